"""Folders of runs of `lineate train`: their finished model, their checkpoints, and the verification of these.

RUN/model/                        the finished model and its tokenizer
RUN/checkpoints/step-000123/      a checkpoint, with a manifest of the size and SHA-256 of each file
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from lineate.models.files.gguf_header import find_gguf

MANIFEST_FILE = "manifest.json"


def checkpoints(folder: Path) -> list[Path]:
    """Return all step folders, the newest first, damaged ones included."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    named = [
        (int(path.name[5:]), path) for path in found if re.fullmatch(r"step-([0-9]{6}|[1-9][0-9]{6,17})", path.name)
    ]
    return [path for _, path in sorted(named, reverse=True)]


def problem(path: Path, contents: bool = True) -> str | None:
    """Return why a checkpoint cannot be used, or None if it can.

    Args:
        path: The folder of the checkpoint.
        contents: Whether to compare checksums in addition to names and sizes.
    """
    try:
        manifest: dict[str, tuple[int, str]] = json.loads((path / MANIFEST_FILE).read_text())
        if not manifest:
            return f"{MANIFEST_FILE} names no files"
        for name, (size, digest) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if (got := file.stat().st_size) != size:
                return f"{name} should have {size} bytes, got {got}"
            if contents and digest_of(file) != digest:
                return f"the contents of {name} have changed"
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}: the save was not finished"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST_FILE} or a file cannot be read ({error})"
    return None


def newest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that matches its manifest, and warn of newer ones that do not.

    Args:
        folder: The folder of all checkpoints.
        warn: Called with a sentence for each damaged checkpoint.
    """
    for path in checkpoints(folder):
        if (why := problem(path)) is None:
            return path
        warn(f"skipped the checkpoint {path}: {why}")
    return None


def find_model(folder: Path, warn: Callable[[str], None]) -> Path:
    """Return the folder of a run's finished model, or else its newest checkpoint; or the folder, if it is a model's.

    Args:
        folder: The folder.
        warn: Called with a sentence for each damaged checkpoint.
    """
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    found = newest(folder / "checkpoints", warn)
    if found is not None:
        if not (found / "model.safetensors").is_file():
            raise ValueError(
                f"{found} was written by several ranks; finish the run first: lineate train --resume {folder}"
            )
        return found
    if not has_own_weights(folder):
        raise ValueError(f"expected the folder of a run or of a model, got {folder}, which has no model yet")
    return folder


def has_own_weights(folder: Path) -> bool:
    """Whether the folder is that of a model, and not of a run, or is a GGUF file."""
    weights = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    return weights or find_gguf(folder) is not None


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file's contents."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
