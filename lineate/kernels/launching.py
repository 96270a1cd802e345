"""Launches kernels and, before the first call of a kind, compiles all kernels that it needs in parallel.

Triton compiles a kernel at its first launch, so a call with its backward would compile one kernel after another.
compile_only runs through a call's launches without launching; threads of a pool compile the kernels.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import cache, partial
from typing import Any

import torch
import triton

_only_compile: ContextVar[bool] = ContextVar("lineate_only_compile", default=False)
_overlapping: ContextVar[bool] = ContextVar("lineate_overlapping", default=False)


recording: ContextVar[Any] = ContextVar("lineate_recording", default=None)
"""The recorder of the launches of a call (tape.py); None: no recording."""


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return kernel[grid]; inside compile_only it launches nothing."""
    recorder = recording.get()
    if recorder is not None:
        return partial(recorder.launch, kernel, grid)
    return partial(kernel.run, grid=grid, warmup=_only_compile.get())


def compiling() -> bool:
    """Whether launches only compile: inside compile_only, with a part of a call's tokens."""
    return _only_compile.get()


@contextmanager
def overlapping() -> Iterator[None]:
    """Let launches begin before the previous one has ended, where the kernel and the GPU support it.

    Such a kernel loads data that no launch of the same step writes, such as weights, and then waits for the previous
    launch. Inside, no launch may write data that the kernels load early.
    """
    token = _overlapping.set(True)
    try:
        yield
    finally:
        _overlapping.reset(token)


def overlaps(device: torch.device) -> bool:
    """Whether launches on this device overlap: inside `overlapping`, on Hopper or later."""
    return _overlapping.get() and launches_dependents(device)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch of a kernel that has OVERLAP, on this device."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


LINKED, LAST = 1, 2  # LINK of kernels


def linked(device: torch.device, last: bool = False) -> dict[str, int]:
    """Return the options of a launch of a kernel that has LINK (layout.py), on this device.

    On Hopper or later such a launch is prepared while the previous one ends, which saves a microsecond or two.

    Args:
        device: Its device.
        last: Whether it is the last one of a call, so that no launch of the caller begins before it ends.
    """
    if not launches_dependents(device):
        return {"LINK": 0}
    return {"LINK": LAST if last else LINKED, "launch_pdl": True}


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@cache
def launches_dependents(device: torch.device) -> bool:
    """Whether a launch can begin before the previous one ends: on GPUs of compute capability 9 or later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def compile_only(function: Callable[[], None]) -> None:
    """Call a function whose launches only compile. A kernel that does not compile raises when it is launched."""

    def compile_all() -> None:
        _only_compile.set(True)
        with ThreadPoolExecutor(min(8, _processors())) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            function()

    # A separate context: if it is interrupted, Triton's mode ends with it, and modes of the caller do not interfere.
    Context().run(compile_all)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; for a CPU, where the interpreter runs, the number of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may use; for a CPU, where the interpreter runs, an H200's."""
    if device.type != "cuda":
        return 232448
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. (triton.cdiv takes 5 us on the host.)"""
    return -(-a // b)


def next_power(n: int) -> int:
    """Return the least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()
