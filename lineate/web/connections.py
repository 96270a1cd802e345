"""Connections before a request has arrived: heads must arrive in time, and data that is not HTTP gets an error."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lineate.web.errors import invalid

NOT_HTTP = "the request must be HTTP/1.1 with a head of at most 64 KB, got something else"


class Connection(H11Protocol):
    """A connection whose heads must arrive in time, so that clients that send nothing cannot use up the server."""

    head_seconds = 30.0
    """Seconds in which the head of a request must have arrived."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; bytes of a head do not extend its deadline."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()  # the head is complete; the body has its own limit
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the rest of the next head if it has begun; uvicorn closes a connection on which none begins."""
        self._stop_waiting()
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP with an error in the shape of all other errors."""
        body = json.dumps(invalid(None, NOT_HTTP, "invalid_http").body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise an answer is already being sent
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def connections(head_seconds: float) -> type[Connection]:
    """Return the class of connections with this limit.

    Args:
        head_seconds: Seconds in which the head of a request must have arrived.
    """
    return type("Connection", (Connection,), {"head_seconds": head_seconds})
