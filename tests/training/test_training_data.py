"""Text to tokens to batches: sources, tokenizers, the token cache under kills and damage, batches against the naive."""

import errno
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineate import folders
from lineate.training import sources, tokenizer, tokens
from lineate.training.batches import Batch, Batches
from lineate.training.sources import documents, fingerprint
from lineate.training.tokenizer import load_tokenizer, make_tokenizer
from lineate.training.tokens import JoinedSpans, TokenStore, TokenView, permutation

TEXTS = ["hello", "", "the quick brown fox", "\u00e9\u4e2d\U0001f600\x00", "a\r\nb\n\n", "<|endoftext|>", "\ufeffx"]
END = 256


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def make_store(folder, texts, name="bytes"):
    """A store of exactly these texts, empty ones too (which the sources leave out)."""
    made = make_tokenizer(name, texts)
    path = Path(folder) / "store.tokens"
    tokens.make_token_file(path, "key", made, iter(texts))
    return TokenStore.open(path, "key"), made


def view_of(lengths):
    """Documents of these lengths whose tokens are all different."""
    lengths = np.array(lengths, np.int64)
    stops = np.cumsum(lengths)
    return TokenView("train", np.arange(stops[-1], dtype=np.uint32), stops - lengths, lengths)


# Sources


def test_stdlib_is_text_of_the_library_alone():
    first, again = list(documents(["stdlib"])), list(documents(["stdlib"]))
    assert first == again
    assert 5e6 < sum(len(text.encode()) for text in first) < 40e6
    files = sources.stdlib_files()
    assert {file.suffix for file in files} <= {".py", ".txt", ".md", ".rst"} and len(files) > 300
    parts = {part for file in files for part in file.relative_to(sources.sysconfig.get_path("stdlib")).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
    assert {"argparse.py", "json", "asyncio"} <= parts


def test_folder_files_and_lines_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "no.txt").write_text("hidden")
    (tmp_path / "b" / "z.MD").write_text("z")
    (tmp_path / "b" / "a.py").write_text("a")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfbom\r\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    write_lines(tmp_path / "a.jsonl", [{"text": "one", "n": 1}, {"text": ""}, {"text": "two"}])
    assert list(documents([str(tmp_path)])) == ["one", "two", "bom\r\n", "a", "z"]
    odd = tmp_path / "notes.log"
    odd.write_text("any suffix when named")
    assert list(documents([str(odd), str(tmp_path / "b")])) == ["any suffix when named", "a", "z"]


