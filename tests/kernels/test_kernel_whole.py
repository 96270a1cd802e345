"""The walk of Hopper's kernels that makes scores, inverse, state and output in one launch."""

import pytest
import torch

import lineate
from tests.support.cases import DELTA, GATED_DELTA, Shape, bounds, convert, draw, same_bits
from tests.support.paths import BF16
from tests.support.rule_kernels import check, on_gpu

pytestmark = pytest.mark.gpu
ROWS = [DELTA, GATED_DELTA]
TEXTS = (0, 1, 64, 0, 128, 70, 200, 0)
SPOILED, END = 263 + 64, 263 + 200  # the second chunk and all later ones of the sequence of 200 tokens


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets whether calls are walked in one launch; skip other GPUs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    launches = pytest.importorskip("lineate.kernels.hopper.launch_walks")
    tape = pytest.importorskip("lineate.kernels.tape")

    def set_choice(whole: bool) -> None:
        monkeypatch.setattr(launches, "walks_whole", lambda call: whole)
        tape.forget_tapes()

    return set_choice


def both(choose, row, inputs, **options):
    """Return the output and the state of the kernels one by one, then of the one launch, three times."""
    found = []
    for whole in (False, True, True, True):
        choose(whole)
        with torch.no_grad():
            found.append(row.op(**on_gpu(inputs), **options))
    torch.cuda.synchronize()
    return found


def assert_same(found, what=""):
    for other in found[1:]:
        for name, x, y in zip(("output", "state"), other, found[0], strict=True):
            assert same_bits(x, y), (what, name, (x.double() - y.double()).abs().max())


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("t", [1, 63, 64, 65, 128, 197, 1000])
def test_one_launch_has_the_bits_of_several(row, t, choose):
    inputs = convert(draw(row, Shape(3, t, 2, 4, 128, 128)), torch.bfloat16)
    assert_same(both(choose, row, inputs))


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("shape", [Shape(1, 0, 2, 2, 128, 128), Shape(1, 0, 1, 3, 128, 256)], ids=["plain", "wide"])
def test_packed_sequences(row, shape, choose):
    inputs = convert(draw(row, shape._replace(t=sum(TEXTS)), texts=len(TEXTS)), torch.bfloat16)
    assert_same(both(choose, row, inputs, cu_seqlens=bounds(TEXTS).cuda()))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_within_the_budget_of_its_dtype(row, choose):
    choose(True)
    for special in ("ordinary", "reset -50") if row is GATED_DELTA else ("ordinary",):
        check(row, convert(draw(row, Shape(2, 300, 2, 4, 128, 128), special), torch.bfloat16), BF16, special)


def wild(inputs, kind):
    """Return inputs with rows that float16 products could not serve."""
    inputs = dict(inputs)
    beta, k = inputs["beta"].clone(), inputs["k"].clone()
    if kind == "large keys":
        k[:, 70:75] *= 30
    elif kind == "negative":
        beta[:, 5] = -1.0
    elif kind == "late":
        beta[:, 63::64] = 3.0
    else:
        beta[:, 100:] = 150.0
        k[:, 100:] *= 0.01
    return {**inputs, "beta": beta, "k": k}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("kind", ["large keys", "negative", "late", "from the middle"])
def test_wild_rows(row, kind, choose):
    """Rows that need float32 have the same bits in one launch and in several; rows before them do not change."""
    tame = convert(draw(row, Shape(2, 197, 2, 4, 128, 128)), torch.bfloat16)
    inputs = wild(tame, kind)
    found = both(choose, row, inputs)
    assert_same(found, kind)
    assert all(x.isfinite().all() for x in found[0])
    first = {"large keys": 70, "negative": 5, "late": 63, "from the middle": 100}[kind]
    choose(True)
    with torch.no_grad():
        before = row.op(**on_gpu(tame))
    assert same_bits(found[1].output[:, :first], before.output[:, :first])


def test_nothing_passes_between_sequences_or_from_the_future(choose):
    """NaN from a chunk of one sequence on changes no bit of its earlier chunks and of other sequences."""
    inputs = convert(draw(GATED_DELTA, Shape(1, sum(TEXTS), 2, 4, 128, 128), texts=len(TEXTS)), torch.bfloat16)
    cu_seqlens = bounds(TEXTS).cuda()
    choose(True)
    on = on_gpu(inputs)
    with torch.no_grad():
        expected = lineate.gated_delta_rule(**on, cu_seqlens=cu_seqlens)
        spoiled = {name: x.clone() for name, x in on.items()}
        for name in ("q", "k", "v", "log_decay", "beta"):
            spoiled[name][:, SPOILED:END] = float("nan")
        found = lineate.gated_delta_rule(**spoiled, cu_seqlens=cu_seqlens)
    same = torch.ones(sum(TEXTS), dtype=torch.bool)
    same[SPOILED:END] = False
    assert same_bits(found.output[:, same], expected.output[:, same])
    others = [n for n in range(len(TEXTS)) if n != 6]
    assert same_bits(found.state[others], expected.state[others])


def test_many_sequences_are_walked_in_one_launch():
    """A batch that fills the device gets the bits of each row alone, whichever kernels serve them."""
    inputs = on_gpu(convert(draw(GATED_DELTA, Shape(24, 130, 2, 4, 128, 128)), torch.bfloat16))
    with torch.no_grad():
        together = lineate.gated_delta_rule(**inputs)
        for n in (0, 11, 23):
            alone = lineate.gated_delta_rule(**{name: x[n : n + 1] for name, x in inputs.items()})
            assert same_bits(together.output[n : n + 1], alone.output)
            assert same_bits(together.state[n : n + 1], alone.state)
