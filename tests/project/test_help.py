"""The output of --help and --version, on 80 columns, and their imports."""

import shlex
import subprocess
import sys

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.main import get_command
from typer.testing import CliRunner

import lineate
import lineate.generation
import lineate.planning
from lineate.cli import build_app
from lineate.console.extras import EXTRAS

GROUP = get_command(build_app())
COMMANDS = sorted(GROUP.commands)


def shown(*words):
    done = CliRunner().invoke(build_app(), [*words, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": ""})
    assert done.exit_code == 0, done.output
    return done.stdout


def examples(command):
    """Return the lines behind "Examples:"."""
    lines = shown(command).partition("\n  Examples:\n")[2].splitlines()
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_in_full(command):
    text = shown(command)
    assert max(map(len, text.splitlines())) <= 80 and "\u2026" not in text and "\\[" not in text
    words = text.replace(",", " ").split()
    options = [flag for x in GROUP.commands[command].params for flag in (*x.opts, *x.secondary_opts) if flag[0] == "-"]
    assert options or command == "inspect"
    assert [flag for flag in options if flag not in words] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_in_two_examples_that_can_be_typed(command):
    found = examples(command)
    assert len(found) == 2 and len(set(found)) == 2
    for line in found:
        program, name, *words = shlex.split(line)
        assert (program, name) == ("lineate", command)
        GROUP.commands[command].make_context(command, words)  # raises what the command line would refuse


def test_the_list_of_commands_cuts_no_sentence():
    text = " ".join(shown().split())
    assert "..." not in text.partition("Commands:")[2]
    for command in GROUP.commands.values():
        assert " ".join((command.help or "").partition("\n\n")[0].split()) in text


IMPORTS = """
import sys
from lineate.cli import main

for words in {words}:
    sys.argv = ["lineate", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
print(*sorted({heavy}.intersection(sys.modules)), "!")
"""
HEAVY = {"torch", "numpy", "rich", "matplotlib", "transformers", "fastapi", "tokenizers"}


@pytest.mark.cover
def test_help_and_version_import_nothing_heavy():
    """Measured with `lineate --version`: importing torch takes most of two seconds, all else a tenth of one."""
    words = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    code = IMPORTS.format(words=words, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"lineate {lineate.__version__}"
    assert done.stdout.splitlines()[-1] == "!"


@pytest.mark.parametrize("package", [lineate, lineate.generation, lineate.planning])
def test_names_that_are_imported_at_their_first_use(package):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)
        assert vars(package)[name] is getattr(package, name)  # found once
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert not hasattr(package, "__wrapped__")


@pytest.mark.cover
def test_modules_are_attributes():
    code = "import lineate; print(lineate.layers.GatedDeltaNet.__name__, lineate.gated_delta_rule.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["GatedDeltaNet", "gated_delta_rule"], done.stderr


def test_extras_are_those_of_the_package():
    """Each extra of pyproject.toml brings, by itself or by another one, what the table says."""
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    other = {"starlette": "fastapi", "pydantic_core": "fastapi", "prometheus_client": "prometheus-client"}
    for extra, modules in EXTRAS.items():
        for module in modules:
            assert any(x.startswith(other.get(module, module)) for x in declared[extra]), (extra, module)
