"""Which calls the kernels of memories serve, how much they keep, and layouts that all layers of a model share."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

from lineate.dispatch import kernels_run
from lineate.tracing import is_eager

R = TypeVar("R")

MOST = 2**28
"""Numbers of states that are made at a time: 1 GiB."""


def on_gpu(x: Tensor) -> bool:
    """In float32 on a GPU, outside of vmap and the like."""
    return x.is_cuda and x.dtype == torch.float32 and kernels_run()


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """make(...), whose last few results are kept: index tensors made of numbers that the host knows.

    The layers of a model ask for the same again and again, and copying such tensors to a GPU waits for it.
    """
    # Tensors of inference mode cannot be used outside of it.
    remembered = lru_cache(maxsize=16)(lambda inference, *arguments: make(*arguments))

    @wraps(make)
    def run(*arguments: Hashable) -> R:
        return remembered(torch.is_inference_mode_enabled(), *arguments) if is_eager() else make(*arguments)

    return run
