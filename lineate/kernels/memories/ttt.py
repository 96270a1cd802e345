"""TTT-Linear and TTT-MLP from chunk to chunk: the weights at each chunk's start, and backwards their gradients.

One program per row and head walks the chunks of its row; torch does everything that can be done for many chunks at
once. A cell is one chunk of one row; the row's j-th chunk has the number base[j] + row. With x_1 = k,
z_l = x_l W_l + b_l, x_2 = gelu(z_1) and G_l = dloss/dz_l, all at the weights of the cell's start, and w the writers'
rates, 0 where nothing is written:

    W_l' = W_l - x_l^T (w G_l),  b_l' = b_l - sum_s w_s G_ls
    G_last = r P(g),  g = gamma^2 x - target,  x = r (z - mean z),  r = 1 / sqrt(var z + eps)
    G_1 = (G_2 W_2^T) gelu'(z_1)

P u = u - mean u - x mean(u x). Tiles are [BC, BD] of a cell's tokens, [BD, BM] and [BM, BD] of W_1 and W_2. One matrix
stays in registers; two go through memory, where the next cell's must be stored anyway. All arithmetic is float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import start
from lineate.kernels.memories.tiles import (
    Walk,
    dot,
    load_tile,
    own_room,
    share,
    store_tile,
    sum_parts,
    tile_size,
)

LONGEST_CHUNK, WIDEST_HEAD, LARGEST_TILE = 64, 128, 4096
"""The limits of shared memory: tokens, channels, and their product, both as powers of two."""
MOST_WIDTHS = 2
"""The most layers of a model that the kernels support."""

# 2 sqrt(2 / pi) and .044715 times that: gelu(z) = z sigmoid(z (_SLOPE + _CUBIC z^2)), the tanh approximation.
_SLOPE, _CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.07135481627260025)


@triton.jit
def _gelu(z):
    """Return gelu(z) and its derivative."""
    s = tl.sigmoid(z * (_SLOPE + _CUBIC * z * z))
    return z * s, s + z * s * (1.0 - s) * (_SLOPE + 3.0 * _CUBIC * z * z)


@triton.jit
def _gelu_second(z):
    """Return the second derivative of gelu."""
    s = tl.sigmoid(z * (_SLOPE + _CUBIC * z * z))
    slope = _SLOPE + 3.0 * _CUBIC * z * z  # the derivative of the sigmoid's argument
    return s * (1.0 - s) * (2.0 * slope + 6.0 * _CUBIC * z * z + z * slope * slope * (1.0 - 2.0 * s))


@triton.jit
def _load(x, n, i, j, I: tl.constexpr, J: tl.constexpr):
    """Load matrix n of x `... I J` at rows i and columns j, with 0 outside."""
    return load_tile(x + n * (I * J), i, j, I, J)


@triton.jit
def _store(x, n, i, j, value, I: tl.constexpr, J: tl.constexpr):
    store_tile(x + n * (I * J), value, i, j, I, J)


@triton.jit
def _load_line(x, n, j, J: tl.constexpr):
    return tl.load(x + n * J + j, mask=j < J, other=0.0)


@triton.jit
def _store_line(x, n, j, value, J: tl.constexpr):
    tl.store(x + n * J + j, value, mask=j < J)


@triton.jit
def _mean(u, D: tl.constexpr):
    """Return the mean over the D channels that exist; u is 0 in the others."""
    return tl.sum(u, 1)[:, None] / D


@triton.jit
def _project(u, x, d, D: tl.constexpr):
    """Return P u."""
    return tl.where((d < D)[None, :], u - _mean(u, D), 0.0) - x * _mean(u * x, D)


@triton.jit
def _norm_gradient(z, target, square, d, eps, D: tl.constexpr):
    """Return G of the last layer, and x, r and g."""
    centred = tl.where((d < D)[None, :], z - _mean(z, D), 0.0)
    r = tl.rsqrt(_mean(centred * centred, D) + eps)
    x = centred * r
    g = square[None, :] * x - target
    return r * _project(g, x, d, D), x, r, g


@triton.jit
def _norm_gradient_backward(dG, G, x, r, g, square, d, D: tl.constexpr):
    """Return dz = r (P dx - x mean(dG G)) with dx = gamma^2 r P dG - r (dG mean(g x) + g mean(dG x))."""
    dx = r * (square[None, :] * _project(dG, x, d, D) - dG * _mean(g * x, D) - g * _mean(dG * x, D))
    return r * (_project(dx, x, d, D) - x * _mean(dG * G, D))


@triton.jit
def _matrix(slot, H: tl.constexpr):
    """Return the number of the matrix of this program's head in a slot."""
    return slot.to(tl.int64) * H + tl.program_id(0) % H


