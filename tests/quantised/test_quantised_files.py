"""Quantised weights in files: reading them from any layout, writing them, damaged files, and memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.models import HybridLM, preset
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.filling import Piece, allocate, fill
from lineate.models.files.loading import MismatchError
from lineate.models.files.safetensors import CheckpointError
from lineate.models.hybrid import empty_model, save_pretrained
from lineate.models.inspect import describe, rows
from lineate.quantised import FORMATS, QuantisedWeight, quantised_formats, quantize, shrink
from lineate.quantised.which import format_of, quantised_parameters
from tests.support.quantised_weights import EXPERTS, realistic, sizes, tokens

ALL = tuple(FORMATS)
CODED = ("int8", "int4", "fp8")


def same_quantised(one: Tensor, other: Tensor) -> bool:
    """Whether two weights have the same codes and scales."""
    assert isinstance(one, QuantisedWeight) and isinstance(other, QuantisedWeight)
    if one.scales is None or other.scales is None:
        return one.scales is other.scales and torch.equal(one.codes, other.codes)
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


def same_models(one: HybridLM, other: HybridLM) -> bool:
    """Whether all tensors of two models have the same bits."""
    theirs = other.state_dict()
    return all(
        same_quantised(x, theirs[name]) if isinstance(x, QuantisedWeight) else torch.equal(x, theirs[name])
        for name, x in one.state_dict().items()
    )


# Writing and reading


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10**5])
def test_saved_and_read_back_to_the_same_bits(form, max_shard_bytes, tmp_path):
    config = sizes("GKMA", experts=EXPERTS, dense_layers=(0,), tie_embeddings=False)
    model = shrink(realistic(config), form)
    save_pretrained(model, tmp_path, max_shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_bytes > 10**6
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["weights"], written["dtype"]) == ("lineate", form, "float32")
    for given in (None, form):
        again = HybridLM.from_pretrained(tmp_path, progress=False, weights=given)
        assert format_of(again) == FORMATS[form] and same_models(again, model)
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


@pytest.mark.parametrize("form", ALL)
def test_tied_embeddings_stay_tied(form, tmp_path):
    model = realistic(sizes("GA"))
    model.save_pretrained(tmp_path / "plain")
    quantised = HybridLM.from_pretrained(tmp_path / "plain", progress=False, weights=form)
    assert quantised.head is None and isinstance(quantised.embed.weight, QuantisedWeight)
    quantised.save_pretrained(tmp_path / "quantised")
    assert not [name for name in Checkpoint.open(tmp_path / "quantised").entries if name.startswith("head")]


def test_the_entries_of_a_file(tmp_path):
    model = shrink(realistic(sizes("G")), "int8")
    model.save_pretrained(tmp_path)
    entries, weight = Checkpoint.open(tmp_path).entries, model.layers[0].mixer.in_proj.weight
    codes, scales = (entries[f"layers.0.mixer.in_proj.weight.{part}"] for part in ("codes", "scales"))
    assert (codes.dtype, codes.shape) == (torch.uint8, weight.codes.shape)
    assert (scales.dtype, scales.shape) == (torch.float16, weight.scales.shape)
    assert "layers.0.mixer.in_proj.weight" not in entries and "layers.0.mixer.conv.weight" in entries


def test_dtypes_of_what_is_not_small(tmp_path):
    realistic(sizes("GA")).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    quantised = HybridLM.from_pretrained(tmp_path / "plain", progress=False, weights="int8")
    assert (quantised.dtype, quantised.norm.weight.dtype, quantised.layers[0].mixer.A_log.dtype) == (torch.float32,) * 3
    half = HybridLM.from_pretrained(tmp_path / "plain", progress=False, weights="int8", dtype="bfloat16")
    assert half.dtype == half.norm.weight.dtype == torch.bfloat16
    assert half.layers[0].mixer.A_log.dtype == torch.float32
    assert same_quantised(half.embed.weight, quantised.embed.weight)
    half.save_pretrained(tmp_path / "half")
    again = HybridLM.from_pretrained(tmp_path / "half", progress=False)
    assert again.dtype == torch.bfloat16 and same_models(again, half)
    assert HybridLM.from_pretrained(tmp_path / "half", progress=False, dtype="float32").dtype == torch.float32
    plain = HybridLM.from_pretrained(tmp_path / "plain", progress=False, weights="bfloat16", dtype="bfloat16")
    assert format_of(plain) is None  # the format of all tensors is no quantised one


@pytest.mark.parametrize("other", ALL)
@pytest.mark.parametrize("form", CODED)
def test_a_quantised_folder_in_another_format(form, other, tmp_path, monkeypatch):
    monkeypatch.setattr("lineate.models.files.rounding.AT_ONCE", 4096)
    model = shrink(realistic(sizes("G", experts=EXPERTS, tie_embeddings=False)), form)
    model.save_pretrained(tmp_path)
    found = HybridLM.from_pretrained(tmp_path, progress=False, weights=other)
    assert same_models(found, shrink(model, other))


@pytest.mark.parametrize("form", ["int9", "INT8", 8, ["int8"], "float32"])
def test_weights_that_are_not_known(form, tmp_path):
    realistic(sizes("G")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights must be"):
        HybridLM.from_pretrained(tmp_path, progress=False, weights=form)


@pytest.mark.parametrize("form", CODED)
def test_what_inspect_says(form, tmp_path):
    model = shrink(realistic(sizes("GA")), form)
    model.save_pretrained(tmp_path)
    found = describe(tmp_path)
    kept = sum(x.nbytes_kept for x in quantised_parameters(model).values())
    plain = sum(x.nbytes for x in model.state_dict().values() if not isinstance(x, QuantisedWeight))
    assert (found.weights, found.problem, found.bytes_on_disk) == (form, None, kept + plain)
    assert found.weight_bytes["fp8" if form == "fp8" else FORMATS[form].bits] == kept + plain
    assert list(found.weight_bytes) == [16, 8, 4, "fp8"]
    assert found.weight_bytes[16] > found.weight_bytes[8] > found.weight_bytes[4]
    lines = dict(rows(found))
    assert lines["large weights"] == f"{form}, {FORMATS[form].bits} bits"
    assert all(text in lines["weights in memory"] for text in ("at 16 bits", "at 8 bits", "at 4 bits", "in fp8"))


# Damaged files


def without(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__delitem__(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__setitem__(name, change(tensors[name]))


def said(value: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, config: config.__setitem__("weights", value)


def also_plain(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["embed.weight"] = torch.zeros(97, 128)


def nothing_of_it(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors[f"{PROJECTION}.codes"], tensors[f"{PROJECTION}.scales"]


PROJECTION = "layers.0.mixer.in_proj.weight"
DAMAGED = {
    "no scales": (without(f"{PROJECTION}.scales"), r"in_proj\.weight\.scales: expected float16 .* got none"),
    "no codes": (without("embed.weight.codes"), r"embed\.weight\.codes: expected uint8 .* got none"),
    "neither": (nothing_of_it, r"missing \(1\):\n    layers\.0\.mixer\.in_proj\.weight: expected shape"),
    "rows": (changed("embed.weight.codes", lambda x: x[1:].clone()), r"embed\.weight\.codes: .* got uint8 of shape"),
    "groups": (changed("embed.weight.scales", lambda x: x[:, 1:].clone()), r"weight\.scales: .* got float16 of shape"),
    "dtype of codes": (changed("embed.weight.codes", lambda x: x.view(torch.int8)), r"expected uint8 .* got int8"),
    "dtype of scales": (changed("embed.weight.scales", lambda x: x.float()), r"expected float16 .* got float32"),
    "another format": (said("int4"), r'embed\.weight\.codes: expected uint8 .*"weights": "int4", got uint8'),
    "no format": (lambda tensors, config: config.__delitem__("weights"), r"missing \(\d+\):\n    embed\.weight"),
    "16 bits": (said("bfloat16"), r"missing \(\d+\):\n    embed\.weight"),
    "unknown format": (said("int3"), r"config\.json: \"weights\" must be one of bfloat16, .* got 'int3'"),
    "format of another kind": (said(8), r'"weights" must be one of .* got 8'),
    "twice": (also_plain, r"expected embed\.weight in codes and scales, got it as a tensor too"),
    "codes of what stays": (
        lambda tensors, config: tensors.update({"norm.weight.codes": torch.zeros(4, dtype=torch.uint8)}),
        r"unexpected \(1\):\n    norm\.weight\.codes",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_before_anything_is_allocated(case, tmp_path, monkeypatch):
    change, message = DAMAGED[case]
    shrink(realistic(sizes("G")), "int8").save_pretrained(tmp_path / "good")
    good = Checkpoint.open(tmp_path / "good")
    tensors, config = {name: good.read(name) for name in good.entries}, dict(good.config)
    change(tensors, config)
    save(tmp_path / "bad", tensors, config)

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("something was allocated")

    monkeypatch.setattr("lineate.models.files.loading.allocate", refuse)
    with pytest.raises(CheckpointError, match=message) as error:
        HybridLM.from_pretrained(tmp_path / "bad", progress=False)
    assert str(tmp_path / "bad") in str(error.value)
    if case in ("neither", "no format", "16 bits", "codes of what stays"):
        assert isinstance(error.value, MismatchError)
        assert describe(tmp_path / "bad").problem is not None


def test_a_file_that_is_cut_is_refused(tmp_path):
    shrink(realistic(sizes("G")), "int4").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="it is truncated"):
        HybridLM.from_pretrained(tmp_path, progress=False)


# Pieces


@dataclass
class Stored(Checkpoint):
    """A checkpoint some of whose tensors are stored as codes, which are all it has of them."""

    codes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    form: str = "int8"

    def kept_as(self, name: str) -> str | None:
        return self.form if name in self.codes else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        first, last = rows or (0, len(self.codes[name][0]))
        return self.codes[name][0][first:last], self.codes[name][1][first:last]


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("at_once", [512, 2**24])
def test_codes_of_the_same_format_are_taken_as_they_are(form, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr("lineate.models.files.rounding.AT_ONCE", at_once)
    bits, kept = FORMATS[form].bits, FORMATS[form]
    x, y = torch.randn(40, 64), torch.randn(24, 64)
    save(tmp_path, {"x": x, "y": y}, {})
    stored = torch.randint(0, 2 ** (bits - 1), (40, 64), dtype=torch.uint8), torch.rand(40, 64 // min(64, kept.group))
    stored = stored[0], stored[1].to(kept.scales_dtype)
    checkpoint = Stored(tmp_path, {}, Checkpoint.open(tmp_path).entries, codes={"x": stored}, form=form)
    pieces = [  # rows 10 to 30 of x, all of y, and the last 5 rows of x
        Piece("x", (40, 64), (slice(0, 20),), (10, 30)),
        Piece("y", (24, 64), (slice(20, 44),)),
        Piece("x", (40, 64), (slice(44, 49),), (35, 40)),
    ]
    made = allocate("head.weight", torch.empty(49, 64, device="meta"), torch.float32, "cpu", FORMATS[form])
    assert isinstance(made, QuantisedWeight) and made.scales is not None
    read: list[int] = []
    fill(checkpoint, pieces, made, read.append)
    assert sum(read) == 49 * 64 * 4
    codes, scales = FORMATS[form].from_tiles(made.codes, made.scales, 49)
    rounded = FORMATS[form].to_codes(y)
    for found, wanted, own in zip((codes, scales), stored, rounded, strict=True):
        assert torch.equal(found, torch.cat([wanted[10:30], own, wanted[35:]]))
    other = "int4" if form == "int8" else "int8"
    made = allocate("head.weight", torch.empty(49, 64, device="meta"), torch.float32, "cpu", FORMATS[other])
    fill(checkpoint, pieces, made)  # of another format: the values are rounded
    assert same_quantised(made, quantize(torch.cat([x[10:30], y, x[35:]]), other))


def _turned(block: Tensor) -> Tensor:
    return block.transpose(-1, -2)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], tuple[dict[str, Tensor], list[Piece]]]]] = {
    "whole": ((40, 64), lambda x: ({"x": x}, [Piece("x", (40, 64))])),
    "a dim more": ((40, 64), lambda x: ({"x": x[:, None]}, [Piece("x", (40, 1, 64))])),
    "turned": ((40, 64), lambda x: ({"x": x.T.contiguous()}, [Piece("x", (64, 40), take=_turned)])),
    "columns": (
        (40, 64),
        lambda x: (
            {"a": x[:, :20].contiguous(), "b": x[:, 20:].contiguous()},
            [Piece("a", (40, 20), (slice(None), slice(0, 20))), Piece("b", (40, 44), (slice(None), slice(20, 64)))],
        ),
    ),
    "experts in one tensor": ((3, 40, 64), lambda x: ({"x": x}, [Piece("x", (3, 40, 64))])),
    "experts one by one": (
        (3, 40, 64),
        lambda x: (
            {f"x{e}{n}": x[e, 20 * n : 20 * n + 20] for e in range(3) for n in range(2)},
            [Piece(f"x{e}{n}", (20, 64), (e, slice(20 * n, 20 * n + 20))) for e in range(3) for n in range(2)],
        ),
    ),
    "experts turned": (
        (3, 40, 64),
        lambda x: (
            {"x": x.transpose(1, 2).contiguous()},
            [Piece("x", (3, 64, 40), (slice(e, e + 1),), (e, e + 1), _turned) for e in range(3)],
        ),
    ),
    "experts turned at once": (
        (3, 40, 64),
        lambda x: ({"x": x.transpose(1, 2).contiguous()}, [Piece("x", (3, 64, 40), take=_turned)]),
    ),
}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_is_rounded_to_the_same_bits(layout, form, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("lineate.models.files.rounding.AT_ONCE", 1024)
    shape, make = LAYOUTS[layout]
    x = torch.randn(shape).to(dtype)
    tensors, pieces = make(x)
    save(tmp_path, tensors, {})
    made = allocate("head.weight", torch.empty(shape, device="meta"), torch.float32, "cpu", FORMATS[form])
    fill(Checkpoint.open(tmp_path), pieces, made)
    assert same_quantised(made, quantize(x.float(), form))


# Memory

MEASURE = """
import os, re, sys, torch
from lineate.models import HybridLM
from lineate.models.quantizing import quantize_checkpoint
from lineate.quantised.format import FORMATS
torch.zeros(4, 4) @ torch.zeros(4, 4)
FORMATS["int4"].encode(torch.zeros(16, 32))
pages = int(open("/proc/self/statm").read().split()[1])
before = pages * os.sysconf("SC_PAGE_SIZE")
if len(sys.argv) == 4:
    quantize_checkpoint(sys.argv[1], sys.argv[3], sys.argv[2], progress=False)