def test_what_is_not_utf8_is_counted(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "lines.jsonl").write_bytes(b'{"text": "\xff"}\n\n{"text": "\\ud800"}\n{"text": "kept"}\n')
    said = []
    assert list(documents([str(tmp_path)], said.append)) == ["good", "kept"]
    assert len(said) == 1 and "3 texts" in said[0] and "bad.txt" in said[0] and "lines.jsonl:3" in said[0]
    with pytest.warns(UserWarning, match="3 texts"):
        list(documents([str(tmp_path)]))
    with pytest.raises(ValueError, match=r"bad\.txt holds no text \(1 not UTF-8\)"):
        list(documents([str(tmp_path / "bad.txt")]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\n{"body": "b", "id": 1}\n', r"line 3 must have a field 'text'.*\['body', 'id'\]"),
        ('{"text": 5}\n', r"line 1 must have a field 'text' that is a string, got a 'text' of type int"),
        ('{"text": "a"}\n["b"]\n', r"line 2 .*got list"),
        ('{"text": "a"}\n{"text": \n', r"line 2 is not JSON"),
        ('{"text": "a"}\n{"text": ' + "[" * 99999 + "\n", r"line 2 is not JSON: maximum recursion depth"),
        ('{"text": ""}\n', r"holds no text"),
    ],
)
def test_wrong_lines_are_named(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(documents([str(tmp_path / "x.jsonl")]))
    assert "x.jsonl" in str(caught.value)


def test_wrong_sources_are_errors_at_once(tmp_path):
    """Before the first text is asked for."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.png").write_bytes(b"1")
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for data, kind, message in [
        ([str(tmp_path / "no" / "where")], FileNotFoundError, "no/where does not exist; give 'stdlib'"),
        ([str(tmp_path / "empty.txt")], ValueError, r"empty\.txt is empty"),
        ([str(tmp_path / "only")], ValueError, r"only holds no text: expected \.txt .*got 1 \.png"),
        ([str(tmp_path / "nothing")], ValueError, "nothing holds no text.*got no files"),
        ([str(tmp_path / "pipe")], ValueError, "neither a file nor a folder"),
        ([], ValueError, "at least one source"),
        ("stdlib", TypeError, r"sequence of names.*\('stdlib',\)"),
        (["hf:"], ValueError, "names no dataset"),
        (["stdlib", ""], ValueError, "data must be named, got ''; give 'stdlib', a file"),  # not the current folder
        (["~nosuchuser/x"], FileNotFoundError, "data: ~nosuchuser/x does not exist"),
    ]:
        for call in (documents, fingerprint):
            with pytest.raises(kind, match=message):
                call(data)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(PermissionError, match=r"a\.txt cannot be read"):
        documents([str(tmp_path)])


def test_unreadable_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(sources.os, "access", lambda path, mode: False)
    for name in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(PermissionError, match=r"a\.txt cannot be read"):
            documents([str(name)])


def test_hugging_face(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf:some/set needs `pip install datasets`"):
        list(documents(["hf:some/set"]))
    calls = []

    class Rows(list):
        column_names = ("text", "id")

    def load_dataset(path, name, *, split):
        calls.append((path, name, split))
        return Rows([{"text": "a"}, {"text": ""}, {"text": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents(["hf:some/set", "hf:set:test", "hf:set:test:raw"])) == ["a", "b"] * 3
    assert calls == [("some/set", None, "train"), ("set", None, "test"), ("set", "raw", "test")]
    Rows.column_names = ("content",)
    with pytest.raises(ValueError, match=r"hf:set must have a column 'text', got \['content'\]"):
        list(documents(["hf:set"]))
    Rows.column_names = ("text",)
    with pytest.raises(ValueError, match=r"hf:set:test holds a row without text: row 1 .* NoneType"):
        Rows.__iter__ = lambda self: iter([{"text": "a"}, {"text": None}])
        list(documents(["hf:set:test"]))


# Tokenizers


def bpe_texts():
    return [*documents([json.__path__[0]]), "a\n\n \n\n\n " * 300]  # runs of newlines become tokens


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return make_tokenizer("bpe:400", bpe_texts())


def test_bytes(tmp_path):
    made = make_tokenizer("bytes", ())
    assert (made.vocab_size, made.end, made.name) == (257, 256, "bytes")
    assert made.encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert made.decode([256, 97, 0xC3, 256, 98]) == "a\ufffdb"
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).identity == "bytes"


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
        assert bpe.decode(bpe.encode(text)) == text
        assert bpe.encode(text) == whole


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
    with pytest.raises(ImportError, match=r"`pip install tokenizers`; or use tokenizer='bytes'"):
        make_tokenizer("bpe:300", ["text"])


# The token cache


def test_documents_are_stored_between_ends(tmp_path, bpe):
    store, made = make_store(tmp_path, TEXTS)
    assert store.n_documents == len(TEXTS)
    assert store.n_tokens == sum(len(text.encode()) + 2 for text in TEXTS)
    for i, text in enumerate(TEXTS):
        assert store.document(i).tolist() == [END, *text.encode(), END]
    assert store.tokens.dtype == np.uint16 and not store.tokens.flags.writeable
    with pytest.raises(IndexError, match=r"0\.\.6, got 7"):
        store.document(7)


def test_groups_do_not_matter(tmp_path, monkeypatch):
    whole, _ = make_store(tmp_path, TEXTS)
    tokens_of_whole, bounds = whole.tokens.copy(), whole.starts.copy()
    monkeypatch.setattr(tokens, "GROUP_CHARACTERS", 1)
    small, _ = make_store(tmp_path, TEXTS)
    assert np.array_equal(small.tokens, tokens_of_whole) and np.array_equal(small.starts, bounds)


def test_large_vocabularies_take_four_bytes(tmp_path):
    class Large(tokenizer.Bytes):
        vocab_size, end = 70_000, 69_999

        def encode_many(self, texts):
            return [ids.astype(np.int64) + 66_000 for ids in super().encode_many(texts)]

    tokens.make_token_file(tmp_path / "large", "key", Large(), iter(["abc", "d"]))
    store = TokenStore.open(tmp_path / "large", "key")
    assert store.tokens.dtype == np.uint32 and (store.vocab_size, store.end) == (70_000, 69_999)
    assert store.document(0).tolist() == [69_999, 66_097, 66_098, 66_099, 69_999]
    assert store.unigram_entropy() == pytest.approx(4 / 6 * math.log(6) + 2 / 6 * math.log(3))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    for i in range(20):
        (folder / f"{i}.txt").write_text("".join(rng.choices("abcdef \n", k=rng.randint(1, 300))))
    return [str(folder)]


def test_made_once_and_again_when_the_sources_change(data, tmp_path, bpe):
    made, cache, said = make_tokenizer("bytes", ()), tmp_path / "new" / "cache", []
    first = TokenStore.open_or_make(data, made, cache, said.append)
    assert said[0].startswith("reading ") and f"{first.n_tokens:,} tokens of 20 documents" in said[1]
    again = TokenStore.open_or_make(data, made, str(cache), said.append)
    assert len(said) == 2 and again.path == first.path and np.array_equal(again.tokens, first.tokens)
    assert TokenStore.open_or_make(data, bpe, cache).path != first.path
    file = Path(data[0]) / "3.txt"
    size, times = file.stat().st_size, file.stat()
    file.write_text("x" * size)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    changed = TokenStore.open_or_make(data, made, cache)
    assert changed.path != first.path and changed.n_tokens == first.n_tokens
    assert not np.array_equal(changed.tokens, first.tokens)
    assert not list(cache.glob("*.partial"))


def damage_truncate(raw):
    return raw[:-1]


def damage_nothing_left(raw):
    return b""


def damage_longer(raw):
    return raw + bytes(8)


def damage_no_header(raw):
    return bytes(tokens.HEADER_BYTES) + raw[tokens.HEADER_BYTES :]


def damage_header(raw):
    assert b'"n_documents": 20' in raw
    return raw.replace(b'"n_documents": 20', b'"n_documents": 21')


def damage_token(raw):
    return raw[:2000] + bytes([raw[2000] ^ 1]) + raw[2001:]


def damage_bounds(raw):
    return raw[:-9] + b"\x01" + raw[-8:]


def damage_other_file(raw):
    header = json.loads(raw[: tokens.HEADER_BYTES].split(b"\n")[1])
    return tokens.header_bytes(header | {"key": "other"}) + raw[tokens.HEADER_BYTES :]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_truncate, r"\d+ bytes, expected \d+"),
        (damage_nothing_left, "header does not match its checksum"),
        (damage_longer, r"\d+ bytes, expected \d+"),
        (damage_no_header, "header does not match its checksum"),
        (damage_header, "header does not match its checksum"),
        (damage_token, "tokens do not match their checksum"),
        (damage_bounds, "bounds do not match their checksum"),
        (damage_other_file, "names other data"),
    ],
    ids=lambda x: x.__name__.removeprefix("damage_") if callable(x) else "",
)
def test_damage_is_seen_and_mended(data, tmp_path, damage, why):
    made = make_tokenizer("bytes", ())
    path = TokenStore.open_or_make(data, made, tmp_path).path
    raw = path.read_bytes()
    path.write_bytes(damage(raw))
    said = []
    TokenStore.open_or_make(data, made, tmp_path, said.append)
    assert path.read_bytes() == raw
    assert len(said) == 3
    assert re.search(rf"is damaged \(.*{why}.*\); making it again", said[0])
    path.write_bytes(damage(raw))
    with pytest.warns(UserWarning, match=why):
        TokenStore.open_or_make(data, made, tmp_path)


def test_large_files_are_not_read_whole_on_opening(data, tmp_path, monkeypatch):
    made = make_tokenizer("bytes", ())
    path = TokenStore.open_or_make(data, made, tmp_path).path
    monkeypatch.setattr(tokens, "CHECKED_BYTES", 100)
    path.write_bytes(damage_token(path.read_bytes()))
    said = []
    TokenStore.open_or_make(data, made, tmp_path, said.append)
    assert not said
    path.write_bytes(damage_bounds(path.read_bytes()))
    TokenStore.open_or_make(data, made, tmp_path, said.append)
    assert "bounds" in said[0]


def in_child(function):
    """Runs it in a forked process, which has this one's modules."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def test_a_killed_writer_leaves_nothing_that_is_trusted(data, tmp_path, monkeypatch):
    made = make_tokenizer("bytes", ())
    monkeypatch.setattr(tokens, "GROUP_CHARACTERS", 1)
    read_end, write_end = os.pipe()

    def stuck():
        def texts(data, report):
            yield from ["some text"] * 10
            os.write(write_end, b"x")
            time.sleep(600)

        tokens.documents = texts
        TokenStore.open_or_make(data, made, tmp_path / "cache")

    child = in_child(stuck)
    os.read(read_end, 1)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    left = list((tmp_path / "cache").iterdir())
    assert [file.suffix for file in left] == [".partial"] and left[0].stat().st_size > tokens.HEADER_BYTES
    assert left[0].read_bytes()[: tokens.HEADER_BYTES] == bytes(tokens.HEADER_BYTES)  # the header comes last
    store = TokenStore.open_or_make(data, made, tmp_path / "cache")
    assert store.n_documents == 20 and left[0].exists()  # it might have been alive
    with pytest.raises(tokens.DamagedTokenFile):
        TokenStore.open(left[0], "any")
    store.path.unlink()
    os.utime(left[0], (1, 1))
    TokenStore.open_or_make(data, made, tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".tokens"]


def test_two_writers_at_once(data, tmp_path):
    """Both begin before either ends, the other's file is renamed over an open one, and both read the truth."""
    made, expected = make_tokenizer("bytes", ()), sorted(documents(data))
    barrier = multiprocessing.get_context("fork").Barrier(3)

    def make():
        def texts(data, report):
            barrier.wait(30)
            yield from documents(data)
            barrier.wait(30)

        tokens.documents = texts
        store = TokenStore.open_or_make(data, made, tmp_path / "cache")
        found = sorted(made.decode(store.document(i)) for i in range(store.n_documents))
        os._exit(0 if found == expected else 1)

    children = [in_child(make) for _ in range(3)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".tokens"]


@pytest.mark.parametrize("missing", [4, 1000])
def test_a_full_disk_is_said_and_leaves_no_half_file(data, tmp_path, missing):
    """A file may not grow beyond a limit: write() takes a part, the next one fails."""
    made = make_tokenizer("bytes", ())
    size = TokenStore.open_or_make(data, made, tmp_path / "whole").path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, limits[1]))
    try:
        with pytest.raises(OSError, match=r"the token cache cannot be written: .*free space or choose") as caught:
            TokenStore.open_or_make(data, made, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("call", [1, 2])
def test_a_disk_that_is_full_when_synced(data, tmp_path, monkeypatch, call):
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens.os, "fsync", fsync)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        TokenStore.open_or_make(data, make_tokenizer("bytes", ()), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_cache_errors_come_before_the_sources_are_read(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sources.Path, "read_bytes", lambda file: pytest.fail(f"{file} was read"))
    with pytest.raises(OSError, match="the token cache cannot be written"):
        TokenStore.open_or_make(data, make_tokenizer("bytes", ()), tmp_path / "file" / "cache")


def test_errors_of_the_sources_leave_no_half_file(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"no": 1}\n')
    (tmp_path / "y.jsonl").write_text('{"text": ""}\n')
    for name, message in (("x.jsonl", "line 2"), ("y.jsonl", "holds no text")):
        with pytest.raises(ValueError, match=message):
            TokenStore.open_or_make([str(tmp_path / name)], make_tokenizer("bytes", ()), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(ValueError, match="data holds no text"):
        tokens.make_token_file(tmp_path / "none", "key", make_tokenizer("bytes", ()), iter(()))


def test_default_cache_folder(monkeypatch, tmp_path, data):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LINEATE_CACHE", raising=False)
    assert folders.cache_folder() == tmp_path / "xdg" / "lineate"
    monkeypatch.setenv("LINEATE_CACHE", str(tmp_path / "own"))
    assert TokenStore.open_or_make(data, make_tokenizer("bytes", ())).path.parent == tmp_path / "own"


def test_unigram_entropy(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "COUNTED_TOKENS", 7)
    store, _ = make_store(tmp_path, TEXTS)
    counts = Counter(token for i in range(store.n_documents) for token in store.document(i)[1:].tolist())
    n = sum(counts.values())
    assert store.unigram_entropy() == pytest.approx(-sum(c / n * math.log(c / n) for c in counts.values()))
    assert view_of([1]).unigram_entropy() == 0


# The split


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60) | st.integers(2, 4), min_size=1, max_size=30),
    fraction=st.sampled_from([1e-6, 0.01, 0.1, 0.3, 0.5]),
    seed=st.integers(0, 5),
)
def test_split_is_a_partition(lengths, fraction, seed):
    whole = view_of(lengths)
    bounds = np.append(whole.starts, whole.n_tokens)
    store = TokenStore(Path("x"), {"vocab_size": 1, "end": 0, "tokens_crc32": 0}, whole.tokens, bounds)
    train, validation = store.split(fraction, seed)
    again = store.split(fraction, seed)
    for one, other in zip((train, validation), again, strict=True):
        assert np.array_equal(one.starts, other.starts) and np.array_equal(one.lengths, other.lengths)
    pieces = [set(view.document(i).tolist()) for view in (train, validation) for i in range(view.n_documents)]
    assert all(pieces) and train.n_documents and validation.n_documents
    assert sum(map(len, pieces)) == whole.n_tokens == len(set.union(*pieces))
    documents_of_whole = [set(whole.document(i).tolist()) for i in range(whole.n_documents)]
    assert sum(piece not in documents_of_whole for piece in pieces) in (0, 2)  # at most one document is cut in two
    wanted = max(1, round(whole.n_tokens * fraction))
    assert 0.5 * wanted <= validation.n_tokens <= 1.5 * wanted


