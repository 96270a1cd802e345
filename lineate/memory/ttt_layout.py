"""Tokens of a batch, or of packed texts, in chunks of a fixed length, wherever in a chunk each row stands."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory.gpu import kept
from lineate.sequences import locate, sequence_lengths


class Layout(NamedTuple):
    """Where tokens stand in chunks: chunks are ordered by their place in the row, then by row, the longest first."""

    rows: int
    chunk: int
    sizes: list[int]
    """Rows that have an i-th chunk: the first so many in the order of `order`."""
    slot: Tensor | None
    """For every token its chunk * c + its place there; None: rows are as long and start together."""
    order: Tensor | None
    rank: Tensor | None
    """Its inverse; None: rows keep their order."""
    complete: Tensor
    """1 for a chunk whose last token is there, else 0."""
    tail: Tensor
    """The chunk of each row, in order, that is begun but not complete."""
    begun: Tensor
    """1 if there is one, else 0."""
    first: Tensor
    """1 if that is the row's first one here, or no token came: what was summed before still counts."""
    position: Tensor
    """Of rows, after the last token."""
    aligned: bool
    """No row has such a chunk, as is known without looking at tensors."""
    base: Tensor
    """Of every chunk of a row, the place of the first one among all."""
    counts: Tensor
    """Of rows, in order, how many they have."""

    def places(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        """base and counts, int32, if there were only the n chunks from `first` on."""
        base, counts = self.base[first : first + n], self.counts[: self.sizes[first]]
        return (base - base[0]).int(), (counts - first).clamp(max=n).int()


def lay_out(q: Tensor, position: Tensor | None, chunk: int, cu_seqlens: Tensor | None) -> Layout:
    lengths = (q.shape[1],) * q.shape[0] if cu_seqlens is None else sequence_lengths(cu_seqlens)
    make = _lay_out if position is not None else _from_the_start
    return make(lengths, position, chunk, cu_seqlens is not None, q.device, q.dtype)


def _lay_out(
    lengths: tuple[int, ...],
    position: Tensor | None,
    chunk: int,
    packed: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Layout:
    rows, tokens = len(lengths), sum(lengths)
    # Where a row stands in its chunk is not looked at, which would wait for a GPU: room for any place.
    spare = 0 if position is None else chunk - 1
    counts = torch.tensor([-(-(length + spare) // chunk) if length else 0 for length in lengths], device="cpu")
    n = int(counts.max()) if rows else 0
    row_order = counts.argsort(descending=True, stable=True)
    sizes = (counts[:, None] > torch.arange(n, device="cpu")).sum(0)  # of chunks
    base = F.pad(sizes.cumsum(0), (1, 0))[:-1]
    index = torch.repeat_interleave(torch.arange(n, device="cpu"), sizes)  # of every chunk, its place in the row
    of_rank = torch.arange(index.shape[0], device="cpu") - base[index]
    counts, row_order, base, index, of_rank = (x.to(device) for x in (counts, row_order, base, index, of_rank))
    length = torch.tensor(lengths, device=device)
    rank = row_order.argsort()
    begin = torch.zeros_like(length) if position is None else position
    end = begin + length
    done = end // chunk
    ordered_end, ordered_done = end[row_order], done[row_order]
    begun = ordered_done < counts[row_order]
    tail = torch.where(begun, base[ordered_done.clamp(max=max(n - 1, 0))] + rank[row_order], 0) if n else done
    slot = None
    if position is not None or packed:
        row, at = locate(F.pad(length.cumsum(0), (1, 0)), tokens)
        at = at + begin[row]
        slot = (base[at // chunk] + rank[row]) * chunk + at % chunk
    return Layout(
        rows, chunk, sizes.tolist(), slot,
        row_order if packed else None, rank if packed else None,
        (ordered_end[of_rank] >= (index + 1) * chunk).to(dtype), tail, begun.to(dtype), (ordered_done == 0).to(dtype),
        end % chunk, position is None and not any(length % chunk for length in lengths), base, counts[row_order],
    )  # fmt: skip


_from_the_start = kept(_lay_out)


def to_chunks(x: Tensor, layout: Layout) -> Tensor:
    """x `b t h d` -> `chunks*h c d`, 0 where there is no token."""
    b, t, h, d = x.shape
    c, n = layout.chunk, len(layout.sizes)
    if layout.slot is None:
        grid = F.pad(x, (0, 0, 0, 0, 0, n * c - t)).view(b, n, c, h, d).permute(1, 0, 3, 2, 4)
    else:
        empty = x.new_zeros(sum(layout.sizes) * c, h, d)
        grid = empty.index_copy(0, layout.slot, x.flatten(0, 1)).unflatten(0, (-1, c)).transpose(1, 2)
    return grid.reshape(-1, c, d)


def to_tokens(x: Tensor, layout: Layout, b: int, t: int) -> Tensor:
    """The inverse of to_chunks."""
    c, n = layout.chunk, len(layout.sizes)
    if layout.slot is None:
        grid = x.view(n, b, -1, c, x.shape[-1]).permute(1, 0, 3, 2, 4)
        return grid.reshape(b, n * c, *grid.shape[3:])[:, :t]
    h = x.shape[0] // sum(layout.sizes)
    return x.unflatten(0, (-1, h)).transpose(1, 2).flatten(0, 1).index_select(0, layout.slot).unflatten(0, (b, t))
