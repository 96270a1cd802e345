"""Every example runs, prints what it should, and stays short."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
DIFFERENCES = {  # how many differences an example prints, and how large they may be
    "attention_sink": (0, 0.0),
    "build_a_hybrid": (0, 0.0),
    "compare_logits": (1, 1e-5),
    "gated_delta_net": (2, 1e-5),
    "output_gate": (2, 1e-5),
    "own_rule": (0, 0.0),  # tests/project/test_own_rule.py
    "speed_up_transformers": (2, 1e-4),
}


def run(name, capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_all_are_tested_and_short():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert [path.stem for path in paths] == list(DIFFERENCES)
    for path in paths:
        assert len(path.read_text().splitlines()) <= 60, path


@pytest.mark.parametrize("name", [
    "gated_delta_net", "output_gate", "compare_logits",
    pytest.param("speed_up_transformers", marks=pytest.mark.slow),
])  # fmt: skip
def test_differences_are_rounding(name, capsys, monkeypatch):
    if name in ("compare_logits", "speed_up_transformers"):
        pytest.importorskip("transformers")
    out = run(name, capsys, monkeypatch)
    count, largest = DIFFERENCES[name]
    errors = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", out)]
    assert len(errors) == count and max(errors) < largest, out
    if name == "compare_logits":
        theirs, ours = re.findall(r"greedy, \w+ +(\[.*\])", out)
        assert theirs == ours
    if name == "speed_up_transformers":
        from lineate.integrations.transformers import is_enabled

        assert not is_enabled()


@pytest.mark.cover
def test_a_head_without_a_gate_needs_a_sink(capsys, monkeypatch):
    """The test checks the figures in the example's docstring that support its point."""
    out = run("attention_sink", capsys, monkeypatch)
    rows = re.findall(r"^(yes|no) +(yes|no) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    error, first, gate = ({row[:2]: float(row[i]) for row in rows} for i in (2, 3, 4))  # by (gated, empty first token)
    assert error["no", "yes"] < 0.02 and first["no", "yes"] > 0.95
    assert error["no", "no"] > 0.3
    assert error["yes", "no"] < 0.05 and first["yes", "no"] < 0.2 and gate["yes", "no"] < 0.2
    assert error["yes", "yes"] < 0.02 and first["yes", "yes"] > 0.9


@pytest.mark.slow
def test_the_hybrid_learns(tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    out = run("build_a_hybrid", capsys, monkeypatch, tmp_path / "text")
    first, *_, last = [float(x) for x in re.findall(r"last 15 (\d+\.\d+)", out)]
    assert last < 0.5 * first, out
    assert "sample: 'Every op " in out
