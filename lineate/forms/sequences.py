"""Packed sequences: their lengths and their tokens' places. Each tensor of bounds on a GPU is read only once."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN = WeakTensorKeyDictionary()
"""The version and the lengths of each tensor of bounds on a GPU that is still used."""


def sequence_lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return the tokens of every sequence.

    Bounds on a GPU must not be changed in a way that torch does not see (`.data`, kernels of others).
    """
    if not may_be_kept(cu_seqlens):
        return tuple(cu_seqlens.diff().tolist())
    known: tuple[int, tuple[int, ...]] = _KNOWN.get(cu_seqlens, (-1, ()))
    version, lengths = known
    if version != cu_seqlens._version:  # new, or changed since
        lengths = tuple(cu_seqlens.diff().tolist())
        _KNOWN[cu_seqlens] = cu_seqlens._version, lengths
    return lengths


def copied_bounds(cu_seqlens: Tensor, device: torch.device | str) -> Tensor:
    """Return bounds on a device, without waiting for it if their memory is pinned, nor when their lengths are read."""
    copied = cu_seqlens.to(device, non_blocking=cu_seqlens.is_pinned())
    if not cu_seqlens.is_cuda and may_be_kept(copied):
        _KNOWN[copied] = copied._version, sequence_lengths(cu_seqlens)
    return copied


def may_be_kept(cu_seqlens: Tensor) -> bool:
    """Whether lengths may be cached; False on a CPU, where reading is free, and in graphs, which keep them for ever.

    It is also False in inference mode, where tensors have no versions.
    """
    if not cu_seqlens.is_cuda or torch.compiler.is_compiling() or cu_seqlens.is_inference():
        return False
    return not torch.cuda.is_current_stream_capturing()


def locate(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each of the `tokens` tokens of packed sequences, and its position in that sequence."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    # Nothing waits for a GPU, nor fails there if the bounds are wrong.
    rows = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return rows, at - cu_seqlens[:-1][rows]
