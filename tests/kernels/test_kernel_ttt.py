"""The kernels of TTT-Linear and TTT-MLP, through the op that uses them and the layers.

`path` is Triton's interpreter or a GPU. The oracle is the loop over chunks in float64, which test_memory_ttt.py checks;
a budget is twice the error of the same loop in float32, plus rounding. Uninitialised memory is full of NaN, and in the
interpreter every access must lie inside a tensor of the launch.
"""

import copy
import importlib
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lineate.layers import TTTMLP, TTTLinear
from lineate.memory.ttt import dual as memory
from tests.support.cases import assert_within, bounds, interpreted, relative_error, same_bits, weights
from tests.support.ttt_cases import draw, dual

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("guarded_memory")
kernels = importlib.import_module("lineate.kernels.memories.ttt")
divided = importlib.import_module("lineate.kernels.memories.tiles").divided

Inputs = dict[str, Tensor]


class Path(NamedTuple):
    device: str

    def __str__(self) -> str:
        return "interpreter" if self.device == "cpu" else "gpu"


INTERPRETER, GPU = Path("cpu"), Path("cuda")


def param(path: Path, *values: object) -> object:
    mark = interpreted if path is INTERPRETER else pytest.mark.gpu
    return pytest.param(path, *values, id="-".join(map(str, (path, *values))), marks=[mark])


