"""Products with weights of 8 and 4 bits, and decoded weights, compared with float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.quantised import FORMATS, QuantisedWeight, float8_activations, quantize
from tests.support.paths import GPU, ONE_EACH, PATHS, Path, param

pytest.importorskip("triton")
quantised_products = importlib.import_module("lineate.kernels.layers.quantised_products")
products = importlib.import_module("lineate.kernels.layers.products")
Codes = quantised_products.Codes
pytestmark = pytest.mark.usefixtures("guarded_memory")
FORMS = ("int8", "int4", "fp8")
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def drawer(path: Path, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: (scale * torch.randn(shape, generator=generator)).to(path.dtype).to(path.device)


def weight_of(path: Path, form: str, *shape: int) -> tuple["Codes", Tensor]:
    """Return a random weight in tiles, and its values in float64. The encoding of this many numbers is made up."""
    form = FORMATS[form]
    generator = torch.Generator().manual_seed(sum(shape))
    codes, scales = form.shapes(shape)
    codes = torch.randint(0, 256, codes, dtype=torch.uint8, generator=generator)
    scales = torch.randn(scales, generator=generator) * shape[-1] ** -0.5 / (form.zero or 448)
    if form.are_numbers is not None:  # every code but those of NaN
        codes = torch.where(codes & 127 == 127, codes - 1, codes)
    scales = scales.to(form.scales_dtype)
    weight = QuantisedWeight(codes, scales, shape, form)
    kept = Codes(codes.to(path.device), scales.to(path.device), shape[-2], form.kernel)
    return kept, weight.decoded().double().to(path.device)


def assert_near(found: Tensor, expected: Tensor, path: Path) -> None:
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < BOUND[path.dtype]


def rms(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.double() + shift)


SIZES = [(16, 32), (3, 64), (40, 96), (33, 544), (100, 2080)]
ON_GPU = [(4096, 4096), (1000, 11008), (12352, 4096), (64, 128)]


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_product(path, form, n, k, rows):
    x, (codes, values) = drawer(path, rows)(rows, k), weight_of(path, form, n, k)
    assert quantised_products.serves(x, codes)
    assert_near(quantised_products.multiply(x, codes), x.double() @ values.T, path)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("path", [param(path) for path in GPU[1:]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), ON_GPU)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 64])
def test_product_of_a_model(path, form, n, k, rows):
    draw = drawer(path, rows)
    x, (codes, values) = draw(rows, k), weight_of(path, form, n, k)
    expected = x.double() @ values.T
    found = quantised_products.multiply(x, codes)
    assert_near(found, expected, path)
    assert torch.equal(found, quantised_products.multiply(x, codes)), "the bits changed"
    other = draw(rows, k)
    other[rows // 2] = x[rows // 2]
    assert torch.equal(quantised_products.multiply(other, codes)[rows // 2], found[rows // 2]), (
        "another row changed the bits"
    )
    parts = quantised_products.parts_of(x, codes)
    if parts > 1:
        assert_near(quantised_products.multiply(x, codes, parts=parts).sum(0), expected, path)
    for parts in (2, 4):
        if k >= 1024:
            assert_near(quantised_products.multiply(x, codes, parts=parts).sum(0), expected, path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (70, 160), (33, 2048)])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm_product_bias_and_residual(path, form, n, k, zero_centred):
    draw, (codes, values) = drawer(path, n), weight_of(path, form, n, k)
    x, norm, bias, residual = draw(1, k), draw(k), draw(n), draw(1, n)
    assert quantised_products.takes_norm(x)
    found = quantised_products.multiply(x, codes, bias, norm=(norm, 1e-5, zero_centred), residual=residual)
    expected = rms(x, norm, 1e-5, float(zero_centred)) @ values.T + bias.double() + residual.double()
    assert_near(found, expected, path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 160), (688, 1024)])
def test_gated_product(path, form, rows, n, k):
    draw, (codes, values) = drawer(path, n), weight_of(path, form, 2 * n, k)
    x, norm = draw(rows, k), draw(k)
    assert quantised_products.takes_gate(codes) and not quantised_products.takes_gate(codes._replace(rows=2 * n - 2))
    if quantised_products.takes_norm(x):
        gate, up = (rms(x, norm, 1e-5) @ values.T).chunk(2, -1)
        found = quantised_products.multiply(x, codes, norm=(norm, 1e-5, False), gated=True)
    else:
        gate, up = (x.double() @ values.T).chunk(2, -1)
        found = quantised_products.multiply(x, codes, gated=True)
    assert_near(found, F.silu(gate) * up, path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_convolution_moves_on_in_place(path, form, size, rows):
    draw = drawer(path, size)
    n, k, width = 45, 64, 37
    (codes, values), taps, past = weight_of(path, form, n, k), draw(width, size), draw(rows, width, size - 1)
    kept = past.double()
    for _ in range(size + 1):
        x = draw(rows, k)
        y = (x.double() @ values.T).to(path.dtype)
        found = quantised_products.multiply(x, codes, convolution=(taps, past))
        assert_near(found[:, width:], y[:, width:], path)
        window = torch.cat((kept, y[:, :width, None].double()), -1)
        assert_near(found[:, :width], F.silu((window * taps.double()).sum(-1)), path)
        kept = window[..., 1:]
        assert_near(past, kept, path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_experts_of_each_row(path, form, gated, every):
    x, (codes, values) = drawer(path, 1)(3, 96), weight_of(path, form, 5, 64, 96)
    experts = torch.tensor([4, 0, 2, 2, 1, 4][: 3 * every], device=path.device)
    found = quantised_products.multiply_experts(x, codes, quantised_products.Pairs(experts, every), gated=gated)
    expected = torch.stack([x[i // every].double() @ values[e].T for i, e in enumerate(experts.tolist())])
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    assert_near(found, expected, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_decoded_weight(path, form, n, k):
    codes, values = weight_of(path, form, n, k)
    assert torch.equal(quantised_products.decoded(codes, path.dtype), values.to(path.dtype))
    if n > 32:
        assert torch.equal(quantised_products.decoded(codes, path.dtype, 1, 1), values[16:32].to(path.dtype))
    ids = torch.tensor([[0, n - 1], [n // 2, 0]], device=path.device)
    assert torch.equal(quantised_products.decoded_rows(codes, ids, path.dtype), values[ids].to(path.dtype))
    outside = quantised_products.decoded_rows(codes, ids + n, path.dtype)
    assert outside[:, 0].isnan().all()


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("form", FORMS)
def test_decoded_experts(path, form):
    codes, values = weight_of(path, form, 3, 40, 96)
    assert torch.equal(quantised_products.decoded(codes, path.dtype), values.to(path.dtype))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [2**25, 16 * 96 * 2])
def test_many_rows(path, form, block, monkeypatch):
    monkeypatch.setattr(quantised_products, "BLOCK", block)
    x, (codes, values) = drawer(path, 1)(70, 96), weight_of(path, form, 120, 96)
    assert_near(quantised_products.multiply_many(x, codes), x.double() @ values.T, path)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS[1:])
def test_rows_that_share_a_shape_have_the_same_bits_in_any_company(path, form):
    x, (codes, _) = drawer(path, 3)(16, 160), weight_of(path, form, 70, 160)
    counts = (9, 10, 12) if quantised_products.uses_tensor_cores(x) else (1, 2, 7)
    whole = quantised_products.multiply(x, codes)
    for rows in counts:
        assert torch.equal(quantised_products.multiply(x[:rows], codes), whole[:rows])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_not_finite_show(path, form):
    x, (codes, _) = drawer(path, 3)(3, 64), weight_of(path, form, 16, 64)
    x[1, 5], x[2, 9] = torch.nan, torch.inf
    made = quantised_products.multiply(x, codes)
    assert made[0].isfinite().all() and made[1].isnan().all() and not made[2].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_linear_embedding_and_gradient_on_a_gpu(dtype, form, rows):
    path = Path("cuda", dtype)
    weight = quantize(torch.randn(200, 256) / 16, form, dtype).to("cuda")
    values, x = weight.decoded().double(), drawer(path, rows)(rows, 256)
    x.requires_grad_()
    y = F.linear(x, weight)
    assert_near(y.detach(), x.detach().double() @ values.T, path)
    y.sum().backward()
    assert_near(x.grad, values.sum(0).expand(rows, 256), path)
    ids = torch.randint(200, (2, 3), device="cuda")
    assert torch.equal(F.embedding(ids, weight), weight.decoded()[ids])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_product_is_the_eager_one(form):
    layer = torch.nn.Linear(256, 200, bias=False).cuda().bfloat16()
    layer.weight = torch.nn.Parameter(quantize(layer.weight, form), requires_grad=False)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


# Rows of float8


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (21, 256)])
def test_rows_are_rounded_to_float8(path, rows, k):
    x = drawer(path, rows)(rows, k)
    x[0, :128] = 0
    codes, scales = quantised_products.round_rows(x)
    filled = -(-rows // 16) * 16
    assert (codes.shape, scales.shape, scales.stride(0)) == ((filled, k), (filled, k // 128), 1)
    largest = x.float().unflatten(1, (-1, 128)).abs().amax(-1)
    torch.testing.assert_close(scales[:rows], largest / 448, rtol=1e-6, atol=0)
    assert not scales[rows:].any() and not codes[rows:].float().any()
    spread = scales[:rows].repeat_interleave(128, -1)
    half = torch.maximum(x.float().abs() * 2**-4, spread * 2**-10)
    near = (codes[:rows].float() * spread - x.float()).abs() <= 1.0001 * half
    if path.device == "cpu":  # the interpreter loses the carry of a number that is rounded up to a power of 2
        near |= torch.frexp(x / spread).mantissa.abs() > 0.96
    assert near.all()
    x[0, 3] = torch.inf
    assert quantised_products.round_rows(x)[1][0, 0].isnan()


@pytest.mark.parametrize("path", ONE_EACH)
def test_tiles_as_rows(path):
    codes, values = weight_of(path, "fp8", 100, 256)
    made, scales = quantised_products.rows_of(codes, 2, 3)
    assert (made.shape, scales.shape) == ((48, 256), (2, 48)) and scales.is_contiguous()
    found = made.double() * scales.double().t().repeat_interleave(128, -1)
    assert torch.equal(found.float(), values[32:80].float())


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1000, 512), (64, 128), (4096, 4096)])
@pytest.mark.parametrize("rows", [65, 300, 4096])
@pytest.mark.parametrize("block", [2**25, 2**19])
def test_many_rows_in_float8(n, k, rows, block, monkeypatch):
    monkeypatch.setattr(quantised_products, "BLOCK", block)
    path = Path("cuda", torch.bfloat16)
    x, (codes, values) = drawer(path, rows)(rows, k), weight_of(path, "fp8", n, k)
    if not quantised_products.takes_float8(x, codes):
        pytest.skip(quantised_products.why_not_float8(x.device))
    rounded, scales = quantised_products.round_rows(x)
    rounded = (rounded.float() * scales.repeat_interleave(128, -1))[:rows]
    with float8_activations():
        found = F.linear(x, QuantisedWeight(codes.codes, codes.scales, (n, k), "fp8", torch.bfloat16))
    assert_near(found, rounded.double() @ values.T, path)
    exact = x.double() @ values.T
    assert float((found.double() - exact).norm() / exact.norm()) < 0.05
    assert torch.equal(quantised_products.linear(x, codes), quantised_products.multiply_many(x, codes))
