"""Checkpoints of a run are whole or absent, and exact to the bit, whatever kills the process or refuses the write."""

import errno
import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lineate.models import HybridLM
from lineate.models.files import safetensors as files
from lineate.text.tokenizer import make_tokenizer
from lineate.training import checkpoint
from lineate.training.config import TrainConfig
from lineate.training.loop import Trainer, TrainingStopped
from lineate.training.prepare import prepare, train
from lineate.training.report import read_metrics
from tests.support.marks import slow_but
from tests.support.ranks import Started
from tests.support.runs import assert_same_bits, everything, make_config


def live(source: Path, resume: bool, moment: int) -> None:
    """A run that dies at the given event: a step, or a call that makes something last on the disk."""
    left = moment

    def counted(call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counting

    lasting = [(os, name) for name in ("fsync", "rename", "replace", "unlink")]
    for owner, name in (*lasting, (shutil, "rmtree"), (Trainer, "train_step")):
        setattr(owner, name, counted(getattr(owner, name)))
    prepare(TrainConfig.load(source), resume=resume).run()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder with data, a model and an uninterrupted run of 12 steps, and that run's final tensors."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, everything(train(make_config(folder)))


def copy(folder: Path, out: Path, **changes: object) -> TrainConfig:
    """Return the config of a copy of the run in a folder."""
    shutil.copytree(folder / "run", out)
    return make_config(folder, out=str(out), **changes)


def die_and_resume(folder: Path, moments: list[int], **changes: object) -> None:
    """Kill a run after this many events of each life, then let it end; compare it with an uninterrupted run.

    Both run in processes of their own: what earlier tests have left in this one may give a product other last bits.
    """
    alone = make_config(folder, out=str(folder / "plain"), **changes)
    (folder / "plain.json").write_text(json.dumps(alone.to_dict()))
    done = Started(live, folder / "plain.json", False, 10**9).wait()
    assert done.code == 0, done.err
    plain, config = loaded(alone), make_config(folder, **changes)
    (folder / "wanted.json").write_text(json.dumps(config.to_dict()))
    run, killed = folder / "run", 0
    for moment in (*moments, 10**9):
        resume = (run / "config.json").is_file()
        source = run / "config.json" if resume else folder / "wanted.json"
        done = Started(live, source, resume, moment).wait()
        assert done.code in (0, -signal.SIGKILL), done.err
        killed += done.code != 0
        if done.code == 0:
            break
    assert killed >= 1 and done.code == 0
    assert_same_bits(everything(plain), everything(loaded(config)))
    for name, x in HybridLM.from_pretrained(run / "model", progress=False).state_dict().items():
        assert torch.equal(x, plain.model.state_dict()[name]), name
    same = [
        [(x["step"], x.get("loss"), x.get("validation_loss")) for x in read_metrics(Path(y))]
        for y in (run, plain.config.out)
    ]
    assert same[0] == same[1]
    assert not list((run / "checkpoints").glob(".*"))


def loaded(config: TrainConfig) -> Trainer:
    trainer = prepare(config, resume=True)
    trainer.close()
    return trainer


@pytest.mark.cover
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    die_and_resume(tmp_path, [31])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_killed_20_times_ends_as_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    draw = random.Random(optimizer)
    die_and_resume(tmp_path, [draw.randrange(1, 60) for _ in range(20)], steps=60, optimizer=optimizer)


@pytest.mark.cover
@pytest.mark.parametrize(
    "changes",
    slow_but(
        [{"optimizer": "adamw", "dtype": "bfloat16"}, {"optimizer": "muon", "recompute": True, "accumulate": 2}],
        [{"optimizer": "muon", "recompute": True, "accumulate": 2}],
    ),
    ids=str,
)
def test_resume_is_exact_and_repeats_no_line(tmp_path: Path, changes: dict[str, object]) -> None:
    plain = train(make_config(tmp_path, out=str(tmp_path / "plain"), **changes))
    config = make_config(tmp_path, **changes)
    first = prepare(config)
    for _ in range(8):  # only step 6 is saved
        first.train_step()
        if first.step == 6:
            assert first.save()
    first.close()
    torch.rand(3)  # random numbers between two lives do not matter
    second = train(config, resume=True)
    assert_same_bits(everything(plain), everything(second))
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line] == list(range(1, 13))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_exact_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    changes = {"device": "cuda", "dtype": dtype, "model": "tiny", "length": 128, "sample_every": 6}
    plain = train(make_config(tmp_path, out=str(tmp_path / "plain"), **changes))
    first = prepare(make_config(tmp_path, **changes))
    for _ in range(8):
        first.train_step()
        if first.step == 6:
            assert first.save()
    first.close()
    assert_same_bits(everything(plain), everything(train(make_config(tmp_path, **changes), resume=True)))


