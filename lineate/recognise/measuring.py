"""Measures the decay, the erase and the write of a rule, independently of its text.

A rule that is linear in S is S_new[x, y] = sum over x', y' of T[x, y, x', y'] S[x', y'] + C[x, y] for one token. All
rows of the table, and most rules that are nearly one of them, have

    T[x, y, x', y] = decay[x, y] (x = x') - erase[y, x, x'] k_x k_x',  0 between value channels        erase of rank one
    C[x, y]        = write[x, y] k_x v_y

so that three small arrays describe them completely. The row of the equation with a and beta has decay = a,
erase[y, x, x'] = beta a_x', write = beta.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from lineate.recognise.evaluation import Token
from lineate.recognise.functions import Misfit

TOLERANCE = 1e-9
"""The largest relative difference of two arrays that count as equal; float64 leaves about 1e-15."""

Rule = Callable[[Tensor], Tensor]
"""S [k, v] -> the new memory, for one token."""
Formula = Callable[..., Tensor]
"""(|k|^2, one gate or two) -> a decay or the strength of a write."""


@dataclass(frozen=True)
class Response:
    """The effect of one token on the memory."""

    token: Token
    transition: Tensor
    """T [k, v, k, v]."""
    offset: Tensor
    """C [k, v]: the new memory of an empty one."""
    S: Tensor
    """A random memory [k, v]."""
    new: Tensor
    """The new memory for it."""

    @property
    def linear(self) -> bool:
        """Whether the new memory is T S + C."""
        made = torch.einsum("xypq,pq->xy", self.transition, self.S) + self.offset
        return difference(made, self.new) < TOLERANCE

    def mirrored(self) -> "Response":
        """Return the same rule with key and value exchanged, and S transposed."""
        token = replace(self.token, k=self.token.v, v=self.token.k)
        turned = self.transition.permute(1, 0, 3, 2)
        return Response(token, turned, self.offset.mT, self.S.mT, self.new.mT)

    def normalised(self) -> "Response":
        """Return the same response with a key of length 1."""
        return replace(self, token=replace(self.token, k=self.token.k / self.token.k.norm()))


@dataclass(frozen=True)
class Coefficients:
    """The three arrays of a linear rule; see above."""

    decay: Tensor
    """[k, v]."""
    erase: Tensor
    """[v, k, k]."""
    write: Tensor
    """[k, v]."""


def difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference relative to the largest number of y."""
    return ((x - y).abs().max() / y.abs().max().clamp(min=1e-300)).item()


def respond(rule: Rule, token: Token, seed: torch.Generator) -> Response:
    """Return the response of a rule to one token, from its values at 0, at every unit matrix and at a random memory."""
    K, V = len(token.k), len(token.v)
    nothing = torch.zeros(K, V, dtype=torch.float64)
    S = torch.randn(K, V, generator=seed, dtype=torch.float64)
    new = rule(S)
    try:
        offset, linear = rule(nothing), True
    except Misfit:  # such as S / norm(S)
        offset, linear = nothing, False
    if not linear or difference(rule(2 * S) - new, new - offset) > TOLERANCE:  # no T describes it
        return Response(token, torch.zeros(K, V, K, V, dtype=torch.float64), offset, S, new)
    units = torch.eye(K * V, dtype=torch.float64).view(K * V, K, V)
    made = torch.stack([rule(unit) - offset for unit in units])  # (k v) k v
    return Response(token, made.view(K, V, K, V).permute(2, 3, 0, 1), offset, S, new)


def coefficients(response: Response) -> Coefficients | None:
    """Return decay, erase and write; None if the rule is not of that form."""
    k, v, T = response.token.k, response.token.v, response.transition
    K, V = len(k), len(v)
    if not response.linear:
        return None
    scale = T.abs().max()
    between = T.masked_fill(torch.eye(V, dtype=torch.bool)[None, :, None, :], 0)
    if between.abs().max() > TOLERANCE * scale:
        return None
    F = torch.einsum("xyzy->yxz", T)  # v k k
    diagonal = torch.eye(K, dtype=torch.bool)
    erase = (-F / torch.outer(k, k)).masked_fill(diagonal, 0)
    if F.masked_fill(diagonal, 0).abs().max() > TOLERANCE * scale:
        completed = _completed(erase)
        if completed is None:
            return None
        erase = completed
    else:
        erase = torch.zeros_like(erase)
    decay = torch.einsum("yxx->xy", F + erase * torch.outer(k, k))
    return Coefficients(decay, erase, response.offset / torch.outer(k, v))


def _completed(erase: Tensor) -> Tensor | None:
    """Fill the diagonals of matrices [v, k, k] of rank one; None if the other entries have another rank."""
    K = erase.shape[-1]
    filled = erase.clone()
    for x in range(K):
        y, z = (x + 1) % K, (x + 2) % K
        filled[:, x, x] = erase[:, x, z] * erase[:, y, x] / erase[:, y, z]
    if not filled.isfinite().all():
        return None
    first = filled[:, :1, :1]
    rank_one = filled[:, :, :1] * filled[:, :1, :] / first
    return filled if first.abs().min() > 0 and difference(rank_one, filled) < 1e3 * TOLERANCE else None


def pattern(arrays: Sequence[Tensor]) -> str:
    """Return the shape of arrays [k, v]: "one" (all are 1), "number", "key" or "value" channels, or "both"."""

    def same(x: Tensor, y: Tensor) -> bool:
        return difference(x, y) < TOLERANCE or bool((x - y).abs().max() < TOLERANCE)

    if all(same(x, torch.ones_like(x)) for x in arrays):
        return "one"
    over_keys = all(same(x, x[:1, :].expand_as(x)) for x in arrays)
    over_values = all(same(x, x[:, :1].expand_as(x)) for x in arrays)
    if over_keys and over_values:
        return "number"
    return "value" if over_keys else "key" if over_values else "both"


