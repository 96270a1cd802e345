"""`lineate serve --replicas` in a process of its own, and clients that press it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

WAIT = 240.0
"""Seconds until a test gives up waiting; Ray and three replicas start in half a minute on a slow machine."""
CHAT = "/v1/chat/completions"


def until(true, what: str = "a condition", wait: float = WAIT) -> None:
    """Wait until something is true."""
    end = time.monotonic() + wait
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {wait} s"
        time.sleep(0.05)


class Replicated:
    """A running `lineate serve --replicas`; it is ended with the block."""

    def __init__(self, *words: Any, **environment: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lineate.cli", "serve", *map(str, words), "--port", "0"],
            env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            until(lambda: self.process.poll() is not None or "/v1" in self.said, "the address")
            found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
            assert found, self.said
            self.url = found[0]
            self.http = httpx.Client(base_url=self.url, timeout=WAIT)
            until(self._healthy, "the server")
        except BaseException:
            self.end()
            raise

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.said += line

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> "Replicated":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """End it, and all of its processes, however it is."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)
                self.process.kill()
                self.process.wait(30)

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that take requests."""
        return sorted(x["replica"] for x in self.samples("lineate_front_active"))

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The labels of all samples of a metric, with its `value`."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return [{**x.labels, "value": x.value} for f in families for x in f.samples if x.name == name]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples with these labels."""
        return sum(x["value"] for x in self.samples(name) if labels.items() <= x.items())

    def processes(self) -> list[int]:
        """The ids of the processes of the replicas."""
        ours, found = {self.process.pid}, []
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
                words = (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(b"ray::ServeReplica"):
                found.append(int(path.parent.name))
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in ours} - ours
            ours |= more
            grown = bool(more)
        return sorted(set(found) & ours)

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        """Send one request, whole."""
        return self.http.post(CHAT, json=body)


class Clients:
    """Clients that send requests without a pause, each in a thread, until they are told to stop.

    Args:
        server: The server.
        bodies: The requests; client n sends the n-th, again and again, and streams if the body says so.
    """

    def __init__(self, server: Replicated, bodies: list[dict[str, Any]]) -> None:
        self.server, self.bodies = server, bodies
        self.answers: list[dict[str, Any]] = []
        self.done: Counter[int] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(len(bodies))]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[dict[str, Any]]:
        """Let all end their last request, and return what every request got."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive(), "a client hangs"
        return self.answers

    def wait(self, rounds: int) -> None:
        """Wait until every client has got so many more answers."""
        before = dict(self.done)
        until(lambda: all(self.done[n] >= before.get(n, 0) + rounds for n in range(len(self.bodies))), "answers")

    def _run(self, n: int) -> None:
        with httpx.Client(base_url=self.server.url, timeout=WAIT) as http:
            while not self._stop.is_set():
                try:
                    got = ask(http, self.bodies[n])
                except Exception as error:
                    got = {"status": 0, "error": repr(error), "text": "", "replica": None, "done": False}
                self.answers.append({"client": n, **got})
                self.done[n] += 1


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and return its status, text, error, replica, and whether a stream came to its end."""
    import json

    if not body.get("stream"):
        answer = http.post(CHAT, json=body)
        value = answer.json()
        text = value["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
        got = {"status": answer.status_code, "text": text, "error": value.get("error"), "done": True}
        return {**got, "replica": answer.headers.get("x-lineate-replica")}
    text, error, done = "", None, False
    with http.stream("POST", CHAT, json=body) as stream:
        for line in stream.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                value = json.loads(line[6:])
                error = value.get("error") or error
                for choice in value.get("choices", ()):
                    text += choice["delta"].get("content") or ""
        replica = stream.headers.get("x-lineate-replica")
    return {"status": stream.status_code, "text": text, "error": error, "done": done, "replica": replica}
