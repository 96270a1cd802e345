"""How a command draws tokens: by the options that were given, then the checkpoint's defaults, then its own.

    flags = SamplingFlags({"temperature": 0.7})                     # what was typed
    sampling = flags.resolve(model.sampling_defaults, OWN)

A checkpoint that names any option replaces the command's own defaults as a whole: what it does not name is neutral
(temperature 1, all tokens, no penalty), because its authors have measured that combination and no other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lineate.console.names import nearest
from lineate.generation.choice import Sampling
from lineate.models.sampling_defaults import SamplingDefaults

CHECKPOINT, NONE = "checkpoint", "none"
OWN = Sampling(temperature=0.8, top_p=0.95)
"""How `lineate generate` and `lineate chat` draw if neither their options nor the checkpoint say it."""
NAMES = tuple(SamplingDefaults.__dataclass_fields__)
"""The options of Sampling that a checkpoint may name."""


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling options of a command.

    Args:
        given: The options that were typed, by name; the value None is that of an option that was not.
        seed: Seed of the draws.
        source: "checkpoint": the checkpoint's defaults are used for the others; "none": they are not.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    source: str = CHECKPOINT

    def __post_init__(self) -> None:
        if self.source not in (CHECKPOINT, NONE):
            hint = nearest(self.source, (CHECKPOINT, NONE))
            raise ValueError(f"--sampling-defaults must be {CHECKPOINT} or {NONE}, got {self.source!r}{hint}")
        object.__setattr__(self, "given", {name: x for name, x in self.given.items() if x is not None})
        Sampling(**self.given, seed=self.seed)  # a wrong one is noticed before a model is loaded

    @property
    def reads(self) -> bool:
        """Whether the checkpoint's defaults are read at all."""
        return self.source == CHECKPOINT

    def resolve(self, defaults: SamplingDefaults | None, own: Sampling) -> Sampling:
        """Return how tokens are drawn.

        Args:
            defaults: Those of the checkpoint; None: it has none.
            own: The command's own defaults.
        """
        named = defaults.named() if defaults is not None and self.reads else {}
        return replace(Sampling() if named else own, **{**named, **self.given}, seed=self.seed)

    def used(self, defaults: SamplingDefaults | None) -> str:
        """Return the checkpoint's defaults that are used, in words; "" if there are none.

        Args:
            defaults: Those of the checkpoint; None: it has none.
        """
        named = defaults.named() if defaults is not None and self.reads else {}
        return str(SamplingDefaults(**{name: x for name, x in named.items() if name not in self.given}))


def shown_options(sampling: Sampling) -> dict[str, Any]:
    """Return the options that a checkpoint may name, as they are in force.

    Args:
        sampling: How tokens are drawn.
    """
    return {name: getattr(sampling, name) for name in NAMES}
