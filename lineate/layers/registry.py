"""One row a mixer: everything that the rest of the library needs to know about it.

A row is declared beside its class and registered once. `models`, `planning`, `tasks`, `explore`, `inspect`, the command
line and the benchmarks read rows; none of them names a letter. A user's own mixer goes through the same door:

    lineate.layers.register(MixerKind(letter="Z", name="my_rule", label="My rule", config=MyConfig, make=make_mine))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from lineate.call import Inputs


class ModelSizes(Protocol):
    """What a mixer may ask of the model around it; HybridConfig has all of it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def zero_centred_norm(self) -> bool: ...


@dataclass(frozen=True)
class Operations:
    """Operations of a mixer; a multiply-add counts as 2. `convention`: "executed" or "least" (planning/compute.py)."""

    projections: Callable[[ModelSizes, Any], int]
    """(model, config) -> products with weights, per token."""
    mixing: Callable[[Any, int, str], int]
    """(config, tokens, convention) -> between tokens, of a whole sequence."""
    mixing_one: Callable[[Any, int, str], int]
    """(config, context, convention) -> of one token after `context` others."""


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn; safe for colour-blind readers, and told apart in grey by marker and line."""

    color: str = "#666666"
    marker: str = "."
    line: Any = "-"
    """A line style of matplotlib."""


@dataclass(frozen=True)
class MixerKind:
    """One row of the table of mixers."""

    letter: str
    """Its letter in a pattern."""
    name: str
    """Its identifier in files and results: "gated_delta_rule"."""
    label: str
    """Its name for people: "Gated DeltaNet"."""
    config: type[Any]
    """The frozen dataclass of its configuration."""
    make: Callable[[ModelSizes, Any], nn.Module]
    """(model, config) -> the mixer."""
    section: str | None = None
    """The field of HybridConfig that holds its configuration; None: `mixers`, under its name."""
    short: str | None = None
    """Its name on the command line, such as "gdn"; None is `name`."""
    operations: Operations | None = None
    """None: they are measured."""
    kept_bytes: Callable[[Any, bool], float] | None = None
    """(config, half) -> bytes a token that the backward keeps; half: bfloat16 autocast. None: they are measured."""
    trace: Callable[[nn.Module, Tensor], Inputs] | None = None
    """(mixer, its input `1 t hidden`) -> what the rule is called with, for pictures. None: it is not pictured."""
    cache: str = ""
    """What grows by a token: "keys and values", "latent", or "" where nothing does."""
    look: Look = Look()


_KINDS: dict[str, MixerKind] = {}


def register(kind: MixerKind) -> MixerKind:
    """Add a row; a letter or name that is taken by another row is refused."""
    for other in _KINDS.values():
        for field in ("letter", "name"):
            if getattr(other, field) == getattr(kind, field) and other != kind:
                raise ValueError(f"{field} must be free, got {getattr(kind, field)!r}, which is {other.label}'s")
    _KINDS[kind.letter] = kind
    return kind


def kinds() -> tuple[MixerKind, ...]:
    """All rows, in the order of their registration."""
    return tuple(_KINDS.values())


def kind_of(letter: str) -> MixerKind:
    """The row of a letter."""
    if letter not in _KINDS:
        raise ValueError(f"letter must be one of {', '.join(_KINDS)}, got {letter!r}; register it first")
    return _KINDS[letter]
