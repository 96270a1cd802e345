"""Balances attention: decides which rank attends with which queries, so that all compare equally many pairs.

A query is compared with all tokens up to its own, so the rank with the end of a long sequence has the most to do. The
linear rules need contiguous segments; attention does not, because the keys of a split sequence are gathered by all
ranks anyway. So tokens stay on their ranks, and ranks above the mean give their last queries to ranks below it: a rank
with an early segment then also has a late piece. All ranks compute the same plan from the descriptions of their
sequences that they exchange.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

LEAST_PAIRS = 2**20
"""Queries move only if the rank with the most pairs exceeds the mean by at least this number of pairs.

Fewer pairs take less time than the two exchanges: with 32 heads of 128 channels a GPU compares this number in about
40 us.
"""
ENOUGH = 32
"""A rank gives queries until it has at most 1 / ENOUGH of the mean above the mean."""


class Part(NamedTuple):
    """The tokens of one sequence on one rank."""

    tokens: int
    before: int
    """Tokens of the sequence before them: on earlier ranks, and in the initial state."""

    def after(self, earlier: "Part") -> "Part":
        """Return this part of a sequence whose earlier part is given."""
        return Part(self.tokens, earlier.before + earlier.tokens)

    def pairs(self, start: int = 0, end: int | None = None) -> int:
        """Count the pairs of a query and a visible key, for the queries of tokens start .. end."""
        end = self.tokens if end is None else end
        return (end - start) * self.before + (end * (end + 1) - start * (start + 1)) // 2


Parts = Sequence[Sequence[Part]]
"""The sequences of every rank, in order."""


def even_parts(tokens: int, ranks: int) -> Parts:
    """Return the parts of one sequence that is cut into segments of equal length.

    Args:
        tokens: Tokens of the sequence.
        ranks: How many ranks share it.
    """
    cuts = [tokens * rank // ranks for rank in range(ranks + 1)]
    return [[Part(end - start, start)] for start, end in pairwise(cuts)]


class Move(NamedTuple):
    """Queries that another rank attends with."""

    owner: int
    """The rank that holds their tokens."""
    sequence: int
    """Which of that rank's sequences they belong to."""
    start: int
    end: int
    """Which tokens of that part."""
    worker: int
    """The rank that attends with them."""

    @property
    def queries(self) -> int:
        return self.end - self.start


def attention_pairs(parts: Parts, moves: Iterable[Move] = ()) -> list[int]:
    """Return how many pairs of a query and a key each rank compares for one row and head.

    Args:
        parts: The sequences of every rank.
        moves: Queries that other ranks attend with.
    """
    found = [sum(part.pairs() for part in own) for own in parts]
    for move in moves:
        pairs = parts[move.owner][move.sequence].pairs(move.start, move.end)
        found[move.owner] -= pairs
        found[move.worker] += pairs
    return found


def plan_moves(parts: Parts, rows: int = 1) -> tuple[Move, ...]:
    """Return the queries to move so that no rank has much more than the mean; none if that saves too little.

    The rank with the most pairs gives to the one with the fewest, until none has more than 1 / ENOUGH above the mean.
    It gives the last queries of the sequence in which they see most keys, which takes the fewest queries. No rank gives
    so much that it is below the mean, nor takes so much that it is above it.

    Args:
        parts: The sequences of every rank.
        rows: Rows of the batch, which are all split in the same way.
    """
    ranks, pairs = len(parts), attention_pairs(parts)
    moves: list[Move] = []
    total = sum(pairs)  # ranks times the mean, so that all arithmetic is in whole numbers
    if rows * (ranks * max(pairs) - total) < ranks * LEAST_PAIRS:
        return ()
    kept = [[part.tokens for part in own] for own in parts]
    while True:
        owner, worker = pairs.index(max(pairs)), pairs.index(min(pairs))
        above, below = ranks * pairs[owner] - total, total - ranks * pairs[worker]
        if ENOUGH * above <= total:
            return tuple(moves)
        own = parts[owner]
        sequence = max((i for i, n in enumerate(kept[owner]) if n), key=lambda i: own[i].before + kept[owner][i])
        part, end = own[sequence], kept[owner][sequence]
        start = _first_of(part, end, min(above, below) // ranks)
        if start == end:  # one query has more pairs than should move
            return tuple(moves)
        moves.append(Move(owner, sequence, start, end, worker))
        kept[owner][sequence] = start
        pairs[owner] -= part.pairs(start, end)
        pairs[worker] += part.pairs(start, end)


def _first_of(part: Part, end: int, most: int) -> int:
    """Return the first of the last queries before `end` that together have at most the given number of pairs."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if part.pairs(middle, end) <= most:
            high = middle
        else:
            low = middle + 1
    return low
