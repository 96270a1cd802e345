"""Latent attention of a few new tokens over the cache itself, compared with softmax in float64."""

import importlib

import pytest
import torch
from torch import Tensor

from tests.support.long_caches import draw_latent, plain
from tests.support.paths import GPU_ONLY, ONE_EACH, PATHS
from tests.support.torch_calls import check_cuda_graph

pytest.importorskip("triton")
latent = importlib.import_module("lineate.kernels.layers.latent")
pytestmark = pytest.mark.usefixtures("guarded_memory")
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def run(q: Tensor, cache: Tensor, rank: int, lengths: list[int], parts: int | None = None, tiles=None) -> Tensor:
    own, shared = q.split((rank, q.shape[3] - rank), -1)
    assert latent.serves_latent(own, shared, cache)
    return latent.latent_attention(own, shared, cache, torch.tensor(lengths, device=q.device), 0.3, tiles, parts)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


CASES = {
    "one entry": ([1, 1], 1, 4, 16, 16, None),
    "rows of all lengths": ([1, 64, 65, 130, 7], 1, 4, 32, 16, None),
    "guesses": ([3, 40, 70], 3, 5, 32, 16, 4),
    "odd sizes": ([5, 33], 2, 3, 20, 6, 1),
    "no shared channels": ([90, 2], 1, 3, 32, 0, 8),
    "several tiles of queries": ([9, 40], 5, 14, 16, 16, 2),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_softmax(case, path):
    lengths, t, heads, rank, shared, parts = CASES[case]
    q, cache = draw_latent(path, lengths, t, heads, rank + shared)
    expected = plain(q, cache, cache[..., :rank], lengths, 0.3)
    assert error(run(q, cache, rank, lengths, parts), expected) < BUDGET[path.dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tiles", [(16, 64, 4, 2), (32, 16, 4, 3)], ids=str)
def test_tiles(tiles, path):
    lengths = [70, 3, 129]
    q, cache = draw_latent(path, lengths, 2, 9, 48)
    expected = plain(q, cache, cache[..., :32], lengths, 0.3)
    assert error(run(q, cache, 32, lengths, 4, latent.Tiles(*tiles)), expected) < BUDGET[path.dtype]


@pytest.mark.parametrize("path", ONE_EACH)
def test_a_row_does_not_depend_on_the_values_and_lengths_of_others(path):
    lengths = [30, 100, 65]
    q, cache = draw_latent(path, lengths, 1, 4, 32)
    together = run(q, cache, 16, lengths, 4)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = run(q[own], cache[own, : length + row], 16, [length], 4)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("path", ONE_EACH)
def test_the_cache_is_part_of_a_larger_tensor(path):
    lengths = [30, 12]
    q, cache = draw_latent(path, lengths, 2, 4, 32)
    wide = torch.full((3, 50, 1, 48), torch.nan, dtype=path.dtype, device=path.device)
    view = wide[:2, : cache.shape[1], :, 8:40]
    view.copy_(cache)
    assert torch.equal(run(q, view, 16, lengths), run(q, cache, 16, lengths))


@pytest.mark.parametrize("path", ONE_EACH)
def test_lengths_beyond_the_cache_read_nothing_outside(path):
    q, cache = draw_latent(path, [30, 12], 1, 4, 32, room=0)
    found = run(q, cache, 16, [30, 9999])
    assert torch.equal(found[:1], run(q, cache, 16, [30, 12])[:1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "rank", "shared"), [(4, 32, 16), (3, 20, 6), (2, 24, 0)])
@pytest.mark.parametrize("turns", [True, False])
def test_a_token_is_placed_into_the_cache(path, heads, rank, shared, turns):
    """Its latent vector after its norm, and the shared channels of key and queries after their rotation."""
    draw = torch.Generator().manual_seed(rank)
    rows, n = 3, 7
    y = torch.randn(rows, heads * (5 + shared) + rank + shared, generator=draw).to(path.dtype).to(path.device)
    q, own, same = y.split((heads * (5 + shared), rank, shared), -1)
    r = q.view(rows, 1, heads, -1)[..., 5:]
    weight = torch.rand(rank, generator=draw).to(path.dtype).to(path.device)
    room = torch.randn(rows, n + 2, 1, rank + shared, generator=draw).to(path.dtype).to(path.device)
    before, cache = room.clone(), room[:, :n]
    lengths = torch.tensor([0, 5, n], device=path.device)  # the last row has no room: nothing is written
    frequencies = torch.rand(shared // 2, generator=draw)
    turning = frequencies.to(path.device) if turns else None
    found = latent.place(r, own, same, (weight, 1e-5, True), turning, lengths, cache)
    angles = lengths.cpu()[:, None, None, None] * frequencies if turns else torch.zeros(())

    def turned(x: Tensor) -> Tensor:
        first, second = x.double().cpu().chunk(2, -1)
        cos, sin = angles.double().cos(), angles.double().sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    if shared:
        assert error(found, turned(r)) < BUDGET[path.dtype]
    x = own.double().cpu()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + weight.double().cpu())
    wanted = torch.cat((x, turned(same[:, None, None])[:, 0, 0]), -1)
    for row, length in enumerate(lengths.tolist()):
        if length < n:
            assert error(room[row, length, 0], wanted[row]) < BUDGET[path.dtype]
            before[row, length] = room[row, length]
    assert torch.equal(room, before), "nothing else is written"


def test_tiles_fit_the_shared_memory(monkeypatch):
    for room in (232448, 166912, 101376, 65536):
        monkeypatch.setattr(latent, "shared_memory", lambda device, room=room: room)
        for queries in (32, 160, 5):
            tiles = latent.tiles_of(torch.device("cpu"), torch.bfloat16, queries, 576)
            assert 2 * 576 * (tiles.queries + tiles.entries * (tiles.stages - 1)) < room
            assert tiles.queries <= max(16, 2 * queries)


@pytest.mark.parametrize("path", GPU_ONLY)
@pytest.mark.parametrize("t", [1, 5])
def test_the_sizes_of_kimi_linear(t, path):
    lengths = [4000, 70, 33, t]
    q, cache = draw_latent(path, lengths, t, 32, 576)
    found = run(q * 0.2, cache, 512, lengths)
    expected = plain((q * 0.2).cuda(), cache, cache[..., :512], lengths, 0.3)
    assert error(found, expected) < BUDGET[path.dtype]


@pytest.mark.gpu
def test_one_graph_serves_all_lengths():
    from tests.support.paths import BF16

    lengths = [300, 70, 900]
    q, cache = draw_latent(BF16, [1000] * 3, 2, 32, 576)
    own, shared = q.split((512, 64), -1)
    at = torch.tensor(lengths, device="cuda")

    def change(turn: int) -> None:
        at.copy_(torch.tensor([[2, 990, 64], [1005, 3, 128], [7, 8, 9]][turn]))

    check_cuda_graph(lambda: [latent.latent_attention(own, shared, cache, at, 0.1)], change)
