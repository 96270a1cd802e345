"""The keys of latent attention in one tensor, and the output's gate, compared with torch."""

import importlib

import pytest
import torch

from tests.support.paths import GPU, INTERPRETER, Path, param

pytest.importorskip("triton")
around = importlib.import_module("lineate.kernels.layers.around_attention")
pytestmark = pytest.mark.usefixtures("guarded_memory")
PATHS = [param(path) for path in (INTERPRETER, *GPU)]


def draw(path: Path, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(path.dtype).to(path.device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads, size, value, shared", [(3, 16, 8, 8), (4, 12, 20, 6), (1, 128, 128, 64)])
def test_keys_of_all_heads(path, heads, size, value, shared):
    made = draw(path, 2, 7, heads, size + value)
    cached = draw(path, 2, 9, 1, 24 + shared)
    own, same = made[..., :size], cached[:, 1:8, :, 24:]
    expected = torch.cat((own, same.expand(-1, -1, heads, -1)), -1)
    assert torch.equal(around.keys_of(own, same), expected)
    assert around.keys_of(own[:, :0], same[:, :0]).shape == (2, 0, heads, size + shared)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows, t, n", [(1, 5, 24), (3, 4, 37), (2, 1, 3000)])
def test_gate(path, rows, t, n):
    whole = draw(path, rows, t, 2 * n + 8)
    x, gate = draw(path, rows, t, n), whole[..., n : 2 * n]
    expected = (x.double() * gate.double().sigmoid()).to(path.dtype)
    found = around.gated(x, gate)
    assert found.is_contiguous()
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < {
        torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4,
    }[path.dtype]  # fmt: skip
    assert torch.equal(around.gated(x, gate.mT.contiguous().mT), found)
    assert torch.equal(around.gated(x[:, :0], gate[:, :0]), x[:, :0])
