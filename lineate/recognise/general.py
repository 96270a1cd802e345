"""The general row, S_new = Diag(a) S - d (S^T p)^T + k v^T: its two vectors, measured and written as formulas.

    a [k] the decay; d [k] the direction of the erase; p [k] what S is read with before it is decayed

The probe of lineate's row reads the decayed S, so it is p / a. A measured rule gives d p^T alone; the formulas decide
which factor belongs to d and which to p.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lineate.recognise.evaluation import Token
from lineate.recognise.measuring import (
    TOLERANCE,
    Coefficients,
    Formula,
    Response,
    bracketed,
    difference,
    formula_of,
    known_formulas,
    pattern,
    written_as,
)


@dataclass(frozen=True)
class Erase:
    """The erase of a rule, for each token."""

    decays: tuple[Tensor, ...]
    """a [k]."""
    directions: tuple[Tensor, ...]
    """d [k]."""
    probes: tuple[Tensor, ...]
    """p / a [k]: what the decayed S is read with."""
    direction: str | None
    """d as a formula of the gates and of the vectors; None if it is not a simple one."""
    probe: str | None
    """p / a as a formula."""
    strength: str | None
    """Where d and p are multiples of k by channels: the formula of d_x p_x / (a_x k_x^2)."""
    before_decay: bool
    """Whether p is a simpler formula than p / a: S is read before its decay."""
    reader: str | None
    """The vector of the expression that is in the probe; None if there is none."""
    one_vector: bool
    """Whether that vector is in d too, and S is read with it alone."""

    def along(self, keys: Iterable[Tensor]) -> bool:
        """Whether each token's direction is a multiple of its key."""
        return all(_parallel(x, y) for x, y in zip(self.directions, keys, strict=True))


def erase_of(responses: Sequence[Response], found: Sequence[Coefficients], decay: str | None) -> Erase | None:
    """Return the erase of a rule; None if it is not d p^T for all value channels, or the decay is not in (0, 1].

    Args:
        responses: the measured responses.
        found: their coefficients.
        decay: the decay as a formula of the gates.
    """
    decays = [c.decay for c in found]
    if pattern(decays) not in ("one", "number", "key"):
        return None
    if any(x.min() <= TOLERANCE or x.max() > 1 + TOLERANCE for x in decays):
        return None
    products = [c.erase[0] * torch.outer(r.token.k, r.token.k) for r, c in zip(responses, found, strict=True)]
    if any(x.abs().max() < TOLERANCE for x in products):
        return None
    if any(difference(c.erase, c.erase[:1].expand_as(c.erase)) > TOLERANCE for c in found):
        return None
    tokens, a = [r.token for r in responses], [x[:, 0] for x in decays]
    before = _factored(products, tokens, decay)
    after = _factored([x / y for x, y in zip(products, a, strict=True)], tokens, None)
    return _chosen(before, after, a)


@dataclass(frozen=True)
class _Factored:
    """The products of each token, d p^T, as two vectors with one scale, which is a factor of d."""

    directions: tuple[Tensor, ...]
    probes: tuple[Tensor, ...]
    direction: "_Vector | None"
    probe: "_Vector | None"
    scale: str | None
    divisor: str | None
    """The decay that the probe is still to be divided by; None if it is none."""

    @property
    def length(self) -> float:
        """Return the length of the formulas, without the divisor."""
        if self.direction is None or self.probe is None or self.scale is None:
            return float("inf")
        return len(self.direction.text) + len(self.probe.text) + (0 if self.scale == "1" else len(self.scale))


def _factored(products: Sequence[Tensor], tokens: Sequence[Token], divisor: str | None) -> _Factored:
    """Return the two vectors of products of rank one, with the simplest formulas that there are."""
    columns, rows = zip(*(_sides(x) for x in products), strict=True)
    direction, probe = _simplest(tokens, columns), _simplest(tokens, rows)
    d = columns if direction is None else direction.values(tokens)
    p = rows if probe is None else probe.values(tokens)
    scales = [(y @ x @ z) / (y.square().sum() * z.square().sum()) for x, y, z in zip(products, d, p, strict=True)]
    scaled = tuple(c * y for c, y in zip(scales, d, strict=True))
    scale = written_as(scales, tokens)
    if scale is None and direction is not None and probe is not None and direction.vector == probe.vector == "k":
        scale = written_as([c * token.k.square().sum() for c, token in zip(scales, tokens, strict=True)], tokens)
        direction, probe = _normalised(direction), _normalised(probe)
    return _Factored(scaled, tuple(p), direction, probe, scale, divisor)


