"""The head_residuals, head_gradients and gather of portable/backward.py in one kernel for Hopper (sm_90), in Gluon.

    E = v - (k S) read_k      R = T (beta E)      dP = tril(dO R^T) D      XR = tril(X R^T, -1) D      dV = beta X
    dq = (dO S) read_q + dP k
    dk = (R dS) write - (X S) beta read_k + dP^T q + dM k + dM^T k         dM = -beta XR

One program runs on each multiprocessor and takes one chunk and key head after another, and in each the R value heads
one after another (a unit each). Its warps are three groups of four, which wait for each other only where necessary:

    q side    k S  [E]  T E  [R]  dO S  dO R^T  [dP]  q k^T  dP k                    dq, summed over R in registers
    k side    X S  X R^T  [dM]  k k^T  R dS  dM k  dM^T k  dP^T q                    dk likewise; dbeta
    supply    fetches each tile of the next unit as soon as its last reader is done; dV and <S, dS>

Only R and dP pass from one side to the other, through shared memory.
"""
# ruff: noqa: RUF059  (every group unpacks the same tuples and uses some of them)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lineate.kernels.hopper.gradient_sides import (
    DQK_READY,
    KEYS_READY,
    PARTS,
    R_FREE,
    R_READY,
    S_READ,
    SIGNALS,
    X_READ,
    begin_items,
    item_chunk,
    k_side,
    q_side,
    signal,
)
from lineate.kernels.hopper.parts import barrier, expect, fetch, make_ring, trim
from lineate.kernels.portable.gates import BETA, FACTORS, LAST


@gluon.jit
def _give_keys(kept_k, kept_q, ready_k, ready_q, signals, stage, phase, rows):
    """Wait for q and k of an item, set the rows below the sequence's last one to 0, and signal KEYS_READY."""
    mbarrier.wait(ready_k.index(stage), phase)
    mbarrier.wait(ready_q.index(stage), phase)
    if rows < 64:
        trim(kept_k, ready_k, stage, phase, rows)
        trim(kept_q, ready_q, stage, phase, rows)
        fence_async_shared()
    signal(signals, KEYS_READY + stage)


