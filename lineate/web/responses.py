"""Responses that detect when their client disconnects: server-sent events, and values that take long to compute."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lineate.web.errors import ApiError, internal, invalid
from lineate.web.fields import shown
from lineate.web.intake import Intake
from lineate.web.json_text import dump
from lineate.web.limits import Limits

LOG = logging.getLogger("lineate.serving")
DONE = "data: [DONE]\n\n"
GONE = 499
"""The status in the metrics of an answer whose client has disconnected; it is never sent."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Comment:
    """A comment of an event stream, which clients skip; it shows them and proxies that the server works."""

    text: str


Chunk = dict[str, Any] | bytes | Comment
"""An event of a stream: a value, JSON, or a comment."""


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Answer with the error that a route has raised."""
    assert isinstance(error, ApiError)
    return answer(error.body, error.status, error.headers)


def answer_http_error(request: Request, error: Exception, code: str | None = None) -> Response:
    """Answer a request without a route, or with a wrong method, with this code."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shown(request.url.path)}"
    message = {404: f"there is no {what}", 405: f"{what} is not allowed"}.get(error.status_code, str(error.detail))
    found = ApiError(error.status_code, message, code=code)
    return answer(found.body, found.status, dict(error.headers or {}))


async def read_body(request: Request, limits: Limits, intake: Intake | None = None) -> bytes:
    """Return the body; raise ApiError if it is no JSON by its type, too large, or too slow.

    Args:
        request: The request.
        limits: Its bytes, and the seconds in which they must arrive, without the waiting time of the intake.
        intake: Limits the rate of all bodies together; None: there is no limit.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Pages of other sites can send anything else without asking this server first.
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    too_large = ApiError(413, f"the body must have at most {limits.body_bytes} bytes", code="request_too_large")
    if length.isdecimal() and (len(length) > 15 or int(length) > limits.body_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds) as arriving:
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large
                if intake is not None:
                    due = arriving.when()
                    arriving.reschedule(None)
                    waited = await intake.take(len(body) - len(part), len(part))
                    arriving.reschedule(None if due is None else due + waited)
    except TimeoutError:
        message = f"the body must arrive within {limits.body_seconds:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    if not body:
        raise invalid(None, "the body must be a JSON object, got none", "invalid_json")
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Made]) -> Made | None:
    """Return the result of the work, or None if the client disconnects first, which cancels the work."""
    making = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else None
    finally:
        for task in (making, leaving):
            task.cancel()
        await asyncio.gather(making, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: each value as JSON (bytes are JSON already), comments, and [DONE].

    Args:
        values: The values.
        limits: The timeout of a client that reads nothing.
        close: Called at the end in every case: it frees the source of the values.
        headers: More headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncIterator[Chunk],
        limits: Limits,
        close: Callable[[], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code, self.background = 200, None
        self._values, self._limits, self._close = values, limits, close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send, scope.get("request_id", "")))
        except TimeoutError:
            LOG.info("a client took nothing for %g s", self._limits.send_seconds)
        finally:
            self._close()

    async def _send(self, send: Send, identity: str) -> None:
        async def put(message: Message) -> None:
            async with asyncio.timeout(self._limits.send_seconds):
                await send(message)

        async def event(text: str | bytes) -> None:
            body = text.encode() if isinstance(text, str) else text
            await put({"type": "http.response.body", "body": body, "more_body": True})

        await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for value in self._values:
                if isinstance(value, bytes):
                    await event(b"data: %b\n\n" % value)
                else:
                    await event(f": {value.text}\n\n" if isinstance(value, Comment) else f"data: {dump(value)}\n\n")
        except ApiError as error:
            await event(f"data: {dump(error.body)}\n\n")
        except (TimeoutError, asyncio.CancelledError):
            raise
        except Exception:
            LOG.exception("%s: a stream failed", identity)
            await event(f"data: {dump(internal(identity).body)}\n\n")
        await event(DONE)
        await put({"type": "http.response.body", "body": b"", "more_body": False})


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(dump(value), status, headers, "application/json")


Endpoint = Callable[[Request], Awaitable[Response]]
