"""lineate tasks --quick, the estimate before the start, the time left, and every letter of a pattern."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch

from lineate.layers import kinds
from lineate.tasks.model import ModelOptions, kinds_by_word, label, make_config
from lineate.tasks.progress import TRUST, Progress, RunCost, duration, estimate, lanes, whole
from lineate.tasks.quick import QUICK
from lineate.tasks.registry import TASKS
from lineate.tasks.runner import Cell, TrainOptions, run_cells, train_cell
from lineate.tasks.task import TaskSizes
from tests.support.marks import slow_but

TRAIN = TrainOptions(steps=4, rows=2, eval_every=2, test_rows=4, test_pairs=(2,), test_lengths=(16, 32))
CELLS = [Cell("recall", rule, seed, TaskSizes(16, 2, 32), ModelOptions(16), TRAIN) for rule in "LG" for seed in (0, 1)]


def run(*arguments):
    from typer.testing import CliRunner

    from lineate.cli import build_app

    return CliRunner().invoke(build_app(), ["tasks", *map(str, arguments)])


@pytest.mark.parametrize("rule", [*(kind.letter for kind in kinds()), "KM", "mla", "KKKM"])
def test_every_letter_of_a_pattern_trains(rule):
    result = train_cell(
        Cell("recall", rule, 0, TaskSizes(16, 2, 32), ModelOptions(32, 4, 2), replace(TRAIN, steps=2)),
        lambda line: None,
    )
    assert 0 < result.history[-1][1] < 10 and result.steps == 2


def test_every_letter_has_a_name():
    assert set(kinds_by_word().values()) == set(kinds())
    words = {word: label(word) for word in kinds_by_word()}
    assert len(set(words.values())) == len(words) and words["kda"] == "Kimi Delta"
    assert label("mla") == "latent attention" and label("KM") == "KM"
    latent = make_config("KM", 32, ModelOptions(64, 2, 2)).latent
    assert latent is not None
    assert (latent.heads, latent.rank, latent.nope_dim + latent.rope_dim, latent.value_dim) == (2, 32, 32, 32)
    assert latent.rope_theta is not None  # a task may ask for an order, and only the rotation tells M about positions


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "1 s"), (89, "89 s"), (91, "2 min"), (3540, "59 min"), (3600, "1 h"), (7800, "2 h 10 min"),
        (137000, "38 h"), (40000, "11 h 10 min"), (200000, "2 days 8 h"), (864000, "10 days"),
    ],
)  # fmt: skip
def test_times_for_people(seconds, said):
    assert duration(seconds) == said


def test_the_estimate_counts_steps_tests_and_minutes(monkeypatch):
    """Every step takes 2 s and a row of a test 0.25 s; only two rows are timed."""
    from lineate.tasks import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    def step(cell, model, optimizer, number):
        now[0] += 2 * cell.train.rows / 16

    def test(model, task, sizes, seed, train):
        now[0] += 0.25 * train.test_rows
        return 0.0

    monkeypatch.setattr(progress, "train_step", step)
    monkeypatch.setattr(progress, "measure", test)
    train = TrainOptions(steps=100, rows=16, eval_every=30, test_rows=8, test_pairs=(1, 2), test_lengths=(16, 64))
    cells = [replace(CELLS[0], train=train), replace(CELLS[2], train=replace(train, minutes=1))]
    first, second = estimate(cells).values()
    assert first.seconds == pytest.approx(100 * 2 + 4 * 2 + 2 * 2 + (1 + 4) * 2)
    assert second.steps == int(60 / 2.08 + 1) and second.last == first.last
    assert now[0] == 2 * (2 * 0.25 + 2 * 0.25)  # two steps and a test of a few rows each, because the steps are slow
    assert whole({cells[0]: first, cells[1]: second}, 2) == first.seconds


@pytest.mark.cover
def test_estimating_leaves_the_runs_as_they_are():
    before = train_cell(CELLS[2], lambda line: None).history
    costs = estimate(CELLS)
    assert list(costs) == CELLS and all(cost.seconds > 0 for cost in costs.values())
    assert costs[CELLS[0]] == costs[CELLS[1]] != costs[CELLS[2]]
    assert train_cell(CELLS[2], lambda line: None).history == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_runs_side_by_side():
    assert lanes(CELLS, 1) == 1
    assert 1 <= lanes(CELLS, 3) <= 3
    assert lanes([replace(CELLS[0], train=replace(TRAIN, device="cuda"))] * 4, 4) == 1


class Clock:
    """A clock that advances only when told."""

    now = 0.0

    def __call__(self):
        return self.now


def watched(terminal, lanes=1):
    from rich.console import Console

    clock, out = Clock(), StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    costs = dict.fromkeys(CELLS, RunCost(step=10.0, last=20.0, steps=4))  # 60 s each
    return Progress(costs, lanes, console, clock), clock, out


def test_the_time_left_follows_what_the_runs_take():
    progress, clock, out = watched(False)
    with progress:
        assert progress.left() == pytest.approx(240)
        clock.now = 60.0
        for steps in (1, 2, 3):  # 30 s of work took 60
            progress.step(CELLS[0], steps)
        assert progress.left() == pytest.approx(210 * (60 + TRUST) / (30 + TRUST))
        progress.say("a line")
        progress.finish(CELLS[0])  # learnt early, so its fourth step is not expected
        assert progress.left() == pytest.approx(180 * (60 + TRUST) / (50 + TRUST))
        progress.step(CELLS[0], 3)  # a late message from a process changes nothing
        assert progress.left() == pytest.approx(180 * (60 + TRUST) / (50 + TRUST))
        for cell in CELLS[1:]:
            progress.step(cell, 4)
            progress.finish(cell)
        assert progress.left() == 0
    assert out.getvalue() == "a line; 6 min left\n"
    assert watched(False, lanes=2)[0].left() == pytest.approx(120)


def test_a_terminal_has_a_bar():
    progress, _, out = watched(True)
    with progress:
        progress.step(CELLS[0], 2)
        progress.say("[recall L seed 0] a line")
    said = out.getvalue()
    assert "[recall L seed 0] a line\n" in said and "a line;" not in said
    assert "0%, 4 min left" in said and "8%" in said and "L, seed 0, step 2 of 4" in said


class Ear:
    """Records what it is told."""

    def __init__(self):
        self.lines, self.steps, self.finished = [], [], []

    def say(self, line):
        self.lines.append(line)

    def step(self, cell, steps):
        self.steps.append((cell, steps))

    def finish(self, cell):
        self.finished.append(cell)


@pytest.mark.cover
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_watcher_is_told_every_step_and_line(jobs):
    ear, kept = Ear(), []
    run_cells(CELLS, jobs, ear, lambda results: kept.append(len(results)))
    assert sorted(ear.steps, key=lambda x: (CELLS.index(x[0]), x[1])) == [(c, n) for c in CELLS for n in (1, 2, 3, 4)]
    assert len(ear.lines) == 8 and set(ear.finished) == set(CELLS) and kept == [1, 2, 3, 4]


def test_before_a_long_run_the_command_says_how_long_and_what_is_shorter(monkeypatch):
    from lineate.tasks import command

    small = dict.fromkeys(CELLS, RunCost(0.1, 1.0, 290))
    long = dict.fromkeys(CELLS, RunCost(10.0, 0.0, 200))
    said = list(command.outlook(long, 1, lambda: small))
    assert said[0] == "4 runs of at most 4 steps: about 2 h 13 min on this machine; --quick takes about 2 min"
    assert "--seeds, --steps and --minutes" in said[1]
    assert list(command.outlook(long, 1, dict)) == [said[0].partition(";")[0], said[1]]  # --quick cannot be
    assert list(command.outlook(small, 1, None)) == [
        "4 runs of at most 4 steps: about 2 min on this machine; less if rules learn the task early"
    ]


TINY = ("--steps", 2, "--rows", 2, "--test-rows", 4, "--device", "cpu")


@pytest.mark.cover
@pytest.mark.parametrize("name", slow_but(TASKS, list(TASKS)[::4]))
def test_every_task_is_quick_and_keeps_full_results_apart(tmp_path, name):
    (tmp_path / f"{name}.json").write_text("full results")
    done = run(name, "--quick", *TINY, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "on this machine" in done.output and "s left" in done.output
    assert QUICK[name].look in done.output and f"{name} --quick (" in done.output
    assert (tmp_path / f"{name}.json").read_text() == "full results"
    content = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert content["quick"] is True and content["train"]["steps"] == 2  # a given option counts
    assert content["model"]["width"] == QUICK[name].flags["width"]
    assert (tmp_path / f"{name}-quick.png").exists() and "--quick" in (tmp_path / f"{name}-quick.md").read_text()
    again = run(name, "--quick", *TINY, "--out", tmp_path)
    assert again.exit_code == 2 and f"no results of {name} --quick" in again.stderr


@pytest.mark.cover
def test_quick_gives_patterns_the_layers_they_need(tmp_path):
    done = run("recall", "--quick", "--rules", "KM,gdn", *TINY, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "recall-quick.json").read_text())["model"]["layers"] == 2
    done = run("recall", "--quick", "--rules", "KM", "--layers", 1, *TINY, "--out", tmp_path / "new")
    assert done.exit_code == 2 and "layers must be at least 2" in done.stderr


@pytest.mark.slow
def test_quick_recall_separates_linear_attention_from_the_delta_rules(tmp_path):
    done = run("recall", "--quick", "--rules", "linear,deltanet,gdn,kda", "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "recall-quick.json").read_text())["cells"]
    accuracy = {cell["rule"]: cell["accuracy"] for cell in cells}
    assert min(accuracy[rule] for rule in ("deltanet", "gdn", "kda")) > accuracy["linear"] + 0.15


@pytest.mark.slow
def test_quick_parity_separates_the_ranges_of_beta(tmp_path):
    done = run("parity", "--quick", "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "parity-quick.json").read_text())["cells"]
    accuracy = {cell["rule"]: cell["by_length"]["40"] for cell in cells}
    assert accuracy["deltanet-2"] > 0.9 and accuracy["deltanet"] < 0.6
