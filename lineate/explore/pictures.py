"""The pictures by name: each computes numbers that JSON can represent, and draws only from these numbers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Numbers = dict[str, Any]
"""The numbers of a picture, as JSON values; units in the keys or under "units"."""

MODULES = {
    "state": "state",
    "attention": "attention",
    "growth": "growth",
    "forgetting": "forgetting",
    "recall": "load",
    "cost": "lengths",
}
"""The pictures, in the order of the gallery, and the module of lineate.explore whose PICTURE each is."""


@dataclass(frozen=True)
class PictureOptions:
    """The user's options; None is the picture's default. A picture reads the fields that it names in `uses`."""

    model: str | None = None
    """A checkpoint's folder or a preset's name; None is the built-in small model, or no model."""
    pattern: str | None = None
    """Mixers of a preset's layers."""
    text: str | None = None
    """The text that the model reads, not a file name."""
    layer: int | None = None
    """The layer, counted from 0."""
    head: int | None = None
    """The head, counted from 0."""
    tokens: int | None = None
    """How many tokens are read or written."""
    seed: int = 0
    quick: bool = False
    """Whether sizes are smaller and numbers rougher."""


@dataclass(frozen=True)
class Picture:
    """One picture."""

    name: str
    title: str
    help: str
    """A description in one line."""
    compute: Callable[[PictureOptions], Numbers]
    """Returns the numbers; raises ValueError or OSError before any work if the options cannot be served."""
    draw: Callable[[Numbers], "Figure"]
    """Draws the numbers; it is called inside figures.styled()."""
    uses: tuple[str, ...] = ()
    """The fields of PictureOptions that compute reads; any other that is given is an error."""


def find(name: str) -> Picture:
    """Return a picture by its name."""
    if name not in MODULES:
        from lineate.console.names import nearest

        hint = nearest(name, (*MODULES, "all", "list"))
        raise ValueError(f"picture must be {', '.join(MODULES)}, all or list, got {name!r}{hint}")
    found: Picture = import_module(f"lineate.explore.{MODULES[name]}").PICTURE
    return found


def rounded(x: "Tensor") -> Any:
    """Return nested lists of numbers with 4 digits, so that JSON files stay small."""
    return [rounded(row) for row in x] if x.dim() > 1 else [float(f"{number:.4g}") for number in x.tolist()]


def save_numbers(name: str, numbers: Numbers, path: Path) -> None:
    """Write the numbers with the picture's name; infinity and NaN, which JSON lacks, become null."""
    strict = json.loads(json.dumps({"picture": name, **numbers}), parse_constant=lambda number: None)
    path.write_text(json.dumps(strict) + "\n", encoding="utf-8")


def load_numbers(name: str, path: Path) -> Numbers:
    """Return the numbers that save_numbers wrote for this picture."""
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--from must be a picture's JSON file, got '{path}' ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--from must be a picture's JSON file, got '{path}', which is not JSON ({error})") from None
    got = numbers.get("picture") if isinstance(numbers, dict) else None
    if got != name:
        what = f"the numbers of the picture {got!r}" if got in MODULES else "no picture's numbers"
        raise ValueError(f"--from must hold the numbers of {name}, got '{path}', which has {what}")
    return {key: value for key, value in numbers.items() if key != "picture"}
