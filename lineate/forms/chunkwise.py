"""The chunkwise form: quadratic inside a chunk of c tokens, recurrent between chunks; forward and backward by hand.

One head, q pre-scaled, G the cumulative log_decay inside the chunk, S the state entering it, rows are tokens:

    Qr = e^G q     Kr = e^G k     Kw = e^{G_c - G} k                       readers of S, writers to the next S
    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    E = V - Kr S          R = (I + beta M)^{-1} (beta E)      (rule only accumulates: R = V)
    O = Qr S + P R        S_next = e^{G_c} S + Kw^T R

Backward, from dO and dS_next, with X = (I + beta M)^{-T} dR, dE = beta X = dV, and Y = dO stacked on -dE:

    dR = P^T dO + Kw dS_next      d[P; M] = tril(Y R^T)      d[Qr; Kr] = Y S^T      dKw = R dS_next^T
    dbeta = rowsum(X (E - M R))      dS = e^{G_c} dS_next + [Qr; Kr]^T Y

q and k are stacked (s = 2) so that each line is one product. A chunk's work is done for a few heads at a time and stays in
cache; kept for the backward are only the states between chunks, everything else is computed again. Forward and backward
are one torch op each, for autograd and torch.compile alike. docs/derivation.md derives every line.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.forms.chunk import Chunk
from lineate.rule import compute_dtype


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """q, k `b t h k`; v `b t hv v`; log_decay `b t hv` or `b t hv k`; beta `b t hv`; state `b hv k v`."""
    tensors = (q, k, v, log_decay, beta, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    output, state, _ = _forward(*tensors, cu_seqlens, corrects, scale, normalize_qk, chunk_size, keep)
    return output, state


@torch.library.custom_op("lineate::chunkwise", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `b t hv v`, final state, and the states entering each chunk `n b hv k v` (none unless `keep`)."""
    output, final, states = _empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)
    for heads in _head_blocks(q, v):
        for text, chunks in _texts(q, chunk_size, cu_seqlens):
            S = heads.take_state(state, text)
            for index, tokens in chunks:
                if keep:
                    heads.put_state(states[index], None, S)
                chunk = heads.load(q, k, v, log_decay, beta, tokens, corrects, scale, normalize_qk)
                heads.put(output, tokens, chunk.forward(S))
            heads.put_state(final, text, S)
    return output, final, states


@torch.library.custom_op("lineate::chunkwise_backward", mutates_args=())
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
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_decay, dbeta, dstate; no elements where the input was None."""
    dq, dk, dv, dlog_decay, dbeta, dstate = grads = _empty_grads(q, k, v, log_decay, beta, dfinal)
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
    return grads


def _empty_outputs(
    q: Tensor, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk_size: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, _, key_dim = q.shape
    texts = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = (
        (t + texts * (chunk_size - 1)) // chunk_size if keep else 0
    )  # at most: each text may end in part of a chunk
    states = state.new_empty(chunks, b, v.shape[2], key_dim, v.shape[3])
    return v.new_empty(v.shape), state.new_empty(state.shape), states


def _empty_grads(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, dfinal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dlog_decay, dbeta = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, beta))
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        dlog_decay,
        dbeta,
        dfinal.new_empty(dfinal.shape),
    )


@_forward.register_fake
def _(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk, chunk_size, keep):  # type: ignore[no-untyped-def]
    return _empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)


@_backward.register_fake
def _(
    doutput, dfinal, q, k, v, log_decay, beta, states, cu_seqlens, corrects, scale, normalize_qk, chunk_size
):  # type: ignore[no-untyped-def]
    return _empty_grads(q, k, v, log_decay, beta, dfinal)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, log_decay, beta, _, cu_seqlens, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, output[2], cu_seqlens)


def _differentiate(ctx, doutput, dfinal, _):  # type: ignore[no-untyped-def]
    q, k, v, log_decay, beta, states, cu_seqlens = ctx.saved_tensors
    dq, dk, dv, dlog_decay, dbeta, dstate = _backward(
        doutput, dfinal, q, k, v, log_decay, beta, states, cu_seqlens, *ctx.options
    )
    dlog_decay = None if log_decay is None else dlog_decay
    dbeta = None if beta is None else dbeta
    return dq, dk, dv, dlog_decay, dbeta, dstate, *[None] * 6


_forward.register_autograd(_differentiate, setup_context=_save)


def _texts(
    q: Tensor, chunk_size: int, cu_seqlens: Tensor | None
) -> list[tuple[int | None, list[tuple[int, slice]]]]:
    """For each text: its row in the states (None: all rows alike), and its chunks as (running index, tokens)."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if (
        bounds[0] != 0 or bounds[-1] != q.shape[1] or sorted(bounds) != bounds
    ):  # compiled calls are checked only here
        raise ValueError(f"cu_seqlens must rise from 0 to t = {q.shape[1]}, got {bounds}")
    texts: list[tuple[int | None, list[tuple[int, slice]]]] = []
    index = 0
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        starts = range(start, end, chunk_size)
        chunks = [(index + j, slice(x, min(x + chunk_size, end))) for j, x in enumerate(starts)]
        index += len(chunks)
        texts.append((None if cu_seqlens is None else i, chunks))
    return texts


@dataclass(frozen=True)
class _Heads:
    """Some rows of the batch and some heads of it, worked on together; hands out chunks as `heads c ...` and takes them back."""

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
            yield _Heads(
                slice(row, min(row + rows, b)), slice(key, end), slice(key * group, end * group), group
            )
