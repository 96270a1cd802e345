"""The checks of every request (host name, key, whether the server accepts requests) and its counting."""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lineate.web.errors import ApiError, internal, queue_full, shutting_down
from lineate.web.responses import GONE, answer

LOG = logging.getLogger("lineate.serving")
PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
"""Pages load nothing from elsewhere and are shown in no other site's frame."""
REMEDY = "lineate serve --allow-host NAME"


class Counting(Protocol):
    """The interface of a counter of answers."""

    def count(self, route: str, status: int) -> None:
        """Count an answer."""
        ...


class Traffic:
    """The requests that are being answered, and whether new ones are accepted."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Condition()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        async with self._idle:
            await self._idle.wait_for(lambda: self.active == 0)

    async def change(self, by: int) -> None:
        """Count a request that begins or ends."""
        async with self._idle:
            self.active += by
            self._idle.notify_all()


class Keys:
    """The keys that clients may use; comparing takes the same time for every key.

    Args:
        keys: The keys; without any, every request is allowed.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: Request) -> None:
        """Raise ApiError if the request has none of the keys."""
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            message = "the header Authorization: Bearer KEY must have a key of this server"
            raise ApiError(401, message, code="invalid_api_key")


class Gate:
    """The outermost part of the application.

    Args:
        app: The application behind it.
        traffic: Counts the requests that are being answered.
        metrics: Counts the answers.
        hosts: Host names that requests may use; any if there are none.
        most: Requests that are answered at once.
        remedy: The option that allows another name, for the message.
    """

    def __init__(
        self, app: ASGIApp, traffic: Traffic, metrics: Counting, hosts: frozenset[str], most: int, remedy: str = REMEDY
    ) -> None:
        self._app, self._traffic, self._metrics, self._hosts, self._most = app, traffic, metrics, hosts, most
        self._remedy = remedy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity, status = f"req_{secrets.token_hex(12)}", 0
        scope["request_id"] = identity
        counted = scope["method"] == "POST"

        async def put(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["X-Request-Id"] = identity
                headers["X-Content-Type-Options"] = "nosniff"
                if headers.get("content-type", "").startswith("text/html"):
                    headers["Content-Security-Policy"] = PAGE_POLICY
                    headers["Referrer-Policy"] = "no-referrer"
                if self._traffic.draining:
                    headers["Connection"] = "close"
            await send(message)

        if counted:
            await self._traffic.change(1)
        try:
            self._check(scope, counted)
            await self._app(scope, receive, put)
        except ApiError as error:
            await answer(error.body, error.status, error.headers)(scope, receive, put)
        except ClientDisconnect:
            status = GONE
        except Exception:
            LOG.exception("%s: %s %s failed", identity, scope["method"], _route(scope))
            if not status:
                failed = internal(identity)
                await answer(failed.body, failed.status)(scope, receive, put)
        finally:
            self._metrics.count(_route(scope), status or GONE)
            if counted:
                await asyncio.shield(self._traffic.change(-1))

    def _check(self, scope: Scope, counted: bool) -> None:
        """Raise ApiError if the request cannot be taken."""
        if self._hosts:
            # Against DNS rebinding: a page of a site whose name resolves to this machine sends that name.
            given = Request(scope).headers.get("host", "")
            try:
                name = urlsplit(f"//{given}").hostname or ""
            except ValueError:
                name = ""
            if name not in self._hosts:
                message = f"the Host header must name this server; {self._remedy} allows another name"
                raise ApiError(403, message, code="host_not_allowed")
        if counted and self._traffic.draining:
            raise shutting_down("the server is shutting down and takes no new requests")
        if counted and self._traffic.active > self._most:
            raise queue_full(1)


def _route(scope: Scope) -> str:
    """Return the route of a request: one label for all requests of a route."""
    return getattr(scope.get("route"), "path", None) or "other"
