"""Programs that share a matrix: which part each has, and that all of them get the sum over all parts."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton")
tiles = importlib.import_module("lineate.kernels.memories.tiles")
tl = triton.language
add_parts, meet, put_part = tiles.add_parts, tiles.meet, tiles.put_part

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("groups", [1, 3, 16, 33, 67, 132, 1000])
@pytest.mark.parametrize(("width", "tile"), [(7, 64), (24, 16), (128, 64), (200, 32), (256, 64), (1000, 64)])
def test_every_row_has_one_program(groups, width, tile, monkeypatch):
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    sharing = tiles.share(groups, width, tile, CUDA)
    assert sharing.parts == 1 or groups * sharing.parts <= 132, "they would wait for each other, and not all run"
    assert sharing.parts * sharing.slice >= width
    assert sharing.slice % sharing.tile == 0 and 16 <= sharing.tile <= tile
    assert sharing.parts == 1 or sharing.parts * tiles.NARROWEST < 2 * width
    assert ("launch_cooperative_grid" in sharing.options) == (sharing.parts > 1)


def test_without_a_gpu_each_program_is_alone():
    assert tiles.share(1, 256, 64, torch.device("cpu")) == tiles.Sharing(1, 256, 64)


@triton.jit
def _add_up(x, y, room, arrived, turns, PARTS: tl.constexpr, N: tl.constexpr):
    """Store y[group, turn], the sum over parts of x[group, turn, part]; each part computes it itself."""
    group, part = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, N), tl.arange(0, N)
    room += group * (2 * PARTS * N * N)
    at = i[:, None] * N + j[None, :]
    for turn in range(turns):
        place = (group * turns + turn) * PARTS + part
        own = tl.load(x + place * (N * N) + at)
        put_part(own, room, turn, i, j, PARTS, N, N)
        meet(arrived + group, turn, PARTS)
        tl.store(y + place * (N * N) + at, add_parts(own, room, turn, i, j, PARTS, N, N))


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "parts"), [(1, 2), (16, 8), (2, 64), (132, 1)])
def test_sums_of_a_group(groups, parts):
    turns, n = 500, 16
    x = torch.randint(-1000, 1000, (groups, turns, parts, n, n), device="cuda").float()
    y = torch.full_like(x, torch.nan)
    sharing = tiles.Sharing(parts, 16, 16)
    room, arrived = sharing.room(groups, n * n, CUDA)
    room.fill_(torch.nan)
    _add_up[(groups, parts)](x, y, room, arrived, turns, PARTS=parts, N=n, **sharing.options)
    assert y.equal(x.sum(2, keepdim=True).expand_as(x))
