"""Draws the next token of each row in C, as lineate.generation.choice describes."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.native.build import c_function, why_not
from lineate.torch_ops.tracing import is_virtual

_CHOICE = struct.Struct("11q")  # Choice in choice.c


class Options(NamedTuple):
    """How rows are drawn: tensors `rows`, on the device of the logits.

    Args:
        temperatures: Divide the logits; above 0, float32.
        least: The lowest logits over the temperature, those of the likeliest tokens being 0, float32.
        ks: Keep the k likeliest tokens, at most the vocabulary, int64.
        ps: Keep the likeliest tokens whose probabilities together reach p, float64.
        seeds: Seeds of the draws, of 64 bits with a sign.
    """

    temperatures: Tensor
    least: Tensor
    ks: Tensor
    ps: Tensor
    seeds: Tensor


def choose(logits: Tensor, options: Options, positions: Tensor) -> Tensor | None:
    """Return a token of each row of logits `rows vocab`; None where the C code cannot, or a row is not finite.

    Args:
        logits: On a CPU.
        options: Those of each row.
        positions: The index of each row's token in its sequence, ints `rows`.
    """
    if why_not("products") is not None or not logits.numel():
        return None
    logits = logits.float()
    if logits.stride(1) != 1 or is_virtual(logits):
        logits = logits.clone(memory_format=torch.contiguous_format)
    at = positions.to(torch.int64).contiguous()
    tokens = torch.empty(len(at), dtype=torch.int64, device="cpu")
    temperatures, least, ks, ps, seeds = (x.data_ptr() for x in options)
    words = _CHOICE.pack(
        *logits.shape, logits.stride(0), logits.data_ptr(), temperatures, least, ps, ks, seeds, at.data_ptr(),
        tokens.data_ptr(),
    )  # fmt: skip
    return None if c_function("choose")(words) else tokens
