"""The short convolution and its gradients, each in one launch and bound by memory alone.

    y_t = silu(u_t),  u_t = sum_a w_a x_{t-a}        a = 0 .. SIZE - 1 the age of an input

A program walks along the tokens of BC channels with the last inputs in registers, so each input is read once. Tokens
are numbered within their batch row; a sequence (`text` in the code) is that row, or one of the sequences packed into
it. After the programs that walk, further programs, one per sequence and BC channels, write the state. All arithmetic is
float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.layers.convolution_parts import load_input, load_taps, load_window, store_window, weighted_sum
from lineate.kernels.layers.rows import sigmoid


@triton.jit
def _find_text(bounds, texts, token, t):
    """Return a token's packed sequence: the number of bounds not after it, less one; -1 or `texts` if it is in none."""
    j = tl.arange(0, 128)
    count = tl.zeros((128,), tl.int32)
    for first in range(0, texts + 1, 128):
        bound = tl.load(bounds + first + j, mask=first + j <= texts, other=t)
        count += (bound <= token).to(tl.int32)
    return tl.sum(count, 0) - 1


@triton.jit
def _text(bounds, row, texts, t):
    """Return a packed sequence's first token and end, within 0 .. t; for none, a first token that no walk reaches."""
    exists = (row >= 0) & (row < texts)
    start = tl.load(bounds + row, mask=exists, other=0).to(tl.int64)
    end = tl.load(bounds + row + 1, mask=row < texts, other=t).to(tl.int64)
    start = tl.where(exists, tl.minimum(tl.maximum(start, 0), t), t + 8).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), t).to(tl.int32)
    return start, end


@triton.jit
def _silu_gradient(u):
    s = sigmoid(u)
    return s * (1.0 + u * (1.0 - s))


@triton.jit
def _four_rows(x, stride, i, n, c, has):
    """Load rows i .. i + 3 of n, all issued before any is waited for; x is at row i."""
    a = tl.load(x + c, mask=has & (i < n), other=0.0)
    b = tl.load(x + stride + c, mask=has & (i + 1 < n), other=0.0)
    d = tl.load(x + 2 * stride + c, mask=has & (i + 2 < n), other=0.0)
    e = tl.load(x + 3 * stride + c, mask=has & (i + 3 < n), other=0.0)
    return a, b, d, e


@triton.jit
def _item_and_channels(CHANNELS: tl.constexpr, BC: tl.constexpr):
    """Return a program's walk or row, its channels, and which of them exist."""
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    item = tl.program_id(0) // BLOCKS
    c = (tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC)
    return item, c, c < CHANNELS


@triton.jit
def _whole_text(bounds, row, texts, t):
    """Return the first token (0 unless packed) and the length of a sequence."""
    if bounds is not None:
        start, end = _text(bounds, row, texts, t)
        return start, tl.maximum(end - start, 0)
    else:
        return row * 0, row * 0 + t


@triton.jit
def _offset(row, start, stride, row_stride, PACKED: tl.constexpr):
    """Return where the first token of a sequence is."""
    if PACKED:
        return start * stride
    else:
        return row * row_stride


@triton.jit
def _begin_walk(bounds, item, texts, walk, blocks, t):
    """Return a walk's batch row and first token, and the number, first token and end of that token's sequence."""
    if bounds is not None:
        batch = item * 0
        first = item * walk
        row = _find_text(bounds, texts, first, t)
        start, end = _text(bounds, row, texts, t)
    else:
        batch = item // blocks
        first = (item % blocks) * walk
        row = batch
        start = first * 0
        end = start + t
    return batch, first, row, start, end


