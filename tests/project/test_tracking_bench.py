"""bench/tasks/tracking.py plans what it says, judges by its threshold, and the documentation has its figures."""

import json
import math
from pathlib import Path

import pytest

from bench.tasks import tracking
from lineate.tasks.model import label, make_config
from lineate.tasks.registry import TASKS
from lineate.tasks.report import percent
from lineate.tasks.runner import CellResult

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "bench/results/tasks/tracking-cpu-xeon"


def planned(name, seeds=3):
    rules = tracking.COMPARISONS[name].rules.split(",")
    return rules, tracking.plan(name, rules, seeds, 64, tracking.TRAIN)


@pytest.mark.parametrize("name", tracking.COMPARISONS)
def test_every_rule_has_a_run_a_seed_and_seeds_come_last(name):
    rules, cells = planned(name)
    assert [(cell.rule, cell.seed) for cell in cells] == [(rule, seed) for seed in range(3) for rule in rules]
    assert tracking.COMPARISONS[name].solvers <= set(rules)
    for cell in cells:
        config = make_config(cell.rule, TASKS[name].tokens(cell.sizes), cell.model)
        assert (config.n_layers, config.linear.heads, config.linear.key_dim) == (1, 4, tracking.HEAD)
        assert config.linear.conv_size == 0 and not config.linear.forgets
        assert cell.train.stop_lengths == (4 * cell.sizes.length,) == cell.train.test_lengths[-1:]


def test_runs_share_the_budget():
    _, cells = planned("s3")
    for jobs, waves in ((12, 1), (9, 1), (8, 2), (1, 9)):
        limits = {cell.train.minutes for cell in tracking.limited(cells, jobs, 150.0)}
        assert limits == {(150 - tracking.STARTING) / waves / 60}
    assert tracking.limited(cells, 12, 0.0)[0].train.minutes == math.inf


def test_a_verdict_counts_seeds_at_four_times_the_length():
    runs = [
        CellResult(rule, seed, accuracy=1.0, by_length={32: 1.0, 64: 1.0, 128: accuracy})
        for rule, each in (("product2-2", (0.99, 0.98)), ("product1-2", (0.3, 0.9899)), ("kda", (1.0, 1.0)))
        for seed, accuracy in enumerate(each)
    ]
    assert tracking.verdict("s3", runs) == [
        "s3 at 4 times the length, product2-2 (can): 1 of 2 seeds",
        "s3 at 4 times the length, product1-2 (cannot): 0 of 2 seeds",
        "s3 at 4 times the length, kda: 2 of 2 seeds",
    ]


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_the_document_has_the_measured_figures(path):
    """A row has the label, and the accuracy of each seed at 32, 64 and 128."""
    found = json.loads(path.read_text())
    text = (ROOT / "docs" / "tasks.md").read_text()
    for rule in {cell["rule"] for cell in found["cells"]}:
        runs = [cell for cell in found["cells"] if cell["rule"] == rule]
        runs.sort(key=lambda cell: cell["seed"])
        columns = [" ".join(percent(cell["by_length"][n]) for cell in runs) for n in ("32", "64", "128")]
        steps = " ".join(str(cell["steps"]) for cell in runs)
        assert f"| {label(rule)} | {' | '.join(columns)} | {steps} |" in text, rule


def test_s3_needs_two_writes_with_negative_eigenvalues():
    """The claim of docs/tasks.md, from the file of the runs: three seeds of each rule."""
    cells = json.loads((MEASURED / "s3.json").read_text())["cells"]
    solved = {(x["rule"], x["seed"]) for x in cells if x["by_length"]["128"] >= tracking.SOLVED}
    assert solved == {("product2-2", seed) for seed in range(3)}
    assert {(x["rule"], x["seed"]) for x in cells} == {
        (rule, seed) for rule in tracking.COMPARISONS["s3"].rules.split(",") for seed in range(3)
    }
