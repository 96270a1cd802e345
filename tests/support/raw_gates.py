"""The fused op, which takes gates before their activation: inputs, the oracle, budgets."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.ops.raw_gates import activate
from tests.support import half
from tests.support.cases import (
    GATED_DELTA,
    KIMI_DELTA,
    Inputs,
    Result,
    Row,
    Shape,
    _condition,
    assert_within,
    convert,
    draw,
    errors,
    relative_error,
)
from tests.support.paths import Path
from tests.support.rule_kernels import CHUNK, assert_like_the_inputs, differentiate, loss_of, native_term

FUSED_ROWS = [GATED_DELTA, KIMI_DELTA]


def raw_inputs(row: Row, path: Path, bias: str, shape: Shape, texts: int | None = None) -> Inputs:
    """Return gates before their activation, in the dtype of q; A_log and dt_bias are parameters, in float32.

    bias: "bias", "flat" (of a gate per channel), "no bias", or "no A_log", which has no bias either.
    """
    inputs = draw(row, shape, texts=texts)
    generator = torch.Generator().manual_seed(3)
    inputs["gate"] = 2 * torch.randn(inputs.pop("log_decay").shape, generator=generator, dtype=torch.float64)
    inputs["write"] = 2 * torch.randn(inputs.pop("beta").shape, generator=generator, dtype=torch.float64)
    inputs["q"], inputs["k"] = 3 * inputs["q"], 3 * inputs["k"]
    inputs = convert(inputs, path.dtype)
    if bias != "no A_log":
        inputs["A_log"] = torch.randn(shape.hv, generator=generator) - 1
    if bias not in ("no bias", "no A_log"):
        size = inputs["gate"].shape[2:]
        inputs["dt_bias"] = torch.randn(size, generator=generator)
        if bias == "flat":
            inputs["dt_bias"] = inputs["dt_bias"].flatten()
    return inputs


def unfused(
    row: Row, inputs: Inputs, dtype: torch.dtype, beta_scale: float, lower_bound: float | None = None, **options: object
) -> Result:
    """Run the activation, then the recurrent form in torch, and differentiate by all inputs."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    bias = leaves.get("dt_bias")
    bias = None if bias is None else bias.view(leaves["gate"].shape[2:])
    gates = leaves["gate"], leaves["write"], leaves.get("A_log")
    log_decay, beta = activate(*gates, bias, beta_scale, lower_bound=lower_bound)
    plain = {name: leaves[name] for name in ("q", "k", "v", "state") if name in leaves}
    output, state = row.op(**plain, log_decay=log_decay, beta=beta, form="recurrent", backend="torch", **options)
    grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
    return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))


def rates(inputs: Inputs, lower_bound: float | None = None) -> tuple[Tensor, Tensor]:
    """Return |dlog_decay/dgate|, and the factor of a gate's gradient in dA_log.

    dA_log = sum_t dgate_t softplus / sigmoid without a lower bound, and sum_t dgate_t (gate_t + dt_bias) with one.
    """
    given = inputs["gate"].double()
    if "dt_bias" in inputs:
        given = given + inputs["dt_bias"].double().view(given.shape[2:])
    speed = inputs.get("A_log", torch.zeros(given.shape[2])).double().exp()
    speed = speed.unsqueeze(-1) if given.dim() == 4 else speed
    if lower_bound is not None:
        opened = (speed * given).sigmoid()
        return -lower_bound * speed * opened * (1 - opened), given
    slope = speed * given.sigmoid()
    return slope, F.softplus(given) / given.sigmoid()


def fused_errors(
    got: Result, expected: Result, inputs: Inputs, lower_bound: float | None = None
) -> dict[str, float]:  # fmt: skip
    """Return errors as cases.errors does; dgate, dlog_decay times the slope, is measured against |k| |dk| slope."""
    found = errors(got, expected)
    slope = rates(inputs, lower_bound)[0].square().mean().sqrt()
    floor = expected.grads["k"].norm() * inputs["k"].double().norm(dim=-1).mean() * slope
    return {**found, "dgate": relative_error(got.grads["gate"], expected.grads["gate"], floor.item())}


