"""Figures in the documentation are those in bench/results."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from lineate.tasks.model import label

ROOT = Path(__file__).parents[2]


def _rows(page, columns, section=""):
    """Cells of the tables with so many columns, by their first one; section: only between there and the next bold."""
    text = (ROOT / page).read_text()
    text = text[text.index(section) :]
    if section:
        text = text[: text.find("\n**", 2)]
    lines = [line.strip()[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [x.strip() for x in cells[1:]] for cells in lines if len(cells) == columns}


def _results(file):
    return json.loads((ROOT / "bench/results" / file).read_text())


def test_training():
    shown, compared = _rows("docs/training.md", 10), _rows("docs/training.md", 4)
    text = {row["pattern"]: row for row in _results("train-text-h200.json")["results"]}
    steps = {row["pattern"]: row for row in _results("train-h200.json")["results"]}
    assert set(text) == set(steps) == set(shown) - {"P", "---"}
    for name, row in text.items():
        _, parameters, *losses, gib, rate, ms, gib_64k = shown[name]
        wanted = [f"{row['validation_loss'][at]:.{n}f}".lstrip("0") for at, n in (("100", 2), ("200", 2), ("400", 3))]
        assert (name, losses, gib) == (name, wanted, f"{row['most_gpu_mib'] / 1024:.1f}")
        step = steps[name]
        assert (parameters, rate) == (f"{step['parameters'] / 1e6:.1f}M", f"{step['tokens_per_s'] / 1e3:.0f}k"), name
        assert (ms, gib_64k) == (f"{step['ms']:.0f}", f"{step['peak_mib'] / 1024:.1f}"), name
    both = {(row["pattern"], row["side"]): row for row in _results("train-fla-h200.json")["results"]}
    for name, (theirs, ours, ratio) in compared.items():
        if name not in ("P", "---"):
            fla, own = both[name, "fla"], both[name, "lineate"]
            assert [theirs, ours] == [f"{x['ms']:.0f} ms, {x['peak_mib'] / 1024:.1f} GiB" for x in (fla, own)], name
            assert ratio == f"{fla['ms'] / own['ms']:.2f}x", name


@pytest.mark.parametrize("file", ["recall", "recall-kda", "parity", "overwriting", "overwriting-kda"])
def test_tasks(file):
    task = file.removesuffix("-kda")
    page = (ROOT / "docs/tasks.md").read_text()
    section = page[page.index(f"**{task.capitalize()}**", page.index("## Measured")) :].partition("![")[0]
    by_rule: dict[str, list] = {}
    for cell in _results(f"tasks/{file}.json")["cells"]:
        by_rule.setdefault(cell["rule"], []).append(cell)
    for rule, cells in by_rule.items():
        line = next(line for line in section.splitlines() if line.startswith(f"| {label(rule)} |"))
        shown = [part.strip() for part in line.strip("| ").split("|")][1:]
        steps = " ".join(f"{cell['steps']}{'!' * (cell['stopped'] == 'minutes')}" for cell in cells)
        accuracy = [cell["accuracy"] for cell in cells]
        at = [[cell["by_length"][n] for cell in cells] for n in cells[0]["by_length"]]
        if task == "parity":
            assert shown == [*map(_each, at), steps]
        else:
            assert shown == [_percent(fmean(accuracy)), _each(accuracy), steps, *(_percent(fmean(x)) for x in at)]


def _each(parts):
    return " ".join(map(_percent, parts))


def _percent(part):
    """Rounded down."""
    return f"{math.floor(1000 * part) / 10:.1f}"


def test_memories():
    results = _results("memory-cpu-neoverse-n1.json")
    recall, exact = _rows("docs/memory.md", 7), _rows("docs/memory.md", 4)
    for row in results["recall"]:
        channels, size, *shares = recall[row["name"]]
        assert (channels, size) == (str(row["d"]), str(row["bytes"]))
        shown = dict(zip((64, 256, 512, 1024), shares, strict=True))
        assert shown.get(row["n"], f"{row['accuracy']:.2f}") == f"{row['accuracy']:.2f}", row
    for row in results["exact"]:
        if str(row["n"]) in exact:
            *least_squares, delta = map(float, exact[str(row["n"])])  # float64, float32
            found = least_squares[row["dtype"] == "float32"]
            assert (found, delta) == (pytest.approx(row["least squares"], rel=0.04), round(row["DeltaNet"], 2))
    cost = _rows("docs/memory.md", 5, "![Time and state")
    base = next(row["forward_us"] for row in results["cost"] if row["name"] == "Gated DeltaNet")
    faster = {row["name"]: f"{row['speed_up']:.0f}" for row in results["forms"]}
    for row in results["cost"]:
        forward, step, speed_up, kib = cost[row["name"]]
        assert forward.split()[0] == f"{row['forward_us'] / base:.1f}", row
        assert (step, kib) == (f"{row['step_us'] / row['forward_us']:.0f}", f"{row['memory'] / 1024:.0f}"), row
        assert speed_up == faster.get(row["name"], "-"), row


def test_memories_on_a_gpu():
    """The figures of each of our layers are those of one run."""
    shown = _rows("docs/memory.md", 5, "**On a GPU**")
    rows = [row for run in _results("memory-gpu-h200.json")["runs"] for row in run["results"]]
    for name in ("TTT-Linear", "TTT-MLP", "Titans", "Titans MLP", "LaCT", "least squares"):
        forward, train, _, mib = shown[name]
        found = [row for row in rows if row["name"] == ("LaCT 4 heads" if name == "LaCT" else name)]
        assert any(
            abs(float(forward) - row["forward_ms"]) < 0.051  # stored with one digit more
            and abs(float(train) - row["train_ms"]) < (0.051 if "." in train else 0.5)
            and mib == f"{row.get('train_mib', 0):.0f}"
            for row in found
        ), name
