"""Which cases run where: two marks, `slow` and `cover`, and how a test with many cases spreads them.

    `make test-quick`   one case of each function that has one without a mark
    `make test`         every case that is not slow
    `make test-all`     every case

`@pytest.mark.slow` and `@pytest.mark.cover` stand on a function or on a case (`pytest.param(..., marks=...)`).
`slow_but` and `cover_but` mark the cases of one parameter. `@pytest.mark.slow(but="values")` makes all cases of a
function slow but a few in which every value of every parameter occurs; with `but="pairs"`, every two values of
different parameters. A new value is included at once. `make test-gpu` runs, of such functions, the cases in which every
two values occur (`--pairs`).
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

Value = tuple[str, str, str]
"""A parameter, its field or "", and how the value is written."""
TOGETHER = {"values": 1, "pairs": 2}


def slow_but(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return parameters for all values; those that are not in `fast` are slow."""
    return _marked(values, fast, pytest.mark.slow)


def cover_but(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters for all values; `--quick` takes one of those in `quick`."""
    return _marked(values, quick, pytest.mark.cover)


def _marked(values: Iterable[Any], plain: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    values = list(values)
    assert plain and all(x in values for x in plain), "a value without the mark must be one of the values"
    return [x if x in plain else pytest.param(x, marks=mark) for x in values]


def choose_slow(items: Iterable[pytest.Item], pairs: bool = False) -> list[pytest.Item]:
    """Take the mark `slow(but=...)` from the cases that the fast suite runs, and from those for a GPU.

    A value with fields (a dataclass, a named tuple) counts field by field. If some cases have the mark `cover`, one of
    the others stays. With `pairs`, only those cases for a GPU that together contain every two values lose the mark; the
    others are returned.
    """
    functions: dict[tuple[str, bool], dict[pytest.Item, set[tuple[Value, ...]]]] = defaultdict(dict)
    for item in items:
        marks = [mark for mark in item.iter_markers("slow") if mark.kwargs]
        if not marks:
            continue
        gpu, name = item.get_closest_marker("gpu") is not None, item.nodeid.split("[")[0]
        if gpu and not pairs:
            _make_fast(item)
        elif gpu or all(mark.kwargs for mark in item.iter_markers("slow")):
            together = TOGETHER["pairs" if gpu else marks[0].kwargs["but"]]
            functions[name, gpu][item] = _meetings(item, together)
    for cases in functions.values():
        missing = set().union(*cases.values())
        used: Counter[tuple[Value, ...]] = Counter()
        quick = {item for item in cases if not item.get_closest_marker("cover")}
        while missing:
            size = {item: (len(x & missing), -sum(used[y] for y in x)) for item, x in cases.items()}
            among = quick if not used and quick else cases
            item = max((x for x in cases if x in among), key=lambda x, size=size: size[x])
            found = cases.pop(item)
            missing -= found
            used.update(found)
            _make_fast(item)
    return [item for (_, gpu), cases in functions.items() if gpu for item in cases]


def _make_fast(item: pytest.Item) -> None:
    item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
    if item.get_closest_marker("slow"):
        raise pytest.UsageError(f"{item.nodeid}: slow(but=...) belongs on the function, not on its class or module")


def _meetings(item: Any, together: int) -> set[tuple[Value, ...]]:
    """Return the combinations of `together` values of a case, each of another parameter."""
    values = [_values(name, value) for name, value in item.callspec.params.items()]
    chosen = itertools.combinations(values, min(together, len(values)))
    return {meeting for some in chosen for meeting in itertools.product(*some)}


def _values(name: str, value: Any) -> list[Value]:
    parts = [x.name for x in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
    return [(name, part, repr(getattr(value, part))) for part in parts] or [(name, "", repr(value))]
