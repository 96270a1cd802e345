"""`lineate quantize`, and --bits of the other commands."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import fresh
from tests.support.quantised_weights import WIDE, realistic, relative, sizes, tokens

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from lineate.cli import build_app
from lineate.generation.loading import load_model, load_or_builtin
from lineate.models import HybridLM
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.quantizing import quantize_checkpoint
from lineate.planning.memory import plan_memory
from lineate.planning.models import read_model
from lineate.quantised import BY_BITS, FORMATS, QuantisedWeight, quantised_formats, shrink
from lineate.quantised.which import format_of
from lineate.serving.command import ServeArguments, run_serve
from lineate.text import Bytes


def lineate(*words: object, typed: str = "") -> Result:
    return CliRunner().invoke(build_app(), list(map(str, words)), input=typed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with its tokenizer."""
    place = tmp_path_factory.mktemp("model") / "plain"
    realistic(sizes("GA", vocab_size=257)).save_pretrained(place)
    Bytes().save(place)
    return place


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def same(one: HybridLM, other: HybridLM) -> bool:
    theirs = other.state_dict()
    for name, x in one.state_dict().items():
        y = theirs[name]
        if isinstance(x, QuantisedWeight) and isinstance(y, QuantisedWeight):
            parts = [(x.codes, y.codes), *([] if x.scales is None else [(x.scales, y.scales)])]
            if not all(torch.equal(a, b) for a, b in parts):
                return False
        elif not torch.equal(x, y):
            return False
    return True


