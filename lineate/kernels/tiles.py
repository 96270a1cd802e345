"""Tiles of the matrices of memories that learn: loaded, stored and multiplied, all in float32."""

import triton
import triton.language as tl

from lineate.kernels.launching import next_power

PRECISION = tl.constexpr("ieee")
"""Of all products; "tf32x3" is the same to float32 on tensor cores."""


@triton.jit
def dot(x, y):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def load_tile(x, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x[i, j] of a matrix `ROWS COLUMNS`, 0 outside."""
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    return tl.load(x + i[:, None] * COLUMNS + j[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    tl.store(x + i[:, None] * COLUMNS + j[None, :], value, mask=mask)


def tile_size(n: int) -> int:
    """The tile of n rows or columns: a power of two, and tl.dot takes no less than 16."""
    return max(next_power(n), 16)
