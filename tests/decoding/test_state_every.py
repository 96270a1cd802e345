"""Decoder with state_every: memories are written at every n-th token alone, and every result is as without it."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lineate.decoding import Decoder
from lineate.decoding.rings import mixers_with_rings
from lineate.forms import ring
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig, MambaConfig, ModelState
from tests.support.small_models import random_model

VOCAB = 64
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=32, n_layers=4, pattern="GKDA", linear=LinearConfig(2, 4, 8, 8),
    attention=AttentionConfig(2, 1, 16), feed=FeedConfig(48),
)  # fmt: skip
PATTERNS = ("GKDA", "RLG", "JKLA")
patterns = pytest.mark.parametrize("pattern", PATTERNS)


def make(pattern: str) -> HybridLM:
    return random_model(replace(CONFIG, pattern=pattern, n_layers=len(pattern)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def prefilled(model: HybridLM, lengths: tuple[int, ...]) -> ModelState:
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(model.device)
    return model(draw(1, sum(lengths)).to(model.device), cu_seqlens=bounds).state


def same(got: ModelState, expected: ModelState, tolerance: float) -> None:
    """Check memories and lengths; of caches, the entries of each row."""
    assert torch.equal(torch.as_tensor(got.lengths), torch.as_tensor(expected.lengths))
    for row, n in enumerate(torch.as_tensor(expected.lengths).expand(expected.rows).tolist()):
        for mine, theirs in zip(got.layers, expected.layers, strict=True):
            for name in mine.names:
                cut = slice(n) if hasattr(mine, "lengths") else slice(None)
                torch.testing.assert_close(mine[name][row, cut], theirs[name][row, cut], rtol=tolerance, atol=tolerance)


@patterns
@torch.no_grad()
def test_equals_decoding_without(pattern):
    """In float64, over three folds, rows of other lengths, and with states that are read at any time."""
    model = make(pattern).double()
    state, ids = prefilled(model, (3, 9, 1)), draw(3, 14, seed=1)
    plain, decoder = Decoder(model, state, room=3), Decoder(model, state, room=3, state_every=4)
    assert not decoder.computes_all
    for t in range(14):
        token = ids[:, t : t + 1]
        torch.testing.assert_close(decoder(token), plain(token), rtol=1e-10, atol=1e-10)
        if t in (2, 3, 9):
            same(decoder.state, plain.state, 1e-10)
            same(decoder.row(1), plain.row(1), 1e-10)
    assert decoder.reads == 14


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "stochastic"])
@torch.no_grad()
def test_greedy_tokens_and_the_state_between(kept):
    """The same greedy tokens; memories in bfloat16 are as near to those of float32 as without the option."""
    model, options = make("GKDA"), {}
    if kept != "float32":
        options = {"state_dtype": "bfloat16", "state_rounding": "stochastic" if kept == "stochastic" else "nearest"}
    state = model(draw(2, 6)).state
    exact = Decoder(model, state, room=40)
    plain, decoder = (Decoder(model, state, room=40, **options, **more) for more in ({}, {"state_every": 8}))
    token, far = draw(2, 1, seed=3), [0.0, 0.0]
    for _ in range(25):
        expected = exact(token)
        found = [plain(token), decoder(token)]
        far = [max(x, float((y - expected).norm())) for x, y in zip(far, found, strict=True)]
        if kept == "float32":
            torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(found[1].argmax(-1), expected.argmax(-1))
        token = expected.argmax(-1)
    assert far[1] <= 1.1 * far[0] + 1e-5
    memories = [x["memory"].dtype for x in decoder.state.layers if "memory" in x.names]
    assert set(memories) == {torch.float32 if kept == "float32" else torch.bfloat16}


@torch.no_grad()
def test_reading_a_state_changes_no_later_bit():
    """Not even with bfloat16 memories that are rounded stochastically: copies get the tokens, memories do not."""
    model = make("GKDA")
    state, options = model(draw(2, 6)).state, {"state_dtype": "bfloat16", "state_rounding": "stochastic"}
    alone, read = (Decoder(model, state, room=40, state_every=4, **options) for _ in range(2))
    for t in range(11):
        token = draw(2, 1, seed=t)
        assert torch.equal(alone(token), read(token))
        whole, row = read.state, read.row(1)
        for n in mixers_with_rings(model):
            assert torch.equal(whole.layers[n]["memory"][1:], row.layers[n]["memory"])
    same(alone.state, read.state, 0)


@torch.no_grad()
def test_rows_are_kept_and_copied_with_their_tokens():
    """keep, copies and refresh write what is pending, and go on from there."""
    model = make("GKDA").double()
    state, ids = model(draw(3, 5)).state, draw(3, 12, seed=2)
    plain, decoder = Decoder(model, state, room=20), Decoder(model, state, room=20, state_every=5)
    for t in range(7):
        plain(ids[:, t : t + 1]), decoder(ids[:, t : t + 1])
    other = copy.deepcopy(decoder)
    decoder.keep([2, 0]), plain.keep([2, 0])
    other.refresh()
    for t in range(7, 12):
        expected = plain(ids[[2, 0], t : t + 1])
        torch.testing.assert_close(decoder(ids[[2, 0], t : t + 1]), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(other(ids[:, t : t + 1])[[2, 0]], expected, rtol=1e-10, atol=1e-10)
    assert decoder.kept == [2, 0] and decoder.reads == 12


@torch.no_grad()
def test_memories_are_written_at_every_nth_token_alone(monkeypatch):
    model = make("GKDA")
    decoder = Decoder(model, model(draw(2, 5)).state, room=20, state_every=4)
    assert len(mixers_with_rings(model)) == 3
    folds, fold = [], ring.fold
    monkeypatch.setattr(ring, "fold", lambda *given: (folds.append(len(given[0])), fold(*given))[1])
    for t in range(9):
        folds.clear()
        decoder(draw(2, 1, seed=t))
        assert folds == ([2] * 3 if t % 4 == 3 else []), t  # both rows of three layers


@torch.inference_mode()
def test_in_inference_mode():
    """States that are read in inference mode, or outside of it, have all tokens."""
    model = make("GKDA").double()
    state = model(draw(3, 5)).state
    plain, decoder = Decoder(model, state, room=20), Decoder(model, state, room=20, state_every=4)
    for t in range(6):
        plain(draw(3, 1, seed=t)), decoder(draw(3, 1, seed=t))
    same(decoder.state, plain.state, 1e-10)
    same(decoder.row(1), plain.row(1), 1e-10)
    other = copy.deepcopy(decoder)
    for x in (plain, decoder, other):
        x.keep([2, 0])
    with torch.inference_mode(False):
        expected = plain(draw(2, 1, seed=9))
        for x in (decoder, other):
            torch.testing.assert_close(x(draw(2, 1, seed=9)), expected, rtol=1e-10, atol=1e-10)
            same(x.state, plain.state, 1e-10)


@pytest.mark.parametrize("letter", "RDGKSHO")
@torch.no_grad()
def test_every_mixer_whose_memory_can_wait(letter):
    config = replace(CONFIG, pattern=letter + "A", n_layers=2, mamba=MambaConfig(2, 8, 8, 1))
    model = random_model(config).double()
    state = model(draw(2, 4)).state
    plain, decoder = Decoder(model, state, room=9), Decoder(model, state, room=9, state_every=3)
    for t in range(8):
        token = draw(2, 1, seed=t)
        torch.testing.assert_close(decoder(token), plain(token), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_what_cannot_wait_is_refused():
    model = make("GKDA")
    state = model(draw(1, 3)).state
    for every in (1, 17, True, 2.0, "8"):
        with pytest.raises(ValueError, match=r"^state_every must be None or an int between 2 and 16, got "):
            Decoder(model, state, room=3, state_every=every)
    alone = make("LA")
    with pytest.raises(ValueError, match=r"^state_every needs a layer whose memory can wait .* got the pattern 'LA'"):
        Decoder(alone, alone(draw(1, 3)).state, room=3, state_every=8)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"^state_every must be None under"),
    ):
        Decoder(model, state, room=3, state_every=8)
    with pytest.raises(ValueError, match=r"^state_every must be None with batch_invariant=True, got 8"):
        Decoder(model, state, room=3, state_every=8, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_in_a_graph(rows):
    """A model in bfloat16 with heads of 128, in a CUDA graph: logits as near to float64's as without the option."""
    config = replace(CONFIG, hidden_size=256, linear=LinearConfig(1, 2, 128, 128))
    model = random_model(config).cuda().bfloat16()
    exact = copy.deepcopy(model).cpu().double()
    ids, first = draw(rows, 20, seed=1), draw(rows, 6)
    state = model(first.cuda()).state
    plain, decoder = (Decoder(model, state, room=64, state_every=every) for every in (None, 4))
    oracle = exact(torch.cat((first, ids), 1)).logits[:, 6:]
    far = [0.0, 0.0]
    for t in range(20):
        found = [x(ids[:, t : t + 1].cuda()).double().cpu() for x in (plain, decoder)]
        far = [max(a, float((x[:, 0] - oracle[:, t]).norm())) for a, x in zip(far, found, strict=True)]
    assert decoder.captured and far[1] <= 1.2 * far[0]
    same(decoder.row(0), plain.row(0), 0.05)
