"""Multiplies rows by a weight of 8 or 4 bits in C (small.c)."""

import struct

import torch
from torch import Tensor

from lineate.native.build import c_function

_SMALL = struct.Struct("10q")  # Small in small.c


def product(x: Tensor, codes: Tensor, scales: Tensor, out: int, bits: int) -> Tensor:
    """Return x weight^T in float32; x `n k` float32; codes and scales of a weight `out k`, dense, in tiles.

    With 8 bits, x is rounded to 15 bits; with 4, whose own error is larger, to 8; both by groups of 32.
    """
    x = x.contiguous()
    y = torch.empty(x.shape[0], out, dtype=torch.float32, device="cpu")
    words = _SMALL.pack(
        *x.shape[:1], out, x.shape[1], bits, 2 if bits == 8 else 1, torch.get_num_threads(),
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    if c_function("small")(words):
        raise MemoryError(f"no memory for {x.shape[0]} rows of {x.shape[1]} numbers, rounded to {bits} bits")
    return y
