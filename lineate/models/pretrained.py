"""A model from the folder of a checkpoint, or a name on the hub, and back into a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lineate.dtypes import parse_dtype
from lineate.models.config import HybridConfig
from lineate.models.families import OWN, make_plan, other_family, read_config
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.hub import find_folder
from lineate.models.files.loading import load, stored_dtype
from lineate.models.files.saving import check_whole

AnyModel = TypeVar("AnyModel", bound=nn.Module)
SHARD_BYTES = 5 * 10**9


def without_memory(make: Callable[[HybridConfig], AnyModel], config: HybridConfig) -> AnyModel:
    """Make a model without memory for its tensors."""
    with torch.device("meta"), _WithoutNormal():
        return make(config)


def load_pretrained(
    make: Callable[[HybridConfig], AnyModel],
    name: str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    progress: bool,
) -> AnyModel:
    """Make a model in eval mode from a folder or a hub name; dtype None or "auto": that of most of the stored bytes."""
    chosen = None if dtype is None or dtype == "auto" else parse_dtype(dtype, also=("auto",))
    _check_target(device)
    checkpoint = Checkpoint.open(find_folder(name))
    config = read_config(checkpoint)
    model = without_memory(make, config)
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


def write_pretrained(
    model: nn.Module, config: HybridConfig, dtype: torch.dtype, folder: str | Path, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json and safetensors under our own names; nothing is left behind if it fails."""
    tensors = model.state_dict()
    check_whole(tensors)
    values = {"model_type": OWN, "dtype": str(dtype).removeprefix("torch."), **config.to_dict()}
    save(folder, tensors, values, max_shard_bytes)


def _check_target(device: torch.device | str) -> None:
    """Raise if weights cannot be loaded to this device, before any are read."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or another of torch's, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} needs a GPU that torch can use, and there is none; use device='cpu'")


class _WithoutNormal(TorchFunctionMode):
    """Leaves out nn.init.normal_, which on meta tensors does nothing but import 150 MB of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs.get("tensor") if func is nn.init.normal_ else func(*args, **kwargs)
