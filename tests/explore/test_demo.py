"""The demo's experiments show what they claim, its files hold its numbers, and the command line answers clearly."""

import dataclasses
import json
import struct
import sys
from pathlib import Path

import pytest
import torch

import lineate
from lineate import cli
from lineate.explore import findings, memories, recall
from lineate.explore.cost import CostSetting, MeasuredCost, measure_cost
from lineate.explore.memories import DEMO_RULES, FIXED_SIZE, RecallSetting
from lineate.figures import label_of

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
pytest.importorskip("matplotlib", reason="the demo draws")

SMALL = RecallSetting(key_dim=64, trials=4)
LINEAR, GATED, DELTA, GATED_DELTA, KIMI, SOFTMAX = DEMO_RULES
PLOTS = ("1_interference.png", "2_overwrite.png", "3_topics.png", "4_compromises.png", "5_cost.png")


@pytest.fixture(scope="module")
def cost() -> MeasuredCost:
    return measure_cost(CostSetting(heads=1, head_dim=16, lengths=(32, 128), rounds=1, decode_rounds=1))


@pytest.fixture(scope="module")
def overwritten() -> recall.Overwrite:
    return recall.overwrite(SMALL)


def test_pairs_are_unit_and_stay_in_their_channels() -> None:
    keys, values = memories.pairs(SMALL, 50, SMALL.generator(), slice(0, 32))
    assert keys.shape == values.shape == (4, 50, 1, 64)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(4, 50, 1))
    torch.testing.assert_close(values.norm(dim=-1), torch.ones(4, 50, 1))
    assert not keys[..., 32:].any()
    cosine = torch.einsum("bihk,bjhk->bij", keys, keys)
    assert cosine.sum(dim=(1, 2)).sub(50).div(50 * 49).mean().item() == pytest.approx(SMALL.similarity, abs=0.03)


@pytest.mark.parametrize("rule", DEMO_RULES)
def test_reading_returns_what_was_written_and_changes_nothing(rule: str) -> None:
    keys, values = memories.pairs(SMALL, 1, SMALL.generator())
    memory = memories.write(rule, None, keys, values)
    before = memory.clone() if isinstance(memory, torch.Tensor) else memory
    assert memories.recall_error(memory, keys, values, SMALL) < 1e-5
    torch.testing.assert_close(memory, before, rtol=0, atol=0)


def test_an_unknown_rule_is_named() -> None:
    keys, values = memories.pairs(SMALL, 1, SMALL.generator())
    with pytest.raises(ValueError, match=r"rule must be one of linear_attention, .*, got 'mamba'"):
        memories.write("mamba", None, keys, values)


def test_adding_interferes_and_repetition_teaches_only_the_delta_rule() -> None:
    result = recall.interference(SMALL)
    assert result.error[LINEAR][-1] > 2 * result.error[LINEAR][3] > 0
    assert result.error[DELTA][-1] < 0.6 * result.error[LINEAR][-1]
    assert result.error_by_told[LINEAR][-1] > 5 * result.error_by_told[LINEAR][0]
    assert result.error_by_told[DELTA][-1] < 0.1 * result.error_by_told[DELTA][0]
    assert max(result.error[SOFTMAX]) < 0.05
    for open_gate, without in ((GATED, LINEAR), (GATED_DELTA, DELTA), (KIMI, DELTA)):
        assert result.error[open_gate] == pytest.approx(result.error[without], abs=1e-4)


def test_only_the_delta_rule_replaces_a_value(overwritten: recall.Overwrite) -> None:
    assert overwritten.overwritten[DELTA] < 0.4 * overwritten.overwritten[LINEAR]
    assert overwritten.ghost[LINEAR] > 0.8 and overwritten.ghost[DELTA] < 0.15
    best_of_fading = min(map(max, overwritten.kept_by_decay, overwritten.overwritten_by_decay))
    assert max(overwritten.kept[DELTA], overwritten.overwritten[DELTA]) < best_of_fading
    # With the same key twice, softmax attention returns the mean of two values, an error of sqrt(1/2).
    assert overwritten.overwritten[SOFTMAX] == pytest.approx(0.5**0.5, abs=0.05)
    assert max(overwritten.kept[SOFTMAX], overwritten.old[SOFTMAX]) < 0.05


def test_the_history_ends_in_the_reported_errors(overwritten: recall.Overwrite) -> None:
    group = overwritten.group
    for rule in DEMO_RULES:
        assert len(overwritten.history[rule]) == 4 * group
        assert overwritten.history[rule][0].count(None) == 3 * group - 1
        last = [error for error in overwritten.history[rule][-1] if error is not None]
        assert len(last) == 3 * group
        for start, reported in ((0, overwritten.old), (group, overwritten.kept), (2 * group, overwritten.overwritten)):
            squares = [error**2 for error in last[start : start + group]]
            assert (sum(squares) / group) ** 0.5 == pytest.approx(reported[rule], rel=1e-4, abs=1e-6)


