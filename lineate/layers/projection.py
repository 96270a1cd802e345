"""How layers call their linear projections: through lineate.half where torch's own products are slow."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lineate.half import LinearThroughFloat32, half_dtype, has_few_rows, linear


def project(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x); the module is an nn.Linear or a stand-in (wrapped, quantised, hooked, fetched on use)."""
    wide = half_dtype(x) is None
    if (not wide or has_few_rows(x)) and type(module) is nn.Linear and _is_bare(module):
        return linear(x, module.weight, module.bias)
    if wide:
        result: Tensor = module(x)
        return result
    if torch.compiler.is_compiling():
        result = module(x)
        return result
    with LinearThroughFloat32():
        result = module(x)
        return result


def _is_bare(module: nn.Linear) -> bool:
    """Whether calling the module only multiplies by its weight."""
    hooks = (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
        or _has_any_global_hook()
    )  # fmt: skip
    return not hooks and "forward" not in vars(module)
