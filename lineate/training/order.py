"""The rows of a text in random order: neighbours in a document teach a step little more than one of them does."""

from functools import lru_cache

import numpy as np
import torch

from lineate.training.batches import Batch, Batches
from lineate.training.tokens import TokenView, permutation


class ShuffledBatches:
    """As Batches, a pure function of the step, with the rows of every epoch in an order of their own.

    Row k of an epoch (n_tokens // length rows) is row permutation[k] of Batches' stream.
    """

    def __init__(self, view: TokenView, length: int, rows: int, seed: int) -> None:
        self.stream = Batches(view, length, 1, seed)
        self.view, self.length, self.rows, self.seed = view, length, rows, seed
        self.epoch_rows = view.n_tokens // length
        self._order = lru_cache(maxsize=2)(self._make_order)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Part `part` of `parts` equal parts of the step's rows."""
        if parts < 1 or self.rows % parts or not 0 <= part < parts:
            raise ValueError(
                f"parts must divide rows = {self.rows}, and part lie in 0 .. parts - 1, got {part} of {parts}"
            )
        some = self.rows // parts
        found = [self.stream.batch(self.row(step, part * some + n)) for n in range(some)]
        bounds = [x.cu_seqlens[:-1] + n * self.length for n, x in enumerate(found)]
        return Batch(
            torch.cat([x.ids for x in found], 1),
            torch.cat([x.targets for x in found], 1),
            torch.cat([*bounds, torch.tensor([some * self.length], device="cpu")]),
        )

    def row(self, step: int, row: int) -> int:
        """Which row of the stream is this row of a step."""
        epoch, k = divmod(step * self.rows + row, self.epoch_rows)
        return epoch * self.epoch_rows + int(self._order(epoch)[k])

    def documents(self, step: int, row: int) -> list[int]:
        """Numbers of the documents, in the view, that a row of a step has parts of."""
        epoch, offset = divmod(self.row(step, row) * self.length, self.view.n_tokens)
        index, _, _ = self.stream._epoch(epoch).locate(offset, min(self.length, self.view.n_tokens - offset))
        by_start = np.argsort(self.view.starts)
        found = np.searchsorted(self.view.starts[by_start], index, side="right") - 1
        return sorted({int(n) for n in by_start[found]})

    def _make_order(self, epoch: int) -> np.ndarray:
        return permutation(self.epoch_rows, self.seed, ~epoch)
