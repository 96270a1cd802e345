"""Choosing tokens: the distribution, the filters, and that a token depends on its own row, seed and position alone."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lineate.generation import choice
from lineate.generation.choice import Draws, Sampling, choose_tokens, log_probabilities
from lineate.generation.drawing import gumbel_noise
from lineate.native.build import available
from tests.support.marks import slow_but

OPTIONS = (
    Sampling(temperature=0),
    Sampling(seed=5),
    Sampling(temperature=0.6, seed=2**64 - 1),
    Sampling(top_k=7, seed=-3),
    Sampling(top_p=0.8, temperature=1.4),
    Sampling(top_p=0.999, temperature=3.0, seed=8),
    Sampling(top_k=40, top_p=0.7, min_p=0.02, seed=1),
    Sampling(min_p=0.1, seed=2),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=3),
    Sampling(logit_bias=((3, 5.0), (70, -100.0)), temperature=0),
    Sampling(top_k=1, seed=4),
)


@pytest.fixture(autouse=True, params=["c", "torch"])
def drawn_by(request, monkeypatch) -> None:
    """Draw in C, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(choice, "choose", lambda *given: None)
    elif not available():
        pytest.skip("no C compiler")


def many(logits: Tensor, sampling: Sampling, draws: int, start: int = 0) -> Tensor:
    """Draw often from one row of logits, at successive positions."""
    at = torch.arange(start, start + draws)
    return torch.cat([choose_tokens(logits.expand(len(x), -1), [sampling] * len(x), x) for x in at.split(1000)])


def check_frequencies(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square: the statistic is near its degrees of freedom, within five deviations."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0].double(), expected[expected > 0]
    rare = expected < 5  # those together are one class
    counts = torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True)))
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected).square() / expected).sum().item()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5, (statistic, freedom)


