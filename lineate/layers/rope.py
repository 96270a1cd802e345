"""Rotary positions: channel i of the first half turns with channel i of the second by position * theta^(-2i / dim)."""

import torch
from torch import Tensor

from lineate.rule import compute_dtype


def rotate(x: Tensor, positions: Tensor, dim: int, theta: float) -> Tensor:
    """x `b t heads d`, its first `dim` channels turned; positions `t` or `b t`."""
    dtype = compute_dtype(x.dtype)
    frequencies = 1 / theta ** (torch.arange(0, dim, 2, device=x.device, dtype=dtype) / dim)
    angles = positions[..., None].to(dtype) * frequencies  # [b] t dim/2
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]  # [b] t 1 dim/2
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second, rest = x.split((dim // 2, dim // 2, x.shape[-1] - dim), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
