"""Rotary positions: channel i of the first half turns with channel i of the second by position * theta^(-2i / dim)."""

import torch
from torch import Tensor

from lineate.layers.gpu import kernels_for
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise

Turn = tuple[Tensor, Tensor]
"""cos and sin of every position's angles, `t dim/2` or `b t dim/2`, in float32, or in float64 for float64 tensors."""


def turns(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Turn:
    """Return the cos and sin that rotate the first `dim` channels of tensors of this dtype; positions `t` or `b t`."""
    dtype = compute_dtype(dtype)
    angles = positions[..., None].to(dtype) * frequencies(dim, theta, dtype, positions.device)
    return elementwise(torch.cos, angles), elementwise(torch.sin, angles)


def frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return by how much each of `dim/2` pairs of channels turns with every token."""
    return 1 / theta ** (torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Return x `b t heads d` with its first channels turned."""
    cos, sin = turn
    kernels = kernels_for(x, cos, sin)
    if kernels is not None:
        y: Tensor = kernels.rotate(x, cos, sin)
        return y
    half = cos.shape[-1]
    cos, sin = (y.to(x.dtype)[..., None, :] for y in (cos, sin))  # [b] t 1 half
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
