"""GGUF files: maps the tensors and metadata of llama.cpp's converter to those of a family.

Each architecture has a function that returns the equivalent config.json, and the tensors under the names and in the
layouts of the checkpoints that the family publishes. So the families' own readers read them without knowing GGUF.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lineate.models.families.gguf.contents import Contents
from lineate.models.families.gguf.kimi import read_kimi
from lineate.models.families.gguf.qwen import read_qwen
from lineate.models.fields import show
from lineate.models.files.gguf import GgufCheckpoint, View
from lineate.models.files.gguf_header import read_headers
from lineate.models.files.safetensors import CheckpointError

ARCHITECTURES: Mapping[str, Callable[[Contents], tuple[dict[str, Any], dict[str, View]]]] = {
    "qwen3next": read_qwen,
    "qwen35": read_qwen,
    "qwen35moe": read_qwen,
    "kimi-linear": read_kimi,
}
"""The reader of each architecture, which returns its config and its tensors."""


def open_gguf(file: Path) -> GgufCheckpoint:
    """Open a GGUF file, or the split set that it belongs to; only headers are read."""
    header = read_headers(file)
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.file}: general.architecture must be one of {', '.join(ARCHITECTURES)}, got {show(name)}"
        )
    contents = Contents(header)
    config, tensors = ARCHITECTURES[name](contents)
    return GgufCheckpoint(header.file, config, {**tensors, **contents.rest()}, header=header)
