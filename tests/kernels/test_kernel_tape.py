"""Calls that are replayed from a tape have the bits of the first call, wherever their tensors lie."""

import importlib
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import lineate
from lineate import layers, plans
from tests.support.cases import GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Shape, convert, draw

pytest.importorskip("triton")
tape = importlib.import_module("lineate.kernels.tape")
layer_ops = importlib.import_module("lineate.kernels.layers.ops")
pytestmark = pytest.mark.gpu
RULES = {"GDN": GATED_DELTA, "KDA": KIMI_DELTA, "gated linear": GATED_LINEAR, "linear": LINEAR}


@pytest.fixture(autouse=True)
def no_tapes():
    tape.forget_tapes()
    yield
    tape.forget_tapes()


def replayed(call, tensors: list[Tensor], times: int = 4) -> int:
    """Make the call on copies at other addresses, compare all results; return how many tapes there are then."""
    expected = call(*tensors)
    held = []
    for n in range(times):
        held.append(torch.empty(1000 + 4096 * n, device="cuda"))
        found = call(*(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors))
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
    made = tape.tapes().values()
    assert all(x is not None for x in made), "a call could not be replayed"
    return len(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_forward_and_backward_keep_their_bits(rule, dtype):
    inputs = {name: x.cuda() for name, x in convert(draw(RULES[rule], Shape(2, 200, 2, 4, 64, 64)), dtype).items()}
    names, op = list(inputs), RULES[rule].op

    def call(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(names, tensors, strict=True))
        output, state = op(**given, backend="triton", form="chunkwise")
        gradients = torch.autograd.grad(output.float().sin().sum() + state.sum(), tensors)
        return [output, state, *gradients]

    assert replayed(call, [x.requires_grad_() for x in inputs.values()]) == 2
    with torch.no_grad():

        def plain(*tensors: Tensor) -> list[Tensor]:
            return list(op(**dict(zip(names, tensors, strict=True)), backend="triton", form="chunkwise"))

        assert replayed(plain, list(inputs.values())) == 3


@torch.no_grad()
def test_packed_sequences_may_change_their_bounds():
    inputs = {k: x.cuda() for k, x in convert(draw(GATED_DELTA, Shape(1, 300, 2, 2, 64, 64)), torch.bfloat16).items()}
    del inputs["state"]
    for bounds in ([0, 10, 300], [0, 200, 300], [0, 0, 300], [0, 64, 300], [0, 299, 300]):
        cu_seqlens = torch.tensor(bounds, device="cuda")
        found = lineate.gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
        for row, (first, end) in enumerate(pairwise(bounds)):
            if end > first:
                alone = lineate.gated_delta_rule(**{k: x[:, first:end] for k, x in inputs.items()}, form="chunkwise")
                torch.testing.assert_close(found.output[:, first:end], alone.output, rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(found.state[row : row + 1], alone.state, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_other_layouts_are_other_calls():
    """Views of one projection, tensors with gaps, and q that is k itself."""
    x = torch.randn(1, 100, 6, 64, device="cuda").bfloat16()
    beta = torch.rand(1, 100, 2, device="cuda")
    views = [x[:, :, 0:2], x[:, :, 2:4], x[:, :, 4:6]]
    dense = [y.contiguous() for y in views]
    gaps = [torch.stack((y, y), -1)[..., 0] for y in views]
    expected = lineate.delta_rule(*dense, beta, normalize_qk=True)
    assert expected.output.isfinite().all()
    for _ in range(4):
        for given in (views, dense, gaps):
            found = lineate.delta_rule(*given, beta, normalize_qk=True)
            assert torch.equal(found.output, expected.output) and torch.equal(found.state, expected.state)
    alone = lineate.delta_rule(dense[0], dense[0].clone(), dense[2], beta, normalize_qk=True)
    for _ in range(4):
        same = lineate.delta_rule(dense[0], dense[0], dense[2], beta, normalize_qk=True)
        assert torch.equal(same.output, alone.output)


@torch.no_grad()
def test_in_a_graph_on_other_streams_and_in_threads():
    inputs = {k: x.cuda() for k, x in convert(draw(KIMI_DELTA, Shape(1, 130, 2, 2, 64, 64)), torch.bfloat16).items()}
    expected = lineate.kimi_delta_attention(**inputs)
    for _ in range(3):
        lineate.kimi_delta_attention(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = lineate.kimi_delta_attention(**inputs)
    found.output.zero_()
    graph.replay()
    assert torch.equal(found.output, expected.output)
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            own = {name: x.clone() for name, x in inputs.items()}
            torch.cuda.current_stream().synchronize()
            for _ in range(50):
                got = lineate.kimi_delta_attention(**own)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got.output, expected.output):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_parts_of_a_layer_keep_their_bits():
    torch.manual_seed(0)
    mixer = layers.GatedDeltaNet(128, 2).cuda().bfloat16()
    feed, norm = layers.SwiGLU(128, 256).cuda().bfloat16(), layers.RMSNorm(128).cuda().bfloat16()
    attention = layers.GatedAttention(128, 2, rotary_dim=32).cuda().bfloat16()
    weights = [p for m in (mixer, feed, norm, attention) for p in m.parameters()]

    def call(x: Tensor) -> list[Tensor]:
        y = feed(norm(mixer(x)[0]) + attention(x)[0])
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *weights])]

    made = replayed(call, [torch.randn(2, 70, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)])
    assert made >= 10


