"""An answer is read again in pieces while the engine has nothing else to do, so that the next turn begins after it."""

import time
from collections.abc import Callable

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.answers import MOST_ANSWERS, Answer
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.planning import Need, Plan, Shape
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import Handle, Request
from tests.support.kept_states import same
from tests.support.serving_models import PATTERNS, SPACING, alone, model, prompt

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
QUESTION = prompt(100, seed=5)
NEW = 40
"""With an answer of so many tokens, the text ends in the third piece; its second piece is read again."""
LONG = 170
"""With this one it ends in the fifth piece; three are read again."""


def make(pattern: str = "GGGA", **options) -> Engine:
    options = {"slots": 3, "context": 512, "spacing": SPACING, "poison": True, **options}
    return Engine(model(pattern), **{"cache": StateCache(2**26, SPACING, poison=True), **options})


def submit(engine: Engine, ids: tuple[int, ...] = QUESTION, new: int = NEW, **options) -> Handle:
    return engine.submit(Request(ids, options.pop("sampling", DRAWN), max_new_tokens=new, **options))


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def answer(engine: Engine, handle: Handle) -> tuple[int, ...]:
    """Step until a request has ended; return the prompt and the answer."""
    while not all(found.finished for found in handle.completions):
        handle.pending()
        engine.step()
        handle.pending()
    return (*handle.request.ids, *handle.completions[0].tokens)


def counts(engine: Engine) -> tuple[int, int]:
    """Return how many answers wait, and how many tokens were read again."""
    return engine.stats.waiting_answers, engine.stats.reread_tokens


def next_turn(engine: Engine, text: tuple[int, ...]) -> int:
    """Return how many tokens the next turn finds; its tokens must be those of a fresh engine."""
    ids = (*text, 1, 2, 3)
    handle = submit(engine, ids, 4)
    finish(engine)
    (found,) = handle.result(0)
    assert tuple(found.tokens) == alone("GGGA", ids, DRAWN, 4)
    return found.cached_tokens


def test_it_is_read_when_the_answer_is_complete():
    engine = make()
    text = answer(engine, submit(engine))
    assert counts(engine) == (1, 0)
    assert not engine.step() and counts(engine) == (0, SPACING)
    assert next_turn(engine, text) == 2 * SPACING
    assert counts(engine) == (0, SPACING)  # a text that ends in the last piece of its prompt has nothing to read


@pytest.mark.cover
def test_a_step_reads_one_piece():
    engine = make()
    answer(engine, submit(engine, new=LONG))
    for n in range(3):
        assert counts(engine) == (1, n * SPACING)
        assert engine.step() == (n < 2)
    assert counts(engine) == (0, 3 * SPACING)


def test_it_waits_while_anything_else_runs():
    """Neither the row that decodes nor the prompt that is read waits for it."""
    engine = make()
    other = submit(engine, prompt(5), 100)
    text = answer(engine, submit(engine))
    long = submit(engine, prompt(4 * SPACING, seed=8), 1)
    while engine.stats.reading or engine.stats.running or engine.stats.waiting:
        assert engine.stats.reread_tokens == 0
        engine.step()
    assert (other.result(0)[0].finished, long.result(0)[0].finished) == ("length", "length")
    assert counts(engine) == (2, 0)
    finish(engine)
    assert counts(engine) == (0, 2 * SPACING)  # of both answers
    assert next_turn(engine, text) == 2 * SPACING


def test_it_goes_on_after_a_request_that_came_in_the_middle():
    engine = make()
    text = answer(engine, submit(engine, new=LONG))
    engine.step()
    assert counts(engine) == (1, SPACING)
    between = submit(engine, prompt(10, seed=7), 10)
    engine.step()
    assert len(between.pending()) > 0  # it was admitted at once
    answer(engine, between)
    assert counts(engine) == (1, SPACING)
    finish(engine)
    assert counts(engine) == (0, 3 * SPACING)  # no piece twice
    assert next_turn(engine, text) == 4 * SPACING


