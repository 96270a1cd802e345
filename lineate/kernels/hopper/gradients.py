"""backward.py's head_residuals, head_gradients and gather in one kernel for Hopper (sm_90), in Gluon.

    E = v - (k S) read_k      R = T (beta E)      dP = tril(dO R^T) D      XR = tril(X R^T, -1) D      dV = beta X
    dq = (dO S) read_q + dP k
    dk = (R dS) write - (X S) beta read_k + dP^T q + dM k + dM^T k         dM = -beta XR

A program takes chunk and key head after chunk and key head, 132 programs at a time, and in each the R value heads one
after another (a unit each). Its warps are three groups of four, who wait for each other only where they need something:

    q side    k S  [E]  T E  [R]  dO S  dO R^T  [dP]  q k^T  dP k                    dq, summed over R in registers
    k side    X S  X R^T  [dM]  k k^T  R dS  dM k  dM^T k  dP^T q                    dk, likewise; dbeta
    supply    asks for each tile of the next unit as soon as its last reader is done; dV, <S, dS>

Only R and dP go from one side to the other, through shared memory.
"""
# ruff: noqa: RUF059  (every group takes the same tuples apart, and uses some)

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.walk import (
    _chunk_bounds,
    _expect,
    _factor,
    _fetch,
    _ring,
    _trim,
    barrier,
    describe,
    describe_rows,
    describe_squares,
)
from lineate.kernels.launching import start
from lineate.kernels.portable.gates import BETA, COARSE, FACTORS, FINE, LAST, READ_K, READ_Q, SMALL_BETA, WRITE
from lineate.kernels.portable.split import PROGRAMS

PARTS = gl.constexpr(5)  # of sums: rows and columns of the q side, rows and columns of the k side, <S, dS>

# Signals between the groups. All but KEYS_READY come once a unit. What is waited for to be free is so at first: these
# waits take the parity before.
#                              sent by      waited for by
S_READ = gl.constexpr(0)  #      both sides   supply           S may be overwritten
R_READY = gl.constexpr(1)  #     q side       k side, supply   R is there, and X E; v, T may be overwritten
R_FREE = gl.constexpr(2)  #      k side       q side, supply   R, dS may be overwritten
DQK_READY = gl.constexpr(3)  #   q side       k side, supply   dP is there; dO may be overwritten
DQK_FREE = gl.constexpr(4)  #    k side       q side           dP may be overwritten
KEYS_READY = gl.constexpr(5)  #  supply       both sides       q and k of an item are there, trimmed (5, 6: two buffers)
X_READ = gl.constexpr(7)  #      k side       supply           X may be overwritten
SIGNALS = gl.constexpr(8)


