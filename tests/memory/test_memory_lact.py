"""LaCT: large chunks agree with the rule taken literally, by autograd and token by token; and the layer."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers.lact import LaCT, last_tokens, window_attention
from lineate.memory import MEMORY_RULES, chunks, run_reference
from lineate.memory.lact import fresh_state, lact, lact_state
from lineate.memory.parts import orthogonalise
from tests.support.lact_cases import gradients, make, middle
from tests.support.memories import CLOSE, check_close, floats


def answer(weights: list[Tensor], x: Tensor) -> Tensor:
    W0, W1, W2 = weights
    return (F.silu(x @ W0.mT) * (x @ W2.mT)) @ W1.mT


def reference(q, k, v, rates, momentum, state, chunk, muon=True):
    """Take the loss's gradient by autograd, token by token (rows and heads in parallel), from one position."""
    names = ("weights", "sums", "previous", "norms")
    weights, sums, previous, norms = ([state[f"{name}_{i}"] for i in range(3)] for name in names)
    total, position = state["momentum"], int(state["position"][0])

    def loss(weights: list[Tensor], key: Tensor, value: Tensor) -> Tensor:
        return -(answer(weights, key) * value).sum()

    out = []
    for i in range(q.shape[1]):
        x, key, value = (y[:, i, :, None] for y in (q, k, v))  # b h 1 d
        out.append(answer(weights, x)[:, :, 0])
        grads = torch.func.grad(loss)(weights, key, value)
        sums = [s - rates[:, i, :, n, None, None] * x for n, (s, x) in enumerate(zip(sums, grads, strict=True))]
        total = total + (0 if momentum is None else momentum[:, i])
        position += 1
        if position == chunk:
            changes = [s + (total / chunk)[..., None, None] * p for s, p in zip(sums, previous, strict=True)]
            moved = [w + (orthogonalise(x) if muon else x) for w, x in zip(weights, changes, strict=True)]
            weights = [w / (w.norm(dim=-1, keepdim=True) + 1e-5) * n for w, n in zip(moved, norms, strict=True)]
            sums, previous = [torch.zeros_like(x) for x in sums], changes
            total, position = torch.zeros_like(total), 0
    end = {"momentum": total, "position": torch.full_like(state["position"], position)}
    for name, tensors in zip(names, (weights, sums, previous, norms), strict=True):
        end |= {f"{name}_{i}": x for i, x in enumerate(tensors)}
    return torch.stack(out, 1), end


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("chunk, position", [(1, 0), (4, 0), (4, 3), (5, 2), (16, 3), (64, 7)])
def test_equals_autograd_token_by_token(chunk, position, muon):
    inputs, state = make()
    state = middle(state, position)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    got, wanted = (form(*inputs, state, chunk=chunk, muon=muon) for form in (lact, reference))
    check_close(got, wanted, **CLOSE)
    for x, expected in zip(gradients(*got, leaves), gradients(*wanted, leaves), strict=True):
        torch.testing.assert_close(x, expected, **CLOSE)


def check_gradients(got, wanted, leaves, names: str = "") -> None:
    """Check the gradients of y and of the named parts of the state."""
    asked = [
        (y, {name: x for name, x in end.items() if name.startswith(tuple(names.split()))}) for y, end in (got, wanted)
    ]
    for x, expected in zip(*(gradients(*own, leaves) for own in asked), strict=True):
        if expected is None:
            assert x is None or x.eq(0).all()
        else:
            torch.testing.assert_close(torch.zeros_like(expected) if x is None else x, expected, **CLOSE)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("d, dh", [(6, 3), (3, 7), (4, 4)])
@pytest.mark.parametrize("t, position", [(1, 3), (2, 1), (4, 0), (8, 0), (10, 0), (11, 3)])
def test_any_shape_without_momentum(t, position, d, dh, muon):
    """Matrices are wide and tall; a call has parts of a chunk before and after whole ones, or neither."""
    inputs, state = make(t=t, d=d, dh=dh)
    state = middle(state, position)
    leaves = [x.requires_grad_() for x in (*inputs[:4], *floats(state))]
    got, wanted = (form(*inputs[:4], None, state, chunk=4, muon=muon) for form in (lact, reference))
    check_close(got, wanted, **CLOSE)
    check_gradients(got, wanted, leaves, "weights sums previous norms momentum")


