"""The output norm over the channels of all heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers.norm import GatedRMSNorm
from lineate.parallel.tensor.ranks import Ranks, rms_norm_over
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise


class AllHeadsNorm(GatedRMSNorm):
    """RMSNorm(x) * activation(gate) over the channels of all heads together, in float32.

    Args:
        size: channels of all heads.
        eps: added to the mean square.
        activation: of the gate, "silu" or "sigmoid"; "none": the gate is not read.
    """

    ranks: Ranks | None = None
    """If set, the other heads are on other ranks, and the mean is that of all."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x `b t heads d` and multiply it by the activated gate of the same shape; in the dtype of x."""
        weight: Tensor = self.weight
        dtype = compute_dtype(x.dtype)
        wide, weight = x.to(dtype).flatten(2), weight.to(dtype)
        if self.ranks is not None:
            y = rms_norm_over(self.ranks, wide, weight, self.eps, self.ranks.size * wide.shape[-1])
        else:
            y = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight
        if self.activation != "none":
            z = gate.to(dtype).flatten(2)
            y = y * (elementwise(F.silu, z) if self.activation == "silu" else elementwise(torch.sigmoid, z))
        return y.to(x.dtype).view_as(x)
