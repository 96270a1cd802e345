"""The walk from chunk to chunk that updates the state and reads the output from it, and the walk backwards.

    E = V - Kr S      R = T (beta E)      (rule only accumulates: R = V)
    O = Qr S + P R    S <- e^{G_c} S + Kw^T R

The state is held transposed, S [BV, K], with value columns as rows. Every product then has its left operand in
registers (S, E, R) and reads its right one in memory order (k, P, T), so only loaded tiles go through shared
memory. A program walks one segment (all of a sequence, if it is not cut) of one value head for BV of its value columns.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.gates import BETA, FACTORS, LAST, READ_K, READ_Q, WRITE
from lineate.kernels.portable.layout import find_segment, load_tile, store_tile, text_bounds


@triton.jit
def load_state(base, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Load columns first.. of a state [K, V], transposed: [BV, BK]."""
    i = first + tl.arange(0, BV)
    j = tl.arange(0, BK)
    return tl.load(base + i[:, None] + j[None, :] * V, mask=(i < V)[:, None] & (j < K)[None, :], other=0.0)


@triton.jit
def store_state(base, S, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Store a state as load_state reads it."""
    i = first + tl.arange(0, BV)
    j = tl.arange(0, BK)
    tl.store(base + i[:, None] + j[None, :] * V, S, mask=(i < V)[:, None] & (j < K)[None, :])


@triton.jit
def _own_part(HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MAP: tl.constexpr):
    """Return this program's part: first value column, pair (an item of layout.find_segment, and a head), head."""
    COLUMNS: tl.constexpr = ((V + K if MAP else V) + BV - 1) // BV
    pair = tl.program_id(0) // COLUMNS
    return tl.program_id(0) % COLUMNS * BV, pair, (pair % HV).to(tl.int64)


@triton.jit
def _takes_part(text, segment, first, V: tl.constexpr, MAP: tl.constexpr):
    """Whether there is such a segment and, for a map, whether the columns from `first` on are needed."""
    needed = text >= 0
    if MAP:
        needed = needed & ((segment > 0) | (first < V))
    return needed


@triton.jit
def _enter(
    outer, inner, text, head, segment, cut, first,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Return columns first.. of the initial state of a segment, transposed: [BV, BK].

    That is the outer state of the sequence for its first segment, and the inner one at the cut before it for others. A
    map starts with an empty state and the identity after it, but that of the first segment with the outer state.
    """
    own = text.to(tl.int64) * HV + head
    if MAP:
        S = _identity_behind(first, K, V, BK, BV)
        if segment == 0:
            S += load_state(outer + own * K * V, first, K, V, BK, BV)
    elif inner is None:
        S = load_state(outer + own * K * V, first, K, V, BK, BV)
    else:
        base = outer + own * K * V
        if segment > 0:
            base = inner + ((cut + segment - 1).to(tl.int64) * HV + head) * K * V
        S = load_state(base, first, K, V, BK, BV)
    return S


@triton.jit
def _identity_behind(first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return columns first.. of an empty state with the identity after its V columns, transposed: [BV, BK]."""
    x = tl.arange(0, BK)
    identity = (first - V + tl.arange(0, BV))[:, None] == x[None, :]
    return tl.where(identity & (x < K)[None, :], 1.0, 0.0)


@triton.jit
def _load_factors(vector, there, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """Load e^{G_c}, [BK] or [1], and the factors of q, [C]."""
    i = tl.arange(0, C)
    if CHANNEL:
        x = tl.arange(0, BK)
        last = tl.load(vector + x, mask=there & (x < K), other=0.0)
        read_q = tl.zeros((C,), tl.float32)
    else:
        last = tl.load(vector + LAST * C + tl.arange(0, 1), mask=there, other=0.0)
        read_q = tl.load(vector + READ_Q * C + i, mask=there, other=0.0)
    return last, read_q


@triton.jit(do_not_specialize=["t", "lasts", "segments"])
def forward_state(
    q, k, w, v, P, T, factors, second_w, second_P, second_M, outer, inner, output, final, states,
    bounds, first_slots, first_cuts, cut_texts, t, lasts, segments,
    stride_q, stride_k, stride_v, head_q, head_k, head_v,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, CHANNEL: tl.constexpr, CORRECTS: tl.constexpr, KEEP: tl.constexpr, MAP: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk from the first chunk to the last. q, k: the caller's with factors `slot hv FACTORS c` (decay per head).

    With CHANNEL, q, k, w are Qr, Kr, Kw, and factors are e^{G_c}, beta. outer `text hv k v`: the state before each
    sequence; inner `cut hv k v`: the state at each cut, None without cuts; final `text hv k v`. KEEP: also store the
    state entering each chunk, `slot hv v k`. MAP: there is no output, and final `cut hv k (v + k)` is the affine map of
    the segment before each cut: its result for an empty state, then for the identity without values. The first segment
    of a sequence has no map but its result for the outer state.

    With a second writer Kw with scores P_k and M_k, the values U are its own: E = -(Kr S + M_k U), and O and the next
    state also get P_k U and Kw^T U.
    """
    first, pair, head = _own_part(HV, K, V, BV, MAP)
    text, segment, segments, cut = find_segment(pair // HV, first_cuts, cut_texts, lasts, segments, PACKED)
    if not _takes_part(text, segment, first, V, MAP):
        return
    start, length, slot = text_bounds(text, bounds, first_slots, t, C, PACKED)
    begin = segment * tl.cdiv(length, C) // segments
    end = (segment + 1) * tl.cdiv(length, C) // segments
    columns = V - first  # the number of columns from `first` on
    S = _enter(outer, inner, text, head, segment, cut, first, HV, K, V, BK, BV, MAP)
    i = tl.arange(0, C)
    key_head = head if CHANNEL else head // R
    dtype = v.dtype.element_ty
    vectors = BK + C if CHANNEL else FACTORS * C  # numbers of `factors` per chunk and head
    # The compiler does not prefetch the factors, so they are loaded here one chunk ahead.
    last, read_q = _load_factors(factors + ((slot + begin) * HV + head) * vectors, begin < end, C, K, BK, CHANNEL)
    for n in range(begin, end):
        rows = length - n * C
        at = (slot + n) * HV + head
        token = start + n * C
        vector = factors + at * vectors
        keys = load_tile(k + token * stride_k + key_head * head_k, stride_k, rows, K, C, BK, K == BK)
        values = load_tile(v + token * stride_v + head * head_v + first, stride_v, rows, columns, C, BV, EVEN)
        if KEEP:
            store_tile(states + at * K * V + first * K, K, S, columns, K, BV, BK, K == BK and EVEN)
        held = S.to(dtype)
        Vt = tl.trans(values).to(tl.float32)
        if CORRECTS:
            inverse = load_tile(T + at * C * C, C, C, C, C, C, True)
            beta = tl.load(vector + (BK if CHANNEL else BETA * C) + i)
            KS = tl.dot(held, tl.trans(keys), input_precision=PRECISION)
            if not CHANNEL:
                KS = KS * tl.load(vector + READ_K * C + i)[None, :]
            if second_w is None:
                E = ((Vt - KS) * beta[None, :]).to(dtype)
            else:
                Ut = tl.trans(values)
                scores = load_tile(second_M + at * C * C, C, C, C, C, C, True)
                E = (-tl.dot(Ut, tl.trans(scores), KS, input_precision=PRECISION)).to(dtype)
            Rt = tl.dot(E, tl.trans(inverse), input_precision=PRECISION)
        else:
            Rt = Vt
        if not MAP:
            queries = load_tile(q + token * stride_q + key_head * head_q, stride_q, rows, K, C, BK, K == BK)
            scores = load_tile(P + at * C * C, C, C, C, C, C, True)
            O = tl.dot(held, tl.trans(queries), input_precision=PRECISION)
            if not CHANNEL:
                O = O * read_q[None, :]
            O = tl.dot(Rt.to(dtype), tl.trans(scores), O, input_precision=PRECISION)
        if second_w is not None and not MAP:
            scores = load_tile(second_P + at * C * C, C, C, C, C, C, True)
            O = tl.dot(Ut, tl.trans(scores), O, input_precision=PRECISION)
        S = S * last[None, :]
        if CHANNEL:
            writers = load_tile(w + token * stride_k + key_head * head_k, stride_k, rows, K, C, BK, K == BK)
            S = tl.dot(Rt.to(dtype), writers, S, input_precision=PRECISION)
            if second_w is not None:
                at_second = second_w + token * stride_k + key_head * head_k
                writers = load_tile(at_second, stride_k, rows, K, C, BK, K == BK)
                S = tl.dot(Ut, writers, S, input_precision=PRECISION)
        else:
            Rt = Rt * tl.load(vector + WRITE * C + i)[None, :]
            S = tl.dot(Rt.to(dtype), keys, S, input_precision=PRECISION)
        last, read_q = _load_factors(vector + HV * vectors, n + 1 < end, C, K, BK, CHANNEL)
        if not MAP:
            written = output + (token * HV + head) * V + first
            store_tile(written, HV * V, tl.trans(O), rows, columns, C, BV, EVEN)
    if MAP:
        store_state(final + pair.to(tl.int64) * K * (V + K), S, first, K, V + K, BK, BV)
    elif pair < lasts * HV:
        store_state(final + pair.to(tl.int64) * K * V, S, first, K, V, BK, BV)


@triton.jit(do_not_specialize=["t", "lasts", "segments"])
def backward_state(
    q, k, w, P, T, factors, outer, inner, doutput, dvalues, dstart, dstates,
    bounds, first_slots, first_cuts, cut_texts, t, lasts, segments, stride_q, stride_k, head_q, head_k,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, CHANNEL: tl.constexpr, CORRECTS: tl.constexpr, MAP: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk from the last chunk to the first, for dS [BV, K].

        dR = P^T dO + Kw dS      X = T^T dR      dE = beta X      (rule only accumulates: dV = dR)
        dS <- e^{G_c} dS + Qr^T dO - Kr^T dE

    outer, inner: dS after each sequence and at each cut; dstart: dS before each sequence. dvalues gets X (dV if the
    rule only accumulates), dstates `slot hv v k` the dS that left each chunk. MAP is as in forward_state, into dstart.
    Segments and cuts are numbered from the end of a sequence.
    """
    first, pair, head = _own_part(HV, K, V, BV, MAP)
    text, segment, segments, cut = find_segment(pair // HV, first_cuts, cut_texts, lasts, segments, PACKED)
    if not _takes_part(text, segment, first, V, MAP):
        return
    start, length, slot = text_bounds(text, bounds, first_slots, t, C, PACKED)
    begin = (segments - 1 - segment) * tl.cdiv(length, C) // segments
    end = (segments - segment) * tl.cdiv(length, C) // segments
    columns = V - first
    dS = _enter(outer, inner, text, head, segment, cut, first, HV, K, V, BK, BV, MAP)
    i = tl.arange(0, C)
    key_head = head if CHANNEL else head // R
    dtype = doutput.dtype.element_ty
    vectors = BK + C if CHANNEL else FACTORS * C
    last, _ = _load_factors(factors + ((slot + end - 1) * HV + head) * vectors, begin < end, C, K, BK, CHANNEL)
    for step in range(begin, end):
        n = end - 1 - (step - begin)
        rows = length - n * C
        at = (slot + n) * HV + head
        token = start + n * C
        vector = factors + at * vectors
        doutputs = load_tile(doutput + (token * HV + head) * V + first, HV * V, rows, columns, C, BV, EVEN)
        keys = load_tile(k + token * stride_k + key_head * head_k, stride_k, rows, K, C, BK, K == BK)
        scores = load_tile(P + at * C * C, C, C, C, C, C, True)
        if not MAP:
            store_tile(dstates + at * K * V + first * K, K, dS, columns, K, BV, BK, K == BK and EVEN)
        dOt = tl.trans(doutputs)
        if CHANNEL:
            writers = load_tile(w + token * stride_k + key_head * head_k, stride_k, rows, K, C, BK, K == BK)
            dR = tl.dot(dS.to(dtype), tl.trans(writers), input_precision=PRECISION)
        else:
            dR = tl.dot(dS.to(dtype), tl.trans(keys), input_precision=PRECISION)
            dR = dR * tl.load(vector + WRITE * C + i)[None, :]
        dR = tl.dot(dOt, scores, dR, input_precision=PRECISION)
        queries = load_tile(q + token * stride_q + key_head * head_q, stride_q, rows, K, C, BK, K == BK)
        dS = dS * last[None, :]
        if CHANNEL:
            dS = tl.dot(dOt, queries, dS, input_precision=PRECISION)
        else:
            read_q = tl.load(vector + READ_Q * C + i)
            scaled = (dOt.to(tl.float32) * read_q[None, :]).to(dtype)
            dS = tl.dot(scaled, queries, dS, input_precision=PRECISION)
        X = dR
        if CORRECTS:
            inverse = load_tile(T + at * C * C, C, C, C, C, C, True)
            beta = tl.load(vector + (BK if CHANNEL else BETA * C) + i)
            X = tl.dot(dR.to(dtype), inverse, input_precision=PRECISION)
            dE = -X * beta[None, :]
            if not CHANNEL:
                dE = dE * tl.load(vector + READ_K * C + i)[None, :]
            dS = tl.dot(dE.to(dtype), keys, dS, input_precision=PRECISION)
        last, _ = _load_factors(vector - HV * vectors, n > begin, C, K, BK, CHANNEL)
        if not MAP:
            store_tile(dvalues + (token * HV + head) * V + first, HV * V, tl.trans(X), rows, columns, C, BV, EVEN)
    if MAP:
        store_state(dstart + pair.to(tl.int64) * K * (V + K), dS, first, K, V + K, BK, BV)
    elif pair < lasts * HV:
        store_state(dstart + pair.to(tl.int64) * K * V, dS, first, K, V, BK, BV)
