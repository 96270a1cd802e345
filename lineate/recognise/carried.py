"""Second states that do not change the rule: a normaliser and a stabiliser, as in mLSTM.

A normaliser n [k] is the memory of the value 1: it has the gates of S, and the output is divided by a function of
n^T q. A stabiliser m is the logarithm of a factor that S and n are divided by, so that no exponential overflows: S e^m
is the same for every m.
"""

from collections.abc import Sequence
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from lineate.recognise.evaluation import Reading, Token, draw_token, evaluated, updated
from lineate.recognise.expressions import Program
from lineate.recognise.functions import Misfit
from lineate.recognise.measuring import TOLERANCE, difference, respond

KINDS = ("normaliser", "stabiliser")


def possible_kinds(names: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """Return the ways in which second states may be a normaliser and a stabiliser; () if there are none to explain."""
    if len(names) > len(KINDS):
        return []
    return [tuple(zip(names, kinds, strict=True)) for kinds in permutations(KINDS, len(names))]


def explains(program: Program, reading: Reading) -> bool:
    """Whether the second states are what the reading says: neither changes the rule."""
    seed = torch.Generator().manual_seed(9)
    token = draw_token(program, reading, seed, True, frozenset())
    S = torch.randn(reading.key_dim, reading.value_dim, generator=seed, dtype=torch.float64)
    n = torch.randn(reading.key_dim, generator=seed, dtype=torch.float64)
    try:
        one, keys = _unscaled(program, reading, token, S, n, 0.0)
        for stored, m in ((n, 0.7), (n, -0.4), (2 * n, 0.0)):
            other, other_keys = _unscaled(program, reading, token, S, stored, m)
            if difference(other, one) > TOLERANCE:
                return False
            if keys is not None and other_keys is not None and m and difference(other_keys, keys) > TOLERANCE:
                return False
        if keys is None:
            return True
        response = respond(partial(updated, program, reading, token), token, seed)
    except Misfit:
        return False
    if not response.linear:
        return False
    columns = range(reading.value_dim)
    made = [response.transition[:, y, :, y] @ n + response.offset[:, y] / token.v[y] for y in columns]
    return all(difference(x, keys) < TOLERANCE for x in made)


def _unscaled(
    program: Program, reading: Reading, token: Token, S: Tensor, n: Tensor, m: float
) -> tuple[Tensor, Tensor | None]:
    """Return S e^m and n e^m after a token, from those before it; None without a normaliser."""
    scale = torch.tensor(m, dtype=torch.float64)
    names = {kind: name for name, kind in reading.carried}
    divisor = scale.exp() if "stabiliser" in names else torch.ones_like(scale)
    given = {name: n / divisor if kind == "normaliser" else scale for name, kind in reading.carried}
    new, after = evaluated(program, reading, token, S / divisor, given)
    factor = after[names["stabiliser"]].exp() if "stabiliser" in names else torch.ones_like(scale)
    return new * factor, after[names["normaliser"]] * factor if "normaliser" in names else None