@torch.no_grad()
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_bounds_may_be_on_the_cpu(first):
    """Calls that differ only in the device of cu_seqlens do not take each other's tape."""
    inputs = {k: x.cuda() for k, x in convert(draw(GATED_DELTA, Shape(1, 300, 2, 2, 64, 64)), torch.bfloat16).items()}
    del inputs["state"]
    expected = {}
    for bounds in ([0, 10, 300], [0, 200, 300]):
        for device in (first, first, first, "cuda", "cpu"):
            found = lineate.gated_delta_rule(**inputs, cu_seqlens=torch.tensor(bounds, device=device))
            before = expected.setdefault(bounds[1], found)
            assert torch.equal(found.output, before.output) and torch.equal(found.state, before.state)
    assert not torch.equal(expected[10].output, expected[200].output)


@torch.no_grad()
def test_a_part_of_one_tensor_may_begin_where_another_does(monkeypatch):
    """q and k are the same memory, 64 tokens apart: then its second slice of q begins where k does.

    Later calls have both elsewhere, with the same strides.
    """
    pipeline = importlib.import_module("lineate.kernels.pipeline")
    monkeypatch.setattr(pipeline, "SLICE_BYTES", 1)  # a slice for each chunk of the backward
    torch.manual_seed(0)
    x = torch.randn(1, 192, 2, 64, device="cuda").bfloat16()
    v, beta = torch.randn(1, 128, 2, 64, device="cuda").bfloat16(), torch.rand(1, 128, 2, device="cuda")

    def gradients(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        own = [y.detach().requires_grad_() for y in (q, k, v, beta)]
        with torch.enable_grad():
            output = lineate.delta_rule(*own, normalize_qk=True, backend="triton", form="chunkwise").output
            return torch.autograd.grad(output.float().square().sum(), own)

    q, k = x[:, :128], x[:, 64:]
    apart = x.clone()[:, :128], x.clone()[:, 64:]
    expected = gradients(q.clone(), k.clone())
    for given in ((q, k), (q, k), (q, k), apart, apart):
        for found, right in zip(gradients(*given), expected, strict=True):
            assert torch.equal(found, right)


@torch.no_grad()
def test_a_thread_may_begin_with_a_replayed_call():
    """A new thread has no context of the driver before it calls something of CUDA's runtime."""
    x = torch.randn(4, 64, device="cuda").bfloat16()
    expected = layer_ops.glu(x)
    for _ in range(3):
        layer_ops.glu(x)
    failed: list[BaseException] = []
    found: list[Tensor] = []

    def work() -> None:
        try:
            found.append(layer_ops.glu(x))
        except BaseException as error:
            failed.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failed
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


@torch.no_grad()
def test_threads_that_forget_each_others_calls(monkeypatch):
    """More forms of calls than are remembered, from several threads at once."""
    monkeypatch.setattr(plans.PLANS, "n", 3)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for n in range(200):
                    x = torch.ones(1 + n % 7, 64, device="cuda")
                    assert layer_ops.glu(x).isfinite().all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(tape.tapes()) <= 6


@torch.no_grad()
def test_calls_without_elements():
    for _ in range(4):
        assert layer_ops.glu(torch.ones(0, 64, device="cuda")).shape == (0, 32)
        assert layer_ops.rms_norm(torch.ones(0, 64, device="cuda"), torch.ones(64, device="cuda")).shape == (0, 64)


@torch.no_grad()
def test_a_recorded_call_may_compile_ahead():
    """As it does if the first call was inside of a CUDA graph; its tape has no room for what was only compiled."""
    inputs = {k: x.cuda() for k, x in convert(draw(GATED_DELTA, Shape(1, 130, 2, 2, 64, 64)), torch.bfloat16).items()}
    for _ in range(2):
        expected = lineate.gated_delta_rule(**inputs)
    (made,) = (x for x in tape.tapes().values() if x is not None)
    tape.forget_tapes()
    for n in range(4):
        if n == 1:  # the call that is recorded
            plans.forget("compiled")
        found = lineate.gated_delta_rule(**inputs)
        assert torch.equal(found.output, expected.output) and torch.equal(found.state, expected.state)
    (again,) = (x for x in tape.tapes().values() if x is not None)
    assert again.bytes <= made.bytes


@torch.no_grad()
def test_calls_share_zeros_without_waiting_for_the_device():
    """Whatever numbers of sequences the calls have, and in whatever order."""
    inputs = {k: x.cuda() for k, x in convert(draw(GATED_DELTA, Shape(1, 300, 2, 2, 64, 64)), torch.bfloat16).items()}
    del inputs["state"]
    all_bounds = [torch.tensor([*range(n), 300], device="cuda") for n in range(1, 25)]
    first = [lineate.gated_delta_rule(**inputs, cu_seqlens=bounds).output for bounds in all_bounds]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [lineate.gated_delta_rule(**inputs, cu_seqlens=bounds).output for bounds in all_bounds]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
