"""The output of `lineate check`: sentences and two tables, or JSON."""

import math
import re
from typing import TYPE_CHECKING, Any

from lineate.recognise.cases import CASES
from lineate.recognise.compare import Finding
from lineate.recognise.distance import MIDDLE, SLOW, STEPS
from lineate.recognise.evaluation import LAYOUTS
from lineate.recognise.match import Match
from lineate.recognise.measuring import logarithm
from lineate.recognise.remedy import with_key
from lineate.recognise.rules import RELATIVES, ROWS, Row

if TYPE_CHECKING:
    from rich.console import Console

HUGE = 1e6
HOW_FAR = (
    "All start from one random S and get the same unit keys, values and gates; a decay that this rule lacks is drawn "
    f"from [{SLOW[0]}, {SLOW[1]:.0f}], a beta is {MIDDLE}."
)
SHAPES = {
    "one": "one number",
    "number": "one number per head",
    "key": "one per key channel",
    "value": "one per value channel",
    "both": "one per entry of S",
    "write": "one number per head and write",
}
KEYS = {
    "any": "of any length",
    "unit": "of unit length: for others it is not this rule",
    "normalised": "the rule divides k by its length itself: normalize_qk=True",
}


def headline(finding: Finding) -> str:
    """Return the answer in one line."""
    if finding.match is None:
        return "None of lineate's rows, and none of the relatives it knows"
    if finding.match.row is not None:
        return _title(finding.match)
    rows = "None of lineate's rows" if finding.match.computed is None else "Not one of the five rows"
    return f"{rows}: {_title(finding.match)}"


def _title(match: Match) -> str:
    """Return the name of a row, with that of the published rule that is a case of it, or the name of a relative."""
    if match.row is None:
        return RELATIVES[str(match.relative)].name
    return match.row.name if match.case is None else f"{CASES[match.case].name}, a case of {match.row.name}"


def facts(finding: Finding) -> list[tuple[str, str]]:
    """Return the facts below the headline, each with its name."""
    match, reading, relative = finding.match, finding.reading, finding.relative
    told = relative or finding.case
    found = [] if told is None else [("what it does", told.what)]
    if reading is not None:
        found.append(("layout", f"S is {reading.layout}; k and v are {_vectors(reading.vectors)}"))
    found += [(name, _role(finding, name, role)) for name, role in finding.roles.items()]
    if match is not None and reading is not None:
        if match.decay_shape != "one":
            found.append(("decay", f"{_formula(finding, match.decay)}, {SHAPES[match.decay_shape]}"))
        if match.write not in (None, "0", "1"):
            found.append(("write", f"{_formula(finding, match.write)}, {SHAPES[match.write_shape]}"))
        found += [(name, f"{_formula(finding, formula)}, {SHAPES[kind]}") for name, formula, kind in match.gates]
        found.append(("keys", KEYS[match.keys]))
    stable = match.row.stable if match is not None and match.row is not None else relative and relative.stable
    if stable:
        found.append(("stable", stable))
    if match is not None and reading is not None:
        of = "one token of lineate's op" if match.row is not None else "the formula of such rules"
        found.append(("difference", f"{match.difference:.1e} at most, relative, from {of} in float64"))
    if match is not None and match.row is not None:
        found.append(("lineate", call(finding, match, match.row)))
    if match is not None and match.computed is not None and match.computed.row is not None:
        computed = f"{match.computed.row.name} computes it: {call(finding, match.computed, match.computed.row)}"
        found.append(("lineate", computed))
    return found


def call(finding: Finding, match: Match, row: Row) -> str:
    """Return lineate's call for a rule, with the gates of the expression."""
    if match.gates:
        given = [f"{name} = {_formula(finding, formula)}" for name, formula, _ in match.gates]
        given += [_operand(finding, x) for x in match.operands]
        return _with(row.call, [*given, *_of_reading(finding, match)])
    given = []
    if row.rule.decays != ("none",):
        formula = _formula(finding, match.decay)
        given.append(f"log_decay = {logarithm(formula)}")
    if match.case == "hgrn2":
        given.append(f"k = 1 - {_formula(finding, match.decay)}")
    elif match.write is None and not row.rule.corrects:
        given.append(f"the computed {'key as k' if match.write_shape == 'key' else 'value as v'}")
    elif match.write != "1" or row.rule.corrects:
        write = _formula(finding, match.write)
        given.append(f"beta = {write}" if row.rule.corrects else f"v = {write} * v")
    return _with(row.call, [*given, *_of_reading(finding, match)])


