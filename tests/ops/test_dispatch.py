"""`auto` is one pure function: a table of what it chooses and refuses; `explain` reports what really runs."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lineate
from lineate import rule
from lineate.call import Request
from lineate.dispatch import Facts, resolve, why_no_triton
from tests.support import fresh
from tests.support.cases import (
    DELTA,
    FORMS,
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    PACKED,
    ROWS,
    SMALL,
    TEXTS,
    assert_same_bits,
    bounds,
    convert,
    draw,
    needs_native,
    run,
)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
NO_COMPILER = "no C compiler was found"

SHORT = "form 'recurrent' because t is at most 8: decoding"
CHUNKS = "form 'chunkwise': linear in t, quadratic only inside a chunk"
RATES = "form 'recurrent' because the kernel for one beta per value channel is recurrent"
ASKED = "form '{form}' as asked"
NATIVE = "backend 'native' runs float32 on a CPU"
NATIVE_ASKED, TORCH_ASKED = "backend 'native' as asked", "backend 'torch' as asked"
BECAUSE = "backend 'torch' because "
NO_PARALLEL = "the native backend has no parallel form"
NO_RATES = "the native backend takes no beta per value channel"
NO_GRADIENTS = "the native recurrent form has no gradients"
NO_FLOAT64 = "the native backend computes in float32, got float64 inputs"
NOT_CPU = "the native backend needs CPU tensors, got {}"
NO_TRITON = "triton is not installed (No module named 'triton')"
TRITON_RATES = "the triton chunkwise form takes no beta per value channel"
TRITON, TRITON_ASKED = "backend 'triton' runs kernels made for a GPU", "backend 'triton' as asked"
TRITON_FLOAT64 = "the triton kernels compute in float32, got float64 inputs"
TRITON_PARALLEL = "the triton backend has no parallel form"
TRITON_GRADIENTS = "the triton recurrent form has no gradients"
TRITON_WIDE = "the triton kernels take k and v up to 256, got 257"
TRITON_CHUNKS = "the triton kernels work in chunks of 64, got chunk_size={}"
TRANSFORMED = "torch.func transforms and forward mode know torch's functions alone"
INTERPRETER = "triton's interpreter computes float32 only, got {}"
TRITON_DEVICE = "the triton kernels need CUDA tensors, got {}"

DEFAULTS = {
    "t": 100,
    "width": 128,
    "packed": False,
    "beta_per_channel": False,
    "needs_grad": False,
    "transformed": False,
    "device": "cpu",
    "dtype": F32,
    "no_native": None,
    "no_triton": None,
    "form": "auto",
    "backend": "auto",
    "chunk_size": None,
}
GPU = {"device": "cuda"}
GPU_AND_NO_TRITON = {**GPU, "no_triton": NO_TRITON}

# Each entry: changes to the defaults, then form, backend, chunk size, the reason for the form and for the backend.
SERVED = [
    # auto form on the native backend
    ({}, "chunkwise", "native", 32, CHUNKS, NATIVE),
    ({"t": 1}, "recurrent", "native", 1, SHORT, NATIVE),
    ({"t": 8}, "recurrent", "native", 1, SHORT, NATIVE),
    ({"t": 9}, "chunkwise", "native", 9, CHUNKS, NATIVE),
    ({"t": 8, "packed": True}, "chunkwise", "native", 8, CHUNKS, NATIVE),
    ({"t": 8, "needs_grad": True}, "chunkwise", "native", 8, CHUNKS, NATIVE),
    ({"packed": True, "needs_grad": True}, "chunkwise", "native", 32, CHUNKS, NATIVE),
    ({"dtype": BF16}, "chunkwise", "native", 32, CHUNKS, NATIVE),
    ({"dtype": F16}, "chunkwise", "native", 32, CHUNKS, NATIVE),
    ({"chunk_size": 64}, "chunkwise", "native", 64, CHUNKS, NATIVE),
    ({"chunk_size": 1000}, "chunkwise", "native", 100, CHUNKS, NATIVE),
    ({"t": 8, "chunk_size": 4}, "recurrent", "native", 1, SHORT, NATIVE),
    # auto backend where native cannot serve the call
    ({"dtype": F64}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_FLOAT64),
    ({"t": 1, "dtype": F64}, "recurrent", "torch", 1, SHORT, BECAUSE + NO_FLOAT64),
    ({"device": "mps"}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NOT_CPU.format("mps")),
    ({"t": 1, "device": "mps"}, "recurrent", "torch", 1, SHORT, BECAUSE + NOT_CPU.format("mps")),
    ({"device": "meta"}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NOT_CPU.format("meta")),
    ({"no_native": NO_COMPILER}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_COMPILER),
    ({"t": 3, "no_native": NO_COMPILER}, "recurrent", "torch", 1, SHORT, BECAUSE + NO_COMPILER),
    ({"beta_per_channel": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_RATES),
    ({"beta_per_channel": True, "t": 8}, "recurrent", "torch", 1, SHORT, BECAUSE + NO_RATES),
    ({"beta_per_channel": True, "packed": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_RATES),
    ({"beta_per_channel": True, "needs_grad": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_RATES),
    ({"transformed": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + TRANSFORMED),
    ({"transformed": True, "t": 1}, "recurrent", "torch", 1, SHORT, BECAUSE + TRANSFORMED),
    # auto on a GPU: the triton kernels, or torch where they cannot serve; limits of native do not matter there
    (GPU, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "t": 8}, "recurrent", "triton", 1, SHORT, TRITON),
    ({**GPU, "t": 9}, "chunkwise", "triton", 9, CHUNKS, TRITON),
    ({**GPU, "t": 8, "packed": True}, "chunkwise", "triton", 8, CHUNKS, TRITON),
    ({**GPU, "t": 8, "needs_grad": True}, "chunkwise", "triton", 8, CHUNKS, TRITON),
    ({**GPU, "packed": True, "needs_grad": True}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "dtype": BF16}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "dtype": F16}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "no_native": NO_COMPILER}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "width": 256}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "chunk_size": 64}, "chunkwise", "triton", 64, CHUNKS, TRITON),
    ({**GPU, "t": 8, "chunk_size": 16}, "recurrent", "triton", 1, SHORT, TRITON),
    ({**GPU, "beta_per_channel": True}, "recurrent", "triton", 1, RATES, TRITON),
    ({**GPU, "form": "recurrent"}, "recurrent", "triton", 1, ASKED, TRITON),
    ({**GPU, "form": "chunkwise", "t": 1}, "chunkwise", "triton", 1, ASKED, TRITON),
    ({**GPU, "dtype": F64}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + TRITON_FLOAT64),
    ({**GPU, "dtype": F64, "t": 1}, "recurrent", "torch", 1, SHORT, BECAUSE + TRITON_FLOAT64),
    ({**GPU, "form": "parallel"}, "parallel", "torch", 100, ASKED, BECAUSE + TRITON_PARALLEL),
    ({**GPU, "form": "recurrent", "needs_grad": True}, "recurrent", "torch", 1, ASKED, BECAUSE + TRITON_GRADIENTS),
    ({**GPU, "beta_per_channel": True, "needs_grad": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + TRITON_RATES),
    ({**GPU, "form": "chunkwise", "beta_per_channel": True}, "chunkwise", "torch", 64, ASKED, BECAUSE + TRITON_RATES),
    ({**GPU, "width": 257}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + TRITON_WIDE),
    ({**GPU, "width": 257, "t": 1}, "recurrent", "torch", 1, SHORT, BECAUSE + TRITON_WIDE),
    ({**GPU, "chunk_size": 16}, "chunkwise", "torch", 16, CHUNKS, BECAUSE + TRITON_CHUNKS.format(16)),
    ({**GPU, "chunk_size": 128}, "chunkwise", "torch", 100, CHUNKS, BECAUSE + TRITON_CHUNKS.format(128)),
    ({**GPU, "transformed": True}, "chunkwise", "torch", 64, CHUNKS, BECAUSE + TRANSFORMED),
    (GPU_AND_NO_TRITON, "chunkwise", "torch", 64, CHUNKS, BECAUSE + NO_TRITON),
    ({**GPU_AND_NO_TRITON, "t": 1}, "recurrent", "torch", 1, SHORT, BECAUSE + NO_TRITON),
    # explicit forms
    ({"form": "recurrent"}, "recurrent", "native", 1, ASKED, NATIVE),
    ({"form": "recurrent", "packed": True}, "recurrent", "native", 1, ASKED, NATIVE),
    ({"form": "recurrent", "needs_grad": True}, "recurrent", "torch", 1, ASKED, BECAUSE + NO_GRADIENTS),
    ({"form": "recurrent", "beta_per_channel": True}, "recurrent", "torch", 1, ASKED, BECAUSE + NO_RATES),
    ({"form": "chunkwise", "beta_per_channel": True}, "chunkwise", "torch", 64, ASKED, BECAUSE + NO_RATES),
    ({"form": "parallel", "beta_per_channel": True}, "parallel", "torch", 100, ASKED, BECAUSE + NO_PARALLEL),
    ({"form": "chunkwise", "t": 1}, "chunkwise", "native", 1, ASKED, NATIVE),
    ({"form": "chunkwise", "needs_grad": True}, "chunkwise", "native", 32, ASKED, NATIVE),
    ({"form": "chunkwise", "dtype": F64}, "chunkwise", "torch", 64, ASKED, BECAUSE + NO_FLOAT64),
    ({"form": "parallel"}, "parallel", "torch", 100, ASKED, BECAUSE + NO_PARALLEL),
    ({"form": "parallel", "packed": True, "chunk_size": 7}, "parallel", "torch", 100, ASKED, BECAUSE + NO_PARALLEL),
    # explicit backends
    ({"backend": "torch"}, "chunkwise", "torch", 64, CHUNKS, TORCH_ASKED),
    ({"backend": "torch", "t": 2}, "recurrent", "torch", 1, SHORT, TORCH_ASKED),
    ({"backend": "torch", "form": "parallel", "device": "cuda"}, "parallel", "torch", 100, ASKED, TORCH_ASKED),
    ({"backend": "torch", "no_native": NO_COMPILER}, "chunkwise", "torch", 64, CHUNKS, TORCH_ASKED),
    ({"backend": "native"}, "chunkwise", "native", 32, CHUNKS, NATIVE_ASKED),
    ({"backend": "native", "t": 2}, "recurrent", "native", 1, SHORT, NATIVE_ASKED),
    ({"backend": "native", "t": 2, "needs_grad": True}, "chunkwise", "native", 2, CHUNKS, NATIVE_ASKED),
    ({"backend": "native", "form": "recurrent"}, "recurrent", "native", 1, ASKED, NATIVE_ASKED),
    ({**GPU_AND_NO_TRITON, "backend": "torch"}, "chunkwise", "torch", 64, CHUNKS, TORCH_ASKED),
    ({**GPU, "backend": "triton"}, "chunkwise", "triton", 64, CHUNKS, TRITON_ASKED),
    ({**GPU, "backend": "triton", "t": 1}, "recurrent", "triton", 1, SHORT, TRITON_ASKED),
    ({**GPU, "backend": "triton", "t": 1, "needs_grad": True}, "chunkwise", "triton", 1, CHUNKS, TRITON_ASKED),
    ({**GPU, "backend": "triton", "form": "chunkwise"}, "chunkwise", "triton", 64, ASKED, TRITON_ASKED),
    ({**GPU, "backend": "triton", "form": "recurrent", "chunk_size": 7}, "recurrent", "triton", 1, ASKED, TRITON_ASKED),
    # the interpreter, which is present if no_triton is None, serves a CPU only when asked
    ({"backend": "triton"}, "chunkwise", "triton", 64, CHUNKS, TRITON_ASKED),
    ({"backend": "triton", "t": 1}, "recurrent", "triton", 1, SHORT, TRITON_ASKED),
]

MESSAGE = "backend='{backend}' cannot serve this call: {why}; use backend='torch'"


def _refused(backend: str, changes: dict[str, object], why: str) -> tuple[dict[str, object], str]:
    return {"backend": backend, **changes}, MESSAGE.format(backend=backend, why=why)


REFUSED = [
    _refused("native", {"dtype": F64}, NO_FLOAT64),
    _refused("native", GPU, NOT_CPU.format("cuda")),
    _refused("native", {"form": "parallel"}, NO_PARALLEL),
    _refused("native", {"beta_per_channel": True}, NO_RATES),
    _refused("native", {"form": "recurrent", "needs_grad": True}, NO_GRADIENTS),
    _refused("native", {"no_native": NO_COMPILER}, NO_COMPILER),
    _refused("native", {"transformed": True}, TRANSFORMED),
    _refused("triton", {**GPU, "transformed": True}, TRANSFORMED),
    _refused("triton", {"no_triton": TRITON_DEVICE.format("cpu")}, TRITON_DEVICE.format("cpu")),
    _refused("triton", {"device": "mps", "no_triton": TRITON_DEVICE.format("mps")}, TRITON_DEVICE.format("mps")),
    _refused("triton", GPU_AND_NO_TRITON, NO_TRITON),
    _refused("triton", {**GPU_AND_NO_TRITON, "dtype": F64}, NO_TRITON),
    _refused("triton", {"dtype": BF16}, INTERPRETER.format("bfloat16")),
    _refused("triton", {"dtype": F16}, INTERPRETER.format("float16")),
    _refused("triton", {"dtype": F64}, INTERPRETER.format("float64")),
    _refused("triton", {**GPU, "dtype": F64}, TRITON_FLOAT64),
    _refused("triton", {**GPU, "form": "parallel"}, TRITON_PARALLEL),
    _refused("triton", {**GPU, "form": "recurrent", "needs_grad": True}, TRITON_GRADIENTS),
    _refused("triton", {**GPU, "beta_per_channel": True, "needs_grad": True}, TRITON_RATES),
    _refused("triton", {**GPU, "width": 257}, TRITON_WIDE),
    _refused("triton", {**GPU, "width": 257, "t": 1}, TRITON_WIDE),
    _refused("triton", {**GPU, "chunk_size": 32}, TRITON_CHUNKS.format(32)),
    _refused("triton", {**GPU, "chunk_size": 128}, TRITON_CHUNKS.format(128)),
]


def choose(the_rule: rule.Rule, call: dict[str, object]) -> lineate.Plan:
    """Return the plan of a call, from the names of what it depends on and asks for."""
    request = {name: x for name, x in call.items() if name in Request._fields}
    facts = {name: x for name, x in call.items() if name not in request}
    return resolve(the_rule, Facts(**facts), Request(**request))


def label(changes: dict[str, object]) -> str:
    return ", ".join(f"{name}={x}" for name, x in changes.items()) or "defaults"


@pytest.mark.parametrize("row", SERVED, ids=lambda row: label(row[0]))
@pytest.mark.parametrize("the_rule", rule.ONE_KEY_RULES, ids=lambda x: x.name)
def test_served(the_rule, row):
    changes, form, backend, chunk_size, why_form, why_backend = row
    call = {**DEFAULTS, **changes}
    reason = f"{why_form.format(t=call['t'], form=form)}; {why_backend}"
    assert choose(the_rule, call) == lineate.Plan(the_rule.name, form, backend, chunk_size, reason)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[label(x) for x, _ in REFUSED])
def test_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        choose(rule.GATED_DELTA, {**DEFAULTS, **changes})
    assert str(caught.value) == message


@pytest.mark.cover
def test_an_explicit_request_is_served_or_refused_but_never_replaced():
    """In every combination, the plan has what was asked for by name."""
    choices = {
        "t": (1, 100),
        "width": (128, 257),
        "packed": (False, True),
        "beta_per_channel": (False, True),
        "needs_grad": (False, True),
        "transformed": (False, True),
        "device": ("cpu", "cuda", "meta"),
        "dtype": (F32, F64, BF16),
        "no_native": (None, NO_COMPILER),
        "no_triton": (None, NO_TRITON),
        "form": ("auto", *FORMS),
        "backend": ("auto", "torch", "native", "triton"),
        "chunk_size": (None, 16),
    }
    served = refused = 0
    for values in itertools.product(*choices.values()):
        call = dict(zip(choices, values, strict=True))
        try:
            plan = choose(rule.DELTA, call)
        except ValueError:
            refused += 1
            assert (call["form"], call["backend"]) != ("auto", "auto")
            assert call["backend"] in ("native", "triton")
            continue
        served += 1
        assert call["form"] in ("auto", plan.form)
        assert call["backend"] in ("auto", plan.backend)
        assert plan.backend == "torch" or (plan.form != "parallel" and not call["transformed"])
        assert not (plan.backend == "native" and (call["dtype"] == F64 or call["device"] != "cpu" or call["no_native"]))
        assert not (plan.backend == "native" and plan.form == "recurrent" and call["needs_grad"])
        assert not (plan.backend == "triton" and (call["dtype"] == F64 or call["width"] > 256 or call["no_triton"]))
        assert not (plan.backend == "triton" and plan.form == "recurrent" and call["needs_grad"])
        assert not (plan.backend == "triton" and plan.form == "chunkwise" and call["chunk_size"] == 16)
        assert call["backend"] != "auto" or plan.backend != {"cpu": "triton", "cuda": "native"}.get(call["device"])
        assert not (call["beta_per_channel"] and plan.backend == "native")
        assert not (call["beta_per_channel"] and plan.backend == "triton" and plan.form != "recurrent")
    assert served > 1000
    assert refused > 1000


# explain


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (LINEAR, "linear_attention"),
        (GATED_LINEAR, "gated_linear_attention"),
        (GATED_LINEAR_CHANNEL, "gated_linear_attention"),
        (DELTA, "delta_rule"),
        (GATED_DELTA, "gated_delta_rule"),
        (KIMI_DELTA, "kimi_delta_attention"),
    ],
    ids=str,
)
def test_explain_names_the_rule_that_the_gates_select(row, name):
    plan = lineate.explain(**draw(row, SMALL))
    assert plan.rule == name == row.op.__name__


def test_explain_prints():
    plan = lineate.explain(**draw(GATED_DELTA, SMALL))
    assert str(plan) == (
        "gated_delta_rule: chunkwise, torch, chunks of 53\n"
        "  form 'chunkwise': linear in t, quadratic only inside a chunk; "
        "backend 'torch' because the native backend computes in float32, got float64 inputs"
    )


class CustomOps(TorchDispatchMode):
    """Records the names of lineate's own torch ops that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineate":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


