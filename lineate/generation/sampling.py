"""Choose tokens from logits: the likeliest, or drawn at a temperature from the top k or the top p."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.checks import check_ids


class Decoder(Protocol):
    """The part of a tokenizer that stream_text needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with U+FFFD for an incomplete character."""
        ...


def choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the next token of every row.

    Args:
        logits: Logits `b vocab`.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p, at least one token.
        generator: Source of random numbers; torch's default if None.

    Returns:
        Tokens `b`.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < logits.shape[-1]:
        sorted_logits[:, top_k:] = -torch.inf
    probabilities = sorted_logits.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # probability of all likelier tokens
        probabilities = probabilities.masked_fill(before >= top_p, 0)  # always keeps the likeliest token
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, drawn)[:, 0]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError if a sampling option is out of range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0 (all tokens), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def generate(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int = 256,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[Tensor]:
    """Continue sequences: yield the next token of every row until every row has reached a stop token.

    A row that has stopped repeats its stop token. The same seed gives the same tokens on the same device.

    Args:
        model: The model.
        ids: Prompts `b t`, all of one length.
        max_new_tokens: The most tokens to yield.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p.
        seed: Seed of the draws.
        stop: Tokens that end a row.

    Yields:
        Tokens `b`.
    """
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    check_ids(ids, model.config.vocab_size, "ids")
    return _generate(model, ids.to(model.device), max_new_tokens, temperature, top_k, top_p, seed, stop)


def _generate(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: Collection[int],
) -> Iterator[Tensor]:
    generator = torch.Generator(ids.device).manual_seed(seed)
    stops = torch.tensor(sorted(stop), dtype=torch.int64, device=ids.device)
    stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    state, last = None, ids[:, -1]
    for n in range(max_new_tokens):
        with torch.no_grad():
            out = model(ids, state=state, last_only=True)
            token = choose(out.logits[:, -1], temperature, top_k, top_p, generator)
        state, last = out.state, torch.where(stopped, last, token)
        yield last
        if len(stops):
            stopped |= torch.isin(last, stops)
            if n + 1 < max_new_tokens and bool(stopped.all()):
                return
        ids = last[:, None]


def stream_text(tokenizer: Decoder, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as tokens arrive, held back while a character is incomplete.

    Args:
        tokenizer: Anything with decode(ids).
        tokens: The token ids of one sequence.
    """
    ids: list[int] = []
    done = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd") and text != done:
            yield text[len(done) :]
            done = text
            if text.endswith("\n"):  # forget the finished line, or decoding would take quadratic time
                ids, done = [], ""
    if ids and (rest := tokenizer.decode(ids)[len(done) :]):
        yield rest
