"""The command line as people type it: underscores, other names of an option, wrong names, home folders."""

from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.main import get_command
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.console.names import user_path
from lineate.training.config import TrainConfig


def lineate(*words):
    return CliRunner().invoke(build_app(), list(map(str, words)))


def said(done):
    """Return everything that was printed, without boxes and line breaks."""
    return " ".join((done.stdout + done.stderr).replace("│", " ").split())


def options():
    """Return every spelling of every option with a hyphen in it, for every command."""
    for name, command in get_command(build_app()).commands.items():
        for param in command.params:
            for flag in (*param.opts, *param.secondary_opts):
                if "-" in flag.lstrip("-"):
                    yield name, flag, 0 if getattr(param, "is_flag", False) else param.nargs


# Every eighth is fast.
OPTIONS = [pytest.param(*x, marks=[pytest.mark.slow] if i % 8 else []) for i, x in enumerate(options())]


@pytest.mark.parametrize("command, flag, values", OPTIONS)
def test_underscores_and_hyphens_are_alike(command, flag, values):
    typed = "--" + flag.lstrip("-").replace("-", "_")
    done = lineate(command, typed, *["1"] * values, "--help")
    assert done.exit_code == 0, said(done)
    # The option is read at all.
    assert "No such option" in said(lineate(command, typed + "_x", *["1"] * values, "--help"))


def test_most_commands_have_such_options():
    assert {name for name, _, _ in options()} >= {"train", "generate", "tasks", "plan"}


ALIKE = {
    "a preset": ["plan", "qwen3_next_80b", "--no_train", "--context", "1k"],
    "channels": ["plan", "--hidden_size", "64", "--n_heads", "4", "--n_layers", "4", "--context", "1k"],
    "another name": ["plan", "tiny", "--context-length", "1k", "--batch_size", "2", "--no-train"],
}


@pytest.mark.parametrize("case", ALIKE)
def test_names_are_taken(case):
    done = lineate(*ALIKE[case])
    assert done.exit_code == 0, said(done)


REFUSED = {
    "a task": (["tasks", "selective_copying", "--rules", "least_squares", "--length", "1"], "length must be"),
    "a rule": (["tasks", "recall", "--rules", "least_square"], "did you mean 'least-squares'?"),
    "tasks' learning rate": (["tasks", "recall", "--learning-rate", "0"], "lr must be above 0 and at most 1, got 0"),
    "train's learning rate": (["train", "--learning-rate", "0"], "lr must be above 0, got 0"),
    "train's rows": (["train", "--batch_size", "0"], "rows must be at least 1, got 0"),
    "a preset of train": (["train", "--model", "qwen3_next_80b", "--pattern", "GA"], "cannot be changed"),
    "a preset of picture": (["picture", "state", "--model", "kimi_linear_48b"], "kimi-linear-48b has no weights"),
    "the start of a preset": (["plan", "qwen3-next"], "did you mean 'qwen3-next-80b'?"),
    "the start of several": (["plan", "qwen"], "'qwen3-next-80b' or 'qwen3-5-27b' or 'qwen3-5-35b-a3b'?"),
    "a name of the hub": (["plan", "Kimi-Linear-48B-A3B"], "did you mean 'kimi-linear-48b'?"),
    "a slip": (["picture", "state", "--model", "tinny"], "did you mean 'tiny'?"),
    "the start for train": (["train", "--model", "qwen3-next"], "did you mean 'qwen3-next-80b'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_as_it_is_known(case, tmp_path):
    words, expected = REFUSED[case]
    more = ["--out", tmp_path / "out"] if words[0] in ("tasks", "train", "picture") else []
    done = lineate(*words, *more)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), said(done)
    assert expected in said(done)


def test_the_learning_rate_in_a_config_file_is_called_lr():
    with pytest.raises(ValueError, match="unknown key 'learning_rate'; did you mean 'lr'"):
        TrainConfig.from_dict({"learning_rate": 0.1})


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "~nosuchuser/x"],
        ["plan", "~nosuchuser/x"],
        ["plan", "~nosuchuser/x/config.json"],
        ["generate", "~nosuchuser/x"],
        ["picture", "state", "--model", "~nosuchuser/x"],
        ["picture", "state", "--text", "~nosuchuser/x"],
        ["picture", "state", "--from", "~nosuchuser/x"],
        ["train", "--model", "~nosuchuser/x"],
        ["train", "--data", "~nosuchuser/x"],
        ["train", "--config", "~nosuchuser/x"],
    ],
)
def test_the_home_of_a_user_who_does_not_exist(words, tmp_path, monkeypatch):
    """It is a name like any other, as in a shell, and nothing of that name exists."""
    monkeypatch.chdir(tmp_path)
    done = lineate(*words)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), repr(done.exception)
    assert "~nosuchuser/x" in said(done)


def test_files_in_the_home_of_a_user_who_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = lineate("plan", "tiny", "--no-train", "--json", "~nosuchuser/x.json")
    assert done.exit_code == 0, repr(done.exception)
    assert (tmp_path / "~nosuchuser" / "x.json").is_file()


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x") == tmp_path / "x" and user_path("~") == tmp_path
    assert user_path("a/~") == Path("a/~") and user_path(Path("/x")) == Path("/x")
