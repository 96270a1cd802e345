"""Pieces of a prompt, and few tokens, after a longer cache: the whole in one call, whichever kernel runs."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lineate.decoding.in_place import caches_in_place
from lineate.layers import GatedAttention, LatentAttention, TokenCache, latent, softmax
from lineate.layers.trail import trail
from tests.support.cases import interpreted
from tests.support.torch_calls import check_cuda_graph

HIDDEN = 48
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: GatedAttention(HIDDEN, 4, kv_heads=2, head_dim=16, rotary_dim=8),
    "latent": lambda: LatentAttention(HIDDEN, 3, rank=32, nope_dim=16, rope_dim=8, value_dim=12, rope_theta=100.0),
}
layers = pytest.mark.parametrize("name", LAYERS)
BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def make(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().to(device, dtype).eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


@torch.no_grad()
def check_pieces(name: str, dtype: torch.dtype, device: str, pieces: tuple[int, ...], bound: float) -> None:
    """Compare pieces with one call in float64 on a CPU, with rows of one length, of several, and packed."""
    layer, x = make(name, dtype, device), draw(3, sum(pieces))
    there = x.to(device, dtype)
    expected = make(name)(x)[0]
    state, outputs = None, []
    for piece in there.split(pieces, 1):
        output, state = layer(piece, state)
        outputs.append(output)
    assert error(torch.cat(outputs, 1), expected) < bound

    first, rest = pieces[0], pieces[1:]  # row r begins with first - r tokens
    counts = [first - row for row in range(3)]
    packed = torch.cat([there[row, :count] for row, count in enumerate(counts)])[None]
    bounds = torch.tensor([0, *counts], device=device).cumsum(0)
    begun = state = layer(packed, cu_seqlens=bounds)[1]
    at, outputs = list(counts), []
    for t in rest:
        output, state = layer(torch.stack([there[row, n : n + t] for row, n in enumerate(at)]), state)
        outputs.append(output)
        at = [n + t for n in at]
    found = torch.cat(outputs, 1)
    wanted = torch.stack([expected[row, n : n + sum(rest)] for row, n in enumerate(counts)])
    assert error(found, wanted) < bound

    more = [rest[0], 0, 2]
    packed = torch.cat([there[row, n : n + t] for row, (n, t) in enumerate(zip(counts, more, strict=True))])[None]
    found, _ = layer(packed, begun, torch.tensor([0, *more], device=device).cumsum(0))
    wanted = torch.cat([expected[row, n : n + t] for row, (n, t) in enumerate(zip(counts, more, strict=True))])
    assert error(found[0], wanted) < bound


@layers
def test_blocks_of_queries_equal_one_mask(name, monkeypatch):
    monkeypatch.setattr(softmax, "LARGEST_MASK", 100)
    check_pieces(name, torch.float64, "cpu", (7, 11, 30, 2), 1e-12)


@interpreted
@layers
def test_kernels_are_called_with_what_they_expect(name, monkeypatch):
    """The interpreter runs the kernels of a GPU, in float32."""
    kernels = importlib.import_module("lineate.kernels.layers.pieces")
    for module in (softmax, latent):
        monkeypatch.setattr(module, "runs_kernels", lambda *tensors: True)
    monkeypatch.setattr(kernels, "serves_piece", lambda *given: True)
    monkeypatch.setattr(latent, "EXPANDED", 60)
    monkeypatch.setattr(latent, "SMALLEST_BLOCK", 16)
    check_pieces(name, torch.float32, "cpu", (7, 70, 2), 1e-5)


@layers
def test_gradients_of_a_piece_do_not_depend_on_its_blocks(name, monkeypatch):
    found = []
    for largest in (softmax.LARGEST_MASK, 60):
        monkeypatch.setattr(softmax, "LARGEST_MASK", largest)
        layer, x = make(name), draw(2, 30).requires_grad_()
        y, _ = layer(x[:, 8:], layer(x[:, :8])[1])
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@layers
@pytest.mark.parametrize("dtype", BOUND)
def test_pieces_on_a_gpu(name, dtype, monkeypatch):
    monkeypatch.setattr(latent, "EXPANDED", 300)
    check_pieces(name, dtype, "cuda", (70, 3, 200, 1, 65, 130), BOUND[dtype])


@pytest.mark.gpu
@layers
@halves
@torch.no_grad()
def test_the_memory_of_a_piece_does_not_grow_with_the_cache(name, dtype, monkeypatch):
    monkeypatch.setattr(latent, "EXPANDED", 1024)
    layer, x, peaks = make(name, dtype, "cuda"), draw(1, 200).to("cuda", dtype), []
    for n in (4096, 4096, 65536):  # the first one compiles
        state = layer(draw(1, n).to("cuda", dtype))[1].reserve(n + 200)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x, state)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] == peaks[2]


@pytest.mark.gpu
@layers
@pytest.mark.parametrize("lengths", [(400, 400), (400, 37)], ids=str)
@torch.no_grad()
def test_guessed_tokens_are_read_as_others(name, lengths):
    layer, x = make(name, torch.bfloat16, "cuda"), draw(2, 410)
    expected = make(name)(x)[0]
    there = x.to("cuda", torch.bfloat16)
    if lengths[0] == lengths[1]:
        state = layer(there[:, :400])[1]
    else:
        packed = torch.cat([there[row, :n] for row, n in enumerate(lengths)])[None]
        state = layer(packed, cu_seqlens=torch.tensor([0, *lengths], device="cuda").cumsum(0))[1]
    guesses = torch.stack([there[row, n : n + 5] for row, n in enumerate(lengths)])
    y, trailed = trail(layer, guesses, state)
    wanted = torch.stack([expected[row, n : n + 5] for row, n in enumerate(lengths)])
    assert error(y, wanted) < BOUND[torch.bfloat16]
    state = trailed.after(torch.tensor([2, 4]))
    y, _ = layer(
        torch.stack([there[row, n + k : n + k + 1] for row, n, k in zip((0, 1), lengths, (2, 4), strict=True)]), state
    )
    wanted = torch.stack([expected[row, n + k : n + k + 1] for row, n, k in zip((0, 1), lengths, (2, 4), strict=True)])
    assert error(y, wanted) < BOUND[torch.bfloat16]


@pytest.mark.gpu
@layers
@pytest.mark.parametrize("t", [1, 4])
@torch.inference_mode()
def test_a_graph_of_a_step_serves_all_lengths(name, t):
    """The caches are wider than every row; what lies after a row's tokens may be anything."""
    assert softmax.reads_own_length(make(name), t)
    layer, capacity = make(name, torch.bfloat16, "cuda"), 2000
    tensors = {
        spec.name: torch.randn(3, capacity, *spec.shape[1:], device="cuda").bfloat16()  # type: ignore[arg-type]
        for spec in layer.state_spec  # type: ignore[union-attr]
    }
    kept = {key: x.clone() for key, x in tensors.items()}
    lengths, x = torch.tensor([900, 10, 0], device="cuda"), draw(3, t).to("cuda", torch.bfloat16)

    def step() -> list[Tensor]:
        cache = caches_in_place({0: tensors}, capacity, t, (lengths, lengths + t), {})[0]
        return [layer(x, cache)[0]]

    def change(turn: int) -> None:
        lengths.copy_(torch.tensor([[3, 1990, 64], [1, 2, 3], [64, 65, 66]][turn]))
        for key, old in kept.items():
            tensors[key].copy_(old)
            for row, n in enumerate(lengths.tolist()):
                tensors[key][row, n:] = torch.nan

    check_cuda_graph(step, change)
    given = {key: torch.stack([old[0, :64]]) for key, old in tensors.items()}
    alone, _ = layer(x[:1], TokenCache(given, torch.tensor([64], device="cuda")))
    assert error(step()[0][:1], alone.double().cpu()) < 1e-2
