"""Every family of checkpoints and every kind of layer: a request yields the tokens of a fresh engine that has only it.

Batches, cache hits, evictions, files, restarts, forks, cancellations and guesses all happen in one run. Without
guesses, the log-probabilities have the same bits too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.layers import registry
from lineate.models import HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.identity import identity_of
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Completion, Handle, Request
from tests.support import serving_models
from tests.support.marks import slow_but
from tests.support.serving_models import PATTERNS, SPACING

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid")
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
SAMPLINGS = (GREEDY, DRAWN, Sampling(top_k=20, top_p=0.9, repetition_penalty=1.2, seed=8))
CONTEXT, MOST, TOP = 256, 8, 3
subjects = pytest.mark.parametrize("subject", [*FAMILIES, *PATTERNS])
Load = Callable[[str], HybridLM]


@cache
def theirs(family: str):
    """Return transformers' model of a family."""
    transformers = pytest.importorskip("transformers")
    from tests.support.families import build

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return build(family)


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Load:
    """Return a function that gives the model of a family, as transformers has saved it, or of a pattern."""

    @cache
    def loaded(subject: str) -> HybridLM:
        if subject in PATTERNS:
            return serving_models.model(subject)
        folder = tmp_path_factory.mktemp(subject)
        theirs(subject).save_pretrained(folder)
        return HybridLM.from_pretrained(folder, progress=False)

    return loaded


def base(lm: HybridLM, length: int = 140, seed: int = 0) -> tuple[int, ...]:
    drawn = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(lm.config.vocab_size, (length,), generator=drawn).tolist())


def finish(engine: Engine, *handles: Handle) -> list[Completion]:
    while engine.step():
        pass
    return [found for handle in handles for found in handle.result(0)]


@cache
def alone(lm: HybridLM, ids: tuple[int, ...], sampling: Sampling) -> Completion:
    """Return the most tokens that any request asks for, from a fresh engine that keeps nothing."""
    engine = Engine(lm, slots=1, context=CONTEXT, spacing=SPACING)
    (found,) = finish(engine, engine.submit(Request(ids, sampling, max_new_tokens=MOST, logprobs=TOP)))
    return found


def check(lm: HybridLM, handle: Handle, bits: bool) -> None:
    """Check that each continuation has the tokens of a fresh engine: all of them, or as many as it came to.

    bits: whether its log-probabilities must have the same bits; guessed tokens are read together, not one by one.
    """
    request = handle.request
    for n, found in enumerate(handle.result(0)):
        expected = alone(lm, request.ids, replace(request.sampling, seed=request.sampling.seed + n))
        assert found.finished in ("length", "cancelled"), found
        many = request.max_new_tokens if found.finished == "length" else len(found.tokens)
        assert found.tokens == expected.tokens[:many]
        assert not bits or found.logprobs == expected.logprobs[:many]


def requests(lm: HybridLM) -> list[Request]:
    """Return prompts that begin alike and part on a cut and between two, one that repeats itself, and forks."""
    ids = base(lm)
    prompts = [ids[:70], ids, (*ids[:64], 5, 6), ids[7:19] * 4, (*ids[:100], 1, 2)]
    counts = [(5, 1), (MOST, 1), (6, 2), (MOST, 1), (4, 1)]
    return [
        Request(own, SAMPLINGS[i % 3], max_new_tokens=new, n=n, logprobs=TOP)
        for i, (own, (new, n)) in enumerate(zip(prompts, counts, strict=True))
    ]


