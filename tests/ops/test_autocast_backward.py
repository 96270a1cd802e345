"""Everything that runs in full precision has the same gradients inside autocast as outside it."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import lineate
from lineate.memory.lact import lact, lact_state
from lineate.memory.least_squares import least_squares
from lineate.memory.titans import titans, titans_state
from lineate.memory.ttt import ttt
from tests.support.cases import PATHS, ROWS, SMALL, Row, convert, draw

AUTOCAST = {"forward too": (True, True), "backward alone": (False, True)}


def gradients(call: Callable[..., Any], given: list[Tensor], forward: bool, backward: bool) -> list[Tensor]:
    """Return the gradients of a sum over all results; forward, backward: whether these run inside autocast."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        results = call(*leaves)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert torch.is_autocast_enabled("cpu") == backward
    return [x for x in found if x is not None]


def check(call: Callable[..., Any], given: list[Tensor], when: str) -> None:
    """Check that the results agree to the last bit."""
    got, expected = gradients(call, given, *AUTOCAST[when]), gradients(call, given, False, False)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("when", AUTOCAST)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_rules(row: Row, path: dict[str, str], when: str) -> None:
    inputs = convert(draw(row, SMALL), torch.float32)
    check(lambda *given: row.op(**dict(zip(inputs, given, strict=True)), **path), list(inputs.values()), when)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TOKENS = [normal(2, 21, 3, 8, seed=i) / 3 for i in range(3)]  # b t h d
GATES = [normal(2, 21, 3, seed=3 + i).sigmoid() for i in range(3)]
MATRIX = normal(3, 8, 8, seed=7) / 3


def run_ttt(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, weight: Tensor) -> list[Tensor]:
    y, state = ttt(
        q, k, v, rate, torch.ones(3, 8), torch.zeros(3, 8), {"weight1": weight, "bias1": weight[:, 0]}, chunk=4
    )
    return [y, state["weight1"]]


def run_titans(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, M: Tensor) -> list[Tensor]:
    y, state = titans(q, k, v, theta, eta, alpha, titans_state([M, M.mT], 2), chunk=4)
    return [y, state["weights_0"], state["momentum_1"]]


def run_lact(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, M: Tensor) -> list[Tensor]:
    rates = torch.stack((rate, rate, rate), -1)
    y, state = lact(q, k, v, rates, None, lact_state([M, M, M], 2), chunk=4)
    return [y, state["weights_0"]]


def run_least_squares(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *, form: str) -> list[Tensor]:
    y, state = least_squares(q, k, v, -gate / 10, beta, chunk=4, form=form)
    return [y, state["S"]]


MEMORIES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "ttt": (run_ttt, [*TOKENS, GATES[0], MATRIX]),
    "titans": (run_titans, [*TOKENS, *GATES, MATRIX]),
    "lact": (run_lact, [*TOKENS, GATES[0], MATRIX]),
    "least squares, chunkwise": (lambda *x: run_least_squares(*x, form="chunkwise"), [*TOKENS, *GATES[:2]]),
    "least squares, recurrent": (lambda *x: run_least_squares(*x, form="recurrent"), [*TOKENS, *GATES[:2]]),
    "attention matrix": (
        lambda q, k, gate, beta: [lineate.attention_matrix(q, k, -gate, beta, normalize_qk=True)],
        [*TOKENS[:2], *GATES[:2]],
    ),
}


@pytest.mark.parametrize("when", AUTOCAST)
@pytest.mark.parametrize("name", MEMORIES)
def test_the_memories_that_learn(name: str, when: str) -> None:
    check(*MEMORIES[name], when)


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
def test_what_comes_before_and_after_keeps_its_autocast(form: str) -> None:
    """A user's own products around the rule still run in bfloat16, forward and backward."""
    x, weight = normal(1, 6, 8, seed=1).requires_grad_(), normal(8, 8, seed=2).requires_grad_()

    def loss() -> Tensor:
        q = (x @ weight).float().unflatten(-1, (2, 4))
        out = lineate.linear_attention(q, q, q, form=form, backend="torch").output
        return (out.flatten(2) @ weight).float().square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss(), (x, weight))
        value = loss()
    outside = torch.autograd.grad(value, (x, weight))
    for a, b in zip(got, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_a_graph_that_is_kept_goes_back_again() -> None:
    q = normal(1, 6, 2, 4, seed=1).requires_grad_()
    out = lineate.linear_attention(q, q, q, form="parallel").output.square().sum()
    (expected,) = torch.autograd.grad(out, q, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(out, q, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(out, q)[0], expected)


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
def test_nodes_of_another_thread_keep_their_autocast(form: str) -> None:
    """Threads number their autograd nodes separately, so nodes before the op are not found by their numbers."""
    seen: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return d

    x = normal(1, 6, 2, 4, seed=1).requires_grad_()
    for _ in range(50):
        x.square()
    y = Watched.apply(x)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            lineate.linear_attention(y, y, y, form=form, backend="torch").output.sum().backward()

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
