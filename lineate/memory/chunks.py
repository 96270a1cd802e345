"""The layout of tokens in chunks that all memories share.

A row is one sequence of the batch, or one of the sequences packed into it. A cell is one chunk of one row. A row that
stands at position p of its chunk begins at slot p of its first cell.

    Chunks     rows of any length and position (TTT, Titans, least squares); made by `lay_out`
    ChunkRun   some chunks of equal length of rows that all stand at one position (LaCT); made by `cut_runs`
"""

from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.forms.sequences import locate, sequence_lengths
from lineate.memory.gpu import kept

LARGEST_TENSOR = 2**26
"""Elements of the largest tensor of a run: 256 MiB in float32."""


def check_chunk(chunk: int) -> None:
    """Check that a chunk is a number of tokens."""
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"chunk must be an int, got {type(chunk).__name__}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")


class Chunks(NamedTuple):
    """Where the tokens of one call lie in chunks.

    Cells are numbered by chunk, then by row, and the rows with most chunks come first: the rows that have an i-th chunk
    are the first sizes[i]. In an even layout all rows have room for the same number of chunks.
    """

    rows: int
    chunk: int
    sizes: list[int]
    """For each chunk, how many rows have it."""
    slot: Tensor | None
    """`b * t`: the slot of each token; None: all rows are equally long and begin a chunk."""
    even: bool
    """Whether slots are counted as `rows n chunk`, and not as `cells chunk`."""
    order: Tensor
    """`rows`: the rows in the order of their cells."""
    rank: Tensor
    """The inverse of order."""
    lengths: Tensor
    """`rows`: how many tokens each row has."""
    position: Tensor
    """`rows`: where each row stands in its chunk after its last token."""
    complete: Tensor
    """`cells`: whether the cell's last slot is filled."""
    tail: Tensor
    """`rows`, ordered: the cell that the row has begun but not completed; 0 if it has none."""
    begun: Tensor
    """`rows`, ordered: whether it has such a cell."""
    first: Tensor
    """`rows`, ordered: whether this call completed no chunk of the row, so that earlier sums still apply."""
    aligned: bool
    """Whether it is known, without reading tensors, that no row has such a cell."""
    filled: Tensor | None
    """`cells chunk`: whether a slot holds a token; None where only the device knows the positions."""
    nearest: Tensor | None
    """`cells chunk`: the token in a slot, or the row's nearest token if it is empty; None like `filled`."""
    ends: list[list[bool]] | None
    """`complete` on the host, for each chunk and row; None where only the device knows the positions."""

    def cells(self, x: Tensor) -> Tensor:
        """Return x `b t h d` as `cells h chunk d`, zeros in empty slots."""
        if self.even:
            return self.grid(x).flatten(0, 1)
        assert self.slot is not None
        empty = x.new_zeros(sum(self.sizes) * self.chunk, *x.shape[2:])
        return empty.index_copy(0, self.slot, x.flatten(0, 1)).unflatten(0, (-1, self.chunk)).transpose(1, 2)

    def near_cells(self, x: Tensor) -> Tensor:
        """Return x `b t h ...` as `cells h chunk ...`, the row's nearest token in empty slots."""
        assert self.nearest is not None
        found = x.flatten(0, 1).index_select(0, self.nearest.flatten())
        return found.unflatten(0, self.nearest.shape).transpose(1, 2)

    def grid(self, x: Tensor) -> Tensor:
        """Return x `b t h d` as `n rows h chunk d`, zeros in empty slots; for even layouts only."""
        n, c = len(self.sizes), self.chunk
        if self.slot is None:
            slots = F.pad(x, (0, 0, 0, 0, 0, n * c - x.shape[1]))
        else:
            slots = x.new_zeros(self.rows * n * c, *x.shape[2:]).index_copy(0, self.slot, x.flatten(0, 1))
        return slots.view(self.rows, n, c, *x.shape[2:]).permute(1, 0, 3, 2, 4)

    def tokens(self, x: Tensor, b: int, t: int) -> Tensor:
        """Return x `cells h chunk d` as `b t h d`: the inverse of `cells`."""
        if self.even:
            x = x.unflatten(0, (len(self.sizes), self.rows)).permute(1, 0, 3, 2, 4)  # rows n chunk h d
            if self.slot is None:
                return x.flatten(1, 2)[:, :t]
            slots = x.flatten(0, 2)
        else:
            slots = x.transpose(1, 2).flatten(0, 1)
        assert self.slot is not None
        return slots.index_select(0, self.slot).unflatten(0, (b, t))


