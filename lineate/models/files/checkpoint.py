"""A checkpoint is a folder: config.json, and model.safetensors or shards with an index."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lineate.models.files.encodings import MOST_KEPT, Encoded, Encoding, Source, decoded
from lineate.models.files.safetensors import (
    LONGEST_HEADER,
    NAMES,
    CheckpointError,
    Entry,
    Reader,
    TensorSize,
    check_name,
    of_tensor,
    parse_json,
    read_header,
    write_bytes,
    write_tensors,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LONGEST_CONFIG = 2**24
"""The most bytes of a config.json; a published one has a few thousand."""
LONGEST_FILE = 200
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass
class Checkpoint:
    """The tensors and the config of a folder; data is read only on request.

    The entries of a quantised checkpoint are its weights, which are decoded when they are read.
    """

    folder: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    encoding: Encoding | None = None
    """The encoding of the weights, if they are quantised."""
    _reader: Reader = field(default_factory=Reader, repr=False)
    _source: Source | None = field(default=None, repr=False)
    _kept: dict[str, str | None] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], decode: bool = True) -> "Checkpoint":
        """Read config.json and the headers of model.safetensors, or of the shards its index names.

        Args:
            folder: The folder.
            decode: Whether the entries of a quantised checkpoint are its weights, and not its codes and scales.
        """
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"expected a folder with {CONFIG} and {SINGLE}, got {path}, which is not a folder")
        config, entries = read_json(path / CONFIG), _find_entries(path)
        return cls.of(path, config, entries) if decode else cls(path, config, entries)

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], stored: dict[str, Entry]) -> "Checkpoint":
        """Return the checkpoint of these tensors; codes and scales become the weights that they encode."""
        entries, encoding = decoded(folder, config, stored)
        return cls(folder, config, entries, encoding)

    @property
    def config_file(self) -> Path:
        """The file that `config` comes from."""
        return self.folder / CONFIG

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors in the files."""
        return sum(part.nbytes for entry in self.entries.values() for part in entry.parts)

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The metadata of a GGUF file; None for a folder."""
        return None

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of one tensor in the files."""
        return sum(part.nbytes for part in self._find(name).parts)

    def is_plain(self, name: str) -> bool:
        """Whether the bytes of one tensor are its numbers, without an encoding."""
        return type(self._find(name)) is Entry

    def read_by(self, reader: Reader, most_kept: int = MOST_KEPT) -> Self:
        """Return the same checkpoint for another thread, which reads its files with this reader.

        Args:
            reader: of one thread.
            most_kept: the most bytes that stay in memory because they are read repeatedly.
        """
        return replace(self, _reader=reader, _source=Source(reader, most_kept))

    def extra(self, name: str) -> dict[str, Any]:
        """Return the contents of another JSON file of the folder; empty if there is none."""
        return read_json(self.folder / name) if (self.folder / name).is_file() else {}

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU, in its own dtype; a quantised one is decoded to float32."""
        entry = self._find(name)
        target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Fill `target`, row-major, in its dtype and on its device, with the tensor or with `rows` of its first dim."""
        entry = self._find(name)
        if isinstance(entry, Encoded):
            entry.read_into(name, self._parts(), target, rows)
        else:
            self._reader.read_into(name, entry, target, rows)

    def kept_as(self, name: str) -> str | None:
        """Return "int8", "int4" or "fp8" if a tensor is stored as the codes of that format (quantised/format.py).

        `read_codes` then reads it without conversion; for every other tensor this is None. The scales are read to check
        whether the format represents them exactly.
        """
        entry = self._find(name)
        if name not in self._kept:
            self._kept[name] = entry.kept_as(self._parts()) if isinstance(entry, Encoded) else None
        return self._kept[name]

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of a tensor that is `kept_as` a format, or those of some rows.

        codes: uint8 `rows columns`, one a byte, that of 0 at 128 (int8) or 8 (int4); fp8: the bytes of float8
        scales: float16 `rows groups`; fp8: float32
        """
        entry = self._find(name)
        if self.kept_as(name) is None or not isinstance(entry, Encoded):
            raise CheckpointError(
                f"{entry.file}: {name} must be stored as codes of 8 or 4 bits in groups of 32 columns, whose scales "
                "float16 has exactly, or as float8 in groups of 128, got another encoding; use read_into"
            )
        return entry.read_codes(self._parts(), rows or (0, entry.shape[0]))

    def _parts(self) -> Source:
        if self._source is None:
            self._source = Source(self._reader)
        return self._source

    def _find(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"{self.folder}: expected a tensor {name}, got none of this name")
        return self.entries[name]


def read_json(file: Path, most: int = LONGEST_CONFIG) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent}: expected a file {file.name}, got none; a checkpoint is a folder with it")
    try:
        with file.open("rb") as handle:
            text = handle.read(most + 1)
        value = parse_json(text) if len(text) <= most else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected JSON, got a file that is not JSON or cannot be read ({error})"
        ) from None
    if len(text) > most:
        raise CheckpointError(f"{file}: expected at most {most:,} bytes of JSON, got more; this is no {file.name}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _find_entries(folder: Path) -> dict[str, Entry]:
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder}: expected {SINGLE}, got {', '.join(pickles[:4])}; pickled weights can run any code and are "
            "never loaded: convert them once, in a place you trust, with safetensors.torch.save_model"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, got {', '.join(shards[:4])} without an index")
    raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, got neither")


def _read_shards(folder: Path) -> dict[str, Entry]:
    index = read_json(folder / INDEX, LONGEST_HEADER)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{folder / INDEX}: expected a weight_map of tensor names to files, got {places!r:.80}")
    files = sorted(set(places.values()))
    for file in files:
        check_name(folder / INDEX, file, LONGEST_FILE)
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{folder / INDEX}: expected names of files next to it, got {outside[0]!r:.80}")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: expected the {len(files)} shards of {INDEX}, got no {', '.join(missing[:4])}"
            f"{', ...' * (len(missing) > 4)}; fetch what is missing"
        )
    entries: dict[str, Entry] = {}
    for file in files:
        found = read_header(folder / file)
        twice = sorted(entries.keys() & found.keys())
        if twice:
            raise CheckpointError(
                f"{folder}: {twice[0]} must be in one shard, got it in {entries[twice[0]].file.name} and {file}"
            )
        entries.update(found)
    lost = [name for name, file in places.items() if name not in entries or entries[name].file.name != file]
    if lost:
        raise CheckpointError(
            f"{folder}: {INDEX} places {lost[0]} in {places[lost[0]]}, which does not have it "
            f"({len(lost)} such tensors); index and shards are of different checkpoints"
        )
    return entries


def save(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json and the tensors, in shards with an index if they are larger than one shard.

    Files are written under temporary names and then renamed, so a save that fails leaves the old files unchanged.
    A save that is stopped while renaming leaves no config.json, so that no mixture of old and new files is ever loaded.
    """
    save_streamed(
        folder, {name: of_tensor(x) for name, x in tensors.items()}, tensors.__getitem__, config, max_shard_bytes
    )


