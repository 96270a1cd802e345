"""Models that flash-linear-attention saved: gated_deltanet, kda, delta_net and gla, with or without attention layers.

Its blocks have attn_norm, attn, mlp_norm and mlp; all four rules and its attention have q_proj, k_proj, v_proj, o_proj.
"""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import AttentionConfig, FeedConfig, HybridConfig, LinearConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values, shortest
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan

LETTERS = {"gated_deltanet": "G", "kda": "K", "delta_net": "D", "gla": "R"}
GLA_RANK, FEED_MULTIPLE = 16, 256
"""Values of its layers that its config.json does not name."""


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json; options that are absent have the values of flash-linear-attention's classes."""
    kind = str(values.get("model_type"))
    v = Values(kind, values)
    v.must_be("hidden_act", "swish", "no other activation is supported")
    v.must_be("attnres_block_size", None, "attention over residuals is not supported")
    hidden, n_layers = v.number("hidden_size"), v.layers()
    eps = v.number("norm_eps", default=1e-6, kind=float)
    attention, layers = _attention(v, hidden, n_layers)
    letters = "".join("A" if i in layers else LETTERS[kind] for i in range(n_layers))
    linear = {"gated_deltanet": _headed, "kda": _headed, "delta_net": _expanded, "gla": _expanded}[kind](v, hidden, eps)
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        pattern=shortest(letters),
        linear=linear,
        attention=attention,
        feed=FeedConfig(_feed_size(v, hidden)),
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family=kind,
    )


def _attention(v: Values, hidden: int, n_layers: int) -> tuple[AttentionConfig | None, frozenset[int]]:
    """Return the sizes of softmax attention, and the layers that have it."""
    if v.get("attn") is None:
        return None, frozenset()
    part = v.part("attn")
    part.must_be("qkv_bias", False, "biases of attention are not supported")
    part.must_be("window_size", None, "attention to a window is not supported")
    layers = part.numbers("layers")
    if not layers or not all(0 <= i < n_layers for i in layers):
        raise part.error(f"must have layers in 0 .. {n_layers - 1}, got {show(layers)}")
    heads = part.number("num_heads")
    dim = hidden // heads
    theta = part.number("rope_theta", default=10000.0, kind=float)
    kv = part.number("num_kv_heads", default=heads)
    attention = AttentionConfig(heads, kv, dim, rotary_dim=dim, rope_theta=theta, gated=False, qk_norm=None)
    return attention, frozenset(layers)


