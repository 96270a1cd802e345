"""The engine: what a request yields does not depend on what else runs, nor on what is cached; every request ends."""

from dataclasses import replace

import pytest
import torch

from lineate.generation.choice import Sampling, log_probabilities
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import EngineStopped, Handle, QueueFull, Request, TooLong
from tests.support.marks import slow_but
from tests.support.serving_models import PATTERNS, SPACING, VOCAB, Counting, alone, model, prompt

patterns = pytest.mark.parametrize("pattern", PATTERNS)
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)


def make(pattern: str = "GGGA", *, cached: bool = True, **options) -> Engine:
    options = {"slots": 4, "context": 1024, "spacing": SPACING, "poison": True, **options}
    if cached and "cache" not in options:
        options["cache"] = StateCache(2**26, SPACING, poison=True)
    return Engine(model(pattern), **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def check(pattern: str, handle: Handle) -> None:
    """Check every continuation of a request that ended by its length against a fresh engine."""
    request = handle.request
    for n, found in enumerate(handle.result(0)):
        sampling = replace(request.sampling, seed=request.sampling.seed + n)
        assert found.finished == "length", found
        assert tuple(found.tokens) == alone(pattern, request.ids, sampling, request.max_new_tokens)


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(PATTERNS, ("GGGA", "TPNC")))
def test_tokens_do_not_depend_on_what_else_runs(pattern):
    """Prompts of many lengths, drawn and greedy, with forks; then the same again from the cache, in another order."""
    engine = make(pattern, slots=3)
    lengths = [(1, 3), (64, 1), (65, 2), (200, 1), (130, 1)]
    requests = [
        Request(prompt(length, seed=length), (GREEDY, DRAWN)[i % 2], max_new_tokens=5 + 3 * i, n=n)
        for i, (length, n) in enumerate(lengths)
    ]
    for again, order in enumerate((requests, requests[::-1])):
        handles = []
        for request in order:
            handles.append(engine.submit(request))
            engine.step()
            engine.step()
        finish(engine)
        for handle in handles:
            check(pattern, handle)
            assert not again or handle.result()[0].cached_tokens == len(handle.request.ids)
    assert engine.stats.finished == {"length": 16}


@patterns
@torch.no_grad()
def test_kept_states_continue_to_the_same_bits(pattern):
    """A prompt read from a state on the grid has the logits and the state of one that is read whole."""
    lm, ids = model(pattern), prompt(200)
    whole = Reading(lm, ids, SPACING)
    while not whole.done:
        whole.advance()
    cache = StateCache(2**26, SPACING)
    first = Reading(lm, prompt(150, seed=7, begins=ids[:130]), SPACING, cache)
    while not first.done:
        first.advance()
    second = Reading(lm, ids, SPACING, cache)
    second.look_up()
    assert (second.position, second.cached_tokens) == (128, 128)
    while not second.done:
        second.advance()
    third = Reading(lm, ids, SPACING, cache)
    third.look_up()
    assert third.done and third.cached_tokens == 200
    for reading in (second, third):
        assert torch.equal(reading.logits, whole.logits)
        for a, b in zip(reading.state.layers, whole.state.layers, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a.names)


def test_prompts_that_part_between_two_cuts_go_on_from_the_last_one():
    beginning = prompt(100, seed=5)
    engine, handles = make(), []
    for n in (11, 12, 13):
        handles.append(engine.submit(Request(prompt(150, seed=n, begins=beginning), DRAWN, max_new_tokens=4)))
        finish(engine)
    assert [handle.result(0)[0].cached_tokens for handle in handles] == [0, 64, 64]
    for handle in handles:
        check("GGGA", handle)


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(PATTERNS, ("GGGA", "TPNC")))
def test_the_next_turn_has_the_bits_of_reading_the_whole_conversation(pattern):
    """Three turns from the cache, with others; each has the log-probabilities of an engine that keeps nothing."""
    engine, ids = make(pattern), prompt(70)
    for turn in range(3):
        request = Request(ids, DRAWN, max_new_tokens=30, logprobs=3)
        others = [engine.submit(Request(prompt(n, seed=turn), DRAWN, max_new_tokens=9 * n)) for n in (3, 4)]
        handle = engine.submit(request)
        finish(engine)
        fresh = make(pattern, cached=False)
        expected = fresh.submit(request)
        finish(fresh)
        ((found,), (wanted,)) = handle.result(0), expected.result(0)
        assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
        assert found.cached_tokens == max(len(ids) - 4, 0) // SPACING * SPACING * (turn > 0)
        for other in others:
            check(pattern, other)
        ids = (*ids, *found.tokens, 1, 2, 3, 4)


def test_a_long_prompt_does_not_stall_the_others():
    engine = make()
    short = engine.submit(Request(prompt(5), GREEDY, max_new_tokens=50))
    engine.step()
    short.pending()
    long = engine.submit(Request(prompt(5 * SPACING), GREEDY, max_new_tokens=1))
    for _ in range(4):
        engine.step()
        assert [event.tokens for event in short.pending()] != []
        assert long.pending() == []
    engine.step()
    assert [event.finished for event in long.pending()] == ["length"]


