"""Computes the effect of decay inside one chunk: the scores, and the factors of readers and writers of the state.

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i
    readers e^{G_i}      writers e^{G_c - G_j}      last e^{G_c}

G is the inclusive cumulative sum of log_decay inside the chunk. Only this file knows whether it is per head or per
channel. No exponent is ever positive and no two sums are subtracted: every factor is a sum or product over just the
tokens it spans, so a reset (log_decay of -50, of -inf) is exact, and what follows it is as accurate as what precedes
it.

Heads: n = key heads of all rows at work, r = value heads a key head serves. Tensors are `n r c ...`; q and k arrive
stacked as QK `n s c k`, s = 2 (q and k) if the rule corrects, else 1 (q alone).
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Decay(Protocol):
    """The factors of one chunk; None stands for 1."""

    @property
    def readers(self) -> Tensor | None:
        """e^{G_i}, `n r c 1|k`."""

    @property
    def writers(self) -> Tensor | None:
        """e^{G_c - G_j}, `n r c 1|k`."""

    @property
    def last(self) -> Tensor | None:
        """e^{G_c}, `n r 1|k 1`."""

    def scores(self, QK: Tensor, k: Tensor) -> Tensor:
        """Return P, and M if k is among the readers: `n r s c c`, zero above the diagonal."""
        ...

    def scores_backward(self, QK: Tensor, k: Tensor, scores: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return d(readers) `n s c k`, d(k as writer) `n c k`, dG `n r c 1|k`; dscores is 0 above the diagonal."""
        ...


