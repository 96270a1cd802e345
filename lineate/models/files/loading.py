"""Fills a model from a checkpoint whose tensors have other names, orders and dtypes.

A plan says for every tensor of the model which pieces of the checkpoint it is made of. It is checked against the
headers before any memory is allocated; one error lists all tensors that are missing, unexpected or misshapen. Then
every tensor is made once, on its device and in its dtype, and filled piece by piece in the order of the files. A weight
that becomes small is read, rounded and released a few rows at a time, or a matrix at a time if its pieces need that.
"""

import math
import mmap
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.tiled import TiledCheckpoint
from lineate.small.format import GROUP, TILE, Format, round_to_codes
from lineate.small.weight import SmallWeight
from lineate.small.which import BLOCK, empty_small, expert_views, fill_small, write_codes
from lineate.terminal import console, printable

KEPT_FLOAT32 = {"A_log", "dt_bias", "router_bias"}
"""Gate and router parameters whose rounding would be exponentiated or would change a choice."""
OWN_PAGES = 2**18
"""A tensor of at least this many bytes gets memory pages of its own."""
AT_ONCE = 2**24
"""Elements of a weight that are read at a time, if it becomes small and its rows can be read apart."""
LISTED = 40
"""How many tensors a message names for each kind of problem; the error's attributes have all."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or some rows of it, and where they go."""

    source: str
    shape: tuple[int, ...]
    """The shape that the source must have."""
    into: tuple[int | slice, ...] = ()
    """The index of the part of the target that this piece fills, in row-major order."""
    rows: tuple[int, int] | None = None
    """First and last + 1 row of the source; None: all."""
    take: Callable[[Tensor], Tensor] | None = None
    """Changes these rows to the shape of that part, such as a transpose; the result is held in memory while copied."""


@dataclass(frozen=True)
class LoadingPlan:
    """How the tensors of a model are made from those of a checkpoint."""

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


def load(
    model: nn.Module,
    plan: LoadingPlan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = True,
    hint: str = "",
    small: Mapping[str, Format] | None = None,
) -> None:
    """Give a model on the meta device its tensors; if anything fails it stays as it was.

    Floating tensors become `dtype`, except A_log, dt_bias and router_bias, which are float32, and those named in
    `small`, which become small weights of these formats; for others they have `dtype`.
    """
    targets, small = _find_targets(model), small or {}
    check_plan({name: tuple(target.like.shape) for name, target in targets.items()}, plan)
    check_tensors(plan, checkpoint, {name for name, t in targets.items() if t.like.is_floating_point()}, hint)
    for first, second in plan.equal:
        _check_equal(checkpoint, first, second)
    for name, target in targets.items():
        target.made = allocate(name, target.like, dtype, device, small.get(name))
    jobs = [([piece], name) for name, pieces in plan.pieces.items() for piece in pieces if name not in small]
    jobs += [(list(pieces), name) for name, pieces in plan.pieces.items() if name in small]
    jobs.sort(key=lambda job: min(_place(checkpoint, piece) for piece in job[0]))
    with show_progress(checkpoint, plan, progress) as advance:
        for own, name in jobs:
            made = targets[name].made
            assert made is not None
            fill(checkpoint, own, made, advance)
    for target in targets.values():
        assert target.made is not None
        if target.key in target.module._parameters:
            learns = target.like.requires_grad and not isinstance(target.made, SmallWeight)
            kept = nn.Parameter(target.made, requires_grad=learns)
            target.module.register_parameter(target.key, kept)
        else:
            target.module.register_buffer(target.key, target.made)


def check_plan(shapes: Mapping[str, tuple[int, ...]], plan: LoadingPlan) -> None:
    """Raise unless the plan fills every element of the model exactly once; a failure is an error of the plan."""
    if plan.pieces.keys() != shapes.keys():
        planned, made = sorted(plan.pieces.keys() - shapes.keys()), sorted(shapes.keys() - plan.pieces.keys())
        only = f"{planned[:8]} only in the plan and {made[:8]} only in the model"
        raise RuntimeError(f"the plan and the model must name the same tensors, got {only}")
    for name, shape in shapes.items():
        boxes = [_box(piece.into, shape) for piece in plan.pieces[name]]
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
    """Return the floating dtype of at least 16 bits that most bytes are in."""
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
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


