"""A cache of states never changes an answer: tokens and log-probabilities have the bits of reading every prompt whole.

Three requests that begin alike, as clients send them: a prompt, the same and more, and the next turn. Families have the
mixers, norms and experts of published ones; formats of weights are those of `--bits` and `--dtype`.
"""

from functools import cache

import pytest

from bench.serving.exactness import FORMS, SAMPLINGS, Clients, compare, configs, make_model, texts
from lineate.models import HybridLM
from lineate.native.build import available
from tests.support.marks import slow_but

SPACING = 64
FAMILIES = tuple(configs())
CASES = [(family, form) for family in FAMILIES for form in FORMS]
QUICK = [("Kimi Linear", "int4"), ("Qwen3.5", "int8"), ("OLMo-Hybrid", "bfloat16")]


@cache
def model(family: str, form: str) -> HybridLM:
    return make_model(configs()[family], form, "cpu")


@pytest.mark.cover
@pytest.mark.parametrize("case", slow_but(CASES, QUICK), ids=" ".join)
@pytest.mark.parametrize("sampling", slow_but(list(SAMPLINGS), ["greedy"]))
def test_cached_answers_have_the_bits_of_uncached_ones(case, sampling):
    """Alone on every machine; among eight clients where the C code decodes."""
    family, form = case
    found = compare(model(family, form), texts(2), SAMPLINGS[sampling], SPACING)
    assert (found["cached: other tokens"], found["cached: logprob"]) == (0, 0)
    assert found["cached: reused"] > 0 and found["read again"] > 0
    if available():
        assert (found["8 clients: other tokens"], found["8 clients: logprob"]) == (0, 0)


def test_the_state_of_a_decoded_answer_is_not_shared():
    """With it, the next turn would read only what is new, and 4-bit weights would show it."""
    side = Clients(model("Kimi Linear", "int4"), 1, True, SPACING)
    given = texts(1)[0]
    (said,) = side.ask([given.prompt], SAMPLINGS["greedy"], 70)
    whole = len(given.prompt) + 70
    (found,) = side.ask([(*given.prompt, *said.tokens, 1, 2)], SAMPLINGS["greedy"], 1)
    assert found.cached_tokens == whole - whole % SPACING
    assert side.engine.stats.reread_tokens == found.cached_tokens - len(given.prompt) // SPACING * SPACING


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "fp8"])
def test_cached_answers_on_a_gpu(family, form):
    """Alone: in batches, the number of rows rounds decoding."""
    lm = make_model(configs()[family], form, "cuda")
    found = compare(lm, texts(4), SAMPLINGS["greedy"], SPACING)
    assert (found["cached: other tokens"], found["cached: logprob"]) == (0, 0)
