"""Checkpoint families: conversion of a config.json to a HybridConfig, and the sources of a model's tensors.

Each family is one file with a row, `FAMILY`; to add a family, add its file and its name in FAMILIES.
"""

import re
from dataclasses import replace

import torch
from torch import nn

from lineate.models.config import HybridConfig
from lineate.models.families import (
    bailing_hybrid,
    bamba,
    fla,
    granitemoehybrid,
    kimi_linear,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    rwkv7,
)
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import token_ids
from lineate.models.fields import show
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.loading import LoadingPlan, Piece
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.tiled import KEY as WEIGHTS
from lineate.models.files.tiled import present_tiles, written_format
from lineate.quantised.format import Format
from lineate.torch_ops.dtypes import FLOATING

OWN = "lineate"
OWN_SIGNATURE = r"^layers\.\d+\.mixer\.(in|q)_proj\.weight$"
OF_TRANSFORMERS = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", WEIGHTS)
"""Keys of lineate's config.json besides those of HybridConfig."""


FEW_LAYERS = 256
"""A config may have this many layers even if the files have fewer tensors.

Loading then lists the tensors that are missing, which is more informative than an error about the number of layers.
"""


FAMILIES: dict[str, CheckpointFamily] = {
    model_type: module.FAMILY
    for module in (
        qwen3_next,
        qwen3_5,
        kimi_linear,
        olmo_hybrid,
        mamba2,
        granitemoehybrid,
        bamba,
        nemotron_h,
        bailing_hybrid,
        fla,
        rwkv7,
    )
    for model_type in module.FAMILY.model_types
}
"""The families by model_type of config.json; lineate's own is "lineate"."""

LACKING = {
    "glm5_next": "hyper-connections and attention to tokens that an indexer chooses",
    "qwen4_exp": "attention to tokens that an indexer chooses, gated residuals and n-gram embeddings",
    "falcon_h1": "blocks in which Mamba-2 and attention read the same input side by side",
    "zamba2": "attention whose weights several layers share",
}
"""Descriptions of the unsupported layers of families whose linear layers are supported."""


def what_it_lacks(model_type: str) -> str | None:
    """Return one sentence about a family that only transformers can build, or None if it is not such a family."""
    layers = LACKING.get(model_type.removesuffix("_text"))
    if layers is None:
        return None
    return (
        f"model_type {model_type!r} has {layers}, which lineate's models lack; load it with transformers, after "
        "lineate.integrations.transformers.enable(), which speeds up its linear layers"
    )


def read_config(checkpoint: Checkpoint) -> HybridConfig:
    """Return the configuration of a checkpoint of any family."""
    kind = _model_type(checkpoint)
    try:
        if kind == OWN:
            written_format(checkpoint.config)
            own = {key: value for key, value in checkpoint.config.items() if key not in OF_TRANSFORMERS}
            config = HybridConfig.from_dict(own)
            config = replace(config, eos_token_ids=_all_eos(checkpoint, config))
        else:
            family_row = FAMILIES[kind]
            config = family_row.config_from(family_row.complete(checkpoint.config, checkpoint.shapes))
            family = kind if config.family == OWN else config.family
            predicts = family_row.predicts(config, checkpoint.shapes)
            config = replace(config, family=family, eos_token_ids=_all_eos(checkpoint, config), prediction=predicts)
    except (TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise CheckpointError(f"{checkpoint.config_file}: {why}") from None
    most = max(FEW_LAYERS, len(checkpoint.entries))
    if checkpoint.entries and config.n_layers > most:
        raise CheckpointError(
            f"{checkpoint.config_file}: the number of layers must be at most {most}, as the files have "
            f"{len(checkpoint.entries)} tensors and every layer needs some, got {config.n_layers}"
        )
    return config


def quantised_format(checkpoint: Checkpoint) -> Format | None:
    """Return the format of a lineate checkpoint that was saved with quantised weights; None for all others."""
    return written_format(checkpoint.config) if _model_type(checkpoint) == OWN else None


def written_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that config.json names for a model with quantised weights: that of all its other tensors."""
    return FLOATING.get(str(checkpoint.config.get("dtype")), torch.float32)


def present(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return a checkpoint with a weight in place of lineate's codes and scales; raise if these do not fit the model."""
    if quantised_format(checkpoint) is None:
        return checkpoint
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    return present_tiles(checkpoint, shapes, written_dtype(checkpoint))


def make_plan(checkpoint: Checkpoint, config: HybridConfig, model: nn.Module) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    kind = _model_type(checkpoint)
    if kind != OWN:
        try:
            return FAMILIES[kind].plan(config, checkpoint.shapes)
        except CheckpointError as error:  # a plan depends on shapes only
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
    prefix = "model." if "model.embed.weight" in checkpoint.entries else ""
    pieces = {name: [Piece(prefix + name, tuple(x.shape))] for name, x in model.state_dict().items()}
    left_out = checkpoint.config.get("prediction") is True and not config.prediction
    return LoadingPlan(pieces, (r"^(model\.)?prediction\.",) if left_out else ())


def other_family(checkpoint: Checkpoint) -> str:
    """Return a hint for error messages if the tensors belong to another family than config.json names."""
    kind = _model_type(checkpoint)
    signatures = {name: family.signature for name, family in FAMILIES.items()} | {OWN: OWN_SIGNATURE}
    for name, signature in signatures.items():
        if signature != signatures[kind] and any(re.search(signature, tensor) for tensor in checkpoint.entries):
            return f": config.json says model_type {kind!r}, the tensors are those of {name!r}"
    return ""


def _model_type(checkpoint: Checkpoint) -> str:
    kind = checkpoint.config.get("model_type")
    if isinstance(kind, str) and (why := what_it_lacks(kind)) is not None:
        raise CheckpointError(f"{checkpoint.config_file}: {why}")
    if not isinstance(kind, str) or (kind != OWN and kind not in FAMILIES):
        known = ", ".join([*FAMILIES, OWN])
        raise CheckpointError(f"{checkpoint.config_file}: model_type must be one of {known}, got {show(kind)}")
    return str(kind)


def _all_eos(checkpoint: Checkpoint, config: HybridConfig) -> tuple[int, ...]:
    """Return the tokens that end a sequence: those of config.json, then those that generation_config.json adds."""
    more = checkpoint.extra("generation_config.json").get("eos_token_id")
    more = token_ids("eos_token_id of generation_config.json", more)
    return tuple(dict.fromkeys((*config.eos_token_ids, *more)))
