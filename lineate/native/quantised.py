"""Multiplies rows by a quantised weight, or float16, in C (quantised.c, halves.c), and finds scales (rounding.c)."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.native.build import c_function, why_not

_QUANTISED = struct.Struct("10q")  # Quantised in quantised.c
_ROWS = struct.Struct("7q")  # Rows in quantised.c
_ROUND = struct.Struct("7q")  # Round in rounding.c


class CodedProduct(NamedTuple):
    """How the C code reads the codes of a format.

    Args:
        kind: Of a Linear in step.c.
        bits: Of a code.
        planes: Of 8 bits, to which rows are rounded by groups of 32 columns: 2 keep 15 bits; 0: rows stay float32.
        rounded_planes: The same inside rounded_activations.
        looks_up: Whether `rows` decodes single rows.
    """

    kind: int
    bits: int
    planes: int
    rounded_planes: int
    looks_up: bool


INT8 = CodedProduct(8, 8, planes=2, rounded_planes=1, looks_up=True)
INT4 = CodedProduct(4, 4, planes=1, rounded_planes=1, looks_up=True)
FLOAT8 = CodedProduct(3, 8, planes=0, rounded_planes=0, looks_up=False)


def product(x: Tensor, codes: Tensor, scales: Tensor, out: int, coded: CodedProduct, rounded: bool = False) -> Tensor:
    """Return x weight^T in float32; x `n k` float32; codes and scales of a weight `out k`, dense, in tiles.

    With 8 bits, x is rounded to 15 bits, or to 8 if `rounded`; with 4, whose own error is larger, to 8; all by groups
    of 32. With float8 x is not rounded (float8.c).
    """
    planes = coded.rounded_planes if rounded else coded.planes
    y, failed = _run(x, codes.data_ptr(), scales.data_ptr(), out, coded.bits, planes)
    if failed:
        raise MemoryError(f"no memory for {x.shape[0]} rows of {x.shape[1]} numbers, rounded to {coded.bits} bits")
    return y


def half_product(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x weight^T in float32, multiplied in float16 (halves.c); None where the C code cannot do it.

    x `n k`, which is rounded to float16 with a scale for each row; weight `m k` float16. Neither may be virtual.
    """
    if x.shape[1] != weight.shape[1] or not x.is_cpu or not weight.is_contiguous():
        return None
    if why_not("products") is not None:
        return None
    y, failed = _run(x.float(), weight.data_ptr(), 0, weight.shape[0], 16, 1)
    return None if failed else y


def _run(x: Tensor, codes: int, scales: int, out: int, bits: int, planes: int) -> tuple[Tensor, int]:
    """Return x weight^T, and whether there was no memory, or the processor does not multiply so."""
    x = x.contiguous()
    y = torch.empty(x.shape[0], out, dtype=torch.float32, device="cpu")
    words = _QUANTISED.pack(
        *x.shape[:1], out, x.shape[1], bits, planes, torch.get_num_threads(), x.data_ptr(), codes, scales, y.data_ptr()
    )
    return y, c_function("quantised")(words)


def rows(codes: Tensor, scales: Tensor, ids: Tensor, coded: CodedProduct) -> Tensor:
    """Return these rows of a weight, float32 `n k`; ids `n` int64, of rows that exist; all tensors dense."""
    y = torch.empty(ids.shape[0], codes.shape[1] * 32, dtype=torch.float32, device="cpu")
    words = _ROWS.pack(*y.shape, coded.bits, ids.data_ptr(), codes.data_ptr(), scales.data_ptr(), y.data_ptr())
    c_function("quantised_rows")(words)
    return y


def best_scales(groups: Tensor, scales: Tensor, zero: int) -> Tensor:
    """Return which of the scales `... candidates` of each group leaves the least squared error, int64 `... 1`.

    groups `... 32` float32, dense, which are rounded to codes of -zero .. zero - 1; scales float32.
    """
    scales = scales.contiguous()
    best = torch.empty(*groups.shape[:-1], 1, dtype=torch.int64, device="cpu")
    addresses = groups.data_ptr(), scales.data_ptr(), best.data_ptr()
    wrong = c_function("round")(
        _ROUND.pack(best.numel(), scales.shape[-1], zero, torch.get_num_threads(), *addresses)
    )  # fmt: skip
    assert not wrong, f"at most 32 candidates, got {scales.shape[-1]}"
    return best
