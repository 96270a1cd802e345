"""Counts for Prometheus: requests by status, times, tokens, and the current numbers of the engine and its cache."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
COUNTED = frozenset({
    "steps", "prompt_tokens", "cached_tokens", "read_tokens", "reread_tokens", "new_tokens", "guesses", "right_guesses",
    "finished", "hits", "misses", "hit_tokens", "kept", "refused", "evictions", "spilled", "restored",
})  # fmt: skip
"""The monotonic numbers of the engine and the cache; all others are gauges, such as files on disk."""

Stats = Callable[[], Mapping[str, Mapping[str, Any]]]


class Metrics:
    """The counts of one server, in a registry of its own.

    Args:
        stats: Returns the current numbers of the engine ("engine") and of the cache ("cache") by name.
    """

    def __init__(self, stats: Stats) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "lineate_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.tokens = Counter(
            "lineate_tokens", "Tokens of prompts, of those found in the cache, and generated.", ("kind",),
            registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "lineate_first_token_seconds", "Seconds from a request's submission to its first token.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "lineate_request_seconds", "Seconds from a request's submission to its end.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.rate = Histogram(
            "lineate_tokens_per_second", "Tokens per second of a request after its first token.",
            buckets=RATES, registry=self.registry,
        )  # fmt: skip
        self.registry.register(_Now(stats))

    def count(self, route: str, status: int) -> None:
        """Count an answer."""
        self.requests.labels(route, str(status)).inc()

    def generated(self, usage: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Count the tokens and times of a request, from its usage objects."""
        self.tokens.labels("prompt").inc(usage["prompt_tokens"])
        self.tokens.labels("cached").inc(own["cached_tokens"])
        self.tokens.labels("generated").inc(usage["completion_tokens"])
        if usage["completion_tokens"]:
            self.first_token.observe(own["first_token_seconds"])
            self.seconds.observe(own["seconds"])
        if own["tokens_per_second"]:
            self.rate.observe(own["tokens_per_second"])

    def text(self) -> bytes:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self.registry)


class _Now(Collector):
    """A collector that reads the engine's numbers when Prometheus scrapes."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for part, numbers in self._stats().items():
            for name, value in numbers.items():
                help_text = f"{name.replace('_', ' ').capitalize()} of the {part}."
                family = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                if isinstance(value, Mapping):
                    labelled = family(f"lineate_{part}_{name}", help_text, labels=("kind",))
                    for kind, count in value.items():
                        labelled.add_metric((str(kind),), count)
                    yield labelled
                elif isinstance(value, int | float):
                    yield family(f"lineate_{part}_{name}", help_text, value=value)
