"""Draws the next token of each row in C, as lineate.generation.choice describes."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.native.build import c_function, why_not
from lineate.tracing import is_virtual

_CHOICE = struct.Struct("11q")  # Choice in choice.c


class Options(NamedTuple):
    """How one row is drawn.

    Args:
        temperature: Divides the logits; above 0.
        least: The lowest logit over the temperature, that of the likeliest token being 0.
        k: Keep the k likeliest tokens, at most the vocabulary.
        p: Keep the likeliest tokens whose probabilities together reach p.
        seed: Seed of the draws, of 64 bits with a sign.
    """

    temperature: float
    least: float
    k: int
    p: float
    seed: int


def choose(logits: Tensor, options: Sequence[Options], positions: Tensor) -> Tensor | None:
    """Return a token of each row of logits `rows vocab`; None where the C code cannot, or a row is not finite.

    Args:
        logits: On a CPU.
        options: Those of each row.
        positions: The index of each row's token in its sequence, int64 `rows`.
    """
    if why_not() is not None or not logits.numel():
        return None
    logits = logits.float()
    if logits.stride(1) != 1 or is_virtual(logits):
        logits = logits.clone(memory_format=torch.contiguous_format)
    temperatures, least, ks, ps, seeds = zip(*options, strict=True)
    floats = torch.tensor([temperatures, least], dtype=torch.float32, device="cpu")
    numbers = torch.tensor([ks, seeds, positions.tolist()], dtype=torch.int64, device="cpu")
    kept = torch.tensor(ps, dtype=torch.float64, device="cpu")
    tokens = torch.empty(len(options), dtype=torch.int64, device="cpu")
    words = _CHOICE.pack(
        *logits.shape, logits.stride(0), logits.data_ptr(), *(x.data_ptr() for x in floats), kept.data_ptr(),
        *(x.data_ptr() for x in numbers), tokens.data_ptr(),
    )  # fmt: skip
    return None if c_function("choose")(words) else tokens
