"""Encoding up to a limit of tokens, without encoding the whole of texts that are far too long.

Three steps, each of which never refuses a text that has few enough tokens:

1. A text whose bytes the limit's tokens cannot hold is refused without encoding any of it (TokenBound).
2. A text with many characters for each token of the limit is first encoded piece by piece, until the pieces have
   clearly more tokens than the limit. A piece ends where the tokenizer cuts texts into words, MARGIN characters before
   the end of what was encoded, so that its tokens do not depend on later text; tokens that a tokenizer adds to each
   piece are within the slack. A tokenizer that does not cut texts into words encodes a whole text that passed the first
   step.
3. The remaining texts are encoded whole, and their tokens are counted.

So a text costs no more than the encoding of about twice the limit's tokens, or of a few characters a token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

PIECE_CHARACTERS = 2**15
"""Characters that are encoded before the tokens are counted."""
MARGIN = 1024
"""Characters at the end of a piece whose tokens are not counted: they may differ in the whole text."""
PLENTY = 8
"""Characters a token, above which a text is encoded in pieces first; ordinary text has three to five."""

BLOCK = 2**16
"""Characters that are counted at a time."""

Piece = Callable[[str], tuple[int, int] | None]
"""Returns the tokens and characters of a prefix whose tokens do not depend on later text; None if none is known."""


class TooManyTokens(ValueError):
    """A text has more tokens than it may have.

    Args:
        most: The most tokens that it may have.
        least: A lower bound of its tokens.
        exact: Whether this is the exact number.
    """

    def __init__(self, most: int, least: int, exact: bool = False) -> None:
        super().__init__(f"the text must have at most {most} tokens, got {'' if exact else 'at least '}{least}")
        self.most, self.least, self.exact = most, least, exact


def check_pieces(text: str, most: int, piece: Piece) -> None:
    """Raise TooManyTokens if the pieces of a text have clearly more tokens than `most`.

    Args:
        text: The text.
        most: The most tokens.
        piece: Counts the tokens of a beginning.
    """
    if len(text) <= PIECE_CHARACTERS + PLENTY * most:
        return
    count, start, size, enough = 0, 0, PIECE_CHARACTERS, most + most // 8 + 64
    while len(text) - start > size:
        found = piece(text[start : start + size])
        if found is None:
            size *= 4  # one word
            continue
        count, start, size = count + found[0], start + found[1], PIECE_CHARACTERS
        if count > enough:
            raise TooManyTokens(most, count)


@dataclass(frozen=True, eq=False)
class TokenBound:
    """The longest tokens of a tokenizer, which give a lower bound of the tokens of a text.

    A token of n bytes counts 1/n for each of them, and a byte counts the least that it counts in any token: then the
    bytes of each token count at most 1 together, and those of a text at most as much as it has tokens.

    Args:
        longest: The most characters of any text that one token can stand for.
        by_byte: For each byte the bytes of the longest token that has it, 256; None if a normaliser changes texts.
        ascii_only: Whether a normaliser may change texts that are not ASCII.
    """

    longest: int
    by_byte: tuple[int, ...] | None
    ascii_only: bool

    @staticmethod
    def of(tokens: Iterable[bytes], shrinks: int = 1, by_bytes: bool = True, ascii_only: bool = False) -> "TokenBound":
        """Return the bound of a vocabulary in which every byte of a text is part of a token.

        Args:
            tokens: The bytes of each token, those of special tokens included.
            shrinks: Characters of a text for each byte that is encoded.
            by_bytes: Whether the bytes that are encoded are those of the text.
            ascii_only: Whether this holds only for ASCII.
        """
        by_byte, longest = [1] * 256, 1
        for token in sorted(tokens, key=len):
            longest = len(token)
            for byte in set(token):
                by_byte[byte] = longest
        return TokenBound(shrinks * longest, tuple(by_byte) if by_bytes else None, ascii_only)

    def least(self, text: str, enough: int) -> int:
        """Return a lower bound of the tokens of a text; counting stops when it exceeds `enough`.

        Args:
            text: The text.
            enough: The number.
        """
        import numpy as np

        least = -(-len(text) // self.longest)
        if least > enough or self.by_byte is None or (self.ascii_only and not text.isascii()):
            return least
        found, by_byte = 0.0, np.array(self.by_byte, np.float64)
        for start in range(0, len(text), BLOCK):
            data = np.frombuffer(text[start : start + BLOCK].encode("utf-8", "surrogatepass"), np.uint8)
            found += float((np.bincount(data, minlength=256) / by_byte).sum())
            if found > enough + 1:
                break
        return max(least, int(found - 1e-6 * found))
