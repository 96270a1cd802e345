"""Evaluates a program on tensors, under one reading of its names: layouts, shapes of vectors and gates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, product

import torch
from torch import Tensor

from lineate.recognise.expressions import Apply, Node, Number, Program, Symbol
from lineate.recognise.functions import FUNCTIONS, Misfit
from lineate.recognise.symbols import DECAYS

KEY_DIM, VALUE_DIM, SQUARE_DIM = 5, 3, 4
"""Sizes of the trial: different, so that shapes distinguish the layouts; equal if the expression needs that."""
MOST_VECTOR_GATES = 3
LAYOUTS, FORMS = ("key x value", "value x key"), ("flat", "column", "row")


@dataclass(frozen=True)
class Reading:
    """One way to understand the names."""

    layout: str = LAYOUTS[0]
    """Whether S is key x value or value x key."""
    vectors: str = FORMS[0]
    """Whether k and v are flat, columns or rows."""
    square: bool = False
    """Whether the trial has as many key channels as value channels."""
    identity: str = "key"
    """Whether I is key x key or value x value."""
    gates: tuple[tuple[str, str], ...] = ()
    """For each gate "number", "key" or "value": one number, or one per key or value channel."""
    carried: tuple[tuple[str, str], ...] = ()
    """For each second state "normaliser" (one number per key channel) or "stabiliser" (one number)."""

    @property
    def key_dim(self) -> int:
        """Return the number of key channels."""
        return SQUARE_DIM if self.square else KEY_DIM

    @property
    def value_dim(self) -> int:
        """Return the number of value channels."""
        return SQUARE_DIM if self.square else VALUE_DIM

    def size(self, of: str) -> int:
        """Return the number of key or of value channels."""
        return self.key_dim if of == "key" else self.value_dim


@dataclass(frozen=True)
class Token:
    """The inputs of one token: q, k [k]; v [v]; each gate [], [k] or [v]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    unit: bool
    """Whether k has length 1."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Other keys [k] and other values [v], such as k2 and v2."""


def draw_token(program: Program, reading: Reading, seed: torch.Generator, unit: bool, signs: frozenset[str]) -> Token:
    """Return random inputs; gates lie in (0, 1), those in `signs` in (-1, 0), and no number is near 0."""

    def drawn(size: int) -> Tensor:
        x = torch.rand(size, generator=seed, dtype=torch.float64) + 0.4
        return x * (torch.randint(2, (size,), generator=seed) * 2 - 1)

    def drawn_key() -> Tensor:
        k = drawn(reading.key_dim)
        length = 1.0 if unit else 0.6 + 0.6 * torch.rand((), generator=seed, dtype=torch.float64)
        return k * (length / k.norm())

    k = drawn_key()
    gates = {}
    for name, shape in reading.gates:
        x = torch.rand(() if shape == "number" else (reading.size(shape),), generator=seed, dtype=torch.float64)
        x = 0.5 + 0.49 * x if name in DECAYS and name not in program.inside_exp else 0.1 + 0.8 * x
        gates[name] = -x if name in signs else x
    q, v = drawn(reading.key_dim), drawn(reading.value_dim)
    others = {name: drawn_key() for name in program.names("other key")}
    others |= {name: drawn(reading.value_dim) for name in program.names("other value")}
    return Token(q, k, v, gates, unit, others)


def updated(program: Program, reading: Reading, token: Token, S: Tensor) -> Tensor:
    """Return the new memory [k, v] for S [k, v]; raise Misfit if the expression has no meaning under this reading.

    With a stabiliser m that is S exp(m) before and after the token; m is 0 before it.
    """
    carried = {
        name: torch.zeros((reading.key_dim,) if kind == "normaliser" else (), dtype=torch.float64)
        for name, kind in reading.carried
    }
    new, carried = evaluated(program, reading, token, S, carried)
    for name, kind in reading.carried:
        new = new * carried[name].exp() if kind == "stabiliser" else new
    if not new.isfinite().all():
        raise Misfit("the new memory is not finite")
    return new


