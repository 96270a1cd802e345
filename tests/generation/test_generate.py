"""Continuing sequences: from prompts of any lengths, from states, until their end tokens."""

from dataclasses import replace

import pytest
import torch

from lineate.generation import Sampling, generate
from lineate.layers import Memory
from lineate.models import HybridLM, ModelState, preset
from tests.support.marks import slow_but

VOCAB = 97


@pytest.fixture(scope="module")
def model() -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(replace(preset("tiny", pattern="GKA", vocab_size=VOCAB), n_layers=3)).eval()
    with torch.no_grad():
        model.embed.weight.mul_(3)  # far from uniform
    return model


def ragged(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def rows(model: HybridLM, *args: object, **options: object) -> list[list[int]]:
    made = generate(model, *args, **options)  # type: ignore[arg-type]
    list(made)
    return made.tokens


@pytest.mark.cover
@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"temperature": 0}, {"seed": 3}, {"top_p": 0.7, "min_p": 0.01, "seed": 9}],
        [{"top_p": 0.7, "min_p": 0.01, "seed": 9}],
    ),
)
def test_a_row_does_not_depend_on_the_others(model: HybridLM, options: dict[str, float]) -> None:
    prompts = ragged(5, 1, 70, 12)
    together = rows(model, prompts, 15, **options)
    assert together == [rows(model, [x], 15, **options)[0] for x in prompts]
    assert together == rows(model, [x.tolist() for x in prompts], 15, **options)
    assert together[::-1] == rows(model, prompts[::-1], 15, **options)


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_left_out(model: HybridLM, left: bool) -> None:
    prompts = ragged(4, 9)
    ids, mask = torch.full((2, 9), 5), torch.zeros(2, 9, dtype=torch.int64)
    for n, x in enumerate(prompts):
        at = slice(9 - len(x), 9) if left else slice(0, len(x))
        ids[n, at], mask[n, at] = x, 1
    assert rows(model, ids, 8, attention_mask=mask) == rows(model, prompts, 8)
    assert rows(model, ids, 8, attention_mask=torch.ones_like(mask)) == rows(model, ids, 8)


@pytest.mark.parametrize("lengths", [(6, 6), (6, 11)])
def test_a_state_goes_on_where_it_ended(model: HybridLM, lengths: tuple[int, int]) -> None:
    prompts = ragged(*lengths)
    whole = rows(model, prompts, 14, seed=4)
    first = generate(model, prompts, 6, seed=4)
    assert first.state is None
    list(first)
    assert isinstance(first.state, ModelState)
    assert torch.equal(first.last, torch.tensor([row[-1] for row in first.tokens]))
    before = [first.state.lengths] * 2 if isinstance(first.state.lengths, int) else first.state.lengths.tolist()
    assert before == [n + 5 for n in lengths]  # all but the last token
    for _ in range(2):  # the state is not changed
        more = rows(model, first.last[:, None], 8, seed=4, state=first.state)
        assert [a + b for a, b in zip(first.tokens, more, strict=True)] == whole


@pytest.mark.cover
def test_rows_that_stop_leave_the_batch_and_keep_their_state(model: HybridLM) -> None:
    prompts = ragged(3, 8, 20)
    whole = rows(model, prompts, 20, seed=1)
    stop = {whole[0][2], whole[1][9]}
    made = generate(model, prompts, 20, seed=1, stop=stop)
    yielded = torch.stack(list(made), 1)
    for n, row in enumerate(whole):
        end = next((i for i, token in enumerate(row) if token in stop), 19)
        assert made.tokens[n] == row[: end + 1]
        assert yielded[n].tolist() == [row[min(i, end)] for i in range(yielded.shape[1])]
    assert made.state is not None
    for n, own in enumerate(made.tokens):
        alone = generate(model, [prompts[n]], len(own), seed=1)
        list(alone)
        one = made.state.select(torch.tensor([n]))
        again = rows(model, [[own[-1]]], 5, seed=1, state=one)
        assert again == rows(model, [[own[-1]]], 5, seed=1, state=alone.state)


def test_the_end_tokens_of_the_checkpoint_stop(model: HybridLM) -> None:
    prompt = ragged(10)
    whole = rows(model, prompt, 12, seed=2)[0]
    config = replace(model.config, eos_token_ids=(whole[4],))
    ending = HybridLM(config).eval()
    ending.load_state_dict(model.state_dict())
    assert rows(ending, prompt, 12, seed=2)[0] == whole[: whole.index(whole[4]) + 1]
    assert rows(ending, prompt, 12, seed=2, stop=())[0] == whole
    assert rows(ending, prompt, 12, seed=2, stop=[whole[6]])[0] == whole[: whole.index(whole[6]) + 1]


