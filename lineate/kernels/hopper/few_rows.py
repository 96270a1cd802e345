"""A few rows times a weight on Hopper, with the adjacent operations of a block.

    y = x W^T        y = silu(x G^T) x U^T,  W = G | U        y = silu(conv(x W^T)), the convolution's inputs in place

The weights are read once, and that bounds the time. A program multiplies 64 rows of W (or of G and of U) by all rows of
x, which are columns of the tensor cores' tile, and keeps STAGES tiles of W in flight; the first are requested before
it waits for the launch before it (launching.overlapping). Where W has too few rows to fill the device, K is cut into
SPLIT parts, whose sums `SPLIT rows n` are added by the launch that follows (layers/rows.py, add_and_norm).
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

from lineate.kernels.hopper.parts import barrier, overlap, sigmoid
from lineate.kernels.hopper.row_convolution import convolve_newest, load_past


@gluon.jit
def _ring(source, STAGES: gl.constexpr):
    """Allocate buffers for STAGES tiles, and their barriers."""
    shape: gl.constexpr = source.block_type.shape
    kept = gl.allocate_shared_memory(source.dtype, [STAGES, shape[0], shape[1]], source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    return kept, ready


@gluon.jit
def _fetch(source, row, column, kept, ready, stage, there):
    mbarrier.expect(ready.index(stage), source.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(source, [row, column], ready.index(stage), kept.index(stage), pred=there)


@gluon.jit(do_not_specialize=["rows"])
def multiply_few(
    weight, x, taps, past, y, rows, N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, BK: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, CHANNELS: gl.constexpr, SIZE: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """64 channels of y `rows N` (SPLIT > 1: of one part of it, float32 `SPLIT rows N`), from descriptors of W and x.

    The first CHANNELS channels are convolved with taps `CHANNELS SIZE` after past `rows CHANNELS SIZE-1`.
    """
    gl.static_assert(num_warps == 4)
    STEPS: gl.constexpr = K // SPLIT // BK
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])  # [64, R]
    along: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    tile = gl.program_id(0) // SPLIT
    part = gl.program_id(0) % SPLIT
    first = part * (K // SPLIT)
    kept_w, ready_w = _ring(weight, STAGES)
    kept_x, ready_x = _ring(x, STAGES)
    if GATED:
        kept_u, ready_u = _ring(weight, STAGES)
    fence_async_shared()
    barrier()
    for s in gl.static_range(min(STAGES, STEPS)):
        _fetch(weight, tile * 64, first + s * BK, kept_w, ready_w, s, True)
        if GATED:
            _fetch(weight, N + tile * 64, first + s * BK, kept_u, ready_u, s, True)
    n = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, along))[:, None]
    r = gl.arange(0, R, gl.SliceLayout(0, along))[None, :]
    has = (n < N) & (r < rows)
    if CHANNELS:
        moves, at, x1, x2, sums, newest = load_past(past, taps, n, r, rows, CHANNELS, SIZE)
    if OVERLAP:
        overlap()
    for s in gl.static_range(min(STAGES, STEPS)):
        _fetch(x, 0, first + s * BK, kept_x, ready_x, s, True)

    acc = gl.zeros([64, R], gl.float32, product)
    up = gl.zeros([64, R], gl.float32, product)
    for i in range(STEPS):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(ready_x.index(stage), phase)
        mbarrier.wait(ready_w.index(stage), phase)
        acc = warpgroup_mma(kept_w.index(stage), kept_x.index(stage).permute([1, 0]), acc, is_async=True)
        if GATED:
            mbarrier.wait(ready_u.index(stage), phase)
            up = warpgroup_mma(kept_u.index(stage), kept_x.index(stage).permute([1, 0]), up, is_async=True)
            acc, up = warpgroup_mma_wait(0, [acc, up])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        barrier()  # all warps have read this stage
        column = first + (i + STAGES) * BK
        more = i + STAGES < STEPS
        _fetch(weight, tile * 64, column, kept_w, ready_w, stage, more)
        if GATED:
            _fetch(weight, N + tile * 64, column, kept_u, ready_u, stage, more)
        _fetch(x, 0, column, kept_x, ready_x, stage, more)

    if GATED:
        acc = acc * sigmoid(acc) * up
    found = gl.convert_layout(acc, along)
    if CHANNELS:
        found = convolve_newest(found, past, n, moves, at, x1, x2, sums, newest, CHANNELS, SIZE)
    gl.store(y + (part * rows + r) * N + n, found.to(y.dtype.element_ty), mask=has)
