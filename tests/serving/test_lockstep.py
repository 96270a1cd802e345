"""One engine on several ranks: the tests of the engine on two ranks that share the model; and ranks that go astray."""

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from lineate.generation.choice import Sampling
from lineate.models.sharding import share_out_model
from lineate.parallel.job.link import JobEnded
from lineate.parallel.tensor.ranks import Ranks
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.peers import LinkedPeers
from lineate.serving.drafting import PromptLookup
from lineate.serving.drafting.predicting import PredictionDrafter
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.lockstep import Lockstep, plain_request, read_request
from lineate.serving.engine.requests import EngineStopped, Event, Handle, QueueFull, Request
from tests.support.linked import Linked
from tests.support.lockstep_ranks import Joined, leave, run_tests
from tests.support.ranks import run_ranks
from tests.support.serving_models import CONFIG, SPACING, Counting, alone, model, prompt
from tests.support.small_models import random_model

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)

SCENARIOS = {
    "speculation": ["test_engine_guesses.py::test_the_next_turn_continues_a_guessed_answer[GGGA]"],
    "cache": ["test_answers.py::test_it_goes_on_after_a_request_that_came_in_the_middle"],
    "fork": ["test_engine.py::test_one_of_several_continuations_is_cancelled"],
    "cancellation": ["test_engine.py::test_cancelling_frees_the_row_at_the_next_step"],
}
"""Tests of the fast suite, each of which takes a second."""
# Left out: tests that break something on one rank, that call the model outside of the engine, or that set the clock.
FILES = {
    "test_engine.py": "not kept_states and not the_bits and not log_prob and not deadlines and not errors",
    "test_engine_guesses.py": "not that_fails and not observe",
    "test_engine_overlap.py": "not fault and not cannot_begin and not interrupted and not deadline",
    "test_answers.py": "not fault and not bits and not which and not that_ends and not different and not so_many",
    "test_engine_failures.py": "many_threads or stopping_drains or listener",
    "test_engine_machine.py": "any_schedule",
    "test_reuse.py": "not chat and not what_the_next",
}


def run(names: list[str], *more: str) -> int:
    """Run tests of other files on two ranks; return how many passed."""
    code, passed, said = run_ranks(2, run_tests, names, list(more))[0]
    assert code == 0, said
    return passed


@pytest.mark.slow
def test_speculation_cache_fork_and_cancellation_on_two_ranks():
    names = [name for own in SCENARIOS.values() for name in own]
    assert run(names) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_engine_on_two_ranks(file):
    assert run([file], "-k", FILES[file]) > 0


def own_head(join: bool) -> list[list[int]]:
    """Return the tokens of an engine that guesses with the model's own head, on all ranks or in one process."""
    lm, link = random_model(replace(CONFIG, prediction=True)), None
    if join:
        joined = Joined()
        link, lm = joined.link, share_out_model(lm, Ranks(dist.group.WORLD)).eval()
    cache = StateCache(2**26, SPACING, peers=None if link is None else LinkedPeers(link))
    engine = Engine(lm, slots=3, context=512, spacing=SPACING, cache=cache, drafter=PredictionDrafter(lm))
    front = engine if link is None else Lockstep(engine, link)
    if link is not None and link.rank:
        front.follow()
        leave(link)
        return []
    handles = [front.submit(Request(prompt(100, n), (GREEDY, DRAWN)[n], max_new_tokens=12, n=1 + n)) for n in range(2)]
    while front.step():
        pass
    assert engine.stats.guesses > 0
    front.stop()
    if link is not None:
        leave(link)
    return [found.tokens for handle in handles for found in handle.result(0)]


@pytest.mark.slow
def test_the_models_own_head_guesses_on_two_ranks():
    assert run_ranks(2, own_head, True)[0] == own_head(False)