def test_split_depends_on_the_seed_and_wants_a_fraction():
    lengths = [10] * 50
    whole = view_of(lengths)
    store = TokenStore(
        Path("x"), {"vocab_size": 1, "end": 0, "tokens_crc32": 0}, whole.tokens, np.append(whole.starts, 500)
    )
    assert len({tuple(store.split(0.1, seed)[1].starts) for seed in range(10)}) > 5
    assert (store.split(0.1, 0)[0].name, store.split(0.1, 0)[1].name) == ("train", "validation")
    for wrong in (0, -0.1, 0.6, float("nan")):
        with pytest.raises(ValueError, match=r"validation_fraction must be in \(0, 0\.5\]"):
            store.split(wrong, 0)


def test_one_text_is_cut(tmp_path):
    store, made = make_store(tmp_path, ["0123456789" * 10])
    train, validation = store.split(0.1, 0)
    assert made.decode(train.document(0)) + made.decode(validation.document(0)) == "0123456789" * 10
    assert validation.n_tokens == 10 and validation.document(0)[-1] == END and train.document(0)[0] == END


def test_permutation():
    assert permutation(6, 1, 2).tolist() == permutation(6, 1, 2).tolist()
    assert sorted(permutation(1000, 0, 0).tolist()) == list(range(1000))
    assert permutation(1, 3, 4).tolist() == [0]
    orders = {tuple(permutation(5, seed, epoch)) for seed in range(30) for epoch in range(30)}
    assert len(orders) == 120  # every order comes up
    assert permutation(8, 0, 0).tolist() == [5, 0, 7, 4, 2, 1, 3, 6]  # a stored run must go on with the same data


