"""The tokens of all documents in one memory-mapped file, made once in a cache folder and checked when opened.

The file: a header of 1024 bytes (what it is, as JSON, and its own checksum), the tokens (uint16 or uint32), padding
to 8 bytes, the documents' bounds (int64). It is written under another name, synced and renamed when whole.
"""

import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lineate.native.build import default_cache_folder
from lineate.training.sources import MessageCallback, documents, fingerprint, warn
from lineate.training.tokenizer import Tokenizer

FORMAT_VERSION = 1
HEADER_BYTES = 1024
CHECKED_BYTES = 256 << 20  # of tokens: up to here their checksum is compared on opening, above only sizes and bounds
STALE_SECONDS = 3600  # a writer that wrote nothing for so long is dead
_GROUP = 8_000_000  # characters that are encoded together
_CHUNK = 1 << 20  # tokens that are counted together


class JoinedSpans:
    """Spans of a token file laid end to end."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.starts = starts
        self.bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the tokens [first, first + count): index in the file, is it a span's last; and where spans begin."""
        low = int(np.searchsorted(self.bounds, first, side="right")) - 1
        high = int(np.searchsorted(self.bounds, first + count, side="left"))
        begins, ends = self.bounds[low:high], self.bounds[low + 1 : high + 1]
        sizes = np.minimum(ends, first + count) - np.maximum(begins, first)
        index = np.arange(first, first + count) + np.repeat(self.starts[low:high] - begins, sizes)
        last = np.zeros(count, bool)
        last[ends[ends <= first + count] - 1 - first] = True
        return index, last, begins[begins >= first] - first


class TokenView:
    """Documents of a token file: all of them, or those of one side of a split."""

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.name, self.tokens, self.starts, self.lengths = name, tokens, starts, lengths
        self.n_documents = len(starts)
        self.n_tokens = int(lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """Its ids, end-of-text at both ends, as int64."""
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document must be in 0..{self.n_documents - 1}, got {index}")
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])].astype(np.int64)

    def unigram_entropy(self) -> float:
        """Nats per predicted token (every one but a document's first): the loss of knowing frequencies only."""
        layout = JoinedSpans(self.starts, self.lengths)
        counts = -np.bincount(self.tokens[self.starts], minlength=1 << 16)
        for first in range(0, self.n_tokens, _CHUNK):
            index, _, _ = layout.locate(first, min(_CHUNK, self.n_tokens - first))
            more = np.bincount(self.tokens[index], minlength=len(counts))
            counts = more + np.pad(counts, (0, len(more) - len(counts)))
        if not counts.any():
            return 0.0
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


class TokenStore(TokenView):
    """All documents, each as end, tokens..., end: the first token is predicted from `end`, and `end` is learnt."""

    def __init__(self, path: Path, header: dict[str, Any], tokens: np.ndarray, bounds: np.ndarray) -> None:
        super().__init__("whole", tokens, bounds[:-1], np.diff(bounds))
        self.path = path
        self.vocab_size: int = header["vocab_size"]
        self.end: int = header["end"]
        self.crc32: int = header["tokens_crc32"]

    @classmethod
    def open_or_make(
        cls,
        data: Sequence[str],
        tokenizer: Tokenizer,
        cache_folder: Path | str | None = None,
        progress: MessageCallback | None = None,
    ) -> "TokenStore":
        """The tokens of the sources: from the cache while it is current, else made there.

        `cache_folder` is LINEATE_CACHE or ~/.cache/lineate by default; `progress` is given lines of text;
        without it only what is wrong is said, as a warning.
        """
        report = progress or (lambda line: None)
        folder = default_cache_folder() if cache_folder is None else Path(cache_folder)
        key = hashlib.sha256(f"{FORMAT_VERSION} {fingerprint(data)} {tokenizer.identity}".encode()).hexdigest()
        path = folder / f"{re.sub('[^a-z0-9]', '-', tokenizer.name)}-{key[:20]}.tokens"
        try:
            return cls._open(path, key)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except _Damaged as damage:
            (progress or warn)(f"{path} is damaged ({damage}); making it again")
        report(f"reading {', '.join(data)}")
        _make(path, key, tokenizer, documents(data, progress))
        store = cls._open(path, key)
        report(f"{store.n_tokens:,} tokens of {store.n_documents:,} documents in {path}")
        return store

    @classmethod
    def _open(cls, path: Path, key: str) -> "TokenStore":
        with path.open("rb") as file:
            header = _read_header(file, key)
            n_tokens, n_documents, dtype = header["n_tokens"], header["n_documents"], np.dtype(header["dtype"])
            at = _bounds_at(n_tokens, dtype)
            size, expected = os.fstat(file.fileno()).st_size, at + 8 * (n_documents + 1)
            if size != expected:
                raise _Damaged(f"{size} bytes, expected {expected}")
            # Mapped from the open file: another process may rename a new one over this name at any time.
            tokens = np.asarray(np.memmap(file, dtype, "r", HEADER_BYTES, (n_tokens,)))
            bounds = np.asarray(np.memmap(file, np.int64, "r", at, (n_documents + 1,)))
        if zlib.crc32(bounds.data) != header["bounds_crc32"]:
            raise _Damaged("its bounds do not match their checksum")
        if tokens.nbytes <= CHECKED_BYTES and zlib.crc32(tokens.data) != header["tokens_crc32"]:
            raise _Damaged("its tokens do not match their checksum")
        return cls(path, header, tokens, bounds)

    def split(self, validation_fraction: float, seed: int) -> tuple[TokenView, TokenView]:
        """(train, validation) by document, about that fraction of the tokens, the same for the same seed.

        Documents are drawn at random among those no longer than the whole validation part. Where they cannot fill it
        (one long text, say), the longest document is cut and its tail is the validation part.
        """
        if not 0 < validation_fraction <= 0.5:
            raise ValueError(f"validation_fraction must be in (0, 0.5], got {validation_fraction}")
        wanted = max(1, round(self.n_tokens * validation_fraction))
        chosen = np.zeros(self.n_documents, bool)
        starts, lengths = self.starts, self.lengths.copy()
        order = permutation(self.n_documents, seed, 0)
        order = order[lengths[order] <= wanted]
        sums = np.cumsum(lengths[order])
        if len(order) and sums[-1] >= wanted:
            chosen[order[: int(np.argmin(np.abs(sums - wanted))) + 1]] = True
        else:
            longest = int(np.argmax(lengths))
            lengths[longest] -= wanted
            starts = np.append(starts, starts[longest] + lengths[longest])
            lengths = np.append(lengths, wanted)
            chosen = np.append(chosen, True)
        return (
            TokenView("train", self.tokens, starts[~chosen], lengths[~chosen]),
            TokenView("validation", self.tokens, starts[chosen], lengths[chosen]),
        )


