"""`lineate serve` in a process of its own: it starts, serves, drains at SIGTERM and keeps its states in a folder."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("typer")
pytest.importorskip("llguidance")

import httpx
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import preset
from lineate.serving.command import is_local, read_keys
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import until
from tests.support.small_models import random_model

LONG = [{"role": "user", "content": "Tell me about the sea, at length. " * 20}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "sea-lion"
    tokenizer = chat_tokenizer()
    random_model(preset("tiny", vocab_size=tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


class Process:
    """A running `lineate serve`."""

    def __init__(self, *words, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lineate.cli", "serve", *map(str, words), "--port", "0"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()
        until(lambda: self.process.poll() is not None or "/v1" in self.said, "the address")
        found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
        assert found, self.said
        self.url = found[0]
        until(self._healthy, "the server")

    def _listen(self):
        for line in self.process.stderr:
            self.said += line

    def _healthy(self):
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(30)


@pytest.mark.cover
def test_serving_draining_and_starting_again(folder, tmp_path):
    options = ("--cache-folder", tmp_path / "states", "--spacing", "64", "--draft", "lookup", "--context", "4096")
    body = {"messages": LONG, "max_tokens": 8, "seed": 1, "temperature": 0}
    with Process(folder, *options) as served:
        assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "sea-lion"
        first = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
        assert first["usage"]["completion_tokens"] == 8 and str(folder.parent) not in json.dumps(first)
        assert httpx.get(f"{served.url}/health", headers={"Host": "evil.example"}).status_code == 403
        endless = {**body, "stream": True, "max_tokens": 300, "ignore_eos": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]  # it was finished
        assert served.process.wait(60) == 0
        assert "Traceback" not in served.said
    with Process(folder, *options) as served:
        again = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] // 64 * 64


def lineate(*words):
    done = CliRunner().invoke(build_app(), ["serve", *map(str, words)])
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


REFUSED = {
    "no such folder": (["/nowhere/at-all"], "/nowhere/at-all"),
    "a port that is none": (["--port", "70000"], "65535"),
    "an address of another machine": (["--host", "192.0.2.1"], "--host and --port must be free"),
    "a name that is none": (["--host", "no.such.host.invalid"], "--host must be a name or an address"),
    "a size that is none": (["--max-body", "much"], "--max-body must be a size"),
    "a device that is none": (["--device", "abacus"], "device must be auto, cpu or cuda, got 'abacus'"),
    "an empty key": (["--api-key", "a,,b"], "--api-key and LINEATE_API_KEY must be visible"),
    "a spacing that is no multiple": (["--spacing", "100"], "spacing must be a multiple of 64"),
    "a head that the model lacks": (["--draft", "head"], "model must have a head of multi-token prediction"),
    "more replicas than none": (["--max-replicas", "3"], "--replicas must be given with --max-replicas 3, got none"),
    "a queue without growth": (
        ["--replicas", "2", "--target-queue", "3"],
        "--max-replicas must be given with --target-queue, got none; add --max-replicas 3",
    ),
    "fewer at most than at least": (
        ["--replicas", "3", "--max-replicas", "2"],
        "--max-replicas must be at least --replicas, 3, got 2",
    ),
    "replicas of several processes": (
        ["--replicas", "2", "--tensor", "4"],
        "--tensor must be 1 with --replicas, got 4; a replica is one process. Start one torchrun --nproc-per-node 4",
    ),
    "no replicas": (["--replicas", "0"], "Invalid value for '--replicas'"),
    "an imbalance below 0": (["--replicas", "2", "--imbalance", "-1"], "Invalid value for '--imbalance'"),
    "one GPU and a half": (["--replicas", "2", "--replica-gpus", "1.5"], "--replica-gpus must be a part of one GPU"),
    "replicas of no folder": (["/nowhere/at-all", "--replicas", "2"], "/nowhere/at-all"),
    "replicas with a folder for no cache": (
        ["--replicas", "2", "--cache", "0", "--cache-folder", "x"],
        "--cache-folder needs --cache above 0",
    ),
    "states in float16": (["--state-dtype", "float16"], "state_dtype must be one of fp32, float32, bf16, bfloat16"),
    "chance without bfloat16": (
        ["--state-rounding", "stochastic"],
        "state_rounding='stochastic' needs state_dtype='bfloat16', got float32",
    ),
    "guesses in invariant steps": (
        ["--batch-invariant", "--draft", "lookup"],
        "--batch-invariant does not cover guessed tokens, got --draft lookup; leave one out",
    ),
    "invariant steps of several processes": (
        ["--batch-invariant", "--tensor", "2"],
        "--batch-invariant needs a model on one device, got --tensor 2; leave one out",
    ),
    "a folder for no cache": (["--cache", "0", "--cache-folder", "x"], "--cache-folder needs --cache above 0"),
    "random weights of a folder": (
        ["/nowhere/at-all", "--random-weights"],
        "--random-weights must be given with a preset, tiny, small, compact, base, medium, large, qwen3-next-80b, "
        "qwen3-5-27b, qwen3-5-35b-a3b, kimi-linear-48b, olmo-hybrid-7b, got '/nowhere/at-all'; to serve a checkpoint, "
        "leave --random-weights out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folder):
    words, expected = REFUSED[case]
    model = [] if words[0].startswith("/") else [folder]
    code, said = lineate(*model, "--port", "0", *words)
    assert code == 2 and expected in said, said


def test_a_preset_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = lineate("kimi-linear-48b", "--port", "0")
    assert code == 2 and "got 'kimi-linear-48b', a preset, which is a shape without weights" in said
    assert said.endswith("add --random-weights to measure its speed")
    (tmp_path / "kimi-linear-48b").mkdir()
    assert "which has no model yet" in lineate("kimi-linear-48b", "--port", "0")[1], "a folder of that name"


def test_random_weights_need_a_preset_and_one_process():
    code, said = lineate("--random-weights", "--port", "0")
    assert code == 2 and "--random-weights must be given with a preset, tiny," in said and said.endswith("got none")
    for flag in ("--tensor", "--replicas"):
        code, said = lineate("tiny", "--random-weights", "--port", "0", flag, "2")
        assert code == 2 and f"--random-weights must be served by one process, got {flag} 2; leave it out" in said


@pytest.mark.cover
def test_serving_random_weights(tmp_path):
    """The server says that answers are noise, and takes and gives all ids of the preset's vocabulary."""
    with Process("compact", "--random-weights", "--bits", "8", "--device", "cpu", "--context", "512") as served:
        assert "warning: the weights are random, in the shape of compact: answers are noise" in served.said
        model = httpx.get(f"{served.url}/v1/models").json()["data"][0]
        assert model["id"] == "compact-random" and model["random_weights"] is True
        details = httpx.get(f"{served.url}/lineate/info").json()["details"]
        assert (details["weights"], details["vocab_size"], details["random_weights"]) == ("int8", 257, True)
        body = {"prompt": [0, 255, 256, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = [httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["prompt_tokens"] == answers[0]["usage"]["completion_tokens"] == 4
        refused = httpx.post(f"{served.url}/v1/completions", json={**body, "prompt": [257]}, timeout=60)
        assert refused.status_code == 400 and "whole numbers below 257" in refused.json()["error"]["message"]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "ray://127.0.0.1:x"])
def test_a_cluster_that_is_not_there(folder, address, monkeypatch):
    pytest.importorskip("ray", reason="lineate[ray] is not installed")
    code, said = lineate(folder, "--port", "0", "--replicas", "2", "--cluster", address)
    assert code == 2 and f"--cluster must be auto or the HOST:PORT of a running Ray cluster, got '{address}'" in said


def test_replicas_without_ray(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, said = lineate(folder, "--port", "0", "--replicas", "2")
    assert code == 1 and "lineate serve needs ray, which is not installed; run pip install 'lineate[ray]'" in said


def test_a_port_that_is_taken(folder):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = lineate(folder, "--port", taken.getsockname()[1])
    assert code == 2 and "--host and --port must be free" in said


def test_keys_come_from_the_option_or_the_environment(monkeypatch):
    monkeypatch.delenv("LINEATE_API_KEY", raising=False)
    assert read_keys(None) == () and read_keys("a, b") == ("a", "b")
    monkeypatch.setenv("LINEATE_API_KEY", "c")
    assert read_keys(None) == ("c",) and read_keys("a") == ("a",)
    monkeypatch.setenv("LINEATE_API_KEY", "")
    with pytest.raises(ValueError, match="must be visible"):
        read_keys(None)  # an empty variable is a mistake, not a server without keys


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False)],
)
def test_local_addresses(host, local):
    assert is_local(host) == local


