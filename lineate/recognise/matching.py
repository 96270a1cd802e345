"""Finds the row or the relative that a measured rule is."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lineate.recognise.cases import case_of
from lineate.recognise.match import Match, Measured, measure
from lineate.recognise.measuring import (
    TOLERANCE,
    Coefficients,
    Response,
    difference,
    pattern,
)
from lineate.recognise.other_rows import row_by_op, several_writes
from lineate.recognise.rules import (
    COMPUTED,
    SLIPS,
    Row,
    Update,
    accumulate,
    added_read,
    added_undecayed_read,
    correct,
    decay_after_erase,
    oja_per_unit,
    read_by_columns,
    row_of,
    run_tokens,
    undecayed_read,
    undecayed_read_by_columns,
)

STRENGTHS = {accumulate: ("one", "number", "key", "value"), correct: ("one", "number")}
"""Allowed shapes of the strength of a row's write; a rule that accumulates has it folded into k and v."""


def find_match(
    responses: Sequence[Response], other_keys: Sequence[str] = (), other_values: Sequence[str] = ()
) -> Match | None:
    """Return the row that matches the responses, else the relative, else None; half of the keys must have length 1.

    Args:
        responses: The measured responses.
        other_keys: Names of other keys of their tokens.
        other_values: Names of other values; there are as many as other keys if a token writes several times.
    """
    found = several_writes(responses, other_keys, other_values) or _find(responses)
    if found is None:
        return None
    case = case_of(found.row, found.decay, found.decay_shape, found.write, responses) if found.row is not None else None
    return found if case is None else replace(found, case=case)


def _find(responses: Sequence[Response]) -> Match | None:
    """Return the row or the relative with one write a token."""
    scopes = {
        "any": responses,
        "normalised": [r.normalised() for r in responses],
        "unit": [r for r in responses if r.token.unit],
    }
    measured: list[Measured] = []
    rows: list[Match] = []
    for keys, some in scopes.items():
        if (x := measure(some, keys)) is not None:
            measured.append(x)
            if (found := _row(x)) is not None and found.write is not None:
                return found
            rows += [] if found is None else [found]
    if rows:  # a row whose strength is no simple formula, not even of the normalised keys
        return rows[0]
    for keys, some in scopes.items():
        x = next((x for x in measured if x.keys == keys), None)
        relative = None if x is None else _relative(x)
        if relative is not None and relative.relative in SLIPS:
            computed = row_by_op(some, keys, x) if relative.relative in COMPUTED else None
            return replace(relative, computed=computed)
        if (by_op := row_by_op(some, keys, x)) is not None:
            return by_op
    for x in measured:
        if (found := _relative(x)) is not None:
            return found
    return _other(responses)


def _row(x: Measured) -> Match | None:
    """Return the row that equals the rule, by lineate's own op."""
    in_range = all(y.min() >= -TOLERANCE and y.max() <= 1 + TOLERANCE for y in x.decays)
    written = not x.negative and all(y.abs().min() > TOLERANCE for y in x.writes)
    if x.decay_shape not in ("one", "number", "key") or not in_range or not written or _without_half(x):
        return None
    for update, shapes in STRENGTHS.items():
        if x.write_shape not in shapes or x.fits(update) > TOLERANCE:
            continue
        row = row_of(update is correct, x.decay_shape)
        return x.match(row, None, update, max(_from_op(row, r, c) for r, c in zip(x.responses, x.found, strict=True)))
    return None


def _from_op(row: Row, response: Response, c: Coefficients) -> float:
    """Return the difference from one token of lineate's op."""
    k, v, a, b = response.token.k, response.token.v, c.decay[:, 0].clamp(0, 1), c.write
    beta = b[:1, 0]
    if not row.rule.corrects:  # a strength per channel is folded into k and v
        k, v, beta = k * b[:, 0], v * b[0] / b[0, 0], torch.ones(1, dtype=torch.float64)
    per_channel = pattern([c.decay]) == "key"
    decay = a[None] if per_channel else a[:1]
    return difference(run_tokens(row.rule, response.S, k[None], v[None], decay, beta), response.new)


def _without_half(x: Measured) -> bool:
    """Whether the decay is 2 g - 1, or 1 - 2 lambda eta."""
    formula = x.decay or ""
    return formula.startswith("1 - 2 * ") or (formula.startswith("2 * ") and formula.endswith(" - 1"))


