"""Clients that stream completions over HTTP with the standard library alone, and a `lineate serve` of their own."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

HOST = "127.0.0.1"


@dataclass
class Answer:
    """A streamed answer as its client saw it; times are those of time.perf_counter."""

    began: float
    times: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    comments: list[str] = field(default_factory=list)
    """The comments of the stream, such as "reading 4096 of 8192 tokens"."""
    tokens: int = 0
    """The tokens that the server counts."""
    own: dict[str, Any] = field(default_factory=dict)
    """The server's own numbers: `lineate` of the last chunk."""

    @property
    def gaps(self) -> list[float]:
        """The seconds between chunks."""
        return [after - before for before, after in pairwise(self.times)]


async def stream(port: int, body: dict[str, Any] | bytes) -> Answer:
    """Return the streamed answer to a completion; raise RuntimeError if the server refuses it or breaks it off.

    Args:
        port: The server's port on this machine.
        body: The body, with stream_options.include_usage; bytes are JSON already.
    """
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    answer = Answer(time.perf_counter())
    try:
        writer.write(_head("POST /v1/completions", len(text)) + text)
        await writer.drain()
        status = (await reader.readline()).decode()
        while (await reader.readline()).strip():
            pass
        if " 200 " not in status:
            raise RuntimeError(f"the server answered {status.strip()}: {(await reader.read(2000)).decode()}")
        async for line in _lines(reader):
            _take(answer, line)
            if line == b"data: [DONE]":
                return answer
        raise RuntimeError("the stream ended without [DONE]")
    finally:
        writer.close()


def _head(what: str, length: int) -> bytes:
    kind = f"Content-Type: application/json\r\nContent-Length: {length}\r\n" if length else ""
    return f"{what} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{kind}\r\n".encode()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a chunked body that are not empty."""
    rest = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            if line:
                yield line


def _take(answer: Answer, line: bytes) -> None:
    """Add a line of the stream to an answer."""
    if line.startswith(b":"):
        answer.comments.append(line[1:].decode().strip())
    if not line.startswith(b"data: {"):
        return
    now, value = time.perf_counter(), json.loads(line.removeprefix(b"data: "))
    if "error" in value:
        raise RuntimeError(f"an error in a stream: {value['error']}")
    if value["choices"] and value["choices"][0]["text"]:
        answer.times.append(now)
    if value.get("usage"):
        answer.tokens, answer.own = value["usage"]["completion_tokens"], value["lineate"]


class Server:
    """A `lineate serve` in a process of its own, whose lines are repeated here.

    Args:
        words: Its options, without the port.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.begun = time.perf_counter()
        self.lines: list[str] = []
        """The lines that it has printed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lineate.cli", "serve", *words, "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            print(f"  {time.perf_counter() - self.begun:7.1f} s  {line.rstrip()}", flush=True)

    def wait(self, seconds: float) -> float:
        """Return the seconds until it answered; raise RuntimeError if it has ended, or takes longer than a limit.

        Args:
            seconds: The limit.
        """
        while time.perf_counter() - self.begun < seconds:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self._process.returncode}: {self.lines[-3:]}")
            found = re.search(rf"http://{re.escape(HOST)}:(\d+)/v1", "\n".join(self.lines))
            if found is not None:
                self.port = int(found[1])
                try:
                    self.get("/health")
                    return time.perf_counter() - self.begun
                except OSError:
                    pass
            time.sleep(0.02)
        raise RuntimeError(f"the server must be ready within {seconds:g} s, got no answer; raise --patience")

    def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
