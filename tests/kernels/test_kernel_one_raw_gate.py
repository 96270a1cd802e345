"""The fused op with one raw gate: the decay or beta is given itself, the other before its activation."""

import pytest
import torch

import lineate
from lineate.rule import activate
from tests.support.cases import Inputs, Result, Row, assert_same_bits, assert_within, bounds, errors, oracle
from tests.support.marks import slow_but
from tests.support.paths import INTERPRETER, PATHS, Path
from tests.support.raw_gates import FUSED_ROWS, fused_allowance, fused_errors, raw_inputs, unfused
from tests.support.rule_kernels import (
    FEWER_TEXTS,
    SHORT,
    SMALL,
    TEXTS,
    allowance,
    assert_like_the_inputs,
    differentiate,
    loss_of,
    sized,
)

RAW = ("gate", "write")


def split(inputs: Inputs, raw: str, lower_bound: float | None) -> tuple[Inputs, Inputs]:
    """Return the inputs with one raw gate, and those with none; a given gate has the dtype of q."""
    gates = [inputs[name].double() for name in ("gate", "write", "A_log", "dt_bias")]
    log_decay, beta = (x.to(inputs["q"].dtype) for x in activate(*gates, lower_bound=lower_bound))
    plain = {name: x for name, x in inputs.items() if name in ("q", "k", "v", "state")}
    if raw == "gate":
        own = {name: inputs[name] for name in ("gate", "A_log", "dt_bias")} | {"beta": beta}
    else:
        own = {"write": inputs["write"], "log_decay": log_decay}
    return {**plain, **own}, {**plain, "log_decay": log_decay, "beta": beta}


def expect(row: Row, inputs: Inputs, raw: str, lower_bound: float | None, **options: object) -> Result:
    """Return the result of the recurrent form in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    decay, rate = (leaves.get(a, leaves.get(b)) for a, b in (("gate", "log_decay"), ("write", "beta")))
    which = {"gate": "log_decay", "write": "beta"}[raw]
    parameters = leaves.get("A_log"), leaves.get("dt_bias")
    log_decay, beta = activate(decay, rate, *parameters, lower_bound=lower_bound, raw_gates=which)
    plain = {name: leaves[name] for name in ("q", "k", "v", "state") if name in leaves}
    output, state = row.op(
        **plain, log_decay=log_decay, beta=beta, form="recurrent", backend="torch", normalize_qk=True, **options
    )
    grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
    return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))


def check(row: Row, inputs: Inputs, path: Path, raw: str, lower_bound: float | None, **options: object) -> Result:
    """Compare with the oracle, within the larger of the budgets with two raw gates and with none."""
    mixed, plain = split(inputs, raw, lower_bound)
    expected = expect(row, mixed, raw, lower_bound, **options)
    got = differentiate(lineate.fused_delta_rule, mixed, path, lower_bound=lower_bound, **options)
    assert_like_the_inputs(got, mixed)
    options["normalize_qk"] = True
    both = oracle(row, plain, **options)
    allowed = allowance(row, plain, both, path, **options)
    every = {**inputs, **mixed}
    found = fused_errors(got, expected, every, lower_bound) if raw == "gate" else errors(got, expected)
    raw_only = unfused(row, inputs, torch.float64, 1.0, lower_bound, **options)
    for name, x in fused_allowance(row, inputs, raw_only, path, 1.0, lower_bound, **options).items():
        allowed[name] = max(x, allowed.get(name, 0.0))
    assert_within(found, {name: allowed[name] for name in found}, (raw, lower_bound))
    return got


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_one_raw_gate(row, raw, bound, path):
    """Output, state and all gradients agree with the recurrent form in float64; a second run gives the same bits."""
    bound = bound if raw == "gate" else None
    inputs = raw_inputs(row, path, "bias", sized(path, SMALL))
    got = check(row, inputs, path, raw, bound)
    mixed, _ = split(inputs, raw, bound)
    assert_same_bits(differentiate(lineate.fused_delta_rule, mixed, path, lower_bound=bound), got)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[:1]), ids=str)
def test_packed_sequences(row, raw, path):
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    inputs = raw_inputs(row, path, "bias", sized(path)._replace(b=1, t=sum(texts)), len(texts))
    check(row, inputs, path, raw, None, cu_seqlens=bounds(texts))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_without_kernels(row, raw, backend):
    """On a CPU the raw gate is computed in torch before the op: in float64 to 1e-10."""
    inputs = raw_inputs(row, INTERPRETER, "bias", SHORT)
    mixed, _ = split({name: x.double() for name, x in inputs.items()}, raw, None)
    expected = expect(row, mixed, raw, None)
    leaves = {name: x.requires_grad_() for name, x in mixed.items()}
    output, state = lineate.fused_delta_rule(**leaves, backend=backend)
    grads = dict(zip(leaves, torch.autograd.grad(loss_of(output, state), list(leaves.values())), strict=True))
    assert_within(errors(Result(output.detach(), state.detach(), grads), expected), 1e-10, raw)


def test_given_decays_are_checked():
    inputs = raw_inputs(FUSED_ROWS[0], INTERPRETER, "bias", SHORT)
    mixed, _ = split(inputs, "write", None)
    mixed["log_decay"][0, 3] = 0.5
    for backend in ("torch", "auto"):
        with pytest.raises(ValueError, match="log_decay must be <= 0"):
            lineate.fused_delta_rule(**mixed, backend=backend)
