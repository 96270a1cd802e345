"""One continuation of a prompt: its tokens so far, and the choice of the next one."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lineate.generation.choice import Draw, Draws, Sampling, adjusted, choose_tokens, log_probabilities
from lineate.models import HybridLM
from lineate.serving.engine.requests import Event, Guide, Handle, TokenLogprob


class Continuation:
    """A row that runs or is about to run.

    Args:
        handle: The handle of its request.
        index: Which continuation of the request it is.
        limit: The most tokens that it may have.
        cached_tokens: How many tokens of the prompt were not read.
    """

    def __init__(self, handle: Handle, index: int, limit: int, cached_tokens: int) -> None:
        request = handle.request
        self.handle, self.index, self.limit, self.cached_tokens = handle, index, limit, cached_tokens
        seed = request.sampling.seed + index
        self.sampling = replace(request.sampling, seed=seed if seed < 2**64 else seed - 2**64)
        self.guide: Guide | None = None
        self.draw: Draw | None = None
        """Its sampling options; None if there is a guide or log-probabilities are requested."""
        self.adjusts = False
        """Whether its logits are changed by penalties or biases before a token is drawn."""
        self.ids = list(request.ids)
        """The prompt and the tokens so far."""
        self.end = len(request.ids) + limit
        """The most tokens that it may have, including the prompt."""
        self.stop_tokens = request.stop_tokens
        self.over = False
        """Whether it has left its row."""
        self.seen: dict[int, int] | None = None
        if self.sampling.penalised:  # tokens that only the prompt has count 0
            self.seen = dict.fromkeys(request.ids, 0)

    def begin(self, vocab: int) -> None:
        """Take a copy of the request's guide, before the first token.

        Args:
            vocab: How many tokens the model has.
        """
        request = self.handle.request
        self.guide = None if request.guide is None else request.guide.copy()
        biases_exist = all(token < vocab for token, _ in request.sampling.logit_bias)
        if self.guide is None and request.logprobs is None and biases_exist:
            self.draw = self.sampling.resolved(vocab)
            self.adjusts = self.sampling.penalised or bool(self.sampling.logit_bias)

    @property
    def key(self) -> tuple[int, int]:
        """Its name."""
        return self.handle.number, self.index

    @property
    def position(self) -> int:
        """The index of the next token in its sequence, the prompt included."""
        return len(self.ids)

    @property
    def left(self) -> int:
        """The number of tokens that it may still add."""
        return self.end - len(self.ids)

    def take(self, token: int) -> str | None:
        """Add a token; return why the continuation ends with it, or None."""
        self.ids.append(token)
        if self.seen is not None:
            self.seen[token] = self.seen.get(token, 0) + 1
        if token in self.stop_tokens:
            return "stop"
        if self.guide is not None:
            self.guide.advance(token)
            if self.guide.finished:
                return "stop"
        return "length" if len(self.ids) >= self.end else None

    def event(
        self,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finished: str | None = None,
        error: str | None = None,
    ) -> Event:
        """Return an event of this continuation."""
        return Event(self.index, tuple(tokens), tuple(logprobs), finished, error, self.cached_tokens)


PROMPT_ROWS = 64
"""Tokens of a prompt whose logits are in memory at once."""
Chosen = tuple[int, TokenLogprob | None]
"""A token, and its log-probability if the request asks for it."""


_PLAIN = Sampling()


class Lineup:
    """Continuations in the order of their rows, and the draw of the next token of each.

    Args:
        rows: The continuations.
        device: The device of the logits.
    """

    def __init__(self, rows: Sequence[Continuation], device: torch.device) -> None:
        self.rows = tuple(rows)
        self._draws = Draws([row.draw for row in rows], device)
        self._options = [row.sampling if row.adjusts else _PLAIN for row in rows]
        self._adjusts = any(row.adjusts for row in rows)
        self._seen = [row.seen for row in rows]
        self.stop_tokens = frozenset[int]().union(*{row.stop_tokens for row in rows})
        """The tokens that end at least one row."""
        self.left = min(row.left for row in rows)
        """The number of tokens that every row may still add."""

    def choose(self, logits: Tensor, positions: Tensor) -> "NextTokens":
        """Begin to choose the next tokens, without waiting for the device.

        Args:
            logits: `rows vocab`; they must not be changed elsewhere.
            positions: The index of each row's next token in its sequence, `rows`.
        """
        changed = adjusted(logits, self._options, self._seen) if self._adjusts else logits
        return NextTokens(self, logits, self._draws.try_tokens(changed, positions))

    def goes_on(self, tokens: list[int]) -> bool:
        """Whether none of these tokens ends its row, so that the next ones can be drawn before these are taken."""
        within = self.left > 0 and self.stop_tokens.isdisjoint(tokens)
        return within and not self._adjusts and min(tokens) >= 0


class NextTokens:
    """The next tokens of a lineup, which the device may still be drawing.

    Args:
        lineup: The continuations.
        logits: `rows vocab`.
        drawn: The tokens `rows`; -1 where one must be chosen on the host.
    """

    def __init__(self, lineup: Lineup, logits: Tensor, drawn: Tensor) -> None:
        self.lineup = lineup
        self.drawn: Tensor | None = drawn
        """The tokens on the device, `rows`; None if some were chosen on the host."""
        self.all_go_on = False
        """Whether the next step may begin before the tokens are taken; known after wait."""
        self._logits, self._host, self._copied = logits, drawn, None
        if drawn.is_cuda:
            self._host = torch.empty(drawn.shape, dtype=drawn.dtype, device="cpu", pin_memory=True)
            self._host.copy_(drawn, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(drawn.device))

    def wait(self) -> list[int | Chosen | Exception]:
        """Wait for the device; return each row's token, or the exception of a row that fails."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        found: list[int | Chosen | Exception] = [*tokens]
        self.lineup.left -= 1
        self.all_go_on = self.lineup.goes_on(tokens)
        if min(tokens) < 0:
            self.drawn, rest = None, [n for n, token in enumerate(tokens) if token < 0]
            rows = [self.lineup.rows[n] for n in rest]
            logits = self._logits if len(rest) == len(found) else self._logits[torch.tensor(rest)]
            for n, chosen in zip(rest, choose(rows, logits), strict=True):
                found[n] = chosen
        return found


