"""The kernels of LaCT's scan against the torch forms, each alone and through the op.

`path` is Triton's interpreter or a GPU. The oracle is lineate.memory.lact.steps in float64; a budget is twice its error
in float32, plus rounding. Uninitialised memory is full of NaN, and in the interpreter every access must lie inside a
tensor of the launch.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers import LaCT
from lineate.memory.lact import lact
from lineate.memory.lact import scan as lact_scan
from lineate.memory.lact import steps as plain
from lineate.memory.parts import MUON_EPS, ROW_EPS
from lineate.rule import normalize
from tests.support.cases import assert_within, interpreted, relative_error
from tests.support.lact_cases import gradients, make, middle
from tests.support.marks import slow_but
from tests.support.memories import floats
from tests.support.paths import GPU, INTERPRETER

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("guarded_memory")
layers = importlib.import_module("lineate.layers.lact")
kernels = importlib.import_module("lineate.kernels.memories.lact")
features = importlib.import_module("lineate.kernels.memories.lact_features").features

paths = pytest.mark.parametrize(
    "path",
    [
        pytest.param(INTERPRETER, id="interpreter", marks=[interpreted]),
        pytest.param(GPU[0], id="gpu", marks=[pytest.mark.gpu]),
    ],
)

SIZES = ((1, 1, 1, 1), (2, 5, 6, 4), (3, 33, 20, 37), (1, 3, 1030, 2), (1, 2, 3, 700))
"""r, c, e, d: smaller and larger than a tile, none a power of two."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_step(steps, name: str, au: Tensor, z: Tensor, rates: Tensor) -> list[Tensor]:
    ds, dhidden = au.flip(-1).clone(), z.flip(0).clone()
    if name == "glu":
        return [steps.glu(au)]
    if name == "glu_backward":
        return [*steps.glu_backward(au, dhidden)]
    if name == "writes":
        return [*steps.writes(au, z, rates)]
    au, z, drates = au.clone(), z.clone(), torch.empty_like(rates)
    steps.writes_backward(au, z, rates, ds, dhidden, drates)
    return [au, z, ds, dhidden, drates]


def matrix_step(steps, name: str, M: Tensor, other: Tensor, mean: Tensor, norms: list[Tensor]) -> list[Tensor]:
    out, flat = torch.empty_like(M), (-1, M.shape[1] // 3, M.shape[2])
    if name == "change":
        return [steps.change(M, mean, other, out, MUON_EPS), out]
    if name == "rescale":
        steps.rescale(M, other, norms, out, ROW_EPS)
        return [out]
    if name == "rescale_backward":
        dnorms = [torch.empty_like(x) for x in norms]
        return [steps.rescale_backward(other, M, norms, dnorms, ROW_EPS), *dnorms]
    base = M.flip(1) if name == "change_backward" else None
    return [steps.change_backward(other.view(flat), plain.unit(M), base, mean, out), out]


def check_step(path, run, *tensors: object) -> None:
    """Run run(module, tensors) with the kernels, and check that it is within twice the error of torch."""

    def cast(x, dtype, device="cpu"):
        return [y.to(device, dtype) for y in x] if isinstance(x, list) else x.to(device, dtype)

    exact = run(plain, *(cast(x, torch.float64) for x in tensors))
    low = run(plain, *(cast(x, torch.float32) for x in tensors))
    got = run(kernels, *(cast(x, torch.float32, path.device) for x in tensors))
    for i, (x, near, wanted) in enumerate(zip(got, low, exact, strict=True)):
        assert x.shape == wanted.shape
        assert_within({"error": relative_error(x.cpu(), wanted)}, 2 * relative_error(near, wanted) + 4e-7, i)


@paths
@pytest.mark.parametrize("name", ["glu", "glu_backward", "writes", "writes_backward"])
@pytest.mark.parametrize("r, c, e, d", SIZES)
def test_steps_of_tokens(path, name, r, c, e, d):
    tensors = random(r, c, 2 * e) * 3, random(r, c, e, seed=1), random(r, c, 3, seed=2).exp()
    check_step(path, lambda steps, *x: token_step(steps, name, *x), *tensors)


@paths
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "name", ["change", "change_backward", "change_backward, no base", "rescale", "rescale_backward"]
)
@pytest.mark.parametrize("r, c, e, d", SIZES)
def test_steps_of_matrices(path, name, r, c, e, d, zero):
    """zero: matrices or lines are 0, where a length has no derivative."""
    M, other = random(r, 3 * e, d), random(r, 3 * e, d, seed=1)
    if zero:
        M[:, :e] = 0
        M[:, :, 0] = 0
        if name in ("change", "rescale"):
            other[:, :e] = 0
            other[:, :, 0] = 0
    norms = [random(r, 2 * e, 1, seed=2).abs(), random(r, 1, d, seed=3).abs()]
    check_step(path, lambda steps, *x: matrix_step(steps, name, *x), M, other, random(r, seed=4), norms)


