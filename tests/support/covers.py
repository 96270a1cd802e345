"""Products of parameters, of which the fast suite runs a cover and `make test-all` everything."""

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest


def covering(names: str, *columns: Iterable[object], together: int = 2) -> pytest.MarkDecorator:
    """Parametrize a test by the product of the columns; cases that the cover does not need are marked slow.

    In the cover every `together` values of different columns occur together at least once: 2 covers every pair, 1
    every value.
    """
    tables = [list(column) for column in columns]
    everything = list(itertools.product(*(range(len(table)) for table in tables)))
    meetings = {
        case: {tuple((i, case[i]) for i in some) for some in itertools.combinations(range(len(tables)), together)}
        for case in everything
    }
    missing = set().union(*meetings.values())
    used: Counter[tuple[int, int]] = Counter()
    cover = set()
    while missing:
        case = max(everything, key=lambda case: (len(meetings[case] & missing), -sum(used[x] for x in enumerate(case))))
        missing -= meetings[case]
        used.update(enumerate(case))
        cover.add(case)
    cases = [_join([tables[i][j] for i, j in enumerate(case)], slow=case not in cover) for case in everything]
    return pytest.mark.parametrize(names, cases)


def _join(values: list[object], slow: bool) -> object:
    """Return one parameter set made of several, which may be pytest.param themselves, or tuples for several names."""
    marks, given, names = [], [], []
    for value in values:
        parts = list(value.values) if hasattr(value, "marks") else list(value) if type(value) is tuple else [value]
        marks += value.marks if hasattr(value, "marks") else ()
        names.append(getattr(value, "id", None) or "-".join(map(str, parts)))
        given += parts
    return pytest.param(*given, marks=[*marks, *([pytest.mark.slow] if slow else [])], id="-".join(names))