# Batches


def naive(view, length, rows, seed, step):
    """All epochs that are needed end to end, token by token: (id, target, does a text begin here)."""
    stream, epoch = [], 0
    while len(stream) < (step + 1) * rows * length:
        for i in permutation(view.n_documents, seed, epoch):
            ids = view.document(i).tolist()
            stream += zip(ids, [*ids[1:], -100], [True] + [False] * len(ids), strict=False)
        epoch += 1
    part = stream[step * rows * length : (step + 1) * rows * length]
    starts = [t for t, (_, _, begins) in enumerate(part) if begins or t % length == 0]
    return [x[0] for x in part], [x[1] for x in part], [*starts, rows * length]


def assert_batch(batch, expected):
    ids, targets, bounds = expected
    assert batch.ids.tolist() == [ids] and batch.targets.tolist() == [targets]
    assert batch.cu_seqlens.tolist() == bounds
    assert {batch.ids.dtype, batch.targets.dtype, batch.cu_seqlens.dtype} == {torch.int64}


CASES = [
    ([50], 7, 3),  # one document, longer than a row
    ([7, 7, 14, 21], 7, 2),  # rows end where documents do
    ([2, 2, 2], 6, 1),  # empty documents; a row is an epoch
    ([2], 2, 5),  # five epochs in a batch
    ([3, 5, 2], 10, 4),
    ([3, 5, 3], 10, 4),  # epochs wrap inside a row
    ([1, 1, 4], 4, 2),
    ([5], 1, 1),
]


