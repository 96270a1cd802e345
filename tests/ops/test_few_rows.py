"""Products of a few rows, as decoding has them: values, bits, and where torch multiplies instead."""

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lineate.layers.projection import project
from lineate.native import product as native
from lineate.native.build import available
from lineate.native.low_precision_matmul import has_few_rows, linear
from lineate.system import processor

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")


@pytest.mark.parametrize("out, size", [(1, 1), (3, 5), (4, 16), (7, 33), (130, 200), (1000, 1003), (50, 2150)])
@torch.no_grad()
def test_values(out, size):
    weight, bias = torch.randn(out, size + 3)[:, 2:-1], torch.randn(out)
    for rows in (1, 2, 3, 4, 5, 8, 15, 16, 19, 64):
        x = torch.randn(2, rows, size)[1]
        exact = F.linear(x.double(), weight.double(), bias.double())
        scale = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        assert (linear(x, weight, bias) - exact).abs().le(2e-7 * (2 + size**0.5) * scale).all()


@pytest.mark.parametrize("out, size", [(777, 300), (97, 2150)])
@torch.no_grad()
def test_bits_do_not_depend_on_the_other_rows_or_on_threads(out, size):
    most = native.MOST_ROWS
    x, weight, threads = torch.randn(most, size), torch.randn(out, size), torch.get_num_threads()
    together = linear(x, weight)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (1, 2, 3, 5, 8, 11, 16):
                for first in (0, most - rows):
                    assert torch.equal(linear(x[first : first + rows], weight), together[first : first + rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 100, 300, 2150])
@torch.no_grad()
def test_bits_of_weights_of_16_bits_do_not_depend_on_the_other_rows(dtype, size):
    most = native.MOST_ROWS
    x, weight = torch.randn(most, size), torch.randn(777, size).to(dtype)
    together = native.product(x, weight)
    for rows in (1, 2, 3, 5, 8, 11, 16):
        for first in (0, most - rows):
            assert torch.equal(native.product(x[first : first + rows], weight), together[first : first + rows])


@pytest.fixture(params=["0", "1"], ids=["widened", "direct"])
def products(request, monkeypatch):
    """Let torch have 16-bit products or not, whatever this processor has."""
    for name in ("LINEATE_CPU_BF16", "LINEATE_CPU_FP16"):
        monkeypatch.setenv(name, request.param)
    processor.forget()
    yield
    processor.forget()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out, size", [(7, 8), (130, 100), (777, 300), (97, 2150)])
@torch.no_grad()
def test_rows_of_16_bits_do_not_depend_on_the_other_rows(dtype, out, size, products):
    """Values are rounded once from float32, and a bias is added before that."""
    x, weight, bias = torch.randn(16, size).to(dtype), torch.randn(out, size).to(dtype), torch.randn(out).to(dtype)
    for own in (None, bias):
        alone = torch.cat([linear(row, weight, own) for row in x.split(1)])
        assert alone.dtype == dtype
        torch.testing.assert_close(
            alone.double(), F.linear(x.double(), weight.double(), None if own is None else own.double()),
            rtol=torch.finfo(dtype).eps, atol=1e-4 * size**0.5,
        )  # fmt: skip
        for rows in range(1, 17):
            for first in (0, 16 - rows):
                assert torch.equal(linear(x[first : first + rows], weight, own), alone[first : first + rows])
        assert torch.equal(linear(x[None, :5], weight, own)[0], alone[:5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8])
@torch.no_grad()
def test_all_numbers_of_16_bits(dtype, rows):
    """Each number stands alone in a row of the weight, and is multiplied by 1."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = numbers.float().expand(rows, -1)
    for column in (0, 13, 24, 31, 39):
        weight = torch.zeros(2**16, 40, dtype=dtype)
        weight[:, column] = numbers
        made = native.product(torch.ones(rows, 40), weight)
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page as Linux does")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 24, 40, 1100])
@torch.no_grad()
def test_nothing_behind_the_weight_is_read(dtype, size):
    """The weight ends where a page ends, and the next one must not be read."""
    page, bytes_each = mmap.PAGESIZE, torch.empty(0, dtype=dtype).element_size()
    for out in (1, 3, 7, 12):
        pages = -(-out * size * bytes_each // page)
        memory = mmap.mmap(-1, (pages + 1) * page)
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert not protect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0)
        weight = torch.frombuffer(memory, dtype=dtype, count=pages * page // bytes_each)[-out * size :].view(out, size)
        weight.copy_(torch.randn(out, size))
        for rows in (1, 2, 4, 8, 16):
            x = torch.randn(rows, size)
            torch.testing.assert_close(native.product(x, weight), x @ weight.float().T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_calls_from_many_threads():
    """Helpers serve one call at a time; a call that comes meanwhile works alone."""
    x, weights = torch.randn(3, 257), [torch.randn(1024, 257) for _ in range(24)]
    expected = [linear(x, weight) for weight in weights]
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with ThreadPoolExecutor(6) as pool:
            for found in pool.map(lambda _: [linear(x, weight) for weight in weights], range(18)):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@torch.no_grad()
def test_a_forked_process_has_helpers_of_its_own():
    x, weight, threads = torch.randn(4, 512), torch.randn(2048, 512), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = native.product(x, weight)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(native.product(x, weight), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(native.product(x, weight), expected)
    finally:
        torch.set_num_threads(threads)


def test_where_torch_multiplies():
    x, layer = torch.randn(2, 8), nn.Linear(8, 4)
    assert project(layer, x).requires_grad
    with torch.no_grad():
        expected = F.linear(x, layer.weight, layer.bias)
        assert not any(map(has_few_rows, (torch.randn(native.MOST_ROWS + 1, 8), x.double(), x[:0])))
        for run in (torch.func.vmap(lambda row: linear(row, layer.weight, layer.bias)), torch.jit.trace(layer, x)):
            torch.testing.assert_close(run(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            linear(torch.randn(2, 7), layer.weight)
        layer.register_forward_hook(lambda module, given, output: output + 1)
        torch.testing.assert_close(project(layer, x), expected + 1)
