"""Chooses the number of threads of a run on a CPU before its first step; a resumed run keeps the number.

Two threads that wait for each other many times a step are slower than one where another process needs a core. So the
cores are measured: a feed-forward at the run's sizes, forward and backward, takes turns with 1, 2, 4, ... threads. The
fastest number is kept for the whole run, because the bits of a sum depend on the number of threads that share it.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from lineate.training.config import TrainConfig
from lineate.training.distributed import World
from lineate.training.report import RunReporter

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables with which a user sets torch's threads."""
MOST_OPERATIONS = 1e9
"""Floating-point operations of one repetition, at most: 10 to 50 ms on one core. Shorter ones would fit between two
interruptions by another process."""
WIDEST = 1024
"""The most channels that are measured."""
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 3, 15, 0.5
"""Rounds of repetitions, one with each number of threads; after the least, none begins when the seconds are over."""


@dataclass(frozen=True)
class Choice:
    """A number of threads, and why."""

    count: int
    reason: str | None
    """The end of the sentence that the run prints; None where there is nothing to say, as on a GPU."""


def set_threads(config: TrainConfig, hidden: int, kept: int | None, world: World, report: RunReporter) -> int:
    """Set and return the number of threads of a run, before its first sum; say which and why.

    Args:
        config: The options of the run.
        hidden: Channels of its model.
        kept: The number of the checkpoint that the run goes on from; None if there is none.
        world: The ranks.
        report: Where it is said.
    """
    tokens = config.rows * config.length // (config.accumulate * world.data_size * world.context_size)
    choice = choose_threads(config.threads, kept, world, feed_forward(hidden, tokens))
    torch.set_num_threads(choice.count)
    if choice.reason is not None:
        report.say(f"threads{' of a rank' if world.size > 1 else ''}: {choice.count} ({choice.reason})")
    if kept not in (None, choice.count) and world.device.type == "cpu":
        report.warn(f"the run had threads = {kept} so far; other numbers change the last bits of what it computes")
    return choice.count


def choose_threads(
    asked: int | str,
    kept: int | None,
    world: World,
    work: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Return the number of threads of this process; the same on every rank that measures.

    In this order: a number that was asked for, the user's environment, the number of the checkpoint, the fastest.

    Args:
        asked: A number or "auto".
        kept: The number of the checkpoint that the run goes on from; None if there is none.
        world: The ranks, among which the cores of a machine are shared out.
        work: What is measured.
        clock: Returns seconds.
    """
    now = torch.get_num_threads()
    if isinstance(asked, int):
        return Choice(asked, "as asked for")
    if world.device.type != "cpu":
        return Choice(now, None)
    names = world.gather(next((name for name in VARIABLES if os.environ.get(name)), None))
    if (name := next(filter(None, names), None)) is not None:  # set for one rank, it holds for those without it too
        return Choice(now, name)
    if kept is not None:
        return Choice(kept, "as in the run so far")
    most = min(world.gather(min(now, share_of_cores(world))))
    if most == 1:
        return Choice(1, "one core" if world.size == 1 else "one core a rank")
    seconds = measure(candidates(most), work, clock)
    count = min(world.gather(fastest(seconds)))
    if count == most:
        return Choice(count, f"{seconds[1] / seconds[count]:.2f} times as fast as 1, measured")
    return Choice(count, f"{most} take {seconds[most] / seconds[count]:.2f} times as long, measured")


def candidates(most: int) -> list[int]:
    """Return the numbers of threads that are measured: powers of two, the largest number, and one core left free."""
    powers = [2**n for n in range(most.bit_length()) if 2**n < most]
    return sorted({*powers, max(1, most - 1), most})


def fastest(seconds: dict[int, float]) -> int:
    """Return the number of threads that takes the least time, the larger one of two that are equally fast."""
    return min(seconds, key=lambda count: (seconds[count], -count))


def measure(counts: Sequence[int], work: Callable[[], object], clock: Callable[[], float]) -> dict[int, float]:
    """Return the median seconds of a repetition with each number of threads, in turns; keep the number that was set.

    Args:
        counts: The numbers of threads.
        work: One repetition.
        clock: Returns seconds.
    """
    before = torch.get_num_threads()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for count in counts:  # starts the threads
            torch.set_num_threads(count)
            work()
        first = clock()
        for turn in range(MOST_ROUNDS):
            if turn >= LEAST_ROUNDS and clock() - first > SECONDS:
                break
            for count in counts if turn % 2 else reversed(counts):
                torch.set_num_threads(count)
                began = clock()
                work()
                seconds[count].append(clock() - began)
    finally:
        torch.set_num_threads(before)
    return {count: statistics.median(found) for count, found in seconds.items()}


def feed_forward(hidden: int, tokens: int) -> Callable[[], object]:
    """Return the products and activations of a feed-forward of 4 hidden channels and its backward, without randomness.

    Both sizes are cut to what MOST_OPERATIONS allow, but for 16 tokens.

    Args:
        hidden: Channels of the model.
        tokens: Tokens of a micro-batch.
    """
    hidden = min(hidden, WIDEST)
    tokens = max(16, min(tokens, int(MOST_OPERATIONS / (48 * hidden**2))))

    @torch.no_grad()
    def work() -> object:
        x = torch.full((tokens, hidden), 0.5, device="cpu")
        up, down = (torch.full(shape, 0.01, device="cpu") for shape in ((4 * hidden, hidden), (hidden, 4 * hidden)))
        inner = F.linear(x, up)  # tokens inner
        active = F.silu(inner)
        dy = F.linear(active, down)  # tokens hidden
        d_inner = (dy @ down) * active
        return dy.T @ active, d_inner.T @ x, (d_inner @ up) * x

    return work


def share_of_cores(world: World) -> int:
    """Return the cores of this process: those it may run on, shared among the ranks of this machine with the same."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    place = socket.gethostname()
    sharing = sum(host == place and not cores.isdisjoint(others) for host, others in world.gather((place, cores)))
    return max(1, min(len(cores), quota() or len(cores)) // sharing)


def quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the cores that the container may use at a time, rounded up; None without a limit.

    Args:
        root: The folder of the control groups.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # the versions of control groups
        try:
            microseconds, period = (int(x) for name in names for x in (root / name).read_text().split())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        if microseconds > 0 and period > 0:
            return -(-microseconds // period)
    return None
