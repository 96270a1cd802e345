"""Rewrite a checkpoint of any family as one of ours with quantised weights, one tensor at a time.

quantize_checkpoint("Qwen/Qwen3.5-4B", "qwen-int8", "int8")
model = HybridLM.from_pretrained("qwen-int8")
"""

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lineate.models.families import make_plan, other_family, present, read_config
from lineate.models.files.checkpoint import Checkpoint, save_streamed
from lineate.models.files.filling import allocate, dtype_of, fill
from lineate.models.files.gguf_tokenizer import UnknownTokenizer, companions_of
from lineate.models.files.loading import LoadingPlan, check_all, show_progress
from lineate.models.files.safetensors import CheckpointError, TensorSize
from lineate.models.files.tiled import sizes, stored_tensors
from lineate.models.hybrid import empty_model
from lineate.models.opening import open_checkpoint
from lineate.models.pretrained import SHARD_BYTES, own_config, write_beside
from lineate.models.sampling_defaults import SamplingDefaults, read_sampling_defaults
from lineate.quantised.format import Format, find_format
from lineate.quantised.which import quantised_formats


@dataclass(frozen=True)
class Quantized:
    """The checkpoint that was written.

    Args:
        folder: the new checkpoint.
        form: the format of its weights.
        bytes_before: bytes of the files that were read.
        bytes_after: bytes of the tensors that were written.
        stayed: the bytes of tensors that are not quantised, by name; layers of one name are added up.
    """

    folder: Path
    form: Format
    bytes_before: int
    bytes_after: int
    stayed: dict[str, int]


def quantize_checkpoint(
    name: str | Path,
    out: str | Path,
    weights: str | Format,
    progress: bool = True,
    max_shard_bytes: int = SHARD_BYTES,
) -> Quantized:
    """Write a checkpoint of ours whose large weights are quantised; no more than one tensor is in memory at a time.

    The tokenizer's files are copied; a GGUF file without one gives a warning. If anything fails, nothing is left.

    Args:
        name: a checkpoint that HybridLM.from_pretrained reads, or its name on the hub.
        out: the new folder, which must not exist or be empty.
        weights: the format, "bfloat16", "float16", "int8", "int4" or "fp8".
        progress: whether a bar is shown, if there is a terminal.
        max_shard_bytes: the most bytes of a file, unless one tensor alone has more.
    """
    form, out = find_format(weights), Path(out).resolve()
    _check_free(out)
    checkpoint = open_checkpoint(name)
    config, defaults = read_config(checkpoint), _defaults(checkpoint)
    model = empty_model(config)
    checkpoint = present(checkpoint, model)
    plan, tensors, quantised = make_plan(checkpoint, config, model), model.state_dict(), quantised_formats(model, form)
    check_all(tensors, plan, checkpoint, other_family(checkpoint))
    try:
        kept = companions_of(checkpoint.folder)
    except UnknownTokenizer as error:
        warnings.warn(f"{error}; the new folder has no tokenizer", stacklevel=2)
        kept = {}
    written: dict[str, dict[str, TensorSize]] = {}
    for key, x in tensors.items():
        plain = TensorSize(dtype_of(key, x, _stored(checkpoint, plan, key)), tuple(x.shape))
        written[key] = sizes(key, tuple(x.shape), form) if key in quantised else {key: plain}
    _check_room(out, sum(size.nbytes for own in written.values() for size in own.values()))
    with _renamed(out) as part, show_progress(checkpoint, plan, progress, "quantizing") as advance:
        make = _maker(checkpoint, plan, tensors, quantised, written, advance)
        flat = {key: size for own in written.values() for key, size in own.items()}
        save_streamed(part, flat, make, own_config(config, torch.float32, form), max_shard_bytes)
        write_beside(part, kept, config, defaults)
    stayed: dict[str, int] = {}
    for key, own in written.items():
        if key not in quantised:
            short = re.sub(r"^layers\.\d+\.", "", key)
            stayed[short] = stayed.get(short, 0) + sum(size.nbytes for size in own.values())
    files = {checkpoint.entries[piece.source].file for pieces in plan.pieces.values() for piece in pieces}
    before = sum(file.stat().st_size for file in files)
    return Quantized(out, form, before, sum(size.nbytes for size in flat.values()), stayed)


def _defaults(checkpoint: Checkpoint) -> SamplingDefaults | None:
    """Return the sampling options that a checkpoint names; wrong ones give a warning, as nothing is drawn here."""
    try:
        return read_sampling_defaults(checkpoint)
    except CheckpointError as error:
        kept = "left out of" if checkpoint.metadata is not None else "copied unchanged to"
        warnings.warn(f"{error}; the sampling options are {kept} the new folder", stacklevel=3)
        return None


def _check_free(out: Path) -> None:
    if out.suffix.lower() in (".gguf", ".safetensors"):
        raise ValueError(
            f"the new folder must not be named as a file, got {out.name}; lineate quantize writes a folder with "
            f"config.json and safetensors, such as {out.stem}, and no GGUF files"
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        kind = "a folder that is not empty" if out.is_dir() else "a file"
        raise ValueError(f"the new folder must not exist or be empty, got {out}, which is {kind}; choose another name")


def _check_room(out: Path, nbytes: int) -> None:
    """Raise before anything is written if the disk of the new folder has fewer than `nbytes` bytes free."""
    place = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise OSError(
            errno.ENOSPC, f"the new folder needs {nbytes:,} bytes and its disk has {free:,}; free some or choose "
            "another place", str(out),
        )  # fmt: skip


def _stored(checkpoint: Checkpoint, plan: LoadingPlan, name: str) -> torch.dtype:
    """Return the dtype that holds a tensor as it is stored, float32 if its pieces differ."""
    found = {checkpoint.entries[piece.source].dtype for piece in plan.pieces[name]}
    return found.pop() if len(found) == 1 and found <= {torch.bfloat16, torch.float16} else torch.float32


def _maker(
    checkpoint: Checkpoint,
    plan: LoadingPlan,
    tensors: Mapping[str, Tensor],
    quantised: Mapping[str, Format],
    written: Mapping[str, Mapping[str, TensorSize]],
    advance: Callable[[int], None],
) -> Callable[[str], Tensor]:
    """Return a function that makes a tensor of the new checkpoint by its name; scales are made with their codes."""
    owners = {key: name for name, own in written.items() for key in own}
    waiting: dict[str, Tensor] = {}

    def make(key: str) -> Tensor:
        if key not in waiting:
            name = owners[key]
            form, dtype = quantised.get(name), next(iter(written[name].values())).dtype
            made = allocate(name, tensors[name], torch.float32 if form else dtype, "cpu", form)
            fill(checkpoint, plan.pieces[name], made, advance)
            waiting.update(stored_tensors(name, made))
        return waiting.pop(key)

    return make


@contextmanager
def _renamed(out: Path) -> Iterator[Path]:
    """Yield a new folder next to `out`, and rename it to `out` at the end; if anything fails, it is removed."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    new = [folder for folder in part.parents if not folder.exists()]
    try:
        part.mkdir(parents=True)
        yield part
        part.replace(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for folder in new:
            with suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise
