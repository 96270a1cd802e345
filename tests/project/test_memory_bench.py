"""bench/memories/recall.py measures what it says: equal bytes, reading without writing, errors of known size."""

from pathlib import Path

import pytest
import torch

from bench.memories.recall import BUDGET, accuracy, error, exact, pairs, recall
from bench.memories.recall_cases import CONTESTANTS

ROOT = Path(__file__).parents[2]

by_name = {who.name: who for who in CONTESTANTS}


@pytest.mark.parametrize("name", by_name)
@torch.no_grad()
def test_contestants(name):
    who = by_name[name]
    d = who.width(BUDGET)
    assert 0.9 * BUDGET < who.state_bytes(d) <= BUDGET < who.state_bytes(d + 1)
    assert len(who.settings) <= 8
    k, v = pairs(0, 2, 64, d)
    s = who.settings[-1]
    state = who.write(k, v, s, None)
    before = {key: x.clone() for key, x in state.items()}
    together, alone = who.read(state, k, s), who.read(state, k[:, 5:6], s)
    assert torch.allclose(together[:, 5:6], alone, rtol=1e-4, atol=1e-4)  # one query does not change the next
    assert all(torch.equal(x, before[key]) for key, x in state.items())
    halves = who.write(k[:, 32:], v[:, 32:], s, who.write(k[:, :32], v[:, :32], s, None))
    assert torch.allclose(who.read(halves, k, s), together, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_measures():
    v = torch.randn(2, 50, 16)
    assert accuracy(3 * v, v, torch.arange(50)) == 1 and accuracy(v.flip(1), v, torch.arange(50)) == 0
    assert error(torch.zeros_like(v), v) == 1 and error(v * torch.nan, v) == float("inf")
    # With random keys, each of n - 1 others disturbs a pair by 1/d of its energy.
    found = recall(by_name["linear attention"], {}, 64, 129, seed=5, rows=8)
    assert found["error"] == pytest.approx(2**0.5, rel=0.05)


@torch.no_grad()
def test_least_squares_is_exact_where_deltanet_is_not():
    for row in exact():
        wanted = 1e-5 if row["dtype"] == "float64" or row["n"] <= 32 else 1
        assert row["least squares"] < wanted and row["DeltaNet"] > 0.5


def test_the_document_has_figures():
    text = (ROOT / "docs" / "memory.md").read_text()
    for name in ("recall", "overwrite", "length", "cost"):
        assert f"images/memory-{name}.png" in text and (ROOT / "docs" / "images" / f"memory-{name}.png").exists()