def test_seeds_and_options_of_each_row(model: HybridLM) -> None:
    prompt = ragged(6)
    a, b, c = rows(model, prompt * 3, 12, seed=[1, 2, 1])
    assert a == c != b
    assert [a, b] == [rows(model, prompt, 12, seed=n)[0] for n in (1, 2)]
    options = [Sampling(temperature=0), Sampling(seed=2), Sampling(repetition_penalty=1.5, temperature=0)]
    mixed = rows(model, prompt * 3, 12, sampling=options)
    assert mixed[1] == b and mixed[0] == rows(model, prompt, 12, temperature=0)[0]
    assert mixed[2] == rows(model, prompt, 12, temperature=0, repetition_penalty=1.5)[0]


@pytest.mark.cover
def test_a_repetition_penalty_repeats_less(model: HybridLM) -> None:
    plain = rows(model, ragged(4), 60, temperature=0)[0]
    varied = rows(model, ragged(4), 60, temperature=0, repetition_penalty=10.0)[0]
    assert len(set(varied)) > len(set(plain))


def test_no_tokens(model: HybridLM) -> None:
    made = generate(model, ragged(4), 0)
    assert list(made) == [] and made.state is None and made.tokens == [[]]


def test_wrong_arguments(model: HybridLM) -> None:
    ids = torch.randint(VOCAB, (2, 7))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        generate(model, ids, -1)
    for wrong, message in (
        (ids[:, :0], r"ids must have shape \(b, t\) with at least one token, got \(2, 0\)"),
        (ids[0], r"ids must have shape \(b, t\) with at least one token, got \(7,\)"),
        (ids + VOCAB, rf"ids must lie in 0 \.\. {VOCAB - 1}"),
        (ids.double(), "ids must be int32 or int64, got float64"),
        ([], "ids must have at least one prompt, got none"),
        ([[1], []], "ids must have at least one token in every row, got none in row 1"),
        ([[1], [VOCAB]], rf"ids must lie in 0 \.\. {VOCAB - 1}, got 1 \.\. {VOCAB}"),
        ([ids], r"ids must be tensors of shape \(t,\) in a sequence of prompts, got \(2, 7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, wrong)  # type: ignore[arg-type]
    for wrong, message in (
        ("text", r"ids must be a torch\.Tensor or a sequence of prompts, got str"),
        (7, r"ids must be a torch\.Tensor or a sequence of prompts, got int"),
        (["text"], "ids must have a sequence of token ids in every row, got str in row 0"),
        ([[1.5]], "ids must have ints in every row, got 1.5 in row 0"),
    ):
        with pytest.raises(TypeError, match=message):
            generate(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_mask needs ids of shape"):
        generate(model, [[1]], attention_mask=torch.ones(1, 1))
    with pytest.raises(ValueError, match="ids must have at least one token in every row, got none in row 1"):
        generate(model, ids, attention_mask=torch.tensor([[1] * 7, [0] * 7]))
    with pytest.raises(ValueError, match="seed must be an int or have one for each of the 2 rows, got 3"):
        generate(model, ids, seed=[1, 2, 3])
    with pytest.raises(ValueError, match="sampling must have one entry for each of the 2 rows, got 1"):
        generate(model, ids, sampling=[Sampling()])
    with pytest.raises(ValueError, match="state must have 2 rows"):
        generate(model, ids, state=model(ids[:1]).state)
    with pytest.raises(ValueError, match="top_p must be above 0"):
        generate(model, ids, top_p=0)


def test_a_state_that_was_looked_at_is_never_written_to(model: HybridLM) -> None:
    """generate() uses the memory of earlier states again, but not of those that somebody has seen."""
    prompt = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    plain = [tokens.clone() for tokens in generate(model, prompt, max_new_tokens=12, stop=())]
    seen = []
    made = generate(model, prompt, max_new_tokens=12, stop=())
    for n, tokens in enumerate(made):
        assert torch.equal(tokens, plain[n])
        if n % 3 == 0 and made.state is not None:
            layers = [layer for layer in made.state.layers if isinstance(layer, Memory)]
            seen += [(x, x.clone()) for layer in layers for x in layer.tensors.values()]
    assert len(seen) == 4 * 4 and all(torch.equal(x, before) for x, before in seen)
