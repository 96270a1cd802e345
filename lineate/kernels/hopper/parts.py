"""Functions that several Gluon kernels share: rings of tiles, bounds of chunks, factors and norms."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.portable.gates import FACTORS

COPY_REGISTERS = gl.constexpr(24)  # a thread, of a warp that only starts copies
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # triton 3.7, triton 3.6


@gluon.jit
def link(LINK: gl.constexpr):
    """The link of layout.py, in Gluon."""
    if LINK != 0:
        gdc_wait()
    if LINK == 1:
        gdc_launch_dependents()


@gluon.jit
def link_late(LINK: gl.constexpr, late):
    """As link, but with `late` (a number) do not wait for the previous launch: the kernel does so when it ends.

    All launches before the previous one have ended by then, because that one waited for them before it let this begin.
    """
    if (LINK != 0) & (late == 0):
        gdc_wait()
    if LINK == 1:
        gdc_launch_dependents()


@gluon.jit
def overlap(LATE: gl.constexpr = False):
    """Let the next launch begin, and wait for the previous one (launching.overlapping); LATE: wait first."""
    if LATE:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    if not LATE:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fresh(at, there):
    """Load with L1 bypassed, because an earlier launch may have just written these values; allowed before link."""
    return gl.load(at, mask=there, other=0, cache_modifier=".cg")


@gluon.jit
def mark(at, there):
    """Set a mark to 1, for another launch that waits for it (await_mark); nothing without a mark.

    All threads call this, after a barrier that follows all their earlier writes.
    """
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.release.gpu.global.s32 [$1], 1; mov.s32 $0, 0;}",
        "=r,l,r", [at.to(gl.int64, bitcast=True), there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_mark(made, at, there):
    """Wait until a mark of made is not 0; nothing if made is None or the chunk does not exist.

    Copies (TMA) then see the data written before the mark was set.
    """
    if made is not None:
        gl.inline_asm_elementwise(
            "{.reg .pred p; .reg .s32 x; setp.eq.s32 p, $2, 0; @p bra THERE;"
            " AGAIN: ld.acquire.gpu.global.s32 x, [$1]; setp.eq.s32 p, x, 0; @p bra AGAIN;"
            " THERE: fence.proxy.async.global; mov.s32 $0, 0;}",
            "=r,l,r", [(made + at).to(gl.int64, bitcast=True), there.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def end_beside(made):
    """Wait for the launch that sets the marks, so that it has ended when this launch has."""
    if made is not None:
        gdc_wait()


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def between(coarse_i, coarse_j, fine_i, fine_j):
    """Return 2^((coarse_i - coarse_j) log2(e) + fine_i + fine_j), each operation rounded as written.

    Several kernels compute the same decays; fusion by the compiler would give each of them different bits.
    """
    return gl.inline_asm_elementwise(
        "{.reg .f32 a, b; sub.rn.f32 a, $1, $2; add.rn.f32 b, $3, $4; fma.rn.f32 a, a, 0f3FB8AA3B, b;"
        " ex2.approx.ftz.f32 $0, a;}",
        "=f,f,f,f,f", [coarse_i, coarse_j, fine_i, fine_j], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def times(x, y):
    """Return x y, rounded before anything is added."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def round_bf16(x):
    """Round x to bfloat16, two numbers at a time.

    (With `to`, the compiler would cut to the triangle after the rounding, one number at a time.)
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def half(ring, stage, FIRST: gl.constexpr):
    """Return 64 columns of a tile."""
    return ring.index(stage).slice(FIRST, 64, 1)


@gluon.jit
def find_segment(item, first_cuts, cut_texts, lasts, segments, CUT: gl.constexpr, PACKED: gl.constexpr):
    """The find_segment of layout.py, in Gluon. Unless CUT, no sequence is cut."""
    text = item
    segment = 0
    first_cut = 0
    if CUT:
        cut = item - lasts
        if PACKED:
            text = gl.where(cut < 0, item, fresh(cut_texts + cut, cut >= 0))
            there = text >= 0
            first_cut = fresh(first_cuts + text, there)
            segments = fresh(first_cuts + text + 1, there) - first_cut + 1
        else:
            text = gl.where(cut < 0, item, cut // (segments - 1))
            first_cut = text * (segments - 1)
        segment = gl.where(cut < 0, segments - 1, cut - first_cut)
    else:
        segments = 1
    return text, segment, segments, first_cut


@gluon.jit
def entering_state(
    outer, inner, text, segment, cut, head, first, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Return the position of the state before a segment, from column `first` on: at a cut, or before the sequence."""
    at = outer + (text.to(gl.int64) * HV + head) * K * V + first
    if inner is not None and segment > 0:
        at = inner + ((cut + segment - 1).to(gl.int64) * HV + head) * K * V + first
    return at


@gluon.jit
def map_start(start, known, first, i, j, V: gl.constexpr, BV: gl.constexpr, H: gl.constexpr):
    """Return the halves of the state with which the map of a segment begins, in columns from `first` on.

    The first segment (known) begins with the outer state, others with an empty one; after V columns comes the identity.
    """
    given = known & (i < BV)
    S0 = gl.where(i + (first - V) == j, 1.0, gl.load(start + i + j * V, mask=given, other=0.0))
    S1 = S0
    if H == 2:
        S1 = gl.where(i + (first - V) == j + 64, 1.0, gl.load(start + i + (j + 64) * V, mask=given, other=0.0))
    return S0, S1


