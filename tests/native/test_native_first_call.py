"""The first use of the C code: what is compiled, by how many compilers, what is said about it, and without a compiler.

Each start is a separate process. The compiler is a script that makes a library of one function and notes its calls.
"""

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import lineate
from lineate.models import HybridLM, preset
from lineate.native import build, compiler
from lineate.native.compiler import NativeUnavailable
from lineate.text import Bytes
from tests.support import fresh

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(os.name != "posix" or CC is None, reason="needs a POSIX system and a C compiler")

START = f"""
import sys, types
sys.modules["lineate"] = types.ModuleType("lineate")  # the package itself would import torch
sys.modules["lineate"].__path__ = [{str(Path(build.__file__).parents[1])!r}]
from lineate.native import build
"""


@pytest.fixture
def noting(tmp_path: Path) -> Path:
    """Return a compiler that makes the same library of anything, and notes its arguments."""
    (tmp_path / "quantised.c").write_text("int lineate_answer(void) { return 42; }\n")
    file = tmp_path / "compiler"
    file.write_text(
        "#!/bin/sh\n"
        'for last; do if [ "$last" = --version ]; then echo small 1; exit; fi; done\n'
        f'echo "$@" >> {tmp_path}/log\n'
        'case " $* " in *" -c "*) exit 0;; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'{CC} -shared -fPIC {tmp_path}/quantised.c -o "$2"\n'
    )
    file.chmod(0o755)
    return file


def environment(compiler: Path | str, cache: Path) -> dict[str, str]:
    return {**os.environ, "CC": str(compiler), "LINEATE_CACHE": str(cache)}


def start(code: str, cc: Path | str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code], env=environment(cc, cache), capture_output=True, text=True
    )  # fmt: skip


def sources(log: Path) -> list[set[str]]:
    """Return the C files of each call of a compiler."""
    return [{Path(x).name for x in line.split() if x.endswith(".c")} for line in log.read_text().splitlines()]


@pytest.mark.cover
def test_only_what_is_needed_is_compiled(noting, tmp_path):
    """The rules are one file; what a layer has around them is compiled by a compiler a file, and linked."""
    log = tmp_path / "log"
    assert start('print(build.why_not("rules"))', noting, tmp_path / "cache").stdout == "None\n"
    assert sources(log) == [{"chunkwise.c"}]
    log.unlink()
    assert start('print(build.why_not("rules", "layers"))', noting, tmp_path / "cache").stdout == "None\n"
    *files, link = sources(log)
    assert sorted(map(sorted, files)) == [["convolution.c"], ["layers.c"], ["threads.c"]] and link == set()
    log.unlink()
    assert start("print(build.why_not())", noting, tmp_path / "cache").stdout == "None\n"
    found = [next(iter(names)) for names in sources(log)[:-1]]
    assert sorted(found) == sorted(x.name for name in ("general", "products") for x in build.SUBJECTS[name].sources)


def test_every_c_file_belongs_to_a_subject():
    folder = Path(build.__file__).parent
    found = {x for code in build.SUBJECTS.values() for x in (*code.sources, *code.headers)}
    assert found == {*folder.glob("*.c"), *folder.glob("*.h")}


