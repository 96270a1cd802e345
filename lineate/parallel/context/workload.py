"""The work of one rank in an attention layer under context parallelism: sends, receives and attention calls."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from lineate.parallel.context.balance import Move, Parts


class Place(NamedTuple):
    """A part of a sequence."""

    rank: int
    """The rank that holds it."""
    sequence: int
    """Which of that rank's sequences it is."""


class Source(NamedTuple):
    """The source of some entries (keys and values, or latent vectors)."""

    kind: str
    """The rank's own "new" tokens, an initial "state", or another "rank"."""
    start: int
    """The first of the new tokens, the row of the state, or the first of the entries that the other rank sends."""
    size: int
    """The number of entries."""
    rank: int = -1
    """The other rank."""


class Call(NamedTuple):
    """Queries that a rank attends with at once."""

    queries: slice
    """Which of its own tokens, or of the queries that it takes from others."""
    keys: slice
    """The entries that they see."""
    sequences: slice | None = None
    """If given, the queries are all tokens of these sequences of the rank; otherwise the last tokens of one."""


class Workload:
    """The work of a rank in an attention layer; the same for all layers of a call.

    Its entries are those of its own sequences, each from the sequence's beginning, followed by those of other ranks'
    sequences whose queries it takes. If it takes later queries of one of its own sequences, the entries of that
    sequence extend to those queries.

    Args:
        rank: The rank.
        parts: The sequences of every rank.
        continues: Whether each rank's first sequence began on an earlier rank.
        moves: Queries that other ranks attend with.
    """

    def __init__(self, rank: int, parts: Parts, continues: Sequence[bool], moves: Sequence[Move]) -> None:
        self._rank, self._parts, self._continues = rank, parts, continues
        self._tokens = [0, *accumulate(part.tokens for part in parts[rank])]
        ranks = range(len(parts))
        self._sent = [self._sent_by(other, moves) for other in ranks]
        self.counts = [sum(self._size(Place(other, i)) for i in self._sent[other]) for other in ranks]
        """How many entries each rank sends to all others."""
        self.sent = [source for i in self._sent[rank] for source in self._own(i)]
        """The entries that this rank sends."""
        self.anything_moves = bool(moves)
        """Whether any rank attends with queries of another one."""
        self.given = sorted((move for move in moves if move.owner == rank), key=lambda move: move.worker)
        """This rank's queries that others attend with, in the order in which they are sent and their outputs return."""
        self.taken = sorted((move for move in moves if move.worker == rank), key=lambda move: move.owner)
        """Queries of others in the order in which they are received and their outputs are sent back."""
        self.gives = [sum(move.queries for move in self.given if move.worker == other) for other in ranks]
        """How many queries this rank sends to each rank."""
        self.takes = [sum(move.queries for move in self.taken if move.owner == other) for other in ranks]
        """How many queries it receives from each rank."""
        chains = [self._chain(Place(rank, i)) for i in range(len(parts[rank]))]
        self.lengths = [sum(map(self._size, chain)) for chain in chains]
        """How many entries each of this rank's sequences has at the end of the segment."""
        found = {chain[0]: n for n, chain in enumerate(chains)}  # by the part in which the sequence begins
        for move in self.taken:
            chain = self._chain(Place(move.owner, move.sequence))
            n = found.setdefault(chain[0], len(chains))
            if n == len(chains):
                chains.append(chain)
            elif len(chain) > len(chains[n]):
                chains[n] = chain
        self.entries = _joined(source for chain in chains for place in chain for source in self._sources(place))
        """Where this rank's entries come from, in their order."""
        self.received = [source for source in self.entries if source.kind == "rank"]
        """Those that other ranks send."""
        sizes = [sum(map(self._size, chain)) for chain in chains]
        self.starts = [0, *accumulate(sizes)]
        """Where the entries of each sequence begin, and where the last ones end."""
        self.extended = sizes != self.lengths
        """Whether there are more entries than those of this rank's own sequences."""
        self.own_calls = self._own_calls(sizes)
        """The calls for the queries that stay here."""
        self.taken_calls: list[Call] = []
        """The calls for the queries that come from others."""
        first = 0
        for move in self.taken:
            start = self.starts[found[self._chain(Place(move.owner, move.sequence))[0]]]
            seen = parts[move.owner][move.sequence].before + move.end
            self.taken_calls.append(Call(slice(first, first + move.queries), slice(start, start + seen)))
            first += move.queries

    def tokens_of(self, move: Move) -> slice:
        """Return which of this rank's tokens it gives in a move."""
        first = self._tokens[move.sequence]
        return slice(first + move.start, first + move.end)

    def _begins(self, place: Place) -> bool:
        """Whether the sequence begins in this part."""
        return place.sequence > 0 or not self._continues[place.rank]

    def _chain(self, place: Place) -> list[Place]:
        """Return the parts of a sequence from its beginning to this one."""
        chain = [place]
        while not self._begins(chain[-1]):
            earlier = chain[-1].rank - 1
            chain.append(Place(earlier, len(self._parts[earlier]) - 1))
        return chain[::-1]

    def _size(self, place: Place) -> int:
        """Return how many entries a part has, with those of the initial state if the sequence begins there."""
        part = self._parts[place.rank][place.sequence]
        return part.tokens + (part.before if self._begins(place) else 0)

    def _sent_by(self, rank: int, moves: Iterable[Move]) -> list[int]:
        """Return which sequences a rank sends: the last if it continues, and those of which it gives queries."""
        sent = {move.sequence for move in moves if move.owner == rank}
        if rank + 1 < len(self._parts) and self._continues[rank + 1]:
            sent.add(len(self._parts[rank]) - 1)
        return sorted(sent)

    def _own(self, index: int) -> list[Source]:
        part, place = self._parts[self._rank][index], Place(self._rank, index)
        state = [Source("state", index, part.before)] if part.before and self._begins(place) else []
        return [*state, Source("new", self._tokens[index], part.tokens)]

    def _sources(self, place: Place) -> list[Source]:
        if place.rank == self._rank:
            return self._own(place.sequence)
        earlier = (Place(place.rank, i) for i in self._sent[place.rank] if i < place.sequence)
        return [Source("rank", sum(map(self._size, earlier)), self._size(place), place.rank)]

    def _own_calls(self, sizes: Sequence[int]) -> list[Call]:
        """Return one call for neighbouring sequences, but a call for each sequence with moved queries or later keys."""
        calls: list[Call] = []
        for i, part in enumerate(self._parts[self._rank]):
            first, start = self._tokens[i], self.starts[i]
            kept = min((move.start for move in self.given if move.sequence == i), default=part.tokens)
            if kept < part.tokens or sizes[i] > self.lengths[i]:
                calls.append(Call(slice(first, first + kept), slice(start, start + part.before + kept)))
                continue
            last = calls[-1].sequences if calls else None
            if last is not None:
                first, start, i_first = calls[-1].queries.start, calls[-1].keys.start, last.start
                calls.pop()
            else:
                i_first = i
            queries, keys = slice(first, self._tokens[i + 1]), slice(start, self.starts[i + 1])
            calls.append(Call(queries, keys, slice(i_first, i + 1)))
        return [call for call in calls if call.queries.stop > call.queries.start]


def _joined(sources: Iterable[Source]) -> list[Source]:
    """Join new tokens that follow each other, and leave out empty sources."""
    found: list[Source] = []
    for source in sources:
        last = found[-1] if found else None
        if last is not None and last.kind == source.kind == "new" and last.start + last.size == source.start:
            found[-1] = last._replace(size=last.size + source.size)
        elif source.size:
            found.append(source)
    return found
