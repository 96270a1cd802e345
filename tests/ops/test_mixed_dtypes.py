"""q, k and v of different dtypes, and first states of any floating dtype: all are converted, and so are gradients."""

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import (
    FORWARD_PATHS,
    GATED_DELTA,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Shape,
    convert,
    draw,
    interpreted,
    same_bits,
)

SHAPE = Shape(2, 6, 2, 4, 3, 5)
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
MIXES = [
    ((F32, F32, BF16), F32),
    ((BF16, F32, F32), F32),
    ((F16, F16, BF16), F32),  # neither holds the numbers of the other
    ((F32, F64, F32), F64),
    ((BF16, BF16, F64), F64),
]
STATES = [F16, BF16, F32, F64, torch.float8_e4m3fn]


def mixed(row, dtypes: tuple[torch.dtype, ...]) -> dict[str, Tensor]:
    inputs = convert(draw(row, SHAPE), F32)
    return {**inputs, **{name: inputs[name].to(dtype) for name, dtype in zip("qkv", dtypes, strict=True)}}


@pytest.mark.parametrize("path", [{}, *FORWARD_PATHS])
@pytest.mark.parametrize(("dtypes", "common"), MIXES, ids=str)
def test_the_common_dtype_computes(dtypes, common, path):
    """The result has the bits of a call in the common dtype; the output is then rounded to the dtype of v."""
    if path.get("backend") == "native" and common is F64:
        path = {**path, "backend": "torch"}
    for row in ROWS:
        call = mixed(row, dtypes)
        wide = {**call, **{name: call[name].to(common) for name in "qkv"}}
        wide["state"] = wide["state"].to(F64 if common is F64 else F32)
        got, expected = row.op(**call, **path), row.op(**wide, **path)
        assert got.output.dtype == dtypes[2] and got.state.dtype == expected.state.dtype
        assert same_bits(got.output, expected.output.to(dtypes[2])) and same_bits(got.state, expected.state), row


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_states_of_every_floating_dtype(dtype, backend):
    """A first state is converted; the last one is float32 (float64 for float64 inputs)."""
    for row in ROWS:
        for wide in (F32, F64):
            call = convert(draw(row, SHAPE), wide)
            call["state"] = call["state"].to(dtype)
            got = row.op(**call, backend=backend)
            expected = row.op(**{**call, "state": call["state"].to(wide)}, backend=backend)
            assert got.state.dtype == wide
            assert same_bits(got.output, expected.output) and same_bits(got.state, expected.state)


def test_gradients_have_the_dtypes_of_their_inputs():
    for op, row in ((lineate.gated_delta_rule, GATED_DELTA), (lineate.linear_attention, LINEAR)):
        call = mixed(row, (BF16, F32, F16))
        call["state"] = call["state"].to(BF16)
        leaves = {name: x.requires_grad_() for name, x in call.items()}
        output, state = op(**leaves)
        grads = torch.autograd.grad(output.float().sum() + state.sum(), list(leaves.values()))
        for (name, x), dx in zip(leaves.items(), grads, strict=True):
            assert dx.dtype == x.dtype and dx.abs().sum() > 0, name


@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_the_fused_op(row):
    call = mixed(row, (BF16, F32, BF16))
    call["state"] = call["state"].to(F16)
    call |= {"gate": call.pop("log_decay"), "write": call.pop("beta"), "A_log": torch.zeros(SHAPE.hv)}
    wide = {name: x.float() for name, x in call.items()}
    got, expected = lineate.fused_delta_rule(**call), lineate.fused_delta_rule(**wide)
    assert got.output.dtype == BF16 and same_bits(got.output, expected.output.to(BF16))
    assert got.state.dtype == F32 and same_bits(got.state, expected.state)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_decode(backend):
    """decode converts q, k and v; the state is written in place, and must have its own dtype."""
    call = mixed(GATED_DELTA, (F32, BF16, F16))
    wide = {name: x.float().clone() for name, x in call.items()}
    got = lineate.decode(**call, backend=backend)
    assert got.dtype == F16 and same_bits(got, lineate.decode(**wide, backend=backend).to(F16))
    assert same_bits(call["state"], wide["state"])
    with pytest.raises(ValueError, match="state must be float32 or bfloat16 for float32 inputs, got float16"):
        lineate.decode(**{**call, "state": call["state"].half()}, backend=backend)


def test_explain_matrix_and_normalized_attention():
    call = mixed(GATED_DELTA, (F32, BF16, F16))
    assert lineate.explain(**call).form == "recurrent"
    gates = {name: call[name] for name in ("q", "k", "log_decay", "beta")}
    expected = lineate.attention_matrix(**{name: x.float() for name, x in gates.items()})
    assert same_bits(lineate.attention_matrix(**gates), expected)
    call = mixed(LINEAR, (F32, BF16, F16))
    del call["state"]
    wide = {name: x.float() for name, x in call.items()}
    got, expected = (lineate.linear_attention(**x, normalize=True, feature_map="elu+1") for x in (call, wide))
    assert same_bits(got.output, expected.output.half()) and same_bits(got.state, expected.state)


def test_compiled():
    torch._dynamo.reset()
    call = mixed(KIMI_DELTA, (BF16, F32, BF16))
    call["state"] = call["state"].half()
    compiled = torch.compile(lineate.kimi_delta_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, expected in zip(compiled(**call), lineate.kimi_delta_attention(**call), strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected)
