"""Granite 4: Mamba-2 and attention, dense or with experts and a shared one, and constant multipliers."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import AttentionConfig, ExpertsConfig, FeedConfig, HybridConfig
from lineate.models.families.builder import PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.mamba_parts import expanded_mamba, take_mamba
from lineate.models.families.values import Values, shortest
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan

LETTERS = {"mamba": "S", "linear_attention": "S", "attention": "A", "full_attention": "A"}


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json."""
    v = Values("granitemoehybrid", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    n_layers, hidden = v.layers(), v.number("hidden_size")
    eps = v.number("rms_norm_eps", default=1e-6, kind=float)
    name = "layer_types" if v.get("layer_types") is not None else "layers_block_type"
    kinds = v.words(name) or ["mamba"] * n_layers
    if unknown := sorted(set(kinds) - LETTERS.keys()):
        raise v.error(f"must have {name} of {', '.join(LETTERS)}, got {show(unknown[0])}")
    letters = "".join(LETTERS[kind] for kind in kinds)
    count = v.number("num_local_experts", default=0, least=0)
    shared = v.number("shared_intermediate_size")
    experts = None
    if count:
        active, size = v.number("num_experts_per_tok"), v.number("intermediate_size")
        experts = ExpertsConfig(count, active, size, shared_size=shared)
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        pattern=shortest(letters),
        mamba=expanded_mamba(v, hidden, eps) if "S" in letters else None,
        attention=_attention(v, hidden) if "A" in letters else None,
        feed=None if count else FeedConfig(shared),
        experts=experts,
        norm_eps=eps,
        embedding_scale=v.number("embedding_multiplier", default=1.0, kind=float),
        residual_scale=v.number("residual_multiplier", default=1.0, kind=float),
        logit_scale=1 / _divisor(v),
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="granitemoehybrid",
    )


def _divisor(v: Values) -> float:
    found = float(v.number("logits_scaling", default=1.0, kind=float))
    if not found > 0:
        raise v.error(f"must have logits_scaling above 0, got {found}")
    return found


def _attention(v: Values, hidden: int) -> AttentionConfig:
    heads = v.number("num_attention_heads")
    positions = v.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise v.error(f"must have position_embedding_type 'rope', 'nope' or null, got {show(positions)}")
    rotary_dim, theta = v.rope(hidden // heads, 1.0) if positions == "rope" else (0, 10000.0)
    return AttentionConfig(
        heads=heads,
        kv_heads=v.number("num_key_value_heads", default=heads),
        head_dim=hidden // heads,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        gated=False,
        qk_norm=None,
        bias=v.flag("attention_bias", default=False),
        scale=v.number("attention_multiplier", default=1.0, kind=float),
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.norms(i, f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight")
        if config.letters[i] == "A":
            builder.attention(i, f"{source}.self_attn")
        else:
            take_mamba(builder, i, f"{source}.mamba")
        _feed(builder, i, source)
    return builder.plan()


def _feed(builder: PlanBuilder, i: int, source: str) -> None:
    """Take shared_mlp, and the experts under the names of a file or of a model in memory."""
    config, hidden, target, experts = (
        builder.config,
        builder.config.hidden_size,
        f"layers.{i}.feed",
        f"{source}.block_sparse_moe",
    )
    dense, size = target, 0
    if config.experts is None:
        assert config.feed is not None
        size = config.feed.size
    else:
        x = config.experts
        dense, size = f"{target}.shared", x.shared_size
        router = builder.first(f"{experts}.router.layer.weight", f"{experts}.router.weight")
        builder.copy(f"{target}.router.weight", router, (x.count, hidden))
        into = builder.first(f"{experts}.input_linear.weight", f"{experts}.experts.gate_up_proj")
        builder.copy(f"{target}.experts_gate_up", into, (x.count, 2 * x.size, hidden))
        back = builder.first(f"{experts}.output_linear.weight", f"{experts}.experts.down_proj")
        builder.copy(f"{target}.experts_down", back, (x.count, hidden, x.size))
    builder.copy(f"{dense}.gate_up_proj.weight", f"{source}.shared_mlp.input_linear.weight", (2 * size, hidden))
    builder.copy(f"{dense}.down_proj.weight", f"{source}.shared_mlp.output_linear.weight", (hidden, size))


FAMILY = CheckpointFamily(("granitemoehybrid",), config_from, plan, r"\.shared_mlp\.input_linear\.weight$")