def _feed_size(v: Values, hidden: int) -> int:
    ratio = v.number("hidden_ratio", default=4, kind=float)
    size = int(hidden * ratio * 2 / 3)
    return int(v.number("intermediate_size", default=-(-size // FEED_MULTIPLE) * FEED_MULTIPLE))


def _convolution(v: Values, needed: bool) -> int:
    """Return the tokens that the short convolution sees; without one, only GLA has no activation in its place."""
    used = v.flag("use_short_conv", default=needed)
    if needed and not used:
        raise v.error(
            "must have use_short_conv = true, got false; an activation without a convolution is not supported"
        )
    return int(v.number("conv_size", default=4)) if used else 0


def _headed(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of gated_deltanet and kda, which name the channels of a head."""
    kda = v.family == "kda"
    heads, dim = v.number("num_heads"), v.number("head_dim")
    value_dim = _whole(v, dim, "expand_v", 1.0 if kda else 2.0)
    bound = None
    if kda:
        bound = v.number("lower_bound", default=None, kind=float)
        if v.flag("safe_gate", default=False) != (bound is not None):
            raise v.error(f"must have a lower_bound with safe_gate alone, got lower_bound {show(bound)}")
    return LinearConfig(
        heads=heads,
        value_heads=v.number("num_v_heads", default=heads),
        key_dim=dim,
        value_dim=value_dim,
        conv_size=_convolution(v, True),
        gate_bias=kda,
        beta_scale=2.0 if v.flag("allow_neg_eigval", default=False) else 1.0,
        gate_lower_bound=bound,
        norm_eps=eps,
        gate_activation="sigmoid" if kda else "silu" if v.flag("use_gate", default=True) else "none",
    )


def _expanded(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of delta_net and gla, which name the channels of all heads."""
    gla = v.family == "gla"
    if gla:
        v.must_be("feature_map", None, "feature maps are not supported")
        v.must_be("clamp_min", None, "a bound of the decay is not supported")
        v.must_be("elementwise_affine", True, "a norm without weights is not supported")
    else:
        v.must_be("use_beta", True, "a rate of 1 for all tokens is not supported")
        v.must_be("qk_activation", "silu", "no other activation is supported")
        v.must_be("qk_norm", "l2", "no other norm of q and k is supported")
    heads = v.number("num_heads")
    if (narrow := v.number("num_kv_heads", default=heads)) != heads:
        raise v.error(
            f"must have num_kv_heads = num_heads = {heads}, got {narrow}; keys shared by queries are not supported"
        )
    keys, values = _whole(v, hidden, "expand_k", 0.5 if gla else 1.0), _whole(v, hidden, "expand_v", 1.0)
    if keys % heads or values % heads:
        raise v.error(f"must have num_heads that divides {keys} and {values} channels, got {heads}")
    gated = v.flag("use_output_gate", default=True) if gla else v.flag("use_gate", default=False)
    negative = not gla and v.flag("allow_neg_eigval", default=False)
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=keys // heads,
        value_dim=values // heads,
        conv_size=_convolution(v, not gla),
        decay_rank=GLA_RANK if gla else None,
        beta_scale=2.0 if negative else 1.0,
        norm_eps=eps,
        gate_activation="silu" if gated else "none",
    )


def _whole(v: Values, channels: int, name: str, usual: float) -> int:
    """Return `channels` times a factor; the product must be whole."""
    factor = v.number(name, default=usual, kind=float)
    if not factor > 0 or int(channels * factor) != channels * factor:
        raise v.error(f"must have {name} above 0 that makes whole channels of {channels}, got {factor}")
    return int(channels * factor)


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends("embeddings")
    assert config.feed is not None
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.norms(i, f"{source}.attn_norm.weight", f"{source}.mlp_norm.weight")
        if config.letters[i] == "A":
            builder.attention(i, f"{source}.attn")
        else:
            _take_rule(builder, i, f"{source}.attn")
        builder.dense(f"layers.{i}.feed", f"{source}.mlp", config.feed.size)
    return builder.plan()


def _take_rule(builder: PlanBuilder, i: int, source: str) -> None:
    config, target = builder.config, f"layers.{i}.mixer"
    x, hidden, letter = config.linear, config.hidden_size, config.letters[i]
    assert x is not None
    keys, values, hv = x.heads * x.key_dim, x.value_heads * x.value_dim, x.value_heads
    rows = {"q_proj": keys, "k_proj": keys, "v_proj": values}
    if letter == "R":
        rows["gk_proj.0"] = GLA_RANK
    if letter == "K":
        rows |= {"f_proj.0": x.value_dim, "g_proj.0": x.value_dim}
    elif x.gate_activation != "none":
        rows["g_proj"] = values
    rows |= {"D": {"b_proj": hv}, "G": {"b_proj": hv, "a_proj": hv}, "K": {"b_proj": hv}, "R": {}}[letter]
    parts = [Part(f"{source}.{name}.weight", (count, hidden)) for name, count in rows.items()]
    builder.stack(f"{target}.in_proj.weight", parts)
    if x.conv_size:
        builder.convolution(i, source)
    if letter == "R":
        builder.copy(f"{target}.decay_proj.weight", f"{source}.gk_proj.1.weight", (hv * x.key_dim, GLA_RANK))
        builder.copy(f"{target}.decay_proj.bias", f"{source}.gk_proj.1.bias", (hv * x.key_dim,))
    if letter == "K":
        builder.copy(f"{target}.decay_proj.weight", f"{source}.f_proj.1.weight", (hv * x.key_dim, x.value_dim))
        builder.copy(f"{target}.gate_proj.weight", f"{source}.g_proj.1.weight", (values, x.value_dim))
        builder.copy(f"{target}.gate_proj.bias", f"{source}.g_proj.1.bias", (values,))
    if letter in "GK":
        builder.delta(i, source, source, "o_norm", "o_proj")
        return
    norm = builder.first(*(f"{source}.{name}.weight" for name in ("o_norm", "g_norm_swish_gate", "g_norm")))
    builder.copy(f"{target}.norm.weight", norm, (x.value_dim,))
    builder.copy(f"{target}.out_proj.weight", f"{source}.o_proj.weight", (hidden, values))


FAMILY = CheckpointFamily(tuple(LETTERS), config_from, plan, r"\.attn\.(b_proj|gk_proj\.1)\.weight$")