def test_prompts_are_read_in_turns():
    """A short prompt behind a long one waits for one piece of it, not for all."""
    engine = make()
    long, short = (engine.submit(Request(prompt(n), GREEDY, max_new_tokens=1)) for n in (6 * SPACING, SPACING))
    engine.step()
    engine.step()
    assert [event.finished for event in short.pending()] == ["length"]
    assert long.pending() == []
    finish(engine)


@pytest.mark.cover
def test_prompts_that_begin_alike_are_read_once():
    """Prompts that arrive together share what is the same, up to the last cut; without a cache each is read whole."""
    first = prompt(3 * SPACING + 10)
    prompts = [first, first, prompt(200, seed=2, begins=first[:140]), prompt(70, seed=3)]
    for cached, read in ((True, len(first) + (200 - 128) + 70), (False, sum(map(len, prompts)))):
        engine = make(cached=cached)
        handles = [engine.submit(Request(ids, DRAWN, max_new_tokens=5)) for ids in prompts]
        finish(engine)
        for handle in handles:
            check("GGGA", handle)
        assert engine.stats.read_tokens == read


def test_a_prompt_goes_on_when_the_one_it_waits_for_is_cancelled():
    engine = make()
    leader, follower = (engine.submit(Request(prompt(5 * SPACING), DRAWN, max_new_tokens=5)) for _ in range(2))
    for _ in range(2):
        engine.step()
    leader.cancel()
    finish(engine)
    check("GGGA", follower)
    assert follower.result()[0].cached_tokens == 2 * SPACING


@pytest.mark.cover
def test_cancelling_frees_the_row_at_the_next_step():
    engine = make(slots=2, cached=False)
    handles = [engine.submit(Request(prompt(3, seed=n), DRAWN, max_new_tokens=30)) for n in range(4)]
    for _ in range(3):
        engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 2)
    handles[0].cancel()
    handles[3].cancel()
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 0)
    assert [event.finished for event in handles[0].pending()][-1] == "cancelled"
    assert [event.finished for event in handles[3].pending()] == ["cancelled"]
    finish(engine)
    for handle in handles[1:3]:
        check("GGGA", handle)
    assert engine.stats.finished == {"cancelled": 2, "length": 2}


def test_one_of_several_continuations_is_cancelled():
    engine = make()
    handle = engine.submit(Request(prompt(3 * SPACING), DRAWN, max_new_tokens=6, n=3))
    engine.step()
    handle.cancel(1)  # while the prompt is read
    while engine.stats.running == 0:
        engine.step()
    handle.cancel(2)
    finish(engine)
    first, second, third = handle.result(0)
    assert tuple(first.tokens) == alone("GGGA", prompt(3 * SPACING), DRAWN, 6)
    assert (second.tokens, second.finished) == ([], "cancelled")
    assert third.finished == "cancelled" and 0 < len(third.tokens) < 6


@pytest.mark.parametrize("when", ["waiting", "reading", "running"])
def test_cancelled_requests_leave_nothing_behind(when):
    engine = make(slots=1)
    other = engine.submit(Request(prompt(2), GREEDY, max_new_tokens=3)) if when == "waiting" else None
    handle = engine.submit(Request(prompt(3 * SPACING, seed=4), DRAWN, max_new_tokens=30))
    for _ in range({"waiting": 1, "reading": 2, "running": 5}[when]):
        engine.step()
    handle.cancel()
    finish(engine)
    assert handle.result(0)[0].finished == "cancelled"
    assert (engine.stats.running, engine.stats.reading, engine.stats.waiting) == (0, 0, 0)
    again = engine.submit(Request(prompt(3 * SPACING, seed=4), DRAWN, max_new_tokens=30))
    finish(engine)
    check("GGGA", again)
    assert other is None or other.result(0)[0].finished == "length"


def test_an_answer_that_is_stopped_serves_the_next_turn():
    """Handle.stop ends a request as a stop token would, for example at a stop string."""
    engine = make()
    handle = engine.submit(Request(prompt(60), DRAWN, max_new_tokens=30))
    for _ in range(5):
        engine.step()
    handle.stop()
    finish(engine)
    (found,) = handle.result(0)
    assert found.finished == "stop" and tuple(found.tokens) == alone("GGGA", prompt(60), DRAWN, 30)[: len(found.tokens)]
    following = engine.submit(Request((*prompt(60), *found.tokens, 5), GREEDY, max_new_tokens=2))
    finish(engine)
    check("GGGA", following)
    assert following.result()[0].cached_tokens == SPACING


def test_stop_tokens_end_a_continuation():
    whole = alone("GGGA", prompt(10), DRAWN, 30)
    stop = whole[7]
    engine = make()
    handle = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=30, stop_tokens={stop}))
    finish(engine)
    (found,) = handle.result(0)
    assert found.finished == "stop" and tuple(found.tokens) == whole[: whole.index(stop) + 1]


