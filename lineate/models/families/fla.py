"""Models that flash-linear-attention saved, with or without attention layers.

Its blocks have attn_norm, attn, mlp_norm and mlp; its rules and its attention have q_proj, k_proj, v_proj and o_proj,
except HGRN2, which has f_proj and i_proj for k_proj and v_proj.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate.layers.variants.retention import retnet_decays
from lineate.models.config import AttentionConfig, FeedConfig, HybridConfig, LinearConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values, shortest
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan, Piece

LETTERS = {
    "gated_deltanet": "G", "kda": "K", "delta_net": "D", "gla": "R", "hgrn2": "H", "retnet": "O", "linear_attn": "L",
    "gated_deltaproduct": "U", "comba": "Q",
}  # fmt: skip
GLA_RANK, FEED_MULTIPLE, HGRN2_EPS, RETNET_THETA = 16, 256, 1e-5, 10000.0
"""Values of its layers that its config.json does not name; HGRN2's output norm does not read norm_eps."""
FEATURE_MAPS = {
    "identity": "identity", "elu": "elu+1", "relu": "relu", "elementwise_product": "product", "t2r": "t2r",
    "hedgehog": "hedgehog",
}  # fmt: skip


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
    linear = _SIZES[kind](v, hidden, eps)
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
    usual = 2 if v.family == "retnet" and "hidden_ratio" not in v.values else 4  # null is 4 in every class
    ratio = v.number("hidden_ratio", default=usual, kind=float)
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


def _sizes(v: Values, heads: int, dim: int, expand: float, eps: float) -> LinearConfig:
    """Return the sizes of a mixer whose keys have dim channels a head, and whose values have expand_v times as many."""
    return LinearConfig(
        heads=heads,
        value_heads=v.number("num_v_heads", default=heads),
        key_dim=dim,
        value_dim=_whole(v, dim, "expand_v", expand),
        conv_size=_convolution(v, True),
        norm_eps=eps,
    )


