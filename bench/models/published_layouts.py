"""Checkpoints with the names, shapes and dtypes of published ones, some of their layers, and random numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.models import HybridConfig, preset
from lineate.models.files.checkpoint import save_streamed
from lineate.models.files.safetensors import TensorSize

Shapes = dict[str, tuple[int, ...]]
NOISE = 2**26 + 2**11 + 1
"""The numbers that are drawn; a file repeats them at places that no two blocks of a disk share."""


@dataclass(frozen=True)
class Layout:
    """A published checkpoint.

    Args:
        preset: with its sizes.
        values: the config.json of a model with these sizes.
        layer: the tensors of a layer.
        prefix: of their names.
    """

    preset: str
    values: Callable[[HybridConfig], dict[str, Any]]
    layer: Callable[[HybridConfig, int], Shapes]
    prefix: str = "model."

    def config(self, gigabytes: float) -> HybridConfig:
        """Return the sizes of a model of at most this number of gigabytes, and at least one layer with experts."""
        whole = preset(self.preset)
        counts = range(len(whole.dense_layers) + 1, whole.n_layers + 1)
        found = [replace(whole, n_layers=n, pattern=whole.letters[:n]) for n in counts]
        fitting = [config for config in found if self.nbytes(config) <= gigabytes * 1e9]
        return (fitting or found[:1])[-1]

    def nbytes(self, config: HybridConfig) -> int:
        return sum(size.nbytes for size in self.tensors(config).values())

    def tensors(self, config: HybridConfig) -> dict[str, TensorSize]:
        vocab, hidden = config.vocab_size, config.hidden_size
        shapes = {f"{self.prefix}embed_tokens.weight": (vocab, hidden)}
        for i in range(config.n_layers):
            norms = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
            own = {**norms, **self.layer(config, i)}
            shapes |= {f"{self.prefix}layers.{i}.{name}": shape for name, shape in own.items()}
        shapes |= {f"{self.prefix}norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
        exact = ("A_log", "dt_bias", "e_score_correction_bias")
        return {
            name: TensorSize(torch.float32 if name.endswith(exact) else torch.bfloat16, shape)
            for name, shape in shapes.items()
        }

    def write(self, folder: Path, gigabytes: float) -> HybridConfig:
        """Write a checkpoint of about this number of gigabytes and return its sizes."""
        config = self.config(gigabytes)
        tensors, noise = self.tensors(config), torch.randn(NOISE).mul_(0.02).to(torch.bfloat16)
        written = 0

        def make(name: str) -> Tensor:
            nonlocal written
            size = tensors[name]
            if size.dtype == torch.float32:
                return torch.zeros(size.shape)
            made = torch.empty(math.prod(size.shape), dtype=torch.bfloat16)
            done = 0
            while done < made.numel():
                at = (written + done) % NOISE
                count = min(made.numel() - done, NOISE - at)
                made[done : done + count] = noise[at : at + count]
                done += count
            written += done
            return made.view(size.shape)

        save_streamed(folder, tensors, make, self.values(config))
        return config


# ---- Qwen3.5 with experts


def _qwen_values(config: HybridConfig) -> dict[str, Any]:
    linear, attention, experts = config.linear, config.attention, config.experts
    assert linear is not None and attention is not None and experts is not None
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers, "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim, "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps, "max_position_embeddings": config.max_position,
        "linear_num_key_heads": linear.heads, "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim, "linear_value_head_dim": linear.value_dim, "linear_conv_kernel_dim": 4,
        "layer_types": [{"G": "linear_attention", "A": "full_attention"}[letter] for letter in config.letters],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "num_experts": experts.count, "num_experts_per_tok": experts.active, "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared_size, "attn_output_gate": True, "dtype": "bfloat16",
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}


def _qwen_layer(config: HybridConfig, i: int) -> Shapes:
    linear, attention, experts, wide = config.linear, config.attention, config.experts, config.hidden_size
    assert linear is not None and attention is not None and experts is not None
    size, count, shared = experts.size, experts.count, experts.shared_size
    shapes: Shapes = {
        "mlp.gate.weight": (count, wide), "mlp.experts.gate_up_proj": (count, 2 * size, wide),
        "mlp.experts.down_proj": (count, wide, size), "mlp.shared_expert_gate.weight": (1, wide),
        "mlp.shared_expert.gate_proj.weight": (shared, wide), "mlp.shared_expert.up_proj.weight": (shared, wide),
        "mlp.shared_expert.down_proj.weight": (wide, shared),
    }  # fmt: skip
    if config.letters[i] == "A":
        heads, few, dim = attention.heads, attention.kv_heads, attention.head_dim
        names = {
            "q_proj.weight": (2 * heads * dim, wide), "k_proj.weight": (few * dim, wide),
            "v_proj.weight": (few * dim, wide), "o_proj.weight": (wide, heads * dim), "q_norm.weight": (dim,),
            "k_norm.weight": (dim,),
        }  # fmt: skip
        return {f"self_attn.{name}": shape for name, shape in names.items()} | shapes
    keys, hv = linear.heads * linear.key_dim, linear.value_heads
    values = hv * linear.value_dim
    names = {
        "in_proj_qkv.weight": (2 * keys + values, wide), "in_proj_z.weight": (values, wide),
        "in_proj_b.weight": (hv, wide), "in_proj_a.weight": (hv, wide), "A_log": (hv,), "dt_bias": (hv,),
        "conv1d.weight": (2 * keys + values, 1, 4), "norm.weight": (linear.value_dim,),
        "out_proj.weight": (wide, values),
    }  # fmt: skip
    return {f"linear_attn.{name}": shape for name, shape in names.items()} | shapes


# ---- Kimi Linear


def _kimi_values(config: HybridConfig) -> dict[str, Any]:
    linear, latent, experts, feed = config.linear, config.latent, config.experts, config.feed
    assert linear is not None and latent is not None and experts is not None and feed is not None
    layers = [(i + 1, letter) for i, letter in enumerate(config.letters)]
    return {
        "model_type": "kimi_linear", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers, "num_attention_heads": latent.heads, "hidden_act": "silu",
        "num_key_value_heads": latent.heads, "intermediate_size": feed.size, "rms_norm_eps": config.norm_eps,
        "kv_lora_rank": latent.rank, "qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim, "mla_use_nope": True, "num_experts": experts.count,
        "num_experts_per_token": experts.active, "num_shared_experts": experts.shared_size // experts.size,
        "moe_intermediate_size": experts.size, "first_k_dense_replace": len(config.dense_layers), "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": experts.scale,
        "tie_word_embeddings": False, "model_max_length": config.max_position, "dtype": "bfloat16",
        "linear_attn_config": {
            "num_heads": linear.heads, "head_dim": linear.key_dim, "short_conv_kernel_size": 4,
            "kda_layers": [i for i, letter in layers if letter == "K"],
            "full_attn_layers": [i for i, letter in layers if letter == "M"],
        },
    }  # fmt: skip


def _kimi_layer(config: HybridConfig, i: int) -> Shapes:
    linear, latent, experts, feed = config.linear, config.latent, config.experts, config.feed
    assert linear is not None and latent is not None and experts is not None and feed is not None
    wide = config.hidden_size
    if config.letters[i] == "M":
        heads, rank = latent.heads, latent.rank
        names: Shapes = {
            "q_proj.weight": (heads * (latent.nope_dim + latent.rope_dim), wide), "kv_a_layernorm.weight": (rank,),
            "kv_a_proj_with_mqa.weight": (rank + latent.rope_dim, wide),
            "kv_b_proj.weight": (heads * (latent.nope_dim + latent.value_dim), rank),
            "o_proj.weight": (wide, heads * latent.value_dim),
        }  # fmt: skip
    else:
        hv, k = linear.heads, linear.key_dim
        names = {f"{x}_proj.weight": (hv * k, wide) for x in "qkv"} | {
            f"{x}_conv1d.weight": (hv * k, 1, 4) for x in "qkv"
        }
        names |= {
            "A_log": (1, 1, hv, 1), "dt_bias": (hv * k,), "f_a_proj.weight": (k, wide), "f_b_proj.weight": (hv * k, k),
            "g_a_proj.weight": (k, wide), "g_b_proj.weight": (hv * k, k), "b_proj.weight": (hv, wide),
            "o_norm.weight": (k,), "o_proj.weight": (wide, hv * k),
        }  # fmt: skip
    found = {f"self_attn.{name}": shape for name, shape in names.items()}

    def dense(source: str, size: int) -> Shapes:
        names = {"gate_proj": (size, wide), "up_proj": (size, wide), "down_proj": (wide, size)}
        return {f"{source}.{name}.weight": shape for name, shape in names.items()}

    if i in config.dense_layers:
        return found | dense("mlp", feed.size)
    found |= {"block_sparse_moe.gate.weight": (experts.count, wide)}
    found |= {"block_sparse_moe.gate.e_score_correction_bias": (experts.count,)}
    for e in range(experts.count):
        one, size = f"block_sparse_moe.experts.{e}", experts.size
        found |= {f"{one}.w1.weight": (size, wide), f"{one}.w2.weight": (wide, size), f"{one}.w3.weight": (size, wide)}
    return found | dense("block_sparse_moe.shared_experts", experts.shared_size)


LAYOUTS = {
    "qwen3-5-35b-a3b": Layout("qwen3-5-35b-a3b", _qwen_values, _qwen_layer, "model.language_model."),
    "kimi-linear-48b": Layout("kimi-linear-48b", _kimi_values, _kimi_layer),
}
"""The published checkpoints by their presets; the experts of a layer are two tensors, or three for each expert."""
