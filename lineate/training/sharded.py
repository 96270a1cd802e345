"""Checkpoints that several ranks write together and any number of ranks can read, by torch.distributed.checkpoint.

A folder has one safetensors file a rank, with that rank's shards and their offsets, and state.json, written last:

    {"files": {name: bytes}, "groups": [{"names": [...], "options": {"lr": ...}}], "scalars": {parameter: {key: value}}}

Tensors are named `model.NAME` and `optimizer.KEY.NAME`, where NAME is the parameter's. Nothing is pickled. A rank reads
only the shards that it holds. The optimizer's state is read from optimizer.state directly: torch's functions for it
would make a step to learn the shapes, and would round the state to the parameters' dtype.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lineate.console.extras import not_installed
from lineate.models.files.safetensors import CheckpointError, read_header, write_bytes
from lineate.training.distributed import on_main

SHARDS_STATE_FILE = "state.json"
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and the dtype of each tensor, by name."""


def save_distributed(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the model and the optimizer's state; all ranks must call it.

    When it returns, everything is on the disk. If any rank fails, for instance because the disk is full, all ranks
    raise OSError.

    Args:
        folder: A new or empty folder on a file system that all ranks share.
        model: The model, sharded or not.
        optimizer: Its optimizer; None saves only the model.
        group: The ranks that write it, if they are not all: those with the same share of the model (World.readers).
    """
    _need_safetensors()
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    path = Path(folder)

    def prepare() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(f"{path} must be a new or an empty folder, got one with files; remove it first")

    groups, scalars, tensors = _pack(model, optimizer)  # first, since it can fail without touching the disk
    on_main(prepare, "write the checkpoint", group)
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with _plain_errors(f"could not write {path}"):
        save(tensors, storage_writer=writer, process_group=group)

    def finish() -> None:
        files = {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}
        text = json.dumps({"files": files, "groups": groups, "scalars": scalars}, indent=1)
        write_bytes(path / SHARDS_STATE_FILE, [text.encode()])

    on_main(finish, "write the checkpoint", group)


def load_distributed(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    options: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint of save_distributed, on any number of ranks, into a model and its optimizer, on all ranks.

    Args:
        folder: The folder that was saved.
        model: The model to fill, sharded or not.
        optimizer: The optimizer to fill; None reads only the model.
        options: Whether to read the optimizer's options (learning rates, weight decays), too; False keeps its own and
            reads only its averages and step counts.
        group: The ranks that read it, if they are not all.
    """
    _need_safetensors()
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = Path(folder)
    state = _read_state(path)
    reader = HuggingFaceStorageReader(str(path))
    found = _found(reader.read_metadata().state_dict_metadata)
    tensors = _model_tensors(model)
    _check_tensors(path, {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}, found)
    parameters = _parameters(model)
    if optimizer is not None:
        names = _group_names(model, optimizer)
        saved = [group["names"] for group in state["groups"]]
        if names != saved:
            raise CheckpointError(
                f"{path}: expected an optimizer with {len(names)} groups of {[len(x) for x in names]} parameters, got "
                f"{len(saved)} of {[len(x) for x in saved]}; create the same optimizer as when the checkpoint was saved"
            )
        for name, (shape, dtype) in found.items():
            if name.startswith("optimizer."):
                tensors[name] = _like(parameters[name.split(".", 2)[2]], shape, dtype)
    with _plain_errors(f"could not read {path}"):
        load(tensors, storage_reader=reader, process_group=group)
    if optimizer is not None:
        _unpack(optimizer, state, tensors, parameters, options)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the whole weights on the CPU of rank 0, for save_pretrained; all ranks must call it.

    Args:
        model: The model, sharded or not.

    Returns:
        The weights by name on rank 0, an empty dict on the others.
    """
    whole = {}
    for name, x in _model_tensors(model).items():
        x = x.full_tensor() if isinstance(x, DTensor) else x  # one at a time, since all may not fit on a GPU
        if not dist.is_initialized() or dist.get_rank() == 0:
            whole[name.removeprefix("model.")] = x.detach().cpu()
    return whole


def _pack(
    model: nn.Module, optimizer: Optimizer | None
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Return the optimizer's groups and its scalars as JSON values, and all tensors by name."""
    groups: list[dict[str, Any]] = []
    scalars: dict[str, dict[str, Any]] = {}
    tensors = _model_tensors(model)
    if optimizer is None:
        return groups, scalars, tensors
    for group, names in zip(optimizer.param_groups, _group_names(model, optimizer), strict=True):
        options = {key: _to_json(key, value) for key, value in group.items() if key != "params"}
        groups.append({"names": names, "options": options})
        for name, x in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(x, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    scalars.setdefault(name, {})[key] = _to_json(key, value)
                    continue
                if isinstance(x, DTensor) and not isinstance(value, DTensor):
                    raise TypeError(
                        f"the optimizer's {key} of {name} must be a DTensor, as the parameter is, got a plain tensor "
                        f"of shape {tuple(value.shape)}; make it with torch.zeros_like(parameter)"
                    )
                tensors[f"optimizer.{key}.{name}"] = value
    return groups, scalars, tensors


def _unpack(
    optimizer: Optimizer,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    parameters: dict[str, nn.Parameter],
    options: bool,
) -> None:
    """Fill the optimizer with the values of the checkpoint."""
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        if options:
            group.update({key: _from_json(value) for key, value in saved["options"].items()})
        # torch keeps step counts on the CPU, unless the optimizer's kernels read them
        place = group["params"][0].device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        for name in saved["names"]:
            for key, value in state["scalars"].get(name, {}).items():
                value = _from_json(value)
                optimizer.state[parameters[name]][key] = value.to(place) if isinstance(value, Tensor) else value
    for full_name, value in tensors.items():
        if full_name.startswith("optimizer."):
            _, key, name = full_name.split(".", 2)
            optimizer.state[parameters[name]][key] = value


def _to_json(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, tuple | list):
        return [_to_json(key, x) for x in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the optimizer's {key} must be a number, text, or a tuple of them, got {type(value).__name__}")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]), device="cpu")
    return tuple(_from_json(x) for x in value) if isinstance(value, list) else value


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, not copied, so that loading fills them in place."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {f"model.{name}": x for name, x in get_model_state_dict(model).items() if isinstance(x, Tensor)}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the state dict, without the prefix that torch.compile adds."""
    return {name.replace("_orig_mod.", ""): x for name, x in model.named_parameters()}


def _group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of the optimizer."""
    names = {x: name for name, x in _parameters(model).items()}
    for group in optimizer.param_groups:
        for x in group["params"]:
            if x not in names:
                raise ValueError(
                    f"optimizer must be made of the model's parameters, got one of shape {tuple(x.shape)} that is not; "
                    "make the optimizer after World.wrap(model)"
                )
    return [[names[x] for x in group["params"]] for group in optimizer.param_groups]


def _like(x: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor for a parameter's state, sharded like the parameter if it has the same shape."""
    if tuple(x.shape) == shape:
        return torch.empty_like(x, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _read_state(path: Path) -> dict[str, Any]:
    """Read state.json, and raise CheckpointError unless the files are those that it names, with their sizes."""
    file = path / SHARDS_STATE_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{path}: expected a file {SHARDS_STATE_FILE}, got none; the save was not finished, use an older one"
        )
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        files, groups = dict(state["files"]), list(state["groups"])
        dict(state["scalars"])
        if any(set(group) != {"names", "options"} for group in groups):
            raise ValueError("groups without names and options")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected files, groups and scalars in JSON, got {error!r}") from None
    sizes = {part.name: part.stat().st_size for part in path.glob("*.safetensors")}
    for name, size in files.items():
        if sizes.pop(name, None) != size:
            got = f"{(path / name).stat().st_size} bytes" if (path / name).is_file() else "no such file"
            raise CheckpointError(f"{path}: expected {name} of {size} bytes, got {got}; use an older checkpoint")
        read_header(path / name)
    if sizes:
        raise CheckpointError(f"{path}: expected only {', '.join(files)}, got {', '.join(sizes)} too; remove it")
    return state


def _found(metadata: dict[str, Any]) -> Shapes:
    """Return the shapes and dtypes of the tensors in a checkpoint."""
    return {name: (tuple(x.size), x.properties.dtype) for name, x in metadata.items()}


def _check_tensors(path: Path, wanted: Shapes, found: Shapes) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the model's tensors."""
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise CheckpointError(f"{path}: expected a tensor {name}, got none; it is another model's checkpoint")
        if found[name] != (shape, dtype):
            raise CheckpointError(
                f"{path}: expected {name} of shape {shape} in {dtype}, got {found[name][0]} in {found[name][1]}"
            )
    for name in found:
        if name.startswith("model.") and name not in wanted:
            raise CheckpointError(
                f"{path}: expected a model with {name}, got one without; it is another model's checkpoint"
            )


def _need_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            not_installed("a checkpoint of many ranks", "safetensors"), name="safetensors"
        ) from None


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise the first failure of any rank as an ordinary error; torch collects them all in a BaseException."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            yield
        except CheckpointException as failures:
            rank, (error, _) = next(iter(failures.failures.items()))
            message = f"rank {rank} {what}: {error}"
            if isinstance(error, OSError):
                raise OSError(error.errno, message) from error
            raise CheckpointError(message) from error
