"""Statements of docs/derivation.md and docs/memory.md that no other test covers, in float64."""

from dataclasses import replace

import pytest
import torch

from lineate import gated_delta_rule, kimi_delta_attention
from lineate.memory import MEMORY_RULES, run_head


def one_point(S, k, target, rate, penalty):
    """Return one SGD step on 1/2 ||S^T k - target||^2 + 1/2 <S, penalty S>, with autograd's gradient.

    K, penalty `k`.
    """
    S = S.detach().requires_grad_()
    loss = (S.T @ k - target).square().sum() / 2 + (penalty[:, None] * S * S).sum() / 2
    return (S - rate * torch.autograd.grad(loss, S)[0]).detach()


def walk(op, log_decay):
    """Return inputs of one head, 12 tokens, k 6, v 5, and the memory after every token, computed by the op."""
    torch.manual_seed(0)
    t, key_dim, value_dim = log_decay.shape[0], 6, 5
    k = torch.nn.functional.normalize(torch.randn(t, key_dim, dtype=torch.float64), dim=-1)
    v, beta = torch.randn(t, value_dim, dtype=torch.float64), 2 * torch.rand(t, dtype=torch.float64)
    start = torch.randn(key_dim, value_dim, dtype=torch.float64)
    after = [
        op(*(x[None, :n, None] for x in (k, k, v, log_decay, beta)), state=start[None, None]).state[0, 0]
        for n in range(1, t + 1)
    ]
    return k, v, beta, start, after


def test_gated_delta_net_is_sgd_with_weight_decay_at_another_rate_and_target():
    """Section 4: eta = a beta, u = v / a, lambda = (1 - a) / (a beta). With beta and v themselves it does not hold."""
    log_decay = -2 * torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k, v, beta, S, after = walk(gated_delta_rule, log_decay)
    for i, expected in enumerate(after):
        a, everywhere = log_decay[i].exp(), torch.ones(6, dtype=torch.float64)
        found = one_point(S, k[i], v[i] / a, a * beta[i], (1 - a) / (a * beta[i]) * everywhere)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        same_names = one_point(S, k[i], v[i], beta[i], (1 - a) / beta[i] * everywhere)
        missing = beta[i] * (1 - a) * torch.outer(k[i], S.T @ k[i])  # the term that differs
        torch.testing.assert_close(same_names + missing, expected, rtol=1e-12, atol=1e-12)
        assert (same_names - expected).norm() > 1e-3 * expected.norm()
        S = expected


def test_decay_per_channel_is_no_such_step():
    """KDA erases beta k (a k)^T, whose antisymmetric part no step on the key k can have."""
    log_decay = -2 * torch.rand(1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k, _, beta, _, _ = walk(kimi_delta_attention, log_decay)
    nothing = torch.zeros(1, 1, 1, 6, dtype=torch.float64)
    F = kimi_delta_attention(
        *(x[None, :, None] for x in (k, k)), nothing, log_decay[None, :, None], beta[None, :, None],
        state=torch.eye(6, dtype=torch.float64)[None, None],
    ).state[0, 0]  # fmt: skip
    a = log_decay[0].exp()
    erased = a.diag() - F
    torch.testing.assert_close(erased, beta[0] * torch.outer(k[0], a * k[0]), rtol=1e-12, atol=1e-12)
    assert (erased - erased.T).norm() > 0.05 * erased.norm()


@pytest.mark.parametrize("a", [0.5, 0.9])
def test_a_full_overwrite_leaves_no_ghost(a):
    """With beta = 1 and a unit key, ours stores v; the step at one point with the same names leaves -(1 - a) v_old."""
    decay = torch.full((1, 1, 1), a, dtype=torch.float64)
    keys, values, _, S, _ = walk(gated_delta_rule, decay[0, 0].log())
    k, v = keys[0], values[0]
    ours = gated_delta_rule(
        *(x[None, None, None] for x in (k, k, v)), decay.log(), torch.ones_like(decay), state=S[None, None]
    ).state[0, 0]
    torch.testing.assert_close(ours.T @ k, v, rtol=1e-12, atol=1e-12)
    ghost = one_point(S, k, v, 1.0, torch.full((6,), 1 - a, dtype=torch.float64)).T @ k
    torch.testing.assert_close(ghost, v - (1 - a) * S.T @ k, rtol=1e-12, atol=1e-12)


def test_titans_without_momentum_is_gated_delta_net_under_other_names():
    """docs/memory.md, section 5: theta = (1 - alpha) beta, and v / (1 - alpha) in place of v, at chunk 1."""
    log_decay = -torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k, v, beta, start, after = walk(gated_delta_rule, log_decay)
    kept = log_decay.exp()
    gates = {"rate": kept * beta, "log_decay": log_decay, "momentum": torch.zeros_like(beta)}
    _, state = run_head(replace(MEMORY_RULES["Titans"], chunk=1), k, k, v / kept[:, None], gates, {"S": start})
    torch.testing.assert_close(state.weights["S"], after[-1], rtol=1e-10, atol=1e-10)
