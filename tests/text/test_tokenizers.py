"""Tokenizers, of bytes and learned ones, give back any text."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineate.text import tokenizer
from lineate.text.tokenizer import load_tokenizer, make_tokenizer
from tests.support.token_stores import TEXTS, bpe_texts


def test_bytes(tmp_path):
    made = make_tokenizer("bytes", ())
    assert (made.vocab_size, made.end, made.name) == (257, 256, "bytes")
    assert made.encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert made.decode([256, 97, 0xC3, 256, 98]) == "a\ufffdb"
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).identity == "bytes"


@pytest.mark.cover
@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(bpe, text):
    for made in (make_tokenizer("bytes", ()), bpe):
        ids = made.encode(text)
        assert made.decode(ids) == text and made.end not in ids
        assert made.decode([made.end, *ids, made.end]) == text


def test_bpe(bpe, tmp_path):
    texts = bpe_texts()
    assert (bpe.vocab_size, bpe.name) == (400, "bpe:400")
    assert len(bpe.encode(texts[0])) < 0.7 * len(texts[0])
    assert make_tokenizer("bpe:400", iter(texts)).identity == bpe.identity
    assert make_tokenizer("bpe:401", texts).identity != bpe.identity
    assert [ids.tolist() for ids in bpe.encode_many(TEXTS)] == [bpe.encode(text) for text in TEXTS]
    assert bpe.decode(bpe.encode("x<|endoftext|>y")) == "x<|endoftext|>y"
    bpe.save(tmp_path)
    back = load_tokenizer(tmp_path)
    assert (back.identity, back.vocab_size, back.end) == (bpe.identity, bpe.vocab_size, bpe.end)
    assert back.encode("".join(TEXTS)) == bpe.encode("".join(TEXTS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_kind.json"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\t'\u00a0\u3000\x1c\x85.1"), max_size=200))
def test_long_texts_are_cut_where_no_token_spans(bpe, text):
    whole = bpe.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARACTERS", 5)
        assert bpe.encode(text) == whole
        assert bpe.decode(whole) == text


def test_bpe_reads_no_more_than_it_needs(monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer, "TRAIN_CHARACTERS", 3000)
    read = []

    def endless():
        while True:
            read.append(1)
            yield "all work and no play makes jack a dull boy, "[len(read) % 7 :] * 30

    assert make_tokenizer("bpe:262", endless()).vocab_size == 262
    assert len(read) <= 4


def test_tokenizer_errors(bpe, tmp_path, monkeypatch):
    for name, message in [
        ("words", "must be 'bytes' or 'bpe:SIZE'.*got 'words'"),
        ("bpe:", "'bpe:SIZE'"),
        ("bpe:-5", "'bpe:SIZE'"),
        ("bpe:1e9", "'bpe:SIZE' such as 'bpe:4096', got 'bpe:1e9'"),
        ("bpe:0", "at least 'bpe:257'"),
        ("bpe:1048577", "at most 'bpe:1048576', got 'bpe:1048577'"),
        ("bpe:99999999999", "at most 'bpe:1048576', got 'bpe:99999999999'"),
        ("bpe:" + "9" * 5000, "at most 'bpe:1048576', got 'bpe:9+$"),  # more digits than int() takes
        ("bpe:256", r"at least 'bpe:257' \(256 bytes and end-of-text\), got 'bpe:256'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_tokenizer(name, ["text"])
    for text in ("x", "ab ab", "the cat sat on the mat"):
        with pytest.raises(ValueError, match=r"'bpe:4096' needs more text: it gave 2\d\d tokens; use 'bpe:") as refused:
            make_tokenizer("bpe:4096", [text])
        made = make_tokenizer(re.search(r"use '(bpe:2\d\d)' or more data", str(refused.value))[1], [text])
        assert made.decode(made.encode(text)) == text
    for made in (make_tokenizer("bytes", ()), bpe):
        with pytest.raises(ValueError, match="surrogate pair at character 1"):
            made.encode("a\ud800")
        for wrong in (-1, made.vocab_size):
            with pytest.raises(ValueError, match=rf"ids must be in 0\.\.{made.vocab_size - 1}.*got {wrong}"):
                made.decode([wrong])
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    bpe.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for broken in (whole[:-10], whole.replace(b'"a"', b'"A"')):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing; tokenizer 'bpe:400' needs it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_kind.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'lineate\[train\]', or use tokenizer='bytes'"):
        make_tokenizer("bpe:300", ["text"])
