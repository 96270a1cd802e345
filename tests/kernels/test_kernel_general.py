"""The kernels of the general row: outputs, states and all gradients, packed, in segments and slices, and their bits."""

import importlib

import pytest
import torch
from torch import Tensor

from lineate.call import Inputs, Request
from lineate.dispatch import Facts, check_and_resolve, resolve
from lineate.kernels import GENERAL_RULES
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT, Rule
from tests.support import general_half
from tests.support.cases import Result, Shape, assert_same_bits, assert_within, bounds, errors, oracle, same_bits
from tests.support.general_cases import CASES as ALL_CASES
from tests.support.general_cases import assert_in_budget, call, drawn, narrow, row
from tests.support.paths import BF16, GPU, GPU_ONLY, INTERPRETER, ONE_EACH, PATHS, Path, param
from tests.support.rule_kernels import CHUNK, assert_like_the_inputs, differentiate, loss_of, native_term, row_results
from tests.support.torch_calls import CapturedOps, check_ops

CASES = [case for case in ALL_CASES if case[0] in GENERAL_RULES and case[2] < 3]
IDS = [f"{rule.name}-{decay}-{n}" for rule, decay, n in CASES]
all_cases = pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
LEAN = Shape(1, 70, 1, 1, 12, 20)
SHORT = Shape(2, 20, 1, 2, 5, 9)
MODEL = Shape(1, 130, 2, 4, 128, 128)