def _headed(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of gated_deltanet and kda, which name the channels of a head."""
    kda = v.family == "kda"
    sizes = _sizes(v, v.number("num_heads"), v.number("head_dim"), 1.0 if kda else 2.0, eps)
    bound = None
    if kda:
        bound = v.number("lower_bound", default=None, kind=float)
        if v.flag("safe_gate", default=False) != (bound is not None):
            raise v.error(f"must have a lower_bound with safe_gate alone, got lower_bound {show(bound)}")
    return replace(
        sizes,
        gate_bias=kda,
        beta_scale=2.0 if v.flag("allow_neg_eigval", default=False) else 1.0,
        gate_lower_bound=bound,
        gate_activation="sigmoid" if kda else "silu" if v.flag("use_gate", default=True) else "none",
    )


def _product(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of gated_deltaproduct, which has several keys and values a token."""
    return replace(
        _sizes(v, v.number("num_heads", default=6), v.number("head_dim", default=256), 2.0, eps),
        beta_scale=2.0 if v.flag("allow_neg_eigval", default=False) else 1.0,
        gate_activation="silu" if v.flag("use_output_gate", default=True) else "none",
        writes=v.number("num_householder", default=1),
        forgets=v.flag("use_forget_gate", default=False),
    )


def _comba(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of comba, whose blocks always have the probe's scale and the correction of the query."""
    return replace(
        _sizes(v, v.number("num_heads", default=6), v.number("head_dim", default=256), 2.0, eps),
        gate_activation="sigmoid" if v.flag("use_output_gate", default=True) else "none",
        probe="unit",
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
    heads, keys, values = _heads(v, hidden, v.number("num_heads"), 0.5 if gla else 1.0, 1.0)
    gated = v.flag("use_output_gate", default=True) if gla else v.flag("use_gate", default=False)
    negative = not gla and v.flag("allow_neg_eigval", default=False)
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=keys,
        value_dim=values,
        conv_size=_convolution(v, not gla),
        decay_rank=GLA_RANK if gla else None,
        beta_scale=2.0 if negative else 1.0,
        norm_eps=eps,
        gate_activation="silu" if gated else "none",
    )


def _heads(v: Values, hidden: int, heads: int, expand_k: float, expand_v: float) -> tuple[int, int, int]:
    """Return the heads, and the channels of a key and of a value; the factors are those of an absent key."""
    if (narrow := v.number("num_kv_heads", default=heads)) != heads:
        raise v.error(
            f"must have num_kv_heads = num_heads = {heads}, got {narrow}; keys shared by queries are not supported"
        )
    keys, values = _whole(v, hidden, "expand_k", expand_k), _whole(v, hidden, "expand_v", expand_v)
    if keys % heads or values % heads:
        raise v.error(f"must have num_heads that divides {keys} and {values} channels, got {heads}")
    return heads, keys // heads, values // heads


def _hgrn2(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of hgrn2, whose keys and values have as many channels as the tokens."""
    v.must_be("elementwise_affine", True, "a norm without weights is not supported")
    v.must_be("use_short_conv", False, "a convolution before HGRN2's gates is not supported")
    given = v.number("expand_ratio", default=None)
    if given is None and "expand_ratio" not in v.values:
        given = 128
    heads = v.number("num_heads") if given is None else max(hidden // given, 1)
    if hidden % heads or (given is not None and heads * given != hidden):
        name, found = ("num_heads", heads) if given is None else ("expand_ratio", given)
        raise v.error(f"must have {name} that divides hidden_size = {hidden}, got {found}")
    dim = hidden // heads
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_size=0,
        norm_eps=HGRN2_EPS,
        gate_activation="none",
        learned_bound=v.flag("use_lower_bound", default=True),
    )


def _retnet(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of retnet; its layers have no convolution, even with use_short_conv, which fla does not read."""
    v.must_be("elementwise_affine", True, "a norm without weights is not supported")
    heads, keys, values = _heads(v, hidden, v.number("num_heads", default=8), 1.0, 2.0)
    activations = {None: "none", "silu": "silu", "swish": "silu", "relu": "relu"}
    found = v.get("feature_map")
    if found is not None and not (isinstance(found, str) and found in activations):
        raise v.error(f"must have feature_map null, 'silu', 'swish' or 'relu', got {show(found)}")
    if keys % 2:
        raise v.error(f"must have an even number of key channels a head, which are rotated, got {keys}")
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=keys,
        value_dim=values,
        conv_size=0,
        norm_eps=eps,
        gate_activation="silu" if v.flag("use_output_gate", default=True) else "none",
        rope_theta=RETNET_THETA,
        qk_activation=activations[found],
    )


def _linear_attn(v: Values, hidden: int, eps: float) -> LinearConfig:
    """Return the sizes of linear_attn, and its feature map."""
    v.must_be("elementwise_affine", True, "a norm without weights is not supported")
    heads, keys, values = _heads(v, hidden, v.number("num_heads", default=4), 1.0, 1.0)
    found = v.get("feature_map", default="elementwise_product")
    if not isinstance(found, str) or found not in FEATURE_MAPS:
        why = "; the definition of dpfp differs between versions of fla" * (found == "dpfp")
        raise v.error(f"must have a feature_map of {', '.join(FEATURE_MAPS)}, got {show(found)}{why}")
    v.flag("tie_feature_map_qk", default=False)
    return LinearConfig(
        heads=heads,
        value_heads=heads,
        key_dim=keys,
        value_dim=values,
        conv_size=0,
        norm_eps=eps,
        gate_activation="none",
        feature_map=FEATURE_MAPS[found],
        normalize=v.flag("norm_feature_map", default=False),
        sum_to_one="".join(part for part in "qk" if v.flag(f"norm_{part}", default=False)),
    )


_SIZES = {
    "gated_deltanet": _headed, "kda": _headed, "delta_net": _expanded, "gla": _expanded, "hgrn2": _hgrn2,
    "retnet": _retnet, "linear_attn": _linear_attn, "gated_deltaproduct": _product,
    "comba": _comba,
}  # fmt: skip


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
    n = x.writes if letter == "U" else 1
    rows = {"q_proj": keys, "f_proj": keys, "i_proj": values}
    if letter != "H":
        rows = {"q_proj": keys, "k_proj": n * keys, "v_proj": n * values}
    if letter == "R":
        rows["gk_proj.0"] = GLA_RANK
    if letter == "K":
        rows |= {"f_proj.0": x.value_dim, "g_proj.0": x.value_dim}
    elif x.gate_activation != "none":
        rows["g_proj"] = values
    rows |= {"b_proj": n * hv} if letter in "DGKUQ" else {}
    rows |= {"a_proj": hv} if letter in "GQ" or (letter == "U" and x.forgets) else {}
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
    if letter == "Q":
        builder.copy(f"{target}.probe_logit", f"{source}.decay", (x.heads,))
        builder.copy(f"{target}.correction", f"{source}.D", (x.heads,))
    if letter in "GKQ" or (letter == "U" and x.forgets):
        builder.delta(i, source, source, "o_norm", "o_proj")
        return
    norm = builder.first(*(f"{source}.{name}.weight" for name in _NORMS[letter]))
    width = values if letter == "H" else x.value_dim
    builder.copy(f"{target}.norm.weight", norm, (width,))
    if letter == "O":  # a constant, of which the checkpoint has no tensor
        decays = partial(_constant, values=(-retnet_decays(hv)).log())
        builder.pieces[f"{target}.A_log"] = [Piece(norm, (width,), take=decays)]
    if letter == "H" and x.learned_bound:  # one tensor has the bounds of all layers
        bound = Piece(
            f"{builder.prefix}lower_bounds", (config.n_layers, hidden), take=partial(_bound_of_layer, layer=i)
        )
        builder.pieces[f"{target}.lower_bound"] = [bound]
    if letter == "L":
        _take_feature_maps(builder, i, source)
    builder.copy(f"{target}.out_proj.weight", f"{source}.o_proj.weight", (hidden, values))


_NORMS = {
    "U": ("o_norm",), "D": ("o_norm",), "R": ("g_norm_swish_gate", "g_norm"), "O": ("g_norm_swish_gate", "g_norm"),
    "H": ("g_norm",), "L": ("norm",),
}  # fmt: skip
"""The names of the output norm; GLA's and RetNet's depends on whether there is an output gate."""


def _bound_of_layer(logits: Tensor, layer: int) -> Tensor:
    """Return the logit of a layer's bound, the sum of softmax(logits) over the layers 1 .. layer; -inf for layer 0."""
    logits = logits.double()
    others = torch.cat((logits[:1], logits[layer + 1 :]))
    return logits[1 : layer + 1].logsumexp(0) - others.logsumexp(0)


def _constant(like: Tensor, values: Tensor) -> Tensor:
    return values


def _take_feature_maps(builder: PlanBuilder, i: int, source: str) -> None:
    """Take the weights of the feature maps; if q and k have the same one, the checkpoint may have it once."""
    x = builder.config.linear
    assert x is not None
    names = {
        "product": {"first": "layer1", "second": "layer2"},
        "t2r": {"first": "layer"},
        "hedgehog": {"first": "layer"},
    }
    for part, other in ("qk", "kq"):
        for ours, theirs in names.get(x.feature_map, {}).items():
            for kind, shape in (("weight", (x.key_dim, x.key_dim)), ("bias", (x.key_dim,))):
                if kind == "bias" and x.feature_map == "t2r":
                    continue
                own, shared = (f"{source}.feature_map_{name}.{theirs}.{kind}" for name in (part, other))
                builder.copy(f"layers.{i}.mixer.{part}_map.{ours}.{kind}", builder.first(own, shared), shape)


FAMILY = CheckpointFamily(
    tuple(LETTERS),
    config_from,
    plan,
    r"\.attn\.(b_proj|gk_proj\.1|f_proj|g_norm|g_norm_swish_gate|feature_map_[qk]\.layer1?)\.weight$",
)
