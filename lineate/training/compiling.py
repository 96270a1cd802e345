"""Determines whether torch.compile is worthwhile for a run, by timing the gradients of a step with and without it."""

import time

import torch

from lineate.training.learner import Learner

TIMING_ROUNDS = 3


def weigh(learner: Learner) -> str:
    """Time a step's gradients with and without compiled blocks, and report which is faster; no weight changes."""
    begin = time.monotonic()
    _seconds(learner)
    first = time.monotonic() - begin
    compiled = eager = float("inf")
    for _ in range(TIMING_ROUNDS):
        compiled = min(compiled, _seconds(learner))
        with torch.compiler.set_stance("force_eager"):
            eager = min(eager, _seconds(learner))
    learner.optimizer.zero_grad(set_to_none=True)
    return verdict(compiled, eager, first)


def verdict(compiled: float, eager: float, first: float) -> str:
    """Report whether --compile is worthwhile.

    Args:
        compiled: Seconds for the gradients of a step with compiled blocks.
        eager: Seconds without.
        first: Seconds of the first call, which compiles.
    """
    found = f"the gradients of a step take {_show(compiled)} compiled, {_show(eager)} without"
    if compiled >= eager:
        return f"--compile does not pay here: {found}; leave it out"
    steps = first / (eager - compiled)
    return f"--compile pays after {steps:.0f} steps: {found}; compiling took {_show(first)}"


def _seconds(learner: Learner) -> float:
    """Time the gradients of one step."""
    begin = time.monotonic()
    loss, _ = learner.gradients()
    float(loss)  # waits for the GPU
    if learner.world.device.type == "cuda":
        torch.cuda.synchronize(learner.world.device)
    return time.monotonic() - begin


def _show(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
