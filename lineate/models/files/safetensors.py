"""The safetensors format, read and written without a second copy of any tensor.

    8 bytes, little endian: length of the header
    header, JSON: {name: {dtype, shape, data_offsets: [first, last]}, "__metadata__": {text: text}}
    data: the tensors, row-major, one after the other; offsets count from the end of the header

Files are read with seek and readinto, straight into the memory of the final tensor. They are never memory-mapped:
mapped pages would count as resident memory in addition to the tensors made from them. Pickles are never read.
"""

import ctypes
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.console.terminal import printable
from lineate.torch_ops.tracing import is_virtual

STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
LONGEST_HEADER = 100_000_000
MOST_DIGITS, MOST_DIMS, LONGEST_NAME = 40, 64, 1000
SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can escape but files and terminals reject."""
BUFFER_BYTES = 16 * 2**20
"""The size of the buffer for tensors whose dtype, layout or device changes while they are read."""
READ_BYTES = 2**24
"""The most bytes of one call of the system."""


class CheckpointError(ValueError):
    """A folder that cannot be read as a checkpoint; the message names the file, the tensor, expected and got."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # tracebacks show the tensor names, which come from the file


@dataclass(frozen=True)
class Entry:
    """The position of one tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parts(self) -> tuple["Entry", ...]:
        """The stored tensors that it consists of: itself, or the codes and scales of a quantised one."""
        return (self,)

    @property
    def by_rows(self) -> bool:
        """Whether some of its rows take no more reading than their own bytes."""
        return True

    @property
    def encoding(self) -> str:
        """The encoding of its numbers in the file."""
        return str(self.dtype).removeprefix("torch.")


def read_header(file: Path) -> dict[str, Entry]:
    """Return all tensors of one file; every length, offset and shape is checked against the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{file}: expected 8 bytes of header length, got a file of {size} bytes; it is truncated"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > LONGEST_HEADER:
                raise CheckpointError(
                    f"{file}: expected a header of at most {LONGEST_HEADER} bytes, got a length of {length}; "
                    "this is not a safetensors file"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{file}: expected a header of {length} bytes, got a file of {size} bytes; it is truncated"
                )
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        header = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a header in JSON, got text that is not ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: expected a header that maps names to tensors, got {type(header).__name__}")
    entries = {
        name: make_entry(file, name, value, 8 + length) for name, value in header.items() if name != "__metadata__"
    }
    _check_offsets(file, entries, 8 + length, size)
    return entries


def parse_json(text: bytes) -> Any:
    """Parse untrusted JSON; raise for a repeated key, or a number so long that computing with it would take hours."""
    return json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r:.80} stands there twice")
    return found


def check_name(file: Path, name: str, most: int = LONGEST_NAME) -> None:
    """Raise unless an untrusted name can be printed in a message and passed to a file system."""
    if len(name) > most or not (name.isascii() or SURROGATES.search(name) is None):
        raise CheckpointError(
            f"{file}: names must be text of at most {most} characters, got one of {len(name)}: {ascii(name)[:80]}"
        )