@paths
@pytest.mark.parametrize("b, t, heads, d", [(1, 1, 1, 1), (2, 19, 3, 5), (1, 70, 2, 64), (1, 2, 1, 2100)])
def test_features(path, b, t, heads, d):
    """Check q', k', v' from a slice of a wider projection, as in the layer, and gradients of projection and weights."""
    mixed, weights = random(b, t, 3 * heads * d + 7), random(2, 2, heads * d, seed=1)

    def run(form, dtype, device="cpu"):
        leaves = [x.to(device, dtype).requires_grad_() for x in (mixed, *weights)]
        y = form(leaves[0][..., : 3 * heads * d], leaves[1], leaves[2], heads)
        dy = [random(*x.shape, seed=2 + i).to(x) for i, x in enumerate(y)]
        return [x.detach().cpu() for x in (*y, *torch.autograd.grad(y, leaves, dy))]

    exact, low = (run(features_by_torch, dtype) for dtype in (torch.float64, torch.float32))
    got = run(features, torch.float32, path.device)
    for i, (x, near, wanted) in enumerate(zip(got, low, exact, strict=True)):
        assert x.shape == wanted.shape
        assert_within({"error": relative_error(x, wanted)}, 2 * relative_error(near, wanted) + 4e-7, i)


def features_by_torch(x: Tensor, scale: Tensor, offset: Tensor, heads: int) -> list[Tensor]:
    q, k, v = x.chunk(3, -1)
    q, k, v = (F.silu(y).unflatten(-1, (heads, -1)) for y in (q * scale[0] + offset[0], k * scale[1] + offset[1], v))
    return [normalize(q), normalize(k), v]


@paths
def test_features_with_gradients_of_some(path):
    x, scale = random(1, 5, 24).to(path.device, torch.float32), torch.ones(2, 8, device=path.device)
    x.requires_grad_()
    q, k, v = features(x, scale, torch.zeros_like(scale), 2)
    (found,) = torch.autograd.grad(k.square().sum() + k.sum(), x)
    assert found[..., :8].eq(0).all() and found[..., 16:].eq(0).all() and found[..., 8:16].ne(0).any()


@pytest.mark.cover
@pytest.mark.slow(but="values")
@paths
@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("d, dh", [(5, 6), (6, 5)])
def test_the_op_by_kernels(path, monkeypatch, muon, d, dh):
    """The call begins inside a chunk, has whole chunks and ends inside one: outputs, states and all gradients agree."""

    def run(dtype, device="cpu"):
        inputs, state = make(d=d, dh=dh)
        state = {n: x.to(device, None if n == "position" else dtype) for n, x in middle(state, 3).items()}
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs] + [x.requires_grad_() for x in floats(state)]
        y, end = lact(*leaves[:5], state, chunk=4, muon=muon)
        found = gradients(y.cpu(), {n: x.cpu() for n, x in end.items()}, leaves)
        return [x.detach().cpu() for x in (y, *floats(end), *found)]

    exact, low = run(torch.float64), run(torch.float32)
    seen = []
    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, watched(getattr(kernels, name), name, seen))
    monkeypatch.setattr(lact_scan, "on_gpu", lambda x: x.dtype == torch.float32)
    got = run(torch.float32, path.device)
    assert set(seen) == {x for x in kernels.__all__ if muon or not x.startswith("change")}
    for i, (x, near, wanted) in enumerate(zip(got, low, exact, strict=True)):
        assert_within({"error": relative_error(x, wanted)}, 2 * relative_error(near, wanted) + 1e-5, i)


@pytest.mark.cover
@paths
@pytest.mark.parametrize("window", slow_but([0, 5], [5]))
def test_the_layer_by_kernels(path, monkeypatch, window):
    """Two rows, and packed sequences, agree in outputs, states and the gradients of all parameters."""

    def run(dtype, device="cpu"):
        torch.manual_seed(0)
        layer = LaCT(16, 2, chunk=4, window=window, conv_size=3).to(device, dtype)
        found = []
        for x, bounds in ((random(2, 9, 16), None), (random(1, 13, 16, seed=1), torch.tensor((0, 5, 5, 13)))):
            x = x.to(device, dtype).requires_grad_()
            y, state = layer(x, cu_seqlens=None if bounds is None else bounds.to(device))
            grads = torch.autograd.grad((y * y.detach().cos()).sum(), [x, *layer.parameters()])
            found += [y, *(state[name] for name in state.names), *grads]
        return [x.detach().cpu() for x in found]

    exact, low = run(torch.float64), run(torch.float32)
    if path.device == "cpu":
        monkeypatch.setattr(lact_scan, "on_gpu", lambda x: x.dtype == torch.float32)
        monkeypatch.setattr(layers, "kernels_for", lambda *tensors: kernels)
    got = run(torch.float32, path.device)
    for i, (x, near, wanted) in enumerate(zip(got, low, exact, strict=True)):
        assert x.shape == wanted.shape
        assert_within({"error": relative_error(x, wanted)}, 2 * relative_error(near, wanted) + 1e-4, i)


def watched(run, name: str, seen: list[str]):
    def launch(*args):
        seen.append(name)
        return run(*args)

    return launch
