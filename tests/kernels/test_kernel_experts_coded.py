"""A mixture of experts whose weights are in codes, by kernels, compared with the decoded weights."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lineate.quantised import FORMATS
from tests.support.experts import (
    ACTIVE,
    COUNT,
    assert_near,
    chosen_by,
    codes_of,
    draw,
    layer_of,
    parts_of,
    plain,
    put_in_codes,
)
from tests.support.paths import BF16, INTERPRETER, ONE_EACH, Path, param

pytest.importorskip("triton")
mixture = importlib.import_module("lineate.kernels.layers.mixture")
grouping = importlib.import_module("lineate.kernels.layers.grouping")
experts = importlib.import_module("lineate.kernels.layers.experts")
coded_blocks = importlib.import_module("lineate.kernels.layers.coded_blocks")
quantised_products = importlib.import_module("lineate.kernels.layers.quantised_products")
pytestmark = pytest.mark.usefixtures("guarded_memory")


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_residual_of_codes_and_of_several_rows_is_added_as_before(path, rows, monkeypatch):
    """In the launch of the sum; with a norm, by torch."""
    (router, made), x = parts_of(layer_of(path, 96, 32)), draw(path, rows, 96)
    kernels = [codes_of(y, "int8", path)[0] for y in (made.gate_up, made.down)]
    added: list[bool] = []
    add = experts.add
    monkeypatch.setattr(
        experts, "add", lambda *given, **named: (added.append(named["residual"] is not None), add(*given, **named))[1]
    )
    monkeypatch.setattr(experts, "leave_one", None)
    monkeypatch.setattr(quantised_products, "LEFT", 0)  # without room in the registers
    for own in (mixture.Experts(*kernels, "swiglu"), *([made] if rows > 1 else [])):
        found = mixture.mix(x, router, own)
        assert torch.equal(mixture.mix(x, router, own, residual=2 * x), 2 * x + found)
        assert added == [False, True]
        added.clear()
        if rows == 1:
            around = draw(path, 96, seed=1), 1e-5, False
            assert torch.equal(
                mixture.mix(x, router, own, residual=x, norm=around), x + mixture.mix(x, router, own, norm=around)
            )
            assert added == [False, False]
            added.clear()


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("kind", "size"), [("swiglu", 96), ("relu2", 160)])
def test_the_second_product_of_one_row_of_codes(path, form, kind, size, monkeypatch):
    """It is one launch with the weighted sum and the residual, with a shared expert or without one."""
    layer = layer_of(path, 64, size, kind=kind, shared_size=size, shared_gate=True, scores="sigmoid")
    shared = layer.shared.gate_up_proj if kind == "swiglu" else layer.shared.up_proj
    owners = (layer, "experts_gate_up"), (layer, "experts_down"), (shared, "weight"), (layer.shared.down_proj, "weight")
    codes = [put_in_codes(*owner, form, path) for owner in owners]
    router = parts_of(layer)[0]
    made = mixture.Experts(codes[0], codes[1], kind, (codes[2], codes[3]))
    if path.device == "cpu":  # the first product takes a shared expert on Hopper alone
        made, layer.shared = made._replace(shared=None), None
        router = router._replace(gate=None)
    x = draw(path, 1, 64)
    expected = plain(layer, x, *chosen_by(layer, x))
    monkeypatch.setattr(experts, "add", None)
    assert mixture.takes_row(x, made, ACTIVE)
    found = mixture.mix(x, router, made)
    assert_near(found, expected, path.dtype)
    assert torch.equal(mixture.mix(x, router, made, residual=2 * x), 2 * x + found), "the sum is rounded before"
    around = draw(path, 64, seed=1), 1e-5, False
    alone = mixture.mix(x, router, made, norm=around)
    assert torch.equal(mixture.mix(x, router, made, residual=x, norm=around), x + alone)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("path", [param(INTERPRETER), param(Path("cpu", torch.float16)), param(BF16)])
def test_the_sum_of_one_row_of_codes(path, form):
    """Weights of 40 rows, some of them those of a shared expert; the residual is added to the rounded sum."""
    generator, n, k = torch.Generator().manual_seed(0), 40, 160
    made = [codes_of(torch.randn(shape, generator=generator), form, path) for shape in ((4, n, k), (n, k))]
    codes, values = [x for x, _ in made], torch.cat([x.view(-1, n, k) for _, x in made])
    chosen = torch.tensor([[2, 4, 0, 4]], dtype=torch.int32, device=path.device)
    amounts = torch.tensor([[0.5, 1.5, -0.25, 0.75]], device=path.device)
    hidden, residual = draw(path, 4, k), draw(path, 1, n, seed=1)
    found, total = (torch.full_like(residual, torch.nan) for _ in range(2))
    quantised_products.leave_one(hidden, *codes, chosen, amounts, found)
    quantised_products.leave_one(hidden, *codes, chosen, amounts, total, residual)
    own = values[chosen[0].long()].double()
    assert_near(found, torch.einsum("p,pnk,pk->n", amounts[0].double(), own, hidden.double())[None], path.dtype)
    assert torch.equal(total, found + residual)


def empty_codes(form: str, *shape: int) -> Any:
    """Return codes of experts `experts n k` without values."""
    kernel, (*count, n, k) = FORMATS[form].kernel, shape
    codes = torch.empty(*count, -(-n // 16), k // 32, kernel.bits, 16, 4, dtype=torch.uint8, device="meta")
    scales = torch.empty(*count, -(-n // 16), -(-k // FORMATS[form].group), 16, device="meta")
    return quantised_products.Codes(codes, scales, n, kernel)


@pytest.mark.parametrize(
    ("form", "k", "pairs", "fits"),
    [
        ("int4", 512, 9, True), ("int8", 512, 9, True), ("fp8", 512, 9, False), ("fp8", 512, 5, True),
        ("int4", 1024, 9, True), ("int8", 1024, 5, True), ("int8", 1024, 6, False), ("fp8", 1024, 9, False),
    ],
)  # fmt: skip
def test_which_codes_of_one_row_fit_into_registers(form, k, pairs, fits):
    """80 KB of a program: tiles of 16 rows; the scales of fp8 count as many bytes again."""
    assert quantised_products.takes_row(torch.empty(1, k), empty_codes(form, 4, 2048, k), pairs) == fits


@pytest.mark.parametrize(
    ("overlap", "cores", "taken"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_one_row_of_codes_where_launches_overlap(overlap, cores, taken, monkeypatch):
    """The second launch reads the chosen experts before the first ends, which only the tensor cores' kernel allows.

    Compute capability 9 and 16 bits have that kernel; 9 and float32, or 10 and later, have overlapping launches alone.
    """
    monkeypatch.setattr(quantised_products, "launches_dependents", lambda device: overlap)
    monkeypatch.setattr(quantised_products, "uses_tensor_cores", lambda x: cores)
    assert quantised_products.takes_row(torch.empty(1, 64), empty_codes("int8", 4, 32, 64), 3) == taken


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_weights_in_codes(path, form, kind, monkeypatch):
    monkeypatch.setattr(mixture, "DECODED", 4 * 64 * 96)  # four experts at a time
    layer = layer_of(path, 96, 32, kind=kind, scores="sigmoid")
    gate_up, down = (put_in_codes(layer, name, form, path) for name in ("experts_gate_up", "experts_down"))
    router, made = parts_of(layer)
    made = made._replace(gate_up=gate_up, down=down)
    x = draw(path, 600, 96)
    many = (65,) if (form, kind) == ("int8", "swiglu") else ()
    for rows in (1, 4, *many) if path.device == "cpu" else (1, 4, 64, 150, 600):
        assert mixture.serves(x[:rows], router, made)
        found = mixture.mix(x[:rows], router, made)
        assert_near(found, plain(layer, x[:rows], *chosen_by(layer, x[:rows])), path.dtype)
        if rows == 64:
            assert torch.equal(mixture.mix(x[5:7], router, made), found[5:7]), "other rows changed the bits"


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2", None])
def test_codes_decoded_for_a_block(path, form, kind):
    """Experts with no pair, with some, and with more than a block."""
    counts = torch.tensor([0, 20, 1, 16, 33, 0, 7, 16, 0, 9, 3, 0])
    chosen = torch.repeat_interleave(torch.arange(COUNT), counts)[torch.randperm(105)].view(35, 3).int().to(path.device)
    n, k, shape = 64, 192, {"BM": 16, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
    halves = 2 if kind == "swiglu" else 1
    codes, numbers = codes_of(torch.randn(COUNT, halves * n, k) * 0.1, form, path)
    x = draw(path, 35, k)
    y = torch.full((105, n), torch.nan, dtype=path.dtype, device=path.device)
    groups = grouping.group(chosen, COUNT, shape["BM"])
    coded_blocks.multiply(x, codes, kind, groups, y, every=3, shape=shape)
    values = numbers.to(path.dtype).double()[chosen.flatten().long()].cpu()
    made = torch.einsum("pnk,pk->pn", values, x.double().cpu().repeat_interleave(3, 0))
    if kind == "swiglu":
        gate, up = made.chunk(2, 1)
        made = F.silu(gate) * up
    assert_near(y, made.relu().square() if kind == "relu2" else made, path.dtype)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Record calls of coded_blocks.multiply."""
    own, found = coded_blocks.multiply, list[int]()
    monkeypatch.setattr(coded_blocks, "multiply", lambda *given, **named: (found.append(1), own(*given, **named))[1])
    return found


