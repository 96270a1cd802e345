"""The channel_state_gradients and channel_gradients of portable/channel.py in one kernel for Hopper (sm_90), in Gluon.

A unit is a chunk, a value head and 64 of its key channels. Blocks have 16 rows; W and F = 2^W are as in channel.py: W
is the decay (log2) from the block's first row a on, that row's own decay not counted. A row's reads are F times those
of row a, and its writes are 1 / F times those of row a. So the accumulators move the reference row from block to block
(per channel: s_b = 2^{from a of block b - 1 to a of block b}), and every pair of blocks uses the same three tiles, Yq =
q F, Yk = k F, Z = k / F:

    aq = dO S     aq <- aq s_b + P_b Z_b                      b = 0 .. 3, in the rows of blocks >= b
    ak = -dE S    ak <- ak s_b + M_b Z_b
    aw = 0        aw <- aw s_b+1 + P_b^T Yq_b + M_b^T Yk_b    b = 3 .. 0, in the rows of blocks <= b
    dq = F aq     dk = F ak + aw / F + (R dS) 2^{to the chunk's end}

P_b is the columns of block b of dP, and P_b^T the transpose of its rows. The diagonal of dP carries no decay and is
added separately. Rules that only accumulate have no M and no ak, and their R is V. dlog_decay_r is the sum of the reads
of rows >= r, minus the writes of rows >= r that the chunk reads, plus the writes of rows < r to the state, plus S.dS
e^{G_c}: one running sum in registers. Pairs of rows >= r cancel in it, so reads and writes are computed with the same
rounded factors: Yq aq + Yk ak - Z aw (see portable/channel.py).

A unit with a row whose 1 / F is too large is marked in wild `slot hv 2`; the two Triton kernels recompute it.
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

from lineate.kernels.hopper.channel_parts import (
    add,
    as_cube,
    as_flat,
    ask,
    board_rows,
    by_rows,
    column_block,
    diagonal_entries,
    log2,
    log2_decay_of_gate,
    opaque,
    opened,
    reciprocal,
    rounded,
    row_block,
    scale_blocks,
    stack2,
    stack8,
    turned_block,
    unit_bounds,
    zero_below,
)
from lineate.kernels.hopper.parts import barrier, exp2
from lineate.kernels.portable.channel import BF16_LIMIT
from lineate.kernels.portable.gates import FLOOR, LOG2E


@gluon.jit(do_not_specialize=["t", "units"])
def channel_gradients(
    q, k, g, states, dstates, doutput, dvalues, residuals, P, M,
    gates, dP, norms, A_log, dt_bias, dq, dk, dlog_decay, dA_log, ddt_bias, wild,
    bounds, first_slots, slot_texts, t, units, head_q, head_k, head_v, scale, lower_bound,
    HV: gl.constexpr, R: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr, RAW: gl.constexpr,
    BIAS: gl.constexpr, PACKED: gl.constexpr, TMA_GATES: gl.constexpr,
):  # fmt: skip
    """Fill dq, dk and the gradients of the gates, for K = V = 128; mark the units left to Triton in wild.

    q ... M: descriptors of tiles of 64 x 64 (P, M: of dP and dM); g: a descriptor only with TMA_GATES. units: 2 slots
    HV. norms `slot hv 2 64`: scale / |q_i| and 1 / |k_i|, used only with NORMALIZE. dvalues and M are used only if
    CORRECTS; head_v only otherwise, when residuals are v in the caller's layout.
    """
    gl.static_assert(CORRECTS or not RAW)
    K: gl.constexpr = 128
    dtype: gl.constexpr = q.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    cube: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    line: gl.constexpr = gl.SliceLayout(1, cube)  # [block, channel]
    two: gl.constexpr = gl.BlockedLayout([2, 1, 2], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    eight: gl.constexpr = gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    row: gl.constexpr = gl.SliceLayout(1, acc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    passing: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    tile: gl.constexpr = q.layout

    # Value columns 64 .. 127; fetched again as soon as the products with the state are done.
    all_S1 = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_dS1 = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_dO1 = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_dE1 = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_R1 = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    # Value columns 0 .. 63; later Yq and dM (A), Yk and boards (B), Z (C); last, accumulators that change layout.
    all_A = gl.allocate_shared_memory(dtype, [2, 64, 64], tile)
    all_B = gl.allocate_shared_memory(dtype, [2, 64, 64], tile)
    all_C = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_q = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_k = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_g = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    all_P = gl.allocate_shared_memory(dtype, [1, 64, 64], tile)
    ready_S1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dS1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dO1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dE1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_R1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_S0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dS0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dO0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_dE0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_R0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_k = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_P = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_M = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    of_states = (states, doutput, residuals, dstates)  # without dvalues, dE of the tuples below is not used
    if CORRECTS:
        of_states += (dvalues,)
    ready_1 = (ready_S1, ready_dO1, ready_R1, ready_dS1, ready_dE1)
    ready_0 = (ready_S0, ready_dO0, ready_R0, ready_dS0, ready_dE0)
    of_rows = (k, q)
    ready_rows = (ready_k, ready_q)
    if TMA_GATES:
        ready_g = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        of_rows = (g, k, q)
        ready_rows = (ready_g, ready_k, ready_q)
    for x in gl.static_range(len(of_states)):
        mbarrier.init(ready_1[x], count=1)
        mbarrier.init(ready_0[x], count=1)
    for x in gl.static_range(len(ready_rows)):
        mbarrier.init(ready_rows[x], count=1)
    mbarrier.init(ready_P, count=1)
    if CORRECTS:
        mbarrier.init(ready_M, count=1)
    fence_async_shared()
    barrier()

    u = gl.program_id(0)
    start, rows, head = unit_bounds(gl.minimum(u, units - 1) >> 1, bounds, first_slots, slot_texts, t, HV, PACKED)
    some = u < units
    tiles_1 = (all_S1.index(0), all_dO1.index(0), all_R1.index(0), all_dS1.index(0), all_dE1.index(0))
    tiles_0 = (all_A.index(0), all_B.index(0), all_C.index(0), all_A.index(1), all_B.index(1))
    tiles_rows = (all_k.index(0), all_q.index(0))
    channel = (u & 1) * 64
    at_S = (u >> 1) * 128
    at_V = head * 128
    at_R = at_V
    if not CORRECTS:
        at_R = head * head_v
    cq = head // R * head_q + channel
    ck = head // R * head_k + channel
    places_rows = ((start, ck), (start, cq))
    if TMA_GATES:
        tiles_rows = (all_g.index(0), all_k.index(0), all_q.index(0))
        places_rows = ((start, at_V + channel), (start, ck), (start, cq))
    ask(
        of_states,
        ((at_S + 64, channel), (start, at_V + 64), (start, at_R + 64), (at_S + 64, channel), (start, at_V + 64)),
        tiles_1, ready_1, some,
    )  # fmt: skip
    ask(
        of_states,
        ((at_S, channel), (start, at_V), (start, at_R), (at_S, channel), (start, at_V)),
        tiles_0,
        ready_0,
        some,
    )
    ask(of_rows, places_rows, tiles_rows, ready_rows, some)
    ask((P,), (((u >> 1) * 64, 0),), (all_P.index(0),), (ready_P,), some)

    none = gl.zeros([64, 64], gl.float32, acc)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(1, line))[:, None]
    xs = gl.arange(0, 64, gl.SliceLayout(0, line))[None, :]
    phase = 0
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        # Always 0, but computed inside the loop: otherwise the compiler computes all operands' addresses before the
        # loop and spills them.
        zero = start >> 30
        S1 = all_S1.index(zero)
        dS1 = all_dS1.index(zero)
        dO1 = all_dO1.index(zero)
        dE1 = all_dE1.index(zero)
        R1 = all_R1.index(zero)
        A0 = all_A.index(zero)
        A1 = all_A.index(zero + 1)
        B0 = all_B.index(zero)
        B1 = all_B.index(zero + 1)
        C0 = all_C.index(zero)
        tile_q = all_q.index(zero)
        tile_k = all_k.index(zero)
        tile_g = all_g.index(zero)
        tile_P = all_P.index(zero)
        tiles_1 = (S1, dO1, R1, dS1, dE1)
        tiles_0 = (A0, B0, C0, A1, B1)  # (the compiler puts a barrier between two neighbours from one allocation)
        tiles_rows = (tile_k, tile_q)
        if TMA_GATES:
            tiles_rows = (tile_g, tile_k, tile_q)
        item = u >> 1
        channel = (u & 1) * 64
        gl.store(wild + u, gl.to_tensor(0).to(gl.int8))
        token = start.to(gl.int64)
        to = (token * HV + head) * K + channel
        there = r < (rows - b * 16)[:, None, :]
        at = (b * (16 * HV * K) + xs)[:, None, :]  # a block's first row; the other rows lie at constant offsets
        if not TMA_GATES:  # (after the products, ptxas has so few registers that it would start one load after another)
            d = gl.load(gates + to + at + r * (HV * K), mask=there, other=0.0)
        for x in gl.static_range(len(of_states)):
            mbarrier.wait(ready_1[x], phase)
        if rows < 64:  # the rows below are another sequence's
            for x in gl.static_range(len(ready_rows)):
                mbarrier.wait(ready_rows[x], phase)
                zero_below(tiles_rows[x], rows, flat)
            for x in gl.static_range(len(of_states)):
                if x % 3 != 0:  # dO, R, dE
                    mbarrier.wait(ready_0[x], phase)
                    zero_below(tiles_0[x], rows, flat)
                    zero_below(tiles_1[x], rows, flat)
            fence_async_shared()
            barrier()
        OS = warpgroup_mma(dO1, S1, none, use_acc=False, is_async=True)
        if CORRECTS:
            ES = warpgroup_mma(dE1, S1, none, use_acc=False, is_async=True)
        RS = warpgroup_mma(R1, dS1, none, use_acc=False, is_async=True)
        SS = warpgroup_mma(S1.permute([1, 0]), dS1, none, use_acc=False, is_async=True)
        for x in gl.static_range(len(of_states)):
            mbarrier.wait(ready_0[x], phase)
        OS = warpgroup_mma(B0, A0, OS, is_async=True)
        if CORRECTS:
            ES = warpgroup_mma(B1, A0, ES, is_async=True)
        RS = warpgroup_mma(C0, A1, RS, is_async=True)
        SS = warpgroup_mma(A0.permute([1, 0]), A1, SS, is_async=True)

        # Compute the decays while these products run.
        for x in gl.static_range(len(ready_rows)):
            mbarrier.wait(ready_rows[x], phase)
        if TMA_GATES:
            d = as_cube(tile_g.load(flat), cube)
        d = d.to(gl.float32)
        if RAW:
            if BIAS:
                d += gl.load(dt_bias + head * K + channel + xs).to(gl.float32)[:, None, :]
            speed = 1.0
            if A_log is not None:
                speed = gl.exp(gl.load(A_log + head).to(gl.float32))
            d = gl.where(there, log2_decay_of_gate(d, speed, lower_bound), 0.0)
        else:
            d = d * LOG2E
        d = gl.where(d <= 0.0, gl.maximum(d, FLOOR * LOG2E), float("nan"))  # as `allowed` of gates.py does
        first = gl.sum(gl.where(r == 0, d, -0.0), 1)  # (adding -0.0 costs no instruction)
        W = gl.associative_scan(gl.where(r == 0, 0.0, d), 1, add)
        inside = gl.sum(gl.where(r == 15, W, -0.0), 1)
        F = exp2(W)

        # P without its diagonal; with NORMALIZE, P of the unit vectors times the inverse norms. Without, q F has scale.
        i = opaque(gl.arange(0, 64, row))
        j = gl.arange(0, 64, gl.SliceLayout(0, acc))
        mbarrier.wait(ready_P, phase)
        scores = tile_P.load(acc)
        at_norm = norms + item.to(gl.int64) * 128
        own = gl.load(dP + item.to(gl.int64) * 4096 + i * 65).to(gl.float32)
        if NORMALIZE:
            rate_q = gl.load(at_norm + i)
            rate_k = gl.load(at_norm + 64 + i)
            own = own * rate_q * rate_k
            norm_q = rate_q[:, None]
            norm_k = rate_k[:, None]
            across = gl.load(at_norm + 64 + j)[None, :]
            scores = scores.to(gl.float32) * norm_q * across
            in_q = 1.0
        else:
            own = own * scale
            in_q = scale
        tile_P.store(gl.where(i[:, None] == j[None, :], 0.0, scores).to(dtype))

        upcoming = u + gl.num_programs(0)
        more = upcoming < units
        to_item = gl.where(more, upcoming, u) >> 1
        to_channel = (upcoming & 1) * 64
        next_start, next_rows, next_head = unit_bounds(to_item, bounds, first_slots, slot_texts, t, HV, PACKED)
        at_S = to_item * 128
        at_V = next_head * 128
        at_R = at_V
        if CORRECTS:
            OS, ES, RS, SS = warpgroup_mma_wait(0, deps=(OS, ES, RS, SS))
        else:
            at_R = next_head * head_v
            OS, RS, SS = warpgroup_mma_wait(0, deps=(OS, RS, SS))
        barrier()  # all warps' products are done
        if CORRECTS:
            mbarrier.expect(ready_M, 8192)
        for x in gl.static_range(len(of_states)):
            mbarrier.expect(ready_1[x], 8192, pred=more)
        if CORRECTS:
            tma.async_copy_global_to_shared(M, (item * 64, 0), ready_M, A1)
        places = (
            (at_S + 64, to_channel), (next_start, at_V + 64), (next_start, at_R + 64), (at_S + 64, to_channel),
            (next_start, at_V + 64),
        )  # fmt: skip
        for x in gl.static_range(len(of_states)):
            tma.async_copy_global_to_shared(of_states[x], places[x], ready_1[x], tiles_1[x], pred=more)
        SdS = gl.convert_layout(diagonal_entries(SS, acc), gl.SliceLayout(0, line))[None, :]

        # The decay from each block's reference row to the next block's.
        board = B1._reinterpret(gl.float32, [32, 64], plain)
        board.slice(0, 8, 0).store(stack2(first, inside, two))
        first0 = board.slice(0, 1, 0).load(line)
        first1 = board.slice(1, 1, 0).load(line)
        first2 = board.slice(2, 1, 0).load(line)
        first3 = board.slice(3, 1, 0).load(line)
        inside0 = board.slice(4, 1, 0).load(line)
        inside1 = board.slice(5, 1, 0).load(line)
        inside2 = board.slice(6, 1, 0).load(line)
        inside3 = board.slice(7, 1, 0).load(line)
        s1 = inside0 + first1
        s2 = inside1 + first2
        s3 = inside2 + first3
        # The decay from the block's row a to the chunk's end, and over the whole chunk.
        down = inside3 + gl.where(b < 3, s3, 0.0) + gl.where(b < 2, s2, 0.0) + gl.where(b < 1, s1, 0.0)
        last = SdS * exp2(first0 + s1 + s2 + s3 + inside3)
        down = exp2(down)
        s1 = exp2(s1)
        s2 = exp2(s2)
        s3 = exp2(s3)
        nothing = gl.zeros([4, 64], gl.float32, line)
        board.store(
            stack8(
                gl.where(b >= 1, s1, 1.0), gl.where(b >= 2, s2, 1.0), gl.where(b >= 3, s3, 1.0),
                gl.where(b < 1, s1, 1.0), gl.where(b < 2, s2, 1.0), gl.where(b < 3, s3, 1.0),
                nothing + exp2(first0), eight,
            )
        )  # fmt: skip
        flags = wild + u + gl.zeros([4, 64], gl.int32, line)
        gl.store(flags, gl.full([4, 64], 1, gl.int8, line), mask=inside < -BF16_LIMIT)

        # Make the tiles Yq, Yk and Z.
        keys = as_cube(tile_k.load(flat).to(gl.float32), cube)
        C0.store(as_flat((keys * reciprocal(F)).to(dtype), flat))
        if CORRECTS:
            B0.store(as_flat((keys * F).to(dtype), flat))
        queries = as_cube(tile_q.load(flat).to(gl.float32), cube)
        A0.store(as_flat((queries * in_q * F).to(dtype), flat))
        if CORRECTS:
            mbarrier.wait(ready_M, phase)
            if NORMALIZE:
                scores = A1.load(acc).to(gl.float32)
                A1.store((scores * norm_k * across).to(dtype))
        fence_async_shared()
        barrier()
        f = board_rows(board, 24, OS)
        if NORMALIZE:
            aq = scale_blocks(OS, f, acc) * norm_q
            if CORRECTS:
                ak = scale_blocks(ES, f, acc) * (norm_k * -1.0)
        else:
            aq = scale_blocks(OS, f, acc)
            if CORRECTS:
                ak = scale_blocks(ES, f * -1.0, acc)
        aq = warpgroup_mma(column_block(tile_P, 0, left), row_block(C0, 0), aq, is_async=True)
        if CORRECTS:
            ak = warpgroup_mma(column_block(A1, 0, left), row_block(C0, 0), ak, is_async=True)
        aw = warpgroup_mma(turned_block(tile_P, 48, left), row_block(A0, 48), none, use_acc=False, is_async=True)
        if CORRECTS:
            aw = warpgroup_mma(turned_block(A1, 48, left), row_block(B0, 48), aw, is_async=True)
        for s in gl.static_range(1, 4):
            f = board_rows(board, s * 4 - 4, OS)
            if CORRECTS:
                aq, ak, aw = warpgroup_mma_wait(3, deps=(aq, ak, aw))
            else:
                aq, aw = warpgroup_mma_wait(1, deps=(aq, aw))
            aq = warpgroup_mma(
                column_block(tile_P, s * 16, left), row_block(C0, s * 16), scale_blocks(aq, f, acc), is_async=True
            )
            if CORRECTS:
                aq, ak, aw = warpgroup_mma_wait(3, deps=(aq, ak, aw))
                ak = warpgroup_mma(
                    column_block(A1, s * 16, left), row_block(C0, s * 16), scale_blocks(ak, f, acc), is_async=True
                )
            f = board_rows(board, 24 - s * 4, OS)
            if CORRECTS:
                aq, ak, aw = warpgroup_mma_wait(2, deps=(aq, ak, aw))
            else:
                aq, aw = warpgroup_mma_wait(1, deps=(aq, aw))
            aw = warpgroup_mma(
                turned_block(tile_P, 48 - s * 16, left),
                row_block(A0, 48 - s * 16),
                scale_blocks(aw, f, acc),
                is_async=True,
            )
            if CORRECTS:
                aw = warpgroup_mma(turned_block(A1, 48 - s * 16, left), row_block(B0, 48 - s * 16), aw, is_async=True)
        if CORRECTS:
            aq, ak, aw, RS = warpgroup_mma_wait(0, deps=(aq, ak, aw, RS))
        else:
            aq, aw, RS = warpgroup_mma_wait(0, deps=(aq, aw, RS))
        barrier()  # all warps have read the tiles

        # Pass the accumulators through shared memory, so that a thread gets all rows of a block.
        pass_A = all_A._reinterpret(gl.float32, [64, 64], passing)
        pass_B = all_B._reinterpret(gl.float32, [64, 64], passing)
        by_row = all_C._reinterpret(gl.float32, [2048], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        pass_A.store(aq)
        if CORRECTS:
            pass_B.store(ak)
        by_row.slice(0, 64, 0).store(own)
        if NORMALIZE:
            by_row.slice(64, 64, 0).store(rate_k)
        # (q and k are loaded twice, to save registers)
        read = as_cube(pass_A.load(flat), cube)
        total = read * rounded(as_cube(tile_q.load(flat).to(gl.float32), cube) * in_q * F)
        read = F * in_q * read
        own = by_rows(by_row.slice(0, 64, 0).load(gl.SliceLayout(1, flat)), cube)
        read = read + own * as_cube(tile_k.load(flat).to(gl.float32), cube)
        gl.store(dq + to + at + r * (HV * K), read.to(dtype), mask=there)
        if CORRECTS:
            reread = as_cube(pass_B.load(flat), cube)
        pass_A.store(aw)
        pass_B.store(RS)
        inverse = reciprocal(F)
        written = as_cube(pass_A.load(flat), cube)
        keys = as_cube(tile_k.load(flat).to(gl.float32), cube)
        total = total - written * rounded(keys * inverse)
        written = inverse * written
        if CORRECTS:
            total = total + reread * rounded(keys * F)
            written = F * reread + written
        kept = as_cube(pass_B.load(flat), cube) * inverse * down[:, None, :]
        if NORMALIZE:
            kept = kept * by_rows(by_row.slice(64, 64, 0).load(gl.SliceLayout(1, flat)), cube)
        step = keys * kept - total
        own = by_rows(by_row.slice(0, 64, 0).load(gl.SliceLayout(1, flat)), cube)
        written = written + kept + own * as_cube(tile_q.load(flat).to(gl.float32), cube)
        gl.store(dk + to + at + r * (HV * K), written.to(dtype), mask=there)
        if RAW and TMA_GATES:
            given = tile_g.load(flat)
        fence_async_shared()
        barrier()  # everything but P has been read
        cq = next_head // R * head_q + to_channel
        ck = next_head // R * head_k + to_channel
        places_rows = ((next_start, ck), (next_start, cq))
        if TMA_GATES:
            places_rows = ((next_start, at_V + to_channel), (next_start, ck), (next_start, cq))
        places = ((at_S, to_channel), (next_start, at_V), (next_start, at_R), (at_S, to_channel), (next_start, at_V))
        ask(of_rows + of_states, places_rows + places, tiles_rows + tiles_0, ready_rows + ready_0, more)
        running = gl.associative_scan(step, 1, add)
        block_step = gl.sum(gl.where(r == 15, running, -0.0), 1)
        block_total = gl.sum(total, 1)
        board = tile_P._reinterpret(gl.float32, [32, 64], plain)
        board.slice(0, 8, 0).store(stack2(block_total, block_total + block_step, two))
        base = last + block_total
        for x in gl.static_range(1, 4):
            base = base + gl.where(b < x, board.slice(x, 1, 0).load(line), 0.0)
            base = base + gl.where(b >= x, board.slice(x + 3, 1, 0).load(line), 0.0)
        dgiven = base[:, None, :] + (running - step)
        dgiven = gl.where((r == 0) & (first <= FLOOR * LOG2E)[:, None, :], 0.0, dgiven)
        if RAW:
            if TMA_GATES:
                x0 = as_cube(given.to(gl.float32), cube)
            else:
                x0 = gl.load(gates + to + at + r * (HV * K), mask=there, other=0.0).to(gl.float32)
            if BIAS:
                x0 += gl.load(dt_bias + head * K + channel + xs).to(gl.float32)[:, None, :]
            rate = 1.0
            if A_log is not None:
                rate = gl.exp(gl.load(A_log + head).to(gl.float32))
            if lower_bound is None:
                # The sum of dgiven_r d_r, by parts: d is the difference of W = log2 F, and step is that of dgiven.
                # (Keeping W would take registers; log2 F is exact to 1e-7, which matters only for log_decay below
                # 1e-5.)
                of_speed = gl.sum(gl.where(r == 15, -0.0, log2(F) * step), 1)
                of_speed = inside * gl.sum(gl.where(r == 15, dgiven, -0.0), 1) - of_speed
                of_speed = (of_speed + first * gl.sum(gl.where(r == 0, dgiven, -0.0), 1)) * (1.0 / LOG2E)
                of_speed = gl.where(rows > 0, of_speed, 0.0)
                dgiven = gl.where(there, dgiven, 0.0)
                dgiven = dgiven * (rate * -1.0) * opened(x0, 1.0)
            else:
                open_ = opened(x0, rate)
                dgiven = gl.where(there, dgiven, 0.0) * (lower_bound * rate) * (open_ * (1.0 - open_))
                of_speed = gl.sum(gl.where(there, dgiven * x0, 0.0), 1)
            of_bias = gl.sum(dgiven, 1)
            board.slice(8, 8, 0).store(stack2(of_speed, of_bias, two))
            of_speed = board.slice(8, 1, 0).load(line)
            of_bias = board.slice(12, 1, 0).load(line)
            for x in gl.static_range(1, 4):
                of_speed = of_speed + board.slice(8 + x, 1, 0).load(line)
                of_bias = of_bias + board.slice(12 + x, 1, 0).load(line)
            if A_log is not None:
                gl.store(dA_log + u, gl.sum(gl.sum(of_speed, 1), 0))
            if BIAS:
                gl.store(ddt_bias + item.to(gl.int64) * K + channel + xs, of_bias)
        gl.store(dlog_decay + to + at + r * (HV * K), dgiven.to(dlog_decay.dtype.element_ty), mask=there)
        fence_async_shared()
        barrier()
        ask((P,), ((to_item * 64, 0),), (tile_P,), (ready_P,), more)
        start = next_start
        rows = next_rows
        head = next_head
        phase ^= 1
