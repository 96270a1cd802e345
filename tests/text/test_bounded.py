"""Texts that may be far too long: what fits is never refused, and what does not fit is not encoded."""

import random

import pytest

pytest.importorskip("tokenizers")

from lineate.text.bounded import PIECE_CHARACTERS, TooManyTokens
from lineate.text.tokenizer import load_tokenizer, make_tokenizer
from tests.support.published import KINDS, make_published
from tests.support.token_stores import bpe_texts

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


def pieces_of(count, normalizer=None, pre_tokenizer=None):
    """Return a tokenizer with bytes, in which one token has n spaces; its decoder makes them of "\u2581"."""
    from tokenizers import Tokenizer, decoders, models

    from lineate.text.published import PublishedTokenizer

    runs = ["\u2581" * n for n in (1, 2, 4, 8, 16, 32) if n <= count]
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", *runs, "<|end|>"]
    merges = [(run, run) for run in runs[:-1]]
    numbers = {piece: n for n, piece in enumerate(vocabulary)}
    engine = Tokenizer(models.BPE(numbers, merges, byte_fallback=True))
    if normalizer is not None:
        engine.normalizer = normalizer
    if pre_tokenizer is not None:
        engine.pre_tokenizer = pre_tokenizer
    engine.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    config = b'{"eos_token": "<|end|>"}'
    return PublishedTokenizer({"tokenizer.json": engine.to_str().encode(), "tokenizer_config.json": config})


@pytest.mark.parametrize("parts", ["metaspace", "replaced", "both", "shorter", "twice"])
def test_a_character_that_is_the_same_piece_as_a_space(parts):
    """Tokens of 16 spaces hold 48 bytes where a text spells them as the character that they are in the vocabulary."""
    from tokenizers import normalizers, pre_tokenizers

    spaces, whole = normalizers.Replace(" ", "\u2581"), pre_tokenizers.Metaspace(split=False, prepend_scheme="never")
    found = {
        "metaspace": (None, whole),
        "replaced": (spaces, None),
        "both": (spaces, whole),
        "shorter": (normalizers.Replace("   ", "\u2581"), None),
        "twice": (normalizers.Sequence([normalizers.Replace(x, y) for x, y in (("aaa", " "), (" ", "\u2581"))]), None),
    }[parts]
    tokenizer = pieces_of(16, *found)
    units = ("\u2581", " ", "\u2581 ", "aaa", "a\u2581", "   \u2581", "\u2581" * 16 + " " * 16, "\u4e2d")
    for unit in units:
        text = unit * (1600 if len(unit) < 16 else 100)
        ids = tokenizer.encode(text)
        assert tokenizer.encode_within(text, len(ids)) == ids, unit
    assert len(tokenizer.encode("\u2581" * 1600)) == 100
    with pytest.raises(TooManyTokens):
        tokenizer.encode_within("\u2581" * 1600, 99)


def test_a_text_of_pieces_that_cannot_fit_is_not_encoded(monkeypatch):
    from tokenizers import pre_tokenizers

    tokenizer = pieces_of(16, None, pre_tokenizers.Metaspace(split=False, prepend_scheme="never"))
    found = counted(tokenizer, monkeypatch)
    with pytest.raises(TooManyTokens):
        tokenizer.encode_within("\u4e2d" * 100_000, 1000)
    assert not found
