"""Multiplies rows by a weight of 8 or 4 bits in C (small.c), and finds the scales of such a weight (rounding.c)."""

import struct

import torch
from torch import Tensor

from lineate.native.build import c_function

_SMALL = struct.Struct("10q")  # Small in small.c
_ROUND = struct.Struct("6q")  # Round in rounding.c


def product(x: Tensor, codes: Tensor, scales: Tensor, out: int, bits: int) -> Tensor:
    """Return x weight^T in float32; x `n k` float32; codes and scales of a weight `out k`, dense, in tiles.

    With 8 bits, x is rounded to 15 bits; with 4, whose own error is larger, to 8; both by groups of 32. With scales of
    float32, codes are float8 and x stays as it is (float8.c).
    """
    x = x.contiguous()
    y = torch.empty(x.shape[0], out, dtype=torch.float32, device="cpu")
    planes = 0 if scales.dtype is torch.float32 else 2 if bits == 8 else 1
    words = _SMALL.pack(
        *x.shape[:1], out, x.shape[1], bits, planes, torch.get_num_threads(),
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    if c_function("small")(words):
        raise MemoryError(f"no memory for {x.shape[0]} rows of {x.shape[1]} numbers, rounded to {bits} bits")
    return y


def best_scales(groups: Tensor, scales: Tensor) -> Tensor:
    """Return which of the scales `... candidates` of each group leaves the least squared error, int64 `... 1`.

    groups `... 32` float32, dense, which are rounded to codes of -8 .. 7; scales float32.
    """
    scales = scales.contiguous()
    best = torch.empty(*groups.shape[:-1], 1, dtype=torch.int64, device="cpu")
    words = _ROUND.pack(
        best.numel(), scales.shape[-1], torch.get_num_threads(), groups.data_ptr(), scales.data_ptr(), best.data_ptr()
    )
    wrong = c_function("round")(words)
    assert not wrong, f"at most 32 candidates, got {scales.shape[-1]}"
    return best
