"""Keeps special tokens out of the messages of a conversation.

A chat template puts messages and special tokens into one text. Where a message spells a special token, or begins one
that the next message could complete, a mark that occurs nowhere else is inserted after its first character. In the
rendered text the marked pieces are encoded as ordinary text, without the mark.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lineate.text.chat import ChatError

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that are not characters (noncharacters of Unicode)."""
PART_CHARACTERS = 2**17
"""Characters that are searched at once."""


class Shield:
    """Marks the special tokens in the texts of one conversation.

    Args:
        special: The texts of the special tokens.
        values: The whole conversation, and all other inputs of the template.
    """

    def __init__(self, special: Sequence[str], values: Any) -> None:
        self._special = sorted((text for text in special if text), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._special)) + ")") if self._special else None
        self._firsts = {text[0] for text in self._special}
        texts = [*_texts(values)]
        self._mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), "")
        if not self._mark:
            raise ChatError("messages must leave one of the code points U+FDD0 .. U+FDEF unused, got all of them")

    def cover(self, value: Any) -> Any:
        """Return a copy of a message or a list of them in which no text spells a special token."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, Mapping):
            return {self._cover_key(key): self.cover(x) for key, x in value.items()}
        return [self.cover(x) for x in value] if isinstance(value, list | tuple) else value

    def without_marks(self, text: str) -> str:
        """Return a rendered text without marks."""
        return text.replace(self._mark, "")

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a rendered text without marks, and whether special tokens in them are ordinary text."""
        if self._mark not in text or self._pattern is None:
            yield text, False
            return
        plain = ""
        for part in self._pattern.split(text):
            if self._mark not in part:
                plain += part
                continue
            if plain:
                yield plain, False
            yield part.replace(self._mark, ""), True
            plain = ""
        if plain:
            yield plain, False

    def _cover_key(self, key: Any) -> Any:
        """Return a key that spells no special token; names that templates look up, such as "role", are unchanged."""
        if not isinstance(key, str) or self._pattern is None or (key.isidentifier() and not self._pattern.search(key)):
            return key
        return self._cover_text(key)

    def _cover_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        begun = [
            n + 1
            for n in range(max(0, len(text) - len(self._special[0]) + 1), len(text))
            if text[n] in self._firsts and any(x.startswith(text[n:]) for x in self._special)
        ]
        if begun:
            text = self._mark.join(text[a:b] for a, b in pairwise([0, *begun, len(text)]))
        if self._spells(self._pattern, text):
            for special in self._special:
                while special in text:  # twice where one overlaps with itself
                    text = text.replace(special, special[0] + self._mark + special[1:])
        return text

    def _spells(self, pattern: re.Pattern[str], text: str) -> bool:
        """Whether a text has a special token; it is searched in parts, between which other threads may run."""
        reach = PART_CHARACTERS + len(self._special[0])
        return any(pattern.search(text, at, at + reach) for at in range(0, len(text), PART_CHARACTERS))


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a conversation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from _texts(key)
            yield from _texts(x)
    elif isinstance(value, list | tuple):
        for x in value:
            yield from _texts(x)
