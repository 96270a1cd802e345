"""Checkpoints of a run: folders step-000123, each whole or not there.

A folder is written under another name: files, synced to the disk, then a manifest with the size and SHA-256 of each.
It is renamed, and its parent synced. What does not match its manifest is never loaded. Safetensors and JSON only.

    manifest.json        {file: [size, sha256]}
    state.json           step, position in the metrics, random state, what data
    model.safetensors    optimizer.safetensors    random.safetensors    by one process
    ranks/               by several: one file a rank (sharded.py)
    tokenizer files, config.json of the model
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lineate.models.safetensors import CheckpointError, Reader, read_header, write_bytes, write_tensors
from lineate.training.distributed import World

MANIFEST_FILE = "manifest.json"
RUN_STATE_FILE = "state.json"
RANKS_FOLDER = "ranks"


def checkpoints(folder: Path) -> list[Path]:
    """All step folders, the newest first, good or not."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    named = [
        (int(path.name[5:]), path) for path in found if re.fullmatch(r"step-([0-9]{6}|[1-9][0-9]{6,17})", path.name)
    ]
    return [path for _, path in sorted(named, reverse=True)]


def problem(path: Path, contents: bool = True) -> str | None:
    """Why a checkpoint cannot be used, or None; contents=False: only names and sizes are compared."""
    try:
        manifest: dict[str, tuple[int, str]] = json.loads((path / MANIFEST_FILE).read_text())
        if not manifest:
            return f"{MANIFEST_FILE} names no files"
        for name, (size, digest) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if (got := file.stat().st_size) != size:
                return f"{name} should have {size} bytes, got {got}"
            if contents and _digest(file) != digest:
                return f"the contents of {name} have changed"
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}: the save was not finished"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST_FILE} or a file cannot be read ({error})"
    return None


def newest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its manifest; newer ones that do not are named."""
    for path in checkpoints(folder):
        if (why := problem(path)) is None:
            return path
        warn(f"skipped the checkpoint {path}: {why}")
    return None


def save(
    folder: Path, step: int, write: Callable[[Path], None], world: World, keep: int, warn: Callable[[str], None]
) -> bool:
    """Make step-NNNNNN of what `write` puts into a folder (on every rank), and prune older ones; all ranks call it.

    False if the disk refused (full, say): what was written is removed, a warning given, older checkpoints stay."""
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
    """Remove all but the newest `keep` whole ones; what is damaged goes once a newer one is whole."""
    good = 0
    for path in checkpoints(folder):
        whole = problem(path, contents=False) is None
        if good >= keep or (good and not whole):
            _remove(path)
        good += whole


def _try(work: Callable[[], None], world: World, mine: bool) -> str:
    """Run on the ranks whose work it is; why it failed on any of them, on all of them; "" if it did not."""
    error = ""
    if mine:
        try:
            work()
        except OSError as failure:
            error = failure.strerror or str(failure)
    world.barrier()  # which waits longer than the sum would: rank 0 reads all that was written
    failures = world.sum(torch.tensor(float(bool(error)), device=world.device))
    return (error or "another rank failed") if failures else ""


def _begin(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # by a process that was killed
        shutil.rmtree(left)
    partial.mkdir()


def _finish(partial: Path, final: Path) -> None:
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    for file in files:
        _sync(file)
    manifest = {str(file.relative_to(partial)): (file.stat().st_size, _digest(file)) for file in files}
    write_bytes(partial / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
    for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(path)
    if final.exists():  # damaged: a whole one would have been resumed from
        _remove(final)
    partial.rename(final)
    _sync(final.parent)


def _remove(path: Path) -> None:
    """Under another name first: a removal that is cut short leaves no checkpoint with files missing."""
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


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write_bytes(partial, [json.dumps(value, indent=1).encode()])
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], list[Any]]:
    """torch's (CPU and GPU) and Python's."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    return tensors, [version, list(words), gauss]


def load_random_state(path: Path, python: list[Any], device: torch.device) -> None:
    """Set what random_state gave, of a checkpoint."""
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
    """All of a safetensors file, on the CPU."""
    reader, found = Reader(), {}
    for name, entry in read_header(file).items():
        found[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        reader.read_into(name, entry, found[name])
    return found


def write_state(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Weights and the optimiser's state: by this process alone, or by all ranks at once."""
    if world.size > 1:
        from lineate.training.sharded import save_distributed

        save_distributed(path / RANKS_FOLDER, model, optimizer)
        return
    write_tensors(path / "model.safetensors", {name: x.detach() for name, x in model.state_dict().items()})
    names: dict[Tensor, str] = {x: name for name, x in model.named_parameters()}
    tensors = {
        f"{names[x]}/{key}": value for x, values in optimizer.state.items() for key, value in values.items()
    }  # fmt: skip
    write_tensors(path / "optimizer.safetensors", dict(sorted(tensors.items())))  # the same file, resumed or not


def load_model(path: Path, model: nn.Module) -> None:
    """Weights that one process wrote, into a model that is not wrapped yet."""
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
    """Its state by parameter names, split over ranks where the parameters are."""
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
    if not isinstance(x, DTensor) or value.shape != x.shape:
        return value
    return distribute_tensor(value.to(x.device), x.device_mesh, x.placements)