@pytest.mark.parametrize("names", ["", "weights", "sums", "previous", "momentum"])
@pytest.mark.parametrize("t", [8, 10])
def test_gradients_of_y_and_some_of_the_state(t, names):
    """A loss need not depend on what the last chunk wrote."""
    inputs, state = make(t=t)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    got, wanted = (form(*inputs, state, chunk=4) for form in (lact, reference))
    check_gradients(got, wanted, leaves, names)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("position", [0, 2])
def test_runs_of_any_size_are_the_same(position, most, monkeypatch):
    inputs, state = make(t=25)
    state = middle(state, position)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    wanted = lact(*inputs, state, chunk=4)
    size = 2 * 2 * 3 * 6 * 5  # numbers in the matrices of a chunk
    monkeypatch.setattr(chunks, "LARGEST_TENSOR", most * size)
    runs = chunks.cut_runs(25, position, 4, size)
    assert max(run.n for run in runs) == most and sum(run.n * run.length for run in runs) == 25
    got = lact(*inputs, state, chunk=4)
    check_close(got, wanted, rtol=1e-12, atol=1e-12)
    check_gradients(got, wanted, leaves, "weights sums previous norms momentum")


@pytest.mark.parametrize("muon", [True, False])
def test_nothing_written_is_finite(muon):
    """With rates of 0, C is 0, where its norm has no derivative."""
    inputs, state = make(t=9)
    inputs[3] = torch.zeros_like(inputs[3])
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    got, wanted = (form(*inputs, state, chunk=4, muon=muon) for form in (lact, reference))
    check_close(got, wanted, **CLOSE)
    found = [gradients(*own, leaves) for own in (got, wanted)]
    for x, expected in zip(*found, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, expected, **CLOSE)


@pytest.mark.parametrize("t", [1, 9])
def test_weights_alone_are_a_state(t):
    """They equal lact_state, which fills in the rest; gradients of the weights go through their norms too."""
    inputs, state = make(b=3, t=t)
    weights = [state[f"weights_{i}"][0].clone().requires_grad_() for i in range(3)]
    found = [lact(*inputs, form(weights, 3), chunk=4) for form in (fresh_state, lact_state)]
    check_close(*found, rtol=1e-13, atol=1e-13)
    assert [list(end) for _, end in found] == [list(lact_state(weights, 3))] * 2
    check_gradients(*found, weights, "weights norms")


def test_what_was_given_is_left_alone_and_runs_are_the_same():
    inputs, state = make(t=11)
    state = middle(state, 2)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    before = [x.detach().clone() for x in leaves]
    y, end = lact(*inputs, state, chunk=4)
    first, again = (torch.autograd.grad(y.sum(), leaves, retain_graph=True, allow_unused=True) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))
    with torch.no_grad():
        quick, quick_end = lact(*inputs, state, chunk=4)
    assert torch.equal(quick, y) and all(torch.equal(quick_end[name], x) for name, x in end.items())


