"""Decoding with the rules of the general row: every write of a token in one launch, the state updated in place.

The oracle is the recurrent form in float64 on the same numbers; the budget is that of general_cases for chunks of one
token.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.call import Inputs, Request, Slots
from lineate.dispatch import Facts, resolve
from lineate.kernels import DECODE_WRITES
from lineate.ops.decode_calls import DecodeRequest
from lineate.ops.decoding import decode_inputs
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT, Rule, activate
from tests.support.cases import Result, Shape, assert_same_bits, bounds, oracle, same_bits
from tests.support.general_cases import CASES, IDS, assert_in_budget, call, drawn, narrow, row
from tests.support.paths import BF16, GPU_ONLY, INTERPRETER, ONE_EACH, PATHS, Path
from tests.support.torch_calls import CapturedOps, check_ops

pytestmark = pytest.mark.usefixtures("guarded_memory")

all_cases = pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
ONE = [(GATED_DELTA_2, "channel", 1), (DIAGONAL_PLUS_LOW_RANK, "channel", 1), (GATED_DELTA_PRODUCT, "head", 2)]
each_rule = pytest.mark.parametrize(("rule", "decay", "n"), ONE, ids=[rule.name for rule, *_ in ONE])
SHAPE = Shape(2, 5, 2, 4, 6, 5)
MODEL = Shape(3, 4, 2, 4, 128, 128)
NO_SLOTS = Slots()
ROUNDING = 2**-8
"""How far rounding to the nearest bfloat16 moves a number at most, relative to it."""


def given(rule: Rule, decay: str, n: int, path: Path, shape: Shape = SHAPE) -> dict[str, Tensor]:
    return narrow(drawn(rule, decay, n, shape=shape), path.dtype)


def run(
    rule: Rule, inputs: dict[str, Tensor], path: Path, where: Slots = NO_SLOTS, backend: str = "triton",
    **options: object,
) -> Result:  # fmt: skip
    """Decode with copies of the inputs, and return the output and the state or the pool on the CPU."""
    tensors = {name: x.to(path.device, copy=True) for name, x in inputs.items()}
    places = Slots(*(None if x is None else x.to(path.device) for x in where))
    address = tensors["state"].data_ptr()
    output = decode_inputs(rule, Inputs(**tensors), places, DecodeRequest(backend=backend, **options))
    assert tensors["state"].data_ptr() == address and output.dtype == inputs["v"].dtype
    return Result(output.cpu(), tensors["state"].cpu(), {})


def check(rule: Rule, inputs: dict[str, Tensor], path: Path, what: object = "", **options: object) -> Result:
    """Compare with the oracle; exp and rsqrt of a GPU are approximations to about 2^-22."""
    got = run(rule, inputs, path, **options)
    writes = inputs["q"].shape[1] * (inputs["k"].shape[2] if rule.writes else 1)
    native = 0.0 if path.device == "cpu" else writes * 2**-22
    assert_in_budget(rule, inputs, got, 1, what, native, **options)
    return got


@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_tokens(rule, decay, n, path):
    """Resets of -50 and -inf and decays of 1e-12 are among the inputs; hv > h, and no size is a power of two."""
    for t in (1, 2, 5):
        inputs = given(rule, decay, n, path, SHAPE._replace(t=t))
        got = check(rule, inputs, path, t)
        if path == INTERPRETER:
            assert_in_budget(rule, inputs, run(rule, inputs, path, backend="torch"), 1, ("torch", t))
        assert got.output.isfinite().all()


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("special", ["resets", "zeros", "ones", "near 2", "weak", "empty"])
@all_cases
def test_special_inputs(rule, decay, n, special, path):
    """Consecutive resets, gates of 0, of 1, and near 2 with keys of unit length, and decays that almost vanish."""
    inputs = given(rule, decay, n, path)
    gates = {"zeros": 0.0, "ones": 1.0, "near 2": 1.99}
    for name in {"erase", "write", "beta", "direction"} & set(inputs) if special in gates else ():
        if name == "direction":
            inputs[name] = gates[special] * inputs["probe"]
        else:
            inputs[name].fill_(min(gates[special], 1.0) if name == "write" else gates[special])
    if decay != "none" and special == "resets":
        inputs["log_decay"][:, 1:3] = -torch.inf
        inputs["log_decay"][:, 3] = -50.0
    if decay != "none" and special == "weak":
        inputs["log_decay"].fill_(-1e-12)
    if special == "empty":
        inputs["state"].zero_()
    check(rule, inputs, path, special)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_a_reset_forgets_everything(path):
    """After exp(-inf) no bit of the result depends on the state before."""
    for rule, decay, n in (x for x in CASES if x[1] != "none"):
        inputs = given(rule, decay, n, path, SHAPE._replace(t=2))
        inputs["log_decay"][:, 0] = -torch.inf
        other = {**inputs, "state": 1e4 * inputs["state"]}
        assert_same_bits(run(rule, other, path), run(rule, inputs, path), rule.name)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@each_rule
def test_sizes(rule, decay, n, path):
    """k and v are more than one block of columns, no powers of two, or whole tiles; 7 value heads share a key head."""
    for k, v in ((2, 3), (33, 66), (64, 32), (8, 100), (3, 256), (256, 3)):
        check(rule, given(rule, decay, n, path, Shape(1, 2, 1, 1, k, v)), path, (k, v))
    check(rule, given(rule, decay, n, path, Shape(1, 2, 1, 7, 4, 3)), path)


@pytest.mark.parametrize("path", ONE_EACH)
def test_many_writes(path):
    check(GATED_DELTA_PRODUCT, given(GATED_DELTA_PRODUCT, "head", DECODE_WRITES, path), path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_scale_and_normalization(rule, decay, n, path):
    inputs = given(rule, decay, n, path)
    inputs["q"], inputs["k"] = 3 * inputs["q"], 0.2 * inputs["k"]
    inputs["k"][:, 1] = 0  # a key without a direction
    check(rule, inputs, path, normalize_qk=True)
    got, plain = (run(rule, inputs, path, normalize_qk=True, scale=x).output for x in (-2.0, 1.0))
    assert (got + 2 * plain).abs().max() <= 0.02 * plain.abs().max()


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("bound", [None, -5.0], ids=["unbounded", "bounded"])
@pytest.mark.parametrize(("rule", "decay", "n"), [x for x in CASES if x[1] != "none"], ids=lambda x: str(x))
def test_raw_gates(rule, decay, n, bound, path):
    """The kernel makes gates as rule.activate does; decays per channel have a bias per channel, or one a head."""
    inputs = given(rule, decay, n, path, SHAPE._replace(t=2))
    generator = torch.Generator().manual_seed(1)
    raw = {"log_decay": 4 * torch.randn(inputs["log_decay"].shape, generator=generator)}
    raw["log_decay"].flatten()[:2] = torch.tensor([-torch.inf, 100.0])
    options: dict[str, object] = {"raw_gates": "log_decay", "lower_bound": bound}
    if rule is GATED_DELTA_PRODUCT:
        raw["beta"] = 3 * torch.randn(inputs["beta"].shape, generator=generator)
        options |= {"raw_gates": True, "beta_scale": 2.0}
    raw = narrow(raw, path.dtype)
    A_log, biases = torch.randn(4, generator=generator), [torch.randn(4, generator=generator)]
    if decay == "channel":
        biases.append(torch.randn(4, 6, generator=generator))
    for dt_bias in biases:
        wide = {name: x.double() for name, x in raw.items()}
        log_decay, beta = activate(
            wide["log_decay"], wide.get("beta"), A_log.double(), dt_bias.double(), 2.0, torch.float64, bound
        )  # fmt: skip
        ready = inputs | {"log_decay": log_decay} | ({"beta": beta} if "beta" in raw else {})
        expected = oracle(row(rule, decay), ready, only=())
        got = run(rule, inputs | raw | {"A_log": A_log, "dt_bias": dt_bias}, path, **options)
        for x, y in zip(got[:2], expected[:2], strict=True):
            limit = 1e-5 + (torch.finfo(x.dtype).eps if x.dtype != torch.float32 else 0.0)
            assert (x.double() - y).norm() <= limit * y.norm()


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_same_bits_however_split(rule, decay, n, path):
    """Tokens one by one, and rows one by one, give the same bits as all at once."""
    inputs = given(rule, decay, n, path, SHAPE._replace(t=3))
    whole = run(rule, inputs, path)
    state, outputs = inputs["state"], []
    for i in range(3):
        token = {name: x[:, i : i + 1] for name, x in inputs.items() if name != "state"}
        output, state, _ = run(rule, {**token, "state": state}, path)
        outputs.append(output)
    assert_same_bits(Result(torch.cat(outputs, 1), state, {}), whole)
    rows = [run(rule, {name: x[i : i + 1] for name, x in inputs.items()}, path) for i in range(2)]
    assert_same_bits(Result(torch.cat([x.output for x in rows]), torch.cat([x.state for x in rows]), {}), whole)


def alone(
    rule: Rule, inputs: dict[str, Tensor], path: Path, row: int, tokens: slice, state: Tensor
) -> Result:  # fmt: skip
    """Run one row's tokens from one state `hv k v`."""
    own = {name: x[row : row + 1, tokens] for name, x in inputs.items() if name != "state"}
    return run(rule, {**own, "state": state[None]}, path)


