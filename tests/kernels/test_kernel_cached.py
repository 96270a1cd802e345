"""Attention of a few new tokens over cached keys, compared with softmax in float64; see test_kernel_layers.py."""

import importlib

import pytest
import torch
from torch import Tensor

from tests.support.paths import GPU_ONLY, ONE_EACH, PATHS, Path

pytest.importorskip("triton")
cached = importlib.import_module("lineate.kernels.layers.cached")
parts = importlib.import_module("lineate.kernels.layers.parts")
pytestmark = pytest.mark.usefixtures("guarded_memory")


def draw(path: Path, lengths: list[int], t: int, heads: int, kv: int, size: int, room: int = 5) -> list[Tensor]:
    """Return q, k, v; what lies after a row's last token is NaN."""
    generator = torch.Generator().manual_seed(len(lengths) + t)
    rows, n = len(lengths), max(lengths) + room
    shapes = (rows, t, heads, size), (rows, n, kv, size), (rows, n, kv, size)
    q, k, v = (torch.randn(shape, generator=generator).to(path.dtype) for shape in shapes)
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = torch.nan
    return [x.to(path.device) for x in (q, k, v)]


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Run softmax attention row by row and token by token."""
    out = torch.empty(q.shape, dtype=torch.float64)
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    for row, length in enumerate(lengths):
        for i in range(t):
            seen = length - t + i + 1
            for head in range(q.shape[2]):
                keys, values = (x[row, :seen, head // group].double().cpu() for x in (k, v))
                weights = (scale * keys @ q[row, i, head].double().cpu()).softmax(0)
                out[row, i, head] = weights @ values
    return out


def run(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    assert cached.serves_cached(q, k, v)
    return cached.cached_attention(q, k, v, torch.tensor(lengths, device=q.device), scale)


CASES = {
    "one key": ([1, 1], 1, 4, 2, 16),
    "rows of all lengths": ([1, 64, 65, 130, 7], 1, 4, 1, 32),
    "guesses": ([3, 40, 70], 3, 4, 2, 16),
    "an odd head": ([5, 33], 2, 3, 3, 20),
    "more keys than parts": ([parts.MOST_PARTS * 64 + 70, 9], 1, 2, 1, 16),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_softmax(case, path):
    lengths, *sizes = CASES[case]
    q, k, v = draw(path, lengths, *sizes)
    found, expected = run(q, k, v, lengths, 0.3).double().cpu(), plain(q, k, v, lengths, 0.3)
    error = float((found - expected).norm() / expected.norm())
    assert error < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[path.dtype]


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_a_row_does_not_depend_on_the_others(path):
    lengths = [30, 100, 65]
    q, k, v = draw(path, lengths, 1, 4, 2, 16)
    together = run(q, k, v, lengths, 0.25)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = run(q[own], k[own, : length + row], v[own, : length + row], [length], 0.25)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("path", ONE_EACH)
def test_caches_are_parts_of_larger_tensors(path):
    lengths = [30, 12]
    q, k, v = draw(path, lengths, 2, 4, 2, 16)
    wide = torch.full((3, 50, 2, 40), torch.nan, dtype=path.dtype, device=path.device)
    views = [wide[:2, : k.shape[1], :, 8:24], wide.clone()[:2, : k.shape[1], :, 16:32]]
    for view, x in zip(views, (k, v), strict=True):
        view.copy_(x)
    assert torch.equal(run(q, *views, lengths, 0.25), run(q, k, v, lengths, 0.25))


@pytest.mark.parametrize("path", ONE_EACH)
def test_lengths_beyond_the_cache_read_nothing_outside(path):
    q, k, v = draw(path, [30, 12], 1, 4, 2, 16, room=0)
    found = run(q, k, v, [30, 9999], 0.25)
    assert torch.equal(found[:1], run(q, k, v, [30, 12], 0.25)[:1])


def test_parts_fill_the_device():
    found = [parts.parts_of(torch.device("cpu"), programs, 2) for programs in (1, 2, 4, 16, 64, 1000)]
    assert found == [128, 128, 64, 16, 4, parts.FEWEST_PARTS]
    assert [parts.parts_of(torch.device("cpu"), programs) for programs in (1, 2, 128)] == [128, 64, 2]


@pytest.mark.parametrize("path", GPU_ONLY)
@pytest.mark.parametrize("t", [1, 3])
def test_the_sizes_of_qwen(t, path):
    lengths = [20000, 4000, 70, t]
    q, k, v = draw(path, lengths, t, 16, 2, 256)
    found, expected = run(q, k, v, lengths, 0.0625).double().cpu(), plain(q, k, v, lengths, 0.0625)
    assert float((found - expected).norm() / expected.norm()) < 8e-3
    one = slice(0, 1)
    alone = run(q[one], k[one], v[one], lengths[:1], 0.0625).double().cpu()
    assert float((alone - expected[one]).norm() / expected[one].norm()) < 8e-3