class HeadDecay:
    """One decay per head, or none: the scores are plain products times D_ij = e^{G_i - G_j}."""

    def __init__(self, log_decay: Tensor | None, like: Tensor, r: int):
        """Take log_decay `n r c 1` or None; like is k, `n c k`."""
        c = like.shape[1]
        self.readers = self.writers = self.last = None
        if log_decay is None:
            self.D = torch.ones(c, c, dtype=like.dtype, device=like.device).tril_().expand(1, r, c, c)
            return
        # Sums over (j, i] by a cumulative sum down the masked columns: -inf stays -inf, never -inf - -inf.
        future = torch.full((c, c), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
        sums = log_decay.expand(*log_decay.shape[:3], c).tril(-1).cumsum(-2)
        self.D = sums.add_(future).exp_()  # n r c c
        self.readers = log_decay.cumsum(-2).exp_()
        self.writers = self.D[:, :, -1].unsqueeze(-1)
        self.last = self.readers[:, :, -1:]

    def scores(self, QK: Tensor, k: Tensor) -> Tensor:
        n, s, c, _ = QK.shape
        products = times_transposed(QK.flatten(1, 2), k).view(n, 1, s, c, c)
        return products * self.D.unsqueeze(2)

    def scores_backward(self, QK: Tensor, k: Tensor, scores: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, s, c, key_dim = QK.shape
        paired = (scores * dscores).sum(2).tril_(-1)  # n r c c; a token's own pair has no decay in it
        dG = (paired.sum(-1) - paired.sum(-2)).unsqueeze(-1)
        dproducts = (dscores * self.D.unsqueeze(2)).sum(1).flatten(1, 2)  # n sc c
        dreaders = (dproducts @ k).view(n, s, c, key_dim)
        dk = dproducts.mT @ QK.flatten(1, 2)
        return dreaders, dk, dG


class ChannelDecay:
    """One decay per key channel: the factor sits inside the product, so it is shared out between its two sides.

    Rows are taken in blocks of 16. With a = the block's first row, reader i carries rho_i = e^{G_i - G_a} and writer j
    carries e^{G_a - G_j}: at most 1 for earlier blocks, 1 / rho_j inside the block. The latter is only used where rho_j
    is not tiny in any channel; the rows past such a point (after a reset) are computed pair by pair instead. Which way
    a row goes depends on its own and earlier gates alone, so the future cannot change the past, not even its rounding.
    """

    block = 16

    def __init__(self, log_decay: Tensor):
        """Take log_decay `n r c k`."""
        n, r, c, key_dim = log_decay.shape
        B = self.block
        m = -(-c // B)
        self.shape = n, r, c, key_dim
        self.blocks = m
        # Smaller factors are negligible; setting them to 0 keeps 1 / rho finite and avoids denormals.
        self.tiny = 1e-200 if log_decay.dtype == torch.float64 else 1e-30
        decay = log_decay.new_ones(n * r, m * B, key_dim)
        torch.exp(log_decay.reshape(n * r, c, key_dim), out=decay[:, :c])
        decay = decay.view(n * r, m, B, key_dim)
        first = decay[:, :, 0]  # nv m k

        rho = decay.clone()  # product over (a, i] inside the block
        rho[:, :, 0] = 1
        sigma = torch.ones_like(decay)  # product over (j, end of block]
        for i in range(1, B):
            rho[:, :, i] *= rho[:, :, i - 1]
            torch.mul(sigma[:, :, B - i], decay[:, :, B - i], out=sigma[:, :, B - i - 1])
        self.exact = self._flush(rho)
        self._flush(sigma)

        readers, writers = torch.empty_like(rho), torch.empty_like(sigma)
        before = torch.ones_like(first[:, 0])  # e^{G} at the end of the block before
        after = torch.ones_like(before)  # e^{G_c - G} at the end of this block
        for i in range(m):
            torch.mul(rho[:, i], (before * first[:, i]).unsqueeze(1), out=readers[:, i])
            before = readers[:, i, -1]
            torch.mul(sigma[:, m - 1 - i], after.unsqueeze(1), out=writers[:, m - 1 - i])
            after = writers[:, m - 1 - i, 0] * first[:, m - 1 - i]
        self._flush(readers)
        self._flush(writers)
        self.readers = readers.view(n, r, m * B, key_dim)[:, :, :c]
        self.writers = writers.view(n, r, m * B, key_dim)[:, :, :c]
        self.last = before.view(n, r, key_dim, 1)
        self.decay, self.rho = decay, rho
        self.inverse = rho.reciprocal()
        if self.exact is not None:
            self.inverse.masked_fill_(rho == 0, 0)
        # Writers of block i as seen from the first row of block i + 1, and from there on to the next.
        self.handed = sigma[:, :-1] * first[:, 1:].unsqueeze(2)  # nv m-1 B k
        self.step = rho[:, :-1, -1] * first[:, 1:]  # nv m-1 k

    def _flush(self, factor: Tensor) -> Tensor | None:
        """Set what is tiny to 0; return the rows `nv m B` where that happened, or None."""
        small = factor < self.tiny
        if not small.any():
            return None
        factor.masked_fill_(small, 0)
        return small.any(-1)

    def scores(self, QK: Tensor, k: Tensor) -> Tensor:
        n, r, c, key_dim = self.shape
        s, B, C = QK.shape[1], self.block, self.blocks * self.block
        QK, k = self._spread(QK), self._spread(k)
        scores = k.new_zeros(n * r, s, C, C)
        written = k.new_empty(n * r, key_dim, C)  # columns k_j e^{G_a - G_j}, a the first row of the block at work
        for i in range(self.blocks):
            start, stop = i * B, (i + 1) * B
            written[:, :, start:stop] = (k[:, start:stop] * self.inverse[:, i]).mT
            readers = (QK[:, :, start:stop] * self.rho[:, i].unsqueeze(1)).flatten(1, 2)
            products = torch.bmm(readers, written[:, :, :stop])
            scores[:, :, start:stop, :stop] = products.view(n * r, s, B, stop)
            if stop < C:
                written[:, :, :start] *= self.step[:, i].unsqueeze(-1)
                written[:, :, start:stop] = (k[:, start:stop] * self.handed[:, i]).mT
        by_block = scores.view(n * r, s, self.blocks, B, self.blocks, B)
        for head, block, row, between in self._exact_rows():
            kept = between * k.view(n * r, self.blocks, B, key_dim)[head, block]  # f B k
            readers = QK[head, :, block * B + row]  # f s k
            by_block[head, :, block, row, block] = torch.bmm(readers, kept.mT)
        return scores.tril_()[:, :, :c, :c].reshape(n, r, s, c, c)

    def scores_backward(self, QK: Tensor, k: Tensor, scores: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, r, c, key_dim = self.shape
        s, B, C = QK.shape[1], self.block, self.blocks * self.block
        QK, k = self._spread(QK), self._spread(k)
        d = k.new_zeros(n * r, s, C, C)
        d[:, :, :c, :c] = dscores.reshape(n * r, s, c, c)
        own = d[:, 0].diagonal(dim1=-2, dim2=-1)  # a token's own pair has no decay in it, so it comes after dG
        d_own = own.unsqueeze(-1).clone()
        own.zero_()
        dreaders, dk = torch.zeros_like(QK), torch.zeros_like(k)
        by_block = d.view(n * r, s, self.blocks, B, self.blocks, B)
        for head, block, row, between in self._exact_rows():
            d_row = by_block[head, :, block, row, block]  # f s B
            by_block[head, :, block, row, block] = 0  # taken out of the blocks below
            kept = between * k.view(n * r, self.blocks, B, key_dim)[head, block]
            dreaders[head, :, block * B + row] = torch.bmm(d_row, kept)
            dkept = between * torch.bmm(d_row.mT, QK[head, :, block * B + row])
            dk.view(-1, B, key_dim).index_add_(0, head * self.blocks + block, dkept)
        carried = torch.empty_like(k)  # e^{G_a - G_j}
        for i in range(self.blocks):
            start, stop = i * B, (i + 1) * B
            carried[:, start:stop] = self.inverse[:, i]
            rho = self.rho[:, i].unsqueeze(1)
            d_i = d[:, :, start:stop, :stop].flatten(1, 2)
            products = torch.bmm(d_i, k[:, :stop] * carried[:, :stop])
            dreaders[:, :, start:stop].addcmul_(products.view(n * r, s, B, key_dim), rho)
            readers = (QK[:, :, start:stop] * rho).flatten(1, 2)
            dk[:, :stop].addcmul_(torch.bmm(d_i.mT, readers), carried[:, :stop])
            if stop < C:
                carried[:, :start] *= self.step[:, i].unsqueeze(1)
                carried[:, start:stop] = self.handed[:, i]
        dG = (QK * dreaders).sum(1) - k * dk
        dreaders[:, 0].addcmul_(d_own, k)
        dk.addcmul_(d_own, QK[:, 0])
        dreaders, dk, dG = (x[..., :c, :].unflatten(0, (n, r)) for x in (dreaders, dk, dG))
        return dreaders.sum(1), dk.sum(1), dG

    def _spread(self, x: Tensor) -> Tensor:
        """Repeat each key head for its value heads and fill up rows to whole blocks: `n ... c k` -> `nv ... C k`."""
        _, r, c, _ = self.shape
        if c % self.block:
            x = F.pad(x, (0, 0, 0, -c % self.block))
        return x if r == 1 else x.repeat_interleave(r, dim=0)

    def _exact_rows(self, at_once: int = 512) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield the rows that go pair by pair: value head, block, row `f`, and e^{G_i - G_j} `f B k` (0 for j > i)."""
        if self.exact is None:
            return
        position = torch.arange(self.block, device=self.decay.device)
        for head, block, row in zip(*(x.split(at_once) for x in self.exact.nonzero(as_tuple=True)), strict=True):
            later = (position > row.unsqueeze(-1)).unsqueeze(-1)  # f B 1
            decay = self.decay[head, block].masked_fill_(later, 1)
            between = torch.ones_like(decay)
            for j in range(self.block - 1, 0, -1):
                torch.mul(between[:, j], decay[:, j], out=between[:, j - 1])
            between.masked_fill_(later | (between < self.tiny), 0)
            yield head, block, row, between


def times_transposed(x: Tensor, y: Tensor) -> Tensor:
    """Return x y^T for batches. Copying y^T costs a tenth of the product; not copying it costs up to twice as much."""
    return torch.bmm(x, y.mT.contiguous())


def _spread(x: Tensor, r: int) -> Tensor:
    """Repeat each key head for its value heads, `n ...` -> `nv ...`; there is no copy if each has one."""
    return x if r == 1 else x.repeat_interleave(r, dim=0)
