"""The part of a loading plan that fills one rank's share of a model: the same pieces, cut.

Rows of a stored tensor are read separately; other cuts read a block of rows and keep some of its columns.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from lineate.models.files.filling import Narrow, Piece, box_of
from lineate.models.files.loading import LoadingPlan

AT_ONCE = 2**22
"""Elements of a stored tensor that are read at a time, if only some of their columns are kept."""


class Share(Protocol):
    """A rank's share of a tensor: pieces of one dimension, one after another."""

    @property
    def dim(self) -> int: ...
    @property
    def ranges(self) -> tuple[tuple[int, int], ...]: ...


def slice_plan(plan: LoadingPlan, shapes: Mapping[str, tuple[int, ...]], shares: Mapping[str, Share]) -> LoadingPlan:
    """Return the plan that fills shares of a model's tensors; the plan of the whole model was checked before.

    Args:
        plan: of the whole model.
        shapes: of its tensors.
        shares: of the tensors that are cut.
    """
    pieces = {
        name: [own for piece in found for own in _cut(piece, shapes[name], shares[name])] if name in shares else found
        for name, found in plan.pieces.items()
    }
    return LoadingPlan(pieces, ignored=(".",))  # the tensors of other ranks are superfluous here


def _cut(piece: Piece, shape: tuple[int, ...], share: Share) -> Iterator[Piece]:
    """Yield the pieces that fill a share where `piece` fills the whole tensor."""
    box, dim, start = box_of(piece.into, shape), share.dim, 0
    low, high = box[dim]
    for first, last in share.ranges:
        begin, end = max(first, low), min(last, high)
        if begin < end:
            into: list[int | slice] = [
                box[d][0] if d < len(piece.into) and isinstance(piece.into[d], int) else slice(*box[d])
                for d in range(len(shape))
            ]
            at = start + begin - first
            into[dim] = at if isinstance(into[dim], int) else slice(at, at + end - begin)
            moved = replace(piece, into=tuple(into))
            yield from [moved] if (begin, end) == (low, high) else _narrowed(moved, box, dim, begin - low, end - begin)
        start += last - first


def _narrowed(piece: Piece, box: list[tuple[int, int]], dim: int, first: int, count: int) -> Iterator[Piece]:
    """Yield pieces that read only `count` of the indices that a piece has in a dimension, from `first` on."""
    sizes = [high - low for low, high in box]
    kept = [d for d in range(len(sizes)) if not isinstance(piece.into[d], int)]
    begin, end = piece.rows or (0, piece.shape[0])
    in_rows = piece.take is None and math.prod(sizes[:dim]) == 1 and end - begin == sizes[dim]
    if in_rows:
        yield replace(piece, rows=(begin + first, begin + first + count))
        return
    part, axis = tuple(sizes[d] for d in kept), kept.index(dim)
    by_rows = piece.take is None and axis > 0 and end - begin == part[0]
    step = max(1, AT_ONCE // max(1, math.prod(part[1:]))) if by_rows else part[0]
    for row in range(0, part[0], step):
        rows = min(step, part[0] - row)
        into = list(piece.into)
        if by_rows:
            index = into[kept[0]]
            assert isinstance(index, slice)
            into[kept[0]] = slice(index.start + row, index.start + row + rows)
        yield replace(
            piece,
            into=tuple(into),
            rows=(begin + row, begin + row + rows) if by_rows else piece.rows,
            take=Narrow(piece.take, (rows, *part[1:]), axis, first, count),
        )
