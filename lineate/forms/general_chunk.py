"""One chunk of the general row: its map and its backward, on dense tensors of a few value heads.

c tokens with n writes each are m = n c writes; rows are tokens of q and writes of all others. G is the cumulative
log_decay, S the state entering the chunk; readers carry e^{G_i}, writers e^{G_c - G_j}:

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}    (write j is of token i or an earlier one)
    M_ij = the same with e_i for q_i          (j < i)

Where k is what is erased (d = k), one solve and one writer suffice:

    (I + M) R = U - Er S          O = Qr S + P R          S_next = e^{G_c} S + Kw^T R

Otherwise d is a second writer, with scores P_d and M_d of its own, and X is what is erased:

    (I + M_d) X = Er S + M U      O = Qr S + P U - P_d X      S_next = e^{G_c} S + Kw^T U - Dw^T X

Backward, from dO and dS_next; Z = d(Er S) is to e what dO is to q:

    d = k:   Z = -(I + M)^{-T} (P^T dO + Kw dS_next)              dU = -Z
    d != k:  Z = -(I + M_d)^{-T} (P_d^T dO + Dw dS_next)          dU = P^T dO + Kw dS_next + M^T Z
    for each writer w with its values W (k with R; or k with U, and d with -X):
             dP_w = dO W^T      dM_w = Z W^T      d(writer) = W dS_next^T
    dQr = dO S^T      dEr = Z S^T      dS = e^{G_c} dS_next + Qr^T dO + Er^T Z
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.call import Inputs
from lineate.forms.decay import ChannelDecay, HeadDecay, times_transposed
from lineate.rule import normalize


class _Side(NamedTuple):
    """One writer: what it writes with, and what its values are multiplied by."""

    w: Tensor
    """`nv m k`"""
    P: Tensor
    """`nv c m`"""
    M: Tensor
    """`nv m m`"""
    writers: Tensor
    """`nv m k`"""


class GeneralChunk:
    """The chunk of a call: q `nv c k`, k `nv m k`, v `nv m v`, log_decay `nv c 1|k`, beta `nv m 1`, others `nv c .`.

    Gradients are returned in the same fields.
    """

    def __init__(self, call: Inputs, *, scale: float, normalize_qk: bool) -> None:
        self.call, self.scale, self.normalize_qk = call, scale, normalize_qk
        q, self.k = (normalize(call.q), normalize(call.k)) if normalize_qk else (call.q, call.k)
        self.q = scale * q
        self.c, self.m = q.shape[1], self.k.shape[1]
        self.n = self.m // self.c
        rate = call.write if call.beta is None else call.beta
        factor = call.erase if call.beta is None else call.beta
        self.u = call.v if rate is None else rate * call.v
        compared = self.k if factor is None else factor * self.k
        self.e = compared if call.probe is None else call.probe
        self.d = call.direction
        log_decay, self.per_channel = call.log_decay, False
        if log_decay is not None and log_decay.shape[-1] > 1:
            self.per_channel = True
            self.channels = ChannelDecay(log_decay.unsqueeze(1))
            factors: tuple[Tensor | None, ...] = self.channels.readers, self.channels.writers, self.channels.last
        else:
            steps = None
            if log_decay is not None:
                steps = log_decay.new_zeros(log_decay.shape[0], 1, self.m, 1)
                steps[:, 0, :: self.n] = log_decay
            heads = HeadDecay(steps, self.k, 1)
            self.D = heads.D[:, 0]  # 1|nv m m
            factors = heads.readers, heads.writers, heads.last
        self.readers, self.writers, self.last = (None if x is None else x[:, 0] for x in factors)  # nv m 1|k

    def forward(self, S: Tensor) -> Tensor:
        """Return O `nv c v`; S `nv k v` becomes the next state in place."""
        c, one = self.c, self._side(self.k)
        reads = torch.bmm(torch.cat((self._read_q(self.q), self._read_e(self.e)), 1), S)
        if self.d is None:
            R = _solve(one.M, self.u - reads[:, c:])
            output = reads[:, :c].baddbmm_(one.P, R)
            self._forget(S).baddbmm_(one.writers.mT, R)
            return output
        other = self._side(self.d)
        X = _solve(other.M, reads[:, c:].baddbmm(one.M, self.u))
        output = reads[:, :c].baddbmm_(one.P, self.u).baddbmm_(other.P, X, alpha=-1)
        self._forget(S).baddbmm_(one.writers.mT, self.u).baddbmm_(other.writers.mT, X, alpha=-1)
        return output

    def backward(self, S: Tensor, dO: Tensor, dS: Tensor) -> Inputs:
        """Return the gradients of the chunk that S `nv k v` entered; dS of the next state becomes dS of S, in place."""
        read_q, read_e = self._read_q(self.q), self._read_e(self.e)
        one = self._side(self.k)
        arriving = torch.bmm(one.P.mT, dO).baddbmm_(one.writers, dS)
        if self.d is None:
            Z = _solve(one.M, arriving, transposed=True).neg_()
            du, sides = -Z, [(one, _solve(one.M, self.u - torch.bmm(read_e, S)))]
        else:
            other = self._side(self.d)
            X = _solve(other.M, torch.bmm(read_e, S).baddbmm_(one.M, self.u))
            at_erased = torch.bmm(other.P.mT, dO).baddbmm_(other.writers, dS)
            Z = _solve(other.M, at_erased, transposed=True).neg_()
            du, sides = arriving.baddbmm_(one.M.mT, Z), [(one, self.u), (other, -X)]

        dread_q, dread_e = times_transposed(dO, S), times_transposed(Z, S)
        dlast = (S * dS).sum(-1)  # nv k
        dwriters = [times_transposed(values, dS) for _, values in sides]
        self._forget(dS).baddbmm_(read_q.mT, dO).baddbmm_(read_e.mT, Z)

        dG = self.k.new_zeros(*self.k.shape[:2], self.k.shape[2] if self.per_channel else 1)
        if self.readers is not None:
            self._add_factors(dG, (read_q * dread_q, read_e * dread_e), sides, dwriters, dlast)
            dread_q, dread_e = self._read_q(dread_q), self._read_e(dread_e)
        dwritten = []
        for (side, values), dwriter in zip(sides, dwriters, strict=True):
            dP, dM = times_transposed(dO, values), times_transposed(Z, values).tril_(-1)
            dq, de, dw = self._through_scores(side, dP, dM, dG)
            dread_q += dq
            dread_e += de
            dwritten.append(dw + (dwriter if self.writers is None else dwriter * self.writers))
        return self._gradients(dread_q, dread_e, dwritten, du, dG)

    def _gradients(self, dq: Tensor, de: Tensor, dwritten: list[Tensor], du: Tensor, dG: Tensor) -> Inputs:
        """Return the gradients of the call from those of the scaled q, of e, of the writers, of u and of G."""
        call, dk = self.call, dwritten[0]
        found: dict[str, Tensor | None] = dict.fromkeys(call.NAMES)
        rate = call.write if call.beta is None else call.beta
        factor = call.erase if call.beta is None else call.beta
        if call.probe is not None:
            found["probe"] = de
        else:
            dk = dk + (de if factor is None else factor * de)
        if call.direction is not None:
            found["direction"] = dwritten[1]
        if call.erase is not None:
            found["erase"] = de * self.k
        if call.write is not None:
            found["write"] = du * call.v
        if call.beta is not None:
            found["beta"] = (de * self.k).sum(-1, keepdim=True) + (du * call.v).sum(-1, keepdim=True)
        if call.log_decay is not None:
            sums = dG.flip(1).cumsum(1).flip(1)[:, :: self.n]  # log_decay_t is part of each G_i with i >= t
            found["log_decay"] = sums.masked_fill(call.log_decay == -torch.inf, 0)  # nothing passes a decay of 0
        found |= {"q": self._through_norm(self.scale * dq, call.q), "k": self._through_norm(dk, call.k)}
        return call.of(found | {"v": du if rate is None else rate * du})

    def _side(self, w: Tensor) -> _Side:
        """Return the scores of a writer, and what it leaves in the next state."""
        writers = w if self.writers is None else w * self.writers
        if self.per_channel:
            scores = self.channels.scores(torch.stack((self.q, self.e), 1), w)[:, 0]  # nv 2 c c
            return _Side(w, scores[:, 0], scores[:, 1].tril(-1), writers)
        P = times_transposed(self.q, w) * self.D[:, self.n - 1 :: self.n]
        return _Side(w, P, (times_transposed(self.e, w) * self.D).tril_(-1), writers)

    def _through_scores(self, side: _Side, dP: Tensor, dM: Tensor, dG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, e and a writer through the scores; add that of G."""
        if self.per_channel:
            readers, scores = torch.stack((self.q, self.e), 1), torch.stack((side.P, side.M), 1).unsqueeze(1)
            dscores = torch.stack((dP.tril_(), dM), 1).unsqueeze(1)  # nv 1 2 c c
            dreaders, dw, through = self.channels.scores_backward(readers, side.w, scores, dscores)
            dG += through[:, 0]
            return dreaders[:, 0], dreaders[:, 1], dw
        last = slice(self.n - 1, None, self.n)
        D = self.D[:, last]
        if self.readers is not None:  # there is no decay between the writes of one token
            token = torch.arange(self.m, device=dP.device) // self.n
            earlier = token > token.unsqueeze(-1)
            for rows, paired in ((last, side.P * dP), (slice(None), side.M * dM)):
                paired = paired.masked_fill(~earlier.mT[rows], 0)
                dG[:, rows] += paired.sum(-1, keepdim=True)
                dG -= paired.sum(-2).unsqueeze(-1)
        dP, dM = dP * D, dM * self.D
        return torch.bmm(dP, side.w), torch.bmm(dM, side.w), torch.bmm(dP.mT, self.q).baddbmm_(dM.mT, self.e)

    def _add_factors(
        self,
        dG: Tensor,
        read: tuple[Tensor, Tensor],
        sides: list[tuple[_Side, Tensor]],
        dwriters: list[Tensor],
        dlast: Tensor,
    ) -> None:
        """Add to dG what passes the factors of readers, writers and the state."""
        assert self.last is not None
        written = sum(side.writers * dw for (side, _), dw in zip(sides, dwriters, strict=True))
        assert isinstance(written, Tensor)
        written[:, -self.n :] = 0  # e^{G_c - G_c} is 1, whatever G_c is
        by_q, through = read[0], read[1] - written
        end = written.sum(1, keepdim=True) + self.last.mT * dlast.unsqueeze(1)
        if not self.per_channel:
            by_q, through, end = (x.sum(-1, keepdim=True) for x in (by_q, through, end))
        dG += through
        dG[:, self.n - 1 :: self.n] += by_q
        dG[:, -1:] += end

    def _read_q(self, x: Tensor) -> Tensor:
        """Return x times the readers' factors of the tokens."""
        return x if self.readers is None else x * self.readers[:, self.n - 1 :: self.n]

    def _read_e(self, x: Tensor) -> Tensor:
        """Return x times the readers' factors of the writes."""
        return x if self.readers is None else x * self.readers

    def _forget(self, S: Tensor) -> Tensor:
        """Return e^{G_c} S, computed in place."""
        return S if self.last is None else S.mul_(self.last)

    def _through_norm(self, dx: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x from that of x^ = x * norm: norm * (dx^ - x^ (x^ . dx^))."""
        if not self.normalize_qk:
            return dx
        norm = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        unit = x * norm
        return norm * (dx - unit * (unit * dx).sum(-1, keepdim=True))


def _solve(M: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return (I + M)^{-1} right, or (I + M)^{-T} right."""
    return torch.linalg.solve_triangular(M.mT if transposed else M, right, upper=transposed, unitriangular=True)
