"""Names on the Hugging Face hub: fetches only the needed files of a checkpoint."""

import re
from pathlib import Path

from lineate.console.extras import not_installed
from lineate.console.names import user_path
from lineate.models.files.checkpoint import INDEX, SINGLE, Checkpoint, read_json
from lineate.models.files.safetensors import LONGEST_HEADER, CheckpointError, Entry, make_entry

TEXTS = ["*.json", "*.jinja", "tiktoken.model"]
"""Patterns of configs, the index, the tokenizer and its chat templates, which have a few MB at most."""
ALL = [*TEXTS, "*.safetensors"]
REVISION = r"[0-9a-f]{40}"


def is_hub_name(name: str | Path) -> bool:
    """Whether this is ORGANISATION/MODEL and no path that exists here; a Path is never one."""
    return isinstance(name, str) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not user_path(name).exists()


def find_folder(name: str | Path) -> Path:
    """Return a folder itself, or the folder with all files of a hub name, which are downloaded if necessary."""
    path = user_path(name)
    if path.is_dir():
        return path
    if not is_hub_name(name):
        raise CheckpointError(f"expected a folder with a checkpoint, or a hub name such as Qwen/Qwen3.5-4B, got {name}")
    return fetch(str(name), ALL)


def fetch(name: str, patterns: list[str]) -> Path:
    """Return the folder in the hub's cache that has the files of these patterns, fetched if they are missing."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name} is not a folder; " + not_installed("fetching it from the hub", "huggingface_hub")
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library also raises errors of its network library, which differ between versions
        raise _why(name, error) from None


def open_headers(name: str | Path) -> Checkpoint:
    """Open a folder, or the config and the tensor headers of a hub name, whose tensors cannot be read."""
    if not is_hub_name(name):
        return Checkpoint.open(find_folder(name))
    folder = fetch(str(name), TEXTS)
    if has_weights(folder):
        return Checkpoint.open(folder)
    return Checkpoint.of(folder, read_json(folder / "config.json"), _fetch_entries(str(name), folder))


def has_weights(folder: Path) -> bool:
    """Whether a folder of the hub's cache has all weights; it may have only their index."""
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX, LONGEST_HEADER).get("weight_map")
        return isinstance(places, dict) and all((folder / str(file)).is_file() for file in places.values())
    return (folder / SINGLE).is_file()


def _fetch_entries(name: str, folder: Path) -> dict[str, Entry]:
    """Fetch the first bytes of every file of weights, which contain its header."""
    from huggingface_hub import get_safetensors_metadata

    revision = folder.name if re.fullmatch(REVISION, folder.name) else None  # the config's, not a newer one
    try:
        files = get_safetensors_metadata(name, revision=revision).files_metadata
    except Exception as error:
        raise _why(name, error) from None
    entries: dict[str, Entry] = {}
    for file, found in files.items():
        for tensor, x in found.tensors.items():
            value = {"dtype": x.dtype, "shape": list(x.shape), "data_offsets": list(x.data_offsets)}
            entries[tensor] = make_entry(folder / file, tensor, value, 0)
    return entries


def _why(name: str, error: Exception) -> CheckpointError:
    """Describe an error of the library by its name, because classes moved between versions, or by its message."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        reason = "its owner asks for an agreement; accept it on the model's page, then run hf auth login"
    elif "RepositoryNotFoundError" in kinds:
        reason = "the hub has no model of this name, or a private one (then run hf auth login)"
    elif "NotASafetensorsRepoError" in kinds:
        reason = f"it has neither {SINGLE} nor {INDEX}, and pickled weights are never loaded"
    elif kinds & {"ConnectError", "ConnectionError", "TimeoutException", "LocalEntryNotFoundError", "ConnectTimeout"}:
        words = str(error).strip().partition("\n")[0].rstrip(".")
        reason = f"the hub cannot be reached and its cache here does not have it ({words}); or give a folder"
    else:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return CheckpointError(f"{name} is not a folder, and could not be fetched from the hub: {reason}")
