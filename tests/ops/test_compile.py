"""torch.compile(fullgraph=True) of modules that use the ops, and torch's checks of custom ops."""

import shutil

import pytest
import torch
from torch import Tensor, nn

import lineate
from lineate.torch_ops.tracing import constant_in_graphs
from tests.support.cases import (
    CHUNKWISE,
    FORWARD_PATHS,
    GATED_DELTA,
    KIMI_DELTA,
    PACKED,
    ROWS,
    SMALL,
    TEXTS,
    Inputs,
    Row,
    Shape,
    bounds,
    convert,
    draw,
    needs_native,
    relative_error,
)
from tests.support.marks import slow_but
from tests.support.torch_calls import CapturedOps, check_ops

SHAPE = Shape(2, 21, 2, 4, 6, 5)


class Memory(nn.Module):
    """A layer around one op: something to differentiate before it and after it, with the state in and out."""

    def __init__(self, row: Row, shape: Shape, **options: object):
        super().__init__()
        self.row, self.options = row, options
        self.before, self.after = nn.Linear(shape.v, shape.v), nn.Linear(shape.v, 3)

    def forward(self, inputs: Inputs, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inputs = {**inputs, "v": self.before(inputs["v"])}
        output, state = self.row.op(**inputs, cu_seqlens=cu_seqlens, **self.options)
        return self.after(output), state


def results(module: nn.Module, inputs: Inputs, *rest: object) -> list[Tensor]:
    """Return output, state, and the gradients of inputs and parameters."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, state = module(leaves, *rest)
    loss = output.square().sum() + state.square().sum()
    return [output, state, *torch.autograd.grad(loss, [*leaves.values(), *module.parameters()])]


def compare(module: Memory, inputs: Inputs, *rest: object, backend: str = "aot_eager", tolerance: float = 0.0) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for seed in (0, 1):  # the second call runs what the first one compiled
        some = {name: x + 0 if seed == 0 else x.roll(1, dims=1) for name, x in inputs.items()}
        for i, (got, expected) in enumerate(
            zip(results(compiled, some, *rest), results(module, some, *rest), strict=True)
        ):
            assert relative_error(got.detach(), expected.detach()) <= tolerance, i


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", CHUNKWISE)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_DELTA, KIMI_DELTA)), ids=str)
def test_compiled_equals_eager(row, path):
    """Forward and backward, with the state in and out, agree to the last bit, because the op itself runs."""
    torch.manual_seed(0)
    inputs = convert(draw(row, SHAPE), torch.float32)
    compare(Memory(row, SHAPE, **path, chunk_size=8, normalize_qk=True), inputs)


@pytest.mark.cover
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_DELTA, KIMI_DELTA)), ids=str)
def test_compiled_packed_texts(row):
    torch.manual_seed(0)
    inputs = convert(draw(row, PACKED, texts=len(TEXTS)), torch.float32)
    compare(Memory(row, PACKED, chunk_size=16), inputs, bounds())


@pytest.mark.cover
@pytest.mark.parametrize("form", ["auto", "recurrent", "parallel"])
def test_other_forms_compile(form):
    """These are plain torch, in which the compiler may order sums differently."""
    torch.manual_seed(0)
    shape = SHAPE._replace(t=2 if form == "recurrent" else 4)  # the recurrent form is unrolled
    compare(Memory(KIMI_DELTA, shape, form=form), convert(draw(KIMI_DELTA, shape), torch.float32), tolerance=1e-6)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", [*FORWARD_PATHS, {}], ids=lambda x: "auto" if not x else None)
@pytest.mark.parametrize("t", [1, 4, 21])
def test_compiled_without_gradients(t, path):
    """Decoding and prefill in inference compile in one graph, whatever `auto` chooses."""
    torch._dynamo.reset()
    unrolled = path == {"form": "recurrent", "backend": "torch"}
    shape = SHAPE._replace(t=min(t, 7) if unrolled else t)
    inputs = convert(draw(GATED_DELTA, shape), torch.float32)
    op = torch.compile(lambda x: GATED_DELTA.op(**x, **path), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, expected in zip(op(inputs), GATED_DELTA.op(**inputs, **path), strict=True):
            assert relative_error(got, expected) <= 1e-6


@pytest.mark.cover
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_fused_delta_rule_compiles(row, bound):
    """On a CPU, the activations in torch and the op are one graph, forward and backward."""
    torch._dynamo.reset()
    inputs = convert(draw(row, SHAPE), torch.float32)
    gates = {"gate": inputs.pop("log_decay"), "write": inputs.pop("beta"), "A_log": torch.zeros(SHAPE.hv)}
    inputs = {**inputs, **gates, "dt_bias": torch.ones(gates["gate"].shape[2:])}
    compiled = torch.compile(lineate.fused_delta_rule, fullgraph=True, backend="aot_eager")
    results = []
    for op in (lineate.fused_delta_rule, compiled):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        output, state = op(**leaves, beta_scale=2.0, lower_bound=bound)
        results.append([output, state, *torch.autograd.grad(output.sum() + state.sum(), list(leaves.values()))])
    for expected, got in zip(*results, strict=True):
        assert relative_error(got.detach(), expected.detach()) <= 1e-6


@pytest.mark.parametrize("raw", ["gate", "write"])
def test_one_raw_gate_compiles(raw):
    torch._dynamo.reset()
    inputs = convert(draw(GATED_DELTA, SHAPE), torch.float32)
    if raw == "gate":
        inputs |= {"gate": inputs.pop("log_decay"), "A_log": torch.zeros(SHAPE.hv)}
    else:
        inputs["write"] = inputs.pop("beta")
    compiled = torch.compile(lineate.fused_delta_rule, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(**inputs), lineate.fused_delta_rule(**inputs), strict=True):
        assert relative_error(got, expected) <= 1e-6


@pytest.mark.cover
def test_one_graph_serves_every_length():
    """With dynamic shapes, nothing is compiled again after the second length."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    op = torch.compile(lambda x: KIMI_DELTA.op(**x, chunk_size=16), fullgraph=True, backend=counter, dynamic=True)
    for t in (20, 33, 47, 64):
        inputs = {name: x.requires_grad_() for name, x in draw(KIMI_DELTA, SHAPE._replace(t=t)).items()}
        assert (
            relative_error(op(inputs).output.detach(), KIMI_DELTA.op(**inputs, form="recurrent").output.detach())
            < 1e-12
        )
    assert counter.frame_count == 1


@pytest.mark.gpu
@torch.no_grad()
def test_one_graph_serves_small_and_large_first_states():
    """Eager calls share small first states and make large ones; a graph makes all of them."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    op = torch.compile(lineate.delta_rule, fullgraph=True, backend=counter, dynamic=True)
    for b in (5, 3, 600):  # no size of another dimension, or torch would take them for one
        q, k, v = (torch.randn(b, 16, 2, 64, device="cuda").bfloat16() for _ in range(3))
        beta = torch.rand(b, 16, 2, device="cuda")
        found, expected = (run(q, k, v, beta, normalize_qk=True) for run in (op, lineate.delta_rule))
        assert torch.equal(found.output, expected.output) and torch.equal(found.state, expected.state)
    assert counter.frame_count == 1


def test_a_constant_of_graphs_is_asked_once():
    """torch runs the function while compiling, even one that it cannot trace, and keeps its result in the graph."""
    torch._dynamo.reset()
    asked = []

    @constant_in_graphs
    def asks(name: str) -> float:
        asked.append(id(object()))  # id() of a new object breaks a graph
        return float(len(name))

    compiled = torch.compile(lambda x: x * asks("four"), fullgraph=True, backend="aot_eager")
    for x in (torch.ones(2), torch.ones(2) + 1):
        assert torch.equal(compiled(x), 4 * x)
    assert len(asked) == 1
    assert asks("five!") == 5.0 and len(asked) == 2  # outside of graphs it is an ordinary function


@pytest.mark.cover
def test_softmax_attention_and_attention_matrix_compile():
    torch._dynamo.reset()
    inputs = convert(draw(KIMI_DELTA, SHAPE), torch.float32)
    q, k, v, log_decay, beta = (inputs[name] for name in ("q", "k", "v", "log_decay", "beta"))

    def function(q: Tensor) -> tuple[Tensor, Tensor]:
        first = lineate.softmax_attention(q, k, v)
        second = lineate.softmax_attention(q, k, v, state=first.state)
        return second.output, lineate.attention_matrix(q, k, log_decay, beta)

    for got, expected in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(q), function(q), strict=True):
        assert relative_error(got, expected) <= 1e-6


@pytest.mark.cover
def test_compiled_calls_check_bounds_when_they_run():
    """Values are unknown while compiling; the op itself refuses bounds that would read outside the sequences."""
    torch._dynamo.reset()
    inputs = convert(draw(GATED_DELTA, SMALL._replace(b=1), "empty memory"), torch.float32)
    op = torch.compile(lambda x, ends: GATED_DELTA.op(**x, cu_seqlens=ends).output, fullgraph=True, backend="aot_eager")
    assert op(inputs, bounds((20, 33))).isfinite().all()
    for wrong in ([0, 20, 54], [1, 20, 53], [0, 60, 53], [0, -1, 53]):
        with pytest.raises(ValueError, match=r"^cu_seqlens must rise from 0 to t = 53, got "):
            op(inputs, torch.tensor(wrong))


OTHER_SIZES = pytest.param(([0, 2], [0, 2, 1, 3]), marks=pytest.mark.slow)  # these are compiled again


@pytest.mark.cover
@pytest.mark.parametrize("wrong", [([0, 1, 2], [0, 4, 3]), OTHER_SIZES], ids=["same size", "other sizes"])
@pytest.mark.parametrize("path", FORWARD_PATHS)
def test_compiled_calls_in_every_form_check_bounds(path, wrong):
    torch._dynamo.reset()
    inputs = convert(draw(GATED_DELTA, Shape(1, 3, 1, 1, 3, 2), "empty memory"), torch.float32)
    op = torch.compile(lambda x, ends: GATED_DELTA.op(**x, **path, cu_seqlens=ends).output, backend="aot_eager")
    assert op(inputs, torch.tensor([0, 2, 3])).shape[1] == 3
    for ends in wrong:
        with pytest.raises(ValueError, match=r"^cu_seqlens must rise from 0 to t = 3, got "):
            op(inputs, torch.tensor(ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled_chunks_check_the_decay(dtype):
    torch._dynamo.reset()
    inputs = convert(draw(GATED_DELTA, SHAPE), dtype)
    op = torch.compile(lambda x: GATED_DELTA.op(**x).output, fullgraph=True, backend="aot_eager")
    assert op(inputs).isfinite().all()
    with pytest.raises(ValueError, match=r"^log_decay must be <= 0"):
        op({**inputs, "log_decay": -inputs["log_decay"]})


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("path", CHUNKWISE)
def test_inductor(path):
    torch.manual_seed(0)
    inputs = convert(draw(KIMI_DELTA, SHAPE), torch.float32)
    compare(Memory(KIMI_DELTA, SHAPE, **path, chunk_size=8), inputs, backend="inductor", tolerance=1e-5)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", CHUNKWISE)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_custom_ops_keep_their_promises(row, packed, path):
    """opcheck passes (schema, fake tensors, autograd registration) for every op that a call and its backward use."""
    shape, texts = (PACKED, len(TEXTS)) if packed else (SHAPE, None)
    inputs = convert(draw(row, shape, texts=texts), torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with CapturedOps() as captured:
        output, state = row.op(**leaves, **path, chunk_size=8, cu_seqlens=bounds() if packed else None)
        torch.autograd.grad(output.square().sum() + state.square().sum(), list(leaves.values()))
    assert len(captured.calls) == 2
    check_ops(captured.calls)


@needs_native
def test_fake_tensors_have_the_real_strides():
    """An output has the strides that the compiler expects: it is contiguous, whatever the inputs are."""
    inputs = convert(draw(GATED_DELTA, SHAPE), torch.float32)
    odd = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}
    for call in (inputs, odd):
        output, state = GATED_DELTA.op(**call, form="chunkwise")
        assert output.is_contiguous()
        assert state.is_contiguous()