@pytest.mark.cover
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_both_products_of_codes_decoded_for_blocks(kind, calls, monkeypatch):
    """With as many pairs of an expert as MOST_PAIRS at most; experts are decoded for more."""
    monkeypatch.setattr(quantised_products, "uses_tensor_cores", lambda x: True)
    monkeypatch.setattr(mixture, "MOST_CODED", 8)
    layer = layer_of(INTERPRETER, 128, 128, kind=kind, scores="sigmoid")
    gate_up, down = (put_in_codes(layer, name, "int8", INTERPRETER) for name in ("experts_gate_up", "experts_down"))
    made, x = parts_of(layer)[1]._replace(gate_up=gate_up, down=down), draw(INTERPRETER, 20, 128)
    weights, chosen = chosen_by(layer, x)
    for most, wanted in ((5, 2), (4, 0)):  # 60 pairs of 12 experts
        monkeypatch.setattr(mixture, "MOST_PAIRS", most)
        parts, places = mixture.products(x, chosen, made)
        assert places is None and len(calls) == wanted
        assert_near((weights[..., None] * parts).sum(1), plain(layer, x, weights, chosen), torch.float32)
        calls.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_mixture_of_codes_decoded_for_blocks(form, calls, monkeypatch):
    """As with the decoded weights."""
    layer = layer_of(BF16, 256, 128, scores="sigmoid")
    router, made = parts_of(layer)
    made = made._replace(gate_up=codes_of(made.gate_up, form, BF16)[0], down=codes_of(made.down, form, BF16)[0])
    x = draw(BF16, 2000, 256)
    for rows in (513, 1000, 2000):
        results = []
        for most in (0, 2000):
            monkeypatch.setattr(mixture, "MOST_PAIRS", most)
            results.append(mixture.mix(x[:rows], router, made))
            assert len(calls) == (2 if most else 0)
        calls.clear()
        assert_near(*results, torch.bfloat16)
