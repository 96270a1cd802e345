"""The fused op, which computes gates, norms and rates inside the kernels."""

import pytest
import torch
import torch.nn.functional as F

import lineate
from tests.support import half
from tests.support.cases import Result, assert_same_bits, assert_within, bounds, errors
from tests.support.marks import slow_but
from tests.support.paths import INTERPRETER, ONE_EACH, PATHS
from tests.support.raw_gates import FUSED, FUSED_ROWS, check_fused, fused_allowance, fused_errors, raw_inputs, unfused
from tests.support.rule_kernels import (
    CHUNK,
    FEWER_TEXTS,
    ONE_HEAD,
    SHORT,
    SMALL,
    TEXTS,
    differentiate,
    loss_of,
    native_term,
    sized,
)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "bias"), FUSED)
def test_fused_equals_activation_and_op(row, bias, path):
    """Norms, gates and rates are computed inside the kernels; the gradients of A_log and dt_bias agree too."""
    shape = sized(path, SMALL._replace(b=2 if bias == "bias" else 1))
    inputs = raw_inputs(row, path, bias, shape)
    got = check_fused(row, inputs, path)
    if bias == "bias":
        assert_same_bits(differentiate(lineate.fused_delta_rule, inputs, path), got)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[:1]), ids=str)
def test_fused_options(row, path):
    """The cases are negative eigenvalues, a scale, no normalisation, and an empty memory."""
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    check_fused(row, inputs, path, "beta_scale", beta_scale=2.0)
    check_fused(row, inputs, path, "scale", beta_scale=2, scale=0.3)
    del inputs["state"]
    check_fused(row, inputs, path, "empty memory")
    inputs["q"], inputs["k"] = inputs["q"] / 4, inputs["k"] / 4
    check_fused(row, inputs, path, "as they are", normalize_qk=False)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[:1]), ids=str)
def test_fused_packed_texts(row, path):
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    shape = sized(path)._replace(b=1, t=sum(texts))
    check_fused(row, raw_inputs(row, path, "bias", shape, len(texts)), path, cu_seqlens=bounds(texts))


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[1:]), ids=str)
def test_fused_gates_of_another_dtype(row, path):
    """A layer's gates may be float32 with q in bfloat16, and its parameters bfloat16."""
    inputs = raw_inputs(row, path, "bias", sized(path, ONE_HEAD))
    narrow = torch.float16 if path.device == "cpu" else torch.bfloat16
    for gates, parameters in ((narrow, torch.float32), (torch.float32, narrow)):
        mixed = {n: x.to(gates if n in ("gate", "write") else x.dtype) for n, x in inputs.items()}
        mixed = {n: x.to(parameters if n in ("A_log", "dt_bias") else x.dtype) for n, x in mixed.items()}
        check_fused(row, mixed, path, (gates, parameters))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_extreme_gates(row, path):
    """With gates of -100 to 100 or infinite, exp never overflows; a closed gate forgets all, an open one nothing."""
    inputs = raw_inputs(row, path, "no bias", sized(path, ONE_HEAD))
    gate = inputs["gate"].flatten(2)
    gate[:, 3], gate[:, 5], gate[:, 8], gate[:, 11] = 100.0, -100.0, torch.inf, -torch.inf
    inputs["write"][:, 2], inputs["write"][:, 4] = 100.0, -100.0
    expected = unfused(row, inputs, torch.float64, 1.0, normalize_qk=True)
    got = differentiate(lineate.fused_delta_rule, inputs, path)
    found = errors(got._replace(grads={}), expected._replace(grads={}))
    reference = half.run(inputs, raw={}, normalize_qk=True) if path.dtype != torch.float32 else None
    reference = reference or unfused(row, inputs, torch.float32, 1.0, normalize_qk=True)
    extra = native_term(path, inputs["q"].shape[1]) + 2**-24 * (CHUNK + 256) ** 0.5
    rounding = torch.finfo(path.dtype).eps / 2 if path.dtype != torch.float32 else 0.0
    allowed = errors(reference._replace(grads={}), expected._replace(grads={}))
    assert_within(found, {name: 2 * x + extra + rounding for name, x in allowed.items()})
    for name, x in got.grads.items():
        if expected.grads[name].isfinite().all():
            assert x.isfinite().all(), name


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_small_raw_gates_are_not_lost(row, path):
    """softplus(-12) is 6e-6; 1 + e^-12 in float32 would lose a hundredth of it, and so a long memory."""
    shape = sized(path)._replace(b=1, t=1)
    inputs = raw_inputs(row, path, "no bias", shape)
    inputs["gate"].fill_(-12.0)
    inputs["write"].fill_(-torch.inf)
    inputs["A_log"].fill_(8.0)
    call = {name: x.to(path.device) for name, x in inputs.items()}
    state = lineate.fused_delta_rule(**call, backend="triton").state.cpu()
    decay = torch.exp(-torch.exp(torch.tensor(8.0).double()) * F.softplus(torch.tensor(-12.0).double()))
    assert ((state / inputs["state"] - decay) / decay).abs().max().item() < 1e-6


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[:1]), ids=str)
def test_fused_gradients_of_some_inputs_only(row, path):
    inputs = raw_inputs(row, path, "bias", sized(path, ONE_HEAD))
    everything = differentiate(lineate.fused_delta_rule, inputs, path)
    for name in ("gate", "A_log", "dt_bias") if path.device == "cpu" else inputs:
        some = differentiate(lineate.fused_delta_rule, inputs, path, only=(name,))
        assert list(some.grads) == [name]
        assert_same_bits(some, everything, name)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("row", "bias"), FUSED)
def test_fused_without_kernels(row, bias, backend):
    """On a CPU the activations run in torch before the op, in float32 within its budget and in float64 to 1e-10."""
    inputs = raw_inputs(row, INTERPRETER, bias, SMALL)
    expected = unfused(row, inputs, torch.float64, 2.0, normalize_qk=True)
    for dtype in (torch.float32, torch.float64):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, state = lineate.fused_delta_rule(**leaves, beta_scale=2.0, backend=backend)
        grads = dict(zip(leaves, torch.autograd.grad(loss_of(output, state), list(leaves.values())), strict=True))
        allowed = fused_allowance(row, inputs, expected, INTERPRETER, 2.0, normalize_qk=True)
        found = fused_errors(Result(output.detach(), state.detach(), grads), expected, inputs)
        assert_within(found, allowed if dtype == torch.float32 else 1e-10, dtype)
