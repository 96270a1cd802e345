"""Zeros that calls on a GPU share, so that an absent state or gradient costs neither memory nor a launch."""

from functools import cache, lru_cache
from math import prod

import torch
from torch import Tensor

from lineate.torch_ops.tracing import recorded, transformed

MOST_SHARED = 2**24
"""The most bytes that are shared at once: 16 MB."""


def read_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return read-only zeros; on a GPU, calls share them up to a size."""
    shared = device.type == "cuda" and not recorded() and not transformed()  # checked first: a graph serves all sizes
    shared = shared and prod(shape) * dtype.itemsize <= MOST_SHARED
    if shared and not torch.cuda.is_current_stream_capturing():  # allocations of a graph belong to the graph
        return _shared_zeros(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, device=device)


@lru_cache(256)
def _shared_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _zeros(1 << max(prod(shape) - 1, 0).bit_length(), dtype, device)[: prod(shape)].view(shape)


@cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return n zeros, for n a power of two: few sizes are allocated, and a dtype takes at most 32 MB."""
    zeros = torch.zeros(count, dtype=dtype, device=device)
    torch.cuda.current_stream(device).synchronize()  # because other streams may read them
    return zeros
