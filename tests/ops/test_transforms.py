"""torch.func (vmap, grad, jvp) and forward mode of the default call agree with the recurrent form in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import lineate
from lineate.layers import GatedDeltaNet
from tests.support.cases import (
    GATED_DELTA,
    KIMI_DELTA,
    ROWS,
    Inputs,
    Row,
    Shape,
    bounds,
    convert,
    draw,
    relative_error,
    run,
)

SHAPE = Shape(1, 21, 2, 4, 6, 5)
TEXTS = (9, 0, 12)
Function = Callable[[Inputs], tuple[Tensor, ...]]
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"]
)


def inputs_of(row: Row, texts: int | None = None, seed: int = 0, shape: Shape = SHAPE) -> Inputs:
    return draw(row, shape, texts=texts, seed=seed)


def function_of(row: Row, **options: object) -> Function:
    """Return a function from the inputs to output and state, in three chunks."""
    return lambda inputs: tuple(row.op(**inputs, **({"chunk_size": 8} | options)))


def jvp(function: Function, inputs: Inputs, tangents: Inputs) -> tuple[Tensor, ...]:
    return torch.func.jvp(function, (inputs,), (tangents,))[1]


def dual(function: Function, inputs: Inputs, tangents: Inputs) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        results = function({name: forward_ad.make_dual(x, tangents[name]) for name, x in inputs.items()})
        return tuple(forward_ad.unpack_dual(x).tangent for x in results)


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


WAYS = {
    "jvp": jvp,
    "dual": dual,
    "jvp of compiled": lambda function, *rest: jvp(compiled(function), *rest),
    "dual of compiled": lambda function, *rest: dual(compiled(function), *rest),
    "compiled jvp": lambda function, *rest: compiled(lambda *x: jvp(function, *x))(*rest),
}


@pytest.mark.slow(but="values")
@DTYPES
@pytest.mark.parametrize("texts", [None, TEXTS], ids=["whole", "packed"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_tangents(row, texts, dtype, tolerance):
    check_tangents(row, jvp, dtype, tolerance, texts)


@pytest.mark.slow(but="values")
@DTYPES
@pytest.mark.parametrize("way", WAYS)
def test_tangents_by_every_way(way, dtype, tolerance):
    """Three chunks of two tokens keep the compile time short."""
    check_tangents(KIMI_DELTA, WAYS[way], dtype, tolerance, shape=SHAPE._replace(t=5), chunk_size=2)


def check_tangents(
    row: Row,
    way: Callable,
    dtype: torch.dtype,
    tolerance: float,
    texts: tuple[int, ...] | None = None,
    shape: Shape = SHAPE,
    chunk_size: int = 8,
) -> None:
    inputs, tangents = (inputs_of(row, texts and len(texts), seed, shape) for seed in (0, 1))
    options = {"cu_seqlens": texts and bounds(texts), "normalize_qk": True, "chunk_size": chunk_size}
    found = way(function_of(row, **options), convert(inputs, dtype), convert(tangents, dtype))
    expected = jvp(function_of(row, **options, form="recurrent"), inputs, tangents)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype and relative_error(x, y) < tolerance


@DTYPES
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_torch_func_grad_is_autograd(row, dtype, tolerance):
    inputs = convert(inputs_of(row), dtype)

    def loss(inputs: Inputs) -> Tensor:
        return sum(x.sum() for x in row.op(**inputs, chunk_size=8))

    found = torch.func.grad(loss)(inputs)
    for name, x in run(row, inputs, weighted=False, chunk_size=8).grads.items():
        assert relative_error(found[name], x) < 10 * tolerance, name


def test_second_derivatives_by_torch_func():
    """The product of the Hessian with a vector works, although autograd's second derivative of the op is refused."""
    inputs, tangents = inputs_of(GATED_DELTA), inputs_of(GATED_DELTA, seed=1)

    def gradient(**options: object) -> Function:
        def loss(inputs: Inputs) -> Tensor:
            return GATED_DELTA.op(**inputs, **options).output.square().sum()

        return torch.func.grad(loss)

    found, expected = (jvp(gradient(**x), inputs, tangents) for x in ({"chunk_size": 8}, {"form": "recurrent"}))
    for name, x in found.items():
        assert relative_error(x, expected[name]) < 1e-12, name


@DTYPES
@pytest.mark.parametrize("options", [{}, {"form": "recurrent"}], ids=["auto", "recurrent"])
def test_vmap_is_a_loop(options, dtype, tolerance):
    """The mapped tensors may require gradients, which cannot be seen inside vmap."""
    each = [convert(inputs_of(KIMI_DELTA, seed=seed), dtype) for seed in (0, 1)]
    stacked = {name: torch.stack([x[name] for x in each]).requires_grad_() for name in each[0]}
    function = function_of(KIMI_DELTA, **options)
    found = torch.vmap(function)(stacked)
    grads = torch.autograd.grad(sum(x.sum() for x in found), list(stacked.values()))
    for i, inputs in enumerate(each):
        expected = run(KIMI_DELTA, inputs, "recurrent", backend="torch", weighted=False)
        assert relative_error(found[0][i], expected.output) < tolerance
        assert relative_error(found[1][i], expected.state) < tolerance
        for name, dx in zip(stacked, grads, strict=True):
            assert relative_error(dx[i], expected.grads[name]) < 10 * tolerance, name