def test_log_probabilities():
    engine, lm = make(), model("GGGA")
    handles = [
        engine.submit(Request(prompt(10, seed=n), DRAWN, max_new_tokens=6, logprobs=(2, 0, None)[n])) for n in range(3)
    ]
    finish(engine)
    for handle, top in zip(handles, (2, 0, None), strict=True):
        (found,) = handle.result(0)
        if top is None:
            assert found.logprobs == []
            continue
        ids = torch.tensor([[*handle.request.ids, *found.tokens[:-1]]])
        with torch.no_grad():
            logits = lm(ids).logits[0, 9:]
        own, likeliest, values = log_probabilities(logits, torch.tensor(found.tokens), top)
        assert [x.token for x in found.logprobs] == found.tokens
        torch.testing.assert_close(torch.tensor([x.logprob for x in found.logprobs]), own, rtol=1e-4, atol=1e-4)
        for n, each in enumerate(found.logprobs):
            assert [token for token, _ in each.top] == likeliest[n].tolist()
            expected = [values[n, i].item() for i in range(top)]
            assert [value for _, value in each.top] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sampling", [replace(GREEDY, repetition_penalty=2.0), replace(DRAWN, frequency_penalty=1.0)])
def test_penalties_count_the_prompt_and_the_answer(sampling):
    engine = make()
    handles = [engine.submit(Request(prompt(20), sampling, max_new_tokens=20)) for _ in range(2)]
    plain = engine.submit(Request(prompt(20), replace(sampling, repetition_penalty=1.0, frequency_penalty=0.0), 20))
    finish(engine)
    for handle in handles:
        check("GGGA", handle)
    assert plain.result(0)[0].tokens != handles[0].result(0)[0].tokens


def test_guides_restrict_the_tokens():
    """Each continuation follows its own copy; others are not restricted, and one that fails ends alone."""
    engine = make()
    guide = Counting(3, 6)
    guided = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=20, guide=guide, n=2))
    free = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=20))
    failing = engine.submit(Request(prompt(10), DRAWN, max_new_tokens=20, guide=Counting(10, 20)))
    finish(engine)
    assert guide.next_token == 3
    for found in guided.result(0):
        assert (found.tokens, found.finished) == ([3, 4, 5, 6], "stop")
    check("GGGA", free)
    (found,) = failing.result(0)
    assert (found.tokens[:3], found.finished, found.error) == ([10, 11, 12], "error", "RuntimeError: 13 is refused")


def test_deadlines():
    now = 0.0
    engine = make(slots=1, clock=lambda: now)
    running, waiting = (engine.submit(Request(prompt(4), GREEDY, max_new_tokens=50, timeout=10)) for _ in range(2))
    for _ in range(3):
        engine.step()
    now = 9.9
    engine.step()
    assert engine.stats.running == 1
    now = 10.0
    finish(engine)
    (first,), (second,) = running.result(0), waiting.result(0)
    assert first.finished == second.finished == "timeout"
    assert len(first.tokens) == 5 and second.tokens == []
    assert tuple(first.tokens) == alone("GGGA", prompt(4), GREEDY, 50)[:5]


def test_the_queue_is_bounded():
    engine = make(slots=1, queue=2)
    for _ in range(2):
        engine.submit(Request(prompt(4), GREEDY, max_new_tokens=2))
    with pytest.raises(QueueFull, match="2 requests wait already") as caught:
        engine.submit(Request(prompt(4), GREEDY, max_new_tokens=2))
    assert caught.value.retry_after > 0
    engine.step()
    engine.submit(Request(prompt(4), GREEDY, max_new_tokens=2))
    finish(engine)


def test_requests_that_cannot_fit_are_refused():
    engine = make(context=100)
    with pytest.raises(TooLong, match=r"a prompt of 90 tokens and max_new_tokens = 11 must fit into the context, 100"):
        engine.submit(Request(prompt(90), max_new_tokens=11))
    with pytest.raises(TooLong, match="a prompt of 100 tokens must fit into the context"):
        engine.submit(Request(prompt(100)))
    handle = engine.submit(Request(prompt(90), GREEDY))
    finish(engine)
    assert len(handle.result(0)[0].tokens) == 10
    with pytest.raises(ValueError, match="n must be at most the engine's slots, 4, got 5"):
        engine.submit(Request(prompt(4), n=5))
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=rf"ids must lie in 0 .. {VOCAB - 1}"):
            engine.submit(Request((3, token)))


def test_errors():
    with pytest.raises(ValueError, match="spacing must be a multiple of 64"):
        make(spacing=100, cached=False)
    with pytest.raises(ValueError, match="cache must have the engine's spacing, 64, got 128"):
        make(cache=StateCache(2**20, 128))
    with pytest.raises(ValueError, match="slots must be an int of at least 1, got 0"):
        make(slots=0)
    for wrong in (
        {"n": 0},
        {"max_new_tokens": -1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"timeout": 0.0},
        {"ids": ()},
        {"n": None},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Request(**{"ids": (1,), **wrong})
    engine = make()
    engine.stop()
    with pytest.raises(EngineStopped):
        engine.submit(Request(prompt(4)))
