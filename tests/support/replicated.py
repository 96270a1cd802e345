"""`lineate serve --replicas` in a process of its own, and clients that press it."""

import json
import threading
import time
from collections import Counter
from typing import Any

import httpx

from bench.serving.replicas import CHAT, Server

__all__ = ["CHAT", "Clients", "Replicated", "ask", "until"]

WAIT = 240.0
"""Seconds until a test gives up waiting; Ray and three replicas start in half a minute on a slow machine."""


def until(true, what: str = "a condition", wait: float = WAIT) -> None:
    """Wait until something is true."""
    end = time.monotonic() + wait
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {wait} s"
        time.sleep(0.05)


class Replicated(Server):
    """A running `lineate serve --replicas`; it is ended with the block."""

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that take requests."""
        return sorted(x["replica"] for x in self.samples("lineate_front_active"))

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
        """Wait until every client has got the given number of further answers."""
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
