"""A few rows times a weight, with the adjacent operations of a block.

    y = W norm(x)                      RMSNorm before it
    y = silu(G norm(x)) U norm(x)      the gated unit, W = G | U
    y = silu(conv(W norm(x)))          the short convolution of the first channels; its last inputs are updated in place
    y = W x + residual

A product with a few rows reads every weight once and is bound by that alone. One row takes one launch, all of it in
float32: a program has all K weights of a few rows of W in registers, and loads them before it waits for the launch
before it (launching.overlapping), so that the memory is never idle between two launches. Up to MOST_ROWS rows on Hopper
go to the tensor cores (hopper/few_rows.py), and the norm and the sum with the residual are small launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, is_hopper, multiprocessors, next_power, overlap_options, start
from lineate.kernels.layers import rows as kernels
from lineate.kernels.layers.convolution_parts import convolve_first, load_taps, load_window
from lineate.kernels.layers.ops import KERNEL_DTYPES, SIZES
from lineate.kernels.layers.rows import sigmoid
from lineate.torch_ops.tracing import PLAIN_TENSORS

WIDEST = 8192
"""The most channels of a single row."""
MOST_ROWS = 64
STEP = 128
"""How many channels of x a program on Hopper multiplies at a time."""
STAGES = 4
"""The most tiles of weights that such a program has in flight; two programs fit on a multiprocessor."""


@triton.jit
def multiply_one(
    x, norm, weight, bias, residual, taps, past, y, eps,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN channels of y `N` from x `K` and weight `N K` (GATED: `2N K`); operations whose argument is None are skipped.

    Weights are read BK channels at once and, if K is more, REST others. The first CHANNELS channels are convolved with
    taps `CHANNELS SIZE` after past `CHANNELS SIZE-1`.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    has = n < N
    mask = has[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    w = tl.load(weight + at, mask=mask, other=0.0)
    if GATED:
        u = tl.load(weight + at + N * K, mask=mask, other=0.0)
    if REST:
        more = BK + tl.arange(0, REST)
        mask = has[:, None] & (more < K)[None, :]
        at = n.to(tl.int64)[:, None] * K + more[None, :]
        w_more = tl.load(weight + at, mask=mask, other=0.0)
        if GATED:
            u_more = tl.load(weight + at + N * K, mask=mask, other=0.0)
    if norm is not None:
        factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32) + SHIFT
        if REST:
            factor_more = tl.load(norm + more, mask=more < K, other=0.0).to(tl.float32) + SHIFT
    if taps is not None:
        moves = n < CHANNELS
        x1, x2, x3 = load_window(past, 0, past, 0, 0, n, moves, SIZE, CHANNELS)
        w0, w1, w2, w3 = load_taps(taps, n, moves, SIZE)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if REST:
        row_more = tl.load(x + more, mask=more < K, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + n, mask=has, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(row * row, 0)
        if REST:
            squares += tl.sum(row_more * row_more, 0)
        scale = tl.rsqrt(squares * (1.0 / K) + eps)
        row *= scale
        row *= factor
        if REST:
            row_more *= scale
            row_more *= factor_more
    found = tl.sum(w.to(tl.float32) * row[None, :], 1)
    if REST:
        found += tl.sum(w_more.to(tl.float32) * row_more[None, :], 1)
    if bias is not None:
        found += tl.load(bias + n, mask=has, other=0.0).to(tl.float32)
    if GATED:
        second = tl.sum(u.to(tl.float32) * row[None, :], 1)
        if REST:
            second += tl.sum(u_more.to(tl.float32) * row_more[None, :], 1)
        found *= sigmoid(found) * second
    if taps is not None:
        found = convolve_first(found, past, n, moves, x1, x2, x3, w0, w1, w2, w3, SIZE)
    if residual is not None:
        found += added
    tl.store(y + n, found, mask=has)


@triton.jit
def multiply_pair(
    x, other, weight, second, y, z,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN channels of y = weight x, or of z = second other: x, other `K`, weights `N K`, y, z `N`."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    has = n < N
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    if tl.program_id(0) >= TILES:
        x, weight, y = other, second, z
    w = tl.load(weight + at, mask=has[:, None] & (k < K)[None, :], other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(y + n, tl.sum(w.to(tl.float32) * row[None, :], 1), mask=has)


Norm = tuple[Tensor, float, bool]
"""The weight of an RMSNorm, its eps, and whether it is zero-centred."""
Convolution = tuple[Tensor, Tensor]
"""The taps `channels size`, and the last inputs `rows channels size-1`, which are overwritten."""


def serves_one(x: Tensor, weight: Tensor) -> bool:
    """Whether product_one supports x `1 k` and weight `n k`."""
    return (
        x.shape[0] == 1 and x.shape[1] <= WIDEST and x.dtype in KERNEL_DTYPES and weight.dtype == x.dtype
        and type(weight) in PLAIN_TENSORS
        and x.is_contiguous() and weight.is_contiguous()
    )  # fmt: skip


def product_one(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    convolution: Convolution | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x weight^T `1 n` with the given adjacent operations, without gradients.

    Args:
        x: `1 k`.
        weight: `n k`; gated: `2n k`.
        bias: `n`.
        norm: Of x.
        gated: Whether the result is silu(first half) * second half.
        convolution: Of the first channels. Launches shortly before this must not write its inputs.
        residual: `1 n`, added at the end.
    """
    assert not (gated and (bias is not None or convolution is not None))
    n, k = weight.shape
    n = n // 2 if gated else n
    taps, past = (None, None) if convolution is None else convolution
    assert taps is None or (taps.shape[1] in SIZES and taps.is_contiguous())
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    width, rest = _cut(k)
    rows = max(4096 // width, 1) if gated else max(8192 // width, 2)  # measured on an H200
    rows = max(1, min(rows, next_power(ceil_div(n, 2 * multiprocessors(x.device)))))  # enough programs
    norm_weight, eps, zero_centred = (None, 0.0, False) if norm is None else norm
    with torch.cuda.device_of(x):
        start(multiply_one, (ceil_div(n, rows),))(
            x, norm_weight, weight, bias, residual, taps, past, y, eps,
            N=n, K=k, BN=rows, BK=width, REST=rest, SHIFT=float(zero_centred), GATED=gated,
            CHANNELS=0 if taps is None else taps.shape[0], SIZE=0 if taps is None else taps.shape[1],
            num_warps=max(1, min(8, rows * width // 2048)), **overlap_options(x.device),
        )  # fmt: skip
    return y


def serves_pair(x: Tensor, weight: Tensor, other: Tensor, second: Tensor) -> bool:
    """Whether product_pair supports these."""
    alike = x.shape == other.shape and x.dtype is other.dtype and weight.shape == second.shape
    return alike and _cut(weight.shape[1])[1] == 0 and serves_one(x, weight) and serves_one(other, second)


def product_pair(x: Tensor, weight: Tensor, other: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return x weight^T and other second^T, `1 n` each, in one launch, without gradients.

    Args:
        x: `1 k`.
        weight: `n k`.
        other: `1 k`.
        second: `n k`.
    """
    n, k = weight.shape
    y, z = (torch.empty(1, n, dtype=x.dtype, device=x.device) for _ in range(2))
    width = next_power(k)
    rows = max(1, min(max(8192 // width, 2), next_power(ceil_div(n, multiprocessors(x.device)))))
    with torch.cuda.device_of(x):
        start(multiply_pair, (2 * ceil_div(n, rows),))(
            x, other, weight, second, y, z, N=n, K=k, BN=rows, BK=width,
            num_warps=max(1, min(8, rows * width // 2048)), **overlap_options(x.device),
        )  # fmt: skip
    return y, z


def _cut(k: int) -> tuple[int, int]:
    """Return two powers of two that cover k channels, or one and 0 where a second one would not make them fewer."""
    width = next_power(k)
    half = width // 2
    rest = next_power(k - half)
    return (half, max(16, rest)) if k > 256 and rest < half else (width, 0)


def serves_few(x: Tensor, weight: Tensor) -> bool:
    """Whether product_few supports x `rows k` and weight `n k`."""
    rows, k = x.shape
    return (
        1 < rows <= MOST_ROWS and x.is_cuda and is_hopper(x.device) and x.dtype in (torch.bfloat16, torch.float16)
        and type(weight) in PLAIN_TENSORS and weight.dtype == x.dtype and k % STEP == 0
        and x.is_contiguous() and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )  # fmt: skip


def product_few(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool = False,
    convolution: Convolution | None = None,
    parts: int = 1,
    width: int | None = None,
) -> Tensor:
    """Return x weight^T `rows n`, without gradients.

    Args:
        x: `rows k`.
        weight: `n k`; gated: `2n k`.
        gated: Whether the result is silu(first half) * second half.
        convolution: Of the first channels. Launches shortly before this must not write its inputs.
        parts: How many sums to cut k into: the result is then `parts rows n` in float32.
        width: The rows of the kernel's tile, a power of two of at least 16 and the number of rows; None: the least.
    """
    from lineate.kernels.hopper.descriptors import SHARED, describe
    from lineate.kernels.hopper.few_rows import multiply_few

    assert parts == 1 or not (gated or convolution)
    (rows, k), n = x.shape, len(weight) // 2 if gated else len(weight)
    taps, past = (x, x) if convolution is None else convolution
    width = max(16, next_power(rows)) if width is None else width
    sizes = (rows, n) if parts == 1 else (parts, rows, n)
    y = torch.empty(sizes, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    stages = min(STAGES, SHARED // (2 * STEP * (width + (128 if gated else 64))))
    with torch.cuda.device_of(x):
        start(multiply_few, (ceil_div(n, 64) * parts,))(
            describe(weight, len(weight), k, k, [64, STEP]), describe(x, rows, k, k, [width, STEP]),
            taps, past, y, rows, N=n, K=k, R=width, BK=STEP, SPLIT=parts, STAGES=stages, GATED=gated,
            CHANNELS=0 if convolution is None else taps.shape[0], SIZE=taps.shape[1],
            num_warps=4, **overlap_options(x.device),
        )  # fmt: skip
    return y


def parts_of(n: int, k: int) -> int:
    """Return into how many sums product_few cuts k for n channels: enough programs for an H200, of at least a tile."""
    return max(s for s in (1, 2, 3, 4, 6, 8) if k % (s * STEP) == 0 and (s == 1 or ceil_div(n, 64) * s <= 192))


def add_and_norm(x: Tensor, parts: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """Return the sum of x `rows n` and of the parts `parts rows n`, and its RMSNorm if there is one."""
    rows, n = x.shape
    total = torch.empty_like(x)
    weight, eps, zero_centred = (None, 0.0, False) if norm is None else norm
    y = None if norm is None else torch.empty_like(x)
    width = next_power(n)
    with torch.cuda.device_of(x):
        start(kernels.add_and_norm, (rows,))(
            x, parts, weight, total, y, rows, eps, PARTS=len(parts), SIZE=n, BN=width, SHIFT=float(zero_centred),
            num_warps=max(1, min(16, width // 512)), **overlap_options(x.device),
        )  # fmt: skip
    return total, y
