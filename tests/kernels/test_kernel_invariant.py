"""In a batch-invariant step a row has the same bits whatever number of rows runs: kernel by kernel, and all launches.

The launches of whole steps are compared on GPUs that are not there (support/fake_gpu.py): the compiled kernels, with
their constants, must be the same for every number of rows, and torch must multiply nothing.
"""

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lineate.torch_ops.invariance import batch_invariant
from tests.support.experts import codes_of, draw, layer_of, parts_of
from tests.support.lowering import Lowering, lowering
from tests.support.paths import INTERPRETER, PATHS, Path

pytest.importorskip("triton")
invariant = importlib.import_module("lineate.kernels.layers.invariant")
cached = importlib.import_module("lineate.kernels.layers.cached")
latent = importlib.import_module("lineate.kernels.layers.latent")
mixture = importlib.import_module("lineate.kernels.layers.mixture")
parts = importlib.import_module("lineate.kernels.layers.parts")
quantised_products = importlib.import_module("lineate.kernels.layers.quantised_products")
pytestmark = pytest.mark.usefixtures("guarded_memory")
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FEW, MANY = (1, 2, 5, 17, 40), (1, 2, 5, 17, 33, 64, 65, 130, 300)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm() / expected.norm()) < BOUND[found.dtype]


def assert_alike(path: Path, run: Callable[[Tensor], Tensor], most: tuple[int, ...] = FEW) -> Tensor:
    """Run on chosen rows, of which run gets the numbers, and compare the bits of each row; return those of all."""
    counts = most if path.device == "cpu" else MANY
    with batch_invariant():
        whole = run(torch.arange(counts[-1], device=path.device))
        for count in counts[:-1]:
            rows = torch.randperm(counts[-1], generator=torch.Generator().manual_seed(count))[:count].to(path.device)
            found = run(rows)
            assert torch.equal(found, whole[rows]), f"the bits of {count} rows are not those of {counts[-1]}"
    return whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (70, 130), (130, 256), (65, 640)])
def test_product(path, n, k):
    x, weight, bias = draw(path, MANY[-1], k), draw(path, n, k, seed=1), draw(path, n, seed=2)
    assert invariant.serves(x, weight)
    expected = x.double() @ weight.double().T
    found = assert_alike(path, lambda rows: invariant.product(x[rows], weight))
    assert_near(found, expected[: len(found)])
    found = assert_alike(path, lambda rows: invariant.product(x[rows], weight, bias))
    assert_near(found, (expected + bias.double())[: len(found)])
    column = torch.cat((draw(path, 3, 5), x[:3]), 1)[:, 5:]  # a view whose rows are not aligned
    assert torch.equal(invariant.product(column, weight), invariant.product(x[:3].clone(), weight))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (33, 640), (64, 1536)])
def test_sums_of_parts(path, n, k):
    x, weight = draw(path, invariant.ROWS, k), draw(path, n, k, seed=1)
    number = invariant.parts_of(weight)
    assert number > 1 or k < 1000
    whole = invariant.sums(x, weight, number)
    assert_near(whole.double().sum(0).to(path.dtype), x.double() @ weight.double().T)
    for count in (1, 3, 30):
        assert torch.equal(invariant.sums(x[:count], weight, number), whole[:, :count])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "k", "m"), [(3, 20, 7), (2, 64, 70), (4, 130, 32)])
@pytest.mark.parametrize("turned", [False, True])
def test_product_of_heads(path, heads, k, m, turned):
    wide = draw(path, heads, m + k + 3, k if turned else m, seed=1)  # a view of a wider weight, as that of up_proj
    weight = wide[:, 3 : 3 + m].mT if turned else wide[:, 3 : 3 + k]
    x = draw(path, MANY[-1], heads, k)
    found = assert_alike(path, lambda rows: invariant.product_of_heads(x[rows], weight))
    assert_near(found, torch.einsum("rhk,hkm->rhm", x.double(), weight.double())[: len(found)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(33, 64), (130, 1024)])
def test_product_with_codes(path, form, n, k):
    codes, values = codes_of(draw(path, n, k, seed=1) * k**-0.5, form, path)
    x, bias = draw(path, MANY[-1], k), draw(path, n, seed=2)
    expected = x.double() @ values.double().T
    counts = (1, 2, 5) if n > 100 else FEW
    found = assert_alike(path, lambda rows: quantised_products.multiply_invariant(x[rows], codes), counts)
    assert_near(found, expected[: len(found)])
    found = assert_alike(path, lambda rows: quantised_products.multiply_invariant(x[rows], codes, bias), counts[:3])
    assert_near(found, (expected + bias.double())[: len(found)])
    number = quantised_products.invariant_parts(x, codes)
    few = x[: quantised_products.INVARIANT_ROWS] if path.device == "cuda" else x[:3]
    whole = quantised_products.multiply_invariant(few, codes, parts=number).view(number, len(few), n)
    assert_near(whole.double().sum(0).to(path.dtype), expected[: len(few)])
    one = quantised_products.multiply_invariant(few[1:2], codes, parts=number).view(number, 1, n)
    assert torch.equal(one[:, 0], whole[:, 1])


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("form", [None, "int8", "fp8"])
def test_mixture(path, kind, form):
    """With a residual, and a shared expert as one of the experts."""
    layer = layer_of(path, 64, 32, kind=kind, shared_size=32, shared_gate=kind == "swiglu")
    router, made = parts_of(layer, shared=form is None)
    if form is not None:
        gate_up, down = (codes_of(weight, form, path)[0] for weight in (made.gate_up, made.down))
        router, made = router._replace(gate=None), made._replace(gate_up=gate_up, down=down)
    most = MANY[-1] if path.device == "cuda" else 20
    x, residual = draw(path, most, 64), draw(path, most, 64, seed=3)

    def run(rows: Tensor) -> Tensor:
        assert mixture.serves(x[rows], router, made)
        return mixture.mix(x[rows], router, made, residual=residual[rows])

    whole = assert_alike(path, run, (1, 5, 20))
    assert_near(mixture.mix(x[:9], router, made, residual=residual[:9]), whole[:9].double())


