"""Kernels that compute the gradients of all chunks at once, from each chunk's entering state and leaving gradient.

    dP = tril(dO R^T)     dM = -beta tril(X R^T, -1)     dbeta_i = X_i . (E - M R)_i     dV = beta X
    dQr = dO S^T          dKr = -dV S^T                  dKw = R dS^T

G occurs only as the factor e^{G_i} of a reader and e^{-G_j} of a writer, so

    dG_i = q_i dq_i + k_i dk_i(reader) - k_i dk_i(writer)     log_decay_t is part of every G_i with i >= t

Pairs without decay (a token with itself, the last writer) are left out of dG, because there they would only cancel.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.gates import BETA, DECAY, FACTORS, FLOOR, LAST, READ_K, READ_Q, WRITE, is_small
from lineate.kernels.portable.layout import chunk_bounds, load_tile, store_tile
from lineate.kernels.portable.scores import between, inverse_norms, load_norms


@triton.jit(do_not_specialize=["t"])
def head_residuals(
    q, k, v, P, T, factors, states, doutput, dv, dbeta, residuals, sums,
    bounds, first_slots, slot_texts, t, stride_q, stride_k, stride_v, head_q, head_k, head_v, scale,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R, dV, dbeta and the gradients through P and M, of one chunk and value head (decay per head, or none).

    d(q k^T) overwrites P and d(k k^T) overwrites T, once both have been read. dv holds X on entry, dV
    afterwards. sums `slot hv PARTS c`: the first part of dG. For rules that only accumulate, v holds R.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    at = slot.to(tl.int64) * HV + head
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // R * head_k
    v += start * stride_v + head * head_v
    token = (start * HV + head) * V
    factors += at * FACTORS * C
    dtype = doutput.dtype.element_ty
    i = tl.arange(0, C)
    beta = tl.load(factors + BETA * C + i)
    small = is_small(beta, dtype)
    some_are_small = tl.sum(tl.where(small & (i < rows), 1, 0), 0) > 0
    dP = tl.zeros((C, C), tl.float32)
    XR = tl.zeros((C, C), tl.float32)
    XE = tl.zeros((C, C), tl.float32)  # only its diagonal is needed, where beta is small
    for first in range(0, V, BV):
        Rd = load_tile(v + first, stride_v, rows, V - first, C, BV, EVEN)
        if CORRECTS:
            keys = load_tile(k, stride_k, rows, K, C, BK, K == BK)
            S = load_tile(states + at * K * V + first * K, K, V - first, K, BV, BK, K == BK and EVEN)
            read_k = tl.load(factors + READ_K * C + i)
            E = Rd.to(tl.float32) - tl.dot(keys, tl.trans(S), input_precision=PRECISION) * read_k[:, None]
            inverse = load_tile(T + at * C * C, C, C, C, C, C, True)
            Rd = tl.dot(inverse, (E * beta[:, None]).to(dtype), input_precision=PRECISION).to(dtype)
            store_tile(residuals + token + first, HV * V, Rd, rows, V - first, C, BV, EVEN)
            X = load_tile(dv + token + first, HV * V, rows, V - first, C, BV, EVEN)
            XR = tl.dot(X, tl.trans(Rd), XR, input_precision=PRECISION)
            if some_are_small:
                XE = tl.dot(X, tl.trans(E.to(dtype)), XE, input_precision=PRECISION)
            store_tile(dv + token + first, HV * V, X.to(tl.float32) * beta[:, None], rows, V - first, C, BV, EVEN)
        dO = load_tile(doutput + token + first, HV * V, rows, V - first, C, BV, EVEN)
        dP = tl.dot(dO, tl.trans(Rd), dP, input_precision=PRECISION)
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    D = between(factors, C) if GATED else tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
    dP = tl.where(i[:, None] >= i[None, :], dP, 0.0) * D * norm_q[:, None] * norm_k[None, :]
    store_tile(P + at * C * C, C, dP, C, C, C, C, True)
    dG = tl.zeros((C,), tl.float32)
    if GATED:
        queries = load_tile(q, stride_q, rows, K, C, BK, K == BK)
        keys = load_tile(k, stride_k, rows, K, C, BK, K == BK)
        paired = dP * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        paired = tl.where(i[:, None] == i[None, :], 0.0, paired)
        dG = tl.sum(paired, 1) - tl.sum(paired, 0)
    if CORRECTS:
        own = tl.sum(tl.where(i[:, None] == i[None, :], XR, 0.0), 1)
        compared = tl.sum(tl.where(i[:, None] == i[None, :], XE, 0.0), 1)
        XR = tl.where(i[:, None] > i[None, :], XR, 0.0) * D * norm_k[:, None] * norm_k[None, :]
        keys = load_tile(k, stride_k, rows, K, C, BK, K == BK)
        paired = XR * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        rate = tl.where(small, compared - tl.sum(paired, 1), own / tl.where(small, 1.0, beta))
        tl.store(dbeta + (start + i) * HV + head, rate.to(dbeta.dtype.element_ty), mask=i < rows)
        paired = paired * beta[:, None]
        dG += tl.sum(paired, 0) - tl.sum(paired, 1)
        tl.debug_barrier()  # all threads have read T
        store_tile(T + at * C * C, C, XR * -beta[:, None], C, C, C, C, True)
    if GATED:
        tl.store(sums + at * (PARTS * C) + i, dG)


@triton.jit(do_not_specialize=["t"])
def head_gradients(
    q, k, dQK, dKK, factors, states, dstates, doutput, dv, residuals, sums, dq, dk,
    bounds, first_slots, slot_texts, t, stride_q, stride_k, stride_r, head_q, head_k, head_r,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BX: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, CORRECTS: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dq and dk `token hv k` of BX channels of one chunk and value head, and their part of dG in sums.

    With normalize_qk these are the gradients of the unit vectors times the inverse norms; gather completes them.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first_x = tl.program_id(2) * BX
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    EVEN_X: tl.constexpr = K % BX == 0
    left = K - first_x
    at = slot.to(tl.int64) * HV + head
    q += start * stride_q + head // R * head_q + first_x
    k += start * stride_k + head // R * head_k + first_x
    factors += at * FACTORS * C
    i = tl.arange(0, C)
    dQr = tl.zeros((C, BX), tl.float32)
    dKr = tl.zeros((C, BX), tl.float32)
    dKw = tl.zeros((C, BX), tl.float32)
    dlast = 0.0
    for first in range(0, V, BV):
        token = (start * HV + head) * V + first
        state_at = at * K * V + first * K + first_x
        S = load_tile(states + state_at, K, V - first, left, BV, BX, EVEN_X and EVEN)
        dS = load_tile(dstates + state_at, K, V - first, left, BV, BX, EVEN_X and EVEN)
        dO = load_tile(doutput + token, HV * V, rows, V - first, C, BV, EVEN)
        Rd = load_tile(residuals + start * stride_r + head * head_r + first, stride_r, rows, V - first, C, BV, EVEN)
        if GATED:
            dlast += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
        dQr = tl.dot(dO, S, dQr, input_precision=PRECISION)
        dKw = tl.dot(Rd, dS, dKw, input_precision=PRECISION)
        if CORRECTS:
            dE = load_tile(dv + token, HV * V, rows, V - first, C, BV, EVEN)
            dKr = tl.dot(dE, S, dKr, input_precision=PRECISION)
    queries = load_tile(q, stride_q, rows, left, C, BX, EVEN_X)
    keys = load_tile(k, stride_k, rows, left, C, BX, EVEN_X)
    dQr = dQr * tl.load(factors + READ_Q * C + i)[:, None]
    dKw = dKw * tl.load(factors + WRITE * C + i)[:, None]
    dKr = dKr * -tl.load(factors + READ_K * C + i)[:, None]
    if GATED:
        written = tl.where(i < rows - 1, tl.sum(keys.to(tl.float32) * dKw, 1), 0.0)
        dlast = dlast * tl.load(factors + LAST * C) + tl.sum(written, 0)
        dG = tl.sum(queries.to(tl.float32) * dQr + keys.to(tl.float32) * dKr, 1)
        dG += tl.where(i == rows - 1, dlast, -written)
        tl.store(sums + (at * PARTS + 1 + tl.program_id(2)) * C + i, dG)
    row = (start * HV + head) * K + first_x
    d = load_tile(dQK + at * C * C, C, C, C, C, C, True)
    dQr = tl.dot(d, keys, dQr, input_precision=PRECISION)
    store_tile(dq + row, HV * K, dQr, rows, left, C, BX, EVEN_X)
    dKw = tl.dot(tl.trans(d), queries, dKw, input_precision=PRECISION)
    if CORRECTS:
        d = load_tile(dKK + at * C * C, C, C, C, C, C, True)
        dKw = tl.dot(d, keys, dKw + dKr, input_precision=PRECISION)
        dKw = tl.dot(tl.trans(d), keys, dKw, input_precision=PRECISION)
    store_tile(dk + row, HV * K, dKw, rows, left, C, BX, EVEN_X)


@triton.jit(do_not_specialize=["t"])
def head_decay_gradients(
    factors, sums, dlog_decay, bounds, first_slots, slot_texts, t,
    HV: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store dlog_decay_t, the sum of dG_i over i >= t in the chunk; a program has a tile [C, HEADS]."""
    slot = tl.program_id(0)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    i = tl.arange(0, C)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    at = slot.to(tl.int64) * HV + head
    there = (head < HV) & (i < rows)
    dG = tl.zeros((C, HEADS), tl.float32)
    for part in tl.static_range(PARTS):
        dG += tl.load(sums + (at * PARTS + part) * C + i, mask=there, other=0.0)
    given = tl.load(factors + (at * FACTORS + DECAY) * C + i, mask=there, other=0.0)
    dgiven = tl.where(given <= FLOOR, 0.0, tl.cumsum(dG, 0, reverse=True))
    tl.store(dlog_decay + (start + i) * HV + head, dgiven.to(dlog_decay.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def gather(
    x, parts, dx, rows, stride, head,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store dx `rows H K`: sum parts `rows H R K` over R, then go from unit vectors to x: dx - x (x . dx) |x|^-2.

    `stride` and `head` are the strides of rows and heads of x.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BK)
    there = (i < rows * H)[:, None] & (j < K)[None, :]
    total = tl.zeros((ROWS, BK), tl.float32)
    for r in tl.static_range(R):
        total += tl.load(parts + (i * R + r)[:, None] * K + j[None, :], mask=there, other=0.0).to(tl.float32)
    if NORMALIZE:
        given = tl.load(x + (i // H * stride + i % H * head)[:, None] + j[None, :], mask=there, other=0.0)
        norm = inverse_norms(given)
        given = given.to(tl.float32)
        total -= given * (tl.sum(given * total, 1) * norm * norm)[:, None]
    tl.store(dx + i[:, None] * K + j[None, :], total.to(dx.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count", "n", "stride"])
def add_parts(
    parts, total, count, n, stride, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store total `n`: the sum of parts `count n BLOCKS` over count and BLOCKS, always in the same order.

    `stride` is the stride of the `count` parts.
    """
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    sums = tl.zeros((ROWS, BN), tl.float32)
    for first in range(0, count, ROWS):
        at = parts + (first + i).to(tl.int64)[:, None] * stride + j[None, :] * BLOCKS
        for block in tl.static_range(BLOCKS):
            sums += tl.load(at + block, mask=(first + i < count)[:, None] & (j < n)[None, :], other=0.0)
    tl.store(total + j, tl.sum(sums, 0), mask=j < n)
