"""Admission by bytes: what is allocated is what was planned, and never more than there is."""

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import DraftModel
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.planning import Need, Plan, Shape
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import Request, TooLong
from tests.support.marks import slow_but
from tests.support.serving_models import PATTERNS, SPACING, VOCAB, alone, model, prompt

patterns = pytest.mark.parametrize("pattern", PATTERNS)
DRAWN = Sampling(temperature=1.5, seed=3)


@patterns
def test_a_prompt_being_read_has_the_planned_bytes(pattern):
    """From its first piece on there is room for the whole prompt, and nothing more, with and without the cache."""
    lm, cache = model(pattern), StateCache(2**26, SPACING)
    for length in (30, 64, 200):
        for ids in (prompt(length), prompt(length, seed=4, begins=prompt(length)[:100])):
            reading = Reading(lm, ids, SPACING, cache)
            reading.look_up()
            while not reading.done:
                reading.advance()
                assert reading.position == 0 or reading.nbytes == lm.state_nbytes(1, len(ids))
            if reading.position == len(ids):
                assert 2 * reading.nbytes == Plan(lm, 1, 256, None).reading_nbytes(Need(1, len(ids), 0, True))


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("pattern", ["GGGA", "LRDG"])
@pytest.mark.parametrize("times", [1.0, 1.5, 20.0])
def test_memory_is_never_exceeded(pattern, times):
    """Requests of all sizes pass through however much memory there is, if each fits alone."""
    lm = model(pattern)
    wishes = [(10, 5, 1), (100, 4, 1), (64, 8, 2), (3, 3, 3), (200, 2, 1), (20, 12, 1), (5, 5, 4)]
    plan = Plan(lm, 4, 512, None)
    most = max(
        plan.pool_nbytes(Shape(n, plan.capacity(length + new))) + plan.reading_nbytes(Need(n, length, 0, True))
        for length, new, n in wishes
    )
    memory = int(most * times)
    engine = Engine(lm, slots=4, context=512, memory_bytes=memory, spacing=SPACING, poison=True)
    assert engine.pool.allocated <= memory
    requests = [Request(prompt(length, seed=length), DRAWN, new, n=n) for length, new, n in wishes]
    handles = [engine.submit(request) for request in requests]
    together = 0
    while engine.step():
        pool = engine.pool
        assert pool.allocated <= pool.nbytes(pool.rows, pool.capacity)
        assert plan.pool_nbytes(Shape(pool.rows, pool.capacity)) <= memory
        together = max(together, engine.stats.running)
    assert together >= (4 if times > 1 else 1)
    for handle, (length, new, _) in zip(handles, wishes, strict=True):
        for i, found in enumerate(handle.result(0)):
            sampling = Sampling(temperature=1.5, seed=3 + i)
            assert tuple(found.tokens) == alone(pattern, prompt(length, seed=length), sampling, new)


@patterns
def test_what_fits_is_exact(pattern):
    """A request is refused with the number of tokens that would fit; that number fits, and one more does not."""
    lm, plan = model(pattern), Plan(model(pattern), 2, 512, None)
    memory = plan.pool_nbytes(Shape(1, plan.capacity(120))) + plan.reading_nbytes(Need(1, 30, 0, True))
    engine = Engine(lm, slots=2, context=512, memory_bytes=memory, spacing=SPACING)
    if not any("t" in spec.shape for layer in lm.state_spec for spec in layer):
        assert engine.plan.most_tokens(1, 30) == 512  # memories do not grow
        return
    with pytest.raises(TooLong, match="must fit into the memory, 128 tokens in all") as caught:
        engine.submit(Request(prompt(30), DRAWN, max_new_tokens=99))
    assert caught.value.fits == 128
    handle = engine.submit(Request(prompt(30), DRAWN, max_new_tokens=98))
    for _ in range(4):
        engine.step()
    assert tuple(x for event in handle.pending() for x in event.tokens) == alone(pattern, prompt(30), DRAWN, 5)
    with pytest.raises(TooLong):
        engine.submit(Request(prompt(30), DRAWN, max_new_tokens=5, n=2))


def test_enough_memory_is_allocated_once():
    """With memory for all slots at the full context, the pool is never resized."""
    lm, plan = model("GGGA"), Plan(model("GGGA"), 3, 256, None)
    enough = plan.pool_nbytes(Shape(3, 256)) + 2 * lm.state_nbytes(1, 256)
    for memory, shape in ((None, (3, 256)), (enough, (3, 256)), (enough - 1, (1, 64))):
        engine = Engine(lm, slots=3, context=256, memory_bytes=memory, spacing=SPACING)
        assert (engine.pool.rows, engine.pool.capacity) == shape


@patterns
@torch.no_grad()
def test_resizing_stays_within_its_bytes(pattern):
    """The bytes that resize plans bound every moment: the tensors that exist, old and new."""
    lm = model(pattern)
    state = lm(torch.tensor([prompt(40)]), last_only=True).state
    for old, new in (((2, 64), (4, 256)), ((4, 256), (2, 64)), ((3, 128), (3, 192))):
        pool = Pool(lm, *old)
        pool.join(state, 2)
        planned = pool.resize_nbytes(*new)
        assert planned >= max(
            pool.allocated, lm.state_nbytes(2, 0) + lm.state_nbytes(new[0], new[1]) - lm.state_nbytes(new[0], 0)
        )
        pool.resize(*new)
        assert pool.allocated <= planned


@pytest.mark.parametrize("draft", slow_but(["GGGA", "TPNC", "LRDG", "EA"], ("GGGA", "EA")))
def test_a_drafter_that_is_a_model_is_planned_for(draft):
    """Its states never take more than was planned, and fewer rows are admitted where they would not fit."""
    lm, small = model("GGGA"), DraftModel(model(draft), VOCAB)
    engine = Engine(lm, slots=3, context=256, spacing=SPACING, drafter=small, most_guesses=3)
    handles = [
        engine.submit(Request(prompt(n, seed=n), Sampling(temperature=1.5, seed=n), max_new_tokens=30))
        for n in (5, 90, 40, 7)
    ]
    most = 0
    while engine.step():
        most = max(most, small.nbytes)
        assert small.nbytes <= engine.pool.rows * small.row_nbytes(engine.pool.capacity, 3)
    assert most > 0 and small.nbytes == 0
    assert all(len(handle.result(0)[0].tokens) == 30 for handle in handles)

    plan = Plan(lm, 3, 64, None, 3, lambda tokens: small.row_nbytes(tokens, 3))
    enough = plan.pool_nbytes(Shape(1, 64)) + 2 * plan.reading_nbytes(Need(1, 20, 0, True))
    together = {}
    for drafter in (None, small):
        engine = Engine(
            lm, slots=3, context=64, memory_bytes=enough, spacing=SPACING, drafter=drafter, most_guesses=3,
        )  # fmt: skip
        for n in range(2):
            engine.submit(Request(prompt(20, seed=n), DRAWN, max_new_tokens=20))
        together[drafter] = 0
        while engine.step():
            together[drafter] = max(together[drafter], engine.stats.running)
    assert together == {None: 2, small: 1}
