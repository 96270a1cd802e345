"""The match of a rule, and the measurement of several of its responses that it is found from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lineate.recognise.measuring import Coefficients, Response, coefficients, difference, pattern, reduced, written_as
from lineate.recognise.rules import Row, Update, accumulate, oja_per_unit
from lineate.rule import LINEAR


@dataclass(frozen=True)
class Match:
    """The match of a rule."""

    row: Row | None
    relative: str | None
    """A key of RELATIVES; one of row and relative is None."""
    keys: str
    """For which keys: "any", "unit", or "normalised" if the rule divides k by its length itself."""
    difference: float
    """The largest relative difference from the row, or from the relative's formula, over all draws."""
    decay: str | None = None
    """The decay as a formula of the gates; None if it is not a simple one."""
    write: str | None = None
    """The strength of the write as a formula of the gates."""
    decay_shape: str = "one"
    """The shape of the decay: "one", "number", "key", "value" or "both"."""
    write_shape: str = "one"
    """The shape of the strength of the write, in the same words."""
    corrects: bool = True
    """Whether the memory is compared with the value before it is written."""
    gates: tuple[tuple[str, str | None, str], ...] = ()
    """Of a row that was found by its op: the name, the formula and the shape of each of its gates."""
    operands: tuple[str, ...] = ()
    """Of such a row: what k and v are, where they are not those of the expression alone."""
    case: str | None = None
    """A key of CASES: the published rule that it is, where that is a case of a row."""
    computed: "Match | None" = None
    """Of a relative: the row that computes it with other gates."""

    @property
    def divides(self) -> bool:
        """Whether the row's op can divide the output by the sum of the keys itself."""
        return self.row is not None and self.row.rule is LINEAR and self.write == "1"

    @property
    def meant_decay(self) -> str | None:
        """Return the probably intended decay: g where a penalty without 1/2 leaves 2 g - 1."""
        if self.decay is None or self.relative != "penalty-without-half":
            return self.decay
        return self.decay.removeprefix("2 * ").removesuffix(" - 1").replace("1 - 2 * ", "1 - ")


@dataclass(frozen=True)
class Measured:
    """Responses of several tokens and their coefficients, with patterns and formulas over all of them."""

    responses: tuple[Response, ...]
    found: tuple[Coefficients, ...]
    keys: str

    @cached_property
    def decays(self) -> list[Tensor]:
        """Return the decay of each token, [k, v]."""
        return [x.decay for x in self.found]

    @cached_property
    def writes(self) -> list[Tensor]:
        """Return the strength of each token's write, [k, v]."""
        return [x.write for x in self.found]

    @cached_property
    def decay(self) -> str | None:
        """Return the decay as a formula of the gates."""
        return self.formula(self.decays)

    @cached_property
    def write(self) -> str | None:
        """Return the strength of the write as a formula of the gates."""
        return self.formula(self.writes)

    @cached_property
    def decay_shape(self) -> str:
        """Return the shape of the decay."""
        return pattern(self.decays)

    @cached_property
    def write_shape(self) -> str:
        """Return the shape of the strength of the write."""
        return pattern(self.writes)

    @cached_property
    def erase_shape(self) -> str:
        """Return the shape of the strength of an erase along k: of the share of S^T k that each key channel erases."""
        return pattern([(c.erase[0, :1] / c.decay[:, 0]).mT for c in self.found])

    @cached_property
    def negative(self) -> bool:
        """Whether every write has the wrong sign."""
        return all(x.max() < 0 for x in self.writes)

    def fits(self, update: Update) -> float:
        """Return the largest difference of an update from the measured responses."""
        pairs = zip(self.responses, self.found, strict=True)
        return max(difference(update(r.S, r.token.k, r.token.v, c.decay, c.write), r.new) for r, c in pairs)

    def formula(self, arrays: Sequence[Tensor]) -> str | None:
        """Return arrays [k, v], one for each token, as a formula of the gates."""
        kind = pattern(arrays)
        return written_as([reduced(x, kind) for x in arrays], [r.token for r in self.responses])

    def match(self, row: Row | None, relative: str | None, update: Update, largest: float | None = None) -> Match:
        """Return a match with the formulas and shapes of this measurement."""
        return Match(
            row, relative, self.keys, self.fits(update) if largest is None else largest,
            self.decay, self.write, self.decay_shape, self.write_shape,
            update not in (accumulate, oja_per_unit),
        )  # fmt: skip


def measure(responses: Sequence[Response], keys: str) -> Measured | None:
    """Return the coefficients of all responses; None if one has none."""
    found = [coefficients(r) for r in responses]
    if any(x is None for x in found):
        return None
    return Measured(tuple(responses), tuple(x for x in found if x is not None), keys)
