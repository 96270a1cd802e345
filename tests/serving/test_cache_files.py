"""States on disk: restarts, kills, damaged and foreign files, the budget of the folder; which model a state is of."""

import json
import logging
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lineate.layers.registry import kinds
from lineate.models import preset
from lineate.models.files.safetensors import Reader, read_header, write_tensors
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.identity import identity_of
from tests.support.kept_states import held, hybrid_state, linear_state, longer, same
from tests.support.small_models import random_model

IDS = list(range(20))


def open_cache(folder, budget=10**6, identity="a model", **options) -> StateCache:
    return StateCache(budget, 4, folder, identity, poison=True, **options)


def files(folder, kind="") -> list[Path]:
    return sorted(folder.glob(f"*/{kind}*.safetensors"))


def spill_three(folder):
    """Write states of 8, 12 and 13 tokens, which share blocks; return a prompt that finds each of them, and the state.

    The last one is the end of a prompt.
    """
    first = hybrid_state(8)
    second, third = longer(first, 4), longer(first, 5)
    cache = open_cache(folder)
    assert cache.keep(IDS[:8], first, torch.arange(5.0), cost=2.0)
    assert cache.keep(IDS[:12], second)
    assert cache.keep([*IDS[:8], 9, 9, 9, 9, 9], third, torch.arange(3.0))
    cache.close()
    return {8: ([*IDS[:8], 0], first), 12: ([*IDS[:12], 0], second), 13: ([*IDS[:8], 9, 9, 9, 9, 9], third)}


@torch.inference_mode()
def test_every_mixer_survives_a_restart(tmp_path):
    letters = "".join(kind.letter for kind in kinds() if kind.built_in)
    model = random_model(replace(preset("tiny", pattern="LGTAM"), pattern=letters, n_layers=len(letters)))
    identity, ids = identity_of(model), torch.randint(256, (1, 20))
    assert identity == identity_of(model, "float32") != identity_of(model, "bfloat16")
    out = model(ids, last_only=True)
    cache = open_cache(tmp_path, 2**30, identity)
    cache.keep(ids[0], out.state, out.logits[0, -1])
    cache.close()
    again = open_cache(tmp_path, 2**30, identity)
    found = again.find(ids[0])
    assert same(found.state, out.state) and torch.equal(found.logits, out.logits[0, -1])
    more = torch.randint(256, (1, 3))
    assert torch.equal(model(more, state=found.state).logits, model(more, state=out.state).logits)
    assert again.stats.restored == 1 and again.stats.bytes == held(again)
    again.close()


@pytest.mark.gpu
def test_states_stay_on_their_device(tmp_path):
    state, ids = hybrid_state(8).to("cuda"), IDS[:8]
    cache = open_cache(tmp_path)
    cache.keep(ids, state, torch.randn(5, device="cuda"))
    assert all(x.is_cuda for x in cache.tensors()) and cache.stats.bytes == held(cache) == state.nbytes + 20
    assert same(cache.find(ids).state, state)
    cache.close()
    again = open_cache(tmp_path)
    found = again.find(ids)
    assert found.logits.is_cuda and all(x.is_cuda for layer in found.state.layers for x in layer.tensors.values())
    assert same(found.state, state)
    again.close()


def test_blocks_are_shared_on_disk_and_written_once(tmp_path):
    kept = spill_three(tmp_path)
    assert len(files(tmp_path, "state-")) == 3 and len(files(tmp_path, "block-")) == 3
    before = {x: x.stat().st_mtime_ns for x in files(tmp_path, "block-")}
    cache = open_cache(tmp_path)
    for ids, state in kept.values():
        assert same(cache.find(ids).state, state)
    assert cache.stats.restored == 3 and cache.stats.bytes == held(cache)
    assert cache.stats.file_bytes == sum(x.stat().st_size for x in files(tmp_path))
    cache.keep(IDS[:14], longer(kept[12][1], 2), torch.arange(3.0))
    cache.close()
    assert len(files(tmp_path, "block-")) == 4
    assert {x: x.stat().st_mtime_ns for x in files(tmp_path, "block-") if x in before} == before


