"""Mamba-2 as transformers names it: blocks of a mixer without a feed-forward."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import HybridConfig
from lineate.models.families.builder import PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.mamba_parts import mamba_sizes, take_backbone_ends, take_mamba
from lineate.models.families.values import Values
from lineate.models.files.loading import LoadingPlan


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json; residual_in_fp32 is not read, as the residual stream has the dtype of the weights here."""
    v = Values("mamba2", values)
    v.must_be("hidden_act", "silu", "no other activation is supported")
    n_layers, hidden = v.layers(), v.number("hidden_size")
    eps = v.number("layer_norm_epsilon", default=1e-5, kind=float)
    mamba = mamba_sizes(
        v, "num_heads", v.number("head_dim"), "state_size", "conv_kernel", groups="n_groups", norm_groups=1, eps=eps,
        bias=v.flag("use_bias", default=False), conv_bias=v.flag("use_conv_bias", default=True),
    )  # fmt: skip
    expand = v.number("expand", default=2, kind=float)
    if int(expand * hidden) != mamba.heads * mamba.head_dim:
        raise v.error(
            f"must have expand x hidden_size = num_heads x head_dim = {mamba.heads * mamba.head_dim}, got "
            f"{expand:g} x {hidden}"
        )
    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        pattern="S",
        mamba=mamba,
        mixer_only=tuple(range(n_layers)),
        norm_eps=eps,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="mamba2",
    )


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    take_backbone_ends(builder)
    for i in range(config.n_layers):
        source = f"{builder.prefix}layers.{i}"
        builder.copy(f"layers.{i}.mixer_norm.weight", f"{source}.norm.weight", (config.hidden_size,))
        take_mamba(builder, i, f"{source}.mixer")
    return builder.plan()


# The second block of a Nemotron-H has no mixer.
FAMILY = CheckpointFamily(("mamba2",), config_from, plan, r"\.layers\.1\.mixer\.conv1d\.weight$")
