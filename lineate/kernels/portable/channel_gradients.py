"""Kernels that compute the gradients of all chunks at once with decay per key channel; channel.py has the scores.

    dP = tril(dO R^T)     dM = -beta tril(X R^T, -1)     dbeta_i = X_i . (E - M R)_i     dV = beta X
    dQr = dO S^T          dKr = -dV S^T                  dKw = R dS^T

The gradients of P and M go to q, k and the decays through the same pairs as in channel_scores: those inside a block of
16 tokens at once, the others level by level.

With a probe e in place of k as the reader of M (load_probes in channel.py), beta is 1, and d(Er) = -X S^T and the
gradient through M go to e; from there to the probe, or to erase and k.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.channel import (
    BEHIND,
    BLOCK_LEVEL,
    FROM,
    LEVELS,
    MOST,
    UP_TO,
    load_decay,
    load_probes,
    pairs,
    same_block,
    split,
    sums,
    through_chunk,
    within_block,
)
from lineate.kernels.portable.gates import FLOOR, LOG2E, allowed, is_small
from lineate.kernels.portable.layout import chunk_bounds, load_tile, store_tile
from lineate.kernels.portable.scores import load_norms


@triton.jit
def solved(T, x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return T x for x [C, BV] in float32. The diagonal of T is 1, so only the rest of T multiplies the rounded x."""
    rounded = x.to(dtype)
    if dtype == tl.float32:
        return tl.dot(T, rounded, input_precision=PRECISION)
    return tl.dot(T, rounded, x - rounded.to(tl.float32), input_precision=PRECISION)


