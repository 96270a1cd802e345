"""A tensor that a checkpoint stores as codes and scales, read as the numbers that they encode.

    value_rc = scale_ij (code_rc - zero_ij)      i = r / rows of a block;  j = c / columns of a block, or order_c

An encoding defines where codes, scales and zeros are in the file; the product is computed here, in float32, some rows
at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.models.files.safetensors import CheckpointError, Entry, Reader
from lineate.quantised.format import BLOCK, INT4, INT8, Format
from lineate.quantised.rounding import TooLargeError

BLOCK_ELEMENTS = 2**20
"""How many numbers are decoded at a time."""
MOST_KEPT = 2**25
"""The most bytes of stored tensors that stay in memory because they are read by columns, that is, repeatedly."""

INTEGERS = {4: INT4, 8: INT8}
"""The quantised formats of integers of this number of bits, a matrix of them."""

WINDOWS = 3
"""How many large tensors are read by columns in turn: codes, scales and zeros of one weight."""


class Stored(NamedTuple):
    """A tensor stored in a file."""

    name: str
    entry: Entry


class Source:
    """Reads parts of stored tensors, in their dtypes, on the CPU.

    Args:
        reader: of the files.
        most: bytes that stay in memory because they are read by columns.
    """

    def __init__(self, reader: Reader, most: int = MOST_KEPT) -> None:
        self._reader, self._most = reader, most
        self._kept: dict[str, Tensor] = {}
        self._windows: dict[str, tuple[int, Tensor]] = {}

    def rows(self, stored: Stored, first: int, last: int) -> Tensor:
        entry = stored.entry
        target = torch.empty(last - first, *entry.shape[1:], dtype=entry.dtype, device="cpu")
        self._reader.read_into(stored.name, entry, target, (first, last))
        return target

    def whole(self, stored: Stored) -> Tensor:
        """Return a whole tensor; it stays in memory until others need the space."""
        found = self._kept.pop(stored.name, None)
        if found is None:
            found = torch.empty(stored.entry.shape, dtype=stored.entry.dtype, device="cpu")
            self._reader.read_into(stored.name, stored.entry, found)
        self._kept[stored.name] = found
        while sum(x.nbytes for x in self._kept.values()) > self._most:
            del self._kept[next(iter(self._kept))]
        return found

    def columns(self, stored: Stored, first: int, last: int) -> Tensor:
        """Return columns of a matrix; a small matrix is read once, and a large one a window of columns at a time."""
        entry = stored.entry
        if entry.nbytes <= self._most // 2:
            return self.whole(stored)[:, first:last].contiguous()
        start, window = self._windows.pop(stored.name, (0, torch.empty(0, 0, device="cpu")))
        if first < start or last > start + window.shape[1]:
            width = max(last - first, self._most // 4 // (entry.shape[0] * entry.dtype.itemsize))
            window = torch.empty(entry.shape[0], min(width, entry.shape[1] - first), dtype=entry.dtype, device="cpu")
            self._reader.read_columns(stored.name, entry, window, first)
            start = first
        self._windows = dict([*self._windows.items()][-WINDOWS + 1 :]) | {stored.name: (start, window)}
        return window[:, first - start : last - start].contiguous()


@dataclass(frozen=True)
class Encoded(Entry):
    """A tensor `rows columns`, or `matrices rows columns`, of float32 numbers that are stored as codes and scales.

    A class of an encoding derives from it and defines how codes, scales and zeros are read.
    """

    codes: Stored
    scales: Stored
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    bits: int = 8
    zeros: Stored | None = None
    """The codes of 0, one a scale; None if all are `zero`."""
    order: Stored | None = None
    """The index of each column's scale, if it is not that of its block."""
    form: Format | None = None
    """The quantised format with such codes, if one exists; it has these if their groups and scales fit it."""

    @property
    def zero(self) -> int:
        """The code of 0, if there is no tensor of them."""
        return 1 << (self.bits - 1)

    @property
    def stored(self) -> Entry:
        """The tensor of codes in the file."""
        return self.codes.entry

    @property
    def parts(self) -> tuple[Entry, ...]:
        found = (self.codes, self.scales, self.zeros, self.order)
        return tuple(part.entry for part in found if part is not None)

    @property
    def kind(self) -> str:
        """A description of the codes."""
        (rows, columns), (height, width) = self.block, self.shape[-2:]
        if columns >= width:
            where = "a scale a row" if rows == 1 else "one scale" if rows >= height else f"a scale for {rows} rows"
        else:
            where = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        return f"{self._codes_text()}, {where}"

    def read_into(self, name: str, source: Source, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Fill `target`, row-major, with the numbers, or those of `rows` of the first dim, in its dtype and device."""
        first, last = rows or (0, self.shape[0])
        *front, height, width = self.shape
        shape = (last - first, height, width) if front else (1, last - first, width)
        if target.numel() != math.prod(shape):
            part = "" if rows is None else f", rows {first} to {last},"
            raise CheckpointError(
                f"{self.file}: {name} of shape {self.shape}{part} fills {math.prod(shape)} elements, "
                f"got a target of shape {tuple(target.shape)}"
            )
        with torch.no_grad():
            copied = False
            try:
                view = target.view(shape)
            except RuntimeError:  # its dims are cut differently and not contiguous: through a copy
                view, copied = torch.empty(shape, dtype=target.dtype, device=target.device), True
            for matrix in range(shape[0]):
                for start, end in self._steps(shape[1], width):
                    at = (first + matrix, start, end) if front else (0, first + start, first + end)
                    view[matrix, start:end].copy_(self._values(source, *at))
            if copied:
                target.copy_(view.view(target.shape))

    def kept_as(self, source: Source) -> str | None:
        """Return the name of the quantised format if these are exactly its codes and scales, else None."""
        form, (width, columns) = self.form, (self.shape[-1], self.block[1])
        if form is None or width % BLOCK or (columns % form.group and columns < width):
            return None
        if self._order(source) is not None:
            return None
        *front, height = self.shape[:-1]
        for matrix in range(math.prod(front)):
            for first, last in self._steps(height, -(-width // columns)):
                scales = self._scales(source, matrix, first, last)
                kept = scales.to(form.scales_dtype)
                if not bool((kept.isfinite() & (kept.float() == scales)).all()):
                    return None
                zeros = self._zeros(source, matrix, first, last)
                if zeros is not None and not bool((zeros == self.zero).all()):
                    return None
        return form.name

    def read_codes(self, source: Source, rows: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return codes `rows columns`, one a byte, and a scale per group, in a quantised format.

        codes: uint8 with zero at 128 or 8 and float16 scales of 32 columns; or the bytes of float8 and float32 scales
        of 128. Of `matrices rows columns` the rows are matrices.
        """
        form = self.form
        assert form is not None
        if len(self.shape) == 3:
            whole = 0, self.shape[1]
            made = [self._kept(source, form, matrix, whole) for matrix in range(*rows)]
            return torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])
        return self._kept(source, form, 0, rows)

    def _kept(self, source: Source, form: Format, matrix: int, rows: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of some rows of a matrix."""
        codes, scales = self._codes(source, matrix, *rows), self._scales(source, matrix, *rows).to(form.scales_dtype)
        groups = torch.arange(0, self.shape[-1], form.group, device="cpu") // self.block[1]
        codes = self._unsigned(codes)
        if form.are_numbers is not None and not form.are_numbers(codes):
            raise TooLargeError(f"must have finite numbers to be kept in {form.name}, got NaN; fetch the file again")
        return codes, scales[:, groups]

    def _codes(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        """Return the codes of some rows of a matrix, `rows columns`."""
        raise NotImplementedError

    def _scales(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        """Return the scales of some rows of a matrix, `rows groups`, in float32."""
        return self._of_rows(source, self.scales, matrix, first, last).float()

    def _zeros(self, source: Source, matrix: int, first: int, last: int) -> Tensor | None:
        """Return the codes of 0 of some rows of a matrix, `rows groups`; None if all are `zero`."""
        return None if self.zeros is None else self._of_rows(source, self.zeros, matrix, first, last)

    def _unsigned(self, codes: Tensor) -> Tensor:
        """Return the codes as the format has them, in uint8."""
        return codes

    def _codes_text(self) -> str:
        return f"{self.bits} bits"

    def _values(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        x = self._codes(source, matrix, first, last).float()
        scales, zeros = self._scales(source, matrix, first, last), self._zeros(source, matrix, first, last)
        if zeros is None and self.zero:
            x.sub_(self.zero)
        order = self._order(source)
        if order is not None:
            return (x if zeros is None else x.sub_(zeros.float()[:, order])).mul_(scales[:, order])
        columns = self.block[1]
        full, rest = divmod(x.shape[1], columns)
        parts = [(x[:, : full * columns].unflatten(1, (full, columns)), slice(0, full))] if full else []
        if rest:
            parts.append((x[:, full * columns :].unsqueeze(1), slice(full, full + 1)))
        for part, groups in parts:
            if zeros is not None:
                part.sub_(zeros[:, groups, None].float())
            part.mul_(scales[:, groups, None])
        return x

    def _of_rows(self, source: Source, stored: Stored, matrix: int, first: int, last: int) -> Tensor:
        """Return, for each of some rows, its row of a tensor that has one number a block, row-major."""
        rows, columns = self.block
        height, groups = -(-self.shape[-2] // rows), -(-self.shape[-1] // columns)
        grid = Stored(stored.name, replace(stored.entry, shape=(math.prod(self.shape[:-2]) * height, groups)))
        top, bottom = first // rows, (last - 1) // rows + 1
        found = source.rows(grid, matrix * height + top, matrix * height + bottom)
        return found if rows == 1 else found[torch.arange(first, last, device="cpu") // rows - top]

    def _order(self, source: Source) -> Tensor | None:
        """Return the scale of each column, or None if each has that of its block."""
        if self.order is None:
            return None
        order, width = source.whole(self.order).long(), self.shape[-1]
        if bool((order == -1).all()) or torch.equal(order, torch.arange(width, device="cpu") // self.block[1]):
            return None
        groups = -(-width // self.block[1])
        if bool((order < 0).any()) or bool((order >= groups).any()):
            raise CheckpointError(
                f"{self.order.entry.file}: {self.order.name} must have groups of 0 to {groups - 1}, got one of "
                f"{int(order.min())} and one of {int(order.max())}; fetch the file again"
            )
        return order

    @staticmethod
    def _steps(rows: int, width: int) -> Iterator[tuple[int, int]]:
        step = max(1, BLOCK_ELEMENTS // max(1, width))
        for first in range(0, rows, step):
            yield first, min(first + step, rows)
