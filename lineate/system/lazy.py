"""Packages whose public names are imported at their first use, so that `lineate --help` need not wait for torch."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def first_use(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the __getattr__ and the __dir__ of a package (PEP 562); its modules are found in the same way.

    Args:
        package: The package's name.
        homes: The names that each of its modules has.
    """
    places = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in places:
            value = getattr(importlib.import_module(places[name]), name)
            setattr(sys.modules[package], name, value)  # the next use does not call __getattr__
            return value
        module = f"{package}.{name}"
        if not name.startswith("_"):
            try:
                return importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names
