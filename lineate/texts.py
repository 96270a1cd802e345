"""How long packed texts are: a GPU is asked once about a tensor of bounds, not by every layer of a model."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN = WeakTensorKeyDictionary()
"""Of tensors that are still used: their version, and the lengths."""


def text_lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Tokens of every text."""
    if torch.compiler.is_compiling() or cu_seqlens.is_inference():
        return tuple(cu_seqlens.diff().tolist())
    known: tuple[int, tuple[int, ...]] = _KNOWN.get(cu_seqlens, (-1, ()))
    version, lengths = known
    if version != cu_seqlens._version:  # new, or changed since
        lengths = tuple(cu_seqlens.diff().tolist())
        _KNOWN[cu_seqlens] = cu_seqlens._version, lengths
    return lengths
