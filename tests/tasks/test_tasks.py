"""lineate.tasks: labels against a naive reading of every row, streams, errors, the command."""

import json
from dataclasses import replace

import pytest
import torch

from lineate.tasks import runner
from lineate.tasks.memory import POWER
from lineate.tasks.model import ModelOptions, label, make_config, parse_rule
from lineate.tasks.registry import TASKS
from lineate.tasks.report import percent
from lineate.tasks.runner import Cell, TrainOptions, learning_rate, logits_asked, plan_cells, sizes_at, train_cell
from lineate.tasks.task import NOTHING, TaskSizes
from lineate.tasks.tracking import GROUPS

SIZES = {
    "recall": TaskSizes(64, 8, 64),
    "overwriting": TaskSizes(80, 6, 32, writes=3),
    "needle": TaskSizes(31, 3, 32),
    "copying": TaskSizes(20, vocab=9),
    "selective-copying": TaskSizes(33, 7, 12),
    "induction": TaskSizes(17, vocab=8),
    "erasing": TaskSizes(60, keys=4, values=3),
    "adding": TaskSizes(60, keys=3, values=4),
    "parity": TaskSizes(23),
    "counting": TaskSizes(23, modulus=5),
    "arithmetic": TaskSizes(23, modulus=5),
    "s3": TaskSizes(21),
    "s4": TaskSizes(21),
    "a5": TaskSizes(21),
    "s5": TaskSizes(21),
}


def rows_of(name, sizes=None, rows=40, seed=3):
    ids, targets = TASKS[name].batch(rows, sizes or SIZES[name], seed=seed, step=7)
    return zip(ids.tolist(), targets.tolist(), strict=True)


def dictionary(row, writes):
    """Return what a dictionary holds after the pairs at the start of a row."""
    return {row[2 * n]: row[2 * n + 1] for n in range(writes)}


@pytest.mark.parametrize("name", TASKS)
def test_shapes_ranges_and_number_of_questions(name):
    task, sizes = TASKS[name], SIZES[name]
    ids, targets = task.batch(50, sizes, seed=0, step=0)
    assert ids.shape == targets.shape == (50, sizes.length)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < task.tokens(sizes)
    asked = targets != NOTHING
    assert asked.sum(1).tolist() == [task.asked(sizes)] * 50
    assert targets[asked].min() >= 0 and targets[asked].max() < task.tokens(sizes)


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_depends_on_seed_step_and_stream_alone(name):
    task, sizes = TASKS[name], SIZES[name]

    def ids(**changed):
        return task.batch(16, sizes, **({"seed": 1, "step": 2, "stream": "train"} | changed))[0]

    torch.manual_seed(0)
    first = ids()
    torch.manual_seed(1)
    assert torch.equal(first, ids())
    for other in ({"seed": 2}, {"step": 3}, {"stream": "test"}, {"seed": 2, "step": 1}):
        assert not torch.equal(first, ids(**other)), other


@pytest.mark.parametrize("noise", [False, True])
def test_recall_asks_every_key_once_for_its_value(noise):
    sizes = replace(SIZES["recall"], noise=noise)
    for row, targets in rows_of("recall", sizes):
        pairs = dictionary(row, 8)
        assert len(pairs) == len(set(pairs.values())) == 8
        assert all(1 <= key < 32 for key in pairs) and all(32 <= value < 64 for value in pairs.values())
        places = [i for i, target in enumerate(targets) if target != NOTHING]
        assert min(places) >= 16 and all(place % 2 == 0 for place in places)
        assert {row[i]: targets[i] for i in places} == pairs and len(places) == 8
        if not noise:
            assert all(row[i] == 0 for i in range(16, 64) if i not in places)


def test_recall_places_queries_by_the_power_law():
    sizes = TaskSizes(64, 1, 64)
    _, targets = TASKS["recall"].batch(20000, sizes, seed=0, step=0)
    places = (targets != NOTHING).float().mean(0)[2::2]
    expected = torch.arange(1, 32).float() ** (POWER - 1)
    torch.testing.assert_close(places, expected / expected.sum(), atol=0.012, rtol=0)


