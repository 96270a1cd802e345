"""A memory that is read at every token and written only now and then: a step from a stored state and later tokens.

S is the state as it was stored, and a ring has the m tokens since: key k_i, write r_i and log_decay_i. With G_i the sum
of log_decay over tokens 1 .. i of the ring, and t = m + 1 the token that is read,

    S'_t^T x = (e^{G_t} S)^T x + sum_i ((e^{G_t - G_i} k_i) . x) r_i           for x = k_t and x = q_t
    r_t = beta_t (v_t - S'_t^T k_t)   or   v_t
    o_t = scale (S'_t^T q_t + (k_t . q_t) r_t)
    S_t = e^{G_t} S + sum_{i <= t} (e^{G_t - G_i} k_i) r_i^T                   when the ring is emptied

G_t - G_i is a sum of log_decay over the later tokens alone, never a difference of two sums: no exponent is positive,
and a token that forgets everything (log_decay = -inf) is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.rule import read


class Entries(NamedTuple):
    """The tokens of rings, for any leading dimensions; only the first m of the n entries are read.

    Args:
        keys: `... n k`.
        writes: r, `... n v`.
        log_decay: `... n 1|k`, or None for rules that do not forget.
        number: m, an int tensor that broadcasts to the leading dimensions.
    """

    keys: Tensor
    writes: Tensor
    log_decay: Tensor | None
    number: Tensor

    @property
    def there(self) -> Tensor:
        """Whether an entry is one of the first m, `... n`."""
        return torch.arange(self.keys.shape[-2], device=self.keys.device) < self.number[..., None]

    def clean(self) -> "Entries":
        """Return the entries with zeros in those that are not there, whose values may be anything."""
        absent = ~self.there[..., None]
        decay = None if self.log_decay is None else self.log_decay.masked_fill(absent, 0)
        return Entries(self.keys.masked_fill(absent, 0), self.writes.masked_fill(absent, 0), decay, self.number)


class RingStep(NamedTuple):
    """The result of one token.

    Args:
        output: o_t `... v`.
        write: r_t `... v`.
    """

    output: Tensor
    write: Tensor


def step(
    state: Tensor, entries: Entries, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    corrects: bool,
) -> RingStep:  # fmt: skip
    """Run one token without writing the state, for any leading dimensions.

    state [k, v], as it was stored; q (scaled), k [k]; v [v]; log_decay [1] or [k]; beta [1] or [v]; None means 0 and 1.
    """
    entries = entries.clean()
    decay, weights = _weights(entries, log_decay)
    keys = entries.keys if weights is None else entries.keys * weights  # ... n k

    def answer(x: Tensor) -> Tensor:
        found = read(state, x if decay is None else decay * x)
        return found + (keys @ x.unsqueeze(-1)).mT.matmul(entries.writes).squeeze(-2)

    write = v - answer(k) if corrects else v
    if beta is not None:
        write = beta * write
    return RingStep(answer(q) + (k * q).sum(-1, keepdim=True) * write, write)


def fold(
    state: Tensor, entries: Entries, k: Tensor | None = None, write: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the state after all entries, and after one more token k [k], r [v] with its log_decay if it is given."""
    entries = entries.clean()
    decay, weights = _weights(entries, log_decay)
    keys = entries.keys if weights is None else entries.keys * weights
    new = (state if decay is None else decay.unsqueeze(-1) * state) + keys.mT @ entries.writes
    if k is not None and write is not None:
        new = new + k.unsqueeze(-1) * write.unsqueeze(-2)
    return new


def _weights(entries: Entries, log_decay: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return e^{G_t} `... 1|k` and e^{G_t - G_i} `... n 1|k`; None for rules that do not forget."""
    if entries.log_decay is None:
        return None, None
    own = torch.zeros_like(entries.log_decay[..., 0, :]) if log_decay is None else log_decay
    last = torch.zeros_like(entries.log_decay[..., :1, :])
    later = torch.cat((entries.log_decay[..., 1:, :], last), -2).flip(-2).cumsum(-2).flip(-2)  # of tokens i + 1 .. m
    return (entries.log_decay.sum(-2) + own).exp(), (later + own.unsqueeze(-2)).exp()
