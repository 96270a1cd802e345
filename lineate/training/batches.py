"""Batches as a pure function of the step: documents laid end to end, cut into rows, packed with cu_seqlens."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lineate.training.tokens import JoinedSpans, TokenView, permutation

NO_TARGET = -100


@dataclass(frozen=True)
class Batch:
    """`n` tokens of packed texts: ids and targets `1 n`, cu_seqlens `texts + 1`, all int64.

    targets[t] is the token after ids[t] in its document, also across a row's edge, -100 where there is none.
    """

    ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    continues: bool = False  # the first text began on an earlier rank

    def to(self, device: torch.device | str) -> "Batch":
        return replace(
            self, ids=self.ids.to(device), targets=self.targets.to(device), cu_seqlens=self.cu_seqlens.to(device)
        )

    def shard(self, rank: int, size: int) -> "Batch":
        """The rank's piece of the n tokens: tokens [rank n / size, (rank + 1) n / size), with its own cu_seqlens."""
        n = self.ids.shape[1]
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1} for size = {size}, got {rank}")
        if n < size:
            raise ValueError(f"a batch of {n} tokens cannot be split over {size} ranks; use longer rows or fewer ranks")
        first, last = rank * n // size, (rank + 1) * n // size
        bounds = self.cu_seqlens
        inside = bounds[(bounds > first) & (bounds < last)]
        edges = bounds.new_tensor([first, last])
        cu_seqlens = torch.cat([edges[:1], inside, edges[1:]]) - first
        continues = not bool((bounds == first).any()) or (first == 0 and self.continues)
        return Batch(self.ids[:, first:last], self.targets[:, first:last], cu_seqlens, continues)


class Batches:
    """`batch(step)`: `rows` rows of `length` tokens of an endless stream of epochs, whatever came before.

    An epoch is a permutation of the documents (by seed and epoch) laid end to end. Row r of step s is the tokens
    [(s rows + r) length, + length) of the stream. cu_seqlens has every row's start and every document's start.
    """

    def __init__(self, view: TokenView, length: int, rows: int, seed: int) -> None:
        for name, value in (("length", length), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if length > view.n_tokens:
            more = "a larger validation_fraction" if view.name == "validation" else "more data"
            raise ValueError(
                f"length = {length} is longer than the {view.name} data, {view.n_tokens} tokens in "
                f"{view.n_documents} documents; use length <= {view.n_tokens} or {more}"
            )
        self.view, self.length, self.rows, self.seed = view, length, rows, seed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Part `part` of `parts` equal parts of the step's rows."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if parts < 1 or self.rows % parts:
            raise ValueError(f"rows = {self.rows} must be a multiple of parts, got parts = {parts}")
        if not 0 <= part < parts:
            raise ValueError(f"part must be in 0..{parts - 1} for parts = {parts}, got {part}")
        n = self.rows // parts * self.length
        first = (step * parts + part) * n  # exact: python's integers
        total = self.view.n_tokens
        ids, targets, starts = [], [], [np.arange(0, n + 1, self.length)]
        done = 0
        while done < n:
            epoch, offset = divmod(first + done, total)
            count = min(n - done, total - offset)
            index, ends, begins = self._epoch(epoch).locate(offset, count)
            ids.append(self.view.tokens[index])
            following = self.view.tokens[np.where(ends, index, index + 1)].astype(np.int64)
            targets.append(np.where(ends, NO_TARGET, following))
            starts.append(begins + done)
            done += count
        return Batch(
            torch.from_numpy(np.concatenate(ids).astype(np.int64))[None],
            torch.from_numpy(np.concatenate(targets))[None],
            torch.from_numpy(np.unique(np.concatenate(starts)).astype(np.int64)),
        )

    def _make_epoch(self, epoch: int) -> JoinedSpans:
        order = permutation(self.view.n_documents, self.seed, epoch)
        return JoinedSpans(self.view.starts[order], self.view.lengths[order])
