"""The tokens of all documents in one memory-mapped file, which is made once in a cache folder and checked when opened.

The file has a header of 1024 bytes (a description in JSON and its checksum), the tokens (uint16 or uint32), padding to
8 bytes, and the documents' bounds (int64). It is written under a temporary name, synced, and renamed when complete.
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

from lineate.system import folders
from lineate.text import Tokenizer
from lineate.training.sources import MessageCallback, documents, fingerprint, warn

FORMAT_VERSION = 1
HEADER_BYTES = 1024
CHECKED_BYTES = 256 << 20
"""The checksum of more tokens than this is not verified on opening, only their size and the bounds."""
STALE_SECONDS = 3600
"""A partial file that has not changed for this long was left by a process that died."""
GROUP_CHARACTERS = 8_000_000
"""Texts are encoded in groups of about this many characters."""
COUNTED_TOKENS = 1 << 20
"""How many tokens unigram_entropy counts at once."""


class JoinedSpans:
    """Spans of a token file, as if they were concatenated.

    Args:
        starts: Where each span begins in the file.
        lengths: How many tokens each span has.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.starts = starts
        self.bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the tokens [first, first + count) of the concatenation.

        Args:
            first: The first token.
            count: How many tokens.

        Returns:
            Their indices in the file, whether each is the last of its span, and which of them, counted from `first`,
            begin a span.
        """
        low = int(np.searchsorted(self.bounds, first, side="right")) - 1
        high = int(np.searchsorted(self.bounds, first + count, side="left"))
        begins, ends = self.bounds[low:high], self.bounds[low + 1 : high + 1]
        sizes = np.minimum(ends, first + count) - np.maximum(begins, first)
        index = np.arange(first, first + count) + np.repeat(self.starts[low:high] - begins, sizes)
        last = np.zeros(count, bool)
        last[ends[ends <= first + count] - 1 - first] = True
        return index, last, begins[begins >= first] - first


class TokenView:
    """Documents of a token file: all of them, or one side of a split.

    Args:
        name: The view's name in messages.
        tokens: All tokens of the file.
        starts: Where each document begins in the file.
        lengths: How many tokens each document has, end-of-text included.
    """

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.name, self.tokens, self.starts, self.lengths = name, tokens, starts, lengths
        self.n_documents = len(starts)
        self.n_tokens = int(lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """Return the ids of a document as int64, with end-of-text at both ends.

        Args:
            index: The number of the document in this view.
        """
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document must be in 0..{self.n_documents - 1}, got {index}")
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])].astype(np.int64)

    def unigram_entropy(self) -> float:
        """Return the entropy of the tokens, in nats: the loss of a model that knows only how frequent each token is.

        The first token of a document does not count, because it is never predicted.
        """
        layout = JoinedSpans(self.starts, self.lengths)
        counts = -np.bincount(self.tokens[self.starts], minlength=1 << 16)
        for first in range(0, self.n_tokens, COUNTED_TOKENS):
            index, _, _ = layout.locate(first, min(COUNTED_TOKENS, self.n_tokens - first))
            more = np.bincount(self.tokens[index], minlength=len(counts))
            counts = more + np.pad(counts, (0, len(more) - len(counts)))
        if not counts.any():
            return 0.0
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


class TokenStore(TokenView):
    """All documents of a token file, each between two end-of-text tokens.

    So a model predicts the first token of a document from end-of-text, and learns where a document ends.
    """

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
        """Open the token file of the sources in the cache; make it first if it is missing, outdated or damaged.

        Args:
            data: The sources, as `documents` takes them.
            tokenizer: Encodes the texts.
            cache_folder: Folder of the token files; by default LINEATE_CACHE, or else ~/.cache/lineate.
            progress: Called with lines of text; without it only problems are reported, as warnings.
        """
        report = progress or (lambda line: None)
        folder = folders.cache_folder() if cache_folder is None else Path(cache_folder)
        key = hashlib.sha256(f"{FORMAT_VERSION} {fingerprint(data)} {tokenizer.identity}".encode()).hexdigest()
        path = folder / f"{re.sub('[^a-z0-9]', '-', tokenizer.name)}-{key[:20]}.tokens"
        try:
            return cls.open(path, key)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except DamagedTokenFile as damage:
            (progress or warn)(f"{path} is damaged ({damage}); rebuilding it")
        report(f"reading {', '.join(data)}")
        make_token_file(path, key, tokenizer, documents(data, progress))
        store = cls.open(path, key)
        report(f"{store.n_tokens:,} tokens of {store.n_documents:,} documents in {path}")
        return store

    @classmethod
    def open(cls, path: Path, key: str) -> "TokenStore":
        """Map a token file and verify it; raise DamagedTokenFile if it does not match its header.

        Args:
            path: The file.
            key: The key that it was made with.
        """
        with path.open("rb") as file:
            header = _read_header(file, key)
            n_tokens, n_documents, dtype = header["n_tokens"], header["n_documents"], np.dtype(header["dtype"])
            at = _bounds_at(n_tokens, dtype)
            size, expected = os.fstat(file.fileno()).st_size, at + 8 * (n_documents + 1)
            if size != expected:
                raise DamagedTokenFile(f"{size} bytes, expected {expected}")
            # Mapped from the open file, since another process may replace the file of this name at any time.
            tokens = np.asarray(np.memmap(file, dtype, "r", HEADER_BYTES, (n_tokens,)))
            bounds = np.asarray(np.memmap(file, np.int64, "r", at, (n_documents + 1,)))
        if zlib.crc32(bounds.data) != header["bounds_crc32"]:
            raise DamagedTokenFile("its bounds do not match their checksum")
        if tokens.nbytes <= CHECKED_BYTES and zlib.crc32(tokens.data) != header["tokens_crc32"]:
            raise DamagedTokenFile("its tokens do not match their checksum")
        return cls(path, header, tokens, bounds)

    def split(self, validation_fraction: float, seed: int) -> tuple[TokenView, TokenView]:
        """Split the documents for training and validation.

        Validation documents are drawn at random among those that are no longer than the whole validation part. If these
        cannot fill it, for instance because there is only one long text, the end of the longest document is used.

        Args:
            validation_fraction: About which fraction of the tokens to use for validation.
            seed: Seed of the draw; the same seed gives the same split.

        Returns:
            The training and the validation documents.
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
    """Return a permutation of 0..n-1 for a seed and a stream.

    It uses arithmetic of its own, so that the versions of libraries cannot change the order of a run's data.

    Args:
        n: How many numbers.
        seed: The seed of the run.
        stream: Distinguishes the permutations of one seed.
    """
    key = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key[:8], "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


