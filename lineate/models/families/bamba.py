"""Bamba: Mamba-2, attention with positions on half of a head's channels, dense feed-forwards."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import HybridConfig
from lineate.models.families.builder import PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.mamba_parts import expanded_mamba, take_mamba
from lineate.models.families.values import Values, shortest
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json."""
    v = Values("bamba", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    v.must_be("mlp_bias", False, "biases of feed-forwards are not supported")
    n_layers, hidden = v.layers(), v.number("hidden_size")
    eps = v.number("rms_norm_eps", default=1e-5, kind=float)
    full = set(v.numbers("attn_layer_indices"))
    if not all(0 <= i < n_layers for i in full):
        raise v.error(f"must have attn_layer_indices in 0 .. {n_layers - 1}, got {show(sorted(full))}")
    letters = "".join("A" if i in full else "S" for i in range(n_layers))
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        pattern=shortest(letters),
        mamba=expanded_mamba(v, hidden, eps) if "S" in letters else None,
        attention=v.attention(0.5, gated=False, qk_norm=None) if "A" in letters else None,
        feed=v.feed(True),
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="bamba",
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    assert config.feed is not None
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.norms(i, f"{source}.input_layernorm.weight", f"{source}.pre_ff_layernorm.weight")
        if config.letters[i] == "A":
            builder.attention(i, f"{source}.self_attn")
        else:
            take_mamba(builder, i, f"{source}.mamba")
        builder.dense(f"layers.{i}.feed", f"{source}.feed_forward", config.feed.size)
    return builder.plan()


FAMILY = CheckpointFamily(("bamba",), config_from, plan, r"\.feed_forward\.up_proj\.weight$")
