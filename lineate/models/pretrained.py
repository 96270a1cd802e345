"""A model from the folder of a checkpoint, or a name on the hub, and back into a folder."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lineate.models.config import HybridConfig
from lineate.models.families import (
    OWN,
    make_plan,
    other_family,
    present,
    quantised_format,
    read_config,
    written_dtype,
)
from lineate.models.families.values import token_ids
from lineate.models.files.checkpoint import Checkpoint, read_json, save
from lineate.models.files.companions import GENERATION, write_companions
from lineate.models.files.gguf import kept_formats
from lineate.models.files.gguf_tokenizer import companions_of
from lineate.models.files.loading import LoadingPlan, check_all, load, stored_dtype
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.saving import check_whole
from lineate.models.files.slicing import slice_plan
from lineate.models.files.tiled import KEY, stored_tensors
from lineate.models.memoryless import without_memory
from lineate.models.opening import open_checkpoint
from lineate.models.sampling_defaults import (
    SamplingDefaults,
    parse_sampling_defaults,
    read_sampling_defaults,
    with_sampling_defaults,
)
from lineate.models.sharding import model_ranges
from lineate.parallel.tensor.ranks import Ranks
from lineate.quantised.format import FORMATS, Format, find_format
from lineate.quantised.which import becomes_quantised, format_of, quantised_formats
from lineate.torch_ops.dtypes import parse_dtype

AnyModel = TypeVar("AnyModel", bound=nn.Module)
SOURCE = "_source"
"""The attribute of a model that has the folder it was loaded from, if it was."""
DEFAULTS = "sampling_defaults"
"""The attribute of a model that has the sampling options of its checkpoint."""
SHARD_BYTES = 5 * 10**9


def load_pretrained(
    make: Callable[..., AnyModel],
    name: str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    progress: bool,
    prediction: bool = True,
    weights: str | None = None,
    ranks: Ranks | None = None,
    sampling_defaults: bool = True,
) -> AnyModel:
    """Make a model in eval mode from a folder or a hub name; dtype None or "auto": that of most of the stored bytes.

    prediction: whether the head of multi-token prediction is read too, if the checkpoint has one. weights: the format
    that large weights are kept in; then a dtype of None is float32 on a CPU, and bfloat16 elsewhere. ranks: those that
    share the model, of which this one reads its share. sampling_defaults: whether those of the checkpoint are read.
    """
    chosen = None if dtype is None or dtype == "auto" else parse_dtype(dtype, also=("auto",))
    form = None if weights is None else find_format(weights)
    check_target(device)
    checkpoint = open_checkpoint(name)
    for note in () if checkpoint.encoding is None else checkpoint.encoding.notes:
        warnings.warn(note, stacklevel=3)
    config = read_config(checkpoint)
    defaults = read_sampling_defaults(checkpoint) if sampling_defaults else None
    if not prediction:
        config = replace(config, prediction=False)
    model = without_memory(make, config)
    checkpoint = present(checkpoint, model)
    wanted = chosen or usual_dtype(checkpoint, form, device)
    plan = make_plan(checkpoint, config, model)
    if ranks is not None and ranks.size > 1:
        shared = without_memory(partial(make, ranks=ranks), config)
        tensors = model.state_dict()
        check_all(tensors, plan, checkpoint, other_family(checkpoint))
        shapes = {key: tuple(x.shape) for key, x in tensors.items()}
        plan, model = slice_plan(plan, shapes, model_ranges(model, ranks.rank, ranks.size)), shared
    quantised = (
        formats_for(model, form, wanted) if form is not None else stored_formats(model, checkpoint, plan, wanted)
    )
    load(
        model,
        plan,
        checkpoint,
        dtype=wanted,
        device=device,
        progress=progress,
        hint=other_family(checkpoint),
        quantised=quantised,
    )
    object.__setattr__(model, SOURCE, checkpoint.folder.absolute())
    object.__setattr__(model, DEFAULTS, defaults)
    return model.eval()


def usual_dtype(checkpoint: Checkpoint, form: Format | None, device: torch.device | str) -> torch.dtype:
    """Return the dtype of a model's tensors, other than quantised weights, if none was asked for.

    Args:
        checkpoint: that it is loaded from.
        form: the format that was asked for.
        device: where it is loaded to.
    """
    stored = quantised_format(checkpoint)
    if form is None and stored is None:
        return stored_dtype(checkpoint)
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.float32 if stored is None else written_dtype(checkpoint)


def formats_for(model: nn.Module, form: Format | None, dtype: torch.dtype) -> dict[str, Format]:
    """Return the formats of the weights that are quantised; none if the format is the dtype of all tensors."""
    return {} if form is None or form.dtype == dtype else quantised_formats(model, form)


def stored_formats(
    model: nn.Module, checkpoint: Checkpoint, plan: LoadingPlan, dtype: torch.dtype
) -> dict[str, Format]:
    """Return the formats of the weights that are quantised if a checkpoint is loaded as it is stored.

    These are one format for a folder of ours that was saved with quantised weights, several for the blocks of a GGUF
    file, and none for other checkpoints.

    Args:
        model: that is loaded; its tensors may be on the meta device.
        checkpoint: that it is loaded from.
        plan: where its tensors come from.
        dtype: of all other tensors.
    """
    quantised = formats_for(model, quantised_format(checkpoint), dtype)
    sources = {target: [piece.source for piece in pieces] for target, pieces in plan.pieces.items()}
    found = {name: FORMATS[kept] for name, kept in kept_formats(checkpoint, sources).items()}
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    return quantised | {name: form for name, form in found.items() if becomes_quantised(name, shapes[name], form)}


def write_pretrained(
    model: nn.Module, config: HybridConfig, dtype: torch.dtype, folder: str | Path, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json and safetensors under our own names; nothing is left behind if it fails.

    The tokenizer of the folder that the model was loaded from is copied, byte for byte.
    """
    tensors = model.state_dict()
    check_whole(tensors)
    values = own_config(config, dtype, format_of(model))
    kept = _kept_files(model, Path(folder))
    plain = {key: part for name, x in tensors.items() for key, part in stored_tensors(name, x).items()}
    save(folder, plain, values, max_shard_bytes)
    write_beside(Path(folder), kept, config, getattr(model, DEFAULTS, None))