def test_what_is_not_mapped_is_checked():
    inputs = inputs_of(GATED_DELTA)
    queries, others = inputs["q"].expand(2, *inputs["q"].shape), {n: x for n, x in inputs.items() if n != "q"}
    for wrong, message in (
        ({"log_decay": -others["log_decay"]}, "log_decay must be <= 0"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "cu_seqlens must start at 0 and end at t = 21"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.vmap(lambda q, wrong=wrong: GATED_DELTA.op(q=q, **{**others, **wrong}).output)(queries)


def test_tangents_of_a_layer():
    """Its convolution and norms propagate them too; in float32, they agree with finite differences in float64."""
    torch.manual_seed(0)
    layer, x, dx = GatedDeltaNet(16, 2, key_dim=4, value_dim=6), torch.randn(2, 70, 16), torch.randn(2, 70, 16)
    found = {way: WAYS[way](lambda x: layer(x["x"])[:1], {"x": x}, {"x": dx})[0] for way in ("jvp", "dual")}
    with torch.no_grad():
        layer, x, dx = layer.double(), x.double(), 1e-5 * dx.double()
        expected = (layer(x + dx)[0] - layer(x - dx)[0]) / 2e-5
    for way, tangent in found.items():
        assert relative_error(tangent, expected) < 1e-5, way


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["jvp", "dual", "compiled jvp"])
def test_tangents_on_a_gpu(way):
    """Neither the kernels of the rule nor those around it are used."""
    inputs, tangents = ({n: x.float().cuda() for n, x in inputs_of(GATED_DELTA, seed=seed).items()} for seed in (0, 1))
    found, expected = (
        WAYS[way](function_of(GATED_DELTA, **options), inputs, tangents) for options in ({}, {"form": "parallel"})
    )
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-4
    torch.manual_seed(0)
    layer, x, dx = GatedDeltaNet(16, 2, key_dim=4, value_dim=6).cuda(), torch.randn(2, 70, 16), torch.randn(2, 70, 16)
    x, dx = x.cuda(), dx.cuda()
    (found,) = WAYS[way](lambda x: layer(x["x"])[:1], {"x": x}, {"x": dx})
    exact = layer.double()  # outside, because torch's own functions crash with weights that change inside
    (expected,) = jvp(lambda x: exact(x["x"])[:1], {"x": x.double()}, {"x": dx.double()})
    assert relative_error(found, expected) < 1e-3


@pytest.mark.cover
def test_decoding_passes_tangents_on_or_refuses():
    inputs = {
        name: x[:, :3] if name != "state" else x for name, x in convert(inputs_of(KIMI_DELTA), torch.float32).items()
    }
    tangents = {name: x.flip(1) for name, x in inputs.items()}

    def decode(inputs: Inputs) -> tuple[Tensor]:
        return (lineate.decode(**{**inputs, "state": inputs["state"].clone()}),)

    (found,), expected = dual(decode, inputs, tangents), dual(function_of(KIMI_DELTA), inputs, tangents)
    assert relative_error(found, expected[0]) < 1e-5
    with pytest.raises(ValueError, match="decode must not be compiled inside"):
        dual(compiled(decode), inputs, tangents)


@pytest.mark.cover
def test_a_recorded_call_is_recorded():
    """make_fx and linearize see every step, those in C too: a replay on other numbers gives their results."""
    torch.manual_seed(0)
    layer, x, y = GatedDeltaNet(16, 2, key_dim=4, value_dim=4), torch.randn(1, 17, 16), torch.randn(1, 17, 16)
    with torch.no_grad():
        for t in (1, 17):
            recorded = make_fx(lambda x: layer(x)[0])(x[:, :t])
            assert relative_error(recorded(y[:, :t]), layer(y[:, :t])[0]) < 1e-5, t
    inputs, tangents = inputs_of(GATED_DELTA), inputs_of(GATED_DELTA, seed=1)
    found, linear = torch.func.linearize(function_of(GATED_DELTA), inputs)
    expected = jvp(function_of(GATED_DELTA, form="recurrent"), inputs, tangents)
    assert relative_error(found[0], function_of(GATED_DELTA)(inputs)[0]) < 1e-12
    assert relative_error(linear(tangents)[0], expected[0]) < 1e-12


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls the op once for each element
@pytest.mark.parametrize("t", [1, 21])
def test_gradients_in_batches(t):
    inputs = {
        name: x if name == "state" else x[:, :t] for name, x in convert(inputs_of(KIMI_DELTA), torch.float32).items()
    }

    def function(q: Tensor) -> Tensor:
        return KIMI_DELTA.op(**{**inputs, "q": q}).output

    found, expected = (torch.autograd.functional.jacobian(function, inputs["q"], vectorize=x) for x in (True, False))
    assert relative_error(found, expected) < 1e-5
