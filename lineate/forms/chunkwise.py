"""The chunkwise form: quadratic inside a chunk of c tokens, recurrent between chunks; forward and backward by hand.

One head, q pre-scaled, G the cumulative log_decay inside the chunk, S the state entering it, rows are tokens:

    Qr = e^G q     Kr = e^G k     Kw = e^{G_c - G} k                       readers of S, writers to the next S
    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    E = V - Kr S          R = (I + beta M)^{-1} (beta E)      (rule only accumulates: R = V)
    O = Qr S + P R        S_next = e^{G_c} S + Kw^T R

Backward, from dO and dS_next, with X = (I + beta M)^{-T} dR, dE = beta X = dV, and Y = dO stacked on -dE:

    dR = P^T dO + Kw dS_next      d[P; M] = tril(Y R^T)      d[Qr; Kr] = Y S^T      dKw = R dS_next^T
    dbeta = rowsum(X (E - M R))      dS = e^{G_c} dS_next + [Qr; Kr]^T Y

q and k are stacked (s = 2) so that each line is one product. A chunk's work is done for a few heads at a time and stays
in cache; kept for the backward are only the states between chunks, everything else is computed again. Forward and
backward are one torch op each, for autograd and torch.compile alike. docs/derivation.md derives every line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lineate.checks import check_decay
from lineate.chunk_op import Grads, Outputs, register
from lineate.forms.chunk import Chunk
from lineate.rule import compute_dtype
from lineate.stability import watch_writes


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    outputs: Outputs,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> None:
    """q, k `b t h k`; v `b t hv v`; log_decay `b t hv` or `b t hv k`; beta `b t hv`; state `b hv k v`."""
    check_decay(log_decay)
    watch_writes(k, beta, normalize_qk)
    output, final, states = outputs
    for heads in _head_blocks(q, v):
        for text, chunks in _texts(q, chunk_size, cu_seqlens):
            S = heads.take_state(state, text)
            for index, tokens in chunks:
                if states.shape[0]:
                    heads.put_state(states[index], None, S)
                chunk = heads.load(q, k, v, log_decay, beta, tokens, corrects, scale, normalize_qk)
                heads.put(output, tokens, chunk.forward(S))
            heads.put_state(final, text, S)


def _backward(
    doutput: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    grads: Grads,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> None:
    """The same chunks from the last to the first, each from the state that entered it."""
    dq, dk, dv, dlog_decay, dbeta, dstate = grads
    for heads in _head_blocks(q, v):
        for text, chunks in _texts(q, chunk_size, cu_seqlens):
            dS = heads.take_state(dfinal, text)
            for index, tokens in reversed(chunks):
                S = heads.take_state(states[index], None)
                chunk = heads.load(q, k, v, log_decay, beta, tokens, corrects, scale, normalize_qk)
                grad = chunk.backward(S, heads.take(doutput, tokens, S.dtype), dS)
                heads.put_keys(dq, tokens, grad.q)
                heads.put_keys(dk, tokens, grad.k)
                heads.put(dv, tokens, grad.v)
                if grad.log_decay is not None:
                    heads.put(dlog_decay, tokens, grad.log_decay)
                if grad.beta is not None:
                    heads.put(dbeta, tokens, grad.beta)
            heads.put_state(dstate, text, dS)


chunkwise = register("chunkwise", _forward, _backward)


def _texts(q: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> list[tuple[int | None, list[tuple[int, slice]]]]:
    """For each text: its row in the states (None: all rows alike), and its chunks as (running index, tokens)."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    texts: list[tuple[int | None, list[tuple[int, slice]]]] = []
    index = 0
    for i, (start, end) in enumerate(pairwise(bounds)):
        starts = range(start, end, chunk_size)
        chunks = [(index + j, slice(x, min(x + chunk_size, end))) for j, x in enumerate(starts)]
        index += len(chunks)
        texts.append((None if cu_seqlens is None else i, chunks))
    return texts


@dataclass(frozen=True)
class _Heads:
    """Some rows and heads of the batch, worked on together: hands out chunks as `heads c ...`, takes them back."""

    rows: slice
    """Rows of the batch."""
    keys: slice
    """Key heads."""
    values: slice
    """The value heads they serve."""
    group: int
    """Value heads a key head."""

    def load(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        tokens: slice,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
    ) -> Chunk:
        dtype = compute_dtype(v.dtype)
        QK = torch.stack([x[self.rows, tokens, self.keys].transpose(1, 2).to(dtype) for x in (q, k)], dim=2)
        return Chunk(
            QK.flatten(0, 1),
            self.take(v, tokens, dtype),
            None if log_decay is None else self.take(log_decay, tokens, dtype),
            None if beta is None else self.take(beta, tokens, dtype),
            corrects=corrects,
            scale=scale,
            normalize_qk=normalize_qk,
        )

    def take(self, x: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """`b t hv d` -> `nv c d`; `b t hv` -> `nv c 1`."""
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

    def take_state(self, states: Tensor, text: int | None) -> Tensor:
        """A copy `nv k v` of these heads' states."""
        rows = self.rows if text is None else slice(text, text + 1)
        return states[rows, self.values].clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def put_state(self, states: Tensor, text: int | None, S: Tensor) -> None:
        """Store `nv k v` among the states."""
        rows = self.rows if text is None else slice(text, text + 1)
        place = states[rows, self.values]
        place.copy_(S.view(place.shape))


def _head_blocks(q: Tensor, v: Tensor) -> Iterator[_Heads]:
    """Few enough heads at a time that a chunk's work stays in the cache of a CPU; all at once elsewhere."""
    b, _, h, _ = q.shape
    group = v.shape[2] // h
    at_once = 8 * torch.get_num_threads() if q.device.type == "cpu" else b * v.shape[2]
    keys = max(1, min(h, at_once // group))
    rows = max(1, at_once // (h * group)) if keys == h else 1
    for row in range(0, b, rows):
        for key in range(0, h, keys):
            end = min(key + keys, h)
            yield _Heads(slice(row, min(row + rows, b)), slice(key, end), slice(key * group, end * group), group)
