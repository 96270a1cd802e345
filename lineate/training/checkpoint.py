"""Checkpoints of a run: folders step-000123, each either complete or absent.

A folder is written under a temporary name: first its files, synced to the disk, then a manifest with the size and
SHA-256 of each. Then it is renamed, and its parent synced. A checkpoint that does not match its manifest is never
loaded. All files are safetensors or JSON.

    manifest.json        {file: [size, sha256]}
    state.json           step, size of the metrics, random state, checksums of the data
    model.safetensors    optimizer.safetensors    random.safetensors    if one process wrote it
    ranks/               if several did: one file a rank (sharded.py)
    the files of the tokenizer, and config.json of the model
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lineate.models.files.runs import MANIFEST_FILE, checkpoints, digest_of, newest, problem
from lineate.models.files.safetensors import CheckpointError, Reader, read_header, write_bytes, write_tensors
from lineate.training.distributed import World

RUN_STATE_FILE = "state.json"
RANKS_FOLDER = "ranks"
__all__ = [
    "check_ranks_folder",
    "checkpoints",
    "load_model",
    "load_optimizer",
    "load_random_state",
    "newest",
    "problem",
    "prune",
    "random_state",
    "ranks_folder",
    "read_tensors",
    "save",
    "write_json",
    "write_state",
]


def save(
    folder: Path, step: int, write: Callable[[Path], None], world: World, keep: int, warn: Callable[[str], None]
) -> bool:
    """Save a checkpoint and remove older ones; all ranks must call it.

    Args:
        folder: The folder of all checkpoints.
        step: The step, which names the checkpoint.
        write: Writes the files of the checkpoint into the folder that it is given; called on every rank.
        world: The ranks.
        keep: How many checkpoints to keep.
        warn: Called with a sentence if the checkpoint could not be written.

    Returns:
        False if the files could not be written, for instance because the disk is full. The partial checkpoint is then
        removed, and older ones stay.
    """
    final, partial = folder / f"step-{step:06d}", folder / f".step-{step:06d}.part"
    failed = _try(lambda: _begin(folder, partial), world, world.is_main)
    failed = failed or _try(lambda: write(partial), world, True)
    failed = failed or _try(lambda: _finish(partial, final), world, world.is_main)
    if failed and world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        older = next((path.name for path in checkpoints(folder) if problem(path, contents=False) is None), None)
        kept = "there is no checkpoint yet" if older is None else f"the newest checkpoint is still {older}"
        warn(f"step {step} was not saved ({failed}); {kept}")
    elif world.is_main:
        prune(folder, keep)
    world.barrier()
    return not failed


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and damaged ones if a newer one is complete."""
    good = 0
    for path in checkpoints(folder):
        whole = problem(path, contents=False) is None
        if good >= keep or (good and not whole):
            _remove(path)
        good += whole


def _try(work: Callable[[], None], world: World, mine: bool) -> str:
    """Run work on the ranks where `mine` is True; return on every rank why it failed on any, or "" if it did not."""
    error = ""
    if mine:
        try:
            work()
        except OSError as failure:
            error = failure.strerror or str(failure)
    world.barrier()  # with a longer timeout than the sum: rank 0 reads all files to verify them
    failures = world.sum_everywhere(torch.tensor(float(bool(error)), device=world.device))
    return (error or "another rank failed") if failures else ""


def _begin(folder: Path, partial: Path) -> None:
    """Make the temporary folder of a checkpoint, and remove others."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # left by a process that was killed
        shutil.rmtree(left)
    partial.mkdir()


def _finish(partial: Path, final: Path) -> None:
    """Sync the files, write the manifest, and give the folder its final name."""
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    for file in files:
        _sync(file)
    manifest = {str(file.relative_to(partial)): (file.stat().st_size, digest_of(file)) for file in files}
    write_bytes(partial / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
    for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(path)
    if final.exists():  # it is damaged, or the run would have resumed from it
        _remove(final)
    partial.rename(final)
    _sync(final.parent)


def _remove(path: Path) -> None:
    """Rename a checkpoint and then remove it, so that an interrupted removal leaves no incomplete checkpoint."""
    old = path.with_name(f".{path.name}.old")
    try:
        path.rename(old)
        shutil.rmtree(old)
    except OSError:  # the next save tries again
        pass


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file completely or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write_bytes(partial, [json.dumps(value, indent=1).encode()])
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], list[Any]]:
    """Return torch's random states (CPU and GPU) and Python's."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    return tensors, [version, list(words), gauss]


