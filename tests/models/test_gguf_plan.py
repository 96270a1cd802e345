"""lineate plan and lineate inspect of GGUF files: the bytes that loading allocates, from the header alone."""

import json
import re
from pathlib import Path

import pytest
import torch

from lineate.models import HybridLM
from lineate.models.files.safetensors import CheckpointError
from lineate.models.inspect import describe, rows
from lineate.planning.compute import touched_weights
from lineate.planning.memory import plan_memory
from lineate.planning.models import read_model, variants
from lineate.quantised import BY_BITS, QuantisedWeight, shrink
from tests.support.families import build

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("typer")
from typer.testing import CliRunner, Result  # noqa: E402

from lineate.cli import build_app  # noqa: E402
from tests.support import gguf_files  # noqa: E402
from tests.support.quantised_weights import WIDE  # noqa: E402

SMALL = ("ssm_conv1d", "ffn_gate_inp", "ssm_a", "ssm_alpha", "ssm_beta", "exp_probs_b")


def lineate(*words: object) -> Result:
    return CliRunner().invoke(build_app(), list(map(str, words)))


def kept_bytes(model: HybridLM) -> int:
    """Return the bytes that a model really has."""
    return sum(x.nbytes_kept if isinstance(x, QuantisedWeight) else x.nbytes for x in model.state_dict().values())


def one_kind(kind: str):
    def of(name: str, shape: tuple[int, ...]) -> str:
        fits = len(shape) >= 2 and shape[-1] % 32 == 0 and not any(part in name for part in SMALL)
        return kind if fits else "F32"

    return of


def several_kinds(name: str, shape: tuple[int, ...]) -> str:
    """Q4_0, but Q8_0 for values and every other feed-forward, and F16 for the embedding."""
    kind = one_kind("Q4_0")(name, shape)
    if kind == "F32" or name == "token_embd.weight":
        return "F16" if name == "token_embd.weight" else "F32"
    return "Q8_0" if "attn_v" in name or ("ffn_down" in name and int(name.split(".")[1]) % 2) else kind


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("qwen3_next", "qwen3_5", "kimi_linear"):
        found[name] = tmp_path_factory.mktemp(name)
        build(name, **WIDE[name]).save_pretrained(found[name])
    return found


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("kinds", ["F32", "F16", "Q8_0", "Q4_0", "several"])
def test_planned_bytes_are_those_of_the_loaded_model(name, kinds, folders, tmp_path):
    file = gguf_files.write(
        tmp_path / "model.gguf", folders[name], several_kinds if kinds == "several" else one_kind(kinds)
    )
    model = HybridLM.from_pretrained(file, progress=False)
    for source in (file, tmp_path):
        planned = read_model(source)
        assert (planned.config, planned.dtype, planned.origin) == (model.config, model.norm.weight.dtype, "gguf")
        assert plan_memory(planned).weights == kept_bytes(model)
        found = describe(source)
        assert found.problem is None and found.loaded_bytes == kept_bytes(model)
    formats = {x.format.name for x in model.parameters() if isinstance(x, QuantisedWeight)}
    assert set(found.stored_formats) == formats and set((planned.weights_text or "").split(" and ")) - {""} == formats
    for dtype in ("bfloat16", "float32"):
        loaded = HybridLM.from_pretrained(file, progress=False, dtype=dtype)
        assert plan_memory(read_model(file, dtype)).weights == kept_bytes(loaded)
    for bits, form in BY_BITS.items():
        loaded = HybridLM.from_pretrained(file, progress=False, weights=form)
        assert plan_memory(read_model(file, weights=form)).weights == kept_bytes(loaded), bits


