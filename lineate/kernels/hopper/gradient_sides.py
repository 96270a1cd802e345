"""The two groups of warps of gradients.py that multiply, the q side and the k side, and the signals between groups."""
# ruff: noqa: RUF059  (every group unpacks the same tuples and uses some of them)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.parts import (
    barrier,
    chunk,
    column,
    factor,
    inverse_norms,
    rates,
    through_norm,
    within,
)
from lineate.kernels.portable.gates import BETA, COARSE, FINE, READ_K, READ_Q, SMALL_BETA, WRITE

PARTS = gl.constexpr(5)  # parts of `sums`: rows and columns of the q side, rows and columns of the k side, <S, dS>
# Signals between the groups. All but KEYS_READY come once a unit. Every buffer is free at first, so the q side waits
# for R_FREE and DQK_FREE with the previous unit's parity.
#                              sent by      waited for by
S_READ = gl.constexpr(0)  #      both sides   supply           S may be overwritten
R_READY = gl.constexpr(1)  # q side       k side, supply   R and X E are ready; v, T may be overwritten
R_FREE = gl.constexpr(2)  #      k side       q side, supply   R, dS may be overwritten
DQK_READY = gl.constexpr(3)  # q side       k side, supply   dP is ready; dO may be overwritten
DQK_FREE = gl.constexpr(4)  #    k side       q side           dP may be overwritten
KEYS_READY = gl.constexpr(5)  # supply       both sides       q and k of an item are ready, trimmed (5, 6: two buffers)
X_READ = gl.constexpr(7)  #      k side       supply           X may be overwritten
SIGNALS = gl.constexpr(8)

WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64, 128]
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64, 64]
ALONG = gl.constexpr(gl.SliceLayout(1, WIDE.value))
DOWN = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, SQUARE.value))


@gluon.jit
def signal(signals, which):
    """Signal once all of this group's warps have arrived here."""
    barrier()
    mbarrier.arrive(signals.index(which), count=1)


