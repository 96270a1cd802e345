"""Elementwise functions of a decoding step whose bits do not depend on the number of rows.

On a CPU, torch computes whole vectors of elements with one routine and the remainder with another, whose last bits
differ. So an element's bits would depend on its position, and a row's on the other rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.torch_ops.tracing import is_eager, needs_grad

VECTORS = 64
"""A multiple of the elements that torch computes at a time on every CPU."""
MOST = 2**20
"""The largest number of elements of a decoding step."""
GRAIN = 2**15
"""torch uses one thread up to this many elements; above, each thread gets a part that may end within a vector."""


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), which has the shape of x, computed in whole vectors.

    Args:
        function: A function of torch that computes each element by itself.
        x: A tensor of any shape.
    """
    if torch.compiler.is_compiling() or not x.is_cpu or not 0 < x.numel() <= MOST:
        return function(x)
    if needs_grad(x) or not is_eager(x):
        return function(x)
    shared_out = x.numel() > GRAIN and torch.get_num_threads() > 1
    whole = x.dim() and x.shape[-1] % VECTORS == 0 and x.stride(-1) == 1
    if (whole or (x.numel() % VECTORS == 0 and x.is_contiguous())) and not shared_out:
        return function(x)
    flat = x.reshape(-1)
    if x.numel() % VECTORS:
        flat = F.pad(flat, (0, -x.numel() % VECTORS))
    made = torch.cat([function(part) for part in flat.split(GRAIN)]) if shared_out else function(flat)
    return made[: x.numel()].view(x.shape)
