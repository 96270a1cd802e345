"""Decides where the walk over a long sequence with few heads is cut into segments that run side by side.

A walk goes from chunk to chunk, so a sequence with few heads leaves most multiprocessors idle. portable/split.py says
how the segments of a walk can run at once, at the price of a second, cheaper walk that finds the map of each segment.

Where a sequence is cut decides its last bits. So that no other sequence of a call ever changes them, that depends only
on the sequence's own number of chunks, on the heads and on the device, never on the batch or on what it is packed with.
"""

from typing import NamedTuple

CHUNK = 64


class Cutting(NamedTuple):
    """The rule by which the sequences of a call are cut; layout.count_cuts is the same rule on the device."""

    shortest: int
    """Chunks of the shortest sequence that is cut."""
    few: int
    """The most segments of a sequence, unless it is long enough for `many`."""
    many: int
    """Segments of a sequence if each then has at least 2 least chunks; at least few."""
    least: int
    """The least chunks of a segment."""

    def count_segments(self, chunks: int) -> int:
        """Return into how many segments, which differ by a chunk at most, a sequence is cut."""
        if chunks < self.shortest:
            return 1
        return self.many if chunks >= 2 * self.least * self.many else min(self.few, chunks // self.least)

    def enough(self, chunks: int) -> int:
        """Return the least chunks of a sequence that is cut like one of so many chunks, which is cut: few, or many."""
        longer = 2 * self.least * self.many
        return longer if chunks >= longer else self.shortest

    def most_cuts(self, tokens: int, sequences: int) -> int:
        """Return how many cuts so many packed sequences of so many tokens in all can have."""
        sequences = min(sequences, tokens // (CHUNK * (self.shortest - 1) + 1))  # of those that are cut
        if not sequences:
            return 0
        chunks = (tokens + sequences * (CHUNK - 1)) // CHUNK
        own = self.count_segments((tokens + CHUNK - 1) // CHUNK) - 1
        return min(sequences * own, chunks // self.least - 1)


WHOLE = Cutting(shortest=2**30, few=1, many=1, least=1)
"""No sequence is cut."""

# The forward walk on an H200 (132 multiprocessors), in microseconds; those marked * are estimates:
#
#     a chunk of the walk    1.6 with 64 value columns a program, one program a multiprocessor; 2.1* with 128 columns
#     a chunk of the maps    1.3* with 64 columns a program, one program a multiprocessor; 1.57 with two
#     a step of the chain    1.5*
#     a launch               3*, with the gap before it; 2.5* more until the first tiles are there
#
# n chunks of p programs of 64 columns take 1.6 n. In s segments (with k = v), p + 2 p (s - 2) programs find the maps of
# n / s chunks each, a chain has s - 2 steps, and s p programs walk n / s chunks each:
#
#     value heads of 128      4                     8                     16                    32
#     tokens              uncut       cut       uncut       cut       uncut       cut       uncut       cut
#       4096                105    8:  43         105    8:  45         105    4:  65         105    3:  95
#       8192                207   16:  57         207    8:  71         207    8: 106         207    3: 172
#      32768                822   16: 133         822   16: 202         822    8: 358         822    3: 641
#     131072               3279   32: 394        3279   16: 705        3279    8:1364        3279    3:2490
#
# The best s lets programs of 64 columns just fill the multiprocessors (`few`) or, from segments of 2 LEAST chunks on,
# programs of 128 columns (`many`). Shorter segments than LEAST chunks lose to the chain and the launches, more than
# MOST to the chain. From 34 heads of 128 on, nothing is gained.
#
# Where the multiprocessors are busy anyway, a cut costs up to 2.5 times the walk. So that sequences which fill a call
# of CROWD chunks (12288 tokens) do not lose by it, a sequence is cut only if such a call would leave half of the
# multiprocessors without a program. Where programs for 2 or 3 segments fit, the gain is 1.2 to 1.7, and not worth the
# two launches more of every packed call that might have a sequence to be cut, unless it has FEWEST chunks.
LEAST = 8
MOST = 32
CROWD = 192
FEWEST = {2: 2048, 3: 256}


def cut_forward(programs: int, processors: int) -> Cutting:
    """Return how the forward walk of a sequence with so many programs is cut."""
    few, many = (min(MOST, wanted // programs) for wanted in (processors, 2 * processors))
    if few < 2:
        return WHOLE
    if few in FEWEST:  # as many segments as let two programs a multiprocessor find all maps at once
        most = (2 * processors + 3 * programs) // (2 * programs)
        return Cutting(FEWEST[few], most, most, LEAST)
    return Cutting(max(4 * LEAST, -(-2 * CROWD * programs // processors)), few, many, LEAST)


def cut_backward(programs: int, processors: int) -> Cutting:
    """Return how the backward walk of a sequence with so many programs is cut."""
    few = processors // programs
    return WHOLE if few < 3 else Cutting(256, few, few, 32)
