"""Read texts from the running Python's standard library, from files and folders, or from a Hugging Face dataset."""

import hashlib
import importlib
import json
import os
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lineate.console.names import user_path
from lineate.console.terminal import printable

MessageCallback = Callable[[str], None]
"""Called with a line of text to show."""
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""The files of a folder that are read; a file that is named itself may have any suffix."""
_REMEDY = "give 'stdlib', a file, a folder or 'hf:NAME[:SPLIT[:CONFIG]]'"
# Folders of the standard library that are not read: tests, installed packages, character tables, build outputs.
_NOT_STDLIB = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib-dynload")
_NOT_STDLIB_START = ("config-", "_sysconfigdata")


def documents(data: Sequence[str], report: MessageCallback | None = None) -> Iterator[str]:
    """Yield every text of the sources, in an order that depends only on names; raise at once if a source is missing.

    A source is one of these:

    - "stdlib": the .py, .txt, .md and .rst files of the running Python's standard library, without its tests, its
      character tables (`encodings`) and installed packages.
    - A file; of a .jsonl file, the field "text" of each line.
    - A folder: its files with `TEXT_SUFFIXES`, recursively, except hidden ones.
    - "hf:NAME[:SPLIT[:CONFIG]]": the column "text" of a Hugging Face dataset.

    Empty texts are left out, and so are texts that are not UTF-8.

    Args:
        data: The sources.
        report: Called with the number of texts that are not UTF-8; by default this is a warning.
    """
    return _read(_sources(data), report or warn)


def fingerprint(data: Sequence[str]) -> str:
    """Return a hash of the sources: names, sizes and times of their files; of a dataset on the hub only its name.

    Args:
        data: The sources, as `documents` takes them.
    """
    digest = hashlib.sha256()
    for name, files in _sources(data):
        digest.update(f"{name!r}\n".encode())
        if name == "stdlib":
            digest.update(f"{sys.version}\n".encode())
        for file in files:
            status = file.stat()
            digest.update(f"{str(file)!r} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _sources(data: Sequence[str]) -> list[tuple[str, list[Path]]]:
    """Return each name with its files (none for a dataset); raise for mistakes found without reading the files."""
    if isinstance(data, str):
        raise TypeError(f"data must be a sequence of names, got the string {data!r}; use ({data!r},)")
    if not data:
        raise ValueError(f"data must name at least one source, got none; {_REMEDY}")
    return [(name, _files(name)) for name in map(str, data)]


def _files(name: str) -> list[Path]:
    """Return the files of one source."""
    if name == "stdlib":
        return stdlib_files()
    if name.startswith("hf:"):
        _dataset_parts(name)
        return []
    if not name:
        raise ValueError(f"data must be named, got ''; {_REMEDY}")
    path = user_path(name).absolute()
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise FileNotFoundError(f"data: {name} does not exist; {_REMEDY}")
    if not path.is_file():
        raise ValueError(f"data: {name} is neither a file nor a folder; {_REMEDY}")
    if not path.stat().st_size:
        raise ValueError(f"data: {name} is empty")
    _check_readable(path)
    return [path]


def _folder(folder: Path) -> list[Path]:
    found = list(_walk(folder, lambda name: name.startswith(".") or name == "__pycache__"))
    files = [file for file in found if file.suffix.lower() in TEXT_SUFFIXES and file.stat().st_size]
    if not files:
        others = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in _count(found)) or "no files"
        raise ValueError(
            f"data: {folder} holds no text: expected {' '.join(TEXT_SUFFIXES)} files that are not empty, got {others}; "
            "name other files one by one"
        )
    for file in files:
        _check_readable(file)
    return files


def stdlib_files() -> list[Path]:
    """Return the text files of the running Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = _walk(folder, lambda name: name in _NOT_STDLIB or name.startswith((*_NOT_STDLIB_START, "__pycache__", ".")))
    files = [file for file in found if file.suffix in TEXT_SUFFIXES and file.suffix != ".jsonl" and file.stat().st_size]
    if not files:
        raise ValueError(
            f"data: 'stdlib' found no sources in {folder} (a Python without them?); give a file or a folder"
        )
    return files


def _walk(folder: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below a folder, sorted, without names that `skip` accepts."""

    def stop(error: OSError) -> None:
        raise PermissionError(f"data: {error.filename} cannot be read: {error.strerror}") from error

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not skip(name))
        yield from (path for name in sorted(names) if not skip(name) and (path := Path(root, name)).is_file())


def _check_readable(file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise PermissionError(f"data: {file} cannot be read: permission denied")


def _count(files: Iterable[Path]) -> list[tuple[str, int]]:
    """Count the five most common suffixes."""
    return Counter(file.suffix for file in files).most_common(5)


def _read(sources: list[tuple[str, list[Path]]], report: MessageCallback) -> Iterator[str]:
    """Yield the texts of the sources."""
    skipped: list[str] = []
    for name, files in sources:
        texts = _dataset(name) if name.startswith("hf:") else _texts(files, skipped)
        empty = True
        for text in texts:
            if text:
                empty = False
                yield text
        if empty:
            unreadable = f" ({len(skipped)} not UTF-8)" if skipped else ""
            raise ValueError(f"data: {name} holds no text{unreadable}")
    if skipped:
        some = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        report(f"{len(skipped)} texts left out that are not UTF-8: {some}")


def _texts(files: list[Path], skipped: list[str]) -> Iterator[str]:
    """Yield the texts of files; names of texts that are not UTF-8 are added to `skipped`."""
    for file in files:
        if file.suffix.lower() == ".jsonl":
            yield from _json_lines(file, skipped)
            continue
        try:
            yield file.read_bytes().decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            skipped.append(str(file))


def _json_lines(file: Path, skipped: list[str]) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                skipped.append(f"{file}:{number}")
                continue
            except (ValueError, RecursionError) as error:
                raise ValueError(f"data: {file}, line {number} is not JSON: {error}") from None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                got = f"the fields {sorted(record)}" if isinstance(record, dict) else type(record).__name__
                if isinstance(record, dict) and "text" in record:
                    got = f"a 'text' of type {type(record['text']).__name__}"
                raise ValueError(f"data: {file}, line {number} must have a field 'text' that is a string, got {got}")
            if _has_surrogate(text):
                skipped.append(f"{file}:{number}")
                continue
            yield text


def _has_surrogate(text: str) -> bool:
    """Whether a text has half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _dataset(name: str) -> Iterator[str]:
    """Yield the texts of a Hugging Face dataset."""
    path, split, config = _dataset_parts(name)
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(f"data: {name} needs `pip install datasets`; or give files") from error
    rows = library.load_dataset(path, config, split=split)
    if "text" not in rows.column_names:
        raise ValueError(f"data: {name} must have a column 'text', got {list(rows.column_names)}")
    for number, row in enumerate(rows):
        if not isinstance(row["text"], str):
            raise ValueError(f"data: {name} holds a row without text: row {number} is {type(row['text']).__name__}")
        yield row["text"]


def _dataset_parts(name: str) -> tuple[str, str, str | None]:
    """Split "hf:NAME[:SPLIT[:CONFIG]]" into name, split and configuration."""
    path, _, rest = name.removeprefix("hf:").partition(":")
    split, _, config = rest.partition(":")
    if not path:
        raise ValueError(f"data: {name!r} names no dataset; expected 'hf:NAME[:SPLIT[:CONFIG]]'")
    return path, split or "train", config or None


def warn(message: str) -> None:
    """Issue a warning; the default MessageCallback."""
    warnings.warn(printable(message), stacklevel=2)
