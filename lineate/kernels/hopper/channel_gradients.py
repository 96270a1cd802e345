"""The last two kernels of portable/channel_gradients.py in one kernel for Hopper (sm_90), in Gluon.

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
rounded factors: Yq aq + Yk ak - Z aw (see portable/channel_gradients.py).

A unit with a row whose 1 / F is too large is marked in wild `slot hv 2`; the two Triton kernels recompute it.

With a probe (COMPARED, as in portable/channel.py), Yk = e F and ak belongs to e. If the probe is a vector of its own,
k is what is erased, and a second launch does the same for the key that is written, for which the state is no reader: aq
and ak begin with 0, and dq, dprobe and dlog_decay of the first launch are added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.channel_gradient_parts import (
    ACC,
    CUBE,
    FLAT,
    LINE,
    K,
    block_decays,
    clear_diagonal,
    fill_board,
    gate_gradients,
    make_tiles,
    pair_products,
    start_state_products,
    start_write_product,
    store_row_gradients,
    sum_over_rows,
)
from lineate.kernels.hopper.channel_parts import as_cube, ask, unit_bounds, zero_below
from lineate.kernels.hopper.parts import barrier
from lineate.kernels.portable.channel import BF16_LIMIT


@gluon.jit
def _new_barrier():
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


@gluon.jit
def _new_barriers():
    """Allocate the barriers of the five tiles."""
    S = _new_barrier()
    dS = _new_barrier()
    dO = _new_barrier()
    dE = _new_barrier()
    R = _new_barrier()
    return S, dO, R, dS, dE


@gluon.jit
def _state_places(at_S, channel, start, at_V, at_R, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Return the places of the five tiles (SECOND: of R and dS), whose value columns begin with FIRST."""
    memory = (at_S + FIRST, channel)
    values = (start, at_V + FIRST)
    places = (memory, values, (start, at_R + FIRST), memory, values)
    if SECOND:
        places = ((start, at_R + FIRST), memory)
    return places


@gluon.jit
def _row_places(
    start, head, channel, head_q, head_k, R: gl.constexpr, KR: gl.constexpr, TMA_GATES: gl.constexpr,
    SECOND: gl.constexpr,
):  # fmt: skip
    """Return the places of the tiles of the gates (with TMA_GATES), k and q (SECOND: and of the probe, dq, dprobe)."""
    cq = head // R * head_q + channel
    ck = head // KR * head_k + channel
    places = ((start, ck), (start, cq))
    own = (start, head * 128 + channel)
    if TMA_GATES:
        places = (own, (start, ck), (start, cq))
    if SECOND:
        places += (own, own, own)
    return places


