"""One chunk of the chunkwise form: the chunk map and its backward, on dense tensors of a few heads.

n = key heads at work, nv = their value heads, r = nv / n; s = 2 readers of the state (q and k) if the rule corrects,
else 1. Each line of forms/chunkwise.py is one line here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.forms.decay import ChannelDecay, Decay, HeadDecay, times_transposed


class ChunkGrad(NamedTuple):
    """The gradients of one chunk's inputs."""

    q: Tensor
    """`n c k`"""
    k: Tensor
    """`n c k`"""
    v: Tensor
    """`nv c v`"""
    log_decay: Tensor | None
    """`nv c 1|k`"""
    beta: Tensor | None
    """`nv c 1|v`"""


class Chunk:
    """The tensors of one chunk: QK `n 2 c k` (changed in place), v `nv c v`, log_decay `nv c 1|k`, beta `nv c 1|v`."""

    def __init__(
        self,
        QK: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        *,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
    ):
        n, _, self.c, _ = QK.shape
        self.n, self.r, self.s = n, v.shape[0] // n, 2 if corrects else 1
        self.norm = None
        if normalize_qk:
            self.norm = torch.linalg.vector_norm(QK, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
            QK *= self.norm
        self.scale = scale
        self.unscaled_q = QK[:, 0].clone() if normalize_qk else None
        QK[:, 0] *= scale
        self.QK, self.k, self.v, self.log_decay, self.beta = QK, QK[:, 1], v, log_decay, beta
        self.decay: Decay
        if log_decay is not None and log_decay.shape[-1] > 1:
            self.decay = ChannelDecay(log_decay.unflatten(0, (n, self.r)))
        else:
            self.decay = HeadDecay(None if log_decay is None else log_decay.unflatten(0, (n, self.r)), self.k, self.r)

    def forward(self, S: Tensor) -> Tensor:
        """Return O `nv c v`; S `nv k v` becomes the next state in place."""
        c = self.c
        scores = self._scores()  # nv s c c
        reads = torch.bmm(self._readers(), S)  # nv s*c v
        R = self.v
        if self.beta is not None:
            R = _solve(self.beta, scores[:, 1], self.beta * (self.v - reads[:, c:]))
        output = reads[:, :c].baddbmm_(scores[:, 0], R)
        self._forget(S).baddbmm_(self._writers().mT, R)
        return output

    def backward(self, S: Tensor, dO: Tensor, dS: Tensor) -> ChunkGrad:
        """Return the gradients of the chunk that S `nv k v` entered; dS of the next state becomes dS of S, in place."""
        n, r, s, c = self.n, self.r, self.s, self.c
        scores, readers, writers = self._scores(), self._readers(), self._writers()
        P = scores[:, 0]
        dR = torch.bmm(P.mT, dO).baddbmm_(writers, dS)
        R, Y, dbeta, dv = self.v, dO, None, dR
        if self.beta is not None:
            E = self.v - torch.bmm(readers[:, c:], S)
            R = _solve(self.beta, scores[:, 1], self.beta * E)
            X = _solve(self.beta, scores[:, 1], dR, transposed=True)
            dv = self.beta * X  # = dE
            Y = torch.cat((dO, -dv), dim=1)  # nv s*c v
            dbeta = X * self._unscaled(R, E, scores[:, 1])
            dbeta = dbeta if self.beta.shape[-1] > 1 else dbeta.sum(-1, keepdim=True)

        dscores = times_transposed(Y, R).view(-1, s, c, c).tril_()
        if s == 2:
            dscores[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
        dreaders = times_transposed(Y, S).view(n, r, s, c, -1)
        dwriters = times_transposed(R, dS).view(n, r, c, -1)
        writers = writers.view(n, r, c, -1)
        dlast = (S * dS).sum(-1).view(n, r, 1, -1)
        self._forget(dS).baddbmm_(readers.mT, Y)

        dQK, dk, dG = self.decay.scores_backward(
            self.QK[:, :s], self.k, scores.view(n, r, s, c, c), dscores.view(n, r, s, c, c)
        )
        dlog_decay = None
        if self.decay.readers is not None and self.decay.writers is not None and self.decay.last is not None:
            written = writers * dwriters
            written[:, :, -1] = 0  # e^{G_c - G_c} is 1, whatever G_c is
            through = (readers.view(n, r, s, c, -1) * dreaders).sum(2) - written
            end = written.sum(2, keepdim=True) + self.decay.last.mT * dlast
            if dG.shape[-1] == 1:
                through, end = through.sum(-1, keepdim=True), end.sum(-1, keepdim=True)
            dG += through
            dG[:, :, -1:] += end
            dlog_decay = self._sum_from_each(dG.flatten(0, 1))
            dreaders *= self.decay.readers.unsqueeze(2)
            dwriters *= self.decay.writers
        dQK += dreaders.sum(1)
        dk += dwriters.sum(1)
        dq = dQK[:, 0]
        if s == 2:
            dk += dQK[:, 1]
        return ChunkGrad(self._through_norm(dq * self.scale, 0), self._through_norm(dk, 1), dv, dlog_decay, dbeta)

    def _scores(self) -> Tensor:
        """Return P, and M if the rule corrects: `nv s c c`."""
        return self.decay.scores(self.QK[:, : self.s], self.k).flatten(0, 1)

    def _readers(self) -> Tensor:
        """Return Qr, and Kr below it if the rule corrects: `nv s*c k`."""
        QK = self.QK[:, : self.s].unsqueeze(1)  # n 1 s c k
        if self.decay.readers is None:
            QK = QK.expand(-1, self.r, -1, -1, -1)
        else:
            QK = QK * self.decay.readers.unsqueeze(2)
        return QK.reshape(self.n * self.r, self.s * self.c, -1)

    def _writers(self) -> Tensor:
        """Return Kw `nv c k`."""
        k = self.k.unsqueeze(1)  # n 1 c k
        k = k.expand(-1, self.r, -1, -1) if self.decay.writers is None else k * self.decay.writers
        return k.flatten(0, 1)

    def _forget(self, S: Tensor) -> Tensor:
        """Return e^{G_c} S, computed in place."""
        return S if self.decay.last is None else S.mul_(self.decay.last.flatten(0, 1))

    def _unscaled(self, R: Tensor, E: Tensor, M: Tensor) -> Tensor:
        """Return E - M R, which is R / beta wherever beta is not too small to divide by."""
        assert self.beta is not None
        tiny = self.beta.abs() < torch.finfo(R.dtype).tiny ** 0.5
        if not tiny.any():
            return R / self.beta
        return torch.where(tiny, E - torch.bmm(M.tril(-1), R), R / self.beta)

    def _sum_from_each(self, dG: Tensor) -> Tensor:
        """Return dlog_decay: log_decay_t is part of each G_i with i >= t; nothing passes a decay of exactly 0."""
        assert self.log_decay is not None
        sums = dG.flip(1).cumsum(1).flip(1)
        return sums.masked_fill_(self.log_decay == -torch.inf, 0)

    def _through_norm(self, dx: Tensor, which: int) -> Tensor:
        """Return the gradient of x from that of x^ = x * norm: norm * (dx^ - x^ (x^ . dx^))."""
        if self.norm is None or self.unscaled_q is None:
            return dx
        unit = self.k if which else self.unscaled_q
        return self.norm[:, which] * (dx - unit * (unit * dx).sum(-1, keepdim=True))


def _solve(beta: Tensor, M: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return (I + beta M)^{-1} right, or its transpose's, reading only the strictly lower triangle of M.

    With one beta per value channel every column has a matrix of its own; then one row is computed after the other.
    """
    if beta.shape[-1] == 1 or right.shape[-1] == 1:
        A = beta * M
        return torch.linalg.solve_triangular(A.mT if transposed else A, right, upper=transposed, unitriangular=True)
    found, c = right.clone(), right.shape[1]
    if transposed:
        scaled = torch.empty_like(found)  # beta * found
        for i in range(c - 1, -1, -1):
            found[:, i] -= torch.bmm(M[:, i + 1 :, i].unsqueeze(1), scaled[:, i + 1 :]).squeeze(1)
            torch.mul(beta[:, i], found[:, i], out=scaled[:, i])
        return found
    for i in range(1, c):
        found[:, i] -= beta[:, i] * torch.bmm(M[:, i : i + 1, :i], found[:, :i]).squeeze(1)
    return found
