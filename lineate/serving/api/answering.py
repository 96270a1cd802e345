"""The base of the answers of all routes: the first fields, sending, and cleanup at the end."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.foreign import HEADER
from lineate.serving.api.running import Running
from lineate.serving.api.service import Service
from lineate.web.errors import shutting_down
from lineate.web.responses import GONE, Chunk, EventStream, answer, unless_gone


class Answering(ABC):
    """The answer to one body, whole or in chunks.

    Args:
        service: The served model.
        running: The requests to the engine.
        prefix: The beginning of the answer's id.
        kind: The `object` of the answer, or of its chunks.
    """

    def __init__(self, service: Service, running: Running, prefix: str, kind: str) -> None:
        self._service, self._running = service, running
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": service.description.name,
            "system_fingerprint": service.description.fingerprint,
        }
        self._closed = False

    @abstractmethod
    async def whole(self) -> dict[str, Any] | bytes:
        """Return the whole answer; one that takes long to write as JSON."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the answer in chunks, as values or JSON, and comments after periods without output."""

    async def respond(self, request: Request, stream: bool, ignored: tuple[str, ...]) -> Response:
        """Send the answer, with the names of the fields that were ignored, and free its resources however it ends."""
        headers = {HEADER: ", ".join(ignored)} if ignored else {}
        if stream:
            return EventStream(self._whole_or_error(), self._service.limits, self.close, headers)
        try:
            body = await unless_gone(request.receive, self.whole())
        finally:
            self.close()
        if isinstance(body, bytes):
            return Response(body, 200, headers, "application/json")
        return Response(status_code=GONE) if body is None else answer(body, headers=headers)

    async def _whole_or_error(self) -> AsyncIterator[Chunk]:
        """Yield the chunks; raise ApiError after the last one if a shutdown has cut the answer short."""
        async for chunk in self.chunks():
            yield chunk
        if self._running.counts.stopped_by == "shutdown":
            raise shutting_down("the server is shutting down; the answer is not complete")

    def close(self) -> None:
        """Cancel the running requests, and count the tokens once."""
        if not self._closed:
            self._closed = True
            self._running.close()
            self._service.metrics.generated(self._running.counts.usage(), self._own())

    def _own(self) -> dict[str, Any]:
        counts = self._running.counts
        return counts.own(self._service.description.state_bytes(counts.longest))
