"""Gradients of some inputs, from half of the result, and taken twice; causality of outputs and gradients."""

import pytest
import torch

from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    ROWS,
    Inputs,
    Result,
    Row,
    assert_same_bits,
    assert_within,
    convert,
    draw,
    errors,
    oracle,
    relative_error,
    same_bits,
    weights,
)
from tests.support.marks import slow_but
from tests.support.paths import BF16, GPU, INTERPRETER, ONE_EACH, PATHS, Path, param
from tests.support.rule_kernels import CHUNK, LEAN, ONE_HEAD, allowance, loss_of, run, sized

# What requires gradients


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_gradients_of_some_inputs_only(row, path):
    inputs = convert(draw(row, sized(path, ONE_HEAD)), path.dtype)
    everything = run(row, inputs, path)
    for name in inputs:
        some = run(row, inputs, path, only=(name,))
        assert list(some.grads) == [name]
        assert_same_bits(some, everything, name)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_without_gradients(row, path):
    """Nothing is kept for a backward; the numbers are the same, in no_grad and inference mode too."""
    inputs = convert(draw(row, sized(path, ONE_HEAD)), path.dtype)
    expected = run(row, inputs, path)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    with torch.no_grad():
        no_grad = row.op(**leaves, form="chunkwise", backend="triton")
    with torch.inference_mode():
        inference = row.op(**leaves, form="chunkwise", backend="triton")
    for output, state in (no_grad, inference):
        assert not output.requires_grad
        assert not state.requires_grad
        assert same_bits(output.cpu(), expected.output)
        assert same_bits(state.cpu(), expected.state)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(
    "row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str
)
def test_losses_on_half_of_the_result(row, path):
    """With a loss on the output alone, or on the state alone, missing gradients are zeros, not uninitialised memory."""
    inputs = convert(draw(row, sized(path, ONE_HEAD)), path.dtype)
    totals = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.items()}
    for which in (0, 1):
        leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
        result = row.op(**leaves, form="chunkwise", backend="triton")[which]
        loss = (result.double() * weights(result, which + 1).to(path.device)).sum()
        for name, x in zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True):
            if which == 1 and name == "q":
                assert x is None or not x.any()  # reading does not depend on the final memory
            totals[name] += 0 if x is None else x.double().cpu()
    expected = oracle(row, inputs)
    whole = run(row, inputs, path)
    assert_within(errors(whole._replace(grads=totals), expected), allowance(row, inputs, expected, path))


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_backward_twice_through_one_graph(path):
    """The same holds for two graphs that share their inputs: two calls never share a buffer."""
    inputs = convert(draw(KIMI_DELTA, sized(path, ONE_HEAD)), path.dtype)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    outputs = [KIMI_DELTA.op(**leaves, form="chunkwise", backend="triton").output for _ in range(2)]
    first = torch.autograd.grad(outputs[0].square().sum(), list(leaves.values()), retain_graph=True)
    others = torch.autograd.grad(outputs[1].square().sum(), list(leaves.values()))
    second = torch.autograd.grad(outputs[0].square().sum(), list(leaves.values()))
    for name, x, y, z in zip(leaves, first, second, others, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z), name