def test_overwriting_asks_for_the_latest_value():
    earlier = 0
    for row, targets in rows_of("overwriting"):
        keys = row[0:36:2]
        assert sorted(keys.count(key) for key in set(keys)) == [3] * 6
        latest = dictionary(row, 18)  # later entries replace earlier ones
        asked = {row[i]: target for i, target in enumerate(targets) if target != NOTHING}
        assert asked == latest
        earlier += sum(row[2 * keys.index(key) + 1] == value for key, value in latest.items())
    assert earlier < 40 * 6 / 4  # the first value is rarely the latest


def test_needle_asks_for_a_pair_that_is_there():
    for row, targets in rows_of("needle"):
        assert targets[:-1] == [NOTHING] * 30
        assert row[:-1].count(row[-1]) == 1
        assert row[row.index(row[-1]) + 1] == targets[-1] >= 16
        assert sum(token >= 8 for token in row[:-1]) == 6  # three pairs; the rest is noise


def test_copying_selective_copying_and_induction():
    for row, targets in rows_of("copying"):
        assert row[10] == 0 and row[11:] == row[:9] and 0 not in row[:10]
        assert targets == [NOTHING] * 10 + row[:10]
    for row, targets in rows_of("selective-copying"):
        assert row[-7:] == [1] * 7
        assert targets == [NOTHING] * 26 + [token for token in row[:-7] if token]
    for row, targets in rows_of("induction"):
        assert row[-1] == 0 and row.count(0) == 2
        assert targets == [NOTHING] * 16 + [row[row.index(0) + 1]]


@pytest.mark.parametrize(("name", "modulus"), [("parity", 2), ("counting", 5)])
def test_sums_so_far(name, modulus):
    for row, targets in rows_of(name):
        assert row[0] == modulus and targets[0] == NOTHING
        assert targets[1:] == [sum(row[1 : n + 1]) % modulus for n in range(1, 23)]


