"""Codes of 4 and 8 bits in words of 32 bits; the first code has the lowest bits of a word."""

import torch
from torch import Tensor


def codes_of(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words of int32, `... words` -> `... words codes`, one a byte."""
    assert words.dtype == torch.int32 and bits in (4, 8)
    nbytes = words.contiguous().unsqueeze(-1).view(torch.uint8)  # the byte of the lowest bits comes first
    if bits == 8:
        return nbytes
    return torch.stack((nbytes & 15, nbytes >> 4), -1).flatten(-2)


def words_for(count: int, bits: int) -> int:
    """Return the number of words for `codes` codes."""
    return -(-count * bits // 32)
