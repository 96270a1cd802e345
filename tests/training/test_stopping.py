"""Signals end a run within a moment, wherever they arrive, and a resumed run ends like an uninterrupted one."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lineate.cli import main
from lineate.training import checkpoint, stopping
from lineate.training.config import TrainConfig
from lineate.training.loop import Trainer, TrainingStopped
from lineate.training.prepare import prepare, train
from lineate.training.report import read_metrics
from tests.support.ranks import Started
from tests.support.runs import assert_same_bits, everything, make_config, short_samples


def be_stuck(config: str, signals: list[int], grace: float) -> None:
    """A run whose fifth step is one call that does not return: the main thread sleeps and no signal wakes it."""
    real, stopping.GRACE_SECONDS = Trainer.gradients, grace

    def send() -> None:
        for n, number in enumerate(signals):
            time.sleep(1.1 * stopping.SAME_REQUEST_SECONDS if n else 0.1)
            os.kill(os.getpid(), number)

    def gradients(self: Trainer) -> Any:
        if self.step == 4:
            threading.Thread(target=send).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
            time.sleep(600)
        return real(self)

    Trainer.gradients = gradients  # type: ignore[method-assign]
    sys.argv[1:] = ["train", "--config", config]
    with short_samples():
        main()


def train_alone(source: Path, resume: bool) -> None:
    with short_samples():
        prepare(TrainConfig.load(source), resume=resume).run()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder with data, a model and an uninterrupted run, and that run's final tensors."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, everything(train(make_config(folder, sample_every=4)))


def lines(run: Path) -> list[tuple[int, float | None, float | None]]:
    return [(x["step"], x.get("loss"), x.get("validation_loss")) for x in read_metrics(run)]


def resume_and_compare(config: TrainConfig, finished: tuple[Path, dict[str, torch.Tensor]]) -> None:
    trainer = train(config, resume=True)
    assert_same_bits(finished[1], everything(trainer))
    assert lines(Path(config.out)) == lines(finished[0] / "run")
    assert trainer.best == min(loss for _, _, loss in lines(Path(config.out)) if loss is not None)


@pytest.mark.cover
@pytest.mark.parametrize(
    ("method", "step", "number"),
    [
        ("gradients", 0, signal.SIGTERM),  # nothing was learnt, so nothing is saved
        ("gradients", 3, signal.SIGTERM),  # this step already has a checkpoint
        ("gradients", 4, signal.SIGTERM),
        pytest.param("gradients", 5, signal.SIGINT, marks=pytest.mark.slow),
        ("evaluate", 5, signal.SIGTERM),  # the resumed run evaluates first
        ("sample", 8, signal.SIGINT),
        pytest.param("evaluate", 12, signal.SIGTERM, marks=pytest.mark.slow),  # all steps are done
    ],
)
def test_work_without_end_is_left(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, method: str, step: int, number: int
) -> None:
    config = make_config(finished[0], out=str(tmp_path / "run"), sample_every=4)
    real = getattr(Trainer, method)

    def endless(self: Trainer) -> Any:
        if self.step == step:
            os.kill(os.getpid(), number)
            for _ in range(500):
                time.sleep(0.01)
            pytest.fail("the signal had to wait")
        return real(self)

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, method, endless)
        with pytest.raises(TrainingStopped, match=rf"^stopped at step {step}; go on with lineate train --resume \S+$"):
            train(config)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    saved = checkpoint.checkpoints(tmp_path / "run/checkpoints")
    assert [int(path.name[5:]) for path in saved[:1]] == [step][: step > 0]
    assert all(checkpoint.problem(path) is None for path in saved)
    resume_and_compare(config, finished)


@pytest.mark.cover
def test_a_signal_in_a_save_waits_for_it(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is not ended during a save, however long it takes."""
    config = make_config(finished[0], out=str(tmp_path / "run"), sample_every=4)
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.01)
    real = checkpoint.write_state

    def slow(path: Path, *args: Any) -> None:
        if path.name == ".step-000006.part":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # as timeout(1) does: one request
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
        real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_state", slow)
        with pytest.raises(TrainingStopped, match="stopped at step 6; go on with"):
            train(config)
    assert checkpoint.problem(tmp_path / "run/checkpoints/step-000006") is None
    resume_and_compare(config, finished)


@pytest.mark.cover
def test_a_stop_that_cannot_be_saved_says_so(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(finished[0], out=str(tmp_path / "run"), sample_every=4)
    real, write = Trainer.gradients, checkpoint.write_state

    def signalled(self: Trainer) -> Any:
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self)

    def full(path: Path, *args: Any) -> None:
        if path.name == ".step-000005.part":
            raise OSError(28, "No space left on device")
        write(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "gradients", signalled)
        patch.setattr(checkpoint, "write_state", full)
        with pytest.raises(TrainingStopped, match=r"stopped at step 5; .*, from step 3: later ones were not saved"):
            train(config)
    resume_and_compare(config, finished)


@pytest.mark.cover
@pytest.mark.parametrize(
    ("signals", "grace"),
    [
        ([signal.SIGTERM], 0.5),
        pytest.param([signal.SIGTERM, signal.SIGTERM], 1e6, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGTERM], 0.5, marks=pytest.mark.slow),
    ],
    ids=["once", "twice", "SIGINT first"],
)
def test_a_call_without_end_is_cut(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, signals: list[int], grace: float
) -> None:
    """The run cannot save then, and earlier checkpoints stay intact."""
    config = make_config(finished[0], out=str(tmp_path / "run"), sample_every=4)
    checkpoint.write_json(tmp_path / "c.json", config.to_dict())
    done = Started(be_stuck, str(tmp_path / "c.json"), signals, grace).wait()
    message = f"lineate: stopped at once after step 4; go on with lineate train --resume {config.out}, from step 3"
    assert done.code == 1 and done.err == f"{message}: later ones were not saved\n", done.err
    plain = make_config(finished[0], out=str(tmp_path / "plain"), sample_every=4)
    checkpoint.write_json(tmp_path / "plain.json", plain.to_dict())
    for source, resume in ((tmp_path / "plain.json", False), (Path(config.out) / "config.json", True)):
        done = Started(train_alone, source, resume).wait()
        assert done.code == 0, done.err
    ends = [prepare(each, resume=True) for each in (plain, config)]
    for trainer in ends:
        trainer.close()
    assert_same_bits(*map(everything, ends))
    assert lines(Path(config.out)) == lines(Path(plain.out))


def test_other_threads_leave_signals_alone(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    handler = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, make_config(tmp_path, steps=1, warmup=0)).result().step == 1
    assert signal.getsignal(signal.SIGTERM) is handler
    trainer = prepare(make_config(tmp_path, steps=2, warmup=0), resume=True)
    trainer.close()
    assert trainer.step == 1


def test_long_steps_get_more_time_but_not_for_ever() -> None:
    signals = stopping.Signals()
    for seconds, grace in ((0.1, 5.0), (6.0, 12.0), (600.0, 30.0), (1.0, 5.0)):
        signals.took(seconds)
        assert signals.grace == grace
