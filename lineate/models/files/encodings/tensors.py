"""The tensors of a quantised checkpoint while an encoding assigns codes and scales to weights."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lineate.models.files.encodings.encoded import Encoded, Stored
from lineate.models.files.safetensors import CheckpointError, Entry

CACHE_SCALES = r"\.(attn\.)?(q|k|v|kv|prob|prob_output)_(scale|zero_point)$"
"""Tensors of a quantised cache of keys and values."""
ACTIVATION_NOTE = (
    "{folder} was made for activations quantised with fixed scales; lineate reads its quantised weights, does not "
    "quantise activations, and does not use those scales"
)
CACHE_NOTE = (
    "{folder} was made for a quantised cache of keys and values; lineate keeps the cache in the dtype of the model, "
    "and does not use its scales"
)


@dataclass(frozen=True)
class Encoding:
    """The encoding of the weights of a checkpoint."""

    method: str
    """Its name in config.json."""
    kinds: Mapping[str, int]
    """The number of tensors of each kind."""
    notes: tuple[str, ...] = ()
    """Unused parts of the checkpoint, in sentences."""

    def __str__(self) -> str:
        kinds = "; ".join(f"{count:,} tensors in {kind}" for kind, count in self.kinds.items())
        return f"{self.method}: {kinds or 'no tensor'}"


class StoredTensors:
    """The stored tensors of a checkpoint, and the weights that they encode."""

    def __init__(self, folder: str, entries: Mapping[str, Entry]) -> None:
        self.folder = folder
        self.entries = entries
        self.encoded: dict[str, Encoded] = {}
        self._used: set[str] = set()
        self._notes: dict[str, None] = {}

    def find(self, name: str) -> Stored | None:
        return Stored(name, self.entries[name]) if name in self.entries else None

    def need(self, of: str, *names: str) -> Stored:
        """Return the first of these tensors that exists; raise if none does."""
        found = next((name for name in names if name in self.entries), None)
        if found is None:
            raise CheckpointError(
                f"{self.entries[of].file}: {of} is quantised and needs {' or '.join(names)}, got no such tensor; the "
                "checkpoint is not whole: fetch it again"
            )
        return Stored(found, self.entries[found])

    def stems(self, suffix: str) -> list[str]:
        """Return the names with this suffix, without it."""
        return [name.removesuffix(suffix) for name in self.entries if name.endswith(suffix)]

    def add(self, name: str, encoded: Encoded, *others: Stored | None) -> None:
        """Add an encoded tensor, which replaces its codes, its scales and others."""
        if name in self.entries and name != encoded.codes.name:
            raise CheckpointError(f"{encoded.file}: {name} must be stored once, got {encoded.codes.name} too")
        self.encoded[name] = encoded
        parts = (encoded.codes, encoded.scales, encoded.zeros, encoded.order, *others)
        self._used |= {part.name for part in parts if part is not None}

    def drop(self, pattern: str) -> bool:
        """Leave out the tensors whose names match; return whether there are any."""
        found = {name for name in self.entries.keys() - self._used if re.search(pattern, name)}
        self._used |= found
        return bool(found)

    def note_activations(self) -> None:
        self._notes[ACTIVATION_NOTE.format(folder=self.folder)] = None

    def note_cache(self) -> None:
        self._notes[CACHE_NOTE.format(folder=self.folder)] = None

    def check_scales(self, pattern: str) -> None:
        """Raise if a scale belongs to no quantised weight."""
        left = sorted(name for name in self.entries.keys() - self._used if re.search(pattern, name))
        if left:
            raise CheckpointError(
                f"{self.entries[left[0]].file}: {left[0]} must belong to a quantised weight, got none; the checkpoint "
                f"is not whole ({len(left)} such tensors)"
            )

    def finish(self, method: str) -> tuple[dict[str, Entry], Encoding]:
        """Return the weights of the checkpoint, in the order of its files, and its encoding."""
        if self.drop(CACHE_SCALES):
            self.note_cache()
        in_place = {encoded.codes.name: (name, encoded) for name, encoded in self.encoded.items()}
        found: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            if name in in_place:
                logical, encoded = in_place[name]
                found[logical] = encoded
            elif name not in self._used:
                found[name] = entry
        kinds = Counter(encoded.kind for encoded in self.encoded.values())
        return found, Encoding(method, dict(kinds.most_common()), tuple(self._notes))


def placed(codes: Stored, shape: tuple[int, ...]) -> dict[str, object]:
    """Return the fields of an Entry of this shape, at the position of its codes."""
    return {"file": codes.entry.file, "dtype": torch.float32, "shape": shape, "start": codes.entry.start}


def wrong_shape(stored: Stored, wanted: str, why: str) -> CheckpointError:
    """Return the error of a tensor whose shape does not fit the others."""
    entry = stored.entry
    dtype = str(entry.dtype).removeprefix("torch.")
    return CheckpointError(f"{entry.file}: {stored.name} must be {wanted}, {why}, got {dtype} of shape {entry.shape}")