@pytest.mark.parametrize("path", ONE_EACH)
def test_second_derivatives_are_refused(path):
    """They raise, because treating the first derivatives as constants would be wrong."""
    inputs = convert(draw(GATED_DELTA, sized(path, ONE_HEAD)), path.dtype)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    output, _ = GATED_DELTA.op(**leaves, form="chunkwise", backend="triton")
    (dq,) = torch.autograd.grad(output.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (dq.square().sum() + leaves["q"].sum()).backward()


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_inputs_are_never_modified(path):
    """The call, its backward and changes to the result leave the inputs unchanged."""
    inputs = convert(draw(KIMI_DELTA, sized(path, ONE_HEAD)), path.dtype)
    for normalize_qk in (False, True):
        leaves = {name: x.to(path.device).clone().requires_grad_() for name, x in inputs.items()}
        output, state = KIMI_DELTA.op(**leaves, form="chunkwise", backend="triton", normalize_qk=normalize_qk)
        ones = torch.ones_like(output), torch.ones_like(state)
        grads = torch.autograd.grad((output, state), list(leaves.values()), ones)
        assert ones[0].eq(1).all() and ones[1].eq(1).all()
        for x in (output, state, *grads):
            x.detach().fill_(7e4)
        for name, x in leaves.items():
            assert torch.equal(x.detach().cpu(), inputs[name]), name
            assert x._version == 0, name


# Causality


def past(row: Row, inputs: Inputs, path: Path, position: int) -> Result:
    """Return the outputs before `position`, and the gradients of a loss on them."""
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    output = row.op(**leaves, form="chunkwise", backend="triton").output[:, :position]
    loss = (output.double() * weights(output, 1).to(path.device)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return Result(output.detach().cpu(), torch.zeros(()), {n: x.cpu() for n, x in zip(leaves, grads, strict=True)})


def causal_positions() -> list[object]:
    return [param(INTERPRETER, x) for x in (17, 64)] + [param(p, x) for p in GPU for x in (1, 17, 31, 63, 64, 100)]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("path", "position"), causal_positions())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_future_never_changes_the_past(row, path, position):
    """No bit of an earlier output or gradient changes, and gradients of future tokens are exactly 0.

    Gradients are only close, not equal, where a reset leaves a chunk to another kernel (channel.py instead of
    hopper/channel_gradients.py).
    """
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    other = convert(draw(row, sized(path, LEAN), seed=99), path.dtype)
    expected = past(row, inputs, path, position)
    values = (0.0, -50.0, -torch.inf)
    if path.device == "cpu":
        values = (-torch.inf,) if position % CHUNK else (0.0,)
    if row.decay == "none":
        values = (None,)
    for value in values:
        changed = {name: x.clone() for name, x in inputs.items()}
        for name in changed:
            if name != "state":
                changed[name][:, position:] = other[name][:, position:] * (1 if "decay" in name else 1.5)
        if value is not None:
            changed["log_decay"][:, position] = value
        got = past(row, changed, path, position)
        close = row.decay == "channel" and path == BF16 and value == -torch.inf
        assert same_bits(got.output, expected.output), value
        for name, x in got.grads.items():
            before = slice(None) if name == "state" else (slice(None), slice(position))
            if close:
                assert relative_error(x[before], expected.grads[name][before]) < 2**-7, (name, value)
            else:
                assert same_bits(x[before], expected.grads[name][before]), (name, value)
            if name != "state":
                assert not x[:, position:].any(), (name, value)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "row", slow_but([row for row in ROWS if row.decay != "none"], (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str
)
def test_nothing_crosses_a_decay_of_zero(row, path):
    """The bits after log_decay = -inf do not depend on earlier tokens, and no gradient reaches back across it.

    Only dlog_decay before the reset has rounding errors, because it is a sum of differences over all later tokens.
    """
    position = 40
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    inputs["log_decay"][:, position] = -torch.inf
    other = convert(draw(row, sized(path, LEAN), seed=7), path.dtype)
    changed = {
        n: other[n] if n == "state" else torch.cat((other[n][:, :position], inputs[n][:, position:]), 1) for n in inputs
    }
    results = []
    for call in (inputs, changed):
        leaves = {name: x.to(path.device).requires_grad_() for name, x in call.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="triton")
        after = output[:, position:]
        grads = torch.autograd.grad(loss_of(after, state), list(leaves.values()))
        grads = {n: x.cpu() for n, x in zip(leaves, grads, strict=True)}
        assert not grads.pop("state").any()
        largest = max(x[:, position:].abs().max().item() for x in grads.values())
        rounding = (1e-6 if path.dtype == torch.float32 else torch.finfo(path.dtype).eps) * largest
        for name, x in grads.items():
            assert x[:, :position].abs().max().item() <= (rounding if name == "log_decay" else 0), name
        assert not grads["log_decay"][:, position].any()
        kept = {name: x[:, position:] for name, x in grads.items()}
        results.append(Result(after.detach().cpu(), state.detach().cpu(), kept))
    assert_same_bits(*results)
