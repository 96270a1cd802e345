"""The metadata and tensors of a GGUF file by name; a missing one is an error that names it."""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lineate.models.fields import MOST_CHANNELS, MOST_LAYERS, show
from lineate.models.files.gguf import Span, View, view, whole
from lineate.models.files.gguf_header import Header, LongArray, Stored
from lineate.models.files.loading import MismatchError
from lineate.models.files.safetensors import CheckpointError

TOKENS = "tokenizer.ggml."
UNUSED = ("rope_freqs.weight",)
MOST_EXPERTS = 2**13


class Contents:
    """The metadata of one architecture, and the tensors; it records which were requested."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata["general.architecture"])
        self.missing: list[str] = []
        self.used: set[str] = set(UNUSED)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.header.file}: {text}")

    # ---- metadata

    def get(self, key: str) -> Any:
        """Return the value of ARCHITECTURE.KEY, None if there is none."""
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: int | None = None, least: int = 1, most: int = MOST_CHANNELS) -> int:
        """Return a whole number; an array must have the same one for all layers."""
        value = self.get(key)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(f"expected the key {self.architecture}.{key}, got none; convert the model anew")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(
                f"{self.architecture}.{key} must be a whole number of {least} .. {most:,}, got {show(value)}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a number, as the shortest decimal that a float32 has: 1e-6, not 9.99999997e-7."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{self.architecture}.{key} must be a number, got {show(value)}")
        if isinstance(value, int) or abs(value) > 3e38:
            return float(value)
        texts = (f"{value:.{digits}g}" for digits in range(6, 10))
        same = (float(x) for x in texts if struct.pack("<f", float(x)) == struct.pack("<f", value))
        return next(same, value)

    def each(self, key: str, count: int) -> list[Any] | None:
        """Return an array with a value for each layer, None if there is no such key or one value for all."""
        value = self.get(key)
        if isinstance(value, LongArray) or (isinstance(value, list) and len(value) < count):
            raise self.error(f"{self.architecture}.{key} must have {count} values, one a layer, got {show(value)}")
        return value[:count] if isinstance(value, list) else None

    def layers(self) -> int:
        """Return the number of blocks; each has at least one tensor."""
        count = self.number("block_count", most=MOST_LAYERS)
        if count > len(self.header.tensors):
            raise self.error(
                f"{self.architecture}.block_count must be at most the number of tensors, {len(self.header.tensors)}, "
                f"got {count}"
            )
        return count

    def token(self, *roles: str) -> list[int]:
        """Return the tokens of these roles that are named."""
        found = []
        for role in roles:
            value = self.header.metadata.get(f"{TOKENS}{role}_token_id")
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise self.error(f"{TOKENS}{role}_token_id must be a token's number, got {show(value)}")
            found += [] if value is None or value == 2**32 - 1 else [value]
        return list(dict.fromkeys(found))

    def common(self) -> dict[str, Any]:
        """Return the values of a config.json that all architectures have in the same way."""
        embedding = self.header.tensors.get("token_embd.weight")
        scaling = self.get("rope.scaling.type")
        if scaling not in (None, "none"):
            raise self.error(
                f"{self.architecture}.rope.scaling.type must be none, got {show(scaling)}; scaled positions are not "
                "supported"
            )
        return {
            "vocab_size": self.number("vocab_size", default=0 if embedding is None else embedding.shape[0]),
            "hidden_size": self.number("embedding_length"),
            "num_attention_heads": self.number("attention.head_count"),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            "max_position_embeddings": self.number("context_length", default=0, least=0, most=2**62) or None,
            "bos_token_id": next(iter(self.token("bos")), None),
            "eos_token_id": self.token("eos", "eot"),
            "pad_token_id": next(iter(self.token("padding")), None),
        }

    # ---- tensors

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    def stored(self, name: str) -> Stored | None:
        """Return a tensor of the file; None if it is missing, which `check` reports."""
        self.used.add(name)
        if name not in self.header.tensors:
            self.missing.append(name)
        return self.header.tensors.get(name)

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
        rows: Sequence[tuple[int, int]] = (),
        columns: Sequence[tuple[int, int]] = (),
    ) -> View | None:
        """Return a view of a tensor, or of some of its rows and columns; None if it is missing."""
        stored = self.stored(name)
        if stored is None:
            return None
        for what, ranges, size in (("rows", rows, stored.rows), ("columns", columns, stored.width)):
            if ranges and (wanted := max(ranges)[1]) != size:
                raise self.error(f"{name} must have {wanted} {what}, got shape {stored.shape}")
        spans = [Span(stored, first, last) for first, last in rows] if rows else whole(stored)
        return view(spans, shape, columns, change)

    def experts(self, name: str, part: tuple[int, int] = (0, 1)) -> list[View]:
        """Return the matrix of each expert from a tensor of three dims; part: (index, number of equal row parts)."""
        stored = self.stored(name)
        if stored is None:
            return []
        if len(stored.shape) != 3 or stored.shape[0] > MOST_EXPERTS or stored.shape[1] % part[1]:
            raise self.error(f"{name} must have three dims, of up to {MOST_EXPERTS} experts, got {stored.shape}")
        count, rows, _ = stored.shape
        share = rows // part[1]
        starts = [e * rows + part[0] * share for e in range(count)]
        return [view([Span(stored, first, first + share)]) for first in starts]

    def check(self) -> None:
        """Raise if a requested tensor is missing."""
        if self.missing:
            raise MismatchError(str(self.header.file), missing=self.missing)

    def rest(self) -> dict[str, View]:
        """Return the tensors that were not requested, under their own names, with which loading refuses them."""
        return {name: view(whole(x)) for name, x in self.header.tensors.items() if name not in self.used}


def decay_logs(stored: Tensor) -> Tensor:
    """Return A_log from -exp(A_log)."""
    return torch.log(-stored)


def centred(stored: Tensor) -> Tensor:
    """Return the weight of a norm that multiplies by 1 + weight."""
    return stored - 1


def present(tensors: dict[str, View | None]) -> dict[str, View]:
    """Leave out tensors that are missing."""
    return {name: x for name, x in tensors.items() if x is not None}
