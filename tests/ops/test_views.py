"""Tensors with unusual memory: odd strides, negative bits, zero tensors and subclasses.

Each case is compared with the float64 oracle on the same values, with all gradients, which arrive in odd layouts too.
"""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lineate
from lineate.layers.convolution import short_convolution
from lineate.layers.feed import glu
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.memory.lact import lact
from lineate.memory.lact import scan as lact_scan
from lineate.memory.titans import op as titans_rule
from lineate.memory.ttt import dual as ttt_rule
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.safetensors import write_tensors
from tests.support import lact_cases, titans_cases, ttt_cases
from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    Inputs,
    Result,
    Row,
    Shape,
    assert_within,
    bounds,
    budget,
    convert,
    draw,
    errors,
    interpreted,
    needs_native,
    oracle,
    same_bits,
    weights,
)
from tests.support.memories import floats


class Marked(Tensor):
    """A subclass that changes nothing."""


def negative(x: Tensor) -> Tensor:
    """Return x as a view whose memory holds -x."""
    return torch._neg_view(-x)


def sliced(x: Tensor) -> Tensor:
    """Return x in the middle of NaN, which an access outside of it would read."""
    room = x.new_full([n + 5 for n in x.shape], torch.nan)
    inner = room[tuple(slice(3, n + 3) for n in x.shape)]
    return inner.copy_(x)


def spread(x: Tensor) -> Tensor:
    """Return x in every second number of its last dimension."""
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    return room[..., 1::2].copy_(x)


def turned(x: Tensor) -> Tensor:
    """Return x with its dimensions in reversed order in memory."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def overlapping(x: Tensor) -> Tensor:
    """Return tokens that each begin one number after the previous one: other values than x, with the same signs."""
    strides = list(x.contiguous().stride())
    strides[1] = 1
    return x.contiguous().as_strided(x.shape, strides)


# Views of x, with its values or with others taken from it.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": negative,
    "imaginary part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "negative, in memory the other way round": lambda x: negative(turned(x)),
    "negative, sliced": lambda x: torch._neg_view(sliced(-x)),
    "negative, expanded": lambda x: torch._neg_view((-x)[:, :1].expand(x.shape)),
    "sliced": sliced,
    "every second number": spread,
    "in memory the other way round": turned,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded over the batch": lambda x: x[:1].expand(x.shape),
    "expanded over tokens": lambda x: x[:, :1].expand(x.shape),
    "expanded over channels": lambda x: x[..., :1].expand(x.shape),
    "one number": lambda x: x.flatten()[0].expand(x.shape),
    "overlapping": overlapping,
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "subclass": lambda x: x.clone().as_subclass(Marked),
    "negative subclass": lambda x: negative(x).as_subclass(Marked),
}
OF_VALUES = ("negative", "zero tensor")
"""Views that are also tried on one tensor at a time."""


def differentiate(row: Row, leaves: Inputs, view: Callable[[Tensor], Tensor], **options: object) -> Result:
    """Run the op on the leaves, with gradients from views of fixed gradients of output and state."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    output, state = row.op(**leaves, **options)
    along = [view(weights(x, i).to(x.dtype)) for i, x in enumerate((output, state))]
    grads = torch.autograd.grad((output, state), list(leaves.values()), along)
    return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))


def check(row: Row, inputs: Inputs, view: Callable[[Tensor], Tensor], what: object, **options: object) -> None:
    """Compare with the oracle; inputs are views, and the gradients arrive as such views too."""
    got = differentiate(row, inputs, view, **options)
    exact = {name: x.detach().clone().double() for name, x in inputs.items()}
    expected = differentiate(row, exact, lambda x: view(x.float()).clone().double(), form="recurrent")
    allowed = budget(row, convert(exact, torch.float32), oracle(row, exact), 16, worst_case=True)
    assert_within(errors(got, expected), allowed, what)


def inputs_of(row: Row) -> Inputs:
    """Draw float32 inputs with keys so short that every view of them is stable."""
    given = convert(draw(row, Shape(2, 18, 2, 4, 6, 5)), torch.float32)
    return given | {"k": 0.5 * given["k"]}


