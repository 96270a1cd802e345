"""lineate's tokenizers: bytes, or byte-level BPE that is trained on the data; and the tokenizer of any folder.

Decoding gives exactly the encoded text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.names import user_path
from lineate.models.files.companions import find_file, read_companions, write_file
from lineate.models.files.gguf_header import find_gguf, read_header
from lineate.models.files.gguf_tokenizer import UnknownTokenizer, gguf_companions, has_tokens
from lineate.models.files.hub import TEXTS, fetch, is_hub_name
from lineate.text.base import END_TEXT, JSON_FILE, KIND_FILE, Tokenizer, library, utf8, vocabulary_bytes
from lineate.text.bounded import TokenBound
from lineate.text.chat import read_chat
from lineate.text.published import PublishedTokenizer

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BPE", "END_TEXT", "JSON_FILE", "KIND_FILE", "Bytes", "Tokenizer", "check_name", "has_tokenizer", "load_tokenizer",
    "make_tokenizer",
]  # fmt: skip

MIN_BPE_SIZE, MAX_BPE_SIZE = 257, 2**20
"""Sizes that a BPE vocabulary may have: at least 256 bytes and end-of-text; at most four times the largest in use."""
TRAIN_CHARACTERS = 50_000_000
"""BPE learns its merges from this many characters at the beginning of the data; more would change little."""
PIECE_CHARACTERS = 1_000_000
"""A long document is encoded in pieces of about this many characters."""
# After a single newline between visible characters a text can be cut without changing its tokens.
_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class Bytes(Tokenizer):
    """A token for each of the 256 bytes of UTF-8, and end-of-text."""

    name = identity = "bytes"
    vocab_size = 257
    end = 256
    bound = TokenBound.of([END_TEXT.encode()])

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        import numpy as np

        return [np.frombuffer(utf8(text), np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def token_bytes(self, token: int) -> bytes:
        self._check(token)
        return b"" if token == self.end else bytes((token,))


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
        tokenizers = _tokenizers()
        try:
            self._engine = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(f"{JSON_FILE} must be what tokenizers wrote, got a text that is not ({error})") from None
        self._engine.encode_special_tokens = True  # "<|endoftext|>" within a text is encoded as ordinary text
        ids = self._engine.get_vocab()
        lacks = {END_TEXT, *tokenizers.pre_tokenizers.ByteLevel.alphabet()} - ids.keys()
        if lacks or set(ids.values()) != set(range(len(ids))):
            got = f"no {min(lacks)!r}" if lacks else f"ids up to {max(ids.values())} for {len(ids)} tokens"
            raise ValueError(f"{JSON_FILE} must number end-of-text, 256 bytes and their merges from 0, got {got}")
        self.vocab_size, self.end = len(ids), ids[END_TEXT]
        self._bytes = [vocabulary_bytes(token) for token in sorted(ids, key=ids.__getitem__)]
        self._bytes[self.end] = b""
        self.bound = TokenBound.of([END_TEXT.encode(), *self._bytes])

    def __reduce__(self) -> Any:
        state = {} if self.chat is None else {"chat": self.chat}
        return BPE, (self.name, self._text), state  # the pickled engine would lack encode_special_tokens

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        import numpy as np

        for text in texts:
            utf8(text)
        pieces = [list(_pieces(text)) for text in texts]
        encoded = iter(self._engine.encode_batch_fast([p for of_text in pieces for p in of_text]))
        empty = np.empty(0, np.int64)
        return [np.concatenate([empty, *(np.array(next(encoded).ids, np.int64) for _ in n)]) for n in pieces]

    def encode(self, text: str) -> list[int]:
        utf8(text)
        return [token for x in self._engine.encode_batch_fast(list(_pieces(text))) for token in x.ids]

    def token_bytes(self, token: int) -> bytes:
        self._check(token)
        return self._bytes[token]

    def _independent(self, text: str, rendered: bool) -> tuple[int, int] | None:
        cuts = [x.start() for x in _CUT.finditer(text)]
        if not cuts:
            return None
        part = text[: cuts[-1]]
        return len(self.encode_rendered(part) if rendered else self.encode(part)), cuts[-1]

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_file(Path(folder) / JSON_FILE, self._text.encode())
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


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer of a folder: one that `save` wrote, or that of a published checkpoint; or of a GGUF file.

    Args:
        folder: The folder, a GGUF file, or the name of a model on the Hugging Face hub, of which only the small files
            are fetched.
    """
    place = fetch(str(folder), TEXTS) if is_hub_name(folder) else user_path(folder)
    if not _has_files(place) and (file := find_gguf(place)) is not None:
        try:
            return PublishedTokenizer(gguf_companions(read_header(file)), str(file))
        except UnknownTokenizer:
            if not _has_files(file.parent):
                raise
            place = file.parent
    if not (place / KIND_FILE).is_file():
        return PublishedTokenizer.open(place)
    own = _load_own(place)
    own.chat = read_chat(place, read_companions(place), {"eos_token": END_TEXT, "bos_token": END_TEXT})
    return own


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder, or a GGUF file, has a tokenizer that load_tokenizer reads.

    Args:
        folder: The folder or the file.
    """
    if _has_files(folder):
        return True
    file = find_gguf(folder)
    return file is not None and (has_tokens(read_header(file)) or _has_files(file.parent))


def _has_files(folder: Path) -> bool:
    return (folder / KIND_FILE).is_file() or PublishedTokenizer.is_in(folder)


def _load_own(folder: Path) -> Tokenizer:
    """Read the tokenizer that `save` wrote to a folder."""
    file = folder / KIND_FILE
    try:
        kind = json.loads((find_file(folder, KIND_FILE) or file).read_text("utf-8"))
        name, identity = kind["name"], kind["identity"]
        size = check_name(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if size is None:
        return Bytes()
    file = folder / JSON_FILE
    found = find_file(folder, JSON_FILE)
    if found is None:
        raise FileNotFoundError(f"{file} is missing; tokenizer '{name}' needs it")
    text = found.read_bytes().decode("utf-8", "replace")
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
    tokenizers = _tokenizers()
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
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
    """Yield the first characters of the texts, up to a number."""
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


def _tokenizers() -> Any:
    """Import the optional library tokenizers."""
    return library("a BPE tokenizer", "train", ", or use tokenizer='bytes'")
