"""Bailing-Hybrid (Ling 3): KDA with a bounded decay and gates of full rank, gated latent attention, experts.

A file has `attention` where transformers' model has `self_attn`, `dense` for `o_proj`, `word_embeddings` for
`embed_tokens` and `expert_bias` for `e_score_correction_bias`; both are read. Its rotary channels are pairs of
neighbours; ours are the first of all pairs, then the second.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate.models.config import HybridConfig, LatentConfig, LinearConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.kimi_linear import dense_layers, sigmoid_experts, take_feed
from lineate.models.families.values import Values, shortest
from lineate.models.files.filling import Reordered
from lineate.models.files.loading import LoadingPlan, Piece


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json, as released or as transformers writes it."""
    v = Values("bailing_hybrid", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    v.must_be("q_lora_rank", None, "low-rank queries are not supported")
    v.must_be("attention_bias", False, "biases are not supported")
    heads, n_layers = v.number("num_attention_heads"), v.layers()
    if (narrow := v.number("num_key_value_heads", default=heads)) != heads:
        raise v.error(f"must have num_key_value_heads = num_attention_heads = {heads}, got {narrow}")
    eps = v.number("rms_norm_eps", default=1e-6, kind=float)
    letters, dense = _letters(v, n_layers), dense_layers(v, n_layers)
    experts = sigmoid_experts(v, scale=2.5) if len(dense) < n_layers else None
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=v.number("hidden_size"),
        n_layers=n_layers,
        pattern=shortest(letters),
        linear=_linear(v, heads, eps) if "K" in letters else None,
        latent=_latent(v, heads) if "M" in letters else None,
        feed=v.feed(bool(dense)),
        experts=experts,
        dense_layers=() if experts is None else dense,
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("model_max_length", "max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="bailing_hybrid",
    )


def _letters(v: Values, n_layers: int) -> str:
    """Return one letter a layer, from layer_types or layer_group_size: the last of each group is latent attention."""
    if v.get("layer_types") is not None:
        return v.layer_letters("K", "M")
    size = v.number("layer_group_size", default=6)
    return "".join("K" if (i + 1) % size else "M" for i in range(n_layers))


def _linear(v: Values, heads: int, eps: float) -> LinearConfig:
    bounded = v.flag("kda_safe_gate", default=True)
    heads, dim = v.number("linear_num_heads", default=heads), v.number("linear_head_dim", "head_dim")
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_size=v.number("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        decay_rank=0,
        gate_rank=0,
        norm_eps=eps,
        gate_activation="sigmoid",
        gate_lower_bound=v.number("kda_lower_bound", default=-5.0, kind=float) if bounded else None,
    )


def _latent(v: Values, heads: int) -> LatentConfig:
    rope_dim = v.number("qk_rope_head_dim")
    turned, theta = Values(v.family, {"rope_theta": 6e6, **v.values}).rope(rope_dim, 1.0)
    if turned != rope_dim:
        raise v.error(f"must rotate all qk_rope_head_dim = {rope_dim} channels, got {turned}")
    return LatentConfig(
        heads=heads,
        rank=v.number("kv_lora_rank"),
        nope_dim=v.number("qk_nope_head_dim", least=0),
        rope_dim=rope_dim,
        value_dim=v.number("v_head_dim"),
        rope_theta=theta,
        norm_eps=1e-6,  # kv_a_layernorm always has this epsilon, independently of rms_norm_eps
        gate="head",
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from; layers after the last predict further tokens."""
    builder = PlanBuilder(config, shapes)
    builder.ends("word_embeddings")
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.norms(i, f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight")
        inside = "self_attn" if f"{source}.self_attn.q_proj.weight" in shapes else "attention"
        if config.letters[i] == "K":
            _take_delta(builder, i, f"{source}.{inside}")
        else:
            _take_latent(builder, i, f"{source}.{inside}")
        take_feed(builder, i, source)
    further = rf"^{re.escape(builder.prefix)}layers\.{config.n_layers}\."
    made = builder.plan()
    return LoadingPlan(made.pieces, (*made.ignored, further), made.equal)


def _take_delta(builder: PlanBuilder, i: int, source: str) -> None:
    linear, hidden = builder.config.linear, builder.config.hidden_size
    assert linear is not None
    inside = f"{source}.forget_gate"
    gates = inside if f"{inside}.A_log" in builder.shapes else source
    keys, hv = linear.heads * linear.key_dim, linear.value_heads
    names = {f"{source}.q_proj": keys, f"{source}.k_proj": keys, f"{source}.v_proj": keys}
    names |= {f"{gates}.f_proj": keys, f"{source}.g_proj": keys, f"{source}.b_proj": hv}
    parts = [Part(f"{name}.weight", (rows, hidden)) for name, rows in names.items()]
    builder.stack(f"layers.{i}.mixer.in_proj.weight", parts)
    builder.convolution(i, source)
    builder.delta(i, source, gates, "o_norm", _output(builder, source))


def _output(builder: PlanBuilder, source: str) -> str:
    return "o_proj" if f"{source}.o_proj.weight" in builder.shapes else "dense"


def _take_latent(builder: PlanBuilder, i: int, source: str) -> None:
    latent, hidden, target = builder.config.latent, builder.config.hidden_size, f"layers.{i}.mixer"
    assert latent is not None
    heads, rank, nope, rope = latent.heads, latent.rank, latent.nope_dim, latent.rope_dim
    pieces, row = [], 0
    for name, groups, still in (("q_proj", heads, nope), ("kv_a_proj_with_mqa", 1, rank)):
        rows = groups * (still + rope)
        take = Reordered(partial(_halves, groups=groups, still=still))
        pieces.append(Piece(f"{source}.{name}.weight", (rows, hidden), (slice(row, row + rows),), take=take))
        row += rows
    pieces.append(Piece(f"{source}.g_proj.weight", (heads, hidden), (slice(row, row + heads),)))
    builder.pieces[f"{target}.in_proj.weight"] = pieces
    builder.copy(f"{target}.latent_norm.weight", f"{source}.kv_a_layernorm.weight", (rank,))
    builder.copy(f"{target}.up_proj.weight", f"{source}.kv_b_proj.weight", (heads * (nope + latent.value_dim), rank))
    out = f"{source}.{_output(builder, source)}.weight"
    builder.copy(f"{target}.out_proj.weight", out, (hidden, heads * latent.value_dim))


def _halves(weight: Tensor, groups: int, still: int) -> Tensor:
    """Return the rows with the rotated ones, after `still` others of each group, as first and second halves."""
    rows = weight.unflatten(0, (groups, -1))
    kept, turned = rows[:, :still], rows[:, still:]
    return torch.cat((kept, turned[:, ::2], turned[:, 1::2]), 1).flatten(0, 1)


FAMILY = CheckpointFamily(
    ("bailing_hybrid",), config_from, plan, r"\.(attention|self_attn\.forget_gate)\.f_proj\.weight$"
)
