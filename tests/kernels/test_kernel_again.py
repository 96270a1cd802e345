"""A call of a known form is repeated without checks, with the same bits; other calls are checked."""

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lineate
from lineate import plans, rule
from lineate.call import Inputs, Options, in_one_dtype, spread_decay
from tests.support.cases import GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Shape, convert, draw

RULES = {"GDN": GATED_DELTA, "KDA": KIMI_DELTA, "gated linear": GATED_LINEAR, "linear": LINEAR}
SHAPE = Shape(1, 200, 2, 4, 64, 64)
FORM = {"backend": "triton", "form": "chunkwise"}


class LookedAt(Exception):
    """A call was checked."""


@pytest.fixture
def forbid(monkeypatch):
    """Return a function after which every call that is checked raises LookedAt."""
    pytest.importorskip("triton")
    importlib.import_module("lineate.kernels.tape").forget_tapes()

    def refuse(*args):
        raise LookedAt

    def start() -> None:
        for module in ("lineate.ops.rules", "lineate.ops.raw_gates"):
            monkeypatch.setattr(importlib.import_module(module), "check_and_resolve", refuse)

    return start


def drawn(row, state: bool = True) -> dict[str, torch.Tensor]:
    inputs = {name: x.cuda() for name, x in convert(draw(row, SHAPE), torch.bfloat16).items()}
    if not state:
        del inputs["state"]
    return inputs


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same values at other addresses."""
    return {name: x.clone() for name, x in inputs.items()}


def apart(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between them."""
    return torch.stack((x, x), -1)[..., 0]


def thrice(call):
    """Make a call as often as it takes to repeat it, and return what the first returned."""
    first, *_ = (call() for _ in range(3))
    return first


def same(found, expected) -> bool:
    return torch.equal(found.output, expected.output) and torch.equal(found.state, expected.state)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("name", RULES)
def test_rules(name, state, forbid):
    op, inputs = RULES[name].op, drawn(RULES[name], state)
    other = {name: x if name == "state" else x.flip(1) for name, x in inputs.items()}
    turned, expected, _ = (op(**moved(given), **FORM) for given in (other, inputs, inputs))
    assert not torch.equal(turned.output, expected.output)
    forbid()
    for _ in range(3):
        assert same(op(**moved(inputs), **FORM), expected) and same(op(**moved(other), **FORM), turned)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("channel", [False, True], ids=["GDN", "KDA"])
def test_raw_gates(channel, forbid):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, h, 64, device="cuda").bfloat16() for h in (2, 2, 4))
    gate = torch.randn(1, 200, 4, *((64,) if channel else ()), device="cuda")
    write, A_log = torch.randn(1, 200, 4, device="cuda"), torch.rand(4, device="cuda")
    dt_bias = torch.randn(4 * (64 if channel else 1), device="cuda")
    given = {"q": q, "k": k, "v": v, "gate": gate, "write": write, "A_log": A_log, "dt_bias": dt_bias}
    expected = thrice(lambda: lineate.fused_delta_rule(**moved(given)))
    doubled = thrice(lambda: lineate.fused_delta_rule(**moved(given), beta_scale=2.0))
    assert not torch.equal(expected.output, doubled.output)
    forbid()
    for _ in range(3):
        assert same(lineate.fused_delta_rule(**moved(given)), expected)
        assert same(lineate.fused_delta_rule(**moved(given), beta_scale=2.0), doubled)


@pytest.mark.gpu
@torch.no_grad()
def test_packed_sequences(forbid):
    inputs = drawn(GATED_DELTA, state=False)
    bounds = [torch.tensor([0, n, 200], device="cuda") for n in (64, 10, 199)]
    expected = [lineate.gated_delta_rule(**inputs, cu_seqlens=x) for x in bounds]
    forbid()
    for x, right in zip(bounds, expected, strict=True):
        assert same(lineate.gated_delta_rule(**moved(inputs), cu_seqlens=x.clone()), right)


