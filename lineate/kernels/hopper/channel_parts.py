"""Functions that the Gluon kernels for decay per channel share.

They work on blocks of 16 rows, on tiles, and on boards: float32 tiles in shared memory with one number a block of 16
rows and channel, through which the warps exchange these numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lineate.kernels.hopper.parts import chunk_bounds, exp2
from lineate.kernels.portable.gates import LOG2E


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rounded(x):
    """Return x [float32] rounded to bfloat16, as float32: two at a time, where `.to` would convert one by one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
        "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def opaque(x):
    """Return x, hidden from the compiler, so that it does not compute addresses before the loop and spill them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _softplus(x):
    """Return softplus(x), computed as in gates.py."""
    y = exp2(gl.abs(x) * -LOG2E)
    p = 0.00512610212 * y - 0.0290740646
    p = p * y + 0.0775160866
    p = p * y - 0.136022476
    p = p * y + 0.190768807
    p = p * y - 0.24835399
    p = p * y + 0.333181217
    p = p * y - 0.49999445
    p = p * y + 0.999999966
    return gl.maximum(x, 0.0) + p * y


@gluon.jit
def opened(x, speed):
    """Return sigmoid(speed x)."""
    return reciprocal(1.0 + exp2(speed * x * -LOG2E))


@gluon.jit
def log2_decay_of_gate(x, speed, lower_bound):
    """Return the logarithm to base 2 of the decay, where decay_of_gate of gates.py has the natural one."""
    if lower_bound is None:
        speed = speed * LOG2E
        d = -speed * _softplus(x)
    else:
        d = (lower_bound * LOG2E) * opened(x, speed)
    return d


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def unit_bounds(u, bounds, first_slots, slot_texts, t, HV: gl.constexpr, PACKED: gl.constexpr):
    """Return the first token, number of rows and head of a unit."""
    start, rows = chunk_bounds(u // HV, bounds, first_slots, slot_texts, t, PACKED)
    return start, rows, u % HV


@gluon.jit
def zero_below(tile, rows, layout: gl.constexpr):
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    tile.store(gl.where(i < rows, tile.load(layout), 0.0))


@gluon.jit
def ask(sources, places, tiles, ready, there):
    """Fetch one chunk's tiles of q, k (and gates), each of 64 x 64, with a barrier of its own."""
    for x in gl.static_range(len(sources)):
        mbarrier.expect(ready[x], sources[x].block_type.nbytes, pred=there)
    for x in gl.static_range(len(sources)):
        tma.async_copy_global_to_shared(sources[x], places[x], ready[x], tiles[x], pred=there)


@gluon.jit
def diagonal_entries(x, layout: gl.constexpr):
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    return gl.sum(gl.where(i == j, x, 0.0), 1)


@gluon.jit
def as_cube(x, layout: gl.constexpr):
    return gl.convert_layout(gl.reshape(x, [4, 16, 64]), layout, assert_trivial=True)


@gluon.jit
def as_flat(x, layout: gl.constexpr):
    return gl.convert_layout(gl.reshape(x, [64, 64]), layout, assert_trivial=True)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scale_blocks(x, f, acc: gl.constexpr):
    """Multiply x [64, 64] by f [4, 64], which has one number for each block and channel."""
    x = gl.reshape(x, [4, 16, 64]) * f[:, None, :]
    return gl.convert_layout(gl.reshape(x, [64, 64]), acc, assert_trivial=True)


@gluon.jit
def board_rows(board, FIRST: gl.constexpr, like):
    """Load four rows of a board, from row FIRST on, in the layout that scale_blocks takes."""
    three: gl.constexpr = gl.reshape(like, [4, 16, 64]).type.layout
    return board.slice(FIRST, 4, 0).load(gl.SliceLayout(1, three))


@gluon.jit
def row_block(tile, FIRST: gl.constexpr):
    return tile.slice(FIRST, 16, 0)


@gluon.jit
def column_block(tile, FIRST: gl.constexpr, left: gl.constexpr):
    return tile.slice(FIRST, 16, 1).load(left)


@gluon.jit
def turned_block(tile, FIRST: gl.constexpr, left: gl.constexpr):
    return tile.slice(FIRST, 16, 0).permute([1, 0]).load(left)


@gluon.jit
def stack2(a, b, layout: gl.constexpr):
    """Stack two [4, 64] into [2, 4, 64]."""
    x = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    a = gl.convert_layout(a, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    b = gl.convert_layout(b, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    return gl.reshape(gl.where(x == 0, a, b), [8, 64])


@gluon.jit
def stack8(a, b, c, d, e, f, g, layout: gl.constexpr):
    x = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    a = gl.convert_layout(a, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    b = gl.convert_layout(b, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    c = gl.convert_layout(c, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    d = gl.convert_layout(d, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    e = gl.convert_layout(e, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    f = gl.convert_layout(f, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    g = gl.convert_layout(g, gl.SliceLayout(0, layout), assert_trivial=True)[None, :, :]
    low = gl.where(x == 0, a, gl.where(x == 1, b, gl.where(x == 2, c, d)))
    return gl.reshape(gl.where(x < 4, low, gl.where(x == 4, e, gl.where(x == 5, f, g))), [32, 64])


@gluon.jit
def by_rows(x, cube: gl.constexpr):
    """Reshape [64] to [4, 16, 1]."""
    return gl.convert_layout(gl.reshape(x, [4, 16]), gl.SliceLayout(2, cube), assert_trivial=True)[:, :, None]


@gluon.jit
def small_merge(X, Xt, Bt, Ba, apart, LEVEL: gl.constexpr, mma: gl.constexpr):
    """Compute _merge of solve.py for the batch of 16 x 16 blocks, with both X and its transpose in registers.

    Bt, Ba: A^T and A as right operands; apart: i ^ j. The transpose of an accumulator has the layout of a right
    operand, so no data moves.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    none = gl.zeros([4, 16, 16], gl.float32, mma)
    half = X.to(gl.float16)
    half_t = Xt.to(gl.float16)
    right_X = gl.convert_layout(gl.permute(half_t, [0, 2, 1]), right)
    right_Xt = gl.convert_layout(gl.permute(half, [0, 2, 1]), right)
    XA = mma_v2(gl.convert_layout(half, left), Ba, none)
    Y = mma_v2(gl.convert_layout(XA.to(gl.float16), left), right_X, none)
    XtAt = mma_v2(gl.convert_layout(half_t, left), Bt, none)
    Yt = mma_v2(gl.convert_layout(XtAt.to(gl.float16), left), right_Xt, none)
    merged = (apart >> LEVEL) == 1  # above (for the transpose, below) the diagonal Y is 0, as X is
    return gl.where(merged, -Y, X), gl.where(merged, -Yt, Xt)
