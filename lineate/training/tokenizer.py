"""Text to token ids and back: bytes, or byte-level BPE trained in place. Both give any text back exactly."""

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
"""Sizes of a BPE vocabulary: 256 bytes and end-of-text; four times the largest in use, whose table fits anywhere."""
TRAIN_CHARACTERS = 50_000_000  # of text that BPE learns from, the first ones; more changes little
_PIECE = 1_000_000  # characters of one long document that are encoded at a time
# A cut here leaves the pieces of the pre-tokenizer as they are: one newline, alone between visible characters.
_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class Tokenizer(ABC):
    """`end` is the id of end-of-text, which no text encodes to; `identity` differs when any id of any text may."""

    name: str
    vocab_size: int
    end: int
    identity: str

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `encode` gives them."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Without end-of-text; what is cut inside a character gives U+FFFD."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must be in 0..{self.vocab_size - 1} for tokenizer '{self.name}', got {i}")
        return self._decode([i for i in ids if i != self.end])

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        kind = {"name": self.name, "vocab_size": self.vocab_size, "end": self.end, "identity": self.identity}
        _write(Path(folder) / KIND_FILE, json.dumps(kind, indent=1) + "\n")


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8, and end-of-text."""

    name = identity = "bytes"
    vocab_size = 257
    end = 256

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class BPE(Tokenizer):
    """Byte pairs merged most frequent first, inside GPT-2's pieces of text: end-of-text, 256 bytes, the merges."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.identity = _identity(name, text)
        self._text = text  # of tokenizer.json
        library = _tokenizers()
        try:
            self._engine = library.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers has no narrower type
            raise ValueError(f"{BPE_FILE} must be what tokenizers wrote, got a text that is not ({error})") from None
        self._engine.encode_special_tokens = True  # end-of-text written out in a text is text like any other
        ids = self._engine.get_vocab()
        lacks = {END_TEXT, *library.pre_tokenizers.ByteLevel.alphabet()} - ids.keys()
        if lacks or set(ids.values()) != set(range(len(ids))):
            got = f"no {min(lacks)!r}" if lacks else f"ids up to {max(ids.values())} for {len(ids)} tokens"
            raise ValueError(f"{BPE_FILE} must number end-of-text, 256 bytes and their merges from 0, got {got}")
        self.vocab_size, self.end = len(ids), ids[END_TEXT]

    def __reduce__(self) -> Any:
        return BPE, (self.name, self._text)  # the engine's own state would lack encode_special_tokens

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
    """ "bytes", or "bpe:4096": 4096 ids learnt from the texts (which "bytes" does not read)."""
    size = check_name(name)
    return Bytes() if size is None else _train(name, size, texts)


def check_name(name: str) -> int | None:
    """Return the vocabulary's size in "bpe:SIZE", None for "bytes"; any other name is an error."""
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
    """What `save` wrote."""
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
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts that are encoded side by side, cut where no token can span."""
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be Unicode, got half of a surrogate pair at character {error.start}") from error


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError("a BPE tokenizer needs `pip install tokenizers`; or use tokenizer='bytes'") from error


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(text.encode())
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
