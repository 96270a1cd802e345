"""The state cache: what is found, to the last bit, for the states of every mixer; budgets; what goes first."""

import gc
import sys
from dataclasses import replace

import pytest
import torch

from lineate.layers import TokenCache
from lineate.layers.registry import kinds
from lineate.models import HybridLM, ModelState, preset
from lineate.serving.cache.cache import StateCache
from tests.support.kept_states import held, hybrid_state, linear_state, longer, same
from tests.support.small_models import random_model

LETTERS = [kind.letter for kind in kinds() if kind.built_in]


def model_of(pattern: str) -> HybridLM:
    return random_model(replace(preset("tiny", pattern="LGTAM"), pattern=pattern, n_layers=len(pattern)))


@pytest.mark.parametrize("pattern", [*LETTERS, "GGA", "KKM"])
@torch.inference_mode()
def test_every_mixer_goes_on_to_the_same_bits(pattern):
    """Reading on from a found state gives the logits and the state of reading on from the one that was kept."""
    model, spacing = model_of(pattern), 64
    torch.manual_seed(1)
    ids = torch.randint(256, (1, 150))
    cache, state, kept = StateCache(2**30, spacing, poison=True), None, {}
    for start in range(0, 150, spacing):
        out = model(ids[:, start : start + spacing], state=state, last_only=True)
        state, length = out.state, min(start + spacing, 150)
        kept[length] = out
        assert cache.keep(ids[0, :length], state, out.logits[0, -1], cost=1.0)
    assert cache.stats.bytes == held(cache) <= model.state_nbytes(3, 150) + 3 * 256 * 4
    for length, out in kept.items():
        found = cache.find(ids[0, :length])
        assert found.length == length and same(found.state, out.state)
        assert torch.equal(found.logits, out.logits[0, -1])
        more = torch.randint(256, (1, 5))
        again, wanted = (model(more, state=x) for x in (found.state, out.state))
        assert torch.equal(again.logits, wanted.logits) and same(again.state, wanted.state)
    cache.clear()
    assert cache.stats.bytes == 0 and cache.stats.nodes == 0


def test_what_is_found():
    cache = StateCache(10**6, 4)
    ids, logits = list(range(10)), torch.randn(7)
    assert cache.find(ids) is None and cache.find([]) is None
    assert cache.keep(ids[:4], linear_state(4)) and cache.keep(ids[:6], linear_state(6), logits + 1)
    found = cache.find(ids[:6])
    assert found.length == 6 and torch.equal(found.logits, logits + 1)
    assert cache.find(ids).length == 4  # what ends between two multiples of the spacing serves that prompt alone
    assert cache.find(ids[:4]) is None and cache.find(ids[:3]) is None  # without logits a token must be left to read
    assert cache.find([0, 1, 2, 3, 9]).length == 4
    assert cache.keep(ids, linear_state(10), logits)
    found = cache.find(ids)
    assert found.length == 10 and torch.equal(found.logits, logits)
    assert cache.find([*ids, 11]).length == 4
    assert cache.stats.hits == 5 and cache.stats.misses == 4
    assert cache.stats.hit_tokens == 6 + 4 + 4 + 10 + 4


def test_an_edit_costs_the_tokens_from_the_last_state_before_it():
    cache, ids = StateCache(10**6, 8), list(range(100, 180))
    for length in range(8, 81, 8):
        cache.keep(ids[:length], linear_state(length))
    for edited in range(80):
        changed = [*ids[:edited], 5, *ids[edited + 1 :]]
        found = cache.find(changed)
        assert (0 if found is None else found.length) == edited // 8 * 8


def test_states_that_begin_alike_share_blocks():
    cache = StateCache(10**6, 4)
    first = hybrid_state(8)
    second, third, logits = longer(first, 4), longer(first, 5), torch.randn(3)
    ids = list(range(8))
    assert cache.keep(ids, first)
    alone = cache.stats.bytes
    assert alone == first.nbytes
    assert cache.keep([*ids, 1, 2, 3, 4], second) and cache.keep([*ids, 9, 9, 9, 9, 9], third, logits)
    memory, a_token = 4 * 4, 5 * 4
    assert cache.stats.bytes == held(cache) == alone + 2 * memory + (4 + 5) * a_token + logits.nbytes
    for prompt, state in (([*ids, 1, 2, 3, 4, 0], second), ([*ids, 9, 9, 9, 9, 9], third), ([*ids, 0], first)):
        assert same(cache.find(prompt).state, state)


def test_states_of_the_same_tokens_with_other_bits_share_nothing():
    cache, ids = StateCache(10**6, 4), list(range(12))
    read, written = hybrid_state(8), hybrid_state(12)
    cache.keep(ids[:8], read)
    cache.keep(ids, written)
    assert same(cache.find([*ids, 0]).state, written) and same(cache.find([*ids[:8], 0]).state, read)
    assert cache.stats.bytes == read.nbytes + written.nbytes
    signed = ModelState(tuple(type(x)({k: -x[k] * 0 for k in x.names}, *([8] * isinstance(x, TokenCache)))
                              for x in read.layers), 8)  # fmt: skip
    zeros = ModelState(tuple(type(x)({k: x[k] * 0 for k in x.names}, *([8] * isinstance(x, TokenCache)))
                             for x in read.layers), 8)  # fmt: skip
    for state, tokens in ((signed, [50] * 8), (longer(zeros, 4), [50] * 12)):
        cache.keep(tokens, state)
        assert same(cache.find([*tokens, 0]).state, state)  # 0 and -0 are other bits


