"""Opens a checkpoint, whatever it is: a folder, a GGUF file or a name on the hub."""

from pathlib import Path

from lineate.console.names import user_path
from lineate.models.families.gguf import open_gguf
from lineate.models.files import hub
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.gguf_header import find_gguf


def open_checkpoint(name: str | Path) -> Checkpoint:
    """Open a folder, a GGUF file (or a folder with one), or a hub name, all files of which are fetched."""
    file = find_gguf(user_path(name))
    return Checkpoint.open(hub.find_folder(name)) if file is None else open_gguf(file)


def open_headers(name: str | Path) -> Checkpoint:
    """Open the same; of a hub name, only the config and the tensor headers are fetched."""
    file = find_gguf(user_path(name))
    return hub.open_headers(name) if file is None else open_gguf(file)
