"""Update rules as people write them, and the row, the layout and the roles that `check` finds.

The layout is kv (S is key x value) or vk. Roles are those of the gates; a formula is the measured decay or strength.
"""

import pytest

from lineate.recognise.compare import check
from lineate.recognise.measuring import TOLERANCE

LINEAR, GATED, DELTA, GDN, KDA = (
    "linear_attention", "gated_linear_attention", "delta_rule", "gated_delta_rule", "kimi_delta_attention",
)  # fmt: skip
LAYOUT = {"kv": "key x value", "vk": "value x key"}

UNICODE = (
    "S_t = \u03b1_t * S_{t-1} @ (I - \u03b2_t * k_t \u2297 k_t) + \u03b2_t * v_t \u2297 k_t",
    "S\u209c = \u03b1\u209c \u00b7 S\u209c\u208b\u2081; "
    "S\u209c = S\u209c + \u03b2\u209c \u00b7 k\u209c \u2297 (v\u209c \u2212 S\u1d40 @ k)",
)
"""Greek letters, subscripts, a raised T, and the signs of inner and outer products."""

# expression: rule, layout, formula of the decay, formula of the strength of the write
ROWS = {
    # linear attention
    "S = S + outer(k, v)": (LINEAR, "kv", "1", "1"),
    "S + np.outer(v, k)": (LINEAR, "vk", "1", "1"),
    "S += k[:, None] * v[None, :]": (LINEAR, "kv", "1", "1"),
    "M = M + v.unsqueeze(-1) * k.unsqueeze(0)": (LINEAR, "vk", "1", "1"),
    "S += k.reshape(-1, 1) @ v.reshape(1, -1)": (LINEAR, "kv", "1", "1"),
    "state = eta * torch.outer(k, v) + state": (LINEAR, "kv", "1", "eta"),
    "S = S + k @ v.T": (LINEAR, "kv", "1", "1"),
    "S = S + k.T @ v": (LINEAR, "kv", "1", "1"),
    "S = S + diag(b) @ outer(k, v)": (LINEAR, "kv", "1", "b"),
    # gated linear attention: RetNet, Mamba-2, GLA
    "S = gamma * S + outer(k, v)": (GATED, "kv", "gamma", "1"),
    "outer(v, k) + alpha * W": (GATED, "vk", "alpha", "1"),
    "S = lambda * S + outer(k, v)": (GATED, "kv", "lam", "1"),
    "S[t] = a[t] * S[t-1] + outer(k[t], v[t])": (GATED, "kv", "a", "1"),
    "S_t = g * S_t-1 + outer(k_t, v_t)": (GATED, "kv", "g", "1"),
    "H = 0.9 * H + outer(v, k)": (GATED, "vk", "0.9", "1"),
    "h = exp(dt * A) * h + dt * outer(B, x)": (GATED, "kv", "exp(dt * A)", "dt"),
    "S = diag(a) @ S + outer(k, v)": (GATED, "kv", "a", "1"),
    "S = S * a[None, :] + outer(v, k)": (GATED, "vk", "a", "1"),
    "S = exp(g)[:, None] * S + outer(k, v)": (GATED, "kv", "exp(g)", "1"),
    "S = a * S + (1 - a) * outer(k, v)": (GATED, "kv", "a", "1 - a"),
    # DeltaNet
    "S = S + b * outer(k, v - S.T @ k)": (DELTA, "kv", "1", "b"),
    "S = S - beta * outer(k, S.T @ k - v)": (DELTA, "kv", "1", "beta"),
    "S = (I - lr * outer(k, k)) @ S + lr * outer(k, v)": (DELTA, "kv", "1", "lr"),
    "S = S @ (np.eye(len(k)) - b * np.outer(k, k)) + b * np.outer(v, k)": (DELTA, "vk", "1", "b"),
    "W = W + eta * (v - W @ k) @ k.T": (DELTA, "vk", "1", "eta"),
    "W += eta * outer(v - W @ k, k)": (DELTA, "vk", "1", "eta"),
    "S = S + b * k.T @ (v - k @ S)": (DELTA, "kv", "1", "b"),
    "old = S.T @ k; new = (1 - b) * old + b * v; S = S - outer(k, old) + outer(k, new)": (DELTA, "kv", "1", "b"),
    "S = S + 2 * sigmoid(b) * outer(k, v - dot(k, S))": (DELTA, "kv", "1", "2 * sigmoid(b)"),
    "S = S + (beta - lr) * outer(k, v - S.T @ k)": (DELTA, "kv", "1", "beta - lr"),
    "S = S + mu / (k @ k) * outer(k, v - S.T @ k)": (DELTA, "kv", "1", "mu / (k @ k)"),
    "S = S + mu / (eps + norm(k)**2) * outer(k, v - S.T @ k)": (DELTA, "kv", "1", "mu / (eps + k @ k)"),
    # Gated DeltaNet
    "S = a * S; S = S + b * outer(k, v - S.T @ k)": (GDN, "kv", "a", "b"),
    "S *= alpha\nS += beta * outer(k, v - S.T @ k)": (GDN, "kv", "alpha", "beta"),
    "S = b * S; S = S + a * outer(k, v - S.T @ k)": (GDN, "kv", "b", "a"),
    "S = a * (I - b * outer(k, k)) @ S + b * outer(k, v)": (GDN, "kv", "a", "b"),
    "S = b * outer(k, v) + (S - b * outer(k, S.T @ k)) * a": (GDN, "kv", "a", "b"),
    "S = a * S + b * outer(k, v - (a * S).T @ k)": (GDN, "kv", "a", "b"),
    "M = exp(g) * M; M = M + beta * outer(v - M @ k, k); o = M @ q": (GDN, "vk", "exp(g)", "beta"),
    "S = exp(-exp(A_log)) * S; S = S + b * outer(k, v - S.T @ k)": (GDN, "kv", "exp(-exp(A_log))", "b"),
    "S = exp(-exp(A_log) * softplus(dt)) * S; S = S + b * outer(k, v - S.T @ k)": (GDN, "kv", None, "b"),
    "S = S - lr * lam * S; S = S + lr * outer(k, v - S.T @ k)": (GDN, "kv", "1 - lr * lam", "lr"),
    UNICODE[0]: (GDN, "vk", "alpha", "beta"),
    UNICODE[1]: (GDN, "kv", "alpha", "beta"),
    "state = state * g.exp()\n"
    "mem = (state * k.unsqueeze(-1)).sum(dim=-2)\n"
    "delta = (v - mem) * beta\n"
    "state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)": (GDN, "kv", "exp(g)", "beta"),
    # Kimi Delta Attention
    "S = diag(a) @ S; S = S + b * outer(k, v - S.T @ k)": (KDA, "kv", "a", "b"),
    "S = (I - b * outer(k, k)) @ Diag(a) @ S + b * outer(k, v)": (KDA, "kv", "a", "b"),
    "S = S @ diag(a) @ (I - b * outer(k, k)) + b * outer(v, k)": (KDA, "vk", "a", "b"),
    "S = exp(g)[:, None] * S; S += b * outer(k, v - S.T @ k)": (KDA, "kv", "exp(g)", "b"),
    "M = M * w[None, :]; M = M + lr * outer(v - M @ k, k)": (KDA, "vk", "w", "lr"),
    "S = einsum('i,ij->ij', a, S); S = S + b * einsum('i,j->ij', k, v - einsum('ij,i->j', S, k))": (
        KDA, "kv", "a", "b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ROWS)
def test_rows(text):
    rule, layout, decay, write = ROWS[text]
    found = check(text)
    assert found.recognised and found.match.row.rule.name == rule
    assert found.reading.layout == LAYOUT[layout] and not found.reading.square
    assert (found.match.decay, found.match.write) == (decay, write)
    assert found.match.difference < TOLERANCE and found.match.keys == "any"
    assert found.remedy is None
    assert bool(found.distances) == (rule not in (GDN, KDA))


# expression: what each of its names is
ROLES = {
    "M = g * M; M = M + lr * outer(key, value - M.T @ key); o = M.T @ query": {
        "M": "memory", "g": "decay", "lr": "write strength", "key": "key", "value": "value", "query": "query",
    },
    "S = b * S + outer(k, v)": {"S": "memory", "b": "decay", "k": "key", "v": "value"},
    "S = S + a * outer(k, v - S.T @ k)": {"S": "memory", "a": "write strength", "k": "key", "v": "value"},
    "S = a * S + (1 - a) * outer(k, v)": {
        "S": "memory", "a": "decay and write strength", "k": "key", "v": "value",
    },
    "h = exp(dt * A) * h + dt * outer(B, x); y = h.T @ C": {
        "h": "memory", "dt": "decay and write strength", "A": "decay", "B": "key", "x": "value", "C": "query",
    },
}  # fmt: skip


@pytest.mark.parametrize("text", ROLES)
def test_roles(text):
    found = check(text)
    assert found.recognised and found.roles == ROLES[text]


KEYS = {
    "S = S + b * outer(k, v) - b / (k @ k) * outer(k, S.T @ k)": "unit",
    "S = a * S - a * b / norm(k) * outer(k, S.T @ k) + b * outer(k, v)": "unit",
    "k = k / norm(k); S = S + b * outer(k, v - S.T @ k)": "normalised",
    "u = F.normalize(k, dim=-1); S = a * S; S = S + b * outer(u, v - S.T @ u)": "normalised",
    "S = S + outer(normalize(k), v)": "normalised",
    "S = S + b * outer(k, v - S.T @ k)": "any",
}


@pytest.mark.parametrize("text", KEYS)
def test_for_which_keys(text):
    found = check(text)
    assert found.recognised and found.match.keys == KEYS[text]


CHANGED = {
    "S = S + b * outer(k, v - S.T @ k)": "outer(k, S.T @ k)",
    "S = S + b * outer(v - S @ k, k)": "outer(S @ k, k)",
    "S = a * S; S = S + b * outer(k, v - S.T @ k)": "outer(k, S.T @ k)",
    "S = S @ diag(a) @ (I - b * outer(k, k)) + b * outer(v, k)": "outer(S @ k, k)",
    "S = a * S + outer(k, v)": "outer(k, S.T @ k)",
}
"""Rows, each with a term of the same shape."""


@pytest.mark.parametrize("text", CHANGED)
def test_a_small_change_is_noticed(text):
    """A rule whose new memory is off by a millionth of such a term is another one; off by S S^T S it is none."""
    assert not check(text).match.row.rule.general
    found = check(f"{text}; S = S + 0.000001 * {CHANGED[text]}")
    assert not found.recognised or found.match.row.rule.general
    assert not check(f"{text}; S = S + 0.000001 * S @ S.T @ S").recognised


@pytest.mark.cover
def test_vectors_are_asked_for():
    text = "S = S * a; S = S + b * outer(v - S @ k, k)"
    assert check(text).match.row.rule.name == GDN
    assert check(text, per_key=["a"]).match.row.rule.name == KDA
    assert check(text, per_key=["b"]).match.row.rule.name == "diagonal_plus_low_rank"
    turned = "S = a * S; S = S + b * outer(k, v - S.T @ k)"
    assert check(turned, per_value=["a"]).match.relative == "value-channel-decay"
    assert check(turned, per_value=["b"]).match.relative == "beta-per-value-channel"


def test_other_readings_are_told():
    others = {(x.gate, x.per): x.match for x in check("S = S * a; S = S + b * outer(v - S @ k, k)").others}
    assert others["a", "key"].row.rule.name == KDA
    assert others["b", "key"].row.rule.name == "diagonal_plus_low_rank"
    assert ("a", "value") not in others  # S [v, k] times a vector [v] has no shape


def test_the_order_matters_for_channels_alone():
    """One decay per head commutes with the erase; one per channel does not."""
    number = check("S = (S - b * outer(k, S.T @ k)) * a + b * outer(k, v)")
    assert number.match.row.rule.name == GDN and any("commutes" in note for note in number.notes)
    assert check("S = diag(a) @ (S - b * outer(k, S.T @ k)) + b * outer(k, v)").match.relative == "decay-after-erase"


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("S = S + outer(exp(k), v)", "key"),
        ("S = a * S + outer(k, tanh(v))", "value"),
        ("S += outer(k, v - a)", "value"),
    ],
)
def test_features(text, side):
    """Linear attention of a computed key or value."""
    found = check(text)
    assert found.recognised and found.match.write is None
    assert any(f"the computed {side}" in note for note in found.notes)


@pytest.mark.parametrize("text", ["S = S + v", "S = a * S + k", "S = S + outer(k, k)", "S = S + outer(a, v)"])
def test_what_is_not_stored_under_a_key_is_no_row(text):
    assert check(text).match.relative == "other-write"


def test_a_row_does_not_depend_on_the_query():
    found = check("S = S + (q @ k) * outer(k, v)")
    assert not found.recognised and any("depends on the query" in note for note in found.notes)
