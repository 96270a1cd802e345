"""The pool and the engine on a GPU: steps are CUDA graphs, one for each number of rows and window."""

import copy
from dataclasses import replace

import pytest
import torch
from serving_models import PATTERNS, SPACING, VOCAB, model, prompt

from lineate.generation import in_place
from lineate.generation.choice import Sampling
from lineate.models import HybridLM
from lineate.serving.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine import Engine
from lineate.serving.pool import Pool
from lineate.serving.requests import Request

pytestmark = pytest.mark.gpu
patterns = pytest.mark.parametrize("pattern", PATTERNS)


def on_gpu(pattern: str) -> HybridLM:
    return copy.deepcopy(model(pattern)).cuda()


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
