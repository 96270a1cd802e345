"""Kernels for weights of 8 and 4 bits in tiles (lineate/quantised/format.py): products of a row, and decoding.

    y_r = sum_g scale_rg sum_c (code_rc - zero) x_c      with the adjacent operations of a block (products.py)

A group g has 32 columns and a scale of float16, or with FP8 128 columns and a scale of float32; codes are then float8
numbers, and zero is 0. Codes are read as words of 4 bytes: word p of a row of a tile has columns 4p to 4p+3 (8 bits),
or columns c to c+3 in the low halves of its bytes and c+16 to c+19 in the high ones, c = 32 (p / 4) + 4 (p % 4)
(4 bits). All sums are float32. On Hopper hopper/quantised_rows.py multiplies rows of 16 bits instead.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.layers.convolution_parts import convolve_first, load_taps, load_window
from lineate.kernels.layers.rows import sigmoid


@triton.jit
def _float8(code):
    """Return the float8 number (e4m3) of each byte, an int32, in float32.

    Its bits lie in the exponent and the digits of a float32, whose exponent counts from 127 and not from 7.
    """
    return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def number_of(words, AT: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr):
    """Return the code at this bit of each word, minus the code of 0, in float32: 2^23 + code ends in the code."""
    code = (words >> AT) & ((1 << BITS) - 1)
    if FP8:
        return _float8(code)
    else:
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))


@triton.jit
def _quads(words, AT: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr):
    """Return the four codes from this bit of each byte of words on, `... 2 2`, in order."""
    even = tl.join(number_of(words, AT, BITS, FP8), number_of(words, AT + 16, BITS, FP8))
    odd = tl.join(number_of(words, AT + 8, BITS, FP8), number_of(words, AT + 24, BITS, FP8))
    return tl.join(even, odd)


@triton.jit
def decode_tiles(
    codes, scales, first, T: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return the rows of T tiles at the columns from `first` on, `16T BK`; codes are words.

    Columns beyond K are undefined.
    """
    G: tl.constexpr = BK // 32
    SCALES: tl.constexpr = (K + 127) // 128 * 16 if FP8 else K // 2  # of a tile
    t = tl.arange(0, T)[:, None, None, None]
    g = tl.arange(0, G)[None, :, None, None]
    s = tl.arange(0, BITS)[None, None, :, None]
    r = tl.arange(0, 16)[None, None, None, :]
    group = first // 32
    at_words = codes + t * (K // 2 * BITS) + (group * BITS * 16 + g * (BITS * 16) + s * 16 + r)
    at_scales = scales + t * SCALES + ((group + g) // 4 if FP8 else group + g) * 16 + r
    if K % BK == 0:
        words = tl.load(at_words)
        factor = tl.load(at_scales).to(tl.float32)
    else:
        there = group + g < K // 32
        words = tl.load(at_words, mask=there, other=0)
        factor = tl.load(at_scales, mask=there, other=0.0).to(tl.float32)
    factor = tl.expand_dims(tl.expand_dims(factor, 4), 5)
    low = (_quads(words, 0, BITS, FP8) * factor).to(dtype)
    if BITS == 8:
        return tl.reshape(tl.permute(low, (0, 3, 1, 2, 4, 5)), (16 * T, BK))
    else:
        both = tl.join(low, (_quads(words, 4, BITS, FP8) * factor).to(dtype))
        return tl.reshape(tl.permute(both, (0, 3, 1, 6, 2, 4, 5)), (16 * T, BK))


@triton.jit
def _column(x, norm, c, has, SHIFT: tl.constexpr):
    """Return these columns of x, times the norm's factor if there is a norm."""
    found = tl.load(x + c, mask=has, other=0.0).to(tl.float32)
    if norm is not None:
        found *= tl.load(norm + c, mask=has, other=0.0).to(tl.float32) + SHIFT
    return found


@triton.jit
def _products(codes, scales, x, norm, p, has, BITS: tl.constexpr, FP8: tl.constexpr, SHIFT: tl.constexpr):
    """Return the summands of y from words p of the 16 rows of a tile, `p 16`."""
    r = tl.arange(0, 16)
    words = tl.load(codes + p[:, None] * 16 + r[None, :], mask=has[:, None], other=0)
    c = p * 4 if BITS == 8 else p // 4 * 32 + p % 4 * 4
    sums = tl.zeros(words.shape, tl.float32)
    for j in tl.static_range(4):
        sums += number_of(words, 8 * j, BITS, FP8) * _column(x, norm, c + j, has, SHIFT)[:, None]
        if BITS == 4:
            sums += number_of(words, 8 * j + 4, BITS, FP8) * _column(x, norm, c + 16 + j, has, SHIFT)[:, None]
    group = p // (32 if FP8 else BITS)
    factor = tl.load(scales + group[:, None] * 16 + r[None, :], mask=has[:, None], other=0.0)
    return sums * factor.to(tl.float32)


@triton.jit
def multiply_quantised(
    codes, scales, x, norm, experts, bias, residual, taps, past, y, eps,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
    SHIFT: tl.constexpr, GATED: tl.constexpr, EVERY: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 channels of a row of y `rows N` from x `rows K`; codes are words; operations with None are skipped.

    GATED: y is silu(first half) times second half, of N channels each. experts: row i of y is that of row i / EVERY of
    x and of weight experts[i] of many. The first CHANNELS channels are convolved with taps `CHANNELS SIZE` after past
    `rows CHANNELS SIZE-1`.
    """
    TILES: tl.constexpr = (N + 15) // 16
    WORDS: tl.constexpr = K // 32 * BITS  # of a row
    SCALES: tl.constexpr = (K + 127) // 128 * 16 if FP8 else K // 2  # of a tile
    tile = tl.program_id(0)
    row = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if experts is not None:
        expert = tl.load(experts + row).to(tl.int64) * ((2 if GATED else 1) * TILES)
        codes += expert * (WORDS * 16)
        scales += expert * SCALES
    x += (row // EVERY).to(tl.int64) * K
    codes += tile.to(tl.int64) * (WORDS * 16)
    scales += tile.to(tl.int64) * SCALES
    sums = tl.zeros((BP, 16), tl.float32)
    if GATED:
        ups = tl.zeros((BP, 16), tl.float32)
    for first in range(0, WORDS, BP):
        p = first + tl.arange(0, BP)
        sums += _products(codes, scales, x, norm, p, p < WORDS, BITS, FP8, SHIFT)
        if GATED:
            at = TILES * WORDS * 16
            ups += _products(codes + at, scales + TILES * SCALES, x, norm, p, p < WORDS, BITS, FP8, SHIFT)
    found = tl.sum(sums, 0)
    if norm is not None:
        k = tl.arange(0, BK)
        whole = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) * (1.0 / K) + eps)
        found *= scale
    n = tile * 16 + tl.arange(0, 16)
    has = n < N
    if bias is not None:
        found += tl.load(bias + n, mask=has, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 0)
        if norm is not None:
            up *= scale
        found *= sigmoid(found) * up
    if taps is not None:
        moves = n < CHANNELS
        past += row.to(tl.int64) * (CHANNELS * (SIZE - 1))
        x1, x2, x3 = load_window(past, 0, past, 0, 0, n, moves, SIZE, CHANNELS)
        w0, w1, w2, w3 = load_taps(taps, n, moves, SIZE)
        found = convolve_first(found, past, n, moves, x1, x2, x3, w0, w1, w2, w3, SIZE)
    if residual is not None:
        found += tl.load(residual + row.to(tl.int64) * N + n, mask=has, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * N + n, found, mask=has)


@triton.jit
def _decoded(codes, scales, tile, r, c, mask, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr):
    """Return rows r of tiles at columns c, in float32; codes are bytes."""
    G: tl.constexpr = K // 32
    g, s = c // 32, c % 32 // 4
    group = tile.to(tl.int64) * G + g
    code = tl.load(codes + (group * BITS + s % BITS) * 64 + r * 4 + c % 4, mask=mask, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (s // 4 * 4)) & 15
    if FP8:
        group = tile.to(tl.int64) * ((K + 127) // 128) + c // 128
    factor = tl.load(scales + group * 16 + r, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        return _float8(code) * factor
    else:
        return (code - (1 << (BITS - 1))).to(tl.float32) * factor


@triton.jit
def leave_quantised_row(
    hidden, codes, scales, own_codes, own_scales, chosen, weights, residual, y,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, BG: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 channels of one row y `N`: the sum over pairs of weights `PAIRS` times hidden `PAIRS K` weight_e^T.

    chosen `PAIRS` names each pair's expert e; EXPERTS is the one with own_codes, if there are any. codes are words of
    `experts N K`. With residual `N`, that is added to the sum, which is rounded before. All but hidden was written
    before the previous launch went on (LATE), so codes are loaded while that one runs.
    """
    TILES: tl.constexpr = (N + 15) // 16
    WORDS: tl.constexpr = K // 2 * BITS  # of a tile
    SCALES: tl.constexpr = (K + 127) // 128 * 16 if FP8 else K // 2
    COLUMNS: tl.constexpr = 128 if FP8 else 32  # of a scale
    EACH: tl.constexpr = 32 if FP8 else BITS  # words of a row that share it
    tile = tl.program_id(0)
    g = tl.arange(0, BG)[:, None, None]
    w = tl.arange(0, EACH)[None, :, None]
    r = tl.arange(0, 16)[None, None, :]
    has = g * EACH + w < K // 32 * BITS
    n = tile * 16 + tl.arange(0, 16)
    if OVERLAP:
        gdc_launch_dependents()
    names = ()
    amounts = ()
    for i in tl.static_range(PAIRS):
        names += (tl.load(chosen + i, cache_modifier=".cg"),)  # type: ignore[assignment]
        amounts += (tl.load(weights + i, cache_modifier=".cg"),)  # type: ignore[assignment]
    if residual is not None:
        added = tl.load(residual + n, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    tiles = ()
    factors = ()
    for i in tl.static_range(PAIRS):
        place = names[i].to(tl.int64) * TILES + tile  # type: ignore[misc]
        at = codes + place * WORDS
        at_scales = scales + place * SCALES
        if own_codes is not None:
            at = tl.where(names[i] == EXPERTS, own_codes + tile * WORDS, at)  # type: ignore[misc]
            at_scales = tl.where(names[i] == EXPERTS, own_scales + tile * SCALES, at_scales)  # type: ignore[misc]
        tiles += (tl.load(at + (g * EACH + w) * 16 + r, mask=has, other=0),)  # type: ignore[assignment]
        group = tl.load(at_scales + g * 16 + r, mask=g * COLUMNS < K, other=0.0)
        factors += (group.to(tl.float32) * amounts[i],)  # type: ignore[misc, assignment]
    if OVERLAP:
        gdc_wait()
    c = g * COLUMNS + w * 4
    total = tl.zeros((BG, EACH, 16), tl.float32)
    for i in tl.static_range(PAIRS):
        sums = tl.zeros((BG, EACH, 16), tl.float32)
        for j in tl.static_range(4):
            sums += number_of(tiles[i], 8 * j, BITS, FP8) * _column(hidden + i * K, None, c + j, has, 0)  # type: ignore[misc]
            if BITS == 4:
                found = _column(hidden + i * K, None, c + 16 + j, has, 0)
                sums += number_of(tiles[i], 8 * j + 4, BITS, FP8) * found  # type: ignore[misc]
        total += sums * factors[i]  # type: ignore[misc]
    found = tl.sum(tl.sum(total, 1), 0)
    if residual is not None:
        found = found.to(y.dtype.element_ty).to(tl.float32) + added
    tl.store(y + n, found.to(y.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["tile", "rows"])
def decode_quantised(
    codes, scales, y, tile, rows, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """A tile's rows at BK columns of y `rows K`, which begins with this tile; codes are words."""
    SCALES: tl.constexpr = (K + 127) // 128 * 16 if FP8 else K // 2
    own = tl.program_id(0)
    first = tl.program_id(1) * BK
    place = (tile + own).to(tl.int64)
    found = decode_tiles(
        codes + place * (K // 2 * BITS), scales + place * SCALES, first, 1, K, BK, BITS, FP8, y.dtype.element_ty
    )  # fmt: skip
    r = tl.arange(0, 16)[:, None]
    c = first + tl.arange(0, BK)[None, :]
    tl.store(y + (own.to(tl.int64) * 16 + r) * K + c, found, mask=(own * 16 + r < rows) & (c < K))


@triton.jit
def decode_quantised_rows(
    codes, scales, ids, y, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row ids[i] of a weight at BK columns of y[i]; codes are bytes. An id outside the weight gives NaN."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    wanted = tl.load(ids + i)
    there = (wanted >= 0) & (wanted < N)
    c = tl.program_id(1) * BK + tl.arange(0, BK)
    found = _decoded(codes, scales, wanted // 16, (wanted % 16).to(tl.int32), c, (c < K) & there, K, BITS, FP8)
    tl.store(y + i.to(tl.int64) * K + c, tl.where(there, found, float("nan")), mask=c < K)


@triton.jit(do_not_specialize=["rows", "M"])
def round_rows(x, codes, scales, rows, M, K: tl.constexpr, BM: tl.constexpr):
    """BM rows of 128 columns of x `rows K` as float8 codes `M K` and scales `K/128 M`; rows to M are filled with 0.

    A scale is the largest number of its columns over 448, or NaN if one of them is not finite.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.program_id(1)
    c = g * 128 + tl.arange(0, 128)[None, :]
    at = r[:, None].to(tl.int64) * K + c
    found = tl.load(x + at, mask=r[:, None] < rows, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(found), 1) * (1.0 / 448.0) + tl.sum(found * 0.0, 1)
    made = found / tl.where(scale == 0.0, 1.0, scale)[:, None]
    made = tl.minimum(tl.maximum(made, -448.0), 448.0)
    tl.store(codes + at, made.to(codes.dtype.element_ty), mask=r[:, None] < M)
    tl.store(scales + g * M + r, scale, mask=r < M)