@triton.jit
def _pass_bounds(
    x, stride, state, bounds, texts, t, token, row, start, end, x1, x2, x3, c, has,
    s: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the sequence of a token and the inputs before it, from those of the token before; x is s tokens back."""
    if (token >= end) & (row < texts):
        while (token >= end) & (row < texts):  # past empty sequences
            row += 1
            start, end = _text(bounds, row, texts, t)
        x1, x2, x3 = load_window(x + s * stride, stride, state, row, token - start, c, has, SIZE, CHANNELS)
    return row, start, end, x1, x2, x3


@triton.jit(do_not_specialize=["t", "texts", "walk", "blocks", "walks", "x_row", "x_token"])
def convolve(
    x, weight, state, bounds, y, final, t, texts, walk, blocks, walks, x_row, x_token,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store y and the last SIZE - 1 inputs of each sequence. Strides are in units of UNIT elements.

    The units let the compiler see the strides' alignment.
    `walks` programs (times blocks of channels) of `walk` tokens each, `blocks` of them a batch row.
    """
    PACKED: tl.constexpr = bounds is not None
    item, c, has = _item_and_channels(CHANNELS, BC)
    stride = tl.cast(x_token, tl.int64) * UNIT
    row_stride = tl.cast(x_row, tl.int64) * UNIT
    if item >= walks:
        row = item - walks
        start, length = _whole_text(bounds, row, texts, t)
        x += _offset(row, start, stride, row_stride, PACKED)
        for i in tl.static_range(SIZE - 1):
            kept = load_input(x + length * stride, stride, state, row, length, c, has, SIZE - 1 - i, SIZE, CHANNELS)
            tl.store(final + (row.to(tl.int64) * CHANNELS + c) * (SIZE - 1) + i, kept, mask=has)
        return

    batch, first, row, start, end = _begin_walk(bounds, item, texts, walk, blocks, t)
    x += batch * row_stride + first * stride
    y += (batch.to(tl.int64) * t + first) * CHANNELS
    n = tl.minimum(t - first, walk)
    w0, w1, w2, w3 = load_taps(weight, c, has, SIZE)
    x1, x2, x3 = load_window(x, stride, state, row, first - start, c, has, SIZE, CHANNELS)
    for i in range(0, n, 4):
        rows = _four_rows(x, stride, i, n, c, has)
        for s in tl.static_range(4):
            x0 = rows[s].to(tl.float32)
            if PACKED:
                token = first + i + s
                row, start, end, x1, x2, x3 = _pass_bounds(
                    x, stride, state, bounds, texts, t, token, row, start, end, x1, x2, x3, c, has, s, SIZE, CHANNELS
                )
            u = weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE)
            u = u * sigmoid(u)
            if PACKED:
                u = tl.where((token >= start) & (token < end), u, 0.0)
            tl.store(y + s * CHANNELS + c, u, mask=has & (i + s < n))
            x3 = x2
            x2 = x1
            x1 = x0
        x += 4 * stride
        y += 4 * CHANNELS


