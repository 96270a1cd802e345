"""Lower bounds of the tokens of a text, derived from tokenizer.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from lineate.text.base import ALPHABET
from lineate.text.bounded import TokenBound

SHRINKS = {"NFC": 4, "NFD": 4, "Lowercase": 1, "ByteLevel": 1, "Prepend": 1}
"""Characters of a text for each that a normaliser makes of them, at most: four code points compose to one character.
Other normalisers may take away any number of characters."""


def token_bound(engine: Mapping[str, Any], spelled: Mapping[int, bytes]) -> TokenBound | None:
    """Return the bound of a tokenizer.json; None where a token may stand for any number of characters.

    That is so if a part of the tokenizer drops characters, makes one token of several that it does not know, or lets an
    added token take the spaces around it.

    Args:
        engine: The contents of tokenizer.json, with all added tokens.
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
    kinds, cuts = {part.get("type") for part in normalizers}, {part.get("type") for part in before}
    tokens = [*filter(None, spelled.values()), *(x["content"].encode("utf-8", "replace") for x in added)]
    by_bytes = "ByteLevel" in kinds | cuts
    if not by_bytes or (engine.get("decoder") or {}).get("type") != "ByteLevel":
        tokens += _pieces(engine["model"]["vocab"], before)
    same = kinds <= {"NFC", "NFD", "ByteLevel"} and not (by_bytes and "Metaspace" in cuts)
    return TokenBound.of(tokens, shrinks, same, bool(kinds & {"NFC", "NFD"}))


def _pieces(vocabulary: Mapping[str, int], parts: list[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the pieces of a vocabulary before a decoder changes them, in each form that they can have in a text.

    A Metaspace makes a space and a "▁" in a text the same piece. A piece with k of them and m other bytes stands for
    3j + (k - j) + m bytes, j of 0 to k, and these count 3j / (3k + m) + (k - j) / (k + m) + m / (3k + m) <= 1 at most.
    """
    spaces = [str(x.get("replacement", "▁")) for x in parts if x.get("type") == "Metaspace"]
    for piece in vocabulary:
        yield piece.encode("utf-8", "replace")
        for space in spaces:
            if space in piece:
                yield piece.replace(space, " ").encode("utf-8", "replace")


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
    """Return the most characters for each one that a normaliser makes of them."""
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        given, made = pattern.get("String"), part.get("content")
        return 1 if given and made is not None and len(made) >= len(given) else None
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
