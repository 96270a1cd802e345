"""Generation by guessing and verifying, and by single steps, for tests of drafters."""

from collections.abc import Sequence

import torch

from lineate.generation import Sampling, choose_tokens
from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.serving.drafting import Drafter, DraftRow, verify

GREEDY = Sampling(temperature=0)
OPTIONS = [
    GREEDY,
    Sampling(seed=4, temperature=0.7),
    Sampling(top_p=0.8, top_k=20, seed=5),
    Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(seed=9, presence_penalty=0.5, logit_bias=((3, 1.5),), min_p=0.02),
]
"""One row each."""


def make(config: HybridConfig, seed: int = 0, sharp: float = 6.0) -> HybridLM:
    torch.manual_seed(seed)
    model = HybridLM(config).double().eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.uniform_(0.5, 1.5)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(sharp)
    return model


def prompts(lengths: Sequence[int] = (7, 12, 3, 9, 5), vocab: int = 61) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (n,), generator=drawn).tolist() for n in lengths]


@torch.no_grad()
def begin(model: HybridLM, ids: Sequence[Sequence[int]]) -> ModelState:
    """Return the state after all tokens of the prompts but the last."""
    if len(set(map(len, ids))) == 1:
        return model(torch.tensor(ids)[:, :-1]).state
    return ModelState.join([model(torch.tensor([own[:-1]])).state for own in ids])


@torch.no_grad()
def plain(model: HybridLM, ids: list[list[int]], sampling: list[Sampling], new: int) -> list[list[int]]:
    """Return the tokens that single steps yield."""
    ids, starts, state = [list(own) for own in ids], [len(own) for own in ids], begin(model, ids)
    for _ in range(new):
        out = model(torch.tensor([own[-1:] for own in ids]), state=state)
        state = out.state
        seen = [{token: own[start:].count(token) for token in own} for own, start in zip(ids, starts, strict=True)]
        tokens = choose_tokens(out.logits[:, -1], sampling, torch.tensor([len(own) for own in ids]), seen)
        for own, token in zip(ids, tokens.tolist(), strict=True):
            own.append(token)
    return [own[start:] for own, start in zip(ids, starts, strict=True)]


@torch.no_grad()
def speculate(
    model: HybridLM, ids: list[list[int]], sampling: list[Sampling], new: int, drafter: Drafter, most: int = 4
) -> tuple[list[list[int]], float]:
    """Return the tokens that guessing and verifying yields, and how many tokens a pass of the model yields a row."""
    ids, starts, state = [list(own) for own in ids], [len(own) for own in ids], begin(model, ids)
    if drafter.needs_hidden:
        read = {own: model.hidden(model.embed(torch.tensor([own[:-1]])))[0][0] for own in set(map(tuple, ids))}
        for key, own in enumerate(ids):
            drafter.observe(key, own, 0, read[tuple(own)])
    passes = tokens = 0
    running = list(range(len(ids)))
    while running:
        seen = [{token: ids[r][starts[r] :].count(token) for token in ids[r]} for r in running]
        rows = [DraftRow(r, list(ids[r]), sampling[r], own) for r, own in zip(running, seen, strict=True)]
        guesses = drafter.propose(rows, most)
        assert all(len(own) <= most for own in guesses)
        longest = 1 + max(map(len, guesses))
        read = [[ids[r][-1], *own, *[0] * (longest - 1 - len(own))] for r, own in zip(running, guesses, strict=True)]
        out = model.trail(torch.tensor(read), state)
        options, positions = [sampling[r] for r in running], [len(ids[r]) for r in running]
        chosen = verify(out.logits, guesses, options, positions, seen)
        state = out.trail.after(torch.tensor([len(own) for own in chosen]))
        passes += len(running)
        tokens += sum(map(len, chosen))
        kept = []
        for n, (r, own) in enumerate(zip(running, chosen, strict=True)):
            if drafter.needs_hidden:
                drafter.observe(r, [*ids[r], *own], len(ids[r]) - 1, out.hidden[n, : len(own)])
            ids[r] += own
            if len(ids[r]) - starts[r] >= new:
                drafter.forget(r)
            else:
                kept.append(n)
        if len(kept) < len(running):
            running = [running[n] for n in kept]
            if running:
                state = state.select(torch.tensor(kept))
    return [own[start : start + new] for own, start in zip(ids, starts, strict=True)], tokens / passes
