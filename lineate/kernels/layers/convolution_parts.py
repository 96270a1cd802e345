"""Pieces of the short convolution (convolution.py) that its kernels and the products of a token share.

    u_t = sum_a w_a x_{t-a}        a = 0 .. SIZE - 1 the age of an input

The inputs x1, x2, x3 before a token and the taps w0 .. w3 stay in registers, in float32.
"""

import triton
import triton.language as tl

from lineate.kernels.layers.rows import sigmoid


@triton.jit
def load_input(x, stride, state, row, offset, c, has, AGE: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the input AGE tokens before token number `offset` of a sequence, which is at x: its own or the state's."""
    found = tl.load(x - AGE * stride + c, mask=has & (offset >= AGE), other=0.0).to(tl.float32)
    if state is not None:
        at = state + (tl.cast(row, tl.int64) * CHANNELS + c) * (SIZE - 1) + (SIZE - 1 + offset - AGE)
        older = tl.load(at, mask=has & (offset >= 0) & (offset < AGE), other=0.0).to(tl.float32)
        found = tl.where(offset >= AGE, found, older)
    return found


@triton.jit
def load_window(x, stride, state, row, offset, c, has, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the inputs of age 1, 2 and 3 of the token at x; those that the convolution does not reach are unused."""
    x1 = load_input(x, stride, state, row, offset, c, has, 1, SIZE, CHANNELS)
    x2 = x1
    x3 = x1
    if SIZE > 2:
        x2 = load_input(x, stride, state, row, offset, c, has, 2, SIZE, CHANNELS)
    if SIZE > 3:
        x3 = load_input(x, stride, state, row, offset, c, has, 3, SIZE, CHANNELS)
    return x1, x2, x3


@triton.jit
def load_taps(weight, c, has, SIZE: tl.constexpr):
    """Load w by age: `weight` is `channels SIZE`, the oldest first."""
    w0 = tl.load(weight + c * SIZE + (SIZE - 1), mask=has, other=0.0).to(tl.float32)
    w1 = tl.load(weight + c * SIZE + (SIZE - 2), mask=has, other=0.0).to(tl.float32)
    w2 = w1
    w3 = w1
    if SIZE > 2:
        w2 = tl.load(weight + c * SIZE + (SIZE - 3), mask=has, other=0.0).to(tl.float32)
    if SIZE > 3:
        w3 = tl.load(weight + c * SIZE, mask=has, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE: tl.constexpr):
    """Return u, summed from the oldest input on; fused by hand, so that all kernels have the same bits."""
    u = w1 * x1
    if SIZE == 3:
        u = tl.fma(w1, x1, w2 * x2)
    if SIZE == 4:
        u = tl.fma(w1, x1, tl.fma(w2, x2, w3 * x3))
    return tl.fma(w0, x0, u)


@triton.jit
def store_window(state, x0, x1, x2, has, SIZE: tl.constexpr):
    """Store the SIZE - 1 inputs that the next token reads, x0 the last of them; state is at the oldest one's place."""
    tl.store(state + (SIZE - 2), x0, mask=has)
    if SIZE > 2:
        tl.store(state + (SIZE - 3), x1, mask=has)
    if SIZE > 3:
        tl.store(state, x2, mask=has)


@triton.jit
def convolve_first(found, past, n, moves, x1, x2, x3, w0, w1, w2, w3, SIZE: tl.constexpr):
    """Convolve the channels n of a product where `moves`; their inputs replace the oldest ones in past."""
    x0 = found.to(past.dtype.element_ty).to(tl.float32)  # rounded as in the state
    convolved = weighted_sum(x0, x1, x2, x3, w0, w1, w2, w3, SIZE)
    found = tl.where(moves, convolved * sigmoid(convolved), x0)
    tl.debug_barrier()  # every thread has read the data that is overwritten now
    store_window(past + n * (SIZE - 1), x0, x1, x2, moves, SIZE)
    return found