class Pair:
    """Two ranks in one process, each with the whole model; rank 1 follows in a thread.

    Args:
        patterns: The model of each rank.
        options: As Engine takes them; a function is called for each rank.
    """

    def __init__(self, *patterns: str, **options) -> None:
        self.linked = Linked(2)
        options = {"slots": 3, "context": 512, "spacing": SPACING, "poison": True, **options}
        self.engines = [
            Engine(model(pattern), **{key: x() if callable(x) else x for key, x in options.items()})
            for pattern in patterns or ("GA", "GA")
        ]
        fronts = zip(self.engines, self.linked.links, strict=True)
        self.front, self.follower = (Lockstep(engine, link, Counting.read) for engine, link in fronts)
        self.ended: list[str] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.follower.follow()
        except JobEnded as ended:
            self.ended.append(str(ended))

    def finish(self) -> None:
        while self.front.step():
            pass

    def stop(self) -> None:
        self.front.stop(drain=False)
        self.join()
        self.linked.close()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def check(handle: Handle, pattern: str = "GA") -> None:
    request = handle.request
    for n, found in enumerate(handle.result(30)):
        sampling = replace(request.sampling, seed=request.sampling.seed + n)
        assert (found.finished, found.error) == ("length", None)
        assert tuple(found.tokens) == alone(pattern, request.ids, sampling, request.max_new_tokens)


@pytest.mark.parametrize("started", [False, True])
def test_all_ranks_do_the_same(started):
    pair = Pair(cache=lambda: StateCache(2**26, SPACING, poison=True), drafter=lambda: PromptLookup(n=1))
    if started:
        pair.front.start()
    handles = [
        pair.front.submit(Request(prompt(100, n), (GREEDY, DRAWN)[n % 2], max_new_tokens=8 + n, n=1 + n % 2))
        for n in range(4)
    ]
    cancelled = pair.front.submit(Request(prompt(70), GREEDY))
    cancelled.cancel()
    guided = pair.front.submit(Request(prompt(9), DRAWN, guide=Counting(3, 6)))
    if not started:
        pair.finish()
    for handle in handles:
        check(handle)
    assert cancelled.result(30)[0].finished == "cancelled"
    assert (guided.result(30)[0].tokens, guided.result()[0].finished) == ([3, 4, 5, 6], "stop")
    pair.stop()
    first, second = (engine.stats for engine in pair.engines)
    assert first == second and first.new_tokens == sum((8 + n) * (1 + n % 2) for n in range(4)) + 4
    counts = [engine.cache.stats for engine in pair.engines]
    assert counts[0] == counts[1] and counts[0].kept > 4
    with pytest.raises(EngineStopped):
        pair.front.submit(Request(prompt(4)))
    assert pair.ended == [] and not pair.front.step()


def test_rank_0_knows_how_far_a_prompt_is_read():
    pair = Pair()
    handle = pair.front.submit(Request(prompt(150), GREEDY, max_new_tokens=2))
    seen = []
    while pair.front.step():
        seen.append((handle.progress.tokens, handle.progress.reads))
    assert seen[:2] == [(64, True), (128, True)] and handle.progress.tokens == 150
    pair.stop()


def test_a_deadline_is_that_of_rank_0():
    pair = Pair()
    handle = pair.front.submit(Request(prompt(5), GREEDY, timeout=1e-9))
    pair.finish()
    assert handle.result(30)[0].finished == "timeout"
    pair.stop()
    assert [engine.stats.finished for engine in pair.engines] == [{"timeout": 1}] * 2


def test_the_queue_counts_what_was_not_sent():
    pair = Pair(queue=2)
    for _ in range(2):
        pair.front.submit(Request(prompt(4), GREEDY, max_new_tokens=2))
    assert pair.front.stats.waiting == 2 and pair.engines[0].stats.waiting == 0
    with pytest.raises(QueueFull, match="2 requests wait already"):
        pair.front.submit(Request(prompt(4), GREEDY, max_new_tokens=2))
    with pytest.raises(ValueError, match="ids must lie in"):
        pair.front.submit(Request((3, 99)))
    pair.stop()


