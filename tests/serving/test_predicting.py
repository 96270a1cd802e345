"""PredictionDrafter guesses with the model's own head; generation with it yields the tokens of plain decoding."""

import pytest
import torch

from lineate.generation import Sampling, choose_tokens
from lineate.models import HybridLM
from lineate.serving.drafting import DraftRow
from lineate.serving.drafting.predicting import PredictionDrafter
from tests.support.odd_models import EXPERTS, odd
from tests.support.speculation import GREEDY, OPTIONS, make, plain, prompts, speculate

CONFIGS = {
    "GGGA": odd("GGGA", prediction=True, zero_centred_norm=True),
    "GA, experts": odd("GA", prediction=True, experts=EXPERTS, dense_layers=(0,)),
    "all mixers, tied": odd("LRDGKTPNCEAM", prediction=True, tie_embeddings=True),
}
cases = pytest.mark.parametrize("case", CONFIGS)


@torch.no_grad()
def hidden_of(model: HybridLM, ids: list[int]) -> torch.Tensor:
    return model.hidden(model.embed(torch.tensor([ids])))[0][0]


@torch.no_grad()
def guesses_of(model: HybridLM, ids: list[int], sampling: Sampling, most: int, first: int = 0) -> list[int]:
    """Return the guesses of the equations: the head over the whole sequence, again for every guess."""
    hidden, guesses = hidden_of(model, ids[:-1])[first:], []
    for _ in range(most):
        tokens = torch.tensor([[*ids, *guesses][first + 1 :]])
        x, _ = model.prediction(model.embed(tokens), hidden[None])
        logits = model.logits(x[0, -1:])
        guesses += choose_tokens(logits, [sampling], torch.tensor([len(ids) + len(guesses)])).tolist()
        hidden = torch.cat((hidden, x[0, -1:]))
    return guesses


@pytest.mark.cover
@cases
def test_generation_yields_the_tokens_of_plain_decoding(case):
    model, ids = make(CONFIGS[case]), prompts((7, 40, 3, 9, 5))
    expected = plain(model, ids, OPTIONS, 14)
    assert speculate(model, ids, OPTIONS, 14, PredictionDrafter(model))[0] == expected


@pytest.mark.cover
@cases
def test_guesses_are_those_of_the_equations(case):
    """Rows go on by different numbers of tokens, come and go, and the guesses of their caches are always given up."""
    model, drafter = make(CONFIGS[case]), PredictionDrafter(make(CONFIGS[case]))
    texts = prompts((60, 80, 70))
    sampling = [GREEDY, Sampling(seed=3), Sampling(seed=4, temperature=0.5)]
    lengths = [5, 30, 4]
    for r in range(3):
        drafter.observe(r, texts[r][: lengths[r]], 0, hidden_of(model, texts[r][: lengths[r] - 1]))
    guessed = 0
    for asked in ([0, 1, 2], [0, 1, 2], [1, 2], [2, 0, 1], [0, 1, 2], [0, 1, 2]):
        rows = [DraftRow(r, texts[r][: lengths[r]], sampling[r]) for r in asked]
        for r, own in zip(asked, drafter.propose(rows, 3), strict=True):
            assert own == guesses_of(model, texts[r][: lengths[r]], sampling[r], len(own))
            guessed += len(own)
            more = 1 + (r + len(asked) + lengths[r]) % 4
            hidden = hidden_of(model, texts[r][: lengths[r] + more - 1])[lengths[r] - 1 :]
            drafter.observe(r, texts[r][: lengths[r] + more], lengths[r] - 1, hidden)
            lengths[r] += more
    assert guessed > 8


def test_a_sequence_that_is_observed_from_the_middle_on():
    model = make(CONFIGS["GGGA"])
    drafter, ids = PredictionDrafter(model), prompts((40,))[0]
    hidden = hidden_of(model, ids[:-1])
    drafter.observe("a", ids, 12, hidden[12:20])
    drafter.observe("a", ids, 18, hidden[18:])  # tokens 18 and 19 a second time
    (own,) = drafter.propose([DraftRow("a", ids, GREEDY)], 2)
    assert own == guesses_of(model, ids, GREEDY, 2, first=12)
    drafter.forget("a")
    assert drafter.propose([DraftRow("a", ids, GREEDY)], 2) == [[]]
    drafter.observe("b", ids, 0, hidden[:10])
    assert drafter.propose([DraftRow("b", ids, GREEDY)], 2) == [[]]  # the last tokens were not observed
    drafter.observe("b", ids, 12, hidden[12:])  # a gap: what was before it is dropped
    assert drafter.propose([DraftRow("b", ids, GREEDY)], 2) == [guesses_of(model, ids, GREEDY, 2, first=12)]


def test_a_model_without_the_head_is_refused():
    with pytest.raises(ValueError, match="model must have a head of multi-token prediction, got none"):
        PredictionDrafter(make(odd("GA")))
