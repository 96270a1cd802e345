"""Scores and inverse that Hopper's kernels make while the walk runs, on the multiprocessors that it leaves idle.

They have the bits of launches one after the other, forward and backward, and the walk never reads what is not written.
"""

import inspect

import pytest
import torch

from tests.support.cases import DELTA, GATED_DELTA, Shape, bounds, convert, draw, same_bits
from tests.support.rule_kernels import TEXTS, on_gpu

pytestmark = pytest.mark.gpu
ROWS = [DELTA, GATED_DELTA]
SHAPES = [
    Shape(1, 1, 2, 4, 128, 128),
    Shape(3, 65, 2, 4, 128, 128),
    Shape(1, 1000, 1, 2, 128, 256),
    Shape(1, 5000, 16, 32, 128, 128),
]
CHUNKWISE = {"form": "chunkwise", "backend": "triton"}


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets whether scores run in parallel with walks, however many and long; skip other GPUs.

    Before it is called again, and at the end, every launch of the scores must have been as it was chosen.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    launches = pytest.importorskip("lineate.kernels.hopper.launch_scores")
    tape = pytest.importorskip("lineate.kernels.tape")
    names = inspect.signature(launches.head_scores.fn).parameters
    start, seen, chosen = launches.start, [], []

    def spy(kernel, grid):
        launch = start(kernel, grid)

        def go(*given, **options):
            seen.append(dict(zip(names, given, strict=False))["made"] is not None)
            return launch(*given, **options)

        return go if kernel is launches.head_scores else launch

    def check() -> None:
        assert bool(seen) == bool(chosen) and all(x == chosen[-1] for x in seen)
        seen.clear()

    def set_choice(beside: bool) -> None:
        check()
        chosen.append(beside)
        monkeypatch.setattr(launches, "leaves_room", lambda call: beside)
        tape.forget_tapes()

    monkeypatch.setattr(launches, "start", spy)
    yield set_choice
    check()


def results(row, inputs, **options):
    """Return the output, the state, and the gradients of all inputs."""
    leaves = {name: x.requires_grad_() for name, x in on_gpu(inputs).items()}
    made = row.op(**leaves, **options, **CHUNKWISE)
    ones = [torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x).to(x.dtype) for x in made]
    return [x.detach() for x in made] + list(torch.autograd.grad(list(made), list(leaves.values()), ones))


def assert_same_beside(choose, row, inputs, **options):
    """Compare with launches one after the other, and without kept states."""
    choose(False)
    expected = results(row, inputs, **options)
    choose(True)
    for n in range(4):
        for i, (x, y) in enumerate(zip(results(row, inputs, **options), expected, strict=True)):
            assert same_bits(x, y), (n, i, (x.double() - y.double()).abs().max())
        with torch.no_grad():
            for x, y in zip(row.op(**on_gpu(inputs), **options, **CHUNKWISE), expected[:2], strict=True):
                assert same_bits(x, y), n


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: f"{x.b}x{x.t} {x.hv}")
def test_beside_the_walk_the_bits_are_those_of_launches_one_after_the_other(row, shape, choose):
    assert_same_beside(choose, row, convert(draw(row, shape), torch.bfloat16))


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("unit", [False, True], ids=["given", "normalised"])
@pytest.mark.parametrize("wild", [False, True], ids=["tame", "wild"])
def test_packed_sequences_and_norms(row, unit, wild, choose):
    shape = Shape(1, sum(TEXTS), 2, 4, 128, 128)
    inputs = convert(draw(row, shape, texts=len(TEXTS)), torch.bfloat16)
    if wild:
        inputs["beta"][:, 100:] = 3.0
    assert_same_beside(choose, row, inputs, cu_seqlens=bounds(TEXTS).cuda(), normalize_qk=unit)


@pytest.mark.parametrize("kind", ["large keys", "negative", "late"])
def test_chunks_with_wild_rows_are_waited_for(kind, choose):
    inputs = convert(draw(GATED_DELTA, Shape(1, 3000, 2, 4, 128, 128)), torch.bfloat16)
    if kind == "large keys":
        inputs["k"][:, 70:3000:701] *= 30
    elif kind == "negative":
        inputs["beta"][:, 5] = -1.0
    else:
        inputs["beta"][:, 2999, 1] = 3.0
    assert_same_beside(choose, GATED_DELTA, inputs)


def test_streams_and_graphs(choose):
    """Calls of several streams at once wait for each other's multiprocessors, but always end; graphs replay them."""
    choose(False)
    inputs = on_gpu(convert(draw(GATED_DELTA, Shape(1, 2000, 16, 32, 128, 128)), torch.bfloat16))
    with torch.no_grad():
        expected = GATED_DELTA.op(**inputs, **CHUNKWISE)
        choose(True)
        GATED_DELTA.op(**inputs, **CHUNKWISE)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(GATED_DELTA.op(**inputs, **CHUNKWISE))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [GATED_DELTA.op(**inputs, **CHUNKWISE) for _ in range(3)]
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    for each in (*found, *captured):
        assert all(same_bits(x, y) for x, y in zip(each, expected, strict=True))


def test_nothing_comes_from_the_future(choose):
    """NaN from a chunk on changes no bit before it."""
    choose(True)
    inputs = on_gpu(convert(draw(GATED_DELTA, Shape(1, 2000, 2, 4, 128, 128)), torch.bfloat16))
    with torch.no_grad():
        expected = GATED_DELTA.op(**inputs, **CHUNKWISE).output
        for name in ("q", "k", "v", "log_decay", "beta"):
            inputs[name][:, 1000:] = float("nan")
        assert same_bits(GATED_DELTA.op(**inputs, **CHUNKWISE).output[:, :960], expected[:, :960])
