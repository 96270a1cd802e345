"""Chunks of sequences, and blocks of heads: the units of work of the chunkwise forms."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lineate.call import Inputs

ChunkSlices = list[tuple[int, slice]]
"""Each chunk's index among all chunks, and its tokens."""


def chunked_sequences(inputs: Inputs, chunk_size: int) -> list[tuple[int | None, ChunkSlices]]:
    """Return the row in the states of each packed sequence, and its chunks; unpacked, None (all rows alike)."""
    packed = inputs.cu_seqlens is not None
    bounds = inputs.cu_seqlens.tolist() if inputs.cu_seqlens is not None else [0, inputs.q.shape[1]]
    sequences: list[tuple[int | None, ChunkSlices]] = []
    index = 0
    for i, (start, end) in enumerate(pairwise(bounds)):
        starts = range(start, end, chunk_size)
        chunks = [(index + j, slice(x, min(x + chunk_size, end))) for j, x in enumerate(starts)]
        index += len(chunks)
        sequences.append((i if packed else None, chunks))
    return sequences


@dataclass(frozen=True)
class Heads:
    """Some rows and heads of the batch, worked on together: it takes chunks as `heads c ...` and stores results."""

    rows: slice
    """Rows of the batch."""
    keys: slice
    """Key heads."""
    values: slice
    """The value heads they serve."""
    group: int
    """Value heads a key head."""

    def take(self, x: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """Return these tokens of x: `b t hv d` -> `nv c d`; `b t hv` -> `nv c 1`."""
        x = x[self.rows, tokens, self.values].transpose(1, 2)
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)

    def put(self, x: Tensor, tokens: slice, values: Tensor) -> None:
        """Store `nv c d` into its place in `b t hv d`, or `nv c 1` into `b t hv`."""
        place = x[self.rows, tokens, self.values].transpose(1, 2)
        place.copy_(values.view(place.shape))

    def put_keys(self, x: Tensor, tokens: slice, values: Tensor) -> None:
        """Store `n c k` into its place in `b t h k`."""
        place = x[self.rows, tokens, self.keys].transpose(1, 2)
        place.copy_(values.view(place.shape))

    def take_state(self, states: Tensor, sequence: int | None) -> Tensor:
        """Return a copy `nv k v` of these heads' states."""
        rows = self.rows if sequence is None else slice(sequence, sequence + 1)
        return states[rows, self.values].clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def put_state(self, states: Tensor, sequence: int | None, S: Tensor) -> None:
        """Store `nv k v` among the states."""
        rows = self.rows if sequence is None else slice(sequence, sequence + 1)
        place = states[rows, self.values]
        place.copy_(S.view(place.shape))


def head_blocks(q: Tensor, v: Tensor) -> Iterator[Heads]:
    """Yield blocks of heads: on a CPU few enough that a chunk's work stays in its cache, elsewhere all at once."""
    b, _, h, _ = q.shape
    group = v.shape[-2] // h
    at_once = 8 * torch.get_num_threads() if q.device.type == "cpu" else b * v.shape[-2]
    keys = max(1, min(h, at_once // group))
    rows = max(1, at_once // (h * group)) if keys == h else 1
    for row in range(0, b, rows):
        for key in range(0, h, keys):
            end = min(key + keys, h)
            yield Heads(slice(row, min(row + rows, b)), slice(key, end), slice(key * group, end * group), group)