def test_a_listener_that_fails_is_cancelled_on_all_ranks(caplog):
    pair = Pair()

    def listener(event: Event) -> None:
        raise ConnectionError("nobody is there")

    pair.front.submit(Request(prompt(4), GREEDY, max_new_tokens=50), listener)
    other = pair.front.submit(Request(prompt(9), GREEDY, max_new_tokens=5))
    pair.finish()
    check(other)
    pair.stop()
    assert [engine.stats.finished for engine in pair.engines] == [{"cancelled": 1, "length": 1}] * 2
    assert "nobody is there" in caplog.text


@pytest.fixture
def no_grace(monkeypatch):
    """Do not wait for news of another rank before a failure is reported."""
    monkeypatch.setattr("lineate.parallel.job.link.GRACE_SECONDS", 0.05)


def broken(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("started", [False, True])
def test_a_rank_that_fails_ends_all_requests(rank, started, no_grace, caplog):
    """An error that one process would survive ends the job: the other rank waits for this one in a collective."""
    pair = Pair()
    told, ended, said = threading.Event(), threading.Event(), []
    pair.front.watch(lambda why: (said.append(why), told.set()))
    pair.linked.links[1].watch(lambda _: ended.set())

    def collective(*_: object) -> None:
        assert (told if rank else ended).wait(30)
        raise RuntimeError("connection closed by peer")

    pair.engines[rank].pool.step, pair.engines[1 - rank].pool.step = broken, collective
    handles = [pair.front.submit(Request(prompt(4, n), GREEDY, max_new_tokens=50, n=2 - n)) for n in range(2)]
    if started:
        pair.front.start()
    else:
        with pytest.raises(JobEnded, match="the device is gone"):
            while True:
                pair.front.step()
    why = f"rank {rank} failed: RuntimeError: the device is gone"
    for handle in handles:
        assert {(found.finished, found.error) for found in handle.result(30)} == {("error", why)}
    assert told.wait(30) and said == [why]
    with pytest.raises(EngineStopped):
        pair.front.submit(Request(prompt(4)))
    pair.front.stop()
    pair.join()
    assert pair.ended == [why] and f"rank {rank} failed" in caplog.text


def test_a_rank_that_is_lost_ends_all_requests():
    pair = Pair()
    gone = threading.Event()
    step = pair.engines[0].pool.step
    pair.engines[0].pool.step = lambda ids: step(ids) if gone.wait(30) else None
    pair.front.start()
    handle = pair.front.submit(Request(prompt(4), GREEDY, max_new_tokens=400))
    next(handle.events(30))
    pair.front.watch(lambda _: gone.set())
    pair.linked.lose(1)
    assert handle.result(30)[0].error.startswith("rank 1 has ended without a word")
    pair.front.stop()
    pair.join()


def test_a_rank_that_chooses_other_tokens_ends_the_job(no_grace):
    pair = Pair("GA", "KM")
    pair.front.submit(Request(prompt(20), GREEDY, max_new_tokens=50))
    why = "rank 1 failed: RuntimeError: it has chosen other tokens than rank 0"
    with pytest.raises(JobEnded, match=why):
        while True:
            pair.front.step()
    pair.join()
    assert pair.ended == [why]


def test_requests_travel_as_plain_data():
    sampling = Sampling(0.7, 3, 0.9, 0.1, 1.2, 0.3, 0.4, ((3, 1.5), (7, -100.0)), 2**64 - 1)
    request = Request((1, 2, 3), sampling, 7, frozenset({5, 4}), 2, 3, None, 1.5, 4)
    assert read_request(plain_request(request)) == request
    assert read_request(plain_request(Request((1,)))) == Request((1,))
    guided = read_request(plain_request(Request((1,), guide=Counting(3, 6))), Counting.read)
    assert (guided.guide.next_token, guided.guide.last) == (3, 6)
    with pytest.raises(ValueError, match="guide must have a grammar, which other ranks are sent, got object"):
        plain_request(Request((1,), guide=object()))
    with pytest.raises(ValueError, match="guides must be given"):
        read_request(plain_request(Request((1,), guide=Counting(3, 6))))
