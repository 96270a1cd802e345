"""One sealed file: tensors in safetensors, with a description whose checksum covers everything.

The tensor `about` holds JSON in bytes: the version of the format, the model's identity, the name of the file, a
checksum of everything else, and what the writer adds. A file is written under another name, synced and renamed, so it
is complete or absent. It is read only if all of these are as expected; nothing in it is trusted before that.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.models.files.safetensors import CheckpointError, Entry, Reader, parse_json, read_header, write_tensors
from lineate.serving.cache.blocks import Named

FORMAT = 1
PART = ".part"
"""The suffix of the name of an unfinished file."""
HEADER_BYTES = 256
"""An upper bound of the bytes of one tensor in the header of a file, without its name."""
LONGEST_ABOUT = 64 * 2**20


def seal(path: Path, identity: str, about: Mapping[str, Any], tensors: Named) -> int:
    """Write one file atomically, and return its bytes.

    Args:
        path: its final name.
        identity: which model the tensors belong to.
        about: further description, as JSON values.
        tensors: by name, on any device.
    """
    tensors = {key: x.cpu() for key, x in tensors.items()}
    said = {"format": FORMAT, "identity": identity, "name": path.name, **about}
    said["checksum"] = checksum(said, tensors)
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    part = path.with_name(path.name + PART)
    try:
        write_tensors(part, {"about": text, **tensors})
        nbytes = part.stat().st_size
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return nbytes


def most_bytes(about: Mapping[str, Any], tensors: Named) -> int:
    """Return a bound of the bytes that `seal` writes, for an identity of at most 500 characters."""
    own = sum(x.nbytes + len(name) for name, x in tensors.items()) + HEADER_BYTES * (len(tensors) + 1)
    return own + len(json.dumps(about)) + 1000


def unseal(path: Path, identity: str) -> tuple[dict[str, Any], Named]:
    """Return the description and the tensors of a file; raise CheckpointError unless everything is as expected."""
    tensors = {key: _read(key, entry) for key, entry in read_header(path).items()}
    about = _about(path, identity, tensors.pop("about", None))
    said = about.pop("checksum", None)
    if said != (got := checksum(about, tensors)):
        raise CheckpointError(f"{path}: expected the checksum {said!r:.80}, got {got}; the file is damaged")
    return about, tensors


def peek(path: Path, identity: str, name: str) -> tuple[dict[str, Any], Tensor, frozenset[str]]:
    """Return a file's description, one tensor, and the names of all; the checksum is not verified."""
    entries = read_header(path)
    if name not in entries or "about" not in entries or entries["about"].nbytes > LONGEST_ABOUT:
        raise CheckpointError(f"{path}: expected the tensors about and {name}, got {', '.join(entries)[:200]}")
    about = _about(path, identity, _read("about", entries["about"]))
    return about, _read(name, entries[name]), frozenset(entries)


def checksum(about: Mapping[str, Any], tensors: Named) -> str:
    """Return the SHA-256 of a description and of tensors on a CPU with their names, dtypes and shapes."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(name: str, entry: Entry) -> Tensor:
    made = torch.empty(entry.shape, dtype=entry.dtype)
    Reader().read_into(name, entry, made)
    return made


def _about(path: Path, identity: str, text: Tensor | None) -> dict[str, Any]:
    """Return a file's description if it has this version, model and name."""
    if text is None or text.dtype != torch.uint8:
        raise CheckpointError(f"{path}: expected a tensor of bytes named about")
    try:
        about = parse_json(text.flatten().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON in about, got text that is not ({error})") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format") if isinstance(about, dict) else about
        raise CheckpointError(f"{path}: expected version {FORMAT} of the format, got {got!r:.80}")
    for key, wanted in (("identity", identity), ("name", path.name)):
        if about.get(key) != wanted:
            raise CheckpointError(f"{path}: expected {key} {wanted[:80]!r}, got {about.get(key)!r:.80}")
    return about
