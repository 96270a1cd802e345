"""Guesses change how many steps it takes, never the tokens: right ones, wrong ones, and all between."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import DraftModel, DraftRow, PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Handle, Request
from tests.support.marks import slow_but
from tests.support.serving_models import PATTERNS, SPACING, VOCAB, Counting, alone, model, prompt

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)


class Oracle:
    """Guesses what a fresh engine generates; every few tokens it is wrong."""

    needs_hidden = False

    def __init__(self, pattern: str, wrong_every: int) -> None:
        self.pattern, self.wrong_every = pattern, wrong_every
        self.prompts: dict[Hashable, tuple[int, ...]] = {}

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        found = []
        for row in rows:
            first = self.prompts.setdefault(row.key, tuple(row.ids[:-1]))
            answer = alone(self.pattern, first, row.sampling, 24)
            guesses = list(answer[len(row.ids) - len(first) :][:most])
            for n in range(len(guesses)):
                if (len(row.ids) + n) % self.wrong_every == 0:
                    guesses[n] = (guesses[n] + 1) % VOCAB
            found.append(guesses)
        return found

    def forget(self, key: Hashable) -> None:
        self.prompts.pop(key, None)


def make(pattern: str, drafter: object, **options) -> Engine:
    options = {"slots": 4, "context": 512, "spacing": SPACING, "poison": True, **options}
    options.setdefault("cache", StateCache(2**26, SPACING, poison=True))
    return Engine(model(pattern), drafter=drafter, **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def check(pattern: str, handle: Handle) -> None:
    request = handle.request
    for n, found in enumerate(handle.result(0)):
        sampling = replace(request.sampling, seed=request.sampling.seed + n)
        assert (found.finished, found.error) == ("length", None)
        assert tuple(found.tokens) == alone(pattern, request.ids, sampling, 24)[: request.max_new_tokens]


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(PATTERNS, ("GGGA", "TPNC", "KKKM, experts")))
def test_guesses_do_not_change_the_tokens(pattern):
    """Rows with many right guesses run with rows with few; rows join, fork and leave, and the cache is used."""
    drafter = Oracle(pattern, 4)
    engine = make(pattern, drafter)
    requests = [
        Request(prompt(70), GREEDY, max_new_tokens=24),
        Request(prompt(10, seed=1), DRAWN, max_new_tokens=12, n=2),
        Request(prompt(70), DRAWN, max_new_tokens=5),
    ]
    for order in (requests, requests[::-1]):
        handles = []
        for request in order:
            handles.append(engine.submit(request))
            engine.step()
        finish(engine)
        for handle in handles:
            check(pattern, handle)
    stats = engine.stats
    assert drafter.prompts == {}
    assert 0.3 * stats.guesses < stats.right_guesses < stats.guesses
    assert stats.steps < 0.6 * (24 + 12 + 5) * 2


@pytest.mark.parametrize("pattern", ["GGGA", "KKKM, experts", "TPNC"])
def test_the_next_turn_continues_a_guessed_answer(pattern):
    """Refused guesses leave nothing in the states that are kept."""
    engine = make(pattern, Oracle(pattern, 3))
    handle = engine.submit(Request(prompt(50), DRAWN, max_new_tokens=20))
    finish(engine)
    following = (*prompt(50), *handle.result(0)[0].tokens, 5, 6)
    handle = engine.submit(Request(following, DRAWN, max_new_tokens=6))
    finish(engine)
    assert handle.result(0)[0].cached_tokens == SPACING
    assert tuple(handle.result(0)[0].tokens) == alone(pattern, following, DRAWN, 24)[:6]


@pytest.mark.cover
def test_drafters_of_the_library():
    """Lookup in a prompt that repeats itself, and a model that guesses for itself."""
    ids = prompt(12) * 3
    for drafter in (PromptLookup(n=1), DraftModel(model("GGGA"), VOCAB), DraftModel(model("LRDG"), VOCAB)):
        engine = make("GGGA", drafter)
        handles = [engine.submit(Request(ids[n:], (GREEDY, DRAWN)[n % 2], max_new_tokens=12)) for n in range(4)]
        finish(engine)
        for handle in handles:
            check("GGGA", handle)
        assert engine.stats.guesses > 0


def test_stop_tokens_among_the_guesses():
    whole = alone("GGGA", prompt(10), DRAWN, 24)
    for place in range(3, 9):
        engine = make("GGGA", Oracle("GGGA", 100))
        handle = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=24, stop_tokens={whole[place]}))
        finish(engine)
        (found,) = handle.result(0)
        assert found.finished == "stop" and tuple(found.tokens) == whole[: whole.index(whole[place]) + 1]


def test_penalties_and_log_probabilities():
    sampling = replace(DRAWN, frequency_penalty=1.0, repetition_penalty=1.5)
    found = []
    for drafter in (Oracle("GGGA", 4), None):
        engine = make("GGGA", drafter)
        handle = engine.submit(Request(prompt(10), sampling, max_new_tokens=20, logprobs=2))
        finish(engine)
        found.append(handle.result(0)[0])
    assert found[0].tokens == found[1].tokens == list(alone("GGGA", prompt(10), sampling, 24)[:20])
    for mine, plain in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert (mine.token, [x for x, _ in mine.top]) == (plain.token, [x for x, _ in plain.top])
        assert mine.logprob == pytest.approx(plain.logprob, abs=1e-4)


class Next:
    """Guesses the next numbers, which a counting guide allows until it ends."""

    needs_hidden = False

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        return [[(row.ids[-1] + n) % VOCAB for n in range(1, most + 1)] for row in rows]

    def forget(self, key: Hashable) -> None:
        pass


def test_guides_follow_the_guesses():
    engine = make("GGGA", Next(), most_guesses=3)
    guide = Counting(3, 12)
    guided = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=24, guide=guide, n=2))
    free = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=24))
    finish(engine)
    for found in guided.result(0):
        assert (found.tokens, found.finished) == (list(range(3, 13)), "stop")
    check("GGGA", free)
    assert engine.stats.right_guesses >= 12 and guide.next_token == 3


def test_a_drafter_that_fails_costs_only_guesses(caplog):
    class Failing(Next):
        def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
            raise KeyError("no idea")

        def forget(self, key: Hashable) -> None:
            raise KeyError("who?")

    engine = make("GGGA", Failing())
    handle = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=5))
    finish(engine)
    check("GGGA", handle)
    assert "guessing failed" in caplog.text


@pytest.mark.cover
def test_guesses_never_exceed_the_context():
    """A row may be at the last token of its context while others are guessed far ahead."""
    engine = make("GGGA", Next(), context=64, most_guesses=8)
    handles = [engine.submit(Request(prompt(n), DRAWN, max_new_tokens=64 - n)) for n in (60, 40, 63)]
    finish(engine)
    for handle in handles:
        check("GGGA", handle)


class Watching(Oracle):
    """Notes what the model's head has read of each sequence."""

    needs_hidden = True

    def __init__(self, pattern: str, wrong_every: int) -> None:
        super().__init__(pattern, wrong_every)
        self.first: dict[Hashable, int] = {}
        self.hidden: dict[Hashable, list[torch.Tensor]] = {}
        self.forgotten: dict[Hashable, tuple[int, torch.Tensor]] = {}

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: torch.Tensor) -> None:
        self.first.setdefault(key, start)
        own = self.hidden.setdefault(key, [])
        assert start == self.first[key] + sum(map(len, own)) and start + len(hidden) <= len(ids)
        own.append(hidden)

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        if key in self.hidden:
            self.forgotten[key] = self.first.pop(key), torch.cat(self.hidden.pop(key))


