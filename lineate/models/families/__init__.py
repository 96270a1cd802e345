"""Checkpoint readers, one file a family: how its config.json becomes a HybridConfig, and its tensors ours."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lineate.dtypes import parse_dtype
from lineate.models.checkpoint import Checkpoint, save
from lineate.models.config import HybridConfig
from lineate.models.families import kimi_linear, olmo_hybrid, qwen3_5, qwen3_next
from lineate.models.families.values import token_ids
from lineate.models.fields import show
from lineate.models.hub import find_folder
from lineate.models.hybrid import HybridLM
from lineate.models.loading import Piece, Plan, load, stored_dtype
from lineate.models.safetensors import CheckpointError
from lineate.models.saving import check_described, check_whole

Shape = tuple[int, ...]
OWN = "lineate"
OWN_SIGNATURE = r"^layers\.\d+\.mixer\.in_proj\.weight$"
OF_TRANSFORMERS = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
"""Keys that may stand in our config.json beside those of HybridConfig."""


FEW_LAYERS = 256
"""So many are made without asking whether the files have tensors for them: a list of what is missing says more."""


@dataclass(frozen=True)
class Family:
    """A reader."""

    config_from: Callable[[dict[str, Any]], HybridConfig]
    plan: Callable[[HybridConfig, Mapping[str, Shape]], Plan]
    signature: str
    """Matches the name of a tensor that no other family has."""


QWEN3_NEXT = Family(qwen3_next.config_from, qwen3_next.plan, qwen3_next.SIGNATURE)
QWEN3_5 = Family(qwen3_5.config_from, qwen3_5.plan, qwen3_5.SIGNATURE)
KIMI_LINEAR = Family(kimi_linear.config_from, kimi_linear.plan, kimi_linear.SIGNATURE)
OLMO_HYBRID = Family(olmo_hybrid.config_from, olmo_hybrid.plan, olmo_hybrid.SIGNATURE)
FAMILIES = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "kimi_linear": KIMI_LINEAR,
    "olmo_hybrid": OLMO_HYBRID,
}
"""By model_type of config.json; our own is "lineate"."""


def load_pretrained(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> HybridLM:
    """A model in eval mode from a folder or a hub name; dtype None or "auto": that of most of the stored bytes."""
    chosen = None if dtype is None or dtype == "auto" else parse_dtype(dtype, also=("auto",))
    check_target(device)
    checkpoint = Checkpoint.open(find_folder(name))
    config = read_config(checkpoint)
    model = empty_model(config)
    load(
        model,
        make_plan(checkpoint, config, model),
        checkpoint,
        dtype=chosen or stored_dtype(checkpoint),
        device=device,
        progress=progress,
        hint=other_family(checkpoint),
    )
    return model.eval()


def check_target(device: torch.device | str) -> None:
    """Where weights are loaded to, before any are read."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or another of torch's, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} needs a GPU that torch can use, and there is none; use device='cpu'")


def save_pretrained(model: HybridLM, folder: str | Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """config.json and safetensors under our own names; nothing is left behind if it fails.

    A model with parts or settings that its configuration does not describe is refused.
    """
    check_saveable(model)
    tensors = model.state_dict()
    check_whole(tensors)
    config = {"model_type": OWN, "dtype": str(model.dtype).removeprefix("torch."), **model.config.to_dict()}
    save(folder, tensors, config, max_shard_bytes)


def check_saveable(model: HybridLM) -> None:
    """Raise if a model made of its configuration and its tensors would not be this one."""
    check_described(model, empty_model(model.config))


def read_config(checkpoint: Checkpoint) -> HybridConfig:
    """The config of a checkpoint of any family."""
    kind = _model_type(checkpoint)
    try:
        if kind == OWN:
            own = {key: value for key, value in checkpoint.config.items() if key not in OF_TRANSFORMERS}
            config = HybridConfig.from_dict(own)
        else:
            config = FAMILIES[kind].config_from(checkpoint.config)
            config = replace(config, eos_token_ids=_all_eos(checkpoint, config))
    except (TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {why}") from None
    most = max(FEW_LAYERS, len(checkpoint.entries))
    if checkpoint.entries and config.n_layers > most:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: the number of layers must be at most {most}, as the files have "
            f"{len(checkpoint.entries)} tensors and every layer needs some, got {config.n_layers}"
        )
    return config


def make_plan(checkpoint: Checkpoint, config: HybridConfig, model: nn.Module) -> Plan:
    """Where every tensor of the model comes from."""
    kind = _model_type(checkpoint)
    if kind != OWN:
        return FAMILIES[kind].plan(config, checkpoint.shapes)
    prefix = "model." if "model.embed.weight" in checkpoint.entries else ""
    return Plan({name: [Piece(prefix + name, tuple(x.shape))] for name, x in model.state_dict().items()})


def empty_model(config: HybridConfig) -> HybridLM:
    """A model without memory for its tensors."""
    with torch.device("meta"), _WithoutNormal():
        return HybridLM(config)


class _WithoutNormal(TorchFunctionMode):
    """Leaves out nn.init.normal_, which on meta tensors does nothing but import 150 MB of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs.get("tensor") if func is nn.init.normal_ else func(*args, **kwargs)


def other_family(checkpoint: Checkpoint) -> str:
    """What to add to a complaint about tensors that are those of another family than config.json says."""
    kind = _model_type(checkpoint)
    signatures = {name: family.signature for name, family in FAMILIES.items()} | {OWN: OWN_SIGNATURE}
    for name, signature in signatures.items():
        if signature != signatures[kind] and any(re.search(signature, tensor) for tensor in checkpoint.entries):
            return f": config.json says model_type {kind!r}, the tensors are those of {name!r}"
    return ""


def _model_type(checkpoint: Checkpoint) -> str:
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or (kind != OWN and kind not in FAMILIES):
        known = ", ".join([*FAMILIES, OWN])
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: model_type must be one of {known}, got {show(kind)}"
        )
    return str(kind)


def _all_eos(checkpoint: Checkpoint, config: HybridConfig) -> tuple[int, ...]:
    """Tokens that end a text: those of config.json, then what generation_config.json adds."""
    more = checkpoint.extra("generation_config.json").get("eos_token_id")
    more = token_ids("eos_token_id of generation_config.json", more)
    return tuple(dict.fromkeys((*config.eos_token_ids, *more)))