def fused_allowance(
    row: Row, inputs: Inputs, expected: Result, path: Path, beta_scale: float, lower_bound: float | None = None,
    **options: object,
) -> dict[str, float]:  # fmt: skip
    """Return the budget of cases.budget or half.budget with the activations in front.

    dA_log and ddt_bias are a few sums of dgate over all tokens, which may cancel: their errors are bounded by that of
    dgate, |sum_t e_t r_t| <= |e| |r|.
    """
    if path.dtype != torch.float32:
        raw = {"beta_scale": beta_scale, "lower_bound": lower_bound}
        reference = half.run(inputs, raw=raw, **options)
        allowed = half.budget(inputs, expected, raw=raw, **options)
        rounding = torch.finfo(inputs["gate"].dtype).eps / 2 if inputs["gate"].dtype != torch.float32 else 0.0
        allowed["dgate"] = 2 * fused_errors(reference, expected, inputs, lower_bound)["dgate"] + rounding
    else:
        bias = inputs.get("dt_bias")
        bias = None if bias is None else bias.float().view(inputs["gate"].shape[2:])
        raw = inputs["gate"].float(), inputs["write"], inputs.get("A_log")
        log_decay, beta = activate(*raw, bias, beta_scale, lower_bound=lower_bound)
        gates = {"log_decay": log_decay, "beta": beta}
        kappa = _condition({"k": inputs["k"], "v": inputs["v"], **gates}, CHUNK, **options)
        t, n = inputs["q"].shape[1], min(CHUNK, inputs["q"].shape[1]) + inputs["k"].shape[-1] + inputs["v"].shape[-1]
        extra = 2**-24 * n**0.5 * kappa + native_term(path, t, kappa)
        own = unfused(row, inputs, torch.float32, beta_scale, lower_bound, **options)
        found = fused_errors(own, expected, inputs, lower_bound)
        allowed = {name: 2 * error + extra for name, error in found.items()}
        for name in ("gate", "write", "A_log", "dt_bias"):
            if name in inputs and inputs[name].dtype != torch.float32:
                allowed["d" + name] += torch.finfo(inputs[name].dtype).eps / 2
    slope, ratio = rates(inputs, lower_bound)
    grads = {name: x.double() for name, x in expected.grads.items()}
    floor = grads["k"].norm() * inputs["k"].double().norm(dim=-1).mean() * slope.square().mean().sqrt()
    error = allowed["dgate"] * max(grads["gate"].norm(), floor)
    per_head = ratio.square().sum([i for i in range(ratio.dim()) if i != 2]).sqrt().max()
    if "A_log" in inputs:
        allowed["dA_log"] += (error * per_head / grads["A_log"].norm()).item()
    if "dt_bias" in inputs:
        tokens = inputs["gate"].shape[0] * inputs["gate"].shape[1]
        allowed["ddt_bias"] += (error * tokens**0.5 / grads["dt_bias"].norm()).item()
    return allowed


def check_fused(row: Row, inputs: Inputs, path: Path, what: object = "", **options: object) -> Result:
    beta_scale, lower_bound = options.get("beta_scale", 1.0), options.get("lower_bound")
    rest = {"normalize_qk": True, **{n: x for n, x in options.items() if n not in ("beta_scale", "lower_bound")}}
    expected = unfused(row, inputs, torch.float64, beta_scale, lower_bound, **rest)
    got = differentiate(lineate.fused_delta_rule, inputs, path, **options)
    assert_like_the_inputs(got, inputs)
    allowed = fused_allowance(row, inputs, expected, path, beta_scale, lower_bound, **rest)
    assert_within(fused_errors(got, expected, inputs, lower_bound), allowed, what or row)
    return got


def biases(row: Row) -> tuple[str, ...]:
    return ("no bias", "bias", "flat") if row is KIMI_DELTA else ("no bias", "bias")


BOUNDED = [pytest.param(row, bias, id=f"{row}-{bias}") for row in FUSED_ROWS for bias in ("no A_log", *biases(row))]
FUSED = [pytest.param(row, bias, id=f"{row}-{bias}") for row in FUSED_ROWS for bias in biases(row)]
