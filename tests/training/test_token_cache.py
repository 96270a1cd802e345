"""The token cache under kills, damage, full disks and two writers at once."""

import errno
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lineate.system import folders
from lineate.text import tokenizer
from lineate.text.tokenizer import make_tokenizer
from lineate.training import tokens
from lineate.training.sources import documents
from lineate.training.tokens import TokenStore
from tests.support.token_stores import END, TEXTS, make_store, view_of


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

    store, _ = make_store(tmp_path, ["abc", "d"], Large())
    assert store.tokens.dtype == np.uint32 and (store.vocab_size, store.end) == (70_000, 69_999)
    assert store.document(0).tolist() == [69_999, 66_097, 66_098, 66_099, 69_999]
    assert store.unigram_entropy() == pytest.approx(4 / 6 * math.log(6) + 2 / 6 * math.log(3))


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
    with tempfile.TemporaryDirectory() as folder:
        return make_store(folder, ["other"])[0].path.read_bytes()


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
    assert re.search(rf"is damaged \(.*{why}.*\); rebuilding it", said[0])
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
    """Run it in a forked process, which has the modules of this one."""
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
    assert left[0].read_bytes()[: tokens.HEADER_BYTES] == bytes(tokens.HEADER_BYTES)  # the header is written last
    store = TokenStore.open_or_make(data, made, tmp_path / "cache")
    assert store.n_documents == 20 and left[0].exists()  # its writer might have been alive
    said = []
    shutil.copy(left[0], store.path)
    TokenStore.open_or_make(data, made, tmp_path / "cache", said.append).path.unlink()
    assert "is damaged" in said[0]
    os.utime(left[0], (1, 1))
    TokenStore.open_or_make(data, made, tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".tokens"]


def test_two_writers_at_once(data, tmp_path):
    """Both begin before either ends, one's file is renamed over the other's open one, and both read correct tokens."""
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
    """A file may not grow beyond a limit: write() takes a part, and the next one fails."""
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

    def read(*_):
        yield pytest.fail("read")

    monkeypatch.setattr(tokens, "documents", read)
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
        make_store(tmp_path, [])


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
