"""Attention of long pieces in whole blocks and a causal square, compared with softmax in float64."""

import importlib

import pytest
import torch
from torch import Tensor

from lineate.layers import GatedAttention, LatentAttention, latent, softmax
from tests.support.long_caches import draw, plain
from tests.support.paths import INTERPRETER, param

pytest.importorskip("triton")
squares = importlib.import_module("lineate.kernels.layers.squares")
pytestmark = pytest.mark.usefixtures("guarded_memory")
HALVES = [torch.bfloat16, torch.float16]
HEADS = [(4, 4, 192, 128), (8, 1, 256, 256), (4, 2, 128, 128), (2, 2, 64, 40)]
LENGTHS = [(2048, 2048), (5000, 1500), (20000, 3072), (21000, 18000), (2500, 2500), (1999, 1024)]
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Stand for cuDNN: its layout, its arguments' shapes, and no shape of a plan that it should not get."""
    t, n = q.shape[1], k.shape[1]
    assert t % squares.GRAIN == n % squares.GRAIN == 0 and max(t, n) <= squares.LARGEST
    assert (t == n) if causal else n & (n - 1) == 0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
    scores = scale * q.transpose(1, 2) @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(t, n, dtype=torch.bool).triu(1), -torch.inf)
    output = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().transpose(1, 2)
    return output, scores.logsumexp(-1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(squares, "GRAIN", 4)
    monkeypatch.setattr(squares, "LARGEST", 16)
    monkeypatch.setattr(squares, "attend_block", attend_plainly)


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("n, t", [(64, 16), (63, 16), (61, 5), (66, 40), (30, 27), (19, 16), (20, 4), (9, 8)])
def test_blocks_and_a_square_are_causal_attention(path, small, n, t, rows, size):
    q, k, v = draw(path, [n] * rows, t, 4, 2, size)
    v = v[..., : size - 4]
    found = squares.long_attention(q, lambda begin, end: (k[:, begin:end], v[:, begin:end]), n, 0.3)
    assert error(found, plain(q, k, v, [n] * rows, 0.3)) < 2e-6


def test_blocks_are_powers_of_two():
    for end in range(0, 6 * squares.LARGEST, squares.GRAIN):
        blocks = list(squares.blocks_before(end))
        assert [x for block in blocks for x in block][1:-1:2] == [begin for begin, _ in blocks][1:]
        assert not blocks or (blocks[0][0] == 0 and blocks[-1][1] == end)
        sizes = [high - low for low, high in blocks]
        assert all(size <= squares.LARGEST and size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("far", [60.0, -60.0])
def test_sums_far_apart(path, far):
    """A block whose scores are far below those of another one adds nothing, and nothing overflows."""
    ones, logs = torch.ones(1, 2, 8, 16), torch.zeros(1, 2, 8)
    output = torch.empty(1, 8, 2, 16)
    squares.join((ones, logs.clone()), (3 * ones, logs + 10 * far), output, 0)
    assert torch.equal(output, torch.full_like(output, 3.0 if far > 0 else 1.0))


@pytest.mark.slow
def test_layers_read_long_pieces_in_blocks(small, monkeypatch):
    """Both layers give their keys to long_attention as it expects them, at once and in pieces."""
    for module in (softmax, latent):
        monkeypatch.setattr(module, "runs_kernels", lambda *tensors: True)
    for module in (softmax, latent):
        monkeypatch.setattr(module, "takes_square", lambda q, k, value: q.shape[1] >= squares.GRAIN)
    called = []
    attend = squares.long_attention
    monkeypatch.setattr(squares, "long_attention", lambda *given: (called.append(given[2]), attend(*given))[1])
    torch.manual_seed(0)
    for layer in (
        GatedAttention(48, 4, kv_heads=2, head_dim=16, rotary_dim=8),
        LatentAttention(48, 3, rank=32, nope_dim=16, rope_dim=8, value_dim=12, rope_theta=100.0),
    ):
        x = torch.randn(2, 115, 48)
        with torch.no_grad(), monkeypatch.context() as patch:
            for module in (softmax, latent):
                patch.setattr(module, "runs_kernels", lambda *tensors: False)
            expected = layer(x)[0]
        called.clear()
        state, outputs = None, []
        with torch.no_grad():
            for piece in x.split((12, 49, 54), 1):
                output, state = layer(piece, state)
                outputs.append(output)
        assert called == [12, 61, 115]
        assert error(torch.cat(outputs, 1), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "heads, kv, size, value", [(4, 4, 192, 128), (8, 1, 256, 256), (4, 2, 128, 128), (2, 2, 64, 40)]
)
@pytest.mark.parametrize(
    "n, t", [(2048, 2048), (5000, 1500), (20000, 3072), (21000, 18000), (2500, 2500), (1999, 1024)]
)
def test_cudnn_in_blocks(n, t, heads, kv, size, value, dtype):
    generator = torch.Generator("cuda").manual_seed(n)
    q, k, v = (
        torch.randn(2, length, count, width, device="cuda", dtype=dtype, generator=generator)
        for length, count, width in ((t, heads, size), (n, kv, size), (n, kv, value))
    )
    assert squares.serves_square(q, k, value)
    scale = size**-0.5
    found = squares.long_attention(q, lambda begin, end: (k[:, begin:end], v[:, begin:end]), n, scale)
    own, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    for first in range(0, t, 1024):
        part, seen = own[:, :, first : first + 1024], n - t + min(t, first + 1024)
        mask = torch.ones(part.shape[2], seen, dtype=torch.bool, device="cuda").tril(seen - part.shape[2])
        expected = torch.nn.functional.scaled_dot_product_attention(
            part, keys[:, :, :seen], values[:, :, :seen], mask, scale=scale, enable_gqa=True
        )
        assert error(found[:, first : first + 1024], expected.transpose(1, 2)) < BUDGET[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_layers_at_their_real_sizes(name, dtype):
    """A sequence in pieces, long and short ones, is the one at once in float32."""
    torch.manual_seed(0)
    layer: torch.nn.Module = {
        "qwen": lambda: GatedAttention(256, 16, kv_heads=2, head_dim=256, rotary_dim=64),
        "kimi": lambda: LatentAttention(256, 32, rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    }[name]()
    layer = layer.to("cuda").eval().requires_grad_(False)
    x = torch.randn(1, 7000, 256, device="cuda")
    expected = layer(x)[0]
    layer = layer.to(dtype)
    for pieces in ((7000,), (1024, 1024, 4096, 856), (100, 3000, 1500, 7, 2393)):
        state, outputs = None, []
        for piece in x.to(dtype).split(pieces, 1):
            output, state = layer(piece, state)
            outputs.append(output)
        assert error(torch.cat(outputs, 1), expected) < (2e-2 if dtype is torch.bfloat16 else 3e-3)