@pytest.mark.parametrize(("lengths", "length", "rows"), CASES, ids=str)
def test_batches_are_the_documents_end_to_end(lengths, length, rows):
    view = view_of(lengths)
    batches = Batches(view, length, rows, seed=3)
    for step in [0, 1, 2, 3, 7, 2, 0]:
        assert_batch(batches.batch(step), naive(view, length, rows, 3, step))


@settings(max_examples=200, deadline=None)
@given(draw=st.data(), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_batches_are_the_documents_end_to_end_for_any(draw, lengths, seed):
    view = view_of(lengths)
    length = draw.draw(st.integers(1, view.n_tokens))
    parts = draw.draw(st.integers(1, 3))
    rows = parts * draw.draw(st.integers(1, 3))
    step = draw.draw(st.integers(0, 6))
    expected = naive(view, length, rows, seed, step)
    batches = Batches(view, length, rows, seed)
    whole = batches.batch(step)
    assert_batch(whole, expected)
    pieces = [batches.batch(step, part, parts) for part in range(parts)]
    assert_joined(pieces, whole, [False] * parts)


def assert_joined(pieces, whole, continues):
    """The pieces side by side are the whole; a text that goes on in the next piece is one text again."""
    assert torch.equal(torch.cat([piece.ids for piece in pieces], 1), whole.ids)
    assert torch.equal(torch.cat([piece.targets for piece in pieces], 1), whole.targets)
    assert [piece.continues for piece in pieces] == continues
    bounds, offset = [], 0
    for piece in pieces:
        assert piece.cu_seqlens[0] == 0 and piece.cu_seqlens[-1] == piece.ids.shape[1]
        assert (piece.cu_seqlens.diff() > 0).all()
        bounds += (piece.cu_seqlens[int(piece.continues) : -1] + offset).tolist()
        offset += piece.ids.shape[1]
    assert [*bounds, offset] == whole.cu_seqlens.tolist()


def test_views_and_stores_give_the_same_batches(tmp_path):
    store, _ = make_store(tmp_path, TEXTS * 5)
    train, validation = store.split(0.2, 1)
    for view in (store, train, validation):
        batches = Batches(view, 11, 4, 5)
        for step in range(30):
            assert_batch(batches.batch(step), naive(view, 11, 4, 5, step))


def test_an_epoch_shows_every_document_once():
    view = view_of([4, 6, 10, 20])
    batches = Batches(view, 10, 2, 0)
    seen = [sorted(torch.cat([batches.batch(2 * epoch + i).ids[0] for i in (0, 1)]).tolist()) for epoch in range(20)]
    assert seen == [list(range(40))] * 20
    assert len({tuple(batches.batch(2 * epoch).ids[0].tolist()) for epoch in range(20)}) > 5


def test_far_steps_are_exact():
    """A position beyond what a float counts, without walking there."""
    view = view_of([3, 4, 6])
    step = 10**17 + 1
    batch = Batches(view, 13, 1, 0).batch(step)
    assert sorted(batch.ids[0].tolist()) == list(range(13))
    order = permutation(3, 0, step)
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(view.lengths[order])]


