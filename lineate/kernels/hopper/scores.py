"""The parts of head_scores.py: positions of chunks, products, and the inverse, in Gluon.

A warp has 16 rows of the chunk (the accumulator's layout), a thread 2 x 16 entries. From q k^T, k k^T and the factors
of the decay a thread makes P and N = -beta M as packed pairs of 16 bits. Bitwise masks cut them to the lower triangle,
to the rows of the sequence and (N) to the rows before the first wild one, so only finite numbers pass, and no later
token changes a bit.

The inverse T = (I - N)^-1 is computed by doubling, X <- X + X N_l X, where N_l is N inside the blocks (2, 1) of level l
only:

    levels 0..3   a warp's own 16 x 16 block, all in 4 registers a thread: float16 mma.sync with X as its accumulator;
                  movmatrix makes the right operands
    level 4       the same with the block left of the diagonal and the previous warp's X (through shared memory)
    level 5       two wgmma of 64 x 32 x 32, which make rows 32.. of columns ..32
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.parts import barrier, fresh
from lineate.kernels.portable.gates import BETA


@gluon.jit
def pack_bf16(x, a, b):
    """Return x in bfloat16 where both masks (int16) are -1, else 0."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 y; cvt.rn.bf16x2.f32 y, $2, $1; lop3.b32 $0, y, $3, $4, 0x80;}", "=r,f,f,r,r", [x, a, b],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def pack_fp16(x, a, b):
    return gl.inline_asm_elementwise(
        "{.reg .b32 y; cvt.rn.f16x2.f32 y, $2, $1; lop3.b32 $0, y, $3, $4, 0x80;}", "=r,f,f,r,r", [x, a, b],
        dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _and(x, a):
    """Return x (float16) where the mask is -1, else 0."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, a], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _and_or(x, a, y):
    """Return the bits x & a | y; y is float16 or int16."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, a, y], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _pick(a, b, c, d, w):
    """Return this warp's tile of the four; w (int16) is the warp's number."""
    return gl.inline_asm_elementwise(
        "{.reg .pred m, n; .reg .b32 y, z; setp.lt.u32 m, $5, 131072; setp.lt.u32 n, $5, 65536;"
        " selp.b32 y, $1, $2, n; setp.lt.u32 n, $5, 196608; selp.b32 z, $3, $4, n; selp.b32 $0, y, z, m;}",
        "=r,r,r,r,r,r", [a, b, c, d, w], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _pick2(a, b, m):
    """Return a where the mask (int16) is -1, else b."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xE2;", "=r,r,r,r", [a, m, b], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _turn_tiles(x):
    """Transpose every 8 x 8 tile in place."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _as_right(x, mma: gl.constexpr):
    """Return x [4, 16, 16], an accumulator, as a right operand."""
    x = gl.permute(gl.reshape(_turn_tiles(x), [4, 2, 8, 2, 8]), [0, 1, 4, 3, 2])
    return gl.convert_layout(gl.reshape(x, [4, 16, 16]), gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def halves(x, n: gl.constexpr):
    """Split [64, 2 n] into its left and right columns."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, n]), [0, 2, 1]))


@gluon.jit
def _block(x, mma: gl.constexpr):
    """Return [64, 16] as one 16 x 16 tile a warp."""
    return gl.convert_layout(gl.reshape(x, [4, 16, 16]), mma, assert_trivial=True)


@gluon.jit
def _beside(a, b, layout: gl.constexpr):
    """Return two tiles a warp as [64, 32]."""
    x = gl.permute(gl.join(gl.reshape(a, [64, 16]), gl.reshape(b, [64, 16])), [0, 2, 1])
    return gl.convert_layout(gl.reshape(x, [64, 32]), layout, assert_trivial=True)


@gluon.jit
def diagonal(x, mma: gl.constexpr):
    """Return x_ii of an accumulator, [64]."""
    low, high = halves(x, 32)
    return diagonal_of_halves(low, high, mma)


@gluon.jit
def diagonal_of_halves(low, high, mma: gl.constexpr):
    """Return x_ii of an accumulator whose columns ..32 and 32.. are given, [64]."""
    a, b = halves(low, 16)
    c, d = halves(high, 16)
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    own = gl.where(
        w < 2, gl.where(w < 1, _block(a, mma), _block(b, mma)), gl.where(w < 3, _block(c, mma), _block(d, mma))
    )
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    return gl.reshape(gl.sum(gl.where(i == j, own, -0.0), 2), [64])


@gluon.jit
def slot_text(slot, slot_texts, PACKED: gl.constexpr):
    text = slot
    if PACKED:
        text = fresh(slot_texts + slot, True).to(gl.int32)
    return text


@gluon.jit
def begin_end(text, bounds, first_slots, PACKED: gl.constexpr):
    begin = text
    end = text
    first = text
    if PACKED:
        begin = fresh(bounds + text, True).to(gl.int32)
        end = fresh(bounds + text + 1, True).to(gl.int32)
        first = fresh(first_slots + text, True).to(gl.int32)
    return begin, end, first


@gluon.jit
def place(slot, begin, end, first, t, PACKED: gl.constexpr):
    """The chunk_bounds of layout.py, in 32 bits."""
    if PACKED:
        start = begin + (slot - first) * 64
        rows = gl.minimum(gl.maximum(end - start, 0), 64)
    else:
        chunks = (t + 63) // 64
        text = slot // chunks
        before = (slot % chunks) * 64
        start = text * t + before
        rows = gl.minimum(t - before, 64)
    return start, rows


@gluon.jit
def mask(x):
    """Return -1 where x, else 0, in 16 bits."""
    return gl.where(x, -1, 0).to(gl.int16)


@gluon.jit
def factor_row(vectors, ROW: gl.constexpr, layout: gl.constexpr):
    """Return one vector of 64 of the unit's factors (from BETA on)."""
    return vectors.slice((ROW - BETA) * 64, 64, 0).load(layout)


ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LOW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, LOW.value, 2))
SMALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
SMALL_LEFT = gl.constexpr(gl.DotOperandLayout(0, SMALL.value, 2))
SMALL_RIGHT = gl.constexpr(gl.DotOperandLayout(1, SMALL.value, 2))
# The layout of the even warp's right operand, held by both warps of a pair: pair, parity, k, n.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 8, 0], [0, 0, 0, 8]],
        [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 1, 0, 0], [1, 0, 0, 0]], [], [2, 2, 16, 16],
    )
)  # fmt: skip
WORKERS = gl.constexpr(3)  # groups of warps in a program of head_scores that runs in parallel with the walk
TILES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0]))


