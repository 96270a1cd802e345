"""Titans: the chunked form agrees with the rule taken literally, by autograd and token by token; and the layer."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory import MATRIX, MEMORY_RULES, deep, run_reference
from lineate.memory.titans import titans, titans_state
from lineate.memory.titans.model import LAYER_NORM_EPS
from tests.support.memories import CLOSE, check_close, floats

CASES = {
    "linear": {},
    "linear, clipped": {"clip": 1.5},
    "mlp": {},
    "mlp, clipped": {"clip": 1.5},
    "mlp, residual": {"residual": True},
    "mlp, norm, residual, clipped": {"residual": True, "norm": True, "clip": 1.5},
    "three matrices": {},
}
cases = pytest.mark.parametrize("case", CASES)


def answer(weights: list[Tensor], x: Tensor, residual: bool, norm: bool) -> Tensor:
    y = x
    for i, w in enumerate(weights):
        y = (F.silu(y) if i else y) @ w
    y = F.layer_norm(y, y.shape[-1:], eps=LAYER_NORM_EPS) if norm else y
    return y + x if residual else y


def reference(q, k, v, theta, eta, alpha, state, chunk=16, clip=None, residual=False, norm=False):
    """Take the gradient of the loss by autograd, then the step, token by token (rows and heads in parallel)."""
    depth, position = len(state) // 3, state["position"]
    weights, momentum, start = (
        [state[f"{name}_{i}"] for i in range(depth)] for name in ("weights", "momentum", "start")
    )

    def loss(weights: list[Tensor], key: Tensor, value: Tensor) -> Tensor:
        return 0.5 * (answer(weights, key, residual, norm) - value).square().sum()

    out = []
    for i in range(q.shape[1]):
        x, key, value, rate, keep, forget = (y[:, i, :, None] for y in (q, k, v, theta, eta, alpha))  # b h 1 ...
        rate, keep, forget = rate[..., None], keep[..., None], forget[..., None]
        grads = torch.func.grad(loss)(start, key, value)
        if clip is not None:
            size = sum(x.square().sum((-2, -1), keepdim=True) for x in grads).sqrt()
            grads = [x * (clip / (size + 1e-6)).clamp(max=1) for x in grads]
        momentum = [keep * s - rate * x for s, x in zip(momentum, grads, strict=True)]
        weights = [(1 - forget) * m + s for m, s in zip(weights, momentum, strict=True)]
        out.append(answer(weights, x, residual, norm)[:, :, 0])
        position = (position + 1) % chunk
        new = (position == 0)[:, None, None, None]
        start = [torch.where(new, m, m0) for m, m0 in zip(weights, start, strict=True)]
    end = {"position": position}
    for i in range(depth):
        end |= {f"weights_{i}": weights[i], f"momentum_{i}": momentum[i], f"start_{i}": start[i]}
    return torch.stack(out, 1), end


def make(case: str, b: int = 2, t: int = 13, h: int = 2, d: int = 5, dtype=torch.float64, seed: int = 0):
    """Return inputs, with some gates of exactly 0 and 1, and a state of random weights and momentum."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    value = d if "residual" in case or "mlp" in case else d + 1
    q, k = (F.normalize(random(b, t, h, d), dim=-1) for _ in range(2))
    theta, eta, alpha = (random(b, t, h).sigmoid() * scale for scale in (0.5, 1, 0.5))
    if t > 5:
        eta[:, 2], eta[0, 4], alpha[:, 3], alpha[0, 5, 0], theta[0, 1] = 0, 1, 1, 0, 0
    sizes = {"linear": (d, value), "mlp": (d, 7, value), "three matrices": (d, 6, 7, value)}[case.split(",")[0]]
    state = titans_state([random(h, *pair) / pair[0] ** 0.5 for pair in pairwise(sizes)], b)
    for name in state:
        if name != "position":
            state[name] = state[name] + 0.3 * random(*state[name].shape)
    state |= {name.replace("start", "weights"): x for name, x in state.items() if "start" in name}
    inputs = [x.to(dtype) for x in (q, k, random(b, t, h, value), theta, eta, alpha)]
    state = {name: x if name == "position" else x.to(dtype) for name, x in state.items()}
    return inputs, state


