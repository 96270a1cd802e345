"""Small models of every mixer with a decoding step in C."""

from typing import Any

import torch

from lineate.layers.configs import AttentionConfig, LatentConfig, LinearConfig, MambaConfig, MemoryConfig
from lineate.models import HybridConfig, HybridLM
from lineate.models.config import ExpertsConfig, FeedConfig

VOCAB = 97
LINEAR = {"heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 48}
ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta rule": ("GGGA", {}),
    "norms around one": ("GGGA", {"zero_centred_norm": True}),
    "no convolution": ("GA", {"linear": {"conv_size": 0}}),
    "two taps": ("GA", {"linear": {"conv_size": 2}}),
    "no gates": ("GA", {"linear": {"gate_activation": "none"}, "attention": {"gated": False, "qk_norm": None}}),
    "sigmoid, odd sizes": ("GA", {"linear": {"gate_activation": "sigmoid", "key_dim": 20, "value_dim": 7}}),
    "beta to 2, bounded decay": ("GA", {"linear": {"beta_scale": 2.0, "gate_lower_bound": -5.0}}),
    "biases": ("GA", {"attention": {"bias": True, "scale": 0.3}}),
    "Kimi": ("KKKA", {}),
    "Kimi, full rank": ("KA", {"linear": {"decay_rank": 0, "gate_rank": 0}}),
    "Kimi, bounded decay": ("KA", {"linear": {"gate_lower_bound": -5.0, "gate_bias": True}}),
    "delta rule": ("DDA", {}),
    "delta rule, beta to 2, odd sizes": ("DA", {"linear": {"beta_scale": 2.0, "key_dim": 20, "value_dim": 7}}),
    "delta rule, no convolution, no gate": ("DA", {"linear": {"conv_size": 0, "gate_activation": "none"}}),
    "gated linear": ("RRA", {}),
    "gated linear, odd sizes": ("RA", {"linear": {"key_dim": 20, "value_dim": 70, "decay_rank": 5}}),
    "linear": ("LLA", {}),
    "linear, odd sizes": ("LA", {"linear": {"key_dim": 20, "value_dim": 7, "gate_activation": "sigmoid"}}),
    "linear, values of 127": ("LA", {"linear": {"value_dim": 127, "conv_size": 0}}),
    "linear, no feature map": ("LA", {"linear": {"feature_map": "identity"}}),
    "Mamba-2": ("SSA", {}),
    "Mamba-2, groups": ("SSA", {"mamba": {"groups": 2, "norm_groups": 4}}),
    "Mamba-2, gate last": ("SA", {"mamba": {"gate_first": False, "bias": True, "conv_bias": False}}),
    "Mamba-2, bounded steps": ("SA", {"mamba": {"step_least": 0.02, "step_most": 0.05}}),
    "Mamba-2, odd sizes": ("SA", {"mamba": {"head_dim": 10, "state_dim": 33, "conv_size": 3}}),
    "Mamba-2, no feed-forward": ("SSS", {"mixer_only": (0, 2)}),
    "Gated DeltaNet-2": ("JJA", {}),
    "Gated DeltaNet-2, odd sizes": ("JA", {"linear": {"key_dim": 20, "value_dim": 7, "beta_scale": 2.0}}),
    "Gated DeltaNet-2, full rank": ("JA", {"linear": {"decay_rank": 0, "gate_rank": 0, "gate_lower_bound": -5.0}}),
    "Gated DeltaProduct": ("UUA", {}),
    "Gated DeltaProduct, odd sizes": ("UA", {"linear": {"writes": 3, "key_dim": 20, "value_dim": 7}}),
    "Gated DeltaProduct, group norm": ("UA", {"linear": {"writes": 3, "group_norm": True, "beta_scale": 2.0}}),
    "Gated DeltaProduct, one write": ("UA", {"linear": {"writes": 1, "gate_activation": "none"}}),
    "all": ("GDKLRSJUA", {}),
    "between other mixers": ("GEKA", {}),
    "experts": ("GA", {"experts": ExpertsConfig(count=4, active=2, size=32)}),
    "latent attention": ("KM", {}),
}


def make(name: str) -> HybridLM:
    pattern, changes = MODELS[name]
    torch.manual_seed(0)
    linear = LinearConfig(**{**LINEAR, **changes.get("linear", {})})
    attention = AttentionConfig(**{**ATTENTION, **changes.get("attention", {})})
    mamba = MambaConfig(**{"heads": 6, "head_dim": 16, "state_dim": 32, **changes.get("mamba", {})})
    latent = LatentConfig(heads=2, rank=32, nope_dim=16, value_dim=16, rope_dim=8) if "M" in pattern else None
    model = HybridLM(
        HybridConfig(
            vocab_size=VOCAB, hidden_size=64, n_layers=len(pattern), pattern=pattern, linear=linear,
            attention=attention if "A" in pattern else None, latent=latent, feed=FeedConfig(size=96),
            mamba=mamba if "S" in pattern else None, memory=MemoryConfig(2, 16) if "E" in pattern else None,
            mixer_only=changes.get("mixer_only", ()),
            experts=changes.get("experts"), zero_centred_norm=changes.get("zero_centred_norm", False),
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(3) if x.dim() > 1 else x.add_(0.1 * torch.randn_like(x))
    return model