@gluon.jit
def begin_items(where, H: gl.constexpr, PACKED: gl.constexpr):
    """Return a program's first item, the step to the next, their number, and the first one's slot, token and rows."""
    items = where[4]
    step = gl.num_programs(0)
    item = gl.program_id(0)
    count = gl.maximum((items - item + step - 1) // step, 0)
    slot, token, rows = item_chunk(item, where, H, PACKED)
    return item, step, count, slot, token, rows


@gluon.jit
def item_chunk(item, where, H: gl.constexpr, PACKED: gl.constexpr):
    """Return the slot, first token and number of rows of an item, or of item 0 if there is no such item."""
    bounds, first_slots, slot_texts, t, items = where
    return chunk(within(item, items), bounds, first_slots, slot_texts, t, H, PACKED)


@gluon.jit
def _indices():
    """Return rows and columns of [64, 64], then those of [64, 128]."""
    i = gl.arange(0, 64, DOWN)
    j = gl.arange(0, 64, ACROSS)
    i_wide = gl.arange(0, 64, ALONG)
    return i, j, i_wide, gl.arange(0, 128, gl.SliceLayout(0, WIDE))


@gluon.jit
def _zeros():
    """Return the zeros that accumulators of [64, 128] and of [64, 64] begin with."""
    return gl.zeros([64, 128], gl.float32, WIDE), gl.zeros([64, 64], gl.float32, SQUARE)


@gluon.jit
def _store_total(total, to, token, key_head, rows, i, c, dtype: gl.constexpr, H: gl.constexpr):
    """Store dq or dk of an item, [64, 128], at its place in `to`."""
    at_row = to + token.to(gl.int64) * (H * 128) + key_head * 128
    gl.store(at_row + i[:, None] * (H * 128) + c[None, :], total.to(dtype), mask=i[:, None] < rows)


@gluon.jit
def _decay_between(kept_factors, buffer, i, j, layout: gl.constexpr):
    """Return D, which is 0 above the diagonal."""
    between = rates(kept_factors, buffer, COARSE, layout) - factor(kept_factors, buffer, COARSE, layout)
    fine = rates(kept_factors, buffer, FINE, layout) - factor(kept_factors, buffer, FINE, layout)
    return gl.exp(gl.where(i[:, None] >= j[None, :], between + fine, float("-inf")))


@gluon.jit
def q_side(
    kept, ready, signals, aside, sums, at_dq, where, scale, HV: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr,
    NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute R, dP and dq."""
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    dtype: gl.constexpr = kept_k.dtype
    H: gl.constexpr = HV // R
    i, j, i_wide, c_wide = _indices()
    none, nothing = _zeros()
    item, step, count, slot, token, rows = begin_items(where, H, PACKED)
    unit = 0
    for n in range(count):
        stage = n % 2
        key_head = item % H
        next_slot, next_token, next_rows = item_chunk(item + step, where, H, PACKED)
        mbarrier.wait(signals.index(KEYS_READY + stage), (n // 2) % 2)
        if NORMALIZE:
            norm_q = inverse_norms(kept_q.index(stage), WIDE, DOWN)
            norm_k = gl.convert_layout(inverse_norms(kept_k.index(stage), WIDE, DOWN), ACROSS)
        total_q = none
        for r in range(R):
            at = slot * HV + key_head * R + r
            turn = unit % 2
            # Always 0, but the compiler cannot know it; with a constant it would keep the addresses of all operands, in
            # more registers than there are.
            only = unit >> 24
            goal = kept_v.index(only)
            keys = kept_k.index(stage + only)
            mbarrier.wait(ready_S.index(0), turn)
            KS = warpgroup_mma(keys, kept_S.index(only).permute([1, 0]), none, use_acc=False, is_async=True)
            mbarrier.wait(ready_factors.index(turn), (unit // 2) % 2)
            beta = column(kept_factors, turn, BETA, ALONG)
            small = gl.where((gl.abs(beta) <= SMALL_BETA) & (i_wide < rows), 1, 0)
            some_are_small = gl.sum(small, 0) > 0
            read_k = rates(kept_factors, turn, READ_K, WIDE)
            mbarrier.wait(ready_v.index(0), turn)
            KS = warpgroup_mma_wait(0, deps=(KS,))
            E = gl.where(i_wide[:, None] < rows, goal.load(WIDE).to(gl.float32) - KS * read_k, 0.0)
            goal.store((E * beta[:, None]).to(dtype))
            fence_async_shared()
            if some_are_small:
                mbarrier.wait(ready_X.index(0), turn)
                aside.index(turn).store(gl.sum(kept_X.index(only).load(WIDE).to(gl.float32) * E, 1))
            mbarrier.wait(ready_T.index(0), turn)
            barrier()  # all warps see E from here on
            Rd = warpgroup_mma(kept_T.index(only), goal, none, use_acc=False, is_async=True)
            mbarrier.wait(signals.index(R_FREE), turn ^ 1)
            Rd = warpgroup_mma_wait(0, deps=(Rd,))
            only = unit >> 25
            residual = kept_R.index(only)
            S = kept_S.index(only)
            dO = kept_dO.index(only)
            dQK = kept_dQK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            residual.store(Rd.to(dtype))
            mbarrier.wait(ready_dO.index(0), turn)
            OS = warpgroup_mma(dO, S, none, use_acc=False, is_async=True)
            fence_async_shared()
            # All warps see R from here on, and have read v, T and X.
            signal(signals, R_READY)
            OS = warpgroup_mma_wait(0, deps=(OS,))
            OS = OS * rates(kept_factors, turn, READ_Q, WIDE)
            total_q = total_q + OS
            if GATED:
                dG = gl.sum(queries.load(WIDE).to(gl.float32) * OS, 1)
                total_q, dG = warpgroup_mma_wait(0, deps=(total_q, dG))
            else:
                total_q = warpgroup_mma_wait(0, deps=(total_q,))
            signal(signals, S_READ)
            dP = warpgroup_mma(dO, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            if GATED:
                D = _decay_between(kept_factors, turn, i, j, SQUARE)
            mbarrier.wait(signals.index(DQK_FREE), turn ^ 1)
            dP, total_q = warpgroup_mma_wait(0, deps=(dP, total_q))
            dP = gl.where((i[:, None] >= j[None, :]) & (i[:, None] < rows), dP, 0.0)
            if NORMALIZE:
                dP = dP * norm_k[None, :] * (norm_q * scale)[:, None]
            else:
                dP = dP * scale
            if GATED:
                dP = dP * D
            dQK.store(dP.to(dtype))
            fence_async_shared()
            # All warps see dP from here on, and have read dO.
            signal(signals, DQK_READY)
            if GATED:
                QK = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            total_q = warpgroup_mma(dQK, keys, total_q, is_async=True)
            if GATED:
                QK, total_q = warpgroup_mma_wait(1, deps=(QK, total_q))
                paired = gl.where(i[:, None] == j[None, :], 0.0, dP * QK)
                dG = dG + gl.convert_layout(gl.sum(paired, 1), ALONG)
                at_sums = sums + at.to(gl.int64) * (PARTS * 64)
                gl.store(at_sums + i_wide, dG)
                gl.store(at_sums + 64 + j, gl.sum(paired, 0) * -1.0)
            total_q = warpgroup_mma_wait(0, deps=(total_q,))
            unit = unit + 1
        if NORMALIZE:
            total_q = through_norm(total_q, kept_q.index(stage), gl.convert_layout(norm_q, ALONG), WIDE)
        _store_total(total_q, at_dq, token, key_head, rows, i_wide, c_wide, dtype, H)
        item = item + step
        slot = next_slot
        token = next_token
        rows = next_rows


@gluon.jit
def k_side(
    kept, ready, signals, aside, sums, at_dk, dbeta, where, HV: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr,
    NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute dM, dbeta and dk."""
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    dtype: gl.constexpr = kept_k.dtype
    H: gl.constexpr = HV // R
    i, j, i_wide, c_wide = _indices()
    none, nothing = _zeros()
    item, step, count, slot, token, rows = begin_items(where, H, PACKED)
    unit = 0
    for n in range(count):
        stage = n % 2
        key_head = item % H
        next_slot, next_token, next_rows = item_chunk(item + step, where, H, PACKED)
        mbarrier.wait(signals.index(KEYS_READY + stage), (n // 2) % 2)
        if NORMALIZE:
            norm_k = inverse_norms(kept_k.index(stage), WIDE, DOWN)
            norm_k_across = gl.convert_layout(norm_k, ACROSS)
        total_k = none
        for r in range(R):
            head = key_head * R + r
            at = slot * HV + head
            turn = unit % 2
            only = unit >> 24
            X = kept_X.index(only)
            keys = kept_k.index(stage + only)
            mbarrier.wait(ready_X.index(0), turn)
            mbarrier.wait(ready_S.index(0), turn)
            XS = warpgroup_mma(X, kept_S.index(only), none, use_acc=False, is_async=True)
            mbarrier.wait(ready_factors.index(turn), (unit // 2) % 2)
            rate_wide = rates(kept_factors, turn, BETA, WIDE) * rates(kept_factors, turn, READ_K, WIDE) * -1.0
            XS = warpgroup_mma_wait(0, deps=(XS,))
            signal(signals, S_READ)
            XS = XS * rate_wide
            total_k = total_k + XS
            if GATED:
                dG = gl.sum(keys.load(WIDE).to(gl.float32) * XS, 1)
                total_k, dG = warpgroup_mma_wait(0, deps=(total_k, dG))
            if GATED:
                D = _decay_between(kept_factors, turn, i, j, SQUARE)
            rate = column(kept_factors, turn, BETA, DOWN)
            only = unit >> 25
            X = kept_X.index(only)
            keys = kept_k.index(stage + only)
            residual = kept_R.index(only)
            mbarrier.wait(signals.index(R_READY), turn)
            XR = warpgroup_mma(X, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            XR, total_k = warpgroup_mma_wait(0, deps=(XR, total_k))
            signal(signals, X_READ)
            own = gl.sum(gl.where(i[:, None] == j[None, :], XR, 0.0), 1)
            XR = gl.where((i[:, None] > j[None, :]) & (i[:, None] < rows), XR, 0.0)
            if NORMALIZE:
                XR = XR * norm_k_across[None, :] * norm_k[:, None]
            if GATED:
                XR = XR * D
            KK = warpgroup_mma(keys, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            kept_dKK.index(only).store((XR * (rate * -1.0)[:, None]).to(dtype))
            KK, XR, total_k = warpgroup_mma_wait(0, deps=(KK, XR, total_k))
            XR = XR * KK
            through = gl.sum(XR, 1)
            mbarrier.wait(ready_dS.index(0), turn)
            RdS = warpgroup_mma(residual, kept_dS.index(only), none, use_acc=False, is_async=True)
            if GATED:
                dG = dG - gl.convert_layout(through * rate, ALONG)
                at_sums = sums + at.to(gl.int64) * (PARTS * 64)
                gl.store(at_sums + 192 + j, gl.sum(XR * rate[:, None], 0))
            is_small = gl.abs(rate) <= SMALL_BETA
            compared = gl.convert_layout(aside.index(turn).load(ALONG), DOWN)
            drate = gl.where(is_small, compared - through, own / gl.where(is_small, 1.0, rate))
            gl.store(dbeta + (token + i).to(gl.int64) * HV + head, drate.to(dbeta.dtype.element_ty), mask=i < rows)
            write = rates(kept_factors, turn, WRITE, WIDE)
            fence_async_shared()
            RdS, total_k = warpgroup_mma_wait(0, deps=(RdS, total_k))
            # All warps see dM from here on, and have read R and dS.
            signal(signals, R_FREE)
            only = unit >> 26
            dQK = kept_dQK.index(only)
            dKK = kept_dKK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            RdS = RdS * write
            total_k = total_k + RdS
            if GATED:
                written = gl.where(i_wide < rows - 1, gl.sum(keys.load(WIDE).to(gl.float32) * RdS, 1), 0.0)
                total_k, written = warpgroup_mma_wait(0, deps=(total_k, written))
            total_k = warpgroup_mma(dKK, keys, total_k, is_async=True)
            total_k = warpgroup_mma(dKK.permute([1, 0]), keys, total_k, is_async=True)
            mbarrier.wait(signals.index(DQK_READY), turn)
            total_k = warpgroup_mma(dQK.permute([1, 0]), queries, total_k, is_async=True)
            if GATED:
                dlast = gl.sum(written, 0)
                gl.store(at_sums + 128 + i_wide, dG + gl.where(i_wide == rows - 1, dlast, written * -1.0))
            total_k = warpgroup_mma_wait(0, deps=(total_k,))
            signal(signals, DQK_FREE)
            unit = unit + 1
        if NORMALIZE:
            total_k = through_norm(total_k, kept_k.index(stage), gl.convert_layout(norm_k, ALONG), WIDE)
        _store_total(total_k, at_dk, token, key_head, rows, i_wide, c_wide, dtype, H)
        item = item + step
        slot = next_slot
        token = next_token
        rows = next_rows