def test_layout_locates_any_range():
    layout = JoinedSpans(np.array([10, 0, 20]), np.array([2, 3, 1]))
    index, last, begins = layout.locate(1, 4)
    assert index.tolist() == [11, 0, 1, 2] and last.tolist() == [True, False, False, True] and begins.tolist() == [1]


def test_batch_errors():
    view = view_of([4, 6])
    with pytest.raises(
        ValueError, match="length = 11 is longer than the train data, 10 tokens in 2 documents; use length"
    ):
        Batches(view, 11, 1, 0)
    view.name = "validation"
    with pytest.raises(ValueError, match=r"validation data.*length <= 10 or a larger validation_fraction"):
        Batches(view, 11, 1, 0)
    for length, rows, message in ((0, 1, "length must be at least 1"), (1, 0, "rows must be at least 1")):
        with pytest.raises(ValueError, match=message):
            Batches(view, length, rows, 0)
    batches = Batches(view, 5, 4, 0)
    for arguments, message in [
        ((-1,), "step must be at least 0, got -1"),
        ((0, 0, 3), "rows = 4 must be a multiple of parts, got parts = 3"),
        ((0, 2, 2), r"part must be in 0\.\.1"),
        ((0, -1, 2), r"part must be in 0\.\.1"),
        ((0, 0, 0), "parts"),
    ]:
        with pytest.raises(ValueError, match=message):
            batches.batch(*arguments)


