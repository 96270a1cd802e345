"""The kernels as torch sees them: compiled calls, custom ops, backends, CUDA graphs."""

import pytest
import torch
from torch import Tensor, nn

import lineate
from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Inputs,
    Shape,
    bounds,
    convert,
    draw,
    same_bits,
)
from tests.support.marks import slow_but
from tests.support.paths import BF16, GPU_ONLY, ONE_EACH, Path
from tests.support.raw_gates import FUSED_ROWS, raw_inputs
from tests.support.rule_kernels import LEAN, MODEL, ONE_HEAD, on_gpu, packed_inputs, sized, to
from tests.support.torch_calls import CapturedOps, check_cuda_graph, check_ops


class Layer(nn.Module):
    """Something to differentiate before and after the op, with the state in and out."""

    def __init__(self, op: object, path: Path, shape: Shape, **options: object):
        super().__init__()
        self.op, self.options = op, options
        self.before, self.after = (nn.Linear(shape.v, n, device=path.device) for n in (shape.v, 3))

    def forward(self, inputs: Inputs, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v = self.before(inputs["v"].float()).to(inputs["v"].dtype)
        output, state = self.op(**{**inputs, "v": v}, cu_seqlens=cu_seqlens, backend="triton", **self.options)
        return self.after(output.float()), state


def compare_compiled(layer: Layer, inputs: Inputs, path: Path, cu_seqlens: Tensor | None = None) -> None:
    """Check that forward and backward, compiled in one graph, have the bits of eager mode, twice."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    cu_seqlens = to(path.device, cu_seqlens)
    for turn in (0, 1):
        results = []
        for function in (layer, compiled):
            leaves = {n: x.to(path.device) + 0 for n, x in inputs.items()}
            leaves = {n: (x.roll(turn, 1) if x.dim() > 2 else x).requires_grad_() for n, x in leaves.items()}
            output, state = function(leaves, cu_seqlens)
            wanted = [*leaves.values(), *layer.parameters()]
            results.append([output, state, *torch.autograd.grad(output.square().sum() + state.square().sum(), wanted)])
        for i, (expected, got) in enumerate(zip(*results, strict=True)):
            assert same_bits(got.detach(), expected.detach()), i


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([LINEAR, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_compiled_equals_eager(row, path):
    torch.manual_seed(0)
    shape = sized(path, ONE_HEAD)
    layer = Layer(row.op, path, shape, form="chunkwise", normalize_qk=row.corrects)
    compare_compiled(layer, convert(draw(row, shape), path.dtype), path)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but(FUSED_ROWS, FUSED_ROWS[1:]), ids=str)
def test_compiled_fused_equals_eager(row, path):
    torch.manual_seed(0)
    shape = sized(path, ONE_HEAD)
    for bound in (None, -5.0):
        layer = Layer(lineate.fused_delta_rule, path, shape, beta_scale=2.0, lower_bound=bound)
        compare_compiled(layer, raw_inputs(row, path, "bias", shape), path)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_compiled_packed_texts(path):
    torch.manual_seed(0)
    lengths = (1, 0, 19) if path.device == "cpu" else (1, 0, 70)
    inputs = packed_inputs(GATED_DELTA, path, lengths, LEAN)
    compare_compiled(Layer(GATED_DELTA.op, path, sized(path), form="chunkwise"), inputs, path, bounds(lengths))


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_compiled_recurrent_form(path):
    torch._dynamo.reset()
    inputs = convert(draw(KIMI_DELTA, sized(path)._replace(t=2)), path.dtype)
    call = {name: x.to(path.device) for name, x in inputs.items()}
    op = torch.compile(lambda x: KIMI_DELTA.op(**x, backend="triton"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, expected in zip(op(call), KIMI_DELTA.op(**call, backend="triton"), strict=True):
            assert same_bits(got, expected)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("which", ["gated_delta", "fused gated_delta", "fused kimi_delta", "bounded kimi_delta"])
def test_custom_ops_keep_their_promises(which, packed, path):
    """opcheck passes (schema, fake tensors, autograd registration) for every op that a call and its backward use."""
    lengths = (1, 0, 19)
    shape, texts = sized(path, ONE_HEAD)._replace(t=20), len(lengths) if packed else None
    row = {x.name: x for x in ROWS}[which.split()[-1]]
    fused, bound = " " in which, {"lower_bound": -5.0} if which.startswith("bounded") else {}
    inputs = (
        raw_inputs(row, path, "no A_log" if bound else "bias", shape, texts)
        if fused
        else convert(draw(row, shape, texts=texts), path.dtype)
    )
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    op = lineate.fused_delta_rule if fused else row.op
    with CapturedOps() as captured:
        ends = bounds(lengths).to(path.device) if packed else None
        output, state = op(**leaves, **bound, backend="triton", cu_seqlens=ends)
        torch.autograd.grad(output.square().sum() + state.square().sum(), list(leaves.values()))
    assert len(captured.calls) == 2
    check_ops(captured.calls)


@pytest.mark.parametrize("path", GPU_ONLY)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_auto_takes_the_kernels(row, path):
    inputs = on_gpu(convert(draw(row, MODEL), path.dtype))
    assert lineate.explain(**inputs).backend == "triton"
    for got, expected in zip(row.op(**inputs), row.op(**inputs, form="chunkwise", backend="triton"), strict=True):
        assert same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_a_positive_log_decay_answers_nan(row):
    """On a GPU, checking gates would need a wait, so an error on a CPU is NaN on a GPU, in its head alone."""
    inputs = on_gpu(convert(draw(row, MODEL), torch.bfloat16))
    inputs["log_decay"][:, 20, 1] = 0.5
    output = row.op(**inputs, form="chunkwise").output
    assert output[:, 20:, 1].isnan().any()
    assert output[:, :, 2:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_in_a_cuda_graph(row, backward, packed):
    """A graph captured once and replayed with other numbers and other bounds has the bits of eager calls."""
    shape = MODEL._replace(b=1, t=130)
    lengths = (64, 0, 66)
    inputs = on_gpu(raw_inputs(row, BF16, "bias", shape, len(lengths) if packed else None))
    leaves = {name: x.requires_grad_(backward) for name, x in inputs.items()}
    ends = bounds(lengths).cuda() if packed else None

    def compute() -> list[Tensor]:
        output, state = lineate.fused_delta_rule(**leaves, cu_seqlens=ends)
        if not backward:
            return [output, state]
        ones = torch.ones_like(output), torch.ones_like(state)
        return [output, state, *torch.autograd.grad((output, state), list(leaves.values()), ones)]

    def change(turn: int) -> None:
        for name in ("q", "k", "v", "gate", "write"):
            leaves[name].copy_(leaves[name].roll(1, 1))
        if ends is not None:
            ends.copy_(bounds(((1, 129, 0), (0, 65, 65))[turn % 2]))

    check_cuda_graph(compute, change)
