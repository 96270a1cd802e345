"""Kimi Linear: Kimi Delta Attention and latent attention without positions, mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import ExpertsConfig, HybridConfig, LatentConfig, LinearConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values, shortest
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan

EXPERT_NAMES = [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")]


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json, as released or as transformers writes it."""
    v = Values("kimi_linear", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    v.must_be("q_lora_rank", None, "low-rank queries are not supported")
    v.must_be("attention_bias", False, "biases are not supported")
    v.must_be("mla_use_nope", True, "its latent attention has no positions")
    v.must_be("moe_router_activation_func", "sigmoid", "no other scores are supported")
    v.must_be("moe_layer_freq", 1, "experts in some layers only are given by first_k_dense_replace")
    heads, n_layers = v.number("num_attention_heads"), v.layers()
    if (narrow := v.number("num_key_value_heads", default=heads)) != heads:
        raise v.error(f"must have num_key_value_heads = num_attention_heads = {heads}, got {narrow}")
    eps = v.number("rms_norm_eps", default=1e-5, kind=float)
    letters, dense = _letters(v, n_layers), dense_layers(v, n_layers)
    experts = sigmoid_experts(v, scale=2.446) if len(dense) < n_layers else None
    latent = None
    if "M" in letters:
        latent = LatentConfig(
            heads=heads,
            rank=v.number("kv_lora_rank"),
            nope_dim=v.number("qk_nope_head_dim", least=0),
            rope_dim=v.number("qk_rope_head_dim", least=0),
            value_dim=v.number("v_head_dim"),
            norm_eps=1e-6,  # kv_a_layernorm always has this epsilon, independently of rms_norm_eps
        )
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=v.number("hidden_size"),
        n_layers=n_layers,
        pattern=shortest(letters),
        linear=_linear(v, eps),
        latent=latent,
        feed=v.feed(bool(dense)),
        experts=experts,
        dense_layers=() if experts is None else dense,
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("model_max_length", "max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="kimi_linear",
    )


def _linear(v: Values, eps: float) -> LinearConfig:
    part = v.mapping("linear_attn_config")
    nested = Values("kimi_linear", {**v.values, **{f"linear_attn_config.{key}": value for key, value in part.items()}})
    heads = nested.number("linear_attn_config.num_heads", "linear_num_heads")
    dim = nested.number("linear_attn_config.head_dim", "linear_head_dim")
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_size=nested.number(
            "linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim", default=4, least=0
        ),
        decay_rank=dim,
        gate_rank=dim,
        norm_eps=eps,
        gate_activation="sigmoid",
    )


def _letters(v: Values, n_layers: int) -> str:
    """Return one letter a layer; full_attn_layers counts from 1."""
    if v.get("layer_types") is not None:
        return v.layer_letters("K", "M")
    part = Values("kimi_linear", v.mapping("linear_attn_config"))
    if part.get("full_attn_layers") is None:
        raise v.error("must have layer_types, or full_attn_layers in linear_attn_config, got neither")
    full = set(part.numbers("full_attn_layers"))
    linear = part.numbers("kda_layers")
    if part.get("kda_layers") is None:
        linear = [i for i in range(1, n_layers + 1) if i not in full]
    if sorted([*part.numbers("full_attn_layers"), *linear]) != list(range(1, n_layers + 1)):
        raise v.error(
            f"must have every layer 1 .. {n_layers} once in full_attn_layers and kda_layers, got "
            f"{show(part.get('full_attn_layers'))} and {show(linear)}"
        )
    return "".join("M" if i + 1 in full else "K" for i in range(n_layers))


def sigmoid_experts(v: Values, scale: float) -> ExpertsConfig:
    """Return the sizes of experts with sigmoid scores, a bias for the choice, and shared experts.

    scale: the default multiplier of their outputs, as in transformers.
    """
    size = v.number("moe_intermediate_size")
    return ExpertsConfig(
        count=v.number("num_experts", "num_local_experts"),
        active=v.number("num_experts_per_token", "num_experts_per_tok"),
        size=size,
        shared_size=size * v.number("num_shared_experts", "n_shared_experts", default=1, least=0),
        scores="sigmoid",
        renormalize=v.flag("moe_renormalize", "norm_topk_prob", default=True),
        scale=v.number("routed_scaling_factor", default=scale, kind=float),
        groups=v.number("num_expert_group", "n_group", default=1),
        active_groups=v.number("topk_group", default=1),
    )


