"""A run's folder belongs to one run: two processes in one folder, hostile folders, and what a refused call leaves."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from lineate.cli import main
from lineate.models import HybridLM
from lineate.models.files.safetensors import write_tensors
from lineate.models.presets import tiny
from lineate.text.tokenizer import make_tokenizer
from lineate.training.checkpoint import read_tensors, write_json
from lineate.training.config import TrainConfig
from lineate.training.distributed import World
from lineate.training.prepare import prepare, train
from lineate.training.report import RunReporter
from lineate.training.sources import documents
from lineate.training.tokens import TokenStore
from tests.support.ranks import Started, run_ranks
from tests.support.runs import make_config


def train_slowly(folder: Path, where: str) -> None:
    """`lineate train --config FILE` that stops at a named function, says so by a file, and waits for another."""
    owner, name = {"before the lock": (World, "start"), "preparing": (TokenStore, "open_or_make")}[where]
    real = getattr(owner, name)

    def slow(*args: Any) -> Any:
        (folder / "waits").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return real(*args)

    setattr(owner, name, slow)
    sys.argv[1:] = ["train", "--config", str(folder / "slow.json")]
    main()


def command(*arguments: str) -> tuple[int, str]:
    """Return the exit code of `lineate ...` and everything that it printed; a traceback fails the test."""
    from typer.testing import CliRunner

    from lineate.cli import build_app

    result = CliRunner().invoke(build_app(), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file and folder under it, with the time of the last change, and bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else (0, b"")
        for path in sorted(folder.rglob("*"))
    }


def start_slow(folder: Path, config: TrainConfig, where: str) -> Started:
    """Return a training process once it has reached its wait."""
    write_json(folder / "slow.json", config.to_dict())
    process = Started(train_slowly, folder, where)
    while not (folder / "waits").exists():
        assert process.runs, process.wait()
        time.sleep(0.05)
    return process


# two processes


@pytest.mark.slow
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
        done = slow.wait()
    assert done.code == 0, done.err
    assert "the model: " in done.out


@pytest.mark.cover
def test_a_run_that_comes_late_leaves_a_finished_one_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2, warmup=0)
    slow = start_slow(tmp_path, config, "before the lock")
    try:
        train(config)
        before = contents(tmp_path / "run")
        assert "model/model.safetensors" in before and before["metrics.jsonl"][1]
    finally:
        (tmp_path / "go").touch()
        done = slow.wait()
    assert done.code == 2 and "has a run; go on with --resume" in done.err and not done.out, done
    assert contents(tmp_path / "run") == before


def try_to_prepare(values: dict[str, Any]) -> list[Any]:
    """Return, on a rank, why a run cannot be prepared, or its tokenizer's identity and ids."""
    try:
        trainer = prepare(TrainConfig.from_dict(values))
    except (ValueError, OSError) as error:
        return [str(error)]
    trainer.close()
    return [trainer.tokenizer.identity, *trainer.tokenizer.encode("the memory <|endoftext|> forgets")]


@pytest.mark.cover
def test_ranks_are_refused_together_and_learn_one_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = make_config(tmp_path, tokenizer="bpe:280", model="tiny", pattern="G")
    made = make_tokenizer("bpe:280", documents(config.data))
    owner = RunReporter(config, True)
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
    fcntl, metrics = pytest.importorskip("fcntl"), tmp_path / "run/metrics.jsonl"
    lock, made = fcntl.flock, []

    def removed_once(file: Any, how: int) -> None:
        lock(file, how)
        if not made and Path(getattr(file, "name", "")) == metrics:
            made.append(metrics.unlink())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", removed_once)
        trainer = prepare(make_config(tmp_path))
    assert made
    with pytest.raises(ValueError, match="is being trained by another process"):
        RunReporter(trainer.config, True).lock()
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


