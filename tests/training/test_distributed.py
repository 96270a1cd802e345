"""Many ranks train as one process does; any number of ranks loads what they save."""

import errno
import os
import re
import time
from contextlib import suppress
from functools import lru_cache, partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from lineate.models import HybridLM
from lineate.models.config import AttentionConfig, ExpertsConfig, FeedConfig, HybridConfig, LinearConfig
from lineate.models.files.safetensors import CheckpointError
from lineate.training import optim
from lineate.training.batches import Batch
from lineate.training.checkpoint import write_state
from lineate.training.distributed import World, fully_shard_model
from lineate.training.sharded import full_state, load_distributed, save_distributed
from tests.support.ranks import make_store, run_ranks

TOLERANCE = 1e-4  # of the loss, over all steps
VOCAB, ROWS, LENGTH = 37, 8, 24


def make_model(pattern="GA", tied=True, experts=False):
    """Return a model whose sizes 2 and 4 ranks do not divide: with 3 heads, the fourth rank has an empty shard."""
    torch.manual_seed(0)
    return HybridLM(
        HybridConfig(
            vocab_size=VOCAB, hidden_size=30, n_layers=len(pattern), pattern=pattern, tie_embeddings=tied,
            linear=LinearConfig(3, 3, 8, 8), attention=AttentionConfig(3, 1, 10, rotary_dim=4), feed=FeedConfig(46),
            experts=ExpertsConfig(5, 2, 16) if experts else None, dense_layers=(0,) if experts else (),
        )
    )  # fmt: skip


