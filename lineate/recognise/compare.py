"""`check(text)`: find the row of lineate's table that an update rule is, or a related rule."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lineate.recognise.carried import explains, possible_kinds
from lineate.recognise.cases import CASES, Case
from lineate.recognise.deviation import needed_change
from lineate.recognise.distance import Distance, distances
from lineate.recognise.evaluation import Reading, Token, draw_token, gate_shapes, readings, updated
from lineate.recognise.expressions import Program, read_expression
from lineate.recognise.functions import Misfit
from lineate.recognise.match import Match
from lineate.recognise.matching import find_match
from lineate.recognise.measuring import TOLERANCE, Response, coefficients, difference, respond
from lineate.recognise.remedy import nearest_row
from lineate.recognise.rules import RELATIVES, Relative
from lineate.recognise.symbols import DECAYS, Refused
from lineate.rule import GATED_DELTA, GATED_LINEAR, KIMI_DELTA

DRAWS, MOST_TRIED, LONG = 3, 6, 100
"""Tokens with keys of length 1, and as many with others; readings that are measured; tokens of the long run."""


@dataclass(frozen=True)
class OtherReading:
    """The result if a gate is a vector."""

    gate: str
    per: str
    """"key" or "value": the channels that it has one number for."""
    match: Match


@dataclass(frozen=True)
class Finding:
    """The result of `lineate check`."""

    program: Program
    match: Match | None
    """None if the rule is neither a row nor a relative."""
    reading: Reading | None
    """None if nothing had to be evaluated."""
    roles: dict[str, str]
    """The role of each name of the expression."""
    distances: tuple[Distance, ...] = ()
    """The distances from Gated DeltaNet and Kimi Delta Attention, unless it is one of them."""
    remedy: str | None = None
    """A row in the names and the layout of the expression."""
    remedy_name: str | None = None
    others: tuple[OtherReading, ...] = ()
    notes: tuple[str, ...] = ()
    change: str = ""
    """The first words of the remedy."""

    @property
    def recognised(self) -> bool:
        """Whether it is a row of the table."""
        return self.match is not None and self.match.row is not None

    @property
    def case(self) -> Case | None:
        """Return the published rule that it is, if that is a case of a row."""
        slug = None if self.match is None else self.match.case
        return None if slug is None else CASES[slug]

    @property
    def relative(self) -> Relative | None:
        """Return the relative it is, if any."""
        slug = None if self.match is None else self.match.relative
        return None if slug is None else RELATIVES[slug]


def check(text: str, per_key: Sequence[str] = (), per_value: Sequence[str] = ()) -> Finding:
    """Return which row of the table an update rule is.

    Args:
        text: the update, such as "S = a * S; S = S + b * outer(k, v - S.T @ k)".
        per_key: gates that are vectors with one number per key channel; others are tried as numbers first.
        per_value: gates that are vectors with one number per value channel.

    Returns:
        The row or the relative, the layout and the roles of the names, distances and a remedy.

    Raises:
        Refused: the text is not an update rule that can be evaluated.
    """
    program = read_expression(text)
    shapes = _vector_gates(program, per_key, per_value)
    if program.uses("softmax"):
        return Finding(program, Match(None, "softmax", "any", 0.0), None, _roles(program))
    if not program.names("state") and not program.names("second state"):
        raise Refused("expected an update that uses the memory S (or M, W, H, state), got none; write S = ...")
    notes = []
    if not program.names("key") and any(x in program.feeding() for x in program.names("query")):
        program = replace(program, free={x: "key" if y == "query" else y for x, y in program.free.items()})
        notes.append(f"{program.names('key')[0]} is taken for the key, because no k occurs.")
    program, possible = _taken(program, shapes, notes)
    if not possible:
        return Finding(program, Match(None, "second-state", "any", 0.0), None, _roles(program))
    reading, match, signs = _best(program, possible)
    if _reads_query(program, reading):
        match = None
        notes.append("The update depends on the query; only the read, S^T q, should: write k.")
    elif _is_computed(match):
        assert match is not None
        side = match.write_shape
        if side != "number" and not _is_function_of(side, program, reading, signs):
            match = replace(match, row=None, relative="other-write")
        elif side != "number":
            notes.append(f"The {side} that is written is not {side[0]} itself: call the op with the computed {side}.")
    if match is not None and match.row is not None and reading.carried:
        match = replace(match, case=_case_of_carried(match, reading, notes))
    return _finding(program, reading, match, signs, notes)


def _taken(program: Program, shapes: Mapping[str, str], notes: list[str]) -> tuple[Program, list[Reading]]:
    """Return the program and its readings; none if it has a second state that no reading explains.

    An i is taken for the value where no v occurs and that has a meaning, as in HGRN2's notation.
    """
    seconds = program.names("second state")
    if not program.names("value") and program.free.get("i") == "gate" and not seconds:
        free = {x: "value" if x == "i" else y for x, y in program.free.items()}
        other = replace(program, free=free)
        try:
            found = _possible(other, {x: y for x, y in shapes.items() if x != "i"}, sizes=(False,))
            notes.append("i is taken for the value, because no v occurs.")
            return other, found
        except Refused:
            pass
    if not seconds:
        return program, _possible(program, shapes)
    if not program.names("state"):
        return program, []
    for carried in possible_kinds(seconds):
        try:
            found = [x for x in _possible(program, shapes, carried)[:MOST_TRIED] if explains(program, x)]
        except Refused:
            continue
        if found:
            return program, found
    return program, []


def _is_computed(match: Match | None) -> bool:
    """Whether a rule writes something else than its key and its value, with one number or one number per channel."""
    if match is None or match.row is None or match.case is not None:
        return False
    return match.write is None and not (match.corrects or match.gates)


def _case_of_carried(match: Match, reading: Reading, notes: list[str]) -> str | None:
    """Return the case of a row with second states, and note what they are."""
    for name, kind in reading.carried:
        if kind == "stabiliser":
            notes.append(
                f"{name} is a stabiliser: S and its key sum are stored divided by exp({name}), for any {name}."
            )
        elif match.divides:
            notes.append(
                f"{name} is a normaliser, the sum of the keys: normalize=True divides the output by {name} . q."
            )
        else:
            notes.append(
                f"{name} is a normaliser, the memory of the value 1: append a channel of ones to v; the last channel "
                f"of the output is then {name} . q, times the op's scale."
            )
    assert match.row is not None
    gated = match.row.rule is GATED_LINEAR and match.write != "1" and match.decay_shape == "number"
    return "mlstm" if gated or any(kind == "stabiliser" for _, kind in reading.carried) else match.case


def _vector_gates(program: Program, per_key: Sequence[str], per_value: Sequence[str]) -> dict[str, str]:
    """Return the gates that must be vectors, with the channels that they have one number for."""
    for name in (*per_key, *per_value):
        if program.free.get(name) != "gate":
            gates = ", ".join(program.names("gate")) or "none"
            raise Refused(f"expected gates of the expression as vectors, got {name[:32]!r}; its gates are: {gates}")
        if name in per_key and name in per_value:
            raise Refused(f"expected a gate to be per key or per value channel, got {name!r} as both; choose one")
    return {**dict.fromkeys(per_key, "key"), **dict.fromkeys(per_value, "value")}


def _possible(
    program: Program,
    shapes: Mapping[str, str],
    carried: tuple[tuple[str, str], ...] = (),
    sizes: tuple[bool, ...] = (False, True),
) -> list[Reading]:
    """Return the readings under which the program has a meaning; with K = V only if there is no other."""
    why = ""
    for square in sizes:
        found = []
        for reading in (replace(x, carried=carried) for x in readings(program, shapes, square)):
            try:
                _try(program, reading)
                found.append(reading)
            except Misfit as error:
                why = why or str(error)
        if found:
            return found
    raise Refused(f"expected shapes that fit with S [k, v] or [v, k], k [k], v [v], got a misfit: {why}")


def _try(program: Program, reading: Reading) -> Tensor:
    seed = torch.Generator().manual_seed(0)
    token = draw_token(program, reading, seed, True, frozenset())
    return updated(program, reading, token, torch.randn(reading.key_dim, reading.value_dim, generator=seed).double())


def _best(program: Program, possible: Sequence[Reading]) -> tuple[Reading, Match | None, frozenset[str]]:
    """Return the simplest reading that is a row; else, among those as simple, a relative; else the first."""
    first: tuple[Reading, Match | None, frozenset[str]] | None = None
    for reading in possible[:MOST_TRIED]:
        if first is not None and first[1] is not None and reading.gates != first[0].gates:
            break
        match, signs = _match(program, reading)
        if match is not None and (match.row is not None or first is None or first[1] is None):
            first = reading, match, signs
        if match is not None and match.row is not None:
            break
        first = first or (reading, match, signs)
    assert first is not None
    return first


def _match(program: Program, reading: Reading) -> tuple[Match | None, frozenset[str]]:
    """Return the match, and the gates that are negative: all of those inside exp, none, or one of them."""
    first: tuple[Match | None, frozenset[str]] | None = None
    inside = program.inside_exp
    for signs in dict.fromkeys((inside, frozenset[str](), *(frozenset((x,)) for x in sorted(inside)))):
        try:
            found = find_match(
                _responses(program, reading, signs), program.names("other key"), program.names("other value")
            )
        except Misfit:
            continue
        if found is not None and found.row is not None:
            return found, signs
        if first is None or first[0] is None:
            first = found, signs
    return first or (None, frozenset())


def _responses(program: Program, reading: Reading, signs: frozenset[str]) -> list[Response]:
    """Return the responses to DRAWS tokens with keys of length 1 and as many with others."""
    seed = torch.Generator().manual_seed(1)
    tokens = [draw_token(program, reading, seed, unit, signs) for unit in [True] * DRAWS + [False] * DRAWS]
    return [respond(partial(updated, program, reading, token), token, seed) for token in tokens]


def _finding(
    program: Program, reading: Reading, match: Match | None, signs: frozenset[str], notes: list[str]
) -> Finding:
    """Return everything that is reported about one reading."""
    rule = match.row.rule if match is not None and match.row is not None else None
    far: tuple[Distance, ...] = ()
    if rule not in (GATED_DELTA, KIMI_DELTA):
        far = _distances(program, reading, signs, match)
    others = tuple(_others(program, reading)) if rule is not None else ()
    remedy, name = nearest_row(program, reading, match) if rule is None else (None, None)
    if reading.square:
        notes.append("Shapes fit only if there are as many key channels as value channels.")
    if rule is GATED_DELTA:
        notes.append(
            "One decay per head commutes with the erase, so their order does not matter; one per channel does not."
        )
    if rule is not None and not rule.corrects and match is not None and match.write not in ("1", None):
        notes.append("The rule has no beta: fold the strength of the write into v (or k), as Mamba-2 folds its step.")
    roles = _roles(program, *_gate_roles(program, reading, signs))
    change = "" if rule is not None else _change(program, reading, match, signs)
    return Finding(program, match, reading, roles, far, remedy, name, others, tuple(notes), change)


def _change(program: Program, reading: Reading, match: Match | None, signs: frozenset[str]) -> str:
    """Return the first words of the remedy of a rule that is no row."""
    if program.names("other value"):
        return "write the pairs one after the other, and compare each with the S that the one before it left"
    if match is not None and match.relative is not None:
        return RELATIVES[match.relative].change
    if _reads_query(program, reading):
        return "use k, not q, in the update"
    return needed_change(_responses(program, reading, signs))


def _distances(
    program: Program, reading: Reading, signs: frozenset[str], match: Match | None
) -> tuple[Distance, ...]:  # fmt: skip
    seed = torch.Generator().manual_seed(2)
    tokens = [draw_token(program, reading, seed, True, signs) for _ in range(LONG)]

    def update(token: Token, S: Tensor) -> Tensor:
        try:
            return updated(program, reading, token, S)
        except Misfit:  # it overflowed
            return torch.full_like(S, float("inf"))

    return distances(update, tokens, match, seed)


def _others(program: Program, reading: Reading) -> list[OtherReading]:
    """Return the results if one more gate is a vector, where that has a meaning."""
    fixed = {name: kind for name, kind in reading.gates if kind != "number"}
    found = []
    for gates in gate_shapes([name for name, _ in reading.gates], fixed):
        more = [x for x in gates if x not in reading.gates]
        if len(more) != 1:
            continue
        other = replace(reading, gates=gates)
        try:
            _try(program, other)
            match, _ = _match(program, other)
        except Misfit:
            continue
        if match is not None:
            found.append(OtherReading(*more[0], match))
    return found


def _reads_query(program: Program, reading: Reading) -> bool:
    """Whether the new memory depends on q."""
    seed = torch.Generator().manual_seed(3)
    token = draw_token(program, reading, seed, True, frozenset())
    S = torch.randn(reading.key_dim, reading.value_dim, generator=seed).double()
    try:
        return not torch.equal(*(updated(program, reading, replace(token, q=q), S) for q in (token.q, 2 * token.q)))
    except Misfit:
        return False


def _is_function_of(side: str, program: Program, reading: Reading, signs: frozenset[str]) -> bool:
    """Whether the "key" side (or "value" side) of what is written depends on the key (the value), and on that alone.

    C = f(k) v^T is linear attention with a feature map; a matrix of which no side depends on k is not.
    """
    seed = torch.Generator().manual_seed(6)
    one, two = (draw_token(program, reading, seed, True, signs) for _ in range(2))
    changed_k, changed_v = replace(one, k=two.k), replace(one, v=two.v)
    own, other = (changed_k, changed_v) if side == "key" else (changed_v, changed_k)

    def written(token: Token) -> Tensor:
        made = updated(program, reading, token, torch.zeros(reading.key_dim, reading.value_dim, dtype=torch.float64))
        return made[:, 0] / token.v[0] if side == "key" else made[0] / token.k[0]

    try:
        before = written(one)
        return difference(written(own), before) > TOLERANCE > difference(written(other), before)
    except Misfit:
        return False


def _gate_roles(program: Program, reading: Reading, signs: frozenset[str]) -> tuple[set[str], set[str], set[str]]:
    """Return the gates that change the decay, those that change the write, and those that change the erase."""
    seed = torch.Generator().manual_seed(4)
    token = draw_token(program, reading, seed, True, signs)
    decays, writes, erases = set[str](), set[str](), set[str]()
    several = bool(program.names("other value"))

    def measured(token: Token) -> tuple[Tensor, Tensor, Tensor] | None:
        try:
            response = respond(partial(updated, program, reading, token), token, torch.Generator().manual_seed(5))
        except Misfit:
            return None
        c = coefficients(response) or coefficients(response.mirrored())
        if c is None:  # several writes a token
            return response.transition, response.offset, torch.zeros(1)
        return c.decay, c.write, c.erase

    before = measured(token)
    for name in program.names("gate"):
        after = measured(replace(token, gates={**token.gates, name: 0.9 * token.gates[name]}))
        if before is None or after is None:
            continue
        changed = [bool((x - y).abs().max() > TOLERANCE) for x, y in zip(before, after, strict=True)]
        if several and changed[1]:
            changed[0] = False  # the erase of a write is a part of the transition
        for names, is_changed in zip((decays, writes, erases), changed, strict=True):
            names |= {name} if is_changed else set()
    return decays, writes, erases - decays - writes


def _roles(
    program: Program, decays: Set[str] = frozenset(), writes: Set[str] = frozenset(), erases: Set[str] = frozenset()
) -> dict[str, str]:
    """Return the role of each name; for a gate whose role could not be measured, the usual role of its name."""
    words = {
        "state": "memory", "second state": "second state", "key": "key", "value": "value", "query": "query",
        "other key": "another key", "other value": "another value",
    }  # fmt: skip
    found = {}
    order = [*words, "gate"]
    for name, kind in sorted(program.free.items(), key=lambda x: order.index(x[1])):
        parts = [("decay", decays), ("write strength", writes), ("erase strength", erases)]
        named = "decay, by its name" if name in DECAYS else "write strength, by its name"
        found[name] = words.get(kind, " and ".join(word for word, names in parts if name in names) or named)
    return found
