"""The kernels around the rules: short convolution, RMSNorm with and without a gate, gated linear unit.

As in test_kernels.py, `path` is ("cpu", float32), Triton's interpreter, or ("cuda", a dtype). The oracle is plain torch
in float64, written here text by text; a budget is twice the error of the same lines in the tested dtype, and rounding.
Uninitialised memory is full of NaN, and in the interpreter every access must lie inside a tensor of the launch.
"""

import importlib
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    Result,
    assert_same_bits,
    assert_within,
    bounds,
    errors,
    interpreted,
    relative_error,
    same_bits,
    weights,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lineate import layers

pytest.importorskip("triton")
layer_ops = importlib.import_module("lineate.kernels.layers.ops")

Inputs = dict[str, Tensor]


class Path(NamedTuple):
    """Where the kernels run, and the dtype of all tensors."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return "interpreter" if self.device == "cpu" else f"gpu-{str(self.dtype).removeprefix('torch.')}"


INTERPRETER = Path("cpu", torch.float32)
GPU = [Path("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
BF16 = GPU[1]


def param(path: Path, *values: object) -> object:
    mark = interpreted if path.device == "cpu" else pytest.mark.gpu
    return pytest.param(path, *values, id="-".join(map(str, (path, *values))), marks=[mark])


PATHS = [param(path) for path in (INTERPRETER, *GPU)]
ONE_EACH = [param(INTERPRETER), param(BF16)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every uninitialised tensor arrives full of NaN, on the GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(3).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def guarded_memory(request, monkeypatch):
    """The interpreter reads and writes nothing outside the tensors that a kernel was given."""
    path = getattr(request.node, "callspec", None) and request.node.callspec.params.get("path")
    if not path or path.device != "cpu":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    ends = np.zeros((0, 2), np.uint64)
    start, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def init_args(self, args, kwargs):
        nonlocal ends
        given = start(self, args, kwargs)
        tensors = [x for x in (*given[0], *given[1].values()) if isinstance(x, Tensor) and x.numel()]
        last = [sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        both = ((x.data_ptr(), x.data_ptr() + x.element_size() * (n + 1)) for x, n in zip(tensors, last, strict=True))
        ends = np.array(sorted(both), np.uint64)
        return given

    def check(pointers, mask):
        at = pointers.data[mask.data.astype(bool)].astype(np.uint64)
        which = np.searchsorted(ends[:, 0], at, "right") - 1
        assert (which >= 0).all() and (at < ends[which, 1]).all(), "an access outside of all tensors"

    def masked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", init_args)
    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)


# Plain torch


def convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Text by text; tap by tap, as the layer in plain torch."""
    size = weight.shape[1]
    texts = list(x) if cu_seqlens is None else [x[0, i:j] for i, j in itertools.pairwise(cu_seqlens.tolist())]
    ys, finals = [], []
    for i, text in enumerate(texts):
        before = x.new_zeros(size - 1, x.shape[2]) if state is None else state[i].mT.to(x.dtype)
        padded = torch.cat((before, text))
        u = padded[: len(text)] * weight[:, 0]
        for a in range(1, size):
            u = torch.addcmul(u, padded[a : a + len(text)], weight[:, a])
        ys.append(F.silu(u))
        finals.append(padded[len(padded) - size + 1 :].mT)
    return torch.stack(ys) if cu_seqlens is None else torch.cat(ys)[None], torch.stack(finals)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, zero_centred: bool = False) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight if zero_centred else weight)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu") -> Tensor:
    return norm(x, weight, eps) * (F.silu(gate) if activation == "silu" else gate.sigmoid())


