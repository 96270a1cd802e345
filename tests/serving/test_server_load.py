"""bench/serving/load.py presses a real server, and finds what is left behind."""

import argparse
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")

import torch

from bench.serving.load import find_leaks, measure, run, show
from lineate.models import HybridLM, preset
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.text.tokenizer import Bytes

OPTIONS = {
    "seconds": 4.0, "clients": 12, "slots": 3, "queue": 4, "cache_mb": 2, "tokens": 8, "seed": 0,
    "patience": 120.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True])
def test_nothing_is_left_of_any_client(draft, capsys):
    torch.manual_seed(0)
    model = HybridLM(preset("tiny", vocab_size=257)).eval()
    report = run(model, Bytes(), argparse.Namespace(**OPTIONS, draft=draft))
    show(report)
    print(capsys.readouterr().out)
    assert report["leaks"] == [] and report["faults"] == []
    assert report["kinds"]["malformed"]["refused"] > 0 and report["kinds"]["leaving"]["left"] > 0
    assert sum(kind["answered"] for kind in report["kinds"].values()) > 0


@pytest.mark.slow
def test_what_is_left_is_found():
    app = SimpleNamespace(state=SimpleNamespace(traffic=SimpleNamespace(active=2)))
    model = HybridLM(preset("tiny", vocab_size=257)).eval()
    cache = StateCache(2**20, 64)
    engine = Engine(model, slots=2, context=128, spacing=64, cache=cache)
    before = measure(engine, cache)
    lost = torch.zeros(2**20)
    after = {**measure(engine, cache), "running": 1, "rows": 1, "threads": before["threads"] + 3}
    found = find_leaks(before, after, engine, cache, app)
    size, words = found.pop(2).split(" ", 1)
    assert found == ["1 running", "1 rows", "3 threads", "2 requests that the server counts as active"]
    # Other tests of this process may free a few small tensors meanwhile.
    assert abs(int(size) - lost.nbytes) < 2**16 and words == "bytes of tensors"
    del lost
