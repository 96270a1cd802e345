"""Kernels of a second writer: the key that is written, where another direction is erased (diagonal_plus_low_rank).

    (I + M_d) X = Er S + M_k U      O = Qr S + P_k U - P_d X      S_next = e^{G_c} S + Kw^T U - Dw^T X

R = -X is what a walk solves for any one writer with values V = -M_k U, R = (I + M_d)^{-1} (V - Er S); the walk computes
V, and adds P_k U and Kw^T U (state.py). Backwards, dR goes through the walk as ever. With Y = (I + M_d)^{-T} dR, which
it leaves,

    dU = P_k^T dO + Kw dS_next - M_k^T Y      dP_k = tril(dO U^T)      dM_k = -tril(Y U^T, -1)      dKw = U dS_next^T
"""

import triton
import triton.language as tl

from lineate.kernels.portable.channel import BEHIND, load_decay, split, sums
from lineate.kernels.portable.channel_gradients import solved
from lineate.kernels.portable.gates import LOG2E, allowed
from lineate.kernels.portable.layout import chunk_bounds, load_tile, store_tile
from lineate.kernels.portable.scores import load_norms


@triton.jit(do_not_specialize=["t"])
def both_residuals(
    k, v, w, T, P, M, states, dstates, doutput, dv, X, residuals, dP, dM, dP_second, dM_second,
    bounds, first_slots, slot_texts, t, stride_v, head_v,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R, dP, dM and dP_k, dM_k and dU of one chunk and head; k is Er, v holds U, w, P, M are Kw, P_k, M_k.

    dv holds Y on entry and dU afterwards; X gets Y.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    at = slot.to(tl.int64) * HV + head
    i = tl.arange(0, C)
    dtype = doutput.dtype.element_ty
    OR = tl.zeros((C, C), tl.float32)
    YR = tl.zeros((C, C), tl.float32)
    OU = tl.zeros((C, C), tl.float32)
    YU = tl.zeros((C, C), tl.float32)
    for first in range(0, V, BV):
        columns = V - first
        token = (start * HV + head) * V + first
        U = load_tile(v + start * stride_v + head * head_v + first, stride_v, rows, columns, C, BV, EVEN)
        S = load_tile(states + at * K * V + first * K, K, columns, K, BV, BK, K == BK and EVEN)
        readers = load_tile(k + (start * HV + head) * K, HV * K, rows, K, C, BK, K == BK)
        scores = load_tile(M + at * C * C, C, C, C, C, C, True)
        E = tl.dot(readers, tl.trans(S), input_precision=PRECISION)
        E = tl.dot(scores, U, E, input_precision=PRECISION)
        inverse = load_tile(T + at * C * C, C, C, C, C, C, True)
        Rd = solved(inverse, -E, dtype, PRECISION).to(dtype)
        store_tile(residuals + token, HV * V, Rd, rows, columns, C, BV, EVEN)
        Y = load_tile(dv + token, HV * V, rows, columns, C, BV, EVEN)
        store_tile(X + token, HV * V, Y, rows, columns, C, BV, EVEN)
        dO = load_tile(doutput + token, HV * V, rows, columns, C, BV, EVEN)
        YR = tl.dot(Y, tl.trans(Rd), YR, input_precision=PRECISION)
        OR = tl.dot(dO, tl.trans(Rd), OR, input_precision=PRECISION)
        YU = tl.dot(Y, tl.trans(U), YU, input_precision=PRECISION)
        OU = tl.dot(dO, tl.trans(U), OU, input_precision=PRECISION)
        dU = -tl.dot(tl.trans(scores), Y, input_precision=PRECISION)
        scores = load_tile(P + at * C * C, C, C, C, C, C, True)
        dU = tl.dot(tl.trans(scores), dO, dU, input_precision=PRECISION)
        writers = load_tile(w + (start * HV + head) * K, HV * K, rows, K, C, BK, K == BK)
        dS = load_tile(dstates + at * K * V + first * K, K, columns, K, BV, BK, K == BK and EVEN)
        dU = tl.dot(writers, tl.trans(dS), dU, input_precision=PRECISION)
        store_tile(dv + token, HV * V, dU, rows, columns, C, BV, EVEN)
    up_to = i[:, None] >= i[None, :]
    before = i[:, None] > i[None, :]
    store_tile(dP + at * C * C, C, tl.where(up_to, OR, 0.0), C, C, C, C, True)
    store_tile(dM + at * C * C, C, tl.where(before, -YR, 0.0), C, C, C, C, True)
    store_tile(dP_second + at * C * C, C, tl.where(up_to, OU, 0.0), C, C, C, C, True)
    store_tile(dM_second + at * C * C, C, tl.where(before, -YU, 0.0), C, C, C, C, True)


@triton.jit(do_not_specialize=["t"])
def second_state_gradients(
    q, k, v, log_decay, dstates, dk, dG, wild, spans, bounds, first_slots, slot_texts, t, stride_q, stride_k, stride_v,
    head_q, head_k, head_v,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Compute dk of BX channels through the next state, and add its part to dG, as channel_state_gradients does."""
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first_x = tl.program_id(2) * BX
    if AGAIN:
        found = tl.load(wild + (slot.to(tl.int64) * HV + head) * tl.num_programs(2) + tl.program_id(2))
        if found == 0:
            return
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    EVEN_X: tl.constexpr = K % BX == 0
    left = K - first_x
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // R * head_k
    _, norm_k = load_norms(q, k, stride_q, stride_k, rows, 1.0, K, BK, C, NORMALIZE)
    i = tl.arange(0, C)
    at = slot.to(tl.int64) * HV + head
    from_write = tl.zeros((C, BX), tl.float32)
    for first in range(0, V, BV):
        columns = V - first
        dS = load_tile(dstates + at * K * V + first * K + first_x, K, columns, left, BV, BX, EVEN_X and EVEN)
        U = load_tile(v + start * stride_v + head * head_v + first, stride_v, rows, columns, C, BV, EVEN)
        from_write = tl.dot(U, dS, from_write, input_precision=PRECISION)
    given, _, _ = load_decay(log_decay, None, None, None, start, rows, head, HV, first_x, K, BX, C, False, False)
    coarse, fine = split(allowed(given) * LOG2E, SPLIT)
    keys = load_tile(k + first_x, stride_k, rows, left, C, BX, EVEN_X)
    write = tl.exp2(sums(spans, BEHIND, coarse, fine, C, SPLIT, PRECISION))
    from_write = from_write * write * norm_k[:, None]
    written = tl.where((i < rows - 1)[:, None], keys.to(tl.float32) * from_write, 0.0)
    row = (start * HV + head) * K + first_x
    total = load_tile(dG + row, HV * K, rows, left, C, BX, EVEN_X)
    total += tl.where((i == rows - 1)[:, None], tl.sum(written, 0)[None, :], -written)
    store_tile(dG + row, HV * K, total, rows, left, C, BX, EVEN_X)
    store_tile(dk + row, HV * K, from_write, rows, left, C, BX, EVEN_X)
