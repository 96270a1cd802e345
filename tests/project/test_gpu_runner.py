"""tests/gpu.py without a GPU: groups, their order, which cases run, and how a run is reported."""

import json
from pathlib import Path
from types import SimpleNamespace

from tests import gpu
from tests.project.test_marks import collect

TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("z", "01")
@pytest.mark.parametrize("y", "012")
@pytest.mark.parametrize("x", "0123")
def test_values(x, y, z): pass

@pytest.mark.slow(but="values")
@pytest.mark.parametrize("y", "012")
@pytest.mark.parametrize("x", [pytest.param("a", marks=pytest.mark.gpu), pytest.param("b", marks=pytest.mark.gpu), "c"])
def test_both(x, y): pass

@pytest.mark.gpu
@pytest.mark.slow
def test_slow(): pass
"""


def test_pairs_take_the_cases_with_every_two_values(tmp_path):
    found, _ = collect(tmp_path, TESTS, "-m", "gpu", "--pairs")
    values = found["test_values"]
    assert 12 <= len(values) < 24
    for i, j, count in ((0, 2, 12), (0, 4, 8), (2, 4, 6)):
        assert len({case[i] + case[j] for case in values}) == count
    assert found["test_both"] == {f"{x}-{y}" for x in "ab" for y in "012"} and "test_slow" in found
    every, _ = collect(tmp_path, TESTS, "-m", "gpu")
    assert len(every["test_values"]) == 24
    cpu, _ = collect(tmp_path, TESTS, "-m", "not gpu and not slow", "--pairs")
    assert cpu == {"test_both": {"c-0", "c-1", "c-2"}}


def item(nodeid: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid)


def test_cases_of_one_function_stand_together_in_groups_of_a_few():
    conftest = SimpleNamespace(_group=lambda x: "row" if "shapes" in x.nodeid else x.nodeid)
    manager = SimpleNamespace(get_plugins=lambda: [conftest])
    known = {"config": SimpleNamespace(pluginmanager=manager), "path": Path("tests/test_a.py")}
    cases = [SimpleNamespace(nodeid=f"tests/test_a.py::{name}", **known) for name in ("test_shapes[1]", "test_one")]
    many = SimpleNamespace(nodeid="tests/test_a.py::test_many[2-3]", callspec=None, **known)
    assert [gpu.group_of(x) for x in (*cases, many)] == [
        ("test_a.py row", gpu.MOST), ("test_a.py tests/test_a.py::test_one", gpu.MOST),
        ("tests/test_a.py::test_many", gpu.FEW),
    ]  # fmt: skip


def test_the_longest_groups_come_first():
    quick, slow = ([item(f"a::{name}[{i}]") for i in range(3)] for name in ("test_quick", "test_slow"))
    ranks = [item(f"b::test_ranks[{i}]") for i in range(4)]
    tests = [(x, "quick", 2) for x in quick] + [(x, "slow", 2) for x in slow] + [(x, "b.py on_gpu", 2) for x in ranks]
    assert gpu.arrange(tests, {}) == [ranks, quick[:2], slow[:2], quick[2:], slow[2:]]
    assert gpu.arrange(tests, {"a::test_slow": 10.0, "a::test_quick": 1.0, "b::test_ranks": 0.1}) == [
        slow[:2], slow[2:], quick[:2], quick[2:], ranks,
    ]  # fmt: skip


def test_a_report_writes_the_mean_seconds_of_each_function(tmp_path, capsys):
    ended = [("t::test_a[1]", "passed", 1.0), ("t::test_a[2]", "passed", 2.0), ("t::test_b", "skipped", 0.0)]
    notes = [{"collected": [name for name, *_ in ended]}]
    for name, outcome, seconds in ended:
        notes += [{"began": name}, {"ended": name, "outcome": outcome, "seconds": seconds, "why": "no GPU"}]
    (tmp_path / "notes-0").write_text("".join(json.dumps(line) + "\n" for line in notes) + '{"cut off')
    assert gpu.report(tmp_path, 60.0, tmp_path / "seconds.json") == 0
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"t::test_a": 1.5, "t::test_b": 0.0}
    assert (
        "3 tests: 2 passed, 0 failed, 1 skipped, 0 broke off, 0 not reached, in 1.0 minutes" in capsys.readouterr().out
    )
