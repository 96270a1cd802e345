"""The kernels around the rules under torch.compile, in CUDA graphs and in a GPU's queue."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import bounds, relative_error, same_bits
from tests.support.layer_kernels import draw, kernel
from tests.support.marks import slow_but
from tests.support.paths import BF16, GPU, ONE_EACH, Path
from tests.support.torch_calls import CapturedOps, check_cuda_graph, check_ops, compilations

pytestmark = pytest.mark.usefixtures("guarded_memory")


# What torch.compile and CUDA graphs see


class Layer(nn.Module):
    """A projection, the three kernels one after another on parts of it, and a norm after them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24 + 12 + 24, device=path.device)
        self.conv = nn.Parameter(torch.randn(24, 4, device=path.device))
        self.norm = nn.Parameter(torch.rand(6, device=path.device) + 0.5)
        self.to(path.dtype)

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None):
        mixed, gate, both = self.project(x).split((24, 12, 24), -1)
        mixed, state = kernel("short_convolution")(mixed, self.conv, state, cu_seqlens)
        gate, mixed = (y.unflatten(-1, (2, 6)) for y in (gate, mixed[..., :12]))
        y = kernel("gated_rms_norm")(mixed, gate, self.norm, 1e-6, "sigmoid").flatten(2)
        return y + kernel("glu")(both), state


def layer_inputs(path: Path, lengths: tuple[int, ...] | None) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    b, t = (2, 5) if lengths is None else (1, sum(lengths))
    x = torch.randn(b, t, 8, generator=generator).to(*path)
    state = torch.randn(b if lengths is None else len(lengths), 24, 3, generator=generator).to(*path)
    return [x.requires_grad_(), state.requires_grad_(), None if lengths is None else bounds(lengths).to(path.device)]


def step(layer: object, parameters: list[Tensor], x: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    y, final = layer(x, state, cu_seqlens)
    wanted = [x, state, *parameters]
    return [y, final, *torch.autograd.grad(y.float().square().sum() + final.float().square().sum(), wanted)]


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("lengths", slow_but([None, (1, 0, 4)], [(1, 0, 4)]), ids=["whole", "packed"])
def test_compiled_equals_eager(lengths, path):
    """Compiled in one graph, forward and backward have the same bits as in eager mode."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = Layer(path)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = layer_inputs(path, lengths)
    expected, found = (step(f, list(layer.parameters()), *inputs) for f in (layer, compiled))
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(x.detach(), y.detach()), i


@pytest.mark.gpu
def test_compiled_by_inductor():
    """torch.compile works with its defaults, in one graph, for several lengths; fusions around the ops round."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    layer = Layer(GPU[0])
    compiled = torch.compile(layer, fullgraph=True)
    for lengths in (None, (1, 0, 4), (2, 9)):
        inputs = layer_inputs(GPU[0], lengths)
        expected, found = (step(f, list(layer.parameters()), *inputs) for f in (layer, compiled))
        for i, (x, y) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4, msg=str(i))


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
def test_custom_ops_keep_their_promises(lengths, path):
    """opcheck passes (schema, fake tensors, autograd registration) for every op that a call and its backward use."""
    layer = Layer(path)
    with CapturedOps() as captured:
        step(layer, list(layer.parameters()), *layer_inputs(path, lengths))
    assert len(captured.calls) == 6
    check_ops(captured.calls)


# Natively only


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_in_a_cuda_graph(backward, lengths):
    """A graph captured once and replayed with other numbers and other bounds has the bits of eager calls."""
    layer = Layer(BF16)
    x, state, ends = inputs = layer_inputs(BF16, lengths)

    def compute() -> list[Tensor]:
        if backward:
            return step(layer, list(layer.parameters()), *inputs)
        with torch.no_grad():
            return [*layer(*inputs)]

    def change(turn: int) -> None:
        x.copy_(x.roll(1, 1))
        state.mul_(0.5)
        if ends is not None:
            ends.copy_(bounds(((0, 5, 0), (2, 1, 2))[turn % 2]))

    check_cuda_graph(compute, change)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
def test_nothing_waits_for_the_device(lengths):
    layer = Layer(BF16)
    inputs = layer_inputs(BF16, lengths)
    step(layer, list(layer.parameters()), *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, list(layer.parameters()), *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_one_compilation_for_every_batch_and_length(packed):
    """Neither t nor b nor the number of texts may compile anything again; a single token has its own kernel."""
    before = None
    for b, t in ((2, 130), (1, 64), (3, 65), (5, 16), (2, 100), (1, 5000), (1, 2), (300, 3)):
        lengths = (t,) * b if packed else None
        size = (1, b * t) if packed else (b, t)
        inputs = draw(BF16, size[1], 256, b=size[0], rows=b) | {"gate": torch.randn(*size, 2, 128).to(BF16.dtype)}
        leaves = {n: x.cuda().requires_grad_() for n, x in inputs.items()}
        ends = bounds(lengths).cuda() if packed else None
        y, final = kernel("short_convolution")(leaves["x"], leaves["weight"], leaves["state"], ends)
        y = kernel("gated_rms_norm")(y.unflatten(-1, (2, 128)), leaves["gate"], leaves["weight"][:128, 0])
        y = kernel("glu")(y.flatten(2))
        torch.autograd.grad(y.float().sum() + final.float().sum(), list(leaves.values()))
        now = compilations("lineate.kernels.layers")
        before = before or now
        assert now == before, (b, t)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Channels are independent, so the last ones, with the largest addresses, must equal a run on them alone."""
    t, channels = 300_000, 8192
    assert t * channels > 2**31
    torch.cuda.empty_cache()  # frees what another test left
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    torch.use_deterministic_algorithms(False)  # poisoning would take as long as the whole test
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

    def results(function: object, dy: Tensor, **inputs: Tensor) -> list[Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
        out = function(**leaves)
        out = out[0] if isinstance(out, tuple) else out
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dy)]

    x, dy, last = normal(1, t, channels), normal(1, t, channels), slice(-512, None)
    weight = normal(channels, 4)
    whole = results(kernel("short_convolution"), dy, x=x, weight=weight)
    alone = results(kernel("short_convolution"), dy[..., last].contiguous(), x=x[..., last], weight=weight[last])
    for found, expected in zip(whole[:2], alone[:2], strict=True):
        assert same_bits(found[:, -1000:, last], expected[:, -1000:])
    assert relative_error(whole[2][last], alone[2]) <= 2**-8  # walks and sums differ
    del whole, alone

    heads = x.view(1, t, 64, 128), dy.view(1, t, 64, 128)
    whole = results(kernel("gated_rms_norm"), heads[1], x=heads[0], gate=heads[1], weight=weight[:128, 0])
    end = [y[:, -100:].contiguous() for y in heads]
    alone = results(kernel("gated_rms_norm"), end[1], x=end[0], gate=end[1], weight=weight[:128, 0])
    for found, expected in zip(whole[:3], alone[:3], strict=True):
        assert same_bits(found[:, -100:], expected)
    del whole, alone

    half = dy[..., : channels // 2]
    whole, alone = (results(kernel("glu"), half[:, i:], x=x[:, i:]) for i in (0, t - 100))
    for found, expected in zip(whole, alone, strict=True):
        assert same_bits(found[:, -100:], expected)
