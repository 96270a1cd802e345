"""A run's folder belongs to one run: two processes in one, folders that are hostile, and what a refused call leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import make_config

from lineate.models import HybridLM
from lineate.models.presets import tiny
from lineate.training.checkpoint import write_json
from lineate.training.config import TrainConfig
from lineate.training.prepare import prepare, train
from lineate.training.report import Report
from lineate.training.sources import documents
from lineate.training.tokenizer import make_tokenizer

# `lineate train --config FILE` that stops at a named function, says so by a file, and waits for another.
SLOW = """
import sys, time
from pathlib import Path
from lineate.cli import main
from lineate.training.distributed import World
from lineate.training.tokens import TokenStore

folder, where = Path(sys.argv[1]), sys.argv[2]
owner, name = {"before the lock": (World, "start"), "preparing": (TokenStore, "open_or_make")}[where]
real = getattr(owner, name)

def slow(*args):
    (folder / "waits").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return real(*args)

setattr(owner, name, slow)
sys.argv[1:] = ["train", "--config", str(folder / "slow.json")]
main()
"""


def command(*arguments: str) -> tuple[int, str]:
    """Exit code of `lineate ...` and all that it printed; a traceback fails the test."""
    from typer.testing import CliRunner

    from lineate.cli import build_app

    result = CliRunner().invoke(build_app(), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder under it: time of the last change, and bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else (0, b"")
        for path in sorted(folder.rglob("*"))
    }


def start_slow(folder: Path, config: TrainConfig, where: str) -> subprocess.Popen[str]:
    """A process that trains, once it waits there."""
    write_json(folder / "slow.json", config.to_dict())
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(folder), where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (folder / "waits").exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    return process


# two processes


def test_a_run_that_prepares_slowly_has_the_folder_already(tmp_path: Path) -> None:
    slow = start_slow(tmp_path, make_config(tmp_path, steps=2, warmup=0, model="tiny", pattern="G"), "preparing")
    before = contents(tmp_path / "run")
    try:
        write_json(tmp_path / "other.json", make_config(tmp_path, tokenizer="bpe:280", model="tiny").to_dict())
        code, text = command("train", "--config", str(tmp_path / "other.json"))
        assert code == 2 and text.startswith("lineate: ") and "is being trained by another process" in text, text
        assert contents(tmp_path / "run") == before
    finally:
        (tmp_path / "go").touch()
        out, err = slow.communicate()
    assert slow.returncode == 0, err
    assert "the model: " in out


def test_a_run_that_comes_late_leaves_a_finished_one_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2, warmup=0)
    slow = start_slow(tmp_path, config, "before the lock")
    try:
        train(config)
        before = contents(tmp_path / "run")
        assert "model/model.safetensors" in before and before["metrics.jsonl"][1]
    finally:
        (tmp_path / "go").touch()
        out, err = slow.communicate()
    assert slow.returncode == 2 and "has a run; go on with --resume" in err and not out, (out, err)
    assert contents(tmp_path / "run") == before


def try_to_prepare(values: dict[str, Any]) -> list[Any]:
    """On a rank: why a run cannot be prepared, or its tokenizer's identity and ids."""
    try:
        trainer = prepare(TrainConfig.from_dict(values))
    except (ValueError, OSError) as error:
        return [str(error)]
    trainer.close()
    return [trainer.tokenizer.identity, *trainer.tokenizer.encode("the memory <|endoftext|> forgets")]


def test_ranks_are_refused_together_and_learn_one_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = make_config(tmp_path, tokenizer="bpe:280", model="tiny", pattern="G")
    made = make_tokenizer("bpe:280", documents(config.data))
    owner = Report(config, True)
    owner.lock()
    before = contents(tmp_path)
    main, other = run_ranks(2, try_to_prepare, config.to_dict())
    assert "is being trained by another process" in main[0]
    assert other == ["rank 0 could not use the run's folder; its own message says why"]
    assert contents(tmp_path) == before
    owner.release()
    assert not (tmp_path / "run").exists()
    main, other = run_ranks(2, try_to_prepare, config.to_dict() | {"out": str(tmp_path / "late"), "length": 10**6})
    assert "is longer than the train data" in main[0] and not (tmp_path / "late").exists()
    found = run_ranks(2, try_to_prepare, config.to_dict() | {"out": str(tmp_path / "ranks")})
    assert found == [[made.identity, *made.encode("the memory <|endoftext|> forgets")]] * 2


