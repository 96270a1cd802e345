"""The tokenizer of models without one: bytes, end-of-text, and a text for every other id."""

import pytest

from lineate.text import Bytes, Detokenizer, Numbered


def test_texts_are_bytes_and_other_ids_have_texts_of_their_own():
    tokenizer = Numbered(163840)
    text = "Grün <|endoftext|> <300>"
    assert tokenizer.encode(text) == Bytes().encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([72, 300, 256, 163839]) == "H<300><163839>" and tokenizer.end == 256
    assert tokenizer.vocab_size == 163840 and tokenizer.name == "numbered:163840" != Numbered(300).identity
    pieces = Detokenizer(tokenizer)
    assert [pieces.push(n) for n in (257, 0xC3, 0xBC, 258)] == ["<257>", "", "ü", "<258>"]


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="size must be at least 257, 256 bytes and end-of-text, got 256"):
        Numbered(256)
    with pytest.raises(ValueError, match=r"ids must be in 0..299 for tokenizer 'numbered:300', got 300"):
        Numbered(300).token_bytes(300)
    with pytest.raises(ValueError, match="tokenizer 'numbered:300' has no files"):
        Numbered(300).save(tmp_path)
