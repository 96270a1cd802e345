"""Coupled sampling: a token is a pure function of its logits, the options, the seed and its position.

    token = argmax_i (logits_i / temperature + noise(seed, position, i)),    noise = -log(-log(1 - u)),  u in (0, 1)

The noise has Gumbel's distribution, so that token i is drawn with its probability softmax(logits / temperature)_i. It
is a hash of (seed, position, i): nothing is drawn from a generator, so neither the other rows of a batch, nor the order
of calls, nor a restart can change what is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.generation.drawing import Kind, Rows, on_device
from lineate.native.choice import Options, choose
from lineate.torch_ops.tracing import is_eager


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one sequence.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the k likeliest tokens, the lower ids of equal ones; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p, at least one token.
        min_p: Draw only from tokens with at least this part of the likeliest token's probability.
        repetition_penalty: Divides the positive logits of tokens that occurred, and multiplies the negative ones.
        presence_penalty: Is subtracted from the logits of tokens that were generated.
        frequency_penalty: Is subtracted from the logits of tokens for each time that they were generated.
        logit_bias: Pairs (token, number to add to its logit).
        seed: Seed of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
        for name in ("top_k", "seed"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        check_sampling(self.temperature, self.top_k, self.top_p)
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be at least 0 and at most 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {value}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be an int of at most 64 bits, got {self.seed}")
        for entry in self.logit_bias:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], int) and entry[0] >= 0):
                raise ValueError(f"logit_bias must be pairs (token, number), got {entry!r}")
            _check_number("logit_bias", entry[1])
            if not math.isfinite(entry[1]):
                raise ValueError(f"logit_bias must be finite, got {entry[1]} for token {entry[0]}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether a logit depends on the tokens before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def resolved(self, vocab: int) -> "Draw":
        """Return the options of a row resolved to numbers.

        Args:
            vocab: The number of tokens.
        """
        limits, seed = torch.finfo(torch.float32), (self.seed + 2**63) % 2**64 - 2**63
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        least = math.log(self.min_p) if self.min_p else -math.inf
        k = min(self.top_k, vocab) or vocab
        kind: Kind = "top_k" if k < vocab else "top_p" if self.top_p < 1 else "plain"
        return Draw(None if self.greedy else kind, temperature, least, k, self.top_p, seed)


class Draw(NamedTuple):
    """The resolved sampling options of one row.

    Args:
        kind: Which tokens it is drawn from; None: the likeliest is taken.
        temperature: Divides the logits; above 0.
        least: The lowest logit over the temperature, that of the likeliest token being 0.
        k: Keep the k likeliest tokens, at most the vocabulary.
        p: Keep the likeliest tokens whose probabilities together reach p.
        seed: Seed of the draws, of 64 bits with a sign.
    """

    kind: Kind | None
    temperature: float
    least: float
    k: int
    p: float
    seed: int


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError if a sampling option is out of range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0 (all tokens), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def choose_tokens(
    logits: Tensor,
    sampling: Sequence[Sampling],
    positions: Tensor,
    seen: Sequence[Mapping[int, int] | None] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Choose the next token of every row; a row's token does not depend on the other rows.

    Args:
        logits: Logits `rows vocab`; they are not changed.
        sampling: The options of each row.
        positions: The index of the token being chosen in its sequence, the prompt included, `rows`.
        seen: For each row that has penalties, how often each token was generated; 0 for a token that only the prompt
            has. The presence and frequency penalties count generated tokens, the repetition penalty takes them all.
        allowed: Which tokens may be chosen, `rows vocab` bool; None for all.

    Returns:
        Tokens `rows`, int64, on the device of the logits.
    """
    _check_rows(logits, sampling, positions, seen, allowed)
    given, logits = logits, adjusted(logits, sampling, seen)
    if allowed is not None:
        logits = (logits.float().clone() if logits is given else logits).masked_fill_(~allowed, -torch.inf)
    if all(row.greedy for row in sampling):
        return _likeliest(logits, allowed)
    tokens = torch.empty(len(sampling), dtype=torch.int64, device=logits.device)
    for group in _grouped([row.resolved(logits.shape[-1]) for row in sampling], logits.device):
        own, places = group.rows_of(logits), group.rows_of(positions.to(logits.device))
        drawn = _likeliest(own, allowed) if group.options is None else group.draw(own, places)
        tokens[slice(None) if group.at is None else group.at] = drawn
    return tokens


