"""A GGUF file as a checkpoint: its tensors under the names and in the layouts that the model's family publishes.

A tensor of the checkpoint is a view: rows of one or more tensors of the file, in another order where the converter
changed it, decoded a bounded number of rows at a time. The modules of lineate/models/families/gguf define which rows
these are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.gguf_blocks import BlockType
from lineate.models.files.gguf_header import Header, Stored
from lineate.models.files.safetensors import CheckpointError, Entry, Reader
from lineate.quantised import GROUP

PASS = 2**20
"""Numbers that are decoded at a time, at most; one row at least."""


class Span(NamedTuple):
    """Consecutive rows of a tensor in the file."""

    stored: Stored
    first: int
    last: int
    """The last row + 1."""
    turned: bool = False
    """Whether these rows, together a matrix, are transposed."""

    @property
    def rows(self) -> int:
        """How many rows of the view they are."""
        return self.stored.width if self.turned else self.last - self.first

    @property
    def width(self) -> int:
        return self.last - self.first if self.turned else self.stored.width


def whole(stored: Stored) -> list[Span]:
    """Return all rows of a tensor."""
    return [Span(stored, 0, stored.rows)]


@dataclass(frozen=True)
class View(Entry):
    """A tensor of the checkpoint: rows of tensors in the file."""

    spans: tuple[Span, ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    """Ranges of columns in the view's order; empty: all in their order."""
    change: Callable[[Tensor], Tensor] | None = None
    """An elementwise function of the decoded values."""

    @property
    def nbytes(self) -> int:
        """The bytes in the file."""
        return sum((span.last - span.first) * span.stored.row_bytes for span in self.spans)

    @property
    def encoding(self) -> str:
        """The types of its blocks."""
        return " and ".join(sorted({span.stored.kind.name for span in self.spans}))

    @property
    def by_rows(self) -> bool:
        return not any(span.turned for span in self.spans)

    @property
    def kind(self) -> BlockType | None:
        """The type of its blocks, None if there are several."""
        kinds = {span.stored.kind.name: span.stored.kind for span in self.spans}
        return next(iter(kinds.values())) if len(kinds) == 1 else None

    @property
    def kept_as(self) -> str | None:
        """The format of lineate.quantised with the codes and scales of these blocks, if there is one."""
        cut = any(bound % GROUP for span in self.columns for bound in span)
        if self.kind is None or self.change is not None or cut or any(span.turned for span in self.spans):
            return None
        return self.kind.kept


def view(
    spans: Sequence[Span],
    shape: tuple[int, ...] | None = None,
    columns: Sequence[tuple[int, int]] = (),
    change: Callable[[Tensor], Tensor] | None = None,
) -> View:
    """Return a view of these rows.

    Args:
        spans: rows of tensors with equally many columns.
        shape: of the view, with as many elements; None: a matrix, or a vector if a row has one number.
        columns: ranges of columns in the view's order; none: all in their order.
        change: an elementwise function of the values.
    """
    first = spans[0]
    if any(span.width != first.width for span in spans):
        names = ", ".join(f"{span.stored.name} {span.stored.shape}" for span in spans[:2])
        raise CheckpointError(f"{first.stored.file}: these tensors must have equally long rows, got {names}")
    for span in spans:
        if not 0 <= span.first < span.last <= span.stored.rows:
            raise CheckpointError(
                f"{span.stored.file}: {span.stored.name} must have at least {span.last} rows, got {span.stored.shape}"
            )
    rows = sum(span.rows for span in spans)
    natural = (rows,) if first.width == 1 and len(first.stored.shape) == 1 else (rows, first.width)
    shape = natural if shape is None else shape
    if math.prod(shape) != rows * first.width or shape[0] == 0 or rows % shape[0]:
        raise CheckpointError(
            f"{first.stored.file}: {first.stored.name} must have {math.prod(shape)} elements, for {shape}, got "
            f"{first.stored.shape}"
        )
    plain = change is None and len({span.stored.kind.dtype for span in spans}) == 1
    dtype = first.stored.kind.dtype if plain else torch.float32
    start = first.stored.start + first.first * first.stored.row_bytes
    return View(first.stored.file, dtype, shape, start, tuple(spans), tuple(columns), change)


