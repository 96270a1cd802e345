"""The registry of mixers: one row a mixer, with everything that the rest of the library needs to know about it.

A row is declared next to the class of its mixer and registered once. `models`, `planning`, `tasks`, `explore`,
`inspect`, the command line and the benchmarks read rows; none of them names a letter. A user's own mixer is registered
in the same way:

    lineate.layers.register(MixerKind(letter="Z", name="my_rule", label="My rule", config=MyConfig, make=make_mine))
    HybridConfig(..., pattern="ZZZA", mixers={"my_rule": MyConfig(...)})
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from inspect import signature
from pathlib import Path
from string import ascii_uppercase
from threading import Lock
from typing import Any, Protocol

from torch import nn

from lineate.call import Inputs
from lineate.layers.by_hand import ByHand
from lineate.layers.configs import AttentionConfig, LatentConfig, LinearConfig, MambaConfig, MemoryConfig, RwkvConfig
from lineate.layers.step.spec import StepSpec
from lineate.parallel.tensor.shards import Shard
from lineate.rule import RULES

ORDER = "LRDGKSTPNCEAM"
"""The order of these mixers in lists, whichever file is imported first; others follow in order of registration."""

SECTIONS: dict[str, type[Any]] = {
    "linear": LinearConfig,
    "mamba": MambaConfig,
    "rwkv": RwkvConfig,
    "memory": MemoryConfig,
    "attention": AttentionConfig,
    "latent": LatentConfig,
}
"""The fields of HybridConfig that hold the sizes of mixers, and their types."""


class ModelSizes(Protocol):
    """The sizes of the model that a mixer may read; HybridConfig has all of them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def zero_centred_norm(self) -> bool: ...


@dataclass(frozen=True)
class Sizes:
    """Model sizes for making one mixer without a model."""

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
    """How figures draw a mixer: a colour that is safe for colour-blind readers, and marker and line for grey prints.

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
            With `first` it has a third parameter, the Carried of the call.
        by_hand: how its rule reads steps that are written by hand; None: as its row of lineate.rule says, if that is
            one of the rules of one key.
        cache: what grows by a token: "keys and values", "latent", or "" where nothing does.
        look: how it is drawn.
        short_label: its name for people where there is little room; None is `label`.
        rule: the row of lineate.rule.RULES that it runs, such as "gated_delta_rule"; None: that of its name, if any.
        shard: how its heads are shared out among the ranks of tensor parallelism; None: they cannot be.
        step: what one token of it computes, for the decoding steps in C and in few launches; None: they call it.
        first: config -> that of a model's first layer with this letter, if the first hands something on to the others:
            their forward then has a fourth parameter, a lineate.layers.state.Carried; None: all layers are equal.
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
    trace: Callable[..., Inputs] | None = None
    by_hand: ByHand | None = None
    cache: str = ""
    look: Look = Look()
    short_label: str | None = None
    rule: str | None = None
    shard: Shard | None = None
    step: StepSpec | None = None
    first: Callable[[Any], Any] | None = None

    @property
    def word(self) -> str:
        """Its name on the command line."""
        return self.short or self.name

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
        """The module whose import registers it, as far as its functions reveal that."""
        makers = (getattr(self.make, "__self__", self.make), self.config)  # a class method belongs to its class
        found = [getattr(x, "__module__", None) or "" for x in makers]
        module = next((x for x in found if x and not _is_ours(x)), _REGISTERED_BY.get(self.name, found[0]))
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        return Path(file).stem if module == "__main__" and file else module

    @property
    def built_in(self) -> bool:
        """Whether importing lineate registers it."""
        return _is_ours(self.module)


_KINDS: dict[str, MixerKind] = {}
_REGISTERED_BY: dict[str, str] = {}
"""For each row's name, the module that called register; the row's functions may all be lineate's own."""
_LOCK = Lock()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("lineate", "functools")


def register(kind: MixerKind) -> MixerKind:
    """Add a row, and return it; raise if another row has its letter or name.

    Args:
        kind: the row. One that is the same but for its functions replaces it, as when a notebook's cell runs again.
    """
    if not isinstance(kind, MixerKind):
        raise TypeError(f"kind must be a MixerKind, got {kind!r}; give register(MixerKind(letter=..., name=..., ...))")
    _check_names(kind)
    _check_config(kind)
    _check_parts(kind)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    with _LOCK:
        _check_free(kind)
        _KINDS[kind.letter] = kind
        _REGISTERED_BY[kind.name] = caller
    return kind


@contextmanager
def temporary_rows(users: bool = True) -> Iterator[None]:
    """Undo, at the end of a `with` block, all that was registered inside of it, as tests of a mixer need.

    Other threads must not register meanwhile: their rows would be removed too.

    Args:
        users: whether the rows that users registered before are there inside of the block, too.
    """
    global _KINDS, _REGISTERED_BY
    with _LOCK:
        before = _KINDS.copy(), _REGISTERED_BY.copy()
        if not users:
            _KINDS = {letter: kind for letter, kind in _KINDS.items() if kind.built_in}
    try:
        yield
    finally:
        with _LOCK:
            _KINDS, _REGISTERED_BY = before


def _check_free(kind: MixerKind) -> None:
    """Raise if another row has the letter or a name of this one."""
    for other in _KINDS.values():
        if _origin(other) == _origin(kind):
            continue
        for field, given, taken in (
            ("letter", kind.letter, other.letter),
            ("name", kind.name, other.name),
            ("short" if kind.short else "name", kind.word, other.word),
        ):
            if given == taken:
                remedy = f"free are {_free()}" if field == "letter" else f"choose another {field}"
                raise ValueError(f"{field} must be free, got {given!r}, which is {other.label}'s; {remedy}")


