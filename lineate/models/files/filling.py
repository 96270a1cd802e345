"""Fills one tensor, plain or quantised, from pieces of a checkpoint.

A weight to quantise is read, rounded and released a few rows at a time, or a matrix at a time if its pieces need that;
no more than one matrix is in memory in addition to the result.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.tiled import TiledCheckpoint
from lineate.quantised.format import TILE, Format
from lineate.quantised.rounding import TooLargeError, check_half
from lineate.quantised.weight import QuantisedWeight
from lineate.quantised.which import BLOCK, empty_quantised, expert_views, fill_quantised, write_codes

KEPT_FLOAT32 = {"A_log", "dt_bias", "router_bias"}
"""Gate and router parameters whose rounding would be exponentiated or would change a choice."""
OWN_PAGES = 2**18
"""A tensor of at least this many bytes gets memory pages of its own."""
AT_ONCE = 2**22
"""Elements read at a time of a weight to quantise whose rows can be read separately."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or some rows of it, and where they go."""

    source: str
    shape: tuple[int, ...]
    """The shape that the source must have."""
    into: tuple[int | slice, ...] = ()
    """The index of the part of the target that this piece fills, in row-major order."""
    rows: tuple[int, int] | None = None
    """First and last + 1 row of the source; None: all."""
    take: Callable[[Tensor], Tensor] | None = None
    """Changes these rows to the shape of that part, such as a transpose; the result is held in memory while copied."""


@dataclass(frozen=True)
class Reordered:
    """Takes rows in another order; codes and their scales can be reordered in the same way.

    Args:
        run: changes `rows columns`, for any number of columns.
    """

    run: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.run(rows)


@dataclass(frozen=True)
class Narrow:
    """Takes some indices of one dimension.

    Args:
        before: applied to the stored rows first; None: nothing.
        shape: the view of the rows.
        axis: the dimension.
        first: the first index.
        count: how many.
    """

    before: Callable[[Tensor], Tensor] | None
    shape: tuple[int, ...]
    axis: int
    first: int
    count: int

    def __call__(self, rows: Tensor) -> Tensor:
        x = rows if self.before is None else self.before(rows)
        return x.reshape(self.shape).narrow(self.axis, self.first, self.count)


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
        return _empty(like.shape, dtype=dtype_of(name, like, dtype), device=torch.device(device))
    return empty_quantised(tuple(like.shape), form, dtype, torch.device(device), _empty)


