"""Section 10 of docs/derivation.md: the rules of the general row as steps of learning, with autograd's gradients."""

import pytest
import torch
from torch.nn.functional import normalize

from lineate import diagonal_plus_low_rank, gated_delta_product, gated_delta_rule_2


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def gradient(S, loss):
    """Return the gradient of loss(S)."""
    S = S.detach().requires_grad_()
    return torch.autograd.grad(loss(S), S)[0]


def squared(key, target):
    return lambda S: (S.T @ key - target).square().sum() / 2


def memory_after(op, S, *inputs):
    """Return the memory after one token of one head; inputs begin with q."""
    return op(*(x[None, None] for x in inputs), state=S[None, None]).state[0, 0]


@pytest.mark.parametrize("writes", [1, 2, 4])
def test_delta_product_is_n_steps_of_sgd_after_one_decay(writes):
    torch.manual_seed(0)
    S, k, v, log_decay = draw(6, 5), normalize(draw(writes, 1, 6), dim=-1), draw(writes, 1, 5), -draw(1).abs()
    beta = 2 * torch.rand(writes, 1, dtype=torch.float64)
    found = memory_after(gated_delta_product, S, k[0], k, v, log_decay, beta)
    expected = log_decay.exp() * S
    for key, value, rate in zip(k[:, 0], v[:, 0], beta[:, 0], strict=True):
        expected = expected - rate * gradient(expected, squared(key, value))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rwkv7_unlearns_at_a_rate_a_channel_then_adds():
    torch.manual_seed(0)
    S, kk, k, v = draw(6, 5), normalize(draw(1, 6), dim=-1), draw(1, 6), draw(1, 5)
    w, a = (torch.rand(1, 6, dtype=torch.float64) * 0.4 + 0.6 for _ in range(2))
    found = memory_after(diagonal_plus_low_rank, S, k, k, v, w.log(), kk / w, kk * a)
    erased = w[0, :, None] * S - a[0, :, None] * gradient(S, squared(kk[0], 0))
    expected = erased - gradient(erased, lambda S: -(S.T @ k[0]) @ v[0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gated_delta_rule_2_steps_along_the_key_for_the_error_at_its_probe():
    """It is a step of SGD where erase is one number b: with rate b, on the target write * v / b. Otherwise it is none.

    A step of SGD on a loss of S^T x alone, for any x, has a symmetric transition.
    """
    torch.manual_seed(0)
    S, k, v, log_decay = draw(6, 5), normalize(draw(1, 6), dim=-1), draw(1, 5), -draw(1, 6).abs()
    erase, write = (torch.rand(1, n, dtype=torch.float64) for n in (6, 5))
    kept = log_decay[0, :, None].exp() * S
    e, target = (erase * k)[0], (write * v)[0]
    found = memory_after(gated_delta_rule_2, S, k, k, v, log_decay, erase, write)
    torch.testing.assert_close(found, kept - torch.outer(k[0], kept.T @ e - target), rtol=1e-12, atol=1e-12)
    along_probe = gradient(kept, squared(e, target))  # that of SGD on the error at e has e in place of k
    torch.testing.assert_close(along_probe, torch.outer(e, kept.T @ e - target), rtol=1e-12, atol=1e-12)

    b = torch.full_like(erase, 0.7)
    found = memory_after(gated_delta_rule_2, S, k, k, v, log_decay, b, write)
    expected = kept - 0.7 * gradient(kept, squared(k[0], target / 0.7))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    nothing = torch.zeros_like(log_decay)
    transition = memory_after(
        gated_delta_rule_2, torch.eye(6, dtype=torch.float64), k, k, torch.zeros_like(k), nothing, erase, nothing
    )
    torch.testing.assert_close(transition, torch.eye(6, dtype=torch.float64) - torch.outer(k[0], e), rtol=1e-12, atol=0)
    assert (transition - transition.T).norm() > 0.05 * (1 - transition.trace() / 6)


def test_comba_steps_at_the_memory_before_its_decay():
    torch.manual_seed(0)
    S, k, v, log_decay, s, beta = draw(6, 5), normalize(draw(1, 6), dim=-1), draw(1, 5), -draw(1).abs(), 0.7, 0.9
    erase, write = beta * s * torch.exp(-log_decay).expand(1, 6), torch.full((1, 5), beta, dtype=torch.float64)
    found = memory_after(gated_delta_rule_2, S, k, k, v, log_decay, erase, write)
    expected = log_decay.exp() * S - beta / s * gradient(S, squared(s * k[0], v[0]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 6])
def test_preconditioned_keys_scale_the_gradient_a_channel(channels):
    torch.manual_seed(0)
    S, k, v, log_decay = draw(6, 5), normalize(draw(1, 6), dim=-1), draw(1, 5), -draw(channels).abs()
    m, beta = 0.7 + torch.rand(6, dtype=torch.float64), 0.8
    erase, write = (beta / m)[None], torch.full((1, 5), beta, dtype=torch.float64)
    decay = log_decay if channels == 1 else log_decay[None]
    found = memory_after(gated_delta_rule_2, S, k, m * k, v, decay, erase, write)
    kept = log_decay.exp()[:, None] * S
    expected = kept - beta * m[:, None] * gradient(kept, squared(k[0], v[0]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("center", "least", "most"), [(-1.0, 30, 100), (-8.0, 0, 1)])
def test_writes_with_different_factors_can_make_a_memory_grow(center, least, most):
    """Three keys in turn, beta = 1, bound 1.5, c of the last key alone, no decay: the growth of S in 300 tokens."""
    keys = torch.tensor([[-0.36, -0.35, -0.87], [0.87, -0.36, 0.35], [0.35, -0.87, -0.36]], dtype=torch.float64)
    k = normalize(keys, dim=-1).repeat(100, 1)
    s = (k.square() + 1e-6).log() - center
    m = 1.5 ** (-s / (1 + s.abs()))
    assert ((m * k * k).sum(-1) < 1.5).all()  # every write has an eigenvalue in [-1, 1]
    nothing, S = torch.zeros_like(k), torch.eye(3, dtype=torch.float64)
    inputs = (k, m * k, nothing, nothing[:, 0], 1 / m, nothing)
    state = gated_delta_rule_2(*(x[None, :, None] for x in inputs), state=S[None, None]).state[0, 0]
    assert least < state.norm() < most