class Draws:
    """Draws the tokens of rows without waiting for a GPU.

        draws = Draws([row.resolved(vocab) for row in sampling], logits.device)
        tokens = draws.try_tokens(logits, positions)         # those of choose_tokens, or -1

    Args:
        rows: The options of each row; None for a row that is left out.
        device: The device of the logits.
    """

    def __init__(self, rows: Sequence[Draw | None], device: torch.device) -> None:
        self._rows, self._device = len(rows), device
        self._groups = _grouped(rows, device)

    def try_tokens(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the token of each row, `rows`; -1 where choose_tokens must be called.

        These are rows that are left out, rows whose logits are not finite, and rarely a row that is so flat that more
        of its tokens must be checked than usual.

        Args:
            logits: Logits `rows vocab`; they are not changed.
            positions: The index of the token being chosen in its sequence, the prompt included, `rows`.
        """
        found = None
        for group in self._groups:
            tokens = group.try_tokens(group.rows_of(logits), group.rows_of(positions))
            if group.at is None:
                return tokens
            found = torch.full((self._rows,), -1, device=self._device) if found is None else found
            found[group.at] = tokens
        return torch.full((self._rows,), -1, device=self._device) if found is None else found


class _Group(NamedTuple):
    """Rows that are drawn in the same way.

    Args:
        at: Which rows; None: all.
        kind: Which tokens they are drawn from; None: the likeliest is taken.
        options: Their options; None if they have no kind.
    """

    at: Tensor | None
    kind: Kind | None
    options: Options | None

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor that are in this group."""
        return x if self.at is None else x[self.at]

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw the tokens of rows that are not greedy; C and torch differ by the rounding of logarithms."""
        assert self.kind is not None and self.options is not None
        found = None
        if logits.is_cpu and is_eager(logits, positions):
            found = choose(logits, self.options, positions)
        return Rows(logits, self.options, positions).draw(self.kind) if found is None else found

    def try_tokens(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of the rows; -1 where that is not possible without waiting, or logits are not finite."""
        if self.kind is None or self.options is None:
            tokens = logits.argmax(-1)  # NaN counts as the highest
            return torch.where(logits.gather(-1, tokens[:, None])[:, 0].isfinite(), tokens, -1)
        found = choose(logits, self.options, positions) if logits.is_cpu else None
        if found is None:
            return Rows(logits, self.options, positions).try_draw(self.kind)
        return torch.where(logits.amax(-1).isfinite(), found, -1)


def _grouped(rows: Sequence[Draw | None], device: torch.device) -> list[_Group]:
    """Return the rows in groups that are drawn in the same way."""
    groups: dict[Kind | None, list[int]] = {}
    for n, row in enumerate(rows):
        if row is not None:
            groups.setdefault(row.kind, []).append(n)
    found = []
    for kind, numbers in groups.items():
        at = None if len(numbers) == len(rows) else on_device(numbers, torch.int64, device)
        options = None if kind is None else _options([row for n in numbers if (row := rows[n]) is not None], device)
        found.append(_Group(at, kind, options))
    return found


def _options(rows: Sequence[Draw], device: torch.device) -> Options:
    """Return the options of rows as tensors."""
    _, temperatures, least, ks, ps, seeds = zip(*rows, strict=True)
    return Options(
        on_device(temperatures, torch.float32, device), on_device(least, torch.float32, device),
        on_device(ks, torch.int64, device), on_device(ps, torch.float64, device),
        on_device(seeds, torch.int64, device),
    )  # fmt: skip


def log_probabilities(logits: Tensor, tokens: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of chosen tokens and of the likeliest ones, before any sampling option.

    Args:
        logits: Logits `rows vocab`.
        tokens: The chosen tokens, `rows`.
        top: How many of the likeliest tokens to return.

    Returns:
        The log-probabilities of the tokens `rows`; the likeliest tokens `rows top`; their log-probabilities.
    """
    if top < 0:
        raise ValueError(f"top must be at least 0, got {top}")
    values = logits.float().log_softmax(-1)
    best = values.topk(min(top, values.shape[-1]), -1)
    return values.gather(-1, tokens[:, None].to(values.device))[:, 0], best.indices, best.values


def adjusted(
    logits: Tensor, sampling: Sequence[Sampling], seen: Sequence[Mapping[int, int] | None] | None = None
) -> Tensor:
    """Return the logits with penalties and biases, without waiting for a GPU; a copy if anything changes.

    Args:
        logits: Logits `rows vocab`.
        sampling: The options of each row, whose biases name tokens of the vocabulary.
        seen: As for choose_tokens.
    """
    biased = [n for n, row in enumerate(sampling) if row.logit_bias]
    counted = [] if seen is None else [n for n, row in enumerate(sampling) if row.penalised and seen[n]]
    if not biased and not counted:
        return logits
    logits, device = logits.float().clone(), logits.device
    for n in counted:
        assert seen is not None
        row, tokens = sampling[n], seen[n]
        assert tokens is not None
        ids = on_device(list(tokens), torch.int64, device)
        counts = on_device(list(tokens.values()), torch.float32, device)
        x = logits[n, ids]
        x = torch.where(x > 0, x / row.repetition_penalty, x * row.repetition_penalty)
        logits[n, ids] = x - row.frequency_penalty * counts - row.presence_penalty * (counts > 0)
    for n in biased:
        ids = on_device([token for token, _ in sampling[n].logit_bias], torch.int64, device)
        more = on_device([x for _, x in sampling[n].logit_bias], torch.float32, device)
        logits[n].index_add_(0, ids, more)
    return logits


def _likeliest(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the first of the highest logits of each row; raise if allowed leaves a row no token."""
    tokens = logits.max(-1).indices if logits.is_cpu else logits.argmax(-1)  # the same; faster on a CPU
    if allowed is not None and bool((logits.gather(-1, tokens[:, None]) == -torch.inf).any()):
        raise ValueError("allowed must leave every row at least one token with a finite logit, got none in some row")
    return tokens


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _check_rows(
    logits: Tensor,
    sampling: Sequence[Sampling],
    positions: Tensor,
    seen: Sequence[Mapping[int, int] | None] | None,
    allowed: Tensor | None,
) -> None:
    """Raise if the arguments of choose_tokens do not have one entry a row, or name tokens that do not exist."""
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (rows, vocab), got {tuple(logits.shape)}")
    rows, vocab = logits.shape
    if len(sampling) != rows:
        raise ValueError(f"sampling must have one entry a row, {rows}, got {len(sampling)}")
    if positions.shape != (rows,) or positions.is_floating_point():
        raise ValueError(
            f"positions must be ints of shape (rows,) = {(rows,)}, got {positions.dtype} of {tuple(positions.shape)}"
        )
    if seen is not None and len(seen) != rows:
        raise ValueError(f"seen must have one entry a row, {rows}, got {len(seen)}")
    if allowed is not None and (allowed.shape != logits.shape or allowed.dtype != torch.bool):
        raise ValueError(
            f"allowed must be bool of shape (rows, vocab) = {(rows, vocab)}, got {allowed.dtype} of "
            f"{tuple(allowed.shape)}"
        )
    for n, row in enumerate(sampling):
        if row.logit_bias and (highest := max(token for token, _ in row.logit_bias)) >= vocab:
            raise ValueError(f"logit_bias must name tokens below {vocab}, got {highest}")
        if row.penalised and seen is not None and (own := seen[n]) and not 0 <= min(own) <= max(own) < vocab:
            raise ValueError(f"seen must have tokens in 0..{vocab - 1}, got {min(own)}..{max(own)}")
