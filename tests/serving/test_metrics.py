"""The metrics for Prometheus: a number that can fall is a gauge, one that only grows is a counter."""

from dataclasses import asdict, fields
from itertools import pairwise

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.kept import CacheStats
from lineate.serving.engine.engine import EngineStats
from lineate.web.metrics import COUNTED, Metrics
from tests.support.kept_states import linear_state

GAUGES = {
    "engine": {"waiting", "reading", "running", "waiting_answers", "pool_bytes"},
    "cache": {"states", "nodes", "bytes", "budget_bytes", "files", "file_bytes", "ignored_files"},
}


def families(metrics):
    found = text_string_to_metric_families(metrics.text().decode())
    return {family.name: family for family in found if family.name.startswith("lineate_cache")}


def test_each_number_is_declared():
    for part, stats in (("engine", EngineStats), ("cache", CacheStats)):
        assert {field.name for field in fields(stats)} - COUNTED == GAUGES[part]
    assert {field.name for stats in (EngineStats, CacheStats) for field in fields(stats)} >= COUNTED


@pytest.mark.parametrize("clear", [True, False])
def test_no_counter_falls(clear, tmp_path):
    """States are kept, written to files, given up and found; the files of a cache that is cleared are removed."""
    states = [linear_state(8) for _ in range(4)]
    cache = StateCache(2 * states[0].nbytes, 8, tmp_path, "a model")
    metrics = Metrics(lambda: {"cache": asdict(cache.stats)})
    seen = []
    for n, state in enumerate(states):
        cache.keep([n] * 8, state)
        cache.find([*[0] * 8, 1])
        seen.append(families(metrics))
    assert seen[-1]["lineate_cache_files"].samples[0].value > 0
    if clear:
        cache.clear()
    seen.append(families(metrics))
    fell = set()
    for before, after in pairwise(seen):
        assert before.keys() == after.keys()
        fell |= {name for name in after if after[name].samples[0].value < before[name].samples[0].value}
    assert {seen[-1][name].type for name in fell} <= {"gauge"}
    assert ({"lineate_cache_files", "lineate_cache_nodes"} <= fell) == clear
