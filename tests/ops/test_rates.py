"""The rates of writing that depend on the length of the key: their equations, limits and gradients."""

import math

import pytest
import torch

import lineate
from lineate import rate_of_key
from lineate.forms import stability

SIZES = (0.0, 1e-40, 1e-12, 1e-4, 0.03, 0.2499, 0.25, 0.4, 1.0, 3.0, 30.0, 1e3, 1e9)
"""Values of |k|^2; the series ends at beta |k|^2 = 0.25."""
KINDS = pytest.mark.parametrize("kind", ["exact", "kaczmarz"])


def keys(squares=SIZES, channels=3, dtype=torch.float64):
    """Return keys `1 t 1 channels` of these squared lengths."""
    one = torch.tensor(squares, dtype=torch.float64).sqrt() / math.sqrt(channels)
    return one[None, :, None, None].expand(1, len(squares), 1, channels).to(dtype)


def rate(square, beta, kind):
    """Return the rate by its equation, with math's float64."""
    if kind == "kaczmarz":
        return beta / (square + 1e-6)
    return beta if square == 0 else -math.expm1(-beta * square) / square


@KINDS
@pytest.mark.parametrize("beta", [0.0, 1e-30, 1e-8, 0.3, 1.0, 2.0])
def test_rates_are_their_equation(kind, beta):
    k = keys()
    wanted = torch.tensor([rate(x, beta, kind) for x in k.square().sum(-1).flatten().tolist()], dtype=torch.float64)
    got = rate_of_key(k, torch.full((1, len(SIZES), 1), beta, dtype=torch.float64), kind)
    torch.testing.assert_close(got.flatten(), wanted, rtol=1e-14, atol=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = keys(SIZES[2:-1]).to(dtype)
        exact = rate_of_key(narrow.double(), torch.full((1, len(SIZES) - 3, 1), beta, dtype=torch.float64), kind)
        found = rate_of_key(narrow, torch.full((1, len(SIZES) - 3, 1), beta, dtype=torch.float32), kind)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-37)


@KINDS
def test_gradients(kind):
    """Those of keys and rates are those of the equation, also at 0 and on both sides of the end of the series."""
    squares = (1e-5, 0.05, 0.2, 0.24, 0.26, 0.5, 2.0, 20.0)
    k = keys(squares).repeat(1, 1, 2, 1).requires_grad_()
    beta = torch.linspace(0.9, 1.6, 32).view(1, 8, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: rate_of_key(*x, kind), (k, beta))
    assert torch.autograd.gradgradcheck(lambda *x: rate_of_key(*x, kind), (k, beta))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        k = torch.zeros(1, 3, 1, 4, dtype=dtype)
        k[:, 1:] = torch.tensor([1e-18, 300.0], dtype=dtype)[:, None, None]
        k, beta = k.requires_grad_(), torch.tensor([[[0.0], [0.5], [0.0]]]).requires_grad_()
        rate_of_key(k, beta, kind).sum().backward()
        assert k.grad.isfinite().all() and beta.grad.isfinite().all()
        torch.testing.assert_close(beta.grad[0, :2, 0], torch.full((2,), 1.0 if kind == "exact" else 1e6))


@pytest.mark.parametrize("square", [1e-8, 0.1, 1.0, 50.0])
def test_exact_is_the_limit_of_many_small_steps(square):
    """Many steps of DeltaNet with the rate beta / n solve the same differential equation, in which a token stays."""
    n, beta = 20000, 0.7
    k, v, S = keys((square,))[0, 0, 0], torch.randn(4).double(), torch.randn(3, 4).double()
    after = S
    for _ in range(n):
        after = after + beta / n * torch.outer(k, v - k @ after)
    q = k.view(1, 1, 1, 3)
    r = rate_of_key(q, torch.full((1, 1, 1), beta, dtype=torch.float64), "exact")
    _, once = lineate.delta_rule(q, q, v.view(1, 1, 1, 4), r, state=S[None, None])
    torch.testing.assert_close(
        once[0, 0], after, rtol=2 * beta * square / n + 1e-9, atol=2 * (beta * square) ** 2 / n + 1e-9
    )


def test_kaczmarz_fits_the_token():
    """With beta = 1 the memory answers v to k, and changes along k alone."""
    torch.manual_seed(0)
    k, v, S = 7 * torch.randn(1, 1, 1, 5).double(), torch.randn(1, 1, 1, 4).double(), torch.randn(1, 1, 5, 4).double()
    r = rate_of_key(k, torch.ones(1, 1, 1).double(), "kaczmarz")
    _, after = lineate.delta_rule(k, k, v, r, state=S)
    torch.testing.assert_close(k[0, 0, 0] @ after[0, 0], v[0, 0, 0], rtol=0, atol=1e-6)
    across = torch.linalg.qr(torch.cat((k[0, 0], torch.randn(4, 5).double())).T).Q[:, 1:]
    torch.testing.assert_close(across.T @ after[0, 0], across.T @ S[0, 0], rtol=0, atol=1e-12)


@KINDS
@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_the_memory_stays_bounded(kind, length, recwarn):
    """Keys of any length, which would overflow a memory with the rate beta."""
    stability.forget()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 400, 2, 6, generator=generator) for _ in range(3))
    beta = torch.rand(1, 400, 2, generator=generator)
    inputs = q, length * k, v, rate_of_key(length * k, beta, kind)
    for form in ("recurrent", "chunkwise"):
        found = lineate.delta_rule(*inputs, form=form)
        exact = lineate.delta_rule(*(x.double() for x in inputs), form="recurrent")
        assert (found.state.double() - exact.state).norm() <= 1e-4 * exact.state.norm()
        # Each token adds at most |v| / |k| along one direction, or sqrt(beta) |v| where the rate is beta itself.
        assert found.state.norm() < 400 * max(1 / length, 1)
    assert not [x for x in recwarn if x.category is lineate.UnstableMemoryWarning]


def test_writes_and_grouped_heads():
    """Each value head has the length of its key head, each write that of its own key."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 5, 3, 2, 6, generator=generator).double()
    beta = torch.rand(2, 5, 3, 4, generator=generator).double()
    got = rate_of_key(k, beta, "exact")
    for write in range(3):
        for head in range(4):
            alone = rate_of_key(k[:, :, write, head // 2, None], beta[:, :, write, head, None], "exact")
            torch.testing.assert_close(got[:, :, write, head, None], alone, rtol=1e-15, atol=0)


def test_refusals():
    k, beta = torch.zeros(2, 5, 3, 6), torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match="kind must be one of 'exact', 'kaczmarz', got 'efla'"):
        rate_of_key(k, beta, "efla")
    for wrong in (torch.zeros(2, 5, 4), torch.zeros(2, 4, 3), torch.zeros(2, 5)):
        with pytest.raises(ValueError, match=r"beta must have the shape of k .* 3 heads, \(2, 5, 3\), got"):
            rate_of_key(k, wrong, "exact")
