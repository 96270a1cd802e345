"""Tokenizers: bytes, or byte-level BPE that is trained on the data. Decoding gives exactly the encoded text."""

import hashlib
import importlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KIND_FILE = "tokenizer_kind.json"
BPE_FILE = "tokenizer.json"
END_TEXT = "<|endoftext|>"
MIN_BPE_SIZE, MAX_BPE_SIZE = 257, 2**20
"""Sizes that a BPE vocabulary may have: at least 256 bytes and end-of-text; at most four times the largest in use."""
TRAIN_CHARACTERS = 50_000_000
"""BPE learns its merges from this many characters at the beginning of the data; more would change little."""
PIECE_CHARACTERS = 1_000_000
"""A long document is encoded in pieces of about this many characters."""
# After a single newline between visible characters a text can be cut without changing its tokens.
_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class Tokenizer(ABC):
    """Encodes text to token ids and decodes it."""

    name: str
    """ "bytes" or "bpe:SIZE"."""
    vocab_size: int
    end: int
    """The id of end-of-text, to which no text is encoded."""
    identity: str
    """Two tokenizers with the same identity encode every text to the same ids."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, as `encode` would.

        Args:
            texts: The texts.
        """

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without end-of-text.

        Args:
            text: The text.
        """
        return self.encode_many([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without end-of-text; an incomplete character becomes U+FFFD.

        Args:
            ids: Token ids.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must be in 0..{self.vocab_size - 1} for tokenizer '{self.name}', got {i}")
        return self._decode([i for i in ids if i != self.end])

    def save(self, folder: Path) -> None:
        """Write the tokenizer to a folder, for load_tokenizer.

        Args:
            folder: The folder, which is made if it does not exist.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        kind = {"name": self.name, "vocab_size": self.vocab_size, "end": self.end, "identity": self.identity}
        _write(Path(folder) / KIND_FILE, json.dumps(kind, indent=1) + "\n")


class Bytes(Tokenizer):
    """A token for each of the 256 bytes of UTF-8, and end-of-text."""

    name = identity = "bytes"
    vocab_size = 257
    end = 256

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class BPE(Tokenizer):
    """Byte-pair encoding within the pieces of GPT-2's pre-tokenizer; the ids are end-of-text, 256 bytes, then merges.

    Args:
        name: "bpe:SIZE".
        text: The contents of tokenizer.json.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.identity = _identity(name, text)
        self._text = text  # the contents of tokenizer.json
        library = _tokenizers()
        try:
            self._engine = library.Tokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(f"{BPE_FILE} must be what tokenizers wrote, got a text that is not ({error})") from None
        self._engine.encode_special_tokens = True  # "<|endoftext|>" within a text is encoded as ordinary text
        ids = self._engine.get_vocab()
        lacks = {END_TEXT, *library.pre_tokenizers.ByteLevel.alphabet()} - ids.keys()
        if lacks or set(ids.values()) != set(range(len(ids))):
            got = f"no {min(lacks)!r}" if lacks else f"ids up to {max(ids.values())} for {len(ids)} tokens"
            raise ValueError(f"{BPE_FILE} must number end-of-text, 256 bytes and their merges from 0, got {got}")
        self.vocab_size, self.end = len(ids), ids[END_TEXT]

    def __reduce__(self) -> Any:
        return BPE, (self.name, self._text)  # the pickled engine would lack encode_special_tokens

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            _utf8(text)
        pieces = [list(_pieces(text)) for text in texts]
        encoded = iter(self._engine.encode_batch_fast([p for of_text in pieces for p in of_text]))
        empty = np.empty(0, np.int64)
        return [np.concatenate([empty, *(np.array(next(encoded).ids, np.int64) for _ in n)]) for n in pieces]

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write(Path(folder) / BPE_FILE, self._text)
        super().save(folder)


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """Make a new tokenizer.

    Args:
        name: "bytes", or "bpe:SIZE" such as "bpe:4096".
        texts: The texts that BPE learns its merges from; "bytes" does not read them.
    """
    size = check_name(name)
    return Bytes() if size is None else _train(name, size, texts)


def check_name(name: str) -> int | None:
    """Return the vocabulary size of "bpe:SIZE", None for "bytes"; raise ValueError for any other name.

    Args:
        name: The name of a tokenizer.
    """
    if name == "bytes":
        return None
    found = re.fullmatch(r"bpe:0*([0-9]+)", name)
    if not found:
        raise ValueError(f"tokenizer must be 'bytes' or 'bpe:SIZE' such as 'bpe:4096', got {name!r:.80}")
    if len(found[1]) > len(str(MAX_BPE_SIZE)) or (size := int(found[1])) > MAX_BPE_SIZE:
        raise ValueError(f"tokenizer must be at most 'bpe:{MAX_BPE_SIZE}', got {name!r:.80}")
    if size < MIN_BPE_SIZE:
        raise ValueError(f"tokenizer must be at least 'bpe:{MIN_BPE_SIZE}' (256 bytes and end-of-text), got {name!r}")
    return size


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer that `save` wrote to a folder.

    Args:
        folder: The folder.
    """
    file = Path(folder) / KIND_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer ({KIND_FILE} is missing)")
    try:
        kind = json.loads(file.read_text("utf-8"))
        name, identity = kind["name"], kind["identity"]
        size = check_name(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if size is None:
        return Bytes()
    file = Path(folder) / BPE_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; tokenizer '{name}' needs it")
    text = file.read_bytes().decode("utf-8", "replace")
    if _identity(name, text) != identity:
        raise ValueError(f"{file} is damaged: not the tokenizer that {KIND_FILE} names; both must come from one save")
    try:
        return BPE(name, text)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _identity(name: str, text: str) -> str:
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()}"


def _train(name: str, size: int, texts: Iterable[str]) -> BPE:
    """Learn the merges of a BPE tokenizer."""
    library = _tokenizers()
    engine = library.Tokenizer(library.models.BPE())
    engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_first(texts, TRAIN_CHARACTERS), trainer)
    learnt = engine.get_vocab_size()
    if learnt < size:
        raise ValueError(
            f"tokenizer '{name}' needs more text: it gave {learnt} tokens; use 'bpe:{learnt}' or more data"
        )
    return BPE(name, engine.to_str())


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the first so many characters of the texts."""
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces, to encode them in parallel, at places that no token can span."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS and (cut := _CUT.search(text, start + PIECE_CHARACTERS)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _utf8(text: str) -> bytes:
    """Encode a text as UTF-8; raise ValueError if that is impossible."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be Unicode, got half of a surrogate pair at character {error.start}") from error


def _tokenizers() -> Any:
    """Import the optional library tokenizers."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError("a BPE tokenizer needs `pip install tokenizers`; or use tokenizer='bytes'") from error


def _write(file: Path, text: str) -> None:
    """Write a file completely or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(text.encode())
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
