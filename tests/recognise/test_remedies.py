"""Every remedy that `check` proposes is a row when it is given back to `check`, and its first words say what to do."""

import re

import pytest

from lineate.recognise.compare import check
from lineate.recognise.report import closing
from tests.support.marks import cover_but

# expression, gates per key channel, gates per value channel, the first words of the remedy
PROPOSED = {
    "S = tanh(S) + outer(k, v)": ("", "", "make the new memory linear in S"),
    "S = S @ S.T @ S + exp(g) * outer(key, value)": ("", "", "make the new memory linear in S"),
    "C = tanh(C) + i * outer(v, k)": ("", "", "make the new memory linear in S"),
    "S = S + b2 * outer(k2, v2 - S.T @ k1) + outer(k1, v1)": ("", "", "write the pairs one after the other"),
    "M = a * M + outer(v1, k1) + outer(v2, k2)": ("", "", "write the pairs one after the other"),
    "S = a * S + b * outer(k, v - S.T @ q)": ("", "", "use k, not q"),
    "state = state * w[None, :] - outer(kk, state.T @ kk) + outer(k, v)": ("", "", "decay the whole of S"),
    "S = 2 * S - outer(kk * a, S.T @ kk) + outer(k, v)": ("", "", "use a decay in [0, 1]"),
    "S = diag(w) @ S - outer(kk * a, S.T @ kk) + outer(k, v) + 1": ("", "", "write one outer(k, v)"),
    "S = diag(w) @ S - outer(k * a, S.T @ k) * v + outer(k, v)": ("", "", "erase with the same strength"),
    "M = M @ diag(a) - b * outer(M @ kk, kk) - b * outer(M @ k, k) + outer(v, k)": ("", "", "erase one product"),
    "S = S - outer(k, v * sum(S.T @ k)) + outer(k, v)": ("", "", "let every value channel be read alone"),
    "M = M + outer(b * (v - M @ k), k)": ("", "b", "use one beta per head"),
    "S = S * a[None, :]; S = S + b * outer(k, v - S.T @ k)": ("b", "", "decay the key channels"),
    "h = exp(dt * A) * h - dt * outer(B, x)": ("", "", "write + beta * outer(k, v)"),
    "S = g * S + S @ diag(a) + r[:, None] * v": ("", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("text", cover_but(PROPOSED, [*PROPOSED][:2]))
def test_a_remedy_is_accepted(text):
    keys, values, words = PROPOSED[text]
    found = check(text, keys.split(), values.split())
    assert not found.recognised and found.change.startswith(words) and found.change not in ("", "change it")
    accepted = check(found.remedy)
    assert accepted.recognised and accepted.match.keys == "any"
    assert accepted.match.row.name == found.remedy_name
    assert accepted.reading.layout == found.reading.layout
    told = "\n".join(closing(found))
    assert re.search(rf"What to change: {re.escape(found.change)}\. .*\n    {re.escape(found.remedy)}$", told)
