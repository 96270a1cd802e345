"""The small model of TTT, its layers read and differentiated for any number of chunks at once."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.torch_ops.elementwise import elementwise

Layers = list[tuple[Tensor, Tensor]]
"""W `n d_in d_out` and b `n 1 d_out` of every layer; n = rows * heads, or cells * heads."""


class LayerGradients(NamedTuple):
    """The results of the keys in every layer, so that dloss/dW_l = x_l^T G_l."""

    inputs: list[Tensor]
    """x_l."""
    before: list[Tensor]
    """z_l = x_l W_l + b_l."""
    back: list[Tensor]
    """dloss/dx_l, from the second layer on."""
    grads: list[Tensor]
    """G_l = dloss/dz_l."""


def gradients(weights: Layers, k: Tensor, target: Tensor, square: Tensor, eps: float) -> LayerGradients:
    """Return the gradients of the loss for keys `n c d`; square is gamma^2, target gamma (v - k - beta)."""
    inputs, before = [k], []
    backs: list[Tensor] = []
    for w, a in weights:
        z = torch.baddbmm(a, inputs[-1], w)
        before.append(z)
        if len(before) < len(weights):
            inputs.append(elementwise(partial(F.gelu, approximate="tanh"), z))
    grads = [_norm_gradient(before[-1], target, square, eps)]
    for (w, _), z in zip(reversed(weights[1:]), reversed(before[:-1]), strict=True):
        back = torch.bmm(grads[0], w.transpose(1, 2))
        backs.insert(0, back)
        grads.insert(0, torch.ops.aten.gelu_backward(back, z, approximate="tanh"))
    return LayerGradients(inputs, before, backs, grads)


def _norm_gradient(z: Tensor, target: Tensor, square: Tensor, eps: float) -> Tensor:
    """Return G = (g - mean g - x mean(g x)) / sigma with x = (z - mean z) / sigma, g = gamma^2 x - target."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal = centred * inverse
    g = square * normal - target
    along = (g * normal).mean(-1, keepdim=True)
    return (g - g.mean(-1, keepdim=True) - normal * along) * inverse


def read(
    weights: Layers,
    found: LayerGradients,
    q: Tensor,
    mask: Tensor,
    scores: Tensor,
    prior: Layers | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Return y of the last layer.

    Args:
        weights: The layers at the start of each chunk.
        found: The result of `gradients` for the chunks' keys.
        q: Queries `n c d`.
        mask: tril(f_t rate_s) `n c c`.
        scores: mask (q_t . k_s + 1) `n c c`.
        prior: Sums of gradients from before the first chunk, or None.
        factor: The reader's factors `c 1`, which turn these sums into steps.
    """
    y = q
    for i, ((w, a), x, grad) in enumerate(zip(weights, found.inputs, found.grads, strict=True)):
        if i:
            y = elementwise(partial(F.gelu, approximate="tanh"), y)
            scores = mask * (torch.bmm(y, x.transpose(1, 2)) + 1)
        z = torch.baddbmm(torch.baddbmm(a, y, w), scores, grad, alpha=-1)
        if prior is not None and factor is not None:
            z = z - factor * torch.baddbmm(prior[i][1], y, prior[i][0])
        y = z
    return y
