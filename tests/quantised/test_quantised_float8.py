"""Weights of float8: their numbers and products, published blocks that are kept unchanged, and refused files."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.safetensors import CheckpointError
from lineate.models.inspect import describe, rows
from lineate.models.quantizing import quantize_checkpoint
from lineate.planning import plan_memory, read_model
from lineate.quantised import FORMATS, QuantisedWeight, float8_activations, quantize, shrink
from lineate.quantised.format import FP8
from lineate.quantised.rounding import FLOAT8, TooLargeError, round_to_float8
from lineate.quantised.which import quantised_parameters
from tests.support.quantised import (
    FP8_CONFIG,
    Encoding,
    compressed_config,
    compressed_float8,
    fp8_blocks,
    write_quantised,
)
from tests.support.quantised_weights import EXPERTS, WIDE, realistic, sizes, tokens


def relative(made: Tensor, wanted: Tensor) -> float:
    return float((made.double() - wanted.double()).norm() / wanted.double().norm())


def exact(quantised: QuantisedWeight) -> Tensor:
    """Return the values of a weight in float64, from its codes and scales alone."""
    assert quantised.scales is not None
    codes, scales = FP8.from_tiles(quantised.codes, quantised.scales, quantised.shape[-2])
    spread = scales.double().repeat_interleave(128, -1)[..., : codes.shape[-1]]
    return codes.view(FLOAT8).double() * spread


# Numbers


def test_every_code_is_the_number_that_torch_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes = torch.where(codes & 127 == 127, 0, codes)  # those of NaN
    quantised = QuantisedWeight(*FP8.to_tiles(codes, torch.ones(8, 1)), (8, 32), FP8)
    wanted = codes.view(FLOAT8).float()
    assert torch.equal(quantised.decoded(), wanted)
    assert torch.equal(F.linear(torch.eye(32), quantised), wanted.T)
    assert torch.equal(F.linear(torch.eye(32, dtype=torch.float64), quantised), wanted.T.double())
    assert torch.equal(F.embedding(torch.arange(8), quantised), wanted)


@pytest.mark.parametrize("shape", [(16, 32), (1, 96), (40, 128), (33, 160), (20, 544), (3, 20, 288)])
def test_numbers_are_rounded_to_the_nearest(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) ** 4
    x[..., 0, :32] = 0
    quantised = quantize(x, "fp8")
    assert (quantised.codes.shape, quantised.scales.shape) == FORMATS["fp8"].shapes(shape)
    assert torch.equal(quantised.decoded().double(), exact(quantised).float().double())
    groups = F.pad(x, (0, -shape[-1] % 128)).unflatten(-1, (-1, 128)).abs().amax(-1)
    scales = (groups / 448).repeat_interleave(128, -1)[..., : shape[-1]]
    half = torch.maximum(x.abs() * 2**-4, scales * 2**-10)  # 3 digits; below 2^-6 steps are of 2^-9
    assert ((quantised.decoded() - x).abs() <= 1.0001 * half).all()


@pytest.mark.parametrize("size", [1e30, 1e4, 1e-6, 1e-30])
def test_weights_of_any_size(size: float) -> None:
    x, weight = torch.randn(5, 256), torch.randn(64, 256)
    assert relative(F.linear(x, quantize(size * weight, "fp8")) / size, x @ weight.T) < 0.04


@pytest.mark.parametrize(
    ("rows", "out", "size"), [(1, 48, 64), (2, 16, 32), (7, 100, 544), (13, 33, 128), (70, 64, 96)]
)
def test_products_are_those_of_float64(rows: int, out: int, size: int) -> None:
    x, quantised = torch.randn(rows, size), quantize(torch.randn(out, size), "fp8")
    wanted = x.double() @ exact(quantised).T
    assert relative(F.linear(x, quantised), wanted) < 5e-7
    assert relative(F.linear(x.double(), quantised), wanted) < 1e-7  # decoded to float32
    ids = torch.tensor([0, out - 1])
    assert torch.equal(FP8.decode_rows(quantised.codes, quantised.scales, ids), quantised.decoded()[ids])


def test_rows_that_are_rounded_too() -> None:
    """Rows in float8, as float8_activations rounds them, move a product by about 2.6%."""
    x, weight = torch.randn(300, 512), torch.randn(200, 512)
    codes, scales = round_to_float8(x)
    rounded = codes.view(FLOAT8).float() * scales.repeat_interleave(128, -1)
    assert relative(rounded @ weight.T, x @ weight.T) < 0.03


# Published blocks

ENCODINGS = {
    "blocks": Encoding(FP8_CONFIG | {"weight_block_size": [24, 128]}, lambda x: fp8_blocks(x, (24, 128))),
    "blocks, bfloat16 scales": Encoding(
        FP8_CONFIG | {"weight_block_size": [128, 128]}, lambda x: fp8_blocks(x, (128, 128), torch.bfloat16)
    ),
    "a scale a row": Encoding(
        compressed_config("float-quantized", type="float", strategy="channel"),
        lambda x: compressed_float8(x, (1, x.shape[1])),
    ),
}
CASES = [("qwen3_next", key) for key in ENCODINGS] + [
    (family, "blocks") for family in ("kimi_linear", "bailing_hybrid")
]


def published(folder: Path, family: str, encoding: Encoding) -> Path:
    """Write a family's tiny model, several blocks wide, with weights of float8."""
    pytest.importorskip("transformers")
    from tests.support.families import build, rewrite

    build(family, **WIDE[family] | {"hidden_size": 288}).save_pretrained(folder / "plain")
    config = {"quantization_config": encoding.config}
    return rewrite(folder / "plain", folder / "float8", lambda x: write_quantised(x, encoding) and None, config)


