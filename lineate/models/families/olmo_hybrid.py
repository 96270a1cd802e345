"""OLMo-Hybrid: Gated DeltaNet with beta up to 2, attention that is normalised after it, dense feed-forward."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import HybridConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values, shortest
from lineate.models.files.loading import LoadingPlan


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json."""
    v = Values("olmo_hybrid", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    heads, hidden = v.number("num_attention_heads"), v.number("hidden_size")
    key_heads = v.number("linear_num_key_heads", default=heads)
    key_dim = v.number("linear_key_head_dim", default=int(0.75 * hidden / key_heads))
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": v.number("linear_num_value_heads", default=heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": v.number("linear_value_head_dim", default=2 * key_dim),
    }
    v.values = values | sizes
    letters = v.layer_letters("G", "A")
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=v.layers(),
        pattern=shortest(letters),
        linear=v.grouped_linear(1e-5, beta_scale=2.0 if v.flag("linear_allow_neg_eigval", default=True) else 1.0),
        attention=v.attention(1.0, gated=False, qk_norm="full"),
        feed=v.feed(True),
        norm_eps=v.number("rms_norm_eps", default=1e-6, kind=float),
        norm_after="A",
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="olmo_hybrid",
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    linear, hidden = config.linear, config.hidden_size
    assert linear is not None and config.feed is not None
    keys, values, hv = linear.heads * linear.key_dim, linear.value_heads * linear.value_dim, linear.value_heads
    rows = {"q": keys, "k": keys, "v": values, "g": values, "b": hv, "a": hv}
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.dense(f"layers.{i}.feed", f"{source}.mlp", config.feed.size)
        after = builder.first(f"{source}.post_attention_layernorm.weight", f"{source}.feedforward_layer_norm.weight")
        if config.letters[i] == "A":
            builder.attention(i, f"{source}.self_attn")
            builder.norms(i, after, f"{source}.post_feedforward_layernorm.weight")
            continue
        before = builder.first(f"{source}.input_layernorm.weight", f"{source}.attention_layer_norm.weight")
        builder.norms(i, before, after)
        own = f"{source}.linear_attn"
        parts = [Part(f"{own}.{name}_proj.weight", (count, hidden)) for name, count in rows.items()]
        builder.stack(f"layers.{i}.mixer.in_proj.weight", parts)
        builder.convolution(i, own)
        builder.delta(i, own, own, "o_norm", "o_proj")
    return builder.plan()


FAMILY = CheckpointFamily(("olmo_hybrid",), config_from, plan, r"\.linear_attn\.g_proj\.weight$")
