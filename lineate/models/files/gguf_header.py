"""The header of a GGUF file: metadata and tensors, with every length checked before anything is allocated.

    "GGUF" | version u32 | number of tensors u64 | number of keys u64
    keys:     name | type u32 | value          a text is its length u64 and UTF-8; an array its type, length and values
    tensors:  name | dims u32 | sizes u64, the last dim first | type u32 | offset u64 of its data
    padding to a multiple of general.alignment (32), then the data of the tensors, each padded in the same way

Long arrays, such as the vocabulary, stay in the file until they are requested. Split files have names that end in
-00001-of-00003.gguf, and the first one has the metadata.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineate.models.files.gguf_blocks import TYPES, UNREAD, BlockType
from lineate.models.files.safetensors import CheckpointError, check_name

MAGIC, VERSIONS, SUFFIX = b"GGUF", (2, 3), ".gguf"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata by number, as struct spells them; 8 is text, 9 an array."""
TEXT, ARRAY = 8, 9
MOST_KEYS, MOST_TENSORS, MOST_ITEMS, MOST_DIMS = 2**12, 2**16, 2**22, 4
LONGEST_TEXT, LONGEST_KEY, LONGEST_NAME = 2**24, 2**12, 200
SHORT_ARRAY = 2**12
"""Arrays of at most this many items are read with the header."""
SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    file: Path
    name: str
    kind: BlockType
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte in the file."""

    @property
    def width(self) -> int:
        """Numbers of a row: of the last dim, or one if that is the only one and its numbers can be read one by one."""
        return 1 if len(self.shape) == 1 and self.kind.size == 1 else self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.width

    @property
    def row_bytes(self) -> int:
        return self.width // self.kind.size * self.kind.nbytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class LongArray:
    """An array of the metadata that is still in the file."""

    file: Path
    kind: int
    count: int
    start: int

    def read(self) -> list[Any]:
        """Return its items."""
        with self.file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(self.file, data, self.start).items(self.kind, self.count)


@dataclass(frozen=True)
class Header:
    """The metadata and tensors of a file."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]


class _Cursor:
    """A position in the bytes of a file, from which values are read one after the other."""

    def __init__(self, file: Path, data: mmap.mmap, at: int = 0) -> None:
        self.file, self.data, self.at, self.size = file, data, at, len(data)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {text}")

    def skip(self, nbytes: int, what: str) -> int:
        """Advance by `nbytes` bytes and return where they begin."""
        if nbytes > self.size - self.at:
            raise self.error(
                f"expected {what} of {nbytes:,} bytes at byte {self.at:,}, got a file of {self.size:,} bytes; "
                "it is truncated or corrupt: fetch it again"
            )
        first = self.at
        self.at += nbytes
        return first

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str, most: int = LONGEST_TEXT) -> str:
        length = self.scalar("Q", what)
        if length > most:
            raise self.error(f"expected {what} of at most {most:,} bytes, got a length of {length:,}; it is corrupt")
        first = self.skip(length, what)
        return self.data[first : first + length].decode("utf-8", "replace")

    def value(self, key: str) -> Any:
        """Return the value of a key; a long array stays in the file."""
        what = f"the value of {key!r}"
        kind = self.scalar("I", what)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind == TEXT:
            return self.text(what)
        if kind != ARRAY:
            raise self.error(f"{key!r} must have a type of 0 .. 12, got {kind}; the file is corrupt")
        inner, count = self.scalar("I", what), self.scalar("Q", what)
        if inner not in SCALARS and inner != TEXT:
            raise self.error(f"{key!r} must be an array of numbers or texts, got one of type {inner}")
        if count > MOST_ITEMS:
            raise self.error(f"{key!r} must have at most {MOST_ITEMS:,} items, got {count:,}")
        if count <= SHORT_ARRAY:
            return self.items(inner, count, what)
        left = LongArray(self.file, inner, count, self.at)
        if inner in SCALARS:
            self.skip(count * struct.calcsize(f"<{SCALARS[inner]}"), what)
        else:
            for _ in range(count):
                self.skip(self.scalar("Q", what), what)
        return left

    def items(self, kind: int, count: int, what: str = "an array") -> list[Any]:
        if kind == TEXT:
            return [self.text(what) for _ in range(count)]
        code = f"<{count}{SCALARS[kind]}"
        return list(struct.unpack_from(code, self.data, self.skip(struct.calcsize(code), what)))


def read_header(file: Path) -> Header:
    """Read one file's metadata and tensors."""
    try:
        with file.open("rb") as handle:
            if handle.read(4) != MAGIC:
                raise CheckpointError(
                    f"{file}: expected a GGUF file, which begins with the letters GGUF, got another beginning"
                )
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(file, data, 4))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None


