"""A trainer that queues a step before it reads the loss of the one before makes the same run.

On a GPU `prepare` makes such trainers; here the CPU runs ahead too, with torch's fused AdamW, which can leave an update
out by a number that a GPU has made.
"""

import itertools
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lineate.models import HybridLM
from lineate.training.loop import MAX_SKIPPED_STEPS, Trainer, TrainingStopped
from lineate.training.optim import make_optimizer
from lineate.training.prepare import prepare
from lineate.training.report import read_metrics
from tests.support.marks import slow_but
from tests.support.runs import assert_same_bits, everything, make_config, make_model

both = pytest.mark.parametrize("optimizer", slow_but(["adamw", "muon"], ["muon"]))


def make(folder: Path, ahead: bool, resume: bool = False, **changes: Any) -> Trainer:
    """Return a trainer that runs ahead or does not, in a folder of its own."""
    trainer = prepare(make_config(folder, out=str(folder / str(ahead)), **changes), resume=resume)
    trainer.runs_ahead = ahead
    for group in trainer.optimizer.param_groups:
        group["fused"] = True
    return trainer


def poison(trainer: Trainer, steps: range, what: str = "loss") -> None:
    """Make the loss of these steps NaN, or only their gradients."""

    def change(module: torch.nn.Module, ids: tuple[torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
        if trainer.step not in steps:
            return None
        if what == "norm":
            if x.requires_grad:
                x.register_hook(lambda dx: dx * math.nan)
            return None
        mask = torch.ones(x.shape[1], 1, device=x.device)
        mask[trainer.config.length + 5] = math.nan
        return x * mask

    trainer.model.embed.register_forward_hook(change)


def lines(folder: Path, ahead: bool) -> list[dict[str, Any]]:
    """Return what a run wrote after its steps, but for how fast they were."""
    found = read_metrics(folder / str(ahead))
    return [{key: x for key, x in line.items() if key != "tokens_per_second"} for line in found]


@pytest.mark.cover
@both
def test_the_run_is_the_same(tmp_path: Path, optimizer: str) -> None:
    found = {}
    for ahead in (False, True):
        trainer = make(tmp_path, ahead, optimizer=optimizer)
        trainer.run()
        trainer.close()
        found[ahead] = everything(trainer)
    assert_same_bits(found[True], found[False])
    assert lines(tmp_path, True) == lines(tmp_path, False) and len(lines(tmp_path, True)) > 12


@pytest.mark.parametrize("ahead", [False, True])
def test_the_loss_of_a_step_is_looked_at_during_the_next_one(tmp_path: Path, ahead: bool) -> None:
    trainer, seen = make(tmp_path, ahead, eval_every=4), {}
    gradients = trainer.gradients

    def note() -> Any:
        seen[trainer.step] = len([line for line in lines(tmp_path, ahead) if "loss" in line])
        return gradients()

    trainer.gradients = note  # type: ignore[method-assign]
    for _ in range(3):
        trainer.train_step()
    assert seen == {0: 0, 1: 1, 2: 1} if ahead else seen == {0: 0, 1: 1, 2: 2}  # the first is always waited for
    assert trainer.settle() and trainer.settle()
    assert [line["step"] for line in lines(tmp_path, ahead)] == [1, 2, 3]
    trainer.close()


@both
@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_bad_step_stops_the_run(tmp_path: Path, optimizer: str, what: str) -> None:
    said, found = {}, {}
    for ahead in (False, True):
        trainer = make(tmp_path, ahead, optimizer=optimizer)
        poison(trainer, range(4, 5), what)
        with pytest.raises(TrainingStopped) as stopped:
            trainer.run()
        trainer.close()
        assert trainer.step == 4
        said[ahead], found[ahead] = str(stopped.value), everything(trainer)
    assert said[True] == said[False] and "is not finite at step 5" in said[True] and f"the {what}" in said[True]
    assert lines(tmp_path, True) == lines(tmp_path, False)
    assert_same_bits(found[True], found[False])


@pytest.mark.cover
@both
def test_bad_steps_are_skipped(tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    said, found = {}, {}
    for ahead in (False, True):
        trainer = make(tmp_path, ahead, optimizer=optimizer, on_bad_loss="skip", accumulate=2)
        poison(trainer, range(6, 8))  # the first is read during the next step, the second before a checkpoint
        trainer.run()
        trainer.close()
        said[ahead], found[ahead] = capsys.readouterr().err, everything(trainer)
    assert said[True] == said[False] and "at step 7" in said[True] and "at step 8" in said[True]
    assert lines(tmp_path, True) == lines(tmp_path, False)
    assert [line["step"] for line in lines(tmp_path, True) if line.get("skipped")] == [7, 8]
    assert_same_bits(found[True], found[False])


@pytest.mark.cover
def test_skipping_ends(tmp_path: Path) -> None:
    trainer = make(tmp_path, True, on_bad_loss="skip", steps=40, save_every=0, eval_every=0)
    poison(trainer, range(2, 40))
    with pytest.raises(TrainingStopped, match=f"at step 12.*{MAX_SKIPPED_STEPS} bad steps in a row"):
        trainer.run()
    trainer.close()


@both
def test_a_bad_first_step_leaves_the_optimiser_empty(tmp_path: Path, optimizer: str) -> None:
    trainer = make(tmp_path, True, optimizer=optimizer, on_bad_loss="skip")
    poison(trainer, range(1))
    trainer.train_step()
    assert trainer.settle() and not trainer.optimizer.state
    assert [line.get("skipped") for line in lines(tmp_path, True)] == [True]
    trainer.close()


class Plain(torch.optim.Optimizer):
    """A user's optimiser, which knows nothing of updates that are called off."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                self.state[x]["step"] = 1
                x.sub_(x.grad, alpha=group["lr"])


@pytest.mark.parametrize("made", [Plain, torch.optim.SGD, torch.optim.AdamW], ids=lambda made: made.__name__)
def test_an_optimiser_whose_updates_cannot_be_called_off_is_waited_for(tmp_path: Path, made: Any) -> None:
    found = {}
    for ahead in (False, True):
        trainer = make(tmp_path, ahead, on_bad_loss="skip", save_every=0)
        trainer.optimizer = made(trainer.model.parameters())
        poison(trainer, range(4, 5))
        for n in range(7):
            trainer.train_step()
            assert len(lines(tmp_path, ahead)) == n + 1
        trainer.close()
        found[ahead] = dict(trainer.model.state_dict())
    assert_same_bits(found[True], found[False])


@both
def test_steps_by_hand_after_a_bad_one_move_the_weights(tmp_path: Path, optimizer: str) -> None:
    trainer = make(tmp_path, True, optimizer=optimizer, on_bad_loss="skip")
    poison(trainer, range(2, 3))
    for _ in range(3):
        trainer.train_step()
    trainer.settle()
    before = trainer.model.embed.weight.detach().clone()
    for x in trainer.model.parameters():
        x.grad = torch.ones_like(x)
    trainer.optimizer.step()
    assert not torch.equal(before, trainer.model.embed.weight)
    trainer.close()


@pytest.mark.cover
def test_a_checkpoint_by_hand_looks_at_the_last_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, True)
    for _ in range(3):
        trainer.train_step()
    assert len(lines(tmp_path, True)) == 2
    trainer.save()
    trainer.close()
    again = make(tmp_path, True, resume=True)
    again.run()
    again.close()
    assert [line["step"] for line in lines(tmp_path, True) if "loss" in line] == list(range(1, 13))
    bad = make(tmp_path / "bad", True)
    poison(bad, range(2, 3))
    for _ in range(3):
        bad.train_step()
    with pytest.raises(TrainingStopped, match="not finite at step 3"):
        bad.save()
    bad.close()
    assert not list((tmp_path / "bad").glob("**/step-*"))


@pytest.mark.cover
def test_checkpoints_of_a_run_are_the_same(tmp_path: Path) -> None:
    """A step may be due for a checkpoint and for nothing else."""
    found = {}
    for ahead in (False, True):
        trainer = make(tmp_path, ahead, eval_every=0, sample_every=0, save_every=3, keep=9)
        trainer.run()
        trainer.close()
        states = sorted((tmp_path / str(ahead)).glob("checkpoints/step-*/state.json"))
        found[ahead] = [{**json.loads(x.read_text()), "config": None, "metrics": None} for x in states]
        sizes = [json.loads(x.read_text())["metrics"] for x in states]
        whole = (tmp_path / str(ahead) / "metrics.jsonl").read_bytes()
        assert [whole[:size].count(b'"loss"') for size in sizes] == [3, 6, 9, 12]
    assert found[True] == found[False] and len(found[True]) == 4


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_an_error_in_a_step_does_not_hide_the_step_before(
    tmp_path: Path, bad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path, True, eval_every=0, save_every=0)
    poison(trainer, range(4, 5) if bad else range(0))
    gradients = trainer.gradients

    def fail() -> Any:
        if trainer.step == 5:
            raise MemoryError("there is none")
        return gradients()

    trainer.gradients = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="there is none"):
        trainer.run()
    trainer.close()
    assert [line["step"] for line in lines(tmp_path, True)] == ([1, 2, 3, 4] if bad else [1, 2, 3, 4, 5])
    assert ("the loss (nan) is not finite at step 5, which changed nothing" in capsys.readouterr().err) == bad


@pytest.mark.parametrize("ahead", [False, True])
def test_the_time_of_each_step_is_counted_once(tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, ticks = make(tmp_path, ahead), itertools.count()
    monkeypatch.setattr("lineate.training.loop.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    for _ in range(4):
        trainer.train_step()
    trainer.settle()
    trainer.close()
    found = read_metrics(tmp_path / str(ahead))
    assert [line["tokens"] / line["tokens_per_second"] for line in found] == [1.0] * 4


@pytest.mark.cover
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_a_signal_ends_the_run_after_the_last_good_step(tmp_path: Path, bad: bool) -> None:
    """The signal comes when the fourth step is queued and not read; if that is bad, it is left out."""
    trainer = make(tmp_path, True, save_every=0, eval_every=0)
    poison(trainer, range(3, 4) if bad else range(0))
    step = trainer.train_step

    def and_a_signal() -> None:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        step()

    trainer.train_step = and_a_signal  # type: ignore[method-assign]
    last = 3 if bad else 4
    with pytest.raises(TrainingStopped, match=f"stopped at step {last}; go on with lineate train --resume"):
        trainer.run()
    trainer.close()
    again, whole = make(tmp_path, True, resume=True), make(tmp_path, False)
    assert again.step == last
    for trainer in (again, whole):
        trainer.run()
        trainer.close()
    assert_same_bits(everything(again), everything(whole))
    steps = [line["step"] for line in lines(tmp_path, True) if "loss" in line]
    assert steps == list(range(1, 13))


@both
def test_an_update_that_is_called_off_changes_nothing(tmp_path: Path, optimizer: str) -> None:
    model = HybridLM.from_pretrained(make_model(tmp_path / "model"))
    made = make_optimizer(model, optimizer, 0.1, 0.1, (0.9, 0.95))
    found = []
    for off, value in ((None, 1.0), (0.0, 1.0), (1.0, math.nan), (1.0, 1.0)):
        for group in made.param_groups:
            group["fused"] = True
        made.found_inf = None if off is None else torch.tensor(off)  # type: ignore[attr-defined]
        for x in model.parameters():
            x.grad = torch.full_like(x, value) * torch.linspace(-1, 1, x.numel()).view(x.shape)
        before = everything(_Both(model, made))
        made.step()
        found.append((before, everything(_Both(model, made))))
    for before, after in found[2:]:
        assert_same_bits(after, before)
    assert not torch.equal(found[1][0]["embed.weight"], found[1][1]["embed.weight"])


class _Both:
    """A model with its optimiser."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer


@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.float64], [torch.float64]))
def test_an_update_that_is_not_called_off_has_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    found = []
    for off in (None, torch.tensor(0.0)):
        model = HybridLM.from_pretrained(make_model(tmp_path / "model")).to(dtype)
        made = make_optimizer(model, "muon", 0.1, 0.1, (0.9, 0.95))
        for group in made.param_groups:
            group["fused"] = True
        for step in range(3):
            made.found_inf = off  # type: ignore[attr-defined]
            for x in model.parameters():
                x.grad = torch.linspace(-1, 1 + step, x.numel(), dtype=dtype).view(x.shape)
            made.step()
        found.append(everything(_Both(model, made)))
    assert_same_bits(*found)


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float32"), ("muon", "bfloat16")])
def test_on_a_gpu_no_step_waits_for_it(tmp_path: Path, optimizer: str, dtype: str) -> None:
    options = {"on_bad_loss": "skip", "save_every": 0, "eval_every": 0, "graph": "off"}  # graphs do not call hooks
    trainer = prepare(make_config(tmp_path, device="cuda", optimizer=optimizer, dtype=dtype, **options))
    assert trainer.runs_ahead
    poison(trainer, range(6, 7))
    for _ in range(3):
        trainer.train_step()  # compiles kernels, and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = None
    for _ in range(3):
        if trainer.step == 6:
            before = trainer.model.embed.weight.detach().clone()
        if trainer.step == 7:
            assert before is not None and torch.equal(before, trainer.model.embed.weight)
        trainer.train_step()
    trainer.settle()
    trainer.close()
    found = read_metrics(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, 10))
    assert [line["step"] for line in found if line.get("skipped")] == [7]
