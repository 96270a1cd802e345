"""A constant log_decay of each head, `hv`: the same as one that repeats it for every token, in every form."""

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import (
    FORWARD_PATHS,
    GATED_DELTA,
    GATED_LINEAR,
    Shape,
    bounds,
    convert,
    draw,
    interpreted,
    same_bits,
)

SHAPE = Shape(2, 70, 2, 4, 3, 5)
ROWS = [GATED_LINEAR, GATED_DELTA]
TRITON = pytest.param({"form": "chunkwise", "backend": "triton"}, id="triton", marks=interpreted)
rows = pytest.mark.parametrize("row", ROWS, ids=str)


def constant(shape: Shape = SHAPE) -> Tensor:
    """Return the decays of RetNet, 1 - 2^-(5 + n) for head n, and one that forgets all."""
    decay = torch.log(1 - 2.0 ** -(5 + torch.arange(shape.hv)))
    decay[-1] = -torch.inf
    return decay


def both(row, shape: Shape = SHAPE, **options: object) -> tuple[dict[str, object], dict[str, object]]:
    inputs = convert(draw(row, shape), torch.float32)
    full = constant(shape).expand(shape.b, shape.t, -1).contiguous()
    return {**inputs, "log_decay": constant(shape), **options}, {**inputs, "log_decay": full, **options}


@pytest.mark.parametrize("path", [{}, *FORWARD_PATHS, TRITON])
@rows
def test_the_same_bits_as_repeated(row, path):
    short, full = both(row, SHAPE._replace(t=7) if path.get("form") == "recurrent" else SHAPE)
    for got, expected in zip(row.op(**short, **path), row.op(**full, **path), strict=True):
        assert same_bits(got, expected)


@pytest.mark.cover
@pytest.mark.parametrize("path", [{}, {"backend": "torch"}, TRITON])
@rows
def test_the_gradient_is_summed_over_tokens(row, path):
    short, full = both(row)
    grads = []
    for call in (short, full):
        leaves = {name: x.double().float().clone().requires_grad_() for name, x in call.items()}
        leaves["log_decay"].data.clamp_(min=-3)
        output, state = row.op(**leaves, **path)
        found = torch.autograd.grad(output.square().sum() + state.square().sum(), list(leaves.values()))
        grads.append(dict(zip(leaves, found, strict=True)))
    assert grads[0]["log_decay"].shape == (4,)
    for name, x in grads[0].items():
        expected = grads[1][name].sum((0, 1)) if name == "log_decay" else grads[1][name]
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@rows
def test_packed_explained_and_as_a_matrix(row):
    short, full = both(row, SHAPE._replace(b=1))
    short["state"] = full["state"] = torch.zeros(2, 4, 3, 5)
    ends = bounds((30, 40))
    for got, expected in zip(row.op(**short, cu_seqlens=ends), row.op(**full, cu_seqlens=ends), strict=True):
        assert same_bits(got, expected)
    assert lineate.explain(**short, cu_seqlens=ends) == lineate.explain(**full, cu_seqlens=ends)
    names = [name for name in ("q", "k", "log_decay", "beta") if name in full]
    matrices = [lineate.attention_matrix(**{name: call[name] for name in names}) for call in (short, full)]
    assert same_bits(*matrices)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
@rows
def test_decode(row, backend):
    short, full = both(row, SHAPE._replace(t=3), backend=backend)
    results = []
    for call in (short, full):
        call = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
        results.append((lineate.decode(**call), call["state"]))
    for got, expected in zip(*results, strict=True):
        assert same_bits(got, expected)


def test_compiled_and_mapped():
    torch._dynamo.reset()
    short, _ = both(GATED_DELTA)
    compiled = torch.compile(lineate.gated_delta_rule, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(**short), lineate.gated_delta_rule(**short), strict=True):
        torch.testing.assert_close(got, expected)
    decays = torch.stack((constant(), constant() / 2))
    run = torch.vmap(lambda decay: lineate.gated_delta_rule(**{**short, "log_decay": decay}).output)
    single = [lineate.gated_delta_rule(**{**short, "log_decay": x}).output for x in decays]
    torch.testing.assert_close(run(decays), torch.stack(single), rtol=1e-4, atol=1e-5)