@dataclass
class GgufCheckpoint(Checkpoint):
    """The tensors and the metadata of a GGUF file, or of a split set; `folder` is the (first) file."""

    header: Header | None = None

    @property
    def config_file(self) -> Path:
        return self.folder

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        return {} if self.header is None else self.header.metadata

    def extra(self, name: str) -> dict[str, Any]:
        """Return nothing: files next to it may belong to other models."""
        return {}

    def kept_as(self, name: str) -> str | None:
        """Return the format of the stored tensor's codes and scales, "int8" or "int4"; None for others."""
        return self._view(name).kept_as

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return codes `rows columns`, one a byte, and scales `rows groups` in float16; as `kept_as` says."""
        found = self._view(name)
        kind = found.kind
        if found.kept_as is None or kind is None or kind.codes is None:
            raise CheckpointError(f"{self.folder}: {name} in {found.encoding} has no codes of lineate; decode it")
        parts = []
        for span, first, last in _cut(found, rows):
            codes, scales = kind.codes(_raw(self._reader, span.stored, first, last).view(-1, kind.nbytes))
            parts.append((codes.view(last - first, -1), scales.view(last - first, -1)))
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        if found.columns:
            codes = _ordered(codes, found.columns)
            scales = _ordered(scales, [(first // GROUP, last // GROUP) for first, last in found.columns])
        return codes, scales

    def read_into(self, name: str, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        found = self._view(name)
        count = math.prod(found.shape) if rows is None else (rows[1] - rows[0]) * math.prod(found.shape[1:])
        if target.numel() != count:
            part = "" if rows is None else f", rows {rows[0]} to {rows[1]},"
            raise CheckpointError(
                f"{self.folder}: {name} of shape {found.shape}{part} fills {count} elements, got a target of shape "
                f"{tuple(target.shape)}"
            )
        with torch.no_grad():
            done = 0
            flat = target.view(-1) if target.is_contiguous() else None
            made = target.new_empty(count) if flat is None and _by_rows(target, found) is None else None
            for block in self._decoded(found, rows):
                if flat is None and made is None:
                    first = done // block.shape[1]
                    target[first : first + len(block)].copy_(block)
                else:
                    into = made if flat is None else flat
                    assert into is not None
                    into[done : done + block.numel()].copy_(block.flatten())
                done += block.numel()
            if made is not None:
                target.copy_(made.view(target.shape))

    def _view(self, name: str) -> View:
        found = self._find(name)
        assert isinstance(found, View)
        return found

    def _decoded(self, found: View, rows: tuple[int, int] | None) -> Iterator[Tensor]:
        """Yield the values of rows, `rows columns`, a bounded number at a time."""
        for span, first, last in _cut(found, rows):
            step = max(1, PASS // span.width)
            for begin in range(first, last, step):
                block = _values(self._reader, span, begin, min(begin + step, last))
                block = _ordered(block, found.columns) if found.columns else block
                if found.change is not None:
                    block = found.change(block.float())
                    if block.isnan().any():
                        raise CheckpointError(
                            f"{span.stored.file}: {span.stored.name} must have numbers, of decays at most 0, got others"
                        )
                yield block


def _by_rows(target: Tensor, found: View) -> int | None:
    """Return the columns of a target that can be filled row by row, else None."""
    return target.shape[1] if target.dim() == 2 and target.shape[1] == found.spans[0].width else None


def _cut(found: View, rows: tuple[int, int] | None) -> Iterator[tuple[Span, int, int]]:
    """Yield the parts of a view that these of its rows are in: a span, and its first and last + 1 row."""
    each = sum(span.rows for span in found.spans) // found.shape[0]  # rows of spans that are one row of the view
    first, last = (0, found.shape[0]) if rows is None else rows
    at = 0
    for span in found.spans:
        begin, end = max(first * each, at), min(last * each, at + span.rows)
        if begin < end:
            offset = (0 if span.turned else span.first) - at
            yield span, begin + offset, end + offset
        at += span.rows


def _raw(reader: Reader, stored: Stored, first: int, last: int) -> Tensor:
    """Return the bytes of rows, `rows bytes`."""
    raw = torch.empty(last - first, stored.row_bytes, dtype=torch.uint8, device="cpu")
    place = Entry(stored.file, torch.uint8, (stored.rows, stored.row_bytes), stored.start)
    reader.read_into(stored.name, place, raw, (first, last))
    return raw


def _values(reader: Reader, span: Span, first: int, last: int) -> Tensor:
    """Return these rows of a span, `rows columns`, in the dtype of its type."""
    stored = span.stored
    if span.turned:
        return _values(reader, span._replace(turned=False), span.first, span.last).T[first:last]
    raw = _raw(reader, stored, first, last)
    if stored.kind.decode is None:
        return raw.view(stored.kind.dtype)
    return stored.kind.decode(raw.view(-1, stored.kind.nbytes)).view(last - first, -1)


def _ordered(block: Tensor, columns: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([block[:, first:last] for first, last in columns], 1)


def kept_formats(checkpoint: Checkpoint, sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the format of lineate.quantised of each tensor of a model if a GGUF checkpoint is loaded as stored.

    A tensor that is made of Q8_0 alone is "int8", one of Q4_0 alone "int4", both exactly. One with any other type of
    blocks, or with several, is rounded to "int8". Tensors without blocks (F32, F16, BF16) are not named.

    Args:
        checkpoint: of a GGUF file; none of another one's tensors are named.
        sources: the checkpoint's tensors that each tensor of the model is made of.
    """
    found: dict[str, str] = {}
    for target, names in sources.items():
        views = [entry for name in names if isinstance(entry := checkpoint.entries.get(name), View)]
        if any(span.stored.kind.decode is not None for x in views for span in x.spans):
            kept = {x.kept_as for x in views}
            found[target] = "int4" if kept == {"int4"} else "int8"
    return found
