"""Coupled sampling: a token is a pure function of its logits, the options, the seed and its position.

    token = argmax_i (logits_i / temperature + noise(seed, position, i)),    noise = -log(-log(1 - u)),  u in (0, 1)

The noise has Gumbel's distribution, so that token i is drawn with its probability softmax(logits / temperature)_i. It
is a hash of (seed, position, i): nothing is drawn from a generator, so neither the other rows of a batch, nor the order
of calls, nor a restart can change what is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native.choice import Options, choose
from lineate.tracing import is_eager

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step between counters of the hash: 2^64 over the golden ratio, odd, as a signed number."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""The factors of splitmix64's finaliser."""
BITS = 40
"""Uniform numbers have so many bits; then even a token with a probability of 1e-10 is drawn as often as it should."""
BLOCK = 64
"""Noise is made in blocks of so many tokens, a power of 2: a block's highest noise is known from one hash."""
SLACK = 1e-3
"""Bounds on noise are this much wider than in exact arithmetic."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen.

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

    @property
    def filtered(self) -> bool:
        """Whether candidates must be sorted."""
        return self.top_k > 0 or self.top_p < 1

    def resolved(self, vocab: int) -> Options:
        """Return the options of a draw, as numbers that need no further thought.

        Args:
            vocab: How many tokens there are.
        """
        limits, seed = torch.finfo(torch.float32), (self.seed + 2**63) % 2**64 - 2**63
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        least = math.log(self.min_p) if self.min_p else -math.inf
        return Options(temperature, least, min(self.top_k, vocab) or vocab, self.top_p, seed)


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
    logits = _adjusted(logits, sampling, seen, allowed)
    if all(row.greedy for row in sampling):
        return _likeliest(logits, allowed)
    groups: dict[tuple[bool, bool], list[int]] = {}
    for n, row in enumerate(sampling):
        groups.setdefault((row.greedy, row.filtered and not row.greedy), []).append(n)
    tokens = torch.empty(len(sampling), dtype=torch.int64, device=logits.device)
    for (greedy, filtered), rows in groups.items():
        whole = len(rows) == len(sampling)
        at = slice(None) if whole else torch.tensor(rows, device=logits.device)
        own = logits[at]
        if greedy:
            tokens[at] = _likeliest(own, allowed)
        else:
            tokens[at] = _draw(own, [sampling[n] for n in rows], positions.to(logits.device)[at], filtered)
    return tokens


def _draw(logits: Tensor, sampling: list[Sampling], positions: Tensor, filtered: bool) -> Tensor:
    """Draw the tokens of rows that are not greedy; C and torch differ by the rounding of logarithms."""
    if logits.is_cpu and is_eager(logits, positions):
        tokens = choose(logits, [row.resolved(logits.shape[-1]) for row in sampling], positions)
        if tokens is not None:
            return tokens
    drawn = _Rows(logits, sampling, positions)
    return drawn.draw_filtered() if filtered else drawn.draw()


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


def gumbel_noise(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of tokens, float32.

    The uniform numbers of a block of 64 tokens are drawn as their minimum m, the token that has it, and 63 numbers
    between m and 1: then they are independent, and m alone says how high the noise of the block is.

    Args:
        seeds: The seed of each row, int64 `rows`.
        positions: The position of each row, `rows`.
        tokens: Token ids, `rows n` or `n`.

    Returns:
        Noise `rows n`.
    """
    keys = _keys(seeds, positions)
    lowest, lane = _minima(keys, tokens // BLOCK)
    others = _uniform(_mixed(tokens * GOLDEN + _mixed(keys + 1)[:, None]))
    u = torch.where(tokens % BLOCK == lane, lowest, others.mul_(1 - lowest).add_(lowest))  # rows n
    return _gumbel(u)


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a hash of the seed and position of each row."""
    return _mixed(_mixed(seeds + GOLDEN) + positions.long() * GOLDEN)


def _minima(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest uniform number of each block and the token of the block that has it: `rows n` each."""
    hashed = _mixed(blocks * GOLDEN + keys[:, None])
    lane = hashed & BLOCK - 1
    return _uniform(hashed).neg_().log1p_().div_(BLOCK).expm1_().neg_(), lane  # 1 - (1 - u)^(1 / 64)


def _uniform(hashed: Tensor) -> Tensor:
    """Return the highest bits of a hash as a number above 0 and below 1; float32 keeps small ones exact."""
    high = hashed.bitwise_right_shift_(64 - BITS).bitwise_and_(2**BITS - 1)
    return high.float().add_(0.5).mul_(2.0**-BITS).clamp_(max=1 - 2.0**-24)


def _gumbel(u: Tensor) -> Tensor:
    return u.clamp(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _mixed(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64, in arithmetic that wraps at 64 bits; x, a temporary, is overwritten."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


class _Rows:
    """Rows that are drawn at a temperature: their logits in blocks, and the options as tensors."""

    def __init__(self, logits: Tensor, sampling: list[Sampling], positions: Tensor) -> None:
        self.vocab, self.device = logits.shape[-1], logits.device
        self.logits = F.pad(logits, (0, -self.vocab % BLOCK), value=-torch.inf)  # rows (blocks of 64)
        in_blocks = self.logits.unflatten(-1, (-1, BLOCK))
        highest = in_blocks.amax(-1)  # rows blocks
        block = highest.argmax(-1, keepdim=True)
        self.best = highest.gather(-1, block).float()
        if not bool(self.best.isfinite().all()):
            wrong = (~self.best[:, 0].isfinite()).nonzero()[:, 0].tolist()
            raise ValueError(
                f"logits must have a highest value that is finite in every row, got {self.best[wrong[0], 0].item()}; "
                "the model overflowed, or allowed leaves no token"
            )
        self.options = [row.resolved(self.vocab) for row in sampling]
        self.temperatures = self.tensor([row.temperature for row in self.options])[:, None]
        self.least = self.tensor([row.least for row in self.options])[:, None]
        self.seeds, self.positions = self.tensor([row.seed for row in self.options], torch.int64), positions
        self.highest = self.scaled(highest)
        own = in_blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
        self.first = block * BLOCK + own.argmax(-1, keepdim=True)  # the likeliest token

    def tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits over the temperature, 0 for the highest of a row."""
        # The difference comes first, so that a very low temperature does not overflow.
        return (logits.float() - self.best).div_(self.temperatures)

    def candidates(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of all tokens of some blocks, `rows n` in order, and their scaled logits.

        Args:
            blocks: which blocks, `rows blocks` bool; rows with fewer than others are filled with -inf.
        """
        packed, real = _packed(blocks)
        ids = (packed[:, :, None] * BLOCK + torch.arange(BLOCK, device=self.device)).flatten(1)
        values = self.scaled(self.logits.gather(-1, ids))
        return ids, values.masked_fill_(~real.repeat_interleave(BLOCK, -1), -torch.inf)

    def draw(self) -> Tensor:
        """Return the tokens of rows without top_k and top_p."""
        blocks = torch.arange(self.highest.shape[1], device=self.device)
        lowest, lane = _minima(_keys(self.seeds, self.positions), blocks)
        noise = _gumbel(lowest)  # the highest of each block
        reached = self.scaled(self.logits.gather(-1, blocks * BLOCK + lane))
        reached = reached.masked_fill_(reached < self.least, -torch.inf).add_(noise).amax(-1, keepdim=True)
        reached = torch.maximum(reached, gumbel_noise(self.seeds, self.positions, self.first))
        bounds = self.highest.masked_fill(self.highest < self.least, -torch.inf) + noise
        ids, values = self.candidates(bounds >= reached - SLACK)
        values.masked_fill_(values < self.least, -torch.inf)
        return self.winners(ids, values)

    def draw_filtered(self) -> Tensor:
        """Return the tokens of rows with top_k or top_p; only tokens that may be among the kept ones are sorted."""
        ks = self.tensor([row.k for row in self.options], torch.int64)
        ps = self.tensor([row.p for row in self.options], torch.float64)
        by_p = (ks == self.vocab) & (ps < 1)
        total = torch.zeros_like(ps)
        if bool(by_p.any()):
            # log_softmax sums each row by itself, in the same order in every batch.
            own = self.scaled(self.logits)[by_p].log_softmax(-1)
            total[by_p] = (-own.amax(-1)).double().exp()  # the sum of exp(scaled)
        ordered = self.highest.sort(dim=-1, descending=True).values
        count = torch.where(by_p, 64, ks).clamp_(max=ordered.shape[1])  # blocks whose highest tokens stand first
        while True:
            # At least `count` tokens reach the bound, and all that do are in blocks whose highest does.
            bound = ordered.gather(-1, count[:, None] - 1)
            ids, values = self.candidates(self.highest >= bound)
            weights = values.double().exp()
            mass = weights.masked_fill(values < bound, 0).sum(-1)
            short = by_p & (mass < ps * total * (1 + 1e-6)) & (count < ordered.shape[1])
            if not bool(short.any()):
                break
            count = torch.where(short, count * 4, count).clamp_(max=ordered.shape[1])
        # Tokens with a probability below (1 - p) / vocab have less than 1 - p together, so they are never kept by p.
        least = torch.where(by_p, total.log() + torch.log1p(-ps) - math.log(self.vocab) - SLACK, -torch.inf)[:, None]
        bound = torch.where(count[:, None] < ordered.shape[1], bound, least.float())
        at, real = _packed(values >= bound)
        ids, values = ids.gather(-1, at), values.gather(-1, at).masked_fill_(~real, -torch.inf)
        values, order = values.sort(dim=-1, descending=True, stable=True)  # equal ones stay in the order of their ids
        ids = ids.gather(-1, order)
        kept = torch.arange(values.shape[-1], device=self.device) < ks[:, None]
        weights = values.double().exp().masked_fill_(~kept, 0)
        sums = weights.cumsum(-1)
        total = torch.where(by_p, total, sums[:, -1])
        kept &= (sums - weights < (ps * total)[:, None]) & (values >= self.least)  # likelier ones have less than p
        kept[:, 0] = True
        return self.winners(ids, values.masked_fill_(~kept, -torch.inf))

    def winners(self, ids: Tensor, values: Tensor) -> Tensor:
        """Return the id of each row with the highest sum of value and noise."""
        noise = gumbel_noise(self.seeds, self.positions, ids)
        return ids.gather(-1, noise.add_(values).argmax(-1, keepdim=True))[:, 0]


def _packed(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row is True, `rows n` in order, and which of these are real: rows may have fewer than n."""
    rows, found = kept.nonzero(as_tuple=True)
    counts = kept.sum(-1)
    at = torch.arange(len(found), device=kept.device) - (counts.cumsum(0) - counts)[rows]
    packed = torch.zeros(len(kept), int(counts.max()), dtype=torch.int64, device=kept.device)
    packed[rows, at] = found
    return packed, torch.arange(packed.shape[1], device=kept.device) < counts[:, None]


def _adjusted(
    logits: Tensor,
    sampling: Sequence[Sampling],
    seen: Sequence[Mapping[int, int] | None] | None,
    allowed: Tensor | None,
) -> Tensor:
    """Return the logits with penalties, biases and the mask of allowed tokens; a copy if anything changes."""
    biased = [n for n, row in enumerate(sampling) if row.logit_bias]
    counted = [] if seen is None else [n for n, row in enumerate(sampling) if row.penalised and seen[n]]
    if not biased and not counted and allowed is None:
        return logits
    logits = logits.float().clone()
    for n in counted:
        assert seen is not None
        row, tokens = sampling[n], seen[n]
        assert tokens is not None
        ids = torch.tensor(list(tokens), device=logits.device)
        counts = torch.tensor(list(tokens.values()), dtype=torch.float32, device=logits.device)
        x = logits[n, ids]
        x = torch.where(x > 0, x / row.repetition_penalty, x * row.repetition_penalty)
        logits[n, ids] = x - row.frequency_penalty * counts - row.presence_penalty * (counts > 0)
    for n in biased:
        ids = torch.tensor([token for token, _ in sampling[n].logit_bias], device=logits.device)
        more = torch.tensor([x for _, x in sampling[n].logit_bias], dtype=torch.float32, device=logits.device)
        logits[n].index_add_(0, ids, more)
    return logits if allowed is None else logits.masked_fill_(~allowed, -torch.inf)


def _likeliest(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the first of the highest logits of each row; raise if allowed leaves a row no token."""
    tokens = logits.argmax(-1)
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
