"""On a CPU, experts give a token the same bits alone and among few others, as in a decoding step."""

import pytest
import torch
from torch import nn

from lineate.layers import MixtureOfExperts
from lineate.native.build import available
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
def test_experts_read_each_row_as_if_it_were_alone(name, dtype):
    layer = build(EXPERTS[name], dtype)
    x = torch.randn(MOST, 1, HIDDEN).to(dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[MOST - rows :]), alone[MOST - rows :])
