"""Rows that are rounded further before they are multiplied by quantised weights on a CPU (rounded_activations)."""

import copy
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.quantised import quantize, rounded_activations, shrink

FORMS = ("float16", "int8")
SIZES = [(1, 32), (33, 64), (65, 96), (128, 1024), (48, 3584)]
HALF, SINGLE = torch.finfo(torch.float16), torch.finfo(torch.float32)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def multiplies_halves() -> bool:
    """Whether this processor multiplies float16 by vectors, as Linux reports it."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "asimdhp" in path.read_text()


@torch.no_grad()
def rounded_linear(x: Tensor, weight: Tensor) -> Tensor:
    with rounded_activations():
        return F.linear(x, weight)


def drawn(rows: int, columns: int) -> Tensor:
    """Rows whose numbers, and whose sizes, differ widely."""
    return torch.randn(rows, columns) * torch.randn(rows, columns).exp() * 10.0 ** torch.randint(-9, 9, (rows, 1))


def budget(x: Tensor, weight: Tensor, form: str) -> Tensor:
    """How far a product may be from the exact one, `rows out`."""
    x, weight = x.double().abs(), weight.double().abs()
    size = x @ weight.T
    summed = x.shape[1] * SINGLE.eps * size
    if form == "int8":  # half a step of 127 to the largest of 32 numbers
        steps = x.unflatten(1, (-1, 32)).amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 127
        return 0.5 * (1 + 1e-5) * steps @ weight.T + summed
    # The row, its product and four sums are rounded; each of them may also be below the normal numbers of float16,
    # where the largest number of a row is at least 32.
    tiny = 6 * x.shape[1] * HALF.smallest_normal * HALF.eps * x.amax(1, keepdim=True) / 32
    return 6 * (HALF.eps / 2) * (1 + 5 * HALF.eps) * size + tiny * (1 + weight.amax()) + summed


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8, 17])
def test_products_are_as_near_as_the_rounding_allows(form, shape, rows, threads):
    torch.manual_seed(rows)
    weight, x = quantize(torch.randn(shape) * shape[1] ** -0.5, form), drawn(rows, shape[1])
    exact = x.double() @ weight.decoded().double().T
    found = rounded_linear(x, weight)
    assert ((found - exact).abs() <= budget(x, weight.decoded(), form)).all()


@pytest.mark.parametrize("form", FORMS)
def test_other_products_do_not_change(form):
    """After the block, with other formats and with columns that float16 is not multiplied in, all stays exact."""
    torch.manual_seed(0)
    x = torch.randn(5, 96)
    weight = quantize(torch.randn(40, 96), form)
    before = F.linear(x, weight)
    rounded_linear(x, weight)
    assert torch.equal(F.linear(x, weight), before)
    for other in ("bfloat16", "int4", "fp8"):
        same = quantize(torch.randn(40, 96), other)
        assert torch.equal(rounded_linear(x, same), F.linear(x, same))
    odd = quantize(torch.randn(40, 41), "float16")
    assert torch.equal(rounded_linear(x[:, :41], odd), F.linear(x[:, :41], odd))
    many = torch.randn(17, 96)
    halves = quantize(torch.randn(40, 96), "float16")
    assert torch.equal(rounded_linear(many, halves), F.linear(many, halves))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(65, 96), (130, 1024)])
def test_bits_of_a_row_do_not_depend_on_its_company(form, shape, threads):
    torch.manual_seed(1)
    weight, x = quantize(torch.randn(shape), form), drawn(16, shape[1])
    alone = torch.cat([rounded_linear(row[None], weight) for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 9, 16):
        assert torch.equal(rounded_linear(x[:rows], weight), alone[:rows])


def test_numbers_that_float16_does_not_have():
    """Rows and weights of any size: what overflows, infinity and NaN are those of the exact product."""
    torch.manual_seed(2)
    whole = torch.randn(9, 64)
    whole[0], whole[1, 3], whole[2, 5] = 6e4, -65504.0, 6e-8
    weight, x = quantize(whole, "float16"), torch.randn(9, 64)
    x[0], x[1, 4], x[2, 7], x[3], x[4], x[5], x[6, 1] = 1e6, torch.inf, torch.nan, 0, 1e-39, 1e34, 3e38
    with torch.no_grad():
        exact = F.linear(x.double(), weight.decoded().double()).float()
        found = rounded_linear(x, weight)
    finite = exact.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found[exact.isinf()], exact[exact.isinf()])
    allowed = budget(x.nan_to_num(0, 0, 0), weight.decoded(), "float16") + SINGLE.smallest_normal
    rest = [0, 3, 4, 5, 7, 8]
    assert ((found - exact.double()).abs() <= allowed)[rest][finite[rest]].all()


def test_weights_that_are_not_finite():
    weight = quantize(torch.randn(4, 32), "float16")
    weight.codes[1, 3], weight.codes[2, 4] = torch.inf, torch.nan
    x = torch.ones(2, 32)
    found = rounded_linear(x, weight)
    assert (found[:, 1] == torch.inf).all()
    assert found[:, 2].isnan().all()
    assert found[:, [0, 3]].isfinite().all()


@pytest.mark.cover
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_steps_of_a_model(form, threads):
    """A decoding step rounds as a call of the model does, and a row has the bits that it has alone."""
    torch.manual_seed(3)
    config = HybridConfig(
        97, 128, 4, "GKA", linear=LinearConfig(2, 4, 32, 32), attention=AttentionConfig(4, 2, 32, rotary_dim=32),
        feed=FeedConfig(192),
    )  # fmt: skip
    model = HybridLM(config).eval()
    shrink(model, form)
    ids = torch.randint(97, (3, 7))
    prompt = model(ids[:, :-1]).state
    exact = model(ids[:, -1:], copy.deepcopy(prompt)).logits
    with rounded_activations():
        together = model(ids[:, -1:], copy.deepcopy(prompt)).logits
        for row in range(3):
            alone = model(ids[row : row + 1, -1:], prompt.select(torch.tensor([row]))).logits
            assert torch.equal(alone, together[row : row + 1])
    assert torch.equal(model(ids[:, -1:], copy.deepcopy(prompt)).logits, exact)
    assert (together - exact).norm() <= (2e-2 if form == "int8" else 2e-3) * exact.norm()
    if form == "int8" or multiplies_halves():
        assert not torch.equal(together, exact)


@pytest.mark.parametrize("form", FORMS)
def test_tensors_whose_memory_does_not_hold_their_values(form):
    torch.manual_seed(4)
    weight, x = quantize(torch.randn(33, 96), form), torch.randn(3, 96)
    assert torch.equal(rounded_linear(torch._neg_view(x), weight), rounded_linear(-x, weight))
    assert torch.equal(rounded_linear(torch._efficientzerotensor((3, 96)), weight), torch.zeros(3, 33))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_another_width_are_refused(form):
    weight = quantize(torch.randn(33, 96), form)
    with pytest.raises((RuntimeError, ValueError), match="96"):
        rounded_linear(torch.randn(3, 64), weight)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_other_threads_are_not_rounded(form):
    torch.manual_seed(5)
    weight, x = quantize(torch.randn(33, 96), form), torch.randn(3, 96)
    exact, found = F.linear(x, weight), []
    with rounded_activations():
        thread = threading.Thread(target=lambda: found.append(F.linear(x, weight)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], exact)


def test_blocks_may_be_left_in_any_order():
    torch.manual_seed(6)
    weight, x = quantize(torch.randn(33, 96), "int8"), torch.randn(3, 96)

    def inside():
        with rounded_activations():
            yield F.linear(x, weight)

    exact, first, second = F.linear(x, weight), inside(), inside()
    rounded = next(first)
    assert torch.equal(next(second), rounded) and not torch.equal(rounded, exact)
    first.close()
    assert torch.equal(F.linear(x, weight), rounded)  # the second is still inside
    second.close()
    assert torch.equal(F.linear(x, weight), exact)
