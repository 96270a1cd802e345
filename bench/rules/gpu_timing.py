"""Time and memory on a CUDA device: events between calls, graph replays, the allocator's peak, the two ceilings."""

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from bench.timing import Call
from lineate.decoding.capturing import captured

WARM_UP = 3
AT_MOST = 64  # the most calls in one graph
HOST_CALLS = 8  # calls that are issued at once, few enough that the queue of launches never fills
HOST_ROUNDS = 5  # how often at least


def first_call(call: Call) -> float:
    """Return the seconds until the first result is complete, including compiling and tuning."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def extra_bytes(call: Call) -> int:
    """Return how many bytes one call adds to the allocator's peak, including its results."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def between_events(calls: Sequence[Call], seconds: float) -> list[float]:
    """Return the milliseconds per call, back to back without waiting: the slower of host and device."""
    return back_to_back(calls, min(500, max(10, math.ceil(seconds / warm_up(calls)))))


def warm_up(calls: Sequence[Call]) -> float:
    """Make a few calls; return about how many seconds one takes after them."""
    for i in range(WARM_UP):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(WARM_UP):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / WARM_UP


def back_to_back(calls: Sequence[Call], count: int) -> list[float]:
    """Return the milliseconds of n calls in turn, from the end of one to that of the next; then wait for them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        calls[i % len(calls)]()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def host_seconds(calls: Sequence[Call], seconds: float) -> list[float]:
    """Return the seconds that the host needs for a call, measured while the device has room for more launches."""
    spent: list[float] = []
    end = time.perf_counter() + seconds
    while len(spent) < HOST_ROUNDS or (time.perf_counter() < end and len(spent) < 100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(HOST_CALLS):
            calls[i % len(calls)]()
        spent.append((time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return spent


def graph_replays(calls: Sequence[Call], expected_ms: float, seconds: float) -> list[float]:
    """Return the milliseconds per call inside a graph of several calls, whose replays cost the host next to nothing."""
    graph, count = capture(calls, expected_ms)
    samples = between_events([graph.replay], seconds)
    graph.reset()
    return [sample / count for sample in samples]


def capture(calls: Sequence[Call], expected_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of a few milliseconds that has every call equally often, and how many calls it has."""
    rounds = max(1, math.ceil(min(AT_MOST, 2 / expected_ms) / len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with captured(torch.device("cuda")) as graph:
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def in_turns(sides: Mapping[str, Sequence[Call]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds per call of each side, measured A B A B ... so that the clocks are the same for all.

    A turn takes about `seconds / rounds`, but at least 4 calls. The first call of a turn is not counted, because the
    device waits for the host to issue it.
    """
    counts, samples = {}, {}
    for name, calls in sides.items():
        counts[name], samples[name] = min(500, max(5, math.ceil(seconds / rounds / warm_up(calls)))), []
    for _ in range(rounds):
        for name, calls in sides.items():
            samples[name] += back_to_back(calls, counts[name])[1:]
    return samples


def copy_rate() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(between_events([lambda: target.copy_(source)], 0.1))
    return 2 * source.nbytes / (1e-3 * copy)


def ceilings() -> dict[str, float]:
    """Return the two ceilings: bytes per second of a copy, and operations per second of a bfloat16 product.

    Both are measured on large tensors; a copy's bytes are those read and written.
    """
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(between_events([lambda: torch.mm(a, b)], 0.1))
    return {
        "copy_bytes_per_second": copy_rate(),
        "matrix_flop_per_second": 2 * size**3 / (1e-3 * product),
    }


def measure(calls: Sequence[Call], *, seconds: float, graph: bool) -> dict[str, Any]:
    """Return all of these measurements; a graph that cannot be captured is recorded, not raised."""
    result: dict[str, Any] = {"first_call_s": first_call(calls[0])}
    for call in calls[1:3]:
        call()
    result["extra_bytes"] = extra_bytes(calls[0])
    events = between_events(calls, seconds)
    result |= {"event_ms": statistics.median(events), "event_samples": _few(events)}
    result["host_ms"] = 1e3 * statistics.median(host_seconds(calls, seconds / 2))
    result |= {"graph_ms": None, "graph_samples": []}
    if graph:
        try:
            replays = graph_replays(calls, result["event_ms"], seconds)
            result |= {"graph_ms": statistics.median(replays), "graph_samples": _few(replays)}
        except Exception as error:  # whatever a peer raises while captured, its event time remains valid
            result["graph_error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
    return result


def _few(samples: list[float], at_most: int = 50) -> list[float]:
    return [round(x, 6) for x in samples[:: math.ceil(len(samples) / at_most)]]