def test_forgetting_clears_a_full_memory() -> None:
    result = recall.topics(SMALL)
    many = result.writes.index(result.switches[-1])
    first = result.writes.index(result.switches[0])
    assert result.norm[LINEAR][many] > 2 * result.norm[LINEAR][first]
    assert result.norm[DELTA][many] == pytest.approx(SMALL.key_dim**0.5, rel=0.1)
    assert result.unseen[DELTA] > 0.8
    assert result.unseen[GATED_DELTA] < 0.7 * result.unseen[DELTA]
    assert result.new[GATED_DELTA] < result.new[DELTA] < result.new[LINEAR]


def test_only_a_gate_per_channel_clears_a_part() -> None:
    result = recall.scratch_pad(SMALL)
    assert result.facts[GATED_DELTA] == pytest.approx(1.0, abs=0.02)  # everything is lost
    assert result.facts[KIMI] == pytest.approx(result.facts[DELTA], abs=1e-4)  # as if nothing had been cleared
    assert result.facts[KIMI] < 0.6
    assert result.unseen[KIMI] == pytest.approx(result.unseen[GATED_DELTA], abs=1e-4)  # and still as clean
    assert result.unseen[KIMI] < 0.7 * result.unseen[DELTA]
    best_of_one_gate = min(map(max, result.facts_by_gate[GATED_DELTA], result.unseen_by_gate[GATED_DELTA]))
    assert max(result.facts[KIMI], result.unseen[KIMI]) < best_of_one_gate


def test_the_state_stays_and_the_cache_grows(cost: MeasuredCost) -> None:
    assert cost.lengths == (32, 128)
    for rule in FIXED_SIZE:
        assert cost.bytes[rule] == (16 * 16 * 4, 16 * 16 * 4)
    assert cost.bytes[SOFTMAX] == (32 * 2 * 16 * 2, 128 * 2 * 16 * 2)
    for times in (cost.prefill_microseconds, cost.decode_microseconds):
        assert all(time > 0 for rule in DEMO_RULES for time in times[rule])


def test_a_length_that_would_take_too_long_is_left_out() -> None:
    setting = CostSetting(heads=1, head_dim=16, lengths=(32, 64), rounds=1, decode_rounds=1, seconds=0.0)
    assert measure_cost(setting).lengths == (32,)


def test_words_follow_the_numbers(overwritten: recall.Overwrite) -> None:
    assert findings.change(0.1, 0.5) == "grows from 0.10 to 0.50"
    assert findings.change(0.5, 0.1) == "falls from 0.50 to 0.10"
    assert findings.change(0.5, 0.5) == "stays at 0.50"
    assert [findings.size(count) for count in (512, 131072, 16 * 2**20, 2**40)] == [
        "512 B", "128 KiB", "16 MiB", "1024 GiB",
    ]  # fmt: skip
    assert findings.UNUSUAL not in findings.overwrite_findings(overwritten)
    upside_down = dataclasses.replace(overwritten, overwritten=overwritten.overwritten | {DELTA: 2.0})
    assert findings.UNUSUAL in findings.overwrite_findings(upside_down)


@pytest.mark.cover
def test_demo_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lineate.explore import demo

    returned = []
    run_demo = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda *args, **options: returned.append(run_demo(*args, **options)))
    threads = torch.get_num_threads()
    outcome = typer_testing.CliRunner().invoke(
        cli.build_app(), ["demo", "--quick", "--seed", "3", "--out", str(tmp_path)]
    )
    assert outcome.exit_code == 0, outcome.output
    assert torch.get_num_threads() == threads

    saved = json.loads((tmp_path / "demo.json").read_text())
    assert saved == json.loads(json.dumps(dataclasses.asdict(returned[0])))
    assert saved["setting"]["seed"] == 3 and saved["lineate"] == lineate.__version__
    for name in PLOTS:
        picture = (tmp_path / name).read_bytes()
        width, height = struct.unpack(">II", picture[16:24])
        assert picture[1:4] == b"PNG" and width > 800 and height > 400 and len(picture) > 10_000

    text = outcome.output
    assert "\x1b" not in text, "escape codes in a log"
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    assert findings.UNUSUAL not in " ".join(text.split())
    assert "\u2026" not in text, "a cell was cut off"
    for label in map(label_of, DEMO_RULES):
        assert label in text


def run_cli(*arguments: str) -> tuple[int, str]:
    result = typer_testing.CliRunner().invoke(cli.build_app(), list(arguments))
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_version_and_help() -> None:
    assert run_cli("--version") == (0, f"lineate {lineate.__version__}")
    code, output = run_cli("demo", "--help")
    assert code == 0 and all(option in output for option in ("--out", "--seed", "--quick"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_as_out_is_explained(tmp_path: Path, inside: bool) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    code, output = run_cli("demo", "--quick", "--out", str(taken / "deeper" if inside else taken))
    assert code == 2
    assert "--out" in output and "expected a folder that can be written" in output and "choose another" in output
    assert taken.read_text() == "not a folder"


@pytest.mark.parametrize("module, extra", [("typer", "cli"), ("matplotlib", "plot")])
def test_a_missing_extra_is_one_line(module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail as if it were not installed
    monkeypatch.setattr(sys, "argv", ["lineate", "demo", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = str(stopped.value)
    install = f"run pip install 'lineate[{extra}]'"
    assert message == f"lineate: lineate demo needs {module}, which is not installed; {install}"
    assert not (tmp_path / "out").exists()