def _read(cursor: _Cursor) -> Header:
    version = cursor.scalar("I", "a version")
    if version not in VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big")
        got = f"version {turned} in big-endian order" if turned in VERSIONS else f"version {version}"
        raise cursor.error(f"expected version {' or '.join(map(str, VERSIONS))} of GGUF, got {got}; convert it anew")
    n_tensors, n_keys = cursor.scalar("Q", "the number of tensors"), cursor.scalar("Q", "the number of keys")
    for what, count, most in (("tensors", n_tensors, MOST_TENSORS), ("keys", n_keys, MOST_KEYS)):
        if count > most:
            raise cursor.error(f"expected at most {most:,} {what}, got {count:,}; the file is corrupt")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.text("a key", LONGEST_KEY)
        check_name(cursor.file, key, LONGEST_KEY)
        if key in metadata:
            raise cursor.error(f"the key {key!r} must stand there once, got it twice; the file is corrupt")
        metadata[key] = cursor.value(key)
    tensors: dict[str, Stored] = {}
    for _ in range(n_tensors):
        tensor = _read_tensor(cursor)
        if tensor.name in tensors:
            raise cursor.error(f"{tensor.name} must stand there once, got it twice; the file is corrupt")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two up to 2^20, got {alignment!r:.80}")
    base = cursor.at + -cursor.at % alignment
    return Header(cursor.file, metadata, _placed(cursor, tensors, base, alignment))


def _read_tensor(cursor: _Cursor) -> Stored:
    """Read the name, shape, type and offset of a tensor; `start` is the offset, which counts from the data."""
    name = cursor.text("the name of a tensor", LONGEST_NAME)
    check_name(cursor.file, name, LONGEST_NAME)
    n_dims = cursor.scalar("I", f"the dims of {name}")
    if not 1 <= n_dims <= MOST_DIMS:
        raise cursor.error(f"{name} must have 1 .. {MOST_DIMS} dims, got {n_dims}; the file is corrupt")
    shape = tuple(cursor.scalar("Q", f"the shape of {name}") for _ in range(n_dims))[::-1]
    number = cursor.scalar("I", f"the type of {name}")
    start = cursor.scalar("Q", f"the offset of {name}")
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise cursor.error(
            f"{name} must have a type of {known}, got {UNREAD.get(number, f'the unknown type {number}')}; "
            "use a file with another quantisation"
        )
    if 0 in shape or math.prod(shape) >= 2**60:
        raise cursor.error(f"{name} must have at least 1 and less than 2^60 elements, got shape {shape}")
    kind = TYPES[number]
    if shape[-1] % kind.size:
        raise cursor.error(
            f"{name} in {kind.name} must have a last dim that is a multiple of {kind.size}, got shape {shape}"
        )
    return Stored(cursor.file, name, kind, shape, start)


def _placed(cursor: _Cursor, tensors: Mapping[str, Stored], base: int, alignment: int) -> dict[str, Stored]:
    """Return the tensors with offsets that count from the file's first byte; their data must be gapless."""
    end, last = 0, "the header"
    found: dict[str, Stored] = {}
    for tensor in sorted(tensors.values(), key=lambda x: x.start):
        name, kind = tensor.name, tensor.kind.name
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap after"
            raise cursor.error(
                f"{name} must begin {end:,} bytes after the header, got {tensor.start:,}: it {what} {last}; "
                "the file is corrupt"
            )
        if base + end + tensor.nbytes > cursor.size:
            raise cursor.error(
                f"{name} of shape {tensor.shape} in {kind} needs {tensor.nbytes:,} bytes from byte {base + end:,}, got "
                f"{max(0, cursor.size - base - end):,} before the end of the file; it is truncated: fetch it again"
            )
        found[name] = Stored(tensor.file, name, tensor.kind, tensor.shape, base + end)
        end, last = end + tensor.nbytes + -tensor.nbytes % alignment, name
    return found


def read_headers(file: Path) -> Header:
    """Read a file, or all files of the split set that it belongs to; the metadata are those of the first."""
    headers = [read_header(each) for each in split_files(file)]
    first = headers[0]
    if len(headers) == 1:
        if first.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{file}: expected a whole model, got one of {first.metadata['split.count']!r:.20} parts, whose names "
                "must end in -00001-of-0000N.gguf"
            )
        return first
    tensors: dict[str, Stored] = {}
    for number, header in enumerate(headers):
        said = header.metadata.get("split.no"), header.metadata.get("split.count")
        if said != (number, len(headers)):
            raise CheckpointError(
                f"{header.file}: expected part {number} of {len(headers)} (split.no, split.count), got {said}"
            )
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(
                f"{header.file}: {twice[0]} must be in one part, got it in {tensors[twice[0]].file.name} too"
            )
        tensors.update(header.tensors)
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(f"{file}: expected {wanted!r:.40} tensors in all parts, got {len(tensors)}")
    return Header(first.file, first.metadata, tensors)


def split_files(file: Path) -> list[Path]:
    """Return the files of the split set that a file belongs to, by its name, or the file alone."""
    found = SPLIT.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    names = [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, min(count, 9999) + 1)]
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{file.parent}: expected the {count} parts of {found['stem']}, got no {', '.join(missing[:4])}"
            f"{', ...' * (len(missing) > 4)}; fetch what is missing"
        )
    return [file.parent / name for name in names]


def find_gguf(path: Path) -> Path | None:
    """Return a GGUF file, the one of a folder that has no other weights, or None; of a split set, its first file.

    Files whose names begin with mmproj are encoders of images, and are left out.
    """
    if path.suffix == SUFFIX and path.is_file():
        return split_files(path)[0]
    if not path.is_dir():
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj") and file.is_file())
    if not files or any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    first = split_files(files[0])
    if set(files) - set(first):
        raise CheckpointError(
            f"{path}: expected one GGUF file or the parts of one, got {', '.join(x.name for x in files[:4])}"
            f"{', ...' * (len(files) > 4)}; name the file"
        )
    return first[0]
