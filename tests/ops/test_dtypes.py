"""Dtypes by name, wherever one is an argument."""

import pytest
import torch

from lineate.planning.memory import plan_training
from lineate.planning.models import dtype_of, read_model
from lineate.system import processor
from lineate.tasks.runner import TrainOptions
from lineate.torch_ops.dtypes import FLOATING, full_name, parse_dtype
from lineate.training.prepare import train
from tests.support.runs import make_config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("torch.float16", torch.float16),
        ("fp64", torch.float64), (torch.float32, torch.float32),
    ],
)  # fmt: skip
def test_parsed(given, expected):
    assert parse_dtype(given) == expected


@pytest.mark.parametrize("given", ["fp8", "BF16", "", "int8", torch.int8, 16, None, ["bf16"]])
def test_refused(given):
    choices = ", ".join(FLOATING)
    shown = str(given).removeprefix("torch.")
    with pytest.raises(ValueError) as error:
        parse_dtype(given, "dtype", also=("auto",))
    assert str(error.value) == f"dtype must be one of auto, {choices}, got {shown!r}"


def test_short_names_everywhere(tmp_path):
    assert [full_name(x) for x in ("bf16", "fp32", "tf32", 3)] == ["bfloat16", "float32", "tf32", 3]
    assert dtype_of("fp8") == torch.float8_e4m3fn
    assert TrainOptions(dtype="bf16").dtype == "bfloat16"
    assert make_config(tmp_path, dtype="bf16").dtype == "bfloat16"
    model = read_model("tiny")
    assert plan_training(model, 64, "bf16") == plan_training(model, 64, "bfloat16")


@pytest.mark.parametrize(("dtype", "products"), [("bf16", "0"), ("bf16", "1"), ("float32", "0")])
def test_a_run_says_when_bfloat16_does_not_pay(dtype, products, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LINEATE_CPU_BF16", products)
    processor.forget()
    train(make_config(tmp_path, dtype=dtype, steps=1, warmup=0, eval_every=0, save_every=0))
    processor.forget()
    said = "bfloat16: this processor has no bfloat16 products; computed through float32, which is no faster than"
    assert (said in capsys.readouterr().out) == (dtype == "bf16" and products == "0")