def tokens(shape: Shape, n: int) -> Shape:
    """Return the shape with as many writes as it has tokens, for the interpreter, where every chunk is slow."""
    return shape._replace(t=-(-shape.t // n))


def sized(path: Path, n: int, small: Shape = LEAN, model: Shape = MODEL) -> Shape:
    return tokens(small, n) if path.device == "cpu" else model


def given(rule: Rule, decay: str, n: int, path: Path, shape: Shape) -> dict[str, Tensor]:
    return narrow(drawn(rule, decay, n, shape=shape), path.dtype)


def run(rule: Rule, decay: str, inputs: dict[str, Tensor], path: Path, **options: object) -> Result:
    return differentiate(row(rule, decay).op, inputs, path, form="chunkwise", **options)


def check(
    rule: Rule, decay: str, inputs: dict[str, Tensor], path: Path, what: object = "", **options: object
) -> Result:  # fmt: skip
    """Compare output, final state and all gradients with the float64 recurrence, on exactly the same numbers."""
    got, n = run(rule, decay, inputs, path, **options), inputs["k"].shape[2] if rule.writes else 1
    several = inputs | {"v": inputs["v"][:, :, 0]} if rule.writes else inputs
    assert_like_the_inputs(got._replace(grads={}), several)
    assert all((x.dtype, x.shape) == (inputs[name].dtype, inputs[name].shape) for name, x in got.grads.items())
    if path.dtype == torch.float32:
        native = native_term(path, inputs["q"].shape[1] * n)
        assert_in_budget(rule, inputs, got, -(-CHUNK // n), what, native, **options)
    else:
        expected = oracle(row(rule, decay), inputs, **options)
        assert_within(errors(got, expected), general_half.budget(rule, inputs, expected, **options), what)
    return got


def shapes() -> list[object]:
    cpu = [Shape(2, 1, 1, 3, 7, 4), Shape(1, 65, 1, 2, 12, 20), Shape(1, 197, 1, 1, 16, 5)]
    gpu = [Shape(2, t, 1, 2, 48, 40) for t in (1, 63, 64, 65, 197)] + [MODEL, Shape(2, 130, 1, 2, 64, 64)]
    gpu += [Shape(1, 590, 1, 2, 128, 128), Shape(1, 330, 2, 2, 64, 128)]  # walks with all of their buffers in turns
    gpu += [Shape(1, 65, 1, 1, 256, 256), Shape(1, 65, 2, 2, 33, 66)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("path", "shape"), shapes())
@all_cases
def test_shapes(rule, decay, n, path, shape):
    """Decays of 1e-12 and resets of -50 and -inf are among the inputs, and erase reaches from 0 to 2."""
    shape = tokens(shape, n) if path.device == "cpu" else shape
    check(rule, decay, given(rule, decay, n, path, shape), path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_normalize_qk(rule, decay, n, path):
    """q and k have any length, and one key is zero: it has no direction, but it has a gradient."""
    inputs = given(rule, decay, n, path, sized(path, n, SHORT))
    inputs["q"], inputs["k"] = inputs["q"] * 4, inputs["k"] * 4
    inputs["k"][:, 7] = 0
    check(rule, decay, inputs, path, normalize_qk=True)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("special", ["resets", "near 2", "weak"])
@all_cases
def test_special_inputs(rule, decay, n, special, path):
    """Resets in a row, gates near 2 with keys of unit length (or repeated probes), and decays that almost vanish."""
    inputs = given(rule, decay, n, path, sized(path, n))
    if special == "resets" and decay != "none":
        inputs["log_decay"][:, 3::5] = -torch.inf
        inputs["log_decay"][:, 8:10] = -50.0
        inputs["log_decay"][:, 5::7, ..., 0] = -torch.inf
    if special == "near 2":
        for name in {"erase", "beta"} & set(inputs):
            inputs[name].fill_(1.99)
        if "probe" in inputs:
            inputs["probe"][:, 1::2] = inputs["probe"][:, : inputs["probe"].shape[1] // 2 * 2 : 2]
            inputs["direction"] = 1.99 * inputs["probe"]
    if special == "weak" and decay != "none":
        inputs["log_decay"].fill_(-1e-12)
    check(rule, decay, inputs, path, special)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_packed(rule, decay, n, path):
    """Packed sequences are as exact as rows, and each has the bits of the same sequence alone."""
    lengths = (0, 1, 40, 0, 67) if path.device == "cpu" else (0, 1, 64, 0, 128, 70, 0)
    shape = sized(path, 1)._replace(b=1, t=sum(lengths))
    inputs = given(rule, decay, n, path, shape)
    inputs["state"] = torch.randn(len(lengths), *inputs["state"].shape[1:], generator=torch.Generator().manual_seed(4))
    got = check(rule, decay, inputs, path, cu_seqlens=bounds(lengths))
    start = 0
    for i, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if not length:
            assert same_bits(got.state[i], inputs["state"][i])
            continue
        text = {name: x[i : i + 1] if name == "state" else x[:, part] for name, x in inputs.items()}
        with torch.no_grad():
            tensors = {name: x.to(path.device) for name, x in text.items()}
            output, state = call(rule, tensors, "chunkwise", backend="triton")
        assert same_bits(got.output[:, part], output.cpu()) and same_bits(got.state[i], state[0].cpu())


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(
    ("rule", "decay", "n"),
    [(GATED_DELTA_2, "channel", 1), (DIAGONAL_PLUS_LOW_RANK, "head", 1), (GATED_DELTA_PRODUCT, "head", 2)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_views_of_one_projection(rule, decay, n, path):
    """q, k and v stay where a fused projection left them; its gradient is their gradients next to each other."""
    inputs = given(rule, decay, n, path, sized(path, n, SHORT._replace(hv=2, k=16, v=24), MODEL._replace(b=2)))
    plain = run(rule, decay, inputs, path)
    widths = [inputs[name].flatten(2).shape[2] for name in "qkv"]

    def take_apart(x: Tensor) -> dict[str, Tensor]:
        parts = zip("qkv", x.split(widths, -1), strict=True)
        return {name: part.view(inputs[name].shape) for name, part in parts}

    projection = torch.cat([inputs[name].flatten(2) for name in "qkv"], -1).to(path.device).requires_grad_()
    rest = {name: x.to(path.device).requires_grad_() for name, x in inputs.items() if name not in "qkv"}
    output, state = row(rule, decay).op(**take_apart(projection), **rest, form="chunkwise", backend="triton")
    dprojection, *grads = torch.autograd.grad(loss_of(output, state), [projection, *rest.values()])
    found = {name: x.cpu() for name, x in zip(rest, grads, strict=True)} | take_apart(dprojection.cpu())
    assert_same_bits(Result(output.detach().cpu(), state.detach().cpu(), found), plain)


@pytest.mark.parametrize("path", GPU_ONLY)
@all_cases
def test_tokens_outside_of_all_sequences(rule, decay, n, path):
    """Their outputs and gradients are 0. (On a CPU such bounds are refused.)"""
    inputs = given(rule, decay, n, path, MODEL)
    inputs["state"] = inputs["state"].expand(2, -1, -1, -1).clone()
    got = run(rule, decay, inputs, path, cu_seqlens=bounds((0, 70)) + 3)
    for x in (got.output, *(x for name, x in got.grads.items() if name != "state")):
        assert x.isfinite().all() and not x[:, :3].any() and not x[:, 73:].any() and x[:, 3:73].any()


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_a_call_that_continues(rule, decay, n, path):
    """The output and the state after a split anywhere are those of the whole call."""
    inputs = given(rule, decay, n, path, sized(path, n))
    tensors = {name: x.to(path.device) for name, x in inputs.items()}
    t = inputs["q"].shape[1]
    with torch.no_grad():
        whole = call(rule, tensors, "chunkwise", backend="triton")
        for split in (1, t - 3):
            first = {name: x if name == "state" else x[:, :split] for name, x in tensors.items()}
            one = call(rule, first, "chunkwise", backend="triton")
            rest = {name: one.state if name == "state" else x[:, split:] for name, x in tensors.items()}
            two = call(rule, rest, "chunkwise", backend="triton")
            both = torch.cat((one.output, two.output), 1)
            limit = 2e-6 if path == INTERPRETER else 2e-5 if path.dtype == torch.float32 else 0.05
            assert (both - whole.output).double().norm() <= limit * whole.output.double().norm()
            assert (two.state - whole.state).norm() <= limit * whole.state.norm()


@pytest.fixture
def cuts(monkeypatch):
    """Return a function that sets how walks are cut, and how many bytes of states a slice may have."""
    pipeline = pytest.importorskip("lineate.kernels.pipeline")
    tape = importlib.import_module("lineate.kernels.tape")
    Cutting = importlib.import_module("lineate.kernels.segments").Cutting

    def set_cuts(cutting: tuple[int, int, int] | None = None, slice_bytes: int = 2**28) -> None:
        tape.forget_tapes()
        if cutting is not None:
            for way in ("forward", "backward"):
                monkeypatch.setitem(pipeline.CUTS, way, lambda *_: Cutting(*cutting))
        monkeypatch.setattr(pipeline, "SLICE_BYTES", slice_bytes)

    yield set_cuts
    tape.forget_tapes()


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@all_cases
def test_segments(rule, decay, n, path, cuts):
    """Two segments of one chunk, and one of two, give the same results within the same budget."""
    cuts((3, 3, 1))
    shape = sized(path, n)._replace(t=-(-(3 * CHUNK + 5) // n))
    check(rule, decay, given(rule, decay, n, path, shape), path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@all_cases
def test_slices_of_the_backward_change_no_bit(rule, decay, n, path, cuts):
    for b in (1, 2):
        shape = sized(path, n)._replace(b=b, t=-(-(130 if b == 1 else 20) // n))
        inputs = given(rule, decay, n, path, shape)
        cuts()
        expected = run(rule, decay, inputs, path)
        cuts(slice_bytes=1)
        assert_same_bits(run(rule, decay, inputs, path), expected, b)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", [*ONE_EACH, *(param(x) for x in GPU if x != BF16)])
@all_cases
def test_bits(rule, decay, n, path):
    """Running twice gives the same bits, a row has the same bits in any company, and the future changes none."""
    shape = sized(path, n, Shape(2, 70, 1, 2, 12, 20))._replace(b=2)
    inputs = given(rule, decay, n, path, shape)
    case = row(rule, decay)
    together = row_results(case, inputs, path, [0, 1])
    for _ in range(1 if path.device == "cpu" else 3):
        again = row_results(case, inputs, path, [1, 0])
        assert_same_bits(again[1], together[0])
        assert_same_bits(again[0], together[1])
    position = 2 * shape.t // 3
    results = []
    for changes in (False, True):
        changed = {name: x.clone() for name, x in inputs.items()}
        for name, x in changed.items():
            if changes and name != "state":
                x[:, position:] = x[:, position:].roll(1, 0)
        leaves = {name: x.to(path.device).requires_grad_() for name, x in changed.items()}
        output = call(rule, leaves, "chunkwise", backend="triton").output[:, :position]
        grads = torch.autograd.grad(loss_of(output, torch.zeros(1)), list(leaves.values()))
        past = {name: x.cpu()[:, :position] for name, x in zip(leaves, grads, strict=True) if name != "state"}
        results.append(Result(output.detach().cpu(), torch.zeros(()), past))
    assert_same_bits(*results)


@pytest.mark.parametrize("path", [param(BF16)])
@all_cases
def test_rows_that_fill_the_device(rule, decay, n, path):
    """A row has the same bits alone and among others, where each program of a launch computes several chunks."""
    inputs = given(rule, decay, n, path, Shape(4, 330, 8, 16, 128, 128))
    case = row(rule, decay)
    together = row_results(case, inputs, path, [0, 1, 2, 3])
    for i in (0, 3):
        assert_same_bits(row_results(case, inputs, path, [i])[0], together[i])


@pytest.mark.parametrize("path", GPU_ONLY)
@all_cases
def test_repeated_calls_are_replayed(rule, decay, n, path):
    """The third call repeats recorded launches with other addresses, and has the bits of the first."""
    tape = importlib.import_module("lineate.kernels.tape")
    inputs = given(rule, decay, n, path, MODEL)
    tape.forget_tapes()
    first = run(rule, decay, inputs, path)
    for _ in range(3):
        assert_same_bits(run(rule, decay, inputs, path), first)
    assert all(x is not None for x in tape.tapes().values())


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@all_cases
def test_ops_of_torch(rule, decay, n, packed, path):
    """Schemas, fake tensors and autograd of both ops agree with what runs."""
    inputs = given(rule, decay, n, path, sized(path, n, Shape(1, 6, 1, 2, 5, 9)))
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    ends = bounds((inputs["q"].shape[1],)).to(path.device) if packed else None
    with CapturedOps() as captured:
        output, state = call(rule, leaves | {"cu_seqlens": ends}, "chunkwise", backend="triton")
        torch.autograd.grad(output.square().sum() + state.square().sum(), list(leaves.values()))
    assert [op._opname for op, *_ in captured.calls] == [
        "chunkwise_general_triton", "chunkwise_general_triton_backward"
    ]  # fmt: skip
    check_ops(captured.calls)


@pytest.mark.parametrize("path", ONE_EACH)
def test_gates_of_another_dtype(path):
    inputs = given(GATED_DELTA_2, "channel", 1, path, sized(path, 1, SHORT))
    for dtype in (torch.float32, torch.float64):
        for name in ("log_decay", "erase", "write"):
            inputs[name] = inputs[name].to(dtype)
        got = run(GATED_DELTA_2, "channel", inputs, path)
        assert_like_the_inputs(got, inputs)
        check(GATED_DELTA_2, "channel", inputs, path, dtype)


def test_what_the_backend_takes():
    facts = Facts(100, 128, device="cuda", dtype=torch.bfloat16, needs_grad=True)
    for rule in GENERAL_RULES:
        assert resolve(rule, facts, Request()).backend == "triton"
        assert resolve(rule, facts, Request()).chunk_size == CHUNK
    wide = Facts(100, 300, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="take k and v up to 256, got 300"):
        resolve(GATED_DELTA_2, wide, Request(backend="triton"))
    inputs = narrow(drawn(GATED_DELTA_2, "head"), torch.float32)
    given = Inputs.of({name: inputs.get(name) for name in Inputs.NAMES})
    with pytest.raises(ValueError, match="chunk_size=32"):
        check_and_resolve(GATED_DELTA_2, given, Request(backend="triton", form="chunkwise", chunk_size=32))