# quantize


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("bits", [16, 8, 4, "fp8"])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "granitemoehybrid"])
def test_checkpoints_of_families(family: str, bits: int | str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.families import build

    build(family, **WIDE[family]).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    done = lineate("quantize", tmp_path / "theirs", tmp_path / "new" / "ours", "--bits", bits)
    assert done.exit_code == 0, done.output
    quantised = HybridLM.from_pretrained(tmp_path / "new" / "ours", progress=False)
    assert format_of(quantised) == FORMATS[BY_BITS[bits]] and quantised.dtype == torch.float32
    assert same(quantised, HybridLM.from_pretrained(tmp_path / "theirs", progress=False, weights=BY_BITS[bits]))
    with torch.no_grad():
        plain = HybridLM.from_pretrained(tmp_path / "theirs", progress=False, dtype="float32")
        most = {16: 1e-6, 8: 0.05, 4: 0.6, "fp8": 0.3}[bits]
        assert relative(quantised(tokens(1, 20)).logits, plain(tokens(1, 20)).logits) < most


def test_what_it_prints_and_copies(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "quantised"
    out.mkdir()  # an empty folder is filled
    done = lineate("quantize", folder, out, "--bits", "4")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    before = (folder / "model.safetensors").stat().st_size
    after = Checkpoint.open(out).nbytes
    found = re.search(r"int4, ([\d,]+) bytes of ([\d.]+) MB \((\d+)%\)", text)
    assert found and int(found[1].replace(",", "")) == after and int(found[3]) == round(100 * after / before)
    assert "not quantised" in text and "mixer.conv.weight" in text and "in_proj" not in text
    assert files(out).keys() == files(folder).keys()
    for name in files(folder).keys() - {"config.json", "model.safetensors"}:
        assert files(out)[name] == files(folder)[name]
    again = lineate("quantize", out, tmp_path / "again", "--bits", "4")  # codes are taken unchanged
    assert again.exit_code == 0 and files(tmp_path / "again") == files(out)


def test_shards_are_written_as_they_fill(folder: Path, tmp_path: Path) -> None:
    made = quantize_checkpoint(folder, tmp_path / "quantised", "int8", progress=False, max_shard_bytes=10**5)
    assert len(list((tmp_path / "quantised").glob("model-*-of-*.safetensors"))) > 3
    model = HybridLM.from_pretrained(folder, progress=False)
    assert same(HybridLM.from_pretrained(tmp_path / "quantised", progress=False), shrink(model, "int8"))
    quantised = quantised_formats(model, "int8")
    plain = {name: x.nbytes for name, x in model.state_dict().items() if name not in quantised}
    assert sum(made.stayed.values()) == sum(plain.values())
    assert made.bytes_after == Checkpoint.open(tmp_path / "quantised").nbytes


def test_what_is_there_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = files(tmp_path)
    for name, kind in (("full", "a folder that is not empty"), ("file", "a file")):
        done = lineate("quantize", folder, tmp_path / name)
        assert done.exit_code == 2 and f"which is {kind}; choose another name" in " ".join(done.stderr.split())
    assert lineate("quantize", folder, folder).exit_code == 2
    assert files(tmp_path) == before


def test_nothing_is_left_behind_if_it_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = lineate("quantize", folder, tmp_path / "quantised", "--bits", "3")
    assert done.exit_code == 2 and "--bits must be one of 16, 8, 4, fp8, got 3" in done.stderr
    done = lineate("quantize", tmp_path / "nothing", tmp_path / "quantised")
    assert done.exit_code == 2 and done.stderr.startswith("lineate: expected a folder")
    written = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:  # the weights were written, and the config is not
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("lineate.models.files.safetensors.os.fsync", full)
    done = lineate("quantize", folder, tmp_path / "a" / "b" / "quantised")
    assert done.exit_code == 2 and "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=10**9, used=10**9 - 999, free=999))
    monkeypatch.setattr("lineate.models.quantizing.save_streamed", lambda *_: pytest.fail("something was written"))
    done = lineate("quantize", folder, tmp_path / "a" / "quantised", "--bits", "4")
    text = " ".join(done.stderr.split())
    assert done.exit_code == 2 and re.search(r"needs [\d,]+ bytes and its disk has 999; free some", text), text
    assert "quantised" in text and list(tmp_path.iterdir()) == []


INTERRUPTED = """
import os, resource, signal, sys, threading
from lineate.cli import build_app
if sys.argv[1] == "full":  # writing fails after so many bytes, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
else:  # Ctrl-C, while the first of many files is written
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start programs with it ignored
    import lineate.models.files.safetensors as files
    write = files.write_bytes
    def interrupted(file, pieces):
        write(file, pieces)
        os.kill(os.getpid(), signal.SIGINT)
    files.write_bytes = interrupted
    import lineate.models.files.checkpoint as checkpoint
    checkpoint.write_bytes = interrupted
build_app()(["quantize", *sys.argv[2:]])
"""


@pytest.mark.cover
@pytest.mark.skipif(os.name != "posix", reason="signals and limits of Unix")
@pytest.mark.parametrize("how", ["full", "interrupted"])
def test_nothing_is_left_behind_if_it_is_stopped(how: str, folder: Path, tmp_path: Path) -> None:
    before, out = files(folder), tmp_path / "a" / "quantised"
    done = fresh.run(f"import sys; sys.argv[1:] = {[how, str(folder), str(out)]}\n" + INTERRUPTED)
    assert done.returncode != 0 and not out.exists()
    if how == "full":
        assert done.returncode == 2 and "File too large: " in done.stderr and "model.safetensors" in done.stderr
    assert list(tmp_path.iterdir()) == [] and files(folder) == before


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, data in files(folder).items():
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / name).write_bytes(data)
    config = json.loads((tmp_path / "bad" / "config.json").read_text())
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config | {"n_layers": 5}))
    done = lineate("quantize", tmp_path / "bad", tmp_path / "quantised")
    assert done.exit_code == 2 and "missing" in done.stderr and "layers.4.mixer" in done.stderr
    assert not (tmp_path / "quantised").exists()


# --bits


