"""The kernels of Titans: output, state and all gradients against the loop over chunks in float64.

A budget is twice the error of the loop in float32, plus rounding: u sqrt(n) for sums of n terms, u = 2^-24, natively
16 u more for a sigmoid by ex2.approx (2^-22, and |x| u from its argument, |x| < 8), times how much the exact result
moves, in units of u, when the inputs move by u (at least 1). `path`, and poisoned and guarded memory, are those of
conftest.py.
"""

import importlib

import pytest
import torch
from torch import Tensor

from lineate import layers
from lineate.memory.titans import op as rule
from tests.support.cases import assert_within, bounds, relative_error, same_bits, weights
from tests.support.paths import GPU, INTERPRETER, Path, param
from tests.support.titans_cases import Case, Tensors, draw

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("guarded_memory")
titans_scan = importlib.import_module("lineate.memory.titans.scan")
launches = importlib.import_module("lineate.kernels.memories.titans")
divided = importlib.import_module("lineate.kernels.memories.tiles").divided

paths = pytest.mark.parametrize("path", [param(INTERPRETER), param(GPU[0])])
on_gpu = pytest.mark.parametrize("path", [param(GPU[0])])


def differentiate(case: Case, inputs: Tensors, state: Tensors, dtype: torch.dtype, device: str = "cpu") -> Tensors:
    """Return y, the state, and the gradients of cases.run's loss by all inputs and the state, on the CPU."""
    leaves = {n: x.to(device, dtype, copy=True).requires_grad_() for n, x in inputs.items()}
    own = {n: x.to(device, x.dtype if n == "position" else dtype, copy=True) for n, x in state.items()}
    begin = {n: x.requires_grad_() for n, x in own.items() if n != "position"}
    y, after = rule.titans(
        *leaves.values(), own or None, chunk=case.chunk, clip=case.clip, residual=case.residual, norm=case.norm,
        cu_seqlens=None if case.lengths is None else bounds(case.lengths).to(device),
    )  # fmt: skip
    results = {"y": y, **{n: after[n] for n in sorted(after) if n != "position"}}
    loss = sum((x.double() * weights(x, i).to(device)).sum() for i, x in enumerate(results.values()))
    leaves |= begin
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    results |= {"position": after["position"], **{f"d{n}": x for n, x in grads.items()}}
    return {n: x.detach().cpu() for n, x in results.items()}


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return relative errors; gradients, some of which cancel, count from a thousandth of the largest."""
    least = 1e-3 * max(x.norm().item() for n, x in expected.items() if n.startswith("d"))
    return {n: relative_error(x, expected[n], least if n.startswith("d") else 0.0) for n, x in found.items()}


def budget(case: Case, inputs: Tensors, state: Tensors, expected: Tensors, path: Path) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)

    def move(x: Tensor) -> Tensor:
        if x.dtype == torch.int64:
            return x
        return x.double() * (1 + 2**-24 * (2 * torch.randint(0, 2, x.shape, generator=generator) - 1))

    moved = differentiate(case, *({n: move(x) for n, x in part.items()} for part in (inputs, state)), torch.float64)
    moves = errors(moved, expected)
    terms = (case.chunk + sum(case.sizes)) ** 0.5 + (16 if path.device == "cuda" and len(case.sizes) == 3 else 0)
    single = differentiate(case, inputs, state, torch.float32)
    return {name: 2 * x + terms * max(moves[name], 2**-24) for name, x in errors(single, expected).items()}


@pytest.fixture
def kernels(monkeypatch):
    """Return a function that makes the kernels serve float32, on a CPU too, and returns the list of their calls."""
    seen = []
    scan = titans_scan.scan

    def counted(*arguments):
        seen.append(arguments)
        return scan(*arguments)

    def force(path: Path) -> list[object]:
        if path.device == "cpu":
            monkeypatch.setattr(rule, "on_gpu", lambda x: x.dtype == torch.float32)
        monkeypatch.setattr(titans_scan, "scan", counted)
        return seen

    return force


def check(case: Case, path: Path, kernels) -> Tensors:
    inputs, state = draw(case)
    expected = differentiate(case, inputs, state, torch.float64)
    allowed = budget(case, inputs, state, expected, path)
    seen = kernels(path)
    found = differentiate(case, inputs, state, torch.float32, path.device)
    assert seen, "the kernels were not called"
    assert_within(errors(found, expected), allowed, case)
    return found


SIZES = ((5, 6), (5, 7, 6))
SQUARE = ((5, 5), (5, 7, 5))


def lengths() -> list[Case]:
    """Return cases of t = 1, c - 1, c, c + 1 and 3c + 5 tokens.

    The kernels do not serve a call that only continues a chunk from its middle.
    """
    cases = [Case((5, 6), t=t, positions=None) for t in (3, 4, 5, 17)]
    cases += [Case(sizes, t=t, clip=1.5) for sizes in SIZES for t in (5, 17)]
    cases += [Case((5, 6), chunk=16, t=53, positions=None), Case((5, 7, 6), chunk=16, t=53, positions=(0, 7))]
    cases += [Case((5, 6), chunk=1, t=3, clip=1.5), Case((5, 7, 6), chunk=1, t=3), Case((5, 7, 6), chunk=20, t=45)]
    cases += [Case(sizes, positions=(3, 1), clip=1.5) for sizes in SIZES]
    texts = (3, 0, 1, 13, 8, 4)
    cases += [Case((5, 6), lengths=texts, positions=None), Case((5, 6), lengths=(1, 1), positions=None)]
    return cases + [Case(sizes, lengths=texts, positions=(0, 2, 3, 1, 0, 0), h=1, clip=1.5) for sizes in SIZES]


def options() -> list[Case]:
    rest = [(None, True, False), (None, False, True), (1.5, True, False), (1.5, False, True), (1.5, True, True)]
    cases = [Case(sizes, h=1, clip=clip, residual=r, norm=n) for sizes in SQUARE for clip, r, n in rest]
    return cases + [Case(sizes, h=1, clip=1e-3) for sizes in SQUARE] + [Case(sizes, h=1, clip=1e3) for sizes in SIZES]


def widths() -> list[Case]:
    """Return widths of one tile or several of rows, filled or not, and keys wider than the widest values."""
    narrow = Case((1, 1), h=1, clip=1.5), Case((2, 1, 2), h=1, residual=True, clip=1.5)
    wide = [(33, 20), (150, 40), (20, 70, 18), (17, 130, 34)]
    return [*narrow, *(Case(sizes, t=9, h=1, clip=1.5, norm=True) for sizes in wide)]


def large() -> list[Case]:
    sizes = [(64, 64), (64, 128, 64), (128, 128), (64, 256, 64), (100, 200, 128), (512, 64)]
    cases = [Case(x, chunk=16, t=200, h=4, clip=1.0, norm=i % 2 == 1) for i, x in enumerate(sizes)]
    cases += [Case(x, chunk=c, t=300, h=2, clip=1.0, norm=True) for x in sizes[:3] for c in (32, 64)]
    return cases + [Case(x, chunk=16, lengths=(1, 64, 0, 300, 77), positions=None, clip=1.0) for x in sizes[:1]]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(
    ("path", "case"),
    [param(path, case) for path in (INTERPRETER, GPU[0]) for case in (*lengths(), *options(), *widths())]
    + [param(GPU[0], case) for case in large()],
)
def test_all_results(path, case, kernels):
    check(case, path, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 2, 4, 8])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_programs_that_share_a_head(programs, clip, kernels, monkeypatch):
    monkeypatch.setattr(launches, "share", lambda groups, width, tile, device: divided(width, tile, programs))
    check(Case((64, 120, 64), chunk=16, lengths=(1, 64, 0, 130, 77), positions=None, h=2, clip=clip), GPU[0], kernels)


@pytest.mark.cover
@paths
def test_a_few_chunks_at_a_time(path, kernels, monkeypatch):
    """Long sequences run this way, because the states of all chunks at once would take too much memory."""
    case = Case((5, 7, 5), lengths=(3, 13, 19), positions=(0, 2, 1), h=1, clip=1.5, norm=True)
    seen = kernels(path)
    whole = differentiate(case, *draw(case), torch.float32, path.device)
    assert len(seen) == 1
    monkeypatch.setattr(rule, "STATE_NUMBERS", 2 * 2 * 70 * 3)
    found = differentiate(case, *draw(case), torch.float32, path.device)
    assert len(seen) > 2
    assert_within(errors(found, whole), 1e-5)
    assert same_bits(found["weights_1"], whole["weights_1"])


@pytest.mark.cover
@paths
def test_texts_do_not_see_each_other(path, kernels):
    """One full of NaN, with its state, changes no bit of the others."""
    case = Case((5, 7, 5), lengths=(9, 10, 6), positions=(0, 0, 0), h=1, clip=1.5)
    inputs, state = draw(case)
    kernels(path)
    whole = differentiate(case, inputs, state, torch.float32, path.device)
    for x in inputs.values():
        x[:, 9:19] = torch.nan
    for name, x in state.items():
        if name != "position":
            x[1] = torch.nan
    found = differentiate(case, inputs, state, torch.float32, path.device)
    assert found["y"][:, 9:19].isnan().all()
    for name, x in found.items():
        tokens = name == "y" or name.removeprefix("d") in inputs
        for part in [slice(0, 9), slice(19, 25)] if tokens else [0, 2]:
            pair = (y[:, part] if tokens else y[part] for y in (x, whole[name]))
            assert same_bits(*pair), name


@pytest.mark.cover
@paths
def test_twice_gives_the_same_bits(path, kernels):
    case = Case((5, 7, 5), clip=1.5, norm=True)
    kernels(path)
    first, second = (differentiate(case, *draw(case), torch.float32, path.device) for _ in range(2))
    assert all(same_bits(x, second[name]) for name, x in first.items())


@paths
@pytest.mark.parametrize("case", [Case((5, 4, 3, 6)), Case((5, 6), chunk=65, t=140), Case((5, 200), t=9)], ids=str)
def test_what_the_kernels_do_not_serve_is_looped(case, path, kernels):
    inputs, state = draw(case)
    expected = differentiate(case, inputs, state, torch.float32, path.device)
    seen = kernels(path)
    found = differentiate(case, inputs, state, torch.float32, path.device)
    assert not seen and all(same_bits(x, expected[name]) for name, x in found.items())
    differentiate(case, inputs, state, torch.float64, path.device)
    assert not seen


@pytest.mark.cover
@paths
def test_a_second_derivative_is_refused(path, kernels):
    case = Case((5, 6), positions=None)
    inputs = {n: x.to(path.device).requires_grad_() for n, x in draw(case)[0].items()}
    kernels(path)
    y, _ = rule.titans(*inputs.values(), chunk=4)
    (dq,) = torch.autograd.grad(y.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.slow
@paths
def test_compiled(path, kernels):
    case = Case((5, 7, 6), t=5, h=1, clip=1.5)
    inputs, state = ({n: x.to(path.device) for n, x in part.items()} for part in draw(case))
    leaf = inputs["k"].requires_grad_()
    seen = kernels(path)
    results = []
    for form in (rule.titans, torch.compile(rule.titans, backend="eager")):
        y, after = form(*inputs.values(), state, chunk=4, clip=1.5)
        results.append([y, after["weights_1"], torch.autograd.grad(y.square().sum(), leaf)[0]])
    assert len(seen) == 2
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_gpu
@pytest.mark.parametrize("memory", ["linear", "mlp"])
def test_layer(memory, path):
    """A GPU agrees with float64 within twice the CPU's float32 error and sums over 300 tokens; autocast is finite."""
    torch.manual_seed(0)
    layer, x = layers.Titans(128, 2, memory=memory), torch.randn(2, 150, 128)
    results = {}
    for name, device, dtype in (
        ("exact", "cpu", torch.float64),
        ("loop", "cpu", torch.float32),
        ("gpu", "cuda", torch.float32),
    ):
        own, leaf = layer.to(device, dtype), x.to(device, dtype).requires_grad_()
        y, _ = own(leaf)
        grads = torch.autograd.grad((y.double() * weights(y, 1).to(device)).sum(), [leaf, *own.parameters()])
        results[name] = {"y": y.detach().cpu(), **{f"d{i}": g.cpu() for i, g in enumerate(grads)}}
    single = errors(results["loop"], results["exact"])
    assert_within(errors(results["gpu"], results["exact"]), {n: 2 * e + 2**-24 * 300 for n, e in single.items()})
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = layer.cuda()(x.cuda())
    grads = torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))
    assert all(x.isfinite().all() for x in (y, *grads))
