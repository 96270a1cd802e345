"""A call keeps all its tensors: each place that copies, cuts, converts or flattens one hands a new field on.

`Wider` is Inputs with one field more. A seam hands the field on as it does all others, or refuses a call that has it
with a message that names it; nothing drops it.
"""

import importlib
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lineate
from lineate import checks, dispatch, plans
from lineate.call import Inputs, Options, RawGates, Request, Slots, described, in_one_dtype, spread_decay
from lineate.explore import subject
from lineate.forms import chunkwise as torch_form
from lineate.forms.packing import run_chunked, run_packed
from lineate.layers import LinearMixer, Memory
from lineate.layers import mixer as mixers
from lineate.layers.trail import trail
from lineate.ops import decode_calls, decoding, raw_gates, rules
from lineate.ops.decode_calls import DecodeRequest
from lineate.parallel.context.carry import run_rule
from lineate.parallel.context.segments import Context, Segment, Told
from lineate.rule import GATED_DELTA, GATED_LINEAR, Rule
from lineate.torch_ops import chunk_op
from lineate.torch_ops.precision import full_precision_backward
from lineate.torch_ops.schema import Flat
from tests.support.cases import bounds, needs_native

B, T, HV, K, V = 2, 20, 2, 4, 3
NAMED = "dummy must be None for|not read dummy"


@described
@dataclass(frozen=True, kw_only=True, eq=False)
class Wider(Inputs):
    """Inputs with one more gate."""

    dummy: Tensor | None = field(default=None, metadata={"role": "gate", "shapes": ("b t hv",)})


def drawn(b: int = B, **changes: Tensor | None) -> Wider:
    """Return a call of GATED_DELTA with a dummy that differs from token to token."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, T, HV, n) for n in (K, K, V))
    gates = {"log_decay": -torch.rand(b, T, HV), "beta": torch.rand(b, T, HV)}
    dummy = torch.arange(b * T * HV, dtype=torch.float32).view(b, T, HV)
    return Wider(q=q, k=k, v=v, **gates, state=torch.zeros(b, HV, K, V), dummy=dummy).replace(**changes)


class Probe:
    """Stands in for what a seam hands a call to; keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Wider] = []

    def __call__(self, *arguments: object, **named: object) -> lineate.Attended:
        inputs = next(x for x in arguments if isinstance(x, Inputs))
        self.calls.append(inputs)
        return lineate.Attended(torch.zeros_like(inputs.v), torch.zeros(inputs.q.shape[0], HV, K, V))

    @property
    def dummies(self) -> Tensor:
        """The dummies of all calls, one after the other."""
        assert self.calls
        return torch.cat([x.dummy for x in self.calls], 1)


@pytest.fixture
def every_form_reads(monkeypatch):
    """Let all forms declare that they read the new field."""
    monkeypatch.setattr(dispatch, "READS", {key: (*reads, "dummy") for key, reads in dispatch.READS.items()})
    monkeypatch.setattr(checks, "check_inputs", lambda rule, inputs: None)


@pytest.fixture(autouse=True)
def no_plans():
    """Forget what other tests have let the dispatch learn of such calls."""
    plans.forget()
    yield
    plans.forget()


# what the value itself does


def test_the_value():
    inputs = drawn()
    assert (*Inputs.NAMES, "dummy") == Wider.NAMES and inputs.tensors()[-1] is inputs.dummy
    assert "dummy" in inputs.given() and inputs.gates() == ("log_decay", "beta", "dummy")
    assert inputs.replace(q=inputs.k).dummy is inputs.dummy
    assert torch.equal(inputs.map(torch.neg).dummy, -inputs.dummy)
    assert torch.equal(inputs.at(slice(3, 7)).dummy, inputs.dummy[:, 3:7])
    assert in_one_dtype(inputs.replace(q=inputs.q.double())).dummy is inputs.dummy
    assert spread_decay(inputs.replace(log_decay=torch.zeros(HV))).dummy is inputs.dummy