@gluon.jit
def invert_blocks(N_low, N_high, swap, zero):
    """Do levels 0 to 3, and the first half of level 4; return X and X N of the adjacent block.

    N_low, N_high: columns ..32 and 32.. of N. swap `4 16 16` gets X of the even warps, then of the odd ones. A barrier
    must follow before merge_blocks. zero: 0, unknown to the compiler, which would otherwise keep masks in registers.
    """
    N0, N1 = halves(N_low, 16)
    N2, N3 = halves(N_high, 16)
    N0, N1, N2, N3 = _block(N0, SMALL), _block(N1, SMALL), _block(N2, SMALL), _block(N3, SMALL)
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, SMALL)))[:, None, None]
    own = _pick(N0, N1, N2, N3, w.to(gl.int16))
    odd = mask((w & 1) == 1)
    beside = _and(_pick2(N0, N2, mask(w < 2)), odd)
    # Invert a warp's own block.
    bi = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SMALL)))[None, :, None] + zero
    bj = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SMALL)))[None, None, :]
    ri = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SMALL_RIGHT)))[None, :, None] + zero
    rj = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SMALL_RIGHT)))[None, None, :]
    apart = ri ^ rj
    nothing = gl.zeros([4, 16, 16], gl.float16, SMALL)
    X = _and_or(own, mask((bi ^ bj) == 1), gl.where(bi == bj, 0x3C00, 0).to(gl.int16))
    right = _as_right(own, SMALL)
    for level in gl.static_range(1, 4):
        XN = mma_v2(gl.convert_layout(X, SMALL_LEFT), _and(right, mask((apart >> level) == 1)), nothing)
        X = mma_v2(gl.convert_layout(XN, SMALL_LEFT), _as_right(X, SMALL), X)
    XN = mma_v2(gl.convert_layout(X, SMALL_LEFT), _as_right(beside, SMALL), nothing)
    turned = gl.permute(gl.reshape(_as_right(X, SMALL), [2, 2, 16, 16]), [1, 0, 2, 3])
    swap.store(gl.reshape(turned, [4, 16, 16]))
    return X, XN


@gluon.jit
def merge_blocks(N_low, X, XN, swap, both):
    """Do the rest: return T [64, 64]. both: a buffer for X of rows ..32 and N of the other rows."""
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, SMALL)))[:, None, None]
    odd = mask((w & 1) == 1)
    even = swap.slice(0, 2, 0).load(gl.SliceLayout(1, PAIRS))[:, None, :, :]
    even, _ = gl.broadcast(even, gl.zeros([2, 2, 16, 16], gl.float16, PAIRS))
    even = gl.convert_layout(gl.reshape(even, [4, 16, 16]), SMALL_RIGHT, assert_trivial=True)
    Xs = mma_v2(gl.convert_layout(XN, SMALL_LEFT), even, gl.zeros([4, 16, 16], gl.float16, SMALL))
    # Blocks of 32 x 32: (X, 0) of an even warp, (Xs, X) of an odd one; the upper in the first 32 columns.
    pair = _beside(_pick2(Xs, X, odd), _and(X, odd), LOW)
    upper = mask(gl.arange(0, 64, gl.SliceLayout(1, LOW)) < 32)[:, None]
    lower = mask(gl.arange(0, 64, gl.SliceLayout(1, LOW)) >= 32)[:, None]
    X_low = _and(pair, upper)
    X_high = _and(pair, lower)
    both.store(_and_or(gl.convert_layout(N_low, LOW, assert_trivial=True), lower, X_low))
    fence_async_shared()
    barrier()
    XN = warpgroup_mma(
        gl.convert_layout(X_high, LEFT), both.slice(32, 32, 0), gl.zeros([64, 32], gl.float32, LOW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    XN = warpgroup_mma_wait(0, deps=(XN,))
    T_low = warpgroup_mma(
        gl.convert_layout(XN.to(gl.float16), LEFT), both.slice(0, 32, 0), X_low.to(gl.float32), is_async=True
    )
    T_low = warpgroup_mma_wait(0, deps=(T_low,))
    whole = gl.permute(gl.join(T_low, X_high.to(gl.float32)), [0, 2, 1])
    whole = gl.convert_layout(gl.reshape(whole, [64, 64]), ACC, assert_trivial=True)
    return whole
