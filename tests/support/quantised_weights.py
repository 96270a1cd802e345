"""Models whose weights can be kept in few bits: sizes in multiples of 32, and numbers as those of trained models.

Embeddings are of order one and each layer adds a part of that, as in a trained model; so the logits are about as exact
as the products are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lineate.models import HybridLM, preset
from lineate.models.config import ExpertsConfig, HybridConfig

VOCAB = 97
EXPERTS = ExpertsConfig(6, 3, 32, shared_size=32, shared_gate=True)
QWEN = dict(hidden_size=64, linear_value_head_dim=16)
QWEN_EXPERTS = QWEN | dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN_EXPERTS | dict(intermediate_size=64),
    "qwen3_5": QWEN | dict(intermediate_size=64),
    "qwen3_5_moe": QWEN_EXPERTS,
    "kimi_linear": dict(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        linear_attn_config=dict(
            head_dim=16, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3, 5]
        ),
    ),
    "olmo_hybrid": dict(hidden_size=64, intermediate_size=64, linear_value_head_dim=16),
    "mamba2": dict(hidden_size=64, num_heads=8, n_groups=2),
    "granitemoehybrid": dict(
        hidden_size=64, intermediate_size=32, shared_intermediate_size=32, mamba_n_heads=8, mamba_n_groups=2
    ),
    "bamba": dict(hidden_size=64, intermediate_size=64, mamba_n_heads=8, mamba_n_groups=2),
    "nemotron_h": dict(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
    ),
    "bailing_hybrid": dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16),
}
"""Sizes of the tiny models of families.py that are multiples of 32."""


def sizes(pattern: str, **changes: Any) -> HybridConfig:
    """Return a tiny configuration with a layer for each letter."""
    return replace(preset("tiny", pattern, vocab_size=VOCAB), n_layers=len(pattern), **changes)


@torch.no_grad()
def realistic(config: HybridConfig, seed: int = 0) -> HybridLM:
    """Return a model in float32 whose numbers have the sizes that trained ones have."""
    torch.manual_seed(seed)
    model = HybridLM(config).eval()
    for name, x in model.named_parameters():
        if "norm" in name:
            x.add_(0.2 * torch.randn_like(x))
        elif name == "embed.weight":
            x.normal_(0, 1)
        elif x.dim() >= 2 and name.endswith(("proj.weight", "experts_gate_up", "experts_down", "head.weight")):
            x.normal_(0, 0.5 * x.shape[-1] ** -0.5)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def relative(made: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of what was wanted."""
    return float((made.double() - wanted.double()).norm() / wanted.double().norm())
