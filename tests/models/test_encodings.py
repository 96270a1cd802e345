"""Quantised checkpoints: every encoding against hand-written words, plain loops, rows, and the logits of families.

The writers of tests/support/quantised.py and the readers were compared once with the packages, to the bit:

    compressed-tensors 0.20.0   words; all formats and strategies, with and without zeros, rounded to its dtype
    AutoAWQ 0.2.9               words, and decoding rounded to its float16
    AutoGPTQ 0.7.1              words and decoding of 4 and 8 bits, symmetric or not, with and without desc_act
    GPTQModel 7.7.0             codes and zeros of version 2 (its functions that unpack them)
    transformers 5.22.2         whole blocks of float8, of fused experts too

These follow descriptions alone: an order of columns and zeros as int8 in compressed-tensors, which only older versions
wrote, and one scale a weight in fp8.
"""

import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.loading import stored_dtype
from lineate.models.files.safetensors import CheckpointError
from lineate.models.inspect import describe, rows
from lineate.quantised.format import FORMATS
from tests.support.quantised import (
    AWQ_CONFIG,
    ENCODINGS,
    FP8_CONFIG,
    awq,
    compressed_config,
    compressed_float8,
    compressed_int8,
    compressed_packed,
    fp8_blocks,
    fp8_one_scale,
    gptq,
    gptq_config,
    mixed_up,
    stored_name,
    words,
    write_quantised,
)  # fmt: skip

ENCODED = "lineate.models.files.encodings.encoded"


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], **changes: Any) -> Checkpoint:
    save(folder, tensors, {"quantization_config": config | changes})
    return Checkpoint.open(folder)


def parts_of(written: tuple[dict[str, Tensor], Tensor], name: str = "x.weight") -> dict[str, Tensor]:
    return {stored_name(name, end): x for end, x in written[0].items()}


def ints(*values: int) -> Tensor:
    return torch.tensor(values).int()


# Words, written by hand

LOW, HIGH = 0x76543210, 0xFEDCBA98 - 2**32  # codes 0 to 7 and 8 to 15, the first in the lowest bits
BYTES = 0x80FF017F - 2**32  # codes 127, 1, 255, 128
EIGHTHS = torch.arange(8.0)


def test_packed_words_of_4_bits(tmp_path):
    tensors = {"x.weight_packed": ints(LOW, HIGH)[None], "x.weight_shape": torch.tensor([1, 16])}
    tensors["x.weight_scale"] = torch.tensor([[0.5, 2.0]])
    config = compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=8)
    expected = [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 2, 4, 6, 8, 10, 12, 14]
    assert write(tmp_path, tensors, config).read("x.weight").tolist() == [expected]


def test_packed_words_of_8_bits_and_zeros_along_the_rows(tmp_path):
    """Four rows; the word of zeros has those of rows 0 to 3: 127, 1, 255 and 128, which are -1, -127, 127 and 0."""
    tensors = {"x.weight_packed": ints(BYTES).expand(4, 1).contiguous(), "x.weight_zero_point": ints(BYTES)[None]}
    tensors |= {"x.weight_shape": torch.tensor([4, 3]), "x.weight_scale": torch.ones(4, 1)}
    config = compressed_config("pack-quantized", strategy="channel", symmetric=False)
    expected = [[0, -126, 128], [126, 0, 254], [-128, -254, 0], [-1, -127, 127]]
    assert write(tmp_path, tensors, config).read("x.weight").tolist() == expected


@pytest.mark.parametrize(("version", "zeros"), [("gptq", 0x77777777), ("gptq_v2", 0x88888888 - 2**32)])
def test_words_of_gptq(tmp_path, version, zeros):
    """Eight rows of 8 columns: row r has codes 0 to 7, or 8 to 15 if r is odd; the scales are 1 to 8."""
    tensors = {"x.qweight": ints(*[LOW, HIGH] * 4)[None], "x.qzeros": ints(zeros)[None, :]}
    tensors["x.scales"] = (EIGHTHS + 1).half()[None]
    got = write(tmp_path, tensors, gptq_config(checkpoint_format=version)).read("x.weight")
    assert got.tolist() == [[(r + 1.0) * (c - 8 + 8 * (r % 2)) for c in range(8)] for r in range(8)]


