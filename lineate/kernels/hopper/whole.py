"""Scores, inverse, state and output of a sequence in one walk, for Hopper (sm_90), in Gluon.

A program walks one sequence and value head, 128 value columns at a time. Its warps form three groups:

    columns     eight warps with the state of 128 value columns in registers walk as in walk.py
    scores      four warps fetch the tiles of the chunks (TMA) and make P and N = -beta M of a chunk
    T           four warps make T = (I - N)^-1, as scores.py does

While the columns walk through chunk n, T of chunk n+1 and the scores of chunk n+2 are made, so P and T never leave
shared memory, and each input is read once. Barriers between the parts:

    ready_q, ready_k, ready_f[stage], ready_v[m]    q, k and the factors of a chunk have arrived; its values have
    full_N, taken       P and N of a chunk are made; N has been read
    full_T[m]           T of a chunk, all inputs of the columns for this chunk, and k of the next are ready;
                        rows after the sequence's end are 0
    there               the same for k of the only chunk, which the columns read before that
    empty[m]            the columns have read all tiles of a chunk
    mended              the scores' warps, which have more registers, have computed T of a chunk with wild rows

The state in 16 bits, the left operand of k S and q S, lies in shared memory, because registers limit the number of
warps.
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

from lineate.kernels.hopper.inverse import (
    LOW_ROW,
    PLAIN,
    WIDTH,
    beside,
    decayed,
    decays,
    system,
    tame_rows,
    vector,
    wild_inverse,
)
from lineate.kernels.hopper.parts import (
    barrier,
    factor,
    half,
    link,
    next_buffer,
    store_rows,
    text_bounds,
    times,
    trim,
)
from lineate.kernels.hopper.scores import (
    ACC,
    LOW,
    SMALL,
    TILES,
    diagonal_of_halves,
    halves,
    invert_blocks,
    merge_blocks,
)
from lineate.kernels.portable.gates import BETA, FACTORS, LAST, READ_K, READ_Q, WRITE

STAGES = gl.constexpr(3)
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # 128 value columns by 64
SQUARE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Registers a thread; the columns have 160. With fewer, their products wait for each other (ptxas C7512), and the warps
# of T spill registers.
SCORE_REGISTERS = gl.constexpr(112)
T_REGISTERS = gl.constexpr(80)


@gluon.jit
def _load_rows(q, k, factors, kept_q, kept_k, kept_factors, ready_q, ready_k, ready_f, stage, place, there):
    """Fetch q, k and the factors of a chunk. place: token, column of q, column of k, row of the factors."""
    to_q, to_k, to_f = ready_q.index(stage), ready_k.index(stage), ready_f.index(stage)
    mbarrier.expect(to_k, 128 * WIDTH, pred=there)
    mbarrier.expect(to_f, 4 * 64 * FACTORS, pred=there)
    mbarrier.expect(to_q, 128 * WIDTH, pred=there)
    tma.async_copy_global_to_shared(k, [place[0], place[2]], to_k, kept_k.index(stage), pred=there)
    tma.async_copy_global_to_shared(factors, [place[3], 0], to_f, kept_factors.index(stage), pred=there)
    tma.async_copy_global_to_shared(q, [place[0], place[1]], to_q, kept_q.index(stage), pred=there)


@gluon.jit
def _make_scores(
    q, k, v, factors, kept_q, kept_k, kept_v, kept_factors, ready_q, ready_k, ready_f, ready_v, full_N, empty, taken,
    mended, made_P, made_T, left_N, right_N, swap, squares, token, at, column_q, column_k, column_v, count, rows, scale,
    HV: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of every chunk, and make its P and its N = -beta M."""
    none = gl.zeros([64, 64], gl.float32, ACC)
    stage = 0
    phase = 0
    place = (token, column_q, column_k, at * FACTORS)
    _load_rows(q, k, factors, kept_q, kept_k, kept_factors, ready_q, ready_k, ready_f, 0, place, count > 0)
    for n in range(count):
        m = n % 2
        zero = n >> 28  # 0, which the compiler must not know, or it keeps masks in registers
        here = gl.where(n == count - 1, rows, 64)
        upcoming = gl.where(stage == STAGES - 1, 0, stage + 1)
        mbarrier.wait(ready_k.index(stage), phase)
        mbarrier.wait(ready_f.index(stage), phase)
        mbarrier.wait(ready_q.index(stage), phase)
        tile_k = kept_k.index(stage)
        QK = warpgroup_mma(kept_q.index(stage), tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        KK = warpgroup_mma(tile_k, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        flat = kept_factors._reinterpret(gl.float32, [STAGES, FACTORS * 64], PLAIN).index(stage)
        to_q = gl.full([64], 1.0, gl.float32, LOW_ROW) * scale
        D = decays(flat, flat, flat, 0, GATED, False)
        QK, KK = warpgroup_mma_wait(0, deps=(QK, KK))
        QK_low, QK_high = halves(QK, 32)
        KK_low, KK_high = halves(KK, 32)
        P_low, low = decayed(QK_low, KK_low, D, to_q, here, zero, 0)
        D = decays(flat, flat, flat, 32, GATED, False)
        P_high, high = decayed(QK_high, KK_high, D, to_q, here, zero, 32)
        mbarrier.wait(empty.index(m), ((n >> 1) & 1) ^ 1)  # the columns have done chunk n - 2
        mbarrier.expect(ready_v.index(m), 128 * WIDTH)
        tma.async_copy_global_to_shared(v, [token, column_v], ready_v.index(m), kept_v.index(m))
        token += 64
        at += HV
        place = (token, column_q, column_k, at * FACTORS)
        _load_rows(
            q, k, factors, kept_q, kept_k, kept_factors, ready_q, ready_k, ready_f, upcoming, place, n + 1 < count
        )
        made_P.index(m).store(beside(P_low, P_high))
        to_k = vector(flat, BETA, LOW_ROW) * -1.0
        mbarrier.wait(taken, (n & 1) ^ 1)
        squares.store(diagonal_of_halves(low, high, SMALL))
        N_low, N_high = system(low, high, to_k, here, zero)
        left_N.store(N_low)
        right_N.store(N_high)
        fence_async_shared()
        barrier()
        till = tame_rows(flat, squares, squares, here, GATED, False)
        mbarrier.arrive(full_N, count=1)
        if till < here:  # the other warps' T may have overflowed
            mbarrier.wait(taken, n & 1)
            T = wild_inverse(
                tile_k, flat, squares, squares, to_k, squares, swap, left_N, till, here, till >> 28, GATED, False
            )
            made_T.index(m).store(T.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            mbarrier.arrive(mended, count=1)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = upcoming


@gluon.jit
def _make_T(
    kept_k, kept_v, kept_factors, ready_k, ready_v, there, full_N, full_T, empty, taken, mended, made_T,
    left_N, right_N, swap, squares, count, rows, GATED: gl.constexpr,
):  # fmt: skip
    """Make T = (I - N)^-1 of every chunk, and clear the rows of the last chunk that are another sequence's."""
    stage = 0
    phase = 0
    wild = 0  # chunks with wild rows
    if (count == 1) & (rows < 64):
        trim(kept_k, ready_k, 0, 0, rows)
        fence_async_shared()
        barrier()
        mbarrier.arrive(there, count=1)
    for n in range(count):
        m = n % 2
        here = gl.where(n == count - 1, rows, 64)
        upcoming, turn = next_buffer(stage, phase, STAGES)
        mbarrier.wait(full_N, n & 1)
        N_low = left_N.load(LOW)
        X, XN = invert_blocks(N_low, right_N.load(LOW), swap, n >> 28)
        barrier()
        flat = kept_factors._reinterpret(gl.float32, [STAGES, FACTORS * 64], PLAIN).index(stage)
        till = tame_rows(flat, squares, squares, here, GATED, False)
        T = merge_blocks(N_low, X, XN, swap, left_N)
        mbarrier.wait(empty.index(m), ((n >> 1) & 1) ^ 1)
        made_T.index(m).store(T.to(gl.bfloat16))
        mbarrier.wait(ready_v.index(m), (n >> 1) & 1)
        mbarrier.wait(ready_k.index(upcoming), turn, pred=n + 1 < count)
        if rows < 64:
            if n + 1 == count:
                trim(kept_v, ready_v, m, (n >> 1) & 1, rows)
            if n + 2 == count:
                trim(kept_k, ready_k, upcoming, turn, rows)
        fence_async_shared()
        barrier()
        mbarrier.arrive(taken, count=1)
        if till < here:
            mbarrier.wait(mended, wild & 1)
            wild += 1
        mbarrier.arrive(full_T.index(m), count=1)
        stage = upcoming
        phase = turn


@gluon.jit
def _wide(x):
    """Return bfloat16 as float32; two numbers take one instruction each."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a; and.b32 a, $2, 0xffff0000; mov.b32 $1, a;}",
        "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _state_times(held_low, held_high, tile, into):
    """Begin S x for the 64 rows x of a tile; `into` is overwritten.

    Naming the registers keeps their number low: the products follow each other in the same 32.
    """
    low = warpgroup_mma(held_low, tile.slice(0, 64, 1).permute([1, 0]), into, use_acc=False, is_async=True)
    return warpgroup_mma(held_high, tile.slice(64, 64, 1).permute([1, 0]), low, is_async=True)


@gluon.jit
def _walk_columns(
    output, out, starts, final, kept_q, kept_k, kept_v, kept_factors, ready_k, there,
    full_T, empty, made_P, made_T, held_low, held_high, written, token, count, rows, column_o, entry, lasts,
    HV: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Walk with the state of 128 value columns, as walk.py does. entry: its position in starts and final."""
    left: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, STATE))[None, :]
    S0 = gl.load(starts + entry + i + j * V)
    S1 = gl.load(starts + entry + i + (j + 64) * V)
    held_low.store(S0.to(gl.bfloat16))
    held_high.store(S1.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    mbarrier.wait(ready_k.index(0), 0, pred=count > 0)
    mbarrier.wait(there, 0, pred=(count == 1) & (rows < 64))
    KS = _state_times(held_low, held_high, kept_k.index(0), gl.zeros([128, 64], gl.float32, STATE))
    last = gl.where(count > 0, gl.load(lasts), 1.0)  # e^{G_c}: one number, of which the tile has 64
    S0 = S0 * last
    S1 = S1 * last
    lasts += gl.where(count > 1, HV * FACTORS * 64, 0)
    last = gl.where(count > 1, gl.load(lasts), 1.0)
    KS = warpgroup_mma_wait(0, deps=(KS,))
    stage = 0
    for n in range(count):
        m = n % 2
        more = n + 1 < count
        upcoming = gl.where(stage == STAGES - 1, 0, stage + 1)
        mbarrier.wait(full_T.index(m), (n >> 1) & 1)
        beta = factor(kept_factors, stage, BETA, STATE)
        rate = beta * factor(kept_factors, stage, READ_K, STATE)
        goal = times(_wide(kept_v.index(m).permute([1, 0]).load(STATE)), beta)
        E = gl.convert_layout((goal - KS * rate).to(gl.bfloat16), left)
        Rt = warpgroup_mma(E, made_T.index(m).permute([1, 0]), KS, use_acc=False, is_async=True)
        write = factor(kept_factors, stage, WRITE, STATE)
        Rt = warpgroup_mma_wait(0, deps=(Rt,))
        added = gl.convert_layout(Rt.to(gl.bfloat16), left)
        wrote = gl.convert_layout((Rt * write).to(gl.bfloat16), left)
        QS = _state_times(held_low, held_high, kept_q.index(stage), Rt)
        S0 = warpgroup_mma(wrote, half(kept_k, stage, 0), S0, is_async=True)
        S1 = warpgroup_mma(wrote, half(kept_k, stage, 64), S1, is_async=True)
        read = factor(kept_factors, stage, READ_Q, STATE)
        QS, S0, S1 = warpgroup_mma_wait(2, deps=(QS, S0, S1))
        QS = QS * read
        QS = warpgroup_mma(added, made_P.index(m).permute([1, 0]), QS, is_async=True)
        S0, S1, QS = warpgroup_mma_wait(1, deps=(S0, S1, QS))
        tma.store_wait(0)
        barrier()  # q S has read the state, and the last output has left its tile
        held_low.store(S0.to(gl.bfloat16))
        held_high.store(S1.to(gl.bfloat16))
        QS = warpgroup_mma_wait(0, deps=(QS,))
        written.permute([1, 0]).store(QS.to(gl.bfloat16))
        fence_async_shared()
        barrier()  # all products have read their tiles
        KS = _state_times(held_low, held_high, kept_k.index(upcoming), QS)
        mbarrier.arrive(empty.index(m), count=1)
        # (The last chunk may be partial and is stored below, so here its store goes outside of the output.)
        tma.async_copy_shared_to_global(output, [gl.where(more, token, output.shape[0]), column_o], written)
        S0 = S0 * last
        S1 = S1 * last
        lasts += gl.where(n + 2 < count, HV * FACTORS * 64, 0)
        last = gl.where(n + 2 < count, gl.load(lasts), 1.0)
        KS = warpgroup_mma_wait(0, deps=(KS,))
        token += 64
        stage = upcoming
    if count > 0:
        store_rows(written, out + (token - 64).to(gl.int64) * (HV * V) + column_o, HV * V, rows)
    gl.store(final + entry + i + j * V, S0)
    gl.store(final + entry + i + (j + 64) * V, S1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["t"])
def whole_walk(
    q, k, v, factors, vectors, output, starts, final, out, bounds, first_slots, t, head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    PACKED: gl.constexpr, LINK: gl.constexpr,
):  # fmt: skip
    """Fill out `b t hv v` and final `pair k v` from the states starts, for bfloat16, k = 128, decay per head or none.

    q, k, v, output: descriptors of [64, 128], factors: of [8, 64]. A program takes a sequence, a value head and 128 of
    its columns.
    """
    pair = gl.program_id(1)
    head = pair % HV
    start, length, slot = text_bounds(pair // HV, bounds, first_slots, t, PACKED)
    count = (length + 63) // 64
    column_o = head * V + gl.program_id(0) * WIDTH
    column_v = head * head_v + gl.program_id(0) * WIDTH
    key_head = head // R
    rows = length - (count - 1) * 64  # in the last chunk; below them are another sequence's rows
    entry = pair.to(gl.int64) * WIDTH * V + gl.program_id(0) * WIDTH

    kept_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, WIDTH], k.layout)
    kept_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, WIDTH], q.layout)
    kept_v = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], v.layout)
    kept_factors = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS, 64], factors.layout)
    made_P = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SQUARE)
    made_T = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SQUARE)
    held_low = gl.allocate_shared_memory(gl.bfloat16, [128, 64], SQUARE)
    held_high = gl.allocate_shared_memory(gl.bfloat16, [128, 64], SQUARE)
    written = gl.allocate_shared_memory(gl.bfloat16, [64, WIDTH], output.layout)
    left_N = gl.allocate_shared_memory(gl.float16, [64, 32], gl.NVMMASharedLayout(64, 16, 2))
    right_N = gl.allocate_shared_memory(gl.float16, [64, 32], gl.NVMMASharedLayout(64, 16, 2))
    swap = gl.allocate_shared_memory(gl.float16, [4, 16, 16], TILES)
    squares = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    ready_q = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready_f = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready_v = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    full_N = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full_N, count=1)
    mended = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(mended, count=1)
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(taken, count=1)
    full_T = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready_q.index(s), count=1)
        mbarrier.init(ready_k.index(s), count=1)
        mbarrier.init(ready_f.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(ready_v.index(s), count=1)
        mbarrier.init(full_T.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()

    link(LINK)  # (find_slots, which makes the bounds, is at least two launches before this one)
    at = slot * HV + head
    lasts = vectors + (gl.where(count > 0, at, 0).to(gl.int64) * FACTORS + LAST) * 64
    gl.warp_specialize(
        [
            (_walk_columns, (
                output, out, starts, final, kept_q, kept_k, kept_v, kept_factors, ready_k, there, full_T, empty, made_P,
                made_T, held_low, held_high, written, start, count, rows, column_o, entry, lasts, HV, V,
            )),
            (_make_scores, (
                q, k, v, factors, kept_q, kept_k, kept_v, kept_factors, ready_q, ready_k, ready_f, ready_v, full_N,
                empty, taken, mended, made_P, made_T, left_N, right_N, swap, squares, start, at, key_head * head_q,
                key_head * head_k, column_v, count, rows, scale, HV, GATED,
            )),
            (_make_T, (
                kept_k, kept_v, kept_factors, ready_k, ready_v, there, full_N, full_T, empty, taken, mended, made_T,
                left_N, right_N, swap, squares, count, rows, GATED,
            )),
        ],
        [4, 4],
        [SCORE_REGISTERS, T_REGISTERS],
    )  # fmt: skip
