"""The products of a batch-invariant step on a GPU: a row's bits depend on the row and the weights alone.

torch's products, and most of our own, choose a kernel, its tiles, and into how many sums k is cut by the number of
rows. Inside `batch_invariant` (torch_ops/invariance.py) layers multiply by these functions, which choose by the weight.
What they do not take raises NotInvariant.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lineate.layers.gpu import coded, uncoded
from lineate.torch_ops.invariance import NotInvariant, is_batch_invariant


def applies(x: Tensor) -> bool:
    """Whether products of x must be those of this module."""
    return x.is_cuda and is_batch_invariant()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias; x `... k`, weight `n k`, which may be quantised, bias `n`."""
    from lineate.kernels.layers import invariant, quantised_products  # triton, at its first use

    _check(x)
    rows, codes, plain = x.reshape(-1, x.shape[-1]), coded(weight), uncoded(weight)
    if codes is not None and quantised_products.serves_invariant(rows, codes):
        y = quantised_products.multiply_invariant(invariant.dense(rows), codes, bias)
    elif codes is None and invariant.serves(rows, plain):
        y = invariant.product(rows, plain, bias)
    else:
        raise NotInvariant(f"a product of {x.dtype} with a weight {weight.dtype} {tuple(weight.shape)}")
    return y.view(*x.shape[:-1], len(weight))


def project(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x), where the module is an nn.Linear without hooks."""
    if type(module) is not nn.Linear or module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
        raise NotInvariant(f"a projection by a {type(module).__name__}, or one with hooks")
    return linear(x, module.weight, module.bias)


def add_product(
    y: Tensor, module: nn.Linear, x: Tensor, then: tuple[Tensor, float, bool] | None
) -> tuple[Tensor, Tensor | None]:
    """Return x + module(y) of y `rows k` and x `rows n`, and its RMSNorm `then` if one launch computes both.

    Args:
        y: `rows k`.
        module: A projection.
        x: `rows n`.
        then: The weight of the norm, its eps, and whether it is zero-centred; None: no norm.
    """
    from lineate.kernels.layers import invariant, products, quantised_products  # triton, at its first use

    _check(y)
    weight, codes = uncoded(module.weight), coded(module.weight)
    served = invariant.serves(y, weight) if codes is None else quantised_products.serves_invariant(y, codes)
    if module.bias is not None or x.shape[1] > products.WIDEST or not served:
        return x + linear(y, module.weight, module.bias), None
    rows, y = len(y), invariant.dense(y)
    if codes is None:
        most, parts = invariant.ROWS if invariant.uses_tensor_cores(weight) else rows, invariant.parts_of(weight)
    else:
        most = quantised_products.INVARIANT_ROWS if quantised_products.uses_tensor_cores(y) else rows
        parts = quantised_products.invariant_parts(y, codes)
    totals, normed = [], []
    for part, own in zip(y.split(most), x.split(most), strict=True):
        if codes is None:
            sums = invariant.sums(part, weight, parts)
        else:
            sums = quantised_products.multiply_invariant(part, codes, parts=parts).view(parts, *own.shape)
        total, after = products.add_and_norm(own.contiguous(), sums, then)
        totals.append(total)
        normed += [] if after is None else [after]
    return _joined(totals), _joined(normed) if normed else None


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return x_h weight_h for every head h; x `b t h k`, weight `h k m` -> `b t h m`."""
    from lineate.kernels.layers import invariant  # triton, at its first use

    _check(x)
    if weight.dtype is not x.dtype:
        raise NotInvariant(f"a product of {x.dtype} with a weight {weight.dtype} of heads")
    return invariant.product_of_heads(x.flatten(0, 1), weight).unflatten(0, x.shape[:2])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check(x: Tensor) -> None:
    if _has_any_global_hook() or torch.is_autocast_enabled("cuda"):
        raise NotInvariant("products under global hooks or autocast")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotInvariant(f"products of {x.dtype}")