def test_signatures_tell_it_apart():
    inputs = drawn()
    without, other = inputs.replace(dummy=None), inputs.replace(dummy=inputs.dummy.double())
    found = {plans.call_signature("op", None, x.tensors(), ()) for x in (inputs, without, other)}
    assert len(found) == 3


# the dispatch


@pytest.mark.parametrize("form", ["auto", "recurrent", "chunkwise", "parallel"])
@pytest.mark.parametrize("backend", ["auto", "torch", pytest.param("native", marks=needs_native)])
def test_the_dispatch_refuses_it(form, backend, monkeypatch):
    monkeypatch.setattr(checks, "check_inputs", lambda rule, inputs: None)
    with pytest.raises(ValueError, match=NAMED):
        rules.attend(GATED_DELTA, drawn(), Request(form=form, backend=backend))


def test_a_form_that_reads_it_is_chosen(monkeypatch):
    monkeypatch.setattr(checks, "check_inputs", lambda rule, inputs: None)
    reads = dict(dispatch.READS)
    reads["recurrent", "torch"] += ("dummy",)
    monkeypatch.setattr(dispatch, "READS", reads)
    plan, _ = dispatch.check_and_resolve(GATED_DELTA, drawn(), Request())
    assert (plan.form, plan.backend) == ("recurrent", "torch")
    assert "form 'recurrent' because form 'chunkwise' does not read dummy" in plan.reason
    assert "backend 'torch' because the native backend does not read dummy" in plan.reason


def test_a_rule_without_it_refuses_it():
    with pytest.raises(ValueError, match="dummy must be None for gated_delta_rule, which takes log_decay, beta"):
        rules.attend(GATED_DELTA, drawn(), Request())
    with pytest.raises(ValueError, match="gates must be those of a rule, got log_decay, beta, dummy"):
        dispatch.select_rule(drawn())


WITH_DUMMY = Rule("with_dummy", corrects=True, decays=("head",), gates=("log_decay", "beta", "dummy"))


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda x: None, TypeError, "dummy must be a torch.Tensor, got NoneType; with_dummy takes it for each token"),
    (lambda x: x[:, 1:], ValueError, r"dummy must have shape \(b, t, hv\) = \(2, 20, 2\), got \(2, 19, 2\)"),
    (lambda x: x.long(), ValueError, "dummy must be float64, float32, bfloat16 or float16, got int64"),
    (lambda x: x.transpose(1, 2), ValueError, "dummy must have shape .* got .*transpose"),
    (lambda x: x, ValueError, "no form can serve this call: form 'recurrent' does not read dummy"),
])  # fmt: skip
def test_a_rule_with_it_checks_its_field(change, error, message):
    inputs = drawn()
    with pytest.raises(error, match=message):
        rules.attend(WITH_DUMMY, inputs.replace(dummy=change(inputs.dummy)), Request())


# the ops