def test_a_file_that_goes_leaves_the_blocks_that_others_need(tmp_path):
    first = hybrid_state(8)
    second, other = longer(first, 4), hybrid_state(8)
    cache = open_cache(tmp_path, budget=second.nbytes)
    for ids, state in ((IDS[:8], first), (IDS[:12], second), ([99] * 12, hybrid_state(12))):
        assert cache.keep(ids, state)
    assert cache.stats.spilled == 2 and len(files(tmp_path, "block-")) == 2
    assert cache.keep(IDS[:8], other, torch.arange(3.0))  # the first state's file goes, its block is the second's too
    assert cache.stats.files == 2 and same(cache.find([*IDS[:8], 0]).state, other)
    assert same(cache.find([*IDS[:12], 0]).state, second)
    cache.clear()
    assert files(tmp_path) == []
    cache.close()


def test_a_state_that_is_too_large_for_memory_is_served_from_disk(tmp_path):
    kept = spill_three(tmp_path)
    cache = open_cache(tmp_path, budget=10)
    assert same(cache.find([*IDS[:12], 0]).state, kept[12][1]) and cache.stats.bytes == 0
    cache.close()


@pytest.mark.cover
@pytest.mark.parametrize("kind", ["state-", "block-"])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, kind, caplog):
    """Bytes of the header and of the data are damaged in turn: other bits are never returned."""
    state = hybrid_state(8)
    cache = open_cache(tmp_path)
    cache.keep(IDS[:8], state, torch.arange(2.0))
    cache.close()
    (file,) = files(tmp_path, kind)
    whole, all_files = file.read_bytes(), {x: x.read_bytes() for x in files(tmp_path)}
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in [*range(0, header, 7), *range(header, len(whole), 3)]:
        for path, text in all_files.items():
            path.write_bytes(text)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        caplog.clear()
        cache = open_cache(tmp_path)
        found = cache.find([*IDS[:8], 0])
        assert (found is None and caplog.records) or same(found.state, state)
        assert found is None or at < header, at  # spaces of the header may change
        cache.close()


def change(file: Path, **new) -> None:
    """Write a state's file again with another description."""
    tensors = {}
    for name, entry in read_header(file).items():
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        Reader().read_into(name, entry, tensors[name])
    about = json.loads(bytes(tensors["about"].tolist())) | new
    tensors["about"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    write_tensors(file, tensors)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "truncated"),
        (lambda file: file.write_bytes(b""), "truncated"),
        (lambda file: file.write_bytes(b"no tensors here" * 9), "not a safetensors file"),
        (lambda file: write_tensors(file, {"x": torch.zeros(3)}), "expected the tensors about and ids"),
        (lambda file: change(file, format=2), "expected version 1 of the format, got 2"),
        (lambda file: change(file, identity="another"), "expected identity"),
        (lambda file: change(file, blocks=["block-0"]), "1 of them are missing"),
        (lambda file: change(file, cost="odd"), "expected blocks and cost"),
        (lambda file: [x.unlink() for x in file.parent.glob("block-*")], "1 of them are missing"),
    ],
)
def test_files_that_cannot_be_used_are_ignored_with_a_message(tmp_path, caplog, spoil, message):
    cache, state = open_cache(tmp_path), hybrid_state(8)
    cache.keep(IDS[:8], state)
    cache.close()
    (file,) = files(tmp_path, "state-")
    spoil(file)
    other = file.with_name("notes.txt")
    other.write_text("mine")
    with caplog.at_level(logging.WARNING):
        cache = open_cache(tmp_path)
    assert message in caplog.text and file.name in caplog.text
    assert cache.find([*IDS[:8], 0]) is None and cache.stats.ignored_files >= 1
    cache.keep(IDS[:8], state)
    cache.close()  # the good state replaces the bad file
    cache = open_cache(tmp_path)
    assert same(cache.find([*IDS[:8], 0]).state, state) and other.read_text() == "mine"
    cache.close()


def test_other_models_and_spacings_find_nothing(tmp_path):
    spill_three(tmp_path)
    for cache in (open_cache(tmp_path, identity="another"), StateCache(10**6, 8, tmp_path, "a model")):
        assert cache.find([*IDS[:12], 0]) is None and cache.stats.files == 0
        cache.close()


