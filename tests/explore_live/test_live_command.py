"""`lineate explore` in a process of its own, and what its options refuse."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("typer")

import httpx
from typer.testing import CliRunner

from lineate.cli import build_app
from tests.support.live_server import until


@pytest.mark.cover
def test_it_serves_until_it_is_interrupted():
    command = [sys.executable, "-m", "lineate.cli", "explore", "tiny", "--port", "0", "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    said = []
    threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
    try:
        until(lambda: process.poll() is not None or said, "the address")
        address = re.search(r"http://127\.0\.0\.1:\d+", said[0])[0]
        assert "lineate explore" in httpx.get(address, timeout=60).text  # it waits until the server runs
        body = {"steps": [{"op": "write", "key": "A", "value": "w"}], "rules": ["delta_rule"]}
        found = httpx.post(f"{address}/api/memory", json=body, timeout=60).json()
        assert found["rules"]["delta_rule"]["norms"] == [0, 1]
        found = httpx.post(f"{address}/api/model/step", json={"text": "abc", "at": 2}, timeout=60).json()
        assert found["at"] == 2 and len(found["next"]) == 8
        about = httpx.get(f"{address}/api/about", timeout=60).json()
        assert about["models"][0] == {"name": "given", "label": "tiny, untrained"} and about["folders"]
        assert httpx.get(address, headers={"Host": "elsewhere.example"}).status_code == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not any("Traceback" in line for line in said)
    finally:
        process.kill()
        process.wait(30)


def lineate(*words):
    done = CliRunner().invoke(build_app(), ["explore", "--no-browser", *map(str, words)])
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    "words, message",
    [
        (["--port", "70000"], "65535"),
        (["--host", "192.0.2.1"], "--host and --port must be free"),
        (["--host", "no.such.host.invalid"], "--host must be a name or an address"),
        (["/no/such/folder"], "MODEL must be a preset"),
        ([Path(__file__).parent], "has no model yet"),
    ],
)
def test_what_is_refused(words, message):
    code, said = lineate(*words)
    assert code == 2 and message in said


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = lineate("--port", port)
    assert code == 2 and f"--host and --port must be free, got 127.0.0.1:{port}" in said


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "lineate.explore.live.app", raising=False)
    code, said = lineate("--port", "0")
    assert code == 1 and "lineate explore needs fastapi" in said and "pip install 'lineate[serve]'" in said
