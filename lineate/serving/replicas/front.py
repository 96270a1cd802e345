"""The front: passes requests to replicas and returns their answers; if a replica is lost, another one answers.

A request is tried again only while its client has seen nothing of an answer (outgoing.py). A stream of which a part was
sent ends with an error event.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from lineate.serving.api.foreign import EXPOSED
from lineate.serving.api.lanes import LONG_BYTES
from lineate.serving.app import Settings
from lineate.serving.replicas.call import Call
from lineate.serving.replicas.gathered import gather
from lineate.serving.replicas.outgoing import Outgoing
from lineate.serving.replicas.prompts import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from lineate.serving.replicas.replica import Report
from lineate.serving.replicas.routing import RoutingStats
from lineate.web.errors import ApiError, unavailable
from lineate.web.gate import Gate, Keys, Traffic
from lineate.web.intake import Intake
from lineate.web.metrics import CONTENT_TYPE
from lineate.web.responses import answer, answer_api_error, read_body, unless_gone

LOG = logging.getLogger("lineate.serving")
TRIES = 3
"""Replicas that a request is given to in turn before it fails: the request may be the cause of the failures."""
WITH_BODY = (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE)
EXPLORER = "/explore/api/"
"""The prefix of the explorer's routes with a body."""
ROUTES = (*WITH_BODY, "/v1/models", "/v1/models/{name:path}", "/lineate/info", "/explore/{path:path}", "/{path:path}")


class ReplicaLost(Exception):
    """The replica that was answering was lost."""


class Replicas(Protocol):
    """The part of the replicas' interface that the front needs."""

    @property
    def stats(self) -> RoutingStats: ...

    def answer(self, call: Call) -> AsyncGenerator[tuple[str, Sequence[Message]]]:
        """Yield the name of the replica that answers, and messages of its answer; raise ReplicaLost."""
        ...

    async def reports(self) -> Sequence[Report]:
        """Return the reports of all replicas."""
        ...