@pytest.mark.cover
def test_a_published_checkpoint_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """A tokenizer that cannot be read is refused, and so is one with more tokens than the model, or without an end."""
    pytest.importorskip("transformers")
    from tests.support.families import build
    from tests.support.published import make_published

    config, folder = make_config(tmp_path), tmp_path / "published"
    build("qwen3_5", vocab_size=300, num_hidden_layers=2).save_pretrained(folder)
    arguments = ["train", "--model", str(folder), "--data", config.data[0], "--out", config.out]
    arguments += ["--cache", str(tmp_path / "cache"), "--steps", "1", "--length", "32", "--rows", "1"]
    for files, flags, message in [
        ((), (), "tokenizer 'bytes' has a vocabulary of 257, the model of PUBLISHED one of 300: its ids would"),
        ((), ("--tokenizer", "bpe:280"), "tokenizer 'bpe:280' has a vocabulary of 280, the model of PUBLISHED one of"),
        (("vocab.json",), (), "model must bring a tokenizer that can be read (tokenizer.json), got PUBLISHED with"),
        (("tokenizer.model",), ("--tokenizer", "bpe:300"), "with tokenizer.model, vocab.json alone; 'bpe:300' would"),
        (("tokenizer.json",), (), "tokenizer.json: expected one of the tokenizers library, got a file that it cannot"),
    ]:  # fmt: skip
        for name in files:
            (folder / name).write_text("{}")
        before = contents(tmp_path)
        code, text = command(*arguments, *flags)
        assert code == 2 and text.startswith("lineate: ")
        assert message.replace("PUBLISHED", str(folder)) in text
        assert contents(tmp_path) == before
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run/config.json", TrainConfig(out=config.out, model=str(folder)).to_dict())
    code, text = command("train", "--resume", config.out)  # the run was stopped before its first checkpoint
    assert code == 2 and text.strip().split("\n")[-1].startswith(f"lineate: {folder}/tokenizer.json: expected one of")
    make_published("bytes", folder)
    arguments += ["--out", str(tmp_path / "other")]
    code, text = command(*arguments)
    assert code == 2 and "has a vocabulary of 705, the model of" in text
    build("qwen3_5", vocab_size=800, num_hidden_layers=2, eos_token_id=None).save_pretrained(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    make_published("bytes", folder, None, eos_token=None)
    code, text = command(*arguments)
    assert code == 2 and "expected a token that ends a text, got none; name eos_token in tokenizer_config.json" in text


@pytest.mark.cover
def test_a_published_checkpoint_is_trained_with_its_own_tokenizer(tmp_path: Path) -> None:
    """The run, its checkpoints and its model have the tokenizer's files unchanged; a run goes on with them."""
    pytest.importorskip("transformers")
    from tests.support.families import build
    from tests.support.published import make_published

    folder, names = tmp_path / "published", ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    build("qwen3_5", vocab_size=800, num_hidden_layers=2, eos_token_id=5).save_pretrained(folder)
    theirs = make_published("bytes", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.5}')
    config = make_config(tmp_path, model=str(folder), steps=2, save_every=1, sample_every=2, warmup=0)
    trainer = train(config)
    assert trainer.tokenizer.encode("the memory") == theirs.encode("the memory")
    assert trainer.model.end_tokens == {5, 6} and trainer.tokenizer.end == theirs.eos_token_id
    places = [tmp_path / "run" / name for name in ("tokenizer", "checkpoints/step-000001", "model")]
    for place in places:
        for name in (*names, "generation_config.json"):
            assert (place / name).read_bytes() == (folder / name).read_bytes(), (place, name)
    further = train(replace(config, steps=3), resume=True)
    assert further.tokenizer.identity == trainer.tokenizer.identity
    name = "generation_config.json"
    assert (tmp_path / "run/model" / name).read_bytes() == (folder / name).read_bytes()
    code, text = command("generate", str(tmp_path / "run"), "--prompt", "the", "--tokens", "3", "--device", "cpu")
    assert code == 0
    with pytest.raises(ValueError, match=r"must be that of the model in .*, 'published:705', got 'bpe:270'"):
        prepare(make_config(tmp_path, out=str(tmp_path / "b"), model=str(folder), tokenizer="bpe:270"))


@pytest.mark.cover
def test_a_vocabulary_with_room_to_spare_can_be_sampled(tmp_path: Path) -> None:
    """The folder brings our tokenizer, so its model may have more rows, none of which a text uses."""
    torch.manual_seed(0)
    HybridLM(tiny("G", vocab_size=2000)).save_pretrained(tmp_path / "wide")
    make_tokenizer("bytes", ()).save(tmp_path / "wide")
    config = make_config(tmp_path, model=str(tmp_path / "wide"), steps=1, warmup=0, sample_every=1)
    assert train(config).model.config.vocab_size == 2000


# hostile folders


DEEP = '{"a": ' + "[" * 99999
NEWEST = "checkpoints/step-000003"


def reseal(folder: Path) -> None:
    """Write a manifest that matches the current files of a checkpoint."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    entries = {str(x.relative_to(folder)): [x.stat().st_size, sha256(x.read_bytes()).hexdigest()] for x in files}
    (folder / "manifest.json").write_text(json.dumps(entries))


def changed(folder: Path, **values: Any) -> str:
    """Return state.json with other values; a value of `...` removes its key."""
    state = json.loads((folder / "state.json").read_text()) | values
    return json.dumps({name: x for name, x in state.items() if x is not ...})


def bpe_with(text: str) -> Callable[[Path], None]:
    """Return a function that writes text as tokenizer.json, and a tokenizer_kind.json that matches it."""

    def write(folder: Path) -> None:
        identity = f"bpe:300-{sha256(text.encode()).hexdigest()}"
        (folder / "tokenizer_kind.json").write_text(json.dumps({"name": "bpe:300", "identity": identity}))
        (folder / "tokenizer.json").write_text(text)

    return write


def short_moments(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    write_tensors(file, {name: x[..., :1].contiguous() if x.dim() else x for name, x in read_tensors(file).items()})


HOSTILE: list[tuple[str, str | bytes | Callable[[Path], str | None], str]] = [
    ("config.json", "", "expected a config in JSON, got"),
    ("config.json", b"\xff\xfe\x00", "expected a config in JSON, got"),
    ("config.json", DEEP, "maximum recursion depth"),
    ("config.json", "[]", "must map names to values, got a list"),
    ("config.json", '{"stepz": 1}', "unknown key 'stepz'; did you mean 'steps'?"),
    ("config.json", '{"data": [[[]]]}', "data must be of type str, got"),
    ("config.json", '{"tokenizer": "bpe:99999999999"}', "tokenizer must be at most 'bpe:1048576'"),
    (f"{NEWEST}/state.json", "", "expected JSON, got a file that is not"),
    (f"{NEWEST}/state.json", b"\xff\xfe\x00", "expected JSON, got a file that is not"),
    (f"{NEWEST}/state.json", DEEP, "maximum recursion depth"),
    (f"{NEWEST}/state.json", "[]", "expected a JSON object, got list"),
    (f"{NEWEST}/state.json", "{}", "expected step of type int, got none; remove"),
    *((f"{NEWEST}/state.json", lambda f, n=name: changed(f, **{n: ...}), f"expected {name} of type")
      for name in ("config", "data", "metrics", "skipped", "best", "random")),
    (f"{NEWEST}/state.json", lambda f: changed(f, step="3"), "expected step of type int, got '3'"),
    (f"{NEWEST}/state.json", lambda f: changed(f, step=True), "expected step of type int, got True"),
    (f"{NEWEST}/state.json", lambda f: changed(f, step=2, looked=2), "expected step 3, as its folder says"),
    (f"{NEWEST}/state.json", lambda f: changed(f, looked=4), "looked no larger, got step 3 and looked 4"),
    (f"{NEWEST}/state.json", lambda f: changed(f, metrics=-1), "expected metrics of type int, got -1"),
    (f"{NEWEST}/state.json", lambda f: changed(f, data={}), "data must be what the run began with"),
    (f"{NEWEST}/state.json", lambda f: changed(f, config={}), "model cannot change in a resumed run"),
    (f"{NEWEST}/state.json", lambda f: changed(f, random=[3, [1, 2], None]), "expected random states, got"),
    (f"{NEWEST}/state.json", lambda f: changed(f, random=[]), "expected random states, got"),
    (f"{NEWEST}/config.json", DEEP, "maximum recursion depth"),
    (f"{NEWEST}/config.json", "{}", "model_type must be one of"),
    (f"{NEWEST}/config.json", '{"model_type": "lineate"}', "config must have"),
    (f"{NEWEST}/model.safetensors", b"", "model.safetensors"),
    (f"{NEWEST}/model.safetensors", b"\xff" * 99, "model.safetensors"),
    (f"{NEWEST}/optimizer.safetensors", b"\xff" * 99, "optimizer.safetensors"),
    (f"{NEWEST}/optimizer.safetensors", short_moments, "must have shape"),
    (f"{NEWEST}/random.safetensors", b"{}", "random.safetensors"),
    (f"{NEWEST}/tokenizer_kind.json", "{}", "tokenizer_kind.json is damaged"),
    (f"{NEWEST}/tokenizer_kind.json", DEEP, "tokenizer_kind.json is damaged"),
    (f"{NEWEST}/tokenizer_kind.json", '{"name": [], "identity": ""}', "tokenizer_kind.json is damaged"),
    (f"{NEWEST}/tokenizer_kind.json", '{"name": "bpe:300", "identity": ""}', "tokenizer.json is missing"),
    (f"{NEWEST}/tokenizer_kind.json", bpe_with(DEEP), "tokenizer.json is damaged"),
    (f"{NEWEST}/tokenizer_kind.json", bpe_with("{}"), "tokenizer.json is damaged"),
    (f"{NEWEST}/tokenizer_kind.json", bpe_with('{"model": {"type": "BPE", "vocab": {}, "merges": []}}'), "got no '!'"),
    ("tokenizer/tokenizer_kind.json", "{}", "tokenizer_kind.json is damaged"),
]  # fmt: skip
MANIFESTS = ["", "[]", "{}", "5", DEEP, '{"state.json": 5}', '{"state.json": [1, 2, 3]}', '{"../x": [0, ""]}']


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three steps with one checkpoint, without its finished model."""
    folder = tmp_path_factory.mktemp("finished")
    train(make_config(folder, steps=3, warmup=0, keep=1))
    shutil.rmtree(folder / "run/model")
    return folder / "run"


def refused(folder: Path, *arguments: str) -> str:
    """Return the one-line message of a call that fails and changes nothing."""
    before = contents(folder)
    code, text = command(*arguments)
    last = text.strip().split("\n")[-1]
    assert code == 2 and last.startswith("lineate: "), text
    assert contents(folder) == before
    return last


def hostile() -> list[Any]:
    """Return parameters for all cases; of those in the long list for state.json, every third is fast."""
    slow = [n for n, (name, _, _) in enumerate(HOSTILE) if name.endswith("state.json") and n % 3]
    marks = [[pytest.mark.slow] if n in slow else [] for n in range(len(HOSTILE))]
    return [pytest.param(*x, id=f"{n}-{x[2][:40]}", marks=marks[n]) for n, x in enumerate(HOSTILE)]


@pytest.mark.cover
@pytest.mark.parametrize(("name", "damage", "message"), hostile())
def test_a_hostile_run_is_one_line_and_changes_nothing(
    run: Path, tmp_path: Path, name: str, damage: Any, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    content = damage((folder / name).parent) if callable(damage) else damage
    if content is not None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if name.startswith(NEWEST):
        reseal(folder / NEWEST)
    assert message in refused(tmp_path, "train", "--resume", str(folder), "--steps", "5")
    for other in (("inspect", str(folder)), ("plan", str(folder)), ("generate", str(folder), "--tokens", "1")):
        code, text = command(*other)  # these need not read what is damaged
        assert code == 0 or (code == 2 and text.strip().split("\n")[-1].startswith("lineate: ")), text


@pytest.mark.parametrize("manifest", MANIFESTS, ids=[x[:20] for x in MANIFESTS])
def test_a_hostile_manifest_vouches_for_nothing(run: Path, tmp_path: Path, manifest: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / NEWEST / "manifest.json").write_text(manifest)
    assert "needs a whole checkpoint, got 1 in" in refused(tmp_path, "train", "--resume", str(folder), "--steps", "5")


@pytest.mark.cover
def test_other_things_where_a_run_keeps_its_own(run: Path, tmp_path: Path) -> None:
    for name, message in (("checkpoints", "no checkpoint yet"), ("metrics.jsonl", "Is a directory")):
        folder = tmp_path / name / "run"
        shutil.copytree(run, folder)
        if name == "checkpoints":
            shutil.rmtree(folder / name)
            (folder / name).write_text("a file")
        else:
            (folder / name).unlink()
            (folder / name).mkdir()
        code, text = command("train", "--resume", str(folder), "--steps", "4", "--save-every", "0")
        assert message in text and "Traceback" not in text, text
        assert code == 2 or "was not saved" in text
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name in ("step-7", "step-99999999999999999999", "step-\u0663\u0663\u0663\u0663\u0663\u0663"):
        (folder / "checkpoints" / name).mkdir()  # not ours
    with (folder / "metrics.jsonl").open("r+") as file:
        file.write("nonsense")
    code, text = command("train", "--resume", str(folder), "--steps", "4")
    assert code == 0 and "going on from" in text and "no plot of the loss" in text, text
    assert (folder / "checkpoints/step-7").is_dir()
    (folder / "metrics.jsonl").write_text("")
    code, text = command("train", "--resume", str(folder), "--steps", "5")
    assert code == 0 and "metrics.jsonl lacks lines up to step 4" in text, text


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--out", ""], ["picture", "state", "--out", ""], ["picture", "state", "--from", ""], ["inspect", ""],
        ["tasks", "recall", "--out", ""], ["generate", ""], ["plan", ""], ["plan", "small", "--json", ""],
        ["train", "--resume", ""], ["train", "--config", ""], ["train", "--out", ""],
        ["train", "--data", ""], ["train", "--cache", ""], ["train", "--model", ""],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = command(*arguments)
    assert code == 2 and ("''" in text or "say what to plan" in text), text
    assert not os.listdir(tmp_path)