@pytest.mark.cover
@torch.no_grad()
def test_drafters_observe_what_the_head_reads():
    """All tokens that are read and kept, from the first that was not cached on; refused guesses are left out."""
    lm, drafter = model("GGGA"), Watching("GGGA", 3)
    engine = make("GGGA", drafter)
    handles = [engine.submit(Request(prompt(100), DRAWN, max_new_tokens=12, n=2))]
    finish(engine)
    handles.append(engine.submit(Request(prompt(120, seed=5, begins=prompt(100)[:64]), GREEDY, max_new_tokens=12)))
    finish(engine)
    cancelled = engine.submit(Request(prompt(200, seed=6), GREEDY))
    engine.step()
    cancelled.cancel()
    finish(engine)
    assert drafter.hidden == drafter.first == {} and set(drafter.forgotten) == {(1, 0), (1, 1), (2, 0), (3, 0)}
    for handle in handles:
        for n, found in enumerate(handle.result(0)):
            first, hidden = drafter.forgotten[handle.number, n]
            assert first == found.cached_tokens
            ids = torch.tensor([[*handle.request.ids, *found.tokens[:-1]]])
            expected, _ = lm.hidden(lm.embed(ids))
            torch.testing.assert_close(hidden, expected[0, first:], rtol=1e-3, atol=1e-4)
