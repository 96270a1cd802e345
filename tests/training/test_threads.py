"""A run chooses its number of threads once and keeps it; what is measured here is a clock that the test turns."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lineate.training import threads
from lineate.training.config import TrainConfig
from lineate.training.distributed import World
from lineate.training.prepare import prepare, train
from lineate.training.threads import candidates, choose_threads, fastest, feed_forward, measure, quota
from tests.support.ranks import run_ranks
from tests.support.runs import assert_same_bits, everything, make_config


@pytest.fixture(autouse=True)
def several(monkeypatch):
    """Give the process four cores and four threads, and an environment without a number."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "quota", lambda: None)
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock, and work that takes the given seconds with each number of threads."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ran = seconds, 0.0, []

    def clock(self):
        return self.now

    def work(self):
        count = torch.get_num_threads()
        self.ran.append(count)
        found = self.seconds[count]
        self.now += found(len(self.ran)) if callable(found) else found


def choose(machine, asked="auto", kept=None, world=None):
    return choose_threads(asked, kept, world or World(), machine.work, machine.clock)


@pytest.mark.parametrize(
    ("seconds", "count", "reason"),
    [
        ({1: 0.04, 2: 0.021, 3: 0.015, 4: 0.012}, 4, "3.33 times as fast as 1, measured"),  # the cores are ours
        ({1: 0.04, 2: 0.030, 3: 0.020, 4: 0.050}, 3, "4 take 2.50 times as long, measured"),  # one of them is not
        ({1: 0.04, 2: 0.041, 3: 0.060, 4: 0.080}, 1, "4 take 2.00 times as long, measured"),
        ({1: 0.04, 2: 0.040, 3: 0.040, 4: 0.040}, 4, "1.00 times as fast as 1, measured"),
    ],
)
def test_auto_takes_the_fastest_number(seconds, count, reason):
    choice = choose(Machine(seconds))
    assert (choice.count, choice.reason) == (count, reason)
    assert torch.get_num_threads() == 4  # choosing sets nothing


def test_a_number_that_is_slower_is_never_chosen():
    """Whatever the times are, no other number is faster than the chosen one."""
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        times = dict(zip((1, 2, 3, 4), torch.rand(4, generator=random).add(0.1).tolist(), strict=True))
        assert times[choose(Machine(times)).count] == min(times.values())


def test_one_interrupted_repetition_does_not_decide():
    machine = Machine({1: 0.04, 2: 0.02, 3: 0.02, 4: lambda turn: 2.0 if turn == 5 else 0.01})
    assert choose(machine).count == 4


def test_measuring_is_short_and_takes_turns():
    quick, slow = Machine(dict.fromkeys((1, 2, 3, 4), 0.001)), Machine(dict.fromkeys((1, 2, 3, 4), 0.2))
    measure([1, 2, 3, 4], quick.work, quick.clock)
    measure([1, 2, 3, 4], slow.work, slow.clock)
    assert len(quick.ran) == 4 * (threads.MOST_ROUNDS + 1)
    assert len(slow.ran) == 4 * (threads.LEAST_ROUNDS + 1)  # the first warms up
    assert slow.ran[:12] == [1, 2, 3, 4, 4, 3, 2, 1, 1, 2, 3, 4]


def test_measuring_keeps_the_number_of_threads_when_the_work_fails():
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([1, 2], fail, lambda: 0.0)
    assert torch.get_num_threads() == 4


def test_what_is_asked_for_comes_first_then_the_environment_then_the_checkpoint(monkeypatch):
    machine = Machine({})
    assert choose(machine, kept=2).count == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose(machine, kept=2).count == 4 and choose(machine, kept=2).reason == "OMP_NUM_THREADS"
    assert choose(machine, asked=7, kept=2).count == 7
    assert not machine.ran  # nothing was measured


def test_there_is_no_choice_on_a_gpu():
    machine = Machine({})
    assert choose(machine, kept=2, world=World(device=torch.device("meta"))) == threads.Choice(4, None)
    assert not machine.ran


def test_torchs_own_number_is_the_largest():
    torch.set_num_threads(2)
    assert choose(Machine({1: 2.0, 2: 1.0})).count == 2
    torch.set_num_threads(1)
    assert choose(Machine({})) == threads.Choice(1, "one core")


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (16, [1, 2, 4, 8, 15, 16])]
)
def test_candidates(most, counts):
    assert candidates(most) == counts


def test_of_equals_the_largest_is_fastest():
    assert fastest({1: 2.0, 2: 1.0, 4: 1.0}) == 4


def test_the_work_is_bounded_and_draws_nothing():
    state = torch.get_rng_state()
    shapes = {name: [tuple(x.shape) for x in feed_forward(*sizes)()] for name, sizes in SIZES.items()}
    assert torch.equal(torch.get_rng_state(), state)
    assert shapes["tiny"] == [(128, 512), (512, 128), (1271, 128)]
    assert shapes["short"] == [(128, 512), (512, 128), (40, 128)]
    assert shapes["wide"] == [(1024, 4096), (4096, 1024), (19, 1024)]


