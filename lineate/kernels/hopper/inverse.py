"""P and T of a chunk in halves of 32 columns, which need fewer registers, and T of chunks with wild rows, in Gluon.

The products and the inverse are those of scores.py. From its first wild row on, T is computed by forward substitution
in float32, one row after another: T_i = e_i + sum over j < i of N_ij T_j.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from lineate.kernels.hopper.parts import barrier, between, chunk_bounds, mark, times
from lineate.kernels.hopper.scores import (
    ACC,
    LOW,
    SMALL,
    WORKERS,
    diagonal,
    halves,
    invert_blocks,
    mask,
    merge_blocks,
    pack_bf16,
    pack_fp16,
)
from lineate.kernels.portable.gates import BETA, COARSE, FACTORS, FINE, LOG2E
from lineate.kernels.portable.solve import MOST_BETA, MOST_SQUARE, MOST_STEP

WIDTH = gl.constexpr(128)  # k
ROW = gl.constexpr(gl.SliceLayout(1, ACC.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, ACC.value))
LOW_ROW = gl.constexpr(gl.SliceLayout(1, LOW.value))
LOW_COLUMN = gl.constexpr(gl.SliceLayout(0, LOW.value))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # every warp holds all 64
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def vector(flat, NUMBER: gl.constexpr, layout: gl.constexpr):
    """Return one vector of 64 of a chunk's factors."""
    return flat.slice(NUMBER * 64, 64, 0).load(layout)


@gluon.jit
def decays(flat, norms_k, logs_k, FIRST: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr):
    """Return e^{G_i - G_j} / |k_j| for 32 columns from FIRST on; entries with j > i are arbitrary."""
    if GATED:
        fine_j = times(flat.slice(FINE * 64 + FIRST, 32, 0).load(LOW_COLUMN), -LOG2E)
        if NORMALIZE:
            fine_j = fine_j + logs_k.slice(FIRST, 32, 0).load(LOW_COLUMN)
        fine_i = times(vector(flat, FINE, LOW_ROW), LOG2E)
        coarse_j = flat.slice(COARSE * 64 + FIRST, 32, 0).load(LOW_COLUMN)
        coarse_i = vector(flat, COARSE, LOW_ROW)
        D = between(coarse_i[:, None], coarse_j[None, :], fine_i[:, None], fine_j[None, :])
    else:
        D = gl.zeros([64, 32], gl.float32, LOW)
        if NORMALIZE:
            D = D + norms_k.slice(FIRST, 32, 0).load(LOW_COLUMN)[None, :]
        else:
            D = D + 1.0
    return D


@gluon.jit
def _low(x):
    """Return 32 columns of an accumulator of 64 in the layout of one of 32."""
    return gl.convert_layout(x, LOW, assert_trivial=True)


@gluon.jit
def decayed(QK, KK, D, to_q, here, zero, FIRST: gl.constexpr):
    """Return P, and k k^T times the decays, for 32 columns from FIRST on."""
    i = gl.arange(0, 64, LOW_ROW)[:, None]
    j = gl.arange(0, 32, LOW_COLUMN)[None, :] + FIRST
    return pack_bf16(_low(QK) * D * to_q[:, None], mask(i + zero >= j), mask(i < here)), _low(KK) * D


@gluon.jit
def beside(a, b):
    """Concatenate 32 and 32 columns to an accumulator of 64."""
    x = gl.permute(gl.join(a, b), [0, 2, 1])
    return gl.convert_layout(gl.reshape(x, [64, 64]), ACC, assert_trivial=True)


@gluon.jit
def system(low, high, to_k, rows, zero):
    """Return N of the first rows in float16, columns ..32 and 32..; the rest is 0."""
    i = gl.arange(0, 64, LOW_ROW)[:, None]
    j = gl.arange(0, 32, LOW_COLUMN)[None, :]
    valid = mask(i < rows)
    N_low = pack_fp16(low * to_k[:, None], mask(i + zero >= j), valid)
    return N_low, pack_fp16(high * to_k[:, None], mask(i + zero >= j + 32), valid)


@gluon.jit
def tame_rows(flat, squares, norms_k, here, GATED: gl.constexpr, NORMALIZE: gl.constexpr):
    """Return the first wild row, or 64, as solve.first_wild_row does; a row whose decay is NaN is wild too."""
    rate = vector(flat, BETA, LINE)
    tame = (rate >= 0.0) & (rate <= MOST_BETA)
    if NORMALIZE:
        norm = norms_k.load(LINE)
        square = 1.0 - 1e-6 * norm * norm  # squared lengths of unit keys, and of keys that are 0
        tame = tame & (norm > 0.0) & (rate * square <= MOST_STEP)
    else:
        square = squares.load(LINE)
        tame = tame & (rate * square <= MOST_STEP) & (square <= MOST_SQUARE)
    if GATED:
        tame = tame & (vector(flat, COARSE, LINE) <= 0.0)
    each = gl.arange(0, 64, LINE)
    return gl.min(gl.where((tame == 0) & (each < here), each, 64), 0)


