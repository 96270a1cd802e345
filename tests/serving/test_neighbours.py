"""A folder of states that several processes share: each finds what any of them wrote."""

import logging
import subprocess
import sys

import pytest
import torch

from lineate.serving.cache.cache import StateCache
from tests.support.kept_states import held, hybrid_state, longer, same

IDS = list(range(20))


def open_cache(folder, budget=10**6, identity="a model", **options) -> StateCache:
    return StateCache(budget, 4, folder, identity, shared=True, poison=True, **options)


def shares(folder):
    return sorted(x.name for x in folder.glob("share-*"))


@pytest.fixture(autouse=True)
def look_always(monkeypatch):
    """Let every search look at the folder, so that no test waits."""
    monkeypatch.setattr("lineate.serving.cache.neighbours.SECONDS", 0.0)


def test_what_one_process_wrote_another_finds(tmp_path):
    one, other = open_cache(tmp_path), open_cache(tmp_path)
    assert shares(tmp_path) == ["share-0", "share-1"]
    first = hybrid_state(8)
    second = longer(first, 4)
    one.keep(IDS[:8], first, torch.arange(5.0), cost=2.0)
    one.keep(IDS[:12], second)
    assert other.find(IDS) is None  # nothing is on disk yet
    one.close()
    found = other.find(IDS)
    assert found.length == 12 and same(found.state, second) and other.stats.restored == 1
    assert other.stats.bytes == held(other)
    found = other.find(IDS[:9])
    assert found.length == 8 and same(found.state, first) and torch.equal(found.logits, torch.arange(5.0))
    assert other.find(IDS).length == 12 and other.stats.restored == 2  # it is in memory now
    other.close()
    third = open_cache(tmp_path)  # takes over the first share that is free, with its files
    assert shares(tmp_path) == ["share-0", "share-1"] and third.find(IDS).length == 12
    third.close()


def test_only_a_longer_state_is_fetched(tmp_path):
    one, other = open_cache(tmp_path), open_cache(tmp_path)
    theirs, ours = hybrid_state(8), hybrid_state(8)
    one.keep(IDS[:8], theirs)
    one.close()
    other.keep(IDS[:8], ours)
    assert same(other.find(IDS).state, ours) and other.stats.restored == 0
    other.close()


def test_the_end_of_a_prompt_serves_that_prompt_alone(tmp_path):
    one, other = open_cache(tmp_path), open_cache(tmp_path)
    one.keep(IDS[:8], hybrid_state(8))
    one.keep(IDS[:10], hybrid_state(10), torch.arange(5.0))
    one.close()
    assert other.find(IDS).length == 8
    found = other.find(IDS[:10])
    assert found.length == 10 and torch.equal(found.logits, torch.arange(5.0))
    other.close()


def test_files_of_others_are_never_removed(tmp_path):
    one, other = open_cache(tmp_path), open_cache(tmp_path, folder_bytes=1)
    one.keep(IDS[:8], hybrid_state(8))
    one.close()
    files = sorted(tmp_path.glob("share-0/*/*.safetensors"))
    assert files and other.find(IDS) is not None
    other.keep(IDS[:8], hybrid_state(8), torch.arange(5.0))  # better, as it has logits
    other.clear()
    other.close()
    assert sorted(tmp_path.glob("share-0/*/*.safetensors")) == files


def test_a_state_that_its_owner_removed_is_read_again(tmp_path, caplog):
    one, other = open_cache(tmp_path), open_cache(tmp_path)
    one.keep(IDS[:8], hybrid_state(8))
    one.keep(IDS[:12], hybrid_state(12))
    one.close()
    assert other.find(IDS[:9]).length == 8
    for file in tmp_path.glob("share-0/*/*.safetensors"):
        file.unlink()
    assert other.find(IDS).length == 8  # what is in memory stays
    other.close()


def test_damaged_files_of_others(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    one, other = open_cache(tmp_path), open_cache(tmp_path)
    one.keep(IDS[:8], hybrid_state(8))
    one.keep([3, 1, 4, 1], hybrid_state(4))
    one.close()
    for file in tmp_path.glob("share-0/*/block-*.safetensors"):
        file.write_bytes(file.read_bytes()[:-3] + b"abc")
    assert other.find(IDS) is None and "was not read" in caplog.text
    caplog.clear()
    assert other.find(IDS) is None and not caplog.text  # it is not tried again
    assert list(tmp_path.glob("share-0/*/state-*.safetensors"))
    for file in tmp_path.glob("share-0/*/state-*.safetensors"):
        file.write_bytes(b"no file of ours")
    third = open_cache(tmp_path, identity="a model")
    assert third.find([3, 1, 4, 1, 5]) is None
    third.close()
    other.close()


def test_states_of_another_model_are_not_found(tmp_path):
    one, other = open_cache(tmp_path), open_cache(tmp_path, identity="another model")
    one.keep(IDS[:8], hybrid_state(8))
    one.close()
    assert other.find(IDS) is None and shares(tmp_path) == ["share-0"]  # a share for each model
    other.close()


def test_what_a_process_alone_wrote_is_found(tmp_path):
    alone = StateCache(10**6, 4, tmp_path, "a model")
    state = hybrid_state(8)
    alone.keep(IDS[:8], state)
    alone.close()
    shared = open_cache(tmp_path)
    assert same(shared.find(IDS).state, state)
    shared.close()


@pytest.mark.cover
def test_the_share_of_a_process_that_was_killed(tmp_path):
    """Its lock ends with it, and what it had written stays."""
    program = """
import os, signal, sys, torch
from tests.support.kept_states import hybrid_state
from lineate.serving.cache.cache import StateCache
torch.manual_seed(0)
state = hybrid_state(8)
cache = StateCache(state.nbytes, 4, sys.argv[1], "a model", shared=True)
cache.keep(list(range(8)), state)
cache.keep([9] * 8, hybrid_state(8))
assert cache.stats.spilled == 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120)
    assert done.returncode == -9
    other = open_cache(tmp_path)
    assert shares(tmp_path) == ["share-0"] and other.find(IDS).length == 8
    other.close()