SIZES = {"tiny": (128, 2048), "short": (128, 40), "wide": (8192, 10**6)}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.max": "?"}, None),
    ],
)
def test_the_limit_of_a_container(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(tmp_path) == cores


def test_a_container_has_no_more_than_its_limit(monkeypatch):
    monkeypatch.setattr(threads, "quota", lambda: 2)
    assert choose(Machine({1: 2.0, 2: 1.0})).count == 2


def rank_chooses(slow_rank):
    """Return what a rank chooses where all have eight cores and eight threads, and what it measured."""
    for name in threads.VARIABLES:
        os.environ.pop(name, None)
    os.sched_getaffinity = lambda process: set(range(8))
    torch.set_num_threads(8)
    world = World.start("cpu")
    quicker = {1: 0.04, 2: 0.03, 3: 0.02, 4: 0.01}
    machine = Machine(quicker | {3: 0.05, 4: 0.05} if world.rank == slow_rank else quicker)
    return choose(machine, world=world).count, sorted(set(machine.ran))


def test_ranks_share_the_cores_and_agree():
    assert run_ranks(2, rank_chooses, None) == [(4, [1, 2, 3, 4])] * 2
    assert run_ranks(2, rank_chooses, 1) == [(2, [1, 2, 3, 4])] * 2


def test_one_rank_with_a_number_in_its_environment_stops_nobody(monkeypatch):
    assert [count for count, _ in run_ranks(2, rank_with_number)] == [8, 8]


def rank_with_number():
    monkey = pytest.MonkeyPatch()
    found = threads.VARIABLES[0]
    world = World.start("cpu")
    torch.set_num_threads(8)
    monkey.delenv(found, raising=False)
    if world.rank == 1:
        monkey.setenv(found, "8")
    return choose(Machine({}), world=world).count, None


# A run.


def run_with(config, *, resume=False):
    """Train to the end; return the tensors, the number of threads in its state, and what it computed with."""
    trainer = prepare(config, resume=resume)
    used = torch.get_num_threads()
    try:
        trainer.run()
    finally:
        trainer.close()
    saved = sorted((Path(config.out) / "checkpoints").glob("step-*"))[-1]
    return everything(trainer), json.loads((saved / "state.json").read_text())["threads"], used


def clocked(monkeypatch, seconds):
    """Let the next runs measure these seconds instead of the time."""
    monkeypatch.setattr(threads, "measure", lambda counts, work, clock: {count: seconds[count] for count in counts})


def test_a_resumed_run_keeps_its_number_and_its_bits(monkeypatch, tmp_path, capsys):
    clocked(monkeypatch, {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0})
    config = make_config(tmp_path, steps=6)
    whole, kept, used = run_with(config)
    assert (kept, used) == (1, 1) and torch.get_num_threads() == 4  # close() has set the former number
    assert "threads: 1 (4 take 3.00 times as long, measured)" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    clocked(monkeypatch, {1: 3.0, 2: 2.0, 3: 2.0, 4: 1.0})  # other processes have gone
    again, kept, used = run_with(config, resume=True)
    assert (kept, used) == (1, 1)
    assert "threads: 1 (as in the run so far)" in capsys.readouterr().out
    assert_same_bits(again, whole)
    asked, *_ = run_with(make_config(tmp_path, steps=6, out=str(tmp_path / "asked"), threads=1))
    assert_same_bits(asked, whole)


def test_a_number_replaces_that_of_the_run_with_a_warning(tmp_path, capsys):
    run_with(make_config(tmp_path, steps=3, threads=1))
    assert "so far" not in capsys.readouterr().err
    _, kept, used = run_with(make_config(tmp_path, steps=4, threads=2), resume=True)
    assert (kept, used) == (2, 2)
    assert "the run had threads = 1 so far" in capsys.readouterr().err


def test_a_checkpoint_of_an_earlier_version_goes_on_with_torchs_number(monkeypatch, tmp_path):
    """Earlier versions wrote no threads, and never set them."""
    run_with(make_config(tmp_path, steps=3, threads=1))
    monkeypatch.setattr("lineate.training.prepare.read_json", without_threads)
    torch.set_num_threads(2)
    assert run_with(make_config(tmp_path, steps=4), resume=True)[1:] == (2, 2)


def without_threads(file):
    values = json.loads(file.read_text())
    values.pop("threads", None)
    return values


@pytest.mark.parametrize(("value", "wrong"), [(0, "got 0"), (10**9, "got 1000000000"), ("2", "got '2'")])
def test_a_damaged_number_in_a_checkpoint(monkeypatch, tmp_path, value, wrong):
    run_with(make_config(tmp_path, steps=3, threads=1))
    monkeypatch.setattr(
        "lineate.training.prepare.read_json",
        lambda file: json.loads(file.read_text()) | ({"threads": value} if file.name == "state.json" else {}),
    )
    with pytest.raises(ValueError, match=f"expected threads .*{wrong}"):
        prepare(make_config(tmp_path), resume=True)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("value", [0, -1, 1025, "many", "-1", "2.5", "", "99999999999999999999", True, 2.0, None])
def test_a_wrong_value_is_an_error_before_anything_runs(value):
    with pytest.raises(ValueError, match="threads must be "):
        TrainConfig.from_dict({"threads": value})


@pytest.mark.parametrize(("value", "found"), [("auto", "auto"), ("2", 2), (2, 2), ("1024", 1024)])
def test_numbers_may_be_words(value, found):
    assert TrainConfig.from_dict({"threads": value}).threads == found


def test_a_run_that_cannot_begin_leaves_the_number(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="prompt must be text"):
        prepare(make_config(tmp_path, prompt="\ud800", threads=2))
    config = make_config(tmp_path, threads=1)
    monkeypatch.setattr("lineate.training.prepare.Trainer.begin", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config)
    assert torch.get_num_threads() == 4
