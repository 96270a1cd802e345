"""Which weights become quantised, and making those of a model quantised in place."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lineate.models import HybridLM
from lineate.models.config import HybridConfig
from lineate.models.hybrid import empty_model
from lineate.quantised import FORMATS, QuantisedWeight, quantised_formats, quantize, shrink
from lineate.quantised.which import format_of, name_of_bits, quantised_parameters
from tests.support.quantised_weights import EXPERTS, realistic, sizes, tokens

ALL = tuple(FORMATS)


def everything() -> HybridConfig:
    """Return a configuration in which every part of the list occurs."""
    config = sizes("GKMASTC", experts=EXPERTS, dense_layers=(0, 1), tie_embeddings=False)
    return replace(config, prediction=True)


def test_the_list() -> None:
    model = empty_model(everything())
    quantised = set(quantised_formats(model, "int8"))
    stay = {name for name, x in model.named_parameters() if name not in quantised and x.dim() >= 2}
    assert {
        "embed.weight",
        "head.weight",
        "prediction.in_proj.weight",
        "prediction.block.mixer.in_proj.weight",
    } <= quantised
    ends = {name.rpartition("mixer.")[2] for name in quantised if ".mixer." in name}
    assert ends == {"in_proj.weight", "out_proj.weight"}
    ends = {name.rpartition("feed.")[2] for name in quantised if ".feed." in name}
    dense = {"gate_up_proj.weight", "down_proj.weight"}
    assert ends == {*dense, *(f"shared.{name}" for name in dense), "experts_gate_up", "experts_down"}
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in stay}
    assert {"conv", "router", "shared_gate", "decay_proj", "gate_proj", "up_proj", "dt_bias"} <= ends
    assert not ends & {"in_proj", "out_proj", "embed", "head", "gate_up_proj", "down_proj"}
    ungated = quantised_formats(
        {"layers.0.feed.up_proj.weight": (64, 32), "layers.1.mixer.up_proj.weight": (64, 32)}, "int4"
    )
    assert ungated.keys() == {"layers.0.feed.up_proj.weight"}


def test_columns_that_are_no_multiple_of_32_stay_unless_a_number_has_16_bits() -> None:
    shapes = {"embed.weight": (10, 48), "head.weight": (10, 64), "layers.0.feed.experts_down": (2, 8, 40)}
    assert quantised_formats(shapes, "int8").keys() == {"head.weight"}
    assert quantised_formats(shapes, "float16").keys() == shapes.keys()


@pytest.mark.parametrize("form", ALL)
def test_shrinking_in_place(form: str) -> None:
    model = realistic(replace(sizes("GA"), tie_embeddings=False))
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    assert shrink(model, form) is model
    assert format_of(model) == FORMATS[form]
    quantised = quantised_parameters(model)
    assert quantised.keys() == quantised_formats(model, form).keys()
    for name, x in model.named_parameters():
        if name not in quantised:
            assert torch.equal(x, weights[name]) and x.requires_grad
            continue
        wanted = quantize(weights[name], form)
        assert isinstance(x, QuantisedWeight) and not x.requires_grad and torch.equal(x.codes, wanted.codes)
        assert (x.scales is None) == (wanted.scales is None)
        assert x.scales is None or torch.equal(x.scales, wanted.scales)
    before = quantised["embed.weight"].codes
    shrink(model, form)  # what is in this format already stays
    assert model.embed.weight.codes is before or torch.equal(model.embed.weight.codes, before)


def test_blocks_of_rows_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineate.quantised.which.BLOCK", 2048)
    model = realistic(sizes("G", experts=EXPERTS))
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    shrink(model, "int4")
    for name, x in quantised_parameters(model).items():
        assert torch.equal(x.codes, quantize(weights[name], "int4").codes), name


def test_a_model_has_one_format() -> None:
    model = realistic(sizes("GA"))
    assert format_of(model) is None
    shrink(model, "int8")
    mixed = copy.deepcopy(model)
    mixed.layers[0].mixer.in_proj.weight = nn.Parameter(
        quantize(mixed.layers[0].mixer.in_proj.weight.decoded(), "int4"), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"one format: layers\.0\.mixer\.in_proj\.weight must be int8, got int4"):
        format_of(mixed)
    mixed.layers[0].mixer.in_proj.weight = nn.Parameter(torch.zeros(mixed.layers[0].mixer.in_proj.weight.shape))
    with pytest.raises(ValueError, match=r"in_proj\.weight must be int8, got not quantised"):
        format_of(mixed)
    with torch.no_grad():
        wanted = shrink(copy.deepcopy(model), "int8")(tokens(1, 9)).logits
        assert torch.equal(model(tokens(1, 9)).logits, wanted)
        shrink(model, "float16")  # from one format to another
    assert format_of(model) == FORMATS["float16"]


def test_a_model_of_several_formats_gets_one() -> None:
    model = shrink(realistic(sizes("GA")), "int8")
    projection = model.layers[0].mixer.in_proj
    values = projection.weight.decoded()
    projection.weight = nn.Parameter(quantize(values, "int4"), requires_grad=False)
    model.layers[1].mixer.in_proj.weight = nn.Parameter(model.layers[1].mixer.in_proj.weight.decoded())
    kept = model.embed.weight
    with pytest.raises(ValueError, match=r"lineate\.quantised\.shrink\(model, 'int8'\) makes them so"):
        format_of(model)
    wanted = quantize(projection.weight.decoded(), "int8")
    assert format_of(shrink(model, "int8")) == FORMATS["int8"]
    assert model.embed.weight is kept and torch.equal(projection.weight.codes, wanted.codes)


def test_what_no_format_of_codes_fits_becomes_plain() -> None:
    model = shrink(realistic(sizes("G", hidden_size=80)), "bfloat16")
    assert isinstance(model.embed.weight, QuantisedWeight)  # 80 columns: no multiple of 32
    shrink(model, "int8")
    assert not isinstance(model.embed.weight, QuantisedWeight) and format_of(model) == FORMATS["int8"]


def test_names_that_are_not_known() -> None:
    model = HybridLM(sizes("A"))
    with pytest.raises(ValueError, match=r"weights must be .*'int8'.* got 'int3'"):
        shrink(model, "int3")
    with pytest.raises(ValueError, match="--bits must be one of 16, 8, 4, fp8, got 2"):
        name_of_bits(2)
    assert [name_of_bits(bits) for bits in (None, 16, 8, 4)] == [None, "bfloat16", "int8", "int4"]
    assert [name_of_bits(bits) for bits in ("16", "4", "fp8", "FP8")] == ["bfloat16", "int4", "fp8", "fp8"]
