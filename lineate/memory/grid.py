"""Tokens of rows laid out in whole chunks, so that all rows go from one chunk to the next together.

A row that stands at position p of its chunk begins at slot p of its first cell; a cell is one chunk of one row. Cells
are ordered by chunk, then by row, rows with most chunks first: those at work in chunk j are the first counts[j].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.memory.gpu import kept


@dataclass(frozen=True)
class Grid:
    """Where the tokens of one call go."""

    counts: list[int]
    """For each chunk: how many rows have tokens in it."""
    complete: list[list[bool]]
    """For each chunk and row at work: whether the row reaches the chunk's end."""
    order: Tensor
    """`rows`: which row is first, second, ..."""
    tokens: Tensor
    """`cells chunk`: the token in a slot; of its own row where there is none."""
    filled: Tensor
    """`cells chunk`: whether there is one."""
    slots: Tensor
    """The slot of each token, `b * t`."""
    positions: Tensor
    """`rows`: where each row stands after the call."""

    def cells(self, x: Tensor) -> Tensor:
        """x `b t h ...` -> `cells h chunk ...`."""
        found = x.flatten(0, 1).index_select(0, self.tokens.flatten())
        return found.unflatten(0, self.tokens.shape).transpose(1, 2)

    def back(self, x: Tensor, b: int) -> Tensor:
        """x `cells h chunk d` -> `b t h d`."""
        found = x.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)
        return found.unflatten(0, (b, -1))


@kept
def lay_out(positions: tuple[int, ...], lengths: tuple[int, ...], chunk: int, device: torch.device) -> Grid:
    """Rows that stand at these positions of their chunks, with so many more tokens each, one row behind the other."""
    p, length = (torch.tensor(x, device="cpu") for x in (positions, lengths))
    first = length.cumsum(0) - length  # each row's first token
    last = p + length
    chunks = torch.where(length > 0, -(-last // chunk), 0)  # rows
    order = chunks.argsort(descending=True, stable=True)
    index = torch.arange(int(chunks.max()), device="cpu")
    at_work = torch.searchsorted(-chunks[order], -index)  # rows with more chunks than that
    counts: list[int] = at_work.tolist()
    base = at_work.cumsum(0) - at_work
    index = index.repeat_interleave(at_work)  # of each cell, its chunk
    row = order[torch.arange(index.shape[0], device="cpu") - base[index]]
    start = index * chunk
    place = torch.arange(chunk, device="cpu")
    step = start[:, None] + place - p[row, None]  # cells chunk: the token's number in its row
    filled = (step >= 0) & (step < length[row, None])
    tokens = first[row, None] + step.clamp_min(0).minimum(length[row, None] - 1)
    slots = torch.empty(int(length.sum()), dtype=torch.int64, device="cpu")
    slots[tokens[filled]] = filled.flatten().nonzero()[:, 0]
    ends: list[bool] = (start + chunk <= last[row]).tolist()
    complete = [ends[i : i + n] for i, n in zip(base.tolist(), counts, strict=True)]
    return Grid(counts, complete, *(x.to(device) for x in (order, tokens, filled, slots, last % chunk)))
