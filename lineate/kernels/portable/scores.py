"""The parts of a chunk that do not depend on the state: its scores and its triangular inverse.

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    T = (I + beta M)^{-1}

All chunks are computed at once, one program per chunk and head. q and k are the caller's: `scale` and the norms of
`normalize_qk` are folded into P, M and the factors of readers and writers. No exponent is positive, so resets (-50,
-inf) are exact.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.gates import BETA, COARSE, FACTORS, FINE, READ_K, READ_Q, WRITE
from lineate.kernels.portable.layout import chunk_bounds, load_tile, store_tile
from lineate.kernels.portable.solve import first_wild_row, invert


@triton.jit
def between(vector, C: tl.constexpr):
    """Return D_ij = e^{G_i - G_j} for j <= i, else 0: [C, C], from the factors of one chunk and head."""
    i = tl.arange(0, C)
    coarse = tl.load(vector + COARSE * C + i)[:, None] - tl.load(vector + COARSE * C + i)[None, :]
    fine = tl.load(vector + FINE * C + i)[:, None] - tl.load(vector + FINE * C + i)[None, :]
    return tl.exp(tl.where(i[:, None] >= i[None, :], coarse + fine, float("-inf")))


@triton.jit
def inverse_norms(x):
    """Return 1 / |x_i| for the rows of x [C, K]."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def load_norms(
    q, k, stride_q, stride_k, rows, scale, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr
):  # fmt: skip
    """Return the factors of q_i and k_i of a chunk and head: scale, and the inverse norms if NORMALIZE; [C] each."""
    norm_q = tl.zeros((C,), tl.float32) + scale
    norm_k = tl.zeros((C,), tl.float32) + 1.0
    if NORMALIZE:
        norm_q = norm_q * inverse_norms(load_tile(q, stride_q, rows, K, C, BK, K == BK))
        norm_k = inverse_norms(load_tile(k, stride_k, rows, K, C, BK, K == BK))
    return norm_q, norm_k


@triton.jit(do_not_specialize=["t"])
def head_scores(
    q, k, P, T, factors, wild, bounds, first_slots, slot_texts, t, stride_q, stride_k, head_q, head_k, h, scale,
    R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    GATED: tl.constexpr, CORRECTS: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Store P and T with decay per head or none. A program takes a chunk and a key head, with its R value heads.

    PRODUCTS are those of the inverse. "fp16" also stores in wild `slot hv` the first wild row of each system (C if none
    is), and computes T as if beta were 0 from that row on; invert_wild then stores those rows.
    """
    slot = tl.program_id(0)
    key_head = tl.program_id(1).to(tl.int64)
    if CORRECTS and PRODUCTS == "fp16":
        wild += slot.to(tl.int64) * h * R + key_head * R
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    queries = load_tile(q + start * stride_q + key_head * head_q, stride_q, rows, K, C, BK, K == BK)
    keys = load_tile(k + start * stride_k + key_head * head_k, stride_k, rows, K, C, BK, K == BK)
    QK = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    KK = QK
    if CORRECTS:
        KK = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    if NORMALIZE:
        norm_q, norm_k = inverse_norms(queries), inverse_norms(keys)
        QK = QK * norm_q[:, None] * norm_k[None, :]
        KK = KK * norm_k[:, None] * norm_k[None, :]
    i = tl.arange(0, C)
    squares = tl.sum(tl.where(i[:, None] == i[None, :], KK, 0.0), 1)
    hv = h * R
    for r in range(R):
        at = slot.to(tl.int64) * hv + key_head * R + r
        vector = factors + at * (FACTORS * C)
        D = between(vector, C) if GATED else tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
        store_tile(P + at * C * C, C, QK * D, C, C, C, C, True)
        if CORRECTS:
            beta = tl.load(vector + BETA * C + i)
            A = tl.where(i[:, None] > i[None, :], KK * D * beta[:, None], 0.0)
            if PRODUCTS == "fp16":
                first = first_wild_row(beta, squares, C)
                tl.store(wild + r, first)
                A = tl.where(i[:, None] < first, A, 0.0)
            store_tile(T + at * C * C, C, invert(A, C, PRODUCTS), C, C, C, C, True)
        if NORMALIZE:
            tl.store(vector + READ_Q * C + i, tl.load(vector + READ_Q * C + i) * norm_q)
            tl.store(vector + READ_K * C + i, tl.load(vector + READ_K * C + i) * norm_k)
            tl.store(vector + WRITE * C + i, tl.load(vector + WRITE * C + i) * norm_k)


@triton.jit(do_not_specialize=["t", "slots"])
def invert_wild(
    k, T, factors, wild, bounds, first_slots, slot_texts, t, slots, stride_k, head_k,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the rows of T from the first wild one on, in float32. A program takes GROUP chunks of a value head."""
    group = tl.program_id(0) * GROUP
    head = tl.program_id(1).to(tl.int64)
    among = group + tl.arange(0, GROUP)
    firsts = tl.load(wild + among.to(tl.int64) * HV + head, mask=among < slots, other=C)
    if tl.min(firsts, 0) == C:
        return
    i = tl.arange(0, C)
    for n in range(0, tl.minimum(GROUP, slots - group)):
        slot = group + n
        at = slot.to(tl.int64) * HV + head
        first = tl.load(wild + at)
        if first < C:
            start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
            keys = load_tile(k + start * stride_k + head // R * head_k, stride_k, rows, K, C, BK, K == BK)
            A = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
            if NORMALIZE:
                norm_k = inverse_norms(keys)
                A = A * norm_k[:, None] * norm_k[None, :]
            vector = factors + at * (FACTORS * C)
            if GATED:
                A = A * between(vector, C)
            beta = tl.load(vector + BETA * C + i)
            A = tl.where(i[:, None] > i[None, :], A * beta[:, None], 0.0)
            store_tile(T + at * C * C, C, invert(A, C, "tf32x3"), C, C, C, C, True, first)
