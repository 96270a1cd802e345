"""Tokens that are written by hand, and how a mixer's rule reads them, for the view "Memory" of lineate explore.

The five rules of one key need no more than their row of lineate/rule.py. The row of another mixer has a ByHand, if it
is to be shown there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lineate.call import Inputs


@dataclass(frozen=True)
class HandMade:
    """A list of steps; each is one write of one memory, or only forgets (its key is 0).

    Args:
        k: `t k`, the keys, of length 1; 0 where nothing is written.
        v: `t v`.
        log_decay: `t`, for rules with one decay per head.
        log_decays: `t k`, for rules with one per key channel.
        beta: `t`, the rate of a write.
        erase: `t`, the rate of erasing, where it is separate.
        write: `t`, the rate of writing, where it is separate.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor
    log_decays: Tensor
    beta: Tensor
    erase: Tensor
    write: Tensor


@dataclass(frozen=True)
class ByHand:
    """How a mixer's rule reads steps that are written by hand.

    Args:
        inputs: (the steps) -> what the rule is called with, `1 t 1 ...`, with one write a step; q is not read, v is
            that of the steps, and `write`, if the rule has it, is one rate for all channels of a value.
        note: what is special about it, in a few words.
    """

    inputs: Callable[[HandMade], Inputs]
    note: str


def one_head(x: Tensor) -> Tensor:
    """Return x `t ...` as a gate or an operand of one head, `1 t 1 ...`."""
    return x[None, :, None]