def _of_reading(finding: Finding, match: Match) -> list[str]:
    """Return the words about the keys and the layout in a call."""
    found = ["normalize_qk=True"] if match.keys == "normalised" else []
    if finding.reading is not None and finding.reading.layout != LAYOUTS[0]:
        found.append("its state is the transpose of S")
    carried = () if finding.reading is None else finding.reading.carried
    if "normaliser" in [kind for _, kind in carried] and match.divides:
        found.insert(0, "normalize=True")
    return found


def _with(call: str, given: list[str]) -> str:
    return call + (f" with {', '.join(given)}" if given else "")


def closing(finding: Finding) -> list[str]:
    """Return the sentences at the end: notes, other readings, and what to change."""
    found = list(finding.notes)
    for other in finding.others:
        what = _title(other.match)
        found.append(f"If {other.gate} is a vector, one number per {other.per} channel, it is: {what}.")
    if finding.remedy is not None:
        found.append(f"What to change: {finding.change}. {finding.remedy_name} in these names:")
        found.append(f"    {finding.remedy}")
    return found


def print_finding(finding: Finding, console: "Console") -> None:
    """Print the result."""
    from rich import box
    from rich.table import Table

    console.print(headline(finding), style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts(finding):
        table.add_row(name, fact)
    console.print(table)
    if finding.distances:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("relative distance of S from")
        for steps in STEPS:
            table.add_column(f"after {steps} token{'s' * (steps > 1)}", justify="right")
        for distance in finding.distances:
            name = next(row.name for row in ROWS if row.rule.name == distance.rule)
            table.add_row(name, *map(_far, distance.after))
        console.print()
        console.print(table)
        console.print(HOW_FAR)
    for sentence in closing(finding):
        console.print(sentence, soft_wrap=sentence.startswith(" "))


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the finding as numbers and words; a distance that is not finite is None."""
    match, reading, relative = finding.match, finding.reading, finding.relative
    row = None if match is None else match.row
    return {
        "expression": finding.program.text,
        "recognised": finding.recognised,
        "rule": None if row is None else row.rule.name,
        "relative": None if match is None else match.relative,
        "name": headline(finding),
        "case": None if match is None else match.case,
        "what": None if (told := relative or finding.case) is None else told.what,
        "call": None if row is None or match is None else call(finding, match, row),
        "computed_by": _computed_by(finding),
        "layout": None if reading is None else reading.layout,
        "vectors": None if reading is None else reading.vectors,
        "square_only": reading is not None and reading.square,
        "roles": finding.roles,
        "gates": {} if reading is None else dict(reading.gates),
        "decay": None if match is None or reading is None else match.decay,
        "decay_shape": None if match is None or reading is None else match.decay_shape,
        "write": None if match is None or reading is None else match.write,
        "write_shape": None if match is None or reading is None else match.write_shape,
        "row_gates": {} if match is None else {name: formula for name, formula, _ in match.gates},
        "keys": None if match is None or reading is None else match.keys,
        "stable": row.stable if row is not None else None if relative is None else relative.stable,
        "largest_difference": None if match is None or reading is None else match.difference,
        "distances": {
            x.rule: {str(n): y if math.isfinite(y) else None for n, y in zip(STEPS, x.after, strict=True)}
            for x in finding.distances
        },
        "change": finding.change or None,
        "remedy": finding.remedy,
        "remedy_name": finding.remedy_name,
        "other_readings": [
            {"gate": x.gate, "per": x.per, "rule": x.match.row and x.match.row.rule.name, "relative": x.match.relative}
            for x in finding.others
        ],
        "notes": list(finding.notes),
    }


def _computed_by(finding: Finding) -> str | None:
    """Return the call of the row that computes a relative, if there is one."""
    computed = None if finding.match is None else finding.match.computed
    return None if computed is None or computed.row is None else call(finding, computed, computed.row)


def _vectors(form: str) -> str:
    return {"flat": "vectors with one axis", "column": "columns", "row": "rows"}[form]


def _role(finding: Finding, name: str, role: str) -> str:
    shape = dict(finding.reading.gates).get(name) if finding.reading is not None else None
    return role if shape in (None, "number") else f"{role}, a vector: {SHAPES[str(shape)]}"


def _operand(finding: Finding, text: str) -> str:
    """Return "k = ..." or "v = ..." with the names of the expression to the right of =."""
    operand, _, formula = text.partition(" = ")
    value = (finding.program.names("value") or ["v"])[0]
    text = re.sub(r"\bv\b", value, _formula(finding, formula))
    return f"{operand} = {text}"


def _formula(finding: Finding, formula: str | None) -> str:
    if formula is None:
        gates = ", ".join(finding.program.names("gate"))
        return f"computed from {gates}" if gates else "computed from the inputs"
    return with_key(formula, (finding.program.names("key") or ["k"])[0])


def _far(distance: float) -> str:
    return f"{distance:.2g}" if distance < HUGE else "it grows without bound"
