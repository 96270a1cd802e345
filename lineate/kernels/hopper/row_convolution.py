"""The short convolution of a new token of a few rows, between the load of its weights and that of its inputs, in Gluon.

    y = silu(sum_a w_a x_a)        a = 0 .. SIZE - 1 the age of an input

The kernels of few_rows.py and quantised_rows.py load the older inputs before they wait for the launch that makes the
newest one. The sum begins with those, so its bits are not those of layers/convolution.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lineate.kernels.hopper.parts import sigmoid


@gluon.jit
def load_past(past, taps, n, r, rows, CHANNELS: gl.constexpr, SIZE: gl.constexpr):
    """Load the older inputs of channels n < CHANNELS of rows r < rows, and the newest one's tap.

    Return which of these there are, the place of their oldest inputs, the two newest of the inputs that stay in the
    state, the sum of all of them times their taps, and the newest one's tap.
    """
    moves = (n < CHANNELS) & (r < rows)
    at = past + (r * CHANNELS + n) * (SIZE - 1)
    x1 = gl.load(at + (SIZE - 2), mask=moves, other=0.0).to(gl.float32)
    x2 = x1
    sums = x1 * gl.load(taps + n * SIZE + (SIZE - 2), mask=n < CHANNELS, other=0.0).to(gl.float32)
    if SIZE > 2:
        x2 = gl.load(at + (SIZE - 3), mask=moves, other=0.0).to(gl.float32)
        sums += x2 * gl.load(taps + n * SIZE + (SIZE - 3), mask=n < CHANNELS, other=0.0).to(gl.float32)
    if SIZE > 3:
        x3 = gl.load(at, mask=moves, other=0.0).to(gl.float32)
        sums += x3 * gl.load(taps + n * SIZE, mask=n < CHANNELS, other=0.0).to(gl.float32)
    newest = gl.load(taps + n * SIZE + (SIZE - 1), mask=n < CHANNELS, other=0.0).to(gl.float32)
    return moves, at, x1, x2, sums, newest


@gluon.jit
def convolve_newest(
    found, past, n, moves, at, x1, x2, sums, newest, CHANNELS: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """Return the convolution of channels n < CHANNELS, with `found` as their newest inputs, which go into past."""
    x0 = found.to(past.dtype.element_ty).to(gl.float32)  # rounded as in the state
    sums += x0 * newest
    found = gl.where(n < CHANNELS, sums * sigmoid(sums), x0)
    gl.store(at + (SIZE - 2), x0.to(past.dtype.element_ty), mask=moves)
    if SIZE > 2:
        gl.store(at + (SIZE - 3), x1.to(past.dtype.element_ty), mask=moves)
    if SIZE > 3:
        gl.store(at, x2.to(past.dtype.element_ty), mask=moves)
    return found