def test_every_layer_and_expert_has_its_own_format(folders, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", folders["qwen3_next"], several_kinds)
    model, planned = HybridLM.from_pretrained(file, progress=False), read_model(file)
    plan = plan_memory(planned)
    for block, layer in zip(model.layers, plan.layers, strict=True):
        assert layer.weights == kept_bytes(block) and layer.feed == kept_bytes(block.feed)
    idle = 0
    for block in model.layers:
        if hasattr(block.feed, "experts_down"):
            one = sum(getattr(block.feed, f"experts_{part}")[0].nbytes_kept for part in ("gate_up", "down"))
            idle += (block.feed.count - block.feed.active) * one
    assert idle and touched_weights(plan, 1) == plan.weights - plan.embedding - idle
    own = [other for other in variants(planned).values() if other.config.letters == planned.config.letters]
    assert all(plan_memory(other).weights == plan.weights for other in own)
    other = read_model(file, pattern="G")
    assert other.kept == () and other.weights == planned.weights and plan_memory(other).weights > 0


def test_the_commands(folders, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", folders["qwen3_5"], several_kinds)
    wanted = kept_bytes(HybridLM.from_pretrained(file, progress=False))
    for source in (file, tmp_path):
        done = lineate("plan", source, "--context", "1k", "--json", "-")
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert report["weights"]["total_bytes"] == wanted and report["model"]["weights"] == "int8 and int4"
    assert report["model"]["name"] == tmp_path.name
    shown = " ".join(lineate("plan", file, "--context", "1k", "--no-train").stdout.split())
    assert shown.startswith("model: ") and "large weights in int8 and int4" in shown
    done = lineate("inspect", file)
    assert done.exit_code == 0 and "Q4_0" in done.stdout and "loaded as stored" in done.stdout
    text = dict(rows(describe(file)))["loaded as stored"]
    assert re.search(r": \d+ weights in int\d, \d+ weights in int\d, all others in float32$", text), text


def test_no_weight_is_read(folders, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", folders["qwen3_5"], one_kind("Q8_0"))
    plan, text = plan_memory(read_model(file)).weights, rows(describe(file))
    from lineate.models.families.gguf import open_gguf

    first = min(span.stored.start for entry in open_gguf(file).entries.values() for span in entry.spans)
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(first)
        handle.truncate(size)  # zeros in place of all weights
    assert plan_memory(read_model(file)).weights == plan and rows(describe(file)) == text


def test_files_that_cannot_be_loaded_are_not_planned(folders, tmp_path):
    def cut(values, tensors):
        tensors["blk.0.attn_qkv.weight"] = tensors["blk.0.attn_qkv.weight"][:, :32].contiguous()

    file = gguf_files.write(tmp_path / "model.gguf", folders["qwen3_5"], change=cut)
    with pytest.raises(CheckpointError, match=r"misshapen \(1\):\n    model\.layers\.0\.linear_attn\.in_proj_qkv"):
        read_model(file)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.gguf").write_bytes(file.read_bytes()[:100])
    done = lineate("plan", tmp_path / "bad")
    assert done.exit_code == 2 and "it is truncated or corrupt: fetch it again" in done.stderr
    done = lineate("plan", tmp_path / "none.gguf")
    assert done.exit_code == 2 and "a GGUF file" in done.stderr and "does not exist" in done.stderr


@torch.no_grad()
def test_inspect_of_a_folder_says_what_it_takes(tmp_path):
    from tests.support.quantised_weights import realistic, sizes

    model = realistic(sizes("GA")).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = describe(tmp_path)
    assert found.loaded_bytes == kept_bytes(HybridLM.from_pretrained(tmp_path, progress=False))
    assert found.stored_formats == {} and dict(rows(found))["loaded as stored"].endswith(": all in bfloat16")


@pytest.mark.parametrize("dtype", [[], {}, 5, None, "int3"])
def test_a_dtype_that_is_no_word_is_planned_as_it_is_loaded(dtype, tmp_path):
    from tests.support.quantised_weights import realistic, sizes

    shrink(realistic(sizes("GA")), "int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    assert plan_memory(read_model(tmp_path)).weights == kept_bytes(HybridLM.from_pretrained(tmp_path, progress=False))
