"""A replica: the server of `lineate serve` in a process of Ray Serve, called with requests instead of connections."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Message

from lineate.serving.engine.engine import Engine
from lineate.serving.replicas.call import Call

STUCK_SECONDS = 300.0
"""Seconds without a step, while requests wait for one, after which an engine counts as stuck."""

AT_ONCE = 3
"""The number of messages that are yielded without waiting for more: the head, the role and the first token."""
COLLECTED, MOST_COLLECTED = 0.002, 0.05
"""Seconds for which messages are collected: per other running request, and the limit."""

Build = Callable[[], tuple[Any, Engine]]
"""Makes the application of make_app and its engine, which is not started yet; it is called in the replica's process."""


class Replica:
    """One replica. Ray Serve makes it, calls its methods, and calls `__del__` when it has answered its last request.

    Args:
        build: Makes the application and its engine.
        name: The replica's name; None: the one that Ray Serve gave it.
    """

    def __init__(self, build: Build, name: str | None = None) -> None:
        self._engine: Engine | None = None
        self._name = _name_by_ray() if name is None else name
        self._app, engine = build()
        self._running: set[asyncio.Future[None]] = set()
        self._progress: tuple[Any, ...] = ()
        self._since = time.monotonic()
        engine.start()
        self._engine = engine

    async def answer(self, call: Call) -> AsyncIterator[tuple[str, list[Message]]]:
        """Yield the replica's name and the messages of an answer that have arrived since the last ones.

        Each yield costs Ray and the front half a millisecond of processor time, whatever its size. So while many
        requests run, the messages of a few tokens are collected; those of the first token go at once. Closing or
        cancelling this generator ends the request in the engine.

        Args:
            call: The request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        bodies = [call.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        work = asyncio.ensure_future(_run(self._app, call, receive, send))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        work.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            for number in itertools.count():
                messages = [await sent.get()]
                if number >= AT_ONCE and _is_part(messages[0]):
                    await asyncio.sleep(min(MOST_COLLECTED, COLLECTED * (len(self._running) - 1)))
                while not sent.empty():
                    messages.append(sent.get_nowait())
                found = [message for message in messages if message is not None]
                if found:
                    yield self._name, found
                if messages[-1] is None:
                    break
        finally:
            left.set()

    async def whole(self, call: Call) -> tuple[str, int, bytes]:
        """Return the replica's name, the status and the body of an answer.

        Args:
            call: The request.
        """
        messages = [message async for _, found in self.answer(call) for message in found]
        return self._name, messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])

    def check_health(self) -> None:
        """Raise if the engine has ended, or makes no step although requests wait; Ray then replaces the replica."""
        assert self._engine is not None
        if not self._engine.alive:
            raise RuntimeError("the engine's thread has ended")
        stats, now = self._engine.stats, time.monotonic()
        progress = (stats.steps, stats.read_tokens, stats.reread_tokens, stats.finished)
        busy = stats.waiting + stats.reading + stats.running
        if not busy or progress != self._progress:
            self._progress, self._since = progress, now
        if now - self._since > STUCK_SECONDS:
            raise RuntimeError(f"the engine has made no step for {now - self._since:.0f} s with {busy} requests")

    def __del__(self) -> None:
        """Stop the engine, and write the cache's states to its folder."""
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            engine.stop(drain=False)
            if engine.cache is not None:
                engine.cache.close()
            self._app.state.service.close()


def _is_part(message: Message | None) -> bool:
    """Whether more of an answer follows a message."""
    return message is not None and bool(message.get("more_body"))


async def _run(app: ASGIApp, call: Call, receive: Any, send: Any) -> None:
    await app(call.scope(), receive, send)


def _name_by_ray() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
