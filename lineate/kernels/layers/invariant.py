"""Products whose tiles, and so the order of a row's sums, depend on the weight alone, never on the number of rows.

    y_r = W x_r                       multiply_rows
    y_rh = x_rh W_h for every head    multiply_heads

A step that is batch-invariant (torch_ops/invariance.py) multiplies with these kernels, and on Hopper with those for 64
rows of 16 bits (hopper/few_rows.py) and for 32 rows times codes (hopper/quantised_rows.py): fewer rows are filled up
with zeros, more rows take several launches. All sums are float32, along k in one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, is_hopper, next_power, overlap_options, start
from lineate.kernels.layers import products
from lineate.kernels.layers.ops import KERNEL_DTYPES
from lineate.torch_ops.tracing import PLAIN_TENSORS

ROWS = products.MOST_ROWS
"""The rows of a launch on Hopper's tensor cores; fewer are filled up with zeros."""
PARTS = (1, 2, 4, 8)
"""Into how many sums k may be cut."""
PROGRAMS = 192
"""The most programs, of one tile of rows, for which k is cut further."""


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x, weight, bias, y, rows,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BM rows and BN channels of y `rows N` (PARTS > 1: of one part, `PARTS rows N`) from x `rows K`, weight `N K`.

    Part p sums PART channels from p PART on. The programs of one tile of the weight follow each other, so that all but
    the first read it from L2.
    """
    blocks = tl.cdiv(rows, BM)
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    part = tl.program_id(0) // blocks % PARTS
    n = tl.program_id(0) // blocks // PARTS * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at_x = x + m[:, None].to(tl.int64) * K
    at_w = weight + n[None, :].to(tl.int64) * K
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, PART, BK):
        k = part * PART + first + i
        a = tl.load(at_x + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(at_w + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = (part * rows + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_heads(
    x, weight, y, rows, w_head, w_k, w_m,
    HEADS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BM rows and BN channels of one head of y `rows HEADS M`, from x `rows HEADS K` and weight `HEADS K M`."""
    TILES: tl.constexpr = (M + BN - 1) // BN
    head = (tl.program_id(0) // TILES % HEADS).to(tl.int64)
    m = tl.program_id(0) // TILES // HEADS * BM + tl.arange(0, BM)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at_x = x + (m.to(tl.int64) * HEADS + head)[:, None] * K
    at_w = weight + head * w_head + n[None, :] * w_m
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + i
        a = tl.load(at_x + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(at_w + k[:, None] * w_k, mask=(n < M)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")
    at = (m.to(tl.int64) * HEADS + head)[:, None] * M + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < M)[None, :])


def dense(x: Tensor) -> Tensor:
    """Return x in memory of its own, unless it is dense and aligned: views of one row and of several may differ."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether product takes rows such as x `rows k` and this weight `n k`."""
    return (
        x.dtype in KERNEL_DTYPES and weight.dtype is x.dtype and type(weight) in PLAIN_TENSORS and weight.dim() == 2
        and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    )  # fmt: skip


def uses_tensor_cores(weight: Tensor) -> bool:
    """Whether this weight is multiplied by the kernel for 64 rows."""
    return weight.is_cuda and is_hopper(weight.device) and weight.itemsize == 2 and weight.shape[1] % products.STEP == 0


def parts_of(weight: Tensor) -> int:
    """Return into how many sums k is cut for a weight `n k`, whose product is added to something."""
    n, k = weight.shape
    if uses_tensor_cores(weight):
        return products.parts_of(n, k)
    tile = _tile(weight)
    tiles, steps = ceil_div(n, tile["BN"]), ceil_div(k, tile["BK"])
    return max(s for s in PARTS if s == 1 or (tiles * s <= PROGRAMS and s <= steps))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T `rows n` of any number of rows, where `serves`, without gradients.

    Args:
        x: `rows k`.
        weight: `n k`.
        bias: `n`.
    """
    x = dense(x)
    if not uses_tensor_cores(weight):
        return _product(x, weight, bias, 1)[0]
    found = [products.product_few(rows, weight, width=ROWS) for rows in x.split(ROWS)]
    y = found[0] if len(found) == 1 else torch.cat(found)
    return y if bias is None else y + bias


def sums(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return the parts of x weight^T, `parts rows n`; where uses_tensor_cores(weight), x has at most ROWS rows.

    Args:
        x: `rows k`.
        weight: `n k`, which `serves` takes.
        parts: Of this weight, parts_of(weight).
    """
    x = dense(x)
    if not uses_tensor_cores(weight):
        return _product(x, weight, None, parts, torch.float32)
    return products.product_few(x, weight, parts=parts, width=ROWS).view(parts, *x.shape[:1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, dtype: torch.dtype | None = None) -> Tensor:
    (rows, k), n, tile = x.shape, len(weight), _tile(weight)
    part = ceil_div(ceil_div(k, tile["BK"]), parts) * tile["BK"]
    y = torch.empty(parts, rows, n, dtype=x.dtype if dtype is None else dtype, device=x.device)
    with torch.cuda.device_of(x):
        start(multiply_rows, (ceil_div(n, tile["BN"]) * parts * ceil_div(rows, tile["BM"]),))(
            x, weight, bias, y, rows, N=n, K=k, PART=part, PARTS=parts, EXACT=x.dtype is torch.float32, **tile,
            **overlap_options(x.device),
        )  # fmt: skip
    return y


def _tile(weight: Tensor) -> dict[str, int]:
    """Return the configuration of multiply_rows, which depends on nothing but the dtype."""
    if weight.dtype is torch.float32:
        return {"BM": 16, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 32, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}


def product_of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return x_h weight_h for every head h, `rows h m`, without gradients.

    Args:
        x: `rows h k`.
        weight: `h k m` in the dtype of x, of any strides.
    """
    x = dense(x)
    (rows, heads, k), m = x.shape, weight.shape[2]
    y = torch.empty(rows, heads, m, dtype=x.dtype, device=x.device)
    wide = 32 if x.dtype is torch.float32 else 64
    block, step = max(16, min(wide, next_power(m))), max(16, min(wide, next_power(k)))
    with torch.cuda.device_of(x):
        start(multiply_heads, (ceil_div(m, block) * heads * ceil_div(rows, 16),))(
            x, weight, y, rows, *weight.stride(), HEADS=heads, K=k, M=m, BM=16, BN=block, BK=step,
            EXACT=x.dtype is torch.float32, num_warps=4, num_stages=3, **overlap_options(x.device),
        )  # fmt: skip
    return y
