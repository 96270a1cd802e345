"""The gradients of gradients.py for rules that only accumulate: R equals v, and dV has already been computed.

    dP = tril(dO V^T) D      dq = (dO S) read_q + dP k      dk = (V dS) write + dP^T q

Two warpgroups work on each unit (a chunk and value head): each has all 64 tokens and half the columns of every product.
A unit moves 160 KB (R = 1), and that traffic bounds the time: S and dO are fetched two units ahead, q and k one item
(chunk and key head) ahead, v and dS one unit ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.parts import (
    barrier,
    chunk,
    expect,
    factor,
    fetch,
    inverse_norms,
    make_ring,
    rates,
    store_rows,
    through_norm,
    trim,
    within,
)
from lineate.kernels.portable.gates import COARSE, FACTORS, FINE, LAST, READ_Q, WRITE

ADDED_PARTS = gl.constexpr(3)  # of `sums`: along rows, over each warpgroup's columns (two parts); along columns (one)


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """Return the sums along the rows, one for each warpgroup's columns, [64, 2], so that no warp waits for another."""
    x = gl.reshape(x, [64, 2, x.shape[1] // 2])
    return gl.convert_layout(gl.sum(x, 2), layout)


@gluon.jit
def _quarter(tile, X: gl.constexpr):
    return tile.slice(X // 2 * 64, 64, 0).slice(X % 2 * 64, 64, 1)


@gluon.jit
def _unit(
    u, item, step, items, bounds, first_slots, slot_texts, t, HV: gl.constexpr, R: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Return the first token, value head and state index of a program's unit u, and whether that unit exists."""
    item = item + u // R * step
    slot, token, _ = chunk(within(item, items), bounds, first_slots, slot_texts, t, HV // R, PACKED)
    head = item % (HV // R) * R + u % R
    return token, head, slot * HV + head, item < items


@gluon.jit(do_not_specialize=["t", "slots", "texts"])
def added_gradients(
    q, k, v, factors, states, dstates, doutput, dq, dk,
    numbers, sums, at_dq, at_dk, bounds, first_slots, slot_texts, t, slots, texts,
    head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Fill dq, dk and, with decay, the parts of dG in sums `slot hv ADDED_PARTS c`.

    q ... dk: descriptors; numbers: the factors; at_dq, at_dk: pointers to dq and dk.
    """
    gl.static_assert(K == 128)
    gl.static_assert(V == 128)
    gl.static_assert(num_warps == 8)
    H: gl.constexpr = HV // R
    dtype: gl.constexpr = k.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])  # [64, 128]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])  # [64, 64]
    along: gl.constexpr = gl.SliceLayout(1, wide)
    halves: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 1]], [], [64, 2]
    )
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)

    kept_S, ready_S = make_ring(states, 2)
    kept_dO, ready_dO = make_ring(doutput, 2)
    kept_q, ready_q = make_ring(q, 2)
    kept_k, ready_k = make_ring(k, 2)
    kept_factors, ready_factors = make_ring(factors, 2)
    kept_v, ready_v = make_ring(v, 1)
    kept_dS, ready_dS = make_ring(dstates, 1)
    dQK_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kept_dQK = gl.allocate_shared_memory(dtype, [1, 64, 64], dQK_layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    aside_kept = gl.allocate_shared_memory(gl.float32, [64, 2], flat)
    aside_dG = gl.allocate_shared_memory(gl.float32, [64, 2], flat)
    fence_async_shared()
    barrier()

    step = gl.num_programs(0)
    first_item = gl.program_id(0)
    item = first_item
    if PACKED:
        slots = gl.load(first_slots + texts).to(gl.int32)
    items = slots * H
    count = gl.maximum((items - item + step - 1) // step, 0)
    slot, token, rows = chunk(within(item, items), bounds, first_slots, slot_texts, t, H, PACKED)
    some = count > 0
    key_head = item % H
    at = slot * HV + key_head * R  # index of the current unit
    token1, head1, at1, more1 = _unit(1, first_item, step, items, bounds, first_slots, slot_texts, t, HV, R, PACKED)
    expect((k, q, v, dstates), (ready_k, ready_q, ready_v, ready_dS), 0, some)
    expect((states, doutput, factors), (ready_S, ready_dO, ready_factors), 0, some)
    expect((states, doutput, factors), (ready_S, ready_dO, ready_factors), 1, more1)
    barrier()
    fetch(
        (doutput, states, factors), (kept_dO, kept_S, kept_factors), (ready_dO, ready_S, ready_factors),
        ((token, key_head * R * V), (at * V, 0), (at * FACTORS, 0)), 0, some,
    )  # fmt: skip
    fetch(
        (v, k, q, dstates), (kept_v, kept_k, kept_q, kept_dS), (ready_v, ready_k, ready_q, ready_dS),
        ((token, key_head * R * head_v), (token, key_head * head_k), (token, key_head * head_q), (at * V, 0)), 0, some,
    )  # fmt: skip
    fetch(
        (doutput, states, factors), (kept_dO, kept_S, kept_factors), (ready_dO, ready_S, ready_factors),
        ((token1, head1 * V), (at1 * V, 0), (at1 * FACTORS, 0)), 1, more1,
    )  # fmt: skip

    i = gl.arange(0, 64, down)
    j = gl.arange(0, 64, across)
    row = gl.arange(0, 64, gl.SliceLayout(1, halves))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, halves))[None, :]
    none = gl.zeros([64, V], gl.float32, wide)
    nothing = gl.zeros([64, 64], gl.float32, square)
    unit = 0
    for n in range(count):
        stage = n % 2
        turn_qk = (n // 2) % 2
        key_head = item % H
        more_items = n + 1 < count
        next_item = item + step
        next_key_head = next_item % H
        next_slot, next_token, next_rows = chunk(
            within(next_item, items), bounds, first_slots, slot_texts, t, H, PACKED
        )
        mbarrier.wait(ready_k.index(stage), turn_qk)
        mbarrier.wait(ready_q.index(stage), turn_qk)
        partial = rows < 64
        if partial:
            trim(kept_k, ready_k, stage, turn_qk, rows)
            trim(kept_q, ready_q, stage, turn_qk, rows)
            fence_async_shared()
            barrier()
        if NORMALIZE:
            norm_q = inverse_norms(kept_q.index(stage), wide, down)
            norm_k = inverse_norms(kept_k.index(stage), wide, down)
            norm_k_across = gl.convert_layout(norm_k, across)
        total_q = none
        total_k = none
        for r in range(R):
            turn = unit % 2  # parity of the rings of one buffer, and index of the buffer of S, dO and factors
            turn2 = (unit // 2) % 2
            last_r = r == R - 1
            more = more_items | (r < R - 1)
            to_head = gl.where(last_r, next_key_head * R, key_head * R + r + 1)
            to_at = gl.where(last_r, next_slot * HV + next_key_head * R, at + 1)
            to_token = gl.where(last_r, next_token, token)
            token2, head2, at2, more2 = _unit(
                unit + 2, first_item, step, items, bounds, first_slots, slot_texts, t, HV, R, PACKED
            )
            if partial:
                trim(kept_dO, ready_dO, turn, turn2, rows)
                trim(kept_v, ready_v, 0, turn, rows)
                fence_async_shared()
                barrier()
            # Always 0, but the compiler cannot know it; with a constant it would keep the addresses of all operands, in
            # more registers than there are.
            only = unit >> 24
            S = kept_S.index(turn)
            dO = kept_dO.index(turn)
            dS = kept_dS.index(only)
            values = kept_v.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            dQK = kept_dQK.index(only)
            mbarrier.wait(ready_dO.index(turn), turn2)
            mbarrier.wait(ready_v.index(0), turn)
            dP = warpgroup_mma(dO, values.permute([1, 0]), nothing, use_acc=False, is_async=True)
            QK = dP
            if GATED:
                QK = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            mbarrier.wait(ready_S.index(turn), turn2)
            OS = warpgroup_mma(dO, S, none, use_acc=False, is_async=True)
            mbarrier.wait(ready_dS.index(0), turn)
            VdS = warpgroup_mma(values, dS, none, use_acc=False, is_async=True)
            mbarrier.wait(ready_factors.index(turn), turn2)
            lower = i[:, None] >= j[None, :]
            if GATED:
                between = rates(kept_factors, turn, COARSE, square) - factor(kept_factors, turn, COARSE, square)
                fine = rates(kept_factors, turn, FINE, square) - factor(kept_factors, turn, FINE, square)
                D = gl.exp(gl.where(lower, between + fine, float("-inf"))) * scale
            else:
                D = gl.where(lower, scale, nothing)
            if NORMALIZE:
                D = D * norm_k_across[None, :] * norm_q[:, None]
            barrier()  # all warps have read the previous dP
            if GATED:
                dP, QK, OS, VdS = warpgroup_mma_wait(2, deps=(dP, QK, OS, VdS))
            else:
                dP, OS, VdS = warpgroup_mma_wait(2, deps=(dP, OS, VdS))
            dP = gl.where(lower, dP, 0.0) * D
            dQK.store(dP.to(dtype))
            fence_async_shared()
            if GATED:
                paired = gl.where(i[:, None] == j[None, :], 0.0, dP * QK)
                dG = _halves(paired, halves)
                columns = gl.sum(paired, 0)
                at_sums = sums + at.to(gl.int64) * (ADDED_PARTS * 64)
                gl.store(at_sums + 128 + j, columns * -1.0)
                SdS = nothing
                for x in gl.static_range(4):  # a quarter at a time, to use few registers
                    each = _quarter(S, x).load(square).to(gl.float32)
                    SdS = SdS + each * _quarter(dS, x).load(square).to(gl.float32)
                aside_kept.store(_halves(SdS, halves))
            OS, VdS = warpgroup_mma_wait(1, deps=(OS, VdS))
            OS = OS * rates(kept_factors, turn, READ_Q, wide)
            total_q = total_q + OS
            if GATED:
                aside_dG.store(dG + _halves(queries.load(wide).to(gl.float32) * OS, halves))
            VdS, total_q = warpgroup_mma_wait(0, deps=(VdS, total_q))
            VdS = VdS * rates(kept_factors, turn, WRITE, wide)
            total_k = total_k + VdS
            if GATED:
                written = _halves(keys.load(wide).to(gl.float32) * VdS, halves)
                written = gl.where(row < rows - 1, written, 0.0)
                last = gl.load(numbers + (at.to(gl.int64) * FACTORS + LAST) * 64)
                dlast = gl.sum(gl.reshape(written + aside_kept.load(halves) * last, [128]), 0)
                dG = aside_dG.load(halves) + gl.where(row == rows - 1, gl.where(half == 0, dlast, 0.0), written * -1.0)
                gl.store(at_sums + half * 64 + row, dG)
            tma.store_wait(0)  # dq and dk of the previous item have left the buffers of q and k
            first = (r == 0) & more_items
            expect((states, doutput, factors), (ready_S, ready_dO, ready_factors), turn, more2)
            expect((dstates, v), (ready_dS, ready_v), 0, more)
            expect((k, q), (ready_k, ready_q), 1 - stage, first)
            barrier()
            # All warps see dP from here on, and have read S, dS, dO and v.
            only = unit >> 25
            dQK = kept_dQK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            total_q = warpgroup_mma(dQK, keys, total_q, is_async=True)
            total_k = warpgroup_mma(dQK.permute([1, 0]), queries, total_k, is_async=True)
            fetch(
                (v, dstates), (kept_v, kept_dS), (ready_v, ready_dS),
                ((to_token, to_head * head_v), (to_at * V, 0)), 0, more,
            )  # fmt: skip
            fetch(
                (k, q), (kept_k, kept_q), (ready_k, ready_q),
                ((next_token, next_key_head * head_k), (next_token, next_key_head * head_q)), 1 - stage, first,
            )  # fmt: skip
            fetch(
                (doutput, states, factors), (kept_dO, kept_S, kept_factors), (ready_dO, ready_S, ready_factors),
                ((token2, head2 * V), (at2 * V, 0), (at2 * FACTORS, 0)), turn, more2,
            )  # fmt: skip
            total_q, total_k = warpgroup_mma_wait(0, deps=(total_q, total_k))
            unit = unit + 1
            at = to_at
        keys = kept_k.index(stage)
        queries = kept_q.index(stage)
        if NORMALIZE:
            total_q = through_norm(total_q, queries, gl.convert_layout(norm_q, along), wide)
            total_k = through_norm(total_k, keys, gl.convert_layout(norm_k, along), wide)
        barrier()  # all warps have read q and k, whose buffers take dq and dk
        queries.store(total_q.to(dtype))
        keys.store(total_k.to(dtype))
        fence_async_shared()
        barrier()
        place = gl.where(partial, dq.shape[0], token)
        tma.async_copy_shared_to_global(dq, [place, key_head * K], queries)
        tma.async_copy_shared_to_global(dk, [place, key_head * K], keys)
        if partial:
            at_row = token.to(gl.int64) * (H * K) + key_head * K
            store_rows(queries, at_dq + at_row, H * K, rows)
            store_rows(keys, at_dk + at_row, H * K, rows)
            barrier()
        item = next_item
        token = next_token
        rows = next_rows
    tma.store_wait(0)
