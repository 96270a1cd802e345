"""The answers of the front itself, for all replicas: their health, numbers and metrics.

Every sample of a replica's metrics gets the label `replica`.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from lineate.serving.replicas.call import Call
from lineate.serving.replicas.routing import RoutingStats
from lineate.web.gate import Traffic
from lineate.web.metrics import CONTENT_TYPE
from lineate.web.responses import answer


class ReplicaLost(Exception):
    """The replica that was answering was lost."""


class Replicas(Protocol):
    """The part of the replicas' interface that the front needs."""

    @property
    def stats(self) -> RoutingStats: ...

    def answer(self, call: Call) -> AsyncGenerator[tuple[str, Sequence[Message]]]:
        """Yield the name of the replica that answers, and messages of its answer; raise ReplicaLost."""
        ...

    async def ask_all(self, call: Call) -> Mapping[str, bytes]:
        """Return the body of each replica's answer by its name; one that does not answer with 200 is left out."""
        ...


class FrontView(Protocol):
    """The part of the front that its own answers need."""

    @property
    def replicas(self) -> Replicas: ...

    @property
    def traffic(self) -> Traffic: ...

    def own_metrics(self) -> bytes:
        """Return the front's own counts in Prometheus' text format."""
        ...


FrontAnswer = Callable[[FrontView, Request], Awaitable[Response]]
"""Answers a request in the front, for all replicas."""


async def health(front: FrontView, request: Request) -> Response:
    """Return whether the front takes requests, and the number of its replicas."""
    running = len(front.replicas.stats.active)
    status = "draining" if front.traffic.draining else "ok" if running else "no replica"
    return answer({"status": status, "replicas": running}, 200 if status == "ok" else 503)


async def metrics(front: FrontView, request: Request) -> Response:
    """Return the metrics of the front and of all replicas."""
    texts = await _asked(front, request)
    return Response(gather(front.own_metrics(), texts), media_type=CONTENT_TYPE)


async def stats(front: FrontView, request: Request) -> Response:
    """Return the numbers of each replica."""
    texts = await _asked(front, request)
    return answer({"replicas": {replica: json.loads(text) for replica, text in texts.items()}})


async def _asked(front: FrontView, request: Request) -> Mapping[str, bytes]:
    """Return the body of each replica's answer to a request."""
    return await front.replicas.ask_all(replace(Call.of(request.scope), method="GET"))


def gather(own: bytes, texts: Mapping[str, bytes]) -> bytes:
    """Return the metrics of the front and those of all replicas, labelled, in Prometheus' text format.

    Args:
        own: The metrics of the front, which get no label.
        texts: The metrics of each replica, by its name.
    """
    registry = CollectorRegistry()
    registry.register(_Gathered(texts))
    return own + generate_latest(registry)


class _Gathered(Collector):
    """Parses the texts of the replicas, and joins samples with the same name."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    labels = {"replica": replica, **sample.labels}
                    joined.samples.append(sample._replace(labels=labels))
        return families.values()
