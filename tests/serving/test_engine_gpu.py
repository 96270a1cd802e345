"""The pool and the engine on a GPU: steps are CUDA graphs, one for each number of rows and window."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from lineate.decoding import in_place
from lineate.generation.choice import Draws, Sampling, adjusted, choose_tokens
from lineate.models import HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.requests import Event, Handle, Request
from tests.support.serving_models import PATTERNS, SPACING, VOCAB, model, prompt

pytestmark = pytest.mark.gpu
patterns = pytest.mark.parametrize("pattern", PATTERNS)


SAMPLINGS = (
    Sampling(temperature=0), Sampling(temperature=1.5, seed=3), Sampling(temperature=1.2, top_p=0.9, seed=5),
    Sampling(temperature=1.5, top_k=20, seed=6),
    Sampling(temperature=1.5, frequency_penalty=1.0, logit_bias=((3, 2.0),), seed=7),
)  # fmt: skip


def on_gpu(pattern: str) -> HybridLM:
    return copy.deepcopy(model(pattern)).cuda()


@contextmanager
def no_waiting() -> Iterator[None]:
    """While it is entered, what waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@patterns
@torch.no_grad()
def test_rows_are_continued_as_if_alone(pattern, monkeypatch):
    """Five rows run in the graph of eight; rows leave and join, and attention's window widens on the way."""
    monkeypatch.setattr(in_place, "WINDOW_STEP", 16)
    lm = on_gpu(pattern)
    pool, states = Pool(lm, 8, 128, poison=True), []
    generator = torch.Generator().manual_seed(1)
    for n, length in enumerate((3, 40, 11, 5, 70, 9, 20, 1)):
        states.append(lm(torch.tensor([prompt(length, seed=n)]).cuda(), last_only=True).state)
        pool.join(states[-1])
        assert pool.allocated == pool.nbytes(8, 128)
        for _ in range(3):
            tokens = torch.randint(VOCAB, (len(states),), generator=generator).tolist()
            logits = pool.step(tokens)
            for row, token in enumerate(tokens):
                out = lm(torch.tensor([[token]]).cuda(), state=states[row])
                torch.testing.assert_close(logits[row], out.logits[0, 0], rtol=1e-3, atol=1e-3)
                states[row] = out.state
        if n in (3, 5):
            pool.leave(1)
            states[1] = states.pop()
    ids = torch.randint(VOCAB, (len(states), 3), generator=generator)
    logits = pool.trail(ids.tolist())
    counts = [n % 4 for n in range(len(states))]
    pool.accept(counts)
    for row, count in enumerate(counts):
        for t in range(count):
            out = lm(ids[row : row + 1, t : t + 1].cuda(), state=states[row])
            torch.testing.assert_close(logits[row, t], out.logits[0, 0], rtol=1e-3, atol=1e-3)
            states[row] = out.state
    pool.resize(6, 256)
    logits = pool.step([1] * len(states))
    for row, state in enumerate(states):
        expected = lm(torch.tensor([[1]]).cuda(), state=state).logits[0, 0]
        torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_short_trail_after_a_long_one():
    """A graph of three tokens is recorded, and replayed with a row that has left, after five tokens were accepted."""
    lm = on_gpu("GA")
    pool, states = Pool(lm, 4, 64), []
    for n in range(3):
        states.append(lm(torch.tensor([prompt(5 + n, seed=n)]).cuda(), last_only=True).state)
        pool.join(states[-1])
    generator = torch.Generator().manual_seed(1)
    for t, counts in ((5, [5, 5, 5]), (3, [1, 3]), (5, [0, 4]), (3, [2, 2])):
        ids = torch.randint(VOCAB, (len(counts), t), generator=generator)
        logits = pool.trail(ids.tolist())
        pool.accept(counts)
        for row, count in enumerate(counts):
            for i in range(count):
                out = lm(ids[row : row + 1, i : i + 1].cuda(), state=states[row])
                torch.testing.assert_close(logits[row, i], out.logits[0, 0], rtol=1e-3, atol=1e-3)
                states[row] = out.state
        if len(counts) == 3:
            pool.leave(2)


@patterns
@pytest.mark.parametrize("drafter", [None, PromptLookup(n=1)], ids=["plain", "guesses"])
def test_tokens_do_not_depend_on_what_else_runs(pattern, drafter):
    lm = on_gpu(pattern)
    engine = Engine(
        lm, slots=3, context=256, spacing=SPACING, cache=StateCache(2**26, SPACING, poison=True), drafter=drafter,
        poison=True,
    )  # fmt: skip
    lengths = [(1, 3), (64, 1), (65, 2), (200, 1), (130, 1)]
    for _ in range(2):
        handles = []
        for length, n in lengths:
            sampling = Sampling(temperature=1.5, seed=length)
            handles.append(engine.submit(Request(prompt(length, seed=length), sampling, max_new_tokens=10, n=n)))
            engine.step()
        while engine.step():
            pass
        for handle in handles:
            for n, found in enumerate(handle.result(0)):
                alone = Engine(lm, slots=1, context=256, spacing=SPACING)
                sampling = replace(handle.request.sampling, seed=handle.request.sampling.seed + n)
                expected = alone.submit(replace(handle.request, sampling=sampling, n=1))
                while alone.step():
                    pass
                assert found.tokens == expected.result(0)[0].tokens


