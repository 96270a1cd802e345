"""Pools with bfloat16 memories: the engine yields the tokens of plain decoding, and plans the bytes that it has."""

import copy
from collections.abc import Hashable, Sequence
from functools import cache

import pytest
import torch

from lineate.generation.choice import Sampling, choose_tokens
from lineate.layers import Memory
from lineate.layers.formats import StateFormat
from lineate.models import HybridLM, ModelState
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import DraftRow
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.planning import Need, Plan, Shape
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import Handle, Request
from tests.support.kept_states import same
from tests.support.serving_models import CONFIG, SPACING, VOCAB, alone, model, prompt
from tests.support.small_models import random_model

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
ROUNDINGS = ("nearest", "stochastic")
PATTERNS = ("GGGA", "KKKM, experts", "LRDG", "SSA")
NARROW = StateFormat.of("bfloat16")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)


@cache
def placed(pattern: str, device: str) -> HybridLM:
    return model(pattern) if device == "cpu" else copy.deepcopy(model(pattern)).cuda()


def read(lm: HybridLM, ids: Sequence[int]) -> Reading:
    """Read a prompt in the pieces of the engine."""
    reading = Reading(lm, tuple(ids), SPACING)
    while not reading.done:
        reading.advance()
    return reading


def seeded(state: ModelState, rounding: str) -> ModelState:
    """Return a state of one row whose next token rounds in this way, with its position as the seed."""
    if rounding == "nearest":
        return state
    layers = (
        Memory(x.tensors, seeds=torch.tensor([int(state.lengths)], device=next(iter(x.tensors.values())).device))
        if isinstance(x, Memory)
        else x
        for x in state.layers
    )
    return ModelState(tuple(layers), state.lengths)


@cache
@torch.no_grad()
def plain(pattern: str, device: str, ids: tuple[int, ...], sampling: Sampling, rounding: str) -> tuple[int, ...]:
    """Return 24 tokens of one row that the model decodes one by one, from a state in bfloat16."""
    lm = placed(pattern, device)
    reading = read(lm, ids)
    state, logits, tokens = lm.convert_state(reading.state, "bfloat16"), reading.logits[None], []
    while len(tokens) < 24:
        tokens.append(int(choose_tokens(logits, [sampling], torch.tensor([len(ids) + len(tokens)]).to(device))))
        out = lm(torch.tensor([tokens[-1:]]).to(device), seeded(state, rounding))
        state, logits = out.state, out.logits[:, -1]
    return tuple(tokens)


class Oracle:
    """Guesses what plain decoding yields; every few tokens it is wrong."""

    needs_hidden = False

    def __init__(self, pattern: str, device: str, rounding: str) -> None:
        self.where, self.rounding = (pattern, device), rounding
        self.prompts: dict[Hashable, tuple[int, ...]] = {}

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        found = []
        for row in rows:
            first = self.prompts.setdefault(row.key, tuple(row.ids[:-1]))
            answer = plain(*self.where, first, row.sampling, self.rounding)
            guesses = list(answer[len(row.ids) - len(first) :][:most])
            found.append([(x + ((len(row.ids) + n) % 4 == 0)) % VOCAB for n, x in enumerate(guesses)])
        return found

    def forget(self, key: Hashable) -> None:
        self.prompts.pop(key, None)


def make(pattern: str, device: str = "cpu", rounding: str = "nearest", **options) -> Engine:
    options = {"slots": 4, "context": 512, "spacing": SPACING, "poison": True, "state_dtype": "bfloat16", **options}
    options.setdefault("cache", StateCache(2**26, SPACING, poison=True))
    return Engine(placed(pattern, device), state_rounding=rounding, **options)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def parted(pattern: str, device: str, rounding: str, handle: Handle) -> int:
    """Return how many continuations of a request have other tokens than plain decoding."""
    request, count = handle.request, 0
    for n, found in enumerate(handle.result(0)):
        sampling = Sampling(temperature=request.sampling.temperature, seed=request.sampling.seed + n)
        assert (found.finished, found.error) == ("length", None)
        expected = plain(pattern, device, request.ids, sampling, rounding)
        count += tuple(found.tokens) != expected[: request.max_new_tokens]
    return count


