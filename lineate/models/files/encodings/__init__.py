"""Encodings of quantised checkpoints, one a file: maps stored tensors to the weights that they encode.

A family's plan and the loader see only the weights, as if they were stored in float32. To add an encoding, add its
file with a function `read` and its name in METHODS.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lineate.models.fields import show
from lineate.models.files.encodings import awq, compressed, fp8, gptq
from lineate.models.files.encodings.encoded import MOST_KEPT, Encoded, Source
from lineate.models.files.encodings.settings import Settings
from lineate.models.files.encodings.tensors import Encoding, StoredTensors
from lineate.models.files.safetensors import Entry

METHODS: dict[str, Callable[[Settings, StoredTensors], None]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed.read,
    "gptq": gptq.read,
    "awq": awq.read,
}
"""The readers by quant_method of quantization_config."""


def decoded(
    folder: Path, config: Mapping[str, Any], stored: dict[str, Entry]
) -> tuple[dict[str, Entry], Encoding | None]:
    """Return the weights that the stored tensors encode, and their encoding; plain tensors are returned as stored."""
    settings = Settings.find(folder / "config.json", config)
    if settings is None:
        return stored, None
    method = settings.values.get("quant_method", "compressed-tensors" if "config_groups" in settings.values else None)
    if not isinstance(method, str) or method not in METHODS:
        raise settings.error(
            f"must have a quant_method of {', '.join(METHODS)}, got {show(method)}; use another checkpoint of the model"
        )
    tensors = StoredTensors(str(folder), stored)
    METHODS[method](settings, tensors)
    return tensors.finish(method)


__all__ = ["METHODS", "MOST_KEPT", "Encoded", "Encoding", "Source", "decoded"]
