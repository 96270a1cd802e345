"""Qwen3-Next: Gated DeltaNet and gated attention, mixtures of experts.

in_proj_qkvz has the rows q | k | v | z of the first key head's group, then of the second, and so on; in_proj_ba has
b | a in the same way. lineate's in_proj has q | k | v | z | b | a, each with all heads.
"""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import ExpertsConfig, HybridConfig
from lineate.models.families.builder import PlanBuilder, Shape, interleaved
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values, shortest
from lineate.models.files.loading import LoadingPlan

EXPERT_NAMES = [("gate_proj", "up_proj", "down_proj")]


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json."""
    v = Values("qwen3_next", values)
    n_layers = v.layers()
    step, only = v.number("decoder_sparse_step", default=1), set(v.numbers("mlp_only_layers"))
    dense = tuple(i for i in range(n_layers) if i in only or (i + 1) % step)
    if not v.number("num_experts", default=0, least=0):
        dense = tuple(range(n_layers))
    return qwen_config(v, dense, v.flag("norm_topk_prob", default=True))


def qwen_config(v: Values, dense: tuple[int, ...], renormalize: bool) -> HybridConfig:
    """Return the configuration of Qwen3-Next and Qwen3.5; dense: the layers without experts."""
    v.must_be("hidden_act", "silu", "no other activation is supported")
    v.must_be("attn_output_gate", True, "attention without its output gate is not supported")
    n_layers = v.layers()
    eps = v.number("rms_norm_eps", default=1e-6, kind=float)
    experts = None
    if len(dense) < n_layers:
        experts = ExpertsConfig(
            count=v.number("num_experts"),
            active=v.number("num_experts_per_tok"),
            size=v.number("moe_intermediate_size"),
            shared_size=v.number("shared_expert_intermediate_size", least=0),
            shared_gate=True,
            renormalize=renormalize,
        )
    letters = v.layer_letters("G", "A")
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=v.number("hidden_size"),
        n_layers=n_layers,
        pattern=shortest(letters),
        linear=v.grouped_linear(eps),
        attention=v.attention(0.25, gated=True, qk_norm="head") if "A" in letters else None,
        feed=v.feed(bool(dense)),
        experts=experts,
        dense_layers=() if experts is None else dense,
        norm_eps=eps,
        zero_centred_norm=True,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family=v.family,
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    for i in range(config.n_layers):
        qwen_block(builder, i)
        if config.letters[i] == "G":
            _in_proj(builder, i, f"{builder.prefix}layers.{i}.linear_attn")
    qwen_prediction(builder)
    return builder.plan()


def qwen_block(builder: PlanBuilder, i: int) -> None:
    """Take a block without the input projection of its linear layer."""
    config, source, target = builder.config, f"{builder.prefix}layers.{i}", f"layers.{i}"
    builder.norms(i, f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight")
    if config.letters[i] == "A":
        builder.attention(i, f"{source}.self_attn")
    else:
        builder.convolution(i, f"{source}.linear_attn")
        builder.delta(i, f"{source}.linear_attn", f"{source}.linear_attn", "norm", "out_proj")
    if not config.has_experts(i):
        assert config.feed is not None
        builder.dense(f"{target}.feed", f"{source}.mlp", config.feed.size)
        return
    assert config.experts is not None
    hidden = config.hidden_size
    builder.copy(f"{target}.feed.router.weight", f"{source}.mlp.gate.weight", (config.experts.count, hidden))
    builder.experts(i, f"{source}.mlp", EXPERT_NAMES)
    builder.dense(f"{target}.feed.shared", f"{source}.mlp.shared_expert", config.experts.shared_size)
    builder.copy(f"{target}.feed.shared_gate.weight", f"{source}.mlp.shared_expert_gate.weight", (1, hidden))


def predicts(config: HybridConfig, shapes: Mapping[str, Shape]) -> bool:
    """Whether there is a head of multi-token prediction, of one block, with the embedding of the model."""
    prefix = _prediction_prefix(shapes)
    more = f"{prefix}layers.1.", f"{prefix}embed_tokens."
    return (
        config.attention is not None
        and f"{prefix}fc.weight" in shapes
        and not any(name.startswith(more) for name in shapes)
    )


def qwen_prediction(builder: PlanBuilder) -> None:
    """Take the head of multi-token prediction, if it is wanted: fc has the embedding's columns first, then h's."""
    config = builder.config
    if not config.prediction:
        return
    prefix, hidden = _prediction_prefix(builder.shapes), config.hidden_size
    for ours, name in (
        ("embedding_norm", "pre_fc_norm_embedding"),
        ("hidden_norm", "pre_fc_norm_hidden"),
        ("norm",) * 2,
    ):
        builder.copy(f"prediction.{ours}.weight", f"{prefix}{name}.weight", (hidden,))
    builder.copy("prediction.in_proj.weight", f"{prefix}fc.weight", (hidden, 2 * hidden))
    block = PlanBuilder(config.of_prediction(), builder.shapes)
    block.prefix = prefix
    qwen_block(block, 0)
    for target, pieces in block.pieces.items():
        builder.pieces[f"prediction.block.{target.removeprefix('layers.0.')}"] = pieces


def _prediction_prefix(shapes: Mapping[str, Shape]) -> str:
    return "model.mtp." if "model.mtp.fc.weight" in shapes else "mtp."


def _in_proj(builder: PlanBuilder, i: int, source: str) -> None:
    linear, hidden = builder.config.linear, builder.config.hidden_size
    assert linear is not None
    ratio = linear.value_heads // linear.heads
    wide = ratio * linear.value_dim
    parts = interleaved(
        f"{source}.in_proj_qkvz.weight", linear.heads, (linear.key_dim, linear.key_dim, wide, wide), (hidden,)
    )
    parts += interleaved(f"{source}.in_proj_ba.weight", linear.heads, (ratio, ratio), (hidden,))
    builder.stack(f"layers.{i}.mixer.in_proj.weight", parts)


FAMILY = CheckpointFamily(("qwen3_next",), config_from, plan, r"\.linear_attn\.in_proj_qkvz\.weight$", predicts)
