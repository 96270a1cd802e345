"""The rules of the general row in C: as exact as the five rules, the same bits in any company, every gradient."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lineate
from lineate.call import Request
from lineate.dispatch import Facts, resolve
from lineate.forms import stability
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA, GATED_DELTA_2, GATED_DELTA_PRODUCT, Rule
from tests.support.cases import (
    Result,
    Shape,
    assert_same_bits,
    bounds,
    needs_native,
    run,
    same_bits,
)
from tests.support.general_cases import CASES, IDS, SMALL, assert_in_budget, call, drawn, narrow, row

pytestmark = needs_native
all_cases = pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
SIZES = ((None, True), (None, False), (1, False), (5, True), (40, False))
LARGE = Shape(1, 70, 1, 2, 48, 40)
WIDE = Shape(1, 33, 1, 1, 130, 33)


def native(rule: Rule, decay: str, inputs: dict[str, Tensor], chunk_size: int | None = None, **options) -> Result:
    return run(row(rule, decay), inputs, backend="native", chunk_size=chunk_size, **options)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("shape", [SMALL, LARGE, WIDE, Shape(2, 1, 1, 3, 7, 4)], ids=str)
@all_cases
def test_float32_stays_in_the_budget(rule, decay, n, shape):
    """Output, state and every gradient, for chunks of any size, against the float64 recurrence."""
    inputs = narrow(drawn(rule, decay, n, shape=shape), torch.float32)
    for chunk_size, normalize_qk in SIZES if shape is SMALL else SIZES[:1]:
        got = native(rule, decay, inputs, chunk_size, normalize_qk=normalize_qk)
        size = chunk_size or 32
        assert_in_budget(rule, inputs, got, size, (chunk_size, normalize_qk), normalize_qk=normalize_qk)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_cases
def test_half_precision_is_rounded_once(rule, decay, n, dtype):
    inputs = narrow(drawn(rule, decay, n), dtype)
    got = native(rule, decay, inputs)
    assert got.output.dtype == dtype and all(x.dtype == inputs[name].dtype for name, x in got.grads.items())
    assert_in_budget(rule, inputs, got, 32)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("special", ["reset -inf", "reset -50", "decay -200", "weak"])
@pytest.mark.parametrize(
    ("rule", "decay", "n"), [case for case in CASES if case[1] != "none"], ids=[x for x in IDS if "none" not in x]
)
def test_resets_and_weak_decays_are_exact(rule, decay, n, special):
    inputs = narrow(drawn(rule, decay, n, t=70), torch.float32)
    log_decay = inputs["log_decay"]
    if special == "weak":
        log_decay.fill_(-1e-12)
    elif special == "decay -200":
        log_decay.fill_(-200.0)
    else:
        value = -50.0 if special.endswith("50") else -torch.inf
        log_decay[:, 3::5] = value
        log_decay[:, 8:10] = value
        log_decay[:, 5::7, ..., 0] = value
    got = native(rule, decay, inputs)
    assert_in_budget(rule, inputs, got, 32)


@all_cases
def test_token_by_token(rule, decay, n):
    """The recurrent form, one token or several, into which no rows and columns fit evenly."""
    for shape in (SMALL, Shape(2, 9, 2, 4, 33, 19), Shape(1, 1, 1, 2, 3, 70)):
        for normalize_qk in (False, True):
            inputs = narrow(drawn(rule, decay, n, shape=shape), torch.float32)
            expected = call(
                rule, {name: x.double() for name, x in inputs.items()}, "recurrent", normalize_qk=normalize_qk
            )
            with torch.no_grad():
                found = call(rule, inputs, "recurrent", backend="native", normalize_qk=normalize_qk)
            for x, right in zip(found, expected, strict=True):
                assert x.isfinite().all()
                assert (x - right).norm() <= 2e-6 * right.norm()


@all_cases
def test_bits_depend_on_nothing_else(rule, decay, n):
    """A row alone, a row among others, packed, with gaps in memory, on one thread and on two: the same bits."""
    inputs = narrow(drawn(rule, decay, n), torch.float32)
    whole = native(rule, decay, inputs)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same_bits(native(rule, decay, inputs), whole)
    finally:
        torch.set_num_threads(before)
    with_gaps = {name: torch.cat((x, x), -1)[..., : x.shape[-1]] for name, x in inputs.items()}
    assert_same_bits(native(rule, decay, with_gaps), whole)

    lengths = (0, 7, 1, 40, 0, 5)
    one = {name: x[:1] for name, x in inputs.items() if name != "state"}
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(len(lengths), *inputs["state"].shape[1:], generator=generator)
    packed = native(rule, decay, one | {"state": state}, weighted=False, cu_seqlens=bounds(lengths))
    start = 0
    for i, length in enumerate(lengths):
        if length:
            here = slice(start, start + length)
            text = {name: x[:, here] for name, x in one.items()} | {"state": state[i : i + 1]}
            alone = native(rule, decay, text, weighted=False)
            assert same_bits(packed.output[:, here], alone.output) and same_bits(packed.state[i : i + 1], alone.state)
            for name, x in alone.grads.items():
                assert same_bits(packed.grads[name][i : i + 1] if name == "state" else packed.grads[name][:, here], x)
        start += length
    with torch.no_grad():
        both = call(rule, inputs, "recurrent", backend="native")
        first = call(rule, {name: x[:1] for name, x in inputs.items()}, "recurrent", backend="native")
    assert torch.equal(first.output, both.output[:1]) and torch.equal(first.state, both.state[:1])


@all_cases
def test_the_future_never_changes_the_past(rule, decay, n):
    """Neither outputs nor gradients of a loss on the past; a NaN to come changes no output."""
    inputs = narrow(drawn(rule, decay, n), torch.float32)

    def past(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the outputs of the first two chunks and the gradients of their sum, with other chunks behind them."""
        leaves = {name: x.clone() for name, x in inputs.items() if name != "state"}
        for x in leaves.values():
            x[:, 32:] = change(x[:, 32:])
            x.requires_grad_()
        output, _ = call(rule, leaves | {"state": inputs["state"]}, "chunkwise", backend="native", chunk_size=16)
        grads = torch.autograd.grad(output[:, :32].sum(), list(leaves.values()))
        return [output[:, :32].detach(), *[x[:, :32] for x in grads]]

    found = past(lambda x: x)
    assert all(torch.equal(x, y) for x, y in zip(found, past(lambda x: x.roll(1, 0)), strict=True))
    assert torch.equal(found[0], past(lambda x: x * torch.nan)[0])