paths = pytest.mark.parametrize("path", [param(INTERPRETER), param(GPU)])
models = pytest.mark.parametrize("model", ["linear", "mlp"])


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Send float32 on a CPU to the kernels too, and return the names of those launched, in order."""
    seen: list[str] = []

    def watch(name):
        launch = getattr(kernels, name)

        def run(*args):
            seen.append(name)
            return launch(*args)

        return run

    for name in ("states", "adjoints"):
        monkeypatch.setattr(kernels, name, watch(name))
    if not torch.cuda.is_available():
        monkeypatch.setattr(memory, "on_gpu", lambda x: x.dtype == torch.float32)
    return seen


class Case(NamedTuple):
    """Rows of t tokens, or one row of packed sequences; with `stand`, rows begin in the middle of their first chunk."""

    t: int | tuple[int, ...]
    chunk: int = 5
    dim: int = 6
    b: int = 2
    one_start: bool = False
    stand: bool = False
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        t = "t" + "+".join(map(str, self.t if isinstance(self.t, tuple) else (self.t,)))
        words = [f"{t}b{self.b}c{self.chunk}d{self.dim}", *(f"{name}={x}" for name, x in self.options)]
        return " ".join(words + ["one start"] * self.one_start + ["mid-chunk"] * self.stand)

    @property
    def packed(self) -> bool:
        return isinstance(self.t, tuple)


def make(model: str, case: Case) -> tuple[Inputs, dict[str, object]]:
    """Return all inputs in float64, those of the state under its names, and the options of the call."""
    lengths = case.t if isinstance(case.t, tuple) else (case.t,) * case.b
    rows, b, t = len(lengths), 1 if case.packed else case.b, sum(lengths) if case.packed else case.t
    named = draw(model, b, t, rows=None if case.one_start else rows, chunk=case.chunk, dim=case.dim)
    named["rate"] *= 6 / case.dim  # as layers do: a step is |k|^2 times its rate, and large steps are chaotic
    if case.stand:  # rows begin after 1, 3, 5, ... tokens of another sequence
        past = [(2 * i + 1) % (2 * case.chunk) for i in range(rows)]
        before = draw(model, 1, sum(past), rows=rows, chunk=case.chunk, dim=case.dim)
        _, state = dual(before, chunk=case.chunk, cu_seqlens=bounds(past))
        named |= state
    options: dict[str, object] = {"chunk": case.chunk, **dict(case.options)}
    if case.packed:
        options["cu_seqlens"] = bounds(lengths)
    return named, options


def run(named: Inputs, options: dict[str, object], dtype: torch.dtype, path: Path = INTERPRETER) -> Inputs:
    """Return output, final state, and the gradients of a fixed weighted sum of both by all inputs, on the CPU."""

    def move(x: object) -> object:
        return x.to(path.device) if isinstance(x, Tensor) else x

    leaves = {
        name: x.to(path.device) if name == "position" else x.detach().to(path.device, dtype, copy=True).requires_grad_()
        for name, x in named.items()
    }
    output, state = dual(leaves, **{name: move(x) for name, x in options.items()})
    results = {"output": output, **state}
    floating = [x for name, x in results.items() if name != "position"]
    loss = sum((x.double() * weights(x, i).to(x.device)).sum() for i, x in enumerate(floating, 1))
    wanted = {name: x for name, x in leaves.items() if x.requires_grad and name not in options}
    grads = torch.autograd.grad(loss, list(wanted.values()))
    results |= {f"d{name}": x for name, x in zip(wanted, grads, strict=True)}
    return {name: x.detach().cpu() for name, x in results.items()}


def errors(found: Inputs, expected: Inputs) -> dict[str, float]:
    """Return relative errors; gradients count from a thousandth of the largest, sums that may be 0 from 1e-3."""
    least = 1e-3 * max(x.double().norm().item() for name, x in expected.items() if name.startswith("d"))
    floors = {name: least if name.startswith("d") else 1e-3 for name in expected}
    return {n: relative_error(found[n], x, floors[n]) for n, x in expected.items() if n != "position"}


def check(named: Inputs, options: dict[str, object], path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """Check errors against 2 x the error of the loop in float32, plus the rounding of sums of n terms.

    The terms are tokens, then channels; rounding grows like sqrt(n), or like n for results of only a few numbers, which
    have no average. Natively 2^-20 is added, as in layer_kernels.py.
    """
    single = {name: x if name == "position" else x.float() for name, x in named.items()}
    found = run(single, options, torch.float32, path)
    exact = {name: x if name == "position" else x.double() for name, x in single.items()}
    with monkeypatch.context() as loops:
        loops.setattr(memory, "on_gpu", lambda x: False)
        expected = run(exact, options, torch.float64)
        loop = errors(run(single, options, torch.float32), expected)
    n = named["q"].shape[:2].numel() + named["q"].shape[-1] * 5
    terms = {name: n if expected[name].numel() < 8 else n**0.5 for name in loop}
    allowed = {name: 2 * x + 2**-24 * terms[name] + (2**-20 if path is GPU else 0) for name, x in loop.items()}
    assert found.keys() == expected.keys() and found["position"].equal(expected["position"])
    assert_within(errors(found, expected), allowed)
    assert all(x.dtype == torch.float32 for name, x in found.items() if name != "position")
    return found


TEXTS = (0, 1, 10, 0, 13, 0)
SMALL = [
    *(Case(t) for t in (1, 4, 5, 6)),
    Case(20, b=1),
    Case(12, one_start=True, options=(("factor", None),)),
    Case(12, b=1, options=(("recompute_chunks", 2), ("eps", 1e-2))),
    Case(11, stand=True),
    Case(9, stand=True, options=(("recompute_chunks", 1),)),
    Case(TEXTS),
    Case(TEXTS, stand=True),
    Case((13, 5, 1), options=(("recompute_chunks", 2),)),
    Case(3, chunk=1),
    Case(67, chunk=64, b=1),
    Case(53, chunk=16, dim=33, b=1),
]
# The sizes of real layers: each tile of weights that the kernels can be compiled for, with several chunks and rows.
LARGE = [
    Case(200, chunk=16, dim=64),
    Case((3, 160, 0, 16, 75), chunk=16, dim=64),
    Case(100, chunk=16, dim=64, stand=True, b=5),
    Case(100, chunk=16, dim=128),
    Case(130, chunk=32, dim=96),
    Case(200, chunk=64, dim=48),
    Case(300, chunk=16, dim=17, b=3),
    Case(40, chunk=8, dim=32, b=40),
]
CASES = [param(INTERPRETER, x) for x in SMALL] + [param(GPU, x) for x in SMALL + LARGE]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy: in the interpreter, e^-x may be inf in a sigmoid
@models
@pytest.mark.parametrize(("path", "case"), CASES)
def test_kernels_equal_the_loop(model, path, case, monkeypatch, launches):
    named, options = make(model, case)
    check(named, options, path, monkeypatch)
    assert set(launches) == {"states", "adjoints"}
    if not case.stand and not dict(case.options).get("recompute_chunks"):
        assert launches == ["states", "adjoints"]  # once each, whatever the lengths


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 2, 4, 8])
def test_programs_that_share_a_head(programs, monkeypatch):
    monkeypatch.setattr(kernels, "share", lambda groups, width, tile, device: divided(width, tile, programs))
    check(*make("mlp", Case((3, 160, 0, 16, 75), chunk=16, dim=64)), GPU, monkeypatch)


@pytest.mark.cover
@models
@paths
def test_twice_gives_the_same_bits_and_a_permuted_batch_permutes(model, path):
    named, options = make(model, Case(6))
    first, second = (run(named, options, torch.float32, path) for _ in range(2))
    assert all(same_bits(x, second[name]) for name, x in first.items())
    order = torch.tensor([1, 0])
    by_row = {name for name in named if named[name].shape[0] == 2 and named[name].dim() > 2}
    leaves = [{n: x.float().to(path.device) for n, x in named.items()} for _ in range(2)]
    leaves[1] |= {name: leaves[0][name][order.to(path.device)] for name in by_row}
    whole, permuted = (dual(x, **options)[0].cpu() for x in leaves)
    assert same_bits(whole[order], permuted)


@pytest.mark.cover
@models
@paths
def test_texts_do_not_see_each_other(model, path):
    """One full of NaN changes neither the others nor their gradients."""
    lengths = (7, 6, 3)
    named, options = make(model, Case(lengths))
    whole = run(named, options, torch.float32, path)
    for name in "qkv":
        named[name][:, 7:13] = torch.nan
    found = run(named, options, torch.float32, path)
    for name in ("output", "dq", "dk", "dv", "drate"):
        assert found[name][:, 7:13].isnan().any()
        assert same_bits(found[name][:, :7], whole[name][:, :7]) and same_bits(found[name][:, 13:], whole[name][:, 13:])
    for name in ("weight1", "bias1_sum", "dweight1", "dbias1"):
        assert same_bits(found[name][::2], whole[name][::2])


@pytest.mark.cover
@models
@paths
def test_without_gradients_few_states_are_kept(model, path, monkeypatch, launches):
    """A few chunks at a time give the same result; the returned state keeps no more memory than it needs."""
    named, options = make(model, Case(23, b=1))
    leaves = {name: x.float().to(path.device).requires_grad_() for name, x in named.items()}
    whole, final = dual(leaves, **options)
    assert launches == ["states"]
    monkeypatch.setattr(
        memory, "STATE_NUMBERS", 2 * sum(x.numel() for n, x in leaves.items() if n.startswith("weight"))
    )
    with torch.no_grad():
        output, state = dual(leaves, **options)
    assert launches == ["states"] * 4  # 5 chunks, 2 at a time
    for name, x in {"output": output, **state}.items():
        torch.testing.assert_close(x, {"output": whole, **final}[name].detach(), rtol=1e-5, atol=1e-5)
        assert x.untyped_storage().nbytes() == x.nbytes or name == "output"


@pytest.mark.cover
@models
@paths
def test_some_gradients(model, path):
    """Gradients from the output alone and the state alone add up; an input alone gets the same as among several."""
    named, options = make(model, Case(8, b=1))

    def grads(*wanted: str) -> list[list[Tensor]]:
        leaves = {name: x.float().to(path.device).requires_grad_(name in wanted) for name, x in named.items()}
        output, state = dual(leaves, **options)
        losses = [output.sin().sum(), state["weight1"].sin().sum() + state["bias1"].cos().sum()]
        return [torch.autograd.grad(x, [leaves[n] for n in wanted], retain_graph=True) for x in (*losses, sum(losses))]

    wanted = ("k", "rate", "weight1")
    found = list(zip(*grads(*wanted), strict=True))
    for name, (by_output, by_state, whole) in zip(wanted, found, strict=True):
        close = {"rtol": 1e-5, "atol": 1e-5 * whole.abs().max().item(), "msg": name}
        torch.testing.assert_close(by_output + by_state, whole, **close)
    torch.testing.assert_close(grads("rate")[2][0], found[1][2])
    torch.testing.assert_close(grads("weight1")[2][0], found[2][2])


@pytest.mark.cover
@paths
def test_second_derivatives_are_refused(path):
    named, options = make("mlp", Case(12))
    leaves = {name: x.float().to(path.device).requires_grad_() for name, x in named.items()}
    (dk,) = torch.autograd.grad(dual(leaves, **options)[0].sum(), leaves["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dk.square().sum().backward()


@paths
def test_what_the_kernels_do_not_serve_is_a_loop(path, launches):
    """The cases are three layers, long chunks, wide heads, float64, and a step of decoding."""
    assert kernels.serves(64, [64]) and kernels.serves(16, [128, 512]) and kernels.serves(1, [3, 4000])
    assert not any((kernels.serves(65, [8]), kernels.serves(16, [129]), kernels.serves(64, [128, 9])))
    named, options = make("mlp", Case(12))
    deep = named | {"weight3": named["weight1"][..., :6].clone(), "bias3": named["bias2"]}
    found = run(deep, options, torch.float32, path)
    assert not launches
    assert_within(errors(found, run(deep, options, torch.float64)), 1e-4)
    dual({name: x.to(path.device) for name, x in named.items()}, **options)
    token = {name: x.float().to(path.device) for name, x in make("linear", Case(1))[0].items()}
    _, state = dual(token, **options)
    assert launches == ["states"]
    dual(token | state, **options)
    assert launches == ["states"]


@pytest.mark.cover
@pytest.mark.slow
@paths
def test_compiled_equals_eager(path):
    """The compiled graph has a break."""
    torch._dynamo.reset()
    named, options = make("mlp", Case(6, b=1))
    leaves = {name: x.float().to(path.device).requires_grad_() for name, x in named.items()}

    def loss(leaves: Inputs) -> Tensor:
        output, state = dual(leaves, **options)
        return (2 * output).sin().sum() + state["weight1"].sin().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(leaves), list(leaves.values())) for f in (compiled, loss))
    for name, x, y in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item(), msg=name)


# Natively only


@pytest.mark.gpu
@models
def test_transforms_go_round_the_kernels(model, launches):
    named, options = make(model, Case(12))
    leaves = {name: x.float().cuda() for name, x in named.items()}

    def loss(leaves: Inputs) -> Tensor:
        return dual(leaves, **options)[0].sin().sum()

    found = torch.func.grad(loss)(leaves)
    assert not launches
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    for (name, x), y in zip(found.items(), torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * y.abs().max().item(), msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", [TTTLinear, TTTMLP])
def test_layer(kind, packed, monkeypatch, launches):
    """Head 64 and chunk 16 agree with float64 within 2 x the error of the loop on the GPU; bfloat16 is finite."""
    torch.manual_seed(0)
    layer = kind(256, 4)
    for name, x in layer.named_parameters():
        if "start" in name:
            nn.init.normal_(x, std=0.1)
    x = torch.randn(1 if packed else 2, 210, 256)
    ends = bounds((33, 0, 16, 161)) if packed else None
    exact = each(copy.deepcopy(layer).double(), x.double(), ends)
    layer, x, ends = layer.cuda(), x.cuda(), None if ends is None else ends.cuda()
    with monkeypatch.context() as loops:
        loops.setattr(memory, "on_gpu", lambda x: False)
        loop = each(layer, x, ends)
    assert not launches
    found = each(layer, x, ends)
    assert launches == ["states", "adjoints"]
    rounding = 2**-24 * (x.shape[:2].numel() + 5 * 64) ** 0.5 + 2**-20
    allowed = {name: 2 * relative_error(y, exact[name]) + rounding for name, y in loop.items()}
    assert_within({name: relative_error(y, exact[name]) for name, y in found.items()}, allowed)
    with torch.autocast("cuda", torch.bfloat16):
        y, state = layer(x, cu_seqlens=ends)
    assert y.dtype == torch.bfloat16 and state["weight1"].dtype == torch.float32
    y.float().sin().sum().backward()
    assert all(x.grad.isfinite().all() for x in layer.parameters()) and y.isfinite().all()


def each(layer: nn.Module, x: Tensor, ends: Tensor | None) -> Inputs:
    """Return the outputs of the layer and the gradients of its parameters."""
    y, state = layer(x, cu_seqlens=ends)
    loss = y.sin().sum() + state["weight1"].sin().sum()
    grads = torch.autograd.grad(loss, list(layer.parameters()))
    named = {name: g for (name, _), g in zip(layer.named_parameters(), grads, strict=True)}
    return {name: z.detach().cpu() for name, z in {"y": y, "weight1": state["weight1"], **named}.items()}
