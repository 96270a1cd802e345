"""Finds the rows that are not among the five of the equation, from the erase, from the writes, or by fitting gates."""

from collections.abc import Sequence
from dataclasses import replace

from lineate.recognise.cases import case_of_erase
from lineate.recognise.fitting import fit_row, formulas, from_op
from lineate.recognise.general import erase_of
from lineate.recognise.match import Match, Measured
from lineate.recognise.measuring import TOLERANCE, Response, bracketed, difference, logarithm, pattern
from lineate.recognise.rules import GATED_DELTA_2, GENERAL, LOW_RANK, PRODUCT, other_rows
from lineate.recognise.several import find_writes


def row_by_op(responses: Sequence[Response], keys: str, x: Measured | None) -> Match | None:
    """Return the row, other than the five of the equation, whose op has these responses for some gates."""
    if x is not None and (found := _general(x)) is not None:
        return found
    for row in other_rows():
        if row.rule.name in GENERAL or row.rule.writes:
            continue
        if (fitted := fit_row(row.rule, responses)) is not None:
            gates, largest = fitted
            return Match(row, None, keys, largest, corrects=row.rule.corrects, gates=formulas(gates, responses))
    return None


def _general(x: Measured) -> Match | None:
    """Return Gated DeltaNet-2 or the general row, if a rule has a decay, an erase of rank one, and one write."""
    erase = erase_of(x.responses, x.found, x.decay)
    if erase is None or x.write_shape == "both" or any(y.abs().min() < TOLERANCE for y in x.writes):
        return None
    along = erase.along(r.token.k for r in x.responses)
    of_key = erase.reader in ("k", "normalize(k)") or (erase.probe is None and not x.responses[0].token.others)
    second = along and of_key and x.write_shape != "key"
    if second and all(d @ e < 0 for d, e in zip(erase.directions, erase.probes, strict=True)):
        return None  # it adds what is stored under k: the step has the wrong sign
    wanted = GATED_DELTA_2 if second else LOW_RANK
    row = next((row for row in other_rows() if row.rule.name == wanted), None)
    if row is None:
        return None
    largest = 0.0
    for i, (r, c) in enumerate(zip(x.responses, x.found, strict=True)):
        decay, k, v = erase.decays[i].clamp(max=1), r.token.k, r.token.v
        gates = {"log_decay": decay.log()}
        if second:
            strength = (erase.directions[i] @ k) / k.square().sum()
            gates |= {"erase": strength * erase.probes[i] / k, "write": c.write[0]}
        else:
            gates |= {"probe": erase.probes[i], "direction": erase.directions[i]}
            k, v = k * c.write[:, 0], v * c.write[0] / c.write[0, 0]
        op = from_op(row.rule, replace(r, token=replace(r.token, k=k, v=v)), gates)
        largest = max(largest, difference(op, r.new))
    if largest > TOLERANCE:
        return None
    case = case_of_erase(erase, x.decay_shape, along)
    named = [("log_decay", "0" if x.decay == "1" else logarithm(x.decay), x.decay_shape)]
    if second:
        named += [("erase", erase.strength, x.erase_shape), ("write", x.write, x.write_shape)]
        return Match(row, None, x.keys, largest, gates=tuple(named), case=case)
    named += [("probe", erase.probe, "key"), ("direction", erase.direction, "key")]
    operand = "k" if x.write_shape == "key" else "v"
    share = "computed strength" if x.write is None else bracketed(x.write)
    operands = () if x.write == "1" else (f"{operand} = {share} * {operand}",)
    return Match(row, None, x.keys, largest, gates=tuple(named), operands=operands, case=case)


def several_writes(responses: Sequence[Response], keys: Sequence[str], values: Sequence[str]) -> Match | None:
    """Return Gated DeltaProduct, if the rule is n writes after one decay."""
    row = next((row for row in other_rows() if row.rule.name == PRODUCT), None)
    writes = None if row is None else find_writes(responses, keys, values)
    if row is None or writes is None:
        return None
    shape = pattern([x[:, None] for x in writes.decays])
    if shape not in ("one", "number") or any(x.min() <= 0 or x.max() > 1 + TOLERANCE for x in writes.decays):
        return None
    largest = 0.0
    for r, a, b in zip(responses, writes.decays, writes.strengths, strict=True):
        gates = {"log_decay": a[0].clamp(max=1).log(), "beta": b[:, None]}
        token = replace(
            r.token, q=r.token.k, k=writes.key(r.token)[:, None], v=writes.value(r.token)[:, None]
        )  # n h ...
        largest = max(largest, difference(from_op(row.rule, replace(r, token=token), gates), r.new))
    decay, strengths = writes.formulas([r.token for r in responses])
    beta = None if any(x is None for x in strengths) else ", ".join(str(x) for x in strengths)
    given = (("log_decay", "0" if decay == "1" else logarithm(decay), shape), ("beta", beta, "write"))
    order = [", ".join(x or first for x in names) for names, first in ((writes.keys, "k"), (writes.values, "v"))]
    operands = (f"k = {order[0]}", f"v = {order[1]} as the writes of a token")
    return Match(row, None, "any", largest, gates=given, operands=operands) if largest < TOLERANCE else None
