"""Qwen3.5, dense or with experts: Qwen3-Next with separate projections; of a vision-language model, the text part."""

from collections.abc import Mapping
from typing import Any

from lineate.models.config import HybridConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.qwen3_next import predicts, qwen_block, qwen_config, qwen_prediction
from lineate.models.families.values import Values
from lineate.models.files.loading import LoadingPlan


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json; in that of a vision-language model the text part is under text_config."""
    family = str(values.get("model_type", "qwen3_5")).removesuffix("_text")
    text = values.get("text_config")
    if isinstance(text, dict):
        outer = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
        values = text | {key: values[key] for key in outer if values.get(key) is not None}
    v = Values(family, values)
    dense = () if family.endswith("_moe") else tuple(range(v.layers()))
    return qwen_config(v, dense, renormalize=True)


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    builder.ends()
    linear, hidden = config.linear, config.hidden_size
    assert linear is not None
    keys, values = linear.heads * linear.key_dim, linear.value_heads * linear.value_dim
    rows = {"qkv": 2 * keys + values, "z": values, "b": linear.value_heads, "a": linear.value_heads}
    for i in range(config.n_layers):
        qwen_block(builder, i)
        if config.letters[i] == "G":
            source = f"{builder.prefix}layers.{i}.linear_attn"
            parts = [Part(f"{source}.in_proj_{name}.weight", (count, hidden)) for name, count in rows.items()]
            builder.stack(f"layers.{i}.mixer.in_proj.weight", parts)
    qwen_prediction(builder)
    return builder.plan()


FAMILY = CheckpointFamily(
    ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    config_from,
    plan,
    r"\.linear_attn\.in_proj_qkv\.weight$",
    predicts,
)
