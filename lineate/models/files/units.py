"""Pieces of a checkpoint, and the units of work in which threads fill tensors with them.

A unit reads some rows of a checkpoint into a part of a tensor that no other unit fills, so units run in any order and
in parallel. It reads about PART_BYTES, so that no thread is left with a large tensor while others have nothing to do.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint

PART_BYTES = 2**25
"""About how many bytes of a file a unit reads."""
OWN_PAGES = 2**18
"""A tensor of at least this many bytes gets memory pages of its own."""
ROOM = 4
"""A block is reordered on a GPU if this many times its bytes are free there."""


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


@dataclass(frozen=True)
class Unit:
    """Some rows of a checkpoint, and how they fill their part of a tensor.

    Args:
        place: of the rows: the file, the start of their tensor, and the first row; units run in this order.
        nbytes: that are read of the files, as progress counts them.
        run: reads the rows from a checkpoint and fills the part.
        held: bytes of other tensors that are in memory meanwhile.
    """

    place: tuple[str, int, int]
    nbytes: int
    run: Callable[[Checkpoint], None]
    held: int = 0


def place_of(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> tuple[str, int, int]:
    """Return the first position of pieces in the files."""
    found = ((checkpoint.entries[piece.source], piece) for piece in pieces)
    return min((str(x.file), x.start, 0 if piece.rows is None else piece.rows[0]) for x, piece in found)


def stored_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    """Return the bytes of a piece in the files; those of pieces that divide a tensor by rows add up to its own."""
    nbytes = checkpoint.stored_bytes(piece.source)
    if piece.rows is None:
        return nbytes
    (first, last), rows = piece.rows, piece.shape[0]
    return nbytes * last // rows - nbytes * first // rows


def box_of(into: tuple[int | slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return first and last + 1 index of every dim."""
    box = [(0, size) for size in shape]
    for dim, index in enumerate(into):
        if isinstance(index, int):
            box[dim] = (index, index + 1)
        else:
            box[dim] = index.indices(shape[dim])[:2]
    return box


def read_piece(checkpoint: Checkpoint, piece: Piece, part: Tensor) -> None:
    """Fill the part of a tensor that a piece is for; a GPU with room reorders the rows itself."""
    if piece.take is None:
        checkpoint.read_into(piece.source, part, piece.rows)
        return
    first, last = piece.rows or (0, piece.shape[0])
    shape, dtype = (last - first, *piece.shape[1:]), checkpoint.entries[piece.source].dtype
    nbytes = math.prod(shape) * dtype.itemsize
    there = part.device.type == "cuda" and torch.cuda.mem_get_info(part.device)[0] > ROOM * nbytes
    block = empty(shape, dtype=dtype, device=part.device if there else torch.device("cpu"))
    checkpoint.read_into(piece.source, block, (first, last))
    part.copy_(piece.take(block).reshape(part.shape))


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate one tensor; large ones on a CPU get their own pages, as torch's allocator may take 25% more."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes).view(dtype).view(*shape)
