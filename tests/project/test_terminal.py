"""A terminal shows text from others but never obeys it: names of tensors and files, texts of models, messages."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.console.terminal import DOT, console, printable
from lineate.models import HybridLM, preset
from lineate.models.files.checkpoint import save
from lineate.models.files.safetensors import CheckpointError
from lineate.text.tokenizer import Bytes
from lineate.training.config import TrainConfig
from lineate.training.report import RunReporter

EVIL = "x\x1b[31m[bold]:smile:\x9b2J\x07\r\u202ey"
SHOWN = f"x{DOT}[31m[bold]:smile:{DOT}2J{DOT * 3}y"


def lineate(*words):
    return CliRunner().invoke(build_app(), list(map(str, words)))


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain text, in a line", "plain text, in a line"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        (EVIL, SHOWN),
        ("\x00\x08\x7f\x85\x9f", DOT * 5),  # NUL, backspace, DEL, and 8-bit controls
        ("\u2066\u2069\u200f\ufeff\u2028", DOT * 5),  # direction, marks and a separator of lines
        ("\ud800", DOT),  # half a surrogate pair, which no encoding has
        ("no\u00a0break, wide\u3000space", "no\u00a0break, wide\u3000space"),
        ("\u0646\u0645\u06cc\u200c\u062e\u0648", "\u0646\u0645\u06cc\u200c\u062e\u0648"),  # a joiner that Persian needs
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),  # and one of emoji
        ("", ""),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_console_shows_strings_as_they_are(capsys):
    from rich.table import Table

    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    screen = console(width=120)
    screen.print(table)
    screen.print(EVIL, style="red")
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 4 and "\x1b" not in out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint with an extra tensor, whose name is an escape sequence."""
    path = tmp_path_factory.mktemp("evil") / "[red]model\x1b[2J"
    model = HybridLM(preset("tiny"))
    tensors = {**model.state_dict(), EVIL: torch.zeros(2)}
    save(path, tensors, {"model_type": "lineate", **model.config.to_dict()})
    return path


def safe(text):
    return printable(text) == text


def test_inspect(folder):
    done = lineate("inspect", folder)
    assert done.exit_code == 0 and safe(done.stdout)
    assert f"    {SHOWN}: of shape (2,)" in done.stdout  # brackets and colons appear literally
    assert f"[red]model{DOT}[2J" in done.stdout.replace("\n", "")


@pytest.mark.cover
def test_plan(folder, tmp_path):
    for words in ([], ["--csv", "-"], ["--json", "-"]):
        done = lineate("plan", folder, "--no-train", *words)
        assert done.exit_code == 0 and safe(done.stdout), words
    assert f"[red]model{DOT}[2J: 4 layers" in lineate("plan", folder, "--no-train").stdout
    done = lineate("plan", "tiny", "--no-train", "--json", tmp_path / f"{DOT}{EVIL}.json")
    assert done.exit_code == 0 and safe(done.stdout) and f"{DOT}{SHOWN}.json" in done.stdout.replace("\n", "")


def test_errors_in_python(folder):
    """A traceback shows the message too; the attributes have the original names."""
    with pytest.raises(CheckpointError) as error:
        HybridLM.from_pretrained(folder, progress=False)
    assert safe(str(error.value)) and SHOWN in str(error.value)
    assert error.value.unexpected == (f"{EVIL}: of shape (2,)",)


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["plan"], ["generate"], ["picture", "state", "--model"], ["train", "--out", "{out}", "--model"],
     ["train", "--out", "{out}", "--data"], ["tasks", "--out", "{out}"]],
)  # fmt: skip
def test_errors_on_the_command_line(words, tmp_path):
    for name in (f"no/such/{EVIL}", EVIL):
        done = lineate(*(word.replace("{out}", str(tmp_path / "out")) for word in words), name)
        assert done.exit_code == 2, done.output
        said = [line for line in done.stdout.splitlines() if not line.startswith("threads: ")]  # by train, before data
        assert not said and safe(done.stderr) and "y" in done.stderr


@pytest.mark.parametrize("key", ["model_type", "pattern", "vocab_size"])
def test_a_config(key, folder, tmp_path):
    values = json.loads((folder / "config.json").read_text()) | {key: EVIL}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shutil.copy(folder / "model.safetensors", tmp_path)
    for command in ("inspect", "plan"):
        done = lineate(command, tmp_path)
        assert done.exit_code == 2 and safe(done.stderr), done.output


@pytest.fixture
def spoken(monkeypatch, tmp_path):
    """Return a model for which `lineate generate` prints EVIL over two lines, and that text."""
    import lineate.generation

    text = f"{EVIL}\n\tand more"
    monkeypatch.setattr(lineate.generation, "generate", lambda *args, **options: iter(text.encode()))
    HybridLM(preset("tiny", vocab_size=257)).save_pretrained(tmp_path / "model")
    Bytes().save(tmp_path / "model")
    return tmp_path / "model", text


def test_generate(spoken):
    place, text = spoken
    done = lineate("generate", place, "--prompt", "a\x1b]0;title\x07b")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"a{DOT}]0;title{DOT}b{SHOWN}\n\tand more\n"
    raw = lineate("generate", place, "--raw")
    assert raw.stdout == f"{text}\n"


def test_training_says_nothing_that_is_obeyed(tmp_path, capsys):
    report = RunReporter(TrainConfig(out=str(tmp_path)), main=True)
    report.sample(3, f"{EVIL}\n\tand more")
    report.say(f"going on from {EVIL}")
    report.warn(f"{EVIL} is damaged")
    said = capsys.readouterr()
    assert safe(said.out) and safe(said.err)
    assert f"    | {SHOWN}\n    | " in said.out and f"going on from {SHOWN}" in said.out
    assert f"warning: {SHOWN} is damaged" in said.err


def test_names_of_data_files(tmp_path):
    from lineate.training.sources import warn

    with pytest.warns(UserWarning) as caught:
        warn(f"{EVIL} is not UTF-8")
    assert str(caught[0].message) == f"{SHOWN} is not UTF-8"


def test_file_names_that_are_no_text(tmp_path):
    """A byte that is not UTF-8 reaches Python as half a surrogate pair, which cannot be printed."""
    if sys.platform == "darwin":
        pytest.skip("file names are UTF-8 here")
    place = tmp_path / Path("a\udcffb")
    HybridLM(preset("tiny")).save_pretrained(place)
    done = lineate("inspect", place)
    assert done.exit_code == 0 and f"a{DOT}b" in done.stdout.replace("\n", "")