class Front:
    """Passes on requests, with the front's counts.

    Args:
        replicas: The replicas.
        settings: Keys, origins, limits.
    """

    def __init__(self, replicas: Replicas, settings: Settings) -> None:
        self.replicas, self.limits, self.keys = replicas, settings.limits, Keys(settings.api_keys)
        self.intake = Intake()
        self.engine = self  # a DrainingServer stops it when answers take too long
        self._stopped, self._reading = asyncio.Event(), asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lineate_front_requests", "Requests by route and status, as clients got them.", ("route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._retries = Counter(
            "lineate_front_retries", "Requests that another replica was given.", registry=self.registry
        )
        self._lost = Counter(
            "lineate_front_lost", "Requests that failed because their replica was lost.", registry=self.registry
        )
        self.registry.register(_Routed(replicas))

    def count(self, route: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """End all answers with an error; any thread may call this.

        Args:
            drain: Not used; running requests are ended.
            timeout: Not used.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """Do nothing: the front has no resources to free."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        self._loop = asyncio.get_running_loop()
        request, path, body = Request(scope, receive), scope["path"], b""
        if path.count("/") > 1 or path in WITH_BODY:  # the remaining paths are files of the chat page
            self.keys.check(request)
        if scope["method"] == "POST" and (path in WITH_BODY or path.startswith(EXPLORER)):
            body = await read_body(request, self.limits, self.intake)
        outgoing = Outgoing(send, self.limits.send_seconds)
        try:
            await unless_gone(receive, self._until_stopped(scope, body, outgoing))
        except TimeoutError:
            LOG.info("a client took nothing for %g s", self.limits.send_seconds)

    async def _until_stopped(self, scope: Scope, body: bytes, outgoing: Outgoing) -> None:
        """Pass a request on unless the front is stopped first."""
        passing = asyncio.ensure_future(self._pass(scope, body, outgoing))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({passing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, stopped):
                task.cancel()
            await asyncio.gather(passing, stopped, return_exceptions=True)
        if not outgoing.done:
            await outgoing.fail(unavailable("the server is shutting down", "shutting_down"))

    async def _pass(self, scope: Scope, body: bytes, outgoing: Outgoing) -> None:
        """Give a request to one replica after another until one has answered, or the client has seen a part."""
        call = await self._read(scope, body)
        for tried in range(TRIES):
            if tried:
                self._retries.inc()
                outgoing.again()
            try:
                await self._try(call, outgoing)
                if outgoing.done:
                    return
            except ReplicaLost as error:
                LOG.warning("%s %s lost its replica: %s", call.method, call.path, error)
            except ApiError as error:
                await outgoing.fail(error)
                return
            if outgoing.shown:
                break
        self._lost.inc()
        await outgoing.fail(unavailable("the replica that was answering was lost", "replica_lost"))

    async def _read(self, scope: Scope, body: bytes) -> Call:
        """Return the call of a request; long bodies are read in a thread, one at a time."""
        if len(body) <= LONG_BYTES:
            return Call.of(scope, body, self.limits.values)
        async with self._reading:
            return await asyncio.to_thread(Call.of, scope, body, self.limits.values)

    async def _try(self, call: Call, outgoing: Outgoing) -> None:
        """Give a request to one replica. A stream is never silent for long, and other answers have a time limit."""
        patience = self.limits.seconds + self.limits.heartbeat_seconds
        async with aclosing(self.replicas.answer(call)) as answers:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        replica, messages = await anext(answers)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise unavailable("no replica answered within the time limit", "timeout") from None
                for message in messages:
                    await outgoing.put(message, replica)

    def metrics(self) -> bytes:
        """Return the front's own counts in Prometheus' text format."""
        return generate_latest(self.registry)


class _Routed(Collector):
    """A collector that reads the routing counts when Prometheus scrapes."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._replicas.stats
        routed = CounterMetricFamily(
            "lineate_front_routed",
            "Requests whose replica was chosen for their prompt, or for its load.",
            labels=("by",),
        )
        routed.add_metric(("prefix",), stats.by_prefix)
        routed.add_metric(("load",), stats.by_load)
        yield routed
        active = GaugeMetricFamily(
            "lineate_front_active", "Requests of each replica, running or waiting.", labels=("replica",)
        )
        for replica, count in stats.active.items():
            active.add_metric((replica,), count)
        yield active


def make_front(replicas: Replicas, settings: Settings) -> Starlette:
    """Return the application of the front; `app.state.traffic` has its current requests.

    Args:
        replicas: The replicas.
        settings: Keys, origins, names, limits.
    """
    front, traffic = Front(replicas, settings), Traffic()

    async def health(request: Request) -> Response:
        running = len(replicas.stats.active)
        status = "draining" if traffic.draining else "ok" if running else "no replica"
        return answer({"status": status, "replicas": running}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        front.keys.check(request)
        texts = {report.replica: report.metrics for report in await replicas.reports()}
        return Response(gather(front.metrics(), texts), media_type=CONTENT_TYPE)

    async def stats(request: Request) -> Response:
        front.keys.check(request)
        return answer({"replicas": {report.replica: report.numbers for report in await replicas.reports()}})

    own = [Route("/health", health), Route("/metrics", metrics), Route("/lineate/stats", stats)]
    gate = Middleware(
        Gate, traffic=traffic, metrics=front, hosts=settings.hosts, most=settings.limits.requests
    )  # fmt: skip
    cors = Middleware(
        CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=list(EXPOSED),
    )  # fmt: skip
    app = Starlette(
        routes=[*own, *(Route(path, front) for path in ROUTES)],
        middleware=[*([cors] if settings.cors else []), gate],
        exception_handlers={ApiError: answer_api_error},
    )
    app.state.traffic, app.state.service = traffic, front
    return app