def make_batch(step, part, parts):
    """Return ids, targets and cu_seqlens of this part of the step's rows. Later rows have far fewer targets."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=random)
    ids[:, 1::2] = (ids[:, ::2] * 3 + 1) % VOCAB  # something to learn
    cuts = torch.randint(2, LENGTH - 1, (ROWS,), generator=random)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    for row, cut in enumerate(cuts.tolist()):
        targets[row, cut - 1] = -100
        targets[row, LENGTH - 3 * row :] = -100
    mine = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    rows = torch.arange(ROWS // parts)[:, None] * LENGTH
    bounds = torch.cat([(rows + torch.stack([torch.zeros_like(cuts), cuts], 1)[mine]).flatten(), torch.tensor([0])])
    bounds[-1] = ROWS // parts * LENGTH
    return ids[mine].reshape(1, -1), targets[mine].reshape(1, -1), bounds


def train(world, model, optimizer, steps, micro=1, first=0):
    """Return losses and gradient norms; make every step in `micro` accumulated parts."""
    found = []
    for step in range(first, first + steps):
        first_part, n_parts = world.data_rank * micro, world.data_size * micro
        parts = [make_batch(step, first_part + part, n_parts) for part in range(micro)]
        count = world.sum(sum((targets != -100).sum() for _, targets, _ in parts)) / world.context_size
        total = torch.zeros((), device=world.device)
        for ids, targets, bounds in parts:
            piece = Batch(ids, targets, bounds)
            if world.context_size > 1:
                piece = piece.shard(world.context_rank, world.context_size)
            piece = piece.to(world.device)
            continues = piece.continues if world.context_size > 1 else None
            loss = model.loss_sum(piece.ids, piece.targets, piece.cu_seqlens, continues) / count
            loss.backward()
            total += loss.detach()
        world.finish_gradients(model)
        norm = world.clip(model, 0.5)
        assert not isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.stack([world.sum(total), norm.detach()]))
    return torch.stack(found).cpu()


def make_optimizer(model, fused=None):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def run_training(shard, context, model_options, steps, micro):
    world = World.start("cpu", shard=shard, context=context)
    model = make_model(**model_options)
    if shard == "none" and world.rank:
        torch.nn.init.normal_(model.embed.weight)  # wrap gives all ranks the weights of rank 0
    model = world.wrap(model)
    losses = train(world, model, make_optimizer(model), steps, micro)
    return losses, full_state(model)


DENSE, MIXED = {"pattern": "GA"}, {"pattern": "KGA", "tied": False, "experts": True}
CASES = {
    "2 ranks, FSDP2": (2, "full", 1, DENSE, 1),
    "2 ranks, FSDP2, untied, experts, accumulated": (2, "full", 1, MIXED, 2),
    "4 ranks, data": (4, "none", 1, DENSE, 1),
    "4 ranks, data, untied, experts, accumulated": (4, "none", 1, MIXED, 2),
    "4 ranks, FSDP2": (4, "full", 1, DENSE, 1),
    "2 data x 2 context": (4, "none", 2, DENSE, 1),
    "2 data x 2 context, FSDP2": (4, "full", 2, DENSE, 2),
}


@lru_cache
def one_process(steps, pattern, tied=True, experts=False):
    return run_training("none", 1, {"pattern": pattern, "tied": tied, "experts": experts}, steps, 1)


@pytest.mark.cover
@pytest.mark.parametrize(
    "name, steps",
    [("2 ranks, FSDP2", 8), ("4 ranks, data", 8), *(pytest.param(x, 50, marks=pytest.mark.slow) for x in CASES)],
)
def test_ranks_train_as_one_process(name, steps):
    size, shard, context, options, micro = CASES[name]
    expected, weights = one_process(steps, **options)
    results = run_ranks(size, run_training, shard, context, options, steps, micro)
    for losses, _ in results:
        difference = (losses - expected).abs().amax(0)
        print(f"{name}: largest difference over {steps} steps: loss {difference[0]:.2e}, norm {difference[1]:.2e}")
        assert difference[0] < TOLERANCE and difference[1] < TOLERANCE
    assert steps < 50 or expected[-1, 0] < 0.8 * expected[0, 0]
    assert all(not found for _, found in results[1:])
    found = results[0][1]
    assert found.keys() == weights.keys()
    for key in weights:
        torch.testing.assert_close(found[key], weights[key], atol=1e-3, rtol=0, msg=key)


def whole_state(model, optimizer):
    """Return every number of the model and the optimizer, on every rank, as plain tensors and values."""
    found = {f"model.{name}": x for name, x in model.state_dict().items()}
    for group, options in enumerate(optimizer.param_groups):
        found |= {f"group {group} {key}": value for key, value in options.items() if key != "params"}
    names = {x: name for name, x in model.named_parameters()}
    found |= {f"{names[x]} {key}": value for x, values in optimizer.state.items() for key, value in values.items()}
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def train_and_save(folder, shard, steps):
    world = World.start("cpu", shard=shard)
    model = world.wrap(make_model())
    optimizer = make_optimizer(model)
    if steps:
        train(world, model, optimizer, steps)
    optimizer.param_groups[0]["lr"] = 0.0012345678901234567  # as a schedule would leave it
    save_distributed(folder, model, optimizer)
    state = whole_state(model, optimizer)
    return state, train(world, model, optimizer, 2, first=steps)


def load_and_train(folder, shard, steps):
    """Return the state loaded into a model and an optimizer with other values, and the losses that follow."""
    world = World.start("cpu", shard=shard)
    model = make_model()
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(7)
    model = world.wrap(model)
    optimizer = make_optimizer(model)
    load_distributed(folder, model, optimizer)
    state = whole_state(model, optimizer)
    return state, train(world, model, optimizer, 2, first=steps)


def anywhere(size, worker, *args):
    return worker(*args) if size == 1 else run_ranks(size, worker, *args)[-1]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        if isinstance(x, torch.Tensor):
            assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
        else:
            assert found[name] == x and type(found[name]) is type(x), name


@pytest.mark.slow
@pytest.mark.parametrize("saved, loaded", [
    ((2, "full"), [(1, "none")]),
    pytest.param((4, "full"), [(1, "none"), (2, "full")], marks=pytest.mark.slow),
    pytest.param((1, "none"), [(2, "full"), (4, "full"), (4, "none")], marks=pytest.mark.slow),
    pytest.param((4, "none"), [(1, "none"), (2, "full"), (2, "none")], marks=pytest.mark.slow),
    pytest.param((2, "full"), [(4, "full"), (4, "none")], marks=pytest.mark.slow),
])  # fmt: skip
def test_checkpoint_loads_at_another_world_size(tmp_path, saved, loaded):
    folder = tmp_path / "step"
    expected, losses = anywhere(saved[0], train_and_save, folder, saved[1], 3)
    assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}
    for size, shard in loaded:
        found, more = anywhere(size, load_and_train, folder, shard, 3)
        assert_same(found, expected)
        torch.testing.assert_close(more, losses, atol=1e-5, rtol=0)


def test_save_before_the_first_step_and_model_alone(tmp_path):
    """No step is made to find out the shape of the optimizer's state, which does not exist yet."""
    model = make_model()
    optimizer = make_optimizer(model)
    save_distributed(tmp_path, model, optimizer)
    assert not optimizer.state
    other = make_model()
    torch.nn.init.ones_(other.embed.weight)
    used = make_optimizer(other)
    train(World(), other, used, 1)
    load_distributed(tmp_path, other, used)
    assert not used.state and torch.equal(other.embed.weight, model.embed.weight)
    torch.nn.init.ones_(other.embed.weight)
    load_distributed(tmp_path, other)
    assert torch.equal(other.embed.weight, model.embed.weight)