def load_random_state(path: Path, python: list[Any], device: torch.device) -> None:
    """Restore the random states of a checkpoint.

    Args:
        path: The folder of the checkpoint.
        python: Python's state, as random_state returned it.
        device: The device whose state is restored in addition to the CPU's.
    """
    file = path / "random.safetensors"
    tensors = read_tensors(file)
    try:
        torch.set_rng_state(tensors["cpu"])
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], device)
        random.setstate((python[0], tuple(python[1]), python[2]))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{file} and {RUN_STATE_FILE}: expected random states, got {error!r:.200}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file to the CPU."""
    reader, found = Reader(), {}
    for name, entry in read_header(file).items():
        found[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        reader.read_into(name, entry, found[name])
    return found


def write_state(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Write the weights and the optimiser's state; with several ranks, all must call it.

    Args:
        path: The folder of the checkpoint.
        model: The model, sharded or not.
        optimizer: Its optimiser.
        world: The ranks.
    """
    if world.size > 1:
        from lineate.training.sharded import save_distributed

        assert world.readers is not None
        save_distributed(ranks_folder(path, world), model, optimizer, world.readers.get_group())
        return
    write_tensors(path / "model.safetensors", {name: x.detach() for name, x in model.state_dict().items()})
    names: dict[Tensor, str] = {x: name for name, x in model.named_parameters()}
    tensors = {
        f"{names[x]}/{key}": value for x, values in optimizer.state.items() for key, value in values.items()
    }  # fmt: skip
    # Sorted, so that a resumed run writes the same file as an uninterrupted one.
    write_tensors(path / "optimizer.safetensors", dict(sorted(tensors.items())))


def ranks_folder(path: Path, world: World) -> Path:
    """Return the folder that several ranks write a checkpoint to: one for each share of the model.

    Args:
        path: The folder of the checkpoint.
        world: The ranks.
    """
    folder = path / RANKS_FOLDER
    return folder if world.tensor_size == 1 else folder / f"tensor-{world.tensor_rank}-of-{world.tensor_size}"


def check_ranks_folder(path: Path, world: World) -> None:
    """Raise ValueError unless the ranks that share the model are as many as wrote the checkpoint.

    Args:
        path: The folder of the checkpoint.
        world: The ranks.
    """
    found = sorted((path / RANKS_FOLDER).glob("tensor-0-of-*"))
    wrote = int(found[0].name.rpartition("-")[2]) if found else 1
    if wrote != world.tensor_size:
        raise ValueError(
            f"tensor must be {wrote}, as when {path} was saved, got {world.tensor_size}; the model of a finished run "
            "can be shared out among any number of ranks"
        )


def load_model(path: Path, model: nn.Module) -> None:
    """Read weights that one process wrote into a model that World.wrap has not wrapped yet.

    Args:
        path: The folder of the checkpoint.
        model: The model to fill.
    """
    file = path / "model.safetensors"
    entries, state, reader = read_header(file), model.state_dict(), Reader()
    if entries.keys() != state.keys():
        other = sorted(entries.keys() ^ state.keys())[0]
        raise CheckpointError(f"{file}: expected the tensors of this model, got a difference in {other}")
    for name, x in state.items():
        if entries[name].shape != tuple(x.shape):
            raise CheckpointError(f"{file}: {name} must have shape {tuple(x.shape)}, got {entries[name].shape}")
        reader.read_into(name, entries[name], x)


def load_optimizer(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read the optimiser's state by parameter names, and shard it as the parameters are sharded.

    Args:
        path: The folder of the checkpoint.
        model: The model, whose parameters the optimiser trains.
        optimizer: The optimiser to fill.
    """
    values: dict[str, dict[str, Tensor]] = {}
    for full, value in read_tensors(path / "optimizer.safetensors").items():
        name, _, key = full.rpartition("/")
        values.setdefault(name, {})[key] = value
    names = {x: name for name, x in model.named_parameters()}
    packed = optimizer.state_dict()
    packed["state"] = {}
    index = 0
    for group in optimizer.param_groups:
        for x in group["params"]:
            for key, value in values.get(names[x], {}).items():
                if value.dim() and value.shape != x.shape:
                    raise CheckpointError(
                        f"{path}: the optimiser's {key} of {names[x]} must have shape {tuple(x.shape)}, got "
                        f"{tuple(value.shape)}"
                    )
            if names[x] in values:
                packed["state"][index] = {key: _split(value, x) for key, value in values.pop(names[x]).items()}
            index += 1
    if values:
        raise CheckpointError(
            f"{path}: the optimiser's state has {next(iter(values))}, which this model does not train"
        )
    optimizer.load_state_dict(packed)


def _split(value: Tensor, x: Tensor) -> Tensor:
    """Shard a value as the parameter x is sharded, if it has its shape."""
    if not isinstance(x, DTensor) or value.shape != x.shape:
        return value
    return distribute_tensor(value.to(x.device), x.device_mesh, x.placements)
