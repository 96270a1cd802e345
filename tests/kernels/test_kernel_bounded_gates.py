"""The fused op with a lower bound of the decay, log_decay = lower_bound sigmoid(exp(A_log) (gate + dt_bias))."""

import pytest
import torch

import lineate
from tests.support import half
from tests.support.cases import Result, assert_same_bits, assert_within, bounds, errors
from tests.support.marks import slow_but
from tests.support.paths import INTERPRETER, ONE_EACH, PATHS
from tests.support.raw_gates import BOUNDED, FUSED_ROWS, check_fused, fused_allowance, fused_errors, raw_inputs, unfused
from tests.support.rule_kernels import (
    CHUNK,
    FEWER_TEXTS,
    SHORT,
    SMALL,
    TEXTS,
    differentiate,
    loss_of,
    native_term,
    sized,
)

BOUND = -5.0


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "bias"), BOUNDED)
def test_bounded_equals_activation_and_op(row, bias, path):
    """Output, state and all gradients agree with the recurrent form in float64; a second run gives the same bits."""
    inputs = raw_inputs(row, path, bias, sized(path, SMALL._replace(b=2 if bias == "bias" else 1)))
    got = check_fused(row, inputs, path, lower_bound=BOUND)
    if bias == "bias":
        assert_same_bits(differentiate(lineate.fused_delta_rule, inputs, path, lower_bound=BOUND), got)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[1:]), ids=str)
def test_bounded_options(row, path):
    """The cases are other bounds (one forgets all within a chunk), larger betas, a scale, no normalisation."""
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    check_fused(row, inputs, path, "weak", lower_bound=-0.01)
    check_fused(row, inputs, path, "strong", lower_bound=-60)
    check_fused(row, inputs, path, "beta_scale", beta_scale=2.0, scale=0.3, lower_bound=BOUND)
    del inputs["state"]
    inputs["q"], inputs["k"] = inputs["q"] / 4, inputs["k"] / 4
    check_fused(row, inputs, path, "as they are", normalize_qk=False, lower_bound=BOUND)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[:1]), ids=str)
def test_bounded_packed_texts(row, path):
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    inputs = raw_inputs(row, path, "bias", sized(path)._replace(b=1, t=sum(texts)), len(texts))
    check_fused(row, inputs, path, cu_seqlens=bounds(texts), lower_bound=BOUND)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[1:]), ids=str)
def test_bounded_gates_of_another_dtype(row, path):
    """A layer's gates may be float32 with q in bfloat16, and its parameters bfloat16."""
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    narrow = torch.float16 if path.device == "cpu" else torch.bfloat16
    for gates, parameters in ((narrow, torch.float32), (torch.float32, narrow)):
        mixed = {n: x.to(gates if n in ("gate", "write") else x.dtype) for n, x in inputs.items()}
        mixed = {n: x.to(parameters if n in ("A_log", "dt_bias") else x.dtype) for n, x in mixed.items()}
        check_fused(row, mixed, path, (gates, parameters), lower_bound=BOUND)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_bounded_extreme_gates(row, path):
    """Gates of -100 to 100 or infinite overflow nothing: an open gate decays by e^lower_bound, a closed one by 1."""
    inputs = raw_inputs(row, path, "no bias", sized(path, SHORT))
    gate = inputs["gate"].flatten(2)
    gate[:, 3], gate[:, 5], gate[:, 8], gate[:, 11] = 100.0, -100.0, torch.inf, -torch.inf
    expected = unfused(row, inputs, torch.float64, 1.0, BOUND, normalize_qk=True)
    got = differentiate(lineate.fused_delta_rule, inputs, path, lower_bound=BOUND)
    found = errors(got._replace(grads={}), expected._replace(grads={}))
    raw = {"lower_bound": BOUND}
    reference = half.run(inputs, raw=raw, normalize_qk=True) if path.dtype != torch.float32 else None
    reference = reference or unfused(row, inputs, torch.float32, 1.0, BOUND, normalize_qk=True)
    extra = native_term(path, inputs["q"].shape[1]) + 2**-24 * (CHUNK + 256) ** 0.5
    rounding = torch.finfo(path.dtype).eps / 2 if path.dtype != torch.float32 else 0.0
    allowed = errors(reference._replace(grads={}), expected._replace(grads={}))
    assert_within(found, {name: 2 * x + extra + rounding for name, x in allowed.items()})
    for name, x in got.grads.items():
        if name != "A_log":  # 0 times infinity, in the oracle too
            assert expected.grads[name].isfinite().all() and x.isfinite().all(), name


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_small_bounded_gates_are_not_lost(row, path):
    """sigmoid(-12) is 6e-6, and all its digits count where the bound is large."""
    inputs = raw_inputs(row, path, "no A_log", sized(path)._replace(b=1, t=1))
    inputs["gate"].fill_(-12.0)
    inputs["write"].fill_(-torch.inf)
    call = {name: x.to(path.device) for name, x in inputs.items()}
    state = lineate.fused_delta_rule(**call, lower_bound=-10000.0, backend="triton").state.cpu()
    decay = torch.exp(-10000 * torch.tensor(-12.0).double().sigmoid())
    assert ((state / inputs["state"] - decay) / decay).abs().max().item() < 1e-6


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("row", "bias"), BOUNDED)
def test_bounded_without_kernels(row, bias, backend):
    """On a CPU the gate is computed in torch before the op, in float32 within its budget and in float64 to 1e-10."""
    inputs = raw_inputs(row, INTERPRETER, bias, SMALL)
    expected = unfused(row, inputs, torch.float64, 2.0, BOUND, normalize_qk=True)
    for dtype in (torch.float32, torch.float64):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, state = lineate.fused_delta_rule(**leaves, beta_scale=2.0, lower_bound=BOUND, backend=backend)
        grads = dict(zip(leaves, torch.autograd.grad(loss_of(output, state), list(leaves.values())), strict=True))
        allowed = fused_allowance(row, inputs, expected, INTERPRETER, 2.0, BOUND, normalize_qk=True)
        found = fused_errors(Result(output.detach(), state.detach(), grads), expected, inputs, BOUND)
        assert_within(found, allowed if dtype == torch.float32 else 1e-10, dtype)
