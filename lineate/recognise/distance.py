"""The distances of a rule from Gated DeltaNet and Kimi Delta Attention, after one token and after a hundred."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.recognise.evaluation import Token
from lineate.recognise.match import Match
from lineate.recognise.measuring import formula_value
from lineate.recognise.rules import run_tokens
from lineate.recognise.symbols import DECAYS, RATES
from lineate.rule import GATED_DELTA, KIMI_DELTA

STEPS = (1, 100)
SLOW, MIDDLE = (0.9, 1.0), 0.5
"""The decay of the two rows where the rule has none, and their beta where it has none."""


@dataclass(frozen=True)
class Distance:
    """|S - S_row| / |S_row| (Frobenius) after the numbers of tokens in STEPS; inf if S overflows."""

    rule: str
    after: tuple[float, ...]


def distances(
    update: Callable[[Token, Tensor], Tensor], tokens: Sequence[Token], match: Match | None, seed: torch.Generator
) -> tuple[Distance, ...]:
    """Return the distances from both rows; they get those keys, values and gates that the rule has.

    `update` is (token, S) -> the new memory.
    """
    start = torch.randn(len(tokens[0].k), len(tokens[0].v), generator=seed, dtype=torch.float64)
    S, made = start, []
    for token in tokens:
        S = update(token, S) if S.isfinite().all() else S
        made.append(S)
    k, v = (torch.stack([getattr(token, name) for token in tokens]) for name in "kv")
    gates = [_gates(token, match, seed) for token in tokens]
    decay, beta = torch.stack([x for x, _ in gates]), torch.stack([x for _, x in gates])
    found = []
    for rule, own in ((GATED_DELTA, decay.log().mean(-1).exp()), (KIMI_DELTA, decay)):
        after = []
        for n in STEPS:
            wanted = run_tokens(rule, start, k[:n], v[:n], own[:n], beta[:n])
            far = ((made[n - 1] - wanted).norm() / wanted.norm()).item()
            after.append(far if math.isfinite(far) else math.inf)
        found.append(Distance(rule.name, tuple(after)))
    return tuple(found)


def _gates(token: Token, match: Match | None, seed: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the decay [k] and the beta [] that the rows get: those measured, else those named so, else usual ones."""
    K = len(token.k)
    drawn = SLOW[0] + (SLOW[1] - SLOW[0]) * torch.rand(K, generator=seed, dtype=torch.float64)
    decay = beta = None
    if match is not None:
        meant = match.meant_decay
        decay = drawn if meant == "1" else None if meant is None else formula_value(meant, token)
        beta = None if match.write is None or match.write == "0" else formula_value(match.write, token).abs().mean()
    if decay is None:
        decay = _named(token, DECAYS, drawn)
    if decay.shape != (K,):
        decay = decay.mean().expand(K)
    return decay.clamp(1e-6, 1), _named(token, RATES, torch.tensor(MIDDLE)).mean() if beta is None else beta


def _named(token: Token, names: Sequence[str], default: Tensor) -> Tensor:
    """Return the first gate that has one of these names, and exp of it where it is negative: it is a logarithm."""
    found = next((x for name, x in token.gates.items() if name in names), default.double())
    return torch.where(found < 0, found.exp(), found)
