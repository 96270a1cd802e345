"""Names on the hub, as `from_pretrained` takes them, on the command line; a folder stands in for the hub."""

import fnmatch
import json
import os
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("huggingface_hub")
pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import huggingface_hub as hub
from huggingface_hub import errors
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import HybridLM, preset
from lineate.models.files.hub import is_hub_name, open_headers
from lineate.models.files.safetensors import CheckpointError
from lineate.models.hybrid import save_pretrained
from lineate.models.inspect import describe
from lineate.planning import plan_memory, read_model
from lineate.text import Bytes, load_tokenizer

NAME = "lineate/tiny-model"
REVISION = "0123456789abcdef0123456789abcdef01234567"
CONFIGS = {"config.json", "generation_config.json"}


def lineate(*words):
    return CliRunner().invoke(build_app(), list(map(str, words)))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Return the hub's content: a model in shards, with a tokenizer of ours."""
    folder = tmp_path_factory.mktemp("there")
    torch.manual_seed(0)
    save_pretrained(HybridLM(preset("tiny", vocab_size=257)).bfloat16(), folder, max_shard_bytes=10**6)
    Bytes().save(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "README.md").write_text("not fetched")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    return folder


class Hub:
    """Copies files into a cache as snapshot_download does, and records the requests."""

    def __init__(self, there, cache):
        self.there, self.snapshot = there, cache / "snapshots" / REVISION
        self.fetched, self.headers = set(), []

    def snapshot_download(self, name, allow_patterns):
        assert name == NAME
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.there.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, self.snapshot)
                self.fetched.add(file.name)
        return str(self.snapshot)

    def get_safetensors_metadata(self, name, revision=None):
        self.headers.append((name, revision))
        files = {}
        for file in self.there.glob("*.safetensors"):
            with file.open("rb") as handle:
                (length,) = struct.unpack("<Q", handle.read(8))
                header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            files[file.name] = SimpleNamespace(tensors={key: SimpleNamespace(**value) for key, value in header.items()})
        return SimpleNamespace(files_metadata=files)

    @property
    def weights(self):
        return {name for name in self.fetched if name.endswith(".safetensors")}


@pytest.fixture
def online(there, tmp_path, monkeypatch):
    made = Hub(there, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("snapshot_download", "get_safetensors_metadata"):
        monkeypatch.setattr(hub, name, getattr(made, name))
    return made


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "train").mkdir(parents=True)
    names = {"Qwen/Qwen3.5-4B": True, "out/train": False, "out": False, "a/b/c": False, "/a/b": False, "a b/c": False}
    assert {name: is_hub_name(name) for name in names} == names
    assert not is_hub_name(tmp_path / "x")


@pytest.mark.cover
def test_plan_fetches_the_config_alone(online, there):
    done = lineate("plan", NAME, "--no-train", "--json", "-")
    assert done.exit_code == 0, done.output
    assert online.fetched == CONFIGS and not online.headers
    got, here = json.loads(done.stdout), read_model(there)
    assert (got["model"]["name"], got["model"]["origin"], got["model"]["dtype"]) == (NAME, "hub", "bfloat16")
    assert got["weights"]["total_bytes"] == plan_memory(here).weights
    assert (
        got["against_context"]
        == json.loads(lineate("plan", there, "--no-train", "--json", "-").stdout)["against_context"]
    )
    assert lineate("plan", NAME, "--pattern", "GGGGGGGA", "--no-train").stdout.startswith(f"{NAME}, GGGGGGGA: 4 layers")


def test_inspect_fetches_headers_alone(online, there):
    done = lineate("inspect", NAME)
    assert done.exit_code == 0, done.output
    assert not online.weights and online.headers == [(NAME, REVISION)]  # from the same commit as the config
    assert NAME in done.stdout
    assert done.stdout.splitlines()[2:] == lineate("inspect", there).stdout.splitlines()[2:]
    assert open_headers(NAME).shapes == open_headers(there).shapes


def test_inspect_reads_weights_that_are_there(online):
    HybridLM.from_pretrained(NAME, progress=False)
    online.headers.clear()
    assert describe(NAME).problem is None and not online.headers


def test_inspect_says_what_would_not_load(online, there, tmp_path):
    online.there = shutil.copytree(there, tmp_path / "other")
    config = json.loads((online.there / "config.json").read_text())
    (online.there / "config.json").write_text(json.dumps(config | {"n_layers": 5}))
    assert "This checkpoint would not load." in lineate("inspect", NAME).stdout


def test_a_header_of_the_hub_is_checked(online, monkeypatch):
    def wrong(name, revision=None):
        tensor = SimpleNamespace(dtype="BF16", shape=[2, 3], data_offsets=(0, 13))
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"x": tensor})})

    monkeypatch.setattr(hub, "get_safetensors_metadata", wrong)
    with pytest.raises(CheckpointError, match="must take 12 bytes"):
        describe(NAME)


def test_generate(online, there):
    words = ("--prompt", "a", "--tokens", 3, "--temperature", 0)
    done = lineate("generate", NAME, *words)
    assert done.exit_code == 0, done.output
    assert done.stdout == lineate("generate", there, *words).stdout
    assert online.weights


