"""The channel_scores of portable/channel.py for Hopper (sm_90), in Gluon, by persistent programs with TMA and wgmma.

A chunk is cut into blocks of 16 rows. For the decay d (log2) of one channel, W_i is its sum over (a, i] with a the
block's first row, E_i its sum over (i, end of block], and B its sum over the whole block. A thread holds all 16 rows of
a block, so W is a sum of its own registers. Every factor of portable/channel.py is a product of a few of the following,
none of which exceeds 1 except 1 / F:

    F = 2^W                               the pairs inside a block: q F, k F against k / F
    R = F 2^{d_a}                         from the block's start: readers
    2^E = 2^{W of the last row} / F       to the block's end: writers
    level 4 (blocks 1-0, 3-2)             R, 2^E
    level 5 (blocks 2, 3 - 0, 1)          R, R 2^{B_2} against 2^E 2^{B_1}, 2^E
    Qr, Kr, Kw                            R 2^{B before}, 2^E 2^{B behind}

Rules that only accumulate have no M, T and Kr, because their keys only write. With a probe (COMPARED, as in
portable/channel.py) e is compared, and e F is in the place of k F wherever keys read: e = erase k, or a vector of its
own, which meets as k what is erased, and in a second launch ("second") the key that is written. No bound of single
rows keeps such an inverse small, so rows are wild where it has grown.

A row whose 1 / F is too large (portable/channel.py: within_block) is wild, as are those that portable/solve.py finds.
This kernel's results for the rows from the first wild one on are not used: a second launch, of the portable
channel_scores, recomputes those rows by the levels.
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
from triton.language.extra.cuda import gdc_wait

from lineate.kernels.hopper.channel_parts import (
    add,
    as_cube,
    as_flat,
    ask,
    diagonal_entries,
    log2_decay_of_gate,
    opaque,
    reciprocal,
    small_merge,
    unit_bounds,
    zero_below,
)
from lineate.kernels.hopper.parts import barrier, exp2, link_late, sigmoid
from lineate.kernels.portable.channel import BF16_LIMIT
from lineate.kernels.portable.gates import FLOOR, LOG2E
from lineate.kernels.portable.solve import MOST_BETA, MOST_SQUARE, MOST_STEP

MOST_SCORE, MOST_GROWTH = gl.constexpr(1.0), gl.constexpr(16.0)  # of tame rows with a probe: in M, and the inverse


@gluon.jit
def _gram(a0, a1, b0, b1, none):
    """Start A B^T of two tiles of 64 channels each; the caller waits for it."""
    r = warpgroup_mma(a0, b0.permute([1, 0]), none, use_acc=False, is_async=True)
    return warpgroup_mma(a1, b1.permute([1, 0]), r, is_async=True)


@gluon.jit
def _by_block(x, flat: gl.constexpr, cube: gl.constexpr):
    """Reshape [64] to [4, 16, 1]."""
    x = gl.reshape(gl.convert_layout(x, gl.SliceLayout(1, flat)), [4, 16])
    return gl.convert_layout(x, gl.SliceLayout(2, cube), assert_trivial=True)[:, :, None]


@gluon.jit
def _half_chunk(
    tile_q, tile_k, tile_g, tile_Y, tile_Yk, tile_Z, tile_Y4, tile_Z4, bias, speed, lower_bound, Qr, Kr, Kw, ends, rows,
    norm_q, norm_k, scale, probes, row_stride: gl.constexpr, flat: gl.constexpr, cube: gl.constexpr,
    CORRECTS: gl.constexpr, RAW: gl.constexpr, BIAS: gl.constexpr, NORMALIZE: gl.constexpr, COMPARED: gl.constexpr,
):  # fmt: skip
    """Compute the factors of 64 channels: store Qr, Kr, Kw and e^{G_c}, and put the operands into shared memory.

    There are seven operands, six without tile_Yk. "second": only Kw is stored. Return how many rows of each block come
    before the first one whose 1 / F is not good, [4, 64].
    """
    line: gl.constexpr = gl.SliceLayout(1, cube)  # [block, channel]
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(1, line))[:, None]
    xs = gl.arange(0, 64, gl.SliceLayout(0, line))[None, :]
    there = r < (rows - b * 16)[:, None, :]
    at = (b * (16 * row_stride) + xs)[:, None, :]  # a block's first row; the other rows lie at constant offsets
    d = as_cube(tile_g.load(flat).to(gl.float32), cube)
    if RAW:
        if BIAS:
            d += gl.load(bias + xs).to(gl.float32)[:, None, :]
        d = gl.where(there, log2_decay_of_gate(d, speed, lower_bound), 0.0)
    else:
        d = d * LOG2E
    d = gl.where(d <= 0.0, gl.maximum(d, FLOOR * LOG2E), float("nan"))  # as `allowed` of gates.py does
    first = gl.sum(gl.where(r == 0, d, -0.0), 1)  # (adding -0.0 costs no instruction)
    W = gl.associative_scan(gl.where(r == 0, 0.0, d), 1, add)
    inside = gl.sum(gl.where(r == 15, W, -0.0), 1)
    # The decay of the other blocks.
    board = tile_Z4._reinterpret(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    board.store(first + inside)
    F = exp2(W)
    B0 = board.slice(0, 1, 0).load(line)
    B1 = board.slice(1, 1, 0).load(line)
    B2 = board.slice(2, 1, 0).load(line)
    B3 = board.slice(3, 1, 0).load(line)
    ea = exp2(first)
    el = exp2(inside)  # k 2^E = Z el
    before = gl.where(b > 0, B0, 0.0) + gl.where(b > 1, B1, 0.0) + gl.where(b > 2, B2, 0.0)
    behind = gl.where(b < 3, B3, 0.0) + gl.where(b < 2, B2, 0.0) + gl.where(b < 1, B1, 0.0)
    up = ea * exp2(before)
    down = el * exp2(behind)
    middle = exp2(gl.where(b == 0, B1, gl.where(b == 3, B2, 0.0)))
    if COMPARED != "second":
        gl.store(ends + xs, exp2(B0 + B1 + B2 + B3))
    even = ((b & 1) == 0)[:, None, :]
    early = (b < 2)[:, None, :]
    f4 = gl.where((b & 1) == 0, el, ea)[:, None, :]
    f5 = (gl.where(b < 2, el, ea) * middle)[:, None, :]
    k = as_cube(tile_k.load(flat).to(gl.float32), cube)
    Z = k * reciprocal(F)
    tile_Z.store(as_flat(Z.to(gl.bfloat16), flat))
    Yk = Z  # used if keys only write: their products as readers are never read
    if CORRECTS:
        if COMPARED == "key" or COMPARED == "erase":
            Yk = k * F
            if COMPARED == "erase":
                Yk = Yk * probes.to(gl.float32)
        else:
            Yk = probes.to(gl.float32) * F
        tile_Yk.store(as_flat(Yk.to(gl.bfloat16), flat))
        kr = Yk * up[:, None, :]
    kw = Z * down[:, None, :]
    if NORMALIZE and COMPARED != "probe":
        nk = _by_block(norm_k, flat, cube)
        if CORRECTS:
            kr = kr * nk
        kw = kw * nk
    if CORRECTS and COMPARED != "second":
        gl.store(Kr + at + r * row_stride, kr.to(gl.bfloat16), mask=there)
    gl.store(Kw + at + r * row_stride, kw.to(gl.bfloat16), mask=there)
    tile_Z4.store(as_flat((gl.where(even, Z, Yk) * f4).to(gl.bfloat16), flat))
    tile_k.store(as_flat((gl.where(early, Z, Yk) * f5).to(gl.bfloat16), flat))
    Y = as_cube(tile_q.load(flat).to(gl.float32), cube) * F
    tile_Y.store(as_flat(Y.to(gl.bfloat16), flat))
    if COMPARED != "second":
        if NORMALIZE:
            nq = _by_block(norm_q, flat, cube)
            qr = Y * up[:, None, :] * nq
        else:
            qr = Y * (up * scale)[:, None, :]
        gl.store(Qr + at + r * row_stride, qr.to(gl.bfloat16), mask=there)
    tile_Y4.store(as_flat((Y * f4).to(gl.bfloat16), flat))
    tile_q.store(as_flat((Y * f5).to(gl.bfloat16), flat))
    return gl.sum(gl.where(W >= -BF16_LIMIT, 1, 0), 1)  # W never rises from row to row


@gluon.jit
def _load_gates(
    beta, A_log, start, rows, head, i1, HV: gl.constexpr, CORRECTS: gl.constexpr, RAW: gl.constexpr
):  # fmt: skip
    """Start to load the first inputs of a unit: beta [64] and A_log, unconverted; 0 where there is none."""
    given_beta = i1 * 0
    if CORRECTS and beta is not None:
        given_beta = gl.load(beta + (start.to(gl.int64) + i1) * HV + head, mask=i1 < rows, other=0.0)
    given_A = start * 0
    if RAW and A_log is not None:
        given_A = gl.load(A_log + head)
    return given_beta, given_A


@gluon.jit
def _start_probe(probe, to, rows, row_stride: gl.constexpr, cube: gl.constexpr, COMPARED: gl.constexpr):
    """Start to load the probe (or erase) of 64 channels of a unit, unconverted; 0 past its rows, and without one."""
    probes = to
    if COMPARED != "key":
        r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None]
        b = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, cube)))[:, None]
        xs = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, :]
        at = (b * (16 * row_stride) + xs)[:, None, :]
        probes = gl.load(probe + to + at + r * row_stride, mask=r < (rows - b * 16)[:, None, :], other=0.0)
    return probes


@gluon.jit
def _first_above(X, most: gl.constexpr, first_wild, i1):
    """Return the first row of X [64, 64] with NaN or a number above `most`, or first_wild if that comes earlier."""
    above = gl.sum(gl.where(gl.abs(X) <= most, 0, 1), 1)
    return gl.minimum(first_wild, gl.min(gl.where(above == 0, 64, i1), 0))


@gluon.jit(do_not_specialize=["t", "units", "late"])
def channel_scores(
    q, k, g, P, M, T, probe, beta, A_log, dt_bias, Qr, Kr, Kw, factors, wild, norms,
    bounds, first_slots, slot_texts, t, units, late, head_q, head_k, scale, beta_scale,
    lower_bound,
    HV: gl.constexpr, R: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr, RAW: gl.constexpr,
    RAW_BETA: gl.constexpr, BIAS: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
    COMPARED: gl.constexpr, LINK: gl.constexpr,
):  # fmt: skip
    """Fill the scores of every chunk: K = 128, bfloat16, PRODUCTS = "fp16". A unit is a slot and one of HV heads.

    q, k, g, P, M, T: descriptors of tiles of 64 x 64; g: the gates, of 16 or 32 bits. units: slots HV. M, T, beta and
    Kr are used only if CORRECTS. KEEP: store the norms, and M of rules without a probe. With a probe `b t hv k` there
    is no beta. "second": fill only Kw, P and M. late: whether the previous launch, which nothing here depends on, may
    still run, and is waited for at the end; then a later launch that waits for this one also waits for that.
    """
    gl.static_assert(CORRECTS or not RAW)
    KR: gl.constexpr = 1 if COMPARED == "probe" else R  # heads of what is erased are value heads
    K: gl.constexpr = 128
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    cube: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    row: gl.constexpr = gl.SliceLayout(1, acc)
    tile: gl.constexpr = q.layout
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    all_q0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_q1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_k0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_k1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Y0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Y1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Yk0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Yk1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Z0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_Z1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    all_U0 = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)  # Y and Z of level 4; before that, the gates
    all_U1 = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    BITS: gl.constexpr = g.dtype.primitive_bitwidth
    all_g0 = all_U0._reinterpret(g.dtype, [32 // BITS, 64, 64], g.layout)
    all_g1 = all_U1._reinterpret(g.dtype, [32 // BITS, 64, 64], g.layout)
    ready_q0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_q1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_k0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_k1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready_q0, count=1)
    mbarrier.init(ready_q1, count=1)
    mbarrier.init(ready_k0, count=1)
    mbarrier.init(ready_k1, count=1)
    ready_g0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_g1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready_g0, count=1)
    mbarrier.init(ready_g1, count=1)
    sources = (k, k, q, q, g, g)
    tiles = (
        all_k0.index(0), all_k1.index(0), all_q0.index(0), all_q1.index(0), all_g0.index(0), all_g1.index(0)
    )  # fmt: skip
    ready = (ready_k0, ready_k1, ready_q0, ready_q1, ready_g0, ready_g1)
    fence_async_shared()
    barrier()

    link_late(LINK, late)
    u = gl.program_id(0)
    start, rows, head = unit_bounds(u, bounds, first_slots, slot_texts, t, HV, PACKED)
    cq = head // R * head_q
    ck = head // KR * head_k
    cg = head * K
    places = ((start, ck), (start, ck + 64), (start, cq), (start, cq + 64), (start, cg), (start, cg + 64))
    ask(sources, places, tiles, ready, u < units)
    given_beta, given_A = _load_gates(beta, A_log, start, rows, head, gl.arange(0, 64, row), HV, CORRECTS, RAW)

    j = gl.arange(0, 64, gl.SliceLayout(0, acc))[None, :]
    none = gl.zeros([64, 64], gl.float32, acc)
    phase = 0
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        if not PACKED:  # computed again, which is faster than registers that the compiler would spill
            start, rows, head = unit_bounds(opaque(u), bounds, first_slots, slot_texts, t, HV, PACKED)
        # Always 0, but computed inside the loop: otherwise the compiler computes all operands' addresses before the
        # loop and spills them.
        zero = start >> 30
        q0 = all_q0.index(zero)
        q1 = all_q1.index(zero)
        k0 = all_k0.index(zero)
        k1 = all_k1.index(zero)
        g0 = all_g0.index(zero)
        g1 = all_g1.index(zero)
        Y0 = all_Y0.index(zero)
        Y1 = all_Y1.index(zero)
        Yk0 = all_Yk0.index(zero)
        Yk1 = all_Yk1.index(zero)
        Z0 = all_Z0.index(zero)
        Z1 = all_Z1.index(zero)
        U0 = all_U0.index(zero)
        U1 = all_U1.index(zero)
        V0 = all_U0.index(zero + 1)
        V1 = all_U1.index(zero + 1)
        tiles = (k0, k1, q0, q1, g0, g1)
        i1 = opaque(gl.arange(0, 64, row))
        i = i1[:, None]
        token = start.to(gl.int64)
        rate = gl.where(i1 < rows, 1.0, 0.0)
        if CORRECTS and COMPARED == "key":
            rate = given_beta.to(gl.float32)
        speed = 1.0
        if RAW and A_log is not None:
            speed = gl.exp(given_A.to(gl.float32))
        if RAW_BETA:
            rate = gl.where(i1 < rows, beta_scale * sigmoid(rate), 0.0)
        to = (token * HV + head) * K
        probes0 = _start_probe(probe, to, rows, HV * K, cube, COMPARED)
        probes1 = _start_probe(probe, to + 64, rows, HV * K, cube, COMPARED)
        for x in gl.static_range(len(ready)):
            mbarrier.wait(ready[x], phase)
        phase ^= 1
        if rows < 64:  # the rows below are another sequence's
            for x in gl.static_range(len(tiles)):
                zero_below(tiles[x], rows, flat)
            fence_async_shared()
            barrier()
        norm_q = gl.full([64], 0.0, gl.float32, row) + scale
        norm_k = gl.full([64], 1.0, gl.float32, row)
        if NORMALIZE:
            qq = _gram(q0, q1, q0, q1, none)
            if COMPARED == "probe":
                qq = warpgroup_mma_wait(0, deps=(qq,))
                norm_q = scale * gl.rsqrt(diagonal_entries(qq, acc) + 1e-6)
            else:
                kk = _gram(k0, k1, k0, k1, none)
                qq, kk = warpgroup_mma_wait(0, deps=(qq, kk))
                norm_q = scale * gl.rsqrt(diagonal_entries(qq, acc) + 1e-6)
                norm_k = gl.rsqrt(diagonal_entries(kk, acc) + 1e-6)
            if KEEP:
                at_norm = norms + u.to(gl.int64) * 128 + i1
                gl.store(at_norm, norm_q)
                gl.store(at_norm + 64, norm_k)
        tma.store_wait(0)
        barrier()  # stored tiles are free again; with NORMALIZE, all warps' products have read q and k
        ends = factors + u.to(gl.int64) * (K + 64)
        good0 = _half_chunk(
            q0, k0, g0, Y0, Yk0, Z0, U0, V0, dt_bias + head * K, speed, lower_bound, Qr + to, Kr + to, Kw + to, ends,
            rows, norm_q, norm_k, scale, probes0, HV * K, flat, cube, CORRECTS, RAW, BIAS, NORMALIZE, COMPARED,
        )  # fmt: skip
        good1 = _half_chunk(
            q1, k1, g1, Y1, Yk1, Z1, U1, V1, dt_bias + head * K + 64, speed, lower_bound, Qr + to + 64, Kr + to + 64,
            Kw + to + 64, ends + 64, rows, norm_q, norm_k, scale, probes1, HV * K, flat, cube, CORRECTS, RAW, BIAS,
            NORMALIZE, COMPARED,
        )  # fmt: skip
        if COMPARED != "second":
            gl.store(ends + K + i1, rate)
        fence_async_shared()
        barrier()
        if CORRECTS:
            Ad = _gram(Yk0, Yk1, Z0, Z1, none)
            A4 = _gram(V0, V1, V0, V1, none)
            A5 = _gram(k0, k1, k0, k1, none)
        good = gl.minimum(good0, good1)
        block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, cube)))[:, None]
        first_wild = gl.min(gl.min(gl.where(good < 16, block * 16 + good, 64), 1), 0)
        cols_k = j
        if NORMALIZE and COMPARED != "probe":
            cols_k = gl.convert_layout(norm_k, gl.SliceLayout(0, acc))[None, :]
        if CORRECTS:
            Ad, A4, A5 = warpgroup_mma_wait(0, deps=(Ad, A4, A5))
        blocks = (i >> 4) ^ (j >> 4)
        own = blocks == 0
        far = blocks > 1
        if CORRECTS:
            if COMPARED == "key" or COMPARED == "erase":
                squares = diagonal_entries(Ad, acc)
            else:
                squares = rate
            A = gl.where(i > j, gl.where(own, Ad, gl.where(far, A5, A4)), 0.0)
            A, squares = warpgroup_mma_wait(0, deps=(A, squares))  # (fewer registers than with all six in flight)
        Pd = _gram(Y0, Y1, Z0, Z1, none)
        P4 = _gram(U0, U1, V0, V1, none)
        P5 = _gram(q0, q1, k0, k1, none)
        if CORRECTS:
            if NORMALIZE and COMPARED == "second":
                A = A * cols_k
            elif NORMALIZE and COMPARED != "probe":
                squares = squares * norm_k * norm_k
                A = A * norm_k[:, None] * cols_k
            if COMPARED != "key":  # 16 rows, each a sum of those before it, grow to 2^15 at most
                first_wild = _first_above(A, MOST_SCORE, first_wild, i1)
            else:
                tame = (rate >= 0.0) & (rate <= MOST_BETA) & (squares <= MOST_SQUARE) & (rate * squares <= MOST_STEP)
                first_wild = gl.minimum(first_wild, gl.min(gl.where(tame, 64, i1), 0))
            A, Pd, P4, P5 = warpgroup_mma_wait(0, deps=(A, Pd, P4, P5))
        else:
            Pd, P4, P5 = warpgroup_mma_wait(0, deps=(Pd, P4, P5))
        scores = gl.where(i >= j, gl.where(own, Pd, gl.where(far, P5, P4)), 0.0)
        if NORMALIZE and COMPARED == "probe":
            scores = scores * norm_q[:, None]
        elif NORMALIZE:
            scores = scores * norm_q[:, None] * cols_k
        else:
            scores = scores * scale
        if COMPARED == "key":
            gl.store(wild + u, first_wild)
        barrier()  # all warps' products have read the operands
        upcoming = u + gl.num_programs(0)
        more = upcoming < units
        start, rows, next_head = unit_bounds(
            gl.where(more, upcoming, u), bounds, first_slots, slot_texts, t, HV, PACKED
        )  # fmt: skip
        head = next_head
        cq = head // R * head_q
        ck = head // KR * head_k
        cg = head * K
        places = ((start, ck), (start, ck + 64), (start, cq), (start, cq + 64), (start, cg), (start, cg + 64))
        ask(sources, places, tiles, ready, more)
        given_beta, given_A = _load_gates(beta, A_log, start, rows, head, i1, HV, CORRECTS, RAW)
        Y0.store(scores.to(gl.bfloat16))
        if CORRECTS and COMPARED != "second":
            if KEEP and COMPARED == "key":
                Y1.store(A.to(gl.bfloat16))
            A = gl.where(i < first_wild, A * rate[:, None], 0.0)
            half_A = A.to(gl.float16)
            shared_A = Yk0._reinterpret(gl.float16, [64, 64], half)
            shared_X = Yk1._reinterpret(gl.float16, [64, 64], half)
            shared_A.store(half_A)

            # Invert the diagonal blocks of 16, one a warp, in registers.
            quads = gl.reshape(gl.where(own, A, 0.0), [4, 16, 4, 16])
            diagonal = gl.convert_layout(gl.sum(quads, 2), small)
            diagonal_t = _turn(diagonal, small)
            right: gl.constexpr = gl.DotOperandLayout(1, small, 2)
            Ba = gl.convert_layout(gl.permute(diagonal_t.to(gl.float16), [0, 2, 1]), right)
            Bt = gl.convert_layout(gl.permute(diagonal.to(gl.float16), [0, 2, 1]), right)
            bi = opaque(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, small))))[None, :, None]
            apart = bi ^ gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, small)))[None, None, :]
            X = gl.where(apart == 0, 1.0, gl.where(apart == 1, -diagonal, 0.0))
            Xt = gl.where(apart == 0, 1.0, gl.where(apart == 1, -diagonal_t, 0.0))
            X, Xt = small_merge(X, Xt, Bt, Ba, apart, 1, small)
            X, Xt = small_merge(X, Xt, Bt, Ba, apart, 2, small)
            X, Xt = small_merge(X, Xt, Bt, Ba, apart, 3, small)
            parts: gl.constexpr = quads.type.layout
            wide = gl.convert_layout(X, gl.SliceLayout(2, parts))[:, :, None, :] + gl.zeros(
                [4, 16, 4, 16], gl.float32, parts
            )
            X = gl.where(own, gl.convert_layout(gl.reshape(wide, [64, 64]), acc, assert_trivial=True), 0.0)
            if COMPARED != "key":
                first_wild = _first_above(X, MOST_GROWTH, first_wild, i1)
                X = gl.where(i < first_wild, X, 0.0)
            # Merge twice, in 64 x 64.
            half_X = X.to(gl.float16)
            shared_X.store(half_X)
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(P, [u * 64, 0], Y0)
            if KEEP and COMPARED == "key":
                tma.async_copy_shared_to_global(M, [u * 64, 0], Y1)
            XA = warpgroup_mma(gl.convert_layout(half_X, left), shared_A, none, use_acc=False, is_async=True)
            XA = warpgroup_mma_wait(0, deps=(XA,))
            Y = warpgroup_mma(gl.convert_layout(XA.to(gl.float16), left), shared_X, none, use_acc=False, is_async=True)
            Y = warpgroup_mma_wait(0, deps=(Y,))
            X = gl.where(blocks == 1, -Y, X)
            if COMPARED != "key":
                first_wild = _first_above(X, MOST_GROWTH, first_wild, i1)
                X = gl.where(i < first_wild, X, 0.0)
                gl.store(wild + u, first_wild)
            half_X = X.to(gl.float16)
            barrier()
            shared_X.store(half_X)
            fence_async_shared()
            barrier()
            XA = warpgroup_mma(gl.convert_layout(half_X, left), shared_A, none, use_acc=False, is_async=True)
            XA = warpgroup_mma_wait(0, deps=(XA,))
            Y = warpgroup_mma(gl.convert_layout(XA.to(gl.float16), left), shared_X, none, use_acc=False, is_async=True)
            Y = warpgroup_mma_wait(0, deps=(Y,))
            X = gl.where(blocks > 1, -Y, X)
            Z0.store(X.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(T, [u * 64, 0], Z0)
        else:
            if COMPARED == "second":
                Y1.store(A.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(P, [u * 64, 0], Y0)
            if COMPARED == "second":
                tma.async_copy_shared_to_global(M, [u * 64, 0], Y1)
    tma.store_wait(0)
    if LINK != 0:
        gdc_wait()


@gluon.jit
def _turn(x, small: gl.constexpr):
    return gl.convert_layout(gl.permute(x, [0, 2, 1]), small)
