"""`lineate --import MODULE COMMAND ...`: the commands know a mixer that a module of the user's registers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.runs import make_config

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.layers import registry
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig

EXAMPLE = Path(__file__).parents[2] / "examples/own_rule.py"


@contextmanager
def new_process():
    """Without own_rule among Python's modules and lineate's rows, before and after."""
    sys.modules.pop("own_rule", None)
    with registry.temporary_rows(users=False):
        yield
    sys.modules.pop("own_rule", None)


def lineate(*words):
    """Run a command as in a process of its own; return its exit code and all that it printed."""
    with new_process():
        done = CliRunner().invoke(build_app(), list(map(str, words)))
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """The current folder, with own_rule.py, texts, and a model of its mixer in own/; own_rule is not imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    shutil.copy(EXAMPLE, tmp_path)
    make_config(tmp_path)
    with new_process(), monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        __import__("own_rule")
        sizes = LinearConfig(heads=2, value_heads=2, key_dim=16, value_dim=16)
        HybridLM(HybridConfig(257, 32, 2, "Z", mixers={"own": sizes}, feed=FeedConfig(48))).save_pretrained("own")
    yield tmp_path


TRAIN = ("train", "--model", "own", "--data", "texts", "--out", "run", "--cache", "cache", "--length", 32, "--rows", 4,
         "--steps", 2, "--warmup", 1, "--sample-every", 0, "--device", "cpu")  # fmt: skip
COMMANDS = {
    "inspect": (("inspect", "own"), "2 x own Mamba (Z)"),
    "plan": (("plan", "own", "--context", "1k"), "own Mamba"),
    "picture": (("picture", "state", "--model", "own", "--tokens", 24, "--out", "pictures"), "pictures/state.png"),
}


@pytest.mark.cover
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_know_the_mixer(folder, name):
    words, expected = COMMANDS[name]
    code, text = lineate(*words)
    assert code == 2 and "import own_rule, or, on the command line, lineate --import own_rule ..." in text
    code, text = lineate("--import", "own_rule", *words)
    assert code == 0 and expected in text


@pytest.mark.cover
def test_a_run_is_trained_inspected_and_generates(folder):
    """Each command imports the module anew, as a process of its own does; the option may be repeated."""
    code, text = lineate("--import", "json", "--import", "own_rule", *TRAIN)
    assert code == 0, text
    for words in (("inspect", "run"), ("generate", "run", "--prompt", "the", "--tokens", 3)):
        code, text = lineate(*words)
        assert code == 2 and "lineate --import own_rule ..." in text
        code, text = lineate("--import", "own_rule", *words)
        assert code == 0, text


@pytest.mark.cover
def test_the_program_looks_in_the_current_folder(folder):
    """Also where Python itself does not, as for an installed program."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    words = [sys.executable, "-P", "-m", "lineate.cli", "--import", "own_rule", "inspect", "own"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "2 x own Mamba (Z)" in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "code", "message"), [
    ("not_there", None, "--import not_there: there is no module 'not_there'; run lineate in its folder, or set"),
    ("not_there.deep", None, "--import not_there.deep: there is no module 'not_there'; run lineate in its folder"),
    ("own_rule.py", None, "got 'own_rule.py'; write --import own_rule in its folder"),
    ("a-b", None, "--import must be the name of a module, as in an import statement, got 'a-b'"),
    ("", None, "--import must be the name of a module, as in an import statement, got ''"),
    ("broken", "x = 1\nimport not_there", "line 2 of {}: ModuleNotFoundError: No module named 'not_there'"),
    ("broken", "x = 1\n\n1 / 0", "--import broken failed in line 3 of {}: ZeroDivisionError: division by zero"),
    ("broken", "x = 1\n)", "--import broken failed in line 2 of {}: SyntaxError: unmatched ')'"),
    ("broken", "import lineate.layers\nlineate.layers.register(3)", "TypeError: kind must be a MixerKind, got 3"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, name, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    if code is not None:
        Path("broken.py").write_text(code)
    status, text = lineate("--import", name, "inspect", "own")
    assert status == 2 and text.startswith("lineate: ") and message.format(tmp_path / "broken.py") in text