def test_zeros_of_gptq_that_borrow(tmp_path):
    """GPTQModel takes 1 from every code of a word at once: zeros 0, 0, 8, ... become 0x7777776FF... by borrowing."""
    zeros = (0x88888800 - 0x11111111) % 2**32
    tensors = {"x.qweight": torch.zeros(1, 8).int(), "x.qzeros": ints(zeros)[None], "x.scales": torch.ones(1, 8)}
    got = write(tmp_path, tensors, gptq_config(sym=False)).read("x.weight")
    assert got[:, 0].tolist() == [0, 0, -8, -8, -8, -8, -8, -8]


def test_words_of_awq(tmp_path):
    """In a word lie rows 0 2 4 6 1 3 5 7, so 0x75316420 has code r for row r; zeros are 15 for odd rows, else 0."""
    tensors = {"x.qweight": ints(0x75316420, 0)[:, None], "x.qzeros": ints(0xFFFF0000 - 2**32)[None]}
    tensors["x.scales"] = torch.tensor([[1.0] * 4 + [2.0] * 4]).half()
    got = write(tmp_path, tensors, AWQ_CONFIG | {"group_size": 2}).read("x.weight")
    first = [0, -14, 2, -12, 8, -20, 12, -16]
    assert got.tolist() == [[x, (-15 if r % 2 else 0) * (1 if r < 4 else 2)] for r, x in enumerate(first)]


def test_blocks_of_float8(tmp_path):
    """0x38 is 1, 0x40 is 2, 0xB8 is -1, 0x7E is 448; blocks of 2 x 2, of which the last ones are cut."""
    codes = torch.tensor([[0x38, 0x40, 0xB8], [0x7E, 0x38, 0x40], [0x00, 0xB8, 0x7E]]).to(torch.uint8)
    tensors = {
        "x.weight": codes.view(torch.float8_e4m3fn),
        "x.weight_scale_inv": torch.tensor([[1.0, 10], [100, 1000]]),
    }
    got = write(tmp_path, tensors, FP8_CONFIG, weight_block_size=[2, 2]).read("x.weight")
    assert got.tolist() == [[1, 2, -10], [448, 1, 20], [0, -100, 448000]]


def test_scales_that_are_powers_of_two(tmp_path):
    """scale_fmt "ue8m0" may store exponents alone: 0x80 is 2, 0x7D is 1/4."""
    scales = torch.tensor([[0x80, 0x7D]]).to(torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"x.weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": scales}
    got = write(tmp_path, tensors, FP8_CONFIG, weight_block_size=[2, 2], scale_fmt="ue8m0").read("x.weight")
    assert got.tolist() == [[2, 2, 0.25, 0.25]] * 2


# Loops


