"""The messages to a client while its replica may still be lost: an answer is held back until it has content.

A request whose client has seen nothing of an answer can be given to another replica. So the head of a stream and its
first chunks, which only name the assistant's role, wait for the first chunk that has text, a call or an end. Comments
that keep a connection open are sent at once, with the head: the answer of another replica can still follow them.
"""

import asyncio
import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from lineate.web.errors import ApiError
from lineate.web.json_text import dump
from lineate.web.responses import DONE

REPLICA = "X-Lineate-Replica"
"""The header that names the replica of an answer."""
EVENTS = "text/event-stream"


class Outgoing:
    """The answer to one request, from one replica after another until one has begun to answer.

    Args:
        send: Sends a message to the client.
        seconds: The timeout of a client that reads nothing.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._held: list[Message] = []
        self._streams = self._begun = False
        self._instead: bytearray | None = None
        self.shown = False
        """Whether the client has seen a part of an answer, so that no other may follow."""
        self.done = False
        """Whether the client has got a whole answer."""

    def again(self) -> None:
        """Drop the held messages; another replica will answer."""
        self._held, self._instead = [], None

    async def put(self, message: Message, replica: str) -> None:
        """Receive an ASGI message of a replica's answer.

        Args:
            message: The message.
            replica: The replica's name.
        """
        if message["type"] == "http.response.start":
            self._start(message, replica)
        elif self._instead is not None:
            self._instead += message.get("body", b"")
            if not message.get("more_body"):
                await self._end_stream(self._instead.decode())
        elif not self._streams or self.shown:
            await self._flush()
            await self._out(message)
        elif (body := message.get("body", b"")).startswith(b":"):
            await self._begin()
            await self._out(message)
        elif _says_nothing(body):
            self._held.append(message)
        else:
            await self._flush()
            await self._out(message)

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error; impossible if a part of an answer that is not a stream was sent.

        Args:
            error: The error.
        """
        self.again()
        if self._begun and self._streams:
            await self._end_stream(dump(error.body))
        elif not self._begun:
            body = dump(error.body).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await self._out({"type": "http.response.start", "status": error.status, "headers": raw})
            await self._out({"type": "http.response.body", "body": body, "more_body": False})

    def _start(self, message: Message, replica: str) -> None:
        """Hold the head of an answer back, or drop it if the client has one."""
        message["headers"] = [tuple(pair) for pair in message["headers"]]
        headers = MutableHeaders(raw=message["headers"])
        headers[REPLICA] = replica
        streams = headers.get("content-type", "").startswith(EVENTS)
        if self._begun:  # with a comment, before another replica was lost; an error becomes an event
            self._instead = None if streams else bytearray()
        else:
            self._held, self._streams = [message], streams

    async def _begin(self) -> None:
        """Send the head, unless it was sent."""
        if not self._begun:
            self._begun = True
            await self._out(self._held.pop(0))

    async def _flush(self) -> None:
        """Send the held messages."""
        self.shown = True
        held, self._held = self._held, []
        for message in held:
            self._begun = True
            await self._out(message)

    async def _end_stream(self, data: str) -> None:
        """Send an event, and end the stream as after its last chunk."""
        self.shown = True
        for text in (f"data: {data}\n\n", DONE):
            await self._out({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await self._out({"type": "http.response.body", "body": b"", "more_body": False})

    async def _out(self, message: Message) -> None:
        async with asyncio.timeout(self._seconds):
            await self._send(message)
        self._begun = True
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.done = True


def _says_nothing(event: bytes) -> bool:
    """Whether an event is a chunk of a chat that only names the role."""
    try:
        value: Any = json.loads(event.removeprefix(b"data: "))
        choices = value["choices"]
        return bool(choices) and all(
            choice["delta"].get("role") and not choice["delta"].get("content") and choice["finish_reason"] is None
            for choice in choices
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