@pytest.mark.cover
@pytest.mark.parametrize("bits", [16, 8, 4, "fp8"])
def test_generate_and_chat(folder: Path, bits: int | str, tmp_path: Path) -> None:
    words = ("--tokens", 8, "--temperature", 0)
    assert lineate("quantize", folder, tmp_path / "quantised", "--bits", bits).exit_code == 0
    asked = lineate("generate", folder, "-p", "abc", *words, "--bits", bits)
    stored = lineate("generate", tmp_path / "quantised", "-p", "abc", *words)
    assert asked.exit_code == stored.exit_code == 0, asked.output + stored.output
    assert asked.stdout == stored.stdout
    asked = lineate("chat", folder, *words, "--bits", bits, typed="hello\n/exit\n")
    stored = lineate("chat", tmp_path / "quantised", *words, typed="hello\n/exit\n")
    assert asked.exit_code == stored.exit_code == 0 and asked.stdout == stored.stdout


def test_models_are_loaded_in_a_format(folder: Path) -> None:
    model, _ = load_model(folder, weights="int8")
    assert format_of(model) == FORMATS["int8"]
    model, _ = load_or_builtin(folder, "bfloat16", "cpu", print, "int4")
    assert format_of(model) == FORMATS["int4"] and model.dtype == torch.bfloat16


def test_bits_that_there_are_not(folder: Path) -> None:
    for command in ("generate", "chat", "plan"):
        done = lineate(command, folder, "--bits", "5", typed="hello\n")
        assert done.exit_code == 2 and "--bits must be one of 16, 8, 4, fp8, got 5" in done.stderr, done.output


def test_serve_refuses_bits_before_a_model_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("llguidance")
    with pytest.raises(SystemExit, match="2"):
        run_serve(ServeArguments(str(folder), port=0, bits="7"))
    assert "--bits must be one of 16, 8, 4, fp8, got 7" in capsys.readouterr().err


def test_a_server_says_the_format() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("llguidance")
    from lineate.serving.app import describe

    model, found = realistic(sizes("GA", vocab_size=257)), []
    for form in (None, *FORMATS):
        about = describe(model if form is None else shrink(model, form), Bytes(), "name", 128, 2)
        assert dict(about.details).get("weights") == form
        found.append(about.fingerprint)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("bits", [16, 8, 4, "fp8"])
def test_plan(folder: Path, bits: int | str) -> None:
    def planned(*words: object) -> dict:
        done = lineate("plan", *words, "--no-train", "--context", "1k", "--json", "-")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    report = planned(folder, "--bits", bits)
    plan = plan_memory(read_model(folder, weights=BY_BITS[bits]))
    assert report["weights"]["total_bytes"] == plan.weights
    assert (report["model"]["weights"], report["model"]["dtype"]) == (BY_BITS[bits], "float32")
    assert planned(folder)["weights"]["total_bytes"] > plan.weights and "weights" not in planned(folder)["model"]
    numbers = ("--emb-dim", 256, "--n-heads", 4, "--n-layers", 4)
    one, other = (
        planned(*numbers, *more)["weights"]["total_bytes"] for more in (("--bits", bits), ("--dtype", "fp32"))
    )
    assert one < other
    done = lineate("plan", folder, "--bits", bits, "--no-train", "--context", "1k")
    assert f"large weights in {BY_BITS[bits]}" in " ".join(done.stdout.split())


def test_decoding_moves_the_bytes_of_quantised_experts() -> None:
    from lineate.planning.compute import touched_weights

    model = read_model("qwen3-next-80b", weights="int8")
    plan = plan_memory(model)
    experts = model.config.experts
    assert experts is not None
    one = FORMATS["int8"].nbytes((2 * experts.size, 2048)) + FORMATS["int8"].nbytes((2048, experts.size))
    idle = (experts.count - experts.active) * model.config.n_layers * one
    whole = sum(layer.weights for layer in plan.layers) + plan.norm + plan.head
    assert touched_weights(plan, 1) == whole - idle
