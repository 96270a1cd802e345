"""On a CPU, experts give a token the same bits alone and among few others, as in a decoding step."""

import pytest
import torch
from torch import nn

from lineate.layers import MixtureOfExperts
from lineate.native.build import available
from lineate.quantised import quantize, rounded_activations
from lineate.system import processor

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")
HIDDEN, ROWS, MOST = 72, (1, 2, 3, 8, 16), 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXPERTS = {
    "softmax": lambda: MixtureOfExperts(HIDDEN, 9, 3, 20),
    "softmax, a shared expert with a gate": lambda: MixtureOfExperts(
        HIDDEN, 8, 2, 20, shared_size=28, shared_gate=True, renormalize=False
    ),
    "sigmoid, groups": lambda: MixtureOfExperts(
        HIDDEN, 8, 3, 20, shared_size=12, scores="sigmoid", groups=4, active_groups=2, scale=2.5
    ),
    "squared relu": lambda: MixtureOfExperts(HIDDEN, 5, 2, 20, kind="relu2", scores="sigmoid"),
}


@pytest.fixture(autouse=True, params=["0", "1"], ids=["widened", "direct"])
def products(request, monkeypatch):
    """Let torch have 16-bit products or not, whatever this processor has."""
    for name in ("LINEATE_CPU_BF16", "LINEATE_CPU_FP16"):
        monkeypatch.setenv(name, request.param)
    processor.forget()
    yield
    processor.forget()


def build(make, dtype: torch.dtype) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = make().eval()
    if layer.router_bias is not None:
        nn.init.uniform_(layer.router_bias, -0.2, 0.2)
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
@torch.no_grad()
def test_one_call_has_the_bits_of_one_expert_after_the_other(name, dtype):
    layer = build(EXPERTS[name], dtype)
    for rows in (1, 3, MOST):
        x = torch.randn(rows, HIDDEN).to(dtype)
        _, chosen = layer.route(x)
        assert torch.equal(layer.run_few(x, chosen), layer.run_sorted(x, chosen, layer.one_by_one))
    chosen[:] = torch.arange(chosen.shape[1])  # all rows have the same experts
    assert torch.equal(layer.run_few(x, chosen), layer.run_sorted(x, chosen, layer.one_by_one))


@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int4", "fp8"])
@torch.no_grad()
def test_one_call_with_quantised_weights(form):
    layer = MixtureOfExperts(96, 9, 3, 32).eval()
    for name in ("experts_gate_up", "experts_down"):
        setattr(layer, name, nn.Parameter(quantize(getattr(layer, name), form), requires_grad=False))
    x = torch.randn(MOST, 96)
    _, chosen = layer.route(x)
    for rows in (1, 5, MOST):
        own = x[:rows], chosen[:rows]
        assert torch.equal(layer.run_few(*own), layer.run_sorted(*own, layer.one_by_one))
    with rounded_activations():
        assert torch.equal(layer.run_few(x, chosen), layer.run_sorted(x, chosen, layer.one_by_one))


def test_where_torch_runs_the_experts():
    layer = build(EXPERTS["softmax"], torch.float32)
    x = torch.randn(MOST, HIDDEN)
    _, chosen = layer.route(x)
    assert layer.run_few(x, chosen) is None, "gradients are wanted"
    with torch.no_grad():
        assert layer.run_few(x, chosen) is not None
        assert layer.run_few(x.repeat(2, 1), chosen.repeat(2, 1)) is None, "too many rows"
        assert layer.run_few(x.double(), chosen) is None
        layer.experts_down = nn.Parameter(layer.experts_down.mT.contiguous().mT)
        assert layer.run_few(x, chosen) is None, "the weights have gaps"
    for name in ("route", "one_by_one"):
        layer = build(EXPERTS["softmax"], torch.float32).requires_grad_(False)
        assert layer.run_few(x, chosen) is not None
        setattr(layer, name, getattr(layer, name))
        assert layer.run_few(x, chosen) is None, f"somebody has set {name} on the layer"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
@torch.no_grad()
def test_experts_read_each_row_as_if_it_were_alone(name, dtype):
    layer = build(EXPERTS[name], dtype)
    x = torch.randn(MOST, 1, HIDDEN).to(dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[MOST - rows :]), alone[MOST - rows :])
