"""Folders that lineate writes to: its cache, and the folders that users name."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    if chosen := os.environ.get("LINEATE_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineate"
    except RuntimeError:  # a user without a name, as in some containers
        raise FileNotFoundError("no home folder is known for a cache; set LINEATE_CACHE to a folder") from None


def check_out(folder: Path) -> None:
    """Check that a file can be written to the folder of --out, before anything is computed."""
    if (why := why_not_writable(folder)) is not None:
        raise ValueError(f"--out must be a folder that can be written, got '{folder}' ({why}); choose another folder")


def why_not_writable(folder: Path) -> str | None:
    """Make the folder, write a file in it and remove the file; return why that fails, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except FileExistsError:
        return "it is a file"
    except OSError as error:
        return error.strerror


def why_not_writable_file(path: Path) -> str | None:
    """Return why a file of this name cannot be written, or None; its folder is made."""
    if path.is_file() and not os.access(path, os.W_OK):
        return "it may not be changed"
    if path.parent.exists() and not path.parent.is_dir():
        return f"'{path.parent}' is no folder"
    return "it is a folder" if path.is_dir() else why_not_writable(path.parent)
