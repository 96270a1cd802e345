"""The scores of a chunk with decay per key channel, and their gradients.

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}

The factor is inside the product, so it is divided between its two sides by halving the chunk recursively: at level s,
blocks of s tokens are readers and writers in turn. With m the border between a pair of blocks, reader i carries
e^{G_i - G_m} and writer j carries e^{G_m - G_j}, whose sums run only over the tokens between it and the border. No
exponent is ever positive, so resets are exact wherever they fall, and one product per level serves all its pairs. The
sums of a level are a product too, of a matrix of zeros and ones with log_decay.

Inside blocks of 16 one product does for all pairs if the decay since the block's first row a is not too strong: reader
i carries e^{G_i - G_a} and writer j the inverse of its own, e^{G_a - G_j}. Rows for which that inverse is too large
(within_block has the limits) take the levels instead. Which way a row goes depends on its own and earlier gates alone.
"""

import torch
import triton
import triton.language as tl

from lineate.kernels.portable.gates import FLOOR, LOG2E, allowed, decay_of_gate, gate_gradients, is_small
from lineate.kernels.portable.layout import chunk_bounds, link, load_tile, store_tile
from lineate.kernels.portable.scores import load_norms
from lineate.kernels.portable.solve import first_wild_row, invert

BLOCK = tl.constexpr(16)
LEVELS = tl.constexpr(6)  # pairs of blocks of 1, 2, 4, 8, 16, 32 tokens, for chunks of 64
BLOCK_LEVEL = tl.constexpr(4)  # from this level on, the pairs are of whole blocks of 16
BF16_LIMIT = tl.constexpr(100.0)  # the limit that within_block uses