def test_which_of_two_states_of_one_prefix_stays():
    cache, ids = StateCache(10**6, 4), [1, 2, 3, 4]
    states = [linear_state(4) for _ in range(5)]
    first, second = torch.randn(3), torch.randn(3)
    for state, given, stays, logits in (
        (states[0], None, 0, None),
        (states[1], None, 0, None),
        (states[2], first, 2, first),  # only this one serves the prompt that ends here
        (states[3], None, 2, first),
        (states[4], second, 2, first),
    ):
        assert cache.keep(ids, state, given)
        assert same(cache.find([*ids, 5]).state, states[stays])
        found = cache.find(ids)
        assert found is None if logits is None else torch.equal(found.logits, logits)
    assert cache.stats.states == 1 and cache.stats.bytes == held(cache) == 16 + 12


def test_the_budget_is_never_exceeded_and_the_cheap_go_first():
    cache = StateCache(3 * 16, 4, poison=True)
    for n, cost in enumerate((5.0, 1.0, 9.0, 2.0)):
        cache.keep([n] * 4, linear_state(4), cost=cost)
        assert cache.stats.bytes == held(cache) <= 48
    assert [cache.find([n] * 5) is not None for n in range(4)] == [True, False, True, True]
    assert cache.stats.evictions == 1
    assert not cache.keep([7] * 4, linear_state(4, size=13))  # alone it is too large: nothing goes for it
    assert cache.stats.states == 3 and cache.stats.refused == 1


def test_what_is_never_used_goes_even_if_it_was_expensive():
    cache = StateCache(4 * 16, 4)
    cache.keep([0] * 4, linear_state(4), cost=3.0)
    for n in range(1, 20):
        cache.keep([n] * 4, linear_state(4), cost=1.0)
    assert cache.find([0] * 5) is None and cache.find([19] * 5) is not None


def test_a_state_that_goes_leaves_the_blocks_that_others_need():
    first = hybrid_state(8, size=100)
    second = longer(first, 4)
    cache, ids = StateCache(first.nbytes + second.nbytes - 8 * 20, 4, poison=True), list(range(12))
    cache.keep(ids[:8], first, cost=1.0)
    cache.keep(ids, second, cost=5.0)
    cache.keep([99] * 4, linear_state(4, size=100), cost=9.0)
    assert cache.find([*ids[:8], 70]) is None and cache.stats.states == 2
    assert same(cache.find([*ids, 0]).state, second)
    assert cache.stats.bytes == held(cache) == second.nbytes + 400
    assert cache.keep([98] * 4, linear_state(4, size=100), cost=99.0)
    assert cache.find([*ids, 0]) is None and cache.stats.bytes == held(cache) == 800


def test_a_state_belongs_to_who_found_it():
    cache, ids = StateCache(10**6, 4, poison=True), list(range(8))
    state = hybrid_state(8)
    wanted = hybrid_state(8)
    for x, y in zip(wanted.layers, state.layers, strict=True):
        for name in x.names:
            x[name].copy_(y[name])
    cache.keep(ids, state)
    for layer in state.layers:
        for name in layer.names:
            layer[name].zero_()  # the caller's own
    found = cache.find([*ids, 1])
    cache.clear()
    assert same(found.state, wanted)
    cache.keep(ids, found.state)
    for layer in cache.find([*ids, 1]).state.layers:
        for name in layer.names:
            layer[name].zero_()
    assert same(cache.find([*ids, 1]).state, wanted)


def lines_of(call) -> int:
    """Return how many lines of Python a call executes, without finalisers of what other tests left behind."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines


@pytest.mark.cover
def test_looking_up_takes_as_long_whatever_else_is_kept():
    cache, counted = StateCache(10**8, 4), []
    prompt = [3, 10, 10, 10, 1]
    for n in range(5000):
        cache.keep([n % 7, n, n, n], linear_state(4))
        if n in (40, 4999):
            cache.find(prompt)  # the first call takes other ways
            counted.append(lines_of(lambda: cache.find(prompt)))
    assert cache.find(prompt).length == 4 and counted[0] == counted[1]
    assert cache.stats.nodes <= 2 * cache.stats.states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(ids=[1, 2, 3]), "ids must be the tokens that the state has read, 4, at least one, got 3"),
        (
            dict(ids=[1] * 5, state=linear_state(5)),
            "ids must be a multiple of spacing = 4 tokens without logits, got 5; other states serve no longer prompt",
        ),
        (dict(cost=float("nan")), "cost must be a number of seconds, at least 0, got nan"),
        (dict(state=ModelState.join([linear_state(4), linear_state(4)])), "of one row, got 2 rows"),
        (dict(state=None), "of one row, got NoneType"),
    ],
)
def test_errors_of_keep(change, message):
    cache = StateCache(10**6, 4)
    with pytest.raises(ValueError, match=message):
        cache.keep(**(dict(ids=[1] * 4, state=linear_state(4)) | change))
    assert cache.stats.states == 0


def test_errors_of_the_cache():
    with pytest.raises(ValueError, match="budget_bytes must be an int of at least 0, got -1"):
        StateCache(-1, 4)
    with pytest.raises(ValueError, match="spacing must be an int of at least 1, got 0"):
        StateCache(1, 0)
