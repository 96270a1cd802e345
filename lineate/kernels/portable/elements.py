"""Kernels of single numbers around the stages, for the rules of the general row: forth, and back for gradients.

    U = write * V        log_decay per head -> per channel        one row of a token -> n rows

A row is the D numbers of one head of one token; a program takes BR rows, whose places are computed once a row.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(count, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Return this program's rows, its columns, and which numbers exist of `count D`."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    return row[:, None], column[None, :], (row < count)[:, None] & (column < D)[None, :]


@triton.jit(do_not_specialize=["count"])
def multiply(
    v, write, u, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Store U = write * V; v may be strided."""
    row, column, there = _rows(count, D, BR, BD)
    at = row * D + column
    rate = tl.load(write + at, mask=there, other=0.0).to(tl.float32)
    value = tl.load(v + row // H * stride + row % H * head_stride + column, mask=there, other=0.0).to(tl.float32)
    tl.store(u + at, (rate * value).to(u.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def multiply_backward(
    v, write, dv, dwrite, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute dV = write * dU and dwrite = V * dU; dv holds dU on entry, v may be strided."""
    row, column, there = _rows(count, D, BR, BD)
    at = row * D + column
    rate = tl.load(write + at, mask=there, other=0.0).to(tl.float32)
    value = tl.load(v + row // H * stride + row % H * head_stride + column, mask=there, other=0.0).to(tl.float32)
    du = tl.load(dv + at, mask=there, other=0.0).to(tl.float32)
    tl.store(dv + at, (rate * du).to(dv.dtype.element_ty), mask=there)
    tl.store(dwrite + at, (value * du).to(dwrite.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def spread(x, channels, count, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Store each of the numbers of x in D channels."""
    row, column, there = _rows(count, D, BR, BD)
    value = tl.load(x + row, mask=row < count, other=0.0).to(channels.dtype.element_ty)
    tl.store(channels + row * D + column, tl.broadcast_to(value, (BR, BD)), mask=there)


@triton.jit(do_not_specialize=["count"])
def sum_channels(channels, total, count, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Store the sums of D channels each: of `count` of them."""
    row, column, there = _rows(count, D, BR, BD)
    parts = tl.load(channels + row * D + column, mask=there, other=0.0).to(tl.float32)
    found = tl.sum(parts, 1, keep_dims=True).to(total.dtype.element_ty)
    tl.store(total + row, found, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def interleave(
    x, rows, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, AT: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store each token of x as row AT of N, and 0 in the other rows: rows is dense, `token N H D`; x may be strided."""
    row, column, there = _rows(count, D, BR, BD)
    token, head = row // H, row % H
    value = tl.load(x + token * stride + head * head_stride + column, mask=there, other=0.0)
    for n in tl.static_range(N):
        at = ((token * N + n) * H + head) * D + column
        tl.store(rows + at, value if n == AT else tl.zeros_like(value), mask=there)


@triton.jit(do_not_specialize=["count"])
def take_rows(
    rows, x, count, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, AT: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Store row AT of the N rows of each token; rows `token N H D` and x `token H D` are dense."""
    row, column, there = _rows(count, D, BR, BD)
    value = tl.load(rows + ((row // H * N + AT) * H + row % H) * D + column, mask=there, other=0.0)
    tl.store(x + row * D + column, value.to(x.dtype.element_ty), mask=there)
