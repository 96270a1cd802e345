"""HGRN2 and mLSTM: gated linear attention in the notations of their papers, with second states that are explained."""

import pytest
import torch

import lineate
from lineate.recognise.compare import check
from lineate.recognise.report import as_json, call, closing, facts, headline

HGRN2 = {
    "S = diag(f) @ S + outer(1 - f, v)": "log(f), k = 1 - f",
    "H_t = H_{t-1} @ diag(f_t) + outer(i_t, 1 - f_t); o_t = H_t @ q_t": (
        "log(f), k = 1 - f, its state is the transpose of S"
    ),
    "f = sigmoid(g); S = S * f[:, None] + outer(1 - f, v)": "log(sigmoid(g)), k = 1 - sigmoid(g)",
    "k = 1 - exp(g); S = exp(g)[:, None] * S + outer(k, v)": "g, k = 1 - exp(g)",
}


@pytest.mark.parametrize("text", HGRN2)
def test_hgrn2(text):
    found = check(text)
    assert found.recognised and found.match.case == "hgrn2" and found.remedy is None
    assert call(found, found.match, found.match.row).partition("with log_decay = ")[2] == HGRN2[text]
    assert headline(found).startswith("HGRN2, a case of gated linear attention")
    assert "k = 1 - decay" in dict(facts(found))["what it does"] and as_json(found)["case"] == "hgrn2"
    assert not any("taken for the key" in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    ["S = diag(f) @ S + outer(1 - 0.999 * f, v)", "S = diag(f) @ S + outer(f, v)", "S = f * S + outer(1 - a, v)"],
)
def test_what_is_not_hgrn2(text):
    """Neither 1 - decay nor the key is written."""
    assert check(text).match.relative == "other-write"


def test_hgrn2_is_a_case_and_a_product_with_the_key_is_none():
    assert check("S = diag(f) @ S + outer((1 - f) * k, v)").match.case is None


STABLE = (
    "m_new = max(logsigmoid(f) + m, i); f2 = exp(logsigmoid(f) + m - m_new); i2 = exp(i - m_new); "
    "C = f2 * C + i2 * outer(v, k); n = f2 * n + i2 * k; h = C @ q / max(abs(n @ q), exp(-m_new))"
)
MLSTM = {
    "C_t = f_t * C_{t-1} + i_t * outer(v_t, k_t); n_t = f_t * n_{t-1} + i_t * k_t": ("log(f)", "i"),
    "C = f * C + i * v @ k.T; n = f * n + i * k; h = C @ q / max(abs(n.T @ q), 1)": ("log(f)", "i"),
    "S = sigmoid(f) * S + exp(i) * outer(k, v)": ("log(sigmoid(f))", "exp(i)"),
    "m_new = max(f + m, i); S = exp(f + m - m_new) * S + exp(i - m_new) * outer(k, v)": ("f", "exp(i)"),
    STABLE: ("log(sigmoid(f))", "exp(i)"),
}


@pytest.mark.parametrize("text", MLSTM)
def test_mlstm(text):
    found = check(text)
    assert found.recognised and found.match.case == "mlstm"
    log_decay, write = MLSTM[text]
    assert f"with log_decay = {log_decay}, v = {write} * v" in call(found, found.match, found.match.row)
    assert found.roles.get("n", "second state") == "second state"
    notes = " ".join(closing(found))
    assert ("n is a normaliser" in notes) == ("n" in found.roles) and ("m is a stabiliser" in notes) == (
        "m" in found.roles
    )


def test_linear_attention_with_a_normaliser():
    found = check("z = z + k; S = S + outer(k, v); o = S.T @ q / (z @ q)")
    assert call(found, found.match, found.match.row) == "lineate.linear_attention(q, k, v) with normalize=True"


@pytest.mark.parametrize(
    "text",
    [
        "n = a * n + i * k; S = f * S + i * outer(k, v)",  # another decay than the memory's
        "n = f * n + k; S = f * S + i * outer(k, v)",  # another strength
        "n = a * n + b * k; S = a * S; S = S + b * outer(k, v - S.T @ k)",  # it corrects, n does not
        "n = f * n + i * k; S = f * S + i * outer(n, v)",  # the memory depends on it
        "m_new = max(f + m, i); S = exp(f - m_new) * S + exp(i - m_new) * outer(k, v)",  # m is left out once
        "m_new = max(f + m, i); n = f * n + i * k; S = exp(f + m - m_new) * S + exp(i - m_new) * outer(k, v)",
        "z = z + k; n = n + k; m = m + 1; S = S + outer(k, v)",
    ],
)
def test_other_second_states_are_not_explained(text):
    assert check(text).match.relative == "second-state"


def test_the_call_of_mlstm_computes_it():
    """The call and the notes, token by token with a stabiliser, against the text's own equations."""
    torch.manual_seed(0)
    t, d = 9, 4
    q, k, v = torch.randn(3, t, d, dtype=torch.float64)
    f, i = torch.randn(2, t, dtype=torch.float64)
    C, n, m, h = torch.zeros(d, d).double(), torch.zeros(d).double(), torch.tensor(0.0).double(), []
    for x in range(t):
        m_new = torch.maximum(torch.nn.functional.logsigmoid(f[x]) + m, i[x])
        kept, put = torch.exp(torch.nn.functional.logsigmoid(f[x]) + m - m_new), torch.exp(i[x] - m_new)
        C, n, m = kept * C + put * torch.outer(v[x], k[x]), kept * n + put * k[x], m_new
        h.append(C @ q[x] / torch.maximum((n @ q[x]).abs(), torch.exp(-m)))
    ones = torch.cat((v, torch.ones(t, 1).double()), 1) * i.exp()[:, None]
    out = lineate.gated_linear_attention(
        *(x[None, :, None] for x in (q, k, ones)), torch.nn.functional.logsigmoid(f)[None, :, None], scale=1.0
    ).output[0, :, 0]
    torch.testing.assert_close(out[:, :-1] / out[:, -1:].abs().clamp(min=1), torch.stack(h))