def _normalised(vector: "_Vector") -> "_Vector":
    """Return a vector with the name of the normalised key in place of the key's."""
    unit = "normalize(k)"
    return replace(vector, text=re.sub(r"\bk$", unit, vector.text), vector=unit)


def _chosen(before: _Factored, after: _Factored, decays: Sequence[Tensor]) -> Erase:
    """Return the erase with the simpler formula: that of what S is read with before its decay, or after it."""
    is_before = before.length < after.length
    chosen = before if is_before else after
    direction, probe, scale = chosen.direction, chosen.probe, chosen.scale
    divisor = chosen.divisor if is_before and chosen.divisor != "1" else None
    strength = None
    if direction is not None and probe is not None and direction.vector == probe.vector == "k":
        strength = _divided(_product(scale, direction.factor, probe.factor), divisor)
    return Erase(
        tuple(decays), chosen.directions,
        tuple(x / a if is_before else x for x, a in zip(chosen.probes, decays, strict=True)),
        None if direction is None else _product(scale, direction.text),
        None if probe is None else _divided(probe.text, divisor), strength, is_before,
        None if probe is None else probe.vector,
        direction is not None and probe is not None and direction.vector == probe.text,
    )  # fmt: skip


@dataclass(frozen=True)
class _Vector:
    """A vector over the key channels that can be written with the names of the expression."""

    text: str
    of: Callable[[Token], Tensor | None]
    """Its value for a token; None if it is no such vector."""
    vector: str | None
    """The vector that is multiplied; None if it is made of gates alone."""
    factor: str = "1"
    """What it is multiplied by."""

    def values(self, tokens: Sequence[Token]) -> tuple[Tensor, ...]:
        """Return its values."""
        return tuple(x for token in tokens if (x := self.of(token)) is not None)


def _sides(product: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and p of d p^T, for a d of length 1."""
    x, y = divmod(int(product.abs().argmax()), product.shape[1])
    d = product[:, y] / product[:, y].norm()
    return d, product[x] / d[x]


def _simplest(tokens: Sequence[Token], sides: Sequence[Tensor]) -> _Vector | None:
    """Return the simplest vector that each token's side is a multiple of; None if there is none."""
    for vector in _vectors(tokens[0]):
        pairs = ((vector.of(token), side) for token, side in zip(tokens, sides, strict=True))
        if all(x is not None and _parallel(x, side) for x, side in pairs):
            return vector
    return None


def _vectors(token: Token) -> Iterator[_Vector]:
    """Yield the vectors of an expression, then vectors of gates, then products of both, simplest first."""
    names = ["k", *(name for name, x in token.others.items() if x.shape == token.k.shape)]
    yield from (_Vector(name, partial(_named, name), name) for name in names)
    factors = [(text, partial(_factor, formula, gates)) for text, gates, formula in known_formulas(list(token.gates))]
    factors = [(text, of) for text, of in factors if of(token) is not None]
    yield from (_Vector(text, of, None) for text, of in factors)
    for text, of in factors:
        for name in names:
            yield _Vector(f"{bracketed(text)} * {name}", partial(_multiplied, of, name), name, text)


def _named(name: str, token: Token) -> Tensor:
    return token.k if name == "k" else token.others[name]


def _factor(formula: Formula, gates: Sequence[str], token: Token) -> Tensor | None:
    """Return a formula of gates if it has one number per key channel."""
    made = formula_of(formula, gates, token)
    return made if made is not None and made.shape == token.k.shape else None


def _multiplied(of: Callable[[Token], Tensor | None], name: str, token: Token) -> Tensor | None:
    factor = of(token)
    return None if factor is None else factor * _named(name, token)


def _parallel(x: Tensor, y: Tensor) -> bool:
    """Whether two vectors are multiples of one another."""
    length = x.norm() * y.norm()
    return bool(length > 0 and (x @ y).abs() > (1 - TOLERANCE) * length and _off(x, y) < TOLERANCE)


def _off(x: Tensor, y: Tensor) -> float:
    """Return the length of y without its part along x, relative to y."""
    return ((y - (x @ y) / (x @ x) * x).norm() / y.norm()).item()


def _product(*factors: str | None) -> str | None:
    """Return the formula of a product; None if one factor has none."""
    if any(x is None for x in factors):
        return None
    sign = "-" if "-1" in factors else ""
    rest = [x for x in factors if x not in (None, "1", "-1")]
    if len(rest) == 1 and not sign:
        return rest[0]
    return sign + (" * ".join(bracketed(x, products=True) for x in rest) or "1")


def _divided(formula: str | None, divisor: str | None) -> str | None:
    """Return the formula of a quotient."""
    if formula is None or divisor is None:
        return formula
    return f"{bracketed(formula, products=True)} / {bracketed(divisor)}"
