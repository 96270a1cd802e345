"""Drafters guess tokens; generation with any of them yields the tokens of plain decoding, and their distribution."""

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import Tensor

from lineate.generation import Sampling
from lineate.layers.registry import letters
from lineate.serving.drafting import Drafter, DraftModel, DraftRow, PromptLookup, verify
from lineate.serving.drafting.predicting import PredictionDrafter
from lineate.serving.drafting.stepwise import taken_back
from tests.support.marks import slow_but
from tests.support.odd_models import EXPERTS, odd
from tests.support.speculation import GREEDY, OPTIONS, make, plain, prompts, speculate

VOCAB = 61
PATTERNS = {letter: odd(letter) for letter in letters()} | {
    "GGGA": odd("GGGA", experts=EXPERTS, dense_layers=(0,)),
    "LRDGKTPNCEAM": odd("LRDGKTPNCEAM"),
}


class Scripted:
    """Guesses given tokens, or random ones, to try everything that verification may meet."""

    needs_hidden = False

    def __init__(self, wanted: list[list[int]], starts: list[int], wrong_every: int) -> None:
        self.wanted, self.starts, self.wrong_every = wanted, starts, wrong_every
        self.drawn = torch.Generator().manual_seed(0)

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        found = []
        for row in rows:
            at = len(row.ids) - self.starts[row.key]
            own = self.wanted[row.key][at : at + int(torch.randint(most + 1, (), generator=self.drawn))]
            found.append([(x + 1) % VOCAB if (at + i) % self.wrong_every == 0 else x for i, x in enumerate(own)])
        return found

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        raise AssertionError("it does not need what the head reads")

    def forget(self, key: Hashable) -> None:
        pass


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(PATTERNS, ("GGGA", "LRDGKTPNCEAM")))
def test_every_drafter_yields_the_tokens_of_plain_decoding(pattern):
    model, ids = make(PATTERNS[pattern]), prompts()
    expected = plain(model, ids, OPTIONS, 12)
    for drafter in (
        PromptLookup(n=1),
        DraftModel(make(odd("GA"), seed=1), VOCAB),
        Scripted(expected, [len(own) for own in ids], wrong_every=3),
    ):
        assert speculate(model, ids, OPTIONS, 12, drafter)[0] == expected, type(drafter).__name__


@pytest.mark.cover
@pytest.mark.parametrize("draft", slow_but(["GGGA", "M", "TPNCE", "LRDK"], ("GGGA", "TPNCE")))
def test_a_model_guesses_itself(draft):
    """A draft model with the larger one's weights is always right: its states are rolled back to the right place."""
    model, ids = make(odd(draft)), prompts()
    found, each = speculate(model, ids, OPTIONS, 40, DraftModel(model, VOCAB))
    assert found == plain(model, ids, OPTIONS, 40)
    assert each > 4  # 5 at the most: the pace begins with 2 guesses


@pytest.mark.cover
def test_a_draft_model_that_is_sometimes_wrong():
    """A model whose weights were disturbed a little is right at some places; its rows go on from different depths."""
    model, ids = make(odd("GGGA")), prompts((7, 12, 3, 9))
    near = make(odd("GGGA"))
    with torch.no_grad():
        torch.manual_seed(1)
        for x in near.parameters():
            x.add_(0.1 * x.std() * torch.randn_like(x)) if x.dim() > 1 else None
    sampling = [Sampling(seed=n) for n in range(4)]
    found, each = speculate(model, ids, sampling, 40, DraftModel(near, VOCAB))
    assert found == plain(model, ids, sampling, 40)
    assert 1.5 < each < 4.5


@pytest.mark.cover
def test_coupled_noise_makes_guesses_right():
    """Draws with the larger model's noise agree more often than independent draws would."""
    model, ids = make(odd("GA"), sharp=2.0), prompts((7, 12, 3))
    near = make(odd("GA"), sharp=1.9)
    sampling = [Sampling(seed=n) for n in range(3)]
    found, each = speculate(model, ids, sampling, 60, DraftModel(near, VOCAB))
    assert found == plain(model, ids, sampling, 60)
    assert each > 2.5  # independent draws from about 40 tokens agree once in 40 times


