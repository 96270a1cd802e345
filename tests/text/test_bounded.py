"""Texts that may be far too long: what fits is never refused, and what does not fit is not encoded."""

import random

import pytest

pytest.importorskip("tokenizers")

from published import KINDS, make_published
from token_stores import bpe_texts

from lineate.text.bounded import PIECE_CHARACTERS, TooManyTokens
from lineate.text.tokenizer import load_tokenizer, make_tokenizer

UNITS = (
    "The state is a matrix.\n", " ", "a", "\n", "<|im_end|>", "<|", "1 234,", "\u4e2d\u6587", "e\u0301", "\uac00\u11a8",
    "\U0001f600", "\u1112\u1161\u11ab", "==", "\t\t", "\u212b",
)  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "bpe", *KINDS])
def tokenizer(request, tmp_path_factory):
    if request.param in KINDS and request.param != "bytes":
        folder = tmp_path_factory.mktemp("published")
        make_published(request.param, folder)
        return load_tokenizer(folder)
    return make_tokenizer("bytes" if request.param == "bytes" else "bpe:400", bpe_texts())


def counted(tokenizer, monkeypatch):
    """Return a list that gets the characters of every text that the tokenizer encodes."""
    found = []
    for name in ("encode", "encode_rendered", "_independent"):
        encode = getattr(tokenizer, name)

        def count(text, *rest, encode=encode):
            found.append(len(text))
            return encode(text, *rest)

        monkeypatch.setattr(tokenizer, name, count)
    return found


@pytest.mark.parametrize("rendered", [False, True])
def test_what_fits_is_never_refused(tokenizer, rendered, monkeypatch):
    """A limit of exactly a text's tokens takes it, and the limit below refuses it; all texts are read in pieces."""
    monkeypatch.setattr("lineate.text.bounded.PIECE_CHARACTERS", 2500)
    monkeypatch.setattr("lineate.text.bounded.PLENTY", 0)
    draw = random.Random(0)
    for n in range(20):
        text = "".join(draw.choice(UNITS) * draw.randrange(1, 300) for _ in range(draw.randrange(1, 12)))
        text = UNITS[n] * 3000 if n < len(UNITS) else text
        ids = (tokenizer.encode_rendered if rendered else tokenizer.encode)(text)
        assert tokenizer.encode_within(text, len(ids), rendered) == ids
        with pytest.raises(TooManyTokens) as caught:
            tokenizer.encode_within(text, len(ids) - 1, rendered)
        assert len(ids) - 1 < caught.value.least <= len(ids)


def test_a_text_that_cannot_fit_is_not_encoded(tokenizer, monkeypatch):
    found = counted(tokenizer, monkeypatch)
    text = "The memory is a matrix. " * 100_000
    with pytest.raises(TooManyTokens):
        tokenizer.encode_within(text, 1000)
    assert sum(found) <= 8 * PIECE_CHARACTERS


def test_a_conversation_that_cannot_fit(tokenizer, monkeypatch):
    messages = [{"role": "user", "content": "The memory is a matrix. <|im_end|>" * 50_000}]
    short = [{"role": "user", "content": "The memory <|im_end|>"}]
    ids = tokenizer.encode_chat(short)
    assert tokenizer.encode_chat(short, most_tokens=len(ids)) == ids
    with pytest.raises(TooManyTokens):
        tokenizer.encode_chat(short, most_tokens=len(ids) - 1)
    found = counted(tokenizer, monkeypatch)
    with pytest.raises(TooManyTokens):
        tokenizer.encode_chat(messages, most_tokens=1000)
    assert sum(found) <= 8 * PIECE_CHARACTERS
