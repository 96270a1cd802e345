"""Where a prompt leaves the path of an earlier one, a state is kept; it is read after all that somebody waits for."""

import time

import pytest
import torch
from serving_models import PATTERNS, SPACING, VOCAB, alone, model, prompt

from lineate.generation.choice import Sampling
from lineate.serving.batch import MOST_BRANCHES
from lineate.serving.cache import StateCache
from lineate.serving.engine import Engine
from lineate.serving.planning import Need, Plan, Shape
from lineate.serving.requests import Handle, Request

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
BEGINNING = prompt(100, seed=5)
ASIDE = len(BEGINNING) - SPACING
"""The tokens between the last cut and the place where prompts part."""


def parting(seed: int, length: int = 150) -> tuple[int, ...]:
    """Return a prompt that leaves the others after 100 tokens, which is between two cuts."""
    return (*BEGINNING, seed, *prompt(length - 101, seed=seed))


def make(**options) -> Engine:
    """Return an engine that has read a first prompt."""
    options = {"slots": 3, "context": 512, "spacing": SPACING, "poison": True, **options}
    engine = Engine(model("GGGA"), cache=StateCache(2**26, SPACING, poison=True), **options)
    submit(engine, parting(1))
    finish(engine)
    assert engine.stats.branch_tokens == 0
    return engine


def submit(engine: Engine, ids: tuple[int, ...], new: int = 4, **options) -> Handle:
    return engine.submit(Request(ids, DRAWN, max_new_tokens=new, **options))


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def step_to_first_token(engine: Engine, handle: Handle) -> None:
    while not handle.pending():
        engine.step()


def third(engine: Engine) -> int:
    """Return how many tokens of another prompt that parts at the same place are found."""
    handle = submit(engine, parting(9))
    finish(engine)
    (found,) = handle.result(0)
    assert tuple(found.tokens) == alone("GGGA", parting(9), DRAWN, 4)
    return found.cached_tokens


def test_it_is_read_after_the_first_token():
    engine = make()
    second = submit(engine, parting(2))
    step_to_first_token(engine, second)
    assert (engine.stats.waiting_branches, engine.stats.branch_tokens) == (1, 0)
    finish(engine)
    assert (engine.stats.waiting_branches, engine.stats.branch_tokens) == (0, ASIDE)
    assert tuple(second.result(0)[0].tokens) == alone("GGGA", parting(2), DRAWN, 4)
    assert third(engine) == len(BEGINNING)
    assert engine.stats.branch_tokens == ASIDE  # a state that is there is not read again


def test_an_answer_of_one_token_leaves_it_too():
    engine = make()
    submit(engine, parting(2), new=1)
    finish(engine)
    assert (engine.stats.branch_tokens, third(engine)) == (ASIDE, len(BEGINNING))


def test_prompts_that_wait_for_their_first_token_come_before_it():
    """Rows decode one token in every step, also in the one that reads on the side."""
    engine = make()
    second = submit(engine, parting(2), new=20)
    step_to_first_token(engine, second)
    long = submit(engine, prompt(5 * SPACING, seed=8), new=1)
    for _ in range(5):
        assert long.pending() == []
        engine.step()
        assert engine.stats.branch_tokens == 0 and len(second.pending()) == 1
    assert len(long.pending()) == 1
    engine.step()
    assert engine.stats.branch_tokens == ASIDE and len(second.pending()) == 1


def test_prompts_that_part_at_the_same_place_leave_one():
    engine = make()
    handles = [submit(engine, parting(n)) for n in (2, 3, 4)]
    finish(engine)
    assert engine.stats.branch_tokens == ASIDE
    for n, handle in zip((2, 3, 4), handles, strict=True):
        assert tuple(handle.result(0)[0].tokens) == alone("GGGA", parting(n), DRAWN, 4)
    assert third(engine) == len(BEGINNING)


def test_only_so_many_wait():
    """While prompts come one after another, the oldest branches are given up."""
    engine, places = make(), range(1, MOST_BRANCHES - 1)
    for place in (*places, *range(SPACING + 1, SPACING + 6)):
        submit(engine, (*parting(1)[:place], (parting(1)[place] + 1) % VOCAB), new=1)
    most = 0
    while engine.step():
        most = max(most, engine.stats.waiting_branches)
    assert most == MOST_BRANCHES
    assert engine.stats.branch_tokens == sum(places[3:]) + sum(range(1, 6))


