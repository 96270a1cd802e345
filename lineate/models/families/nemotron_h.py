"""Nemotron-H: Mamba-2, attention without positions, squared-ReLU feed-forwards and experts, one of them a layer.

A block of lineate has a mixer and the feed-forward that follows it; where two mixers follow each other, the block of
the first has no feed-forward.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lineate.models.config import AttentionConfig, ExpertsConfig, FeedConfig, HybridConfig, MambaConfig
from lineate.models.families.builder import FEW_EXPERTS, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.mamba_parts import mamba_sizes, take_backbone_ends, take_mamba
from lineate.models.families.values import Values, shortest
from lineate.models.fields import MOST_LAYERS, show
from lineate.models.files.loading import LoadingPlan, Piece
from lineate.models.files.safetensors import CheckpointError

WORDS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
SIGNS = "M*-E"
"""The signs of Nemotron-H's layers in a pattern: Mamba-2, attention, feed-forward, experts."""


class Pair(NamedTuple):
    """A block of lineate: the checkpoint's layer with the mixer, and the one with its feed-forward, if there is one."""

    letter: str
    mixer: int
    feed: int | None = None
    experts: bool = False


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json, as released (hybrid_override_pattern) or as transformers writes it (layers_block_type)."""
    v = Values("nemotron_h", values)
    v.must_be("mamba_hidden_act", "silu", "no other activation is supported")
    v.must_be("mlp_hidden_act", "relu2", "no other activation is supported")
    v.must_be("mlp_bias", False, "biases of feed-forwards are not supported")
    v.must_be("attention_bias", False, "biases of attention are not supported")
    v.must_be("sliding_window", None, "attention to a window is not supported")
    v.must_be(
        "moe_latent_size",
        None,
        "experts on a latent vector are not supported; use lineate.integrations.transformers.enable()",
    )
    pairs = _pairs(v, _signs(v))
    n_layers = len(pairs)
    eps = v.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5, kind=float)
    letters = "".join(pair.letter for pair in pairs)
    dense = tuple(i for i, pair in enumerate(pairs) if pair.feed is not None and not pair.experts)
    some = any(pair.experts for pair in pairs)
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=v.number("hidden_size"),
        n_layers=n_layers,
        pattern=shortest(letters),
        mamba=_mamba(v, eps) if "S" in letters else None,
        attention=_attention(v) if "A" in letters else None,
        feed=FeedConfig(v.number("intermediate_size"), "relu2") if dense else None,
        experts=_experts(v) if some else None,
        dense_layers=dense if some else (),
        mixer_only=tuple(i for i, pair in enumerate(pairs) if pair.feed is None),
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="nemotron_h",
    )


def _signs(v: Values) -> str:
    """Return one sign of SIGNS for each layer of the checkpoint."""
    words, pattern = v.get("layers_block_type", "layer_types"), v.get("hybrid_override_pattern")
    if isinstance(words, list) and all(isinstance(word, str) for word in words) and words:
        if unknown := sorted(set(words) - WORDS.keys()):
            raise v.error(f"must have layers_block_type of {', '.join(WORDS)}, got {show(unknown[0])}")
        pattern = "".join(WORDS[word] for word in words)
    elif words is not None:
        raise v.error(f"must have a list of words in layers_block_type, got {show(words)}")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(SIGNS):
        raise v.error(
            f"must have layers_block_type, or hybrid_override_pattern of the signs {', '.join(SIGNS)}, got "
            f"{show(pattern)}"
        )
    if len(pattern) > MOST_LAYERS:
        raise v.error(f"is not possible: it must have at most {MOST_LAYERS} layers, got {len(pattern)}")
    return pattern


def _pairs(v: Values, signs: str) -> list[Pair]:
    """Return lineate's blocks; raise if a feed-forward follows no mixer."""
    pairs: list[Pair] = []
    for i, sign in enumerate(signs):
        if sign in "M*":
            pairs.append(Pair("S" if sign == "M" else "A", i))
            continue
        if not pairs or pairs[-1].feed is not None:
            raise v.error(
                f"must have a mixer before every feed-forward, got {signs[: i + 1]!r:.80}, whose layer {i} follows "
                "none; a block of a feed-forward alone is not supported, use lineate.integrations.transformers.enable()"
            )
        pairs[-1] = pairs[-1]._replace(feed=i, experts=sign == "E")
    return pairs


