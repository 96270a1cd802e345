"""Decides where the walk over a long sequence with few heads is cut into segments that run in parallel.

A walk goes from chunk to chunk, so a sequence with few heads leaves most multiprocessors idle. portable/split.py
describes how the segments of a walk run in parallel, at the cost of a second, cheaper walk that computes the map of
each segment.

The cuts of a sequence determine its last bits. They depend only on the sequence's own number of chunks, the heads, the
rule and the device, never on the batch or on other packed sequences, so other sequences of a call never change the
bits.
"""

from typing import NamedTuple

CHUNK = 64


class Cutting(NamedTuple):
    """The rule by which the sequences of a call are cut; layout.count_cuts is the same rule on the device."""

    shortest: int
    """Chunks of the shortest sequence that is cut."""
    most: int
    """The most segments of a sequence."""
    least: int
    """The least chunks of a segment."""

    def count_segments(self, chunks: int) -> int:
        """Return the number of segments of a sequence; their lengths differ by at most one chunk."""
        return 1 if chunks < self.shortest else min(self.most, chunks // self.least)

    @property
    def least_cuts(self) -> int:
        """The least cuts of a sequence that is cut."""
        return max(1, self.count_segments(self.shortest) - 1)

    def most_cuts(self, tokens: int, sequences: int) -> int:
        """Return the most cuts of `number` packed sequences with `tokens` tokens in total."""
        sequences = min(sequences, tokens // (CHUNK * (self.shortest - 1) + 1))  # of those that are cut
        if not sequences:
            return 0
        chunks = (tokens + sequences * (CHUNK - 1)) // CHUNK
        own = self.count_segments((tokens + CHUNK - 1) // CHUNK) - 1
        return min(sequences * own, chunks // self.least - 1)


WHOLE = Cutting(shortest=2**30, most=1, least=1)
"""No sequence is cut."""

# p programs of 64 value columns walk n chunks, about 1.3 us each. In s segments (with k = v), p + 2 p (s - 2) programs
# find the maps of n / s chunks each, a chain has s - 2 steps, and s p programs walk n / s chunks each. The forward of
# one sequence on an H200 (132 multiprocessors), ms in a graph, by its segments (bench/rules/gpu_segments.py), with
# copies started by the computing warps (with a separate warp: 8192, 8 in 8 segments .079; 32768, 8 in 8 segments .235;
# 8192, 32 .211):
#
#     tokens, value heads of 128      1       2       3       4       6       8      12      16
#      2048,  8                     .067    .064    .054    .050    .053    .054
#      8192,  8                     .229    .197    .144    .120    .108    .098    .129    .126
#     32768,  8                     .874    .722    .505    .397    .328    .272    .345    .294
#      2048, 16                     .072    .069    .060    .060    .078    .077
#      8192, 16                     .239    .207    .155    .146    .183    .161    .197    .204
#     32768, 16                     .903    .754    .540    .491    .608    .493    .571    .537
#      2048, 32                     .077    .077    .090    .102    .130    .145
#      8192, 32                     .257    .228    .249    .268    .315    .311    .352    .396
#     32768, 32                     .978    .833    .884    .931   1.067    .971   1.013   1.057
#
# So the best s lets programs of 64 columns just fill the multiprocessors, with at least LEAST chunks a segment. Where
# scores are computed in parallel with an uncut walk (hopper/launch_scores.py), two segments do not help: 131072, 32 in
# 1 and 2 segments 2.79 3.30.
#
# Where the multiprocessors are busy anyway, a cut costs up to 2.5 times the walk, and the maps' memory. So only long
# sequences are cut, from SHORTEST chunks on by the number of segments, else from OTHERS on: a call of many is rare,
# and where 2 or 3 segments fill the device, little is gained (1.1 to 1.7 times).
#
# In 4 segments, one sequence alone fills the device, and other packed sequences wait. So a sequence is cut into 4 only
# if each has 32 chunks, into 3 before that. 16 heads, ms in 3 and 4 segments: 6144 + 2048 tokens .130 .142 (KDA .230
# .245), 6144 + 6144 .175 .193, 6144 alone .116 .100.
LEAST = 8
LEAST_OF_FOUR = 32
MOST = 32
SHORTEST = {2: 2048, 3: 256}
OTHERS = 96


def cut_forward(programs: int, processors: int, beside: bool = False) -> Cutting:
    """Return the cutting of the forward walk of a sequence with `programs` programs.

    beside: whether scores are computed in parallel with an uncut walk, which is faster than two segments.
    """
    most = min(MOST, processors // programs)
    if most < (3 if beside else 2):
        return WHOLE
    return Cutting(SHORTEST.get(most, OTHERS), most, LEAST_OF_FOUR if most == 4 else LEAST)


def cut_backward(programs: int, processors: int, beside: bool = False) -> Cutting:
    """Return the cutting of the backward walk of a sequence with `programs` programs: never into two segments."""
    most = min(MOST, processors // programs)
    return WHOLE if most < 3 else Cutting(256, most, 32)