def _check_names(kind: MixerKind) -> None:
    """Raise unless the letter, the names and the rule can be used."""
    if not isinstance(kind.letter, str) or len(kind.letter) != 1 or kind.letter not in ascii_uppercase:
        raise ValueError(f"letter must be one letter of A .. Z, got {kind.letter!r}; free are {_free()}")
    for field in ("name", "label", "short", "short_label"):
        given, optional = getattr(kind, field), field.startswith("short")
        if (not isinstance(given, str) or not given) and not (optional and given is None):
            example = 'such as "my_rule"' + ", or None" * optional
            raise ValueError(f"{field} must be text that is not empty, got {given!r}; give one {example}")
    rules = [rule.name for rule in RULES]
    if kind.rule is not None and kind.rule not in rules:
        raise ValueError(
            f"rule must be one of {', '.join(rules)}, got {kind.rule!r}; leave it out if it is none of them"
        )


def _check_config(kind: MixerKind) -> None:
    """Raise unless config is a frozen dataclass and, if the row has a section, the class of that section."""
    config, section = kind.config, kind.section
    if not isinstance(config, type) or not is_dataclass(config):
        raise TypeError(f"config must be a dataclass (the class, not a value of it), got {config!r}")
    if not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"config must be a frozen dataclass, got {config!r}; declare it with @dataclass(frozen=True)")
    if section is not None and section not in SECTIONS:
        raise ValueError(
            f"section must be one of {', '.join(SECTIONS)}, got {section!r}; leave it out for sizes of your own, which "
            "stand in HybridConfig.mixers"
        )
    if section is not None and config is not SECTIONS[section]:
        raise TypeError(
            f"config must be {SECTIONS[section].__name__} with section={section!r}, got {config.__name__}; leave "
            "section out for sizes of your own"
        )


def _check_parts(kind: MixerKind) -> None:
    """Raise unless functions can be called and the other parts have their types."""
    traced = "mixer, x" if kind.first is None else "mixer, x, carried"
    for field, arguments in (("make", "model, config"), ("kept_bytes", "config, half"), ("trace", traced)):
        given = getattr(kind, field)
        if not _takes(given, len(arguments.split(","))) and (given is not None or field == "make"):
            raise TypeError(f"{field} must be a function of ({arguments}), got {given!r}")
    if kind.operations is not None and not isinstance(kind.operations, Operations):
        raise TypeError(f"operations must be Operations(...) or None, got {kind.operations!r}; None: they are measured")
    if kind.shard is not None and not isinstance(kind.shard, Shard):
        raise TypeError(f"shard must be Shard(divide, cuts) or None, got {kind.shard!r}; None: it has no ranks")
    if kind.step is not None and not isinstance(kind.step, StepSpec):
        raise TypeError(f"step must be StepSpec(...) or None, got {kind.step!r}; None: decoding calls the mixer")
    if kind.by_hand is not None and not isinstance(kind.by_hand, ByHand):
        raise TypeError(f"by_hand must be ByHand(inputs, note) or None, got {kind.by_hand!r}; None: it is not shown")
    if kind.first is not None and not callable(kind.first):
        raise TypeError(f"first must be a function of (config) or None, got {kind.first!r}; None: all layers are equal")
    if not isinstance(kind.look, Look):
        raise TypeError(f'look must be a Look, got {kind.look!r}; give Look(color="#0072B2")')
    if not isinstance(kind.cache, str):
        raise TypeError(f'cache must be text, got {kind.cache!r}; give "keys and values", "latent" or ""')


def _takes(function: Any, count: int) -> bool:
    """Whether a function can be called with this number of arguments, judging by its signature."""
    try:
        signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # written in C, and without a signature
        return callable(function)
    return True


def check_made(kind: MixerKind, mixer: Any) -> nn.Module:
    """Return the result of a row's `make` if it is a mixer; otherwise raise.

    Args:
        kind: the row.
        mixer: a module that has a state_spec.
    """
    where = f"make of {kind.label} ({kind.letter})"
    if not isinstance(mixer, nn.Module):
        raise TypeError(f"{where} must return a torch.nn.Module, got {mixer!r}; return the mixer")
    specs = getattr(mixer, "state_spec", None)
    if not isinstance(specs, tuple) or not all(hasattr(spec, "name") and hasattr(spec, "shape") for spec in specs):
        raise TypeError(
            f"{where} must return a module whose state_spec is a tuple of TensorSpec, got {specs!r} of "
            f"{type(mixer).__name__}; declare one for each tensor of its state, () if it has none"
        )
    return mixer


def _free() -> str:
    return ", ".join(letter for letter in ascii_uppercase if letter not in _KINDS)


def _origin(kind: MixerKind) -> tuple[str, ...]:
    return kind.letter, kind.name, kind.module


def kinds() -> tuple[MixerKind, ...]:
    """Return all rows: the library's own, then others in the order of their registration."""
    rows = _KINDS.copy()  # another thread may be registering
    own = [rows[letter] for letter in ORDER if letter in rows]
    return (*own, *(kind for letter, kind in rows.items() if letter not in ORDER))


def step_of(mixer: nn.Module) -> StepSpec | None:
    """Return what a step of this mixer computes; None if no row describes it."""
    return next((row.step for row in _KINDS.values() if row.step is not None and row.step.describes(mixer)), None)


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
