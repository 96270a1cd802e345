"""RMSNorm, plain or zero-centred, RMSNorm with an output gate, and LayerNorm with a bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers.gpu import kernels_for
from lineate.native import layers as native
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight over the last dimension, in float32.

    Args:
        size: channels.
        eps: added to the mean square.
        zero_centred: whether it multiplies by 1 + weight.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.zero_centred = zero_centred
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0 if self.zero_centred else 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; on a GPU under autocast the result has autocast's dtype, as every reader would convert it."""
        weight: Tensor = self.weight
        if native.serves(x, weight):
            return native.rms_norm(x, weight, self.eps, zero_centred=self.zero_centred)
        kernels = kernels_for(x, weight)
        if kernels is not None and x.shape[-1] <= kernels.WIDEST_NORM:
            lower = torch.is_autocast_enabled("cuda") and x.dtype == torch.float32
            dtype = torch.get_autocast_dtype("cuda") if lower else None
            return kernels.rms_norm(x, weight, self.eps, zero_centred=self.zero_centred, dtype=dtype)
        dtype = compute_dtype(x.dtype)
        weight = weight.to(dtype) + 1 if self.zero_centred else weight.to(dtype)
        return F.rms_norm(x.to(dtype), x.shape[-1:], weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + ", zero_centred=True" * self.zero_centred


class LayerNorm(nn.Module):
    """(x - mean x) / sqrt(var x + eps) * weight + bias over the last dimension, in float32.

    Args:
        size: channels.
        eps: added to the variance.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; in the dtype of x."""
        dtype = compute_dtype(x.dtype)
        return F.layer_norm(x.to(dtype), x.shape[-1:], self.weight.to(dtype), self.bias.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * activation(gate), in float32.

    Args:
        size: channels.
        eps: added to the mean square.
        activation: of the gate, "silu" (Qwen3-Next) or "sigmoid" (Kimi Linear); "none": the gate is not read.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, activation: str = "silu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x `... size` and multiply it by the activated gate `... size`; in the dtype of x."""
        weight: Tensor = self.weight
        if self.activation == "none":
            if native.serves(x, weight):
                return native.rms_norm(x, weight, self.eps, zero_centred=False)
            wide = compute_dtype(x.dtype)
            return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), self.eps).to(x.dtype)
        if native.serves(x, weight, gate) and gate.shape == x.shape:
            return native.gated_rms_norm(x, weight, gate, self.eps, self.activation)
        kernels = kernels_for(x, weight, gate)
        if kernels is not None and gate.shape == x.shape and x.shape[-1] <= kernels.WIDEST_NORM:
            return kernels.gated_rms_norm(x, gate, weight, self.eps, self.activation)
        dtype = compute_dtype(x.dtype)
        x, gate, given = x.to(dtype), gate.to(dtype), x.dtype
        # (torch 2.11 cannot compile tangents of its own rms_norm on a GPU.)
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight.to(dtype)
        return (normed * elementwise(F.silu if self.activation == "silu" else torch.sigmoid, gate)).to(given)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"