@pytest.mark.parametrize("words", [["generate"], ["train", "--steps", "1", "--model"]])
def test_no_weights_are_fetched_without_a_tokenizer(words, online, there, tmp_path):
    online.there = shutil.copytree(there, tmp_path / "other")
    (online.there / "tokenizer_kind.json").unlink()
    done = lineate(*words, NAME)
    assert done.exit_code == 2 and "holds no tokenizer" in done.stderr
    assert online.fetched and not online.weights


@pytest.mark.cover
def test_the_files_of_a_published_tokenizer_are_fetched(online, there, tmp_path):
    """Its templates and its ranks too, which are no JSON; generating needs no more than those and the weights."""
    pytest.importorskip("transformers")
    from tests.support.published import make_published

    online.there = shutil.copytree(there, tmp_path / "other")
    (online.there / "tokenizer_kind.json").unlink()
    (online.there / "tiktoken.model").write_text("not read beside tokenizer.json")
    save_pretrained(HybridLM(preset("tiny", vocab_size=800)), online.there)
    theirs = make_published("bytes", online.there)
    ours = load_tokenizer(NAME)
    assert ours.encode("the memory") == theirs.encode("the memory") and ours.chat is not None
    assert {"chat_template.jinja", "tiktoken.model"} <= online.fetched and not online.weights
    done = lineate("generate", NAME, "--tokens", 3)
    assert done.exit_code == 0 and online.weights, done.output
    done = lineate("picture", "attention", "--model", NAME, "--text", "the<|im_end|>", "--out", "x", "--format", "svg")
    assert done.exit_code == 0, done.output


@pytest.mark.cover
def test_picture(online):
    done = lineate("picture", "attention", "--model", NAME, "--tokens", 8, "--out", "drawn", "--format", "svg")
    assert done.exit_code == 0, done.output
    assert NAME in (online.snapshot.parents[1] / "drawn" / "attention.svg").read_text()


@pytest.mark.cover
def test_train(online, tmp_path):
    (tmp_path / "text.txt").write_text("some words to learn " * 99)
    words = ("--data", "text.txt", "--steps", 1, "--rows", 1, "--length", 16, "--out", "run", "--cache", "cache")
    done = lineate("train", "--model", NAME, *words, "--sample-every", 0, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == str(online.snapshot)


def http_error(kind):
    """Return an error of the library as a server's answer would raise it, whatever its network library is."""
    error = kind.__new__(kind)
    error.args = ("404 Client Error.\n\nhow to log in",)
    return error


def failing(error):
    def fail(name, **options):
        raise error

    return fail


class ConnectError(Exception):
    """An error like that of httpx, which is not an OSError."""


WHY = {
    "unknown": (lambda: http_error(errors.RepositoryNotFoundError), "the hub has no model of this name, or a private"),
    "gated": (lambda: http_error(errors.GatedRepoError), "accept it on the model's page"),
    "no network": (lambda: ConnectError("[Errno -2] Name or service not known"), "the hub cannot be reached"),
    "not in the cache": (lambda: errors.LocalEntryNotFoundError("None found.\nmore"), "does not have it (None found)"),
    "no name": (lambda: errors.HFValidationError("Repo id must use alphanumeric chars"), "Repo id must use"),
    "no words": (lambda: OSError(), "OSError"),
    "a full disk": (lambda: OSError(28, "No space left on device"), "No space left on device"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHY)
def test_why_it_cannot_be_fetched(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    make, expected = WHY[case]
    monkeypatch.setattr(hub, "snapshot_download", failing(make()))
    for words in (["plan"], ["inspect"], ["generate"], ["picture", "state", "--model"], ["train", "--model"]):
        done = lineate(*words, "lineate/none")
        assert done.exit_code == 2 and done.stdout == "", done.output
        start = "lineate: lineate/none is not a folder, and could not be fetched from the hub: "
        assert done.stderr.startswith(start) and done.stderr.count("\n") == 1
        assert expected in done.stderr


@pytest.mark.parametrize(
    "error, expected",
    [
        (errors.NotASafetensorsRepoError("no"), "pickled weights are never loaded"),
        (ConnectError("[Errno -2]"), "the hub cannot be reached"),
    ],
)
def test_why_headers_cannot_be_fetched(error, expected, online, monkeypatch):
    monkeypatch.setattr(hub, "get_safetensors_metadata", failing(error))
    done = lineate("inspect", NAME)
    assert done.exit_code == 2 and expected in done.stderr


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for command in ("plan", "inspect", "generate"):
        done = lineate(command, NAME)
        assert done.exit_code == 2 and "run pip install 'lineate[lm]'" in done.stderr


@pytest.mark.slow
def test_the_library_itself_finds_what_is_in_its_cache(there, tmp_path):
    """Nothing is replaced: huggingface_hub runs offline, with a cache as it would have made it."""
    place = tmp_path / "models--lineate--tiny-model"
    shutil.copytree(there, place / "snapshots" / REVISION)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(REVISION)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "COLUMNS": "120"}
    code = "from lineate.cli import build_app\nbuild_app()()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", NAME], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert NAME in done.stdout and "would not load" not in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "lineate/other"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "the hub cannot be reached and its cache here does not have it" in done.stderr
