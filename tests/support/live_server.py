"""A server on a free port in a thread, over a real engine with a small model or over a scripted one."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from lineate.serving.api.service import Description
from lineate.serving.app import Settings, make_app
from lineate.serving.draining import DrainingServer
from lineate.serving.engine.requests import EngineStopped, Event, Handle, QueueFull, Request

WAIT = 60.0
"""Seconds until a test gives up waiting."""


def until(true: Callable[[], Any], what: str = "a condition") -> None:
    """Wait until something is true."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {WAIT} s"
        time.sleep(0.005)


class Live:
    """A running server."""

    def __init__(self, app, server: DrainingServer, port: int, thread: threading.Thread) -> None:
        self.app, self.server, self.port, self.thread = app, server, port, thread
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> Any:
        """Return OpenAI's own client, which tries once."""
        import openai

        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)


@contextlib.contextmanager
def live(engine, tokenizer, description: Description, settings: Settings | None = None) -> Iterator[Live]:
    """Serve in a thread until the block ends."""
    app = make_app(engine, tokenizer, description, settings or Settings())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off")
        server = DrainingServer(app, config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started, "the server")
        try:
            yield Live(app, server, port, thread)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


@dataclasses.dataclass(frozen=True)
class ScriptedStats:
    waiting: int = 0
    running: int = 0
    new_tokens: int = 0


class ScriptedEngine:
    """Answers each request with the text that a script gives, token by token, in threads; slots are counted.

    Args:
        encode: Turns the text into tokens.
        script: Returns the text for a request and an index; what it raises is the request's error.
        slots: Choices that run at once.
        queue: Requests that may wait or run.
        gate: If given, no token comes before it is set, except the first ones.
        free: How many tokens come without it.
    """

    cache = None

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        script: Callable[[Request, int], str],
        slots: int = 4,
        queue: int = 64,
        gate: threading.Event | None = None,
        free: int = 0,
    ) -> None:
        self.slots, self.queue, self.gate, self.free = slots, queue, gate, free
        self._encode, self._script = encode, script
        self._lock, self._closed = threading.Lock(), False
        self.handles: list[Handle] = []
        self.running = 0
        self.made = 0

    @property
    def stats(self) -> ScriptedStats:
        return ScriptedStats(0, self.running, self.made)

    def submit(self, request: Request, listener: Callable[[Event], None] | None = None) -> Handle:
        with self._lock:
            if self._closed:
                raise EngineStopped("stopped")
            if self.running >= self.queue:
                raise QueueFull(self.running, 2.2)
            handle = Handle(request, len(self.handles), listener)
            self.handles.append(handle)
            self.running += 1
        threading.Thread(target=self._run, args=(handle,), daemon=True).start()
        return handle

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        self._closed = True
        for handle in self.handles:
            handle.shut_down()
        until(lambda: self.running == 0, "the end of all requests")

    def _run(self, handle: Handle) -> None:
        request = handle.request
        for index in range(request.n):
            try:
                tokens = self._encode(self._script(request, index))[: request.max_new_tokens]
            except Exception as error:
                handle.put(Event(index, finished="error", error=str(error)))
                continue
            whole = len(tokens) < (request.max_new_tokens or 2**30)
            for n, token in enumerate(tokens):
                while n >= self.free and self.gate and not self.gate.is_set() and index not in handle.ending:
                    self.gate.wait(0.005)
                if index in handle.ending:
                    break
                self.made += 1
                handle.put(Event(index, (token,)))
            end = tuple(sorted(request.stop_tokens)[:1]) if whole else ()
            finished = handle.ending.get(index, "stop" if whole else "length")
            handle.put(Event(index, end if finished == "stop" else (), finished=finished))
        with self._lock:
            self.running -= 1
