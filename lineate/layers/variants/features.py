"""Feature maps of linear attention, phi(x), each on the channels of one head; the heads share the weights.

    relu        max(x, 0)
    product     (A x + a) * (B x + b)                           the default of flash-linear-attention
    t2r         max(A x, 0)                                     T2R
    hedgehog    softmax of 2 (A x + a) and -2 (A x + a) together, twice as many channels

"identity" and "elu+1" have no module: `linear_attention` computes them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers.projection import project
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise

SMALLEST_SUM = 1e-4
"""What is added to the sum of the features before they are divided by it."""


class Rectified(nn.Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return elementwise(F.relu, x)


class ProductMap(nn.Module):
    """The elementwise product of two affine maps, (A x + a) * (B x + b).

    Args:
        key_dim: channels of a head.
    """

    def __init__(self, key_dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(key_dim, key_dim), nn.Linear(key_dim, key_dim)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.first, x) * project(self.second, x)


class RectifiedMap(nn.Module):
    """max(A x, 0), as in T2R.

    Args:
        key_dim: channels of a head.
    """

    def __init__(self, key_dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(key_dim, key_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return elementwise(F.relu, project(self.first, x))


class HedgehogMap(nn.Module):
    """The softmax of y and -y together, y = 2 (A x + a): twice as many channels, which are positive and sum to 1.

    Args:
        key_dim: channels of a head.
    """

    def __init__(self, key_dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(key_dim, key_dim)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * project(self.first, x)
        both = torch.cat((y, -y), -1)
        return both.to(compute_dtype(both.dtype)).softmax(-1).to(both.dtype)


def make_feature_map(name: str, key_dim: int) -> nn.Module | None:
    """Return the module of a feature map; None for those that `linear_attention` computes.

    Args:
        name: one of configs.FEATURE_MAPS.
        key_dim: channels of a head.
    """
    if name == "relu":
        return Rectified()
    if name == "product":
        return ProductMap(key_dim)
    if name == "t2r":
        return RectifiedMap(key_dim)
    return HedgehogMap(key_dim) if name == "hedgehog" else None


def features_of(name: str) -> int:
    """Return how many features a feature map makes of one channel."""
    return 2 if name == "hedgehog" else 1


def layers_of(name: str) -> int:
    """Return how many projections, key_dim x key_dim, a feature map has."""
    return 2 if name == "product" else int(name in ("t2r", "hedgehog"))


def divide_by_sum(x: Tensor) -> Tensor:
    """Return features `... k` divided by their sum."""
    return x / (x.sum(-1, keepdim=True) + SMALLEST_SUM)
