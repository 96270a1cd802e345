"""Which classes of transformers lineate changes, one row a model family, with the projections of its linear layer.

A new family adds a row here, and a function for its projections unless it shares one; no other module needs a change.
Only families that transformers itself has get a row: classes that a checkpoint brings as remote code are not found.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lineate.integrations.transformers_layers import Project, Projected


@dataclass(frozen=True)
class ModelPatch:
    """The classes of one transformers model family that lineate changes, and how its linear layer differs."""

    name: str
    """The name of its module below transformers.models."""
    layer: str
    """The class of the linear layer."""
    model: str
    """The class of the text model, which makes the masks and calls the layers."""
    project: Project
    """Computes the inputs of the rule from the hidden states."""
    norm: str = "norm"
    """The name of the linear layer's gated norm."""
    out: str = "out_proj"
    """The name of the linear layer's output projection."""
    attention: str | None = None
    """The class of a softmax attention whose values are narrower than its keys, if the family has one."""
    borrowed: tuple[str, ...] = ("conv1d",)
    """Submodules whose weights are read without calling them; accelerate's hooks must load these first."""


def project_qwen3_next(layer: Any, x: Tensor) -> Projected:
    """Split Qwen3-Next's two projections, each grouped by key head: (q, k, v, output gate) and (write, gate)."""
    b, t = x.shape[:2]
    h, hv, k, v = heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    wide = hv // h * v  # value columns of a key head's group
    grouped = layer.in_proj_qkvz(x).view(b, t, h, 2 * (k + wide))
    parts = grouped.split([k, k, wide, wide], dim=-1)
    qkv = torch.cat([part.reshape(b, t, -1) for part in parts[:3]], dim=-1)
    write, gate = (y.reshape(b, t, hv) for y in layer.in_proj_ba(x).view(b, t, h, -1).chunk(2, dim=-1))
    return Projected(qkv, parts[3].reshape(b, t, hv, v), gate, write, layer.A_log, layer.dt_bias, heads, 1.0)


def project_qwen3_5(layer: Any, x: Tensor) -> Projected:
    """Apply Qwen3.5's separate projections for q, k and v, for the output gate, and for both gates."""
    heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    output_gate = layer.in_proj_z(x).unflatten(-1, (heads[1], heads[3]))
    gate, write = layer.in_proj_a(x), layer.in_proj_b(x)
    return Projected(layer.in_proj_qkv(x), output_gate, gate, write, layer.A_log, layer.dt_bias, heads, 1.0)


def project_olmo(layer: Any, x: Tensor) -> Projected:
    """Apply OLMo-Hybrid's projections, one each; beta may reach 2 if negative eigenvalues are allowed."""
    heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    qkv = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), dim=-1)
    output_gate = layer.g_proj(x).unflatten(-1, (heads[1], heads[3]))
    beta_scale = 2.0 if layer.allow_neg_eigval else 1.0
    gate, write = layer.a_proj(x), layer.b_proj(x)
    return Projected(qkv, output_gate, gate, write, layer.A_log, layer.dt_bias, heads, beta_scale)


def project_kimi(layer: Any, x: Tensor) -> Projected:
    """Apply Kimi Linear's projections; those of the decay and the output gate have low rank."""
    h, k = layer.num_heads, layer.head_dim
    forget = layer.forget_gate
    qkv = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), dim=-1)
    output_gate = layer.g_b_proj(layer.g_a_proj(x)).unflatten(-1, (h, k))
    gate = forget.f_b_proj(forget.f_a_proj(x)).unflatten(-1, (h, k))
    write = layer.b_proj(x)
    return Projected(qkv, output_gate, gate, write, forget.A_log.flatten(), forget.dt_bias, (h, h, k, k), 1.0)


MODEL_PATCHES = (
    ModelPatch("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextModel", project_qwen3_next),
    ModelPatch("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel", project_qwen3_5),
    ModelPatch("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextModel", project_qwen3_5),
    ModelPatch(
        "kimi_linear", "KimiLinearDeltaAttention", "KimiLinearModel", project_kimi,
        norm="o_norm", out="o_proj", attention="KimiLinearAttention", borrowed=("conv1d", "forget_gate"),
    ),
    ModelPatch("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridModel", project_olmo, norm="o_norm", out="o_proj"),
)  # fmt: skip