def tokens_alone(lm: HybridLM, request: Request, count: int) -> list[int]:
    """Return what a request yields that has an engine to itself, where nothing is under way."""
    engine = Engine(lm, slots=1, context=512, spacing=SPACING, overlap=False)
    handle = engine.submit(replace(request, max_new_tokens=count, stop_tokens=frozenset()))
    while engine.step():
        pass
    return handle.result(0)[0].tokens


@pytest.mark.parametrize("pattern", ["GGGA", "KKKM, experts", "TPNC"])
def test_rows_change_while_a_step_is_under_way(pattern):
    """Requests join, end by their length or a stop token, are cancelled and stopped; the pool grows meanwhile.

    Whatever happens between two steps happens while the device computes the next one.
    """
    lm, states = on_gpu(pattern), StateCache(2**26, SPACING, poison=True)
    engine = Engine(lm, slots=6, context=512, spacing=SPACING, cache=states, poison=True)
    handles: list[Handle] = []
    events: dict[int, list[Event]] = {}

    def submit(length: int, new: int, which: int, stop_tokens: frozenset[int] = frozenset()) -> Handle:
        request = Request(prompt(length, seed=length), SAMPLINGS[which], new, stop_tokens)
        own = events.setdefault(len(handles) + 1, [])
        handles.append(engine.submit(request, own.append))
        return handles[-1]

    for which, length in enumerate((3, 70, 9, 130, 20)):
        submit(length, 40, which)
        engine.step()
    for _ in range(8):
        engine.step()
    short, cancelled, stopped = submit(5, 4, 1), handles[0], handles[1]
    expected = tokens_alone(lm, Request(prompt(11, seed=11), SAMPLINGS[1]), 20)
    submit(11, 20, 1, frozenset(expected[6:7]))
    for _ in range(3):
        engine.step()
    cancelled.cancel()
    engine.step()
    stopped.stop()
    submit(200, 10, 0)
    for _ in range(3):
        engine.step()
    submit(300, 30, 2)  # needs a larger pool
    while engine.step():
        pass
    for handle in handles:
        own = events[handle.number]
        tokens = [token for event in own for token in event.tokens]
        assert [event.finished for event in own[:-1]] == [None] * (len(own) - 1) and own[-1].finished is not None
        assert tokens == tokens_alone(lm, handle.request, handle.request.max_new_tokens)[: len(tokens)]
        assert own[-1].finished != "length" or len(tokens) == handle.request.max_new_tokens
    finished = {handle.number: events[handle.number][-1].finished for handle in handles}
    assert finished[cancelled.number] == "cancelled" and finished[stopped.number] == "stop"
    assert finished[short.number] == "length" and finished[7] == "stop"
    answer = [token for event in events[stopped.number] for token in event.tokens]
    following = Request((*stopped.request.ids, *answer, 5), SAMPLINGS[1], max_new_tokens=8)
    handle = engine.submit(following)
    while engine.step():
        pass
    (found,) = handle.result(0)
    assert found.cached_tokens == (70 + len(answer)) // SPACING * SPACING
    assert found.tokens == tokens_alone(lm, following, 8)


def test_steps_and_draws_do_not_wait():
    """Reading a token of every row, drawing the next ones and a row that leaves; only recording a graph waits."""
    lm = on_gpu("GGGA")
    pool = Pool(lm, 8, 128)
    with torch.no_grad():
        for n in range(5):
            pool.join(lm(torch.tensor([prompt(5 + n, seed=n)]).cuda(), last_only=True).state)
    pool.step([1] * 5)
    with no_waiting():
        draws = Draws([sampling.resolved(VOCAB) for sampling in SAMPLINGS], torch.device("cuda"))
        logits = pool.step([1, 2, 3, 4, 5])
        positions = pool.positions.clone()
        changed = adjusted(logits, SAMPLINGS, [None] * 4 + [{1: 2, 5: 0}])
        drawn = draws.try_tokens(changed, positions)
        pool.step(drawn)
        pool.leave(1)
    assert positions.tolist() == [7, 8, 9, 10, 11]
    expected = choose_tokens(logits, SAMPLINGS, positions, [None] * 4 + [{1: 2, 5: 0}])
    assert torch.equal(drawn, expected)


def test_draws_that_do_not_wait_are_those_that_do():
    """Where a few candidates are enough; elsewhere they say so."""
    logits = torch.linspace(0.01, 12, 40)[:, None] * torch.randn(40, 30_000, generator=torch.Generator().manual_seed(3))
    logits, at = logits.cuda(), torch.arange(40).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype, copy=True)
        for row in (
            Sampling(temperature=0),
            Sampling(seed=1),
            Sampling(top_p=0.95, seed=2),
            Sampling(top_k=50, seed=3),
        ):
            found = Draws([row.resolved(30_000)] * 40, x.device).try_tokens(x, at)
            expected = choose_tokens(x, [row] * 40, at)
            assert ((found == expected) | (found == -1)).all()
            assert (found[-5:] == expected[-5:]).all()
        x[::2, 7] = torch.nan
        assert (Draws([SAMPLINGS[2].resolved(30_000)] * 40, x.device).try_tokens(x, at)[::2] == -1).all()
