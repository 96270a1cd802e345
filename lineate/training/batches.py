"""Batches as a pure function of the step: documents are concatenated, cut into rows, and packed with cu_seqlens."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.forms.sequences import copied_bounds
from lineate.training.tokens import JoinedSpans, TokenView, permutation

NO_TARGET = -100


@dataclass(frozen=True)
class Batch:
    """`n` tokens of packed sequences; all tensors are int64."""

    ids: Tensor
    """Tokens `1 n`."""
    targets: Tensor
    """`1 n`: the token that follows each one in its document, also across the end of a row; -100 where none does."""
    cu_seqlens: Tensor
    """Bounds of the sequences, `sequences + 1`."""
    continues: bool = False
    """Whether the first sequence began on an earlier rank."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device; if its memory is pinned, the CPU does not wait for the copy.

        Args:
            device: The target device.
        """
        ids, targets = (x.to(device, non_blocking=x.is_pinned()) for x in (self.ids, self.targets))
        return replace(self, ids=ids, targets=targets, cu_seqlens=copied_bounds(self.cu_seqlens, device))

    def pinned(self) -> "Batch":
        """Return the batch in memory that a GPU can copy by itself."""
        ids, targets, cu_seqlens = (x.pin_memory() for x in (self.ids, self.targets, self.cu_seqlens))
        return replace(self, ids=ids, targets=targets, cu_seqlens=cu_seqlens)

    def padded(self, sequences: int) -> "Batch":
        """Return the batch with empty sequences after the others, so that all batches have equally many.

        Args:
            sequences: How many it is to have; a batch with more is returned unchanged.
        """
        missing = sequences + 1 - self.cu_seqlens.shape[0]
        if missing <= 0:
            return self
        return replace(self, cu_seqlens=F.pad(self.cu_seqlens, (0, missing), value=self.ids.shape[1]))

    def joined(self, sequences: int) -> "Batch":
        """Return the batch with its last sequences as one, so that it has no more than a number of them.

        Args:
            sequences: How many it may have, at least 1; a batch with fewer is returned unchanged.
        """
        if sequences + 1 >= self.cu_seqlens.shape[0]:
            return self
        return replace(self, cu_seqlens=torch.cat([self.cu_seqlens[:sequences], self.cu_seqlens[-1:]]))

    def shard(self, rank: int, size: int) -> "Batch":
        """Return one rank's segment, tokens rank n / size to (rank + 1) n / size, with cu_seqlens of its own.

        Args:
            rank: Which segment.
            size: How many segments of equal length to split into.
        """
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
    """Batches of consecutive rows: `batch(step)` depends only on the step.

    The documents of an epoch, in an order drawn from seed and epoch, are concatenated; the epochs form one endless
    stream. Row r of step s has the `length` tokens of the stream from (s rows + r) length on. Every row and every
    document begins a sequence in cu_seqlens.

    Args:
        view: The documents.
        length: Tokens in a row.
        rows: Rows in a step.
        seed: Seed of the order of the documents.
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
        """Return the rows of a step.

        Args:
            step: The step, from 0.
            part: Return only this one of `parts` equal parts of the rows.
            parts: How many parts there are.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if parts < 1 or self.rows % parts:
            raise ValueError(f"rows = {self.rows} must be a multiple of parts, got parts = {parts}")
        if not 0 <= part < parts:
            raise ValueError(f"part must be in 0..{parts - 1} for parts = {parts}, got {part}")
        n = self.rows // parts * self.length
        first = (step * parts + part) * n  # exact, as Python's integers do not overflow
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
        """Return the documents of an epoch in their order."""
        order = permutation(self.view.n_documents, self.seed, epoch)
        return JoinedSpans(self.view.starts[order], self.view.lengths[order])