def _mamba(v: Values, eps: float) -> MambaConfig:
    """Return Mamba-2's sizes; steps are at least time_step_min, as in transformers, which ignores time_step_limit."""
    groups = "n_groups" if v.get("n_groups") is not None else "mamba_n_groups"
    conv = "conv_kernel" if v.get("conv_kernel") is not None else "mamba_d_conv"
    sizes = mamba_sizes(
        v, "mamba_num_heads", v.number("mamba_head_dim"), "ssm_state_size", conv, groups=groups,
        norm_groups=v.number(groups), eps=eps, bias=v.flag("use_bias", default=False),
        conv_bias=v.flag("use_conv_bias", "mamba_conv_bias", default=True),
    )  # fmt: skip
    least = v.number("time_step_min", "mamba_dt_min", default=0.001, kind=float)
    if not least >= 0:
        raise v.error(f"must have a number of at least 0 in time_step_min, got {show(least)}")
    return replace(sizes, step_least=least, step_most=None)


def _attention(v: Values) -> AttentionConfig:
    heads = v.number("num_attention_heads")
    return AttentionConfig(
        heads=heads,
        kv_heads=v.number("num_key_value_heads", default=heads),
        head_dim=v.number("head_dim", "attention_head_dim", default=v.number("hidden_size") // heads),
        gated=False,
        qk_norm=None,
    )


def _experts(v: Values) -> ExpertsConfig:
    return ExpertsConfig(
        count=v.number("n_routed_experts", "num_local_experts"),
        active=v.number("num_experts_per_tok"),
        size=v.number("moe_intermediate_size"),
        shared_size=v.number("moe_shared_expert_intermediate_size"),
        scores="sigmoid",
        renormalize=v.flag("norm_topk_prob", default=True),
        scale=v.number("routed_scaling_factor", default=1.0, kind=float),
        groups=v.number("n_group", default=1),
        active_groups=v.number("topk_group", default=1),
        kind="relu2",
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    take_backbone_ends(builder)
    theirs = 0
    for i, letter in enumerate(config.letters):
        source = f"{builder.prefix}layers.{theirs}"
        builder.copy(f"layers.{i}.mixer_norm.weight", f"{source}.norm.weight", (config.hidden_size,))
        if letter == "S":
            take_mamba(builder, i, f"{source}.mixer")
        else:
            builder.attention(i, f"{source}.mixer")
        theirs += 1
        if i not in config.mixer_only:
            source = f"{builder.prefix}layers.{theirs}"
            builder.copy(f"layers.{i}.feed_norm.weight", f"{source}.norm.weight", (config.hidden_size,))
            _feed(builder, i, f"{source}.mixer")
            theirs += 1
    return builder.plan()


def _feed(builder: PlanBuilder, i: int, source: str) -> None:
    config, target = builder.config, f"layers.{i}.feed"
    if not config.has_experts(i):
        assert config.feed is not None
        _dense(builder, target, source, config.feed.size)
        return
    x, hidden = config.experts, config.hidden_size
    assert x is not None
    builder.copy(f"{target}.router.weight", f"{source}.gate.weight", (x.count, hidden))
    builder.copy(f"{target}.router_bias", f"{source}.gate.e_score_correction_bias", (x.count,))
    _dense(builder, f"{target}.shared", f"{source}.shared_experts", x.shared_size)
    names = (("experts_gate_up", "up_proj", (x.size, hidden)), ("experts_down", "down_proj", (hidden, x.size)))
    for ours, name, shape in names:
        fused = f"{source}.experts.{name}"
        if fused in builder.shapes:
            builder.copy(f"{target}.{ours}", fused, (x.count, *shape))
            continue
        if x.count > max(FEW_EXPERTS, len(builder.shapes)):
            raise CheckpointError(
                f"the config's experts one by one need at least {x.count} tensors, got {len(builder.shapes)}"
            )
        pieces = [Piece(f"{source}.experts.{e}.{name}.weight", shape, (e,)) for e in range(x.count)]
        builder.pieces[f"{target}.{ours}"] = pieces


def _dense(builder: PlanBuilder, target: str, source: str, size: int) -> None:
    hidden = builder.config.hidden_size
    builder.copy(f"{target}.up_proj.weight", f"{source}.up_proj.weight", (size, hidden))
    builder.copy(f"{target}.down_proj.weight", f"{source}.down_proj.weight", (hidden, size))


FAMILY = CheckpointFamily(("nemotron_h",), config_from, plan, r"\.mixer\.(shared_experts\.)?up_proj\.weight$")
