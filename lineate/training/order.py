"""Batches of rows in random order: neighbouring rows of a document in one step would teach little more than one row."""

from functools import lru_cache

import numpy as np
import torch

from lineate.training.batches import Batch, Batches
from lineate.training.tokens import TokenView, permutation


class ShuffledBatches:
    """Like Batches, but with the rows of every epoch shuffled; still a pure function of the step.

    An epoch has n_tokens // length rows. Its row k is row permutation[k] of the stream of Batches.

    Args:
        view: The documents.
        length: Tokens in a row.
        rows: Rows in a step.
        seed: Seed of both orders, that of the documents and that of the rows.
    """

    def __init__(self, view: TokenView, length: int, rows: int, seed: int) -> None:
        self.stream = Batches(view, length, 1, seed)
        self.view, self.length, self.rows, self.seed = view, length, rows, seed
        self.epoch_rows = view.n_tokens // length
        self._order = lru_cache(maxsize=2)(self._make_order)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Return the rows of a step.

        Args:
            step: The step, from 0.
            part: Return only this one of `parts` equal parts of the rows.
            parts: How many parts there are.
        """
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
        """Return which row of the stream is this row of a step.

        Args:
            step: The step, from 0.
            row: The row of the step.
        """
        epoch, k = divmod(step * self.rows + row, self.epoch_rows)
        return epoch * self.epoch_rows + int(self._order(epoch)[k])

    def most_sequences(self, parts: int = 1) -> int:
        """Return how many sequences the parts of a step have at most, but for one part in a hundred of the first epoch.

        Args:
            parts: How many equal parts the rows of a step have.
        """
        begins = self.stream._epoch(0).bounds[:-1]
        begins = begins[begins < self.epoch_rows * self.length]
        inside = begins[begins % self.length > 0] // self.length  # a row begins a sequence in any case
        each = 1 + np.bincount(inside, minlength=self.epoch_rows)
        some = self.rows // parts
        whole = self.epoch_rows // some
        if not whole:  # a part takes rows of several epochs
            return some * int(each.max())
        sums = each[self._order(0)][: whole * some].reshape(whole, some).sum(1)
        return int(np.quantile(sums, 0.99, method="higher"))

    def documents(self, step: int, row: int) -> list[int]:
        """Return the indices, in the view, of the documents that a row of a step overlaps.

        Args:
            step: The step, from 0.
            row: The row of the step.
        """
        epoch, offset = divmod(self.row(step, row) * self.length, self.view.n_tokens)
        index, _, _ = self.stream._epoch(epoch).locate(offset, min(self.length, self.view.n_tokens - offset))
        by_start = np.argsort(self.view.starts)
        found = np.searchsorted(self.view.starts[by_start], index, side="right") - 1
        return sorted({int(n) for n in by_start[found]})

    def _make_order(self, epoch: int) -> np.ndarray:
        return permutation(self.epoch_rows, self.seed, ~epoch)
