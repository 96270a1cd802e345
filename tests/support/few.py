"""Parameters of which some run in the fast suite and the others among the slow tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return parameters for all values; those that are not in `fast` are slow."""
    values = list(values)
    assert all(x in values for x in fast), "a fast value must be one of the values"
    return [x if x in fast else pytest.param(x, marks=pytest.mark.slow) for x in values]