NATIVE = {"form": "chunkwise", "backend": "native", "chunk_size": 16}
OTHERS = [
    pytest.param({"form": "chunkwise", "backend": "torch", "chunk_size": 16}, id="torch"),
    pytest.param({"form": "parallel", "backend": "torch"}, id="parallel"),
    pytest.param({"form": "recurrent", "backend": "torch"}, id="recurrent"),
    pytest.param({"form": "chunkwise", "backend": "triton"}, id="triton", marks=interpreted),
]


@pytest.mark.slow(but="values")
@needs_native
@pytest.mark.parametrize("row", (GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA), ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_the_native_backend_takes_any_view(name, row):
    view = VIEWS[name]
    check(row, {each: view(x) for each, x in inputs_of(row).items()}, view, name, **NATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("name", ("negative", "negative, sliced", "overlapping", "zero tensor", "negative subclass"))
def test_other_backends_take_any_view(name, path):
    view = VIEWS[name]
    check(GATED_DELTA, {each: view(x) for each, x in inputs_of(GATED_DELTA).items()}, view, name, **path)


@needs_native
@pytest.mark.parametrize("each", ("q", "k", "v", "log_decay", "beta", "state"))
@pytest.mark.parametrize("name", ("negative", "zero tensor"))
def test_one_tensor_of_a_call_at_a_time(name, each):
    given = inputs_of(KIMI_DELTA)
    given[each] = VIEWS[name](given[each])
    check(KIMI_DELTA, given, lambda x: x, each, **NATIVE)


@needs_native
@pytest.mark.parametrize("name", VIEWS)
def test_tokens_one_by_one_take_any_view(name):
    """The native recurrent form, which decoding uses, has the bits of a contiguous copy."""
    given = {each: VIEWS[name](x) for each, x in inputs_of(KIMI_DELTA).items()}
    copies = {each: x.clone().as_subclass(Tensor).contiguous() for each, x in given.items()}
    found, wanted = (KIMI_DELTA.op(**x, form="recurrent", backend="native") for x in (given, copies))
    assert all(same_bits(x.as_subclass(Tensor), y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("raw", [False, True])
def test_decode_takes_negative_views_and_writes_through_them(backend, raw):
    """Every tensor is a negative view, even the pool that is written; the bits are those of a contiguous copy."""
    given = {name: x[:, :3].contiguous() if name != "state" else x for name, x in inputs_of(GATED_DELTA).items()}
    if raw:
        given |= {"A_log": torch.tensor([0.1, 0.2, 0.3, 0.4]), "dt_bias": torch.tensor([0.4, 0.3, 0.2, 0.1])}
    slots = torch.tensor([1, 0])
    views = {name: negative(x) for name, x in given.items()}
    wanted = lineate.decode(**given, slots=slots, raw_gates=raw, backend=backend)
    got = lineate.decode(**views, slots=negative(slots), raw_gates=raw, backend=backend)
    assert views["state"].is_neg()
    assert same_bits(got, wanted)
    assert same_bits(views["state"].clone(), given["state"])


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_decode_takes_zero_tensors_but_writes_into_none(backend):
    given = {name: x[:, :3].contiguous() if name != "state" else x for name, x in inputs_of(GATED_DELTA).items()}
    zeros = given | {name: VIEWS["zero tensor"](given[name]) for name in ("v", "log_decay")}
    plain = (
        zeros | {name: torch.zeros_like(given[name]) for name in ("v", "log_decay")} | {"state": given["state"].clone()}
    )
    assert same_bits(lineate.decode(**zeros, backend=backend), lineate.decode(**plain, backend=backend))
    assert same_bits(zeros["state"], plain["state"])
    with pytest.raises(ValueError, match="state must have memory to write into, got a zero tensor"):
        lineate.decode(**(given | {"state": VIEWS["zero tensor"](given["state"])}), backend=backend)


# The parts of a layer: name -> a function of its tensors, and their shapes.
TEXTS = (1, 0, 4, 2)


def gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return torch.func.functional_call(GatedRMSNorm(8), {"weight": weight}, (x, gate))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.func.functional_call(RMSNorm(8), {"weight": weight}, (x,))


PARTS: dict[str, tuple[Callable[..., object], dict[str, tuple[int, ...]]]] = {
    "convolution": (short_convolution, {"x": (2, 7, 8), "weight": (8, 4), "state": (2, 8, 3)}),
    "one token": (short_convolution, {"x": (2, 1, 8), "weight": (8, 4), "state": (2, 8, 3)}),
    "packed": (
        lambda x, weight, state: short_convolution(x, weight, state, bounds(TEXTS)),
        {"x": (1, 7, 8), "weight": (8, 3), "state": (4, 8, 2)},
    ),
    "norm": (norm, {"x": (2, 7, 3, 8), "weight": (8,)}),
    "gated norm": (gated, {"x": (2, 7, 3, 8), "gate": (2, 7, 3, 8), "weight": (8,)}),
    "glu": (glu, {"x": (2, 7, 16)}),
}


def results(function: Callable[..., object], leaves: list[Tensor], view: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return all outputs, then the gradients by all leaves, from views of fixed gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    found = function(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    along = [view(weights(x, i).to(x)) for i, x in enumerate(outputs)]
    return [x.detach().as_subclass(Tensor) for x in (*outputs, *torch.autograd.grad(outputs, leaves, along))]


def assert_like_a_copy(
    function: Callable[..., object], tensors: list[Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    """Check that function has the same bits for views of the tensors and for contiguous copies of these views."""

    def copied(x: Tensor) -> Tensor:
        return view(x).clone().as_subclass(Tensor).contiguous()

    found = results(function, [view(x) for x in tensors], view)
    wanted = results(function, [copied(x) for x in tensors], copied)
    assert [same_bits(x, y) for x, y in zip(found, wanted, strict=True)] == [True] * len(found)


def drawn(shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes.values()]


@needs_native
@pytest.mark.parametrize("name", [name for name in VIEWS if name != "overlapping"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_layers_take_any_view(part, name):
    function, shapes = PARTS[part]

    def view(x: Tensor) -> Tensor:
        if x.dim() < 3 and not name.startswith("negative"):  # x is a weight
            return x
        return VIEWS[name](x) if x.dim() > 1 else negative(x)

    assert_like_a_copy(function, drawn(shapes), view)


@pytest.mark.cover
@interpreted
@pytest.mark.parametrize("view", [negative, VIEWS["zero tensor"]], ids=["negative", "zero tensor"])
def test_kernels_of_layers_take_virtual_tensors(view):
    ops = importlib.import_module("lineate.kernels.layers.ops")
    features = importlib.import_module("lineate.kernels.memories.lact_features").features
    x, weight, state, gate = drawn({"x": (2, 7, 8), "weight": (8, 4), "state": (2, 8, 3), "gate": (2, 7, 8)})
    turns = [torch.rand(7, 4), torch.rand(7, 4)]
    for function, tensors in (
        (ops.short_convolution, [x, weight, state]),
        (ops.rms_norm, [x, weight[:, 0]]),
        (ops.gated_rms_norm, [x, gate, weight[:, 0]]),
        (ops.glu, [x]),
        (lambda y, v=view, a=turns: ops.rotate(y, *map(v, a)), [x[:, :, None]]),
        (lambda *y, f=features: f(*y, 2), [torch.cat((x, x, x), -1), weight[:, :2].mT, weight[:, 2:].mT]),
    ):
        assert_like_a_copy(function, tensors, view)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    "memory, name",
    [
        ("ttt linear", "negative"),
        ("ttt mlp", "negative"),
        ("titans", "negative"),
        ("titans", "zero tensor"),
        ("lact", "negative"),
        ("lact", "zero tensor"),
    ],
)
def test_kernels_of_memories_take_virtual_tensors(memory, name, monkeypatch):
    """All tokens, and the state they start from, are virtual."""
    for module in (lact_scan, titans_rule, ttt_rule):
        monkeypatch.setattr(module, "on_gpu", lambda x: x.dtype == torch.float32)
    if memory.startswith("ttt"):
        named = {name: x.float() for name, x in ttt_cases.draw(memory[4:], 2, 9, rows=2).items()}

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            y, end = ttt_cases.dual(dict(zip(named, tensors, strict=True)))
            return y, *floats(end)

        tensors = list(named.values())
    elif memory == "titans":
        inputs, state = titans_cases.draw(titans_cases.Case((5, 7, 6)))

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip([name for name in sorted(state) if name != "position"], tensors[6:], strict=True))
            y, end = titans_rule.titans(*tensors[:6], own | {"position": state["position"]}, chunk=4)
            return y, *floats(end)

        tensors = [*inputs.values(), *floats(state)]
    else:
        inputs, state = lact_cases.make(dtype=torch.float32)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip([name for name in sorted(state) if name != "position"], tensors[5:], strict=True))
            y, end = lact(*tensors[:5], own | {"position": state["position"]}, chunk=4)
            return y, *floats(end)

        tensors = [*inputs, *floats(state)]
    assert_like_a_copy(run, tensors, VIEWS[name])


def test_saving_keeps_the_values_of_views(tmp_path):
    given = {name: view(torch.randn(2, 3, 4)) for name, view in VIEWS.items()}
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path / "model.safetensors", given)
    saved = Checkpoint.open(tmp_path)
    for name, x in given.items():
        target = torch.empty(x.shape)
        saved.read_into(name, target)
        assert target.equal(x.clone().as_subclass(Tensor)), name


def test_loading_writes_through_negative_views(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    x = torch.randn(3, 4)
    write_tensors(tmp_path / "model.safetensors", {"x": x})
    target = negative(torch.zeros(3, 4))
    Checkpoint.open(tmp_path).read_into("x", target)
    assert target.is_neg() and target.equal(x)


@needs_native
def test_tensors_of_other_kinds_do_not_reach_c():
    """A decoding step with such tensors is left to the op, which refuses or records it."""
    mode = FakeTensorMode()
    given = {name: mode.from_tensor(x[:, :1] if name != "state" else x) for name, x in inputs_of(GATED_DELTA).items()}
    with torch.no_grad():
        output, state = lineate.gated_delta_rule(**given, form="recurrent", backend="native")
    assert (output.shape, state.shape) == ((2, 1, 4, 5), (2, 4, 6, 5))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_a_backward_of_other_kinds_of_tensors_after_their_mode(backend):
    """The final state has no gradient; zeros in its place are of the same kind."""
    with FakeTensorMode():
        given = {name: torch.ones(x.shape, requires_grad=True) for name, x in inputs_of(GATED_DELTA).items()}
        loss = lineate.gated_delta_rule(**given, form="chunkwise", backend=backend).output.sum()
    loss.backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in given.values())


# On a GPU, where the kernels really read memory.


def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


virtual = pytest.mark.parametrize("view", [negative, zero], ids=["negative", "zero tensor"])


@pytest.mark.gpu
@virtual
@pytest.mark.parametrize("row", (GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_the_rules_on_a_gpu(dtype, row, view):
    """Forward, backward with gradients that are views, and the recurrent form have the bits of a contiguous copy."""
    given = {name: x.cuda() for name, x in convert(draw(row, Shape(2, 150, 2, 4, 64, 64)), dtype).items()}
    names, tensors = list(given), list(given.values())
    assert_like_a_copy(lambda *x: tuple(row.op(**dict(zip(names, x, strict=True)), backend="triton")), tensors, view)
    views = {name: view(x) for name, x in given.items()}
    copies = {name: x.clone() for name, x in views.items()}
    with torch.no_grad():
        found, wanted = (row.op(**x, form="recurrent", backend="triton") for x in (views, copies))
    assert all(same_bits(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("raw", [False, True])
def test_decode_on_a_gpu_takes_negative_views(raw):
    given = convert(draw(GATED_DELTA, Shape(2, 3, 2, 4, 64, 64)), torch.float32)
    given = {name: x.cuda() for name, x in given.items()}
    if raw:
        given |= {name: torch.rand(4, device="cuda") for name in ("A_log", "dt_bias")}
    slots = torch.tensor([1, 0], device="cuda")
    views = {name: negative(x) for name, x in given.items()}
    wanted = lineate.decode(**given, slots=slots, raw_gates=raw, backend="triton")
    got = lineate.decode(**views, slots=negative(slots), raw_gates=raw, backend="triton")
    assert same_bits(got, wanted)
    assert same_bits(views["state"].clone(), given["state"])


@pytest.mark.gpu
@virtual
def test_parts_of_layers_on_a_gpu(view):
    ops = importlib.import_module("lineate.kernels.layers.ops")
    shapes = {"x": (2, 70, 64), "weight": (64, 4), "state": (2, 64, 3), "gate": (2, 70, 64)}
    x, weight, state, gate = (y.cuda() for y in drawn(shapes))
    for function, tensors in (
        (ops.short_convolution, [x, weight, state]),
        (ops.rms_norm, [x, weight[:, 0]]),
        (ops.gated_rms_norm, [x, gate, weight[:, 0]]),
        (ops.glu, [x]),
    ):
        assert_like_a_copy(function, tensors, view)
