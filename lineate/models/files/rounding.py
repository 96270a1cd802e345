"""The units that fill a quantised weight from pieces of a checkpoint.

The weight is read, rounded and released a few rows at a time, or a matrix at a time if its pieces need that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.tiled import TiledCheckpoint
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
from lineate.quantised.format import TILE, Format
from lineate.quantised.rounding import TooLargeError
from lineate.quantised.weight import QuantisedWeight
from lineate.quantised.which import BLOCK, expert_views, fill_quantised, write_codes

AT_ONCE = 2**20
"""Elements of a weight that a unit reads and rounds, if its rows can be read separately."""
AT_ONCE_GPU = 2**22
"""The same on a GPU, which rounds a unit in one launch of each kernel."""
ROUNDING = 16
"""Bytes for each element that rounding holds besides the numbers and the codes."""


def quantised_units(checkpoint: Checkpoint, pieces: Sequence[Piece], weight: QuantisedWeight) -> list[Unit]:
    """Return the units that fill a quantised weight; codes that are stored in its format are copied.

    Args:
        checkpoint: whose tensors they read.
        pieces: all of the weight.
        weight: in codes and scales.
    """
    shape, source = tuple(weight.shape), checkpoint.entries[pieces[0].source]
    as_stored = len(pieces) == 1 and pieces[0].rows is None and pieces[0].take is None and source.shape == shape
    if as_stored and isinstance(checkpoint, TiledCheckpoint) and checkpoint.is_kept(pieces[0].source, weight.format):
        return list(_stored_units(checkpoint, pieces[0].source, weight))
    if weight.dim() == 2:
        matrices = [_as_rows(pieces, shape)]
    else:
        matrices = [_as_rows(own, shape[1:]) for own in _by_expert(pieces, shape)]
    views = [weight] if weight.dim() == 2 else expert_views(weight)
    if None not in matrices and len(matrices) == len(views):
        return [
            unit
            for view, parts in zip(views, matrices, strict=True)
            if parts is not None
            for unit in _matrix_units(checkpoint, parts, view)
        ]

    def run(checkpoint: Checkpoint) -> None:
        values = empty(shape, dtype=torch.float32, device=torch.device("cpu"))
        for piece in pieces:
            read_piece(checkpoint, piece, values[piece.into] if piece.into else values)
        with named(checkpoint, pieces):
            fill_quantised(weight, values)

    nbytes = sum(stored_bytes(checkpoint, piece) for piece in pieces)
    return [Unit(place_of(checkpoint, pieces), nbytes, run, 4 * weight.numel())]


def _stored_units(checkpoint: TiledCheckpoint, name: str, weight: QuantisedWeight) -> Iterator[Unit]:
    """Yield units that copy tiles, or the tiles of experts."""
    count = len(weight.codes)
    nbytes, step = checkpoint.stored_bytes(name), max(1, PART_BYTES * count // weight.nbytes_kept)
    file, start, _ = place_of(checkpoint, [Piece(name, tuple(weight.shape))])
    for first in range(0, count, step):
        last = min(first + step, count)

        def run(source: Checkpoint, first: int = first, last: int = last) -> None:
            assert isinstance(source, TiledCheckpoint)
            source.read_tiles(name, weight, first, last)

        yield Unit((file, start, first), nbytes * last // count - nbytes * first // count, run)


@dataclass(frozen=True)
class _Rows:
    """A piece that fills whole rows of a matrix."""

    piece: Piece
    first: int
    """The first row of the matrix that it fills."""
    last: int
    apart: bool
    """Whether its rows are rows of the source, which can be read separately."""

    def between(self, at: int, end: int) -> "_Rows | None":
        """Return the part of it in these rows of the matrix, None if there is none."""
        first, last = max(at, self.first), min(end, self.last)
        if first >= last:
            return None
        if not self.apart or (first, last) == (self.first, self.last):
            return self
        start = first - self.first + (0 if self.piece.rows is None else self.piece.rows[0])
        return replace(self, piece=replace(self.piece, rows=(start, start + last - first)), first=first, last=last)


def _by_expert(pieces: Sequence[Piece], shape: tuple[int, ...]) -> list[list[Piece]]:
    """Return the pieces of each expert, as pieces of a matrix; none if a piece cannot be split by experts."""
    found: list[list[Piece]] = [[] for _ in range(shape[0])]
    for piece in pieces:
        (first, last), *_ = box_of(piece.into, shape)
        start = 0 if piece.rows is None else piece.rows[0]
        if last - first == 1:
            found[first].append(replace(piece, into=piece.into[1:]))
        elif piece.take is None and len(piece.into) <= 1 and piece.shape[1:] == shape[1:]:
            for e in range(first, last):
                found[e].append(replace(piece, into=(), rows=(start + e - first, start + e - first + 1)))
        elif isinstance(piece.take, Narrow) and piece.take.before is None and piece.take.axis:
            part = replace(piece.take, shape=piece.take.shape[1:], axis=piece.take.axis - 1)
            for e in range(first, last):
                rows = start + e - first, start + e - first + 1
                found[e].append(replace(piece, into=piece.into[1:], rows=rows, take=part))
        else:
            return []
    return found


def _as_rows(pieces: Sequence[Piece], shape: tuple[int, ...]) -> list[_Rows] | None:
    """Return which rows of a matrix each piece fills; None if one fills only some columns."""
    found = []
    for piece in pieces:
        (first, last), columns = box_of(piece.into, shape)
        if columns != (0, shape[1]):
            return None
        apart = piece.take is None and len(piece.shape) == 2 and piece.shape[1] == shape[1]
        found.append(_Rows(piece, first, last, apart))
    return found


def _matrix_units(checkpoint: Checkpoint, parts: Sequence[_Rows], weight: QuantisedWeight) -> Iterator[Unit]:
    """Yield units that fill a quantised matrix from pieces of whole rows, some of its rows at a time."""
    rows, columns = weight.shape
    entries = [checkpoint.entries[part.piece.source] for part in parts]
    at_once = AT_ONCE if weight.device.type == "cpu" else AT_ONCE_GPU
    step = max(TILE, at_once // columns // TILE * TILE) if all(part.apart for part in parts) else rows
    each = step if all(entry.by_rows for entry in entries) else rows  # columns are kept for the next rows
    count = min(step, rows) * columns
    held = count * (1 + max(entry.dtype.itemsize for entry in entries)) + min(count, _rounded(weight.device)) * ROUNDING
    for first in range(0, rows, each):
        last = min(first + each, rows)
        pieces = [own.piece for part in parts if (own := part.between(first, last)) is not None]

        def run(source: Checkpoint, first: int = first, last: int = last) -> None:
            for at in range(first, last, step):
                _fill_rows(source, parts, weight, at, min(at + step, last))

        nbytes = sum(stored_bytes(checkpoint, piece) for piece in pieces)
        yield Unit(place_of(checkpoint, pieces), nbytes, run, held)


def _rounded(device: torch.device) -> int:
    """Return the most elements that are rounded at a time."""
    return BLOCK if device.type == "cpu" else AT_ONCE_GPU


def _fill_rows(checkpoint: Checkpoint, parts: Sequence[_Rows], weight: QuantisedWeight, at: int, end: int) -> None:
    """Fill the rows from `at` to `end` of a quantised matrix."""
    columns, form = weight.shape[1], weight.format
    codes = torch.empty(end - at, columns, dtype=form.codes_dtype, device=weight.device)
    scales = torch.empty(end - at, form.scale_count(columns), dtype=form.scales_dtype, device=weight.device)
    for part in parts:
        if (own := part.between(at, end)) is not None:
            rows = slice(own.first - at, own.last - at)
            _round(checkpoint, own.piece, form, codes[rows], scales[rows])
    write_codes(weight, codes, scales, at)


def _keeps_groups(piece: Piece, group: int) -> bool:
    """Whether a piece has whole groups of the stored rows, whose codes can be copied."""
    if not isinstance(cut := piece.take, Narrow):
        return piece.take is None or isinstance(piece.take, Reordered)
    whole = cut.first % group == 0 and (cut.count % group == 0 or cut.first + cut.count == cut.shape[cut.axis])
    in_columns = cut.axis == len(cut.shape) - 1
    return (cut.before is None or isinstance(cut.before, Reordered)) and (whole or not in_columns)


def _round(checkpoint: Checkpoint, piece: Piece, form: Format, codes: Tensor, scales: Tensor) -> None:
    """Write the codes `rows columns` and scales of a piece, a bounded number of elements at a time."""
    if checkpoint.kept_as(piece.source) == form.name and _keeps_groups(piece, form.group):
        _copy_codes(checkpoint, piece, form, codes, scales)
        return
    values = empty(codes.shape, dtype=checkpoint.entries[piece.source].dtype, device=codes.device)
    read_piece(checkpoint, piece, values)
    step = max(1, _rounded(codes.device) // codes.shape[1])
    with named(checkpoint, [piece]):
        for at in range(0, len(codes), step):
            codes[at : at + step], scales[at : at + step] = form.to_codes(values[at : at + step])


def _copy_codes(checkpoint: Checkpoint, piece: Piece, form: Format, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of a piece that is stored in the weight's format."""
    with named(checkpoint, [piece]):
        stored, factors = checkpoint.read_codes(piece.source, piece.rows)
    if isinstance(cut := piece.take, Reordered):
        stored, factors = cut(stored), cut(factors)
    elif isinstance(cut, Narrow):
        last = cut.axis == len(cut.shape) - 1
        groups = replace(
            cut,
            shape=(*cut.shape[:-1], form.scale_count(cut.shape[-1])),
            first=form.scale_count(cut.first) if last else cut.first,
            count=form.scale_count(cut.count) if last else cut.count,
        )
        stored, factors = cut(stored), groups(factors)
    codes.copy_(stored.reshape(codes.shape))
    scales.copy_(factors.reshape(scales.shape))


@contextmanager
def named(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> Iterator[None]:
    """Name the file and the tensors in the error of numbers that cannot be rounded."""
    try:
        yield
    except TooLargeError as error:
        sources = list(dict.fromkeys(piece.source for piece in pieces))
        names = ", ".join(sources[:4]) + ", ..." * (len(sources) > 4)
        raise CheckpointError(f"{checkpoint.entries[sources[0]].file}: {names} {error}") from None