@pytest.mark.cover
def test_more_steps_can_be_asked_for(tmp_path: Path) -> None:
    train(make_config(tmp_path, steps=3))
    shutil.rmtree(tmp_path / "start")  # the initial model is not needed
    assert train(make_config(tmp_path, steps=5), resume=True).step == 5
    assert train(make_config(tmp_path, steps=5), resume=True).step == 5  # nothing is left to do
    with pytest.raises(ValueError, match="steps must be at least 5, which are done, got 4"):
        prepare(make_config(tmp_path, steps=4), resume=True)


@pytest.mark.cover
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("truncate", "model.safetensors should have"),
        ("flip", "the contents of optimizer.safetensors have changed"),
        ("remove", "state.json is missing"),
        ("manifest", "no manifest.json: the save was not finished"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(
    finished: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    damage: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = copy(finished[0], tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-000012"
    if damage == "truncate":
        os.truncate(newest / "model.safetensors", 1000)
    elif damage == "flip":
        data = bytearray((newest / "optimizer.safetensors").read_bytes())
        data[-1] ^= 1
        (newest / "optimizer.safetensors").write_bytes(data)
    else:
        (newest / ("state.json" if damage == "remove" else "manifest.json")).unlink()
    trainer = prepare(config, resume=True)
    said = capsys.readouterr()
    assert f"skipped the checkpoint {newest}: " in said.err and why in said.err
    assert trainer.step == 9 and "step-000009" in said.out
    trainer.run()
    trainer.close()
    assert_same_bits(finished[1], everything(trainer))
    assert checkpoint.problem(newest) is None  # it was recomputed


@pytest.mark.cover
def test_when_all_checkpoints_are_damaged_nothing_is_thrown_away(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    config = copy(finished[0], tmp_path / "run")
    for path in checkpoint.checkpoints(tmp_path / "run/checkpoints"):
        os.truncate(path / "model.safetensors", 1000)
    lines = read_metrics(tmp_path / "run")
    with pytest.raises(ValueError, match=r"needs a whole checkpoint, got 2 in .*, all damaged; remove them to start"):
        prepare(config, resume=True)
    assert read_metrics(tmp_path / "run") == lines


@pytest.mark.cover
def test_a_folder_has_one_process_at_a_time(finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    first = prepare(copy(finished[0], tmp_path / "run", steps=14), resume=True)
    before = (tmp_path / "run/config.json").read_text()
    with pytest.raises(ValueError, match="run is being trained by another process"):
        prepare(replace(first.config, steps=20), resume=True)
    assert (tmp_path / "run/config.json").read_text() == before
    first.close()
    prepare(first.config, resume=True).close()


@pytest.mark.cover
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_full_disk_costs_one_checkpoint_and_says_so(
    finished: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, run = files.write_bytes, tmp_path / "run"

    def full(file: Path, pieces: object) -> None:
        if file.parent.name in (".step-000009.part", ".step-000012.part") and name in file.name:
            file.write_bytes(b"what fitted")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write_bytes", full)
    monkeypatch.setattr(checkpoint, "write_bytes", full)
    trainer = train(make_config(finished[0], out=str(run), keep=9))
    assert (
        "step 9 was not saved (No space left on device); the newest checkpoint is still step-000006"
        in capsys.readouterr().err
    )
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["step-000003", "step-000006"]  # and no leftovers
    assert_same_bits(finished[1], everything(trainer))


@pytest.mark.cover
def test_a_disk_that_is_full_for_everything_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, open_file = tmp_path / "run/metrics.jsonl", Path.open

    def open_full(file: Path, *how: Any, **options: Any) -> Any:
        found = open_file(file, *how, **options)
        return FullFile(found) if file == metrics else found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        trainer = prepare(make_config(tmp_path))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner in (files, checkpoint):
        monkeypatch.setattr(owner, "write_bytes", full)
    monkeypatch.setattr("lineate.models.files.checkpoint.write_tensors", full)
    size = trainer.report.position
    with pytest.raises(
        TrainingStopped, match=r"was not saved \(No space left on device\), nor was any checkpoint; make"
    ):
        trainer.run()
    trainer.close()
    assert trainer.step == 12 and metrics.stat().st_size == size
    assert "lacks lines from step 1 on" in capsys.readouterr().err
    assert not list((tmp_path / "run/checkpoints").iterdir())


class FullFile:
    """A file whose disk takes only half of a line."""

    def __init__(self, file: object) -> None:
        self.file = file

    def write(self, line: bytes) -> int:
        return self.file.write(line[: len(line) // 2])  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_pruning_keeps_the_last_good_ones(tmp_path: Path) -> None:
    def save(step: int, keep: int) -> bool:
        write = lambda folder: files.write_bytes(folder / "a", [b"a" * step])  # noqa: E731
        return checkpoint.save(tmp_path, step, write, checkpoint.World(), keep, print)

    def names() -> list[int]:
        return [int(path.name[5:]) for path in checkpoint.checkpoints(tmp_path)]

    for step in (1, 2, 3):
        assert save(step, 3)
    os.truncate(tmp_path / "step-000003/a", 1)
    checkpoint.prune(tmp_path, 1)
    assert names() == [3, 2]  # 3, the newest, is damaged and left for inspection; 2 is the last good one
    assert save(4, 2) and names() == [4, 2]
    (tmp_path / ".step-000005.part").mkdir()  # left by a killed process
    assert save(5, 1) and names() == [5] and not list(tmp_path.glob(".*"))
    os.truncate(tmp_path / "step-000005/a", 1)
    assert checkpoint.newest(tmp_path, print) is None
    assert save(5, 1) and checkpoint.newest(tmp_path, print) == tmp_path / "step-000005"


@pytest.mark.cover
def test_sigterm_ends_a_run_after_a_save(
    finished: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(finished[0], out=str(tmp_path / "run"))
    step = Trainer.train_step

    def and_a_signal(self: Trainer) -> None:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", and_a_signal)
        with pytest.raises(TrainingStopped, match="stopped at step 4; go on with lineate train --resume"):
            train(config)
    trainer = prepare(config, resume=True)
    assert trainer.step == 4
    trainer.run()
    trainer.close()
    assert_same_bits(finished[1], everything(trainer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer": "bpe:300"},
            "tokenizer cannot change .* expected 'bytes', got 'bpe:300'; the vocabularies differ",
        ),
        ({"length": 16}, "length cannot change in a resumed run, expected 32, got 16"),
        ({"seed": 1}, "seed cannot change"),
        ({"optimizer": "adamw"}, "optimizer cannot change"),
    ],
)
def test_what_a_resumed_run_cannot_change(
    finished: tuple[Path, dict[str, torch.Tensor]], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(make_config(finished[0], **{"steps": 14} | changes), resume=True)


@pytest.mark.cover
def test_changed_data_or_vocabulary_is_noticed_on_resume(tmp_path: Path) -> None:
    train(make_config(tmp_path, steps=3))
    config, own = make_config(tmp_path, steps=4), tmp_path / "run/tokenizer"
    other, one = tmp_path / "texts/more.txt", tmp_path / "texts/00.txt"
    text = one.read_text()
    other.write_text("one more text")
    with pytest.raises(ValueError, match=r"data must be what the run began with, .* its text has changed"):
        prepare(config, resume=True)
    other.unlink()
    one.write_text(text.replace("the memory", "THE MEMORY"))  # as long as before
    with pytest.raises(ValueError, match=r"data must be what the run began with, .* its text has changed"):
        prepare(config, resume=True)
    one.write_text(text)
    (tmp_path / "texts").rename(tmp_path / "moved")  # the same text
    moved = replace(config, data=(str(tmp_path / "moved"),))
    assert train(moved, resume=True).step == 4
    pytest.importorskip("tokenizers")
    make_tokenizer("bpe:280", [path.read_text() for path in (tmp_path / "moved").iterdir()]).save(own)
    with pytest.raises(
        ValueError, match="bytes with a vocabulary of 257, got bpe:280 with 280: the vocabularies differ"
    ):
        prepare(moved, resume=True)


@pytest.mark.cover
def test_before_the_first_checkpoint_the_tokenizer_can_change(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = make_config(tmp_path, model="tiny", pattern="G", steps=1, warmup=0)
    prepare(config).close()
    trainer = prepare(replace(config, tokenizer="bpe:280"), resume=True)
    trainer.run()
    trainer.close()
    assert trainer.tokenizer.name == "bpe:280" and trainer.model.config.vocab_size == 280
    folder = Path(config.out) / "model"
    with pytest.raises(ValueError, match=r"tokenizer must be that of the model in .*, 'bpe:280', got 'bpe:270'"):
        prepare(make_config(tmp_path, out=str(tmp_path / "b"), model=str(folder), tokenizer="bpe:270"))
    further = prepare(make_config(tmp_path, out=str(tmp_path / "c"), model=str(folder)))
    further.close()
    assert further.tokenizer.identity == trainer.tokenizer.identity
