"""Text while it is generated: whole characters of the tokens that arrive, and stop strings.

Both hold back only text that cannot be shown yet, and take time proportional to their input.
"""

import codecs
from collections.abc import Iterable, Sequence

from lineate.text.base import Tokenizer


class Detokenizer:
    """Converts tokens to text one by one; the concatenated results equal tokenizer.decode of all of them.

    Bytes of an incomplete character are held back. Bytes that cannot become a character are U+FFFD at once.

    Args:
        tokenizer: The tokenizer.
        keep_special: Whether special tokens are written out, rather than left out.
        after: The ids of the text that is continued, if there is one; a space at the beginning then stays.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = False, after: Sequence[int] = ()) -> None:
        self._tokenizer, self._keep = tokenizer, keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begun = any(tokenizer.shown_bytes(token, keep_special) for token in reversed(after))
        self._strip = 0 if begun else tokenizer.longest_strip  # spaces that may still be left out

    def push(self, token: int) -> str:
        """Return the characters that this token completes.

        Args:
            token: The id of the next token.
        """
        found = self._tokenizer.shown_bytes(token, self._keep)
        while self._strip and found:
            if found[0] != 0x20:
                self._strip = 0
                break
            found, self._strip = found[1:], self._strip - 1
        return self._decoder.decode(found)

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Passes text on until one of several strings is met; no part of the string that ends the text is shown.

    Text is held back only while it could be the beginning of a stop string. The stop string that is complete first
    ends the text; of several that are complete at the same character, the longest does.

    Args:
        stops: The strings; without any, all text passes.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        if "" in self._stops:
            raise ValueError("stop strings must have at least one character, got ''")
        self._tables = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text so far ends with
        self._held = ""
        self._met: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be shown, and the stop string that was met, if one was; nothing after it is shown.

        Args:
            text: More text.
        """
        if self._met is not None:
            return "", self._met
        if not self._stops:
            return text, None
        held = self._held + text
        for n, character in enumerate(text, len(self._held) + 1):
            for i, stop in enumerate(self._stops):
                size, table = self._matched[i], self._tables[i]
                while size and stop[size] != character:
                    size = table[size - 1]
                self._matched[i] = size = size + (stop[size] == character)
                if size == len(stop):
                    self._held, self._met = "", stop
                    return held[: n - size], stop
        keep = max(self._matched)
        shown, self._held = held[: len(held) - keep], held[len(held) - keep :]
        return shown, None

    def finish(self) -> str:
        """Return the text that was held back, at the end of the input."""
        rest, self._held = self._held, ""
        return rest


def _failures(stop: str) -> list[int]:
    """Return, for each beginning of a string, how long its longest proper beginning is that is also its end."""
    table, size = [0] * len(stop), 0
    for n in range(1, len(stop)):
        while size and stop[size] != stop[n]:
            size = table[size - 1]
        size += stop[size] == stop[n]
        table[n] = size
    return table
