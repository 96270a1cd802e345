"""A long prompt that is read in pieces has the logits and the state of one call, and takes less memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.layers import Memory
from lineate.models import HybridConfig, hybrid, reading
from lineate.models.config import AttentionConfig, FeedConfig, LatentConfig, LinearConfig
from lineate.models.nbytes import weights_nbytes
from lineate.models.reading import PIECE
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
def test_pieces_equal_one_call(most: int, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = random_model(CONFIG), draw(2, 64)
    state = model(draw(2, before, seed=1)).state if before else None
    kept = None if state is None else [x[name].clone() for x in state.layers for name in x.names]
    expected = model(ids, state, last_only=True)
    monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: 2 * most)
    monkeypatch.setattr(reading, "CHUNK", 1)
    found = model(ids, state, last_only=True)
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
def test_short_packed_prompts_are_read_together_and_long_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = random_model(CONFIG), draw(1, 60)
    read, given = type(model).hidden, []

    def hidden(x: Tensor, *others: Any) -> Any:
        given.append(x.shape[1])
        return read(model, x, *others)

    model.hidden = hidden  # type: ignore[method-assign]
    monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: 10)
    monkeypatch.setattr(reading, "CHUNK", 1)
    for bounds, pieces in (
        ([0, 3, 35, 60], [3, 10, 10, 10, 2, 10, 10, 5]),
        ([0, 1, 4, 10, 11, 31, 33, 60], [10, 1, 10, 10, 2, 10, 10, 7]),
        ([0, 15, 20, 24, 60], [10, 5, 9, 10, 10, 10, 6]),
        ([0, 3, 3, 60], [60]),
    ):
        packed, begun = torch.tensor(bounds), None
        for _ in range(2):  # from nothing, then from the state
            given[:] = []
            found = model(ids, begun, packed, last_only=True)
            assert given == pieces, "with an empty one they are read together"
            monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: None)
            expected = model(ids, begun, packed, last_only=True)
            monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: 10)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            close(found.state, expected.state)
            begun = expected.state


@torch.no_grad()
def test_pieces_check_the_state_as_one_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = random_model(CONFIG), torch.tensor([0, 3, 35, 60])
    monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: 10)
    for rows in (2, 4):
        state = model(draw(rows, 4)).state
        with pytest.raises(ValueError, match=f"state must have 3 rows, .* got {rows}"):
            model(draw(1, 60), state, packed, last_only=True)
        with pytest.raises(ValueError, match=f"state must have 1 rows, .* got {rows}"):
            model(draw(1, 60), state, last_only=True)
    for bounds in (None, packed):
        with pytest.raises(TypeError, match="state must be a ModelState or None, got dict"):
            model(draw(1, 60), {}, bounds, last_only=True)


class Stateless(nn.Module):
    """A mixer that keeps nothing."""

    state_spec = ()

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, *_: object) -> tuple[Tensor, Memory]:
        return self.in_proj(x), Memory({})


@torch.no_grad()
def test_lengths_of_models_that_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(CONFIG)
    for block in model.layers:
        block.mixer, block.state_names = Stateless(64), ()
    packed = torch.tensor([0, 3, 35, 60])
    monkeypatch.setattr(hybrid, "piece_of", lambda *_, **__: 10)
    state = model(draw(1, 60), None, packed, last_only=True).state
    assert state.lengths.tolist() == [3, 32, 25]
    assert model(draw(1, 60), state, packed, last_only=True).state.lengths.tolist() == [6, 64, 50]


@torch.no_grad()
def test_on_a_cpu_it_is_one_call() -> None:
    model = random_model(CONFIG)
    assert reading.piece_of(draw(1, 50000), model.layers, [model.embed], alone=True) is None


def test_the_size_of_a_piece_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the card and on the weights alone, never on what else the card has at the moment."""
    model = random_model(replace(CONFIG, experts=EXPERTS))
    own, each = reading.sizes_of(model.layers)
    assert own == weights_nbytes(model.layers) == sum(x.nbytes for x in model.layers.state_dict().values())
    own += weights_nbytes(model.embed)
    feed = model.layers[0].feed
    assert each == max(map(reading.token_nbytes, model.layers))
    assert each > 4 * feed.active * (64 + 2 * EXPERTS.size), "what the experts of a token write"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def piece(tokens: int, room: float, alone: bool = True) -> int | None:
        card = SimpleNamespace(total_memory=own + room * each * reading.SHARE)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        ids = SimpleNamespace(is_cuda=True, numel=lambda: tokens, device="cuda")
        return reading.piece_of(ids, model.layers, [model.embed], alone=alone)  # type: ignore[arg-type]

    with torch.no_grad():
        assert piece(100000, 1e6) == piece(PIECE + 1, PIECE) == PIECE and piece(PIECE, PIECE) is None
        assert piece(100000, PIECE - 1) == PIECE // 2 and piece(PIECE // 2, PIECE - 1) is None
        assert piece(100000, 10) == 4096 and piece(4096, 10) is None
        assert piece(100000, 10, alone=False) == PIECE, "other ranks may have another card"
    assert piece(100000, PIECE - 1) is None, "gradients need the activations of all tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", [0, 7])
@torch.no_grad()
def test_long_prompts_on_a_gpu(packed: bool, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(CONFIG).cuda()
    ids, bounds = draw(2, 200).cuda(), None
    if packed:
        ids, bounds = draw(1, 400).cuda(), torch.tensor([0, 3, 300, 400], device="cuda")
    rows = 2 if bounds is None else 3
    state = model(draw(rows, before, seed=1).cuda()).state if before else None
    expected = model(ids, state, bounds, last_only=True)
    monkeypatch.setattr(reading, "PIECE", 130)
    monkeypatch.setattr(reading, "SMALLEST", 130)
    assert reading.piece_of(ids, model.layers, [model.embed], alone=True) == 130
    found = model(ids, state, bounds, last_only=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    close(found.state, expected.state, 1e-3)


@pytest.mark.gpu
@torch.no_grad()
def test_memory_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the state, twice the tokens take the same memory."""
    model = random_model(replace(CONFIG, pattern="GGGG", experts=EXPERTS, attention=None, latent=None)).cuda()
    monkeypatch.setattr(reading, "PIECE", 2048)

    def peak(tokens: int) -> int:
        ids = draw(1, tokens).cuda()
        model(ids, last_only=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids, last_only=True)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(4096), peak(16384)
    assert long < 1.2 * short
