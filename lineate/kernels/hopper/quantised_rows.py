"""A few rows times a weight of 4 or 8 bits on the tensor cores, with the adjacent operations of a block.

    y_r = sum_g scale_rg sum_c (code_rc - zero) x_c     columns c of group g      (lineate/quantised/format.py)

With FP8 codes are float8 numbers, zero is 0, and four groups of codes share a scale.

The codes are read once, and that bounds the time. A program has WM pairs of tiles, 32 rows of the weight each; WK warps
share the groups of columns of a pair among themselves, C groups each at a time. Codes, scales and x go through rings of
STAGES buffers in shared memory; the first codes are requested before the launch waits for the one before it
(launching.overlapping).

A thread reads 16 bytes of codes, 4 columns (4 bits: 8) of 4 rows, and converts them to exactly its part of the left
operands of two products: which row of a product is which row of a tile is free, and so is the order of columns, if x
has the same. Codes become 16-bit numbers by integer instructions on two at a time: 128 + code, or 1024 + code in
float16, is a number with the code as its last digits. The bits of a float8 number, put where a 16-bit number has its
exponent and digits, make one that is a power of 2 smaller.

A program adds the sums of its warps in a fixed order, and no row of x changes the bits of another.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lineate.kernels.hopper.parts import barrier, overlap, sigmoid
from lineate.kernels.hopper.row_convolution import convolve_newest, load_past

# A word has the codes of columns 0 1 2 3 (4 bits: and 16 17 18 19 in the high halves of its bytes). A register of
# results has two columns, in the order 0 2, 1 3 (16 18, 17 19). lop3 with 0xea is (a & b) | c, with 0xae (~a & b) | c.
_BFLOAT16_4 = gl.constexpr(
    """{.reg .b32 a, b, c;
    shr.u32 a, $4, 8; shr.u32 b, $4, 4; shr.u32 c, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea; lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea; lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
    mov.b32 a, 0x43084308;
    sub.bf16x2 $0, $0, a; sub.bf16x2 $1, $1, a; sub.bf16x2 $2, $2, a; sub.bf16x2 $3, $3, a;}"""
)
_FLOAT16_4 = gl.constexpr(
    """{.reg .b32 a, b, c;
    shr.u32 a, $4, 8; shr.u32 b, $4, 4; shr.u32 c, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, a, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, b, 0x000f000f, 0x64006400, 0xea; lop3.b32 $3, c, 0x000f000f, 0x64006400, 0xea;
    mov.b32 a, 0x64086408;
    sub.f16x2 $0, $0, a; sub.f16x2 $1, $1, a; sub.f16x2 $2, $2, a; sub.f16x2 $3, $3, a;}"""
)
# bfloat16 has 7 digits: 128 + the low 7 bits of the code, less 128 where its high bit is set and 256 where it is not.
_BFLOAT16_8 = gl.constexpr(
    """{.reg .b32 a, b, c;
    shr.u32 a, $2, 8;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xae; lop3.b32 c, a, 0x00800080, 0x43004300, 0xae;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea; lop3.b32 $1, a, 0x007f007f, 0x43004300, 0xea;
    sub.bf16x2 $0, $0, b; sub.bf16x2 $1, $1, c;}"""
)
_FLOAT16_8 = gl.constexpr(
    """{.reg .b32 a, b;
    shr.u32 a, $2, 8; mov.b32 b, 0x64806480;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea; lop3.b32 $1, a, 0x00ff00ff, 0x64006400, 0xea;
    sub.f16x2 $0, $0, b; sub.f16x2 $1, $1, b;}"""
)

# float8 has a sign, 4 bits of an exponent from 7 on, and 3 digits; bfloat16's exponent is from 127 on, float16's 15.
_BFLOAT16_FP8 = gl.constexpr(
    """{.reg .b32 a, b, c;
    shl.b32 a, $2, 8; shl.b32 b, $2, 4; shr.u32 c, $2, 4;
    and.b32 a, a, 0x80008000; and.b32 $1, $2, 0x80008000;
    lop3.b32 $0, b, 0x07f007f0, a, 0xea; lop3.b32 $1, c, 0x07f007f0, $1, 0xea;
    mov.b32 a, 0x7b807b80;
    mul.bf16x2 $0, $0, a; mul.bf16x2 $1, $1, a;}"""
)
_FLOAT16_FP8 = gl.constexpr(
    """{.reg .b32 a, b, c;
    shl.b32 a, $2, 8; shl.b32 b, $2, 7; shr.u32 c, $2, 1;
    and.b32 a, a, 0x80008000; and.b32 $1, $2, 0x80008000;
    lop3.b32 $0, b, 0x3f803f80, a, 0xea; lop3.b32 $1, c, 0x3f803f80, $1, 0xea;
    mov.b32 a, 0x5c005c00;
    mul.f16x2 $0, $0, a; mul.f16x2 $1, $1, a;}"""
)

_FOUR = gl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r")  # eight results, and the same word eight times
_EIGHT = gl.constexpr("=r,=r,r,r,r,r")


@gluon.constexpr_function
def _steps(count: int, dim: int, rank: int, unit: int = 1) -> list[list[int]]:
    """Return the bases of `count` positions along a dimension, with stride `unit`."""
    return [[unit * 2**i if d == dim else 0 for d in range(rank)] for i in range((count - 1).bit_length())]


@gluon.constexpr_function
def _power(n: int) -> int:
    """Return the least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def _code_layout(groups: int, tiles: int, steps: int, columns: int, WK: int, WM: int) -> Any:
    """Return the layout of codes `groups tiles steps 16 columns` as the left operand, 4 rows of a tile in a thread."""
    registers = [
        *_steps(columns, 4, 5),
        *_steps(4, 3, 5),
        *_steps(steps // 4, 2, 5, 4),
        *_steps(groups // WK, 0, 5, WK),
    ]
    lanes = [*_steps(4, 2, 5), *_steps(4, 3, 5, 4), *_steps(2, 1, 5)]
    warps = [*_steps(WM, 1, 5, 2), *_steps(WK, 0, 5)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, tiles, steps, 16, columns])


@gluon.constexpr_function
def _scale_layout(groups: int, tiles: int, WK: int, WM: int) -> Any:
    """Return the layout of scales `groups tiles 16` that matches the sums of their rows."""
    registers = [*_steps(4, 2, 3), *_steps(groups // WK, 0, 3, WK)]
    lanes = [[0, 0, 0], [0, 0, 0], *_steps(4, 2, 3, 4), *_steps(2, 1, 3)]
    warps = [*_steps(WM, 1, 3, 2), *_steps(WK, 0, 3)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, tiles, 16])


@gluon.constexpr_function
def _row_layout(groups: int, rows: int, WK: int, WM: int) -> Any:
    """Return the layout of x `groups rows 32` as the right operand."""
    registers = [*_steps(4, 2, 3), [0, 0, 16], *_steps(rows // 8, 1, 3, 8), *_steps(groups // WK, 0, 3, WK)]
    lanes = [*_steps(4, 2, 3, 4), *_steps(8, 1, 3)]
    warps = [*([[0, 0, 0]] * (WM - 1).bit_length()), *_steps(WK, 0, 3)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, rows, 32])


@gluon.constexpr_function
def _along(dim: int, layout: Any) -> tuple[Any, list[int]]:
    """Return the layout of a vector along one dimension of a tensor, and the other dimensions."""
    others = [d for d in range(layout.rank) if d != dim]
    for d in reversed(others):
        layout = gl.SliceLayout(d, layout)
    return layout, others


@gluon.jit
def _arange(count: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """Return 0 .. count-1 along one dimension of a tensor."""
    parts: gl.constexpr = _along(dim, layout)
    found = gl.arange(0, count, parts[0])
    for other in gl.static_range(len(parts[1])):
        found = gl.expand_dims(found, parts[1][other])
    return found


@gluon.jit
def _numbers(words, dtype: gl.constexpr, BITS: gl.constexpr, FP8: gl.constexpr, layout: gl.constexpr):
    """Return code - zero of words `groups tiles steps 16`, `groups tiles steps 16 columns`, in the order above."""
    words = gl.expand_dims(words, 4)
    shape: gl.constexpr = [words.shape[0], words.shape[1], words.shape[2], words.shape[3], 32 // BITS]
    words, _ = gl.broadcast(words, gl.zeros(shape, gl.int32, layout))
    if FP8 and dtype == gl.bfloat16:
        made = gl.inline_asm_elementwise(_BFLOAT16_FP8, _EIGHT, [words], dtype=gl.bfloat16, is_pure=True, pack=4)
    elif FP8:
        made = gl.inline_asm_elementwise(_FLOAT16_FP8, _EIGHT, [words], dtype=gl.float16, is_pure=True, pack=4)
    elif BITS == 4 and dtype == gl.bfloat16:
        made = gl.inline_asm_elementwise(_BFLOAT16_4, _FOUR, [words], dtype=gl.bfloat16, is_pure=True, pack=8)
    elif BITS == 4:
        made = gl.inline_asm_elementwise(_FLOAT16_4, _FOUR, [words], dtype=gl.float16, is_pure=True, pack=8)
    elif dtype == gl.bfloat16:
        made = gl.inline_asm_elementwise(_BFLOAT16_8, _EIGHT, [words], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        made = gl.inline_asm_elementwise(_FLOAT16_8, _EIGHT, [words], dtype=gl.float16, is_pure=True, pack=4)
    return made


@gluon.jit
def _fetch(ring, at, first, limit, groups, stage, UNIT: gl.constexpr):
    """Copy the groups from `first` to before `limit` of `groups` into a buffer; the others become 0."""
    async_copy.async_copy_global_to_shared(ring.index(stage), at + first * UNIT, mask=first + groups < limit)


@gluon.jit
def _fetch_scales(ring, at, first, limit, groups, stage, FP8: gl.constexpr):
    """Copy the scales of the groups from `first` to before `limit` of `groups`; four groups may have one scale."""
    group = (first + groups) // 4 if FP8 else first + groups
    async_copy.async_copy_global_to_shared(ring.index(stage), at + group * 16, mask=first + groups < limit)


@gluon.jit
def _number(t, tile, TILES: gl.constexpr, GATED: gl.constexpr):
    """Return which tile after `tile` a program's tile t is; a missing one is the last tile, and is not stored."""
    if GATED:  # tile 2p is a gate, tile 2p+1 its factor
        return gl.minimum(t // 2, TILES - 1 - tile) + (t % 2) * TILES
    else:
        return gl.minimum(t, TILES - 1 - tile)


@gluon.jit(do_not_specialize=["rows"])
def multiply_quantised_rows(
    codes, scales, x, norm, experts, bias, residual, taps, past, y, members, own_codes, own_scales,
    rows, eps,
    N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ONE: gl.constexpr, BITS: gl.constexpr, FP8: gl.constexpr,
    C: gl.constexpr, WK: gl.constexpr, WM: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, SHIFT: gl.constexpr,
    GATED: gl.constexpr, EVERY: gl.constexpr, EXPERTS: gl.constexpr, CHANNELS: gl.constexpr, SIZE: gl.constexpr,
    OVERLAP: gl.constexpr, LATE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """32 WM channels of y `rows N` (GATED: 16 WM; SPLIT > 1: of one part of it, float32 `SPLIT rows N`).

    codes are words of 4 bytes; operations whose argument is None are skipped. ONE: there is one row, which may have a
    norm. experts, with ONE: row i of y is that of row i / EVERY of x and of weight experts[i] of many. With members
    `blocks R` instead: those are the rows i of block b, all of weight experts[b], and -1 is none; a block of expert -1
    has none. Expert EXPERTS has the codes own_codes and own_scales, if they are given. LATE: the next launch may read
    what the one before this has written. The first CHANNELS channels are convolved with taps `CHANNELS SIZE` after past
    `rows CHANNELS SIZE-1`.
    """
    gl.static_assert(num_warps == WK * WM)
    G: gl.constexpr = K // 32
    SCALES: gl.constexpr = ((G + 3) // 4 if FP8 else G) * 16  # of a tile
    PART: gl.constexpr = (G + SPLIT - 1) // SPLIT
    GC: gl.constexpr = C * WK
    STEPS: gl.constexpr = (PART + GC - 1) // GC
    T: gl.constexpr = 2 * WM
    M: gl.constexpr = 16 * T
    TILES: gl.constexpr = (N + 15) // 16
    WORDS: gl.constexpr = BITS * 16  # of a group of a tile
    left: gl.constexpr = _code_layout(GC, T, BITS, 32 // BITS, WK, WM)
    beside: gl.constexpr = _scale_layout(GC, T, WK, WM)
    right: gl.constexpr = _row_layout(GC, R, WK, WM)
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WM, 1], [1, 16, 8])
    dtype: gl.constexpr = x.dtype.element_ty

    tile = gl.program_id(0) // SPLIT * (WM if GATED else T)
    part = gl.program_id(0) % SPLIT
    start = part * PART
    limit = gl.minimum(start + PART, G)
    if experts is not None:
        pair = gl.program_id(1)
        if OVERLAP:
            overlap(LATE)
        expert = gl.load(experts + pair).to(gl.int64)
        if members is not None:
            if expert < 0:
                return
            members += pair * R
        else:
            x += (pair // EVERY).to(gl.int64) * K
            y += pair.to(gl.int64) * N
        if own_codes is not None:
            own = expert == EXPERTS
            codes = gl.where(own, own_codes, codes)
            scales = gl.where(own, own_scales, scales)
            expert = gl.where(own, 0, expert)
        expert *= (2 if GATED else 1) * TILES
        codes += expert * (G * WORDS)
        scales += expert * SCALES

    copy_w: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8 // BITS, BITS, 4], [num_warps, 1, 1, 1], [3, 2, 1, 0])
    copy_f: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 2, 4], [num_warps, 1, 1], [2, 1, 0])
    copy_x: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
    packed_w: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    packed: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring_w = gl.allocate_shared_memory(gl.int32, [STAGES, GC, T, BITS, 16], packed_w)
    ring_f = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, GC, T, 16], packed)
    g_w = _arange(GC, 0, copy_w)
    g_f = _arange(GC, 0, copy_f)
    at_w = codes + tile.to(gl.int64) * (G * WORDS)
    at_w = at_w + _number(_arange(T, 1, copy_w), tile, TILES, GATED) * (G * WORDS)
    at_w = at_w + (g_w * WORDS + _arange(BITS, 2, copy_w) * 16 + _arange(16, 3, copy_w))
    at_f = scales + tile.to(gl.int64) * SCALES
    at_f = at_f + _number(_arange(T, 1, copy_f), tile, TILES, GATED) * SCALES + _arange(16, 2, copy_f)
    for s in gl.static_range(STAGES - 1):
        _fetch(ring_w, at_w, start + s * GC, limit, g_w, s, WORDS)
        _fetch_scales(ring_f, at_f, start + s * GC, limit, g_f, s, FP8)
        async_copy.commit_group()

    along: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    MO: gl.constexpr = M // 2 if GATED else M
    m = gl.arange(0, MO, gl.SliceLayout(1, along))[:, None]
    r = gl.arange(0, R, gl.SliceLayout(0, along))[None, :]
    # the rows of a product, from the slowest: row / 2 % 2, pair, row % 2, tile (not GATED), row / 4
    if GATED:
        n = tile * 16 + 16 * ((m // 8) % WM) + (m % 4) * 4 + 2 * (m // (8 * WM)) + (m // 4) % 2
    else:
        n = tile * 16 + 32 * ((m // 16) % WM) + 16 * ((m // 4) % 2) + (m % 4) * 4 + 2 * (m // (16 * WM)) + (m // 8) % 2
    has = (n < N) & (r < rows)
    if norm is not None or ONE:
        ROOM: gl.constexpr = _power(STEPS)
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
        k = start * 32 + _arange(ROOM * GC, 0, flat) * 32 + _arange(32, 1, flat)
        flat_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        row_x = gl.allocate_shared_memory(dtype, [ROOM * GC, 32], flat_shared)
        ring_x = row_x._reinterpret(dtype, [ROOM, GC, 32], flat_shared)
    if norm is not None:
        factor = gl.load(norm + k, mask=k < K, other=0.0).to(gl.float32) + SHIFT
    if CHANNELS:
        moves, at, x1, x2, sums, newest = load_past(past, taps, n, r, rows, CHANNELS, SIZE)
    if OVERLAP and experts is None:
        overlap()

    if ONE:
        row = gl.load(x + k, mask=k < limit * 32, other=0.0).to(gl.float32)
        if norm is not None:
            squares = gl.sum(gl.sum(row * row, 1), 0)
            row = row * gl.rsqrt(squares * (1.0 / K) + eps) * factor
        row_x.store(row.to(dtype))
    else:
        ring_x = gl.allocate_shared_memory(dtype, [STAGES, GC, R, 32], packed)
        g_x = _arange(GC, 0, copy_x)
        r_x = _arange(R, 1, copy_x)
        if members is not None:
            row_x = gl.load(members + r_x)
            at_x = x + ((gl.maximum(row_x, 0) // EVERY).to(gl.int64) * K + g_x * 32 + _arange(32, 2, copy_x))
            there = gl.where(row_x >= 0, g_x, G)
        else:
            at_x = x + (r_x * K + g_x * 32 + _arange(32, 2, copy_x))
            there = gl.where(r_x < rows, g_x, G)  # missing rows are treated as missing groups
        for s in gl.static_range(STAGES - 1):
            _fetch(ring_x, at_x, start + s * GC, limit, there, s, 32)
            async_copy.commit_group()
    if members is not None:
        r = gl.load(members + r)
        has = (n < N) & (r >= 0)
        r = r.to(gl.int64)
    if residual is not None:
        added = gl.load(residual + r * N + n, mask=has, other=0.0).to(gl.float32)

    total = gl.zeros([WK, M, R], gl.float32, product)
    for i in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        barrier()  # all copies have arrived, and all warps have read the buffer that is filled next
        if STEPS >= STAGES:
            stage = (i + STAGES - 1) % STAGES
            ahead = start + (i + STAGES - 1) * GC
            _fetch(ring_w, at_w, ahead, limit, g_w, stage, WORDS)
            _fetch_scales(ring_f, at_f, ahead, limit, g_f, stage, FP8)
            if not ONE:
                _fetch(ring_x, at_x, ahead, limit, there, stage, 32)
        async_copy.commit_group()
        if ONE:
            b = gl.expand_dims(ring_x.index(i).load(gl.SliceLayout(1, right)), 1)
            b, _ = gl.broadcast(b, gl.zeros([GC, R, 32], dtype, right))
        else:
            b = ring_x.index(i % STAGES).load(right)
        # columns in the order 0 2 1 3
        b = b.reshape([GC, R, 8, 2, 2]).permute([0, 2, 4, 3, 1]).reshape([GC, 32, R])
        a = _numbers(ring_w.index(i % STAGES).load(gl.SliceLayout(4, left)), dtype, BITS, FP8, left)
        # group, pair, tile, step, row / 4, row / 2 % 2, row % 2, (4 bits: half of the byte,) column
        if BITS == 4:
            a = a.reshape([GC, WM, 2, 4, 4, 2, 2, 2, 4]).permute([0, 5, 1, 6, 2, 4, 7, 3, 8])
        else:
            a = a.reshape([GC, WM, 2, 8, 4, 2, 2, 4]).permute([0, 5, 1, 6, 2, 4, 3, 7])
        a = gl.convert_layout(a.reshape([GC, M, 32]), gl.DotOperandLayout(0, product, 4), assert_trivial=True)
        b = gl.convert_layout(b, gl.DotOperandLayout(1, product, 4), assert_trivial=True)
        made = mma_v2(a, b, gl.zeros([GC, M, R], gl.float32, product))
        f = ring_f.index(i % STAGES).load(beside).to(gl.float32)
        f = f.reshape([GC, WM, 2, 4, 2, 2]).permute([0, 4, 1, 5, 2, 3]).reshape([GC, M])
        f = gl.convert_layout(f, gl.SliceLayout(2, product), assert_trivial=True)
        made = gl.sum((made * gl.expand_dims(f, 2)).reshape([C, WK, M, R]), 0)
        total += gl.convert_layout(made, product, assert_trivial=True)

    found = gl.sum(total, 0)  # M R
    if GATED:
        both: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 4, 8, 1], [num_warps, 1, 1, 1], [3, 2, 1, 0])
        gate, up = gl.split(gl.convert_layout(found.reshape([M // 8, 2, 4, R]).permute([0, 2, 3, 1]), both))
        found = (gate * sigmoid(gate) * up).reshape([MO, R])
    found = gl.convert_layout(found, along)
    if bias is not None:
        found += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    if CHANNELS:
        found = convolve_newest(found, past, n, moves, at, x1, x2, sums, newest, CHANNELS, SIZE)
    if residual is not None:
        found += added
    gl.store(y + (part * rows + r) * N + n, found.to(y.dtype.element_ty), mask=has)
