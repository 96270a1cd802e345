"""Reads a quantization_config; a key that is missing or not understood raises an error that names it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lineate.models.fields import show
from lineate.models.files.safetensors import CheckpointError

KEYS = ("quantization_config", "compression_config")
"""The keys of a config.json for quantised weights; the second is an older name of the first."""
MOST = 2**24


class Settings:
    """The keys of one object of a quantization_config, which is an untrusted file."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    @classmethod
    def find(cls, file: Path, config: Mapping[str, Any]) -> "Settings | None":
        """Return the quantization_config of a config.json, or of its text_config; None if there is none."""
        text = config.get("text_config")
        for part in (config, text if isinstance(text, dict) else {}):
            for key in KEYS:
                value = part.get(key)
                if value is not None and not isinstance(value, dict):
                    raise CheckpointError(f"{file}: expected an object in {key}, got {show(value)}")
                if value:
                    return cls(f"{file}: {key}", value)
        return None

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {text}")

    def part(self, name: str) -> "Settings | None":
        """Return the object under this key; None if it is null or absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"must have an object in {name}, got {show(value)}")
        return None if value is None else Settings(f"{self.where}.{name}", value)

    def word(self, *names: str, allowed: Sequence[str], default: str | None = None, remedy: str = "") -> str:
        """Return the word under the first of these keys that is not null, in small letters; one of those allowed."""
        value = next((x for x in map(self.values.get, names) if x is not None), default)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(f"must have {names[0]} = {' or '.join(allowed)}, got {show(value)}{remedy}")
        return value.lower()

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the whole number under the first of these keys that is not null."""
        value = next((x for x in map(self.values.get, names) if x is not None), default)
        if type(value) is not int or not least <= value <= MOST:
            raise self.error(f"must have a whole number of {least} to {MOST:,} in {names[0]}, got {show(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"must have true or false in {name}, got {show(value)}")
        return default if value is None else value

    def pair(self, name: str) -> tuple[int, int] | None:
        """Return two whole numbers, such as the sizes of a block; None if the key is null or absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 1 <= n <= MOST for n in value):
            raise self.error(f"must have two whole numbers in {name}, got {show(value)}")
        return value[0], value[1]