class DamagedTokenFile(ValueError):
    """A file in the cache does not match its header; the message says how."""


def _bounds_at(n_tokens: int, dtype: np.dtype[Any]) -> int:
    """Return where the documents' bounds begin in a file."""
    return HEADER_BYTES + -(-n_tokens * dtype.itemsize // 8) * 8


def header_bytes(header: dict[str, Any]) -> bytes:
    """Return the first bytes of a token file: the checksum of its description, and the description in JSON."""
    text = json.dumps(header, sort_keys=True).encode()
    return (hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n").ljust(HEADER_BYTES)


def _read_header(file: BinaryIO, key: str) -> dict[str, Any]:
    raw = file.read(HEADER_BYTES)
    checksum, _, text = raw.partition(b"\n")
    if len(raw) < HEADER_BYTES or hashlib.sha256(text.rstrip()).hexdigest().encode() != checksum:
        raise DamagedTokenFile("its header does not match its checksum")
    header: dict[str, Any] = json.loads(text)
    if header["key"] != key:
        raise DamagedTokenFile("its header names other data")
    return header


def make_token_file(path: Path, key: str, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Write a token file under a temporary name, and rename it when it is complete.

    Args:
        path: The file to make.
        key: Identifies sources and tokenizer; TokenStore.open must be given the same.
        tokenizer: Encodes the texts.
        texts: The documents.
    """
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
    """Encode the texts and write all parts of a token file."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    bounds, crc32 = [0], 0

    def put(what: bytes | memoryview) -> None:
        rest = memoryview(what).cast("B")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:  # only here: errors in reading the sources have their own messages
            raise _cannot_write(folder, error) from error

    def sync() -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(folder, error) from error

    put(bytes(HEADER_BYTES))  # the header comes last, so that a partial file is never valid
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
    sync()  # the tokens must be on the disk before the header
    file.seek(0)
    put(header_bytes(header))
    sync()


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Collect texts into groups that are encoded at once."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text) + 100
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _remove_stale(path: Path) -> None:
    """Remove partial files that killed processes left."""
    for other in path.parent.glob(f"{path.name}.*.partial"):
        try:
            if time.time() - other.stat().st_mtime > STALE_SECONDS:
                other.unlink()
        except FileNotFoundError:
            pass  # another process has removed it


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new name in it survives a loss of power; only POSIX systems can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cannot_write(folder: Path, error: OSError) -> OSError:
    """Return the error to raise if the cache folder cannot be written."""
    why = f"the token cache cannot be written: {error.strerror}; free space or choose another cache_folder"
    return OSError(error.errno, why, str(folder))