@triton.jit(do_not_specialize=["x_row"])
def convolve_one(
    x, weight, bias, state, y, final, x_row,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Decode one token a row: read the state once and write the next one, which may be the same tensor.

    The bits are those of convolve, which has no bias `CHANNELS`.
    """
    item, c, has = _item_and_channels(CHANNELS, BC)
    row = item.to(tl.int64)
    x += row * (tl.cast(x_row, tl.int64) * UNIT)
    x1, x2, x3 = load_window(x, 0, state, row, 0, c, has, SIZE, CHANNELS)
    w0, w1, w2, w3 = load_taps(weight, c, has, SIZE)
    if bias is not None:
        shift = tl.load(bias + c, mask=has, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x0 = tl.load(x + c, mask=has, other=0.0).to(tl.float32)
    u = weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE)
    if bias is not None:
        u += shift
    tl.store(y + row * CHANNELS + c, u * sigmoid(u), mask=has)
    tl.debug_barrier()  # every thread has read the data that may be overwritten now
    store_window(final + (row * CHANNELS + c) * (SIZE - 1), x0, x1, x2, has, SIZE)


@triton.jit
def _last_gradient(
    dfinal, row, j, c, has, there, SIZE: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Load the gradient of position j of a sequence's new state."""
    at = dfinal + (tl.cast(row, tl.int64) * CHANNELS + c) * (SIZE - 1) + j
    return tl.load(at, mask=has & there, other=0.0).to(tl.float32)


@triton.jit
def _state_gradient(
    x, stride, state, dy, dy_stride, dfinal, dstate, row, length, c, has, w0, w1, w2, w3,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the SIZE - 1 inputs before a sequence, which its first tokens read."""
    x1, x2, x3 = load_window(x, stride, state, row, 0, c, has, SIZE, CHANNELS)
    d1 = tl.zeros_like(x1)
    d2 = tl.zeros_like(x1)
    d3 = tl.zeros_like(x1)
    for i in tl.static_range(SIZE - 1):
        there = has & (i < length)
        x0 = tl.load(x + i * stride + c, mask=there, other=0.0).to(tl.float32)
        du = tl.load(dy + i * dy_stride + c, mask=there, other=0.0).to(tl.float32)
        du *= _silu_gradient(weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE))
        du = tl.where(there, du, 0.0)
        # at token i an input is i older than at the first
        if i == 0:
            d1 = w1 * du
            if SIZE > 2:
                d2 = w2 * du
            if SIZE > 3:
                d3 = w3 * du
        elif i == 1:
            d1 = tl.fma(w2, du, d1)
            if SIZE > 3:
                d2 = tl.fma(w3, du, d2)
        else:
            d1 = tl.fma(w3, du, d1)
        x3 = x2
        x2 = x1
        x1 = x0
    if dfinal is not None:  # a sequence shorter than the state keeps some of the old one
        d1 += _last_gradient(dfinal, row, SIZE - 2 - length, c, has, length <= SIZE - 2, SIZE, CHANNELS)
        if SIZE > 2:
            d2 += _last_gradient(dfinal, row, SIZE - 3 - length, c, has, length <= SIZE - 3, SIZE, CHANNELS)
        if SIZE > 3:
            d3 += _last_gradient(dfinal, row, 0, c, has, length == 0, SIZE, CHANNELS)
    store_window(dstate + (row.to(tl.int64) * CHANNELS + c) * (SIZE - 1), d1, d2, d3, has, SIZE)


@triton.jit(do_not_specialize=["t", "texts", "walk", "blocks", "walks", "x_row", "x_token", "dy_row", "dy_token"])
def convolve_backward(
    x, weight, state, bounds, dy, dfinal, dx, dstate, partials,
    t, texts, walk, blocks, walks, x_row, x_token, dy_row, dy_token,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """du_t = dy_t silu'(u_t),  dx_t = sum_a w_a du_{t+a},  dw_a = sum_t du_t x_{t-a}.

    The walk is that of convolve, SIZE - 1 tokens further: dx of a token is stored after the last token that read it.
    partials `walks SIZE channels` (by age) are the sums over each walk's own tokens.
    """
    PACKED: tl.constexpr = bounds is not None
    PAST: tl.constexpr = SIZE - 1
    item, c, has = _item_and_channels(CHANNELS, BC)
    stride = tl.cast(x_token, tl.int64) * UNIT
    row_stride = tl.cast(x_row, tl.int64) * UNIT
    dy_stride = tl.cast(dy_token, tl.int64) * UNIT
    dy_row_stride = tl.cast(dy_row, tl.int64) * UNIT
    w0, w1, w2, w3 = load_taps(weight, c, has, SIZE)
    if dstate is not None:  # noqa: SIM102 (known when compiling; the next is not)
        if item >= walks:
            row = item - walks
            start, length = _whole_text(bounds, row, texts, t)
            x += _offset(row, start, stride, row_stride, PACKED)
            dy += _offset(row, start, dy_stride, dy_row_stride, PACKED)
            _state_gradient(
                x, stride, state, dy, dy_stride, dfinal, dstate, row, length, c, has, w0, w1, w2, w3, SIZE, CHANNELS
            )
            return

    batch, first, row, start, end = _begin_walk(bounds, item, texts, walk, blocks, t)
    x += batch * row_stride + first * stride
    dy += batch * dy_row_stride + first * dy_stride
    dx += (batch.to(tl.int64) * t + first - PAST) * CHANNELS
    n = tl.minimum(t - first, walk)
    seen = tl.minimum(t - first, walk + PAST)
    x1, x2, x3 = load_window(x, stride, state, row, first - start, c, has, SIZE, CHANNELS)
    # dw by age; and partial sums of dx of the previous token, of the one before that, ...
    dw0 = tl.zeros((BC,), tl.float32)
    dw1 = tl.zeros((BC,), tl.float32)
    dw2 = tl.zeros((BC,), tl.float32)
    dw3 = tl.zeros((BC,), tl.float32)
    dx1 = tl.zeros((BC,), tl.float32)
    dx2 = tl.zeros((BC,), tl.float32)
    dx3 = tl.zeros((BC,), tl.float32)
    for i in range(0, n + PAST, 4):
        rows = _four_rows(x, stride, i, seen, c, has)
        drows = _four_rows(dy, dy_stride, i, seen, c, has)
        for s in tl.static_range(4):
            x0 = rows[s].to(tl.float32)
            du = drows[s].to(tl.float32)
            token = first + i + s
            if PACKED:
                row, start, end, x1, x2, x3 = _pass_bounds(
                    x, stride, state, bounds, texts, t, token, row, start, end, x1, x2, x3, c, has, s, SIZE, CHANNELS
                )
                x0 = tl.where(token >= start, x0, 0.0)
            inside = (token >= start) & (token < end)
            du *= _silu_gradient(weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE))
            du = tl.where(inside, du, 0.0)
            own = tl.where(i + s < n, du, 0.0)
            dw0 = tl.fma(own, x0, dw0)
            dw1 = tl.fma(own, x1, dw1)
            if SIZE > 2:
                dw2 = tl.fma(own, x2, dw2)
            if SIZE > 3:
                dw3 = tl.fma(own, x3, dw3)
            # dx, unless the other token is of another sequence
            du1 = du
            du2 = du
            du3 = du
            if PACKED:
                du1 = tl.where(token - start >= 1, du, 0.0)
                du2 = tl.where(token - start >= 2, du, 0.0)
                du3 = tl.where(token - start >= 3, du, 0.0)
            dx1 = tl.fma(w1, du1, dx1)
            if SIZE > 2:
                dx2 = tl.fma(w2, du2, dx2)
            if SIZE > 3:
                dx3 = tl.fma(w3, du3, dx3)
            done = dx1 if SIZE == 2 else (dx2 if SIZE == 3 else dx3)
            tl.store(dx + s * CHANNELS + c, done, mask=has & (i + s >= PAST) & (i + s < n + PAST))
            dx3 = dx2
            dx2 = dx1
            dx1 = tl.zeros((BC,), tl.float32)
            if dfinal is not None:  # noqa: SIM102
                if inside & (end - token <= PAST):
                    dx1 = _last_gradient(dfinal, row, PAST - end + token, c, has, inside, SIZE, CHANNELS)
            dx1 = tl.fma(w0, du, dx1)
            x3 = x2
            x2 = x1
            x1 = x0
        x += 4 * stride
        dy += 4 * dy_stride
        dx += 4 * CHANNELS
    partials += item.to(tl.int64) * (SIZE * CHANNELS) + c
    tl.store(partials, dw0, mask=has)
    tl.store(partials + CHANNELS, dw1, mask=has)
    if SIZE > 2:
        tl.store(partials + 2 * CHANNELS, dw2, mask=has)
    if SIZE > 3:
        tl.store(partials + 3 * CHANNELS, dw3, mask=has)
