"""bench/models/train_graph.py without a GPU: its table and its options."""

import sys
from typing import Any

import pytest

from bench.models import train_graph


def row(kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "pattern": "GA", "optimizer": "muon", "kind": kind, "ms": ms, "host_ms": ms / 2, "between_events_ms": ms,
        "busy_ms": 4.0, "parameters": 54_300_000, "why": None, **more,
    }  # fmt: skip


def test_the_table_compares_both_kinds_of_steps() -> None:
    found = train_graph.table([row("launches", 16.0), row("graph", 4.2, same_bits=True)])
    assert found == [
        ["GA", "muon", "54.3", "4.00", "16.00", "8.00", "4.00x", "4.20", "2.10", "1.05x", "4.20", "3.81x", "yes", ""]
    ]
    assert len(found[0]) == len(train_graph.COLUMNS)
    refused = train_graph.table([row("launches", 16.0), row("graph", 16.0, same_bits=False, why="no memory")])
    assert refused[0][-2:] == ["no", "no memory"]


def test_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_graph", "--help"])
    with pytest.raises(SystemExit, match="0"):
        train_graph.main()
    text = capsys.readouterr().out
    assert "--tokens" in text and "Graphs are to reach 1.1" in text
    monkeypatch.setattr(sys, "argv", ["train_graph", "--optimizer", "sgd"])
    with pytest.raises(SystemExit, match="2"):
        train_graph.main()
