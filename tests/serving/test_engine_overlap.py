"""A step that begins before the tokens of the last one are delivered, as on a GPU, changes nothing else.

Here the model is on a CPU, where the step has ended when it has begun: the order of all that happens is the same.
"""

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.continuation import NextTokens
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Event, Handle, Request
from tests.support.marks import slow_but
from tests.support.serving_models import PATTERNS, SPACING, Counting, alone, model, prompt

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
FILTERED = Sampling(temperature=1.2, top_p=0.9, seed=5)
PENALISED = Sampling(temperature=1.5, frequency_penalty=1.0, seed=6)
BIASED = Sampling(temperature=1.5, logit_bias=((3, 4.0), (60, -50.0)), seed=7)


def make(pattern: str = "GGGA", **options) -> Engine:
    options = {"slots": 4, "context": 1024, "spacing": SPACING, "overlap": True, "poison": True, **options}
    options.setdefault("cache", StateCache(2**26, SPACING, poison=True))
    return Engine(model(pattern), **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def whole(handle: Handle, pattern: str = "GGGA") -> tuple[int, ...]:
    """Return what a request yields that runs alone, without overlap."""
    request = handle.request
    return alone(pattern, request.ids, request.sampling, request.max_new_tokens)


def check(handle: Handle, pattern: str = "GGGA") -> None:
    (found,) = handle.result(0)
    assert (found.finished, tuple(found.tokens)) == ("length", whole(handle, pattern))


class Steps:
    """Counts the steps of a pool; one of them may fail, or have logits that are NaN."""

    def __init__(self, engine: Engine, fails: int = 0, spoils: int = 0) -> None:
        self.count, self._step = 0, engine.pool.step
        self._fails, self._spoils = fails, spoils
        engine.pool.step = self.step

    def step(self, ids):
        self.count += 1
        if self.count == self._fails:
            raise RuntimeError("the device is gone")
        logits = self._step(ids)
        return logits * torch.nan if self.count == self._spoils else logits


@pytest.mark.parametrize(("overlap", "ahead"), [(True, 1), (False, 0), (None, 0)])
def test_the_next_step_begins_before_tokens_are_delivered(overlap, ahead):
    """With overlap, n + 1 steps have begun when the token of step n arrives, except for the last; else n."""
    engine, found = make(overlap=overlap), []
    steps = Steps(engine)
    engine.submit(Request(prompt(4), DRAWN, max_new_tokens=6), lambda event: found.append(steps.count))
    finish(engine)
    assert found == [0, *(min(n + ahead, 5) for n in range(1, 6))]
    assert steps.count == engine.stats.steps == 5


def test_guesses_are_not_made_ahead():
    engine = make(drafter=PromptLookup(n=1))
    handle = engine.submit(Request(prompt(12) * 3, GREEDY, max_new_tokens=20))
    finish(engine)
    check(handle)
    assert engine.stats.guesses > 0


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(PATTERNS, ("GGGA", "LRDG")))
def test_rows_of_all_kinds_join_and_end_at_any_step(pattern):
    """Rows that are drawn in different ways, and more requests than slots, which end at different steps."""
    engine, handles = make(pattern, slots=3), []
    for n, sampling in enumerate((GREEDY, DRAWN, FILTERED, PENALISED, BIASED, DRAWN)):
        handles.append(engine.submit(Request(prompt(3 + 40 * n, seed=n), sampling, max_new_tokens=3 + 2 * n)))
        engine.step()
    finish(engine)
    for handle in handles:
        check(handle, pattern)
    assert len(engine.pool) == 0


