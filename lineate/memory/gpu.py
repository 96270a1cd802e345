"""Which calls the kernels of memories serve, and how much they keep."""

import torch
from torch import Tensor

from lineate.dispatch import why_no_triton

MOST = 2**28
"""Numbers of states that are made at a time: 1 GiB."""


def on_gpu(x: Tensor) -> bool:
    """In float32 on a GPU, outside of vmap and the like."""
    if not x.is_cuda or x.dtype != torch.float32 or why_no_triton("cuda") is not None:
        return False
    return torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
