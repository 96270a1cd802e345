"""Decoding with gates before their activation."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import zeros

import lineate
from tests.support.cases import (
    DELTA,
    GATED_DELTA,
    KIMI_DELTA,
    Shape,
    assert_same_bits,
    assert_within,
    budget,
    errors,
    oracle,
)
from tests.support.decode_cases import PATHS, SHAPE, inputs_of, run


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("decay", "bound"),
    [("none", None), *product(("head", "head, no bias", "channel", "channel, bias per head"), (None, -5.0))],
)
def test_raw_gates(decay, bound, path):
    """Gates are -exp(A_log) softplus(x + dt_bias) and beta_scale sigmoid(x), for x of -100 to 100 and infinite x.

    With a lower bound the first is lower_bound sigmoid(exp(A_log) (x + dt_bias)).
    """
    row = {"h": GATED_DELTA, "c": KIMI_DELTA, "n": DELTA}[decay[0]]
    shape = SHAPE._replace(t=3)
    inputs = inputs_of(row, shape)
    generator = torch.Generator().manual_seed(0)
    raw = {"beta": 3 * torch.randn(2, 3, 4, generator=generator)}
    options: dict[str, object] = {"raw_gates": True, "beta_scale": 2.0}
    gates = {"beta": 2.0 * raw["beta"].double().sigmoid()}
    if decay != "none":
        size = (2, 3, 4, 6) if row is KIMI_DELTA else (2, 3, 4)
        raw["log_decay"] = 4 * torch.randn(size, generator=generator)
        raw["log_decay"].flatten()[:4] = torch.tensor([-100.0, 100.0, torch.inf, -torch.inf])
        options["A_log"] = torch.randn(4, generator=generator)
        bias, rate = torch.zeros(4), -options["A_log"].double().exp()
        if decay != "head, no bias":
            bias = options["dt_bias"] = torch.randn((4, 6) if decay == "channel" else 4, generator=generator)
        if row is KIMI_DELTA:
            rate, bias = rate[:, None], bias if bias.dim() == 2 else bias[:, None]
        gates["log_decay"] = rate * F.softplus(raw["log_decay"].double() + bias, threshold=1000)
        if bound is not None:
            options["lower_bound"] = bound
            gates["log_decay"] = bound * torch.sigmoid(-rate * (raw["log_decay"].double() + bias))
    expected = oracle(row, {**inputs, **gates}, only=())
    # The gates' own rounding is the error of the same gates in float32, carried through three tokens.
    single = {name: x.float() for name, x in gates.items()}
    allowed = budget(row, {**inputs, **single}, expected, 1)
    got = run({**inputs, **raw}, path, **options)
    assert_within(errors(got, expected), {name: x + 3 * 2**-20 for name, x in allowed.items()})


@pytest.mark.parametrize("path", PATHS)
def test_small_raw_gates_are_not_lost(path):
    """softplus(-12) is 6e-6; 1 + e^-12 in float32 would lose a hundredth of it, and so a long memory."""
    inputs = inputs_of(GATED_DELTA, Shape(1, 1, 1, 1, 2, 2))
    raw = {"log_decay": torch.full((1, 1, 1), -12.0), "beta": torch.full((1, 1, 1), -torch.inf)}
    got = run({**inputs, **raw}, path, raw_gates=True, A_log=torch.tensor([8.0]))
    decay = torch.exp(-torch.exp(torch.tensor(8.0).double()) * F.softplus(torch.tensor(-12.0).double()))
    assert_within({"state": ((got.state / inputs["state"] - decay) / decay).abs().max().item()}, 1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_one_raw_gate(row, path):
    """Only the gate, or only the logit of beta, is raw; in the same dtype the other is used unchanged."""
    inputs = inputs_of(row, SHAPE._replace(t=3))
    gates = {"gate": 20 * inputs["log_decay"], "A_log": torch.tensor([0.1, -0.3, 0.5, 0.0])}
    for bound in (None, -5.0):
        log_decay = lineate.decay_gate(**{name: x.double() for name, x in gates.items()}, lower_bound=bound)
        expected = oracle(row, {**inputs, "log_decay": log_decay}, only=())
        allowed = budget(row, {**inputs, "log_decay": log_decay.float()}, expected, 1)
        got = run(
            {**inputs, "log_decay": gates["gate"]}, path, raw_gates="log_decay", A_log=gates["A_log"], lower_bound=bound
        )  # fmt: skip
        assert_within(errors(got, expected), {name: x + 3 * 2**-20 for name, x in allowed.items()})
    beta = 2 * inputs["beta"].double().sigmoid()
    expected = oracle(row, {**inputs, "beta": beta}, only=())
    allowed = budget(row, {**inputs, "beta": beta.float()}, expected, 1)
    got = run(inputs, path, raw_gates="beta", beta_scale=2.0)
    assert_within(errors(got, expected), {name: x + 3 * 2**-20 for name, x in allowed.items()})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_a_bounded_gate_without_A_log(row, path):
    """Without A_log the gate itself opens the decay: the result has the bits of A_log = 0."""
    inputs = inputs_of(row, SHAPE._replace(t=3))
    inputs["log_decay"], inputs["beta"] = 20 * inputs["log_decay"], 3 * inputs["beta"]
    options = {"raw_gates": True, "lower_bound": -5}
    assert_same_bits(run(inputs, path, **options), run(inputs, path, **options, A_log=zeros(4)))
