"""Rules that are no row: each gets its diagnosis, its distances, and a remedy that is a row."""

import math
from functools import cache, partial

import pytest
import torch

from lineate.recognise.compare import check
from lineate.recognise.distance import STEPS, distances
from lineate.recognise.evaluation import draw_token, updated
from lineate.recognise.expressions import read_expression
from lineate.recognise.rules import RELATIVES
from lineate.rule import step
from tests.support.marks import slow_but

once = cache(check)
"""The same finding for all tests of an expression."""

# expression: the diagnosis, and the row of the remedy
WRONG = {
    # order of decay and erase
    "S = diag(a) @ (I - b * outer(k, k)) @ S + b * outer(k, v)": ("decay-after-erase", "kimi_delta_attention"),
    "S = S @ (I - b * outer(k, k)) @ diag(a) + b * outer(v, k)": ("decay-after-erase", "kimi_delta_attention"),
    # the read is not decayed
    "S = a * S + b * outer(k, v - S.T @ k)": ("undecayed-read", "gated_delta_rule"),
    "S = a[:, None] * S + b * outer(k, v - S.T @ k)": ("undecayed-read", "kimi_delta_attention"),
    "W = W - lr * (outer(W @ k - v, k) + lam * W)": ("undecayed-read", "gated_delta_rule"),
    "S = (a * I - b * outer(k, k)) @ S + b * outer(k, v)": ("undecayed-read", "gated_delta_rule"),
    # the new write is decayed too
    "S = a * (S + b * outer(k, v - S.T @ k))": ("decayed-write", "gated_delta_rule"),
    "S = S + b * outer(k, v - S.T @ k); S = diag(a) @ S": ("decayed-write", "kimi_delta_attention"),
    # decay on value channels
    "S = S * a[None, :]; S = S + b * outer(k, v - S.T @ k)": ("value-channel-decay", "kimi_delta_attention"),
    "S = S @ diag(a) + outer(k, v)": ("value-channel-decay", "kimi_delta_attention"),
    "S = diag(a) @ S + b * outer(v - S @ k, k)": ("value-channel-decay", "kimi_delta_attention"),
    # a penalty without 1/2
    "S = S - lr * (outer(k, S.T @ k - v) + 2 * lam * S)": ("penalty-without-half", "gated_delta_rule"),
    "S = S - 2 * (1 - g) * S; S = S + b * outer(k, v - S.T @ k)": ("penalty-without-half", "gated_delta_rule"),
    "S = (2 * g - 1) * S + outer(k, v)": ("penalty-without-half", "gated_delta_rule"),
    # beta per channel
    "S = a * S; S = S + outer(k, diag(b) @ (v - S.T @ k))": ("beta-per-value-channel", "gated_delta_rule"),
    # a missing transpose
    "S = S + b * outer(k, v - S @ k)": ("missing-transpose", "delta_rule"),
    "S = a * S; S = S + b * outer(k, v - S @ k)": ("missing-transpose", "gated_delta_rule"),
    # signs
    "S = S - b * outer(k, v - S.T @ k)": ("sign-of-the-step", "delta_rule"),
    "S = a * S; S = S + b * outer(k, S.T @ k - v)": ("sign-of-the-step", "gated_delta_rule"),
    "S = S + b * outer(k, v + S.T @ k)": ("sign-of-the-read", "delta_rule"),
    "S = a * S; S = S - b * outer(k, v + S.T @ k)": ("sign-of-the-value", "gated_delta_rule"),
    "S = a * S - outer(k, v)": ("sign-of-the-value", "gated_delta_rule"),
    # strengths, ranges, and what is written
    "S = exp(g * g) * S + outer(k, v)": ("growing", "gated_delta_rule"),
    "S = (a - 1) * S + outer(k, v)": ("negative-decay", "gated_delta_rule"),
    "S = S + k * v": ("other-write", "delta_rule"),
    "S = a * S + b * outer(k, v) + 1": ("other-write", "gated_delta_rule"),
    "S = a * S": ("nothing-written", "gated_delta_rule"),
    # relatives with a name of their own
    "S = S + b * outer(k - S @ v, v)": ("oja", "delta_rule"),
    "y = S.T @ k; S = S + eta * outer(k - S @ y, y)": ("oja-unsupervised", "delta_rule"),
    "S = S + eta * (outer(k, v) - S * v**2)": ("oja-per-unit", "delta_rule"),
    "S = S + b * outer(k, v); S = S / norm(S)": ("normalised-hebb", "delta_rule"),
    "S = (S + b * outer(k, v)) / norm(S)": ("normalised-hebb", "delta_rule"),
}


FIRST = {found: text for text, found in reversed(WRONG.items())}
"""The first expression of each diagnosis and row; the others repeat them in another form."""
wrong = pytest.mark.parametrize("text", slow_but(WRONG, FIRST.values()))