CHANGES = {
    "plain": lambda x: x,
    "no state": lambda x: x.replace(state=None),
    "mixed dtypes": lambda x: x.replace(q=x.q.double()),
    "constant decay": lambda x: x.replace(log_decay=-torch.ones(HV)),
    "packed": lambda x: x.map(lambda y: y[:1], x.OF_TOKENS).replace(cu_seqlens=bounds((5, 0, 15)), state=None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["recurrent", "parallel"])
def test_forms_get_it(form, change, monkeypatch, every_form_reads):
    inputs, probe = CHANGES[change](drawn()), Probe()
    monkeypatch.setattr(rules, form, probe)
    rules.attend(GATED_DELTA, inputs, Request(form=form, backend="torch"))
    assert torch.equal(probe.dummies, inputs.dummy)


@pytest.mark.parametrize(("module", "backend"), [(rules, "torch"), (rules.native_ops, "native")])
def test_the_chunkwise_form_gets_it(module, backend, monkeypatch, every_form_reads):
    if backend == "native" and rules.native_ops is not module:
        pytest.skip("no native backend")
    inputs, probe = drawn(state=None), Probe()
    monkeypatch.setattr(module, "chunkwise", probe)
    monkeypatch.setattr(dispatch, "why_not", lambda name: None)
    rules.attend(GATED_DELTA, inputs, Request(form="chunkwise", backend=backend))
    assert torch.equal(probe.dummies, inputs.dummy)


def test_a_rule_without_chunks_of_its_own_runs_the_parallel_form_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(dispatch, "READS", {key: (*reads, "dummy") for key, reads in dispatch.READS.items()})
    inputs, probe = drawn(), Probe()
    monkeypatch.setattr(rules, "parallel", probe)
    rules.attend(WITH_DUMMY, inputs, Request(form="chunkwise", backend="torch", chunk_size=8))
    assert torch.equal(probe.dummies, inputs.dummy) and len(probe.calls) == 3


def test_raw_gates(monkeypatch):
    A_log, probe = torch.zeros(HV), Probe()
    inputs = drawn(A_log=A_log, dt_bias=torch.zeros(HV))
    assert raw_gates.activated(inputs, RawGates()).dummy is inputs.dummy
    with pytest.raises(ValueError, match="gates must be those of a rule, got log_decay, beta, dummy"):
        raw_gates.attend_raw(None, inputs, RawGates())
    for name, stand_in in {
        "select_rule": lambda x: GATED_DELTA,
        "check_and_resolve": lambda *x: (dispatch.Plan("", "chunkwise", "torch", 64, ""), None),
        "attend": probe,
    }.items():
        monkeypatch.setattr(raw_gates, name, stand_in)
    raw_gates.attend_raw(None, inputs, RawGates())
    assert torch.equal(probe.dummies, inputs.dummy)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.replace(q=x.q.bfloat16())], ids=["plain", "mixed dtypes"])
def test_decode_refuses_it(change, monkeypatch):
    with pytest.raises(ValueError, match="gates must be those of a rule, got log_decay, beta, dummy"):
        decoding.decode_inputs(None, change(drawn()), Slots(), DecodeRequest())
    monkeypatch.setattr(decode_calls, "select_rule", lambda inputs: GATED_DELTA)
    monkeypatch.setattr(checks, "check_inputs", lambda rule, inputs: None)
    with pytest.raises(ValueError, match="dummy must be None for decode"):
        decoding.decode_inputs(None, change(drawn()), Slots(), DecodeRequest())


# packing, and the torch ops


@pytest.mark.parametrize("run", ["packed", "chunked"])
def test_packing(run):
    probe, options = Probe(), Options(GATED_DELTA, 1.0, chunk_size=7)
    if run == "packed":
        inputs = drawn(b=1, cu_seqlens=bounds((4, 0, 9, 7)), state=torch.zeros(4, HV, K, V))
        run_packed(probe, inputs, options)
    else:
        inputs = drawn()
        run_chunked(probe, inputs, options)
    assert torch.equal(probe.dummies, inputs.dummy) and len(probe.calls) == 3


SEEN: list[Wider] = []


def fill(inputs: Wider, options: Options, outputs: chunk_op.Outputs) -> None:
    """Return dummy * v."""
    SEEN.append(inputs)
    for x in outputs:
        x.zero_()
    outputs[0].copy_(inputs.dummy.unsqueeze(-1) * inputs.v)


def fill_gradients(inputs: Wider, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Wider):
    SEEN.append(inputs)
    grads.map(Tensor.zero_)
    grads.v.copy_(inputs.dummy.unsqueeze(-1) * doutput)
    grads.dummy.copy_((inputs.v * doutput).sum(-1))


READS = (*torch_form.READS, "dummy")
times_dummy = chunk_op.register("test_times_dummy", fill, fill_gradients, READS, kind=Wider)


class AsOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["eager", "virtual", "dispatch mode", "compiled"])
def test_ops_flatten_and_restore_it(mode):
    SEEN.clear()
    inputs, options = drawn(), Options(GATED_DELTA, 1.0)
    expected = inputs.dummy.unsqueeze(-1) * inputs.v
    run = partial(times_dummy, options=options)
    if mode == "virtual":
        inputs = inputs.replace(dummy=torch._neg_view(-inputs.dummy))
    if mode == "dispatch mode":
        with AsOps():
            output, _ = run(inputs)
    elif mode == "compiled":
        torch._dynamo.reset()
        output = torch.compile(lambda q, d: run(inputs.replace(q=q, dummy=d))[0], fullgraph=True, backend="aot_eager")(
            inputs.q, inputs.dummy
        )
    else:
        output, _ = run(inputs)
    assert torch.equal(output, expected) and isinstance(SEEN[0], Wider) and SEEN[0].dummy is not None


@pytest.mark.parametrize("as_op", [False, True])
def test_its_gradient(as_op):
    inputs = drawn().map(lambda x: x.requires_grad_())
    with AsOps() if as_op else torch.enable_grad():
        output, _ = times_dummy(inputs, Options(GATED_DELTA, 1.0))
        dv, ddummy = torch.autograd.grad(output.square().sum(), (inputs.v, inputs.dummy))
    wanted = (inputs.dummy.unsqueeze(-1) * inputs.v).square().sum()
    for found, expected in zip((dv, ddummy), torch.autograd.grad(wanted, (inputs.v, inputs.dummy)), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_op_that_does_not_read_it_refuses_it():
    inputs = drawn().map(lambda x: x.requires_grad_())
    with pytest.raises(ValueError, match="dummy must be None for an op that reads q, k, v"):
        Flat(torch_form.READS, chunk_op.OPTIONS, kind=Wider).flatten(inputs, Options(GATED_DELTA, 1.0))


def test_the_backward_outside_of_autocast_knows_it():
    """The node that made the dummy is not protected: it is not the op's."""
    inside: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            inside.append(torch.is_autocast_enabled("cpu"))
            return d

    leaf = drawn().dummy.requires_grad_()

    @full_precision_backward
    def run(inputs: Wider) -> Tensor:
        return inputs.dummy.square()

    inputs = drawn(dummy=Watched.apply(leaf))
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(run(inputs).sum(), leaf)
    assert inside == [True]


# mixers


class Own(LinearMixer):
    """A mixer whose rule has the new field."""

    rule = GATED_DELTA
    gates = ("values", "heads", "heads")
    raw = False

    def rule_inputs(self, q, k, v, gates):
        parameters = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)} if self.raw else {}
        log_decay, dummy = -gates[1].sigmoid(), gates[2]
        return Wider(q=q, k=k, v=v, log_decay=log_decay, beta=gates[1], dummy=dummy, **parameters)


@pytest.fixture
def own():
    torch.manual_seed(1)
    mixer = Own(8, HV, key_dim=K, value_dim=V, conv_size=0).requires_grad_(False)
    return mixer, torch.randn(B, T, 8)


def dummy_of(mixer: Own, x: Tensor) -> Tensor:
    return mixer.project(x)[3]


@pytest.mark.parametrize("raw", [False, True])
def test_attend(own, raw, monkeypatch):
    (mixer, x), probe = own, Probe()
    mixer.raw = raw
    monkeypatch.setattr(mixers, "attend_raw" if raw else "attend", probe)
    mixer(x)
    assert torch.equal(probe.dummies, dummy_of(mixer, x))


@pytest.mark.parametrize("raw", [False, True])
def test_one_token(own, raw, monkeypatch):
    (mixer, x), probe = own, Probe()
    mixer.raw = raw
    monkeypatch.setattr(mixers, "attend", probe)
    mixer(x[:, :1], Memory({"memory": torch.zeros(B, HV, K, V)}))
    assert torch.equal(probe.dummies, dummy_of(mixer, x)[:, :1])