@pytest.mark.cover
def test_options_of_the_optimizer_can_stay(tmp_path):
    """A run is resumed with another weight decay."""
    model = make_model()
    optimizer = make_optimizer(model)
    train(World(), model, optimizer, 1)
    save_distributed(tmp_path, model, optimizer)
    other = make_optimizer(model)
    other.param_groups[0].update(weight_decay=0.5)
    load_distributed(tmp_path, model, other, options=False)
    assert other.param_groups[0]["weight_decay"] == 0.5
    averages = [x.state[model.embed.weight]["exp_avg"] for x in (optimizer, other)]
    assert averages[0].any() and torch.equal(*averages)


def test_muon_moves_few_matrices_at_a_time(monkeypatch):
    """A rank never holds all of a sharded model, and the steps are the same."""
    found = []
    for most in (2**26, 2000):
        monkeypatch.setattr(optim, "GATHERED_ELEMENTS", most)
        model = make_model("GAG", experts=True)
        train(World(), model, optim.make_optimizer(model, "muon", 3e-3, 0.1, (0.9, 0.95)), 2)
        found.append(model.state_dict())
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, atol=1e-6, rtol=0, msg=name)


def _truncate(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def _corrupt(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:8] + b"!" + file.read_bytes()[9:])


def _smaller_vocabulary(folder):
    torch.manual_seed(0)
    model = make_model()
    model.embed.weight = torch.nn.Parameter(model.embed.weight[:-1].detach())
    return model