@pytest.mark.cover
@pytest.mark.slow(but="pairs")
@devices
@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guesses"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tokens_of_plain_decoding(pattern, rounding, guesses, device):
    """Rows join, fork and leave, all again from the cache, with and without guesses that are often wrong.

    On a GPU, kernels for other numbers of rows and tokens sum in another order; where that moves a number of the memory
    to its other neighbour, a choice between two tokens that are nearly as likely may change.
    """
    drafter = Oracle(pattern, device, rounding) if guesses else None
    engine = make(pattern, device, rounding, drafter=drafter)
    requests = [
        Request(prompt(70), GREEDY, max_new_tokens=24),
        Request(prompt(10, seed=1), DRAWN, max_new_tokens=12, n=2),
        Request(prompt(70), DRAWN, max_new_tokens=5),
        Request(prompt(130, seed=2), DRAWN, max_new_tokens=20),
    ]
    others = 0
    for again, order in enumerate((requests, requests[::-1])):
        handles = []
        for request in order:
            handles.append(engine.submit(request))
            engine.step()
        finish(engine)
        for handle in handles:
            others += parted(pattern, device, rounding, handle)
            assert not again or handle.result()[0].cached_tokens == len(handle.request.ids)
    assert others <= (0 if device == "cpu" else 2)  # of 10
    if guesses:
        assert 0.3 * engine.stats.guesses < engine.stats.right_guesses < engine.stats.guesses


def test_rounding_changes_the_state():
    """Tokens may be the same in any dtype, states are not."""
    states = []
    for format in (StateFormat.of(None), NARROW, StateFormat.of("bf16", "stochastic")):
        pool = Pool(model("GGGA"), 1, 64, format=format)
        pool.join(read(model("GGGA"), prompt(20)).state)
        for token in (1, 2, 3):
            pool.step([token])
        states.append(pool.row(0).layers[0]["memory"])
    assert [x.dtype for x in states] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert not torch.equal(states[0].bfloat16(), states[1]) and not torch.equal(states[1], states[2])
    for x in states[1:]:
        assert float((x.float() - states[0]).norm() / states[0].norm()) < 0.02


def test_the_next_turn_is_read_in_float32():
    """The answer was decoded in bfloat16; it is read again in float32, and that state is kept for any pool."""
    lm, engine = model("GGGA"), make("GGGA")
    handle = engine.submit(Request(prompt(50), GREEDY, max_new_tokens=20))
    finish(engine)
    text = (*prompt(50), *handle.result(0)[0].tokens)
    following = (*text, *prompt(40, seed=8))
    kept = engine.cache.find(following)
    assert kept.length == SPACING < len(text) and kept.state.layers[0]["memory"].dtype == torch.float32
    assert same(kept.state, read(lm, text[:SPACING]).state)
    second = engine.submit(Request(following, GREEDY, max_new_tokens=8))
    finish(engine)
    (found,) = second.result(0)
    assert found.cached_tokens == SPACING
    assert tuple(found.tokens) == plain("GGGA", "cpu", following, GREEDY, "nearest")[:8]
    wide = make("GGGA", state_dtype=None, cache=engine.cache)  # another pool takes it, too
    third = wide.submit(Request(following, GREEDY, max_new_tokens=8))
    finish(wide)
    assert tuple(third.result(0)[0].tokens) == alone("GGGA", following, GREEDY, 8)
    assert third.result()[0].cached_tokens == len(following)


