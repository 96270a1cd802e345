"""A number of tokens that a text has at least, for the cost of counting its bytes, where a tokenizer.json tells it.

A token of n bytes counts 1/n for each of them, and a byte counts the least that it counts in any token: then the bytes
of each token count at most 1 together, and those of a text at most as much as it has tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lineate.text.base import ALPHABET

BLOCK = 2**16
"""Characters that are counted at a time."""
SHRINKS = {"NFC": 4, "NFD": 4, "Lowercase": 1, "ByteLevel": 1, "Prepend": 1}
"""Characters of a text for each byte that a normaliser makes of it, at most: four code points compose to one character,
and the longest character becomes one byte. Other normalisers may take away any number of characters."""


@dataclass(frozen=True, eq=False)
class TokenBound:
    """The longest tokens of a tokenizer.

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
            ascii_only: Whether that is so for ASCII alone.
        """
        by_byte, longest = [1] * 256, 1
        for token in sorted(tokens, key=len):
            longest = len(token)
            for byte in set(token):
                by_byte[byte] = longest
        return TokenBound(shrinks * longest, tuple(by_byte) if by_bytes else None, ascii_only)

    def least(self, text: str, enough: int) -> int:
        """Return a number of tokens that a text has at least; counting ends where that is more than `enough`.

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


def token_bound(engine: Mapping[str, Any], spelled: Mapping[int, bytes]) -> TokenBound | None:
    """Return the bound of a tokenizer.json; None where a token may stand for any number of characters.

    That is so if a part of the tokenizer drops characters, makes one token of several that it does not know, or lets an
    added token take the spaces around it.

    Args:
        engine: What tokenizer.json says, with all added tokens.
        spelled: The bytes of the tokens that are not special.
    """
    added = engine.get("added_tokens") or ()
    if any(x.get("lstrip") or x.get("rstrip") for x in added):
        return None
    shrinks, before = 1, [*_parts(engine.get("pre_tokenizer"), "pretokenizers")]
    normalizers = [*_parts(engine.get("normalizer"), "normalizers")]
    for part in normalizers:
        found = _shrink(part)
        if found is None:
            return None
        shrinks *= found
    if not all(_keeps(part) for part in before) or not _spells_all(engine.get("model") or {}, [*normalizers, *before]):
        return None
    kinds = {part.get("type") for part in normalizers}
    tokens = [*filter(None, spelled.values()), *(x["content"].encode("utf-8", "replace") for x in added)]
    return TokenBound.of(tokens, shrinks, kinds <= {"NFC", "NFD", "ByteLevel"}, bool(kinds & {"NFC", "NFD"}))


def _parts(value: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normaliser or pre-tokenizer, those of sequences one by one."""
    if value is None:
        return
    if value.get("type") == "Sequence":
        for part in value.get(name, ()):
            yield from _parts(part, name)
    else:
        yield value


def _shrink(part: Mapping[str, Any]) -> int | None:
    """Return the most characters for each byte that a normaliser makes of them."""
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        given, made = pattern.get("String"), part.get("content")
        return 1 if given and made is not None and len(made.encode("utf-8", "replace")) >= len(given) else None
    return SHRINKS.get(str(part.get("type")))


def _keeps(part: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops no characters."""
    if part.get("type") in ("Split", "Punctuation"):
        return str(part.get("behavior", "Isolated")).lower() != "removed"
    return part.get("type") in ("ByteLevel", "Metaspace", "Digits")


def _spells_all(model: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> bool:
    """Whether every byte of a text is part of a token of the vocabulary."""
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return False
    if any(part.get("type") == "ByteLevel" for part in parts):
        return vocabulary.keys() >= ALPHABET.keys()
    return bool(model.get("byte_fallback")) and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