def make_entry(file: Path, name: str, value: Any, base: int) -> Entry:
    check_name(file, name)

    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{file}: {name} must have dtype, shape and data_offsets, got {value!r:.80}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise CheckpointError(f"{file}: {name} must have a dtype of {', '.join(STORED_DTYPES)}, got {dtype!r:.80}")
    if not whole(shape) or not whole(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: {name} must have a shape and two data_offsets in whole numbers, got {shape!r:.80} and "
            f"{offsets!r:.80}"
        )
    if len(shape) > MOST_DIMS or math.prod(max(1, n) for n in shape) >= 2**60:  # torch counts bytes in 63 bits
        raise CheckpointError(
            f"{file}: {name} must have at most {MOST_DIMS} dimensions and 2^60 elements, got shape {shape!r:.80}"
        )
    entry = Entry(file, STORED_DTYPES[dtype], tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise CheckpointError(
            f"{file}: {name} of shape {entry.shape} in {dtype} must take {entry.nbytes} bytes, "
            f"got offsets {offsets} of {offsets[1] - offsets[0]} bytes"
        )
    return entry


def _check_offsets(file: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    """Raise unless the data is gapless, without overlap, and ends with the file."""
    end, last = base, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(
                f"{file}: {name} must start at byte {end}, got {entry.start}: it {what} {last}; the file is corrupt"
            )
        end, last = entry.start + entry.nbytes, name
        if end > size:
            raise CheckpointError(
                f"{file}: {name} needs {entry.nbytes} bytes from byte {entry.start}, got {max(0, size - entry.start)} "
                f"before the end of the file ({size} bytes); it is truncated: fetch it again"
            )
    if end != size:
        raise CheckpointError(
            f"{file}: expected {end} bytes after {last}, got a file of {size} bytes; the file is corrupt"
        )


class Reader:
    """Fills tensors from files; tensors that cannot be filled in place share one buffer."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def read_into(self, name: str, entry: Entry, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Fill `target`, row-major, with the tensor or with `rows` of its first dim; dtype and device are the target's.

        The element count must agree, the shape need not: (C, 1, 4) fills (C, 4). If the dtypes agree and the target is
        contiguous CPU memory, the file is read directly into it; otherwise through a buffer of 16 MiB.
        """
        start, count = entry.start, math.prod(entry.shape)
        if rows is not None:
            row = math.prod(entry.shape[1:])
            start, count = start + rows[0] * row * entry.dtype.itemsize, (rows[1] - rows[0]) * row
        if target.numel() != count:
            part = "" if rows is None else f", rows {rows[0]} to {rows[1]},"
            raise CheckpointError(
                f"{entry.file}: {name} of shape {entry.shape}{part} fills {count} elements, "
                f"got a target of shape {tuple(target.shape)}"
            )
        with self.open(entry.file) as handle, torch.no_grad():
            handle.seek(start)
            self._fill(handle, name, entry, target)

    def read_columns(self, name: str, entry: Entry, target: Tensor, first: int) -> None:
        """Fill `target`, contiguous CPU memory of the entry's dtype, with the columns of a matrix from `first` on."""
        with self.open(entry.file) as handle:
            for row, part in enumerate(target):
                handle.seek(entry.start + (row * entry.shape[1] + first) * entry.dtype.itemsize)
                self.read(handle, name, entry, part)

    @contextmanager
    def open(self, file: Path) -> Iterator[FileIO]:
        """Open a file for one read."""
        with file.open("rb", buffering=0) as handle:
            yield handle

    def read(self, handle: FileIO, name: str, entry: Entry, target: Tensor) -> None:
        """Fill `target`, contiguous CPU memory, with the next bytes of a file."""
        view = _memory(target)
        done = 0
        while done < len(view):
            count = handle.readinto(view[done : done + READ_BYTES])
            if not count:
                raise CheckpointError(
                    f"{entry.file}: {name} needs {len(view)} bytes at byte {handle.tell() - done}, got {done} before "
                    "the end of the file; it was cut while being read"
                )
            done += count

    def copy(self, handle: FileIO, name: str, entry: Entry, part: Tensor) -> None:
        """Fill `part`, of at most `buffer_bytes` in the file, through the buffer."""
        nbytes = part.numel() * entry.dtype.itemsize
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = torch.empty(min(max(nbytes, 2**16), self.buffer_bytes), dtype=torch.uint8, device="cpu")
        buffer = self._buffer[:nbytes].view(entry.dtype)
        self.read(handle, name, entry, buffer)
        part.copy_(buffer.view(part.shape))

    @property
    def buffer_bytes(self) -> int:
        """The size of the buffer."""
        return BUFFER_BYTES

    def _fill(self, handle: FileIO, name: str, entry: Entry, target: Tensor) -> None:
        """Fill the target from the current position of the file."""
        if target.numel() == 0:
            return
        per_buffer = self.buffer_bytes // entry.dtype.itemsize
        if target.is_contiguous():
            flat = target.view(-1)
            if target.dtype == entry.dtype and target.device.type == "cpu" and not is_virtual(target):
                self.read(handle, name, entry, flat)
                return
            for first in range(0, flat.numel(), per_buffer):
                self.copy(handle, name, entry, flat[first : first + per_buffer])
            return
        row = target[0].numel()
        if row > per_buffer:
            for part in target:
                self._fill(handle, name, entry, part)
            return
        step = per_buffer // row
        for first in range(0, len(target), step):
            self.copy(handle, name, entry, target[first : first + step])


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))


@dataclass(frozen=True)
class TensorSize:
    """The dtype and the shape of a tensor that is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def of_tensor(x: Tensor) -> TensorSize:
    """Return the dtype and the shape of a tensor."""
    return TensorSize(x.dtype, tuple(x.shape))


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor] | Mapping[str, TensorSize], make: Callable[[str], Tensor] | None = None
) -> None:
    """Write one file and sync it to the disk.

    make: returns the tensors of which only the sizes are given, one after the other; each is released once written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes = {name: of_tensor(x) if isinstance(x, Tensor) else x for name, x in tensors.items()}
    # Tensors whose size has more factors of two come first, which aligns all; otherwise they stay in their order.
    ordered = sorted(sizes.items(), key=lambda item: -math.gcd(item[1].nbytes, 8))
    end = 0
    for name, size in ordered:
        first, end = end, end + size.nbytes
        header[name] = {"dtype": NAMES[size.dtype], "shape": list(size.shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    find: Callable[[str], Any] = make or tensors.__getitem__
    pieces = (piece for name, size in ordered for piece in _bytes_of(_sized(name, size, find(name))))
    write_bytes(file, _after(struct.pack("<Q", len(text)) + text, pieces))


def _sized(name: str, size: TensorSize, tensor: Tensor) -> Tensor:
    if of_tensor(tensor) != size:
        raise RuntimeError(f"{name} must be made as {size}, got {of_tensor(tensor)}")
    return tensor.detach()


def _after(first: bytes, rest: Iterable[memoryview]) -> Iterable[bytes | memoryview]:
    yield first
    yield from rest


def _bytes_of(tensor: Tensor) -> Iterable[memoryview]:
    """Yield row-major bytes; tensors that are virtual or not contiguous CPU memory are copied some rows at a time."""
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not is_virtual(tensor):
        yield _memory(tensor)
        return
    if tensor.dim() == 0:
        tensor = tensor[None]
    row = tensor[0].numel() * tensor.element_size()
    step = max(1, BUFFER_BYTES // row)
    for first in range(0, len(tensor), step):
        part = tensor[first : first + step].cpu().contiguous()
        part = part.clone() if is_virtual(part) else part
        yield _memory(part)


def write_bytes(file: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with file.open("wb", buffering=0) as handle:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                with _named(file):
                    view = view[handle.write(view) :]
        with _named(file):
            os.fsync(handle.fileno())


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in an error of writing to it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