@pytest.mark.parametrize("length", [23, 22, 2])
def test_expressions_so_far(length):
    for row, targets in rows_of("arithmetic", TaskSizes(length, modulus=5)):
        assert row[0] == 8 and all(token < 5 for token in row[1::2]) and all(5 <= token < 8 for token in row[2::2])
        written = "".join("+-*"[token - 5] if token >= 5 else str(token) for token in row[1:])
        assert targets[0::2] == [NOTHING] * len(row[0::2])
        assert targets[1::2] == [eval(written[: 2 * n + 1]) % 5 for n in range(length // 2)]


@pytest.mark.parametrize(("name", "size"), [("s3", 6), ("s4", 24), ("a5", 60), ("s5", 120)])
def test_permutations_so_far(name, size):
    elements = GROUPS[name].elements
    assert len(set(elements)) == size
    for row, targets in rows_of(name):
        assert row[0] == size and targets[0] == NOTHING
        now = tuple(range(GROUPS[name].items))
        for token, target in zip(row[1:], targets[1:], strict=True):
            now = tuple(elements[token][x] for x in now)
            assert elements[target] == now


def test_erasing_asks_what_is_left():
    """4 keys, 3 values: 0 .. 11 set, 12 .. 15 clear, 16 .. 19 ask."""
    cleared = missing = 0
    for row, targets in rows_of("erasing"):
        held = {}
        for change, question, target in zip(row[0::2], row[1::2], targets[1::2], strict=True):
            if change < 12:
                held[change // 3] = change % 3 + 1
            else:
                assert change < 16
                held.pop(change - 12, None)
            cleared += change >= 12
            assert question >= 16 and target == held.get(question - 16, 0)
            missing += target == 0
        assert targets[0::2] == [NOTHING] * 30
    assert 0.28 < cleared / 1200 < 0.38 and missing / 1200 > 0.3


def test_adding_asks_for_every_value_since_the_key_was_cleared():
    """3 keys, 4 values: 0 .. 11 add, 12 .. 14 clear, 15 .. 26 ask."""
    yes = several = 0
    for row, targets in rows_of("adding"):
        held = {key: set() for key in range(3)}
        for change, question, target in zip(row[0::2], row[1::2], targets[1::2], strict=True):
            if change < 12:
                held[change // 4].add(change % 4)
            else:
                assert change < 15
                held[change - 12].clear()
            key, value = divmod(question - 15, 4)
            assert target == (value in held[key])
            yes += target
            several += len(held[key]) > 1
        assert targets[0::2] == [NOTHING] * 30
    assert 0.3 < yes / 1200 < 0.5  # rows begin with empty keys
    assert several > 400


def test_logits_are_those_of_the_places_asked():
    task, sizes = TASKS["recall"], SIZES["recall"]
    from lineate.models import HybridLM

    model = HybridLM(make_config("gdn", 64, ModelOptions(32)))
    ids, targets = task.batch(3, sizes, seed=0, step=0)
    logits, asked = logits_asked(model, ids, targets, 8)
    kept = targets != NOTHING
    torch.testing.assert_close(logits.flatten(0, 1), model(ids).logits[kept], atol=1e-5, rtol=1e-5)
    assert torch.equal(asked.flatten(), targets[kept])


def test_rules_and_patterns():
    assert parse_rule("gdn") == ("G", 1.0, None)
    assert parse_rule("deltanet-2") == ("D", 2.0, None)
    assert parse_rule("deltanet", 2.0) == ("D", 2.0, None)
    assert parse_rule("GGGA-2") == ("GGGA", 2.0, None)
    assert parse_rule("least-squares") == ("E", 1.0, None) and parse_rule("ttt-mlp") == ("P", 1.0, None)
    assert parse_rule("gdn2") == ("J", 1.0, None) and parse_rule("gdn2-2") == ("J", 2.0, None)
    assert parse_rule("product") == ("U", 1.0, None) and parse_rule("product-2") == ("U", 2.0, None)
    assert parse_rule("product3") == ("U", 1.0, 3) and parse_rule("product12-2") == ("U", 2.0, 12)
    assert label("product3-2") == "DeltaProduct, n = 3, beta in (0, 2)"
    assert label("product1") == "DeltaProduct, n = 1"
    assert make_config("titans", 50, ModelOptions(64, 2, 2)).memory.head_dim == 32
    config = make_config("kda-2", 50, ModelOptions(64, 3, 2, conv=0))
    assert (config.letters, config.linear.beta_scale, config.linear.key_dim, config.linear.conv_size) == (
        "KKK",
        2,
        32,
        0,
    )
    linear = make_config("product3-2", 50, ModelOptions(64, 2, 2, decay=False)).linear
    assert (linear.writes, linear.forgets, linear.beta_scale) == (3, False, 2)
    linear = make_config("product", 50, ModelOptions(64, 2, 2)).linear
    assert (linear.writes, linear.forgets, linear.beta_scale) == (2, True, 1)


def test_schedule_and_curriculum():
    train = TrainOptions(steps=900, lr=1.0, curriculum=4)
    assert learning_rate(0, train) == pytest.approx(1 / 45)
    assert learning_rate(45, train) == pytest.approx(1.0)
    assert learning_rate(899, train) == pytest.approx(0.02, abs=1e-3)
    task, sizes = TASKS["recall"], SIZES["recall"]
    found = [(s.pairs, s.length) for s in (sizes_at(task, sizes, n, train) for n in (0, 149, 150, 299, 300, 899))]
    assert found == [(2, 16), (2, 16), (4, 32), (4, 32), (8, 64), (8, 64)]


@pytest.mark.cover
def test_the_same_seed_gives_the_same_run_and_time_ends_it(monkeypatch):
    train = TrainOptions(steps=6, rows=4, eval_every=3, test_rows=8, test_lengths=(64, 128))
    cell = Cell("recall", "deltanet", 1, SIZES["recall"], ModelOptions(32), train)
    first, again = (train_cell(cell, lambda line: None) for _ in range(2))
    assert first.history == again.history and first.by_length == again.by_length
    assert (first.steps, first.stopped, list(first.by_length)) == (6, "steps", [64, 128])
    other = train_cell(replace(cell, seed=2), lambda line: None)
    assert other.history != first.history
    late = train_cell(replace(cell, train=replace(train, minutes=1e-9)), lambda line: None)
    assert (late.steps, late.stopped) == (3, "minutes")
    good = train_cell(replace(cell, train=replace(train, stop_at=-1, eval_every=1)), lambda line: None)
    assert (good.steps, good.stopped) == (2, "accuracy")
    accurate = {64: 0.9, 256: 0.4}
    monkeypatch.setattr(runner, "measure", lambda model, task, sizes, seed, train: accurate[sizes.length])
    short = replace(train, stop_at=0.5, stop_lengths=(256,), eval_every=1, test_lengths=())
    assert train_cell(replace(cell, train=short), lambda line: None).stopped == "steps"
    accurate[256] = 0.5
    long = train_cell(replace(cell, train=short), lambda line: None)
    assert (long.steps, long.stopped, long.accuracy) == (2, "accuracy", 0.9)


def run(*arguments):
    from typer.testing import CliRunner

    from lineate.cli import build_app

    return CliRunner().invoke(build_app(), ["tasks", *map(str, arguments)])


SMALL = ("--vocab", 64, "--pairs", 8, "--length", 64, "--width", 32, "--layers", 1, "--rows", 4, "--test-rows", 8)


@pytest.mark.cover
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_command_writes_table_figure_and_numbers(tmp_path, jobs):
    done = run("recall", "--rules", "linear,deltanet-2,A", *SMALL, "--steps", 10, "--eval-every", 5, "--seeds", 2,
               "--jobs", jobs, "--device", "cpu", "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "DeltaNet" in done.output and "recall.png" in done.output.replace("\n", "")
    content = json.loads((tmp_path / "recall.json").read_text(), parse_constant=pytest.fail)  # NaN, Infinity
    assert [(x["rule"], x["seed"]) for x in content["cells"]] == [
        (rule, seed) for rule in ("linear", "deltanet-2", "A") for seed in (0, 1)
    ]
    assert content["sizes"]["pairs"] == 8 and content["cells"][0]["steps"] == 10
    assert list(content["cells"][0]["by_pairs"]) == ["1", "2", "4", "8", "16"]
    assert list(content["cells"][0]["by_length"]) == ["64", "128", "256"]
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "recall.md").read_text().count("\n| ") == 5


@pytest.mark.cover
def test_results_are_replaced_only_when_asked(tmp_path):
    words = ("recall", "--rules", "linear", *SMALL, "--steps", 1, "--seeds", 1, "--device", "cpu", "--out", tmp_path)
    (tmp_path / "recall.json").write_text("mine")
    (tmp_path / "parity.json").write_text("mine too")
    done = run(*words)
    assert done.exit_code == 2
    assert "--out must have no results of recall" in done.stderr and "choose another, or --overwrite" in done.stderr
    assert (tmp_path / "recall.json").read_text() == "mine"
    done = run(*words, "--overwrite")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "recall.json").read_text())["task"] == "recall"
    assert (tmp_path / "parity.json").read_text() == "mine too"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recal"], "did you mean 'recall'?"),
        (["recall", "--rules", "deltanett"], "did you mean 'deltanet'?"),
        (["recall", "--rules", "linear-2"], "has no beta"),
        (["recall", "--rules", "rwkv7-2"], "has no beta"),
        (["recall", "--rules", "product0"], "rules must be of"),
        (["recall", "--rules", "gdn3"], "rules must be of"),
        (["s3", "--keys", 3], "--keys has no meaning for s3"),
        (["erasing", "--length", 31], "length must be even"),
        (["arithmetic", "--modulus", 1], "modulus must be at least 2"),
        (["recall", "--rules", "gdn,gdn"], "rules must differ"),
        (["recall", "--rules", "GGGA"], "layers must be at least 4"),
        (["recall", "--pairs", 200], "200 pairs need a length of at least 800, got 512"),
        (["recall", "--pairs", 0], "pairs must be at least 1"),
        (["recall", "--vocab", 100], "vocab must be above 129"),
        (["recall", "--modulus", 3], "--modulus has no meaning for recall"),
        (["parity", "--test-pairs", "3"], "test_pairs has no meaning for parity"),
        (["recall", "--test-lengths", "64"], "need a length of at least 256, got 64"),
        (["recall", "--test-lengths", "1,x"], "--test-lengths must be whole numbers"),
        (["recall", "--width", 30], "width must be a multiple of 4 * heads"),
        (["recall", "--lr", 0], "lr must be above 0"),
        (["recall", "--curriculum", 3], "curriculum must be a power of two"),
        (["recall", "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
        (["recall", "--beta-scale", 3], "beta_scale must be above 0 and at most 2"),
        (["recall", "--init", 0], "init must be above 0 and at most 1"),
        (["recall", "--device", "gpu"], "--device must be auto, cpu or cuda"),
        (["copying", "--length", 7], "length must be even"),
        (["parity", "--out", "/dev/null/x"], "--out must be a folder that can be written"),
    ],
)
def test_wrong_flags_say_so_before_any_work(tmp_path, arguments, message):
    where = [] if "--out" in arguments else ["--out", tmp_path / "new"]
    done = run(*arguments, *where)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "new").exists()


@pytest.mark.cover
def test_bfloat16_trains():
    train = TrainOptions(steps=3, rows=4, eval_every=3, test_rows=8, dtype="bfloat16")
    for rule in ("linear", "gla", "deltanet", "gdn", "kda", "softmax"):
        result = train_cell(Cell("parity", rule, 0, TaskSizes(12), ModelOptions(32), train), lambda line: None)
        assert 0 < result.history[0][1] < 10, rule


def test_percent_rounds_down_what_is_between_tenths_only():
    assert [percent(n / 1000) for n in range(1001)] == [f"{n / 10:.1f}" for n in range(1001)]
    assert percent(0.99959) == "99.9"


def test_plan_has_every_rule_with_every_seed():
    cells = plan_cells(TASKS["parity"], ["gdn", "kda"], TaskSizes(12), ModelOptions(32), TrainOptions(), 3)
    assert [(c.rule, c.seed) for c in cells] == [(r, s) for r in ("gdn", "kda") for s in range(3)]


@pytest.mark.parametrize("name", TASKS)
def test_defaults_and_their_stages_can_be_made(name):
    task = TASKS[name]
    task.check(task.default)
    for factor in (2, 4, 8):
        sizes = task.shrink(task.default, factor)
        assert task.obstacle(sizes) is None
        ids, targets = task.batch(2, sizes, seed=0, step=0)
        assert int((targets != NOTHING).sum()) == 2 * task.asked(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_batches_are_made_on_the_gpu_and_train_there(name):
    ids, targets = TASKS[name].batch(4, SIZES[name], seed=0, step=0, device="cuda")
    assert ids.is_cuda and targets.is_cuda
    train = TrainOptions(steps=4, rows=4, eval_every=2, test_rows=8, device="cuda", dtype="tf32")
    for rule in ("linear", "gla", "deltanet", "gdn", "kda", "softmax"):
        result = train_cell(Cell(name, rule, 0, SIZES[name], ModelOptions(64), train), lambda line: None)
        assert 0 < result.history[-1][1] < 20, rule


@pytest.mark.slow
def test_overwriting_separates_adding_from_correcting():
    sizes = TaskSizes(40, 4, 64, writes=3)
    train = TrainOptions(steps=400, rows=64, lr=5e-3, test_rows=256)
    accuracy = {
        rule: train_cell(
            Cell("overwriting", rule, 0, sizes, ModelOptions(64, init=0.125), train), lambda line: None
        ).accuracy
        for rule in ("deltanet", "linear")
    }
    assert accuracy["deltanet"] > 0.95
    assert accuracy["linear"] < 0.6


@pytest.mark.slow
def test_parity_needs_negative_eigenvalues():
    train = TrainOptions(steps=600, rows=32, eval_every=100, test_rows=256)
    accuracy = {
        rule: train_cell(Cell("parity", rule, 0, TaskSizes(40), ModelOptions(64, 1), train), lambda line: None).accuracy
        for rule in ("deltanet", "deltanet-2")
    }
    assert accuracy["deltanet-2"] > 0.95
    assert accuracy["deltanet"] < 0.6


@pytest.mark.slow
def test_s3_needs_two_writes_a_token():
    """Without a convolution and a decay, a token is n generalised reflections of the memory."""
    train = TrainOptions(steps=500, rows=32, lr=3e-3, test_rows=128, test_lengths=(64,))
    model = ModelOptions(64, 1, 4, conv=0, decay=False)
    accuracy = {
        rule: train_cell(Cell("s3", rule, 0, TaskSizes(32), model, train), lambda line: None).by_length[64]
        for rule in ("product2-2", "product1-2")
    }
    assert accuracy["product2-2"] > 0.95
    assert accuracy["product1-2"] < 0.6


@pytest.mark.slow
def test_adding_favours_separate_rates():
    train = TrainOptions(steps=400, rows=32, lr=1e-2, eval_every=400, test_rows=128)
    model = ModelOptions(32, 1, 1, conv=0, init=0.18)
    wrong = {
        rule: 1 - train_cell(Cell("adding", rule, 0, TASKS["adding"].default, model, train), lambda line: None).accuracy
        for rule in ("deltanet", "gdn2")
    }
    assert wrong["gdn2"] < 0.01 < 0.02 < wrong["deltanet"]