@pytest.mark.gpu
@torch.no_grad()
def test_what_is_looked_at(forbid):
    """Other shapes, strides, alignments, dtypes and options; gradients, transforms, modes and recordings."""
    inputs = drawn(GATED_DELTA)
    op = lineate.gated_delta_rule
    expected = thrice(lambda: op(**inputs, **FORM))
    thrice(lambda: op(**inputs, scale=1.0, **FORM))  # 1.0 == True
    shifted = torch.empty(inputs["v"].numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(inputs["v"].shape)
    forbid()
    assert same(op(**inputs, **FORM), expected)
    others = {
        "shape": {name: x if name == "state" else x[:, :100] for name, x in inputs.items()},
        "stride": inputs | {"k": apart(inputs["k"])},
        "alignment": inputs | {"v": shifted.copy_(inputs["v"])},
        "dtype": inputs | {"beta": inputs["beta"].double()},
        "no state": {name: x for name, x in inputs.items() if name != "state"},
        "device": inputs | {"beta": inputs["beta"].cpu()},
        "option": inputs | {"scale": 0.5},
        "its type": inputs | {"scale": True},
        "bad option": inputs | {"scale": [1.0]},
        "no tensor": inputs | {"q": 1},
        "virtual": inputs | {"v": torch._neg_view(inputs["v"])},
    }
    for name, given in others.items():
        with pytest.raises(LookedAt):
            op(**given, **FORM)
            pytest.fail(f"{name} was not looked at")
    with torch.enable_grad(), pytest.raises(LookedAt):
        op(**inputs | {"v": inputs["v"].clone().requires_grad_()}, **FORM)
    with pytest.raises(LookedAt):
        torch.vmap(lambda v: op(**inputs | {"v": v}, **FORM).output)(inputs["v"][None])
    with FlopCounterMode(display=False), pytest.raises(LookedAt):
        op(**inputs, **FORM)
    assert same(op(**inputs, **FORM), expected)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_state_of_another_dtype(dtype):
    inputs = drawn(GATED_DELTA)
    inputs["state"] = inputs["state"].to(dtype)
    expected = lineate.gated_delta_rule(**inputs | {"state": inputs["state"].float()}, **FORM)
    for _ in range(5):
        assert same(lineate.gated_delta_rule(**moved(inputs), **FORM), expected)


@pytest.mark.gpu
@torch.no_grad()
def test_a_call_that_copies_is_not_repeated(forbid):
    inputs = drawn(GATED_DELTA)
    inputs["k"] = apart(inputs["k"])
    for _ in range(4):
        lineate.gated_delta_rule(**inputs, **FORM)
    forbid()
    with pytest.raises(LookedAt):
        lineate.gated_delta_rule(**inputs, **FORM)


@pytest.mark.gpu
@torch.no_grad()
def test_in_a_graph(forbid):
    """A graph that was captured from a repeated call reads its inputs anew."""
    inputs = drawn(GATED_DELTA, state=False)
    expected = thrice(lambda: lineate.gated_delta_rule(**inputs, **FORM))
    forbid()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = lineate.gated_delta_rule(**inputs, **FORM)
    found.output.zero_()
    graph.replay()
    assert same(found, expected)
    inputs["v"].zero_()
    graph.replay()
    assert not found.output.any()


@pytest.mark.gpu
@torch.no_grad()
def test_after_inference_mode(forbid):
    """Calls outside of it get tensors that autograd may save, whatever came first."""
    inputs = drawn(GATED_DELTA)
    for _ in range(3):
        with torch.inference_mode():
            lineate.gated_delta_rule(**inputs, **FORM)
    forbid()
    found = lineate.gated_delta_rule(**inputs, **FORM)
    assert not found.output.is_inference() and not found.state.is_inference()


@pytest.mark.parametrize(
    ("change", "repeated"),
    [
        (lambda x: x, True),
        (lambda x: x.replace(state=None), True),
        (lambda x: x.replace(state=x.state.bfloat16()), False),
        (lambda x: x.replace(state=x.state.double()), False),
        (lambda x: x.replace(state=apart(x.state)), False),
        (lambda x: x.replace(q=x.q.bfloat16()), False),
        (lambda x: x.replace(v=x.v.bfloat16()), False),
        (lambda x: x.replace(k=apart(x.k)), False),
        (lambda x: x.replace(log_decay=x.log_decay[0, 0]), False),
        (lambda x: x.replace(beta=apart(x.beta)), False),
        (lambda x: x.replace(cu_seqlens=torch.tensor([0, 64])), True),
        (lambda x: x.replace(cu_seqlens=apart(torch.tensor([0, 64]))), False),
    ],
    ids=["plain", "no state", "bfloat16 state", "float64 state", "state apart", "bfloat16 q", "bfloat16 v", "k apart",
         "constant decay", "beta apart", "packed", "bounds apart"],
)  # fmt: skip
def test_only_what_is_read_as_it_is_may_be_repeated(change, repeated, monkeypatch):
    """Kernels of a repeated call get the caller's own memory."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("lineate.kernels.ops")
    kept = []
    monkeypatch.setattr(kernels, "find", lambda kind, given, options: (True, object()))
    monkeypatch.setattr(kernels, "remember", lambda form, run: kept.append(run))
    q, k, v = (torch.ones(1, 64, 2, 16) for _ in range(3))
    gates = {"log_decay": torch.zeros(1, 64, 2), "beta": torch.ones(1, 64, 2)}
    own = change(Inputs(q=q, k=k, v=v, **gates, state=torch.zeros(1, 2, 16, 16)))
    used = spread_decay(in_one_dtype(own))
    if used.state is None:
        used = used.replace(state=torch.zeros(1, 2, 16, 16))
    kernels.remember_forward(("form",), own, used, Options(rule.GATED_DELTA, 1.0))
    assert [run is not None for run in kept] == [repeated]


def test_a_call_on_a_cpu_has_no_form():
    x = torch.ones(1, 8, 2, 16)
    assert plans.repeat_signature("linear_attention", Inputs(q=x, k=x, v=x), (None, "auto")) is None


@pytest.fixture
def no_forms():
    plans.forget()
    yield
    plans.forget()


def test_signatures_are_remembered(no_forms):
    q = torch.ones(1)
    x = Inputs(q=q, k=q, v=q)
    for n in range(5):
        signature = ("repeat", n)
        assert plans.undecided(signature) and plans.repeat(signature, x) is None
        plans.remember(signature, None if n == 3 else lambda inputs, n=n: (inputs.q + n, inputs.q))
        assert not plans.undecided(signature)
    assert plans.repeat(("repeat", 3), x) is None and plans.repeat(None, x) is None
    found = plans.repeat(("repeat", 4), x)
    assert found is not None and found[0].item() == 5
    plans.forget("launches")
    assert not plans.undecided(("repeat", 4))
    plans.forget("repeat")
    assert plans.undecided(("repeat", 4))


def test_what_is_forgotten_may_remember(no_forms, monkeypatch):
    """A finaliser that runs while a form is forgotten may itself make calls."""
    monkeypatch.setattr(plans.PLANS, "n", 1)

    class Run:
        def __call__(self, tensors):
            return None

        def __del__(self) -> None:
            plans.remember(("repeat", "last"), None)

    plans.remember(("repeat", "first"), Run())
    for n in range(2):  # with the second of them the first is forgotten
        plans.remember(("repeat", n), None)
    assert not plans.undecided(("repeat", "last"))