def gated_unit(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    """Angles that turn half of the channels, rounded to an even number."""
    n = x.shape[-1] // 4
    angles = torch.arange(x.shape[1] * n, device=x.device).view(x.shape[1], n).float().sqrt()
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
    cos, sin = (y.to(x.dtype)[..., None, :] for y in (tables(x) if cos is None else (cos, sin)))
    n = cos.shape[-1]
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


PLAIN = {
    "short_convolution": convolution, "rms_norm": norm, "gated_rms_norm": gated_norm, "glu": gated_unit,
    "rotate": turned,
}  # fmt: skip


def kernel(name: str):
    if name == "rotate":
        return lambda x, cos=None, sin=None: layer_ops.rotate(x, *(tables(x) if cos is None else (cos, sin)))
    return getattr(layer_ops, name)


def differentiate(function: object, leaves: Inputs, **options: object) -> Result:
    """Output, state if there is one, and the gradients by all inputs of the loss of cases.run, on the CPU."""
    results = function(**leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((x.double() * weights(x, i).to(x.device)).sum() for i, x in enumerate(results, 1))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    output, state = (*results, torch.zeros(0))[:2]
    grads = {name: x.cpu() for name, x in zip(leaves, grads, strict=True)}
    return Result(output.detach().cpu(), state.detach().cpu(), grads)


def run(name: str, inputs: Inputs, path: Path, **options: object) -> Result:
    leaves = {n: x.detach().to(path.device).clone().requires_grad_() for n, x in inputs.items()}
    options = {n: x.to(path.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    return differentiate(kernel(name), leaves, **options)


def plain(name: str, inputs: Inputs, dtype: torch.dtype | None = None, **options: object) -> Result:
    leaves = {n: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for n, x in inputs.items()}
    return differentiate(PLAIN[name], leaves, **options)


def check(name: str, inputs: Inputs, path: Path, what: object = "", **options: object) -> Result:
    """All results against float64 on the same numbers, within 2 x the error of torch in this dtype, and rounding:

    half an eps of the result's dtype (float32: its sums, of at most n terms, round like sqrt(n)); and natively 2^-20,
    the error of a sigmoid by ex2.approx (2^-22, and |x| 2^-24 from its argument, |x| < 8) and rcp.approx (2^-23).
    """
    expected = plain(name, inputs, torch.float64, **options)
    found = run(name, inputs, path, **options)
    n = max(next(iter(inputs.values())).shape[:-1].numel(), 16)
    rounding = torch.finfo(path.dtype).eps / 2 + 2**-24 * n**0.5 + (2**-20 if path.device == "cuda" else 0)
    allowed = {key: 2 * x + rounding for key, x in errors(plain(name, inputs, **options), expected).items()}
    assert_within(errors(found, expected), allowed, what)
    for key, x in inputs.items():
        assert (found.grads[key].dtype, found.grads[key].shape) == (x.dtype, x.shape), key
    return found


# The convolution


def draw(
    path: Path, t: int, channels: int, size: int = 4, *, b: int = 1, rows: int | None = None, state: bool = True
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(b, t, channels, generator=generator),
        "weight": torch.randn(channels, size, generator=generator) / size**0.5,
        "state": torch.randn(b if rows is None else rows, channels, size - 1, generator=generator),
    }
    if not state:
        del inputs["state"]
    return {name: x.to(path.dtype) for name, x in inputs.items()}


class Shape(NamedTuple):
    b: int
    t: int
    channels: int
    size: int
    state: bool

    def __str__(self) -> str:
        return f"b{self.b}t{self.t}c{self.channels}s{self.size}" + "+state" * self.state


def shapes() -> list[object]:
    cpu = [Shape(2, t, 20, 4, state) for t in (1, 2, 3, 5) for state in (False, True)]
    cpu += [Shape(1, 5, 130, 2, True), Shape(1, 5, 130, 3, True), Shape(1, 1, 130, 3, False), Shape(3, 1, 20, 2, True)]
    cpu += [
        Shape(1, 70, 20, 4, True),
        Shape(1, 70, 130, 4, False),
        Shape(1, 3, 600, 4, True),
        Shape(1, 17, 20, 3, True),
    ]
    sizes = [(b, t, c) for b, t in ((3, 1), (2, 2), (2, 3), (1, 5), (2, 70), (1, 300)) for c in (20, 130)]
    sizes += [(2, 70, 1024), (1, 2000, 1536), (256, 1, 1024)]
    gpu = [Shape(*x, 4, state) for x in sizes for state in (False, True)]
    gpu += [Shape(2, t, 130, size, True) for t in (1, 2, 3, 70) for size in (2, 3)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), shapes())
def test_convolution(path, shape):
    b, t, channels, size, state = shape
    found = check("short_convolution", draw(path, t, channels, size, b=b, state=state), path)
    assert found.output.dtype == found.state.dtype == path.dtype


TEXTS = (0, 1, 0, 0, 2, 3, 21, 0, 1, 4, 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("size", "state"), [(4, True), (4, False), (3, True), (2, True)])
def test_packed_texts(size, state, path):
    """None (first, inside, twice, last), one token, fewer than the state has, one that needs two walks."""
    channels = 20 if path.device == "cpu" else 1032
    inputs = draw(path, sum(TEXTS), channels, size, rows=len(TEXTS), state=state)
    found = check("short_convolution", inputs, path, cu_seqlens=bounds(TEXTS))
    empty = [i for i, length in enumerate(TEXTS) if not length]
    if state:
        assert same_bits(found.state[empty], inputs["state"][empty])
        assert same_bits(found.grads["state"][empty], weights(found.state, 2)[empty].to(path.dtype))


@pytest.mark.parametrize("path", [param(path) for path in GPU])
def test_many_packed_texts(path):
    """More bounds than one look at them takes, and texts much longer than a walk."""
    lengths = (*[1, 0, 2] * 60, 700, *[3] * 200, 1500, 0)
    inputs = draw(path, sum(lengths), 640, rows=len(lengths))
    check("short_convolution", inputs, path, cu_seqlens=bounds(lengths).int())


@pytest.mark.parametrize("path", PATHS)
def test_texts_do_not_see_each_other(path):
    """A text alone has the bits it has in company; one full of NaN, its state too, changes nothing but dweight."""
    lengths = (2, 1, 15, 3)
    inputs = draw(path, sum(lengths), 20, rows=len(lengths))
    whole = run("short_convolution", inputs, path, cu_seqlens=bounds(lengths))
    inputs["x"][:, 2:3] = torch.nan
    inputs["state"][1] = torch.nan
    found = run("short_convolution", inputs, path, cu_seqlens=bounds(lengths))
    assert found.output[:, 2:3].isnan().all() and found.grads["x"][:, 2:3].isnan().all()
    for i, (start, end) in enumerate(itertools.pairwise(bounds(lengths).tolist())):
        if i == 1:
            continue
        assert same_bits(found.output[:, start:end], whole.output[:, start:end])
        assert same_bits(found.grads["x"][:, start:end], whole.grads["x"][:, start:end])
        assert same_bits(found.state[i], whole.state[i]) and same_bits(found.grads["state"][i], whole.grads["state"][i])
        own = {"x": inputs["x"][:, start:end], "weight": inputs["weight"], "state": inputs["state"][i : i + 1]}
        y, final = kernel("short_convolution")(**{n: x.to(path.device) for n, x in own.items()})
        assert same_bits(y.cpu(), whole.output[:, start:end]) and same_bits(final.cpu(), whole.state[i : i + 1])


@pytest.mark.parametrize("path", PATHS)
def test_a_step_has_the_bits_of_the_walk(path):
    """One token a row, and the same tokens as packed texts of one."""
    inputs = draw(path, 1, 130, b=3)
    step = run("short_convolution", inputs, path)
    packed = {**inputs, "x": inputs["x"].transpose(0, 1)}
    walked = run("short_convolution", packed, path, cu_seqlens=torch.arange(4))
    walked.grads["x"] = walked.grads["x"].transpose(0, 1)
    dweight = step.grads.pop("weight"), walked.grads.pop("weight")  # sums over rows and over tokens: another order
    assert relative_error(*dweight) < torch.finfo(path.dtype).eps
    assert_same_bits(step, walked._replace(output=walked.output.transpose(0, 1)))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("cut", [1, 2, 18])
def test_split_equals_whole(cut, path):
    inputs = {n: x.to(path.device) for n, x in draw(path, 19, 20).items()}
    convolve, x, weight = kernel("short_convolution"), inputs["x"], inputs["weight"]
    y, final = convolve(x, weight, inputs["state"])
    first, between = convolve(x[:, :cut], weight, inputs["state"])
    second, last = convolve(x[:, cut:], weight, between)
    assert same_bits(torch.cat((first, second), 1), y) and same_bits(last, final)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("wrong", [(0, 9, 25), (3, 9, 20), (0, 18, 6, 20), (0, -5, 20), (0, 1000, 0, 20), (0, 0, 0)])
def test_wrong_bounds_touch_nothing_outside(wrong, path):
    """Nobody looks at them. Tokens outside every text are not used, and give 0."""
    inputs = draw(path, 20, 20, rows=len(wrong) - 1)
    inputs["x"][:, : wrong[0] if any(wrong) else None] = torch.nan
    guards = {n: torch.full((3, *x.shape), 7.0, dtype=x.dtype, device=path.device) for n, x in inputs.items()}
    for name, x in guards.items():
        x[1] = inputs[name]
    leaves = {n: x[1].detach().requires_grad_() for n, x in guards.items()}
    y, final = kernel("short_convolution")(**leaves, cu_seqlens=torch.tensor(wrong, device=path.device))
    grads = torch.autograd.grad(y.sum() + final.sum(), list(leaves.values()))
    assert all(x.isfinite().all() for x in (y, final, *grads))
    for x in guards.values():
        assert x[0].eq(7).all() and x[2].eq(7).all()
    if wrong[0] > 0:
        assert y[:, : wrong[0]].eq(0).all() and grads[0][:, : wrong[0]].eq(0).all()
    if wrong[-1] == 0:
        assert y.eq(0).all() and same_bits(final, leaves["state"]) and grads[0].eq(0).all()


@pytest.mark.parametrize("path", ONE_EACH)
def test_one_of_two_gradients(path):
    """A loss of the output alone, or of the state alone."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in draw(path, 5, 20).items()}
    results = kernel("short_convolution")(**inputs)
    both = torch.autograd.grad(results, list(inputs.values()), [torch.ones_like(x) for x in results], retain_graph=True)
    y, final = (torch.autograd.grad(x.sum(), list(inputs.values()), retain_graph=True) for x in results)
    assert final[1].eq(0).all() and final[2].eq(0).all()
    assert final[0][:, -3:].eq(1).all() and final[0][:, :-3].eq(0).all()
    assert all(same_bits(a, b) for a, b in zip(y[1:], both[1:], strict=True))
    assert same_bits(y[0][:, :-3], both[0][:, :-3])


@pytest.mark.parametrize("path", ONE_EACH)
def test_dtypes_of_state_and_weight(path):
    """As in torch: the state is read in the dtype of x, the output has the wider one of x and weight."""
    inputs = draw(path, 5, 20)
    single = {**inputs, "weight": inputs["weight"].float(), "state": inputs["state"].float()}
    found = run("short_convolution", single, path)
    assert found.output.dtype == torch.float32 and found.state.dtype == path.dtype
    assert found.grads["state"].dtype == found.grads["weight"].dtype == torch.float32
    assert same_bits(found.output.to(path.dtype), run("short_convolution", inputs, path).output)


# The norms


def draw_norm(path: Path, *shape: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(n, generator=generator) for n in (shape, shape, shape[-1:]))
    return {"x": (2 * x).to(path.dtype), "gate": (2 * gate).to(path.dtype), "weight": weight.to(path.dtype) + 1}


def norm_shapes() -> list[object]:
    cpu = [(2, 5, 3, 20), (70, 130), (2, 3, 128), (1, 3, 2, 512), (1, 3), (2, 1, 2, 2, 5)]
    gpu = [*cpu, (2, 70, 8, 128), (1, 1000, 4, 256), (40_000, 64), (3, 333, 3, 80), (5, 300, 500)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), norm_shapes())
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation, path, shape):
    found = check("gated_rms_norm", draw_norm(path, *shape), path, eps=1e-5, activation=activation)
    assert found.output.dtype == path.dtype


def wide_norm_shapes() -> list[object]:
    cpu = [(2, 3, 20), (5, 1030), (2, 2, 3, 130)]
    gpu = [*cpu, (3, 700, 1024), (1, 1, 2048), (2, 33, 2304), (70, 5120), (9, 8192), (1, 300, 7, 256)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), wide_norm_shapes())
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm(zero_centred, path, shape):
    inputs = draw_norm(path, *shape)
    del inputs["gate"]
    assert check("rms_norm", inputs, path, eps=1e-5, zero_centred=zero_centred).output.dtype == path.dtype


@pytest.mark.parametrize("path", [param(GPU[0])])
def test_norm_under_autocast_is_in_its_dtype(path):
    """The same numbers as rounding afterwards, forward and backward, but for the order of sums."""
    norm, x = layers.RMSNorm(384).cuda(), torch.randn(5, 70, 384, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        low = norm(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, norm(x).bfloat16(), rtol=2**-8, atol=0)
    d = torch.randn_like(low)
    found = torch.autograd.grad(low, (x, norm.weight), d)
    expected = torch.autograd.grad(norm(x), (x, norm.weight), d.float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [param(GPU[0])])
@pytest.mark.parametrize("kind", [layers.DeltaNet, layers.GatedDeltaNet, layers.KimiDeltaAttention])
def test_under_autocast_the_rule_is_in_its_dtype(path, kind):
    """Weights stay float32: were the convolution's product float32, the rule would run several times slower."""
    mixer, seen = kind(256, 2).cuda(), []
    hook = mixer.conv.register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = mixer(torch.randn(1, 70, 256, device="cuda"))
    hook.remove()
    assert seen == [torch.bfloat16] and y.dtype == torch.bfloat16
    y.sum().backward()
    assert mixer.conv.weight.grad.dtype == torch.float32 and mixer.conv.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy: the interpreter divides in idle rows too
@pytest.mark.parametrize("path", PATHS)
def test_gated_norm_of_zeros_and_without_eps(path):
    inputs = draw_norm(path, 3, 20)
    check("gated_rms_norm", inputs, path, eps=0.0)
    inputs["x"][1] = 0
    check("gated_rms_norm", inputs, path, eps=1e-6)


# The gated linear unit


def unit_shapes() -> list[object]:
    cpu = [(2, 3, 40), (1, 2), (5, 260), (2, 2060)]
    gpu = [*cpu, (2, 70, 1536), (1000, 10_240), (3, 1, 4, 6)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), unit_shapes())
def test_gated_unit(path, shape):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    check("glu", {"x": x.to(path.dtype)}, path)


# Rotary positions


def turn_shapes() -> list[object]:
    cpu = [(1, 1, 1, 2, 2), (2, 3, 2, 24, 24), (1, 9, 3, 10, 6), (2, 2, 1, 130, 66)]
    gpu = [*cpu, (2, 300, 4, 128, 32), (1, 3000, 16, 256, 64), (64, 1, 8, 64, 64)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), turn_shapes())
@pytest.mark.parametrize("shared", [True, False], ids=["one table", "a table a row"])
def test_rotate(path, shape, shared):
    b, t, heads, size, dim = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(b, t, heads, size, generator=g).to(path.dtype)
    angles = 100 * torch.rand(*([] if shared else [b]), t, dim // 2, generator=g)
    found = check("rotate", {"x": x}, path, cos=angles.cos(), sin=angles.sin())
    assert same_bits(found.output[..., dim:], x[..., dim:])


def test_rotate_says_what_is_wrong():
    x, table = torch.zeros(2, 3, 1, 8), torch.zeros(3, 4)
    for wrong in (torch.zeros(3, 5), torch.zeros(1, 3, 4), torch.zeros(3, 4).double(), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match="cos must be float32 of shape"):
            layer_ops.rotate(x, wrong, table)


# All of them


def small(name: str, path: Path) -> Inputs:
    t = 3 if path.device == "cpu" else 6
    if name == "short_convolution":
        return draw(path, t, 24, b=2)
    if name == "glu":
        return {"x": draw(path, t, 48, b=2)["x"]}
    if name == "rotate":
        return {"x": draw_norm(path, 2, t, 2, 24)["x"]}
    return draw_of_norm(name, path, 2, t, 2, 24)


def draw_of_norm(name: str, path: Path, *shape: int) -> Inputs:
    return {n: x for n, x in draw_norm(path, *shape).items() if n != "gate" or name == "gated_rms_norm"}


def strange_layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in memory that is not contiguous, or not aligned."""
    if x.dim() < 2:
        return {}
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 40), torch.nan)
    wide[..., 8:-32] = x
    every = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    every[..., ::2] = x
    behind = x.new_full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan)
    behind[:, 2:-1] = x
    shifted = x.new_full((x.numel() + 1,), torch.nan)
    shifted[1:] = x.flatten()
    return {
        "part of a projection": wide[..., 8:-32],
        "every other element": every[..., ::2],
        "a slice of tokens": behind[:, 2:-1],
        "rows inside": x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).copy_(x),
        "channels first": x.movedim(-1, 1).contiguous().movedim(1, -1),
        "not aligned": shifted[1:].view(x.shape),
    }


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_memory_layout_does_not_matter(name, path):
    inputs = small(name, path)
    expected = run(name, inputs, path)
    inputs = {n: x.to(path.device) for n, x in inputs.items()}
    for layout in strange_layouts(inputs["x"]):
        leaves = {n: strange_layouts(x).get(layout, x).detach().requires_grad_() for n, x in inputs.items()}
        found = differentiate(kernel(name), leaves)
        if "norm" in name and path.device == "cuda":  # a thread has other elements of a row: another sum
            assert_within(errors(found, expected), torch.finfo(path.dtype).eps, layout)
        else:
            assert_same_bits(found, expected, layout)


@pytest.mark.parametrize("path", ONE_EACH)
def test_gate_of_all_heads_in_one_projection(path):
    """v | z | more in one tensor: z of a head is a row of the gate, one token's heads lie together."""
    inputs = draw_norm(path, 2, 3, 4, 24)
    expected = run("gated_rms_norm", inputs, path)
    wide = torch.randn(2, 3, 8 + 4 * 24 + 16).to(path.dtype)
    wide[..., 8:-16] = inputs["gate"].flatten(2)
    leaves = {n: x.to(path.device).requires_grad_() for n, x in {**inputs, "gate": wide}.items()}

    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return kernel("gated_rms_norm")(x, gate[..., 8:-16].unflatten(-1, (4, 24)), weight)

    found = differentiate(norm, leaves)
    found.grads["gate"] = found.grads["gate"][..., 8:-16].unflatten(-1, (4, 24))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_expanded_gradients(name, path):
    """The gradient of a sum is one number, of stride 0 in all dimensions; that of a mean over tokens in one."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in small(name, path).items()}
    results = kernel(name)(**inputs)
    y = results[0] if isinstance(results, tuple) else results
    d = torch.randn_like(y[:, :1]).expand_as(y)
    for given in (torch.ones((), dtype=y.dtype, device=y.device).expand_as(y), d):
        found = torch.autograd.grad(y, list(inputs.values()), given, retain_graph=True)
        dense = torch.autograd.grad(y, list(inputs.values()), given.contiguous(), retain_graph=True)
        assert all(same_bits(a, b) for a, b in zip(found, dense, strict=True))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_nothing_to_do(name, path):
    """No rows and no tokens: empty results, the state as it was, dweight 0."""
    inputs = small(name, path)
    for cut in (lambda x: x[:0], lambda x: x[:, :0]):
        few = {n: cut(x) if n in ("x", "gate") else x for n, x in inputs.items()}
        if "state" in few:
            few["state"] = few["state"][: few["x"].shape[0]]
        found = run(name, few, path)
        width = few["x"].shape[-1] // (2 if name == "glu" else 1)
        assert found.output.shape == (*few["x"].shape[:-1], width)
        assert "weight" not in found.grads or found.grads["weight"].eq(0).all()
        if "state" in few:
            assert same_bits(found.state, few["state"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PLAIN)
def test_same_bits_twice_and_inputs_untouched(name, path):
    inputs = small(name, path)
    if path.device == "cuda":
        inputs = draw(path, 3000, 1100) if name == "short_convolution" else inputs
        inputs = draw_of_norm(name, path, 2, 3000, 3, 100) if "norm" in name else inputs
    copies = {n: x.clone() for n, x in inputs.items()}
    leaves = {n: x.to(path.device).requires_grad_() for n, x in inputs.items()}
    assert_same_bits(differentiate(kernel(name), leaves), differentiate(kernel(name), leaves))
    assert all(same_bits(x.detach().cpu(), copies[n]) for n, x in leaves.items())


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_without_gradients(name, path):
    """The same bits with autograd, without it, and without any input that wants a gradient."""
    inputs = {n: x.to(path.device) for n, x in small(name, path).items()}
    expected = run(name, inputs, path)
    with torch.no_grad():
        found = [kernel(name)(**inputs), kernel(name)(**{n: x.requires_grad_() for n, x in inputs.items()})]
    for x in found:
        x = x[0] if isinstance(x, tuple) else x
        assert not x.requires_grad and same_bits(x.cpu(), expected.output)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_second_derivatives_are_refused(name, path):
    """Rather than given as if the first ones were constants."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in small(name, path).items()}
    results = kernel(name)(**inputs)
    y = results[0] if isinstance(results, tuple) else results
    (dx,) = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (dx.square().sum() + inputs["x"].sum()).backward()


@pytest.mark.parametrize("path", ONE_EACH)
def test_errors(path):
    inputs = {n: x.to(path.device) for n, x in draw(path, 2, 8).items()}
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        kernel("short_convolution")(inputs["x"].double(), inputs["weight"])
    with pytest.raises(ValueError, match=r"size in \(2, 3, 4\), got \(8, 5\)"):
        kernel("short_convolution")(inputs["x"], inputs["weight"].new_zeros(8, 5))
    x = inputs["x"]
    with pytest.raises(ValueError, match="activation must be 'silu' or 'sigmoid', got 'gelu'"):
        kernel("gated_rms_norm")(x, x, x[0, 0], 1e-6, "gelu")
    with pytest.raises(ValueError, match=r"gate must have the shape of x = \(1, 2, 8\), got \(1, 1, 8\)"):
        kernel("gated_rms_norm")(x, x[:, :1], x[0, 0])
    wide = x.new_zeros(2, 8193)
    with pytest.raises(ValueError, match="at most 8192 channels for the kernels, got 8193"):
        kernel("gated_rms_norm")(wide, wide, wide[0])


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


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
def test_compiled_equals_eager(lengths, path):
    """Compiled in one graph, forward and backward: the same bits as eager."""
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
    """The defaults of torch.compile, in one graph, for several lengths; what it fuses around the ops rounds apart."""
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


class Captured(TorchDispatchMode):
    """The calls of lineate's own torch ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineate":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
def test_custom_ops_keep_their_promises(lengths, path):
    """opcheck: schema, fake tensors, autograd registration, of every op that a call and its backward use."""
    layer = Layer(path)
    with Captured() as captured:
        step(layer, list(layer.parameters()), *layer_inputs(path, lengths))
    assert len(captured.calls) == 6
    for op, args, kwargs in captured.calls:
        detached = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
        torch.library.opcheck(op, detached, kwargs, test_utils=utils)


# Natively only


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (1, 0, 4)], ids=["whole", "packed"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_in_a_cuda_graph(backward, lengths):
    """Captured once, replayed with other numbers and other bounds: the same bits as eager calls."""
    layer = Layer(BF16)
    x, state, ends = inputs = layer_inputs(BF16, lengths)

    def compute() -> list[Tensor]:
        if backward:
            return step(layer, list(layer.parameters()), *inputs)
        with torch.no_grad():
            return [*layer(*inputs)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for i, (found, expected) in enumerate(zip(captured, compute(), strict=True)):
            assert same_bits(found.detach(), expected.detach()), (turn, i)
        with torch.no_grad():
            x.copy_(x.roll(1, 1))
            state.mul_(0.5)
            if ends is not None:
                ends.copy_(bounds(((0, 5, 0), (2, 1, 2))[turn % 2]))


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
    modules = [importlib.import_module(f"lineate.kernels.layers.{name}") for name in ("convolution", "rows")]
    kernels = [x for module in modules for x in vars(module).values() if hasattr(x, "device_caches")]

    def compilations() -> list[int]:
        return [sum(len(cache[0]) for cache in x.device_caches.values()) for x in kernels]

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
        before = before or compilations()
        assert compilations() == before, (b, t)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Channels are independent: the last ones, whose addresses are the largest, equal a run on them alone."""
    t, channels = 300_000, 8192
    assert t * channels > 2**31
    torch.cuda.empty_cache()  # what another test left
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    torch.use_deterministic_algorithms(False)  # poisoning takes as long as all of it
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
    assert relative_error(whole[2][last], alone[2]) <= 2**-8  # other walks, other sums
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