def test_the_folder_has_a_budget(tmp_path):
    limit = 30_000
    cache = open_cache(tmp_path, budget=500, folder_bytes=limit)
    for n in range(40):
        cache.keep([n] * 4, linear_state(4, size=100))
        assert cache.stats.file_bytes == sum(x.stat().st_size for x in files(tmp_path)) <= limit
    found = [cache.find([n] * 5) is not None for n in range(40)]
    assert not found[0] and all(found[-5:])  # the ones used longest ago went first
    cache.close()
    cache = open_cache(tmp_path, folder_bytes=limit // 2)
    assert sum(x.stat().st_size for x in files(tmp_path)) <= limit // 2 and cache.stats.files > 0
    cache.close()
    cache = open_cache(tmp_path, folder_bytes=0)
    assert files(tmp_path) == []
    cache.close()


def test_clearing_removes_the_files(tmp_path):
    spill_three(tmp_path)
    cache = open_cache(tmp_path)
    cache.clear()
    assert files(tmp_path) == [] and cache.stats.file_bytes == 0 and cache.find(IDS) is None
    cache.close()


def test_a_folder_has_one_owner(tmp_path):
    cache = open_cache(tmp_path)
    with pytest.raises(OSError, match="locked by another process"):
        open_cache(tmp_path)
    cache.close()
    open_cache(tmp_path).close()
    with pytest.raises(ValueError, match="identity must be given with a folder"):
        open_cache(tmp_path, identity="")


KILLED = """
import sys, torch
from lineate.layers import Memory, TokenCache
from lineate.models import ModelState
from lineate.serving.cache.cache import StateCache
cache = StateCache(3000, 4, sys.argv[1], "a model")
n = 0
while True:
    x = torch.full((1, 4, 64), float(n))
    cache.keep([n] * 4, ModelState((Memory({"m": x[:, 0]}), TokenCache({"keys": x}, 4)), 4))
    if cache.stats.spilled:
        print(cache.stats.spilled, flush=True)
    n += 1
"""


@pytest.mark.cover
def test_a_kill_at_any_moment_loses_no_finished_file(tmp_path):
    """A process is killed while it writes; all states that it had finished are found, whole."""
    run = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True)
    finished = 0
    for line in run.stdout:
        finished = int(line)
        if finished >= 12:
            break
    run.send_signal(signal.SIGKILL)
    finished = max([finished, *(int(line) for line in run.stdout.read().split("\n")[:-1])])
    run.wait()
    cache = open_cache(tmp_path)
    assert cache.stats.files >= finished and not list(tmp_path.glob("*/*.part"))
    for n in range(finished):  # all cost the same, so the oldest went first
        found = cache.find([n] * 5)
        memory, keys = found.state.layers
        assert found.length == 4 and (memory["m"] == n).all() and (keys["keys"] == n).all()
    cache.close()


def test_a_disk_that_cannot_be_written_is_logged(tmp_path, caplog, monkeypatch):
    cache = open_cache(tmp_path, budget=20)

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    for n in range(3):
        assert cache.keep([n] * 4, linear_state(4))
    assert "No space left on device" in caplog.text and cache.stats.spilled == 0
    assert list(tmp_path.glob("*/*.part")) == [] and cache.stats.file_bytes == 0
    cache.close()


def test_identity():
    """It names the weights, their dtype and the configuration."""
    config = preset("tiny", pattern="GA")
    model = random_model(config)
    known = {identity_of(model)}
    assert identity_of(random_model(config)) in known and len(identity_of(model)) == 64
    others = [
        random_model(replace(config, norm_eps=1e-5)),
        random_model(config).bfloat16(),
        random_model(replace(config, pattern="AG")),
    ]
    changed = random_model(config)
    with torch.no_grad():
        changed.layers[1].feed_norm.weight[3] += 1
    trained = random_model(config)
    with torch.no_grad():
        trained.layers[0].mixer.in_proj.weight.mul_(1.01)
    for other in (*others, changed, trained):
        assert identity_of(other) not in known
        known.add(identity_of(other))


def test_files_outlive_a_moment_without_room(tmp_path):
    """Too many open files is no damage: the state is not found now, and is found later."""
    spill_three(tmp_path)
    cache = open_cache(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert cache.find([*IDS[:12], 1]) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert cache.stats.files == 3 and cache.find([*IDS[:12], 1]).length == 12
    cache.close()