def make_spans(C: int, like: torch.Tensor) -> torch.Tensor:
    """Return which tokens j the sums of row i run over, `10 C C`: for each level those up to the border of its pair."""
    i = torch.arange(C, device=like.device).unsqueeze(1)
    j = i.T
    levels = [(i >> n == j >> n) & ((j <= i) == ((i >> n) % 2 == 1)) for n in range(LEVELS.value)]
    within = (i // BLOCK.value == j // BLOCK.value) & (j <= i) & (j % BLOCK.value > 0)
    return torch.stack([*levels, j <= i, j > i, j >= i, within]).to(
        like.dtype if like.dtype == torch.float32 else torch.bfloat16
    )


@triton.jit
def load_decay(
    log_decay, A_log, dt_bias, lower_bound, start, rows, head, HV: tl.constexpr, first, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Load log_decay of channels first.. of a chunk and head, [C, BK], 0 past the end.

    With raw gates, also return d log_decay / d gate and d log_decay / d A_log.
    """
    x = tl.arange(0, BK)
    at = log_decay + (start * HV + head) * K + first
    given = load_tile(at, HV * K, rows, K - first, C, BK, K % BK == 0).to(tl.float32)
    slope = given
    by_speed = given
    if RAW:
        if BIAS:
            given += tl.load(dt_bias + head * K + first + x, mask=x < K - first, other=0.0).to(tl.float32)[None, :]
        speed = 1.0
        if A_log is not None:
            speed = tl.exp(tl.load(A_log + head).to(tl.float32))
        slope, by_speed = gate_gradients(1.0, given, speed, lower_bound)
        given = tl.where((tl.arange(0, C) < rows)[:, None], decay_of_gate(given, speed, lower_bound), 0.0)
    return given, slope, by_speed


@triton.jit
def split(x, SPLIT: tl.constexpr):
    """Split x into two parts of 8 bits, whose products with zeros and ones are exact (SPLIT), or return it unsplit."""
    coarse, fine = x, x
    if SPLIT:
        coarse = x.to(tl.bfloat16)
        fine = (x - coarse.to(tl.float32)).to(tl.bfloat16)
    return coarse, fine


@triton.jit
def sums(spans, which, coarse, fine, C: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """Return W x for x = coarse + fine [C, BX] and the matrix W [C, C] of zeros and ones number `which` (see spans)."""
    W = load_tile(spans + which * C * C, C, C, C, C, C, True)
    result = tl.dot(W, coarse, input_precision=PRECISION)
    if SPLIT:
        result = tl.dot(W, fine, result)
    return result


# After the levels come the other sums: over j <= i, j > i, j >= i, and (a, i] with a the block's first row.
UP_TO = tl.constexpr(6)
BEHIND = tl.constexpr(7)
FROM = tl.constexpr(8)
WITHIN = tl.constexpr(9)


@triton.jit
def pairs(level, C: tl.constexpr):
    """Return the pairs of readers and writers in adjacent blocks of 2^level, [C, C], above the diagonal too."""
    i = tl.arange(0, C)
    return (i >> level)[:, None] == ((i >> level) ^ 1)[None, :]


@triton.jit
def same_block(C: tl.constexpr):
    """Return the pairs of a reader with an earlier writer of its block of 16, [C, C]."""
    i = tl.arange(0, C)
    return ((i // BLOCK)[:, None] == (i // BLOCK)[None, :]) & (i[:, None] > i[None, :])


@triton.jit
def within_block(
    spans, coarse, fine, C: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr
):
    """Return log2 of e^{G_i - G_a} [C, BX], and the rows [C] where its inverse is good in every channel.

    Good is at most 2^100 in bfloat16 and 2^6 in float16, far from overflow, and 2^8 in float32, where the exponent has
    not yet lost digits.
    """
    decay = sums(spans, WITHIN, coarse, fine, C, SPLIT, PRECISION)
    LIMIT: tl.constexpr = BF16_LIMIT if dtype == tl.bfloat16 else 6.0 if dtype == tl.float16 else 8.0
    return decay, tl.min(decay, 1) >= -LIMIT


@triton.jit
def through_chunk(decay, SPLIT: tl.constexpr):
    """Return e^{G_c} from log2 decays [C, BX]; in float32 the sum runs in two parts, the larger of which is exact."""
    if SPLIT:
        result = tl.exp2(tl.sum(decay, 0))
    else:
        steps = tl.floor(decay * 256.0 + 0.5) * (1.0 / 256.0)
        result = tl.exp2(tl.sum(steps, 0)) * tl.exp2(tl.sum(decay - steps, 0))
    return result


@triton.jit(do_not_specialize=["t"])
def channel_scores(
    q, k, log_decay, beta, A_log, dt_bias, Qr, Kr, Kw, P, M, T, factors, wild, spans,
    bounds, first_slots, slot_texts, t, stride_q, stride_k, head_q, head_k, scale, beta_scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr,
    BIAS: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    PRODUCTS: tl.constexpr, AGAIN: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Compute the scores, BX channels at a time; a program takes a chunk and value head.

    PRODUCTS and wild are as in head_scores. After a first launch, of this kernel or of hopper/channel.py, a second one
    (AGAIN) recomputes Qr, Kr, P, M and T from the first wild row of each chunk on. It also recomputes Kw of all rows
    and e^{G_c}, since these depend on the decay of the wild rows.
    """
    link(LINK)
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    at = slot.to(tl.int64) * HV + head
    first_row = 0
    if AGAIN:
        first_row = tl.load(wild + at)
        if first_row == C:
            return
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // R * head_k
    EVEN_X: tl.constexpr = K % BX == 0
    dtype = q.dtype.element_ty
    i = tl.arange(0, C)
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    scores = tl.zeros((C, C), tl.float32)
    A = tl.zeros((C, C), tl.float32)
    squares = tl.zeros((C,), tl.float32)
    for first in range(0, K, BX):
        left = K - first
        queries = load_tile(q + first, stride_q, rows, left, C, BX, EVEN_X)
        keys = load_tile(k + first, stride_k, rows, left, C, BX, EVEN_X)
        given, _, _ = load_decay(
            log_decay, A_log, dt_bias, lower_bound, start, rows, head, HV, first, K, BX, C, RAW, BIAS
        )
        decay = allowed(given)
        x = first + tl.arange(0, BX)
        decay = decay * LOG2E
        tl.store(factors + at * (BK + C) + x, through_chunk(decay, SPLIT))
        coarse, fine = split(decay, SPLIT)
        row = (start * HV + head) * K + first
        read = tl.exp2(sums(spans, UP_TO, coarse, fine, C, SPLIT, PRECISION))
        reader = queries.to(tl.float32) * read * norm_q[:, None]
        store_tile(Qr + row, HV * K, reader, rows, left, C, BX, EVEN_X, first_row)
        if CORRECTS:
            reader = keys.to(tl.float32) * read * norm_k[:, None]
            store_tile(Kr + row, HV * K, reader, rows, left, C, BX, EVEN_X, first_row)
        write = tl.exp2(sums(spans, BEHIND, coarse, fine, C, SPLIT, PRECISION))
        store_tile(Kw + row, HV * K, keys.to(tl.float32) * write * norm_k[:, None], rows, left, C, BX, EVEN_X)
        squares += tl.sum(keys.to(tl.float32) * keys.to(tl.float32), 1)
        own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
        scores += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
        inside, good = within_block(spans, coarse, fine, C, SPLIT, PRECISION, dtype)
        F = tl.exp2(inside)
        Z = (keys.to(tl.float32) * tl.exp2(-inside)).to(dtype)
        Y = (queries.to(tl.float32) * F).to(dtype)
        meet = same_block(C) & good[:, None]
        scores += tl.where(meet, tl.dot(Y, tl.trans(Z), input_precision=PRECISION), 0.0)
        if CORRECTS:
            Y = (keys.to(tl.float32) * F).to(dtype)
            A += tl.where(meet, tl.dot(Y, tl.trans(Z), input_precision=PRECISION), 0.0)
        first_level = BLOCK_LEVEL
        if tl.min(good.to(tl.int32), 0) == 0:
            first_level = 0
        for level in range(first_level, LEVELS):
            F = tl.exp2(sums(spans, level, coarse, fine, C, SPLIT, PRECISION))
            meet = pairs(level, C) & ((good == 0)[:, None] | (level >= BLOCK_LEVEL))
            Z = (keys.to(tl.float32) * F).to(dtype)
            Y = (queries.to(tl.float32) * F).to(dtype)
            scores += tl.where(meet, tl.dot(Y, tl.trans(Z), input_precision=PRECISION), 0.0)
            if CORRECTS:
                A += tl.where(meet, tl.dot(Z, tl.trans(Z), input_precision=PRECISION), 0.0)
    scores = tl.where(i[:, None] >= i[None, :], scores * norm_q[:, None] * norm_k[None, :], 0.0)
    store_tile(P + at * C * C, C, scores, C, C, C, C, True, first_row)
    rate = tl.where(i < rows, 1.0, 0.0)
    if CORRECTS:
        rate = tl.load(beta + (start + i) * HV + head, mask=i < rows, other=0.0).to(tl.float32)
        if RAW_BETA:
            rate = tl.where(i < rows, beta_scale * tl.sigmoid(rate), 0.0)
        A = tl.where(i[:, None] > i[None, :], A * norm_k[:, None] * norm_k[None, :], 0.0)
        if KEEP:
            store_tile(M + at * C * C, C, A, C, C, C, C, True, first_row)
        A = A * rate[:, None]
        if PRODUCTS == "fp16":
            first_wild = first_wild_row(rate, squares * norm_k * norm_k, C)
            tl.store(wild + at, first_wild)
            A = tl.where(i[:, None] < first_wild, A, 0.0)
        store_tile(T + at * C * C, C, invert(A, C, PRODUCTS), C, C, C, C, True, first_row)
    tl.store(factors + at * (BK + C) + BK + i, rate)


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
    CORRECTS: tl.constexpr, RAW_BETA: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R, dP = tril(dO R^T), dM = -beta tril(X R^T, -1), dbeta and dV = beta X of one chunk and head; k is Kr.

    dv holds X on entry. Rules that only accumulate need dP alone; their R is V.
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
        own = tl.sum(tl.where(i[:, None] == i[None, :], XR, 0.0), 1)
        scores = load_tile(M + at * C * C, C, C, C, C, C, True).to(tl.float32)
        unscaled = XE - tl.sum(tl.where(strictly_lower, XR * scores, 0.0), 1)
        small = is_small(beta, dtype)
        rate = tl.where(small, unscaled, own / tl.where(small, 1.0, beta))
        if RAW_BETA:
            rate = rate * beta * (1.0 - beta / beta_scale)
        tl.store(dbeta + (start + i) * HV + head, rate.to(dbeta.dtype.element_ty), mask=i < rows)


@triton.jit(do_not_specialize=["t"])
def channel_state_gradients(
    q, k, log_decay, A_log, dt_bias, states, dstates, doutput, dv, residuals, dq, dk, dG, wild, spans,
    bounds, first_slots, slot_texts, t, stride_q, stride_k, stride_r, head_q, head_k, head_r, scale,
    lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dG (float32, `token hv k`) of BX channels of a chunk and value head, through the state.

    These are their parts as readers and writers of the state. dq and dk are `token hv k` too; with NORMALIZE they are
    the gradients of the unit vectors times the inverse norms, which gather completes.
    """
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
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
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
        from_k = -from_k * read * norm_k[:, None]
        total += keys.to(tl.float32) * from_k
    write = tl.exp2(sums(spans, BEHIND, coarse, fine, C, SPLIT, PRECISION))
    from_write = from_write * write * norm_k[:, None]
    written = tl.where((i < rows - 1)[:, None], keys.to(tl.float32) * from_write, 0.0)
    dlast += tl.sum(written, 0)
    total += tl.where((i == rows - 1)[:, None], dlast[None, :], -written)
    row = (start * HV + head) * K + first_x
    store_tile(dG + row, HV * K, total, rows, left, C, BX, EVEN_X)
    store_tile(dq + row, HV * K, from_q, rows, left, C, BX, EVEN_X)
    store_tile(dk + row, HV * K, from_write + from_k, rows, left, C, BX, EVEN_X)


@triton.jit(do_not_specialize=["t"])
def channel_gradients(
    q, k, log_decay, A_log, dt_bias, dP, dM, dq, dk, dG, dlog_decay, dA_log, ddt_bias, wild, spans,
    bounds, first_slots, slot_texts, t, stride_q, stride_k, head_q, head_k, scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Add the gradients through P and M to dq, dk and dG of channel_state_gradients; then compute dlog_decay from dG.

    A pair of a reader and a writer adds the same amount to dG of the reader that it subtracts from that of the writer,
    and the two cancel in dlog_decay of the tokens before both. So both sides have the same rounded factors, Y and Z. If
    one side had the factors before rounding, 2^-9 of each pair would remain, and would add up in dA_log and ddt_bias.

    dA_log `slot hv blocks` and ddt_bias `slot hv K` are this chunk's parts.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first_x = tl.program_id(2) * BX
    if AGAIN:
        found = tl.load(wild + (slot.to(tl.int64) * HV + head) * tl.num_programs(2) + tl.program_id(2))
        if found == 0:
            return
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    dtype = q.dtype.element_ty
    EVEN_X: tl.constexpr = K % BX == 0
    left = K - first_x
    q += start * stride_q + head // R * head_q
    k += start * stride_k + head // R * head_k
    row = (start * HV + head) * K + first_x
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    queries = load_tile(q + first_x, stride_q, rows, left, C, BX, EVEN_X)
    keys = load_tile(k + first_x, stride_k, rows, left, C, BX, EVEN_X)
    queries = queries.to(tl.float32) * norm_q[:, None]
    keys = keys.to(tl.float32) * norm_k[:, None]
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
    dA = dscores
    if CORRECTS:
        dA = load_tile(dM + at * C * C, C, C, C, C, C, True)
    inside, good = within_block(spans, coarse, fine, C, SPLIT, PRECISION, dtype)
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
        Y = (keys * F).to(dtype)
        dY = tl.dot(d, Z, input_precision=PRECISION)
        dkeys += dY * F
        total += Y.to(tl.float32) * dY
        dZ = tl.dot(tl.trans(d), Y, dZ, input_precision=PRECISION)
    dkeys += dZ * inverse
    total -= Z.to(tl.float32) * dZ
    first_level = BLOCK_LEVEL
    if tl.min(good.to(tl.int32), 0) == 0:
        first_level = 0
    for level in range(first_level, LEVELS):
        F = tl.exp2(sums(spans, level, coarse, fine, C, SPLIT, PRECISION))
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
            dZ = tl.dot(d, Z, dZ, input_precision=PRECISION)
            dZ = tl.dot(tl.trans(d), Z, dZ, input_precision=PRECISION)
        dkeys += dZ * F
        reads = (((i >> level) & 1) == 1)[:, None]
        total += tl.where(reads, 1.0, -1.0) * Z.to(tl.float32) * dZ
    dqueries = dqueries * norm_q[:, None] + load_tile(dq + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
    dkeys = dkeys * norm_k[:, None] + load_tile(dk + row, HV * K, rows, left, C, BX, EVEN_X).to(tl.float32)
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
    store_tile(dlog_decay + row, HV * K, dgiven, rows, left, C, BX, EVEN_X)
    store_tile(dq + row, HV * K, dqueries, rows, left, C, BX, EVEN_X)
    store_tile(dk + row, HV * K, dkeys, rows, left, C, BX, EVEN_X)