def lay_out(
    like: Tensor,
    positions: tuple[int, ...] | Tensor | None,
    chunk: int,
    cu_seqlens: Tensor | None,
    even: bool | None = None,
) -> Chunks:
    """Return the layout of a call.

    Args:
        like: Any tensor `b t ...` of the call.
        positions: Where each row stands in its chunk. A tensor's values are not read, which would wait for a GPU;
            every row then gets room for any position. None means that all rows begin a chunk.
        chunk: Tokens of a chunk.
        cu_seqlens: The bounds of packed sequences, or None.
        even: Whether all rows get room for the same number of chunks; None: if they are not packed.
    """
    packed = cu_seqlens is not None
    lengths = (like.shape[1],) * like.shape[0] if cu_seqlens is None else sequence_lengths(cu_seqlens)
    make = _lay_out if isinstance(positions, Tensor) else _kept_layout
    return make(lengths, positions, chunk, packed, not packed if even is None else even, like.device)


def _lay_out(
    lengths: tuple[int, ...],
    positions: tuple[int, ...] | Tensor | None,
    chunk: int,
    packed: bool,
    even: bool,
    device: torch.device,
) -> Chunks:
    rows, known = len(lengths), not isinstance(positions, Tensor)
    # Values that depend on device tensors are computed there; all others are computed on the host, then copied.
    place = torch.device("cpu") if known else device
    if isinstance(positions, tuple):
        room = positions
    else:
        room = (0 if positions is None else chunk - 1,) * rows
    if even:  # nothing is sorted, so that lengths may be symbols of a compiled graph
        n = -(-(max((0, *lengths)) + max((0, *room))) // chunk)
        counts, order, sizes = [n] * rows, list(range(rows)), [rows] * n
    else:
        counts = [-(-(new + before) // chunk) if new else 0 for new, before in zip(lengths, room, strict=True)]
        n = max((0, *counts))
        order = sorted(range(rows), key=lambda row: -counts[row])
        sizes = _conjugate(counts, n)
    base = torch.tensor([0, *accumulate(sizes)][:n], device="cpu").long()
    numbers, each = (x.long() for x in (torch.arange(n, device="cpu"), torch.tensor(sizes, device="cpu")))
    index = numbers.repeat_interleave(each, output_size=sum(sizes))  # the chunk's number of every cell
    ranks = torch.arange(index.shape[0], device="cpu") - base[index]
    length, ordered, count = (torch.tensor(x, device="cpu").long() for x in (lengths, order, counts))
    length, ordered, count, base, index, ranks = (x.to(place) for x in (length, ordered, count, base, index, ranks))
    rank = ordered.argsort()
    if isinstance(positions, Tensor):
        begin = positions.clamp(0, chunk - 1)  # no row may run into another
    else:
        begin = torch.tensor(room, device="cpu").long()
    end = begin + length
    done = end // chunk
    complete = end[ordered][ranks] >= (index + 1) * chunk
    begun = (done < count)[ordered]
    tail = torch.where(begun, base[done[ordered].clamp(max=n - 1)] + rank[ordered], 0) if n else done
    slot = None
    if packed or positions is not None or not even:
        row, at = locate(F.pad(length.cumsum(0), (1, 0)), sum(lengths))
        at = at + begin[row]
        slot = row * (n * chunk) + at if even else (base[at // chunk] + rank[row]) * chunk + at % chunk
    filled, nearest, ends = None, None, None
    if known:
        own = ordered[ranks][:, None]  # of every cell, its row
        step = index[:, None] * chunk + torch.arange(chunk, device="cpu") - begin[own]  # the token's number in its row
        filled = (step >= 0) & (step < length[own])
        nearest = (length.cumsum(0) - length)[own] + step.clamp_min(0).minimum(length[own] - 1)
        last = [before + new for before, new in zip(room, lengths, strict=True)]
        ends = [[last[row] >= (j + 1) * chunk for row in order[:size]] for j, size in enumerate(sizes)]
    slot, filled, nearest = (None if x is None else x.to(device) for x in (slot, filled, nearest))
    first = (done == 0)[ordered]
    after = (ordered, rank, length, end % chunk, complete, tail, begun, first)
    ordered, rank, length, position, complete, tail, begun, first = (x.to(device) for x in after)
    aligned = positions is None and not any(x % chunk for x in lengths)
    return Chunks(
        rows, chunk, sizes, slot, even, ordered, rank, length, position, complete, tail, begun, first, aligned,
        filled, nearest, ends,
    )  # fmt: skip


_kept_layout = kept(_lay_out)


def _conjugate(counts: list[int], n: int) -> list[int]:
    """Return for each i below n how many counts are larger: rows that have a chunk, or chunks that a row has."""
    equal = [0] * (n + 1)
    for count in counts:
        equal[count] += 1
    left, larger = len(counts), []
    for number in equal[:n]:
        left -= number
        larger.append(left)
    return larger


@kept
def walk_places(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Return where kernels that walk from chunk to chunk find cells: the j-th chunk of a row is cell base[j] + row.

    Args:
        sizes: For each of some consecutive chunks, how many rows have it, most first.
        device: The device of the returned tensors.

    Returns:
        base `n` and the number of chunks of each row `rows`, both int32, and the latter on the host.
    """
    counts = _conjugate(list(sizes), max(sizes, default=0))
    base = torch.tensor([0, *accumulate(sizes)][: len(sizes)], dtype=torch.int32, device="cpu")
    return base.to(device), torch.tensor(counts, dtype=torch.int32, device="cpu").to(device), counts


class ChunkRun(NamedTuple):
    """Some chunks of equal length, of rows that all stand at one position of their chunks."""

    first: int
    """The first token."""
    n: int
    """How many chunks."""
    length: int
    """Tokens of each."""
    ends: bool
    """Whether they are complete."""

    def cells(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the run's part of x `b t h ...` as `n*b*h length ...`, in one copy."""
        own = self.view(x).to(dtype, memory_format=torch.contiguous_format)
        return own.reshape(-1, self.length, *own.shape[4:]).contiguous()

    def view(self, x: Tensor) -> Tensor:
        """Return the run's part of x `b t h ...`, as `n b h length ...`."""
        own = x[:, self.first : self.first + self.n * self.length].unflatten(1, (self.n, self.length))
        return own.permute(1, 0, 3, 2, *range(4, own.dim()))

    def store(self, x: Tensor, own: Tensor) -> None:
        """Store own `n*b*h length ...` in its part of x `b t h ...`."""
        place = self.view(x)
        place.copy_(own.view(place.shape))


def cut_runs(tokens: int, position: int, chunk: int, numbers: int) -> list[ChunkRun]:
    """Cut tokens that begin at this position of a chunk into runs.

    Args:
        tokens: The number of tokens.
        position: Where the first one stands.
        chunk: Tokens of a chunk.
        numbers: The size of the largest tensor of one chunk; a run's is at most LARGEST_TENSOR, or one chunk's.
    """
    starts = [0, *range(chunk - position, tokens, chunk)] if tokens else []
    lengths = [stop - start for start, stop in pairwise([*starts, tokens])]
    ends = [True] * (len(lengths) - 1) + [(position + tokens) % chunk == 0] * (tokens > 0)
    runs, first, most = [], 0, max(LARGEST_TENSOR // max(numbers, 1), 1)
    for (length, end), group in groupby(zip(lengths, ends, strict=True)):
        left = len(list(group))
        while left:
            n = min(left, most)
            runs.append(ChunkRun(first, n, length, end))
            first, left = first + n * length, left - n
    return runs
