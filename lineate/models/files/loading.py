"""Fills a model from a checkpoint whose tensors have other names, orders and dtypes.

A plan defines for every tensor of the model the pieces of the checkpoint that fill it. It is checked against the
headers before any memory is allocated; one error lists all tensors that are missing, unexpected or misshapen. Then
every tensor is allocated once, on its device and in its dtype, and threads fill them in the order of the files.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from lineate.console.terminal import console, printable
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.encodings import Encoded
from lineate.models.files.filling import Piece, allocate, box_of, units_of
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.threads import run_units
from lineate.models.files.units import stored_bytes
from lineate.quantised.format import Format
from lineate.quantised.weight import QuantisedWeight

__all__ = [
    "LoadingPlan",
    "MismatchError",
    "Piece",
    "check_all",
    "check_plan",
    "check_tensors",
    "load",
    "show_progress",
    "stored_dtype",
]
LISTED = 40
"""The number of tensors that a message names for each kind of problem; the error's attributes have all."""


@dataclass(frozen=True)
class LoadingPlan:
    """The mapping from the tensors of a checkpoint to those of a model."""

    pieces: Mapping[str, Sequence[Piece]]
    """The pieces of every parameter and buffer of the model."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that the model does not need."""
    equal: tuple[tuple[str, str], ...] = ()
    """Pairs of checkpoint tensors that fill one tensor of the model, and so must have equal values."""


class MismatchError(CheckpointError):
    """Tensors that do not fit the config."""

    def __init__(
        self,
        where: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[str] = (),
        hint: str = "",
    ) -> None:
        self.missing, self.unexpected, self.misshapen = tuple(missing), tuple(unexpected), tuple(misshapen)
        lines = [f"{where}: the tensors do not fit the config{hint}"]
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)):
            if names:
                lines.append(f"  {kind} ({len(names)}):")
                lines += [f"    {name}" for name in names[:LISTED]]
                if len(names) > LISTED:
                    lines.append(f"    ... and {len(names) - LISTED} more")
        super().__init__("\n".join(lines))


@dataclass
class _Target:
    """A parameter or buffer of the model, and the tensor that will replace it."""

    module: nn.Module
    key: str
    like: Tensor
    made: Tensor | None = field(default=None)

    @property
    def full(self) -> Tensor:
        assert self.made is not None
        return self.made


def load(
    model: nn.Module,
    plan: LoadingPlan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = True,
    hint: str = "",
    quantised: Mapping[str, Format] | None = None,
) -> None:
    """Give a model on the meta device its tensors; if anything fails it is unchanged.

    Floating tensors become `dtype`, except those of KEPT_FLOAT32, which are float32, and those in `quantised`, which
    become weights of these formats; to callers they have `dtype`.
    """
    targets, quantised = _find_targets(model), quantised or {}
    check_all({name: target.like for name, target in targets.items()}, plan, checkpoint, hint)
    for name, target in targets.items():
        target.made = allocate(name, target.like, dtype, device, quantised.get(name))
    units = [unit for name, target in targets.items() for unit in units_of(checkpoint, plan.pieces[name], target.full)]
    units.sort(key=lambda unit: unit.place)
    with show_progress(checkpoint, plan, progress) as advance:
        run_units(units, checkpoint, torch.device(device), advance)
    for target in targets.values():
        if target.key in target.module._parameters:
            learns = target.like.requires_grad and not isinstance(target.full, QuantisedWeight)
            kept = nn.Parameter(target.full, requires_grad=learns)
            target.module.register_parameter(target.key, kept)
        else:
            target.module.register_buffer(target.key, target.full)


def check_all(tensors: Mapping[str, Tensor], plan: LoadingPlan, checkpoint: Checkpoint, hint: str = "") -> None:
    """Raise unless the checkpoint has all tensors that the plan needs, before anything is allocated."""
    check_plan({name: tuple(x.shape) for name, x in tensors.items()}, plan)
    check_tensors(plan, checkpoint, {name for name, x in tensors.items() if x.is_floating_point()}, hint)
    for first, second in plan.equal:
        _check_equal(checkpoint, first, second)


def check_plan(shapes: Mapping[str, tuple[int, ...]], plan: LoadingPlan) -> None:
    """Raise unless the plan fills every element of the model exactly once; a failure is an error of the plan."""
    if plan.pieces.keys() != shapes.keys():
        planned, made = sorted(plan.pieces.keys() - shapes.keys()), sorted(shapes.keys() - plan.pieces.keys())
        only = f"{planned[:8]} only in the plan and {made[:8]} only in the model"
        raise RuntimeError(f"the plan and the model must name the same tensors, got {only}")
    for name, shape in shapes.items():
        boxes = [box_of(piece.into, shape) for piece in plan.pieces[name]]
        filled = sum(math.prod(last - first for first, last in box) for box in boxes)
        if filled != math.prod(shape) or not _disjoint(boxes, 0):
            raise RuntimeError(
                f"the pieces of {name} must fill {shape} once, got {len(boxes)} pieces of {filled} elements"
            )
        for piece, box in zip(plan.pieces[name], boxes, strict=True):
            _check_piece(piece, name, shape, box)