def test_second_derivatives_are_refused():
    inputs, state = make()
    k = inputs[1].requires_grad_()
    (found,) = torch.autograd.grad(lact(*inputs, state, chunk=4)[0].square().sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_transforms_of_torch_func():
    inputs, state = make()
    q, k, *rest = inputs

    def loss(k: Tensor) -> Tensor:
        return lact(q, k, *rest, state, chunk=4)[0].square().sum()

    keys = torch.stack((k, 2 * k))
    found = torch.vmap(torch.func.grad(loss))(keys)
    for x, own in zip(found, keys, strict=True):
        (wanted,) = torch.autograd.grad(loss(own.requires_grad_()), own)
        torch.testing.assert_close(x, wanted, **CLOSE)


def test_equals_the_generic_reference():
    (q, k, v, rates, momentum), state = make(b=1)
    weights = {f"W{i}": state[f"weights_{i}"][0] for i in range(3)}
    gates = {f"rate.W{i}": rates[..., i] for i in range(3)} | {"momentum": momentum}
    y, end = lact(q, k, v, rates, momentum, state, chunk=4)
    wanted, final = run_reference(replace(MEMORY_RULES["LaCT"], chunk=4), q, k, v, gates, weights)
    torch.testing.assert_close(y, wanted, **CLOSE)
    for i in range(3):
        torch.testing.assert_close(end[f"weights_{i}"], final.weights[f"W{i}"], **CLOSE)
        torch.testing.assert_close(end[f"sums_{i}"], final.sums[f"W{i}"], **CLOSE)
        torch.testing.assert_close(end[f"previous_{i}"], final.momentum[f"W{i}"], **CLOSE)


@pytest.mark.parametrize("t", [1, 9])
def test_without_a_position_rows_begin_a_chunk(t):
    inputs, state = make(t=t)
    wanted, wanted_end = lact(*inputs, state, chunk=4)
    del state["position"]
    y, end = lact(*inputs, state, chunk=4)
    assert torch.equal(y, wanted) and all(torch.equal(end[name], x) for name, x in wanted_end.items())


def test_split_anywhere_and_one_by_one_equal_whole():
    inputs, state = make(t=19)
    whole = lact(*inputs, state, chunk=6)
    for cuts in ([1], [6], [18], [3, 4, 5, 13], list(range(1, 19))):
        parts, own = [], state
        for start, end in pairwise([0, *cuts, 19]):
            y, own = lact(*(x[:, start:end] for x in inputs), own, chunk=6)
            parts.append(y)
        check_close((torch.cat(parts, 1), own), whole, rtol=1e-11, atol=1e-11)
    assert own["position"].tolist() == [1, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_rows_never_see_each_other(packed):
    """The cases are packed sequences, and rows of a batch, each from its own position in its chunk."""
    lengths = (3, 0, 1, 21, 8) if packed else (9, 9, 9, 9, 9)
    inputs, _ = make(b=1, t=sum(lengths))
    _, state = make(b=len(lengths), seed=1)
    state = middle(state, 1) | {"position": torch.tensor([0, 2, 3, 1, 0])}
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    if packed:
        got = lact(*inputs, state, chunk=4, cu_seqlens=bounds)
    else:
        y, end = lact(*(x.unflatten(1, (5, 9))[0] for x in inputs), state, chunk=4)
        got = y.flatten(0, 1)[None], end
    parts, ends = [], []
    for row, (start, stop) in enumerate(pairwise(bounds.tolist())):
        own = {name: x[row : row + 1] for name, x in state.items()}
        if stop > start:
            part, own = lact(*(x[:, start:stop] for x in inputs), own, chunk=4)
            parts.append(part)
        ends.append(own)
    wanted = torch.cat(parts, 1), {name: torch.cat([x[name] for x in ends]) for name in ends[0]}
    check_close(got, wanted, rtol=1e-12, atol=1e-12)
    for x, expected in zip(gradients(*got, leaves), gradients(*wanted, leaves), strict=True):
        torch.testing.assert_close(x, expected, **CLOSE)


def test_rows_of_one_token_at_different_positions():
    inputs, state = make(b=3, t=1)
    state = middle(state, 1) | {"position": torch.tensor([3, 0, 3])}
    y, end = lact(*inputs, state, chunk=4)
    for row in range(3):
        own = {name: x[row : row + 1] for name, x in state.items()}
        wanted = lact(*(x[row : row + 1] for x in inputs), own, chunk=4)
        check_close((y[row : row + 1], {n: x[row : row + 1] for n, x in end.items()}), wanted, rtol=1e-12, atol=1e-12)


def test_the_state_does_not_grow_and_the_norms_stay():
    inputs, state = make(t=50)
    before = sum(x.nbytes for x in state.values())
    _, end = lact(*inputs, state, chunk=4)
    assert sum(x.nbytes for x in end.values()) == before
    for i in range(3):
        norms = end[f"weights_{i}"].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(norms, state[f"norms_{i}"], rtol=1e-4, atol=0)


def test_singular_values_of_a_step():
    """Singular values from 0.8 % of the whole norm up become 0.977 .. 1.032."""
    g = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))[0] for _ in range(2))
    sizes = torch.logspace(0, -2, 64, dtype=torch.float64)
    sizes = sizes[sizes / sizes.norm() > 0.008]
    found = torch.linalg.svdvals(orthogonalise((U[:, : len(sizes)] * sizes) @ V[: len(sizes)]))[: len(sizes)]
    assert found.min() > 0.977 and found.max() < 1.032


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close(dtype):
    inputs, state = make(t=40)
    wanted, _ = lact(*inputs, state, chunk=16)
    low = {name: x if name == "position" else x.float() for name, x in state.items()}
    y, end = lact(*(x.to(dtype) for x in inputs), low, chunk=16)
    assert y.dtype == dtype and end["weights_0"].dtype == torch.float32
    assert (y - wanted).norm() / wanted.norm() < (1e-5 if dtype == torch.float32 else 0.05)