@pytest.mark.cover
def test_memories_in_bfloat16(folder):
    """The options reach the pool, and clients see that answers are made so, and how many bytes a sequence has."""
    from starlette.testclient import TestClient

    from lineate.serving.arguments import ServeArguments, settings_of
    from lineate.serving.building import application

    said = {}
    for dtype in ("float32", "bfloat16"):
        rounding = "stochastic" if dtype == "bfloat16" else "nearest"
        asked = ServeArguments(str(folder), slots=2, context=256, state_dtype=dtype, state_rounding=rounding)
        app, engine, model, _ = application(asked, settings_of(asked))
        assert engine.pool.allocated <= engine.pool.nbytes(2, 256)
        assert engine.pool.nbytes(2, 256) == model.state_nbytes(2, 256, dtype) + 16
        said[dtype] = TestClient(app, base_url="http://localhost").get("/lineate/info").json()
    narrow, wide = said["bfloat16"], said["float32"]
    assert (narrow["details"]["state_dtype"], narrow["details"]["state_rounding"]) == ("bfloat16", "stochastic")
    again = replace(asked, state_dtype="float32", state_rounding="nearest", batch_invariant=True)
    app, engine, _, _ = application(again, settings_of(again))
    invariant = TestClient(app, base_url="http://localhost").get("/lineate/info").json()
    assert engine.pool.batch_invariant and invariant["details"]["batch_invariant"] is True
    assert invariant["fingerprint"] != wide["fingerprint"]
    assert "state_dtype" not in wide["details"] and narrow["fingerprint"] != wide["fingerprint"]
    assert sum(x["fixed"] for x in narrow["layers"]) < sum(x["fixed"] for x in wide["layers"])
