"""Scores, inverse, state and output of a sequence in one walk, for Hopper (sm_90), in Gluon.

A program walks one sequence and value head, 128 value columns at a time. Its warps have three parts:

    loads       one warp fetches the tiles of the chunks (TMA)
    scores      four warps make P and T = (I + beta M)^-1 of a chunk, as scores.py does
    columns     two groups of four, each with the state of 64 value columns in registers, do what walk.py does

The scores of chunk n+1 are made while the columns walk through chunk n, so P and T never leave shared memory, and each
input is read once. Barriers between the parts:

    ready[stage], ready_v[m]    q, k and the factors of a chunk have arrived; its values have
    there                       rows of the last chunk's k after the sequence's end are 0
    full[m]                     P, T and the factors of a chunk are made; rows of v after the sequence's end are 0
    free[stage], empty[m]       both groups of columns have read q, k and factors; v, P and T

The state in 16 bits, the left operand of k S and q S, lies in shared memory, because registers are what limits the
number of warps.
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
    COLUMN,
    LOW_ROW,
    PLAIN,
    ROW,
    WIDTH,
    _beside,
    _decayed,
    _decays,
    _system,
    _tame_rows,
    _vector,
    _wild_inverse,
)
from lineate.kernels.hopper.parts import _factor, _half, _store_rows, _text_bounds, _times, _trim, barrier
from lineate.kernels.hopper.scores import (
    ACC,
    SMALL,
    TILES,
    _diagonal_of_halves,
    _halves,
    _invert_blocks,
    _merge_blocks,
)
from lineate.kernels.portable.gates import BETA, FACTORS, LAST, READ_K, READ_Q, WRITE

STAGES = gl.constexpr(3)
WHOLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _load_tiles(
    q, k, v, factors, kept_q, kept_k, kept_v, kept_factors, ready, ready_v, free, empty,
    token, at, column_q, column_k, column_v, count, HV: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of every chunk as soon as there is room for them."""
    stage = 0
    phase = 1
    for n in range(count):
        m = n % 2
        mbarrier.wait(free.index(stage), phase)
        to = ready.index(stage)
        mbarrier.expect(to, 2 * 128 * WIDTH + 4 * 64 * FACTORS)
        tma.async_copy_global_to_shared(k, [token, column_k], to, kept_k.index(stage))
        tma.async_copy_global_to_shared(q, [token, column_q], to, kept_q.index(stage))
        tma.async_copy_global_to_shared(factors, [at * FACTORS, 0], to, kept_factors.index(stage))
        mbarrier.wait(empty.index(m), ((n >> 1) & 1) ^ 1)
        mbarrier.expect(ready_v.index(m), 128 * WIDTH)
        tma.async_copy_global_to_shared(v, [token, column_v], ready_v.index(m), kept_v.index(m))
        token += 64
        at += HV
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _make_scores(
    kept_q, kept_k, kept_v, kept_factors, ready, ready_v, there, full, empty, made_P, made_T,
    both, swap, squares, count, rows, scale, GATED: gl.constexpr,
):  # fmt: skip
    """Make P and T of every chunk."""
    none = gl.zeros([64, 64], gl.float32, ACC)
    stage = 0
    phase = 0
    for n in range(count):
        m = n % 2
        zero = n >> 28  # 0, which the compiler must not know, or it keeps masks in registers
        here = gl.where(n == count - 1, rows, 64)
        mbarrier.wait(ready.index(stage), phase)
        if here < 64:
            _trim(kept_k, ready, stage, phase, here)
            _trim(kept_v, ready_v, m, (n >> 1) & 1, here)
            fence_async_shared()
            barrier()
            mbarrier.arrive(there, count=1)
        tile_k = kept_k.index(stage)
        tile_q = kept_q.index(stage)
        flat = kept_factors._reinterpret(gl.float32, [STAGES, FACTORS * 64], PLAIN).index(stage)
        QK = warpgroup_mma(tile_q, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        KK = warpgroup_mma(tile_k, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        to_q = gl.full([64], 1.0, gl.float32, LOW_ROW) * scale
        D = _decays(flat, squares, squares, 0, GATED, False)
        mbarrier.wait(empty.index(m), ((n >> 1) & 1) ^ 1)
        QK, KK = warpgroup_mma_wait(0, deps=(QK, KK))
        QK_low, QK_high = _halves(QK, 32)
        KK_low, KK_high = _halves(KK, 32)
        P_low, low = _decayed(QK_low, KK_low, D, to_q, here, zero, 0)
        D = _decays(flat, squares, squares, 32, GATED, False)
        P_high, high = _decayed(QK_high, KK_high, D, to_q, here, zero, 32)
        made_P.index(m).store(_beside(P_low, P_high))
        to_k = _vector(flat, BETA, LOW_ROW) * -1.0
        squares.store(_diagonal_of_halves(low, high, SMALL))
        N_low, N_high = _system(low, high, to_k, here, zero)
        X, XN = _invert_blocks(N_low, N_high, swap)
        barrier()
        till = _tame_rows(flat, squares, squares, here, GATED, False)
        T = _merge_blocks(N_low, X, XN, swap, both)
        if till < here:  # what has been made so far may have overflowed
            T = _wild_inverse(tile_k, flat, squares, squares, to_k, squares, swap, both, till, here, zero, GATED, False)
        made_T.index(m).store(T.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(m), count=1)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _beside_half(a, b):
    """Return two accumulators [64, 64] side by side."""
    x = gl.permute(gl.join(a, b), [0, 2, 1])
    return gl.convert_layout(gl.reshape(x, [64, 128]), WHOLE, assert_trivial=True)


@gluon.jit
def _walk_columns(
    output, out, starts, final, kept_q, kept_k, kept_v, kept_factors, ready, ready_v, there, free, full, empty,
    made_P, made_T, held, written, token, count, rows, column_o, entry, lasts,
    HALF: gl.constexpr, HV: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Walk with the state of 64 value columns, as walk.py does. entry: where their state lies in starts and final."""
    left: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    i = gl.arange(0, 64, ROW)[:, None]
    j = gl.arange(0, 64, COLUMN)[None, :]
    none = gl.zeros([64, 64], gl.float32, ACC)
    S0 = gl.load(starts + entry + i + j * V)
    S1 = gl.load(starts + entry + i + (j + 64) * V)
    held.store(_beside_half(S0.to(gl.bfloat16), S1.to(gl.bfloat16)))
    fence_async_shared()
    barrier()
    mbarrier.wait(ready.index(0), 0, pred=count > 0)
    mbarrier.wait(there, 0, pred=(count == 1) & (rows < 64))
    KS = warpgroup_mma(held, kept_k.index(0).permute([1, 0]), none, use_acc=False, is_async=True)
    KS = warpgroup_mma_wait(0, deps=(KS,))
    stage = 0
    phase = 0
    last = gl.load(lasts)  # e^{G_c}: one number, of which the tile has 64
    for n in range(count):
        m = n % 2
        more = n + 1 < count
        upcoming = gl.where(stage == STAGES - 1, 0, stage + 1)
        turn = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        mbarrier.wait(ready_v.index(m), (n >> 1) & 1)
        mbarrier.wait(full.index(m), (n >> 1) & 1)
        beta = _factor(kept_factors, stage, BETA, ACC)
        rate = beta * _factor(kept_factors, stage, READ_K, ACC)
        goal = _times(kept_v.index(m).slice(HALF * 64, 64, 1).permute([1, 0]).load(ACC).to(gl.float32), beta)
        E = gl.convert_layout((goal - KS * rate).to(gl.bfloat16), left)
        Rt = warpgroup_mma(E, made_T.index(m).permute([1, 0]), none, use_acc=False, is_async=True)
        QS = warpgroup_mma(held, kept_q.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        S0 = S0 * last
        S1 = S1 * last
        Rt, QS = warpgroup_mma_wait(1, deps=(Rt, QS))
        write = _factor(kept_factors, stage, WRITE, ACC)
        added = gl.convert_layout(Rt.to(gl.bfloat16), left)
        wrote = gl.convert_layout((Rt * write).to(gl.bfloat16), left)
        S0 = warpgroup_mma(wrote, _half(kept_k, stage, 0), S0, is_async=True)
        S1 = warpgroup_mma(wrote, _half(kept_k, stage, 64), S1, is_async=True)
        read = _factor(kept_factors, stage, READ_Q, ACC)
        QS, S0, S1 = warpgroup_mma_wait(2, deps=(QS, S0, S1))
        QS = QS * read
        QS = warpgroup_mma(added, made_P.index(m).permute([1, 0]), QS, is_async=True)
        S0, S1, QS = warpgroup_mma_wait(1, deps=(S0, S1, QS))
        half = _beside_half(S0.to(gl.bfloat16), S1.to(gl.bfloat16))
        QS = warpgroup_mma_wait(0, deps=(QS,))
        tma.store_wait(0)
        mbarrier.wait(ready.index(upcoming), turn, pred=more)
        mbarrier.wait(there, 0, pred=(n + 2 == count) & (rows < 64))
        barrier()  # all products have read their tiles, and the last output has left its own
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(empty.index(m), count=1)
        held.store(half)
        written.permute([1, 0]).store(QS.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        KS = warpgroup_mma(held, kept_k.index(upcoming).permute([1, 0]), none, use_acc=False, is_async=True)
        # (The last chunk may be partial and is stored below, so here its store goes outside of the output.)
        tma.async_copy_shared_to_global(output, [gl.where(more, token, output.shape[0]), column_o + HALF * 64], written)
        lasts += gl.where(more, HV * FACTORS * 64, 0)
        last = gl.load(lasts)
        KS = warpgroup_mma_wait(0, deps=(KS,))
        token += 64
        stage = upcoming
        phase = turn
    if count > 0:
        _store_rows(written, out + (token - 64).to(gl.int64) * (HV * V) + column_o + HALF * 64, HV * V, rows)
    gl.store(final + entry + i + j * V, S0)
    gl.store(final + entry + i + (j + 64) * V, S1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["t"])
def whole_walk(
    q, k, v, factors, vectors, output, starts, final, out, bounds, first_slots, t, head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    PACKED: gl.constexpr, SCORE_REGISTERS: gl.constexpr, COLUMN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Fill out `b t hv v` and final `pair k v` from the states starts, for bfloat16, k = 128, decay per head or none.

    q, k, v, factors, output: descriptors of [64, 128] and [8, 64], output of [64, 64]. A program takes a sequence, a
    value head and 128 of its columns.
    """
    pair = gl.program_id(1)
    head = pair % HV
    start, length, slot = _text_bounds(pair // HV, bounds, first_slots, t, PACKED)
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
    made_P = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], output.layout)
    made_T = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], output.layout)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], k.layout)
    written = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], output.layout)
    both = gl.allocate_shared_memory(gl.float16, [64, 32], gl.NVMMASharedLayout(64, 16, 2))
    swap = gl.allocate_shared_memory(gl.float16, [4, 16, 16], TILES)
    squares = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready_v = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(ready_v.index(s), count=1)
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()

    at = slot * HV + head
    lasts = vectors + (gl.where(count > 0, at, 0).to(gl.int64) * FACTORS + LAST) * 64
    gl.warp_specialize(
        [
            (_walk_columns, (
                output, out, starts, final, kept_q, kept_k, kept_v, kept_factors, ready, ready_v, there, free, full,
                empty, made_P, made_T, held.index(0), written.index(0), start, count, rows, column_o, entry, lasts,
                0, HV, V,
            )),
            (_walk_columns, (
                output, out, starts, final, kept_q, kept_k, kept_v, kept_factors, ready, ready_v, there, free, full,
                empty, made_P, made_T, held.index(1), written.index(1), start, count, rows, column_o, entry + 64, lasts,
                1, HV, V,
            )),
            (_make_scores, (
                kept_q, kept_k, kept_v, kept_factors, ready, ready_v, there, full, empty, made_P, made_T, both, swap,
                squares, count, rows, scale, GATED,
            )),
            (_load_tiles, (
                q, k, v, factors, kept_q, kept_k, kept_v, kept_factors, ready, ready_v, free, empty,
                start, at, key_head * head_q, key_head * head_k, column_v, count, HV,
            )),
        ],
        [4, 4, 1],
        [COLUMN_REGISTERS, SCORE_REGISTERS, 24],
    )  # fmt: skip
