"""Decoding with guesses: a drafter proposes tokens, the model reads them in one pass, and the right ones are kept."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lineate.serving.drafting import Drafter, DraftRow, verify
from lineate.serving.engine.continuation import Chosen, Continuation, check_finite, logprobs_of
from lineate.serving.engine.requests import Failed, Guide

logger = logging.getLogger(__name__)


class Guesses:
    """The guesses of one continuation.

    Args:
        tokens: The guesses, the next token first.
        allowed: What the guide allows first and after each guess, `guesses+1 vocab`; None without a guide.
    """

    def __init__(self, tokens: list[int], allowed: Tensor | None = None) -> None:
        self.tokens, self.allowed = tokens, allowed


def propose(
    drafter: Drafter, rows: Sequence[Continuation], most: int, vocab: int, failed: Failed
) -> list[Guesses] | None:
    """Return guesses for each continuation, none beyond its limit or against its guide; None if there are none.

    Args:
        drafter: Guesses tokens.
        rows: The continuations.
        most: The most guesses for each.
        vocab: The tokens of the vocabulary.
        failed: Called with the drafter's exception.
    """
    try:
        found = drafter.propose([DraftRow(row.key, row.ids, row.sampling, row.seen) for row in rows], most)
        pairs = list(zip(rows, found, strict=True))
    except Exception as error:
        failed(error, "guessing failed; this step goes without")
        return None
    try:
        guesses = [_permitted(row, own[: min(most, row.left - 1)], vocab) for row, own in pairs]
    except Exception:  # the guide's exception, which is the same for every call
        logger.exception("a guide could not follow the guesses; this step goes without")
        return None
    return guesses if any(own.tokens for own in guesses) else None


def _permitted(row: Continuation, tokens: list[int], vocab: int) -> Guesses:
    """Return the guesses before the first that ends the continuation, is not a token, or is forbidden by its guide."""
    ends = row.handle.request.stop_tokens
    over = (n for n, token in enumerate(tokens) if token in ends or not 0 <= token < vocab)
    tokens = tokens[: next(over, len(tokens))]
    if row.guide is None:
        return Guesses(tokens)
    allowed = _walk(row.guide, tokens, vocab)
    return Guesses(tokens[: len(allowed) - 1], torch.stack(allowed))


def _walk(guide: Guide, tokens: list[int], vocab: int) -> list[Tensor]:
    """Return the tokens that a guide allows first and after each guess, up to the first forbidden or last guess."""
    allowed, advanced = [guide.allowed(vocab)], 0
    try:
        for token in tokens:
            if not bool(allowed[-1][token]):
                break
            guide.advance(token)
            advanced += 1
            if guide.finished:
                break
            more = guide.allowed(vocab)
            if not bool(more.any()):  # a dead end, which plain decoding may never reach
                break
            allowed.append(more)
    finally:
        guide.rollback(advanced)
    return allowed


def padded(rows: Sequence[Continuation], guesses: Sequence[Guesses]) -> list[list[int]]:
    """Return the tokens to read: each row's last token, its guesses, and padding where other rows have more guesses."""
    t = 1 + max(len(own.tokens) for own in guesses)
    read = [[row.ids[-1], *own.tokens] for row, own in zip(rows, guesses, strict=True)]
    return [own + own[-1:] * (t - len(own)) for own in read]


def choose_guessed(
    rows: Sequence[Continuation], logits: Tensor, guesses: Sequence[Guesses]
) -> list[list[Chosen] | Exception]:
    """Choose the tokens that plain decoding would choose: the right guesses of each row, and one more.

    Args:
        rows: The continuations.
        logits: `rows t vocab`, of each row's last token and of its guesses.
        guesses: The guesses of each row.

    Returns:
        Each row's tokens; a row that fails has its exception.
    """
    try:
        return [*_choose_guessed(rows, logits, guesses)]
    except Exception as error:
        if len(rows) == 1:
            return [error]
        each = range(len(rows))
        return [x for n in each for x in choose_guessed([rows[n]], logits[n : n + 1], [guesses[n]])]


def _choose_guessed(rows: Sequence[Continuation], logits: Tensor, guesses: Sequence[Guesses]) -> list[list[Chosen]]:
    seen = [row.seen for row in rows] if any(row.seen is not None for row in rows) else None
    tokens, options = [own.tokens for own in guesses], [row.sampling for row in rows]
    chosen = verify(logits, tokens, options, [row.position for row in rows], seen, _allowed(guesses, logits))
    highest = logits.amax(-1).tolist()
    found: list[list[Chosen]] = []
    for n, (row, own) in enumerate(zip(rows, chosen, strict=True)):
        check_finite(highest[n][: len(own)])
        top = row.handle.request.logprobs
        entries = [None] * len(own) if top is None else logprobs_of(logits[n, : len(own)], own, top)
        found.append(list(zip(own, entries, strict=True)))
    return found


def _allowed(guesses: Sequence[Guesses], logits: Tensor) -> Tensor | None:
    """Return which tokens the guides allow, `rows t vocab`, or None if there are no guides."""
    if all(own.allowed is None for own in guesses):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for n, own in enumerate(guesses):
        if own.allowed is not None:
            allowed[n, : len(own.allowed)] = own.allowed
    return allowed.to(logits.device)