@pytest.mark.cover
def test_the_next_turn_may_come_before_it_is_read():
    """It begins after the pieces that were read, and reads the others; then nothing is left to read."""
    engine = make()
    text = answer(engine, submit(engine, new=LONG))
    engine.step()
    assert next_turn(engine, text) == 2 * SPACING
    assert counts(engine) == (0, SPACING)


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_without_the_state_before_it_nothing_is_read(when):
    engine = make()
    text = answer(engine, submit(engine, new=LONG))
    if when == "in the middle":
        engine.step()
        answer(engine, submit(engine, prompt(4), 2))  # a request between frees the state
    read = engine.stats.reread_tokens
    engine.cache.clear()
    finish(engine)
    assert counts(engine) == (0, read) and engine.cache.find(text) is None


def test_after_a_prompt_of_less_than_a_piece_no_state_is_needed():
    engine = make()
    text = answer(engine, submit(engine, QUESTION[:30]))
    engine.cache.clear()
    finish(engine)
    assert counts(engine) == (0, SPACING)
    assert next_turn(engine, text) == SPACING


@pytest.mark.parametrize(
    ("length", "new", "read"), [(100, 27, 0), (100, 28, 64), (64, 63, 0), (64, 64, 64), (63, 1, 64)]
)
def test_only_whole_pieces_after_the_prompt_are_read(length, new, read):
    engine = make()
    submit(engine, QUESTION[:length], new)
    finish(engine)
    assert counts(engine) == (0, read)


@pytest.mark.parametrize("how", ["stop", "length", "timeout", "cancelled"])
def test_which_answers_are_read(how):
    now = 0.0
    engine = make(clock=lambda: now)
    handle = submit(engine, new=NEW if how == "length" else LONG, timeout=10)
    while how != "length" and len(handle.completions[0].tokens) < NEW:
        engine.step()
        handle.pending()
    if how == "timeout":
        now = 11.0
    elif how != "length":
        (handle.stop if how == "stop" else handle.cancel)()
    finish(engine)
    assert handle.result(0)[0].finished == how
    assert counts(engine) == (0, 0 if how == "cancelled" else SPACING)


def test_a_request_that_is_cancelled_after_its_end_is_read():
    engine = make()
    handle = submit(engine)
    answer(engine, handle)
    handle.cancel()
    finish(engine)
    assert counts(engine) == (0, SPACING)


def test_a_longer_text_takes_the_place_of_a_shorter_one():
    engine = make()
    busy = submit(engine, prompt(5), 300)
    text = answer(engine, submit(engine))
    assert counts(engine) == (1, 0)
    longer = answer(engine, submit(engine, (*text, 9), 60))
    assert counts(engine) == (1, 0)
    busy.cancel()
    finish(engine)
    assert len(longer) // SPACING == 3 and counts(engine) == (0, SPACING)  # the prompt's pieces are there
    assert next_turn(engine, longer) == 3 * SPACING


def test_equal_answers_are_read_once():
    engine = make()
    answer(engine, submit(engine, n=3, sampling=GREEDY))
    assert counts(engine) == (1, 0)
    finish(engine)
    assert counts(engine) == (0, SPACING)


def test_different_answers_are_each_read():
    engine = make()
    handle = submit(engine, n=3)
    finish(engine)
    assert counts(engine) == (0, 3 * SPACING)
    for found in handle.result(0):
        assert engine.cache.find((*QUESTION, *found.tokens, 0)).length == 2 * SPACING


@pytest.mark.cover
def test_only_so_many_wait():
    """While another request keeps the engine busy, the oldest answers are given up."""
    engine = make(slots=8)
    busy = submit(engine, prompt(5), 500)
    handles = [submit(engine, prompt(61, seed=n), 3) for n in range(MOST_ANSWERS + 3)]
    texts = [answer(engine, handle) for handle in handles]
    assert counts(engine) == (MOST_ANSWERS, 0)
    busy.cancel()
    finish(engine)
    assert counts(engine) == (0, MOST_ANSWERS * SPACING)
    assert [engine.cache.find((*text, 0)) is not None for text in texts] == [False] * 3 + [True] * MOST_ANSWERS


@pytest.mark.cover
@pytest.mark.parametrize("end", [Engine.close, Engine.stop, lambda engine: engine.stop(drain=False)])
def test_an_engine_that_ends_reads_none(end: Callable[[Engine], None]):
    for steps in (0, 1):
        engine = make()
        answer(engine, submit(engine, new=LONG))
        for _ in range(steps):
            engine.step()
        end(engine)
        assert not engine.step() and engine.stats.reread_tokens == steps * SPACING
        engine.stop()
        assert counts(engine) == (0, steps * SPACING)


