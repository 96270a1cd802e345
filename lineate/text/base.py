"""The interface of tokenizers: text to ids and back, special tokens, chat template."""

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.extras import not_installed
from lineate.models.files.companions import write_file
from lineate.text.bounded import TokenBound, TooManyTokens, check_pieces
from lineate.text.chat import CHAT_FILE, DEFAULT_TEMPLATE, ChatTemplate
from lineate.text.shield import Shield

if TYPE_CHECKING:
    import numpy as np


KIND_FILE = "tokenizer_kind.json"
JSON_FILE = "tokenizer.json"
END_TEXT = "<|endoftext|>"
_DEFAULT = ChatTemplate(DEFAULT_TEMPLATE)


class Tokenizer(ABC):
    """Encodes text to token ids and decodes it."""

    name: str
    """"bytes", "bpe:SIZE" or "published:SIZE"."""
    vocab_size: int
    """One more than the largest id; a model may have more rows."""
    end: int
    """The id of end-of-text, to which `encode` encodes no text."""
    identity: str
    """Two tokenizers with the same identity encode every text to the same ids."""
    chat: ChatTemplate | None = None
    """The chat template, if the tokenizer's folder has one."""
    longest_strip: int = 0
    """The most spaces at the beginning of a text that `decode` removes."""
    bound: TokenBound | None = None
    """A lower bound of the number of tokens of a text; None if it is not known without encoding."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """Return the ids of each text, as `encode` would.

        Args:
            texts: The texts.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of a token, which may be part of a character; none for a special token.

        Args:
            token: The id.
        """

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text or a turn of a conversation."""
        return frozenset((self.end,))

    @property
    def start(self) -> tuple[int, ...]:
        """The ids that come before a plain prompt."""
        return (self.end,)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all special tokens."""
        return (END_TEXT,)

    def special_text(self, token: int) -> str | None:
        """Return the text of a special token, such as "<|endoftext|>"; None for any other token.

        Args:
            token: The id.
        """
        return END_TEXT if token == self.end else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens within the text are encoded as ordinary text.

        Args:
            text: The text.
        """
        return self.encode_many([text])[0].tolist()

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens count as such, like one that a chat template rendered.

        Args:
            text: The text.
        """
        ids: list[int] = []
        for n, part in enumerate(text.split(END_TEXT)):
            ids += [self.end] * (n > 0) + (self.encode(part) if part else [])
        return ids

    def encode_within(self, text: str, most: int, rendered: bool = False) -> list[int]:
        """Return the ids of a text that has at most `most`; raise TooManyTokens, soon, for any other.

        The work is bounded by the limit, not by the text, as bounded.py says.

        Args:
            text: The text.
            most: The most tokens.
            rendered: Whether special tokens within the text count as such, as in `encode_rendered`.
        """
        self._check_least(text, most)
        check_pieces(text, most, lambda part: self._independent(part, rendered))
        ids = self.encode_rendered(text) if rendered else self.encode(text)
        if len(ids) > most:
            raise TooManyTokens(most, len(ids), True)
        return ids

    def _check_least(self, text: str, most: int) -> None:
        """Raise TooManyTokens if a text has more than `most` tokens, however it is encoded."""
        if self.bound is not None and (least := self.bound.least(text, most)) > most:
            raise TooManyTokens(most, least)

    def _independent(self, text: str, rendered: bool) -> tuple[int, int] | None:
        """Return the numbers of tokens and characters of a prefix whose tokens do not depend on the rest of the text.

        Args:
            text: The text, and more may follow it.
            rendered: Whether special tokens within it count as such.
        """
        return None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of a conversation, in which only the template makes special tokens, never its inputs.

        Without a chat template of its own, a tokenizer uses DEFAULT_TEMPLATE.

        Args:
            messages: The messages, each with a role and its content.
            tools: Descriptions of functions that the model may call, as JSON schemas.
            add_generation_prompt: Whether the ids end with the beginning of the assistant's answer.
            most_tokens: If given, a conversation with more raises TooManyTokens, as `encode_within` does.
            kwargs: More variables of the template, such as enable_thinking.
        """
        shield = Shield(self.special_texts, (messages, tools, kwargs))
        template = _DEFAULT if self.chat is None else self.chat
        more = {name: shield.cover(value) for name, value in kwargs.items()}
        text = template.render(shield.cover(messages), tools and shield.cover(tools), add_generation_prompt, **more)
        ids = [] if self.chat is not None else list(self.start)
        if most_tokens is None:
            for part, covered in shield.parts(text):
                ids += self.encode(part) if covered else self.encode_rendered(part)
            return ids
        self._check_least(shield.without_marks(text), most_tokens)
        for part, covered in shield.parts(text):
            try:
                ids += self.encode_within(part, most_tokens - len(ids), not covered)
            except TooManyTokens as error:
                raise TooManyTokens(most_tokens, len(ids) + error.least) from None
        return ids

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Return the text of ids; invalid bytes become U+FFFD.

        Args:
            ids: Token ids.
            keep_special: Whether special tokens are written out, rather than left out.
        """
        found = b"".join(self.shown_bytes(int(i), keep_special) for i in ids)
        return self.strip_start(found).decode("utf-8", "replace")

    def shown_bytes(self, token: int, keep_special: bool = False) -> bytes:
        """Return the bytes of a token in a decoded text.

        Args:
            token: The id.
            keep_special: Whether a special token is written out.
        """
        text = self.special_text(token) if keep_special else None
        return self.token_bytes(token) if text is None else text.encode()

    def strip_start(self, found: bytes) -> bytes:
        """Return the bytes of a text without the spaces that encoding put before it.

        Args:
            found: The first bytes of a text, at least longest_strip + 1 or all of them.
        """
        kept = found.lstrip(b" ")
        return found[min(self.longest_strip, len(found) - len(kept)) :]

    def save(self, folder: Path) -> None:
        """Write the tokenizer to a folder, for load_tokenizer.

        Args:
            folder: The folder, which is made if it does not exist.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        kind = {"name": self.name, "vocab_size": self.vocab_size, "end": self.end, "identity": self.identity}
        write_file(Path(folder) / KIND_FILE, (json.dumps(kind, indent=1) + "\n").encode())
        if self.chat is not None:
            write_file(Path(folder) / CHAT_FILE, self.chat.source.encode())

    def _check(self, token: int) -> None:
        """Raise ValueError unless this is an id."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"ids must be in 0..{self.vocab_size - 1} for tokenizer '{self.name}', got {token}")


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8; raise ValueError if that is impossible."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be Unicode, got half of a surrogate pair at character {error.start}") from error


def library(what: str, extra: str | None = None, instead: str = "") -> Any:
    """Import the optional library tokenizers; raise ImportError with the reason, its extra and an alternative."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError(not_installed(what, "tokenizers", extra) + instead) from error


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


ALPHABET = byte_alphabet()


def vocabulary_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with a character outside of the alphabet is ordinary text."""
    try:
        return bytes([ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")