else:
    model = HybridLM.from_pretrained(sys.argv[1], progress=False, weights=sys.argv[2])
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(peak - before)
"""


def grown(*arguments: object) -> int:
    """Return by how many bytes resident memory grows while a checkpoint is loaded, or rewritten into a folder."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def make_large(folder: Path, layers: int, vocab: int) -> tuple[int, int]:
    """Make a model of arbitrary contents; return the bytes of its weights in float32 and in int8."""
    config = replace(preset("small"), n_layers=layers, vocab_size=vocab)
    empty = empty_model(config)
    tensors = {name: torch.ones(1).expand(x.shape) for name, x in empty.state_dict().items()}
    save(folder, tensors, {"model_type": "lineate", **config.to_dict()})
    quantised = quantised_formats(empty, "int8")
    kept = sum(
        quantised[name].nbytes(tuple(x.shape)) if name in quantised else 4 * x.numel() for name, x in tensors.items()
    )
    return sum(4 * x.numel() for x in tensors.values()), kept


@pytest.mark.cover
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("layers", "vocab"),
    [pytest.param(26, 2048, marks=pytest.mark.slow), (1, 2**16)],
    ids=["many layers", "a large embedding"],
)
def test_memory_grows_by_what_stays_and_one_block(layers, vocab, tmp_path):
    plain, quantised = make_large(tmp_path / "plain", layers, vocab)
    block = 60 * 2**20  # 2^22 numbers in float32, their codes, what rounding 2^18 of them takes, what malloc keeps
    loaded = grown(tmp_path / "plain", "int8")
    rewritten = grown(tmp_path / "plain", "int8", tmp_path / "quantised")
    print(f"{plain / 1e6:.0f} MB, {quantised / 1e6:.0f} MB quantised: {loaded / 1e6:.0f} MB loading")
    print(f"{rewritten / 1e6:.0f} MB rewriting")
    assert plain > quantised + block  # so that a second copy would be noticed
    assert loaded < quantised + block
    largest = FORMATS["int8"].nbytes((vocab, preset("small").hidden_size))  # of the tensors that are written
    assert rewritten < largest + block
