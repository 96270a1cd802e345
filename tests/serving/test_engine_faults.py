"""Faults that pass, guesses that are none, and values out of range end nothing but what they touch."""

import asyncio

import pytest
import torch

from lineate.decoding import in_place
from lineate.generation.choice import Sampling, choose_tokens
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.requests import Request
from tests.support.serving_models import SPACING, alone, model, prompt

GREEDY = Sampling(temperature=0)


def make(**options) -> Engine:
    return Engine(model("GA"), slots=2, context=256, spacing=SPACING, poison=True, **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


class Guessing:
    """Guesses the same tokens always."""

    needs_hidden = False

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def propose(self, rows, most):
        return [self.tokens[:most] for _ in rows]

    def observe(self, *_):
        raise AssertionError("it does not need what the head reads")

    def forget(self, key):
        pass


class DeadEnd:
    """A guide that allows everything, and nothing after one token."""

    finished = False

    def __init__(self, token: int, seen: tuple[int, ...] = ()) -> None:
        self.token, self.seen = token, list(seen)

    def allowed(self, vocab: int) -> torch.Tensor:
        return torch.full((vocab,), not self.seen or self.seen[-1] != self.token)

    def advance(self, token: int) -> None:
        self.seen.append(token)

    def rollback(self, count: int) -> None:
        del self.seen[len(self.seen) - count :]

    def copy(self) -> "DeadEnd":
        return DeadEnd(self.token, tuple(self.seen))


@pytest.mark.parametrize("tokens", [(999,), (-1,), (3, 61, 4)])
def test_guesses_that_are_no_tokens_change_nothing(tokens):
    engine = make(drafter=Guessing(*tokens))
    handles = [engine.submit(Request(prompt(5, n), GREEDY, max_new_tokens=5)) for n in range(2)]
    finish(engine)
    for n, handle in enumerate(handles):
        assert tuple(handle.result(0)[0].tokens) == alone("GA", prompt(5, n), GREEDY, 5)


def test_a_wrong_guess_into_a_dead_end_changes_nothing():
    expected = alone("GA", prompt(5), GREEDY, 8)
    dead = next(token for token in range(61) if token not in expected)
    engine = make(drafter=Guessing(dead))
    handle = engine.submit(Request(prompt(5), GREEDY, max_new_tokens=8, guide=DeadEnd(dead)))
    finish(engine)
    assert tuple(handle.result(0)[0].tokens) == expected


def test_a_fault_that_passes_is_not_kept(monkeypatch):
    """A state with NaN never enters the cache, so the prompt is served when the fault is over."""
    lm, states = model("GA"), StateCache(2**26, SPACING, poison=True)
    engine, real = make(cache=states), lm.hidden
    with monkeypatch.context() as patch:
        patch.setattr(lm, "hidden", lambda x, state=None: (real(x, state)[0] * torch.nan, real(x, state)[1]))
        failed = engine.submit(Request(prompt(100), GREEDY, max_new_tokens=5))
        finish(engine)
    assert failed.result(0)[0].finished == "error" and states.stats.states == 0
    again = engine.submit(Request(prompt(100), GREEDY, max_new_tokens=5))
    finish(engine)
    assert tuple(again.result(0)[0].tokens) == alone("GA", prompt(100), GREEDY, 5)


def test_a_listener_that_is_cancelled_ends_its_request_alone(caplog):
    def cancelled(event):
        raise asyncio.CancelledError

    engine = make()
    engine.start()
    engine.submit(Request(prompt(5), GREEDY, max_new_tokens=50), cancelled)
    handle = engine.submit(Request(prompt(6), GREEDY, max_new_tokens=5))
    assert tuple(handle.result(60)[0].tokens) == alone("GA", prompt(6), GREEDY, 5)
    engine.stop(timeout=60)
    assert "the listener of request 1 failed" in caplog.text


def test_events_of_a_listener_are_not_read():
    engine = make()
    handle = engine.submit(Request(prompt(5), GREEDY, max_new_tokens=2), lambda event: None)
    finish(engine)
    with pytest.raises(RuntimeError, match="go to its listener"):
        handle.result(0)


def test_an_index_out_of_range_is_refused():
    engine = make()
    handle = engine.submit(Request(prompt(5), GREEDY, max_new_tokens=2))
    with pytest.raises(ValueError, match=r"index must be that of a continuation, 0 \.\. 0, got 3"):
        handle.cancel(3)
    finish(engine)
    assert handle.result(0)[0].finished == "length"


def test_any_temperature_gives_a_token():
    logits = torch.randn(1, 61, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-300, 1e39, 1e300):
        assert 0 <= int(choose_tokens(logits, [Sampling(temperature=temperature)], torch.tensor([5]))) < 61


def test_a_row_that_cannot_join_changes_nothing(monkeypatch):
    lm = model("GA")
    pool = Pool(lm, 2, 64)
    with torch.no_grad():
        state = lm(torch.tensor([prompt(5)])).state
    pool.join(state)
    before, calls = pool.row(0), []
    real = torch.cat

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("can't allocate memory")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", failing)
        with pytest.raises(RuntimeError, match="allocate"):
            pool.join(state)
    assert len(pool) == 1 and pool.step([3]).shape[0] == 1
    assert before.lengths == 5


def test_a_trial_that_fails_is_undone():
    """Memories that a step wrote in place before it failed are put back."""
    x = torch.zeros(3)

    def step() -> None:
        x.add_(1)
        raise torch.OutOfMemoryError("a layer later")

    with pytest.raises(torch.OutOfMemoryError):
        in_place.try_out(step, [x])
    assert torch.equal(x, torch.zeros(3))


def test_a_copy_that_fails_leaves_no_bytes(monkeypatch):
    """A CPU without memory raises RuntimeError; what was counted for the copies is given back."""
    states, made = StateCache(2**26, SPACING, poison=True), []
    with torch.no_grad():
        state = model("GA")(torch.tensor([prompt(SPACING)])).state
    real = torch.Tensor.copy_

    def failing(x, *args, **options):
        made.append(x)
        if len(made) == 3:
            raise RuntimeError("can't allocate memory")
        return real(x, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", failing)
        assert not states.keep(prompt(SPACING), state)
    assert len(made) == 3 and states.stats.bytes == 0
    assert states.keep(prompt(SPACING), state)
