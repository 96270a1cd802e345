"""Caches of two ranks find and keep the same states, each its own part, whatever one of them has lost."""

import shutil
from pathlib import Path
from threading import current_thread

import pytest
import torch

from lineate.serving.cache import spill
from lineate.serving.cache.blocks import Tensors
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.peers import LinkedPeers
from tests.support.kept_states import hybrid_state, linear_state, same
from tests.support.linked import Linked, on_all

SPACING = 4
IDS = tuple(range(80))


class Both:
    """The caches of two ranks in one process."""

    def __init__(self, folder: Path | None = None, budget: int = 2**20) -> None:
        self.linked = Linked(2)

        def make(link):
            own = None if folder is None else folder / str(link.rank)
            return StateCache(budget, SPACING, own, "a model", poison=True, peers=LinkedPeers(link))

        self.caches = on_all(self.linked.links, make)

    def keep(self, length: int, states, **more) -> list[bool]:
        return self._each(lambda cache, rank: cache.keep(IDS[:length], states[rank], **more))

    def find(self, length: int) -> list:
        """Return what each rank finds for a prompt that is one token longer."""
        return self._each(lambda cache, _: cache.find((*IDS[:length], 99)))

    def close(self) -> None:
        self._each(lambda cache, _: cache.close())
        self.linked.close()

    def _each(self, call) -> list:
        found = on_all(self.linked.links, lambda link: call(self.caches[link.rank], link.rank))
        counts = [cache.stats for cache in self.caches]
        assert counts[0] == counts[1]
        return found


def parts(tokens: int, make=hybrid_state) -> list:
    """Return the parts of one state."""
    return [make(tokens) for _ in range(2)]


def test_each_rank_has_its_own_part(tmp_path):
    both, states = Both(tmp_path), {n: parts(n) for n in (8, 12)}
    for n, own in states.items():
        assert both.keep(n, own) == [True, True]
    for _ in range(2):
        for n, own in states.items():
            found = both.find(n)
            assert all(x.length == n and same(x.state, part) for x, part in zip(found, own, strict=True))
        both.close()
        both = Both(tmp_path)  # now from the disk
    both.close()


def files(folder: Path, rank: int) -> list[Path]:
    return sorted((folder / str(rank)).rglob("state-*.safetensors"))


def test_a_part_that_is_lost_loses_the_state(tmp_path):
    both = Both(tmp_path)
    both.keep(8, parts(8, linear_state))
    both.keep(12, parts(12, linear_state))
    both.close()
    gone = files(tmp_path, 1)[0]
    gone.unlink()
    both = Both(tmp_path)
    assert [len(files(tmp_path, rank)) for rank in range(2)] == [1, 1]
    assert {x.name for x in files(tmp_path, 0)} == {x.name for x in files(tmp_path, 1)}
    assert sum(both.find(n)[0] is not None and both.find(n)[0].length == n for n in (8, 12)) == 1
    both.close()


@pytest.mark.parametrize("damage", ["a bit", "nothing left"])
def test_a_part_that_is_damaged_loses_the_state(tmp_path, damage, caplog):
    """It is found out only when the part is read; the other rank then gives its part up."""
    both = Both(tmp_path)
    both.keep(8, parts(8))
    both.close()
    both = Both(tmp_path)
    (file,) = files(tmp_path, 1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content if damage == "a bit" else b"")
    assert both.find(8) == [None, None]
    assert files(tmp_path, 0) == files(tmp_path, 1) == []
    assert "cannot be used" in caplog.text
    assert both.keep(8, parts(8)) == [True, True]
    assert [x.length for x in both.find(8)] == [8, 8]
    both.close()


def test_parts_of_two_writings_are_not_put_together(tmp_path):
    """Rank 1's disk is set back to an older state: the same tokens and cost, but other numbers."""
    both = Both(tmp_path)
    both.keep(8, parts(8))
    both.close()
    shutil.copytree(tmp_path / "1", tmp_path / "older")
    both = Both(tmp_path)
    on_all(both.linked.links, lambda link: both.caches[link.rank].clear())
    both.keep(8, parts(8))
    both.close()
    shutil.rmtree(tmp_path / "1")
    shutil.copytree(tmp_path / "older", tmp_path / "1")
    both = Both(tmp_path)
    assert both.find(8) == [None, None]
    both.close()


def test_a_part_that_cannot_be_written_is_written_by_none(tmp_path, monkeypatch, caplog):
    real = spill.seal

    def full(path, *more):
        if path.is_relative_to(tmp_path / "1"):
            raise OSError("the disk is full")
        return real(path, *more)

    monkeypatch.setattr(spill, "seal", full)
    both = Both(tmp_path)
    both.keep(8, parts(8))
    both.close()
    assert files(tmp_path, 0) == files(tmp_path, 1) == [] and "the disk is full" in caplog.text
    assert list((tmp_path / "0").rglob("block-*")) == []


@pytest.mark.parametrize("finding", [False, True])
def test_a_part_that_finds_no_memory_is_kept_and_found_by_none(finding, monkeypatch, caplog):
    both, states = Both(), parts(8)
    if finding:
        assert both.keep(8, states) == [True, True]
    short = []

    def fails(real):
        def call(x, *more):
            if short and current_thread().name == short[0]:
                raise RuntimeError("can't allocate memory")
            return real(x, *more)

        return call

    monkeypatch.setattr(Tensors, "copy", fails(Tensors.copy))
    monkeypatch.setattr(torch.Tensor, "clone", fails(torch.Tensor.clone))

    def call(cache, rank):
        if rank:
            short.append(current_thread().name)
        return cache.find((*IDS[:8], 99)) if finding else cache.keep(IDS[:8], states[rank])

    found = on_all(both.linked.links, lambda link: call(both.caches[link.rank], link.rank))
    assert found == ([None, None] if finding else [False, False])
    short.clear()
    counts = [cache.stats for cache in both.caches]
    assert counts[0] == counts[1] and "allocate" in caplog.text
    assert both.keep(8, states) == [True, True] and [x.length for x in both.find(8)] == [8, 8]
    both.close()


def test_evictions_are_the_same(tmp_path):
    """More states than fit, in memory and on disk, some used again; seconds are those that every rank was told."""
    both = Both(tmp_path, budget=100)
    for n in range(1, 20):
        both.keep(4 * n, parts(4 * n, linear_state), cost=n % 3)
        both.find(4 * (n // 2 + 1))
    assert both.caches[0].stats.evictions > 3
    both.close()
    assert [x.name for x in files(tmp_path, 0)] == [x.name for x in files(tmp_path, 1)]
