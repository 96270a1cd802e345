"""Products with quantised weights without the C code: each weight is decoded once and kept, if memory allows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.quantised import expanded, quantize
from lineate.quantised.format import Format

FORMS = ("int8", "int4", "fp8")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run without the C code; return the rows of each weight that is decoded to be kept."""
    made: list[int] = []

    def noted(codes: Tensor, scales: Tensor, rows: int, form: Format) -> Tensor:
        made.append(rows)
        return form.decode(codes, scales, rows)

    monkeypatch.setattr("lineate.quantised.product.available", lambda *subjects: False)
    monkeypatch.setattr(expanded, "copied", noted)
    monkeypatch.setattr(expanded, "fits", lambda nbytes: True)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_decoded_once(form: str, decoded: list[int]) -> None:
    quantised, x = quantize(torch.randn(40, 64), form), torch.randn(3, 64)
    for rows in (x, x[:1], x.bfloat16()):
        wanted = F.linear(rows.float(), quantised.decoded()).to(rows.dtype)
        assert torch.equal(F.linear(rows, quantised), wanted)
    assert decoded == [40]


def test_a_copy_ends_with_its_weight(decoded: list[int]) -> None:
    before = expanded.kept_bytes()
    quantised = quantize(torch.randn(40, 64), "int4")
    F.linear(torch.randn(1, 64), quantised)
    assert expanded.kept_bytes() - before == 4 * 40 * 64
    del quantised
    assert expanded.kept_bytes() == before


def test_experts_are_kept_too(decoded: list[int]) -> None:
    experts, x = quantize(torch.randn(3, 32, 64), "int4"), torch.randn(2, 64)
    for _ in range(2):
        for e in range(3):
            assert torch.equal(F.linear(x, experts[e]), F.linear(x, experts.decoded()[e]))
    assert decoded == [32] * 3


def test_codes_that_are_written_are_decoded_again(decoded: list[int]) -> None:
    quantised, other = (quantize(torch.randn(32, 64), "int4") for _ in range(2))
    x = torch.randn(2, 64)
    F.linear(x, quantised)
    assert quantised.scales is not None and other.scales is not None
    quantised.codes.copy_(other.codes)
    quantised.scales[:].copy_(other.scales)
    assert torch.equal(F.linear(x, quantised), F.linear(x, other.decoded())) and decoded == [32, 32]


def test_without_memory_blocks_are_decoded(decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("lineate.quantised.product.available", lambda *subjects: False)
    quantised, x = quantize(torch.randn(40, 64), "int4"), torch.randn(2, 64)
    before = expanded.kept_bytes()
    for total, available in ((1 << 30, 1 << 20), (1 << 30, 1 << 28)):  # a quarter is left, but no more
        monkeypatch.setattr(expanded, "machine_memory", lambda found=(total, available): found)
        torch.testing.assert_close(F.linear(x, quantised), F.linear(x, quantised.decoded()))
        assert expanded.kept_bytes() == before
    monkeypatch.setattr(expanded, "machine_memory", lambda: (1 << 30, (1 << 28) + 4 * 40 * 64))
    monkeypatch.setattr(expanded, "group_memory", lambda: None)
    F.linear(x, quantised)
    assert expanded.kept_bytes() - before == 4 * 40 * 64


def test_weights_of_inference_mode_are_not_kept(decoded: list[int]) -> None:
    with torch.inference_mode():
        quantised, x = quantize(torch.randn(40, 64), "int4"), torch.randn(2, 64)
        torch.testing.assert_close(F.linear(x, quantised), F.linear(x, quantised.decoded()))
    assert not decoded


@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "data"])
def test_weights_that_are_overwritten_are_decoded_again(how: str, decoded: list[int]) -> None:
    first, other = (torch.nn.Linear(64, 32, bias=False) for _ in range(2))
    x = torch.randn(2, 64)
    for layer in (first, other):
        layer.weight = torch.nn.Parameter(quantize(layer.weight.detach(), "int4"), requires_grad=False)
    first(x)
    with torch.no_grad():
        if how == "copy_":
            first.weight.copy_(other.weight)
        elif how == "data":
            first.weight.data = other.weight.data
        else:
            first.load_state_dict(other.state_dict())
    assert torch.equal(first(x), F.linear(x, other.weight.decoded()))
