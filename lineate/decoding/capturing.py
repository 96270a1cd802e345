"""Record launches in a CUDA graph so that a capture, or its failure, changes nothing else in the process.

CUDA refuses a capture in which the host reads a number from the device. torch's `capture_end` then raises before it has
undone what `capture_begin` did: the default generator stays in capture mode, so that random numbers and replays of all
other graphs raise "Offset increment outside graph capture encountered unexpectedly"; the allocator no longer frees its
cached memory before it reports that there is none; and the thread keeps the capture's stream. `captured` undoes this.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from threading import RLock
from typing import Any

import torch

CAPTURES = RLock()
"""Held during a capture and the trial runs before it: all captures use one stream."""

FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture has failed: torch's allocators may keep pointers to them."""


@contextmanager
def captured(device: torch.device, pool: Any = None, draws: bool = False) -> Iterator[torch.cuda.CUDAGraph]:
    """Record what this thread launches inside, on capture_stream, in the graph that is returned; then replay it.

    Meanwhile other threads may allocate, launch, draw random numbers and replay graphs. The graph itself must not draw
    from torch's default generator, unless `draws`. If CUDA refuses the capture, the first error is raised, and torch is
    as before.

    Args:
        device: The device.
        pool: The memory of the graph's intermediate results, shared with other graphs; None: its own.
        draws: Whether the graph draws from the default generator: each replay then draws the next numbers, as the
            launches would. Meanwhile other threads must not draw from it, nor replay graphs that do.
    """
    with CAPTURES, torch.cuda.device(device):
        index, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as much memory as there is for the graph's pool
        drawing = _generator_inside(index) if draws else nullcontext()
        with torch.cuda.stream(capture_stream(index)), drawing:
            apart = nullcontext() if draws else _generator_apart(index)
            with _undone_if_it_fails(graph, index, pool), apart, torch.inference_mode(False):
                graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:  # it says more than the error of capture_end, which follows from it
                with suppress(RuntimeError), _undone_if_it_fails(graph, index, pool):
                    graph.capture_end()
                raise
            with _undone_if_it_fails(graph, index, pool):
                graph.capture_end()


@cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """Return the one stream for all captures on a device; each stream would keep a workspace for matrix products."""
    return torch.cuda.Stream(index)


@contextmanager
def _generator_apart(index: int) -> Iterator[None]:
    """Let capture_begin register a copy of the state of the default generator, which so stays out of capture mode.

    torch registers whatever state the default generator has when a capture begins, and refuses to draw from it outside
    of the graph until the capture ends. Threads that draw in the microseconds in which it begins meet the copy. A copy
    that is made in inference mode could not be written by replays outside of it.
    """
    generator = torch.cuda.default_generators[index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


@contextmanager
def _generator_inside(index: int) -> Iterator[None]:
    """If a capture that draws from the default generator fails, take its state, a copy, out of capture mode.

    The state that was registered stays in capture mode, and earlier graphs that draw can no longer be replayed.
    """
    generator = torch.cuda.default_generators[index]
    with torch.inference_mode(False):
        spare = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(spare)
        raise


@contextmanager
def _undone_if_it_fails(graph: torch.cuda.CUDAGraph, index: int, pool: Any) -> Iterator[None]:
    """If capture_begin or capture_end raises inside, end the allocator's part of the capture."""
    try:
        yield
    except BaseException:
        FAILED.append(graph)
        with suppress(RuntimeError):  # the allocator's part had not begun, or has ended
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        raise