# Pieces for context parallelism


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), size=st.integers(1, 9))
def test_shards_side_by_side_are_the_batch(lengths, size):
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    n = int(bounds[-1])
    batch = Batch(torch.arange(n)[None], torch.arange(n)[None] + 100, bounds)
    if n < size:
        with pytest.raises(ValueError, match=f"{n} tokens cannot be split over {size} ranks"):
            batch.shard(0, size)
        return
    shards = [batch.shard(rank, size) for rank in range(size)]
    sizes = [shard.ids.shape[1] for shard in shards]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
    firsts = [int(shard.ids[0, 0]) for shard in shards]
    assert_joined(shards, batch, [first not in bounds.tolist() for first in firsts])


def test_shards_of_one_batch():
    batch = Batch(torch.arange(10)[None], torch.arange(1, 11)[None], torch.tensor([0, 2, 5, 10]))
    first, second = batch.shard(0, 2), batch.shard(1, 2)
    assert first.cu_seqlens.tolist() == [0, 2, 5] and not first.continues
    assert second.cu_seqlens.tolist() == [0, 5] and not second.continues and second.ids.tolist() == [[5, 6, 7, 8, 9]]
    middle = batch.shard(1, 3)
    assert middle.cu_seqlens.tolist() == [0, 2, 3] and middle.continues and middle.targets.tolist() == [[4, 5, 6]]
    assert middle.shard(0, 3).continues and not middle.shard(2, 3).continues
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank must be in"):
            batch.shard(rank, size)


def test_to_moves_everything():
    moved = Batch(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([0, 2]), continues=True).to("meta")
    assert {moved.ids.device.type, moved.targets.device.type, moved.cu_seqlens.device.type} == {"meta"}
    assert moved.continues
