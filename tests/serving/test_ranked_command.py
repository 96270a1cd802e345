"""`lineate serve` and `generate` on two ranks under torchrun: what one process says, and one message if a rank dies."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("typer")
pytest.importorskip("llguidance")

import httpx
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import preset
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.small_models import random_model

WAIT = 180.0
"""Seconds until a test gives up; less than the collectives wait for a rank, which must not be needed."""
SCRIPT = """
import os, sys
import lineate
if os.environ["RANK"] == "1":
    {change}
from lineate.cli import main
main()
"""
LONG = [{"role": "user", "content": "Tell me about the sea, at length. " * 20}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("served") / "sea-lion")


def make_model(folder, change=0.0):
    tokenizer = chat_tokenizer()
    model = random_model(preset("tiny", vocab_size=tokenizer.vocab_size))
    model.layers[1].mixer.out_proj.weight.data += change
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def launch(*words, script=None, ranks=2):
    """Start ranks of lineate under torchrun, or of a script that runs it."""
    what = ["-m", "lineate.cli"] if script is None else [str(script)]
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *what,
            *map(str, words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


class Served:
    """A running `lineate serve`, on several ranks or in one process."""

    def __init__(self, *words, ranks=2):
        words = ("serve", *words, "--port", "0", "--context", "4096")
        if ranks > 1:
            self.process = launch(*words, "--tensor", ranks, ranks=ranks)
        else:
            command = [sys.executable, "-m", "lineate.cli", *map(str, words)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()
        self.until(lambda: "/v1" in self.said or self.process.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
        assert found, self.said
        self.url = found[0]
        self.until(self._healthy)

    def until(self, true):
        end = time.monotonic() + WAIT
        while not true():
            assert time.monotonic() < end, self.said
            time.sleep(0.05)

    def _listen(self):
        for line in self.process.stderr:
            self.said += line

    def _healthy(self):
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, **body):
        return httpx.post(f"{self.url}/v1/chat/completions", json={"seed": 1} | body, timeout=WAIT)

    def text(self, **body):
        return self.post(**body).json()["choices"][0]["message"]["content"]

    def info(self):
        """Return what the server says about the model, but for the moment of its start."""
        return httpx.get(f"{self.url}/lineate/info").json() | {"created": None}

    def pid(self, rank):
        """Return the process of a rank, which torchrun has started."""
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                status = environment.with_name("status").read_text()
                variables = environment.read_bytes().split(b"\0")
            except OSError:
                continue
            if f"PPid:\t{self.process.pid}\n" in status and f"RANK={rank}".encode() in variables:
                return int(environment.parent.name)
        raise AssertionError(f"rank {rank} is not there: {self.said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its processes
        self.process.wait(WAIT)


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BODIES = [
    {"messages": LONG, "max_tokens": 8, "temperature": 0},
    {"messages": LONG, "max_tokens": 8},
    {"messages": LONG, "max_tokens": 40, "response_format": FORMAT},
]


@pytest.mark.slow
def test_two_ranks_serve_what_one_process_serves(folder, tmp_path):
    """Answers, a grammar, n answers, a client that leaves, draining at SIGTERM, and states on disk after a restart."""
    options = ("--spacing", "64", "--draft", "lookup")
    with Served(folder, *options, ranks=1) as one:
        expected = [one.text(**body) for body in BODIES]
        info = one.info()
    options = (*options, "--cache-folder", tmp_path / "states")
    with Served(folder, *options) as served:
        assert [served.text(**body) for body in BODIES] == expected
        assert served.info() == info | {"details": info["details"] | {"ranks": 2}}
        several = served.post(**BODIES[1], n=3).json()
        assert several["choices"][0]["message"]["content"] == expected[1]
        assert several["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        endless = {**BODIES[0], "stream": True, "max_tokens": 2000, "ignore_eos": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=endless, timeout=WAIT) as stream:
            next(stream.iter_lines())
        served.until(lambda: httpx.get(f"{served.url}/lineate/stats").json()["engine"]["running"] == 0)
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=endless | {"max_tokens": 60}, timeout=WAIT
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]  # it was finished
        served.process.wait(WAIT)
    assert {x.name for x in (tmp_path / "states").iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    with Served(folder, *options) as served:
        again = served.post(**BODIES[0]).json()
        assert again["choices"][0]["message"]["content"] == expected[0]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "busy"), [(1, True), (1, False), (0, True)])
def test_a_killed_rank_ends_the_job_with_one_message(folder, rank, busy):
    with Served(folder) as served:
        body = {"messages": LONG, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        said = []
        if busy:
            with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=WAIT) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(served.pid(rank), signal.SIGKILL)
                try:
                    said = [line for line in lines if line]
                except httpx.TransportError:
                    assert rank == 0
            assert rank == 0 or '"error"' in said[-2], said[-3:]
        else:
            os.kill(served.pid(rank), signal.SIGKILL)
        assert served.process.wait(60) != 0
        served.until(lambda: "the job ends" in served.said)
        assert served.said.count("the job ends") == 1
        assert f"rank {rank} has ended without a word" in served.said


CHANGED = {
    "version of lineate": ("lineate.__version__ = '0.0.0'", "got 0.0.0 on rank 1 and"),
    "version of torch": ("import torch; torch.__version__ = '1.0'", "got 1.0 on rank 1 and"),
    "checkpoint": ("sys.argv[2] = {other!r}", "got sea-otter ("),
    "--spacing": ("sys.argv += ['--spacing', '128']", "got 128 on rank 1 and None on rank 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGED)
def test_a_rank_that_differs_is_refused(folder, tmp_path, what):
    change, got = CHANGED[what]
    if what == "checkpoint":
        change = change.format(other=str(make_model(tmp_path / "sea-otter", change=0.1)))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(change=change))
    done = launch("serve", folder, "--port", "0", "--tensor", "2", script=script)
    said = done.communicate(timeout=WAIT)[1]
    assert done.returncode != 0
    assert f"lineate: every rank must have the same {what}, {got}" in said, said
    assert said.count("every rank must have the same") == 1


@pytest.mark.slow
def test_generate_prints_once_what_one_process_prints(folder):
    words = ["generate", str(folder), "--prompt", "The sea", "--tokens", "12", "--stop", "zzz"]
    alone = CliRunner().invoke(build_app(), words)
    done = launch(*words, "--tensor", "2")
    out, said = done.communicate(timeout=WAIT)
    assert done.returncode == 0, said
    assert out == alone.stdout and said.count("tokens read in") == 1


@pytest.mark.slow
def test_a_mistake_that_every_rank_meets_is_said_once(folder):
    done = launch("serve", folder, "--port", "0", "--spacing", "100", "--tensor", "2")
    said = done.communicate(timeout=WAIT)[1]
    assert done.returncode != 0
    assert said.count("spacing must be a multiple of 64") == 1 and "lineate: spacing" in said
    assert "the job ends" not in said


def test_one_process_says_how_to_start_more(folder):
    for words in (["generate", str(folder), "-p", "x"], ["serve", str(folder), "--port", "0"]):
        done = CliRunner().invoke(build_app(), [*words, "--tensor", "2"])
        said = " ".join((done.stdout + done.stderr).split())
        assert done.exit_code == 2 and "got 2 and WORLD_SIZE is not set; start them with torchrun" in said
