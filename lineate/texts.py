"""Packed texts: how long they are, which a GPU is asked once for a tensor of bounds, and where their tokens stand."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN = WeakTensorKeyDictionary()
"""Of tensors on GPUs that are still used: their version, and the lengths."""


def text_lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Tokens of every text. Bounds on a GPU must not be changed behind torch's back (`.data`, kernels of others)."""
    if not _may_be_kept(cu_seqlens):
        return tuple(cu_seqlens.diff().tolist())
    known: tuple[int, tuple[int, ...]] = _KNOWN.get(cu_seqlens, (-1, ()))
    version, lengths = known
    if version != cu_seqlens._version:  # new, or changed since
        lengths = tuple(cu_seqlens.diff().tolist())
        _KNOWN[cu_seqlens] = cu_seqlens._version, lengths
    return lengths


def _may_be_kept(cu_seqlens: Tensor) -> bool:
    """Looking costs nothing on a CPU; a graph would keep lengths for ever; inference mode counts no versions."""
    if not cu_seqlens.is_cuda or torch.compiler.is_compiling() or cu_seqlens.is_inference():
        return False
    return not torch.cuda.is_current_stream_capturing()


def locate(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For every token of packed texts, so many in all: which text, and where in it."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    # Nothing waits for a GPU, nor fails there if the bounds are wrong.
    rows = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return rows, at - cu_seqlens[:-1][rows]
