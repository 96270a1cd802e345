"""`lineate learn` as people type it."""

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

import lineate as library
from lineate.cli import build_app
from lineate.learn.lessons import all_lessons


def lineate(*words):
    return CliRunner().invoke(build_app(), ["learn", *map(str, words)], env={"COLUMNS": "200"})


def test_the_list_has_every_lesson():
    done = lineate()
    assert done.exit_code == 0
    for number, lesson in all_lessons().items():
        assert f"{number:3}  {lesson.name:12} {lesson.title}" in done.stdout


@pytest.mark.parametrize("word", ["9", "kimi"])
def test_a_lesson_is_shown_and_run(word):
    done, lesson = lineate(word), all_lessons()[9]
    assert done.exit_code == 0
    assert lesson.title in done.stdout and "S'  = Diag(a_t) S_{t-1}" in done.stdout
    for line in lesson.code.strip().splitlines():
        assert line in done.stdout
    assert "relative difference of one step in the other order: 0.035" in done.stdout  # what it prints
    assert "holds  with equal channels it is Gated DeltaNet: off by " in done.stdout and "at most 1e-12" in done.stdout
    assert "[Kimi2025] Kimi Team (2025)" in done.stdout
    assert "FAILS" not in done.stdout and "Picture" not in done.stdout
    assert "[[.64, -.24], [-.48, .18]]" not in done.stdout  # the answer


def test_the_answer_is_shown_when_asked_for():
    done = lineate(9, "--answer")
    assert done.exit_code == 0
    assert "[[.64, -.24], [-.48, .18]]" in done.stdout and "holds  the other order: " in done.stdout


def test_names_may_be_spelled_with_underscores():
    assert lineate("gated_delta").exit_code == 0


@pytest.mark.cover
def test_the_picture_goes_into_the_folder(tmp_path):
    done = lineate(3, "--out", tmp_path / "new")
    assert done.exit_code == 0
    path = tmp_path / "new" / "03-forms.png"
    assert path.is_file() and str(path) in done.stdout


@pytest.mark.cover
def test_all_lessons_run():
    done = lineate("all")
    assert done.exit_code == 0
    assert [lesson.title for lesson in all_lessons().values() if lesson.title not in done.stdout] == []
    assert "../" not in done.stdout  # links to pages are their texts


def test_disagreements_run():
    done = lineate("disagreements")
    assert done.exit_code == 0 and "11. Is the memory read before or after the write?" in done.stdout


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("0", "lineate learn lists them"),
        ("13", "lineate learn lists them"),
        ("-1", ""),
        ("gated", "did you mean 'gated-delta'?"),
        ("kimmi", "did you mean 'kimi'?"),
        ("xyzzy", "lineate learn lists them"),
    ],
)
def test_an_unknown_lesson_is_refused(word, hint):
    done = lineate("--", word)
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert f"lesson must be a number from 1 to 12, a name, all or disagreements, got '{word}'" in said
    assert hint in said


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    done = lineate(3, "--out", tmp_path / "file")
    assert done.exit_code == 2 and "--out must be a folder that can be written" in " ".join(done.stderr.split())


def test_a_claim_that_fails_ends_the_program(monkeypatch):
    op = library.delta_rule
    monkeypatch.setattr(library, "delta_rule", lambda q, k, v, beta, **options: op(q, k, v, beta / 2, **options))
    done = lineate(6)
    assert done.exit_code == 1
    assert "FAILS  lineate's op compares and corrects" in done.stdout
    assert "does not hold on this machine" in " ".join(done.stderr.split())