def run_all(lm: HybridLM, folder, budget: int, guesses: bool, rounds: int) -> None:
    """Run all requests at the same time, in rounds of another order, with a restart after each; check them all."""
    seen = {"evictions": 0, "spilled": 0, "restored": 0, "guesses": 0, "cached": 0}
    for n in range(rounds):
        states = StateCache(budget, SPACING, folder, identity_of(lm), poison=True)
        options = {"slots": 3, "context": CONTEXT, "spacing": SPACING, "poison": True}
        engine = Engine(lm, **options, cache=states, drafter=PromptLookup(n=1) if guesses else None)
        order = requests(lm)
        order = order[n:] + order[:n]
        handles = []
        for request in order:
            handles.append(engine.submit(request))
            engine.step()
            engine.step()
        cancelled = engine.submit(Request(base(lm, 90, seed=2), DRAWN, max_new_tokens=MOST, n=2, logprobs=TOP))
        while not any(event.tokens for event in cancelled.pending()):
            engine.step()
        cancelled.cancel()
        again = [engine.submit(replace(request, max_new_tokens=3, n=1)) for request in order[:2]]
        finish(engine)
        for handle in (*handles, cancelled, *again):
            check(lm, handle, bits=not guesses)
        assert engine.stats.finished == {"length": 8, "cancelled": 2}
        engine.stop()
        states.close()
        stats = states.stats
        now = {"evictions": stats.evictions, "spilled": stats.spilled, "restored": stats.restored}
        now |= {"guesses": engine.stats.guesses, "cached": engine.stats.cached_tokens}
        seen = {name: seen[name] + now[name] for name in seen}
    if budget >= 3 * lm.state_nbytes(1, 140):  # states share the entries of attention, so that all of them may fit
        del seen["evictions"]
    if not guesses:
        assert seen.pop("guesses") == 0
    assert all(seen.values()), seen


@pytest.mark.parametrize("subject", slow_but([*FAMILIES, *PATTERNS], ("qwen3_5_moe", *list(PATTERNS)[:1])))
@pytest.mark.parametrize("guesses", [False, True])
def test_nothing_depends_on_anything_else(subject, guesses, load, tmp_path):
    lm = load(subject)
    run_all(lm, tmp_path, int(2.5 * lm.state_nbytes(1, 140)), guesses, 2)


@pytest.mark.slow
@subjects
@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("budget", [1.2, 4, 100])
def test_in_many_orders(subject, guesses, budget, load, tmp_path):
    lm = load(subject)
    run_all(lm, tmp_path, int(budget * lm.state_nbytes(1, 140)), guesses, 5)


@pytest.mark.parametrize(
    "subject", slow_but([*FAMILIES, *PATTERNS], ("qwen3_next", "olmo_hybrid", "kimi_linear", *list(PATTERNS)[:2]))
)
def test_logits_from_a_kept_state_have_the_same_bits(subject, load, tmp_path):
    """All log-probabilities of the first token: from a state on the grid, from the prompt's end, and from files."""
    lm, ids = load(subject), base(load(subject))
    whole = Request(ids, DRAWN, max_new_tokens=1, logprobs=lm.config.vocab_size)
    plain = Engine(lm, slots=1, context=CONTEXT, spacing=SPACING)
    (expected,) = finish(plain, plain.submit(whole))
    assert len(expected.logprobs[0].top) == lm.config.vocab_size
    cached = []
    for n in range(2):
        states = StateCache(2**26, SPACING, tmp_path, identity_of(lm), poison=True)
        engine = Engine(lm, slots=3, context=CONTEXT, spacing=SPACING, cache=states, poison=True)
        if not n:
            finish(engine, engine.submit(Request((*ids[:130], 1, 2, 3), DRAWN, max_new_tokens=MOST)))
        engine.submit(Request(ids[50:], DRAWN, max_new_tokens=MOST, n=2))
        for _ in range(2):
            (found,) = finish(engine, engine.submit(whole))
            assert found.logprobs == expected.logprobs
            cached.append(found.cached_tokens)
        states.close()
    assert cached == [128, 140, 140, 140]


@pytest.mark.cover
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(family, load):
    """Its own generate, from one prompt that is continued from a kept state and one that is not."""
    lm = load(family)
    states = StateCache(2**26, SPACING, poison=True)
    engine = Engine(lm, slots=2, context=CONTEXT, spacing=SPACING, cache=states, drafter=PromptLookup(n=1))
    ids = base(lm)
    for prompt, cached in ((ids[:70], 0), ((*ids[:66], 1, 2), SPACING)):
        (found,) = finish(engine, engine.submit(Request(prompt, GREEDY, max_new_tokens=MOST)))
        options = {"max_new_tokens": MOST, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        given = torch.tensor([prompt])  # with a mask, as generate takes tokens that equal the padding for padding
        made = theirs(family).generate(given, attention_mask=torch.ones_like(given), **options)
        assert found.cached_tokens == cached
        assert found.tokens == made[0, len(prompt) :].tolist()


def test_all_letters_are_there():
    assert set("".join(config.pattern for config in PATTERNS.values())) == set(registry.letters())
