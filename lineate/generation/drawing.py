"""Draws of tokens at a temperature, in torch: the noise, and the candidates of each row.

token = argmax_i (logits_i / temperature + noise(seed, position, i)),    noise = -log(-log(1 - u)),  u in (0, 1)
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native.choice import Options

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step between counters of the hash: 2^64 over the golden ratio, odd, as a signed number."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""The factors of splitmix64's finaliser."""
BITS = 40
"""Bits of a uniform number; even a token with a probability of 1e-10 is drawn with the right frequency."""
BLOCK = 64
"""Tokens of a block of noise, a power of 2: one hash gives the highest noise of a block."""
SLACK = 1e-3
"""Bounds on noise are this much wider than in exact arithmetic."""
FEW_BLOCKS = 64
"""Blocks of a row that draws without waiting for the device check, which nearly always suffices."""

Kind = Literal["plain", "top_k", "top_p"]
"""Which tokens of a row are drawn from: all, the k likeliest, or the likeliest whose probabilities reach p."""


def gumbel_noise(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of tokens, float32.

    The uniform numbers of a block of 64 tokens are drawn as their minimum m, the token that has it, and 63 numbers
    between m and 1: then they are independent, and m alone bounds the noise of the block.

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


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the device.

    Args:
        values: The numbers.
        dtype: The dtype.
        device: The device.
    """
    pinned = device.type == "cuda"  # memory that is not pinned would be copied after all earlier launches
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


class Rows:
    """Rows that are drawn at a temperature: their logits in blocks, and the options as tensors."""

    def __init__(self, logits: Tensor, options: Options, positions: Tensor) -> None:
        self.vocab, self.device = logits.shape[-1], logits.device
        self.options, self.positions = options, positions
        rest = -self.vocab % BLOCK
        self.logits = F.pad(logits, (0, rest), value=-torch.inf) if rest else logits  # rows (blocks of 64)
        in_blocks = self.logits.unflatten(-1, (-1, BLOCK))
        highest = in_blocks.amax(-1)  # rows blocks
        block = highest.argmax(-1, keepdim=True)
        self.best = highest.gather(-1, block).float()  # NaN if any logit of the row is
        self.temperatures, self.least = options.temperatures[:, None], options.least[:, None]
        self.highest = self.scaled(highest)
        own = in_blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
        self.first = block * BLOCK + own.argmax(-1, keepdim=True)  # the likeliest token
        self.few = min(FEW_BLOCKS, highest.shape[1])

    def check_finite(self) -> None:
        """Raise unless the highest logit of every row is finite."""
        if not bool(self.best.isfinite().all()):
            wrong = (~self.best[:, 0].isfinite()).nonzero()[:, 0].tolist()
            raise ValueError(
                f"logits must have a highest value that is finite in every row, got {self.best[wrong[0], 0].item()}; "
                "the model overflowed, or allowed leaves no token"
            )

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits over the temperature, 0 for the highest of a row."""
        # The difference comes first, so that a very low temperature does not overflow.
        return (logits.float() - self.best).div_(self.temperatures)

    def candidates(self, blocks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of all tokens of some blocks, `rows n` in order, and their scaled logits.

        Args:
            blocks: Which blocks, `rows blocks` in order.
            real: Whether a block is valid; the logits of others are -inf.
        """
        ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=self.device)).flatten(1)
        values = self.scaled(self.logits.gather(-1, ids))
        return ids, values.masked_fill_(~real[:, :, None].expand(-1, -1, BLOCK).flatten(1), -torch.inf)

    def few_candidates(self, bounds: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates in the wanted ones of the FEW_BLOCKS blocks with the highest bounds.

        Args:
            bounds: A number for each block, `rows blocks`; of equal ones the lower block counts as higher.
            wanted: Which blocks are candidates, `rows blocks`: those whose bound is high enough.
        """
        bits = (bounds + 0.0).view(torch.int32).long()  # + 0.0: there is no -0.0
        in_order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
        key = in_order - torch.arange(bounds.shape[1], device=self.device)
        blocks = key.topk(self.few, -1, sorted=False).indices.sort(-1).values
        return self.candidates(blocks, wanted.gather(-1, blocks))

    def draw(self, kind: Kind) -> Tensor:
        """Return the tokens of rows that are all of one kind; raise unless the highest logit of every row is finite."""
        self.check_finite()
        if kind != "plain":
            return self.draw_filtered(self.total() if kind == "top_p" else None)
        bounds, reached = self.bounds()
        return self.winners(*self.candidates(*_packed(bounds >= reached)))

    def try_draw(self, kind: Kind) -> Tensor:
        """Return the result of draw without waiting for the device.

        A row has -1 if its logits are not finite, or if it is so flat that more blocks must be checked.
        """
        if kind == "plain":
            bounds, reached = self.bounds()
            wanted = bounds >= reached
            tokens, enough = self.winners(*self.few_candidates(bounds, wanted)), wanted.sum(-1) <= self.few
        else:
            tokens, enough = self.try_filtered(self.total() if kind == "top_p" else None)
        return torch.where(enough & self.best[:, 0].isfinite(), tokens, -1)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return a bound on the sums of value and noise of each block, `rows blocks`, and a sum that is reached."""
        blocks = torch.arange(self.highest.shape[1], device=self.device)
        lowest, lane = _minima(_keys(self.options.seeds, self.positions), blocks)
        noise = _gumbel(lowest)  # the highest of each block
        reached = self.scaled(self.logits.gather(-1, blocks * BLOCK + lane))
        reached = reached.masked_fill_(reached < self.least, -torch.inf).add_(noise).amax(-1, keepdim=True)
        reached = torch.maximum(reached, gumbel_noise(self.options.seeds, self.positions, self.first))
        return self.highest.masked_fill(self.highest < self.least, -torch.inf) + noise, reached - SLACK

    def draw_filtered(self, total: Tensor | None) -> Tensor:
        """Draw with top_k or top_p; only tokens that may be among the kept ones are sorted.

        Args:
            total: The sum of exp(scaled) of each row, `rows`, for rows that are filtered by top_p alone; else None.
        """
        ordered = self.highest.sort(dim=-1, descending=True).values
        count = self.first_count(total)
        while True:
            # At least `count` tokens reach the bound, and all that do are in blocks whose highest does.
            bound = ordered.gather(-1, count[:, None] - 1)
            ids, values = self.candidates(*_packed(self.highest >= bound))
            if total is None or not bool((short := self.falls_short(values, bound, count, total)).any()):
                break
            count = torch.where(short, count * 4, count).clamp_(max=ordered.shape[1])
        at, real = _packed(values >= self.least_kept(bound, count, total))
        ids, values = ids.gather(-1, at), values.gather(-1, at).masked_fill_(~real, -torch.inf)
        return self.filtered_winners(ids, values, total)

    def try_filtered(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the result of draw_filtered, and for which rows a few blocks are enough, `rows` each."""
        count = self.first_count(total)
        bound = self.highest.topk(self.few, -1).values.gather(-1, count.clamp(max=self.few)[:, None] - 1)
        # Tokens at the bound may be left out, in higher blocks than those taken; at least `few` tokens go before them.
        ids, values = self.few_candidates(self.highest, self.highest >= bound)
        enough = count <= self.few
        if total is not None:
            above = torch.nextafter(bound, torch.full_like(bound, torch.inf))
            enough &= ~self.falls_short(values, above, count, total)
        values.masked_fill_(values < self.least_kept(bound, count, total), -torch.inf)
        return self.filtered_winners(ids, values, total), enough

    def total(self) -> Tensor:
        """Return the sum of exp(scaled) of each row, `rows`."""
        # log_softmax sums each row by itself, in the same order in every batch.
        return (-self.scaled(self.logits).log_softmax(-1).amax(-1)).double().exp()

    def first_count(self, total: Tensor | None) -> Tensor:
        """Return how many blocks, those whose highest tokens stand first, have candidates: `rows`."""
        count = self.options.ks if total is None else torch.full_like(self.options.ks, FEW_BLOCKS)
        return count.clamp(max=self.highest.shape[1])

    def falls_short(self, values: Tensor, bound: Tensor, count: Tensor, total: Tensor) -> Tensor:
        """Return which rows need more blocks, because the candidates that reach the bound have less than p, `rows`."""
        mass = values.double().exp().masked_fill_(values < bound, 0).sum(-1)
        return (mass < self.options.ps * total * (1 + 1e-6)) & (count < self.highest.shape[1])

    def least_kept(self, bound: Tensor, count: Tensor, total: Tensor | None) -> Tensor:
        """Return a bound on the scaled logits of the tokens that can be kept, `rows 1`."""
        least: Tensor | float = -torch.inf
        if total is not None:
            # Tokens with a probability below (1 - p) / vocab have less than 1 - p together, so p never keeps them.
            least = total.log() + torch.log1p(-self.options.ps) - math.log(self.vocab) - SLACK
            least = least.float()[:, None]
        return torch.where(count[:, None] < self.highest.shape[1], bound, least)

    def filtered_winners(self, ids: Tensor, values: Tensor, total: Tensor | None) -> Tensor:
        """Return the winners among the candidates that top_k, top_p and min_p keep."""
        values, order = values.sort(dim=-1, descending=True, stable=True)  # equal ones stay in the order of their ids
        ids = ids.gather(-1, order)
        kept = torch.arange(values.shape[-1], device=self.device) < self.options.ks[:, None]
        weights = values.double().exp().masked_fill_(~kept, 0)
        sums = weights.cumsum(-1)
        total = sums[:, -1] if total is None else total
        kept &= sums - weights < (self.options.ps * total)[:, None]  # likelier ones have less than p
        kept[:, 0] = True
        return self.winners(ids, values.masked_fill_(~kept, -torch.inf))

    def winners(self, ids: Tensor, values: Tensor) -> Tensor:
        """Return the id of each row with the highest sum of value and noise, of those that min_p keeps."""
        noise = gumbel_noise(self.options.seeds, self.positions, ids)
        values = values.masked_fill(values < self.least, -torch.inf)
        return ids.gather(-1, noise.add_(values).argmax(-1, keepdim=True))[:, 0]


def _packed(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row is True, `rows n` in order, and which of these are real: rows may have fewer than n."""
    rows, found = kept.nonzero(as_tuple=True)
    counts = kept.sum(-1)
    at = torch.arange(len(found), device=kept.device) - (counts.cumsum(0) - counts)[rows]
    packed = torch.zeros(len(kept), int(counts.max()), dtype=torch.int64, device=kept.device)
    packed[rows, at] = found
    return packed, torch.arange(packed.shape[1], device=kept.device) < counts[:, None]
