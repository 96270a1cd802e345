"""Products of parameters, of which the fast suite runs a cover and `make test-all` everything."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

Value = tuple[str, str, str]
"""A parameter, its field or "", and how the value is written."""


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark those cases slow that a function with the mark `cover` does not need in the fast suite.

    In the cover of `pytest.mark.cover(n)` every n values of different parameters that occur together in any fast case
    do so at least once: 1, the default, covers every value, 2 every pair. A value with fields (a dataclass, a named
    tuple) counts field by field. Cases for a GPU are left as they are.
    """
    functions: dict[str, dict[pytest.Item, set[tuple[Value, ...]]]] = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("cover")
        if mark and not any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            functions[item.nodeid.split("[")[0]][item] = _meetings(item, *mark.args)
    for cases in functions.values():
        missing = set().union(*cases.values())
        used: Counter[tuple[Value, ...]] = Counter()
        while missing:
            size = {item: (len(x & missing), -sum(used[y] for y in x)) for item, x in cases.items()}
            found = cases.pop(max(size, key=lambda item, size=size: size[item]))
            missing -= found
            used.update(found)
        for item in cases:
            item.add_marker(pytest.mark.slow)


def _meetings(item: Any, together: int = 1) -> set[tuple[Value, ...]]:
    """Return the combinations of `together` values of a case, each of another parameter."""
    values = [_values(name, value) for name, value in item.callspec.params.items()]
    chosen = itertools.combinations(values, min(together, len(values)))
    return {meeting for some in chosen for meeting in itertools.product(*some)}


def _values(name: str, value: Any) -> list[Value]:
    parts = [x.name for x in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
    return [(name, part, repr(getattr(value, part))) for part in parts] or [(name, "", repr(value))]
