"""A uvicorn server that drains: SIGTERM refuses new requests, and lets those that run end, up to a limit."""

import asyncio
import logging
import socket
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from lineate.web.connections import connections
from lineate.web.gate import Traffic
from lineate.web.limits import Limits

LOG = logging.getLogger("lineate.serving")
LAST_SECONDS = 5.0
"""Seconds for cancelled requests to send the end of their answers."""


class Stoppable(Protocol):
    """An object that ends all requests, such as an engine."""

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """End all requests."""
        ...


class Served(Protocol):
    """The part of `app.state.service` that a server needs."""

    @property
    def limits(self) -> Limits: ...

    @property
    def engine(self) -> Stoppable: ...

    def close(self) -> None:
        """Free its resources."""
        ...


class DrainingServer(uvicorn.Server):
    """Serves an application of make_app, or the front of replicas, until a signal comes or `drain` is called.

    The first SIGTERM or SIGINT drains; a second one ends at once. New requests get 503 while the server drains.

    Args:
        app: The application.
        config: Host, port and other settings of uvicorn.
    """

    def __init__(self, app: Starlette, config: uvicorn.Config) -> None:
        self._traffic: Traffic = app.state.traffic
        self._service: Served = app.state.service
        limits = self._service.limits
        config.http, config.timeout_keep_alive = connections(limits.head_seconds), limits.idle_seconds
        config.loop, config.ws = "asyncio", "none"  # even if others are installed, such as Ray's
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drains = False  # requested, perhaps before there is a loop
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server has drained."""
        self._loop = asyncio.get_running_loop()
        if self._drains:
            self._begin()
        try:
            await super().serve(sockets)
        finally:
            self._service.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self._traffic.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        self.drain()

    def drain(self) -> None:
        """Begin to drain; any thread may call this."""
        self._drains = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._draining is None:
            self._traffic.draining = True
            self._draining = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Wait until all requests have ended; cancel those that exceed the limit."""
        limits = self._service.limits
        LOG.info("shutting down; %d requests have %g s to end", self._traffic.active, limits.drain_seconds)
        try:
            async with asyncio.timeout(limits.drain_seconds):
                await self._traffic.idle()
        except TimeoutError:
            LOG.warning("cancelling %d requests", self._traffic.active)
            await asyncio.to_thread(self._service.engine.stop, False)
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await self._traffic.idle()
            except TimeoutError:
                self.force_exit = True
        self.should_exit = True
