"""Pairs of tokens and experts in blocks of one expert, compared with plain Python."""

import importlib

import pytest
import torch

from tests.support.paths import ONE_EACH

pytest.importorskip("triton")
grouping = importlib.import_module("lineate.kernels.layers.grouping")
pytestmark = pytest.mark.usefixtures("guarded_memory")


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(
    ("rows", "width", "count", "size"),
    [
        *((1, 1, 1, 16), (5, 3, 40, 16), (64, 2, 7, 8), (90, 3, 5, 2)),
        *((800, 3, 37, 32), (800, 3, 37, 48), (9000, 8, 37, 128)),
    ],
)
def test_groups_hold_every_pair_once(path, rows, width, count, size):
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, count, (rows, width), generator=generator, dtype=torch.int32).to(path.device)
    blocks, members, kept, _ = grouping.group(chosen, count, size)
    flat, members = chosen.flatten().cpu(), members.cpu()
    assert kept == size and len(blocks) == grouping.most_blocks(rows * width, count, size)
    used = [e for e in blocks.tolist() if e >= 0]
    assert used == sorted(used) and blocks.tolist() == used + [-1] * (len(blocks) - len(used))
    found: dict[int, list[int]] = {e: [] for e in used}
    for e, own in zip(used, members.tolist(), strict=False):
        inside = [i for i in own if i >= 0]
        assert inside and own == inside + [-1] * (size - len(inside)), "pairs come first"
        assert len(found[e]) % size == 0, "a block before the last one of an expert is full"
        found[e] += inside
    assert found == {e: (flat == e).nonzero()[:, 0].tolist() for e in sorted(set(flat.tolist()))}


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(("rows", "count"), [(1, 3), (700, 37), (24000, 37)])
def test_pairs_are_sorted_as_by_torch(path, rows, count):
    chosen = torch.randint(0, count, (rows, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    order, back, ends = (x.cpu().long() for x in grouping.sort(chosen.to(path.device), count))
    flat = chosen.flatten().long()
    assert torch.equal(order, flat.sort(stable=True)[1])
    assert torch.equal(order[back], torch.arange(len(flat)))
    assert torch.equal(ends, flat.bincount(minlength=count).cumsum(0))