@gluon.jit
def text_bounds(text, bounds, first_slots, t, PACKED: gl.constexpr):
    """The text_bounds of layout.py, in 32 bits."""
    if PACKED:
        start = fresh(bounds + text, True).to(gl.int32)
        length = fresh(bounds + text + 1, True).to(gl.int32) - start
        slot = fresh(first_slots + text, True).to(gl.int32)
    else:
        start = text * t
        length = t
        slot = text * ((t + 63) // 64)
    return start, length, slot


@gluon.jit
def chunk_bounds(slot, bounds, first_slots, slot_texts, t, PACKED: gl.constexpr):
    """The chunk_bounds of layout.py, in 32 bits."""
    if PACKED:
        text = gl.load(slot_texts + slot).to(gl.int32)
        start = gl.load(bounds + text).to(gl.int32)
        end = gl.load(bounds + text + 1).to(gl.int32)
        start += (slot - gl.load(first_slots + text).to(gl.int32)) * 64
        rows = gl.minimum(gl.maximum(end - start, 0), 64)
    else:
        chunks = (t + 63) // 64
        text = slot // chunks
        begin = (slot % chunks) * 64
        start = text * t + begin
        rows = gl.minimum(t - begin, 64)
    return start, rows


@gluon.jit
def expect(sources, ready, stage, there):
    """Announce the bytes of one chunk's tiles to their barriers; call this before fetch."""
    for x in gl.static_range(len(sources)):
        mbarrier.expect(ready[x].index(stage), sources[x].block_type.nbytes, pred=there)


@gluon.jit
def fetch(sources, kept, ready, places, stage, there):
    """Fetch one chunk's tiles, each with its own barrier.

    With one barrier for all tiles, the threads would have to meet before each fetch.
    """
    for x in gl.static_range(len(sources)):
        tma.async_copy_global_to_shared(sources[x], places[x], ready[x].index(stage), kept[x].index(stage), pred=there)


@gluon.jit
def make_ring(source, STAGES: gl.constexpr):
    """Allocate buffers for STAGES tiles, and their barriers."""
    shape: gl.constexpr = source.block_type.shape
    kept = gl.allocate_shared_memory(source.dtype, [STAGES, shape[0], shape[1]], source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    return kept, ready


@gluon.jit
def next_buffer(stage, phase, STAGES: gl.constexpr):
    """Return the next buffer of a ring, and the phase of its barriers."""
    last = stage == STAGES - 1
    turn = gl.where(last, phase ^ 1, phase)
    return gl.where(last, 0, stage + 1), turn


@gluon.jit
def signals(STAGES: gl.constexpr, OUTS: gl.constexpr):
    """Allocate the barriers between the warps that walk and the warp that copies: done[stage], free[m]."""
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [OUTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(done.index(s), count=1)
    for s in gl.static_range(OUTS):
        mbarrier.init(free.index(s), count=1)
    return done, free


@gluon.jit
def trim(ring, ready, stage, phase, rows):
    """Wait for a tile, then set its rows below the sequence's last one to 0."""
    mbarrier.wait(ready.index(stage), phase)
    tile = ring.index(stage)
    across: gl.constexpr = tile.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    for x in gl.static_range(4):  # 16 rows at a time, to use few registers
        part = tile.slice(x * 16, 16, 0)
        part.store(gl.where(i < rows - x * 16, part.load(layout), 0.0))


@gluon.jit
def factor(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """Return one vector of 64 of the factors, as a row: [1, 64]."""
    return kept_factors.index(stage).slice(ROW, 1, 0).load(layout)


@gluon.jit
def store_rows(tile, at, stride, rows):
    """Store the first rows of a tile; the rows after them in memory are another sequence's."""
    across: gl.constexpr = tile.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    for x in gl.static_range(4):  # 16 rows at a time, to use few registers
        part = tile.slice(x * 16, 16, 0).load(layout)
        gl.store(at + (i + x * 16) * stride + j, part, mask=i < rows - x * 16)


@gluon.jit
def column(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """Return one vector of 64 of the factors, in a layout of one dimension.

    (Triton 3.6 ignores permute on tiles without a swizzle.)
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = kept_factors._reinterpret(gl.float32, [kept_factors.shape[0], FACTORS * 64], flat).index(stage)
    return numbers.slice(ROW * 64, 64, 0).load(layout)


@gluon.jit
def rates(kept_factors, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """Return one vector of 64 of the factors, as a column: [64, 1]."""
    return column(kept_factors, stage, ROW, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def within(item, items):
    """Return the item if it exists, else 0."""
    return gl.maximum(gl.minimum(item, items - 1), 0)


@gluon.jit
def chunk(item, bounds, first_slots, slot_texts, t, H: gl.constexpr, PACKED: gl.constexpr):
    """Return the slot, first token and number of rows of an item's chunk."""
    slot = item // H
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, PACKED)
    return slot, start, rows


@gluon.jit
def inverse_norms(tile, layout: gl.constexpr, to: gl.constexpr):
    """Return 1 / |x_i| for the rows of a tile, [64]."""
    x = tile.load(layout).to(gl.float32)
    return gl.convert_layout(gl.rsqrt(gl.sum(x * x, 1) + 1e-6), to)


@gluon.jit
def through_norm(total, tile, norm, layout: gl.constexpr):
    """Return the gradient of vectors from that of their unit vectors times the inverse norms."""
    x = tile.load(layout).to(gl.float32)
    along = gl.sum(x * total, 1) * norm * norm
    return total - x * along[:, None]
