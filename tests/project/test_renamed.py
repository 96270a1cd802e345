"""Old names of modules still import, once with a warning, and give the same module."""

import importlib
import sys

import pytest

from lineate.system.renamed import renamed


@pytest.mark.parametrize("old", sorted(renamed()))
def test_an_old_name_gives_the_module_at_its_new_place(old):
    new = renamed()[old]
    try:
        module = importlib.import_module(new)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    sys.modules.pop(old, None)
    spec = module.__spec__
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}; the old name will be removed in 0.3.0") as caught:
        assert importlib.import_module(old) is module
    assert caught[-1].filename == __file__
    assert module.__spec__ is spec and spec.name == new
    assert importlib.import_module(old) is module  # without a second warning


def test_the_warning_names_the_line_of_an_import_statement():
    sys.modules.pop("lineate.dtypes", None)
    with pytest.warns(DeprecationWarning) as caught:
        from lineate.dtypes import parse_dtype  # noqa: F401
    assert [x.filename for x in caught] == [__file__]


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lineate.no_such_module")