@cases
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_equals_autograd_token_by_token(case, chunk):
    """Outputs, state and all gradients agree, from positions inside a chunk that differ between rows."""
    inputs, state = make(case)
    state["position"] = torch.tensor([0, 3]) % chunk
    if chunk > 1:  # the second row began its chunk elsewhere
        state |= {n: torch.cat((x[:1], 0.7 * x[1:])) for n, x in state.items() if "start" in n}
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    g = torch.Generator().manual_seed(9)
    results = []
    for form in (titans, reference):
        y, end = form(*inputs, state, chunk=chunk, **CASES[case])
        weighted = [
            (x * torch.randn(x.shape, generator=g.manual_seed(9), dtype=x.dtype)).sum() for x in (y, *floats(end))
        ]
        results.append((y, end, torch.autograd.grad(sum(weighted), leaves)))
    (y, end, grads), (wanted, wanted_end, wanted_grads) = results
    check_close((y, end), (wanted, wanted_end), **CLOSE)
    for got, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("t", [1, 9])
def test_without_a_position_rows_begin_a_chunk(t):
    inputs, state = make("linear", t=t)
    wanted = titans(*inputs, state, chunk=4)
    del state["position"]
    check_close(titans(*inputs, state, chunk=4), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["linear", "linear, clipped", "mlp", "mlp, residual"])
def test_equals_the_generic_reference(case):
    (q, k, v, theta, eta, alpha), state = make(case)
    model = MATRIX if "linear" in case else deep(2, residual="residual" in case)
    weights = {name: state[f"weights_{i}"] for i, name in enumerate(model.learned)}
    rule = replace(MEMORY_RULES["Titans"], model=model, chunk=4, clip=CASES[case].get("clip"))
    begun = state | {name: torch.zeros_like(x) for name, x in state.items() if "momentum" in name}
    y, end = titans(q, k, v, theta, eta, alpha, begun, chunk=4, **CASES[case])
    gates = {"rate": theta, "momentum": eta, "log_decay": torch.log1p(-alpha)}
    wanted, final = run_reference(rule, q, k, v, gates, weights)
    torch.testing.assert_close(y, wanted, **CLOSE)
    for i, name in enumerate(model.learned):
        torch.testing.assert_close(end[f"weights_{i}"], final.weights[name], **CLOSE)
        torch.testing.assert_close(end[f"momentum_{i}"], final.momentum[name], **CLOSE)
        torch.testing.assert_close(end[f"start_{i}"], final.start[name], **CLOSE)


@cases
def test_split_anywhere_and_one_by_one_equal_whole(case):
    inputs, state = make(case, t=19)
    whole = titans(*inputs, state, chunk=4, **CASES[case])
    for cuts in ([1], [4], [18], [3, 4, 5, 11], list(range(1, 19))):
        parts, own = [], state
        for start, end in pairwise([0, *cuts, 19]):
            y, own = titans(*(x[:, start:end] for x in inputs), own, chunk=4, **CASES[case])
            parts.append(y)
        check_close((torch.cat(parts, 1), own), whole, rtol=1e-12, atol=1e-12)
    assert own["position"].tolist() == [3, 3]


