"""A weight knows its format: in copies and files, and in files of before the format was stored."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import lineate.quantised
from lineate.quantised import FORMATS, Format, QuantisedWeight, quantised_formats, quantize, register_format
from lineate.quantised.rounding import float8_numbers, round_to_float8

ALL = tuple(FORMATS)


@pytest.mark.parametrize("form", ALL)
def test_the_format_is_kept(form: str) -> None:
    kept = nn.Parameter(quantize(torch.randn(3, 40, 64), form), requires_grad=False)
    wanted = FORMATS[form]
    copies = kept[1], kept.detach(), kept.clone(), kept.bfloat16(), kept.to("meta"), copy.deepcopy(kept)
    for twin in (kept, *copies, pickle.loads(pickle.dumps(kept))):
        assert isinstance(twin, QuantisedWeight) and twin.format is wanted
    assert pickle.loads(pickle.dumps(wanted)) is copy.deepcopy(wanted) is wanted


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_of_before_the_format_was_stored(form: str, weights_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, file = quantize(torch.randn(40, 128), form), io.BytesIO()
    with monkeypatch.context() as before:
        before.setattr(QuantisedWeight, "__getstate__", lambda self: {"codes": self.codes, "scales": self.scales})
        torch.save({"weight": nn.Parameter(kept, requires_grad=False)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=weights_only)["weight"]
    assert isinstance(found, QuantisedWeight) and found.format is FORMATS[form]
    assert torch.equal(found.decoded(), kept.decoded())


@pytest.mark.parametrize(("old", "new"), [("SmallWeight", QuantisedWeight), ("small_formats", quantised_formats)])
def test_old_names(old: str, new: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"lineate.quantised.{old} is now .*removed in 0.3.0") as caught:
        assert getattr(lineate.quantised, old) is new
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'small_weight'"):
        getattr(lineate.quantised, "small_" + "weight")


def test_parts_that_are_not_of_the_format() -> None:
    kept = quantize(torch.randn(16, 32), "int8")
    with pytest.raises(ValueError, match="scales must be a tensor for int8, got None"):
        QuantisedWeight(kept.codes, None, (16, 32), "int8")
    with pytest.raises(ValueError, match="scales must be None for float16, got a tensor"):
        QuantisedWeight(torch.ones(16, 32).half(), kept.scales, (16, 32), "float16")
    with pytest.raises(ValueError, match=r"form must be one of .*, got 'int3'"):
        QuantisedWeight(kept.codes, kept.scales, (16, 32), "int3")


def test_what_a_format_must_have() -> None:
    functions = {"round": round_to_float8, "numbers": float8_numbers}
    for wrong in ({}, {"dtype": torch.bfloat16, **functions}, {"round": round_to_float8}):
        with pytest.raises(ValueError, match="format 'x' must have either a dtype or both round and numbers"):
            Format("x", 8, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format 'x' must have codes of 4 or 8 bits, got 3"):
        Format("x", 3, **functions)
    with pytest.raises(ValueError, match="a name of its own, got int8"):
        register_format(Format("int8", 8, **functions))
    with pytest.raises(ValueError, match="a flag of its own, got 8, which is int8"):
        register_format(Format("x", 8, **functions, flag=8))
