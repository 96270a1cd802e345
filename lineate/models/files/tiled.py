"""Checkpoints of lineate with quantised weights: two entries per weight, in tiles as in memory.

    NAME.codes     uint8, in tiles (lineate/quantised/format.py)
    NAME.scales    in the format's dtype, float16 (fp8: float32)
    config.json    "weights": the format's name, such as "int8", "int4" or "fp8"

Weights of 16 bits are plain tensors under their own name; config.json says "weights": "bfloat16" or "float16".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.safetensors import CheckpointError, Entry, TensorSize, of_tensor
from lineate.quantised.format import FORMATS, TILE, Format
from lineate.quantised.weight import QuantisedWeight
from lineate.quantised.which import quantised_formats

KEY = "weights"
"""The key of config.json that names the format."""
CODES, SCALES = ".codes", ".scales"


@dataclass
class TiledCheckpoint(Checkpoint):
    """A checkpoint whose entries are the weights that codes and scales encode."""

    form: Format = FORMATS["int8"]  # a frozen value
    tiles: dict[str, tuple[Entry, Entry]] = field(default_factory=dict)
    """The codes and the scales of each quantised weight."""

    def read_into(self, name: str, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        if name not in self.tiles:
            super().read_into(name, target, rows)
            return
        shape = self.entries[name].shape
        first, last = rows or (0, shape[0])
        if len(shape) == 3:  # whole experts
            codes, scales = self._read(name, first, last)
            values = self.form.decode(codes, scales, shape[1])
        else:
            tile = first // TILE
            codes, scales = self._read(name, tile, -(-last // TILE))
            values = self.form.decode(codes, scales, last - tile * TILE)[first - tile * TILE :]
        if values.numel() != target.numel():
            raise CheckpointError(
                f"{self.entries[name].file}: rows {first} to {last} of {name} {shape} fill {values.numel()} elements, "
                f"got a target of shape {tuple(target.shape)}"
            )
        target.copy_(values.view(target.shape))

    def kept_as(self, name: str) -> str | None:
        return self.form.name if name in self.tiles else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        if name not in self.tiles:
            return super().read_codes(name, rows)
        shape = self.entries[name].shape
        first, last = rows or (0, shape[0])
        if len(shape) == 3:  # whole experts
            return self.form.from_tiles(*self._read(name, first, last), shape[1])
        tile = first // TILE
        codes, scales = self.form.from_tiles(*self._read(name, tile, -(-last // TILE)), last - tile * TILE)
        return codes[first - tile * TILE :], scales[first - tile * TILE :]

    def stored_bytes(self, name: str) -> int:
        return sum(entry.nbytes for entry in self.tiles[name]) if name in self.tiles else super().stored_bytes(name)

    def is_plain(self, name: str) -> bool:
        return name not in self.tiles and super().is_plain(name)

    def is_kept(self, name: str, form: Format) -> bool:
        """Whether a weight is stored in the tiles of this format."""
        return name in self.tiles and form == self.form

    def read_tiles(self, name: str, weight: QuantisedWeight, first: int, last: int) -> None:
        """Fill tiles `first` to `last` of a quantised weight, or those of these experts, with the stored bytes."""
        assert weight.scales is not None and self.is_kept(name, weight.format)
        for key, entry, part in zip((CODES, SCALES), self.tiles[name], (weight.codes, weight.scales), strict=True):
            self._reader.read_into(name + key, entry, part[first:last], (first, last))
        self._check_numbers(name, weight.codes[first:last])

    def _read(self, name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return some tiles, or the tiles of some experts."""
        found = []
        for key, entry in zip((CODES, SCALES), self.tiles[name], strict=True):
            part = torch.empty(last - first, *entry.shape[1:], dtype=entry.dtype, device="cpu")
            self._reader.read_into(name + key, entry, part, (first, last))
            found.append(part)
        self._check_numbers(name, found[0])
        return found[0], found[1]

    def _check_numbers(self, name: str, codes: Tensor) -> None:
        """Refuse codes that are not numbers."""
        if self.form.are_numbers is not None and not self.form.are_numbers(codes):
            raise CheckpointError(
                f"{self.entries[name].file}: {name} must have numbers alone, got NaN; make the folder again with "
                "`lineate quantize`"
            )


def written_format(config: Mapping[str, Any]) -> Format | None:
    """Return the format that a config.json of lineate names; None if it names none."""
    name = config.get(KEY)
    if name is None:
        return None
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f'"{KEY}" must be one of {", ".join(FORMATS)}, got {name!r:.80}')
    return FORMATS[name]


def present_tiles(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Checkpoint:
    """Return a checkpoint of lineate whose entries are weights; every code and scale is checked against its header.

    Args:
        checkpoint: the opened checkpoint.
        shapes: of the model's tensors, by name.
        dtype: that its weights are read in.
    """
    form = written_format(checkpoint.config)
    if form is None or not form.has_codes:
        return checkpoint
    entries = dict(checkpoint.entries)
    tiles: dict[str, tuple[Entry, Entry]] = {}
    for name in quantised_formats(shapes, form):
        if name not in entries and not {name + CODES, name + SCALES} & entries.keys():
            continue  # loading lists it with all others that are missing
        parts = [_part(checkpoint, key, size) for key, size in sizes(name, shapes[name], form).items()]
        if name in entries:
            raise CheckpointError(f"{entries[name].file}: expected {name} in codes and scales, got it as a tensor too")
        tiles[name] = parts[0], parts[1]
        del entries[name + CODES], entries[name + SCALES]
        entries[name] = replace(parts[0], shape=shapes[name], dtype=dtype)
    return TiledCheckpoint(checkpoint.folder, checkpoint.config, entries, form=form, tiles=tiles)


def _part(checkpoint: Checkpoint, name: str, size: TensorSize) -> Entry:
    entry = checkpoint.entries.get(name)
    text = f'expected {_shown(size.dtype)} of shape {size.shape} for "{KEY}": "{checkpoint.config[KEY]}"'
    if entry is None:
        raise CheckpointError(f"{checkpoint.folder}: {name}: {text}, got none of this name; write the folder again")
    if (entry.dtype, entry.shape) != (size.dtype, size.shape):
        raise CheckpointError(f"{entry.file}: {name}: {text}, got {_shown(entry.dtype)} of shape {entry.shape}")
    return entry


def sizes(name: str, shape: tuple[int, ...], form: Format) -> dict[str, TensorSize]:
    """Return the entries that a quantised weight is written as, with their dtypes and shapes."""
    codes, scales = form.shapes(shape)
    if scales is None:
        assert form.dtype is not None
        return {name: TensorSize(form.dtype, codes)}
    return {name + CODES: TensorSize(form.codes_dtype, codes), name + SCALES: TensorSize(form.scales_dtype, scales)}


def stored_tensors(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that a tensor, which may be quantised, is written as."""
    if not isinstance(x, QuantisedWeight):
        return {name: x}
    parts = [x.codes] if x.scales is None else [x.codes, x.scales]
    found = dict(zip(sizes(name, tuple(x.shape), x.format), parts, strict=True))
    assert all(of_tensor(found[key]) == size for key, size in sizes(name, tuple(x.shape), x.format).items())
    return found


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
