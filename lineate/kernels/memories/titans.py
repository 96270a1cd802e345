"""The Titans memory from chunk to chunk: one program per row and head walks its chunks, backwards for the gradients.

    x_1 = k, z_l = x_l M_l, x_2 = silu(z_1)                                    one or two matrices
    G_last = z - target, or through the layer norm                             dloss/dz of the last matrix
    G_1 = (G_2 M_2^T) silu'(z_1)                                               then both are clipped by token
    M' = b M + f S - (last x)^T G     S' = carried S - (moving x)^T G          for each matrix

A cell is one chunk of one row; the matrices at its start are in slot (base[chunk] + row) * heads + head. A chunk's
results go to the slot of the row's next chunk, or after the last chunk to slot (cells + row) * heads + head, and the
next chunk reads them from there: nothing stays in registers. All arithmetic is float32. Where a cell has no token, last
= moving = 0.

The last matrix is processed in tiles of BN of its rows; with two matrices, these are also columns of the first. Two
matrices are shared by as many programs as the GPU can run at one time, each with a slice of these rows
(kernels/memories/tiles.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import start
from lineate.kernels.memories.tiles import (
    Walk,
    add_parts,
    divided,
    dot,
    load_tile,
    meet,
    put_part,
    share,
    store_tile,
    sum_parts,
    tile_size,
)
from lineate.kernels.memories.titans_parts import (
    advance,
    begin_walk,
    error,
    error_backward,
    load_factors,
    load_tokens,
    retreat,
    silu_slope,
    written_gradient,
)

WIDEST = 128
"""The most channels of keys and values with two matrices, and of values with one."""
LONGEST = 64
"""The most tokens of a chunk."""
TILE = 4096
"""Elements of a tile of a matrix; with chunks over 16 tokens or wide heads, half as many fit into registers."""


@triton.jit(do_not_specialize=["cells", "heads"])
def walk_states(
    k, target, last, moving, ends, base, chunks, M1, S1, M2, S2, hidden, cells, heads, clip, shared, arrived,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, EPS: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Store M and S at the start of every cell and after the last one; those of chunk 0 are given.

    k `cells h c KEYS`, target `cells h c VALUES`, last and moving `cells h c`, ends `cells h 3`: b, f, carried.
    M2, S2 `slots ROWS VALUES` are the last matrix; M1, S1 `slots KEYS ROWS` the one before it, or None (ROWS = KEYS).
    hidden `programs c ROWS` has room for z_1 of a chunk. clip: None, or the largest norm of a token's gradient.
    PARTS programs share a head, SLICE of the ROWS each: shared `programs 2*PARTS*C*(BV + 1)`, arrived `programs`.
    """
    program, begin, shared, shared_lines, arrived, row, head, one, c, d, v, has, count = begin_walk(
        shared, arrived, chunks, heads, C, BK, BV, VALUES, PARTS, SLICE
    )
    turn = 0
    slot = row * heads + head
    for j in range(count):
        new = (tl.load(base + j + 1, mask=j + 1 < count, other=cells) + row) * heads + head
        # Loads from global memory come first, so that their latency is paid once.
        goal = load_tile(target + slot * (CHUNK * VALUES), c, v, CHUNK, VALUES)
        own_last, own_moving, b, f, carried = load_factors(last, moving, ends, slot, c, CHUNK)
        keys = k + slot * (CHUNK * KEYS)
        z = tl.zeros((C, BV), tl.float32)
        squares = tl.zeros((C,), tl.float32)
        if M1 is not None:
            x1 = load_tile(keys, c, d, CHUNK, KEYS)
            hidden_own = hidden + program * (CHUNK * ROWS)
        for first in range(begin, begin + SLICE, BN):
            n = first + tl.arange(0, BN)
            if M1 is not None:
                z1 = dot(x1, load_tile(M1 + slot * (KEYS * ROWS), d, n, KEYS, ROWS))
                store_tile(hidden_own, z1, c, n, CHUNK, ROWS)
                x = z1 * tl.sigmoid(z1)
            else:
                x = load_tile(keys, c, n, CHUNK, ROWS)
            z += dot(x, load_tile(M2 + slot * (ROWS * VALUES), n, v, ROWS, VALUES))
            squares += tl.sum(x * x, 1)
        put_part(z, shared, turn, c, v, PARTS, C, BV)
        put_part(squares[:, None], shared_lines, turn, c, one, PARTS, C, 1)
        meet(arrived, turn, PARTS)
        z = add_parts(z, shared, turn, c, v, PARTS, C, BV)
        squares = add_parts(squares[:, None], shared_lines, turn, c, one, PARTS, C, 1)
        turn += 1
        G, _, _, _ = error(z, goal, has, EPS, VALUES)
        if M1 is not None:
            tl.debug_barrier()
        if clip is not None:
            squares *= tl.sum(G * G, 1)[:, None]
            if M1 is not None:
                back = tl.zeros((C,), tl.float32)
                for first in range(begin, begin + SLICE, BN):
                    n = first + tl.arange(0, BN)
                    z1 = load_tile(hidden_own, c, n, CHUNK, ROWS)
                    G1 = dot(G, tl.trans(load_tile(M2 + slot * (ROWS * VALUES), n, v, ROWS, VALUES)))
                    G1 *= silu_slope(z1, tl.sigmoid(z1))
                    back += tl.sum(G1 * G1, 1)
                back = sum_parts(back[:, None], shared_lines, arrived, turn, c, one, PARTS, C, 1)
                turn += 1
                squares += tl.sum(x1 * x1, 1)[:, None] * back
            size = tl.sqrt(tl.maximum(squares, 1e-30))
            G *= tl.minimum(clip / (size + 1e-6), 1.0)  # this scales G_1 too
        for first in range(begin, begin + SLICE, BN):
            n = first + tl.arange(0, BN)
            if M1 is not None:
                z1 = load_tile(hidden_own, c, n, CHUNK, ROWS)
                s = tl.sigmoid(z1)
                x = z1 * s
                G1 = dot(G, tl.trans(load_tile(M2 + slot * (ROWS * VALUES), n, v, ROWS, VALUES)))
                G1 *= silu_slope(z1, s)
                advance(M1, S1, slot, new, d, n, x1, G1, own_last, own_moving, b, f, carried, KEYS, ROWS)
            else:
                x = load_tile(keys, c, n, CHUNK, ROWS)
            advance(M2, S2, slot, new, n, v, x, G, own_last, own_moving, b, f, carried, ROWS, VALUES)
        tl.debug_barrier()
        slot = new