@all_cases
def test_the_future_of_its_own_chunk_changes_no_output(rule, decay, n):
    inputs = narrow(drawn(rule, decay, n), torch.float32)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name, x in changed.items():
        if name != "state":
            x[:, 21:] = x[:, 21:].roll(1, 0)
    first, second = (call(rule, x, "chunkwise", backend="native", chunk_size=32).output for x in (inputs, changed))
    assert torch.equal(first[:, :21], second[:, :21])


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "decay", "n"), [CASES[4], CASES[-2]], ids=[IDS[4], IDS[-2]])
def test_compiled_in_one_graph(rule, decay, n):
    inputs = narrow(drawn(rule, decay, n), torch.float32)
    compiled = torch.compile(lambda given: call(rule, given, backend="native"), fullgraph=True, backend="aot_eager")
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, state = compiled(leaves)
    grads = torch.autograd.grad(output.sum() + state.sum(), list(leaves.values()))
    expected = native(rule, decay, inputs, weighted=False)
    assert_same_bits(Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True))), expected)
    token = {name: x if name == "state" else x[:, :2] for name, x in inputs.items()}
    with torch.no_grad():
        found = torch.compile(lambda given: call(rule, given), fullgraph=True, backend="aot_eager")(token)
        assert all(torch.equal(x, y) for x, y in zip(found, call(rule, token), strict=True))


UNSTABLE = [
    (GATED_DELTA_2, {"erase": 5.0}, r"sum\(erase \* k\^2\)"),
    (GATED_DELTA_PRODUCT, {"beta": 5.0}, r"beta \|k\|\^2"),
    (DIAGONAL_PLUS_LOW_RANK, {"direction": 5.0}, r"probe \. direction"),
]


@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
@pytest.mark.parametrize(("rule", "change", "named"), UNSTABLE, ids=[rule.name for rule, *_ in UNSTABLE])
def test_unstable_erasing_is_said_once(rule, change, named, form):
    inputs = narrow(drawn(rule, "head", 2, t=20), torch.float32)
    stability.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(rule, inputs, form, backend="native")  # inputs that are stable say nothing
    wrong = {name: x.clone() for name, x in inputs.items()}
    for name, factor in change.items():
        wrong[name] *= factor
    with pytest.warns(lineate.UnstableMemoryWarning, match=f"^{named} must stay in"):
        call(rule, wrong, form, backend="native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(rule, wrong, form, backend="native")


@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
@pytest.mark.parametrize(
    ("rule", "decay", "n"), [case for case in CASES if case[1] != "none"], ids=[x for x in IDS if "none" not in x]
)
def test_positive_decay_is_refused(rule, decay, n, form):
    inputs = narrow(drawn(rule, decay, n, t=20), torch.float32)
    inputs["log_decay"].view(-1)[-1] = 0.5
    with pytest.raises(ValueError, match="log_decay must be <= 0"):
        call(rule, inputs, form, backend="native")


def test_what_it_serves():
    other = Rule("other", corrects=True, decays=("none",), gates=("probe",), general=True)
    with pytest.raises(ValueError, match="the native backend has no other"):
        resolve(other, Facts(100, 8), Request(backend="native"))
    gates = Facts(100, 8, given=("q", "k", "v", "log_decay", "erase", "write"))
    assert resolve(GATED_DELTA_2, gates, Request(backend="native")).backend == "native"
    with pytest.raises(ValueError, match="native backend does not read erase, write"):
        resolve(GATED_DELTA, gates, Request(form="recurrent", backend="native"))
    with pytest.raises(ValueError, match="does not read dummy"):
        resolve(GATED_DELTA_2, Facts(100, 8, given=("q", "k", "v", "dummy")), Request(backend="native"))
    plans = [resolve(GATED_DELTA_PRODUCT, Facts(100, 8, writes=n), Request(backend="native")) for n in (1, 2, 5, 40)]
    assert [x.chunk_size for x in plans] == [32, 16, 6, 1]
    with pytest.raises(ValueError, match="recurrent form has no gradients"):
        resolve(GATED_DELTA_2, Facts(8, 8, needs_grad=True), Request(form="recurrent", backend="native"))
