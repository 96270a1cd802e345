"""Odd numbers: NaN next to a positive log_decay, subclasses of tensors, rates too small for float32, huge ints."""

import pytest
import torch

import lineate
from tests.support.cases import (
    FORWARD_PATHS,
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    PATHS,
    ROWS,
    Row,
    Shape,
    assert_within,
    convert,
    draw,
    errors,
    oracle,
    run,
)  # fmt: skip

SHAPE = Shape(2, 40, 2, 4, 6, 5)


class Plain(torch.Tensor):
    """A subclass that only has another name."""


def call(row: Row, log_decay: torch.Tensor, **options: str) -> None:
    inputs = convert(draw(row, SHAPE), torch.float32)
    row.op(**{**inputs, "log_decay": log_decay}, **options)


def positive(row: Row, *, nan: bool) -> torch.Tensor:
    log_decay = convert(draw(row, SHAPE), torch.float32)["log_decay"]
    log_decay[1, 30, 2] = 0.25
    if nan:
        log_decay[0, 3, 1] = torch.nan
    return log_decay


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Plain])
@pytest.mark.parametrize("nan", [False, True], ids=["numbers", "with NaN"])
@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, GATED_LINEAR_CHANNEL], ids=str)
def test_a_positive_decay_is_found(row: Row, path: dict[str, str], nan: bool, kind: type) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"log_decay must be <= 0 .* got a maximum of 0.25"):
        call(row, positive(row, nan=nan).as_subclass(kind), **path)


def test_decode_and_explain_find_it_too() -> None:
    inputs = convert(draw(KIMI_DELTA, SHAPE), torch.float32)
    inputs["log_decay"][1, 30, 2, 1], inputs["log_decay"][0, 0, 0, 0] = 0.25, torch.nan
    for op in (lineate.decode, lineate.explain):
        with pytest.raises(ValueError, match=r"got a maximum of 0\.25"):
            op(**inputs)


@pytest.mark.parametrize("path", FORWARD_PATHS)
def test_nan_alone_is_computed_with(path: dict[str, str]) -> None:
    log_decay = convert(draw(GATED_DELTA, SHAPE), torch.float32)["log_decay"]
    log_decay[0, 3, 1] = torch.nan
    call(GATED_DELTA, log_decay, **path)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("beta", [1e-45, 1e-40, 1.2e-38, 1e-37, 1e-30, -1e-40, -1.2e-38])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [row for row in ROWS if row.corrects], ids=str)
def test_rates_too_small_for_float32(row: Row, path: dict[str, str], beta: float) -> None:
    """dbeta = X . (E - M R) is finite and exact however small beta is, although R = beta (E - M R) is not."""
    inputs = convert(draw(row, SHAPE), torch.float32)
    inputs["beta"][:, ::2] = beta
    assert_within(errors(run(row, inputs, **path), oracle(row, inputs)), 2e-6)


HUGE = "an int of 1329 bits"


@pytest.mark.parametrize("scale", [10**400, -(10**400)])
def test_a_scale_beyond_floats(scale: int) -> None:
    inputs = convert(draw(GATED_DELTA, SHAPE), torch.float32)
    state, qkv = inputs.pop("state"), [inputs[name] for name in "qkv"]
    A_log, gates = torch.zeros(4), (inputs["log_decay"], inputs["beta"])
    calls = {
        f"scale must be finite, got {HUGE}": [
            lambda: lineate.gated_delta_rule(**inputs, scale=scale),
            lambda: lineate.softmax_attention(*qkv, scale=scale),
            lambda: lineate.attention_matrix(*qkv[:2], scale=scale),
            lambda: lineate.fused_delta_rule(*qkv, *gates, A_log, scale=scale),
            lambda: lineate.decode(**inputs, state=state, scale=scale),
            lambda: lineate.explain(**inputs, scale=scale),
        ],
        f"beta_scale must be finite( and above 0)?, got {HUGE}; 1 and 2 are usual": [
            lambda: lineate.fused_delta_rule(*qkv, *gates, A_log, beta_scale=scale),
            lambda: lineate.decode(**inputs, state=state, raw_gates=True, A_log=A_log, beta_scale=scale),
        ],
    }
    for message, wrong in calls.items():
        for op in wrong:
            with pytest.raises(ValueError, match=message):
                op()