@triton.jit
def _after(base, j, count, row, cells):
    """Return the slot of the state after the row's j-th chunk: the next cell's, or the row's, after all cells."""
    following = tl.load(base + j + 1, mask=j + 1 < count, other=0) + row
    return tl.where(j + 1 < count, following, cells + row)


@triton.jit
def _before(base, j, row, rows):
    """Return the slot of the gradient before the row's j-th chunk: the end of the previous cell, or the row's start."""
    previous = tl.load(base + j - 1, mask=j > 0, other=0) + rows + row
    return tl.where(j > 0, previous, row)


@triton.jit(do_not_specialize=["cells", "eps"])
def linear_states(
    k, target, write, square, w, b, base, counts, cells, eps,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Fill w `slots*h d d` and b `slots*h d`: first the cells, then the rows' ends; the rows' first cells are given."""
    row = tl.program_id(0) // H
    c, d = tl.arange(0, BC), tl.arange(0, BD)
    count = tl.load(counts + row)
    gamma = _load_line(square, tl.program_id(0) % H, d, D)
    W = _load(w, _matrix(row, H), d, d, D, D)
    bias = _load_line(b, _matrix(row, H), d, D)
    for j in range(count):
        n = _matrix(tl.load(base + j) + row, H)
        key = _load(k, n, c, d, C, D)
        G = _norm_gradient(dot(key, W) + bias[None, :], _load(target, n, c, d, C, D), gamma, d, eps, D)[0]
        G *= _load_line(write, n, c, C)[:, None]
        W -= dot(tl.trans(key), G)
        bias -= tl.sum(G, 0)
        there = _matrix(_after(base, j, count, row, cells), H)
        _store(w, there, d, d, W, D, D)
        _store_line(b, there, d, bias, D)


@triton.jit(do_not_specialize=["cells", "eps"])
def mlp_states(
    k, target, write, square, w1, b1, w2, b2, base, counts, cells, eps, room, arrived,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The linear_states of two layers: w1 `slots*h d m`, b1 `slots*h m`, w2 `slots*h m d` and b2 `slots*h d`.

    PARTS programs share a head, SLICE of the m channels each; buffer room `programs 2 PARTS BC BD` and arrived
    `programs`.
    """
    row = tl.program_id(0) // H
    begin = tl.program_id(1) * SLICE
    room, arrived = own_room(room, arrived, BC * BD, PARTS)
    c, d = tl.arange(0, BC), tl.arange(0, BD)
    count = tl.load(counts + row)
    gamma = _load_line(square, tl.program_id(0) % H, d, D)
    bias = _load_line(b2, _matrix(row, H), d, D)
    for j in range(count):
        n = _matrix(tl.load(base + j) + row, H)
        there = _matrix(_after(base, j, count, row, cells), H)
        key = _load(k, n, c, d, C, D)
        rate = _load_line(write, n, c, C)[:, None]
        goal = _load(target, n, c, d, C, D)
        z2 = tl.zeros((BC, BD), tl.float32)
        for first in range(begin, begin + SLICE, BM):
            m = first + tl.arange(0, BM)
            x2 = _gelu(dot(key, _load(w1, n, d, m, D, M)) + _load_line(b1, n, m, M)[None, :])[0]
            z2 += dot(x2, _load(w2, n, m, d, M, D))
        z2 = sum_parts(z2, room, arrived, j, c, d, PARTS, BC, BD) + bias[None, :]
        step = rate * _norm_gradient(z2, goal, gamma, d, eps, D)[0]
        bias -= tl.sum(step, 0)
        if begin == 0:
            _store_line(b2, there, d, bias, D)
        for first in range(begin, begin + SLICE, BM):
            m = first + tl.arange(0, BM)
            W1 = _load(w1, n, d, m, D, M)
            W2 = _load(w2, n, m, d, M, D)
            bias1 = _load_line(b1, n, m, M)
            x2, slope = _gelu(dot(key, W1) + bias1[None, :])
            G1 = dot(step, tl.trans(W2)) * slope  # this is w G_1, because step is w G_2
            _store(w1, there, d, m, W1 - dot(tl.trans(key), G1), D, M)
            _store_line(b1, there, m, bias1 - tl.sum(G1, 0), M)
            _store(w2, there, m, d, W2 - dot(tl.trans(x2), step), M, D)
        tl.debug_barrier()  # makes the other threads' stores visible to the next loads


@triton.jit(do_not_specialize=["rows", "eps"])
def linear_adjoints(
    k, target, write, square, z, asked, dw, db, aw, ab, base, counts, rows, eps,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Fill aw and ab, the gradients by the weights at the end of each cell: first the rows' starts, then the cells.

    Those at the ends of the rows' last cells are given. A cell's readers use its weights, with gradients dw and db,
    and its G, with the gradient `asked`. If A and a are the gradients at the end of a cell, those at its start are
    dw + A + k^T dz and db + a + sum dz, where dz comes from dG = asked - w (k A + a).
    """
    row = tl.program_id(0) // H
    c, d = tl.arange(0, BC), tl.arange(0, BD)
    count = tl.load(counts + row)
    gamma = _load_line(square, tl.program_id(0) % H, d, D)
    last = _matrix(rows + tl.load(base + count - 1) + row, H)
    A = _load(aw, last, d, d, D, D)
    a = _load_line(ab, last, d, D)
    for i in range(count):
        j = count - 1 - i
        n = _matrix(tl.load(base + j) + row, H)
        key = _load(k, n, c, d, C, D)
        G, x, r, g = _norm_gradient(_load(z, n, c, d, C, D), _load(target, n, c, d, C, D), gamma, d, eps, D)
        dG = _load(asked, n, c, d, C, D) - _load_line(write, n, c, C)[:, None] * (dot(key, A) + a[None, :])
        dz = _norm_gradient_backward(dG, G, x, r, g, gamma, d, D)
        A += _load(dw, n, d, d, D, D) + dot(tl.trans(key), dz)
        a += _load_line(db, n, d, D) + tl.sum(dz, 0)
        there = _matrix(_before(base, j, row, rows), H)
        _store(aw, there, d, d, A, D, D)
        _store_line(ab, there, d, a, D)


@triton.jit(do_not_specialize=["rows", "eps"])
def mlp_adjoints(
    k, target, write, square, z1, z2, back, w2, asked_x, asked1, asked2, dw1, db1, dw2, db2, aw1, ab1, aw2, ab2,
    base, counts, rows, eps, room, arrived,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The linear_adjoints of two layers; back = G_2 W_2^T, G_1 = back gelu'(z_1). The given gradients get:

    dG_1 = -w (k A_1 + a_1),  dback = dG_1 gelu'(z_1),  dG_2 = -w (x_2 A_2 + a_2) + dback W_2,  dz_2 from dG_2
    dx_2 = -w G_2 A_2^T + dz_2 W_2^T,  dz_1 = dG_1 back gelu''(z_1) + dx_2 gelu'(z_1)
    dW_1 = k^T dz_1,  db_1 = sum dz_1,  dW_2 = dback^T G_2 + x_2^T dz_2,  db_2 = sum dz_2
    """
    row = tl.program_id(0) // H
    begin = tl.program_id(1) * SLICE
    room, arrived = own_room(room, arrived, BC * BD, PARTS)
    c, d = tl.arange(0, BC), tl.arange(0, BD)
    count = tl.load(counts + row)
    gamma = _load_line(square, tl.program_id(0) % H, d, D)
    a2 = _load_line(ab2, _matrix(rows + tl.load(base + count - 1) + row, H), d, D)
    for i in range(count):
        j = count - 1 - i
        cell = tl.load(base + j) + row
        n = _matrix(cell, H)
        here = _matrix(rows + cell, H)
        there = _matrix(_before(base, j, row, rows), H)
        key = _load(k, n, c, d, C, D)
        minus_w = -_load_line(write, n, c, C)[:, None]
        G2, x, r, g = _norm_gradient(_load(z2, n, c, d, C, D), _load(target, n, c, d, C, D), gamma, d, eps, D)
        asked = _load(asked2, n, c, d, C, D) + minus_w * a2[None, :]
        new_a2 = a2 + _load_line(db2, n, d, D)
        dG2 = tl.zeros((BC, BD), tl.float32)
        for first in range(begin, begin + SLICE, BM):
            m = first + tl.arange(0, BM)
            x2, slope = _gelu(_load(z1, n, c, m, C, M))
            dG1 = minus_w * (dot(key, _load(aw1, here, d, m, D, M)) + _load_line(ab1, here, m, M)[None, :])
            dback = (_load(asked1, n, c, m, C, M) + dG1) * slope
            dG2 += dot(minus_w * x2, _load(aw2, here, m, d, M, D)) + dot(dback, _load(w2, n, m, d, M, D))
        dG2 = sum_parts(dG2, room, arrived, i, c, d, PARTS, BC, BD) + asked
        dz2 = _norm_gradient_backward(dG2, G2, x, r, g, gamma, d, D)
        a2 = new_a2 + tl.sum(dz2, 0)
        if begin == 0:
            _store_line(ab2, there, d, a2, D)
        step = minus_w * G2
        for first in range(begin, begin + SLICE, BM):
            m = first + tl.arange(0, BM)
            z = _load(z1, n, c, m, C, M)
            x2, slope = _gelu(z)
            A1 = _load(aw1, here, d, m, D, M)
            A2 = _load(aw2, here, m, d, M, D)
            a1 = _load_line(ab1, here, m, M)
            dG1 = _load(asked1, n, c, m, C, M) + minus_w * (dot(key, A1) + a1[None, :])
            dx2 = dot(step, tl.trans(A2)) + dot(dz2, tl.trans(_load(w2, n, m, d, M, D)))
            dx2 += _load(asked_x, n, c, m, C, M)
            dz1 = dG1 * _load(back, n, c, m, C, M) * _gelu_second(z) + dx2 * slope
            A1 += _load(dw1, n, d, m, D, M) + dot(tl.trans(key), dz1)
            A2 += _load(dw2, n, m, d, M, D) + dot(tl.trans(dG1 * slope), G2) + dot(tl.trans(x2), dz2)
            _store(aw1, there, d, m, A1, D, M)
            _store_line(ab1, there, m, a1 + _load_line(db1, n, m, M) + tl.sum(dz1, 0), M)
            _store(aw2, there, m, d, A2, M, D)
        tl.debug_barrier()  # makes the other threads' stores visible to the next loads


# Launches


class TTTCells(NamedTuple):
    """The inputs of the writers of all cells."""

    k: Tensor
    """`cells*h c d`."""
    target: Tensor
    """`cells*h c d`."""
    write: Tensor
    """`cells*h c 1`: the rates, 0 where nothing is written."""
    square: Tensor
    """gamma^2, `h 1 d`."""


def serves(chunk: int, widths: list[int]) -> bool:
    """Whether there are kernels for chunks of this many tokens and layers of these input widths, the head's first."""
    if chunk > LONGEST_CHUNK or widths[0] > WIDEST_HEAD or len(widths) > MOST_WIDTHS:
        return False
    return tile_size(chunk) * tile_size(widths[0]) <= LARGEST_TILE


def _launch(kernel: Any, tensors: Sequence[Tensor], cells: TTTCells, weights: list[Tensor], *numbers: float) -> None:
    """Launch a walk over the heads of all rows; the weights `rows*h ...` give their number."""
    (c, d), programs = cells.k.shape[1:], weights[0].shape[0]
    sizes = {"H": cells.square.shape[0], "C": c, "D": d, "BC": tile_size(c), "BD": tile_size(d)}
    tile = sizes["BC"] * sizes["BD"]
    grid: tuple[int, ...] = (programs,)
    room: tuple[Tensor, ...] = ()
    if len(weights) == 2:
        how = {"num_warps": 8, "num_stages": 2 if tile < LARGEST_TILE else 1}
    else:
        sharing = share(programs, weights[0].shape[2], max(2**16 // tile, 16), cells.k.device)
        sizes |= {"M": weights[0].shape[2], "BM": sharing.tile, "PARTS": sharing.parts, "SLICE": sharing.slice}
        how = sharing.options
        grid, room = (programs, sharing.parts), sharing.room(programs, tile, cells.k.device)
    with torch.cuda.device_of(cells.k):
        start(kernel, grid)(*tensors, *numbers, *room, **sizes, **how)


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def states(cells: TTTCells, weights: list[Tensor], walk: Walk, eps: float) -> list[Tensor]:
    """Return the weights at the start of every cell, then those at the end of every row, `(cells + rows)*h ...`.

    Args:
        cells: The inputs of the writers.
        weights: W_1, b_1, ... at the rows' starts, `rows*h d n` and `rows*h 1 n`.
        walk: Which cells each row has.
        eps: Added to the variance in LN.
    """
    n, first = cells.k.shape[0], weights[0].shape[0]
    found = [x.new_empty(n + first, *x.shape[1:]) for x in weights]
    for x, y in zip(found, weights, strict=True):
        x[:first] = y
    kernel = linear_states if len(weights) == 2 else mlp_states
    tensors = *_dense(*cells), *found, walk.base, walk.chunks
    _launch(kernel, tensors, cells, weights, n // cells.square.shape[0], eps)
    return found


def adjoints(
    cells: TTTCells,
    values: list[Tensor],
    asked: list[Tensor],
    grads: list[Tensor],
    finals: list[Tensor],
    walk: Walk,
    eps: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients by the weights at the start of every row, and by those at the end of every cell.

    Args:
        cells: The inputs of the writers.
        values: z, or for two layers z_1, z_2, G_2 W_2^T and W_2.
        asked: The readers' gradients by G, or by x_2, G_1 and G_2.
        grads: The readers' gradients by the cells' weights.
        finals: The incoming gradients by the weights at the rows' ends.
        walk: Which cells each row has.
        eps: Added to the variance in LN.
    """
    h, first, device = cells.square.shape[0], finals[0].shape[0], cells.k.device
    rows = first // h
    last = rows + walk.base[walk.chunks - 1] + torch.arange(rows, device=device)
    found = [x.new_empty(first + cells.k.shape[0], *x.shape[1:]) for x in finals]
    for x, y in zip(found, finals, strict=True):
        x.unflatten(0, (-1, h)).index_copy_(0, last, y.unflatten(0, (-1, h)))
    kernel = linear_adjoints if len(grads) == 2 else mlp_adjoints
    tensors = *_dense(*cells, *values, *asked, *grads), *found, walk.base, walk.chunks
    _launch(kernel, tensors, cells, finals, rows, eps)
    return [x[:first] for x in found], [x[first:] for x in found]
