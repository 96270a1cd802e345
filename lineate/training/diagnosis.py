"""Which parameter and which rows made a step whose loss or gradient is not finite."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lineate.training.batches import NO_TARGET

if TYPE_CHECKING:
    from lineate.training.loop import Trainer


def diagnose(trainer: "Trainer") -> tuple[str, bool]:
    """In words, and whether a parameter's value is bad, which skipping a step does not mend; all ranks call it.

    The step is computed again: clipping has spread what was bad over all gradients.
    """
    trainer.gradients()
    names, flags = [], []
    for name, x in trainer.model.named_parameters():
        names.append(name)
        flags.append((_bad(x), _bad(x.grad)))
    found = trainer.world.sum(torch.tensor(flags, dtype=torch.float32, device=trainer.world.device)).tolist()
    values = [name for name, (value, _) in zip(names, found, strict=True) if value]
    gradients = [name for name, (_, gradient) in zip(names, found, strict=True) if gradient]
    where = "every parameter is finite, and so is its gradient when computed again"
    if bad := values or gradients:
        kind = "value" if values else "gradient"
        where = f"the first parameter whose {kind} is not: {bad[0]} ({len(bad)} of {len(names)})"
    rows = _bad_rows(trainer)
    if not rows:
        return f"{where}; every row of the batch has a finite loss", bool(values)
    some = "; ".join(f"row {row}: {_describe(trainer, row)}" for row in rows[:3])
    return f"{where}; rows of the batch whose loss is not: {len(rows)} of {trainer.config.rows} ({some})", bool(values)


def _bad_rows(trainer: "Trainer") -> list[int]:
    """Rows of the step with a loss that is not finite, wherever they were computed."""
    config, world = trainer.config, trainer.world
    found = torch.zeros(config.rows, device=world.device)
    for n, piece in enumerate(trainer.pieces(trainer.batches, trainer.step)):
        piece = piece.to(world.device)
        with torch.no_grad():
            logits = trainer.logits(piece)[0].float()
        bad = ~F.cross_entropy(logits, piece.targets[0], ignore_index=NO_TARGET, reduction="none").isfinite()
        part = world.data_rank * config.accumulate + n
        tokens = config.rows * config.length // (world.data_size * config.accumulate)  # of a micro-batch
        first = part * tokens + world.context_rank * tokens // world.context_size
        rows = (first + torch.arange(len(bad), device=bad.device)) // config.length
        found.index_add_(0, rows, bad.float())
    return world.sum(found).nonzero().flatten().tolist()


def _describe(trainer: "Trainer", row: int) -> str:
    """Which documents, and how the row begins."""
    length = trainer.config.length
    ids = trainer.batches.batch(trainer.step).ids[0, row * length : (row + 1) * length]
    numbers = trainer.batches.documents(trainer.step, row)
    some = ", ".join(map(str, numbers[:3])) + ", ..." * (len(numbers) > 3)
    return f"training documents {some}, {trainer.tokenizer.decode(ids[:40].tolist())!r}"


def _bad(x: Tensor | None) -> bool:
    if x is None:
        return False
    x = x.detach()
    return not bool((x.to_local() if isinstance(x, DTensor) else x).isfinite().all())
