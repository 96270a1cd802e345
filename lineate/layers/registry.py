"""One row a mixer: everything that the rest of the library needs to know about it.

A row is declared beside its class and registered once. `models`, `planning`, `tasks`, `explore`, `inspect`, the command
line and the benchmarks read rows; none of them names a letter. A user's own mixer goes through the same door:

    lineate.layers.register(MixerKind(letter="Z", name="my_rule", label="My rule", config=MyConfig, make=make_mine))
    HybridConfig(..., pattern="ZZZA", mixers={"my_rule": MyConfig(...)})
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from lineate.call import Inputs

ORDER = "LRDGKTPNCEAM"
"""How lists name the library's own mixers, whichever file is imported first; all others follow."""


class ModelSizes(Protocol):
    """What a mixer may ask of the model around it; HybridConfig has all of it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def zero_centred_norm(self) -> bool: ...


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that is not there, to make one mixer by itself."""

    hidden_size: int
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False


@dataclass(frozen=True)
class Operations:
    """Operations of a mixer; a multiply-add counts as 2. `convention`: "executed" or "least" (planning/compute.py).

    Args:
        projections: (model, config) -> those of products with weights, per token.
        mixing: (config, tokens, convention) -> those between tokens, of a whole sequence.
        mixing_one: (config, context, convention) -> those of one token after `context` others.
    """

    projections: Callable[[ModelSizes, Any], int]
    mixing: Callable[[Any, int, str], int]
    mixing_one: Callable[[Any, int, str], int]


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn; safe for colour-blind readers, and told apart in grey by marker and line.

    Args:
        color: of lines and markers.
        marker: a marker of matplotlib.
        line: a line style of matplotlib.
    """

    color: str = "#666666"
    marker: str = "."
    line: Any = "-"


@dataclass(frozen=True)
class MixerKind:
    """One row of the table of mixers.

    Args:
        letter: its letter in a pattern.
        name: its identifier in files and results, such as "gated_delta_rule".
        label: its name for people, such as "Gated DeltaNet".
        config: the frozen dataclass of its configuration.
        make: (model, config) -> the mixer.
        section: the field of HybridConfig that holds its configuration; None: `mixers`, under its name.
        short: its name on the command line, such as "gdn"; None is `name`.
        operations: counts its operations; None: they are measured.
        kept_bytes: (config, half) -> bytes a token that the backward keeps; half: bfloat16 autocast. None: measured.
        trace: (mixer, its input `1 t hidden`) -> what the rule is called with, for pictures; None: it is not pictured.
        cache: what grows by a token: "keys and values", "latent", or "" where nothing does.
        look: how it is drawn.
        short_label: its name for people where there is little room; None is `label`.
    """

    letter: str
    name: str
    label: str
    config: type[Any]
    make: Callable[[ModelSizes, Any], nn.Module]
    section: str | None = None
    short: str | None = None
    operations: Operations | None = None
    kept_bytes: Callable[[Any, bool], float] | None = None
    trace: Callable[[Any, Tensor], Inputs] | None = None
    cache: str = ""
    look: Look = Look()
    short_label: str | None = None

    @property
    def grows(self) -> bool:
        """Whether its state grows with the sequence, as that of softmax attention does."""
        return bool(self.cache)

    @property
    def learns(self) -> bool:
        """Whether its memory is a model that learns while it reads."""
        return self.section == "memory"

    @property
    def module(self) -> str:
        """The module whose import registers it, as far as its functions tell."""
        makers = (getattr(self.make, "__self__", self.make), self.config)  # a class method is its class's
        found = [getattr(x, "__module__", None) or "" for x in makers]
        module = next((x for x in found if x and x.partition(".")[0] not in ("lineate", "functools")), found[0])
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        return Path(file).stem if module == "__main__" and file else module

    @property
    def built_in(self) -> bool:
        """Whether importing lineate registers it."""
        return self.module.partition(".")[0] in ("lineate", "functools")


_KINDS: dict[str, MixerKind] = {}


def register(kind: MixerKind) -> MixerKind:
    """Add a row, and return it; a letter or name that another row has is refused.

    Args:
        kind: the row. One that is the same but for its functions replaces it, as when a notebook's cell runs again.
    """
    if len(kind.letter) != 1 or not kind.letter.isalpha():
        raise ValueError(f"letter must be one letter, got {kind.letter!r}")
    if not is_dataclass(kind.config):
        raise TypeError(f"config must be a dataclass, got {kind.config!r}")
    for other in _KINDS.values():
        for field in ("letter", "name"):
            if getattr(other, field) == getattr(kind, field) and _origin(other) != _origin(kind):
                raise ValueError(f"{field} must be free, got {getattr(kind, field)!r}, which is {other.label}'s")
    _KINDS[kind.letter] = kind
    return kind


def _origin(kind: MixerKind) -> tuple[str, ...]:
    return kind.letter, kind.name, kind.module


def kinds() -> tuple[MixerKind, ...]:
    """Return all rows: the library's own, then others in the order of their registration."""
    own = [_KINDS[letter] for letter in ORDER if letter in _KINDS]
    return (*own, *(kind for letter, kind in _KINDS.items() if letter not in ORDER))


def letters() -> str:
    """Return the letters of all rows, in their order."""
    return "".join(kind.letter for kind in kinds())


def kind_of(letter: str) -> MixerKind:
    """Return the row of a letter.

    Args:
        letter: one letter of a pattern.
    """
    if letter not in _KINDS:
        raise ValueError(f"letter must be one of {', '.join(letters())}, got {letter!r}; register it first")
    return _KINDS[letter]
