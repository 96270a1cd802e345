"""Kernels of single numbers around the stages, for the rules of the general row: forth, and back for gradients.

    U = write * V        log_decay per head -> per channel        one row of a token -> n rows

Numbers of dense tensors are numbered consecutively; a program takes BLOCK of them.
"""

import triton
import triton.language as tl


@triton.jit
def _places(count, H: tl.constexpr, D: tl.constexpr, stride, head_stride, BLOCK: tl.constexpr):
    """Return this program's indices in a dense tensor `token H D`, which exist, and those in a strided one."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return i, i < count, i // (H * D) * stride + i // D % H * head_stride + i % D


@triton.jit(do_not_specialize=["count"])
def multiply(v, write, u, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store U = write * V; v may be strided."""
    i, there, at = _places(count, H, D, stride, head_stride, BLOCK)
    rate = tl.load(write + i, mask=there, other=0.0).to(tl.float32)
    value = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
    tl.store(u + i, (rate * value).to(u.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def multiply_backward(
    v, write, dv, dwrite, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute dV = write * dU and dwrite = V * dU; dv holds dU on entry, v may be strided."""
    i, there, at = _places(count, H, D, stride, head_stride, BLOCK)
    rate = tl.load(write + i, mask=there, other=0.0).to(tl.float32)
    value = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
    du = tl.load(dv + i, mask=there, other=0.0).to(tl.float32)
    tl.store(dv + i, (rate * du).to(dv.dtype.element_ty), mask=there)
    tl.store(dwrite + i, (value * du).to(dwrite.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def spread(x, channels, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store each of the numbers of x in D channels."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i // D, mask=i < count, other=0.0)
    tl.store(channels + i, value.to(channels.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def sum_channels(channels, total, count, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sums of D channels each: of `count` of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, BD)
    there = (i < count)[:, None] & (j < D)[None, :]
    parts = tl.load(channels + i[:, None] * D + j[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(total + i, tl.sum(parts, 1).to(total.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def interleave(
    x, rows, count, stride, head_stride, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, AT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each token of x as row AT of N, and 0 in the other rows: rows is dense, `token N H D`; x may be strided."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = i // (H * D)
    own = (row % N == AT) & (i < count)
    value = tl.load(x + row // N * stride + i // D % H * head_stride + i % D, mask=own, other=0.0)
    tl.store(rows + i, value, mask=i < count)


@triton.jit(do_not_specialize=["count"])
def take_rows(rows, x, count, SIZE: tl.constexpr, N: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr):
    """Store row AT of the N rows of each token; rows `token N SIZE` and x `token SIZE` are dense."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + (i // SIZE * N + AT) * SIZE + i % SIZE, mask=i < count, other=0.0)
    tl.store(x + i, value.to(x.dtype.element_ty), mask=i < count)
