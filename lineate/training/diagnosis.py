"""Finds the parameter and the rows of the batch that caused a loss or a gradient that is not finite."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lineate.training.batches import NO_TARGET
from lineate.training.learner import Learner


def diagnose(learner: Learner) -> tuple[str, bool]:
    """Recompute the step and report what is not finite; all ranks must call it.

    The gradients of the failed step do not show it, because clipping has spread the bad values over all of them.

    Returns:
        A sentence, and whether a parameter's own value is not finite, which skipping the step cannot fix.
    """
    learner.gradients()
    names, flags = [], []
    for name, x in learner.model.named_parameters():
        names.append(name)
        flags.append((_bad(x), _bad(x.grad)))
    found = learner.world.sum_everywhere(torch.tensor(flags, dtype=torch.float32, device=learner.world.device)).tolist()
    values = [name for name, (value, _) in zip(names, found, strict=True) if value]
    gradients = [name for name, (_, gradient) in zip(names, found, strict=True) if gradient]
    where = "every parameter is finite, and so is its gradient when computed again"
    if bad := values or gradients:
        kind = "value" if values else "gradient"
        where = f"the first parameter whose {kind} is not: {bad[0]} ({len(bad)} of {len(names)})"
    rows = _bad_rows(learner)
    if not rows:
        return f"{where}; every row of the batch has a finite loss", bool(values)
    some = "; ".join(f"row {row}: {_describe(learner, row)}" for row in rows[:3])
    return f"{where}; rows of the batch whose loss is not: {len(rows)} of {learner.config.rows} ({some})", bool(values)


def _bad_rows(learner: Learner) -> list[int]:
    """Return the rows of the step whose loss is not finite, on whichever rank they were computed."""
    config, world = learner.config, learner.world
    found = torch.zeros(config.rows, device=world.device)
    for n, piece in enumerate(learner.pieces(learner.batches, learner.step)):
        piece = piece.to(world.device)
        with torch.no_grad():
            logits = learner.logits(piece)[0].float()
        bad = ~F.cross_entropy(logits, piece.targets[0], ignore_index=NO_TARGET, reduction="none").isfinite()
        part = world.data_rank * config.accumulate + n
        tokens = config.rows * config.length // (world.data_size * config.accumulate)  # in a micro-batch
        first = part * tokens + world.context_rank * tokens // world.context_size
        rows = (first + torch.arange(len(bad), device=bad.device)) // config.length
        found.index_add_(0, rows, bad.float())
    return world.sum(found).nonzero().flatten().tolist()


def _describe(learner: Learner, row: int) -> str:
    """Name the documents in a row, and quote its beginning."""
    length = learner.config.length
    ids = learner.batches.batch(learner.step).ids[0, row * length : (row + 1) * length]
    numbers = learner.batches.documents(learner.step, row)
    some = ", ".join(map(str, numbers[:3])) + ", ..." * (len(numbers) > 3)
    return f"training documents {some}, {learner.tokenizer.decode(ids[:40].tolist())!r}"


def _bad(x: Tensor | None) -> bool:
    """Whether this rank's part of x has a value that is not finite."""
    if x is None:
        return False
    x = x.detach()
    return not bool((x.to_local() if isinstance(x, DTensor) else x).isfinite().all())
