"""Multiplies a few rows by a matrix in C, which widens the elements of a 16-bit one as they are multiplied.

Each row is summed by itself in one order: its bits do not depend on how many rows there are.
"""

import struct

import torch
from torch import Tensor

from lineate.native.build import c_function, why_not
from lineate.system.processor import instruction_sets

FEW_ROWS = 16
"""The number of rows up to which this product is faster than torch's on every processor."""


def _most_rows() -> int:
    """Return how many rows this processor multiplies here faster than with torch's float32 product.

    Of its peak, a Neoverse-N1 reaches .77 to .86 with 32 rows and more, torch .60 to .67 with 32, .72 to .78 with 64,
    .80 to .86 with more; a processor with SVE has wider vectors, which torch uses. A Xeon with AVX-512 needs .64 to .69
    of torch's time with 32 rows and .84 to .95 with 64, for weights of 16 bits .43 to .46 and .62 to .65.
    """
    found = instruction_sets()
    return 64 if "avx512f" in found or ("asimd" in found and "sve" not in found) else FEW_ROWS


MOST_ROWS = _most_rows()
"""The most rows of x; for more, torch multiplies, even if blocks of the matrix are widened for it."""

_PRODUCT = struct.Struct("10q")  # Product in product.c
_KINDS = (torch.bfloat16, torch.float16, torch.float32)


def product(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x weight^T in float32, x `n k`, weight `m k`; None where the C code cannot do it."""
    fits = x.shape[0] <= MOST_ROWS and x.shape[1] == weight.shape[1]
    return _run("product", x, weight, weight.shape[0]) if fits else None


def widens(dtype: torch.dtype) -> bool:
    """Whether the C code widens weights of this dtype; for float16 a processor needs instructions."""
    return product(*(torch.ones(1, 1, dtype=each, device="cpu") for each in (torch.float32, dtype))) is not None


def combine(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x weight in float32, x `n m`, weight `m k`; None where the C code cannot do it."""
    fits = x.shape[0] <= min(FEW_ROWS, MOST_ROWS) and x.shape[1] == weight.shape[0]
    return _run("combine", x, weight, weight.shape[1]) if fits else None


def _run(entry: str, x: Tensor, weight: Tensor, width: int) -> Tensor | None:
    if not (weight.dtype in _KINDS and weight.stride(1) == 1) or why_not("products") is not None:
        return None
    if weight.is_neg() or weight._is_zerotensor() or x._is_zerotensor():  # their memory does not hold their values
        return None
    x = x.float().contiguous().resolve_neg()
    y = torch.empty(x.shape[0], width, dtype=torch.float32, device="cpu")
    words = _PRODUCT.pack(
        x.shape[0], *weight.shape, torch.get_num_threads(), _KINDS.index(weight.dtype),
        x.data_ptr(), weight.data_ptr(), weight.stride(0), y.data_ptr(), 0,
    )  # fmt: skip
    return None if c_function(entry)(words) else y