@wrong
def test_diagnosis(text):
    relative, row = WRONG[text]
    found = once(text)
    assert not found.recognised and found.match.relative == relative
    assert found.relative is RELATIVES[relative] and found.relative.change
    mended = once(found.remedy)
    assert mended.recognised and mended.match.row.rule.name == row and found.remedy_name == mended.match.row.name
    assert mended.reading.layout == found.reading.layout


@wrong
def test_distances(text):
    """The rule is not Gated DeltaNet and not KDA: it is some way from both, after one token or after 100."""
    distances = {x.rule: x.after for x in once(text).distances}
    assert set(distances) == {"gated_delta_rule", "kimi_delta_attention"}
    for after in distances.values():
        assert max(after) > 1e-3 and not any(map(math.isnan, after))


def test_distances_are_those_of_the_equation():
    """A hundred tokens of a rule and of `lineate.rule.step`, from the same memory and with the same gates."""
    text = "S = a * S + b * outer(k, v - S.T @ k)"
    program, reading = read_expression(text), once(text).reading
    seed = torch.Generator().manual_seed(7)
    tokens = [draw_token(program, reading, seed, True, frozenset()) for _ in range(STEPS[-1])]
    found = distances(partial(updated, program, reading), tokens, once(text).match, torch.Generator().manual_seed(8))
    S = wanted = torch.randn(5, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    expected = []
    for i, token in enumerate(tokens):
        a, b = token.gates["a"][None], token.gates["b"][None]
        S = a * S + b * torch.outer(token.k, token.v - S.mT @ token.k)
        _, wanted = step(wanted, token.k, token.k, token.v, a, b, True)
        if i + 1 in STEPS:
            expected.append(((S - wanted).norm() / wanted.norm()).item())
    assert [x.after for x in found] == [pytest.approx(expected)] * 2  # one decay for all channels: KDA is GDN


WITHOUT_STATE = {
    "m = mu * m + outer(k, v - S.T @ k); S = S + b * m": "second-state",
    "S = eta * S - theta * outer(M.T @ k - v, k).T; M = (1 - a) * M + S": "second-state",
    "z = a * z + k; S = S + outer(k, v)": "second-state",
    "softmax(q @ k) * v": "softmax",
    "S = S + outer(torch.softmax(k, dim=-1), v)": "softmax",
}


@pytest.mark.parametrize("text", WITHOUT_STATE)
def test_what_is_no_update_of_one_memory(text):
    found = check(text)
    assert not found.recognised and found.match.relative == WITHOUT_STATE[text]
    assert found.distances == () and found.remedy is None


@pytest.mark.cover
@pytest.mark.parametrize("text", ["S = tanh(exp(g) * S) + b * outer(k, v)", "S = a * S + b * outer(k, v - S.T @ q)"])
def test_none(text):
    found = check(text)
    assert found.change and found.match is None and not found.recognised and len(found.distances) == 2
    assert check(found.remedy).match.row.rule.name == "gated_delta_rule"


@pytest.mark.cover
def test_the_query_does_not_belong_into_the_update():
    assert any("query" in note for note in check("S = a * S + b * outer(k, v - S.T @ q)").notes)
    assert not check("S = S + outer(k, v); o = S.T @ q").notes
    found = check("S = S + outer(q, v)")
    assert found.recognised and found.roles["q"] == "key" and any("taken for the key" in note for note in found.notes)


def test_what_is_square_only_says_so():
    assert any("as many key channels" in note for note in check("S = S + b * outer(k, v - S @ k)").notes)


def test_one_step_of_weight_decay_is_gated_deltanet_of_other_gates():
    """The statement of the text of "undecayed-read": beta / decay for beta, decay * v for v."""
    torch.manual_seed(0)
    S, k, v = torch.randn(5, 3).double(), torch.randn(5).double(), torch.randn(3).double()
    a, b = torch.tensor([0.7]).double(), torch.tensor([0.4]).double()
    _, renamed = step(S, k, k, a * v, a, b / a, True)
    torch.testing.assert_close(renamed, a * S + b * torch.outer(k, v - S.mT @ k))


def test_stable_ranges_hold():
    """At the end of each range that a relative names, the largest eigenvalue of the transition along k is 1."""
    k = torch.nn.functional.normalize(torch.randn(5).double(), dim=0)
    eye, a = torch.eye(5).double(), 0.6
    for b in (0.0, 1 + a):  # undecayed-read
        assert torch.linalg.eigvalsh(a * eye - b * torch.outer(k, k)).abs().max() <= 1 + 1e-12
    assert torch.linalg.eigvalsh(a * eye - 1.7 * torch.outer(k, k)).abs().max() > 1
    beta = torch.rand(5).double()
    beta = beta * 2 / (beta * k.square()).sum()  # beta-per-key-channel
    assert torch.linalg.eigvals(eye - torch.outer(beta * k, k)).abs().max() <= 1 + 1e-12