@cases
def test_packed_texts_never_see_each_other(case):
    """Sequences have all lengths, even 0, each from its own state in the middle of a chunk."""
    lengths = (3, 0, 1, 21, 8)
    inputs, _ = make(case, b=1, t=sum(lengths))
    _, state = make(case, b=len(lengths), seed=1)
    state["position"] = torch.tensor([0, 2, 3, 1, 0])
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    leaves = [x.requires_grad_() for x in (*inputs, *floats(state))]
    y, end = titans(*inputs, state, chunk=4, cu_seqlens=bounds, **CASES[case])
    parts, ends = [], []
    for row, (start, stop) in enumerate(pairwise(bounds.tolist())):
        own = {name: x[row : row + 1] for name, x in state.items()}
        if stop > start:
            part, own = titans(*(x[:, start:stop] for x in inputs), own, chunk=4, **CASES[case])
            parts.append(part)
        ends.append(own)
    wanted = torch.cat(parts, 1), {name: torch.cat([x[name] for x in ends]) for name in end}
    check_close((y, end), wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    grads = [
        torch.autograd.grad((x * weight).sum() + sum(s.sum() for s in floats(e)), leaves) for x, e in ((y, end), wanted)
    ]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_the_future_never_changes_the_past():
    inputs, state = make("mlp, clipped", t=30)
    changed = [torch.cat((x[:, :21], x[:, 21:].flip(1) * 0.5), 1) for x in inputs]
    first, second = (titans(*x, state, chunk=8, clip=0.5)[0][:, :21] for x in (inputs, changed))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-14)


def test_clipping_bounds_the_step():
    inputs, state = make("linear", t=1)
    inputs[2] = inputs[2] * 1e6
    _, loose = titans(*inputs, state)
    _, bound = titans(*inputs, state, clip=2.0)
    theta, eta = inputs[3][:, 0, :, None, None], inputs[4][:, 0, :, None, None]
    step = (bound["momentum_0"] - eta * state["momentum_0"]).norm(dim=(-2, -1))
    torch.testing.assert_close(step, 2 * theta[..., 0, 0], rtol=1e-6, atol=0)
    assert loose["momentum_0"].norm() > 1e4


def test_without_momentum_forgetting_and_chunks_it_is_the_delta_rule():
    from lineate import delta_rule

    (q, k, v, theta, _, _), _ = make("linear", t=12)
    zero = torch.zeros_like(theta)
    y, state = titans(q, k, v, theta, zero, zero, chunk=1)
    wanted = delta_rule(q, k, v, theta, scale=1.0)
    torch.testing.assert_close(y, wanted.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["weights_0"], wanted.state, rtol=1e-12, atol=1e-12)


@pytest.mark.cover
def test_gradcheck_at_gates_of_zero_and_one():
    inputs, state = make("linear", b=1, t=7, h=1, d=2)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: titans(*x, state, chunk=4)[0], leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close(dtype):
    inputs, state = make("mlp", t=40)
    wanted, _ = titans(*inputs, state, chunk=16, clip=1.0)
    low = {name: x if name == "position" else x.float() for name, x in state.items()}
    y, end = titans(*(x.to(dtype) for x in inputs), low, chunk=16, clip=1.0)
    assert y.dtype == dtype and end["weights_0"].dtype == torch.float32
    error = (y - wanted).norm() / wanted.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


def test_errors_say_what_was_expected():
    inputs, state = make("linear")
    with pytest.raises(ValueError, match=r"eta must have shape \(b, t, h\) = \(2, 13, 2\), got \(2, 13\)"):
        titans(*inputs[:4], inputs[4][..., 0], inputs[5])
    with pytest.raises(ValueError, match="clip must be above 0"):
        titans(*inputs, clip=0.0)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        titans(*inputs, chunk=0)
    with pytest.raises(ValueError, match="state must have weights_0 of shape"):
        titans(*inputs, {"memory": torch.zeros(2)})
    with pytest.raises(ValueError, match="values as wide as keys"):
        titans(*inputs, state, residual=True)
    with pytest.raises(ValueError, match="titans_state"):
        titans(*(x.float() for x in inputs), state)


def test_layouts_are_kept_but_no_state_is_part_of_them():
    """The same call runs twice; its first state is then written to, as decoding in place does; inference runs first."""
    inputs, _ = make("linear", t=7)
    with torch.inference_mode():
        titans(*inputs, chunk=4)
    y, state = titans(*inputs, chunk=4)
    state["position"] += 1
    leaves = [x.requires_grad_() for x in inputs]
    again, after = titans(*leaves, chunk=4)
    again.sum().backward()
    assert torch.equal(again, y) and after["position"].tolist() == [3, 3]