@triton.jit(do_not_specialize=["cells", "heads"])
def walk_adjoints(
    k, target, z, z1, back, terms, last, moving, ends, base, chunks, M2, dM1, dS1, dM2, dS2, A1, B1, A2, B2, room,
    cells, heads, shared, arrived,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, EPS: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Store A and B, the gradients of M and S at every cell's end, from the last chunk to the first.

    Those of each row's last cell are given; those of its start go to slot (cells + row) * heads + head. dM, dS: the
    gradients from the readers of the matrices at a cell's start. z `cells h c VALUES`, z1 and back = G_2 M_2^T
    `cells h c ROWS` are values before the clipping. terms (None: no clipping) `4 cells h c`: the scale s, e |x|^2 and
    e |G|^2 of the last matrix, e |x|^2 of the first, e = (ds/dsize) / size. room `3 programs c ROWS` holds gradients of
    G_1 (twice) and x_2.
    """
    program, begin, shared, shared_lines, arrived, row, head, one, c, d, v, has, count = begin_walk(
        shared, arrived, chunks, heads, C, BK, BV, VALUES, PARTS, SLICE
    )
    programs = tl.num_programs(0).to(tl.int64)
    turn = 0
    slot = (tl.load(base + count - 1) + row) * heads + head
    for step in range(count):
        j = count - 1 - step
        before = (tl.load(base + j - 1, mask=j > 0, other=cells) + row) * heads + head
        keys = k + slot * (CHUNK * KEYS)
        own_last, own_moving, b, f, carried = load_factors(last, moving, ends, slot, c, CHUNK)
        answer = load_tile(z + slot * (CHUNK * VALUES), c, v, CHUNK, VALUES)
        goal = load_tile(target + slot * (CHUNK * VALUES), c, v, CHUNK, VALUES)
        own = M2 + slot * (ROWS * VALUES)
        if terms is not None:
            per = cells.to(tl.int64) * heads * CHUNK
            scale = load_tokens(terms, slot, c, CHUNK)
            to_G = load_tokens(terms + per, slot, c, CHUNK)
            to_x = load_tokens(terms + 2 * per, slot, c, CHUNK)
            to_G1 = load_tokens(terms + 3 * per, slot, c, CHUNK)
        if z1 is not None:
            x1 = load_tile(keys, c, d, CHUNK, KEYS)
            own_z1 = z1 + slot * (CHUNK * ROWS)
            own_back = back + slot * (CHUNK * ROWS)
            written = room + program * (CHUNK * ROWS)
            dG1s = room + (programs + program) * (CHUNK * ROWS)
            dx2s = room + (2 * programs + program) * (CHUNK * ROWS)

        # Go from the writes to the gradients of G and x,
        dG = tl.zeros((C, BV), tl.float32)
        along = tl.zeros((C,), tl.float32)
        for first in range(begin, begin + SLICE, BN):
            n = first + tl.arange(0, BN)
            if z1 is not None:
                hidden = load_tile(own_z1, c, n, CHUNK, ROWS)
                s = tl.sigmoid(hidden)
                x = hidden * s
                dG1 = written_gradient(A1, B1, slot, d, n, x1, own_last, own_moving, KEYS, ROWS)
                along += tl.sum(dG1 * load_tile(own_back, c, n, CHUNK, ROWS) * silu_slope(hidden, s), 1)
                store_tile(written, dG1, c, n, CHUNK, ROWS)
            else:
                x = load_tile(keys, c, n, CHUNK, ROWS)
            dG += written_gradient(A2, B2, slot, n, v, x, own_last, own_moving, ROWS, VALUES)
        G, centred, r, g = error(answer, goal, has, EPS, VALUES)
        clipped = G
        rest = tl.zeros((C, BV), tl.float32)
        if terms is not None:  # dsize / size = e (dG . G)
            put_part(dG, shared, turn, c, v, PARTS, C, BV)
            put_part(along[:, None], shared_lines, turn, c, one, PARTS, C, 1)
            meet(arrived, turn, PARTS)
            dG = add_parts(dG, shared, turn, c, v, PARTS, C, BV)
            along = add_parts(along[:, None], shared_lines, turn, c, one, PARTS, C, 1) + tl.sum(dG * G, 1)[:, None]
            turn += 1
            clipped = scale * G
            rest = scale * dG + along * to_G * G
            dG = tl.zeros((C, BV), tl.float32)
        if z1 is not None:
            tl.debug_barrier()
            for first in range(begin, begin + SLICE, BN):
                n = first + tl.arange(0, BN)
                hidden = load_tile(own_z1, c, n, CHUNK, ROWS)
                s = tl.sigmoid(hidden)
                slope = silu_slope(hidden, s)
                dG1 = load_tile(written, c, n, CHUNK, ROWS)
                dx2 = -own_last * dot(clipped, tl.trans(load_tile(A2 + slot * (ROWS * VALUES), n, v, ROWS, VALUES)))
                dx2 -= own_moving * dot(clipped, tl.trans(load_tile(B2 + slot * (ROWS * VALUES), n, v, ROWS, VALUES)))
                if terms is not None:
                    dx2 += along * to_x * hidden * s
                    G1 = load_tile(own_back, c, n, CHUNK, ROWS) * slope
                    dG1 = scale * dG1 + along * to_G1 * G1
                store_tile(dx2s, dx2, c, n, CHUNK, ROWS)
                store_tile(dG1s, dG1, c, n, CHUNK, ROWS)
                dG += dot(dG1 * slope, load_tile(own, n, v, ROWS, VALUES))
            dG = sum_parts(dG, shared, arrived, turn, c, v, PARTS, C, BV)
            turn += 1
            tl.debug_barrier()
        dG += rest

        # and from those to the gradients of the matrices that G and x were computed with.
        dz = error_backward(dG, G, centred, r, g, has, EPS, VALUES)
        for first in range(begin, begin + SLICE, BN):
            n = first + tl.arange(0, BN)
            if z1 is not None:
                hidden = load_tile(own_z1, c, n, CHUNK, ROWS)
                s = tl.sigmoid(hidden)
                slope = silu_slope(hidden, s)
                bend = s * (1.0 - s) * (2.0 + hidden * (1.0 - 2.0 * s))  # silu''
                dx2 = load_tile(dx2s, c, n, CHUNK, ROWS) + dot(dz, tl.trans(load_tile(own, n, v, ROWS, VALUES)))
                dG1 = load_tile(dG1s, c, n, CHUNK, ROWS)
                dz1 = dG1 * load_tile(own_back, c, n, CHUNK, ROWS) * bend + dx2 * slope
                retreat(A1, B1, dM1, dS1, slot, before, d, n, x1, dz1, None, None, b, f, carried, KEYS, ROWS)
                x = hidden * s
                du = dG1 * slope
            else:
                x = load_tile(keys, c, n, CHUNK, ROWS)
                du = None
            retreat(A2, B2, dM2, dS2, slot, before, n, v, x, dz, du, G, b, f, carried, ROWS, VALUES)
        tl.debug_barrier()
        slot = before


MatrixList = list[Tensor]
"""One or two matrices, each `slots h in out` with a slot for each cell and then one for each row."""


class TitansCells(NamedTuple):
    """The inputs of a walk for all cells: k, target, and the factors at a chunk's end."""

    k: Tensor
    """`cells h c KEYS`."""
    target: Tensor
    """`cells h c VALUES`."""
    last: Tensor
    """`cells h c`: how much of each gradient is in M at the end."""
    moving: Tensor
    """`cells h c`: how much of it is in S at the end."""
    ends: Tensor
    """`cells h 3`: b, f, carried."""


class Made(NamedTuple):
    """The results of the forward for all cells, before the clipping."""

    z: Tensor
    """`cells h c VALUES`."""
    z1: Tensor | None
    """`cells h c ROWS`, for two matrices."""
    back: Tensor | None
    """G_2 M_2^T `cells h c ROWS`, for two matrices."""
    terms: Tensor | None
    """`4 cells h c`, the terms of the clipping (walk_adjoints); None: no clipping."""


def fits(chunk: int, sizes: list[int]) -> bool:
    """Whether the kernels serve chunks of this length and matrices of these widths, keys first and values last."""
    return len(sizes) in (2, 3) and chunk <= LONGEST and max([sizes[-1], *sizes[:-2]]) <= WIDEST


def _launch(
    kernel: Any, walk: Walk, k: Tensor, M: MatrixList, eps: float | None, tensors: tuple[object, ...]
) -> None:  # fmt: skip
    heads, chunk, keys = k.shape[1:]
    rows, values = M[-1].shape[2:]
    C, BK, BV = (tile_size(n) for n in (chunk, keys, values))
    widest = BV if len(M) == 1 else max(BK, BV)
    elements = TILE if C == 16 and widest <= 64 else TILE // 2
    programs = walk.chunks.shape[0] * heads
    tile = min(64, elements // widest)
    sharing = share(programs, rows, tile, k.device) if len(M) == 2 else divided(rows, tile, 1)
    with torch.cuda.device_of(k):
        start(kernel, (programs, sharing.parts))(
            *tensors, *sharing.room(programs, C * (BV + 1), k.device),
            CHUNK=chunk, KEYS=keys, ROWS=rows, VALUES=values, EPS=eps,
            C=C, BK=BK, BN=sharing.tile, BV=BV, PARTS=sharing.parts, SLICE=sharing.slice,
            **sharing.options,
        )  # fmt: skip


def _of_first(matrices: MatrixList) -> Tensor | None:
    return matrices[0] if len(matrices) == 2 else None


def fill_states(
    cells: TitansCells, walk: Walk, M: MatrixList, S: MatrixList, clip: float | None, eps: float | None
) -> None:  # fmt: skip
    """Run walk_states into M and S, whose slots of chunk 0 are already filled; with eps None there is no norm."""
    k = cells.k
    heads, programs = k.shape[1], walk.chunks.shape[0] * k.shape[1]
    hidden = k.new_empty(programs, k.shape[2], M[-1].shape[2]) if len(M) == 2 else None
    tensors = (
        *cells, walk.base, walk.chunks, _of_first(M), _of_first(S), M[-1], S[-1], hidden, walk.cells, heads, clip
    )  # fmt: skip
    _launch(walk_states, walk, k, M, eps, tensors)


def fill_adjoints(
    cells: TitansCells, made: Made, walk: Walk, M: MatrixList, given: tuple[MatrixList, MatrixList],
    found: tuple[MatrixList, MatrixList], eps: float | None,
) -> None:  # fmt: skip
    """Run walk_adjoints.

    Args:
        cells: The inputs of the walk for all cells.
        made: The forward's results for all cells.
        walk: Which cells each row has.
        M: The matrices at every cell's start.
        given: dM and dS, the gradients from the readers of the matrices at a cell's start.
        found: A and B, to be filled; the slots of each row's last cell are already filled.
        eps: Added to the variance in the layer norm; None: there is no norm.
    """
    k, (dM, dS), (A, B) = cells.k, given, found
    heads, programs = k.shape[1], walk.chunks.shape[0] * k.shape[1]
    room = k.new_empty(3, programs, k.shape[2], M[-1].shape[2]) if len(M) == 2 else None
    tensors = (
        k, cells.target, *made, cells.last, cells.moving, cells.ends, walk.base, walk.chunks, M[-1],
        _of_first(dM), _of_first(dS), dM[-1], dS[-1], _of_first(A), _of_first(B), A[-1], B[-1], room, walk.cells, heads,
    )  # fmt: skip
    _launch(walk_adjoints, walk, k, M, eps, tensors)
