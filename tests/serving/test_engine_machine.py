"""Any order of requests, steps, cancellations, evictions and restarts yields the tokens of requests that run alone."""

import shutil
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lineate.generation.choice import Sampling
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import DraftRow, PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.planning import Need, Plan, Shape
from lineate.serving.engine.requests import Handle, Request
from tests.support.serving_models import SMALL, SPACING, VOCAB, alone, model, prompt

MOST, CONTEXT = 8, 256
BASE = prompt(160, seed=1)
# Prompts that share beginnings: they end before, at and after the cuts, and part on them and between them.
PROMPTS = [
    BASE[:1], BASE[:63], BASE[:64], BASE[:65], BASE[:130], BASE[:160], (*BASE[:64], 5, 6), (*BASE[:100], 7, 8, 9),
    (*BASE[:100], 8), (*BASE[:128], 3), prompt(20, seed=2), prompt(70, seed=3),
]  # fmt: skip
SAMPLINGS = [Sampling(temperature=0), Sampling(temperature=1.5, seed=3), Sampling(top_p=0.9, frequency_penalty=0.5)]


class Mixed:
    """Guesses right, wrong or not at all, by the length of the sequence."""

    needs_hidden = False

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        found = []
        for row in rows:
            right = next((x for x in PROMPTS if tuple(row.ids[: len(x)]) == x and len(row.ids) <= len(x) + MOST), None)
            answer = () if right is None else alone(self.pattern, right, row.sampling, MOST)
            guesses = list(answer[len(row.ids) - len(right or ()) :][:most])
            if len(row.ids) % 3 == 0:
                guesses = [(token + len(row.ids) % 2) % VOCAB for token in guesses]
            found.append(guesses)
        return found

    def forget(self, key: Hashable) -> None:
        pass


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine, and compares every continuation with one that ran alone."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.handles: list[Handle] = []
        self.checked = 0

    @initialize(
        pattern=st.sampled_from(sorted(SMALL)),
        slots=st.integers(1, 4),
        guesses=st.sampled_from(["none", "lookup", "mixed"]),
        budget=st.sampled_from([0.5, 3, 1000]),
        memory=st.sampled_from([1.0, 2.0, None]),
        spills=st.booleans(),
        overlap=st.booleans(),
    )
    def begin(self, pattern, slots, guesses, budget, memory, spills, overlap) -> None:
        lm = self.lm = model(pattern)
        self.pattern, self.slots, self.guesses, self.overlap = pattern, slots, guesses, overlap
        self.budget, self.spills = int(budget * lm.state_nbytes(1, 160)), spills
        plan = Plan(lm, slots, CONTEXT, None, 4)
        least = plan.pool_nbytes(Shape(slots, plan.capacity(CONTEXT))) + plan.reading_nbytes(Need(1, CONTEXT, 0, True))
        self.memory = None if memory is None else int(memory * least)
        self.start()

    def start(self) -> None:
        self.cache = StateCache(self.budget, SPACING, self.folder if self.spills else None, self.pattern, poison=True)
        drafter = {"none": None, "lookup": PromptLookup(n=1), "mixed": Mixed(self.pattern)}[self.guesses]
        self.engine = Engine(
            self.lm, slots=self.slots, context=CONTEXT, memory_bytes=self.memory, spacing=SPACING, cache=self.cache,
            drafter=drafter, overlap=self.overlap, poison=True,
        )  # fmt: skip

    @rule(which=st.integers(0, len(PROMPTS) - 1), how=st.integers(0, len(SAMPLINGS) - 1), new=st.integers(1, MOST))
    def submit(self, which, how, new) -> None:
        self.handles.append(self.engine.submit(Request(PROMPTS[which], SAMPLINGS[how], max_new_tokens=new)))

    @rule(which=st.integers(0, len(PROMPTS) - 1), n=st.integers(2, 3))
    def fork(self, which, n) -> None:
        request = Request(PROMPTS[which], SAMPLINGS[1], max_new_tokens=5, n=min(n, self.slots))
        self.handles.append(self.engine.submit(request))

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99), more=st.integers(1, 2))
    def next_turn(self, which, more) -> None:
        """Continue a conversation: the prompt, the answer so far, and a few more tokens."""
        handle = self.handles[which % len(self.handles)]
        handle.pending()
        ids = (*handle.request.ids, *handle.completions[0].tokens, *range(more))
        if len(ids) <= CONTEXT - MOST:
            self.handles.append(self.engine.submit(Request(ids, handle.request.sampling, max_new_tokens=3)))

    @rule(count=st.integers(1, 6))
    def step(self, count) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99), keeps=st.booleans())
    def end(self, which, keeps) -> None:
        handle = self.handles[-1 - which % len(self.handles)]
        (handle.stop if keeps else handle.cancel)()

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule(drain=st.booleans())
    def restart(self, drain) -> None:
        """Stop the engine, and begin again with a new one, and with what the cache has written to its folder."""
        self.engine.stop(drain=drain)
        self.cache.close()
        self.check_all()
        self.start()

    @invariant()
    def nothing_is_exceeded(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.cache.stats.bytes <= self.budget
        assert len(self.engine.pool) == self.engine.stats.running <= self.slots
        if self.memory is not None:
            assert self.engine.pool.allocated <= self.memory

    def check_all(self) -> None:
        """Check every request so far; the engine has nothing left to do."""
        for handle in self.handles:
            request = handle.request
            for n, found in enumerate(handle.result(0)):
                sampling = replace(request.sampling, seed=request.sampling.seed + n)
                whole = alone(self.pattern, request.ids, sampling, MOST)
                assert found.finished in ("length", "cancelled", "shutdown", "stop"), found
                assert len(found.tokens) == request.max_new_tokens or found.finished != "length"
                assert tuple(found.tokens) == whole[: len(found.tokens)], (request, found)
        self.checked += len(self.handles)
        self.handles.clear()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.stop()
            self.check_all()
            self.cache.close()
            assert len(self.engine.pool) == 0
        shutil.rmtree(self.folder)


def run(examples: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.cover
def test_any_schedule_gives_the_same_tokens():
    run(6)


@pytest.mark.slow
def test_a_thousand_schedules_give_the_same_tokens():
    run(1000)