def test_a_lock_that_was_removed_is_none(tmp_path: Path) -> None:
    """A process that could not begin removes its empty metrics.jsonl; who has just opened that file opens the next."""
    from lineate.training import report

    lock, made = report._lock, []

    def removed_once(file: Any, folder: Path) -> None:
        lock(file, folder)
        if not made:
            made.append((folder / "metrics.jsonl").unlink())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_lock", removed_once)
        trainer = prepare(make_config(tmp_path))
    with pytest.raises(ValueError, match="is being trained by another process"):
        Report(trainer.config, True).lock()
    trainer.close()


# what a refused call leaves


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png", "tokenizer/a", "checkpoints/step-000900/a", "model/a"])
def test_a_fresh_run_overwrites_nothing(tmp_path: Path, name: str) -> None:
    config = make_config(tmp_path)
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("of someone")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"run with {name.split('/')[0]} that the run would overwrite; choose"):
        prepare(config)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "changes", [{"length": 10**6}, {"data": ("nowhere",)}, {"tokenizer": "bpe:99999"}, {"device": "tpu"}], ids=str
)
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(tmp_path, out=str(tmp_path / "new/run"), model="tiny", **changes)
    with pytest.raises((ValueError, OSError)):
        prepare(config)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    with pytest.raises((ValueError, OSError)):
        prepare(config)
    assert (tmp_path / "new").exists() and not os.listdir(tmp_path / "new")


# models to go on from


def test_a_published_checkpoint_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """Its ids are those of a tokenizer that is not read; a vocabulary of another size is a sign of the same."""
    pytest.importorskip("transformers")
    from families import build

    config, folder = make_config(tmp_path), tmp_path / "published"
    build("qwen3_5", vocab_size=300, num_hidden_layers=2).save_pretrained(folder)
    arguments = ["train", "--model", str(folder), "--data", config.data[0], "--out", config.out]
    arguments += ["--cache", str(tmp_path / "cache"), "--steps", "1", "--length", "32", "--rows", "1"]
    for files, flags, message in [
        ((), (), "tokenizer 'bytes' has a vocabulary of 257, the model of PUBLISHED one of 300: its ids would"),
        ((), ("--tokenizer", "bpe:280"), "tokenizer 'bpe:280' has a vocabulary of 280, the model of PUBLISHED one of"),
        (("tokenizer.json",), (), "model must bring a tokenizer of lineate train (tokenizer_kind.json), got PUBLISHED"),
        (("tokenizer.json",), ("--tokenizer", "bpe:300"), "with tokenizer.json, which is not read yet; 'bpe:300'"),
        (("tokenizer.model", "vocab.json"), (), "tokenizer.json, tokenizer.model, vocab.json, which is not read yet"),
    ]:  # fmt: skip
        for name in files:
            (folder / name).write_text("{}")
        before = contents(tmp_path)
        code, text = command(*arguments, *flags)
        assert code == 2 and text.startswith("lineate: ") and "train a preset, or train this model in Python" in text
        assert message.replace("PUBLISHED", str(folder)) in text
        assert contents(tmp_path) == before
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run/config.json", TrainConfig(out=config.out, model=str(folder)).to_dict())
    code, text = command("train", "--resume", config.out)  # a run that was stopped before its first checkpoint
    assert code == 2 and text.strip().split("\n")[-1].startswith(
        "lineate: model must bring a tokenizer of lineate train"
    )


def test_a_vocabulary_with_room_to_spare_can_be_sampled(tmp_path: Path) -> None:
    """The folder brings our tokenizer, so its model may have more rows, none of which a text has."""
    torch.manual_seed(0)
    HybridLM(tiny("G", vocab_size=2000)).save_pretrained(tmp_path / "wide")
    make_tokenizer("bytes", ()).save(tmp_path / "wide")
    config = make_config(tmp_path, model=str(tmp_path / "wide"), steps=1, warmup=0, sample_every=1)
    assert train(config).model.config.vocab_size == 2000
