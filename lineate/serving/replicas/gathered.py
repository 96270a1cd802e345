"""The metrics of all replicas in one text: every sample gets the label `replica`."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def gather(own: bytes, texts: Mapping[str, str]) -> bytes:
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

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    labels = {"replica": replica, **sample.labels}
                    joined.samples.append(sample._replace(labels=labels))
        return families.values()