def allocate(
    name: str, like: Tensor, dtype: torch.dtype, device: torch.device | str, form: Format | None = None
) -> Tensor:
    """Return an empty tensor for a model's parameter or buffer: plain, or small in this format.

    Args:
        name: of the parameter or buffer.
        like: a tensor of its shape, on the meta device.
        dtype: of floating tensors, except those that stay float32.
        device: where it is made.
        form: the format of a weight that becomes small.
    """
    if form is None:
        return _empty(like.shape, dtype=dtype_of(name, like, dtype), device=torch.device(device))
    return empty_small(tuple(like.shape), form, dtype, torch.device(device), _empty)


def dtype_of(name: str, like: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's parameter or buffer if floating tensors become `dtype`."""
    if not like.is_floating_point():
        return like.dtype
    return torch.float32 if name.rpartition(".")[2] in KEPT_FLOAT32 else dtype


def _empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate one tensor; large ones on a CPU get their own pages, as torch's allocator may take 25% more."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes).view(dtype).view(*shape)


def _box(into: tuple[int | slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return first and last + 1 index of every dim."""
    box = [(0, size) for size in shape]
    for dim, index in enumerate(into):
        if isinstance(index, int):
            box[dim] = (index, index + 1)
        else:
            box[dim] = index.indices(shape[dim])[:2]
    return box


def _disjoint(boxes: list[list[tuple[int, int]]], dim: int) -> bool:
    """Whether boxes that agree in all dims before this one do not overlap."""
    if len(boxes) <= 1:
        return True
    if dim == len(boxes[0]):
        return False
    groups = [(key, list(group)) for key, group in groupby(sorted(boxes), key=lambda box: box[dim])]
    apart = all(one[1] <= other[0] for (one, _), (other, _) in pairwise(groups))
    return apart and all(_disjoint(group, dim + 1) for _, group in groups)


def _place(checkpoint: Checkpoint, piece: Piece) -> tuple[str, int]:
    """Return the place of a piece in its file; pieces are read in this order, so that files are read front to end."""
    entry = checkpoint.entries[piece.source]
    first = 0 if piece.rows is None else piece.rows[0] * math.prod(entry.shape[1:]) * entry.dtype.itemsize
    return str(entry.file), entry.start + first


def fill(
    checkpoint: Checkpoint, pieces: Sequence[Piece], made: Tensor, advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Fill a tensor with pieces of a checkpoint; a small weight needs all its pieces at once.

    Args:
        checkpoint: where they are read.
        pieces: of this tensor; a plan that check_plan has passed.
        made: what `allocate` returned.
        advance: called with the number of bytes that were read.
    """
    if isinstance(made, SmallWeight) and made.scales is not None:
        _fill_small(checkpoint, pieces, made, advance)
        return
    for piece in pieces:
        part = made.codes if isinstance(made, SmallWeight) else made
        part = part[piece.into] if piece.into else part
        _read(checkpoint, piece, part)
        advance(part.numel() * checkpoint.entries[piece.source].dtype.itemsize)


def _read(checkpoint: Checkpoint, piece: Piece, part: Tensor) -> None:
    """Fill the part of a tensor that a piece is for."""
    if piece.take is None:
        checkpoint.read_into(piece.source, part, piece.rows)
        return
    first, last = piece.rows or (0, piece.shape[0])
    block = torch.empty(last - first, *piece.shape[1:], dtype=checkpoint.entries[piece.source].dtype, device="cpu")
    checkpoint.read_into(piece.source, block, (first, last))
    part.copy_(piece.take(block).reshape(part.shape))


def _fill_small(
    checkpoint: Checkpoint, pieces: Sequence[Piece], small: SmallWeight, advance: Callable[[int], None]
) -> None:
    """Fill a weight of 8 or 4 bits; codes that are stored in its format are taken as they are."""
    shape, source = tuple(small.shape), checkpoint.entries[pieces[0].source]
    if isinstance(checkpoint, TiledCheckpoint) and checkpoint.kept_as(pieces[0].source) == small.format.name:
        checkpoint.read_tiles(pieces[0].source, small)
        advance(source.nbytes)
        return
    if small.dim() == 2:
        matrices = [_as_rows(pieces, shape)]
    else:
        matrices = [_as_rows(own, shape[1:]) for own in _by_expert(pieces, shape)]
    views = [small] if small.dim() == 2 else expert_views(small)
    if None not in matrices and len(matrices) == len(views):
        for view, parts in zip(views, matrices, strict=True):
            assert parts is not None
            _fill_rows(checkpoint, parts, view, advance)
        return
    values = _empty(shape, dtype=torch.float32, device=torch.device("cpu"))
    fill(checkpoint, pieces, values, advance)
    fill_small(small, values)


@dataclass(frozen=True)
class _Rows:
    """A piece that fills whole rows of a matrix."""

    piece: Piece
    first: int
    """The first row of the matrix that it fills."""
    last: int
    apart: bool
    """Whether its rows are rows of the source, which can be read apart."""


def _by_expert(pieces: Sequence[Piece], shape: tuple[int, ...]) -> list[list[Piece]]:
    """Return the pieces of each expert, as pieces of a matrix; none if a piece cannot be split by experts."""
    found: list[list[Piece]] = [[] for _ in range(shape[0])]
    for piece in pieces:
        (first, last), *_ = _box(piece.into, shape)
        start = 0 if piece.rows is None else piece.rows[0]
        if last - first == 1:
            found[first].append(replace(piece, into=piece.into[1:]))
        elif piece.take is None and len(piece.into) <= 1 and piece.shape[1:] == shape[1:]:
            for e in range(first, last):
                found[e].append(replace(piece, into=(), rows=(start + e - first, start + e - first + 1)))
        else:
            return []
    return found


def _as_rows(pieces: Sequence[Piece], shape: tuple[int, ...]) -> list[_Rows] | None:
    """Return which rows of a matrix each piece fills; None if one fills only some columns."""
    found = []
    for piece in pieces:
        (first, last), columns = _box(piece.into, shape)
        if columns != (0, shape[1]):
            return None
        apart = piece.take is None and len(piece.shape) == 2 and piece.shape[1] == shape[1]
        found.append(_Rows(piece, first, last, apart))
    return found


def _fill_rows(
    checkpoint: Checkpoint, parts: Sequence[_Rows], small: SmallWeight, advance: Callable[[int], None]
) -> None:
    """Fill a small matrix from pieces of whole rows, about AT_ONCE elements at a time."""
    rows, columns = small.shape
    step = max(TILE, AT_ONCE // columns // TILE * TILE) if all(part.apart for part in parts) else rows
    for at in range(0, rows, step):
        end = min(at + step, rows)
        codes = torch.empty(end - at, columns, dtype=torch.uint8, device=small.device)
        scales = torch.empty(end - at, columns // GROUP, dtype=torch.float16, device=small.device)
        for part in parts:
            first, last = max(at, part.first), min(end, part.last)
            if first < last:
                piece = part.piece
                if part.apart:
                    start = first - part.first + (0 if piece.rows is None else piece.rows[0])
                    piece = replace(piece, rows=(start, start + last - first))
                _round(checkpoint, piece, small.format, codes[first - at : last - at], scales[first - at : last - at])
                advance((last - first) * columns * checkpoint.entries[piece.source].dtype.itemsize)
        write_codes(small, codes, scales, at)


def _round(checkpoint: Checkpoint, piece: Piece, form: Format, codes: Tensor, scales: Tensor) -> None:
    """Write the codes `rows columns` and scales of a piece, BLOCK elements at a time."""
    if piece.take is None and checkpoint.kept_as(piece.source) == form.name:
        stored, factors = checkpoint.read_codes(piece.source, piece.rows)
        codes.copy_(stored.reshape(codes.shape))
        scales.copy_(factors.reshape(scales.shape))
        return
    entry = checkpoint.entries[piece.source]
    values = _empty(codes.shape, dtype=entry.dtype, device=torch.device("cpu"))
    _read(checkpoint, piece, values)
    step = max(1, BLOCK // codes.shape[1])
    for at in range(0, len(codes), step):
        made = round_to_codes(values[at : at + step].to(codes.device), form.bits)
        codes[at : at + step], scales[at : at + step] = made


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
    """Show a progress bar in bytes, if it is wanted, stderr is a terminal and rich is installed."""
    bar = None
    if progress and sys.stderr.isatty():
        try:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn())
            bar = Progress(*columns, console=console(stderr=True), transient=True)
        except ImportError:
            pass
    if bar is None:
        yield lambda nbytes: None
        return
    sources = {piece.source for pieces in plan.pieces.values() for piece in pieces}
    total = sum(checkpoint.entries[name].nbytes for name in sources)
    with bar:
        task = bar.add_task(printable(f"{verb} {checkpoint.folder.name}"), total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
