"""The rows after Kimi Delta Attention, in the notations of their papers: their gates, cases and calls."""

import pytest
import torch

import lineate
from lineate.recognise.compare import check
from lineate.recognise.measuring import TOLERANCE
from lineate.recognise.report import as_json, call, closing, facts, headline

SECOND, LOW_RANK, PRODUCT = "gated_delta_rule_2", "diagonal_plus_low_rank", "gated_delta_product"
TURNED = "its state is the transpose of S"

# expression, gates per key channel, gates per value channel: the row, its case, what the call has after "with"
ROWS = {
    # Gated DeltaNet-2
    ("S = (I - outer(k, b * k)) @ diag(a) @ S + outer(k, w * v)", "b", "w"): (
        SECOND, None, "log_decay = log(a), erase = b, write = w",
    ),
    ("S_t = S_{t-1} @ diag(\u03b1_t) @ (I - outer(b * k, k)) + outer(w * v, k)", "b", "w"): (
        SECOND, None, f"log_decay = log(alpha), erase = b, write = w, {TURNED}",
    ),
    ("S = exp(g)[:, None] * S; u = write * v - S.T @ (erase * k); S = S + outer(k, u)", "erase", "write"): (
        SECOND, None, "log_decay = g, erase = erase, write = write",
    ),
    ("M = exp(g) * M; M = M + outer(sigmoid(w) * v - M @ (2 * b * k), k)", "b", "w"): (
        SECOND, None, f"log_decay = g, erase = 2 * b, write = sigmoid(w), {TURNED}",
    ),
    ("S = S + outer(k, b * v - S.T @ k)", "", ""): (SECOND, None, "log_decay = 0, erase = 1, write = b"),
    # RWKV-7; the next three are the formula of the paper, the code of its authors, and the generalized delta rule
    ("S_t = S_{t-1} @ (diag(w_t) - kk_t^T @ (a_t * kk_t)) + v_t^T @ k_t", "a", ""): (
        LOW_RANK, "rwkv-7", f"log_decay = log(w), probe = kk / w, direction = a * kk, {TURNED}",
    ),
    ("S = S * w.T + S @ (-kk @ (kk * a).T) + v @ k.T", "w a", ""): (
        LOW_RANK, "rwkv-7", f"log_decay = log(w), probe = kk / w, direction = a * kk, {TURNED}",
    ),
    ("S = exp(w)[:, None] * S + outer(b, S.T @ a) + outer(k, v)", "", ""): (
        LOW_RANK, None, "log_decay = w, probe = a / exp(w), direction = -b",
    ),
    ("S = diag(w) @ S - outer(kk * a, S.T @ kk) + outer(k, v)", "a", ""): (
        LOW_RANK, "rwkv-7", "log_decay = log(w), probe = kk / w, direction = a * kk",
    ),
    ("S = exp(-exp(w))[:, None] * S - outer(\u03ba * a, S.T @ \u03ba) + outer(k, v)", "a", ""): (
        LOW_RANK, "rwkv-7", "log_decay = -exp(w), probe = kappa / exp(-exp(w)), direction = a * kappa",
    ),
    ("kk = normalize(k); S = S @ (diag(w) - outer(kk, a * kk)) + outer(v, k)", "a", ""): (
        LOW_RANK, "rwkv-7", f"log_decay = log(w), probe = normalize(k) / w, direction = a * normalize(k), {TURNED}",
    ),
    # the general row
    ("S = (diag(w) + outer(a, b)) @ S + outer(k, v)", "", ""): (
        LOW_RANK, None, "log_decay = log(w), probe = b / w, direction = -a",
    ),
    ("S = diag(a) @ S; S = S - outer(direction, S.T @ probe) + outer(k, b * v)", "", ""): (
        LOW_RANK, None, "log_decay = log(a), probe = probe, direction = direction, v = b * v",
    ),
    ("S = S + outer(diag(b) @ k, v - S.T @ k)", "", ""): (
        LOW_RANK, None, "log_decay = 0, probe = k, direction = b * k, k = b * k",
    ),
    # Comba: the error is compared before the decay
    ("S = a * S + b * outer(k, v - d * (S.T @ k))", "", ""): (
        SECOND, "comba", "log_decay = log(a), erase = b * d / a, write = b",
    ),
    ("S = S @ (a * I - b * outer(sigmoid(d) * k, k)) + b * outer(v, k)", "d", ""): (
        SECOND, "comba", f"log_decay = log(a), erase = b * sigmoid(d) / a, write = b, {TURNED}",
    ),
    ("S = exp(g) * S + b * outer(k, v - S.T @ p)", "", ""): (
        LOW_RANK, "comba", "log_decay = g, probe = p / exp(g), direction = b * k, v = b * v",
    ),
    ("S = a * S; S = S + b * outer(k, v - d * (S.T @ k))", "", ""): (
        SECOND, None, "log_decay = log(a), erase = b * d, write = b",  # after the decay, as in fla's naive form
    ),
    # Gated DeltaProduct
    ("S = a * S; S = S + b1 * outer(k1, v1 - S.T @ k1); S = S + b2 * outer(k2, v2 - S.T @ k2)", "", ""): (
        PRODUCT, None, "log_decay = log(a), beta = b1, b2, k = k1, k2, v = v1, v2 as the writes of a token",
    ),
    ("S = exp(g) * S; S = S + b * outer(v2 - S @ k2, k2); S = S + b * outer(v1 - S @ k1, k1)", "", ""): (
        PRODUCT, None, f"log_decay = g, beta = b, b, k = k2, k1, v = v2, v1 as the writes of a token, {TURNED}",
    ),
    (
        "S_t = (I - \u03b2_{t,2} * outer(k_{t,2}, k_{t,2})) @ (I - \u03b2_{t,1} * outer(k_{t,1}, k_{t,1})) @ S_{t-1} "
        "+ \u03b2_{t,1} * (I - \u03b2_{t,2} * outer(k_{t,2}, k_{t,2})) @ outer(k_{t,1}, v_{t,1}) "
        "+ \u03b2_{t,2} * outer(k_{t,2}, v_{t,2})", "", "",
    ): (PRODUCT, None, "log_decay = 0, beta = beta1, beta2, k = k1, k2, v = v1, v2 as the writes of a token"),
    (
        "S = S + b1 * outer(k1, x1 - S.T @ k1); S = S + b2 * outer(k2, x2 - S.T @ k2); "
        "S = S + 2 * b3 * outer(k3, x3 - S.T @ k3)", "", "",
    ): (
        PRODUCT, None,
        "log_decay = 0, beta = b1, b2, 2 * b3, k = k1, k2, k3, v = x1, x2, x3 as the writes of a token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", ROWS)
def test_rows(asked):
    row, case, given = ROWS[asked]
    found = check(asked[0], asked[1].split(), asked[2].split())
    assert found.recognised and found.match.row.rule.name == row and found.match.case == case
    assert call(found, found.match, found.match.row).partition(" with ")[2] == given
    assert found.match.difference < TOLERANCE and found.match.keys == "any" and found.remedy is None
    assert dict(facts(found))["stable"] and not any("computed from" in x for _, x in facts(found))


# expression: the diagnosis, and the gates of the row that computes it
COMPUTED = {
    "S = a * S + b * outer(k, v - S.T @ k)": ("undecayed-read", "log_decay = log(a), erase = b / a, write = b"),
    "S = diag(a) @ S + b * outer(k, v - S.T @ k)": ("undecayed-read", "log_decay = log(a), erase = b / a, write = b"),
    "S = a * (S + b * outer(k, v - S.T @ k))": ("decayed-write", "log_decay = log(a), erase = b, write = a * b"),
    "S = diag(a) @ (S - b * outer(k, S.T @ k)) + b * outer(k, v)": (
        "decay-after-erase", "log_decay = log(a), probe = k / a, direction = b * a * k, v = b * v",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", COMPUTED)
def test_a_slip_is_named_although_a_row_computes_it(text):
    relative, given = COMPUTED[text]
    found = check(text)
    assert not found.recognised and found.match.relative == relative
    assert headline(found) == f"Not one of the five rows: {found.relative.name}"
    assert as_json(found)["computed_by"].endswith(f" with {given}")
    assert given in dict(facts(found))["lineate"] and check(found.remedy).recognised


def test_a_case_is_told():
    found = check("S = S @ (diag(w) - outer(kk, a * kk)) + outer(v, k)")
    assert headline(found) == "RWKV-7, a case of diagonal plus low rank"
    assert found.roles == {
        "S": "memory", "k": "key", "v": "value", "kk": "another key", "w": "decay", "a": "erase strength",
    }  # fmt: skip
    assert "scale=1" in dict(facts(found))["what it does"]
    assert "If a is a vector, one number per key channel, it is: RWKV-7, a case of diagonal plus low rank." in closing(
        found
    )
    found = check("S = a * S; S = S + b1 * outer(k1, v1 - S.T @ k1); S = S + b2 * outer(k2, v2 - S.T @ k2)")
    assert found.roles == {
        "S": "memory", "k1": "key", "v1": "value", "k2": "another key", "v2": "another value", "a": "decay",
        "b1": "write strength", "b2": "write strength",
    }  # fmt: skip


NEARLY = {
    "S = diag(w) @ S + outer(kk * a, S.T @ kk) + outer(k, v) + 0.001 * S @ S.T @ S": "make the new memory linear in S",
    "S = diag(w) @ S - outer(kk * a, S.T @ kk) - 0.001 * outer(k, S.T @ k) + outer(k, v)": "erase one product",
    "S = (I - outer(k, b * k)) @ diag(a) @ S + outer(k, w * v) + 0.000001 * outer(b * k, b * v)": "write one outer",
    "S = a * S; S = S + b1 * outer(k1, v1 - S.T @ k1); S = S + b2 * outer(k2, v2 - S.T @ k1)": "write the pairs",
    "S = diag(a) @ S; S = S + b1 * outer(k1, v1 - S.T @ k1); S = S + b2 * outer(k2, v2 - S.T @ k2)": "write the pairs",
}


@pytest.mark.cover
@pytest.mark.parametrize("text", NEARLY)
def test_what_is_nearly_a_row(text):
    found = check(text, per_key=[x for x in "b" if " b * k" in text], per_value=[x for x in "w" if "w * v" in text])
    assert not found.recognised and found.change.startswith(NEARLY[text])
    accepted = check(found.remedy)
    assert accepted.recognised and accepted.match.row.name == found.remedy_name


def test_a_remedy_may_write_several_times():
    found = check("S = a * S; T = S; S = S + b1 * outer(k1, v1 - T.T @ k1) + b2 * outer(k2, v2 - T.T @ k2)")
    assert found.remedy == "S = a * S; S = S + b1 * outer(k1, v1 - S.T @ k1); S = S + b2 * outer(k2, v2 - S.T @ k2)"
    assert found.remedy_name == "Gated DeltaProduct" and check(found.remedy).match.row.rule.name == PRODUCT


def test_the_call_of_rwkv_7_computes_its_paper():
    """S_t = S_{t-1} (diag(w) - kk^T (a * kk)) + v^T k and S_t q, token by token, against the call of `check`."""
    torch.manual_seed(0)
    t, d = 7, 4
    q, k, v, kk = torch.randn(4, t, d, dtype=torch.float64)
    kk = torch.nn.functional.normalize(kk, dim=-1)
    w, a = torch.exp(-0.6065 * torch.rand(t, d).double()), torch.rand(t, d).double()
    S, wanted = torch.zeros(d, d).double(), []
    for x in range(t):
        S = S @ (torch.diag(w[x]) - torch.outer(kk[x], a[x] * kk[x])) + torch.outer(v[x], k[x])
        wanted.append(S @ q[x])
    given = (x[None, :, None] for x in (q, k, v, w.log(), kk / w, a * kk))
    out, state = lineate.diagonal_plus_low_rank(*given, scale=1.0)
    torch.testing.assert_close(out[0, :, 0], torch.stack(wanted))
    torch.testing.assert_close(state[0, 0].mT, S)