@gluon.jit
def _substitute(T, N_low, N_high, line, first, rows):
    """Return T with the rows from `first` on replaced by those of (I - N)^-1, one after another in float32.

    N_low, N_high: columns ..32 and 32.. of N, whose entries with j >= i are 0. line `64`: shared memory.
    """
    i = gl.arange(0, 64, ROW)[:, None]
    j = gl.arange(0, 64, COLUMN)
    n = gl.arange(0, 64, LOW_ROW)[:, None]
    for r in range(first, rows):
        barrier()
        line.slice(0, 32, 0).store(gl.sum(gl.where(n == r, N_low, 0.0), 0))
        line.slice(32, 32, 0).store(gl.sum(gl.where(n == r, N_high, 0.0), 0))
        barrier()
        found = gl.sum(line.load(ROW)[:, None] * T, 0) + gl.where(j == r, 1.0, 0.0)
        T = gl.where(i == r, found[None, :], T)
    return T


@gluon.jit
def wild_inverse(
    tile_k,
    flat,
    norms_k,
    logs_k,
    to_k,
    line,
    swap,
    both,
    till,
    here,
    zero,
    GATED: gl.constexpr,
    NORMALIZE: gl.constexpr,
):
    """Return T of a chunk with wild rows: before the first of them by products in float16, then in float32."""
    none = gl.zeros([64, 64], gl.float32, ACC)
    KK = warpgroup_mma(tile_k, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
    KK = warpgroup_mma_wait(0, deps=(KK,))
    KK_low, KK_high = halves(KK, 32)
    low = _low(KK_low) * decays(flat, norms_k, logs_k, 0, GATED, NORMALIZE)
    high = _low(KK_high) * decays(flat, norms_k, logs_k, 32, GATED, NORMALIZE)
    N_low, N_high = system(low, high, to_k, till, zero)
    X, XN = invert_blocks(N_low, N_high, swap, zero)
    barrier()
    T = merge_blocks(N_low, X, XN, swap, both)
    i = gl.arange(0, 64, LOW_ROW)[:, None]
    j = gl.arange(0, 32, LOW_COLUMN)[None, :]
    low = gl.where(i > j, low * to_k[:, None], 0.0)
    high = gl.where(i > j + 32, high * to_k[:, None], 0.0)
    return _substitute(T, low, high, line, till, here)


@gluon.jit
def mend(
    k, T, factors, made, rooms, bounds, first_slots, slot_texts, t, wanted, items, worker: gl.constexpr, stride_k,
    head_k,
    H: gl.constexpr, R: gl.constexpr, SHARED: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """Compute invert_wild of portable/scores.py for a program of head_scores, with the bits of whole_walk.

    k, T: no descriptors. rooms: buffers for a tile of k, of P, of T, and the inverse's. wanted: items, or 0 if none of
    the program's has wild rows. made: as for head_scores; chunks that are checked here are marked.
    """
    tile, room_P, room_T, both, swap = rooms
    flat = room_P._reinterpret(gl.float32, [FACTORS * 64], PLAIN)
    small = room_T._reinterpret(gl.float32, [3, 64], PLAIN)
    rows_of: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    step = gl.num_programs(0) * (1 if made is None else WORKERS)
    for n in range(gl.program_id(0) + worker * gl.num_programs(0), wanted, step):
        item = n if UP else items - 1 - n
        start, rows = chunk_bounds(item // H, bounds, first_slots, slot_texts, t, PACKED)
        i = gl.arange(0, 64, gl.SliceLayout(1, rows_of))[:, None]
        x = gl.arange(0, WIDTH, gl.SliceLayout(0, rows_of))[None, :]
        keys = k + (start.to(gl.int64) + i) * stride_k + item % H // SHARED * head_k + x
        barrier()
        tile.store(gl.load(keys, mask=i < rows, other=0.0))
        fence_async_shared()
        barrier()
        none = gl.zeros([64, 64], gl.float32, ACC)
        KK = warpgroup_mma(tile, tile.permute([1, 0]), none, use_acc=False, is_async=True)
        KK = warpgroup_mma_wait(0, deps=(KK,))
        square = diagonal(KK, SMALL)
        norms_k = small.index(0)
        logs_k = small.index(1)
        if NORMALIZE:
            within = gl.arange(0, 64, square.type.layout) < rows
            nk = gl.rsqrt(gl.where(within, square, 0.0) + 1e-6)
            norms_k.store(nk)
            logs_k.store(gl.log2(nk))
        else:
            norms_k.store(square)
        for r in range(R):
            at = (item * R + r).to(gl.int64)
            given = gl.load(factors + at * (FACTORS * 64) + gl.arange(0, FACTORS * 64, line))
            barrier()
            flat.store(given)
            barrier()
            till = tame_rows(flat, norms_k, norms_k, rows, GATED, NORMALIZE)
            if till < 64:
                to_k = vector(flat, BETA, LOW_ROW) * -1.0
                if NORMALIZE:
                    to_k = to_k * norms_k.load(LOW_ROW)
                again = wild_inverse(
                    tile, flat, norms_k, logs_k, to_k, small.index(2), swap, both, till, rows, n >> 28, GATED, NORMALIZE
                )
                j = gl.arange(0, 64, ROW)[:, None]
                to = T + at * 4096 + j * 64 + gl.arange(0, 64, COLUMN)[None, :]
                gl.store(to, again.to(gl.bfloat16), mask=j >= till)
            if made is not None:  # (of all chunks, so that the walk can rely on it)
                barrier()
                mark(made + at, n >= 0)