def test_errors_say_what_was_expected():
    inputs, state = make()
    with pytest.raises(ValueError, match=r"rates must have shape \(b, t, h, 3\) = \(2, 13, 2, 3\), got"):
        lact(*inputs[:3], inputs[4], inputs[4], state)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        lact(*inputs, state, chunk=0)
    with pytest.raises(ValueError, match=r"make it with lact_state"):
        lact(*inputs, {"memory": torch.zeros(2)})
    with pytest.raises(ValueError, match="momentum must have shape"):
        lact(*inputs[:4], inputs[4][:1], state)


@pytest.mark.parametrize("window", [1, 3, 600])
def test_window_attention_is_softmax_of_the_last_tokens(window):
    """This holds over more than one block of queries, and when continued from a cache."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1100, 1, 4, generator=g, dtype=torch.float64) for _ in range(3))
    at = torch.arange(1100)
    outside = (at > at[:, None]) | (at <= at[:, None] - window)
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) / 2).masked_fill(outside, -torch.inf)
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    y, keys, values = window_attention(q, k, v, window)
    torch.testing.assert_close(y, wanted, **CLOSE)
    y, keys, values = window_attention(q[:, :2], k[:, :2], v[:, :2], window)
    y, keys, values = window_attention(q[:, 2:], k[:, 2:], v[:, 2:], window, (keys, values, torch.tensor([2, 2])))
    torch.testing.assert_close(y, wanted[:, 2:], **CLOSE)
    assert torch.equal(keys, k[:, 1101 - window :]) and torch.equal(values, v[:, 1101 - window :])


def test_last_tokens_of_packed_texts():
    x, bounds = torch.arange(1.0, 8.0)[:, None], torch.tensor([0, 1, 1, 5, 7])
    found = last_tokens(x, 3, bounds)[..., 0].tolist()
    assert found == [[0, 0, 1], [0, 0, 0], [3, 4, 5], [0, 6, 7]]
    assert last_tokens(x, 0, bounds).shape == (4, 0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, (0, 1, 1, 70, 300)])
@pytest.mark.parametrize("window", [2, 20, 400])
def test_the_window_in_one_launch_equals_blocks(window, bounds):
    """bfloat16 on a GPU agrees with float32 there and on a CPU in outputs, states and gradients."""
    layer = LaCT(64, 2, chunk=32, window=window)
    given = [
        x.bfloat16() for x in torch.randn(3, 1 if bounds else 2, 300, 64, generator=torch.Generator().manual_seed(0))
    ]
    found = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_() for x in given]
        state: dict[str, Tensor] = {}
        cu_seqlens = torch.tensor(bounds, device=device) if bounds else None
        y = layer.to(device).attend_window(*leaves, None, cu_seqlens, state)
        y.float().square().sum().backward()
        assert state["seen"].tolist() == ([300, 300] if bounds is None else [1, 0, 69, 230])
        results = y, state["keys"], state["values"], *(x.grad for x in leaves)
        found[device, dtype] = [x.detach().float().cpu() for x in results]
    wanted = found.pop(("cpu", torch.float32))
    for (_, dtype), results in found.items():
        for got, x in zip(results, wanted, strict=True):
            assert (got - x).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * x.norm()
