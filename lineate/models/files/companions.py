"""The files next to the weights of a checkpoint: tokenizer, chat templates, generation options.

They are read under fixed names, never run, and never from outside of the folder: a link may lead only to a file of the
same folder, or into the store of the hub's cache that the folder belongs to.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lineate.models.files.safetensors import CheckpointError

GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates."""
TOKENIZER_FILES = (
    "tokenizer_kind.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
LONGEST = 2**28
"""The most bytes of one of these files; a large vocabulary has some ten million."""
MOST_TEMPLATES = 64


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of a folder, None if there is none; raise if it is a link that leads out of the folder."""
    file = folder / name
    if not file.is_file():
        return None
    place, real = folder.resolve(), file.resolve()
    inside = [place]
    if place.parent.name == "snapshots":  # the hub's cache: snapshots/COMMIT/NAME is a link to blobs/HASH
        inside.append(place.parent.parent / "blobs")
    if not any(real.is_relative_to(each) for each in inside):
        raise CheckpointError(
            f"{file}: expected a file of its folder, got a link to a file outside of it; copy that file into {folder}"
        )
    return real


def read_file(folder: Path, name: str, most: int = LONGEST) -> bytes | None:
    """Return the contents of a file of the folder, of at most `most` bytes; None if there is none."""
    file = find_file(folder, name)
    if file is None:
        return None
    try:
        with file.open("rb") as handle:
            found = handle.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: expected a file that can be read, got {error.strerror}") from None
    if len(found) > most:
        raise CheckpointError(f"{folder / name}: expected at most {most:,} bytes, got more; this is no {name}")
    return found


def companion_names(folder: Path) -> Iterator[str]:
    """Yield the names of the existing files of the tokenizer and of generation options."""
    for name in (*TOKENIZER_FILES, GENERATION):
        if (folder / name).is_file():
            yield name
    more = folder / TEMPLATES
    if more.is_dir():
        names = sorted(file.name for file in more.iterdir() if file.suffix == ".jinja" and file.is_file())
        if len(names) > MOST_TEMPLATES:
            raise CheckpointError(f"{more}: expected at most {MOST_TEMPLATES} templates, got {len(names)}")
        yield from (f"{TEMPLATES}/{name}" for name in names)


def read_companions(folder: Path) -> dict[str, bytes]:
    """Return the contents of these files by name."""
    found = {name: read_file(folder, name) for name in companion_names(folder)}
    return {name: data for name, data in found.items() if data is not None}


def write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files of these names and bytes, each completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_file(folder / name, data)


def write_file(file: Path, data: bytes) -> None:
    """Write a file completely or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
