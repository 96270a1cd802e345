"""backward.py's head_residuals, head_gradients and gather in one kernel for Hopper (sm_90), in Gluon.

    E = v - (k S) read_k      R = T (beta E)      dP = tril(dO R^T) D      XR = tril(X R^T, -1) D      dV = beta X
    dq = (dO S) read_q + dP k
    dk = (R dS) write - (X S) beta read_k + dP^T q + dM k + dM^T k         dM = -beta XR

A program takes chunk and key head after chunk and key head, 132 programs at a time, and in each the R value heads one
after another (a unit each): dq and dk are summed in registers. 8 warps, two warpgroups: each has all 64 tokens and half
the columns of every product, whose operands all lie in shared memory. What a unit needs is asked for one unit ahead, as
soon as its place is free:

    k S  dO S  [k S]  E  X S  |  T E  [R]  q k^T  |  dO R^T  k k^T  X R^T  [all]  R dS  dP dM  |  dP k  dP^T q  dM k ...
                                                         S v T asked for               dO X dS
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.gates import BETA, COARSE, FACTORS, FINE, LAST, READ_K, READ_Q, WRITE
from lineate.kernels.hopper import (
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
from lineate.kernels.hopper_backward import _store_rows
from lineate.kernels.launching import start
from lineate.kernels.split import PROGRAMS

PARTS = 3  # of sums: what is summed along rows, each warpgroup's columns; what is summed along columns


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """Sums along the rows, of each warpgroup's columns by themselves: [64, 2]. No warp waits for another."""
    x = gl.reshape(x, [64, 2, x.shape[1] // 2])
    return gl.convert_layout(gl.sum(x, 2), layout)


@gluon.jit
def _quarter(tile, X: gl.constexpr):
    return tile.slice(X // 2 * 64, 64, 0).slice(X % 2 * 64, 64, 1)


@gluon.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _rates(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """One vector of 64, as a column: [64, 1]. (Triton 3.6 overlooks permute on tiles without a swizzle.)"""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = kept_factors._reinterpret(gl.float32, [2, FACTORS * 64], flat).index(stage)
    return numbers.slice(ROW * 64, 64, 0).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _chunk(item, bounds, first_slots, slot_texts, t, H: gl.constexpr, PACKED: gl.constexpr):
    """Slot, first token and number of rows of an item's chunk."""
    slot = item // H
    if PACKED:
        text = gl.load(slot_texts + slot)
        start = gl.load(bounds + text).to(gl.int32)
        end = gl.load(bounds + text + 1).to(gl.int32)
        start = start + (slot - gl.load(first_slots + text).to(gl.int32)) * 64
        rows = gl.minimum(end - start, 64)
    else:
        chunks = (t + 63) // 64
        text = slot // chunks
        begin = (slot - text * chunks) * 64
        start = text * t + begin
        rows = gl.minimum(t - begin, 64)
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


@gluon.jit(do_not_specialize=["t", "slots", "texts"])
def head_gradients(
    q, k, v, T, factors, states, dstates, doutput, dvalues, dq, dk,
    numbers, dbeta, sums, at_dv, at_dq, at_dk, bounds, first_slots, slot_texts, t, slots, texts,
    head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q ... dk: descriptors; numbers: the factors. dvalues is X on entry, dV afterwards; at_dv, at_dq, at_dk: pointers.

    sums `slot hv PARTS c`: dG, to be summed over PARTS. Rules that correct, decay per head or none.
    """
    gl.static_assert(K == 128)
    gl.static_assert(V == 128)
    gl.static_assert(num_warps == 8)
    H: gl.constexpr = HV // R
    dtype: gl.constexpr = k.dtype
    LEAST: gl.constexpr = 0.00390625 if dtype == gl.float16 else 0.0  # as in backward.py: below it R tells nothing
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])  # [64, 128]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])  # [64, 64]
    along: gl.constexpr = gl.SliceLayout(1, wide)
    halves: gl.constexpr = gl.DistributedLinearLayout(  # what _halves of both has
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 1]], [], [64, 2]
    )
    down: gl.constexpr = gl.SliceLayout(1, square)
    across: gl.constexpr = gl.SliceLayout(0, square)

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
    # Sums that are wanted later. Kept there, not in registers, they are also made where they stand: ptxas makes what no
    # store waits for as late as it can, and keeps all it is made of until then.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    aside_compared = gl.allocate_shared_memory(gl.float32, [64, 2], flat)
    aside_kept = gl.allocate_shared_memory(gl.float32, [64, 2], flat)
    aside_dG = gl.allocate_shared_memory(gl.float32, [64, 2], flat)
    fence_async_shared()
    barrier()

    step = gl.num_programs(0)
    item = gl.program_id(0)
    if PACKED:
        slots = gl.load(first_slots + texts).to(gl.int32)
    items = slots * H
    count = gl.maximum((items - item + step - 1) // step, 0)
    slot, token, rows = _chunk(gl.minimum(item, items - 1), bounds, first_slots, slot_texts, t, H, PACKED)
    some = count > 0
    key_head = item % H
    at = slot * HV + key_head * R  # of the unit in hand
    _expect(
        (states, doutput, dvalues, v, T, dstates), (ready_S, ready_dO, ready_X, ready_v, ready_T, ready_dS), 0, some
    )
    _expect((k, q, factors), (ready_k, ready_q, ready_factors), 0, some)
    barrier()
    _fetch(
        (k, states, doutput, dvalues, factors, v, dstates, T, q),
        (kept_k, kept_S, kept_dO, kept_X, kept_factors, kept_v, kept_dS, kept_T, kept_q),
        (ready_k, ready_S, ready_dO, ready_X, ready_factors, ready_v, ready_dS, ready_T, ready_q),
        (
            (token, key_head * head_k), (at * V, 0), (token, key_head * R * V), (token, key_head * R * V),
            (at * FACTORS, 0), (token, key_head * R * head_v), (at * V, 0), (at * 64, 0), (token, key_head * head_q),
        ), 0, some,
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
        next_slot, next_token, next_rows = _chunk(
            gl.minimum(next_item, items - 1), bounds, first_slots, slot_texts, t, H, PACKED
        )
        mbarrier.wait(ready_k.index(stage), turn_qk)
        mbarrier.wait(ready_q.index(stage), turn_qk)
        partial = rows < 64
        if partial:
            _trim(kept_k, ready_k, stage, turn_qk, rows)
            _trim(kept_q, ready_q, stage, turn_qk, rows)
            fence_async_shared()
            barrier()
        if NORMALIZE:
            norm_q = _inverse_norms(kept_q.index(stage), wide, down)
            norm_k = _inverse_norms(kept_k.index(stage), wide, down)
            norm_k_across = gl.convert_layout(norm_k, across)
        total_q = none
        total_k = none
        for r in range(R):
            head = key_head * R + r
            turn = unit % 2  # of the rings of one; and the buffer of factors
            last_r = r == R - 1
            more = more_items | (r < R - 1)
            to_head = gl.where(last_r, next_key_head * R, head + 1)
            to_at = gl.where(last_r, next_slot * HV + next_key_head * R, at + 1)
            to_token = gl.where(last_r, next_token, token)
            if partial:
                _trim(kept_dO, ready_dO, 0, turn, rows)
                _trim(kept_X, ready_X, 0, turn, rows)
                _trim(kept_v, ready_v, 0, turn, rows)
                fence_async_shared()
                barrier()
            # 0, which the compiler does not know: else it keeps all operands' addresses, in more registers than are.
            only = unit >> 24
            S = kept_S.index(only)
            dS = kept_dS.index(only)
            dO = kept_dO.index(only)
            X = kept_X.index(only)
            goal = kept_v.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            buffer = turn
            mbarrier.wait(ready_S.index(0), turn)
            KS = warpgroup_mma(keys, S.permute([1, 0]), none, use_acc=False, is_async=True)
            mbarrier.wait(ready_dO.index(0), turn)
            OS = warpgroup_mma(dO, S, none, use_acc=False, is_async=True)
            mbarrier.wait(ready_factors.index(buffer), (unit // 2) % 2)
            mbarrier.wait(ready_v.index(0), turn)
            beta = _rates(kept_factors, buffer, BETA, wide)
            read_k = _rates(kept_factors, buffer, READ_K, wide)
            KS, OS = warpgroup_mma_wait(1, deps=(KS, OS))
            E = goal.load(wide).to(gl.float32) - KS * read_k
            goal.store((E * beta).to(dtype))
            fence_async_shared()
            mbarrier.wait(ready_X.index(0), turn)
            aside_compared.store(_halves(X.load(wide).to(gl.float32) * E, halves))
            mbarrier.wait(ready_T.index(0), turn)
            mbarrier.wait(ready_dS.index(0), turn)
            XS = warpgroup_mma(X, S, none, use_acc=False, is_async=True)
            tma.store_wait(0)  # dV has left R's place; of the last item, dq and dk have left q's and k's
            barrier()
            # E is there for all to see.
            inverse = kept_T.index(only)
            Rd = warpgroup_mma(inverse, goal, none, use_acc=False, is_async=True)
            if GATED:
                SdS = nothing
                for x in gl.static_range(4):  # few registers at a time
                    each = _quarter(S, x).load(square).to(gl.float32)
                    SdS = SdS + each * _quarter(dS, x).load(square).to(gl.float32)
                aside_kept.store(_halves(SdS, halves))
            OS, XS, Rd = warpgroup_mma_wait(1, deps=(OS, XS, Rd))
            OS = OS * _rates(kept_factors, buffer, READ_Q, wide)
            total_q = total_q + OS
            if GATED:
                dG = _halves(queries.load(wide).to(gl.float32) * OS, halves)
            XS = XS * (beta * read_k * -1.0)
            total_k = total_k + XS
            if GATED:
                aside_dG.store(dG + _halves(keys.load(wide).to(gl.float32) * XS, halves))
            Rd, total_q, total_k = warpgroup_mma_wait(0, deps=(Rd, total_q, total_k))
            only = unit >> 25
            dS = kept_dS.index(only)
            dO = kept_dO.index(only)
            X = kept_X.index(only)
            residual = kept_R.index(only)
            dQK = kept_dQK.index(only)
            dKK = kept_dKK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            QK = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            residual.store(Rd.to(dtype))
            fence_async_shared()
            first = (r == 0) & more_items
            _expect((states, v, T), (ready_S, ready_v, ready_T), 0, more)
            _expect((factors,), (ready_factors,), 1 - buffer, more)
            _expect((k, q), (ready_k, ready_q), 1 - stage, first)
            barrier()
            # R is there for all to see; S, v, T have been read.
            dP = warpgroup_mma(dO, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            KK = warpgroup_mma(keys, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
            XR = warpgroup_mma(X, residual.permute([1, 0]), nothing, use_acc=False, is_async=True)
            _fetch(
                (states, v, T), (kept_S, kept_v, kept_T), (ready_S, ready_v, ready_T),
                ((to_at * V, 0), (to_token, to_head * head_v), (to_at * 64, 0)), 0, more,
            )  # fmt: skip
            _fetch((factors,), (kept_factors,), (ready_factors,), ((to_at * FACTORS, 0),), 1 - buffer, more)
            _fetch(
                (k, q), (kept_k, kept_q), (ready_k, ready_q),
                ((next_token, next_key_head * head_k), (next_token, next_key_head * head_q)), 1 - stage, first,
            )  # fmt: skip
            lower = i[:, None] >= j[None, :]
            strict = i[:, None] > j[None, :]
            equal = i[:, None] == j[None, :]
            if GATED:
                between = _rates(kept_factors, buffer, COARSE, square) - _factor(kept_factors, buffer, COARSE, square)
                fine = _rates(kept_factors, buffer, FINE, square) - _factor(kept_factors, buffer, FINE, square)
                D = gl.exp(gl.where(lower, between + fine, float("-inf")))
            else:
                D = gl.where(lower, 1.0, nothing)
            if NORMALIZE:
                D = D * norm_k_across[None, :]
            rate = _rates(kept_factors, buffer, BETA, square)
            QK, dP, KK, XR = warpgroup_mma_wait(2, deps=(QK, dP, KK, XR))
            dP = gl.where(lower, dP, 0.0) * D
            if NORMALIZE:
                dP = dP * (norm_q * scale)[:, None]
            else:
                dP = dP * scale
            dQK.store(dP.to(dtype))
            paired = gl.where(equal, 0.0, dP * QK)
            KK, XR = warpgroup_mma_wait(0, deps=(KK, XR))
            RdS = warpgroup_mma(residual, dS, none, use_acc=False, is_async=True)  # (not sooner: registers)
            own = _halves(gl.where(equal, XR, 0.0), halves)
            XR = gl.where(strict, XR, 0.0) * D
            if NORMALIZE:
                XR = XR * norm_k[:, None]
            through = _halves(XR * KK, halves)
            XR = XR * (rate * -1.0)
            dKK.store(XR.to(dtype))
            paired = paired + XR * KK
            if GATED:
                dG = aside_dG.load(halves) + _halves(paired, halves)
                columns = gl.sum(paired, 0)
            own, compared = gl.reduce((own, aside_compared.load(halves) - through), 1, _add2)
            own = gl.convert_layout(own, down)[:, None]
            compared = gl.convert_layout(compared, down)[:, None]
            small = gl.abs(rate) <= LEAST
            drate = gl.where(small, compared, own / gl.where(small, 1.0, rate))
            at_token = (token + i).to(gl.int64)[:, None] * HV + head
            gl.store(dbeta + at_token, drate.to(dbeta.dtype.element_ty), mask=i[:, None] < rows)
            write = _rates(kept_factors, buffer, WRITE, wide)
            RdS = warpgroup_mma_wait(0, deps=(RdS,))
            RdS = RdS * write
            total_k = total_k + RdS
            if GATED:
                at_sums = sums + at.to(gl.int64) * (3 * 64)
                gl.store(at_sums + 128 + j, columns * -1.0)
                written = _halves(keys.load(wide).to(gl.float32) * RdS, halves)
                written = gl.where(row < rows - 1, written, 0.0)
                last = gl.load(numbers + (at.to(gl.int64) * FACTORS + LAST) * 64)
                dlast = gl.sum(gl.reshape(written + aside_kept.load(halves) * last, [128]), 0)
                dG = dG + gl.where(row == rows - 1, gl.where(half == 0, dlast, 0.0), written * -1.0)
                gl.store(at_sums + half * 64 + row, dG)
            barrier()  # all have done with R: its place takes dV
            residual.store((X.load(wide).to(gl.float32) * _rates(kept_factors, buffer, BETA, wide)).to(dtype))
            fence_async_shared()
            _expect((doutput, dstates, dvalues), (ready_dO, ready_dS, ready_X), 0, more)
            barrier()
            # dP, dM, dV are there for all to see; dO, X, dS have been read.
            only = unit >> 26
            dQK = kept_dQK.index(only)
            dKK = kept_dKK.index(only)
            keys = kept_k.index(stage + only)
            queries = kept_q.index(stage + only)
            total_q = warpgroup_mma(dQK, keys, total_q, is_async=True)
            total_k = warpgroup_mma(dQK.permute([1, 0]), queries, total_k, is_async=True)
            total_k = warpgroup_mma(dKK, keys, total_k, is_async=True)
            total_k = warpgroup_mma(dKK.permute([1, 0]), keys, total_k, is_async=True)
            tma.async_copy_shared_to_global(dvalues, [gl.where(partial, dvalues.shape[0], token), head * V], residual)
            _fetch(
                (doutput, dvalues, dstates), (kept_dO, kept_X, kept_dS), (ready_dO, ready_X, ready_dS),
                ((to_token, to_head * V), (to_token, to_head * V), (to_at * V, 0)), 0, more,
            )  # fmt: skip
            if partial:
                _store_rows(residual, at_dv + token.to(gl.int64) * (HV * V) + head * V, HV * V, rows)
                barrier()
            total_q, total_k = warpgroup_mma_wait(0, deps=(total_q, total_k))
            unit = unit + 1
            at = to_at
        keys = kept_k.index(stage)
        queries = kept_q.index(stage)
        if NORMALIZE:
            total_q = _through_norm(total_q, queries, gl.convert_layout(norm_q, along), wide)
            total_k = _through_norm(total_k, keys, gl.convert_layout(norm_k, along), wide)
        barrier()  # all have read q and k: their places take dq and dk
        queries.store(total_q.to(dtype))
        keys.store(total_k.to(dtype))
        fence_async_shared()
        barrier()
        place = gl.where(partial, dq.shape[0], token)
        tma.async_copy_shared_to_global(dq, [place, key_head * K], queries)
        tma.async_copy_shared_to_global(dk, [place, key_head * K], keys)
        if partial:
            at_row = token.to(gl.int64) * (H * K) + key_head * K
            _store_rows(queries, at_dq + at_row, H * K, rows)
            _store_rows(keys, at_dk + at_row, H * K, rows)
            barrier()
        item = next_item
        token = next_token
        rows = next_rows
    tma.store_wait(0)


def head_gradients_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    T: Tensor,
    factors: Tensor,
    states: Tensor,
    dstates: Tensor,
    doutput: Tensor,
    dvalues: Tensor,
    dq: Tensor,
    dk: Tensor,
    dbeta: Tensor,
    sums: Tensor | None,
    bounds: Tensor | None,
    first_slots: Tensor | None,
    slot_texts: Tensor | None,
    count: int,
    scale: float,
    *,
    normalize_qk: bool,
) -> None:
    """The launch, if hopper.fits, k = v = 128 and the rule corrects: dq and dk `b t h k` as the caller gets them.

    count: of texts. sums `slot hv PARTS c`, None without decay. doutput, dvalues, dq, dk, states, dstates: contiguous
    (a slice of tokens of such, if b = 1). head_decay_gradients follows, with PARTS; gather does not.
    """
    b, t, h, K = q.shape
    hv, V = v.shape[2:]
    slots = T.shape[0]
    if doutput.data_ptr() % 16:  # what TMA asks for
        doutput = doutput.clone()
    # (Of a slice of tokens, b is 1: whatever its strides say, its rows follow one another.)
    doutput_rows, dvalues_rows = (describe(x, b * t, hv * V, hv * V, [64, V]) for x in (doutput, dvalues))
    dq_rows, dk_rows = (describe(x, b * t, h * K, h * K, [64, K]) for x in (dq, dk))
    start(head_gradients, (min(PROGRAMS, slots * h),))(
        describe_rows(q, K), describe_rows(k, K), describe_rows(v, V), describe_squares(T),
        describe(factors, factors.numel() // 64, 64, 64, [8, 64]),
        describe(states, slots * hv * V, K, K, [V, K]),
        describe(dstates, slots * hv * V, K, K, [V, K]),
        doutput_rows, dvalues_rows, dq_rows, dk_rows,
        factors, dbeta, dbeta if sums is None else sums, dvalues, dq, dk,
        bounds, first_slots, slot_texts, t, slots, count, q.stride(2), k.stride(2), v.stride(2), scale,
        HV=hv, R=hv // h, K=K, V=V, GATED=sums is not None, NORMALIZE=normalize_qk, PACKED=bounds is not None,
        num_warps=8,
    )  # fmt: skip
