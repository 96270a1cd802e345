"""Quantised checkpoints that are not whole, or not understood, are refused by name while they are opened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.safetensors import CheckpointError, read_header
from tests.support.quantised import ENCODINGS, FP8_CONFIG, compressed_config, fp8_blocks, gptq_config, stored_name

FP8, PACKED, ROWS, GPTQ, AWQ = (
    "fp8 blocks", "packed 4 bits", "packed 4 bits, a scale a row", "gptq 4 bits", "awq",
)  # fmt: skip
Tensors = dict[str, Tensor]


def parts(key: str) -> Tensors:
    """Return x.weight, of 40 rows and 48 columns, in an encoding."""
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    return {stored_name("x.weight", end): part for end, part in ENCODINGS[key].write(x)[0].items()}


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def given(new: Tensors) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(new)


def shaped(name: str, *shape: int, dtype: torch.dtype | None = None) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype or tensors[name].dtype)})


def scheme(**weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "strategy": "group", "group_size": 8}
    return compressed_config("pack-quantized", **base | weights)


WRONG: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], None] | None, str]] = {
    "unknown method": (
        FP8, {"quant_method": "bitsandbytes"}, None,
        r"config.json: quantization_config must have a quant_method of fp8, compressed-tensors, gptq, awq, "
        r"got 'bitsandbytes'; use another checkpoint",
    ),
    "no method": (FP8, {"quant_method": None}, None, "quant_method of fp8, .* got None"),
    "method, a list": (FP8, {"quant_method": ["fp8"]}, None, r"got \['fp8'\]"),
    "fp8: format": (FP8, {"fmt": "e5m2"}, None, "must have fmt = e4m3 or float8_e4m3fn, got 'e5m2'"),
    "fp8: experts of 4 bits": (FP8, {"expert_dtype": "fp4"}, None, "expert_dtype = fp8, got 'fp4'; experts of 4 bits"),
    "fp8: block of three": (FP8, {"weight_block_size": [1, 2, 3]}, None, "two whole numbers in weight_block_size"),
    "fp8: block of zero": (FP8, {"weight_block_size": [0, 128]}, None, r"weight_block_size, got \[0, 128\]"),
    "fp8: block in words": (FP8, {"weight_block_size": "128"}, None, "weight_block_size, got '128'"),
    "fp8: activations": (FP8, {"activation_scheme": 3}, None, "activation_scheme = dynamic or static, got 3"),
    "fp8: no scale": (
        FP8, {}, without("x.weight_scale_inv"),
        r"model.safetensors: x.weight is quantised and needs x.weight_scale_inv or x.weight_scale, got no such tensor",
    ),
    "fp8: blocks": (
        FP8, {}, shaped("x.weight_scale_inv", 3, 3),
        r"x.weight_scale_inv must be floats of shape \(3, 2\), a scale for each block of 16 x 24 of x.weight "
        r"\(40, 48\), got float32 of shape \(3, 3\)",
    ),
    "fp8: whole scales": (FP8, {}, shaped("x.weight_scale_inv", 3, 2, dtype=torch.int8), "must be floats .* got int8"),
    "fp8: one scale wanted": (FP8, {"weight_block_size": None}, None, r"shape \(\) or .* or \(40, 1\), one scale"),
    "fp8: vector": (FP8, {}, shaped("x.weight", 48), r"x.weight must have 2 or 3 dimensions, got shape \(48,\)"),
    "fp8: scale alone": (
        FP8, {}, without("x.weight"), "x.weight_scale_inv must belong to a quantised weight, got none",
    ),
    "packed: format": (PACKED, scheme() | {"format": "marlin-24"}, None, "must have format = pack-quantized or .* got"),
    "packed: strategy": (
        PACKED, scheme(strategy="tensor_group"), None,
        r"config_groups.group_0.weights must have strategy = tensor or channel or group or block, got 'tensor_group'",
    ),
    "packed: bits": (PACKED, scheme(num_bits=3), None, "must have num_bits = 4 or 8, got 3"),
    "packed: float of 4 bits": (PACKED, scheme(type="float"), None, "must have num_bits = 8, got 4"),
    "packed: no group size": (PACKED, scheme(group_size=None), None, "a group_size with strategy group alone"),
    "packed: negative group": (PACKED, scheme(group_size=-7), None, "of 1 to .* in group_size, got -7"),
    "packed: blocks": (PACKED, scheme(block_structure=[8, 8]), None, "block_structure with strategy block alone"),
    "packed: no groups": (PACKED, {"config_groups": {}}, None, "must have config_groups with weights, got none"),
    "packed: groups, a list": (PACKED, {"config_groups": [1]}, None, r"an object in config_groups, got \[1\]"),
    "packed: group, a list": (PACKED, {"config_groups": {"W4A16": ["Linear"]}}, None, "an object in W4A16"),
    "packed: sparse": (
        PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}, None, "format = dense, got 'sparse-24.*not read",
    ),
    "packed: rotated": (PACKED, {"transform_config": {"config_groups": {"R1": {}}}}, None, "must have no transform_"),
    "packed: no scale": (PACKED, {}, without("x.weight_scale"), "x.weight_packed is .* needs x.weight_scale, got no"),
    "packed: no shape": (PACKED, {}, without("x.weight_shape"), "x.weight_packed is .* needs x.weight_shape"),
    "packed: no zeros": (
        PACKED, scheme(symmetric=False), None, "x.weight_packed is quantised and needs x.weight_zero_point",
    ),
    "packed: no order": (PACKED, scheme(actorder="group"), None, "needs x.weight_g_idx, got no such tensor"),
    "packed: groups that do not fit": (
        PACKED, scheme(group_size=16), None,
        r"x.weight_packed must be int32 of shape \(40, 12\), 4 bits for each of \(40, 96\), got int32 of shape "
        r"\(40, 6\)",
    ),
    "packed: rows of scales": (PACKED, {}, shaped("x.weight_scale", 39, 6), r"x.weight_scale must be .* \(40, 6\)"),
    "packed: codes of 64 bits": (PACKED, {}, shaped("x.weight_packed", 40, 6, dtype=torch.int64), "must be int32 of 2"),
    "packed: shape of three": (PACKED, {}, shaped("x.weight_shape", 3), "x.weight_shape must be two whole numbers"),
    "packed: rows of the shape": (
        ROWS, {}, given({"x.weight_shape": torch.tensor([41, 48])}),
        r"x.weight_shape must say 40 rows and at most 48 columns, as x.weight_packed has, got \[41, 48\]",
    ),
    "packed: columns of the shape": (
        ROWS, {}, given({"x.weight_shape": torch.tensor([40, 2**40])}), "at most 48 columns",
    ),
    "packed: columns of the shape, fewer": (
        ROWS, {}, given({"x.weight_shape": torch.tensor([40, 9])}), r"int32 of shape \(40, 2\)",
    ),
    "packed: zeros": (ROWS, {}, shaped("x.weight_zero_point", 40, 1), r"x.weight_zero_point must be of shape \(5, 1\)"),
    "packed: twice": (
        PACKED, {}, given({"x.weight": torch.zeros(40, 48)}),
        "x.weight must be stored once, got x.weight_packed too",
    ),
    "packed: no scheme": (
        PACKED, {}, given({"y.weight": torch.zeros(8, 8).char(), "y.weight_scale": torch.ones(8, 1)}),
        r"y.weight must be quantised by a scheme of the config \(int4, strategy group of 8\), .* got int8",
    ),
    "packed: no rows": (PACKED, {}, shaped("x.weight_packed", 0, 6), "weight_packed must be int32 of 2 dim.*none of"),
    "int8: no rows": (
        PACKED, {},
        given({"y.weight": torch.zeros(0, 8).char(), "y.weight_scale": torch.ones(1)}),
        r"must be a matrix of at least one number, as quantised weights are, got int8 of shape \(0, 8\)",
    ),
    "int8: no scale": (
        PACKED, {}, given({"y.weight": torch.zeros(8, 8).char()}), "y.weight is quantised and n",
    ),
    "gptq: format": (GPTQ, {"checkpoint_format": "marlin"}, None, "checkpoint_format = gptq or gptq_v2, got 'marlin'"),
    "gptq: bits": (GPTQ, {"bits": 3}, None, "must have bits = 4 or 8 .* got 3 and 8"),
    "gptq: no bits": (GPTQ, {"bits": None}, None, "must have a whole number .* in bits, got None"),
    "gptq: group of zero": (GPTQ, {"group_size": 0}, None, "group_size of -1 or above 0, got 4 and 0"),
    "gptq: words of 16 bits": (GPTQ, {"pack_dtype": "int16"}, None, "pack_dtype = int32, got 'int16'"),
    "gptq: order in words": (GPTQ, {"desc_act": "no"}, None, "true or false in desc_act, got 'no'"),
    "gptq: other bits": (GPTQ, {"bits": 8}, None, r"x.scales must be floats of shape \(3, 40\), one scale for 8"),
    "gptq: other groups": (GPTQ, {"group_size": 16}, None, r"x.scales must be floats of shape \(3, 40\)"),
    "gptq: no zeros": (GPTQ, {}, without("x.qzeros"), "x.qweight is quantised and needs x.qzeros, got no such tensor"),
    "gptq: no scales": (GPTQ, {}, without("x.scales"), "x.qweight is quantised and needs x.scales"),
    "gptq: no order": (GPTQ, {"desc_act": True}, without("x.g_idx"), "x.qweight is quantised and needs x.g_idx"),
    "gptq: order": (GPTQ, {}, shaped("x.g_idx", 47), r"x.g_idx must be whole numbers of shape \(48,\), .* got int32"),
    "gptq: zeros": (GPTQ, {}, shaped("x.qzeros", 6, 4), r"x.qzeros must be int32 of shape \(6, 5\)"),
    "gptq: scales alone": (GPTQ, {}, without("x.qweight"), "x.g_idx must belong to a quantised weight"),
    "gptq: 3 bits of a module": (GPTQ, {"dynamic": {".*": {}}}, shaped("x.qzeros", 6, 4), "must be of 4 or 8 bits"),
    "gptq: codes in float": (GPTQ, {}, shaped("x.qweight", 6, 40, dtype=torch.float32), "must be int32 of 2 dim"),
    "awq: version": (AWQ, {"version": "gemv"}, None, "must have version = gemm, got 'gemv'"),
    "awq: bits": (AWQ, {"bits": 8}, None, "must have bits = 4 .* got 8"),
    "awq: groups that do not divide": (AWQ, {"group_size": 32}, None, "x.qweight must be of columns that groups of 32"),
    "awq: other groups": (AWQ, {"group_size": 16}, None, r"x.scales must be floats of shape \(3, 40\)"),
    "awq: zeros": (AWQ, {}, shaped("x.qzeros", 6, 4), r"x.qzeros must be int32 of shape \(6, 5\)"),
    "awq: no zeros": (AWQ, {}, without("x.qzeros"), "x.qweight is quantised and needs x.qzeros"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path, case):
    key, changes, change, message = WRONG[case]
    tensors = parts(key)
    if change is not None:
        change(tensors)
    save(tmp_path, tensors, {"quantization_config": ENCODINGS[key].config | changes})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", ["fp8", [1], 7])
def test_a_config_that_is_no_object(tmp_path, value):
    for config in ({"quantization_config": value}, {"text_config": {"compression_config": value}}):
        save(tmp_path, {"x": torch.ones(1)}, config)
        with pytest.raises(
            CheckpointError, match=r"config.json: expected an object in (quantization|compression)_config"
        ):
            Checkpoint.open(tmp_path)


def test_without_a_config_nothing_is_decoded(tmp_path):
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        save(tmp_path, tensors := parts(GPTQ), config)
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.entries.keys() == tensors.keys()
        assert checkpoint.encoding is None
        assert checkpoint.kept_as("x.scales") is None
        with pytest.raises(CheckpointError, match=r"x.scales must be stored as codes of 8 or 4 bits"):
            checkpoint.read_codes("x.scales")


def test_entries_as_the_files_have_them(tmp_path):
    """A plan needs the config alone; it takes checkpoints whose encoding is unknown too."""
    save(tmp_path, tensors := parts(GPTQ), {"quantization_config": {"quant_method": "unknown"}})
    assert Checkpoint.open(tmp_path, decode=False).entries.keys() == tensors.keys()


def test_gate_and_up_whose_blocks_are_not_whole(tmp_path):
    written, _ = fp8_blocks(torch.randn(2, 40, 16), (16, 16))
    tensors = {f"experts.gate_up_proj{end}": x for end, x in written.items()}
    save(tmp_path, tensors, {"quantization_config": FP8_CONFIG | {"weight_block_size": [16, 16]}})
    with pytest.raises(
        CheckpointError, match=r"gate and up of whole blocks of 16 rows, got 20 rows each; .* one by one"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("order", [[0] * 47 + [6], [-2] + [0] * 47])
def test_groups_that_do_not_exist(tmp_path, order):
    tensors = parts(GPTQ) | {"x.g_idx": torch.tensor(order).int()}
    save(tmp_path, tensors, {"quantization_config": gptq_config(desc_act=True)})
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"x.g_idx must have groups of 0 to 5, got one of"):
        checkpoint.read("x.weight")


def test_an_order_of_minus_ones_is_none(tmp_path):
    """compressed-tensors fills weight_g_idx with -1 where it is not used."""
    tensors = parts(PACKED)
    save(tmp_path / "a", tensors, {"quantization_config": scheme()})
    save(tmp_path / "b", tensors | {"x.weight_g_idx": torch.full((48,), -1).int()}, {"quantization_config": scheme()})
    one, other = (Checkpoint.open(tmp_path / name).read("x.weight") for name in "ab")
    assert torch.equal(one, other)


@pytest.mark.parametrize("key", [FP8, PACKED, GPTQ, AWQ])
def test_files_that_are_cut(tmp_path, monkeypatch, key):
    save(tmp_path, parts(key), {"quantization_config": ENCODINGS[key].config})
    file = tmp_path / "model.safetensors"
    whole, checkpoint = file.read_bytes(), Checkpoint.open(tmp_path)
    for kept in (32 * 2**20, 16):  # by columns, too
        monkeypatch.setattr("lineate.models.files.encodings.encoded.MOST_KEPT", kept)
        for entry in checkpoint.entries["x.weight"].parts:
            file.write_bytes(whole[: entry.start + entry.nbytes - 1])
            with pytest.raises(CheckpointError, match=r"model.safetensors: x.* before the end of the file; it was cut"):
                checkpoint.read("x.weight")
    with pytest.raises(CheckpointError, match=r"before the end of the file .* truncated"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("key", [PACKED, ROWS, GPTQ])
def test_headers_alone(tmp_path, key):
    """Of a name on the hub only headers are fetched; shapes then come from them."""
    save(tmp_path, parts(key), {})
    stored = read_header(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    checkpoint = Checkpoint.of(tmp_path, {"quantization_config": ENCODINGS[key].config}, stored)
    assert checkpoint.shapes == {"x.weight": (40, 48)}


def test_configs_of_this_file_are_right(tmp_path):
    """Without a change, every case above would open."""
    for key in {case[0] for case in WRONG.values()}:
        save(tmp_path / key, parts(key), {"quantization_config": ENCODINGS[key].config})
        assert Checkpoint.open(tmp_path / key).shapes == {"x.weight": (40, 48)}