def _relative(x: Measured) -> Match | None:
    """Return the relative with the same decay, erase and write."""
    if max(y.abs().max() for y in x.writes) < TOLERANCE:
        return x.match(None, "nothing-written", accumulate)
    for update in (accumulate, correct, undecayed_read):
        if x.fits(update) > TOLERANCE:
            continue
        if x.negative:
            return x.match(None, "sign-of-the-value" if update is accumulate else "sign-of-the-step", update)
        return x.match(None, _name(x, update), update)
    if x.fits(decay_after_erase) < TOLERANCE:
        return x.match(None, "decay-after-erase", decay_after_erase)
    for update in (added_read, added_undecayed_read):
        if x.fits(update) < TOLERANCE:
            return x.match(None, "sign-of-the-value" if x.negative else "sign-of-the-read", update)
    if (strengths := _strengths(x)) is not None and x.decay_shape in ("one", "number", "key"):
        return x.match(None, "unequal-strengths", correct, strengths)
    return None


def _name(x: Measured, update: Update) -> str:
    """Return the relative whose update is a row's, or the undecayed one, with gates of shapes that no row has."""
    if x.fits(oja_per_unit) < TOLERANCE:
        return "oja-per-unit"
    if _without_half(x):
        return "penalty-without-half"
    if any(y.max() > 1 + TOLERANCE for y in x.decays):
        return "growing"
    if any(y.min() < -TOLERANCE for y in x.decays):
        return "negative-decay"
    if x.write_shape == "both":
        return "other-write"
    if x.decay_shape in ("value", "both"):
        return "value-channel-decay" if x.decay_shape == "value" else "decay-per-entry"
    if update is undecayed_read and _decays_write(x):
        return "decayed-write"
    if x.write_shape in ("key", "value"):
        return f"beta-per-{x.write_shape}-channel"
    return "undecayed-read"


def _decays_write(x: Measured) -> bool:
    """Whether the write is a simpler formula once the decay is divided out: then the decay multiplies it too."""
    shares = [c.write / c.decay for c in x.found]
    if pattern(shares) not in ("one", "number"):
        return False
    whole, share = x.write, x.formula(shares)
    return share is not None and (whole is None or len(share) < len(whole))


def _strengths(x: Measured) -> float | None:
    """Return the difference from a row that erases with another strength than it writes; None if it is no such rule."""
    largest = 0.0
    for r, c in zip(x.responses, x.found, strict=True):
        if c.decay.abs().min() < TOLERANCE or pattern([c.write]) not in ("one", "number"):
            return None
        strength = c.erase[0, 0, 1] / c.decay[1, 0]
        kept = c.decay * r.S
        made = kept + c.write * torch.outer(r.token.k, r.token.v) - strength * torch.outer(r.token.k, r.token.k @ kept)
        largest = max(largest, difference(made, r.new))
    return largest if largest < TOLERANCE else None


def _other(responses: Sequence[Response]) -> Match | None:
    """Return a relative without decay, erase along k and write: Oja's, a missing transpose, a normalisation."""
    turned = measure([r.mirrored() for r in responses], "any")
    if turned is not None and turned.fits(correct) < TOLERANCE:
        return turned.match(None, "oja", correct)
    if responses[0].S.shape[0] == responses[0].S.shape[1] and responses[0].linear:
        found = [_read_off(r) for r in responses]
        square = Measured(tuple(responses), tuple(found), "any")
        for update in (read_by_columns, undecayed_read_by_columns):
            if square.fits(update) < TOLERANCE:
                return square.match(None, "missing-transpose", update)
    for name, misfit in (("oja-unsupervised", _oja), ("normalised-hebb", _normalised)):
        if not any(r.linear for r in responses) and (largest := max(map(misfit, responses))) < TOLERANCE:
            return Match(None, name, "any", largest)
    return None


def _read_off(r: Response) -> Coefficients:
    """Return decay and write of a square memory whose erase has other entries than a row's."""
    K = len(r.token.k)
    diagonal = torch.einsum("xyxy->xy", r.transition)
    decay = torch.stack([diagonal[x, (x + 1) % K] for x in range(K)])  # where row and column differ
    write = r.offset / torch.outer(r.token.k, r.token.v)
    return Coefficients(decay[:, None].expand(K, K), torch.zeros(K, K, K, dtype=torch.float64), write)


def _oja(r: Response) -> float:
    """Return the difference from S + b (k - S y) y^T or S + b (k y^T - S Diag(y^2)), with y = S^T k and the best b."""
    y = r.S.mT @ r.token.k
    steps = (torch.outer(r.token.k - r.S @ y, y), torch.outer(r.token.k, y) - r.S * y.square())
    best = [(x, ((r.new - r.S) * x).sum() / x.square().sum()) for x in steps]
    return min(difference(r.S + b * x, r.new) for x, b in best)


def _normalised(r: Response) -> float:
    """Return the difference from the best combination of S and k v^T."""
    parts = torch.stack((r.S.flatten(), torch.outer(r.token.k, r.token.v).flatten()), 1)
    best = torch.linalg.lstsq(parts, r.new.flatten()[:, None]).solution
    return difference((parts @ best).view_as(r.new), r.new) if best.abs().min() > TOLERANCE else 1.0