@gluon.jit
def _help(
    kept, ready, sums, at_dv, numbers, unit, at, token, rows, head, HV: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Compute dV = beta X and <S, dS> of a unit."""
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    V: gl.constexpr = 128
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    line = gl.arange(0, 16, gl.SliceLayout(1, lines))
    place = gl.arange(0, 128, gl.SliceLayout(0, lines))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 64, vector)
    turn = unit % 2
    mbarrier.wait(ready_factors.index(turn), (unit // 2) % 2)
    mbarrier.wait(ready_X.index(0), turn)
    rates = kept_factors._reinterpret(gl.float32, [2, FACTORS * 64], flat).index(turn)
    at_rows = at_dv + token.to(gl.int64) * (HV * V) + head * V
    for x in gl.static_range(4):
        part = kept_X.index(0).slice(x * 16, 16, 0).load(lines).to(gl.float32)
        part = part * rates.slice(BETA * 64 + x * 16, 16, 0).load(gl.SliceLayout(1, lines))[:, None]
        to = at_rows + (line + x * 16)[:, None] * (HV * V) + place[None, :]
        gl.store(to, part.to(kept_X.dtype), mask=line[:, None] < rows - x * 16)
    mbarrier.wait(ready_S.index(0), turn)
    mbarrier.wait(ready_dS.index(0), turn)
    if GATED:
        SdS = gl.zeros([16, 128], gl.float32, lines)
        for x in gl.static_range(8):
            each = kept_S.index(0).slice(x * 16, 16, 0).load(lines).to(gl.float32)
            SdS = SdS + each * kept_dS.index(0).slice(x * 16, 16, 0).load(lines).to(gl.float32)
        last = gl.load(numbers + (at.to(gl.int64) * FACTORS + LAST) * 64)
        dlast = gl.sum(gl.reshape(SdS, [16 * 128]), 0) * last
        gl.store(sums + at.to(gl.int64) * (PARTS * 64) + 256 + i, gl.where(i == rows - 1, dlast, 0.0))
    barrier()


@gluon.jit
def _supply(
    tiles, kept, ready, signals, sums, at_dv, numbers, where, head_q, head_k, head_v, HV: gl.constexpr, R: gl.constexpr,
    GATED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Fetch all tiles, and compute dV and <S, dS> while they arrive."""
    states, dstates, doutput, dvalues, v, T, k, q, factors = tiles
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    H: gl.constexpr = HV // R
    V: gl.constexpr = 128
    item, step, count, slot, token, rows = begin_items(where, H, PACKED)
    key_head = item % H
    at = slot * HV + key_head * R
    some = count > 0
    expect(
        (k, states, doutput, v, factors, T, dvalues, q, dstates),
        (ready_k, ready_S, ready_dO, ready_v, ready_factors, ready_T, ready_X, ready_q, ready_dS),
        0,
        some,
    )
    fetch(
        (k, states, doutput, v, factors, T, dvalues, q, dstates),
        (kept_k, kept_S, kept_dO, kept_v, kept_factors, kept_T, kept_X, kept_q, kept_dS),
        (ready_k, ready_S, ready_dO, ready_v, ready_factors, ready_T, ready_X, ready_q, ready_dS),
        (
            (token, key_head * head_k), (at * V, 0), (token, key_head * R * V), (token, key_head * R * head_v),
            (at * FACTORS, 0), (at * 64, 0), (token, key_head * R * V), (token, key_head * head_q), (at * V, 0),
        ), 0, some,
    )  # fmt: skip
    if some:
        _give_keys(kept_k, kept_q, ready_k, ready_q, signals, 0, 0, rows)
    unit = 0
    for n in range(count):
        stage = n % 2
        key_head = item % H
        more_items = n + 1 < count
        next_key_head = (item + step) % H
        next_slot, next_token, next_rows = item_chunk(item + step, where, H, PACKED)
        for r in range(R):
            head = key_head * R + r
            turn = unit % 2
            last_r = r == R - 1
            more = more_items | (r < R - 1)
            to_head = gl.where(last_r, next_key_head * R, head + 1)
            to_at = gl.where(last_r, next_slot * HV + next_key_head * R, at + 1)
            to_token = gl.where(last_r, next_token, token)
            _help(kept, ready, sums, at_dv, numbers, unit, at, token, rows, head, HV, GATED)
            # Fetch the next unit's tiles.
            mbarrier.wait(signals.index(R_READY), turn)
            expect((v, T), (ready_v, ready_T), 0, more)
            fetch(
                (v, T), (kept_v, kept_T), (ready_v, ready_T), ((to_token, to_head * head_v), (to_at * 64, 0)), 0, more
            )
            mbarrier.wait(signals.index(S_READ), turn)
            first = (r == 0) & more_items
            expect((states,), (ready_S,), 0, more)
            expect((factors,), (ready_factors,), 1 - turn, more)
            expect((k, q), (ready_k, ready_q), 1 - stage, first)
            fetch((states,), (kept_S,), (ready_S,), ((to_at * V, 0),), 0, more)
            fetch((factors,), (kept_factors,), (ready_factors,), ((to_at * FACTORS, 0),), 1 - turn, more)
            fetch(
                (k, q),
                (kept_k, kept_q),
                (ready_k, ready_q),
                ((next_token, next_key_head * head_k), (next_token, next_key_head * head_q)),
                1 - stage,
                first,
            )
            mbarrier.wait(signals.index(X_READ), turn)
            expect((dvalues,), (ready_X,), 0, more)
            fetch((dvalues,), (kept_X,), (ready_X,), ((to_token, to_head * V),), 0, more)
            mbarrier.wait(signals.index(DQK_READY), turn)
            expect((doutput,), (ready_dO,), 0, more)
            fetch((doutput,), (kept_dO,), (ready_dO,), ((to_token, to_head * V),), 0, more)
            if last_r & more_items:
                _give_keys(kept_k, kept_q, ready_k, ready_q, signals, 1 - stage, ((n + 1) // 2) % 2, next_rows)
            mbarrier.wait(signals.index(R_FREE), turn)
            expect((dstates,), (ready_dS,), 0, more)
            fetch((dstates,), (kept_dS,), (ready_dS,), ((to_at * V, 0),), 0, more)
            unit = unit + 1
            at = to_at
        item = item + step
        token = next_token
        rows = next_rows


@gluon.jit(do_not_specialize=["t", "slots", "texts"])
def head_gradients(
    q, k, v, T, factors, states, dstates, doutput, dvalues,
    numbers, dbeta, sums, at_dv, at_dq, at_dk, bounds, first_slots, slot_texts, t, slots, texts,
    head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Fill dV, dq, dk and dbeta, and with decay the parts of dG in sums `slot hv PARTS c`, to be summed over PARTS.

    q ... dvalues: descriptors; numbers: the factors; at_dv, at_dq, at_dk: pointers. dvalues is X on entry, then dV.
    """
    gl.static_assert(K == 128)
    gl.static_assert(V == 128)
    gl.static_assert(num_warps == 4)
    dtype: gl.constexpr = k.dtype
    kept_S, ready_S = make_ring(states, 1)
    kept_dS, ready_dS = make_ring(dstates, 1)
    kept_q, ready_q = make_ring(q, 2)
    kept_k, ready_k = make_ring(k, 2)
    kept_v, ready_v = make_ring(v, 1)
    kept_dO, ready_dO = make_ring(doutput, 1)
    kept_X, ready_X = make_ring(dvalues, 1)
    kept_T, ready_T = make_ring(T, 1)
    kept_factors, ready_factors = make_ring(factors, 2)
    kept_R = gl.allocate_shared_memory(dtype, [1, 64, V], v.layout)
    kept_dQK = gl.allocate_shared_memory(dtype, [1, 64, 64], T.layout)
    kept_dKK = gl.allocate_shared_memory(dtype, [1, 64, 64], T.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    aside = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    signals = gl.allocate_shared_memory(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(SIGNALS):
        mbarrier.init(signals.index(x), count=2 if x == S_READ else 1)
    fence_async_shared()
    barrier()
    if PACKED:
        slots = gl.load(first_slots + texts).to(gl.int32)
    items = slots * (HV // R)
    kept = (kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK)
    ready = (ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors)
    tiles = (states, dstates, doutput, dvalues, v, T, k, q, factors)
    where = (bounds, first_slots, slot_texts, t, items)
    gl.warp_specialize(
        [
            (q_side, (kept, ready, signals, aside, sums, at_dq, where, scale, HV, R, GATED, NORMALIZE, PACKED)),
            (k_side, (kept, ready, signals, aside, sums, at_dk, dbeta, where, HV, R, GATED, NORMALIZE, PACKED)),
            (
                _supply,
                (
                    tiles,
                    kept,
                    ready,
                    signals,
                    sums,
                    at_dv,
                    numbers,
                    where,
                    head_q,
                    head_k,
                    head_v,
                    HV,
                    R,
                    GATED,
                    PACKED,
                ),
            ),
        ],
        [4, 4],
        [216, 72] if GATED else [232, 56],  # registers of the k side and the supply; the q side gets the rest
    )