def test_an_engine_in_its_thread_reads_it_without_requests():
    engine = make()
    engine.start()
    (found,) = submit(engine, new=LONG).result(60)
    for _ in range(6000):
        if counts(engine) == (0, 3 * SPACING):
            break
        time.sleep(0.01)
    (following,) = submit(engine, (*QUESTION, *found.tokens, 9), 1).result(60)
    engine.stop(timeout=60)
    assert (following.cached_tokens, *counts(engine)) == (4 * SPACING, 0, 3 * SPACING)


def test_without_a_cache_none_is_read():
    engine = make(cache=None)
    answer(engine, submit(engine))
    assert counts(engine) == (0, 0) and not engine.step()


@pytest.mark.parametrize("fails", [False, True])
def test_a_fault_that_passes_leaves_none(fails, monkeypatch, caplog):
    """A state whose logits are not finite is not kept; nor is one that cannot be made."""
    engine = make()
    lm = engine.model
    text = answer(engine, submit(engine))
    real = lm.hidden

    def faulty(x, state=None):
        if fails:
            raise RuntimeError("a fault")
        return real(x, state)[0] * torch.nan, real(x, state)[1]

    with monkeypatch.context() as patch:
        patch.setattr(lm, "hidden", faulty)
        finish(engine)
    assert ("a fault" in caplog.text) == fails and engine.stats.waiting_answers == 0
    assert next_turn(engine, text) == SPACING


@pytest.mark.cover
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_its_states_have_the_bits_of_reading_the_text(pattern):
    """Whatever else was decoded with it, and though a request came in the middle."""
    engine = make(pattern)
    submit(engine, prompt(20, seed=9), 30)
    text = answer(engine, submit(engine, new=110))
    while engine.stats.reread_tokens < SPACING:
        engine.step()
    submit(engine, prompt(30, seed=10), 3)
    finish(engine)
    for pieces in (2, 3):
        ids = text[: pieces * SPACING]
        found, fresh = engine.cache.find(ids), Reading(engine.model, ids, SPACING)
        while not fresh.done:
            fresh.advance()
        assert found.length == len(ids) and same(found.state, fresh.state)
        assert torch.equal(found.logits, fresh.logits)


def test_an_answer_that_no_longer_fits_is_not_read():
    """After the answer, a longer one takes the memory that reading would need; the pool keeps it."""
    plan = Plan(model("GGGA"), 1, 2048, None)
    memory = plan.pool_nbytes(Shape(1, plan.capacity(140))) + plan.reading_nbytes(Need(1, 100, 140, True))
    memory = max(memory, plan.pool_nbytes(Shape(1, plan.capacity(140))) + plan.reading_nbytes(Need(0, 128, 0, True)))
    for crowded in (False, True):
        engine = make(slots=1, context=2048, memory_bytes=memory)
        first = submit(engine)
        more = submit(engine, prompt(5), engine.plan.most_tokens(1, 5) - 5) if crowded else None
        answer(engine, first)
        if more is not None:
            engine.step()
            assert len(more.pending()) > 0
            more.cancel()
        finish(engine)
        assert counts(engine) == (0, 0 if crowded else SPACING)


@pytest.mark.cover
def test_its_state_is_freed_before_the_pool_grows(monkeypatch):
    """The plan counts no answer next to a request that is admitted."""
    engine = make()
    answer(engine, submit(engine, prompt(20), 4 * SPACING))
    engine.step()
    assert counts(engine) == (1, SPACING)
    order: list[str] = []
    pause, shape_for = Answer.pause, Plan.shape_for
    monkeypatch.setattr(Answer, "pause", lambda own: (order.append("pause"), pause(own))[1])
    monkeypatch.setattr(Plan, "shape_for", lambda *given: (order.append("plan"), shape_for(*given))[1])
    submit(engine, prompt(5, seed=3), 4)
    finish(engine)
    assert order[:2] == ["pause", "plan"]


@pytest.mark.cover
def test_a_cache_without_room_ends_the_reading():
    """Otherwise each answer would be read whole, and nothing of it be kept."""
    engine = make(cache=StateCache(1000, SPACING))
    answer(engine, submit(engine, prompt(20), 3 * SPACING))
    finish(engine)
    assert counts(engine) == (0, SPACING)