@gluon.jit
def _trim_tiles(
    tiles_rows, tiles_0, tiles_1, ready_rows, ready_0, rows, phase, STATES: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Wait for the tiles that have a row for each token, and set the rows below the sequence's last one to 0."""
    for x in gl.static_range(len(tiles_rows)):
        mbarrier.wait(ready_rows[x], phase)
        zero_below(tiles_rows[x], rows, FLAT)
    for x in gl.static_range(STATES):
        if x == 0 if SECOND else x % 3 != 0:  # dO, R, dE
            mbarrier.wait(ready_0[x], phase)
            zero_below(tiles_0[x], rows, FLAT)
            zero_below(tiles_1[x], rows, FLAT)
    fence_async_shared()
    barrier()


@gluon.jit
def _fetch_behind_products(
    of_states, at_S, channel, start, at_V, at_R, ready_1, tiles_1, M, item, ready_M, tile_M, more,
    CORRECTS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Fetch dM, and the last value columns of the next unit's tiles (if it exists), once all warps have read them."""
    barrier()
    if CORRECTS:
        mbarrier.expect(ready_M, 8192)
    for x in gl.static_range(len(of_states)):
        mbarrier.expect(ready_1[x], 8192, pred=more)
    if CORRECTS:
        tma.async_copy_global_to_shared(M, (item * 64, 0), ready_M, tile_M)
    places = _state_places(at_S, channel, start, at_V, at_R, 64, SECOND)
    for x in gl.static_range(len(of_states)):
        tma.async_copy_global_to_shared(of_states[x], places[x], ready_1[x], tiles_1[x], pred=more)


@gluon.jit(do_not_specialize=["t", "units"])
def channel_gradients(
    q, k, g, states, dstates, doutput, dvalues, residuals, P, M,
    gates, probe, dP, norms, A_log, dt_bias, dq, dk, dprobe, dlog_decay, dA_log, ddt_bias, wild,
    probe_tiles, dq_tiles, dprobe_tiles, dG,
    bounds, first_slots, slot_texts, t, units, head_q, head_k, head_v, scale, lower_bound,
    HV: gl.constexpr, R: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr, RAW: gl.constexpr,
    BIAS: gl.constexpr, PACKED: gl.constexpr, TMA_GATES: gl.constexpr, COMPARED: gl.constexpr,
):  # fmt: skip
    """Fill dq, dk and the gradients of the gates, for K = V = 128; mark the units left to Triton in wild.

    q ... M: descriptors of tiles of 64 x 64 (P, M: of dP and dM); g: a descriptor only with TMA_GATES. units: 2 slots
    HV. With a probe `b t hv k`, dprobe is filled. norms `slot hv 2 64`: scale / |q_i| and 1 / |k_i|, used only with
    NORMALIZE. dvalues and M are used only if CORRECTS; head_v only otherwise, when residuals are v in the caller's
    layout. "second": residuals are v likewise; probe_tiles, dq_tiles and dprobe_tiles are descriptors of probe, dq and
    dprobe; dG `token hv k` is the dlog_decay of the first launch in float32; blocks marked in wild are left alone.
    """
    gl.static_assert(CORRECTS or not RAW)
    SECOND: gl.constexpr = COMPARED == "second"
    KR: gl.constexpr = 1 if COMPARED == "probe" else R  # heads of what is erased are value heads
    STATES: gl.constexpr = 2 if SECOND else 5 if CORRECTS else 4  # tiles of the products with the state: S, dO, R, ...
    dtype: gl.constexpr = q.dtype
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
    ready_1 = _new_barriers()
    ready_0 = _new_barriers()
    ready_q = _new_barrier()
    ready_k = _new_barrier()
    ready_P = _new_barrier()
    ready_M = _new_barrier()
    of_states = (states, doutput, residuals, dstates)
    if SECOND:
        of_states = (residuals, dstates)
    elif CORRECTS:
        of_states += (dvalues,)
    of_rows = (k, q)
    ready_rows = (ready_k, ready_q)
    if TMA_GATES:
        ready_g = _new_barrier()
        of_rows = (g, k, q)
        ready_rows = (ready_g, ready_k, ready_q)
    if SECOND:
        ready_e = _new_barrier()
        ready_dq = _new_barrier()
        ready_de = _new_barrier()
        of_rows += (probe_tiles, dq_tiles, dprobe_tiles)
        ready_rows += (ready_e, ready_dq, ready_de)
    for x in gl.static_range(STATES):
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
    if SECOND:
        tiles_1 = (all_R1.index(0), all_dS1.index(0))
        tiles_0 = (all_C.index(0), all_A.index(1))
    tiles_rows = (all_k.index(0), all_q.index(0))
    channel = (u & 1) * 64
    at_S = (u >> 1) * 128
    at_V = head * 128
    at_R = at_V
    if SECOND or not CORRECTS:
        at_R = head * head_v
    places_rows = _row_places(start, head, channel, head_q, head_k, R, KR, TMA_GATES, SECOND)
    if TMA_GATES:
        tiles_rows = (all_g.index(0), all_k.index(0), all_q.index(0))
    if SECOND:
        tiles_rows += (all_S1.index(0), all_dO1.index(0), all_dE1.index(0))
    ask(of_states, _state_places(at_S, channel, start, at_V, at_R, 64, SECOND), tiles_1, ready_1, some)
    ask(of_states, _state_places(at_S, channel, start, at_V, at_R, 0, SECOND), tiles_0, ready_0, some)
    ask(of_rows, places_rows, tiles_rows, ready_rows, some)
    ask((P,), (((u >> 1) * 64, 0),), (all_P.index(0),), (ready_P,), some)

    none = gl.zeros([64, 64], gl.float32, ACC)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CUBE)))[None, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(1, LINE))[:, None]
    xs = gl.arange(0, 64, gl.SliceLayout(0, LINE))[None, :]
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
        if SECOND:  # (their places are those of tiles that a second writer does not have)
            tiles_1 = (R1, dS1)
            tiles_0 = (C0, A1)
            tiles_rows += (S1, dO1, dE1)
        item = u >> 1
        channel = (u & 1) * 64
        if not SECOND:
            gl.store(wild + u, gl.to_tensor(0).to(gl.int8))
        token = start.to(gl.int64)
        to = (token * HV + head) * K + channel
        there = r < (rows - b * 16)[:, None, :]
        if SECOND:
            there = there & (gl.load(wild + u) == 0)
        at = (b * (16 * HV * K) + xs)[:, None, :]  # a block's first row; the other rows lie at constant offsets
        probes = to
        if COMPARED == "erase" or COMPARED == "probe":
            probes = gl.load(probe + to + at + r * (HV * K), mask=there, other=0.0)
        if not TMA_GATES:  # (after the products, ptxas has so few registers that it would start one load after another)
            d = gl.load(gates + to + at + r * (HV * K), mask=there, other=0.0)
        for x in gl.static_range(STATES):
            mbarrier.wait(ready_1[x], phase)
        if rows < 64:  # the rows below are another sequence's
            _trim_tiles(tiles_rows, tiles_0, tiles_1, ready_rows, ready_0, rows, phase, STATES, SECOND)
        if SECOND:
            RS = start_write_product(tiles_1, tiles_0, ready_0, phase, none)
            OS, ES, SS = none, none, none
        else:
            OS, ES, RS, SS = start_state_products(tiles_1, tiles_0, ready_0, phase, none, CORRECTS)

        # Compute the decays while these products run.
        for x in gl.static_range(len(ready_rows)):
            mbarrier.wait(ready_rows[x], phase)
        if TMA_GATES:
            d = as_cube(tile_g.load(FLAT), CUBE)
        first, inside, F = block_decays(d, there, r, xs, A_log, dt_bias, head, channel, lower_bound, RAW, BIAS)
        own, rate_k, norm_q, norm_k, across = clear_diagonal(tile_P, ready_P, phase, dP, norms, item, scale, NORMALIZE)
        if NORMALIZE:
            in_q = 1.0
        else:
            in_q = scale

        upcoming = u + gl.num_programs(0)
        more = upcoming < units
        to_item = gl.where(more, upcoming, u) >> 1
        to_channel = (upcoming & 1) * 64
        next_start, next_rows, next_head = unit_bounds(to_item, bounds, first_slots, slot_texts, t, HV, PACKED)
        at_S = to_item * 128
        at_V = next_head * 128
        at_R = at_V
        if SECOND:
            at_R = next_head * head_v
            RS = warpgroup_mma_wait(0, deps=(RS,))
        elif CORRECTS:
            OS, ES, RS, SS = warpgroup_mma_wait(0, deps=(OS, ES, RS, SS))
        else:
            at_R = next_head * head_v
            OS, RS, SS = warpgroup_mma_wait(0, deps=(OS, RS, SS))
        _fetch_behind_products(
            of_states, at_S, to_channel, next_start, at_V, at_R, ready_1, tiles_1, M, item, ready_M, A1, more, CORRECTS,
            SECOND,
        )  # fmt: skip
        board, down, last = fill_board(B1, first, inside, SS, b, SECOND)
        if SECOND:
            probes = as_cube(S1.load(FLAT), CUBE)
        else:
            flags = wild + u + gl.zeros([4, 64], gl.int32, LINE)
            gl.store(flags, gl.full([4, 64], 1, gl.int8, LINE), mask=inside < -BF16_LIMIT)

        make_tiles(tile_q, tile_k, A0, B0, C0, F, in_q, probes, CORRECTS, COMPARED)
        if CORRECTS:
            mbarrier.wait(ready_M, phase)
            if NORMALIZE and COMPARED != "probe":
                scores = A1.load(ACC).to(gl.float32)
                if not SECOND:
                    scores = scores * norm_k
                A1.store((scores * across).to(dtype))
        fence_async_shared()
        barrier()
        aq, ak, aw, RS = pair_products(
            tile_P, A1, A0, B0, C0, board, OS, ES, RS, norm_q, norm_k, none, CORRECTS, NORMALIZE, SECOND
        )
        barrier()  # all warps have read the tiles
        total, step = store_row_gradients(
            aq, ak, aw, RS, own, rate_k, tile_q, tile_k, S1, dO1, dE1, all_A, all_B, all_C, F, in_q, down, probe, dq,
            dk, dprobe, to, at, r, there, HV * K, CORRECTS, NORMALIZE, COMPARED,
        )  # fmt: skip
        if RAW and TMA_GATES:
            given = tile_g.load(FLAT)
        fence_async_shared()
        barrier()  # everything but P has been read
        places_rows = _row_places(next_start, next_head, to_channel, head_q, head_k, R, KR, TMA_GATES, SECOND)
        places = _state_places(at_S, to_channel, next_start, at_V, at_R, 0, SECOND)
        ask(of_rows + of_states, places_rows + places, tiles_rows + tiles_0, ready_rows + ready_0, more)
        board, dgiven = sum_over_rows(tile_P, total, step, last, first, b, r)
        if RAW:
            if TMA_GATES:
                x0 = as_cube(given.to(gl.float32), CUBE)
            else:
                x0 = gl.load(gates + to + at + r * (HV * K), mask=there, other=0.0).to(gl.float32)
            dgiven = gate_gradients(
                dgiven, x0, step, first, inside, F, rows, there, r, xs, board, A_log, dt_bias, dA_log, ddt_bias, u,
                head, channel, lower_bound, BIAS,
            )  # fmt: skip
        if SECOND:
            dgiven = dgiven + gl.load(dG + to + at + r * (HV * K), mask=there, other=0.0)
        gl.store(dlog_decay + to + at + r * (HV * K), dgiven.to(dlog_decay.dtype.element_ty), mask=there)
        fence_async_shared()
        barrier()
        ask((P,), ((to_item * 64, 0),), (tile_P,), (ready_P,), more)
        start = next_start
        rows = next_rows
        head = next_head
        phase ^= 1