def save_streamed(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, TensorSize],
    make: Callable[[str], Tensor],
    config: Mapping[str, Any],
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the files of `save`, with tensors that are computed one after the other while they are written.

    Args:
        folder: where the files are written.
        tensors: the dtype and shape of each tensor.
        make: returns a tensor by its name; it is released once it is written. Tensors whose bytes are a multiple of 8
            are requested in the order of `tensors`, within a shard before all others.
        config: of config.json.
        max_shard_bytes: the most bytes of a file, unless one tensor alone has more.
    """
    path = Path(folder)
    new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"folder must be a folder or a new name, got {path}, which is a file or in one") from None
    waiting: dict[str, Path] = {}
    try:
        shards = _shards(tensors, max_shard_bytes)
        for file, part in shards.items():
            waiting[file] = path / f".{file}.{os.getpid()}.part"
            write_tensors(waiting[file], part, make)
        texts = {CONFIG: dict(config)}
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            places = {name: file for file, part in shards.items() for name in part}
            texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        for file, value in texts.items():
            waiting[file] = path / f".{file}.{os.getpid()}.part"
            write_bytes(waiting[file], [json.dumps(value, indent=2).encode()])
        stale = {file.name for file in path.glob("model-*-of-*.safetensors")} | {SINGLE, INDEX}
        (path / CONFIG).unlink(missing_ok=True)
        for file in stale - waiting.keys():
            (path / file).unlink(missing_ok=True)
        for file in sorted(waiting, key=lambda file: file == CONFIG):  # the config last
            waiting[file].replace(path / file)
    except BaseException:
        for part_file in waiting.values():
            part_file.unlink(missing_ok=True)
        if new and not any(path.iterdir()):
            path.rmdir()
        raise


def _shards(tensors: Mapping[str, TensorSize], most: int) -> dict[str, dict[str, TensorSize]]:
    """Return the tensors by file, none above `most` bytes unless one tensor alone is."""
    parts: list[dict[str, TensorSize]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} must have a dtype of {', '.join(NAMES.values())}, got {tensor.dtype}")
        if size + tensor.nbytes > most and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}
