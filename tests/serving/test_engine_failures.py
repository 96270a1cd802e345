"""An error in one request ends that request alone; the engine goes on, in its thread too."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import EngineStopped, Event, Handle, Request
from tests.support.serving_models import SPACING, VOCAB, alone, model, prompt

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)


def make(**options) -> Engine:
    options = {"slots": 4, "context": 1024, "spacing": SPACING, "poison": True, **options}
    options.setdefault("cache", StateCache(2**26, SPACING, poison=True))
    return Engine(model("GGGA"), **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def check(handle: Handle) -> None:
    request = handle.request
    (found,) = handle.result(30)
    assert (found.finished, found.error) == ("length", None)
    assert tuple(found.tokens) == alone("GGGA", request.ids, request.sampling, request.max_new_tokens)


class Spoiled:
    """While it is entered, the embedding of one token fails, or is NaN."""

    def __init__(self, token: int, fails: bool) -> None:
        self.token, self.fails = token, fails

    def __enter__(self) -> None:
        def spoil(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            found = inputs[0] == self.token
            if self.fails and bool(found.any()):
                raise RuntimeError(f"token {self.token} is spoiled")
            return output.masked_fill(found[..., None], float("nan"))

        self.hook = model("GGGA").embed.register_forward_hook(spoil)

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def clean(length: int, seed: int) -> tuple[int, ...]:
    """Return a prompt without token 0."""
    return tuple(1 + token % (VOCAB - 1) for token in prompt(length, seed))


def test_a_prompt_that_fails_ends_alone(caplog):
    """Failing in its second piece, it has left a state of its first one, which serves the next request."""
    engine = make()
    running = engine.submit(Request(clean(5, 1), DRAWN, max_new_tokens=10))
    engine.step()
    ids = (*clean(100, 2), 0)
    with Spoiled(0, fails=True):
        failing = engine.submit(Request(ids, DRAWN, max_new_tokens=5, n=2))
        for _ in range(2):
            engine.step()
    finish(engine)
    for found in failing.result(0):
        assert (found.tokens, found.finished, found.error) == ([], "error", "RuntimeError: token 0 is spoiled")
    assert "failed while its prompt was read" in caplog.text
    again = engine.submit(Request(ids, DRAWN, max_new_tokens=5))
    finish(engine)
    assert again.result(0)[0].cached_tokens == 64
    assert tuple(again.result(0)[0].tokens) == alone("GGGA", ids, DRAWN, 5)
    assert tuple(running.result(0)[0].tokens[:2]) == alone("GGGA", clean(5, 1), DRAWN, 10)[:2]


def test_a_row_whose_logits_are_not_finite_ends_alone(caplog):
    """Its row and its cached entries are used again by the next request, which must not see them."""
    engine = make(slots=2, cache=None)
    other = engine.submit(Request(clean(5, 1), GREEDY, max_new_tokens=20))
    engine.step()
    with Spoiled(0, fails=False):
        broken = engine.submit(Request((3, 0), GREEDY, max_new_tokens=20))
        finish(engine)
    (found,) = broken.result(0)
    assert found.finished == "error" and "must be finite" in found.error
    check(other)
    with_nan = engine.submit(Request((3, 0, 7), GREEDY, max_new_tokens=20))
    finish(engine)
    check(with_nan)
    assert "must be finite" in caplog.text


def test_a_step_that_fails_ends_the_running_rows_only(caplog):
    engine = make()
    running = [engine.submit(Request(clean(5, n), DRAWN, max_new_tokens=40)) for n in (1, 2)]
    for _ in range(3):
        engine.step()
    reading = engine.submit(Request(clean(3 * SPACING, 3), GREEDY, max_new_tokens=5))
    step, engine.pool.step = engine.pool.step, None  # any failure in the middle of a step
    engine.step()
    engine.pool.step = step
    for handle in running:
        assert handle.result(0)[0].finished == "error"
    assert (engine.stats.running, engine.stats.reading, len(engine.pool)) == (0, 1, 0)
    assert "a decoding step failed" in caplog.text
    finish(engine)
    check(reading)


def test_a_listener_that_fails_is_cancelled(caplog):
    engine = make()

    def listener(event: Event) -> None:
        raise ConnectionError("nobody is there")

    engine.submit(Request(prompt(4), GREEDY, max_new_tokens=50), listener)
    other = engine.submit(Request(prompt(9), GREEDY, max_new_tokens=5))
    finish(engine)
    check(other)
    assert engine.stats.finished == {"cancelled": 1, "length": 1}
    assert "nobody is there" in caplog.text


def test_listeners_get_every_event():
    engine, events = make(), []
    engine.submit(Request(prompt(4), DRAWN, max_new_tokens=6, n=2), events.append)
    finish(engine)
    for index in range(2):
        own = [event for event in events if event.index == index]
        tokens = tuple(token for event in own for token in event.tokens)
        assert tokens == alone("GGGA", prompt(4), Sampling(temperature=1.5, seed=3 + index), 6)
        assert [event.finished for event in own] == [None] * 5 + ["length"]


@pytest.mark.cover
def test_many_threads():
    """Requests come from several threads while the engine runs in its own; some are cancelled."""
    engine = make(slots=3)
    engine.start()
    handles: list[Handle] = []

    def client(seed: int) -> None:
        for n in range(4):
            handle = engine.submit(Request(prompt(20 + 40 * n, seed), DRAWN, max_new_tokens=6))
            if (seed + n) % 4 == 0:
                handle.cancel()
            else:
                handles.append(handle)
                check(handle)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    engine.stop()
    assert len(handles) == 12
    finished = engine.stats.finished
    assert finished["length"] >= 12 and sum(finished.values()) == 16


@pytest.mark.cover
@pytest.mark.parametrize("started", [False, True])
def test_stopping_drains_or_cancels(started):
    for drain in (True, False):
        engine = make(slots=1)
        handles = [engine.submit(Request(prompt(70, n), DRAWN, max_new_tokens=30)) for n in range(3)]
        if started:
            engine.start()
        engine.stop(drain=drain)
        for handle in handles:
            if drain:
                check(handle)
            else:
                assert handle.result(0)[0].finished in ("shutdown", "length")
        assert (engine.stats.waiting, engine.stats.reading, engine.stats.running) == (0, 0, 0)
        with pytest.raises(EngineStopped, match="accepts no more requests"):
            engine.submit(Request(prompt(4)))


def test_the_thread_survives_what_we_did_not_expect(caplog):
    """A mistake in the engine itself fails the requests that it met so far; the next ones are served."""
    engine = make()
    fails = threading.Event()

    def plan(*_: object) -> None:
        fails.set()
        raise ZeroDivisionError("a mistake")

    running = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=1000))
    engine.start()
    next(running.events(30))
    whole, engine.plan.shape_for = engine.plan.shape_for, plan
    failing = engine.submit(Request(prompt(6), GREEDY, max_new_tokens=3))
    assert fails.wait(30)
    for handle in (running, failing):
        assert handle.result(30)[0].error == "ZeroDivisionError: a mistake"
    engine.plan.shape_for = whole
    check(engine.submit(Request(prompt(6), GREEDY, max_new_tokens=3)))
    engine.stop()
    assert "a step of the engine failed" in caplog.text


def test_waiting_for_events_times_out():
    engine = make()
    handle = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=3))
    with pytest.raises(TimeoutError, match="no event of request 1 within"):
        next(handle.events(0.01))
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    finish(engine)
    assert [len(event.tokens) for event in handle.events(0.01)] == [1, 1, 1]
    assert torch.tensor(handle.result(0)[0].tokens).shape == (3,)


class Refusing:
    """A guide that cannot be copied."""

    finished = False

    def copy(self) -> "Refusing":
        raise RuntimeError("no copies")


def test_a_guide_that_cannot_be_copied_ends_its_request_alone():
    engine = make()
    failing = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=5, guide=Refusing(), n=2))
    other = engine.submit(Request(prompt(9), GREEDY, max_new_tokens=5))
    finish(engine)
    assert [found.error for found in failing.result(0)] == ["RuntimeError: no copies"] * 2
    check(other)


def test_a_pool_without_room_fails_the_request_once(caplog):
    """If the state cannot join, no continuation has had an event before its error, not even one that was at its end."""
    engine = make()
    join, engine.pool.join = engine.pool.join, None
    failing = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=5, n=2))
    engine.step()
    engine.pool.join = join
    finish(engine)
    for found in failing.result(0):
        assert (found.tokens, found.finished) == ([], "error")
    assert failing.pending() == []
    handle = engine.submit(Request(prompt(4), GREEDY, max_new_tokens=5))
    finish(engine)
    check(handle)


def test_a_cache_that_fails_costs_only_its_hits(caplog):
    class Broken(StateCache):
        def find(self, ids):
            raise OSError("the disk is gone")

        def keep(self, *_):
            raise OSError("the disk is full")

    engine = make(cache=Broken(2**20, SPACING))
    for _ in range(2):
        handle = engine.submit(Request(prompt(100), GREEDY, max_new_tokens=5))
        finish(engine)
        check(handle)
    assert "the disk is gone" in caplog.text and "the disk is full" in caplog.text