def pool_of(slots: int, shape: Shape) -> Tensor:
    return torch.randn(slots, shape.hv, shape.k, shape.v, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@each_rule
def test_slots(rule, decay, n, integer, path):
    """Rows are in any order in a pool, two of them idle; nothing else in it changes, not even NaN."""
    shape = SHAPE._replace(b=4, t=2)
    inputs = given(rule, decay, n, path, shape) | {"state": pool_of(7, shape)}
    inputs["state"][[0, 4]] = torch.nan
    slots = torch.tensor([5, -1, 2, -7], dtype=integer)
    got = run(rule, inputs, path, Slots(slots))
    kept = [0, 1, 3, 4, 6]
    assert torch.equal(got.state[kept].view(torch.int32), inputs["state"][kept].view(torch.int32))
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert not got.output[i].any()
            continue
        own = alone(rule, inputs, path, i, slice(None), inputs["state"][slot])
        assert_same_bits(Result(got.output[i : i + 1], got.state[slot : slot + 1], {}), own)


@pytest.mark.parametrize("path", PATHS)
@each_rule
def test_packed_sequences_and_a_slot_for_each_token(rule, decay, n, path):
    """Sequences of 2, 0, 3 and 1 tokens start from slots, one is idle; the state after each token is kept."""
    shape = SHAPE._replace(b=1, t=6)
    inputs = given(rule, decay, n, path, shape) | {"state": pool_of(12, shape)}
    inputs["cu_seqlens"] = bounds((2, 0, 3, 1))
    starts, each = [0, 4, 6, -1], torch.tensor([[1, 2, -1], [3, 5, 7], [8, 11, -1], [9, -1, 10]])
    got = run(rule, inputs, path, Slots(each, torch.tensor(starts)))
    texts = {name: x for name, x in inputs.items() if name != "cu_seqlens"}
    for text, (first, end) in enumerate(((0, 2), (2, 2), (2, 5), (5, 6))):
        state = inputs["state"][starts[text]]
        for i in range(first, end):
            if starts[text] < 0:
                assert not got.output[0, i].any()
                continue
            own = alone(rule, texts, path, 0, slice(i, i + 1), state)
            state = own.state[0]
            assert same_bits(got.output[:, i : i + 1], own.output)
            if (slot := int(each[text, i - first])) >= 0:
                assert same_bits(got.state[slot], state)
    kept = [0, 3, 4, 5, 6, 7, 9, 10]
    assert same_bits(got.state[kept], inputs["state"][kept])


@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_a_slot_outside_of_the_pool(rule, decay, n, path):
    """Values are not checked on a GPU: a slot that does not exist gives NaN, and is not written."""
    pipeline = importlib.import_module("lineate.kernels.pipeline")
    options = importlib.import_module("lineate.call").Options(rule, 1.0)
    inputs = given(rule, decay, n, path, SHAPE._replace(b=3, t=1)) | {"state": pool_of(4, SHAPE)}
    tensors = {name: x.to(path.device, copy=True) for name, x in inputs.items()}
    output = pipeline.decode(Inputs(**tensors), Slots(torch.tensor([4, 1, 2], device=path.device)), options)
    assert output[0].isnan().all() and not output[1:].isnan().any()
    assert same_bits(tensors["state"][[0, 3]].cpu(), inputs["state"][[0, 3]])


@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_fewer_slots_than_tokens(rule, decay, n, path):
    """Bounds are not checked on a GPU: a row with more tokens than slots keeps the states of its first tokens."""
    pipeline = importlib.import_module("lineate.kernels.pipeline")
    options = importlib.import_module("lineate.call").Options(rule, 1.0)
    inputs = given(rule, decay, n, path, SHAPE._replace(t=3)) | {"state": pool_of(7, SHAPE)}
    tensors = {name: x.to(path.device, copy=True) for name, x in inputs.items()}
    places = [torch.tensor(x, device=path.device) for x in ([[1, 2], [4, 5]], [0, 3])]
    pipeline.decode(Inputs(**tensors), Slots(*places), options)
    first = {name: x if name == "state" else x[:, :2] for name, x in inputs.items()}
    two = run(rule, first, path, Slots(*places), scale=1.0)
    assert same_bits(tensors["state"].cpu(), two.state)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@all_cases
def test_states_in_bfloat16(rule, decay, n, path):
    """The output is that of the float32 state; the new state is rounded to the nearest, or by the given seeds."""
    inputs = given(rule, decay, n, path, SHAPE._replace(t=1))
    inputs["state"] = inputs["state"].bfloat16()
    got, wide = run(rule, inputs, path), run(rule, {**inputs, "state": inputs["state"].float()}, path)
    assert got.state.dtype == torch.bfloat16
    if path == INTERPRETER:
        assert same_bits(got.output, wide.output) and same_bits(got.state, wide.state.bfloat16())
    else:
        torch.testing.assert_close(got.output, wide.output, rtol=2**-7, atol=1e-2)
        assert ((got.state.float() - wide.state).abs() <= 1.01 * ROUNDING * wide.state.abs() + 1e-5).all()
    seeds = torch.tensor([5, 2**40 + 9])
    drawn_once, drawn_again, torchs = (
        run(rule, inputs, path, Slots(seeds=seeds), backend, rounding="stochastic").state
        for backend in ("triton", "triton", "torch")
    )
    assert same_bits(drawn_once, drawn_again)
    assert ((drawn_once.float() - wide.state).abs() <= 2.01 * ROUNDING * wide.state.abs() + 1e-5).all()
    assert (drawn_once != torchs).float().mean() < 0.02  # where float32 sums differ, a number may be rounded elsewhere


@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_each_token_has_random_numbers_of_its_own(rule, decay, n, path):
    """Token i of a row is rounded as one token with the seed of the row + i."""
    inputs = given(rule, decay, n, path, SHAPE._replace(t=3))
    inputs["state"], seeds = inputs["state"].bfloat16(), torch.tensor([5, 2**40 + 9])
    whole = run(rule, inputs, path, Slots(seeds=seeds), rounding="stochastic")
    state = inputs["state"]
    for i in range(3):
        token = {name: x[:, i : i + 1] for name, x in inputs.items() if name != "state"} | {"state": state}
        state = run(rule, token, path, Slots(seeds=seeds + i), rounding="stochastic").state
    assert same_bits(state, whole.state)


@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_columns_of_wider_tensors(rule, decay, n, path):
    """Sizes are multiples of 8, but one tensor at a time has strides that are not, and is not aligned."""
    inputs = given(rule, decay, n, path, Shape(2, 2, 1, 2, 8, 16))
    tensors = {name: x.to(path.device) for name, x in inputs.items()}
    for name in set(inputs) - {"state"}:
        wide = F.pad(tensors[name], (1, 2), value=torch.nan)
        state = tensors["state"].clone()
        views = tensors | {name: wide[..., 1:-2], "state": state}
        output = decode_inputs(rule, Inputs(**views), Slots(), DecodeRequest(backend="triton"))
        native = 0.0 if path.device == "cpu" else 2 * n * 2**-22
        assert_in_budget(rule, inputs, Result(output.cpu(), state.cpu(), {}), 1, name, native)


@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_views_are_read_where_they_lie(rule, decay, n, path):
    """Tensors with other strides, and a state that is one layer's among others, give the same bits."""
    inputs = given(rule, decay, n, path, SHAPE._replace(t=2))
    plain = run(rule, inputs, path)
    tensors = {name: x.to(path.device) for name, x in inputs.items()}
    layers = torch.full((2, 3, *inputs["state"].shape[1:]), torch.nan, device=path.device)
    for turn in ("tokens first", "channels last"):
        layers[:, 1] = tensors["state"]
        views = {
            name: x.transpose(0, 1).contiguous().transpose(0, 1) if turn == "tokens first" else x.mT.contiguous().mT
            for name, x in tensors.items() if name != "state"
        }  # fmt: skip
        output = decode_inputs(
            rule, Inputs(**views, state=layers[:, 1]), Slots(), DecodeRequest(backend="triton")
        )  # fmt: skip
        assert_same_bits(Result(output.cpu(), layers[:, 1].cpu(), {}), plain, turn)
        assert layers[:, ::2].isnan().all()


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@each_rule
def test_the_recurrent_form(rule, decay, n, path):
    """The op runs the same launch on a copy of the state, for rows and packed sequences, without gradients."""
    inputs = given(rule, decay, n, path)
    tensors = {name: x.to(path.device) for name, x in inputs.items()}
    packed = {name: x[:1] for name, x in tensors.items() if name != "state"}
    packed |= {"state": tensors["state"], "cu_seqlens": bounds((2, 3)).to(path.device)}
    with torch.no_grad(), CapturedOps() as captured:
        found = call(rule, tensors, "recurrent", backend="triton")
        both = call(rule, packed, "recurrent", backend="triton")
    check_ops(captured.calls)
    assert [op._opname for op, *_ in captured.calls] == ["recurrent_general_triton"] * 2
    assert_same_bits(Result(found.output.cpu(), found.state.cpu(), {}), run(rule, inputs, path))
    assert same_bits(both.output[:, :2], call(rule, _first(tensors, 2), "recurrent", backend="triton").output)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    with pytest.raises(ValueError, match="the triton recurrent form has no gradients"):
        call(rule, leaves, "recurrent", backend="triton")


def _first(tensors: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    return {name: x[:1] if name == "state" else x[:1, :t] for name, x in tensors.items()}


def test_plans():
    for rule in (GATED_DELTA_2, GATED_DELTA_PRODUCT, DIAGONAL_PLUS_LOW_RANK):
        facts = Facts(1, 128, given=("q", "k", "v", "state", *rule.gates), device="cuda", dtype=torch.bfloat16)
        plan = resolve(rule, facts, Request())
        assert (plan.form, plan.backend, plan.chunk_size) == ("recurrent", "triton", 1)
        assert "decoding" in plan.reason and "kernels made for a GPU" in plan.reason
    many = Facts(1, 128, device="cuda", dtype=torch.bfloat16, writes=DECODE_WRITES + 1)
    assert resolve(GATED_DELTA_PRODUCT, many, Request()).backend == "torch"
    with pytest.raises(ValueError, match="the triton recurrent form takes up to 8 writes a token, got 9"):
        resolve(GATED_DELTA_PRODUCT, many, Request(backend="triton", form="recurrent"))


@pytest.mark.parametrize("path", [INTERPRETER], ids=["interpreter"])
def test_refused_calls(path, monkeypatch):
    product = given(GATED_DELTA_PRODUCT, "head", DECODE_WRITES + 1, path, SHAPE._replace(t=1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="it takes up to 8 writes a token, got 9; use backend='torch'"):
        run(GATED_DELTA_PRODUCT, product, path)
    run(GATED_DELTA_PRODUCT, product, path, backend="auto")
    wide = drawn(GATED_DELTA_2, "channel", 1, shape=SHAPE._replace(t=1))
    with pytest.raises(ValueError, match="it computes in float32, got float64 inputs; use backend='torch'"):
        run(GATED_DELTA_2, wide, path)


@pytest.mark.parametrize("path", GPU_ONLY)
@all_cases
def test_model_sizes(rule, decay, n, path):
    for shape in (MODEL._replace(t=1), MODEL, Shape(2, 2, 2, 2, 64, 128), Shape(2, 2, 1, 2, 256, 256)):
        inputs = given(rule, decay, n, path, shape)
        check(rule, inputs, path, shape)
        assert_same_bits(run(rule, inputs, path, backend="auto"), run(rule, inputs, path))
        gates = {name: x.float() for name, x in inputs.items() if name not in ("q", "k", "v")}
        check(rule, inputs | gates, path, (shape, "float32 gates"))
        check(rule, inputs, path, (shape, "normalized"), normalize_qk=True)


@pytest.mark.gpu
@each_rule
def test_in_a_cuda_graph(rule, decay, n):
    """A graph captured once and replayed with other tokens and other slots has the bits of eager calls."""
    shape = MODEL._replace(b=4, t=1)
    inputs = {name: x.cuda() for name, x in given(rule, decay, n, BF16, shape).items()}
    inputs["state"] = pool_of(9, shape).cuda()
    first, slots = inputs["state"].clone(), torch.tensor([5, -1, 2, 0], device="cuda")

    def call_on(tensors: dict[str, Tensor]) -> Tensor:
        return decode_inputs(rule, Inputs(**tensors), Slots(slots), DecodeRequest())

    call_on(inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call_on(inputs)
    eager = {**{name: x.clone() for name, x in inputs.items()}, "state": first.clone()}
    inputs["state"].copy_(first)
    for turn in range(3):
        graph.replay()
        assert same_bits(output, call_on(eager)), turn
        assert same_bits(inputs["state"], eager["state"])
        for name in set(inputs) - {"state"}:
            inputs[name].copy_(inputs[name].roll(1, 0))
            eager[name].copy_(inputs[name])
        slots.copy_(slots.roll(1))


@pytest.mark.gpu
@each_rule
def test_repeated_calls_are_replayed(rule, decay, n):
    tape = importlib.import_module("lineate.kernels.tape")
    inputs = given(rule, decay, n, BF16, MODEL)
    tape.forget_tapes()
    first = run(rule, inputs, BF16)
    for _ in range(3):
        assert_same_bits(run(rule, inputs, BF16), first)
    assert all(x is not None for x in tape.tapes().values())


@pytest.mark.gpu
def test_explain():
    inputs = {name: x.cuda() for name, x in given(GATED_DELTA_2, "channel", 1, BF16, MODEL._replace(t=1)).items()}
    plan = lineate.explain(**inputs)
    assert (plan.rule, plan.form, plan.backend) == ("gated_delta_rule_2", "recurrent", "triton")