def reduced(array: Tensor, kind: str) -> Tensor:
    """Return an array [k, v] without the axes on which it does not depend."""
    if kind in ("one", "number"):
        return array[0, 0]
    return array[:, 0] if kind == "key" else array[0] if kind == "value" else array


def written_as(values: Sequence[Tensor], tokens: Sequence[Token]) -> str | None:
    """Return the simplest formula of the gates that gives these values, one for each token; None if none is known."""
    if all(x.dim() == 0 and abs(x - values[0]) < TOLERANCE for x in values):
        return f"{round(values[0].item(), 9) + 0.0:.6g}"  # never -0
    for text, names, formula in known_formulas(list(tokens[0].gates)):
        if all(_equal(formula_of(formula, names, token), value) for token, value in zip(tokens, values, strict=True)):
            return text
    return None


def formula_value(text: str, token: Token) -> Tensor:
    """Return the value of a formula of `written_as` for a token."""
    for known, names, formula in known_formulas(list(token.gates)):
        if known == text and (made := formula_of(formula, names, token)) is not None:
            return made
    return torch.tensor(float(text), dtype=torch.float64)


def known_formulas(gates: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], Formula]]:
    """Yield formulas of one gate, then of two, each with its text and its gates."""
    for name in gates:
        yield from ((text.format(x=name), (name,), formula) for text, formula in ONE_GATE.items())
    for one, two in permutations(gates, 2):
        yield from ((text.format(x=one, y=two), (one, two), formula) for text, formula in TWO_GATES.items())


def formula_of(formula: Formula, names: Sequence[str], token: Token) -> Tensor | None:
    """Return the value of a known formula for a token; None if its gates are vectors of different lengths."""
    gates = [token.gates[name] for name in names]
    if len({x.shape for x in gates if x.dim()}) > 1:
        return None
    return formula(token.k.square().sum(), *gates)


def logarithm(formula: str | None) -> str | None:
    """Return the formula of the logarithm of a decay."""
    if formula is None:
        return None
    inner = formula.removeprefix("exp(").removesuffix(")")
    return inner if formula == f"exp({inner})" else f"log({formula})"


TERM = r"(?:[\w.]+|\w+\([^()]*(?:\([^()]*\)[^()]*)*\))"
"""One name, number or call."""


def bracketed(text: str, products: bool = False) -> str:
    """Return a formula as a factor, in brackets unless it is one name, number or call, or a product of some."""
    simple = re.fullmatch(rf"{TERM}(?: \* {TERM})*" if products else TERM, text) is not None
    return text if simple else f"({text})"


def _equal(x: Tensor | None, y: Tensor) -> bool:
    fits = x is not None and x.dim() <= y.dim() and (x.dim() == 0 or x.shape == y.shape)
    return fits and x is not None and bool(((x - y).abs() < TOLERANCE).all())


ONE_GATE: dict[str, Formula] = {
    "{x}": lambda kk, x: x,
    "exp({x})": lambda kk, x: x.exp(),
    "exp(-{x})": lambda kk, x: (-x).exp(),
    "exp(-exp({x}))": lambda kk, x: (-x.exp()).exp(),
    "1 - {x}": lambda kk, x: 1 - x,
    "sigmoid({x})": lambda kk, x: x.sigmoid(),
    "1 - sigmoid({x})": lambda kk, x: 1 - x.sigmoid(),
    "-{x}": lambda kk, x: -x,
    "2 * {x}": lambda kk, x: 2 * x,
    "{x} / 2": lambda kk, x: x / 2,
    "2 * {x} - 1": lambda kk, x: 2 * x - 1,
    "1 - 2 * {x}": lambda kk, x: 1 - 2 * x,
    "2 * sigmoid({x})": lambda kk, x: 2 * x.sigmoid(),
    "{x}**2": lambda kk, x: x.square(),
    "sqrt({x})": lambda kk, x: x.abs().sqrt(),
    "{x} / (k @ k)": lambda kk, x: x / kk,
    "{x} / norm(k)": lambda kk, x: x / kk.sqrt(),
}
"""Formulas of a gate x, and of kk = |k|^2, simplest first."""
TWO_GATES: dict[str, Formula] = {
    "{x} * {y}": lambda kk, x, y: x * y,
    "1 - {x} * {y}": lambda kk, x, y: 1 - x * y,
    "1 - 2 * {x} * {y}": lambda kk, x, y: 1 - 2 * x * y,
    "2 * {x} * {y}": lambda kk, x, y: 2 * x * y,
    "{x} / {y}": lambda kk, x, y: x / y,
    "{x} - {y}": lambda kk, x, y: x - y,
    "exp({x} * {y})": lambda kk, x, y: (x * y).exp(),
    "exp(-{x} * {y})": lambda kk, x, y: (-x * y).exp(),
    "{x} * (1 - {y})": lambda kk, x, y: x * (1 - y),
    "1 - {x} * (1 - {y})": lambda kk, x, y: 1 - x * (1 - y),
    "1 - 2 * {x} * (1 - {y})": lambda kk, x, y: 1 - 2 * x * (1 - y),
    "{x} * sigmoid({y})": lambda kk, x, y: x * y.sigmoid(),
    "sigmoid({x}) * sigmoid({y})": lambda kk, x, y: x.sigmoid() * y.sigmoid(),
    "{x} / ({y} + k @ k)": lambda kk, x, y: x / (y + kk),
}
"""Formulas of two gates."""