def test_decode(own, monkeypatch):
    (mixer, x), probe = own, Probe()
    monkeypatch.setattr(mixers, "decode_inputs", probe)
    mixed, *gates = mixer.project(x)
    inputs = mixer.rule_inputs(*mixer.split_heads(mixed), gates)
    mixer.decode(inputs, torch.zeros(B, HV, K, V), Slots())
    assert torch.equal(probe.dummies, gates[2])


@pytest.mark.parametrize("raw", [False, True])
def test_trace(own, raw):
    mixer, x = own
    mixer.raw = raw
    found = mixer.trace(x[:1])
    assert torch.equal(found.dummy, dummy_of(mixer, x[:1])) and found.A_log is None


@pytest.mark.parametrize("keep", ["inputs", "states"])
def test_speculation(own, keep, monkeypatch):
    (mixer, x), probe = own, Probe()
    probe.result = None
    replayed = Probe()

    def decode(rule, inputs, where, request):
        return replayed(inputs).output

    monkeypatch.setattr(mixers, "attend", probe)
    monkeypatch.setattr(mixers, "decode_inputs", decode)
    _, trailed = trail(mixer, x, Memory({"memory": torch.zeros(B, HV, K, V)}), keep)
    found = probe if keep == "states" else replayed
    assert torch.equal(found.dummies, dummy_of(mixer, x))
    if keep == "inputs":
        replayed.calls.clear()
        trailed.after(torch.tensor([3] * B))
        assert torch.equal(replayed.dummies, dummy_of(mixer, x))


# context parallelism


class Arrived:
    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Second(Context):
    """The second of three ranks; the others send what it sends."""

    def __init__(self) -> None:
        self.rank, self.size = 1, 3

    def gather_later(self, x):
        return Arrived(torch.stack((x,) * self.size))


def test_segments():
    """Each run of the rule has the dummy: that from the empty memory, that on the identity, and the whole."""
    told = tuple(Told(B, int(rank > 0), 0, T, 0) for rank in range(3))
    inputs, probe = drawn(state=None), Probe()
    run = lambda x: lineate.Attended(torch.zeros_like(x.v), torch.zeros(B, HV, K, probe(x) and x.v.shape[3]))  # noqa: E731
    run_rule(run, inputs, Segment(Second(), None, (0, T), told), corrects=True)
    assert len(probe.calls) == 3 and all(torch.equal(x.dummy, inputs.dummy) for x in probe.calls)
    probe.calls.clear()
    run_rule(probe, inputs, None, corrects=False)
    run_rule(probe, inputs.at(slice(0, 8)), bounds((3, 5)), corrects=False)
    assert [x.dummy.shape[1] for x in probe.calls] == [T, 8]


def test_pictures_refuse_it(monkeypatch):
    kind = SimpleNamespace(trace=lambda mixer, x: drawn(1, state=None), rule=GATED_DELTA.name, label="own", letter="Z")
    monkeypatch.setattr(subject, "kind_of", lambda letter: SimpleNamespace(name="own", first=None, **vars(kind)))
    model = SimpleNamespace(config=SimpleNamespace(letters="Z"), layers=[SimpleNamespace(mixer=None)])
    with pytest.raises(ValueError, match="dummy must be None for a picture, which does not read it"):
        subject.trace_layer(model, 0, subject.Given(torch.zeros(1, T, 8)))


def test_kernels_refuse_it():
    pytest.importorskip("triton")
    call, decode, token = (
        importlib.import_module(f"lineate.kernels.{name}") for name in ("call", "portable.decode", "layers.token")
    )
    inputs, options = drawn(A_log=torch.zeros(HV)), Options(GATED_LINEAR, 1.0)
    with pytest.raises(ValueError, match="dummy must be None for the stages"):
        call.make_call(inputs, options)
    with pytest.raises(ValueError, match="dummy must be None for the decoding kernel"):
        decode.decode(inputs, Slots(), options)
    with pytest.raises(ValueError, match="dummy must be None for the step of a mixer"):
        token.mix(inputs, token.Token(True, "speed", 1.0), (inputs.v, inputs.v, 1e-6, True))
