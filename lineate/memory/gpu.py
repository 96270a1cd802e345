"""Tells which calls the memories' kernels support, bounds their buffers, and caches what layers share."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

from lineate.dispatch import kernels_run
from lineate.torch_ops.tracing import is_eager

R = TypeVar("R")

STATE_NUMBERS = 2**28
"""The most elements of states that kernels compute at a time: 1 GiB in float32."""


def on_gpu(x: Tensor) -> bool:
    """Whether kernels may read x: it is float32 on a GPU, and torch.func does not transform the call."""
    return x.is_cuda and x.dtype == torch.float32 and kernels_run()


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """Return make with a cache of its last few results: index tensors made from numbers that the host knows.

    The layers of a model need the same tensors, and each copy of such a tensor to a GPU waits for the device.
    """
    # Tensors made in inference mode cannot be used outside of it.
    remembered = lru_cache(maxsize=16)(lambda inference, *arguments: make(*arguments))

    @wraps(make)
    def run(*arguments: Hashable) -> R:
        return remembered(torch.is_inference_mode_enabled(), *arguments) if is_eager() else make(*arguments)

    return run