DAMAGES = {
    "unfinished": (lambda folder: (folder / "state.json").unlink(), "expected a file state.json, got none"),
    "not JSON": (lambda folder: (folder / "state.json").write_text("{"), "expected files, groups and scalars"),
    "truncated": (_truncate, r"expected shard-00001-model-00001-of-00001.safetensors of \d+ bytes, got \d+ bytes"),
    "corrupt": (_corrupt, "expected a header in JSON"),
    "a shard of another save": (
        lambda folder: (folder / "more.safetensors").write_bytes(b""),
        "got more.safetensors too; remove it",
    ),
    "another model": (lambda folder: make_model("GAG"), "expected a tensor model.layers.2.* got none"),
    "a smaller model": (lambda folder: make_model("G"), "expected a model with model.layers.1.* got one without"),
    "another vocabulary": (_smaller_vocabulary, r"expected model.embed.weight of shape \(36, 30\) .* got \(37, 30\)"),
    "another dtype": (lambda folder: make_model().double(), r"in torch.float64, got \(37, 30\) in torch.float32"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(tmp_path, name):
    damage, message = DAMAGES[name]
    saved = make_model()
    with torch.no_grad():
        saved.embed.weight += 1
    save_distributed(tmp_path, saved, make_optimizer(saved))
    damaged = damage(tmp_path)
    model = damaged if isinstance(damaged, HybridLM) else make_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_distributed(tmp_path, model, make_optimizer(model))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_optimizers_that_cannot_be_saved_or_loaded(tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match=r"optimizer must be made of the model's parameters.*after World.wrap"):
        save_distributed(tmp_path / "other", model, make_optimizer(make_model()))
    optimizer = make_optimizer(model)
    optimizer.param_groups[0]["schedule"] = object()
    with pytest.raises(TypeError, match="the optimizer's schedule must be a number"):
        save_distributed(tmp_path / "object", model, optimizer)
    assert not any(tmp_path.iterdir())
    save_distributed(tmp_path / "good", model, make_optimizer(model))
    with pytest.raises(FileExistsError, match="must be a new or an empty folder"):
        save_distributed(tmp_path / "good", model, make_optimizer(model))
    half = torch.optim.AdamW([{"params": [x]} for x in model.parameters()])
    with pytest.raises(CheckpointError, match="create the same optimizer"):
        load_distributed(tmp_path / "good", model, half)


@pytest.mark.parametrize("options, variables, message", [
    ({"shard": "half"}, {}, "shard must be 'none' or 'full', got 'half'"),
    ({"context": 0}, {}, "context must be a number of ranks, at least 1, got 0"),
    ({"context": 2}, {}, "context must divide the number of processes = 1, got 2"),
    ({"device": "tpu"}, {}, "device must be 'cpu' or 'cuda'"),
    ({}, {"RANK": "0"}, "WORLD_SIZE must be set in the environment besides RANK"),
    ({}, {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK in the environment must be a whole number"),
    ({"context": 2}, {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, "number of processes = 3, got 2"),
])  # fmt: skip
def test_start_says_what_is_wrong(monkeypatch, options, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RuntimeError), match=message):
        World.start(**{"device": "cpu"} | options)


def test_alone():
    """There is no process group and no collective; shard="full" has nothing to split."""
    world = World.start("cpu", shard="full")
    assert (world.rank, world.size, world.data_rank, world.data_size, world.context_rank) == (0, 1, 0, 1, 0)
    assert world.is_main and not torch.distributed.is_initialized()
    model = make_model()
    assert world.wrap(model) is model
    x = torch.ones(2)
    assert torch.equal(world.sum(x), x) and world.sum(x) is not x
    world.barrier()
    world.close()


def no_data():
    raise ValueError("no data")


def places(context):
    world = World.start("cpu", context=context)
    found = [world.data_rank, world.context_rank, world.data_size, world.context_size, int(world.is_main)]
    small = torch.nn.Linear(2, 1, bias=False)
    if world.rank == 1:
        small.weight.grad = torch.ones(1, 2)  # the others have none, which counts as 0
    world.finish_gradients(small)
    world.barrier()
    assert world.on_main(lambda: 5, "count") == (5 if world.is_main else None)
    error, message = (ValueError, "no data") if world.is_main else (OSError, "rank 0 could not find data; its own mess")
    with pytest.raises(error, match=message):
        world.on_main(no_data, "find data")
    total = world.sum(torch.tensor(world.rank))
    world.close()
    return torch.tensor(found), small.weight.grad, total


@pytest.mark.cover
def test_places_in_the_mesh():
    results = run_ranks(4, places, 2)
    assert [found.tolist() for found, _, _ in results] == [
        [0, 0, 2, 2, 1], [0, 1, 2, 2, 0], [1, 0, 2, 2, 0], [1, 1, 2, 2, 0],
    ]  # fmt: skip
    assert all(torch.equal(gradient, torch.ones(1, 2)) and total == 6 for _, gradient, total in results)


def one_rank(folder):
    """The model stays plain, and saves like that of a single process."""
    world = World.start("cpu", shard="full")
    model = world.wrap(make_model())
    write_state(folder, model, make_optimizer(model), world)
    return (folder / "model.safetensors").is_file()


@pytest.mark.cover
def test_one_rank_of_torchrun(tmp_path):
    assert run_ranks(1, one_rank, tmp_path) == [True]


def test_a_rank_that_fails_does_not_wait_for_the_others(monkeypatch):
    """Over NCCL, destroying the group would wait for the other ranks, which wait for this one."""
    left = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(1))
    world = World(mesh=object())
    with suppress(ValueError):
        try:
            no_data()
        finally:
            world.close()
    assert not left
    world.close()
    assert left


def one_dies(call):
    """Rank 1 ends silently, as if killed; rank 0 must notice it without waiting for the timeout."""
    world = World.start("cpu")
    world.barrier()
    if world.rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="onnection"):
        world.barrier() if call == "barrier" else world.sum(torch.ones(1))
    return True


@pytest.mark.cover
@pytest.mark.parametrize("call", ["barrier", "sum"])
def test_a_rank_that_dies_is_noticed(call):
    assert run_ranks(2, one_dies, call) == [True, None]


def meet(late):
    """One rank is late, when the other may have read what the previous start left."""
    if os.environ["RANK"] == str(late):
        time.sleep(0.3)
    return int(World.start("cpu").sum(torch.tensor(1)))


@pytest.mark.cover
def test_ranks_meet_again_after_a_restart():
    """torchrun keeps the addresses of ranks that have died."""
    store = make_store()
    for late in (0, 1, 0):
        assert run_ranks(2, meet, late, store=store) == [2, 2]


def disk_is_full(folder, what):
    """If one rank cannot write, every rank reports it, and no rank waits."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    from lineate.training import sharded

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    world = World.start("cpu", shard="full")
    model = world.wrap(make_model())
    if what == "shard" and world.rank == 1:
        HuggingFaceStorageWriter.write_data = full
    if what == "state" and world.rank == 0:
        sharded.write_bytes = full
    with pytest.raises(OSError) as caught:
        save_distributed(folder, model, make_optimizer(model))
    world.barrier()  # all ranks are still there
    with pytest.raises(CheckpointError, match="the save was not finished"):
        load_distributed(folder, model)
    return str(caught.value)


@pytest.mark.cover
@pytest.mark.parametrize("what, said", [
    ("shard", ["rank 1 could not write .*: .*No space left on device"] * 2),
    ("state", ["No space left on device", "rank 0 could not write the checkpoint"]),
])  # fmt: skip
def test_a_full_disk_fails_the_save_on_all_ranks(tmp_path, what, said):
    for message, pattern in zip(run_ranks(2, disk_is_full, tmp_path / "step", what), said, strict=True):
        assert re.search(pattern, message)


def on_a_gpu(folder, shard):
    """It runs over NCCL, with AdamW's fused kernel, whose step counts are on the GPU."""
    world = World.start("cuda", shard=shard)
    # World.wrap does not shard the model of a single rank.
    wrap = partial(fully_shard_model, mesh=world.readers) if shard == "full" else world.wrap
    model = wrap(make_model())
    optimizer = make_optimizer(model, fused=True)
    losses = train(world, model, optimizer, 5)
    save_distributed(folder, model, optimizer)
    saved = whole_state(model, optimizer)
    other = wrap(make_model())
    loaded = make_optimizer(other, fused=True)
    load_distributed(folder, other, loaded)
    assert_same(whole_state(other, loaded), saved)
    same = train(world, other, loaded, 2, first=5), train(world, model, optimizer, 2, first=5)
    torch.testing.assert_close(*same, atol=1e-5, rtol=0)
    world.barrier()
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("shard", ["none", "full"])
def test_one_gpu(tmp_path, shard):
    (losses,) = run_ranks(1, on_a_gpu, tmp_path / "step", shard)
    model = make_model().cuda()
    alone = train(World(device=torch.device("cuda")), model, make_optimizer(model, fused=True), 5)
    torch.testing.assert_close(losses, alone, atol=1e-5, rtol=0)
