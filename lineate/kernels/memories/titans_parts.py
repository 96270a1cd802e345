"""Pieces of the kernels of titans.py: a program's share, the loss and its gradients, and tiles of M and S."""

import triton
import triton.language as tl

from lineate.kernels.memories.tiles import dot, load_tile, own_room, store_tile


@triton.jit
def load_tokens(x, slot, c, CHUNK: tl.constexpr):
    """Load one number per token, `C 1`."""
    return tl.load(x + slot * CHUNK + c, mask=c < CHUNK, other=0.0)[:, None]


@triton.jit
def begin_walk(
    shared, arrived, chunks, heads, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VALUES: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Return a program's number and the beginning of its slice, its row and head, indices, and how many chunks it has.

    Behind the beginning come the group's memory for summands `C BV` and for summands `C 1`, and its counter. The
    indices are those of a single column, of tokens, keys and values, and which values exist `1 BV`.
    """
    program = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * SLICE
    shared, arrived = own_room(shared, arrived, C * (BV + 1), PARTS)
    shared_lines = shared + 2 * PARTS * C * BV
    one = tl.arange(0, 1)
    row = program // heads
    head = program % heads
    c = tl.arange(0, C)
    d = tl.arange(0, BK)
    v = tl.arange(0, BV)
    has = v[None, :] < VALUES
    count = tl.load(chunks + row)
    return program, begin, shared, shared_lines, arrived, row, head, one, c, d, v, has, count


@triton.jit
def load_factors(last, moving, ends, slot, c, CHUNK: tl.constexpr):
    """Load last and moving of a cell's tokens, and b, f and carried of its end."""
    own_last = load_tokens(last, slot, c, CHUNK)
    own_moving = load_tokens(moving, slot, c, CHUNK)
    b = tl.load(ends + slot * 3)
    f = tl.load(ends + slot * 3 + 1)
    return own_last, own_moving, b, f, tl.load(ends + slot * 3 + 2)


@triton.jit
def silu_slope(z, s):
    """Return silu'(z), given s = sigmoid(z)."""
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def _centre(x, has, WIDTH: tl.constexpr):
    """Return x - mean x over the columns that exist."""
    return tl.where(has, x - tl.sum(x, 1)[:, None] / WIDTH, 0.0)


@triton.jit
def _mean(x, y, WIDTH: tl.constexpr):
    return tl.sum(x * y, 1)[:, None] / WIDTH


@triton.jit
def error(z, target, has, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return dloss/dz, c = z - mean z, r and g.

    dloss/dz = r P(g), P(u) = u - mean u - x mean(u x), with r = 1 / sigma, x = (z - mean z) r, g = x - target.
    If EPS is None, there is no norm.
    """
    centred = z
    r = z
    g = z - target
    G = g
    if EPS is not None:
        centred = _centre(z, has, WIDTH)
        r = tl.rsqrt(_mean(centred, centred, WIDTH) + EPS)
        x = centred * r
        g = x - target
        G = (_centre(g, has, WIDTH) - x * _mean(g, x, WIDTH)) * r
    return G, centred, r, g


@triton.jit
def error_backward(dG, G, centred, r, g, has, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return dz, given the gradient dG and the results of error."""
    dz = dG
    if EPS is not None:
        x = centred * r
        along = _mean(dG, x, WIDTH)
        dg = (_centre(dG, has, WIDTH) - x * along) * r
        dx = dg - r * (dG * _mean(g, x, WIDTH) + g * along)
        dr = _mean(dG, G, WIDTH) / r + _mean(dx, centred, WIDTH)  # (dr divided by WIDTH)
        dz = _centre(dx * r - r * r * r * centred * dr, has, WIDTH)
    return dz


@triton.jit
def advance(
    M, S, old, new, i, j, x, G, last, moving, b, f, carried, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store a tile of M' and S'."""
    weights = load_tile(M + old * (ROWS * COLUMNS), i, j, ROWS, COLUMNS)
    momentum = load_tile(S + old * (ROWS * COLUMNS), i, j, ROWS, COLUMNS)
    weights = b * weights + f * momentum - dot(tl.trans(x * last), G)
    store_tile(M + new * (ROWS * COLUMNS), weights, i, j, ROWS, COLUMNS)
    momentum = carried * momentum - dot(tl.trans(x * moving), G)
    store_tile(S + new * (ROWS * COLUMNS), momentum, i, j, ROWS, COLUMNS)


@triton.jit
def retreat(
    A, B, dM, dS, slot, before, i, j, x, dz, back, G, b, f, carried, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the gradients of a tile of M and S at a cell's start, which are those at the end of the cell before.

    x^T dz is the part of M's gradient through z = x M; back^T G, if it is given, the part through G M^T.
    """
    size = ROWS * COLUMNS
    weights = load_tile(A + slot * size, i, j, ROWS, COLUMNS)
    momentum = load_tile(B + slot * size, i, j, ROWS, COLUMNS)
    new_weights = load_tile(dM + slot * size, i, j, ROWS, COLUMNS)
    new_momentum = load_tile(dS + slot * size, i, j, ROWS, COLUMNS)
    new_weights += b * weights + dot(tl.trans(x), dz)
    if back is not None:
        new_weights += dot(tl.trans(back), G)
    store_tile(A + before * size, new_weights, i, j, ROWS, COLUMNS)
    store_tile(B + before * size, new_momentum + f * weights + carried * momentum, i, j, ROWS, COLUMNS)


@triton.jit
def written_gradient(A, B, slot, i, j, x, last, moving, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return dG = -(last (x A) + moving (x B)) for a tile of A and B."""
    size = ROWS * COLUMNS
    dG = last * dot(x, load_tile(A + slot * size, i, j, ROWS, COLUMNS))
    return -dG - moving * dot(x, load_tile(B + slot * size, i, j, ROWS, COLUMNS))
