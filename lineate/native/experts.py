"""Multiplies a few rows by the weights of experts in one call of C (experts.c), without copies of the weights."""

import struct
from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.native.build import c_function, why_not
from lineate.native.product import widens
from lineate.native.quantised import CodedProduct

MOST_ROWS = 16
"""The most tokens whose experts are multiplied in one call; for more, torch's products of an expert take less time."""
_EXPERTS = struct.Struct("15q")  # Experts in experts.c
_KINDS = (torch.bfloat16, torch.float16, torch.float32)


class Weight(NamedTuple):
    """The weights of experts.

    Args:
        numbers: `experts n k` of 16 or 32 bits, dense; or codes in tiles, `experts tiles ...`, dense.
        rows: n.
        columns: k.
        scales: Of the codes, dense; or None.
        coded: How C reads the codes; or None.
        rounded: Whether rows are rounded further, as inside rounded_activations.
    """

    numbers: Tensor
    rows: int
    columns: int
    scales: Tensor | None = None
    coded: CodedProduct | None = None
    rounded: bool = False


@cache
def serves(dtype: torch.dtype) -> bool:
    """Whether the C code runs here, and multiplies by weights of this dtype (uint8: by codes)."""
    if why_not("products") is not None:
        return False
    return dtype is torch.uint8 or (dtype in _KINDS and widens(dtype))


def multiply(x: Tensor, weight: Weight, experts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the products of rows with the weights of their experts, float32 `rows n`, where `serves`.

    Args:
        x: `rows k`; first those of experts[0], and so on.
        weight: Of all experts.
        experts: Their numbers, each once.
        counts: How many rows each has, at least 1.
    """
    x = x.float().contiguous()
    y = torch.empty(x.shape[0], weight.rows, dtype=torch.float32, device="cpu")
    ends = array("q", (0, *counts))
    for i in range(1, len(ends)):
        ends[i] += ends[i - 1]
    numbers = array("q", experts)
    assert ends[-1] == x.shape[0] and x.shape[1] == weight.columns
    kind, bits, planes, scales, step = 0, 0, 0, 0, 0
    if weight.coded is None:
        kind = _KINDS.index(weight.numbers.dtype)
    else:
        assert weight.scales is not None
        bits, planes = weight.coded.bits, weight.coded.rounded_planes if weight.rounded else weight.coded.planes
        scales, step = weight.scales.data_ptr(), weight.scales.nbytes // weight.scales.shape[0]
    words = _EXPERTS.pack(
        len(numbers), weight.rows, weight.columns, torch.get_num_threads(), kind, bits, planes,
        numbers.buffer_info()[0], ends.buffer_info()[0], x.data_ptr(), weight.numbers.data_ptr(), scales,
        weight.numbers.nbytes // weight.numbers.shape[0], step, y.data_ptr(),
    )  # fmt: skip
    if c_function("experts")(words):
        raise MemoryError(f"no memory for {x.shape[0]} rows of {x.shape[1]} numbers")
    return y