def evaluated(
    program: Program, reading: Reading, token: Token, S: Tensor, carried: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the new memory [k, v] and the new second states; `carried` has those before the token, [k] or []."""
    turned = reading.layout == LAYOUTS[1]
    vectors = {"state": S.mT if turned else S}
    vectors |= {
        "key": _shaped(token.k, reading),
        "value": _shaped(token.v, reading),
        "query": _shaped(token.q, reading),
    }
    given = {**token.gates, **token.others, **carried}
    values = {
        name: _shaped(given[name], reading) if name in given else vectors[kind] for name, kind in program.free.items()
    }
    eye = torch.eye(reading.size(reading.identity), dtype=torch.float64)
    result = last = None
    bases = [part.base for x in program.statements if x.target and (part := program.part(x.target)) is not None]
    memory = program.memory if program.memory in bases else None
    new = dict(carried)
    for statement in program.statements:
        last = _value(statement.value, values, eye)
        if statement.target is None:
            continue
        values[statement.target] = last
        part = program.part(statement.target)
        if part is not None and part.kind == "state" and memory in (None, part.base):
            result = last
        for name in carried:
            if part is not None and part == program.part(name):
                new[name] = last.flatten() if carried[name].dim() else last
    if result is None or (program.statements[-1].target is None and last is not None and last.shape == result.shape):
        result = last
    assert result is not None
    if result.shape != (S.mT if turned else S).shape:
        raise Misfit(f"the new memory has shape {tuple(result.shape)}")
    if any(new[name].shape != x.shape for name, x in carried.items()):
        raise Misfit("the second states have other shapes")
    if not result.isfinite().all():
        raise Misfit("the new memory is not finite")
    return (result.mT if turned else result), new


def _shaped(x: Tensor, reading: Reading) -> Tensor:
    if x.dim() == 0 or reading.vectors == "flat":
        return x
    return x.unsqueeze(1 if reading.vectors == "column" else 0)


def _value(node: Node, values: Mapping[str, Tensor], eye: Tensor) -> Tensor:
    """Return the value of a node, a tensor of at most two axes."""
    if isinstance(node, Number):
        return torch.tensor(node.value, dtype=torch.float64)
    if isinstance(node, Symbol):
        return values[node.name]
    return _applied(node, values, eye)


def _applied(node: Apply, values: Mapping[str, Tensor], eye: Tensor) -> Tensor:
    if node.function == "eye":
        return eye
    arguments = [_value(x, values, eye) for x in node.arguments]
    try:
        found = FUNCTIONS[node.function].run(arguments, node.options)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shapes = " and ".join(str(tuple(x.shape)) for x in arguments)
        raise Misfit(f"{node.function} of shapes {shapes}") from error
    if found.dim() > 2:
        raise Misfit(f"{node.function} gives {found.dim()} axes")
    return found


def readings(program: Program, shapes: Mapping[str, str], square: bool) -> list[Reading]:
    """Return the ways to understand a program, simplest first; `shapes` fixes the shapes of some gates."""
    gates = program.names("gate")
    found = []
    for given in gate_shapes(gates, shapes):
        for vectors in FORMS:
            for layout in LAYOUTS:
                for identity in ("key", "value") if program.uses("eye") and not square else ("key",):
                    found.append(Reading(layout, vectors, square, identity, given))
    return found


def gate_shapes(gates: list[str], shapes: Mapping[str, str]) -> list[tuple[tuple[str, str], ...]]:
    """Return the shapes that gates may have together: at most two are vectors, besides those that `shapes` fixes."""
    open_gates = [x for x in gates if x not in shapes]
    found = []
    for count in range(min(MOST_VECTOR_GATES, len(open_gates)) + 1):
        for vectors in combinations(open_gates, count):
            for kinds in product(("key", "value"), repeat=count):
                chosen = {**dict.fromkeys(gates, "number"), **shapes, **dict(zip(vectors, kinds, strict=True))}
                found.append(tuple((x, chosen[x]) for x in gates))
    return found