def test_log_probabilities_and_guides():
    found = []
    for overlap in (True, False):
        engine = make(overlap=overlap)
        handles = [
            engine.submit(Request(prompt(10), DRAWN, max_new_tokens=6, logprobs=2)),
            engine.submit(Request(prompt(10), DRAWN, max_new_tokens=20, guide=Counting(3, 6))),
            engine.submit(Request(prompt(10), DRAWN, max_new_tokens=20, guide=Counting(10, 20))),
            engine.submit(Request(prompt(11), DRAWN, max_new_tokens=9)),
        ]
        finish(engine)
        found.append([handle.result(0)[0] for handle in handles])
    assert found[0] == found[1]
    assert [x.finished for x in found[0]] == ["length", "stop", "error", "length"]


def test_a_listener_cancels_another_request():
    """The other one is in the step that is under way, whose token for it is dropped; its row is free at once."""
    engine, events = make(slots=2), []
    other = engine.submit(Request(prompt(5), DRAWN, max_new_tokens=30), events.append)
    engine.step()

    def listener(event: Event) -> None:
        count.append(event)
        if len(count) == 3:
            other.cancel()

    count: list[Event] = []
    engine.submit(Request(prompt(9), GREEDY, max_new_tokens=8), listener)
    waiting = engine.submit(Request(prompt(6), DRAWN, max_new_tokens=5))
    while all(event.finished is None for event in events):
        engine.step()
    told = len(events)
    assert events[-1].finished == "cancelled" and events[-1].tokens == ()
    assert engine.stats.running == 2  # the waiting request has its row already
    finish(engine)
    assert len(events) == told
    tokens = tuple(token for event in events for token in event.tokens)
    assert tokens == whole(other)[: len(tokens)]
    assert [token for event in count for token in event.tokens] == list(alone("GGGA", prompt(9), GREEDY, 8))
    check(waiting)


def test_a_listener_that_fails_while_a_step_is_under_way(caplog):
    engine, events = make(), []

    def listener(event: Event) -> None:
        events.append(event)
        if len(events) == 4:
            raise ConnectionError("nobody is there")

    engine.submit(Request(prompt(4), GREEDY, max_new_tokens=50), listener)
    other = engine.submit(Request(prompt(9), DRAWN, max_new_tokens=12))
    finish(engine)
    check(other)
    assert [event.finished for event in events] == [None] * 4 + ["cancelled"]
    assert "nobody is there" in caplog.text


@pytest.mark.parametrize("how", ["stop token", "length"])
def test_a_row_that_ends_is_not_read_further(how):
    """Others go on; the next turn finds the answer, as without overlap."""
    engine = make()
    other = engine.submit(Request(prompt(9), GREEDY, max_new_tokens=25))
    tokens = alone("GGGA", prompt(120), DRAWN, 30)
    last = next(n for n in range(8, 30) if tokens[n] not in tokens[:n])
    request = (
        Request(prompt(120), DRAWN, last + 1) if how == "length" else Request(prompt(120), DRAWN, 30, {tokens[last]})
    )
    handle = engine.submit(request)
    finish(engine)
    check(other)
    (found,) = handle.result(0)
    assert (tuple(found.tokens), found.finished) == (tokens[: last + 1], how.split()[0])
    following = engine.submit(Request((*prompt(120), *found.tokens, 1, 2), DRAWN, max_new_tokens=8))
    finish(engine)
    check(following)
    assert following.result()[0].cached_tokens == 2 * SPACING


@pytest.mark.parametrize("spoils", [0, 6])
def test_stopping_while_a_step_is_under_way(spoils):
    """The next turn finds the answer, which was read again: also if that step had logits that are NaN."""
    engine = make()
    Steps(engine, spoils=spoils)
    handle = engine.submit(Request(prompt(60), DRAWN, max_new_tokens=30))
    for _ in range(5):
        engine.step()
    handle.stop()
    finish(engine)
    (found,) = handle.result(0)
    assert found.finished == "stop" and tuple(found.tokens) == whole(handle)[: len(found.tokens)]
    following = engine.submit(Request((*prompt(60), *found.tokens, 5), GREEDY, max_new_tokens=9))
    finish(engine)
    check(following)
    assert following.result()[0].cached_tokens == SPACING