def choose(rows: Sequence[Continuation], logits: Tensor) -> list[Chosen | Exception]:
    """Choose the next token of each continuation from logits `rows vocab`; a row that fails has its exception."""
    try:
        return list(_choose(rows, logits))
    except Exception as error:
        if len(rows) == 1:
            return [error]
        return [x for n, row in enumerate(rows) for x in choose([row], logits[n : n + 1])]


def _choose(rows: Sequence[Continuation], logits: Tensor) -> list[Chosen]:
    positions = torch.tensor([row.position for row in rows]).to(logits.device)
    seen = [row.seen for row in rows] if any(row.seen is not None for row in rows) else None
    tokens = choose_tokens(logits, [row.sampling for row in rows], positions, seen, _allowed(rows, logits))
    highest = logits.amax(-1).double()  # NaN if any logit of the row is
    found, best = torch.stack((tokens.double(), highest)).tolist()  # one wait for the device
    check_finite(best)
    chosen = [int(token) for token in found]
    entries: list[TokenLogprob | None] = [None] * len(rows)
    for n, row in enumerate(rows):
        if row.handle.request.logprobs is not None:
            entries[n] = logprobs_of(logits[n : n + 1], chosen[n : n + 1], row.handle.request.logprobs)[0]
    return list(zip(chosen, entries, strict=True))


def check_finite(highest: Sequence[float]) -> None:
    """Raise unless the highest logits of all rows are finite."""
    if not all(-torch.inf < x < torch.inf for x in highest):
        raise ArithmeticError(f"the model's logits must be finite, got a highest one of {', '.join(map(str, highest))}")


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, and of the likeliest ones, from logits `tokens vocab`."""
    own, ids, values = (x.tolist() for x in log_probabilities(logits, torch.tensor(tokens), top))
    each = zip(tokens, own, ids, values, strict=True)
    return [TokenLogprob(token, x, tuple(zip(best, y, strict=True))) for token, x, best, y in each]


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens after the first, which are computed while it is read.

    Args:
        model: The model.
        ids: The prompt.
        top: How many of the likeliest tokens are listed with each one.
    """

    def __init__(self, model: HybridLM, ids: tuple[int, ...], top: int) -> None:
        self._model, self._ids, self._top = model, ids, top
        self.entries: list[TokenLogprob] = []

    def read(self, start: int, hidden: Tensor) -> None:
        """Receive the inputs of the model's head of a piece; logits are computed for a few tokens at a time.

        Args:
            start: The index of the piece's first token.
            hidden: `n hidden`.
        """
        for at in range(0, len(hidden), PROMPT_ROWS):
            rows = hidden[at : at + PROMPT_ROWS]
            following = self._ids[start + at + 1 : start + at + 1 + len(rows)]  # the last token of all has none
            if following:
                logits = self._model.logits(rows[None, : len(following)])[0]
                check_finite(logits.amax(-1).tolist())
                self.entries += logprobs_of(logits, following, self._top)


def _allowed(rows: Sequence[Continuation], logits: Tensor) -> Tensor | None:
    """Return which tokens the guides allow, `rows vocab`, or None if there are no guides."""
    if all(row.guide is None for row in rows):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for n, row in enumerate(rows):
        if row.guide is not None:
            allowed[n] = row.guide.allowed(logits.shape[1])
    return allowed.to(logits.device)
