"""read_prompt: a prompt that is read in pieces has the logits and the state of one call, and takes less memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lineate.models import HybridConfig
from lineate.models.config import AttentionConfig, FeedConfig, LatentConfig, LinearConfig
from lineate.models.reading import read_prompt, read_rows
from lineate.models.state import ModelState
from tests.support.small_models import EXPERTS, random_model

CONFIG = HybridConfig(
    vocab_size=96, hidden_size=64, n_layers=4, pattern="GKAM",
    linear=LinearConfig(2, 4, 32, 32), attention=AttentionConfig(4, 2, 32, rotary_dim=16),
    latent=LatentConfig(4, rank=48, nope_dim=32, rope_dim=16, value_dim=32, rope_theta=10000.0), feed=FeedConfig(128),
)  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(seed))


def close(one: ModelState, other: ModelState, tolerance: float = 1e-4) -> None:
    assert torch.equal(torch.as_tensor(one.lengths).cpu(), torch.as_tensor(other.lengths).cpu())
    lengths = torch.as_tensor(other.lengths).expand(other.rows).tolist()
    for x, y in zip(one.layers, other.layers, strict=True):
        for name in y.names:
            for row, n in enumerate(lengths):
                cut = slice(n) if hasattr(y, "lengths") else slice(None)
                torch.testing.assert_close(x[name][row, cut], y[name][row, cut], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("most", [1, 10, 32, 100])
@torch.no_grad()
def test_pieces_equal_one_call(most: int, before: int) -> None:
    model, ids = random_model(CONFIG), draw(2, 64)
    state = model(draw(2, before, seed=1)).state if before else None
    kept = None if state is None else [x[name].clone() for x in state.layers for name in x.names]
    expected, found = model(ids, state, last_only=True), read_rows(model, ids, state, most)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    close(found.state, expected.state)
    if state is not None and kept is not None:  # it is not changed
        now = [x[name] for x in state.layers for name in x.names]
        assert all(torch.equal(x, y) for x, y in zip(now, kept, strict=True))
    more = draw(2, 5, seed=2)
    torch.testing.assert_close(
        model(more, found.state).logits, model(more, expected.state).logits, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_on_a_cpu_it_is_one_call() -> None:
    model, ids = random_model(CONFIG), draw(1, 50)
    found, expected = read_prompt(model, ids, piece=8), model(ids, last_only=True)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", [0, 7])
@torch.no_grad()
def test_long_prompts_on_a_gpu(packed: bool, before: int) -> None:
    model = random_model(CONFIG).cuda()
    ids, bounds = draw(2, 200).cuda(), None
    if packed:
        ids, bounds = draw(1, 400).cuda(), torch.tensor([0, 3, 300, 400], device="cuda")
    rows = 2 if bounds is None else 3
    state = model(draw(rows, before, seed=1).cuda()).state if before else None
    found = read_prompt(model, ids, state, bounds, piece=130)
    expected = model(ids, state, bounds, last_only=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    close(found.state, expected.state, 1e-3)


@pytest.mark.gpu
@torch.no_grad()
def test_memory_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the state, twice the tokens take the same memory."""
    model = random_model(replace(CONFIG, pattern="GGGG", experts=EXPERTS, attention=None, latent=None)).cuda()

    def peak(tokens: int) -> int:
        ids = draw(1, tokens).cuda()
        read_prompt(model, ids, piece=2048)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        read_prompt(model, ids, piece=2048)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(4096), peak(16384)
    assert long < 1.2 * short