def test_a_deadline_between_steps():
    now = 0.0
    engine = make(slots=1, clock=lambda: now)
    handle = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=50, timeout=10))
    waiting = engine.submit(Request(prompt(6), DRAWN, max_new_tokens=5))
    for _ in range(4):
        engine.step()
    now = 10.0
    engine.step()
    (found,) = handle.completions
    assert [event.finished for event in handle.pending()] == [None] * 5 + ["timeout"]
    assert tuple(found.tokens) == whole(handle)[:5]
    finish(engine)
    check(waiting)


def test_a_step_that_cannot_begin_fails_after_the_tokens_before_it(caplog):
    """The tokens of the last step are delivered; a row that ended with it has ended well."""
    engine = make(cache=None)
    Steps(engine, fails=4)
    going = engine.submit(Request(prompt(4), DRAWN, max_new_tokens=30))
    ending = engine.submit(Request(prompt(5), DRAWN, max_new_tokens=2))
    reading = engine.submit(Request(prompt(5 * SPACING), GREEDY, max_new_tokens=5))
    finish(engine)
    (found,) = going.result(0)
    assert (found.finished, found.error) == ("error", "RuntimeError: the device is gone")
    assert tuple(found.tokens) == whole(going)[:4]  # the first comes from the prompt
    check(ending)
    check(reading)
    assert "a decoding step failed" in caplog.text and len(engine.pool) == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_waiting_for_a_step_can_be_interrupted(overlap, monkeypatch):
    """The tokens of that step have not been taken, so the next one takes them; nothing is read twice."""
    engine, wait, interruptions = make(overlap=overlap), NextTokens.wait, iter([0, 1, 0, 0, 1, 1, 0])

    def interrupted(step):
        if next(interruptions, 0):
            raise KeyboardInterrupt
        return wait(step)

    monkeypatch.setattr(NextTokens, "wait", interrupted)
    handles = [engine.submit(Request(prompt(5 + n), x, max_new_tokens=9)) for n, x in enumerate((DRAWN, PENALISED))]
    count = 0
    for _ in range(40):
        try:
            if not engine.step():
                break
        except KeyboardInterrupt:
            count += 1
    assert count == 3
    for handle in handles:
        check(handle)


def test_all_rows_leave_while_a_step_is_under_way():
    engine = make(slots=2, cache=None)
    first = [engine.submit(Request(prompt(4, seed=n), DRAWN, max_new_tokens=30)) for n in range(2)]
    for _ in range(4):
        engine.step()
    for handle in first:
        handle.cancel()
    second = [engine.submit(Request(prompt(7, seed=n), DRAWN, max_new_tokens=6)) for n in range(2)]
    finish(engine)
    for handle in first:
        (found,) = handle.result(0)
        assert found.finished == "cancelled" and tuple(found.tokens) == whole(handle)[: len(found.tokens)]
    for handle in second:
        check(handle)


def test_prompts_take_their_turns():
    """A row has a token in every step while a long prompt is read."""
    engine = make()
    short = engine.submit(Request(prompt(5), GREEDY, max_new_tokens=50))
    engine.step()
    short.pending()
    long = engine.submit(Request(prompt(5 * SPACING), GREEDY, max_new_tokens=1))
    for _ in range(4):
        engine.step()
        assert [len(event.tokens) for event in short.pending()] == [1]
        assert long.pending() == []
    finish(engine)
    check(short)
    check(long)


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_the_engine(drain):
    engine = make(slots=2)
    handles = [engine.submit(Request(prompt(20, n), DRAWN, max_new_tokens=12)) for n in range(4)]
    engine.start()
    next(handles[0].events(30))
    engine.stop(drain=drain, timeout=60)
    for handle in handles:
        (found,) = handle.result(0)
        assert found.finished == "length" or (not drain and found.finished == "shutdown")
        assert tuple(found.tokens) == whole(handle)[: len(found.tokens)]
    assert (engine.stats.running, len(engine.pool)) == (0, 0)