def own_config(config: HybridConfig, dtype: torch.dtype, form: Format | None) -> dict[str, Any]:
    """Return the config.json of a model of ours."""
    values = {"model_type": OWN, "dtype": str(dtype).removeprefix("torch.")}
    return {**values, **({} if form is None else {KEY: form.name}), **config.to_dict()}


def write_beside(
    folder: Path, companions: Mapping[str, bytes], config: HybridConfig, defaults: SamplingDefaults | None = None
) -> None:
    """Write the files of a tokenizer and of generation next to a model; defaults of None leave those of the file."""
    write_companions(folder, companions)
    if GENERATION not in companions:
        _write_ends(folder / GENERATION, config)
    if defaults is not None:
        _write_defaults(folder / GENERATION, defaults)


def _kept_files(model: nn.Module, folder: Path) -> dict[str, bytes]:
    """Return the tokenizer's files that lie where the model was loaded from; warn if they cannot be read any more."""
    source: Path | None = getattr(model, SOURCE, None)
    try:
        if source is None or source.exists():
            return {} if source is None else companions_of(source)
        why = "which is gone"
    except (CheckpointError, OSError) as error:
        why = f"whose files cannot be read ({error})"
    warnings.warn(
        f"the model was loaded from {source}, {why}: its tokenizer is not in {folder}; copy it there", stacklevel=5
    )
    return {}


def _write_ends(file: Path, config: HybridConfig) -> None:
    """Write the end tokens for those who read generation_config.json; a file that names no other ones stays."""
    wanted = set(config.eos_token_ids)
    try:
        found = set(token_ids("eos_token_id", read_json(file).get("eos_token_id")))
        stays = found <= wanted
    except (CheckpointError, TypeError, ValueError):
        stays = False
    if stays:
        return
    file.unlink(missing_ok=True)
    if wanted:
        values = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
        write_companions(file.parent, {file.name: (json.dumps(values, indent=2) + "\n").encode()})


def _write_defaults(file: Path, defaults: SamplingDefaults) -> None:
    """Bring the sampling options of generation_config.json to these; a file that has them already is not changed."""
    values = read_json(file) if file.is_file() else {}
    try:
        same = (parse_sampling_defaults(file, values) or SamplingDefaults()) == defaults
    except CheckpointError:
        same = False
    if not same:
        text = json.dumps(with_sampling_defaults(values, defaults), indent=2, ensure_ascii=False)
        write_companions(file.parent, {file.name: f"{text}\n".encode()})


def check_target(device: torch.device | str) -> None:
    """Raise if weights cannot be loaded to this device, before any are read."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or another of torch's, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} needs a GPU that torch can use, and there is none; use device='cpu'")
