"""The marks slow and cover say which cases the quick, the fast and the whole suite run."""

from pathlib import Path

import pytest

from tests.support import fresh

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from tests.support.marks import cover_but, slow_but

def test_plain(): pass

@pytest.mark.cover
def test_covering(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("x", slow_but("abc", "b"))
def test_one_value(x): pass

@pytest.mark.parametrize("x", cover_but("abc", "c"))
def test_quick_value(x): pass

@pytest.mark.slow(but="values")
@pytest.mark.parametrize("y", "123")
@pytest.mark.parametrize("x", "abc")
def test_values(x, y): pass

@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("z", [0, 1])
@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("x", [0, 1])
def test_pairs(x, y, z): pass

@pytest.mark.slow(but="values")
@pytest.mark.parametrize("y", cover_but("123", "3"))
@pytest.mark.parametrize("x", cover_but("abc", "b"))
def test_quick_values(x, y): pass

@pytest.mark.slow(but="values")
@pytest.mark.parametrize("x", [*slow_but("ac", "a"), pytest.param("b", marks=pytest.mark.gpu)])
def test_marked_values(x): pass
"""
ON_A_CLASS = """
import pytest

@pytest.mark.slow(but="values")
class TestAll:
    @pytest.mark.parametrize("x", "abc")
    def test(self, x): pass
"""


def collect(folder, text, *options):
    """Return the cases that pytest collects from a file as in this repository, by function, and what it prints."""
    file = folder / "test_some.py"
    file.write_text(text)
    plain = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", f"{ROOT}/pyproject.toml", "--collect-only"]
    command = [*plain, f"--confcutdir={ROOT}", *options, str(file)]
    done = fresh.run(f"import sys, pytest; sys.path.insert(0, {str(ROOT)!r}); sys.exit(pytest.main({command!r}))")
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if "::test" in line:
            name, _, case = line.split("::")[-1].partition("[")
            found.setdefault(name, set()).add(case.rstrip("]"))
    return found, done.stdout + done.stderr


@pytest.mark.cover
def test_marks(tmp_path):
    every, _ = collect(tmp_path, TESTS, "-m", "not gpu")
    assert {name: len(cases) for name, cases in every.items()} == {
        "test_plain": 1, "test_covering": 1, "test_slow": 1, "test_one_value": 3, "test_quick_value": 3,
        "test_values": 9, "test_pairs": 8, "test_quick_values": 9, "test_marked_values": 2,
    }  # fmt: skip
    fast, _ = collect(tmp_path, TESTS)
    values, pairs, quick = fast["test_values"], fast["test_pairs"], fast["test_quick_values"]
    assert len(values) == 3 and len({case[0] for case in values}) == len({case[-1] for case in values}) == 3
    assert len(pairs) < 8 and all(len({case[i] + case[j] for case in pairs}) == 4 for i, j in ((0, 2), (2, 4), (0, 4)))
    assert len(quick) == 3 and "b-3" in quick
    assert fast["test_one_value"] == {"b"} and fast["test_marked_values"] == {"a"}
    assert fast["test_quick_value"] == set("abc") and set(every) - set(fast) == {"test_slow"}
    found, _ = collect(tmp_path, TESTS, "--quick")
    assert set(fast) - set(found) == {"test_covering"}
    assert all(len(cases) == 1 and cases <= fast[name] for name, cases in found.items())
    assert found["test_quick_value"] == {"c"} and found["test_quick_values"] == {"b-3"}
    gpu, _ = collect(tmp_path, TESTS, "-m", "gpu and not slow")
    assert gpu == {"test_marked_values": {"b"}}


@pytest.mark.cover
def test_a_cover_of_a_class_is_refused(tmp_path):
    _, said = collect(tmp_path, ON_A_CLASS)
    assert "slow(but=...) belongs on the function, not on its class" in said
