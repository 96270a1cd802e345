"""The scores of a chunk with decay per key channel; their gradients are in channel_gradients.py.

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

from lineate.kernels.portable.gates import LOG2E, allowed, decay_of_gate, gate_gradients
from lineate.kernels.portable.layout import chunk_bounds, link, load_tile, store_tile
from lineate.kernels.portable.scores import load_norms
from lineate.kernels.portable.solve import first_wild_row, invert

BLOCK = tl.constexpr(16)
LEVELS = tl.constexpr(6)  # pairs of blocks of 1, 2, 4, 8, 16, 32 tokens, for chunks of 64
BLOCK_LEVEL = tl.constexpr(4)  # from this level on, the pairs are of whole blocks of 16
BF16_LIMIT = tl.constexpr(100.0)  # the limit that within_block uses
MOST = tl.constexpr(16)  # chunks of which a program of a second launch looks for the wild ones


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
def load_probes(
    probe, keys, start, rows, head, HV: tl.constexpr, first, K: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """Return channels first.. of what is compared with the memory, e without the norms of keys, [C, BX] in float32.

    COMPARED: "key", then e = k; "erase", then e = probe * k; "probe", then k is the direction that is erased; "second",
    the same probe with the key that is written.
    """
    probes = keys.to(tl.float32)
    if COMPARED != "key":
        given = load_tile(probe + (start * HV + head) * K + first, HV * K, rows, K - first, C, BX, K % BX == 0)
        if COMPARED == "erase":
            probes = given.to(tl.float32) * probes
        else:
            probes = given.to(tl.float32)
    return probes


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


@triton.jit
def _chunk_scores(
    q, k, probe, log_decay, beta, A_log, dt_bias, Qr, Kr, Kw, P, M, T, factors, wild, spans,
    slot, head, start, rows, first_row, stride_q, stride_k, head_q, head_k, scale, beta_scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr,
    BIAS: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    PRODUCTS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Compute the scores of one chunk and value head, from its row first_row on."""
    at = slot.to(tl.int64) * HV + head
    q += start * stride_q + head // R * head_q
    KR: tl.constexpr = 1 if COMPARED == "probe" else R
    k += start * stride_k + head // KR * head_k
    EVEN_X: tl.constexpr = K % BX == 0
    dtype = q.dtype.element_ty
    i = tl.arange(0, C)
    norm_q, norm_k = load_norms(q, k, stride_q, stride_k, rows, scale, K, BK, C, NORMALIZE)
    if COMPARED == "probe":
        norm_k = tl.zeros((C,), tl.float32) + 1.0
    norm_e = norm_k
    if COMPARED == "second":
        norm_e = tl.zeros((C,), tl.float32) + 1.0
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
        if COMPARED != "second":
            tl.store(factors + at * (BK + C) + x, through_chunk(decay, SPLIT))
        coarse, fine = split(decay, SPLIT)
        row = (start * HV + head) * K + first
        read = tl.exp2(sums(spans, UP_TO, coarse, fine, C, SPLIT, PRECISION))
        if COMPARED != "second":
            reader = queries.to(tl.float32) * read * norm_q[:, None]
            store_tile(Qr + row, HV * K, reader, rows, left, C, BX, EVEN_X, first_row)
        if CORRECTS:
            probes = load_probes(probe, keys, start, rows, head, HV, first, K, BX, C, COMPARED)
            if COMPARED != "second":
                reader = probes * read * norm_e[:, None]
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
            Y = (probes * F).to(dtype)
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
                Y = Z
                if COMPARED != "key":
                    Y = (probes * F).to(dtype)
                A += tl.where(meet, tl.dot(Y, tl.trans(Z), input_precision=PRECISION), 0.0)
    scores = tl.where(i[:, None] >= i[None, :], scores * norm_q[:, None] * norm_k[None, :], 0.0)
    store_tile(P + at * C * C, C, scores, C, C, C, C, True, first_row)
    rate = tl.where(i < rows, 1.0, 0.0)
    if CORRECTS:
        if COMPARED == "key":
            rate = tl.load(beta + (start + i) * HV + head, mask=i < rows, other=0.0).to(tl.float32)
            if RAW_BETA:
                rate = tl.where(i < rows, beta_scale * tl.sigmoid(rate), 0.0)
        A = tl.where(i[:, None] > i[None, :], A * norm_e[:, None] * norm_k[None, :], 0.0)
        if KEEP:
            store_tile(M + at * C * C, C, A, C, C, C, C, True, first_row)
    if CORRECTS and COMPARED != "second":
        A = A * rate[:, None]
        if PRODUCTS == "fp16":
            first_wild = first_wild_row(rate, squares * norm_k * norm_k, C)
            tl.store(wild + at, first_wild)
            A = tl.where(i[:, None] < first_wild, A, 0.0)
        store_tile(T + at * C * C, C, invert(A, C, PRODUCTS), C, C, C, C, True, first_row)
    if COMPARED != "second":
        tl.store(factors + at * (BK + C) + BK + i, rate)


