"""Mamba-2 layers of transformers as gated linear attention.

    S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T,  y_t = S_t^T C_t + D x_t,  A = -exp(A_log)

q is C and k is B, one for each group of heads; v is dt x, and log_decay is dt A.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.integrations.transformers_delta import sizes
from lineate.integrations.transformers_layers import Projected
from lineate.native import layers as native
from lineate.ops import gated_linear_attention
from lineate.ops.decoding import decode
from lineate.rule import compute_dtype

CLOSED_STEP = -math.inf
"""The raw step of a padding token: its dt is 0, also where dt has a lower limit."""


@dataclass(frozen=True)
class Mamba2Parts:
    """The differences between the Mamba-2 layers of the families, whose parts have the same names."""

    heads: tuple[str, str, str, str] = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
    """The sizes h, hv, k and v."""
    multipliers: tuple[str, str] | None = None
    """The factors before and after in_proj."""

    @property
    def borrowed(self) -> tuple[str, ...]:
        return ("conv1d",)

    def project(self, layer: Any, x: Tensor, mask: Tensor | None) -> Projected:
        if self.multipliers is not None:
            x = x * getattr(layer, self.multipliers[0])
        projected = layer.in_proj(x)
        if self.multipliers is not None:
            projected = projected * getattr(layer, self.multipliers[1])
        hv = layer.num_heads
        width = layer.intermediate_size
        output_gate, mixed, step = projected.split([width, projected.shape[-1] - width - hv, hv], dim=-1)
        if mask is not None:
            step = step.masked_fill(~mask[..., None], CLOSED_STEP)
            if layer.in_proj.bias is not None:
                mixed = mixed * mask[..., None]
        return Projected(mixed, (step,), output_gate)

    def attend(
        self, layer: Any, mixed: Tensor, gates: tuple[Tensor, ...], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        h, hv, k, v = sizes(layer, self.heads)
        x, B, C = mixed.split([hv * v, h * k, h * k], dim=-1)
        x, B, C = x.unflatten(-1, (hv, v)), B.unflatten(-1, (h, k)), C.unflatten(-1, (h, k))
        decoding = state is not None and x.shape[1] == 1
        dtype = compute_dtype(x.dtype)
        dt = _step(layer, gates[0].to(dtype), decoding)
        log_decay = dt * -layer.A_log.to(dtype).exp()  # b t hv
        values = x * dt[..., None].to(x.dtype)
        if state is not None:
            state = state.to(dtype).transpose(2, 3)  # the cache has b hv v k
        if decoding and x.is_cuda and not torch.is_grad_enabled():
            assert state is not None
            final = state.contiguous()
            output = decode(C, B, values, log_decay, state=final, scale=1.0)
        else:
            output, final = gated_linear_attention(
                C, B, values, log_decay, scale=1.0, state=state, cu_seqlens=cu_seqlens
            )  # fmt: skip
        return torch.addcmul(output, x, layer.D[:, None].to(x.dtype)), final.transpose(2, 3)

    def finish(self, layer: Any, output: Tensor, output_gate: Tensor) -> Tensor:
        b, t = output.shape[:2]
        # One row: Falcon-H1's norm misinterprets a batch of single tokens.
        y, gate = output.reshape(1, b * t, -1), output_gate.reshape(1, b * t, -1)
        result: Tensor = layer.out_proj(_gated_norm(layer.norm, y, gate).view(b, t, -1).to(output_gate.dtype))
        return result


def _step(layer: Any, raw: Tensor, decoding: bool) -> Tensor:
    """Return dt = softplus(raw + dt_bias), `b t hv`, within the layer's limits.

    As in transformers, the limits do not apply to a single token that continues a state.
    """
    dt = F.softplus(raw + layer.dt_bias.to(raw.dtype))
    least, most = layer.time_step_limit
    if decoding or (least <= 0 and most == math.inf):
        return dt
    return dt.clamp(least, most).masked_fill(raw == CLOSED_STEP, 0.0)


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Apply the layer's own norm to x and gate `1 t channels`; Falcon-H1 may have a gate without a norm."""
    if isinstance(norm, torch.nn.Identity):
        return x * F.silu(gate)
    whole = type(norm).__name__.endswith("RMSNormGated") and not hasattr(norm, "n_groups")
    whole = whole and getattr(norm, "group_size", x.shape[-1]) == x.shape[-1] and "forward" not in norm.__dict__
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    if whole and not hooked and native.serves(x, norm.weight, gate):  # the gate comes first
        return native.rms_norm(x * F.silu(gate), norm.weight, norm.variance_epsilon)
    normed: Tensor = norm(x, gate)
    return normed