def code(tensor: Tensor, row: int, column: int, bits: int) -> int:
    """Return a code of a row of words."""
    each = 32 // bits
    return (int(tensor[row, column // each]) % 2**32 >> bits * (column % each)) % 2**bits


def by_loops(tensors: dict[str, Tensor], config: dict[str, Any], shape: torch.Size) -> Tensor:
    """Decode x.weight element by element, from the descriptions of the formats."""
    out, method = torch.empty(shape), config["quant_method"]
    get = {name.removeprefix("x."): x for name, x in tensors.items()}
    scheme = config["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else config
    bits = scheme.get("num_bits", scheme.get("bits", 8))
    for r in range(shape[0]):
        for c in range(shape[1]):
            size = scheme.get("group_size", -1)
            group = c // size if size and size > 0 else 0
            if method in ("gptq", "awq"):
                group = int(get["g_idx"][c]) if method == "gptq" else group
                place = r if method == "gptq" else r // 8 * 8 + (0, 4, 1, 5, 2, 6, 3, 7)[r % 8]
                value = code(get["qweight"].t(), r, c, bits) if method == "gptq" else code(get["qweight"], c, place, 4)
                zero = code(get["qzeros"], group, place, bits)
                zero += 1 if method == "gptq" and config.get("checkpoint_format") != "gptq_v2" else 0
                out[r, c] = (value - zero) * float(get["scales"][group, r])
                continue
            scales = get["weight_scale_inv"] if "weight_scale_inv" in get else get["weight_scale"]
            group = int(get["weight_g_idx"][c]) if "weight_g_idx" in get else group
            i, j = (0, 0) if scales.numel() == 1 else (r, group)
            if block := scheme.get("block_structure", config.get("weight_block_size")):
                i, j = r // block[0], c // block[1]
            zero = 0
            if "weight_zero_point" in get:
                packed = get["weight_zero_point"].dtype == torch.int32
                zeros = get["weight_zero_point"]
                zero = code(zeros.t(), j, i, bits) - 2 ** (bits - 1) if packed else int(zeros[i, j])
            if "weight_packed" in get:
                value = code(get["weight_packed"], r, c, bits) - 2 ** (bits - 1)
            else:
                value = float(get["weight"][r, c])
            out[r, c] = (value - zero) * float(scales.view(-1)[0] if scales.numel() == 1 else scales[i, j])
    return out


def written(key: str, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of x.weight in an encoding, and what they stand for."""
    encoding = ENCODINGS[key]
    x = torch.randn((40, 48) if encoding.multiple > 1 else (37, 45), generator=torch.Generator().manual_seed(seed))
    parts, value = encoding.write(x * torch.linspace(0.05, 3, x.shape[1]))
    return {stored_name("x.weight", end): part for end, part in parts.items()}, value


@pytest.mark.parametrize("key", ENCODINGS)
def test_decoding_equals_a_loop(tmp_path, key):
    tensors, value = written(key)
    checkpoint = write(tmp_path, tensors, ENCODINGS[key].config)
    assert list(checkpoint.entries) == ["x.weight"]
    assert checkpoint.shapes["x.weight"] == value.shape
    got = checkpoint.read("x.weight")
    assert got.dtype == torch.float32
    assert torch.equal(got, value)
    assert torch.equal(got, by_loops(tensors, ENCODINGS[key].config, value.shape))


@pytest.mark.parametrize("key", ENCODINGS)
def test_the_default_device_does_not_matter(tmp_path, key):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    checkpoint = write(tmp_path, parts_of(ENCODINGS[key].write(x)), ENCODINGS[key].config)
    wanted, kept = checkpoint.read("x.weight"), checkpoint.kept_as("x.weight")
    with torch.device("meta"):
        again = Checkpoint.open(tmp_path)
        assert torch.equal(again.read("x.weight"), wanted) and again.kept_as("x.weight") == kept
        if kept is not None:
            assert {part.device.type for part in again.read_codes("x.weight", (3, 21))} == {"cpu"}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("key", ENCODINGS)
def test_rows_dtypes_and_layouts(tmp_path, monkeypatch, key, small):
    if small:  # few rows at a time, and columns straight from the file
        monkeypatch.setattr(f"{ENCODED}.BLOCK_ELEMENTS", 150)
        monkeypatch.setattr(f"{ENCODED}.MOST_KEPT", 64)
    tensors, value = written(key, seed=1)
    checkpoint = write(tmp_path, tensors, ENCODINGS[key].config)
    height, width = value.shape
    for first, last in ((0, height), (0, 1), (3, 4), (5, 23), (16, 32), (height - 1, height)):
        part = torch.full((last - first, width), torch.nan)
        checkpoint.read_into("x.weight", part, (first, last))
        assert torch.equal(part, value[first:last])
    targets = [
        torch.full((height, width), torch.nan, dtype=torch.bfloat16),
        torch.full((height * width,), torch.nan),
        torch.full((height, width + 9), torch.nan)[:, 4:-5],
        torch.full((width, height), torch.nan).t(),
        torch.full((width, 2 * height), torch.nan)[:, ::2],
    ]
    for target in targets:
        checkpoint.read_into("x.weight", target)
        assert torch.equal(target, value.reshape(target.shape).to(target.dtype))
    with pytest.raises(CheckpointError, match=rf"x.weight of shape \({height}, {width}\), rows 2 to 4, fills"):
        checkpoint.read_into("x.weight", targets[0], (2, 4))


def test_fused_experts_in_float8(tmp_path):
    x = torch.randn(5, 32, 40)
    parts, value = fp8_blocks(x, (8, 16), torch.bfloat16)
    tensors = {f"mlp.experts.gate_up_proj{end}": part for end, part in parts.items()}
    checkpoint = write(tmp_path, tensors, FP8_CONFIG, weight_block_size=[8, 16])
    name = "mlp.experts.gate_up_proj"
    assert list(checkpoint.entries) == [name]
    assert torch.equal(checkpoint.read(name), value)
    part = torch.empty(2, 32, 40)
    checkpoint.read_into(name, part, (1, 3))
    assert torch.equal(part, value[1:3])


def test_parts_in_different_shards(tmp_path):
    tensors, value = written("gptq 4 bits")
    save(tmp_path, tensors, {"quantization_config": gptq_config()}, max_shard_bytes=100)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert torch.equal(Checkpoint.open(tmp_path).read("x.weight"), value)


def test_several_groups_of_a_config(tmp_path):
    """Each weight has the scheme that its tensors fit; patterns of names are not run."""
    x = torch.randn(16, 32)
    four, eight = compressed_packed(x, 4, 16), compressed_packed(x, 8, 8, asymmetric=True)
    plain = compressed_int8(x)
    config = compressed_config("mixed-precision", num_bits=4, strategy="group", group_size=16)
    for i, weights in enumerate(({"group_size": 8, "strategy": "group", "symmetric": False}, {"strategy": "channel"})):
        group = {"targets": [r"re:(a+)+$"], "weights": {"num_bits": 8, "type": "int"} | weights}
        config["config_groups"][f"group_{i + 1}"] = group
    tensors = parts_of(four, "a.weight") | parts_of(eight, "b.weight") | parts_of(plain, "c.weight")
    checkpoint = write(tmp_path, tensors, config)
    for name, (_, value) in (("a.weight", four), ("b.weight", eight), ("c.weight", plain)):
        assert torch.equal(checkpoint.read(name), value)


def test_modules_of_gptq_with_bits_and_groups_of_their_own(tmp_path):
    x = torch.randn(16, 32)
    four, eight = gptq(x, 4, 8), gptq(x, 8, 16)
    tensors = parts_of(four, "a.weight") | parts_of(eight, "b.weight")
    checkpoint = write(tmp_path, tensors, gptq_config(dynamic={r"+:.*\.b": {"bits": 8, "group_size": 16}}))
    assert torch.equal(checkpoint.read("a.weight"), four[1])
    assert torch.equal(checkpoint.read("b.weight"), eight[1])


def test_a_last_group_of_gptq_that_is_cut(tmp_path):
    written_, value = gptq(torch.randn(8, 40), 4, 16)
    checkpoint = write(tmp_path, parts_of((written_, value)), gptq_config(group_size=16))
    assert torch.equal(checkpoint.read("x.weight"), value)


# Codes that are kept unchanged

KEPT = {
    "packed 4 bits": (compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32),
                      lambda x: compressed_packed(x, 4, 32), "int4"),
    "packed 8 bits, groups of 64": (compressed_config("pack-quantized", strategy="group", group_size=64),
                                    lambda x: compressed_packed(x, 8, 64), "int8"),
    "packed 4 bits, a scale a row": (compressed_config("pack-quantized", num_bits=4, strategy="channel"),
                                     lambda x: compressed_packed(x, 4), "int4"),
    "int8": (compressed_config("int-quantized", strategy="channel"), compressed_int8, "int8"),
    "gptq": (gptq_config(group_size=64), lambda x: gptq(x, 4, 64), "int4"),
    "gptq 8 bits": (gptq_config(bits=8, group_size=-1), lambda x: gptq(x, 8, 192), "int8"),
    "awq, all zeros at 8": (AWQ_CONFIG | {"group_size": 32}, lambda x: awq(x, 32, asymmetric=False), "int4"),
    "groups of 16": (compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=16),
                     lambda x: compressed_packed(x, 4, 16), None),
    "asymmetric": (compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
                   lambda x: compressed_packed(x, 4, 32, asymmetric=True), None),
    "ordered": (gptq_config(group_size=32, desc_act=True), lambda x: gptq(x, 4, 32, order=mixed_up(192, 32)), None),
    "awq": (AWQ_CONFIG | {"group_size": 32}, lambda x: awq(x, 32), None),
    "float8": (FP8_CONFIG | {"weight_block_size": [16, 128]}, lambda x: fp8_blocks(x, (16, 128)), "fp8"),
    "float8, bfloat16 scales": (FP8_CONFIG | {"weight_block_size": [128, 128]},
                                lambda x: fp8_blocks(x, (128, 128), torch.bfloat16), "fp8"),
    "float8, a scale a row": (compressed_config("float-quantized", type="float", strategy="channel"),
                              lambda x: compressed_float8(x, (1, 192)), "fp8"),
    "float8, one scale": (FP8_CONFIG, fp8_one_scale, "fp8"),
    "float8, blocks of 32": (FP8_CONFIG | {"weight_block_size": [32, 32]}, lambda x: fp8_blocks(x, (32, 32)), None),
}  # fmt: skip


@pytest.mark.parametrize("key", KEPT)
def test_codes_that_pass_on_without_loss(tmp_path, key):
    config, writer, form = KEPT[key]
    parts, value = writer(torch.randn(40, 192))
    checkpoint = write(tmp_path, parts_of((parts, value)) | {"y": torch.ones(3)}, config)
    assert checkpoint.kept_as("x.weight") == form
    assert checkpoint.kept_as("y") is None
    if form is None:
        with pytest.raises(CheckpointError, match=r"x\.weight must be stored as codes of 8 or 4 bits.*use read_into"):
            checkpoint.read_codes("x.weight")
        return
    kept = FORMATS[form]
    for first, last in ((0, 40), (7, 29)):
        codes, scales = checkpoint.read_codes("x.weight", (first, last))
        assert (codes.dtype, scales.dtype) == (torch.uint8, kept.scales_dtype)
        assert (codes.shape, scales.shape) == ((last - first, 192), (last - first, 2 if form == "fp8" else 6))
        assert torch.equal(kept.decode(*kept.to_tiles(codes, scales), last - first), value[first:last])
    assert torch.equal(checkpoint.read_codes("x.weight")[0][7:29], codes)


def test_scales_that_float16_lacks_are_not_kept(tmp_path):
    for i, scale in enumerate((1 + 2**-11, 1e5, 1e-9)):
        parts = parts_of(compressed_packed(torch.randn(4, 32), 4, 32))
        parts["x.weight_scale"] = torch.tensor([[0.5], [scale], [1.0], [2.0]])
        config = compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32)
        checkpoint = write(tmp_path / str(i), parts, config)
        assert checkpoint.kept_as("x.weight") is None
        parts["x.weight_scale"][1] = 2.0**-17
        assert write(tmp_path / str(i), parts, config).kept_as("x.weight") == "int4"


# Families

SIZES = {
    "qwen3_next": dict(
        hidden_size=64, moe_intermediate_size=24, shared_expert_intermediate_size=32, intermediate_size=40
    ),
    "qwen3_5": dict(hidden_size=64, intermediate_size=40),
    "kimi_linear": dict(hidden_size=64, moe_intermediate_size=24, intermediate_size=40, kv_lora_rank=24),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that gives the folder of a family's tiny model as transformers saves it."""
    pytest.importorskip("transformers")
    from tests.support.families import build

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        build(family, **SIZES[family]).save_pretrained(path)
        return path

    return folder


def logits(folder: Path) -> Tensor:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = HybridLM.from_pretrained(folder, progress=False)
        return model(torch.arange(3, 83).view(2, 40)).logits


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("key", ENCODINGS)
@pytest.mark.parametrize("family", SIZES)
def test_logits_are_those_of_the_decoded_weights(folder_of, tmp_path, family, key):
    from tests.support.families import rewrite

    encoding, values = ENCODINGS[key], {}
    quantised = rewrite(
        folder_of(family), tmp_path / "quantised", lambda tensors: values.update(write_quantised(tensors, encoding)),
        {"quantization_config": encoding.config},
    )  # fmt: skip
    plain = rewrite(folder_of(family), tmp_path / "plain", lambda tensors: tensors.update(values))
    kinds = ("experts", "linear_attn", "self_attn") if family == "qwen3_next" else ("mlp", "self_attn")
    assert all(any(kind in name for name in values) for kind in kinds[1:])
    got, wanted = logits(quantised), logits(plain)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(got, logits(folder_of(family)), atol=1e-5)


def test_fused_experts_of_a_family(folder_of, tmp_path):
    from tests.support.families import fused_experts, rewrite

    values = {}

    def change(tensors: dict[str, Tensor]) -> None:
        fused_experts(False)(tensors, "qwen3_next")
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            parts, values[name] = fp8_blocks(tensors.pop(name), (8, 16))
            tensors |= {name + end: x for end, x in parts.items()}

    config = {"quantization_config": FP8_CONFIG | {"weight_block_size": [8, 16]}}
    quantised = rewrite(folder_of("qwen3_next"), tmp_path / "quantised", change, config)

    def plain(tensors: dict[str, Tensor]) -> None:
        fused_experts(False)(tensors, "qwen3_next")
        tensors.update(values)

    wanted = logits(rewrite(folder_of("qwen3_next"), tmp_path / "plain", plain))
    assert len(values) == 8
    torch.testing.assert_close(logits(quantised), wanted, atol=1e-5, rtol=0)


def test_the_config_of_the_text_part(folder_of, tmp_path):
    from tests.support.families import rewrite

    encoding = ENCODINGS["packed 4 bits"]
    source = Checkpoint.open(folder_of("qwen3_5"))
    inner = source.config | {"compression_config": encoding.config}
    config = dict.fromkeys(source.config) | {"model_type": "qwen3_5", "text_config": inner}
    folder = rewrite(folder_of("qwen3_5"), tmp_path, lambda x: write_quantised(x, encoding) and None, config)
    assert Checkpoint.open(folder).encoding is not None
    assert logits(folder).isfinite().all()


# What is told


def test_the_dtype_is_that_of_the_other_tensors(tmp_path):
    x = torch.randn(64, 64)
    tensors = parts_of(fp8_blocks(x, (16, 16))) | {"norm.weight": torch.ones(4).bfloat16(), "A_log": torch.ones(1)}
    checkpoint = write(tmp_path, tensors, FP8_CONFIG, weight_block_size=[16, 16])
    assert stored_dtype(checkpoint) == torch.bfloat16
    assert checkpoint.nbytes == 64 * 64 + 4 * 16 + 8 + 4


def test_inspect_names_the_encoding(folder_of, tmp_path):
    from tests.support.families import rewrite

    encoding = ENCODINGS["gptq 4 bits"]
    rewrite(
        folder_of("qwen3_5"), tmp_path, lambda x: write_quantised(x, encoding) and None,
        {"quantization_config": encoding.config},
    )  # fmt: skip
    found, plain = describe(tmp_path), describe(folder_of("qwen3_5"))
    assert (found.problem, plain.encoding, found.parameters) == (None, None, plain.parameters)
    assert found.bytes_on_disk < plain.bytes_on_disk / 2
    assert found.bytes_by_dtype["int32"] + found.bytes_by_dtype["float16"] < found.bytes_on_disk
    texts = dict(rows(found))
    assert re.match(r"gptq: \d+ tensors in 4 bits, groups of 8; decoded", texts["quantised"])
    assert "quantised" not in dict(rows(plain))


def test_what_is_not_used_is_told_once(folder_of, tmp_path):
    from tests.support.families import rewrite

    encoding = ENCODINGS["int8"]
    config = encoding.config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {"group_0": group | {"input_activations": {"num_bits": 8, "dynamic": False}}}

    def change(tensors: dict[str, Tensor]) -> None:
        write_quantised(tensors, encoding)
        tensors["model.layers.3.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.3.self_attn.q_proj.input_scale"] = torch.ones(1)

    folder = rewrite(folder_of("qwen3_5"), tmp_path, change, {"quantization_config": config})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HybridLM.from_pretrained(folder, progress=False)
    texts = [str(warning.message) for warning in caught]
    assert [sum(word in text for text in texts) for word in ("activations", "cache of keys")] == [1, 1]
    dynamic = {"group_0": group | {"input_activations": {"num_bits": 8, "dynamic": True}}}
    checkpoint = write(tmp_path / "other", parts_of(compressed_int8(torch.randn(8, 8))), config, config_groups=dynamic)
    assert checkpoint.encoding is not None
    assert len(checkpoint.encoding.notes) == 1


# Memory

MEASURE = """
import os, re, sys, torch
from lineate.models.files.checkpoint import Checkpoint
checkpoint = Checkpoint.open(sys.argv[1])
shape = checkpoint.shapes["x.weight"]
target = torch.zeros(shape, dtype=torch.bfloat16)
torch.zeros(4, 4) @ torch.zeros(4, 4)
before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
checkpoint.read_into("x.weight", target)
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(peak - before, float(target.sum()))
"""
ROWS, COLUMNS = 16384, 8192


def large(key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a weight of 512 MB in float32, of ones."""
    words_of_ones, half = int(words(torch.full((8,), 9), 4)[0]), {"dtype": torch.float16}
    if key == "fp8":
        codes = torch.ones(1, 1).to(torch.float8_e4m3fn).expand(ROWS, COLUMNS)
        tensors = {"x.weight": codes, "x.weight_scale_inv": torch.ones(ROWS // 128, COLUMNS // 128)}
        return tensors, FP8_CONFIG | {"weight_block_size": [128, 128]}
    filled = torch.full((1, 1), words_of_ones, dtype=torch.int32)
    if key == "packed":
        tensors = {
            "x.weight_packed": filled.expand(ROWS, COLUMNS // 8),
            "x.weight_shape": torch.tensor([ROWS, COLUMNS]),
        }
        tensors["x.weight_scale"] = torch.ones(ROWS, COLUMNS // 32, **half)
        return tensors, compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32)
    zeros = torch.full((COLUMNS // 128, ROWS // 8), 0x77777777, dtype=torch.int32)
    scales = torch.ones(COLUMNS // 128, ROWS, **half)
    if key == "gptq":
        tensors = {"x.qweight": filled.expand(COLUMNS // 8, ROWS), "x.qzeros": zeros, "x.scales": scales}
        return tensors, gptq_config(group_size=128)
    tensors = {"x.qweight": filled.expand(COLUMNS, ROWS // 8), "x.qzeros": zeros + 0x11111111, "x.scales": scales}
    return tensors, AWQ_CONFIG | {"group_size": 128}


@pytest.mark.cover
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("key", ["fp8", "packed", "gptq", "awq"])
def test_decoding_takes_little_memory(tmp_path, key):
    tensors, config = large(key)
    write(tmp_path, tensors, config)
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, total = map(float, run.stdout.split())
    print(f"{key}: grown by {grown / 2**20:.0f} MiB")
    assert total == ROWS * COLUMNS
    assert grown < 64 * 2**20


def test_an_entry_is_a_value(tmp_path):
    """Entries of encodings are frozen and compare by their fields, as others do."""
    tensors, _ = written("awq")
    one, other = (write(tmp_path, tensors, ENCODINGS["awq"].config).entries["x.weight"] for _ in range(2))
    assert one == other
    assert one != replace(one, start=0)