def permutation(n: int, seed: int, stream: int) -> np.ndarray:
    """Of 0..n-1, by seed and stream; our own arithmetic, so that no version of a library can change a run."""
    key = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key[:8], "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


class _Damaged(ValueError):
    """Why a file in the cache is not to be trusted."""


def _bounds_at(n_tokens: int, dtype: np.dtype[Any]) -> int:
    return HEADER_BYTES + -(-n_tokens * dtype.itemsize // 8) * 8


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    return (hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n").ljust(HEADER_BYTES)


def _read_header(file: BinaryIO, key: str) -> dict[str, Any]:
    raw = file.read(HEADER_BYTES)
    checksum, _, text = raw.partition(b"\n")
    if len(raw) < HEADER_BYTES or hashlib.sha256(text.rstrip()).hexdigest().encode() != checksum:
        raise _Damaged("its header does not match its checksum")
    header: dict[str, Any] = json.loads(text)
    if header["key"] != key:
        raise _Damaged("its header names other data")
    return header


def _make(path: Path, key: str, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".partial", prefix=f"{path.name}.", dir=path.parent)
    except OSError as error:
        raise _cannot_write(path.parent, error) from error
    partial = Path(name)
    try:
        with open(handle, "wb", buffering=0) as file:
            _remove_stale(path)
            _write(file, path.parent, key, tokenizer, texts)
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _write(file: FileIO, folder: Path, key: str, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    bounds, crc32 = [0], 0

    def put(what: bytes | memoryview) -> None:
        rest = memoryview(what).cast("B")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:  # here and not further out: an error of reading the sources says so itself
            raise _cannot_write(folder, error) from error

    def sync() -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(folder, error) from error

    put(bytes(HEADER_BYTES))  # no header yet: what is cut short here is never a token file
    for group in _groups(texts):
        encoded = tokenizer.encode_many(group)
        lengths = np.array([len(ids) + 2 for ids in encoded])
        block = np.full(lengths.sum(), tokenizer.end, dtype)
        for ids, stop in zip(encoded, np.cumsum(lengths), strict=True):
            block[stop - 1 - len(ids) : stop - 1] = ids
        bounds.extend((bounds[-1] + np.cumsum(lengths)).tolist())
        crc32 = zlib.crc32(block.data, crc32)
        put(block.data)
    if len(bounds) == 1:
        raise ValueError("data holds no text: expected at least one document that is not empty")
    ends = np.array(bounds, np.int64)
    put(bytes(_bounds_at(bounds[-1], dtype) - HEADER_BYTES - bounds[-1] * dtype.itemsize))
    put(ends.data)
    header = {
        "key": key,
        "dtype": dtype.name,
        "n_tokens": bounds[-1],
        "n_documents": len(bounds) - 1,
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": tokenizer.name,
        "tokens_crc32": crc32,
        "bounds_crc32": zlib.crc32(ends.data),
    }
    sync()  # the tokens first, then the header that vouches for them
    file.seek(0)
    put(_header_bytes(header))
    sync()


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text) + 100
        if characters >= _GROUP:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _remove_stale(path: Path) -> None:
    """What killed writers left behind."""
    for other in path.parent.glob(f"{path.name}.*.partial"):
        try:
            if time.time() - other.stat().st_mtime > STALE_SECONDS:
                other.unlink()
        except FileNotFoundError:
            pass  # another process was faster


def _sync_folder(folder: Path) -> None:
    """The new name outlives a loss of power; where folders cannot be opened it is only less certain."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cannot_write(folder: Path, error: OSError) -> OSError:
    why = f"the token cache cannot be written: {error.strerror}; free space or choose another cache_folder"
    return OSError(error.errno, why, str(folder))
