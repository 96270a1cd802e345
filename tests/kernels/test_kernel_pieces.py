"""Attention of a piece over a longer cache, causal from the end, compared with softmax in float64."""

import importlib
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.long_caches import draw, plain
from tests.support.paths import GPU, INTERPRETER, Path, param

pytest.importorskip("triton")
pieces = importlib.import_module("lineate.kernels.layers.pieces")
pytestmark = pytest.mark.usefixtures("guarded_memory")
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PATHS = [param(path) for path in (INTERPRETER, *GPU[1:])]
ONE_EACH = [param(INTERPRETER), param(GPU[1])]
SMALL = pieces.Tiles(16, 16, 4, 2)


def inputs(path: Path, lengths: list[int], t: int, heads: int, kv: int, sizes: tuple[int, int, int], room: int = 5):
    """Return q, keys of each head, values, shared channels or None, and all channels of the keys."""
    size, value, shared = sizes
    q, k, v = draw(path, lengths, t, heads, kv, size + shared, room=room)
    v = v[..., :value].contiguous()
    k, p = k[..., :size].contiguous(), k[:, :, :1, size:].contiguous() if shared else None
    whole = k if p is None else torch.cat((k, p.expand(-1, -1, kv, -1)), -1)
    return q, k, v, p, whole


def run(q, k, v, p, lengths, size: int, bounds: list[int] | None = None, tiles=SMALL, scale: float = 0.3) -> Tensor:
    """Run it in blocks of `size` keys."""
    n = k.shape[1]
    blocks = (
        pieces.Block(k[:, at : at + size], v[:, at : at + size], None if p is None else p[:, at : at + size], at)
        for at in range(0, n, size)
    )
    bounds_there = None if bounds is None else torch.tensor(bounds, device=q.device)
    longest = 0 if bounds is None else max(b - a for a, b in pairwise(bounds))
    if not isinstance(lengths, int):
        lengths = torch.tensor(lengths, device=q.device)
    return pieces.piece_attention(q, blocks, n, lengths, scale, bounds_there, longest, tiles)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


CASES = {
    "grouped": ([40, 70, 37], 37, 4, 2, (32, 32, 0)),
    "shared channels, odd sizes": ([90, 64, 20], 20, 3, 3, (24, 20, 6)),
    "one row": ([100], 33, 2, 1, (16, 16, 16)),
    "a new prompt": ([33], 33, 2, 2, (16, 16, 0)),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [16, 23, 1000])
@pytest.mark.parametrize("case", CASES)
def test_softmax(case, size, path):
    lengths, t, heads, kv, sizes = CASES[case]
    q, k, v, p, whole = inputs(path, lengths, t, heads, kv, sizes)
    found = run(q, k, v, p, lengths, size)
    assert error(found, plain(q, whole, v, lengths, 0.3)) < BUDGET[path.dtype]


@pytest.mark.parametrize("path", PATHS)
def test_one_length_for_all_rows(path):
    q, k, v, p, whole = inputs(path, [50, 50], 19, 2, 1, (16, 16, 0), room=0)
    assert error(run(q, k, v, p, 50, 1000), plain(q, whole, v, [50, 50], 0.3)) < BUDGET[path.dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [32, 1000])
def test_packed_queries(size, path):
    """Sequences of 20, 0, 1 and 35 new tokens, each the last of its row's entries."""
    lengths, more = [40, 9, 60, 35], [20, 0, 1, 35]
    q, k, v, p, whole = inputs(path, lengths, 35, 4, 2, (16, 16, 0))
    bounds = [0, 20, 20, 21, 56]
    packed = torch.cat([q[row : row + 1, 35 - count :] for row, count in enumerate(more)], 1)
    found = run(packed, k, v, p, lengths, size, bounds)
    expected = plain(q[[0, 2, 3]], whole[[0, 2, 3]], v[[0, 2, 3]], [40, 60, 35], 0.3)  # rows of at least one token
    expected = torch.cat([expected[i, 35 - count :] for i, count in enumerate((20, 1, 35))])
    assert error(found[0], expected) < BUDGET[path.dtype]


@pytest.mark.parametrize("path", ONE_EACH)
def test_queries_and_keys_are_parts_of_larger_tensors(path):
    q, k, v, p, _ = inputs(path, [40, 30], 20, 4, 2, (16, 16, 0))
    expected = run(q, k, v, p, [40, 30], 1000)
    wide = [
        torch.full((3, x.shape[1] + 4, x.shape[2], 40), torch.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)
    ]
    views = [w[:2, : x.shape[1], :, 8:24] for w, x in zip(wide, (q, k, v), strict=True)]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    assert torch.equal(run(*views, p, [40, 30], 1000), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [param(path) for path in GPU[1:]])
@pytest.mark.parametrize("sizes", [(128, 128, 64), (256, 256, 0), (80, 80, 0), (9, 7, 4)], ids=str)
def test_real_tiles(sizes, path):
    lengths, t = [1000, 300, 700], 300
    heads, kv = (4, 4) if sizes[2] else (8, 2)
    q, k, v, p, whole = inputs(path, lengths, t, heads, kv, sizes)
    assert pieces.serves_piece(q, k, *sizes)
    expected = plain(q, whole, v, lengths, 0.05)
    for size in (k.shape[1], 257):
        found = run(q, k, v, p, lengths, size, tiles=None, scale=0.05)
        assert error(found, expected) < BUDGET[path.dtype]


def test_what_is_served():
    q, cache = torch.empty(1, 5, 2, 24, dtype=torch.bfloat16), torch.empty(1, 9, 1, 24, dtype=torch.bfloat16)
    assert pieces.serves_piece(q, cache, 20, 300 - 44, 4)
    assert not pieces.serves_piece(q, cache, 20, 257, 4)
    assert not pieces.serves_piece(q, cache, 257, 20)
    assert not pieces.serves_piece(q.float(), cache.float(), 20, 20, 4)
    assert not pieces.serves_piece(q, cache.half(), 20, 20, 4)
    assert not pieces.serves_piece(q[:, :0], cache, 20, 20, 4)
