"""Whether torch.compile pays for a run: before its first step the gradients are computed both ways, and timed."""

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lineate.training.loop import Trainer

TIMING_ROUNDS = 3


def weigh(trainer: "Trainer") -> str:
    """Compile the blocks, time a step's gradients with and without, and return what was found; nothing is learnt."""
    begin = time.monotonic()
    _seconds(trainer)
    first = time.monotonic() - begin
    compiled = eager = float("inf")
    for _ in range(TIMING_ROUNDS):
        compiled = min(compiled, _seconds(trainer))
        with torch.compiler.set_stance("force_eager"):
            eager = min(eager, _seconds(trainer))
    trainer.optimizer.zero_grad(set_to_none=True)
    return verdict(compiled, eager, first)


def verdict(compiled: float, eager: float, first: float) -> str:
    """Return the sentence for seconds a step with and without --compile, and of the first call, which compiles."""
    found = f"the gradients of a step take {_show(compiled)} compiled, {_show(eager)} as they are"
    if compiled >= eager:
        return f"--compile does not pay here: {found}; leave it out"
    steps = first / (eager - compiled)
    return f"--compile pays after {steps:.0f} steps: {found}; compiling took {_show(first)}"


def _seconds(trainer: "Trainer") -> float:
    begin = time.monotonic()
    loss, _ = trainer.gradients()
    float(loss)  # waits for a GPU
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize(trainer.world.device)
    return time.monotonic() - begin


def _show(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