@pytest.mark.cover
@devices
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_rows_are_continued_as_if_alone(pattern, device):
    """Single steps and trails, whose guesses are accepted in part, while rows join and leave and the pool grows."""
    lm, states = placed(pattern, device), []
    pool = Pool(lm, 3, 96, poison=True, format=NARROW)
    generator = torch.Generator().manual_seed(1)
    for n, length in enumerate((5, 40, 11)):
        states.append(lm.convert_state(read(lm, prompt(length, seed=n)).state, "bfloat16"))
        pool.join(states[-1])
    for t, counts in ((1, [1, 1, 1]), (5, [5, 0, 2]), (8, [8, 3, 7]), (1, [1, 1]), (3, [2, 3])):
        if len(counts) < len(states):
            pool.leave(0)
            states[0] = states.pop()
            pool.resize(5, 160)
        ids = torch.randint(VOCAB, (len(counts), t), generator=generator)
        if t == 1:
            logits = pool.step(ids[:, 0].tolist())[:, None]
        else:
            logits = pool.trail(ids.tolist())
            pool.accept(counts)
        for row, count in enumerate(counts):
            for i in range(count):
                out = lm(ids[row : row + 1, i : i + 1].to(device), states[row])
                torch.testing.assert_close(logits[row, i], out.logits[0, 0], rtol=1e-2, atol=1e-2)
                states[row] = out.state
            got = pool.row(row)
            for a, b in zip(got.layers, states[row].layers, strict=True):
                for name in a.names:
                    assert a[name].dtype == b[name].dtype
                    wrong = (a[name].float() - b[name].float()).norm() / b[name].float().norm()
                    assert wrong < 5e-3, (name, float(wrong))


@devices
@pytest.mark.parametrize("pattern", PATTERNS)
def test_planned_bytes_are_allocated_bytes(pattern, device):
    """The pool has the bytes of its plan: those of memories are half, and prompts are read in float32."""
    lm = placed(pattern, device)
    state = read(lm, prompt(20)).state
    for rows, capacity in ((1, 64), (4, 192)):
        pool, wide = Pool(lm, rows, capacity, format=NARROW), Pool(lm, rows, capacity)
        for each in (pool, wide):
            each.join(state, rows)
            each.step([1] * rows)
            assert each.allocated == each.nbytes(rows, capacity)
        assert pool.nbytes(rows, capacity) - wide.nbytes(rows, capacity) == rows * (
            lm.state_nbytes(1, capacity, "bfloat16") - lm.state_nbytes(1, capacity)
        )
        assert pool.resize_nbytes(rows + 1, capacity) < wide.resize_nbytes(rows + 1, capacity)
        narrow_plan, plan = (Plan(lm, rows, capacity, None, state_dtype=x) for x in ("bfloat16", None))
        shape, saved = Shape(rows, capacity), wide.allocated - pool.allocated
        assert plan.pool_nbytes(shape) - narrow_plan.pool_nbytes(shape) == 2 * saved > 0  # and what a step makes
        need = Need(1, 30, 64, True)
        assert plan.reading_nbytes(need) == narrow_plan.reading_nbytes(need)  # prompts are read in float32


@pytest.mark.cover
def test_more_rows_fit_into_the_same_memory():
    """With the memory that eight rows take in bfloat16, an engine in float32 runs fewer at once; none is exceeded."""
    lm, together = random_model(CONFIG), {}
    plan = Plan(lm, 8, 64, None, state_dtype="bfloat16")
    enough = plan.pool_nbytes(Shape(8, 64)) + 2 * plan.reading_nbytes(Need(1, 10, 64, True))
    for dtype in ("float32", "bfloat16"):
        engine = Engine(lm, slots=8, context=64, memory_bytes=enough, spacing=SPACING, state_dtype=dtype)
        for n in range(8):
            engine.submit(Request(prompt(10, seed=n), DRAWN, max_new_tokens=40))
        together[dtype] = 0
        while engine.step():
            together[dtype] = max(together[dtype], engine.stats.running)
            assert engine.pool.allocated <= enough
    assert together["bfloat16"] == 8 and together["float32"] < 8


def test_wrong_options():
    with pytest.raises(ValueError, match=r"^state_dtype must be one of fp32, float32, bf16, bfloat16, got 'float16'$"):
        make("GGGA", state_dtype="float16")
    with pytest.raises(ValueError, match=r"^state_rounding='stochastic' needs state_dtype='bfloat16'"):
        make("GGGA", rounding="stochastic", state_dtype="float32")
    with pytest.raises(ValueError, match=r"^state_dtype='bfloat16' needs a layer with a memory that can be kept so"):
        make("attention alone")