@triton.jit(do_not_specialize=["t", "slots", "group"])
def channel_scores(
    q, k, probe, log_decay, beta, A_log, dt_bias, Qr, Kr, Kw, P, M, T, factors, wild, spans,
    bounds, first_slots, slot_texts, t, slots, group, stride_q, stride_k, head_q, head_k, scale, beta_scale,
    lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr,
    BIAS: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    PRODUCTS: tl.constexpr, COMPARED: tl.constexpr, AGAIN: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Compute the scores, BX channels at a time; a program takes a chunk and value head.

    PRODUCTS and wild are as in head_scores. After a first launch, of this kernel or of hopper/channel.py, a second one
    (AGAIN) recomputes Qr, Kr, P, M and T from the first wild row of each chunk on. It also recomputes Kw of all rows
    and e^{G_c}, since these depend on the decay of the wild rows. Its programs take `group` chunks of a value head
    each, at most MOST, few of which have such rows.

    With a probe e (see load_probes), Kr and M have e in place of k as the reader, and beta is 1. A "second" launch
    stores Kw, P and M of a second writer.
    """
    link(LINK)
    head = tl.program_id(1).to(tl.int64)
    if AGAIN:
        first = tl.program_id(0) * group
        last = tl.minimum(first + group, slots)
        among = first + tl.arange(0, MOST)
        firsts = tl.load(wild + among.to(tl.int64) * HV + head, mask=among < last, other=C)
        if tl.min(firsts, 0) == C:
            return
        for n in range(0, last - first):
            slot = first + n
            first_row = tl.load(wild + slot.to(tl.int64) * HV + head)
            if first_row < C:
                start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
                _chunk_scores(
                    q, k, probe, log_decay, beta, A_log, dt_bias, Qr, Kr, Kw, P, M, T, factors, wild, spans,
                    slot, head, start, rows, first_row, stride_q, stride_k, head_q, head_k, scale, beta_scale,
                    lower_bound, HV, R, K, BK, BX, C, CORRECTS, NORMALIZE, RAW, RAW_BETA, BIAS, KEEP, SPLIT, PRECISION,
                    PRODUCTS, COMPARED,
                )  # fmt: skip
    else:
        slot = tl.program_id(0)
        start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
        _chunk_scores(
            q, k, probe, log_decay, beta, A_log, dt_bias, Qr, Kr, Kw, P, M, T, factors, wild, spans,
            slot, head, start, rows, 0, stride_q, stride_k, head_q, head_k, scale, beta_scale, lower_bound,
            HV, R, K, BK, BX, C, CORRECTS, NORMALIZE, RAW, RAW_BETA, BIAS, KEEP, SPLIT, PRECISION, PRODUCTS, COMPARED,
        )  # fmt: skip