def test_lookup_takes_the_longest_and_latest_match():
    lookup = PromptLookup(n=2)
    text = [1, 2, 3, 4, 9, 9, 2, 3, 5, 6, 8, 8, 7, 2, 3, 4, 1]

    def guess(ids: list[int]) -> list[int]:
        return lookup.propose([DraftRow(tuple(ids), ids, GREEDY)], 8)[0]  # the pace begins with 2 tokens

    assert guess([*text, 50, 2, 3]) == [4, 1]  # the latest of three equal matches
    assert guess([*text, 1, 2, 3]) == [4, 9]  # a match of three tokens
    assert guess([*text, 9, 2, 3]) == [5, 6]
    assert guess([*text, 50]) == []
    assert guess([5]) == []
    assert guess([5, 5, 5, 5]) == [5, 5]  # beyond its end a match repeats itself


def test_lookup_grows_with_success_and_pauses_after_failures():
    lookup, period = PromptLookup(n=2), [1, 2, 3, 4, 5, 6, 7]
    ids = period * 3
    lengths = []
    for _ in range(6):
        (guesses,) = lookup.propose([DraftRow("a", ids, GREEDY)], 8)
        assert guesses == [period[(len(ids) + i) % 7] for i in range(len(guesses))]
        lengths.append(len(guesses))
        ids = [*ids, *guesses, period[(len(ids) + len(guesses)) % 7]]
    assert lengths == [2, 4, 8, 8, 8, 8]
    lengths = []
    for n in range(40):
        ids = [*ids, 1, 2] if n else [*ids, 2, 1, 2]
        (guesses,) = lookup.propose([DraftRow("a", ids, GREEDY)], 8)
        ids = [*ids, 10 + n]  # never what was guessed
        lengths.append(len(guesses))
    assert lengths[0] == 8
    assert all(n <= 1 for n in lengths[1:])
    assert 2 <= sum(lengths[1:]) <= 12
    lookup.forget("a")
    assert lookup.propose([DraftRow("a", [1, 2], GREEDY)], 8) == [[]]


def test_lookup_indexes_only_new_tokens():
    """Each token is read once, however often the sequence is continued."""

    class Noted(list):
        taken = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Noted.taken += len(found) if isinstance(at, slice) else 1
            return found

    ids, lookup = Noted(), PromptLookup()
    for n in range(500):
        list.append(ids, n % 97)
        lookup.propose([DraftRow(0, ids, GREEDY)], 4)
    assert Noted.taken < 500 * 7


@pytest.mark.cover
def test_rows_come_and_go():
    """A draft model keeps the states of rows that are not asked for, and reads what they missed."""
    model = make(odd("GGGA"))
    drafter = DraftModel(model, VOCAB)
    ids = prompts((7, 12, 3, 30))
    expected = plain(model, ids, [GREEDY] * 4, 60)
    done = [0] * 4
    for asked in ([0, 1], [0, 1, 2], [2], [3, 1], [0, 1, 2, 3], [1], [3, 2, 1, 0], [0, 1, 2, 3]):
        rows = [DraftRow(r, [*ids[r], *expected[r][: done[r]]], GREEDY) for r in asked]
        for r, own in zip(asked, drafter.propose(rows, 4), strict=True):
            assert own == expected[r][done[r] : done[r] + len(own)]
            done[r] += len(own) + (20 if r == 1 and done[r] < 10 else 1)  # row 1 is generated without guesses at times
    drafter.forget(1)
    (own,) = drafter.propose([DraftRow(1, ids[1], GREEDY)], 4)
    assert own == expected[1][: len(own)] and own