def oracle(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities that a row of logits is drawn with, by sorting all of it in float64."""
    x = logits.double() / sampling.temperature
    x, order = x.sort(descending=True, stable=True)
    p = x.softmax(-1)
    kept = p >= sampling.min_p * p[0]
    if sampling.top_k:
        kept[sampling.top_k :] = False
        p = torch.cat((p[: sampling.top_k], torch.zeros_like(p[sampling.top_k :])))
        p = p / p.sum()
    kept &= p.cumsum(-1) - p < sampling.top_p
    p = p.masked_fill(~kept, 0)
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


@pytest.mark.parametrize("vocab", slow_but([5, 64, 150, 1000], [64]))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, seed=11),
        Sampling(top_k=4, temperature=2.0),
        Sampling(top_p=0.75, seed=1),
        Sampling(top_k=30, top_p=0.9, seed=2),
        Sampling(min_p=0.2, temperature=1.5),
        Sampling(min_p=0.05, top_p=0.9, seed=7),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(vocab: int, sampling: Sampling) -> None:
    logits = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    drawn = many(logits, sampling, 10_000)
    check_frequencies(drawn.bincount(minlength=vocab), oracle(logits[0], sampling))


def test_ties_at_the_border_of_top_k_go_to_lower_ids() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 250] = 1.0
    assert set(many(logits, Sampling(top_k=3), 300).tolist()) == {250, 0, 1}
    assert set(many(logits, Sampling(top_k=1), 20).tolist()) == {250}
    assert set(many(logits.zero_(), Sampling(top_k=1), 20).tolist()) == {0}


@pytest.mark.cover
def test_rare_tokens_are_drawn() -> None:
    logits = torch.zeros(1, 2)
    logits[0, 1] = math.log(2e-4)
    count = many(logits, Sampling(), 100_000).sum().item()  # 20 are expected
    assert 4 < count < 45


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab in (50, 64, 5000):
        scale = torch.linspace(0.2, 6, len(OPTIONS))[:, None]
        logits = scale * torch.randn(len(OPTIONS), vocab, generator=generator)
        seen = [{1: 2, 4: 0, 17: 1} for _ in OPTIONS]
        options = [replace(x, logit_bias=tuple((token % vocab, bias) for token, bias in x.logit_bias)) for x in OPTIONS]
        positions = torch.arange(len(OPTIONS)) * 3
        allowed = torch.rand(len(OPTIONS), vocab, generator=generator) < 0.7
        for mask in (None, allowed):
            together = choose_tokens(logits, options, positions, seen, mask)
            order = torch.randperm(len(OPTIONS), generator=generator)
            shuffled = choose_tokens(
                logits[order],
                [options[n] for n in order],
                positions[order],
                seen,
                None if mask is None else mask[order],
            )
            assert torch.equal(shuffled, together[order])
            for n, row in enumerate(options):
                own = None if mask is None else mask[n : n + 1]
                alone = choose_tokens(logits[n : n + 1], [row], positions[n : n + 1], seen[n : n + 1], own)
                assert alone[0] == together[n]
                assert mask is None or mask[n, alone[0]]


def test_a_token_is_the_highest_sum_of_logit_and_noise() -> None:
    logits = 3 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    positions, seed = torch.arange(6) + 100, 9
    noise = gumbel_noise(torch.full((6,), seed), positions, torch.arange(3000))
    for temperature in (0.5, 1.0, 2.0):
        drawn = choose_tokens(logits, [Sampling(temperature, seed=seed)] * 6, positions)
        assert torch.equal(drawn, (logits / temperature + noise).argmax(-1))


def test_noise_is_gumbels_and_independent() -> None:
    seeds, positions = torch.arange(40), torch.arange(40) * 7
    noise = gumbel_noise(seeds, positions, torch.arange(1280))
    u = (-noise.double()).exp().neg().exp()  # uniform, if the noise is Gumbel's
    check_frequencies((u * 64).long().clamp(max=63).flatten().bincount(minlength=64), torch.full((64,), 1 / 64))
    cells = torch.full((64,), 1 / 64)
    for a, b in (
        (u[:, :-1], u[:, 1:]),  # neighbours, in a block and over its border
        (u[:, :-64], u[:, 64:]),  # blocks
        (u[:-1], u[1:]),  # rows
        (gumbel_like(0, torch.arange(3000)), gumbel_like(0, torch.arange(1, 3001))),  # positions
        (gumbel_like(torch.arange(3000), 0), gumbel_like(torch.arange(1, 3001), 0)),  # seeds
        (gumbel_like(torch.arange(3000), 1), gumbel_like(torch.arange(1, 3001), 0)),  # seed and position exchanged
    ):
        pairs = (a * 8).long().clamp(max=7) * 8 + (b * 8).long().clamp(max=7)
        check_frequencies(pairs.flatten().bincount(minlength=64), cells)


def gumbel_like(seed: Tensor | int, position: Tensor | int) -> Tensor:
    """Return uniform numbers of four tokens for many seeds or positions."""
    rows = len(seed) if isinstance(seed, Tensor) else len(position)  # type: ignore[arg-type]
    seeds = seed if isinstance(seed, Tensor) else torch.full((rows,), seed)
    positions = position if isinstance(position, Tensor) else torch.full((rows,), position)
    noise = gumbel_noise(seeds, positions, torch.tensor([0, 1, 63, 64]))
    return (-noise.double()).exp().neg().exp()


def test_the_noise_of_a_token_does_not_depend_on_the_others() -> None:
    seeds, positions = torch.tensor([4, 5]), torch.tensor([10, 2**40])
    whole = gumbel_noise(seeds, positions, torch.arange(777))
    some = torch.tensor([[776, 3, 64], [0, 3, 65]])
    assert torch.equal(gumbel_noise(seeds, positions, some), whole.gather(1, some))


def test_noise_is_kept_between_versions() -> None:
    """Seeds that users noted give the same tokens later."""
    noise = gumbel_noise(torch.tensor([42]), torch.tensor([7]), torch.tensor([0, 1, 100_000]))
    torch.testing.assert_close(noise, torch.tensor([[0.8469324, 0.7440749, 0.14452666]]), rtol=1e-5, atol=0)


def test_penalties_count_what_was_generated_and_what_was_seen() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.2]])
    at = torch.zeros(1, dtype=torch.int64)

    def likeliest(sampling: Sampling, seen: dict[int, int], among: list[int]) -> int:
        allowed = torch.zeros(1, 4, dtype=torch.bool)
        allowed[0, among] = True
        return int(choose_tokens(logits, [sampling], at, [seen], allowed))

    greedy = Sampling(temperature=0)
    assert likeliest(greedy, {0: 9}, [0, 1]) == 0
    assert likeliest(replace(greedy, repetition_penalty=1.1), {0: 0}, [0, 1]) == 1  # 2 / 1.1 < 1.9
    assert likeliest(replace(greedy, repetition_penalty=1.3), {2: 0}, [2, 3]) == 3  # -1 * 1.3 < -1.2
    assert likeliest(replace(greedy, presence_penalty=0.2), {0: 1}, [0, 1]) == 1
    assert likeliest(replace(greedy, presence_penalty=0.2), {0: 0}, [0, 1]) == 0  # the prompt has it
    assert likeliest(replace(greedy, frequency_penalty=0.06), {0: 2}, [0, 1]) == 1
    assert likeliest(replace(greedy, frequency_penalty=0.06), {0: 1}, [0, 1]) == 0
    assert likeliest(replace(greedy, frequency_penalty=0.06), {}, [0, 1]) == 0


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(len(OPTIONS), 200)
    before = logits.clone()
    seen = [{n: 1 for n in range(50)} for _ in OPTIONS]
    choose_tokens(logits, OPTIONS, torch.arange(len(OPTIONS)), seen, torch.rand(len(OPTIONS), 200) < 0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 100).to(dtype)
    for sampling in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.5)):
        exact = choose_tokens(logits.float(), [sampling] * 3, torch.arange(3))
        assert torch.equal(choose_tokens(logits, [sampling] * 3, torch.arange(3)), exact)


def test_odd_temperatures_and_values() -> None:
    at = torch.arange(2)
    logits = torch.tensor([[0.0, 3e38, -3e38, 1.0], [-torch.inf, -torch.inf, -2.0, -torch.inf]])
    for sampling in (Sampling(1e-45), Sampling(1e-3, top_p=0.9), Sampling(1.0, top_k=3), Sampling(0.0), Sampling(1e30)):
        drawn = choose_tokens(logits, [sampling] * 2, at)
        assert drawn[1] == 2 and (sampling.temperature > 1 or drawn[0] == 1)


def test_c_and_torch_draw_the_same_tokens(monkeypatch) -> None:
    """Logits without ties, of which rounding could decide in either way."""
    generator = torch.Generator().manual_seed(0)
    cases = [(vocab, scale) for vocab in (1, 5, 64, 65, 1000, 4097) for scale in (0.01, 1.0, 10.0)]
    rows = [row for row in OPTIONS if not row.penalised and not row.logit_bias]
    for vocab, scale in cases:
        logits = scale * torch.randn(len(rows), vocab, generator=generator)
        if vocab > 9:
            logits[:, 3:9] = -torch.inf
        at = torch.randint(9999, (len(rows),), generator=generator)
        found = choose_tokens(logits, rows, at)
        with monkeypatch.context() as patch:
            patch.setattr(choice, "choose", lambda *given: None)
            assert torch.equal(choose_tokens(logits, rows, at), found)


def test_draws_that_do_not_wait_are_the_same() -> None:
    """Of logits as peaked as a model's; rows that are left out, and logits that are not finite, have -1."""
    generator = torch.Generator().manual_seed(2)
    rows = [row for row in OPTIONS if not row.penalised and not row.logit_bias and row.top_p != 0.999]
    for vocab in (5, 64, 65, 5000, 20_000):
        logits = 16 * torch.randn(len(rows), vocab, generator=generator)
        at = torch.randint(9999, (len(rows),), generator=generator)
        expected = choose_tokens(logits, rows, at)
        drawn = [row.resolved(vocab) for row in rows]
        assert torch.equal(Draws(drawn, logits.device).try_tokens(logits, at), expected)
        for n, row in enumerate(drawn):
            assert Draws([row], logits.device).try_tokens(logits[n : n + 1], at[n : n + 1]) == expected[n]
        some = Draws([row if n % 2 else None for n, row in enumerate(drawn)], logits.device).try_tokens(logits, at)
        assert torch.equal(some[1::2], expected[1::2]) and (some[::2] == -1).all()
        for wrong in (torch.nan, torch.inf):
            spoiled = logits.clone()
            spoiled[::3, vocab // 2] = wrong
            found = Draws(drawn, logits.device).try_tokens(spoiled, at)
            assert (found[::3] == -1).all()
            others = torch.arange(len(rows)) % 3 != 0
            assert ((found == expected) | (found == -1))[others].all()
    nothing = Draws([None, None], logits.device).try_tokens(logits[:2], at[:2])
    assert nothing.tolist() == [-1, -1]


def test_draws_that_do_not_wait_are_never_wrong() -> None:
    """A row that is too flat for a few candidates has -1, and every other token is that of choose_tokens."""
    logits = torch.linspace(0.01, 12, 40)[:, None] * torch.randn(40, 30_000, generator=torch.Generator().manual_seed(3))
    at = torch.arange(40)
    rounded = logits.bfloat16()  # many are equal
    for row in (
        Sampling(seed=1),
        Sampling(top_p=0.95, seed=2),
        Sampling(top_k=50, seed=3),
        Sampling(top_k=400, seed=4),
    ):
        found = Draws([row.resolved(30_000)] * 40, logits.device).try_tokens(logits, at)
        expected = choose_tokens(logits, [row] * 40, at)
        assert ((found == expected) | (found == -1)).all()
        assert row.top_k == 400 or (found[-5:] == expected[-5:]).all()
        found = Draws([row.resolved(30_000)] * 40, logits.device).try_tokens(rounded, at)
        expected = choose_tokens(rounded, [row] * 40, at)
        assert ((found == expected) | (found == -1)).all()
        assert row.top_k != 50 or (found == expected).all()


def test_empty_batches() -> None:
    assert choose_tokens(torch.zeros(0, 9), [], torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_log_probabilities() -> None:
    logits = torch.randn(3, 50)
    tokens = torch.tensor([4, 0, 49])
    chosen, ids, values = log_probabilities(logits, tokens, 5)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), exact[torch.arange(3), tokens], rtol=0, atol=1e-6)
    best = exact.topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values.double(), best.values, rtol=0, atol=1e-6)
    assert log_probabilities(logits, tokens, 0)[1].shape == (3, 0)
    assert log_probabilities(logits, tokens, 99)[1].shape == (3, 50)
    with pytest.raises(ValueError, match="top must be at least 0, got -1"):
        log_probabilities(logits, tokens, -1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature must be at least 0 and finite, got -1"),
        ({"temperature": math.nan}, ValueError, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0"),
        ({"top_k": 1.5}, TypeError, "top_k must be an int, got 1.5"),
        ({"top_p": 0}, ValueError, "top_p must be above 0 and at most 1, got 0"),
        ({"min_p": 1.1}, ValueError, "min_p must be at least 0 and at most 1, got 1.1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be above 0 and finite, got 0"),
        ({"presence_penalty": math.inf}, ValueError, "presence_penalty must be finite, got inf"),
        ({"logit_bias": ((-1, 2.0),)}, ValueError, r"logit_bias must be pairs \(token, number\), got \(-1, 2.0\)"),
        ({"logit_bias": ((1, math.nan),)}, ValueError, "logit_bias must be finite, got nan for token 1"),
        ({"seed": 2**64}, ValueError, "seed must be an int of at most 64 bits"),
        ({"seed": True}, TypeError, "seed must be an int, got True"),
    ],
)
def test_wrong_options(options: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Sampling(**options)  # type: ignore[arg-type]


def test_wrong_calls() -> None:
    logits, at = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64)
    two = [Sampling()] * 2
    with pytest.raises(ValueError, match=r"logits must have shape \(rows, vocab\), got \(10,\)"):
        choose_tokens(logits[0], two, at)
    with pytest.raises(ValueError, match="sampling must have one entry a row, 2, got 1"):
        choose_tokens(logits, two[:1], at)
    with pytest.raises(ValueError, match=r"positions must be ints of shape \(rows,\) = \(2,\)"):
        choose_tokens(logits, two, at.float())
    with pytest.raises(ValueError, match="seen must have one entry a row, 2, got 1"):
        choose_tokens(logits, two, at, [None])
    with pytest.raises(ValueError, match=r"allowed must be bool of shape \(rows, vocab\) = \(2, 10\)"):
        choose_tokens(logits, two, at, None, torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="logit_bias must name tokens below 10, got 10"):
        choose_tokens(logits, [Sampling(logit_bias=((10, 1.0),))] * 2, at)
    with pytest.raises(ValueError, match=r"seen must have tokens in 0\.\.9, got 3\.\.12"):
        choose_tokens(logits, [Sampling(presence_penalty=1.0)] * 2, at, [{3: 1, 12: 1}] * 2)
    none = torch.zeros(2, 10, dtype=torch.bool)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_p=0.5)):
        with pytest.raises(ValueError, match="allowed"):
            choose_tokens(logits, [sampling] * 2, at, None, none)
    with pytest.raises(ValueError, match="highest value that is finite in every row, got nan"):
        choose_tokens(logits * torch.nan, two, at)