def dtype_of(name: str, like: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's parameter or buffer if floating tensors become `dtype`."""
    if not like.is_floating_point():
        return like.dtype
    return torch.float32 if name.rpartition(".")[2] in KEPT_FLOAT32 else dtype


def _empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate one tensor; large ones on a CPU get their own pages, as torch's allocator may take 25% more."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes).view(dtype).view(*shape)


def box_of(into: tuple[int | slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return first and last + 1 index of every dim."""
    box = [(0, size) for size in shape]
    for dim, index in enumerate(into):
        if isinstance(index, int):
            box[dim] = (index, index + 1)
        else:
            box[dim] = index.indices(shape[dim])[:2]
    return box


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
    if isinstance(made, QuantisedWeight) and made.format.has_codes:
        _fill_quantised(checkpoint, pieces, made, advance)
        return
    for piece in pieces:
        part = made.codes if isinstance(made, QuantisedWeight) else made
        part = part[piece.into] if piece.into else part
        _read(checkpoint, piece, part)
        if isinstance(made, QuantisedWeight):
            with _named(checkpoint, [piece]):
                check_half(part)
        advance(part.numel() * checkpoint.entries[piece.source].dtype.itemsize)


def _read(checkpoint: Checkpoint, piece: Piece, part: Tensor) -> None:
    """Fill the part of a tensor that a piece is for."""
    if piece.take is None:
        checkpoint.read_into(piece.source, part, piece.rows)
        return
    first, last = piece.rows or (0, piece.shape[0])
    dtype = checkpoint.entries[piece.source].dtype
    block = _empty((last - first, *piece.shape[1:]), dtype=dtype, device=torch.device("cpu"))
    checkpoint.read_into(piece.source, block, (first, last))
    part.copy_(piece.take(block).reshape(part.shape))


def _fill_quantised(
    checkpoint: Checkpoint, pieces: Sequence[Piece], weight: QuantisedWeight, advance: Callable[[int], None]
) -> None:
    """Fill a quantised weight; codes that are stored in its format are copied."""
    shape, source = tuple(weight.shape), checkpoint.entries[pieces[0].source]
    as_stored = len(pieces) == 1 and pieces[0].rows is None and pieces[0].take is None and source.shape == shape
    tiled = isinstance(checkpoint, TiledCheckpoint) and checkpoint.kept_as(pieces[0].source) == weight.format.name
    if as_stored and tiled:
        assert isinstance(checkpoint, TiledCheckpoint)
        checkpoint.read_tiles(pieces[0].source, weight)
        advance(source.nbytes)
        return
    if weight.dim() == 2:
        matrices = [_as_rows(pieces, shape)]
    else:
        matrices = [_as_rows(own, shape[1:]) for own in _by_expert(pieces, shape)]
    views = [weight] if weight.dim() == 2 else expert_views(weight)
    if None not in matrices and len(matrices) == len(views):
        for view, parts in zip(views, matrices, strict=True):
            assert parts is not None
            _fill_rows(checkpoint, parts, view, advance)
        return
    values = _empty(shape, dtype=torch.float32, device=torch.device("cpu"))
    fill(checkpoint, pieces, values, advance)
    with _named(checkpoint, pieces):
        fill_quantised(weight, values)


@dataclass(frozen=True)
class _Rows:
    """A piece that fills whole rows of a matrix."""

    piece: Piece
    first: int
    """The first row of the matrix that it fills."""
    last: int
    apart: bool
    """Whether its rows are rows of the source, which can be read separately."""


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


def _fill_rows(
    checkpoint: Checkpoint, parts: Sequence[_Rows], weight: QuantisedWeight, advance: Callable[[int], None]
) -> None:
    """Fill a quantised matrix from pieces of whole rows, about AT_ONCE elements at a time."""
    (rows, columns), form = weight.shape, weight.format
    step = max(TILE, AT_ONCE // columns // TILE * TILE) if all(part.apart for part in parts) else rows
    for at in range(0, rows, step):
        end = min(at + step, rows)
        codes = torch.empty(end - at, columns, dtype=form.codes_dtype, device=weight.device)
        scales = torch.empty(end - at, form.scale_count(columns), dtype=form.scales_dtype, device=weight.device)
        for part in parts:
            first, last = max(at, part.first), min(end, part.last)
            if first < last:
                piece = part.piece
                if part.apart:
                    start = first - part.first + (0 if piece.rows is None else piece.rows[0])
                    piece = replace(piece, rows=(start, start + last - first))
                _round(checkpoint, piece, form, codes[first - at : last - at], scales[first - at : last - at])
                advance((last - first) * columns * checkpoint.entries[piece.source].dtype.itemsize)
        write_codes(weight, codes, scales, at)


def _keeps_groups(piece: Piece, group: int) -> bool:
    """Whether a piece has whole groups of the stored rows, whose codes can be copied."""
    if not isinstance(cut := piece.take, Narrow):
        return piece.take is None or isinstance(piece.take, Reordered)
    whole = cut.first % group == 0 and (cut.count % group == 0 or cut.first + cut.count == cut.shape[cut.axis])
    in_columns = cut.axis == len(cut.shape) - 1
    return (cut.before is None or isinstance(cut.before, Reordered)) and (whole or not in_columns)


def _round(checkpoint: Checkpoint, piece: Piece, form: Format, codes: Tensor, scales: Tensor) -> None:
    """Write the codes `rows columns` and scales of a piece, BLOCK elements at a time."""
    if checkpoint.kept_as(piece.source) == form.name and _keeps_groups(piece, form.group):
        with _named(checkpoint, [piece]):
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
        return
    entry = checkpoint.entries[piece.source]
    values = _empty(codes.shape, dtype=entry.dtype, device=torch.device("cpu"))
    _read(checkpoint, piece, values)
    step = max(1, BLOCK // codes.shape[1])
    with _named(checkpoint, [piece]):
        for at in range(0, len(codes), step):
            made = form.to_codes(values[at : at + step].to(codes.device))
            codes[at : at + step], scales[at : at + step] = made


@contextmanager
def _named(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> Iterator[None]:
    """Name the file and the tensors in the error of numbers that cannot be rounded."""
    try:
        yield
    except TooLargeError as error:
        sources = list(dict.fromkeys(piece.source for piece in pieces))
        names = ", ".join(sources[:4]) + ", ..." * (len(sources) > 4)
        raise CheckpointError(f"{checkpoint.entries[sources[0]].file}: {names} {error}") from None