@pytest.mark.parametrize("path", PATHS)
def test_attention_over_caches(path):
    """Rows of 1 to 300 (100) entries; in a batch they are cut into the parts of a single row, whatever the capacity."""
    counts = (1, 5, 17) if path.device == "cpu" else MANY
    most = 300 if path.device == "cuda" else 100
    lengths = 1 + torch.arange(counts[-1], device=path.device) * 7 % most
    q, keys, values = (draw(path, len(lengths), *s) for s in ((1, 4, 32), (most, 2, 32), (most, 2, 32)))
    r, cache = draw(path, len(lengths), 1, 4, 16), draw(path, len(lengths), most, 1, 48)

    def attend(rows: Tensor) -> Tensor:
        own = (x[rows] for x in (q, keys, values, lengths))
        return cached.cached_attention(*own, 0.2)

    def attend_latent(rows: Tensor) -> Tensor:
        return latent.latent_attention(q[rows], r[rows], cache[rows], lengths[rows], 0.2)

    for run in (attend, attend_latent):
        whole = assert_alike(path, run, counts)
        assert_near(run(torch.arange(5, device=path.device)), whole[:5].double())
    shorter = int(lengths[1])
    with batch_invariant():
        own = q[1:2], keys[1:2, :shorter].contiguous(), values[1:2, :shorter].contiguous(), lengths[1:2], 0.2
        assert torch.equal(cached.cached_attention(*own), attend(torch.arange(5, device=path.device))[1:2])


def test_the_parts_of_a_row():
    device = torch.device("cpu")
    with batch_invariant():
        found = [parts.parts_of_rows(device, rows, 2, 2, 2048) for rows in (1, 7, 256)]
        assert found == [64] * 3
        assert parts.parts_of_rows(device, 1, 1, 2, 32 * 512) == 16
        assert parts.parts_of_rows(device, 1, 64, 2, 2**16) == parts.FEWEST_PARTS
    assert parts.parts_of_rows(device, 64, 2, 2, 2048) == parts.parts_of(device, 128, 2)


def test_float32_of_many_rows_is_left_to_torch_outside_of_invariant_steps():
    router, made = parts_of(layer_of(INTERPRETER))
    x = draw(INTERPRETER, mixture.FEW + 1, 72)
    assert mixture.takes_few(x[1:]) and not mixture.takes_few(x)
    with batch_invariant():
        assert mixture.takes_few(x) and mixture.serves(x, router, made)


# Whole steps, on GPUs that are not there


@pytest.fixture(scope="module")
def process() -> Iterator[Lowering]:
    with lowering() as started:
        yield started


STEPS = {
    "bfloat16": {"dtype": "bfloat16", "hidden": 512},
    "bfloat16, odd": {"dtype": "bfloat16", "hidden": 224, "kind": "relu2"},
    "float32": {"dtype": "float32"},
    "no convolution": {"dtype": "bfloat16", "taps": 0},
    "int8": {"dtype": "bfloat16", "form": "int8"},
    "int4": {"dtype": "float16", "form": "int4", "hidden": 224, "kind": "relu2"},
    "fp8": {"dtype": "bfloat16", "form": "fp8", "overlap": True},
}


def kernels_of(process: Lowering, capability: int, options: dict[str, object]) -> set[str]:
    """Return what was compiled for the launches of a step, besides the grouping of pairs, which adds nothing up."""
    found = process.run(capability, "whole_step", {"pattern": "GKMASJUDR", **options}, lowers=False)
    assert not found.failures, "\n".join(found.failures)
    assert len(found.launched) > 50
    return {x for x in found.variants if ".grouping." not in x}


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("capability", [90, 80])
def test_all_numbers_of_rows_run_the_same_kernels(capability, step, process):
    options = STEPS[step] | {"invariant": True}
    one = kernels_of(process, capability, options | {"rows": 1})
    for rows in (2, 5, 64, 65, 300):
        other = kernels_of(process, capability, options | {"rows": rows})
        assert other == one, "\n".join(sorted(other ^ one))


@pytest.mark.cover
@pytest.mark.parametrize("step", ["bfloat16", "int8"])
def test_other_steps_run_other_kernels_for_other_numbers_of_rows(step, process):
    options = STEPS[step] | {"invariant": False}
    one, few, many = (kernels_of(process, 90, options | {"rows": rows}) for rows in (1, 5, 65))
    assert one != few != many != one
