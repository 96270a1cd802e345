"""Warm-up of a GPU before the first request: compiles kernels and records the steps of the pool."""

import torch

from lineate.generation.choice import Draws, Sampling, choose_tokens
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.reading import Reading

SHORT_PIECES = (1, 40, 200)
"""Lengths of a prompt's last piece; short pieces run other kernels than long ones."""


def warm_up(engine: Engine, guesses: int = 0) -> None:
    """Compile the kernels and record the steps that requests will need; on a CPU do nothing.

    Args:
        engine: The engine, before it is started.
        guesses: The most guesses for each row in a step; 0: there are none.
    """
    if engine.model.device.type != "cuda":
        return
    for rest in SHORT_PIECES:
        tokens = min(2 * engine.spacing + rest, engine.context - 1)
        reading = Reading(engine.model, (0,) * tokens, engine.spacing)
        while not reading.done:
            reading.advance()
    assert reading.logits is not None
    logits, at = reading.logits[None], torch.tensor([tokens], device=reading.logits.device)
    for sampling in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=20)):
        choose_tokens(logits, [sampling], at)
        Draws([sampling.resolved(logits.shape[1])], logits.device).try_tokens(logits, at)
    engine.pool.record(guesses)
