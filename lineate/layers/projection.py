"""How layers call their linear projections: through native/low_precision_matmul.py where torch's products are slow."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lineate.layers import invariant
from lineate.layers.gpu import overlaps, uncoded
from lineate.native.low_precision_matmul import LinearThroughFloat32, half_dtype, has_few_rows, linear
from lineate.parallel.tensor.ranks import Ranks
from lineate.torch_ops.tracing import needs_grad


def project(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x); the module is an nn.Linear or a stand-in (wrapped, quantised, hooked, fetched on use)."""
    if invariant.applies(x):
        return invariant.project(module, x)
    if x.is_cuda and overlaps(x.device) and type(module) is nn.Linear and is_bare(module):
        few = _few_rows(x, module)
        if few is not None:
            return few
    wide = half_dtype(x) is None
    if (not wide or has_few_rows(x)) and type(module) is nn.Linear and is_bare(module):
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


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T; x `... k`, weight `n k`, which has no module of its own, such as an embedding."""
    return invariant.linear(x, weight) if invariant.applies(x) else linear(x, weight)


def project_out(module: nn.Linear, x: Tensor, ranks: Ranks | None) -> Tensor:
    """Return module(x), or this rank's summand of it if other ranks have the other inputs; they share the bias."""
    if ranks is None or module.bias is None:
        return project(module, x)
    return linear(x, module.weight, module.bias / ranks.size)


def _few_rows(x: Tensor, module: nn.Linear) -> Tensor | None:
    """Return module(x) of the few rows that a step or a trail in a graph has, if a kernel of ours multiplies them."""
    from lineate.kernels.layers import products  # triton, at its first use

    rows, weight = x.reshape(-1, x.shape[-1]), uncoded(module.weight)
    if module.bias is not None or needs_grad(x, weight) or torch.is_autocast_enabled("cuda"):
        return None
    if products.serves_one(rows, weight):
        return products.product_one(rows, weight).view(*x.shape[:-1], -1)
    if products.serves_few(rows, weight):
        return products.product_few(rows, weight).view(*x.shape[:-1], -1)
    return None


def runs_own_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class, without hooks of its own around it."""
    return not (module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))


def run_own_forwards(module: nn.Module) -> bool:
    """Whether all modules in it are lineate's or torch's, and run the forwards of their classes."""
    return all(
        runs_own_forward(x) and type(x).__module__.partition(".")[0] in ("lineate", "torch") for x in module.modules()
    )


def is_bare(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class, and nothing before or after it, nor in a backward."""
    backward = module._backward_pre_hooks or module._backward_hooks
    return runs_own_forward(module) and not (backward or _has_any_global_hook())
