"""Sources of text: the standard library, files, folders, lines, a dataset; and errors in them."""

import itertools
import os
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from lineate.training import sources
from lineate.training.sources import documents, fingerprint
from tests.support.token_stores import write_lines


def test_stdlib_is_text_of_the_library_alone():
    first, again = list(documents(["stdlib"])), list(documents(["stdlib"]))
    assert first == again
    assert 5e6 < sum(len(text.encode()) for text in first) < 40e6
    assert len(first) > 300
    library, texts = Path(sysconfig.get_path("stdlib")), set(first)
    for name in ("argparse.py", "json/decoder.py", "asyncio/events.py"):
        assert (library / name).read_text() in texts, name
    for part in ("site-packages", "test", "idlelib/idle_test", "encodings"):
        for file in itertools.islice((library / part).rglob("*.py"), 50):
            assert file.stat().st_size < 500 or file.read_text(errors="ignore") not in texts, file


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
    """The error comes before the first document is read."""
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