def test_files_are_compiled_at_the_same_time(tmp_path, monkeypatch):
    """Two compilers wait for each other, so that one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=60)
    run = subprocess.run

    def wait_and_run(command, **options):
        if "-c" in command:
            meeting.wait()
        return run(command, **options)

    for name in "ab":
        (tmp_path / f"{name}.c").write_text(f"int lineate_{name}(void) {{ return 1; }}\n")
    monkeypatch.setattr(compiler, "CORES", 2)
    monkeypatch.setattr(compiler, "RUNNING", threading.BoundedSemaphore(2))
    monkeypatch.setattr(subprocess, "run", wait_and_run)
    code = compiler.Code("pair", (tmp_path / "a.c", tmp_path / "b.c"))
    library = build.load_or_build(compiler.compiler_command(CC), tmp_path, code)
    assert library.lineate_a() == library.lineate_b() == 1


def test_a_failure_names_the_error_and_the_remedy(tmp_path):
    """The first line is short, for the command line; the compiler's own text follows."""
    for name, text in {"a": "int lineate_a(void) { return 1; }", "b": "#include <no_such_header.h>"}.items():
        (tmp_path / f"{name}.c").write_text(text + "\n")
    code = compiler.Code("pair", (tmp_path / "a.c", tmp_path / "b.c"))
    with pytest.raises(NativeUnavailable, match=r"failed: .*no_such_header.h.*; install gcc or clang") as raised:
        build.load_or_build(compiler.compiler_command(CC), tmp_path, code)
    assert "compilation terminated" in str(raised.value) or "1 error generated" in str(raised.value)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.c", "b.c"]


def on_terminal(code: str, cc: Path, cache: Path) -> str:
    """Return what a start writes to stderr if that is a terminal."""
    reader, writer = pty.openpty()
    done = subprocess.Popen([sys.executable, "-c", START + code], env=environment(cc, cache), stderr=writer)
    os.close(writer)
    text = b""
    try:
        while more := os.read(reader, 4096):
            text += more
    except OSError:  # Linux's end of a terminal
        pass
    os.close(reader)
    assert done.wait() == 0
    return text.decode()


def test_a_terminal_is_told_that_it_compiles(noting, tmp_path):
    said = on_terminal('build.why_not("rules")', noting, tmp_path / "cache")
    assert said == "lineate: compiling chunkwise.c for this processor, once\r\n"
    assert on_terminal('build.why_not("rules")', noting, tmp_path / "cache") == ""


ASKS = 'build.why_not("rules"); build.why_not("layers"); build.why_not()'


def test_a_command_says_once_that_there_is_no_compiler(tmp_path):
    done = start("build.speak_once(); " + ASKS, "/nonexistent/cc", tmp_path / "cache")
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert "several times slower (8 and 4 bits: in float32): /nonexistent/cc could not run" in done.stderr
    assert "install gcc or clang, or set CC" in done.stderr


def test_a_library_says_nothing(tmp_path):
    assert start(ASKS, "/nonexistent/cc", tmp_path / "cache").stderr == ""


def test_a_switched_off_backend_is_no_news(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEATE_NATIVE", "0")
    assert start("build.speak_once(); " + ASKS, "/nonexistent/cc", tmp_path / "cache").stderr == ""


def run_command(tmp_path: Path, *words: str, cc: str) -> subprocess.CompletedProcess[str]:
    return fresh.command(tmp_path, *words, CC=cc, LINEATE_CACHE=str(tmp_path / "cache"))


@pytest.mark.cover
def test_commands_without_a_compiler(tmp_path):
    """A command that computes says so in one line on stderr; one that does not says nothing."""
    HybridLM(preset("tiny", vocab_size=257)).save_pretrained(tmp_path / "model")
    Bytes().save(tmp_path / "model")
    done = run_command(tmp_path, "generate", "model", "--prompt", "a", "--tokens", "2", cc="/nonexistent/cc")
    assert done.returncode == 0 and done.stderr.count("plain torch") == 1 and "plain torch" not in done.stdout
    done = run_command(tmp_path, "plan", "tiny", "--json", "-", cc="/nonexistent/cc")
    assert "plain torch" not in done.stderr + done.stdout and json.loads(done.stdout)


def test_explain_names_the_remedy(monkeypatch):
    reason = "no C compiler was found; install gcc or clang, or set CC"
    monkeypatch.setattr("lineate.dispatch.why_not", lambda *subjects: reason)
    x = torch.randn(1, 70, 1, 3)
    assert f"backend 'torch' because {reason}" in str(lineate.explain(x, x, x, chunk_size=23))