def dense_layers(v: Values, n_layers: int) -> tuple[int, ...]:
    """Return the layers with a dense feed-forward, from mlp_layer_types or from first_k_dense_replace."""
    kinds = v.words("mlp_layer_types")
    if not v.number("num_experts", "num_local_experts", default=0, least=0):
        return tuple(range(n_layers))
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(min(n_layers, v.number("first_k_dense_replace", default=1, least=0))))


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.norms(i, f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight")
        if config.letters[i] == "K":
            _delta(builder, i, f"{source}.self_attn")
        else:
            _latent(builder, i, f"{source}.self_attn")
        take_feed(builder, i, source)
    return builder.plan()


def _delta(builder: PlanBuilder, i: int, source: str) -> None:
    linear, hidden, target = builder.config.linear, builder.config.hidden_size, f"layers.{i}.mixer"
    assert linear is not None and linear.decay_rank and linear.gate_rank
    inside = f"{source}.forget_gate"
    gates = inside if f"{inside}.A_log" in builder.shapes else source
    keys, values, hv = linear.heads * linear.key_dim, linear.value_heads * linear.value_dim, linear.value_heads
    parts = [
        Part(f"{source}.q_proj.weight", (keys, hidden)),
        Part(f"{source}.k_proj.weight", (keys, hidden)),
        Part(f"{source}.v_proj.weight", (values, hidden)),
        Part(f"{gates}.f_a_proj.weight", (linear.decay_rank, hidden)),
        Part(f"{source}.g_a_proj.weight", (linear.gate_rank, hidden)),
        Part(f"{source}.b_proj.weight", (hv, hidden)),
    ]
    builder.stack(f"{target}.in_proj.weight", parts)
    builder.copy(f"{target}.decay_proj.weight", f"{gates}.f_b_proj.weight", (hv * linear.key_dim, linear.decay_rank))
    builder.copy(f"{target}.gate_proj.weight", f"{source}.g_b_proj.weight", (values, linear.gate_rank))
    builder.convolution(i, source)
    builder.delta(i, source, gates, "o_norm", "o_proj")


def _latent(builder: PlanBuilder, i: int, source: str) -> None:
    latent, hidden, target = builder.config.latent, builder.config.hidden_size, f"layers.{i}.mixer"
    assert latent is not None
    heads, rank = latent.heads, latent.rank
    parts = [
        Part(f"{source}.q_proj.weight", (heads * (latent.nope_dim + latent.rope_dim), hidden)),
        Part(f"{source}.kv_a_proj_with_mqa.weight", (rank + latent.rope_dim, hidden)),
    ]
    builder.stack(f"{target}.in_proj.weight", parts)
    builder.copy(f"{target}.latent_norm.weight", f"{source}.kv_a_layernorm.weight", (rank,))
    up = (heads * (latent.nope_dim + latent.value_dim), rank)
    builder.copy(f"{target}.up_proj.weight", f"{source}.kv_b_proj.weight", up)
    builder.copy(f"{target}.out_proj.weight", f"{source}.o_proj.weight", (hidden, heads * latent.value_dim))


def take_feed(builder: PlanBuilder, i: int, source: str) -> None:
    """Take the feed-forward, under mlp or block_sparse_moe; dense layers too."""
    config, target = builder.config, f"layers.{i}.feed"
    if not config.has_experts(i):
        assert config.feed is not None
        names = [f"{source}.{part}" for part in ("mlp", "block_sparse_moe")]
        there = next((name for name in names if f"{name}.gate_proj.weight" in builder.shapes), names[0])
        builder.dense(target, there, config.feed.size)
        return
    experts = config.experts
    assert experts is not None
    names = [f"{source}.{part}" for part in ("block_sparse_moe", "mlp")]
    there = next((name for name in names if f"{name}.gate.weight" in builder.shapes), names[0])
    builder.copy(f"{target}.router.weight", f"{there}.gate.weight", (experts.count, config.hidden_size))
    bias = builder.first(f"{there}.gate.e_score_correction_bias", f"{there}.gate.expert_bias")
    builder.copy(f"{target}.router_bias", bias, (experts.count,))
    builder.experts(i, there, EXPERT_NAMES)
    if experts.shared_size:
        builder.dense(f"{target}.shared", f"{there}.shared_experts", experts.shared_size)


FAMILY = CheckpointFamily(("kimi_linear",), config_from, plan, r"\.self_attn\.(forget_gate\.)?f_a_proj\.weight$")