def test_taking_back_does_not_copy_caches():
    model = make(odd("GA"))
    with torch.no_grad():
        base = model(torch.tensor([[1, 2, 3], [4, 5, 6]])).state
        base = model(torch.tensor([[1], [2]]), state=base).state
        addresses = set()
        for _ in range(10):
            last = base
            for _ in range(5):
                last = model(torch.tensor([[7], [8]]), state=last).state
            expected = model(torch.tensor([[9], [9]]), state=base.select(torch.arange(2))).logits
            base = taken_back(base, last)
            assert torch.allclose(model(torch.tensor([[9], [9]]), state=base.select(torch.arange(2))).logits, expected)
            addresses.add(base.layers[1].tensors["keys"].data_ptr())
    assert len(addresses) == 1


def test_verification_ignores_what_follows_a_wrong_guess():
    logits = torch.zeros(2, 3, 5)
    logits[0, 0, 2] = logits[1, 0, 4] = logits[1, 1, 1] = 9.0
    logits[0, 1:] = torch.nan  # row 0 guesses wrong, and what was read after that is not finite
    logits[1, 2, 3] = 9.0
    for options in (GREEDY, Sampling(temperature=0.1)):
        assert verify(logits, [[1, 1], [4, 1]], [options] * 2, [7, 9]) == [[2], [4, 1, 3]]
        assert verify(logits, [[], [4]], [options] * 2, [7, 9]) == [[2], [4, 1]]
    with pytest.raises(ValueError, match="logits must have a highest value that is finite"):
        verify(logits, [[2, 1], [4, 1]], [Sampling()] * 2, [7, 9])


def test_verification_obeys_allowed_tokens():
    logits = torch.zeros(1, 2, 5)
    logits[0, :, 2] = 9.0
    allowed = torch.ones(1, 2, 5, dtype=torch.bool)
    allowed[0, 1, 2:] = False
    assert verify(logits, [[2]], [GREEDY], [3], allowed=allowed) == [[2, 0]]


@pytest.mark.cover
@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        ("lookup", 1000),
        ("head", 1000),
        pytest.param("lookup", 4000, marks=pytest.mark.slow),
        pytest.param("head", 4000, marks=pytest.mark.slow),
        pytest.param("model", 4000, marks=pytest.mark.slow),
    ],
)
def test_the_distribution_is_that_of_the_model(kind, draws):
    """Chi-square over the next three tokens of many draws, against the probabilities of the model."""
    vocab = 5
    config = odd("G", vocab_size=vocab, prediction=kind == "head")
    model = make(config, sharp=4.0)
    ids = [1, 2, 1, 2, 1]
    drafter: Drafter
    if kind == "lookup":
        drafter, least = PromptLookup(n=1), 1.05
    elif kind == "model":
        drafter, least = DraftModel(make(config, sharp=3.0), vocab), 1.5
    else:
        drafter, least = PredictionDrafter(model), 1.5
    sampling = [Sampling(seed=n) for n in range(draws)]
    each, speed = speculate(model, [ids] * draws, sampling, 3, drafter, most=2)
    found = Counter(map(tuple, each))
    assert speed > least  # guesses are really taken
    with torch.no_grad():
        probabilities = {}
        for a in range(vocab):
            for b in range(vocab):
                logits = model(torch.tensor([[*ids, a, b]])).logits[0].softmax(-1)
                for c in range(vocab):
                    probabilities[a, b, c] = float(logits[-3, a] * logits[-2, b] * logits[-1, c])
    assert abs(sum(probabilities.values()) - 1) < 1e-9
    frequent = {key for key, p in probabilities.items() if p * draws >= 5}
    rest = 1 - sum(probabilities[key] for key in frequent)
    square = sum((found[key] - probabilities[key] * draws) ** 2 / (probabilities[key] * draws) for key in frequent)
    if rest * draws >= 5:
        others = draws - sum(found[key] for key in frequent)
        square += (others - rest * draws) ** 2 / (rest * draws)
    freedom = len(frequent)
    assert square < freedom + 4 * (2 * freedom) ** 0.5


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="model must have the vocabulary of the model that it guesses for, 99 tokens"):
        DraftModel(make(odd("G")), 99)
    with pytest.raises(ValueError, match="n must be an int of at least 1, got 0"):
        PromptLookup(n=0)
