"""Writes the nearest correcting row in the names and the layout of an expression."""

import re

from lineate.recognise.evaluation import LAYOUTS, Reading
from lineate.recognise.expressions import Program
from lineate.recognise.match import Match
from lineate.recognise.measuring import bracketed
from lineate.recognise.rules import PRODUCT, other_rows
from lineate.recognise.symbols import DECAYS, NUMBERED, RATES


def nearest_row(program: Program, reading: Reading, match: Match | None) -> tuple[str, str]:
    """Return the row that the expression probably intends, as an expression, and the row's name."""
    S = program.memory
    decay, vector = _decay(program, reading, match)
    turned, rows = reading.layout == LAYOUTS[1], reading.vectors == "row"
    product = next((row.name for row in other_rows() if row.rule.name == PRODUCT), None)
    pairs = _pairs(program)
    several = product is not None and len(pairs) > 1
    lines = []
    if decay is not None and vector and not several:
        lines.append(f"{S} = {S} @ diag({decay})" if turned else f"{S} = diag({decay}) @ {S}")
    elif decay is not None:
        lines.append(f"{S} = {bracketed(decay)} * {S}")
    for k, v, named in pairs if several else pairs[:1]:
        strength = named if several else bracketed(with_key(_strength(program, match), k))
        read = (f"{k} @ {S}.T" if rows else f"{S} @ {k}") if turned else (f"{k} @ {S}" if rows else f"{S}.T @ {k}")
        written = f"outer({v} - {read}, {k})" if turned else f"outer({k}, {v} - {read})"
        lines.append(f"{S} = {S} + {strength} * {written}")
    name = "DeltaNet" if decay is None else "Kimi Delta Attention" if vector else "Gated DeltaNet"
    return "; ".join(lines), str(product) if several else name


def _pairs(program: Program) -> list[tuple[str, str, str]]:
    """Return the key, the value and the strength of each write of a token, in the order of their numbers."""
    keys, values = (
        sorted(program.names(kind) + program.names(f"other {kind}"), key=_number)
        for kind in ("key", "value")
    )  # fmt: skip
    numbered = [x for x in keys if _number(x)]
    if len(numbered) < 2 or [_number(x) for x in values] != [_number(x) for x in numbered]:
        names = {kind: (program.names(kind) or [kind[0]])[0] for kind in ("key", "value")}
        return [(names["key"], names["value"], "b")]
    rate = next((x for x in program.names("gate") if x in RATES), "b")
    strengths = {_number(x): x for x in program.names("gate") if _number(x)}
    return [(k, v, strengths.get(_number(k), rate)) for k, v in zip(numbered, values, strict=True)]


def _number(name: str) -> str:
    """Return the number at the end of a name; "" if it has none."""
    found = NUMBERED.fullmatch(name)
    return "" if found is None else found[2]


def _decay(program: Program, reading: Reading, match: Match | None) -> tuple[str | None, bool]:
    """Return the decay as a formula, and whether it is a vector; None if nothing is forgotten."""
    gates = dict(reading.gates)
    if match is not None and match.decay_shape == "one" and match.decay is not None:
        return None, False
    meant = None if match is None else match.meant_decay
    wrong = match is not None and match.relative in ("growing", "negative-decay", "oja-per-unit")
    if match is None or meant is None or wrong or _is_useless(meant):
        name = next((x for x in gates if x in DECAYS), None)
        vector = name is not None and gates[name] != "number"
        return f"exp({name})" if name in program.inside_exp else name, vector
    return meant, match.decay_shape != "number"


def _is_useless(formula: str) -> bool:
    """Whether a decay is a constant that keeps nothing or more than everything."""
    return re.fullmatch(r"-?[\d.]+", formula) is not None and not 0 < float(formula) < 1


def _strength(program: Program, match: Match | None) -> str:
    """Return the strength of the write as a formula."""
    gates = program.names("gate")
    named = next((x for x in gates if x in RATES), "b")
    if match is None or match.write in (None, "0") or match.relative in ("decayed-write", "normalised-hebb"):
        return named
    formula = str(match.write).removeprefix("-")
    return named if formula == "1" and match.relative is not None and not match.corrects else formula


def with_key(formula: str, key: str) -> str:
    """Return a formula of the gates, in which the key is k, with the expression's own name of the key."""
    return re.sub(r"\bk\b", key, formula)
