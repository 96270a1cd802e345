"""Writes the nearest correcting row in the names and the layout of an expression."""

import re

from lineate.recognise.evaluation import LAYOUTS, Reading
from lineate.recognise.expressions import Program
from lineate.recognise.matching import Match
from lineate.recognise.symbols import DECAYS, RATES, part_of


def mended(program: Program, reading: Reading, match: Match | None) -> tuple[str, str]:
    """Return the row that the expression probably intends, as an expression, and the row's name."""
    names = {kind: program.names(kind)[0] if program.names(kind) else kind[0] for kind in ("key", "value")}
    part = part_of(program.names("state")[0])
    S, k, v = part.base if part else "S", names["key"], names["value"]
    decay, vector = _decay(program, reading, match)
    turned, rows = reading.layout == LAYOUTS[1], reading.vectors == "row"
    lines = []
    if decay is not None and vector:
        lines.append(f"{S} = {S} @ diag({decay})" if turned else f"{S} = diag({decay}) @ {S}")
    elif decay is not None:
        lines.append(f"{S} = {_bracketed(decay)} * {S}")
    read = (f"{k} @ {S}.T" if rows else f"{S} @ {k}") if turned else (f"{k} @ {S}" if rows else f"{S}.T @ {k}")
    written = f"outer({v} - {read}, {k})" if turned else f"outer({k}, {v} - {read})"
    lines.append(f"{S} = {S} + {_bracketed(with_key(_strength(program, match), k))} * {written}")
    return "; ".join(lines), "DeltaNet" if decay is None else "Kimi Delta Attention" if vector else "Gated DeltaNet"


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


def _bracketed(text: str) -> str:
    """Return a formula as a factor."""
    simple = re.fullmatch(r"[\w.]+|\w+\([\w -]*\)", text) is not None
    return text if simple else f"({text})"