CALLS = [
    {},
    {"t": 1},
    {"t": 8},
    {"t": 9},
    {"dtype": F64},
    {"dtype": F64, "t": 2},
    {"dtype": BF16},
    {"packed": True},
    {"needs_grad": True},
    {"needs_grad": True, "t": 1},
    {"form": "recurrent"},
    {"form": "recurrent", "needs_grad": True},
    {"form": "parallel"},
    {"form": "chunkwise", "t": 1},
    {"backend": "torch"},
    {"backend": "torch", "chunk_size": 5},
    {"chunk_size": 5},
]


@needs_native
@pytest.mark.parametrize("call", CALLS, ids=label)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_explain_says_what_really_runs(row, call):
    """A call has the same bits as one that asks for the plan by name, and runs the op that the plan names."""
    call = dict(call)
    packed, needs_grad = call.pop("packed", False), call.pop("needs_grad", False)
    shape = PACKED if packed else SMALL._replace(t=call.pop("t", SMALL.t))
    inputs = convert(draw(row, shape, texts=len(TEXTS) if packed else None), call.pop("dtype", F32))
    inputs["v"].requires_grad_(needs_grad)
    options = {**call, "cu_seqlens": bounds() if packed else None}
    plan = lineate.explain(**inputs, **options)
    only = ("v",) if needs_grad else ()
    with CustomOps() as ran:
        got = run(row, inputs, **{"form": "auto", **options}, only=only)
    expected_ops = {
        ("chunkwise", "torch"): ["lineate.chunkwise.default", "lineate.chunkwise_backward.default"],
        ("chunkwise", "native"): ["lineate.chunkwise_native.default", "lineate.chunkwise_native_backward.default"],
    }.get((plan.form, plan.backend), [])
    assert [name for name in ran.names if "recurrent" not in name] == expected_ops[: 1 + needs_grad]
    by_name = {**options, "form": plan.form, "backend": plan.backend, "chunk_size": plan.chunk_size}
    assert_same_bits(got, run(row, inputs, **by_name, only=only))