def test_a_cancelled_request_leaves_none():
    for other in (False, True):  # which wants the same state
        engine = make()
        second = submit(engine, parting(2), new=20, n=2)
        step_to_first_token(engine, second)
        if other:
            step_to_first_token(engine, submit(engine, parting(3)))
        second.cancel()
        finish(engine)
        assert engine.stats.branch_tokens == (ASIDE if other else 0)
        assert third(engine) == (len(BEGINNING) if other else SPACING)


def test_a_request_that_is_cancelled_after_its_end_leaves_one():
    engine = make()
    second = submit(engine, parting(2), new=1)
    step_to_first_token(engine, second)
    second.cancel()
    finish(engine)
    assert (second.result(0)[0].finished, engine.stats.branch_tokens) == ("length", ASIDE)


@pytest.mark.parametrize("drain", [False, True])
def test_an_engine_that_stops_reads_none(drain):
    engine = make()
    second = submit(engine, parting(2))
    step_to_first_token(engine, second)
    engine.stop(drain=drain)
    assert second.result(0)[0].finished == ("length" if drain else "cancelled")
    assert (engine.stats.waiting_branches, engine.stats.branch_tokens) == (0, 0) and not engine.step()


def test_an_engine_in_its_thread_reads_it_without_requests():
    engine = make()
    engine.start()
    submit(engine, parting(2), new=1).result(60)
    for _ in range(6000):
        if engine.stats.branch_tokens:
            break
        time.sleep(0.01)
    (found,) = submit(engine, parting(9), new=1).result(60)
    engine.stop(timeout=60)
    assert (found.cached_tokens, engine.stats.branch_tokens) == (len(BEGINNING), ASIDE)


def test_without_the_state_at_the_cut_none_is_read():
    engine = make()
    second = submit(engine, parting(2))
    step_to_first_token(engine, second)
    engine.cache.clear()
    finish(engine)
    assert engine.stats.branch_tokens == 0
    assert tuple(second.result(0)[0].tokens) == alone("GGGA", parting(2), DRAWN, 4)


def test_a_branch_before_the_first_cut_needs_no_state():
    engine = make()
    for seed, cached in ((20, 0), (21, 30)):
        ids = prompt(90, seed=seed, begins=(*BEGINNING[:30], seed))
        handle = submit(engine, ids)
        step_to_first_token(engine, handle)
        assert handle.completions[0].cached_tokens == cached
        finish(engine)
    assert engine.stats.branch_tokens == 30


@pytest.mark.parametrize("fails", [False, True])
def test_a_fault_that_passes_leaves_none(fails, monkeypatch, caplog):
    """The request is answered whatever becomes of the state on the side; a state with NaN is not kept."""
    engine = make()
    lm = engine.model
    second = submit(engine, parting(2), new=1)
    step_to_first_token(engine, second)
    real = lm.hidden

    def faulty(x, state=None):
        if fails:
            raise RuntimeError("a fault")
        return real(x, state)[0] * torch.nan, real(x, state)[1]

    with monkeypatch.context() as patch:
        patch.setattr(lm, "hidden", faulty)
        finish(engine)
    assert second.result(0)[0].finished == "length"
    assert ("a fault" in caplog.text) == fails
    assert third(engine) == SPACING


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_its_state_has_the_bits_of_reading_from_the_cut(pattern):
    lm, cache = model(pattern), StateCache(2**26, SPACING, poison=True)
    engine = Engine(lm, slots=2, context=512, spacing=SPACING, cache=cache)
    for n in (1, 2):
        submit(engine, parting(n))
        finish(engine)
    found = cache.find(parting(3))
    assert (found.length, found.kind) == (len(BEGINNING), "branch")
    state = None
    for piece in (BEGINNING[:SPACING], BEGINNING[SPACING:]):
        _, state = lm.hidden(lm.embed(torch.tensor([piece])), state)
    for a, b in zip(found.state.layers, state.layers, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a.names)


def test_a_branch_that_no_longer_fits_is_not_read():
    """After the prompt, a request with a long answer takes the memory that reading on the side would need."""
    plan = Plan(model("GGGA"), 1, 2048, None)
    memory = plan.pool_nbytes(Shape(1, plan.capacity(151))) + plan.reading_nbytes(Need(1, 150, 151, True))
    for crowded in (False, True):
        engine = make(slots=1, context=2048, memory_bytes=memory)
        submit(engine, parting(2), new=1)
        more = submit(engine, prompt(5), new=engine.plan.most_tokens(1, 5) - 5) if crowded else None
        for _ in range(6):
            engine.step()
        if more is not None:
            assert len(more.pending()) > 1
            more.cancel()
        finish(engine)
        assert engine.stats.branch_tokens == (0 if crowded else ASIDE)
