"""The front: passes requests to replicas and returns their answers; if a replica is lost, another one answers.

A request is tried again only while its client has seen nothing of an answer (outgoing.py). A stream of which a part was
sent ends with an error event.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lineate.serving.api.foreign import EXPOSED
from lineate.serving.api.lanes import LONG_BYTES
from lineate.serving.app import Settings
from lineate.serving.replicas.call import Call
from lineate.serving.replicas.gathered import FrontAnswer, ReplicaLost, Replicas
from lineate.serving.replicas.outgoing import Outgoing
from lineate.serving.routes import ENDPOINTS, OTHER_PATHS, Endpoint, Paths, methods_of
from lineate.web.errors import ApiError, unavailable
from lineate.web.gate import Gate, Keys, Traffic
from lineate.web.intake import Intake
from lineate.web.responses import answer_api_error, read_body, unless_gone

LOG = logging.getLogger("lineate.serving")
TRIES = 3
"""Replicas that a request is given to in turn before it fails: the request may be the cause of the failures."""


class Front:
    """Passes on requests, with the front's counts; it is the FrontView of the answers in gathered.py.

    Args:
        replicas: The replicas.
        settings: Keys, origins, limits.
    """

    def __init__(self, replicas: Replicas, settings: Settings) -> None:
        self.replicas, self.limits, self.keys = replicas, settings.limits, Keys(settings.api_keys)
        self.intake, self.traffic = Intake(), Traffic()
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

    async def pass_on(self, row: Paths, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to a replica.

        Args:
            row: The row of its path.
            scope: The request, as ASGI has it.
            receive: Receives its body.
            send: Sends the answer.
        """
        self._loop = asyncio.get_running_loop()
        request = Request(scope, receive)
        if row.key:
            self.keys.check(request)
        body = await read_body(request, self.limits, self.intake) if row.has_body(request.method) else b""
        outgoing = Outgoing(send, self.limits.send_seconds)
        try:
            await unless_gone(receive, self._until_stopped(row, scope, body, outgoing))
        except TimeoutError:
            LOG.info("a client took nothing for %g s", self.limits.send_seconds)

    async def _until_stopped(self, row: Paths, scope: Scope, body: bytes, outgoing: Outgoing) -> None:
        """Pass a request on unless the front is stopped first."""
        passing = asyncio.ensure_future(self._pass(row, scope, body, outgoing))
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

    async def _pass(self, row: Paths, scope: Scope, body: bytes, outgoing: Outgoing) -> None:
        """Give a request to one replica after another until one has answered, or the client has seen a part."""
        call = await self._read(row, scope, body)
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

    async def _read(self, row: Paths, scope: Scope, body: bytes) -> Call:
        """Return the call of a request; long bodies are read in a thread, one at a time."""
        if len(body) <= LONG_BYTES:
            return Call.of(scope, body, self.limits.values, row.prompt)
        async with self._reading:
            return await asyncio.to_thread(Call.of, scope, body, self.limits.values, row.prompt)

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

    def own_metrics(self) -> bytes:
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


@dataclass(frozen=True)
class _PassOn:
    """The application of a row whose requests are passed on, with any method: a replica answers 405."""

    front: Front
    row: Paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front.pass_on(self.row, scope, receive, send)


def _own(front: Front, row: Endpoint, respond: FrontAnswer) -> Callable[[Request], Awaitable[Response]]:
    """Return the function of a row that the front answers itself."""

    async def responded(request: Request) -> Response:
        if row.key:
            front.keys.check(request)
        return await respond(front, request)

    return responded


def _routes(front: Front, endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the routes of the front: those of the rows, then all other paths."""
    routes = []
    for row in endpoints:
        if row.front is None:
            routes.append(Route(row.path, _PassOn(front, row)))
        else:
            routes.append(Route(row.path, _own(front, row, row.front), methods=[*row.methods]))
    return [*routes, *(Route(row.path, _PassOn(front, row)) for row in OTHER_PATHS)]


def make_front(replicas: Replicas, settings: Settings, endpoints: Sequence[Endpoint] = ENDPOINTS) -> Starlette:
    """Return the application of the front; `app.state.traffic` has its current requests.

    Args:
        replicas: The replicas.
        settings: Keys, origins, names, limits.
        endpoints: The rows that the replicas serve.
    """
    front = Front(replicas, settings)
    gate = Middleware(
        Gate, traffic=front.traffic, metrics=front, hosts=settings.hosts, most=settings.limits.requests
    )  # fmt: skip
    cors = Middleware(
        CORSMiddleware, allow_origins=list(settings.cors), allow_methods=methods_of(endpoints),
        allow_headers=["*"], expose_headers=list(EXPOSED),
    )  # fmt: skip
    app = Starlette(
        routes=_routes(front, endpoints),
        middleware=[*([cors] if settings.cors else []), gate],
        exception_handlers={ApiError: answer_api_error},
    )
    app.state.traffic, app.state.service = front.traffic, front
    return app