@gluon.jit
def _rates(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """One vector of 64, as a column: [64, 1]. (Triton 3.6 overlooks permute on tiles without a swizzle.)"""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = kept_factors._reinterpret(gl.float32, [2, FACTORS * 64], flat).index(stage)
    return numbers.slice(ROW * 64, 64, 0).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _within(item, items):
    """An item that is there, if any is; 0 otherwise."""
    return gl.maximum(gl.minimum(item, items - 1), 0)


@gluon.jit
def _chunk(item, bounds, first_slots, slot_texts, t, H: gl.constexpr, PACKED: gl.constexpr):
    """Slot, first token and number of rows of an item's chunk."""
    slot = item // H
    start, rows = _chunk_bounds(slot, bounds, first_slots, slot_texts, t, PACKED)
    return slot, start, rows


@gluon.jit
def _inverse_norms(tile, layout: gl.constexpr, to: gl.constexpr):
    """1 / |x_i| for the rows of a tile, [64]."""
    x = tile.load(layout).to(gl.float32)
    return gl.convert_layout(gl.rsqrt(gl.sum(x * x, 1) + 1e-6), to)


@gluon.jit
def _through_norm(total, tile, norm, layout: gl.constexpr):
    """From the gradient of unit vectors, times the inverse norms, to the vectors'."""
    x = tile.load(layout).to(gl.float32)
    along = gl.sum(x * total, 1) * norm * norm
    return total - x * along[:, None]


@gluon.jit
def _signal(signals, which):
    """All of this group's warps have come here."""
    barrier()
    mbarrier.arrive(signals.index(which), count=1)


@gluon.jit
def _column(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """One vector of 64 in a layout of one dimension."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = kept_factors._reinterpret(gl.float32, [2, FACTORS * 64], flat).index(stage)
    return numbers.slice(ROW * 64, 64, 0).load(layout)


@gluon.jit
def _items(items):
    step = gl.num_programs(0)
    item = gl.program_id(0)
    return item, step, gl.maximum((items - item + step - 1) // step, 0)


@gluon.jit
def _decay_between(kept_factors, buffer, i, j, layout: gl.constexpr):
    """D, 0 above the diagonal."""
    between = _rates(kept_factors, buffer, COARSE, layout) - _factor(kept_factors, buffer, COARSE, layout)
    fine = _rates(kept_factors, buffer, FINE, layout) - _factor(kept_factors, buffer, FINE, layout)
    return gl.exp(gl.where(i[:, None] >= j[None, :], between + fine, float("-inf")))


@gluon.jit
def _q_side(
    kept, ready, signals, aside, sums, at_dq, where, scale, HV: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr,
    NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """R, dP and dq."""
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    bounds, first_slots, slot_texts, t, items = where
    dtype: gl.constexpr = kept_k.dtype
    H: gl.constexpr = HV // R
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # [64, 128]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64, 64]
    along: gl.constexpr = gl.SliceLayout(1, wide)
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)
    i = gl.arange(0, 64, down)
    j = gl.arange(0, 64, across)
    i_wide = gl.arange(0, 64, along)
    c_wide = gl.arange(0, 128, gl.SliceLayout(0, wide))
    none = gl.zeros([64, 128], gl.float32, wide)
    nothing = gl.zeros([64, 64], gl.float32, square)
    item, step, count = _items(items)
    slot, token, rows = _chunk(_within(item, items), bounds, first_slots, slot_texts, t, H, PACKED)
    unit = 0
    for n in range(count):
        stage = n % 2
        key_head = item % H
        next_slot, next_token, next_rows = _chunk(
            _within(item + step, items), bounds, first_slots, slot_texts, t, H, PACKED
        )
        mbarrier.wait(signals.index(KEYS_READY + stage), (n // 2) % 2)
        if NORMALIZE:
            norm_q = _inverse_norms(kept_q.index(stage), wide, down)
            norm_k = gl.convert_layout(_inverse_norms(kept_k.index(stage), wide, down), across)
        total_q = none
        for r in range(R):
            at = slot * HV + key_head * R + r
            turn = unit % 2
            # 0, which the compiler does not know: else it keeps all operands' addresses, in more registers than are.
            only = unit >> 24
            goal = kept_v.index(only)
            keys = kept_k.index(stage + only)
            mbarrier.wait(ready_S.index(0), turn)
            KS = warpgroup_mma(keys, kept_S.index(only).permute([1, 0]), none, use_acc=False, is_async=True)
            mbarrier.wait(ready_factors.index(turn), (unit // 2) % 2)
            beta = _column(kept_factors, turn, BETA, along)
            small = gl.where((gl.abs(beta) <= SMALL_BETA) & (i_wide < rows), 1, 0)
            some_are_small = gl.sum(small, 0) > 0
            read_k = _rates(kept_factors, turn, READ_K, wide)
            mbarrier.wait(ready_v.index(0), turn)
            KS = warpgroup_mma_wait(0, deps=(KS,))
            E = gl.where(i_wide[:, None] < rows, goal.load(wide).to(gl.float32) - KS * read_k, 0.0)
            goal.store((E * beta[:, None]).to(dtype))
            fence_async_shared()
            if some_are_small:
                mbarrier.wait(ready_X.index(0), turn)
                aside.index(turn).store(gl.sum(kept_X.index(only).load(wide).to(gl.float32) * E, 1))
            mbarrier.wait(ready_T.index(0), turn)
            barrier()  # E is there for all to see
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
            # R is there for all to see; v, T, X have been read.
            _signal(signals, R_READY)
            OS = warpgroup_mma_wait(0, deps=(OS,))
            OS = OS * _rates(kept_factors, turn, READ_Q, wide)
            total_q = total_q + OS
            if GATED:
                dG = gl.sum(queries.load(wide).to(gl.float32) * OS, 1)
                total_q, dG = warpgroup_mma_wait(0, deps=(total_q, dG))
            else:
                total_q = warpgroup_mma_wait(0, deps=(total_q,))
            _signal(signals, S_READ)
            dP = warpgroup_mma(dO, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            if GATED:
                D = _decay_between(kept_factors, turn, i, j, square)
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
            # dP is there for all to see; dO has been read.
            _signal(signals, DQK_READY)
            if GATED:
                QK = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            total_q = warpgroup_mma(dQK, keys, total_q, is_async=True)
            if GATED:
                QK, total_q = warpgroup_mma_wait(1, deps=(QK, total_q))
                paired = gl.where(i[:, None] == j[None, :], 0.0, dP * QK)
                dG = dG + gl.convert_layout(gl.sum(paired, 1), along)
                at_sums = sums + at.to(gl.int64) * (PARTS * 64)
                gl.store(at_sums + i_wide, dG)
                gl.store(at_sums + 64 + j, gl.sum(paired, 0) * -1.0)
            total_q = warpgroup_mma_wait(0, deps=(total_q,))
            unit = unit + 1
        if NORMALIZE:
            total_q = _through_norm(total_q, kept_q.index(stage), gl.convert_layout(norm_q, along), wide)
        at_row = at_dq + token.to(gl.int64) * (H * 128) + key_head * 128
        gl.store(at_row + i_wide[:, None] * (H * 128) + c_wide[None, :], total_q.to(dtype), mask=i_wide[:, None] < rows)
        item = item + step
        slot = next_slot
        token = next_token
        rows = next_rows


@gluon.jit
def _k_side(
    kept, ready, signals, aside, sums, at_dk, dbeta, where, HV: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr,
    NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dM, dbeta and dk."""
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    bounds, first_slots, slot_texts, t, items = where
    dtype: gl.constexpr = kept_k.dtype
    H: gl.constexpr = HV // R
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # [64, 128]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64, 64]
    along: gl.constexpr = gl.SliceLayout(1, wide)
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)
    i = gl.arange(0, 64, down)
    j = gl.arange(0, 64, across)
    i_wide = gl.arange(0, 64, along)
    c_wide = gl.arange(0, 128, gl.SliceLayout(0, wide))
    none = gl.zeros([64, 128], gl.float32, wide)
    nothing = gl.zeros([64, 64], gl.float32, square)
    item, step, count = _items(items)
    slot, token, rows = _chunk(_within(item, items), bounds, first_slots, slot_texts, t, H, PACKED)
    unit = 0
    for n in range(count):
        stage = n % 2
        key_head = item % H
        next_slot, next_token, next_rows = _chunk(
            _within(item + step, items), bounds, first_slots, slot_texts, t, H, PACKED
        )
        mbarrier.wait(signals.index(KEYS_READY + stage), (n // 2) % 2)
        if NORMALIZE:
            norm_k = _inverse_norms(kept_k.index(stage), wide, down)
            norm_k_across = gl.convert_layout(norm_k, across)
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
            rate_wide = _rates(kept_factors, turn, BETA, wide) * _rates(kept_factors, turn, READ_K, wide) * -1.0
            XS = warpgroup_mma_wait(0, deps=(XS,))
            _signal(signals, S_READ)
            XS = XS * rate_wide
            total_k = total_k + XS
            if GATED:
                dG = gl.sum(keys.load(wide).to(gl.float32) * XS, 1)
                total_k, dG = warpgroup_mma_wait(0, deps=(total_k, dG))
            if GATED:
                D = _decay_between(kept_factors, turn, i, j, square)
            rate = _column(kept_factors, turn, BETA, down)
            only = unit >> 25
            X = kept_X.index(only)
            keys = kept_k.index(stage + only)
            residual = kept_R.index(only)
            mbarrier.wait(signals.index(R_READY), turn)
            XR = warpgroup_mma(X, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            XR, total_k = warpgroup_mma_wait(0, deps=(XR, total_k))
            _signal(signals, X_READ)
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
                dG = dG - gl.convert_layout(through * rate, along)
                at_sums = sums + at.to(gl.int64) * (PARTS * 64)
                gl.store(at_sums + 192 + j, gl.sum(XR * rate[:, None], 0))
            is_small = gl.abs(rate) <= SMALL_BETA
            compared = gl.convert_layout(aside.index(turn).load(along), down)
            drate = gl.where(is_small, compared - through, own / gl.where(is_small, 1.0, rate))
            gl.store(dbeta + (token + i).to(gl.int64) * HV + head, drate.to(dbeta.dtype.element_ty), mask=i < rows)
            write = _rates(kept_factors, turn, WRITE, wide)
            fence_async_shared()
            RdS, total_k = warpgroup_mma_wait(0, deps=(RdS, total_k))
            # dM is there for all to see; R, dS have been read.
            _signal(signals, R_FREE)
            only = unit >> 26
            dQK = kept_dQK.index(only)
            dKK = kept_dKK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            RdS = RdS * write
            total_k = total_k + RdS
            if GATED:
                written = gl.where(i_wide < rows - 1, gl.sum(keys.load(wide).to(gl.float32) * RdS, 1), 0.0)
                total_k, written = warpgroup_mma_wait(0, deps=(total_k, written))
            total_k = warpgroup_mma(dKK, keys, total_k, is_async=True)
            total_k = warpgroup_mma(dKK.permute([1, 0]), keys, total_k, is_async=True)
            mbarrier.wait(signals.index(DQK_READY), turn)
            total_k = warpgroup_mma(dQK.permute([1, 0]), queries, total_k, is_async=True)
            if GATED:
                dlast = gl.sum(written, 0)
                gl.store(at_sums + 128 + i_wide, dG + gl.where(i_wide == rows - 1, dlast, written * -1.0))
            total_k = warpgroup_mma_wait(0, deps=(total_k,))
            _signal(signals, DQK_FREE)
            unit = unit + 1
        if NORMALIZE:
            total_k = _through_norm(total_k, kept_k.index(stage), gl.convert_layout(norm_k, along), wide)
        at_row = at_dk + token.to(gl.int64) * (H * 128) + key_head * 128
        gl.store(at_row + i_wide[:, None] * (H * 128) + c_wide[None, :], total_k.to(dtype), mask=i_wide[:, None] < rows)
        item = item + step
        slot = next_slot
        token = next_token
        rows = next_rows


@gluon.jit
def _give_keys(kept_k, kept_q, ready_k, ready_q, signals, stage, phase, rows):
    """q and k of an item, 0 below the text's last row."""
    mbarrier.wait(ready_k.index(stage), phase)
    mbarrier.wait(ready_q.index(stage), phase)
    if rows < 64:
        _trim(kept_k, ready_k, stage, phase, rows)
        _trim(kept_q, ready_q, stage, phase, rows)
        fence_async_shared()
    _signal(signals, KEYS_READY + stage)


@gluon.jit
def _help(
    kept, ready, sums, at_dv, numbers, unit, at, token, rows, head, HV: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """dV = beta X and <S, dS> of a unit."""
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
    """Asks for everything; dV and <S, dS> on the way."""
    states, dstates, doutput, dvalues, v, T, k, q, factors = tiles
    kept_S, kept_dS, kept_dO, kept_X, kept_v, kept_T, kept_k, kept_q, kept_factors, kept_R, kept_dQK, kept_dKK = kept
    ready_S, ready_dS, ready_dO, ready_X, ready_v, ready_T, ready_k, ready_q, ready_factors = ready
    bounds, first_slots, slot_texts, t, items = where
    H: gl.constexpr = HV // R
    V: gl.constexpr = 128
    item, step, count = _items(items)
    slot, token, rows = _chunk(_within(item, items), bounds, first_slots, slot_texts, t, H, PACKED)
    key_head = item % H
    at = slot * HV + key_head * R
    some = count > 0
    _expect(
        (k, states, doutput, v, factors, T, dvalues, q, dstates),
        (ready_k, ready_S, ready_dO, ready_v, ready_factors, ready_T, ready_X, ready_q, ready_dS),
        0,
        some,
    )
    _fetch(
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
        next_slot, next_token, next_rows = _chunk(
            _within(item + step, items), bounds, first_slots, slot_texts, t, H, PACKED
        )
        for r in range(R):
            head = key_head * R + r
            turn = unit % 2
            last_r = r == R - 1
            more = more_items | (r < R - 1)
            to_head = gl.where(last_r, next_key_head * R, head + 1)
            to_at = gl.where(last_r, next_slot * HV + next_key_head * R, at + 1)
            to_token = gl.where(last_r, next_token, token)
            _help(kept, ready, sums, at_dv, numbers, unit, at, token, rows, head, HV, GATED)
            # What comes next.
            mbarrier.wait(signals.index(R_READY), turn)
            _expect((v, T), (ready_v, ready_T), 0, more)
            _fetch(
                (v, T), (kept_v, kept_T), (ready_v, ready_T), ((to_token, to_head * head_v), (to_at * 64, 0)), 0, more
            )
            mbarrier.wait(signals.index(S_READ), turn)
            first = (r == 0) & more_items
            _expect((states,), (ready_S,), 0, more)
            _expect((factors,), (ready_factors,), 1 - turn, more)
            _expect((k, q), (ready_k, ready_q), 1 - stage, first)
            _fetch((states,), (kept_S,), (ready_S,), ((to_at * V, 0),), 0, more)
            _fetch((factors,), (kept_factors,), (ready_factors,), ((to_at * FACTORS, 0),), 1 - turn, more)
            _fetch(
                (k, q),
                (kept_k, kept_q),
                (ready_k, ready_q),
                ((next_token, next_key_head * head_k), (next_token, next_key_head * head_q)),
                1 - stage,
                first,
            )
            mbarrier.wait(signals.index(X_READ), turn)
            _expect((dvalues,), (ready_X,), 0, more)
            _fetch((dvalues,), (kept_X,), (ready_X,), ((to_token, to_head * V),), 0, more)
            mbarrier.wait(signals.index(DQK_READY), turn)
            _expect((doutput,), (ready_dO,), 0, more)
            _fetch((doutput,), (kept_dO,), (ready_dO,), ((to_token, to_head * V),), 0, more)
            if last_r & more_items:
                _give_keys(kept_k, kept_q, ready_k, ready_q, signals, 1 - stage, ((n + 1) // 2) % 2, next_rows)
            mbarrier.wait(signals.index(R_FREE), turn)
            _expect((dstates,), (ready_dS,), 0, more)
            _fetch((dstates,), (kept_dS,), (ready_dS,), ((to_at * V, 0),), 0, more)
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
    """q ... dvalues: descriptors; numbers: the factors; at_dv, at_dq, at_dk: pointers. dvalues is X on entry, then dV.

    sums `slot hv PARTS c`: dG, to be summed over PARTS.
    """
    gl.static_assert(K == 128)
    gl.static_assert(V == 128)
    gl.static_assert(num_warps == 4)
    dtype: gl.constexpr = k.dtype
    kept_S, ready_S = _ring(states, 1)
    kept_dS, ready_dS = _ring(dstates, 1)
    kept_q, ready_q = _ring(q, 2)
    kept_k, ready_k = _ring(k, 2)
    kept_v, ready_v = _ring(v, 1)
    kept_dO, ready_dO = _ring(doutput, 1)
    kept_X, ready_X = _ring(dvalues, 1)
    kept_T, ready_T = _ring(T, 1)
    kept_factors, ready_factors = _ring(factors, 2)
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
            (_q_side, (kept, ready, signals, aside, sums, at_dq, where, scale, HV, R, GATED, NORMALIZE, PACKED)),
            (_k_side, (kept, ready, signals, aside, sums, at_dk, dbeta, where, HV, R, GATED, NORMALIZE, PACKED)),
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
        [216, 72] if GATED else [232, 56],  # registers; the q side gets what is left
    )


def head_gradients_hopper(
    q: Tensor, k: Tensor, v: Tensor, T: Tensor, factors: Tensor, states: Tensor, dstates: Tensor,
    doutput: Tensor, dvalues: Tensor, dq: Tensor, dk: Tensor, dbeta: Tensor, sums: Tensor | None,
    bounds: Tensor | None, first_slots: Tensor | None, slot_texts: Tensor | None, count: int, scale: float,
    *, normalize_qk: bool,
) -> None:  # fmt: skip
    """The launch, if hopper.fits, k = v = 128 and the rule corrects: dq and dk `b t h k` as the caller gets them.

    count: of texts. sums `slot hv PARTS c`, None without decay. doutput, dvalues, dq, dk, states, dstates: contiguous
    (a slice of tokens of such, if b = 1). head_decay_gradients follows; gather does not.
    """
    b, t, h, K = q.shape
    hv, V = v.shape[2:]
    slots = T.shape[0]
    # (Of a slice of tokens, b is 1: whatever its strides say, its rows follow one another.)
    values = (describe(x, b * t, hv * V, hv * V, [64, V]) for x in (doutput, dvalues))
    memories = (describe(x, slots * hv * V, K, K, [V, K]) for x in (states, dstates))
    start(head_gradients, (min(PROGRAMS, slots * h),))(
        describe_rows(q, K), describe_rows(k, K), describe_rows(v, V), describe_squares(T),
        describe(factors, factors.numel() // 64, 64, 64, [8, 64]), *memories, *values,
        factors, dbeta, dbeta if sums is None else sums, dvalues, dq, dk,
        bounds, first_slots, slot_texts, t, slots, count, q.stride(2), k.stride(2), v.stride(2), scale,
        HV=hv, R=hv // h, K=K, V=V, GATED=sums is not None, NORMALIZE=normalize_qk, PACKED=bounds is not None,
        num_warps=4,
    )  # fmt: skip