def _check_piece(piece: Piece, name: str, shape: tuple[int, ...], box: list[tuple[int, int]]) -> None:
    block = piece.shape if piece.rows is None else (piece.rows[1] - piece.rows[0], *piece.shape[1:])
    sizes = [last - first for first, last in box]
    if piece.take is None:
        if math.prod(block) != math.prod(sizes):
            raise RuntimeError(f"{piece} must have as many elements as its part of {name} {shape}")
        stored, wanted = ([size for size in x if size != 1] for x in (block, sizes))
        if stored != wanted and sorted(stored) == sorted(wanted):
            raise RuntimeError(f"{piece.source} {block} must be transposed for its part {sizes} of {name}, got no take")
        return
    indexed = [isinstance(index, int) for index in piece.into] + [False] * len(sizes)
    part = tuple(size for size, gone in zip(sizes, indexed, strict=False) if not gone)
    if (got := _taken_shape(piece.take, block)) != part:
        raise RuntimeError(f"what is taken of {piece.source} must have shape {part} for {name} {shape}, got {got}")


@lru_cache(maxsize=64)
def _taken_shape(take: Callable[[Tensor], Tensor], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(take(torch.empty(block, device="meta")).shape)


def check_tensors(plan: LoadingPlan, checkpoint: Checkpoint, floating: set[str], hint: str = "") -> None:
    """Raise unless every planned tensor exists with its shape, and every other one is known to be superfluous."""
    missing: dict[str, None] = {}
    misshapen: dict[str, None] = {}
    used = {name for pair in plan.equal for name in pair}
    for target, pieces in plan.pieces.items():
        for piece in pieces:
            entry = checkpoint.entries.get(piece.source)
            used.add(piece.source)
            if entry is None:
                missing[f"{piece.source}: expected shape {piece.shape}"] = None
            elif entry.shape != piece.shape:
                misshapen[f"{piece.source}: expected shape {piece.shape}, got {entry.shape}"] = None
            elif entry.dtype.is_floating_point != (target in floating):
                wanted = "a floating dtype" if target in floating else "an integer dtype"
                misshapen[f"{piece.source}: expected {wanted}, got {entry.dtype}"] = None
    ignored = re.compile("|".join(plan.ignored) or r"(?!)")
    unexpected = [
        f"{name}: of shape {entry.shape}"
        for name, entry in checkpoint.entries.items()
        if name not in used and not ignored.search(name)
    ]
    if missing or unexpected or misshapen:
        raise MismatchError(str(checkpoint.folder), list(missing), unexpected, list(misshapen), hint)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the floating dtype of at least 16 bits that most bytes are in; quantised tensors do not count."""
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1 and not isinstance(entry, Encoded):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def _find_targets(model: nn.Module) -> dict[str, _Target]:
    found: dict[str, _Target] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for key, parameter in module.named_parameters(recurse=False):
            found[dot + key] = _Target(module, key, parameter)
        for key, buffer in module.named_buffers(recurse=False):
            if key in module._non_persistent_buffers_set:
                raise RuntimeError(
                    f"buffer {dot}{key} is in no checkpoint: compute it in forward, or make it persistent"
                )
            found[dot + key] = _Target(module, key, buffer)
    return found


def _disjoint(boxes: list[list[tuple[int, int]]], dim: int) -> bool:
    """Whether boxes that agree in all dims before this one do not overlap."""
    if len(boxes) <= 1:
        return True
    if dim == len(boxes[0]):
        return False
    groups = [(key, list(group)) for key, group in groupby(sorted(boxes), key=lambda box: box[dim])]
    apart = all(one[1] <= other[0] for (one, _), (other, _) in pairwise(groups))
    return apart and all(_disjoint(group, dim + 1) for _, group in groups)


def _check_equal(checkpoint: Checkpoint, first: str, second: str) -> None:
    one, other = checkpoint.entries[first], checkpoint.entries[second]
    same = one.shape == other.shape and one.dtype == other.dtype
    step = max(1, 2**23 // max(1, one.nbytes // max(1, one.shape[0])))
    for row in range(0, one.shape[0], step):
        if not same:
            break
        rows = (row, min(row + step, one.shape[0]))
        parts = [torch.empty(rows[1] - row, *one.shape[1:], dtype=one.dtype, device="cpu") for _ in range(2)]
        checkpoint.read_into(first, parts[0], rows)
        checkpoint.read_into(second, parts[1], rows)
        same = torch.equal(parts[0], parts[1])
    if not same:
        raise CheckpointError(
            f"{checkpoint.folder}: the config ties {second} to {first}, so they must be equal, got different values; "
            'set "tie_word_embeddings": false in config.json if they are meant to differ'
        )


@contextmanager
def show_progress(
    checkpoint: Checkpoint, plan: LoadingPlan, progress: bool, verb: str = "loading"
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes of the files, if it is wanted, stderr is a terminal and rich is installed."""
    bar = None
    if progress and sys.stderr.isatty():
        try:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=console(stderr=True), transient=True)
        except ImportError:
            pass
    if bar is None:
        yield lambda nbytes: None
        return
    total = sum(stored_bytes(checkpoint, piece) for pieces in plan.pieces.values() for piece in pieces)
    with bar:
        task = bar.add_task(printable(f"{verb} {checkpoint.folder.name}"), total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
