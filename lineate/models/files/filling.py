"""Allocates the tensors of a model and fills them, plain or quantised, from pieces of a checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.rounding import named, quantised_units
from lineate.models.files.units import (
    PART_BYTES,
    Narrow,
    Piece,
    Reordered,
    Unit,
    box_of,
    empty,
    place_of,
    read_piece,
    stored_bytes,
)
from lineate.quantised.format import Format
from lineate.quantised.rounding import check_half
from lineate.quantised.weight import QuantisedWeight
from lineate.quantised.which import empty_quantised

__all__ = ["Narrow", "Piece", "Reordered", "allocate", "box_of", "dtype_of", "fill", "units_of"]
KEPT_FLOAT32 = {"A_log", "dt_bias", "past_A_log", "past_dt_bias", "lower_bound", "router_bias"}
"""Gate and router parameters whose rounding would be exponentiated or would change a choice."""
DECODING = 2**24
"""About the bytes in memory while some rows of an encoded tensor are decoded."""


def allocate(
    name: str, like: Tensor, dtype: torch.dtype, device: torch.device | str, form: Format | None = None
) -> Tensor:
    """Return an empty tensor for a model's parameter or buffer: plain, or quantised in this format.

    Args:
        name: of the parameter or buffer.
        like: a tensor of its shape, on the meta device.
        dtype: of floating tensors, except those that stay float32.
        device: where it is made.
        form: the format of a quantised weight.
    """
    if form is None:
        return empty(like.shape, dtype=dtype_of(name, like, dtype), device=torch.device(device))
    return empty_quantised(tuple(like.shape), form, dtype, torch.device(device), empty)


def dtype_of(name: str, like: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's parameter or buffer if floating tensors become `dtype`."""
    if not like.is_floating_point():
        return like.dtype
    return torch.float32 if name.rpartition(".")[2] in KEPT_FLOAT32 else dtype


def fill(
    checkpoint: Checkpoint, pieces: Sequence[Piece], made: Tensor, advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Fill a tensor with pieces of a checkpoint; a quantised weight needs all its pieces at once.

    Args:
        checkpoint: where they are read.
        pieces: of this tensor, from a plan checked by check_plan.
        made: the result of `allocate`.
        advance: called with the number of bytes that were read.
    """
    for unit in units_of(checkpoint, pieces, made):
        unit.run(checkpoint)
        advance(unit.nbytes)


def units_of(checkpoint: Checkpoint, pieces: Sequence[Piece], made: Tensor) -> list[Unit]:
    """Return the units of `fill`, which run in any order."""
    if isinstance(made, QuantisedWeight) and made.format.has_codes:
        return quantised_units(checkpoint, pieces, made)
    whole = made.codes if isinstance(made, QuantisedWeight) else made
    half = isinstance(made, QuantisedWeight)
    return [
        _unit(checkpoint, own, part, half)
        for piece in pieces
        for own, part in _cut(checkpoint, piece, whole[piece.into] if piece.into else whole)
    ]


def _unit(checkpoint: Checkpoint, piece: Piece, part: Tensor, half: bool) -> Unit:
    """Return the unit that fills a part; half: whether its numbers must fit into float16."""

    def run(source: Checkpoint) -> None:
        read_piece(source, piece, part)
        if half:
            with named(source, [piece]):
                check_half(part)

    entry, nbytes = checkpoint.entries[piece.source], stored_bytes(checkpoint, piece)
    held = 0 if checkpoint.is_plain(piece.source) else DECODING
    if piece.take is not None or (held and not part.is_contiguous()):
        held += 2 * part.numel() * entry.dtype.itemsize
    return Unit(place_of(checkpoint, [piece]), nbytes, run, held)


def _cut(checkpoint: Checkpoint, piece: Piece, part: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Yield pieces of about PART_BYTES, and their parts of a tensor."""
    entry, nbytes = checkpoint.entries[piece.source], stored_bytes(checkpoint, piece)
    if piece.take is not None or nbytes < 2 * PART_BYTES or not piece.shape or not entry.by_rows:
        yield piece, part
        return
    first, last = piece.rows or (0, piece.shape[0])
    rows = last - first
    if part.is_contiguous():
        part = part.view(rows, -1)
    elif part.shape[0] != rows:
        yield piece, part
        return
    step = max(1, PART_BYTES * rows // nbytes)
    for at in range(0, rows, step):
        end = min(at + step, rows)
        yield replace(piece, rows=(first + at, first + end)), part[at:end]