def test_explain_runs_nothing():
    """It runs no torch op on the inputs, except for the check of the gates."""
    inputs = {name: x.to("meta") for name, x in draw(KIMI_DELTA, SMALL).items()}
    with CustomOps() as ran:
        plan = lineate.explain(**inputs)
    assert not ran.names
    assert (plan.form, plan.backend) == ("chunkwise", "torch")


# On devices that are not here


def test_explain_asks_for_a_device_that_has_kernels():
    """A meta tensor stands for any device without kernels (mps, xpu): auto uses torch, an explicit request fails."""
    inputs = {name: x.to("meta") for name, x in convert(draw(GATED_DELTA, SMALL), F32).items()}
    plan = lineate.explain(**inputs)
    assert (plan.form, plan.backend) == ("chunkwise", "torch")
    assert plan.reason.endswith(BECAUSE + NOT_CPU.format("meta"))
    with pytest.raises(ValueError) as caught:
        lineate.explain(**inputs, backend="triton")
    assert str(caught.value) == MESSAGE.format(backend="triton", why=TRITON_DEVICE.format("meta"))


def test_why_no_triton_names_the_device(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device in ("mps", "xpu", "meta"):
        assert why_no_triton(device) == TRITON_DEVICE.format(device)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert why_no_triton("cpu") == TRITON_DEVICE.format("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert why_no_triton("cpu") == TRITON_DEVICE.format("cpu")


# Without the native backend, without triton


def without_native(code: str, **environment: str) -> str:
    """Return the output of `code` in a fresh process with these environment variables."""
    done = fresh.run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


EXPLAIN = """
import torch, lineate
x = torch.ones(1, 20, 1, 4)
plan = lineate.explain(x, x, x)
print(plan.backend, plan.chunk_size, plan.reason.split("; ", 1)[1], sep="|")
print(lineate.linear_attention(x, x, x).output.sum().item())
try:
    lineate.linear_attention(x, x, x, backend="native")
except ValueError as error:
    print(error)
"""


@pytest.mark.cover
def test_switched_off():
    assert without_native(EXPLAIN, LINEATE_NATIVE="0").splitlines() == [
        "torch|20|backend 'torch' because it is switched off by LINEATE_NATIVE=0",
        "1680.0",
        "backend='native' cannot serve this call: it is switched off by LINEATE_NATIVE=0; use backend='torch'",
    ]


@pytest.mark.cover
def test_without_a_compiler(tmp_path):
    """With a missing compiler, one that fails, or a read-only cache, torch serves, and explain says why."""
    gone = without_native(EXPLAIN, CC=str(tmp_path / "no-such-cc"), LINEATE_CACHE=str(tmp_path / "a")).splitlines()
    fails = without_native(EXPLAIN, CC="false", LINEATE_CACHE=str(tmp_path / "b")).splitlines()
    (tmp_path / "file").write_text("")
    no_cache = without_native(EXPLAIN, LINEATE_CACHE=str(tmp_path / "file" / "c")).splitlines()
    for plan, output, error in (gone, fails, no_cache):
        assert plan.startswith("torch|20|backend 'torch' because ")
        assert output == "1680.0"
        assert error.startswith("backend='native' cannot serve this call: ")
        assert error.endswith("; use backend='torch'")
    assert "no-such-cc could not run" in gone[2]
    assert "false failed" in fails[2]
    assert "the cache folder cannot be made" in no_cache[2]
