"""Weights of 16, 8 and 4 bits: what they decode to, their products, and what torch does with them."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.native.build import available
from lineate.native.low_precision_matmul import linear
from lineate.quantised import FORMATS, GROUP, QuantisedWeight, quantize
from tests.support import fresh

ALL = tuple(FORMATS)
CODED = ("int8", "int4")
ERROR = {"bfloat16": 0.004, "float16": 0.0005, "int8": 0.008, "int4": 0.12, "fp8": 0.04}
"""The relative error of a product with a normal weight."""


def relative(made: Tensor, wanted: Tensor) -> float:
    made, wanted = made.detach().double(), wanted.detach().double()
    return float((made - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (40, 96), (3, 20, 64)])
def test_codes_come_back_from_tiles(form: str, shape: tuple[int, ...]) -> None:
    kept = FORMATS[form]
    bits = kept.bits
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    scales = torch.randn(*shape[:-1], shape[-1] // GROUP).half()
    tiles = kept.to_tiles(codes, scales)
    assert (tiles[0].shape, tiles[1].shape) == FORMATS[form].shapes(shape)
    back = kept.from_tiles(*tiles, shape[-2])
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)
    wanted = (codes.float() - FORMATS[form].zero) * scales.float().repeat_interleave(GROUP, -1)
    assert torch.equal(kept.decode(*tiles, shape[-2]), wanted)


@pytest.mark.parametrize("form", CODED)
def test_no_number_is_further_from_its_code_than_half_a_step(form: str) -> None:
    x, kept = torch.randn(48, 128), FORMATS[form]
    codes, scales = kept.encode(x)
    steps = kept.from_tiles(codes, scales, 48)[1].float().abs().repeat_interleave(GROUP, 1)
    groups = x.unflatten(1, (-1, GROUP))
    most = 127 if form == "int8" else 7
    if form == "int8":
        assert ((kept.decode(codes, scales, 48) - x).abs() <= 0.502 * steps).all()
    plain = groups.abs().amax(-1, keepdim=True) / most  # 4 bits may clip the largest, if that makes the error smaller
    nearest = (groups / plain).round().clamp(-most - 1, most) * plain
    assert relative(kept.decode(codes, scales, 48), x) < 0.93 * relative(nearest.flatten(1), x)


def test_8_bits_that_were_rounded_before_stay() -> None:
    """Also those of others, whose scales map the largest number to 127."""
    x = torch.randn(480, 128)
    plain = (x.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True) / 127).half().float()
    others = ((x.unflatten(1, (-1, GROUP)) / plain).round() * plain).flatten(1)
    kept = FORMATS["int8"]
    for once in (kept.decode(*kept.encode(x), 480), others):
        assert torch.equal(kept.decode(*kept.encode(once), 480), once)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("shape", [(16, 32), (40, 96), (3, 20, 64), (300, 256)])
def test_c_finds_the_scales_that_torch_finds(
    shape: tuple[int, ...], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) ** 4
    x[..., 0, :32], x[..., 1, :32] = 0, 1e-9
    x[..., 2, :32] = torch.arange(32) % 3 - 1.0  # many candidates are equally good
    for other in (x, x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        made = FORMATS[form].encode(other)
        with monkeypatch.context() as without:
            without.setattr("lineate.quantised.rounding.available", lambda *subjects: False)
            wanted = FORMATS[form].encode(other)
        assert torch.equal(made[0], wanted[0]) and torch.equal(made[1], wanted[1])


@pytest.mark.parametrize("size", [1e4, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_weights_of_any_size(size: float) -> None:
    """Scales below 6e-5 have few bits in float16; rounded down, they would clip the largest numbers, or be 0."""
    x, weight = torch.randn(5, 256), size * torch.randn(64, 256)
    for form, most in (("int8", 0.01 if size > 1e-6 else 0.03), ("int4", 0.12 if size > 1e-6 else 0.2)):
        assert relative(F.linear(x, quantize(weight, form)), x @ weight.T) < most


@pytest.mark.parametrize("form", CODED)
def test_zeros_stay_zeros_and_large_numbers_finite(form: str) -> None:
    x = torch.zeros(16, 64)
    x[3, 40] = 1000.0
    kept = quantize(x, form).decoded()
    assert torch.equal(kept[:, :32], x[:, :32]) and abs(float(kept[3, 40]) - 1000) < 1 and kept.isfinite().all()


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(
    ("rows", "out", "size"), [(1, 48, 64), (3, 16, 32), (7, 100, 544), (13, 33, 128), (70, 64, 96)]
)
def test_product_is_that_of_the_decoded_weight(form: str, rows: int, out: int, size: int) -> None:
    x, weight = torch.randn(rows, size), torch.randn(out, size) / size**0.5
    quantised = quantize(weight, form)
    made = F.linear(x, quantised)
    most = {"int4": 0.01, "fp8": 1e-6}.get(form, 1e-4)  # with 4 bits x has 8, with 8 it has 15, and fp8 leaves it
    assert relative(made, x @ quantised.decoded().T) < most
    assert relative(made, x @ weight.T) < ERROR[form]


@pytest.mark.skipif(not available(), reason="torch's own products, which run without C, do not promise it")
@pytest.mark.parametrize("form", (*CODED, "fp8"))
def test_a_row_has_the_same_bits_in_any_company(form: str) -> None:
    x, quantised = torch.randn(29, 160), quantize(torch.randn(70, 160), form)
    whole = F.linear(x, quantised)
    for n in (1, 2, 5, 6, 7, 12, 28):
        assert torch.equal(F.linear(x[:n], quantised), whole[:n])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(F.linear(x, quantised), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", (*CODED, "fp8"))
def test_numbers_that_are_not_finite_show(form: str) -> None:
    x, quantised = torch.randn(3, 64), quantize(torch.randn(16, 64), form)
    x[1, 5], x[2, 9] = torch.nan, torch.inf
    made = F.linear(x, quantised)
    assert made[0].isfinite().all() and made[1].isnan().all() and not made[2].isfinite().any()


@pytest.mark.parametrize("form", (*CODED, "fp8"))
def test_plain_torch_gives_the_same(form: str) -> None:
    x, quantised = torch.randn(5, 64), quantize(torch.randn(40, 64), form)
    exact = F.linear(x.double(), quantised)  # float64 is multiplied in torch
    assert relative(exact, x.double() @ quantised.decoded().double().T) < 1e-6
    assert relative(F.linear(x, quantised), exact) < 0.01


@pytest.mark.parametrize("form", ALL)
def test_the_input_has_a_gradient(form: str) -> None:
    x = torch.randn(2, 3, 64, requires_grad=True)
    quantised, bias = quantize(torch.randn(48, 64), form), torch.randn(48, requires_grad=True)
    y = F.linear(x, quantised, bias)
    dx, dbias = torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    assert relative(dx, quantised.decoded().sum(0).expand(2, 3, 64)) < 1e-5
    assert torch.equal(dbias, torch.full((48,), 6.0))


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("run", [linear, F.linear], ids=["half.linear", "F.linear"])
def test_a_linear_layer_keeps_its_class(form: str, run: Callable[..., Tensor]) -> None:
    layer = nn.Linear(64, 40)
    layer.weight = nn.Parameter(quantize(layer.weight, form), requires_grad=False)
    x = torch.randn(3, 64)
    with torch.no_grad():
        wanted = layer(x)
        assert relative(run(x, layer.weight, layer.bias), wanted) < 1e-5
    assert isinstance(layer.weight, QuantisedWeight) and isinstance(layer.weight, nn.Parameter)
    twin = copy.deepcopy(layer)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    with torch.no_grad():
        assert torch.equal(twin(x), wanted)
        other = nn.Linear(64, 40)
        other.weight = nn.Parameter(quantize(other.weight, form), requires_grad=False)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), wanted)
    assert twin.to(torch.bfloat16).weight.dtype is torch.bfloat16
    assert twin(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("form", ALL)
def test_embedding_looks_up_rows(form: str) -> None:
    quantised = quantize(torch.randn(50, 64), form)
    ids = torch.randint(0, 50, (2, 7))
    assert torch.equal(F.embedding(ids, quantised), quantised.decoded()[ids])


@pytest.mark.parametrize("form", ALL)
def test_one_expert_of_many(form: str) -> None:
    quantised = quantize(torch.randn(3, 24, 64), form)
    one = quantised[1]
    assert isinstance(one, QuantisedWeight) and torch.equal(one.decoded(), quantised.decoded()[1])
    assert one.codes.data_ptr() != quantised.codes.data_ptr() and one.codes._is_view()


@pytest.mark.parametrize("form", ALL)
def test_bytes(form: str) -> None:
    quantised = quantize(torch.randn(40, 96), form)
    assert quantised.nbytes_kept == FORMATS[form].nbytes((40, 96))
    wanted = {"bfloat16": 2 * 40 * 96, "float16": 2 * 40 * 96, "int8": 48 * 3 * 34, "int4": 48 * 3 * 18}
    wanted["fp8"] = 48 * (96 + 4)
    assert quantised.nbytes_kept == wanted[form]


@pytest.mark.cover
@pytest.mark.parametrize("form", ALL)
def test_it_compiles_whole(form: str) -> None:
    layer = nn.Linear(64, 40)
    layer.weight = nn.Parameter(quantize(layer.weight, form), requires_grad=False)
    x = torch.randn(3, 64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), layer(x)) < 1e-6


def test_other_functions_see_the_values_and_none_changes_them() -> None:
    quantised = quantize(torch.randn(16, 32), "int8")
    assert torch.equal(quantised + 1, quantised.decoded() + 1)
    with pytest.raises(RuntimeError, match="frozen"):
        quantised.mul_(2)
    with pytest.raises(RuntimeError, match="only overwritten by one of its own format"):
        quantised.copy_(quantize(torch.randn(16, 32), "int4"))


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of 32 for int8, got shape \(16, 40\)"):
        quantize(torch.randn(16, 40), "int8")
    with pytest.raises(ValueError, match=r"at least 2 dims.*got shape \(64,\)"):
        quantize(torch.randn(64), "int4")
    with pytest.raises(ValueError, match="form must be"):
        quantize(torch.randn(16, 32), "int3")


@pytest.mark.skipif(not available(), reason="torch's own products, which run without C, do not promise it")
@pytest.mark.parametrize("form", (*CODED, "fp8"))
@pytest.mark.parametrize(("out", "size"), [(41, 1120), (600, 64)])
def test_many_columns_and_many_rows_of_a_weight(form: str, out: int, size: int) -> None:
    """Products take columns in spans and rows in runs, whose number depends on how many rows x has."""
    x, quantised = torch.randn(14, size), quantize(torch.randn(out, size) / size**0.5, form)
    whole = F.linear(x, quantised)
    assert relative(whole, x @ quantised.decoded().T) < (0.01 if form == "int4" else 1e-4)
    for n in (1, 2, 3, 4, 7):
        assert torch.equal(F.linear(x[:n], quantised), whole[:n])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [*FORMATS])
def test_autocast_is_that_of_a_linear_layer(form: str, dtype: torch.dtype) -> None:
    """Operands are converted to autocast's dtype, which the result has; float64 is left alone."""
    torch.manual_seed(0)
    weight, x, bias = quantize(torch.randn(48, 64), form), torch.randn(3, 64), torch.randn(48)
    plain = nn.Linear(64, 48)
    plain.weight.data, plain.bias.data = weight.decoded(), bias
    with torch.autocast("cpu", dtype):
        y, wanted = F.linear(x, weight, bias), plain(x)
        alone, wide = F.linear(x, weight), F.linear(x.double(), weight)
        with torch.autocast("cpu", enabled=False):
            off = F.linear(x, weight)
    assert y.dtype == wanted.dtype == alone.dtype == dtype
    assert wide.dtype == torch.float64 and off.dtype == torch.float32
    assert torch.equal(alone, F.linear(x.to(dtype), weight)) and torch.equal(off, F.linear(x, weight))
    assert torch.equal(y, F.linear(x.to(dtype), weight, bias.to(dtype)))
    assert relative(y, wanted) < 0.02
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        F.linear(given, weight).sum().backward()
    assert given.grad is not None and given.grad.dtype == torch.float32
    torch.testing.assert_close(given.grad, weight.decoded().float().sum(0).expand(3, 64), rtol=0.02, atol=0.1)


def test_a_saved_weight_loads_after_the_package_is_imported(tmp_path: Path) -> None:
    """torch.load without pickles needs lineate.quantised, which `import lineate` leaves out."""
    torch.save({"weight": quantize(torch.randn(32, 32), "int8")}, tmp_path / "weight.pt")
    file = str(tmp_path / "weight.pt")
    load = f"torch.load({file!r}, weights_only=True)['weight']"
    done = fresh.run(f"import torch, lineate\n{load}")
    assert done.returncode != 0 and "lineate.quantised.weight.QuantisedWeight" in done.stderr
    done = fresh.run(f"import torch, lineate.quantised\nprint({load})")
    assert done.returncode == 0 and done.stdout.startswith("QuantisedWeight(int8"), done.stderr