@triton.jit(do_not_specialize=["t"])
def channel_residuals(
    k, v, M, T, factors, states, doutput, dv, dbeta, residuals, dP, dM,
    bounds, first_slots, slot_texts, t, stride_v, head_v, beta_scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, COMPARED: tl.constexpr, RAW_BETA: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R, dP = tril(dO R^T), dM = -beta tril(X R^T, -1), dbeta and dV = beta X of one chunk and head; k is Kr.

    dv holds X on entry. Rules that only accumulate need dP alone; their R is V. With a probe there is no dbeta.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    at = slot.to(tl.int64) * HV + head
    i = tl.arange(0, C)
    dtype = doutput.dtype.element_ty
    dscores = tl.zeros((C, C), tl.float32)
    XR = tl.zeros((C, C), tl.float32)
    XE = tl.zeros((C,), tl.float32)
    beta = tl.load(factors + at * (BK + C) + BK + i)
    for first in range(0, V, BV):
        columns = V - first
        token = (start * HV + head) * V + first
        dO = load_tile(doutput + token, HV * V, rows, columns, C, BV, EVEN)
        values = load_tile(v + start * stride_v + head * head_v + first, stride_v, rows, columns, C, BV, EVEN)
        Rd = values
        if CORRECTS:
            S = load_tile(states + at * K * V + first * K, K, columns, K, BV, BK, K == BK and EVEN)
            keys = load_tile(k + (start * HV + head) * K, HV * K, rows, K, C, BK, K == BK)
            E = values.to(tl.float32) - tl.dot(keys, tl.trans(S), input_precision=PRECISION)
            inverse = load_tile(T + at * C * C, C, C, C, C, C, True)
            Rd = solved(inverse, E * beta[:, None], dtype, PRECISION).to(dtype)
            store_tile(residuals + token, HV * V, Rd, rows, columns, C, BV, EVEN)
            X = load_tile(dv + token, HV * V, rows, columns, C, BV, EVEN)
            XE += tl.sum(X.to(tl.float32) * E, 1)
            XR = tl.dot(X, tl.trans(Rd), XR, input_precision=PRECISION)
            store_tile(dv + token, HV * V, X.to(tl.float32) * beta[:, None], rows, columns, C, BV, EVEN)
        dscores = tl.dot(dO, tl.trans(Rd), dscores, input_precision=PRECISION)
    strictly_lower = i[:, None] > i[None, :]
    store_tile(dP + at * C * C, C, tl.where(i[:, None] >= i[None, :], dscores, 0.0), C, C, C, C, True)
    if CORRECTS:
        store_tile(dM + at * C * C, C, tl.where(strictly_lower, XR, 0.0) * -beta[:, None], C, C, C, C, True)
    if CORRECTS and COMPARED == "key":
        own = tl.sum(tl.where(i[:, None] == i[None, :], XR, 0.0), 1)
        scores = load_tile(M + at * C * C, C, C, C, C, C, True).to(tl.float32)
        unscaled = XE - tl.sum(tl.where(strictly_lower, XR * scores, 0.0), 1)
        small = is_small(beta, dtype)
        rate = tl.where(small, unscaled, own / tl.where(small, 1.0, beta))
        if RAW_BETA:
            rate = rate * beta * (1.0 - beta / beta_scale)
        tl.store(dbeta + (start + i) * HV + head, rate.to(dbeta.dtype.element_ty), mask=i < rows)


@triton.jit
def _chunk_through_state(
    q, k, probe, log_decay, A_log, dt_bias, states, dstates, doutput, dv, residuals, dq, dk, dprobe, dG, spans,
    stride_q, stride_k, stride_r, head_q, head_k, head_r, scale, lower_bound, slot, head, first_x, start, rows,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk and value head through the state."""
    EVEN_X: tl.constexpr = K % BX == 0
    left = K - first_x
    KR: tl.constexpr = 1 if COMPARED == "probe" else R
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // KR * head_k
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    if COMPARED == "probe":
        norm_k = tl.zeros((C,), tl.float32) + 1.0
    i = tl.arange(0, C)
    at = slot.to(tl.int64) * HV + head
    from_q = tl.zeros((C, BX), tl.float32)
    from_k = tl.zeros((C, BX), tl.float32)
    from_write = tl.zeros((C, BX), tl.float32)
    dlast = tl.zeros((BX,), tl.float32)
    for first in range(0, V, BV):
        columns = V - first
        token = (start * HV + head) * V + first
        S = load_tile(states + at * K * V + first * K + first_x, K, columns, left, BV, BX, EVEN_X and EVEN)
        dS = load_tile(dstates + at * K * V + first * K + first_x, K, columns, left, BV, BX, EVEN_X and EVEN)
        dO = load_tile(doutput + token, HV * V, rows, columns, C, BV, EVEN)
        Rd = load_tile(residuals + start * stride_r + head * head_r + first, stride_r, rows, columns, C, BV, EVEN)
        dlast += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        from_q = tl.dot(dO, S, from_q, input_precision=PRECISION)
        from_write = tl.dot(Rd, dS, from_write, input_precision=PRECISION)
        if CORRECTS:
            dE = load_tile(dv + token, HV * V, rows, columns, C, BV, EVEN)
            from_k = tl.dot(dE, S, from_k, input_precision=PRECISION)
    given, _, _ = load_decay(
        log_decay, A_log, dt_bias, lower_bound, start, rows, head, HV, first_x, K, BX, C, RAW, BIAS
    )
    decay = allowed(given) * LOG2E
    coarse, fine = split(decay, SPLIT)
    dlast = dlast * through_chunk(decay, SPLIT)
    queries = load_tile(q + first_x, stride_q, rows, left, C, BX, EVEN_X)
    keys = load_tile(k + first_x, stride_k, rows, left, C, BX, EVEN_X)
    read = tl.exp2(sums(spans, UP_TO, coarse, fine, C, SPLIT, PRECISION))
    from_q = from_q * read * norm_q[:, None]
    total = queries.to(tl.float32) * from_q
    if CORRECTS:
        if COMPARED == "key":
            from_k = -from_k * read * norm_k[:, None]
            total += keys.to(tl.float32) * from_k
        else:
            from_k = -from_k * read
            probes = load_probes(probe, keys, start, rows, head, HV, first_x, K, BX, C, COMPARED)
            if COMPARED == "erase":
                probes = probes * norm_k[:, None]
            total += probes * from_k
    write = tl.exp2(sums(spans, BEHIND, coarse, fine, C, SPLIT, PRECISION))
    from_write = from_write * write * norm_k[:, None]
    written = tl.where((i < rows - 1)[:, None], keys.to(tl.float32) * from_write, 0.0)
    dlast += tl.sum(written, 0)
    total += tl.where((i == rows - 1)[:, None], dlast[None, :], -written)
    row = (start * HV + head) * K + first_x
    store_tile(dG + row, HV * K, total, rows, left, C, BX, EVEN_X)
    store_tile(dq + row, HV * K, from_q, rows, left, C, BX, EVEN_X)
    if COMPARED == "key":
        store_tile(dk + row, HV * K, from_write + from_k, rows, left, C, BX, EVEN_X)
    else:
        store_tile(dk + row, HV * K, from_write, rows, left, C, BX, EVEN_X)
        store_tile(dprobe + row, HV * K, from_k, rows, left, C, BX, EVEN_X)


@triton.jit(do_not_specialize=["t", "slots", "group"])
def channel_state_gradients(
    q, k, probe, log_decay, A_log, dt_bias, states, dstates, doutput, dv, residuals, dq, dk, dprobe, dG, wild, spans,
    bounds, first_slots, slot_texts, t, slots, group, stride_q, stride_k, stride_r, head_q, head_k, head_r, scale,
    lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    COMPARED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dG (float32, `token hv k`) of BX channels of a chunk and value head, through the state.

    These are their parts as readers and writers of the state. dq and dk are `token hv k` too; with NORMALIZE they are
    the gradients of the unit vectors times the inverse norms, which gather completes. dprobe gets that of e.

    AGAIN: a program takes `group` chunks of a value head, at most MOST, and computes those that are wild.
    """
    head = tl.program_id(1).to(tl.int64)
    first_x = tl.program_id(2) * BX
    if AGAIN:
        first = tl.program_id(0) * group
        last = tl.minimum(first + group, slots)
        blocks = tl.num_programs(2)
        among = first + tl.arange(0, MOST)
        at = (among.to(tl.int64) * HV + head) * blocks + tl.program_id(2)
        if tl.max(tl.load(wild + at, mask=among < last, other=0).to(tl.int32), 0) == 0:
            return
        for n in range(0, last - first):
            slot = first + n
            if tl.load(wild + (slot.to(tl.int64) * HV + head) * blocks + tl.program_id(2)) != 0:
                start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
                _chunk_through_state(
                    q, k, probe, log_decay, A_log, dt_bias, states, dstates, doutput, dv, residuals, dq, dk, dprobe, dG,
                    spans, stride_q, stride_k, stride_r, head_q, head_k, head_r, scale, lower_bound, slot, head,
                    first_x, start, rows, HV, R, K, V, BK, BX, BV, C, CORRECTS, NORMALIZE, RAW, BIAS, EVEN, SPLIT,
                    PRECISION, COMPARED,
                )  # fmt: skip
    else:
        slot = tl.program_id(0)
        start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
        _chunk_through_state(
            q, k, probe, log_decay, A_log, dt_bias, states, dstates, doutput, dv, residuals, dq, dk, dprobe, dG, spans,
            stride_q, stride_k, stride_r, head_q, head_k, head_r, scale, lower_bound, slot, head, first_x, start, rows,
            HV, R, K, V, BK, BX, BV, C, CORRECTS, NORMALIZE, RAW, BIAS, EVEN, SPLIT, PRECISION, COMPARED,
        )  # fmt: skip


@triton.jit
def _through_blocks(
    dqueries, dkeys, dprobes, total, queries, keys, probes, dscores, dA, inside, good, C: tl.constexpr,
    CORRECTS: tl.constexpr, COMPARED: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add the gradients through pairs of the same block of 16; `inside` and `good` are those of within_block."""
    F = tl.exp2(inside)
    inverse = tl.where(good[:, None], tl.exp2(-inside), 0.0)
    meet = same_block(C) & good[:, None]
    Z = (keys * inverse).to(dtype)
    Y = (queries * F).to(dtype)
    d = tl.where(meet, dscores, 0.0)
    dY = tl.dot(d, Z, input_precision=PRECISION)
    dqueries += dY * F
    total += Y.to(tl.float32) * dY
    dZ = tl.dot(tl.trans(d), Y, input_precision=PRECISION)
    if CORRECTS:
        d = tl.where(meet, dA, 0.0)
        Y = (probes * F).to(dtype)
        dY = tl.dot(d, Z, input_precision=PRECISION)
        if COMPARED == "key":
            dkeys += dY * F
        else:
            dprobes += dY * F
        total += Y.to(tl.float32) * dY
        dZ = tl.dot(tl.trans(d), Y, dZ, input_precision=PRECISION)
    dkeys += dZ * inverse
    total -= Z.to(tl.float32) * dZ
    return dqueries, dkeys, dprobes, total


@triton.jit
def _through_level(
    dqueries, dkeys, dprobes, total, queries, keys, probes, dscores, dA, F, good, level, C: tl.constexpr,
    CORRECTS: tl.constexpr, COMPARED: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add the gradients through the pairs of one level, whose factors are F."""
    i = tl.arange(0, C)
    meet = pairs(level, C) & ((good == 0)[:, None] | (level >= BLOCK_LEVEL))
    Z = (keys * F).to(dtype)
    Y = (queries * F).to(dtype)
    d = tl.where(meet, dscores, 0.0)
    dY = tl.dot(d, Z, input_precision=PRECISION)
    dqueries += dY * F
    total += Y.to(tl.float32) * dY
    dZ = tl.dot(tl.trans(d), Y, input_precision=PRECISION)
    if CORRECTS:
        d = tl.where(meet, dA, 0.0)
        if COMPARED == "key":
            dZ = tl.dot(d, Z, dZ, input_precision=PRECISION)
            dZ = tl.dot(tl.trans(d), Z, dZ, input_precision=PRECISION)
        else:
            Y = (probes * F).to(dtype)
            dY = tl.dot(d, Z, input_precision=PRECISION)
            dprobes += dY * F
            total += Y.to(tl.float32) * dY
            dZ = tl.dot(tl.trans(d), Y, dZ, input_precision=PRECISION)
    dkeys += dZ * F
    reads = (((i >> level) & 1) == 1)[:, None]
    total += tl.where(reads, 1.0, -1.0) * Z.to(tl.float32) * dZ
    return dqueries, dkeys, dprobes, total


@triton.jit
def _store_decay_gradients(
    total, log_decay, A_log, dt_bias, dlog_decay, dA_log, ddt_bias, spans, lower_bound,
    slot, start, rows, head, HV: tl.constexpr, first_x, K: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    RAW: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dlog_decay, the sum of dG over the rows from its own on, and the parts of dA_log and ddt_bias."""
    EVEN_X: tl.constexpr = K % BX == 0
    i = tl.arange(0, C)
    at = slot.to(tl.int64) * HV + head
    coarse, fine = split(total, SPLIT)
    given, slope, by_speed = load_decay(
        log_decay, A_log, dt_bias, lower_bound, start, rows, head, HV, first_x, K, BX, C, RAW, BIAS
    )
    dgiven = tl.where(given <= FLOOR, 0.0, sums(spans, FROM, coarse, fine, C, SPLIT, PRECISION))
    if RAW:
        there = (i < rows)[:, None]
        if A_log is not None:
            part = tl.sum(tl.sum(tl.where(there, dgiven * by_speed, 0.0), 1), 0)
            tl.store(dA_log + at * tl.num_programs(2) + tl.program_id(2), part)
        dgiven = dgiven * slope
        if BIAS:
            x = first_x + tl.arange(0, BX)
            tl.store(ddt_bias + at * K + x, tl.sum(tl.where(there, dgiven, 0.0), 0), mask=x < K)
    row = (start * HV + head) * K + first_x
    store_tile(dlog_decay + row, HV * K, dgiven, rows, K - first_x, C, BX, EVEN_X)


@triton.jit
def _chunk_through_scores(
    q, k, probe, log_decay, A_log, dt_bias, dP, dM, dq, dk, dprobe, dG, dlog_decay, dA_log, ddt_bias, spans, stride_q,
    stride_k, head_q, head_k, scale, lower_bound, slot, head, first_x, start, rows,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one chunk and value head through P and M."""
    dtype = q.dtype.element_ty
    EVEN_X: tl.constexpr = K % BX == 0
    left = K - first_x
    KR: tl.constexpr = 1 if COMPARED == "probe" else R
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // KR * head_k
    row = (start * HV + head) * K + first_x
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    if COMPARED == "probe":
        norm_k = tl.zeros((C,), tl.float32) + 1.0
    queries = load_tile(q + first_x, stride_q, rows, left, C, BX, EVEN_X)
    keys = load_tile(k + first_x, stride_k, rows, left, C, BX, EVEN_X)
    queries = queries.to(tl.float32) * norm_q[:, None]
    keys = keys.to(tl.float32) * norm_k[:, None]
    probes = keys
    if COMPARED != "key":
        probes = load_probes(probe, keys, start, rows, head, HV, first_x, K, BX, C, COMPARED)
    i = tl.arange(0, C)
    at = slot.to(tl.int64) * HV + head
    given, _, _ = load_decay(
        log_decay, A_log, dt_bias, lower_bound, start, rows, head, HV, first_x, K, BX, C, RAW, BIAS
    )
    coarse, fine = split(allowed(given) * LOG2E, SPLIT)
    total = load_tile(dG + row, HV * K, rows, left, C, BX, EVEN_X)
    dscores = load_tile(dP + at * C * C, C, C, C, C, C, True)
    own = tl.sum(tl.where(i[:, None] == i[None, :], dscores.to(tl.float32), 0.0), 1)
    dqueries = own[:, None] * keys
    dkeys = own[:, None] * queries
    dprobes = dkeys
    if COMPARED != "key":
        dprobes = load_tile(dprobe + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
    dA = dscores
    if CORRECTS:
        dA = load_tile(dM + at * C * C, C, C, C, C, C, True)
    inside, good = within_block(spans, coarse, fine, C, SPLIT, PRECISION, dtype)
    dqueries, dkeys, dprobes, total = _through_blocks(
        dqueries, dkeys, dprobes, total, queries, keys, probes, dscores, dA, inside, good, C, CORRECTS, COMPARED,
        PRECISION, dtype,
    )  # fmt: skip
    first_level = BLOCK_LEVEL
    if tl.min(good.to(tl.int32), 0) == 0:
        first_level = 0
    for level in range(first_level, LEVELS):
        F = tl.exp2(sums(spans, level, coarse, fine, C, SPLIT, PRECISION))
        dqueries, dkeys, dprobes, total = _through_level(
            dqueries, dkeys, dprobes, total, queries, keys, probes, dscores, dA, F, good, level, C, CORRECTS, COMPARED,
            PRECISION, dtype,
        )  # fmt: skip
    if COMPARED == "erase":
        erase = load_tile(probe + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
        dkeys += erase * dprobes
        dprobes = dprobes * keys
    dqueries = dqueries * norm_q[:, None] + load_tile(dq + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
    dkeys = dkeys * norm_k[:, None] + load_tile(dk + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
    if COMPARED == "probe":
        store_tile(dG + row, HV * K, total, rows, left, C, BX, EVEN_X)
    else:
        _store_decay_gradients(
            total, log_decay, A_log, dt_bias, dlog_decay, dA_log, ddt_bias, spans, lower_bound,
            slot, start, rows, head, HV, first_x, K, BX, C, RAW, BIAS, SPLIT, PRECISION,
        )  # fmt: skip
    store_tile(dq + row, HV * K, dqueries, rows, left, C, BX, EVEN_X)
    store_tile(dk + row, HV * K, dkeys, rows, left, C, BX, EVEN_X)
    if COMPARED != "key":
        store_tile(dprobe + row, HV * K, dprobes, rows, left, C, BX, EVEN_X)


@triton.jit(do_not_specialize=["t", "slots", "group"])
def channel_gradients(
    q, k, probe, log_decay, A_log, dt_bias, dP, dM, dq, dk, dprobe, dG, dlog_decay, dA_log, ddt_bias, wild, spans,
    bounds, first_slots, slot_texts, t, slots, group, stride_q, stride_k, head_q, head_k, scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, COMPARED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Add the gradients through P and M to dq, dk and dG of channel_state_gradients; then compute dlog_decay from dG.

    dprobe holds the gradient of e through the state on entry, and the gradient of the probe, or of erase, afterwards.
    With a probe and a direction, a launch for the second writer follows, which computes dlog_decay.

    A pair of a reader and a writer adds the same amount to dG of the reader that it subtracts from that of the writer,
    and the two cancel in dlog_decay of the tokens before both. So both sides have the same rounded factors, Y and Z. If
    one side had the factors before rounding, 2^-9 of each pair would remain, and would add up in dA_log and ddt_bias.

    dA_log `slot hv blocks` and ddt_bias `slot hv K` are this chunk's parts.

    AGAIN: a program takes `group` chunks of a value head, at most MOST, and computes those that are wild.
    """
    head = tl.program_id(1).to(tl.int64)
    first_x = tl.program_id(2) * BX
    if AGAIN:
        first = tl.program_id(0) * group
        last = tl.minimum(first + group, slots)
        blocks = tl.num_programs(2)
        among = first + tl.arange(0, MOST)
        at = (among.to(tl.int64) * HV + head) * blocks + tl.program_id(2)
        if tl.max(tl.load(wild + at, mask=among < last, other=0).to(tl.int32), 0) == 0:
            return
        for n in range(0, last - first):
            slot = first + n
            if tl.load(wild + (slot.to(tl.int64) * HV + head) * blocks + tl.program_id(2)) != 0:
                start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
                _chunk_through_scores(
                    q, k, probe, log_decay, A_log, dt_bias, dP, dM, dq, dk, dprobe, dG, dlog_decay, dA_log, ddt_bias,
                    spans, stride_q, stride_k, head_q, head_k, scale, lower_bound, slot, head, first_x, start, rows, HV,
                    R, K, BK, BX, C, CORRECTS, NORMALIZE, RAW, BIAS, SPLIT, PRECISION, COMPARED,
                )  # fmt: skip
    else:
        slot = tl.program_id(0)
        start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
        _chunk_through_scores(
            q, k, probe, log_decay, A_log, dt_bias, dP, dM, dq, dk, dprobe, dG, dlog_decay, dA_log, ddt_bias, spans,
            stride_q, stride_k, head_q, head_k, scale, lower_bound, slot, head, first_x, start, rows, HV, R, K, BK, BX,
            C, CORRECTS, NORMALIZE, RAW, BIAS, SPLIT, PRECISION, COMPARED,
        )  # fmt: skip