@pytest.mark.cover
@pytest.mark.parametrize(("family", "key"), CASES)
@torch.no_grad()
def test_published_numbers_stay_as_they_are(tmp_path: Path, family: str, key: str) -> None:
    folder = published(tmp_path, family, ENCODINGS[key])
    plain = HybridLM.from_pretrained(folder, progress=False, dtype="float32")
    quantised = HybridLM.from_pretrained(folder, progress=False, weights="fp8")
    kept = quantised_parameters(quantised)
    assert len(kept) > 8
    for name, x in kept.items():
        if not name.startswith("embed"):  # which is not stored in float8
            assert torch.equal(x.decoded(), plain.get_parameter(name)), name
    quantize_checkpoint(folder, tmp_path / "ours", "fp8", progress=False)
    quantised.save_pretrained(tmp_path / "saved")
    for name in ("ours", "saved"):
        again = HybridLM.from_pretrained(tmp_path / name, progress=False)
        assert quantised_parameters(again).keys() == kept.keys()
        for own, x in quantised_parameters(again).items():
            assert torch.equal(x.codes, kept[own].codes) and torch.equal(x.scales, kept[own].scales), own
        assert torch.equal(again(tokens(1, 9)).logits, quantised(tokens(1, 9)).logits)
    assert dict(rows(describe(folder)))["quantised"].endswith("decoded when they are read, or kept by --bits fp8")


def test_fused_experts_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.families import build, fused_experts, rewrite

    build("qwen3_next", **WIDE["qwen3_next"] | {"hidden_size": 256}).save_pretrained(tmp_path / "plain")

    def change(tensors: dict[str, Tensor]) -> None:
        fused_experts(False)(tensors, "qwen3_next")
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            parts, _ = fp8_blocks(tensors.pop(name), (16, 128))
            tensors |= {name + end: x for end, x in parts.items()}

    config = {"quantization_config": FP8_CONFIG | {"weight_block_size": [16, 128]}}
    folder = rewrite(tmp_path / "plain", tmp_path / "float8", change, config)
    plain = HybridLM.from_pretrained(folder, progress=False, dtype="float32")
    quantised = HybridLM.from_pretrained(folder, progress=False, weights="fp8")
    found = {name: x for name, x in quantised_parameters(quantised).items() if "experts_" in name}
    assert len(found) == 8
    assert all(torch.equal(x.decoded(), plain.get_parameter(name)) for name, x in found.items())


def test_planned_bytes_are_those_allocated(tmp_path: Path) -> None:
    model = shrink(realistic(sizes("GKA", experts=EXPERTS, dense_layers=(0,))), "fp8")
    model.save_pretrained(tmp_path)
    quantised = quantised_parameters(model)
    plain = sum(x.nbytes for name, x in model.state_dict().items() if name not in quantised)
    assert plan_memory(read_model(tmp_path)).weights == plain + sum(x.nbytes_kept for x in quantised.values())
    entry = Checkpoint.open(tmp_path).entries["layers.0.mixer.in_proj.weight.scales"]
    assert (entry.dtype, entry.shape) == (torch.float32, model.layers[0].mixer.in_proj.weight.scales.shape)


# What is refused


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    x = torch.randn(16, 64)
    x[3, 5] = torch.inf
    with pytest.raises(TooLargeError, match="x must have finite numbers to be kept in fp8"):
        quantize(x, "fp8")
    model = realistic(sizes("G"))
    with torch.no_grad():
        model.layers[0].mixer.out_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"mixer\.out_proj\.weight must have finite numbers to be kept in fp8"):
        HybridLM.from_pretrained(tmp_path, progress=False, weights="fp8")


def test_published_codes_that_are_no_number(tmp_path: Path) -> None:
    parts, _ = fp8_blocks(torch.randn(32, 128), (16, 128))
    parts[""].view(torch.uint8)[3, 7] = 255
    tensors = {"x.weight" + end: x for end, x in parts.items()}
    save(tmp_path, tensors, {"quantization_config": FP8_CONFIG | {"weight_block_size": [16, 128]}})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.kept_as("x.weight") == "fp8"
    with pytest.raises(TooLargeError, match="must have finite numbers to be kept in fp8, got NaN"):
        checkpoint.read_codes("x.weight")


def test_codes_of_a_folder_that_are_no_number(tmp_path: Path) -> None:
    model = shrink(realistic(sizes("G")), "fp8")
    model.layers[0].mixer.out_proj.weight.codes.view(-1)[5] = 127
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"mixer\.out_proj\.weight must have numbers alone, got NaN"):
        HybridLM.from_pretrained(tmp_path, progress=False)


def test_scales_that_float32_lacks_are_not_kept(tmp_path: Path) -> None:
    parts, _ = fp8_blocks(torch.randn(32, 128), (16, 128))
    tensors = {"x.weight" + end: x.double() if end else x for end, x in parts.items()}
    save(tmp_path, tensors, {"quantization_config": FP8_CONFIG | {"weight_block_size": [16, 128]}})
    assert Checkpoint.open(tmp_path).kept_as("x.weight") is None


def test_rows_of_float8_need_a_gpu() -> None:
    refused = pytest.raises(ValueError, match=r"float8_activations needs a GPU .* got device cpu; leave it out")
    with refused, float8_activations("cpu"):
        pytest.fail("it ran")
