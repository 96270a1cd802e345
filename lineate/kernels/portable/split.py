"""The chain over the segments, which run in parallel, of the walk over a long sequence with few heads; it is exact.

A segment maps the state that enters it to the one that leaves it, S -> A S + B. One walk computes all A and B at once
(B is the segment's result for an empty state, A its result for the identity without values); a short chain over the
segments then computes the state at each cut, and all segments walk at once. The last segment needs no map, and the
first one only its result for the state before the sequence. The work is up to three times as much, and the sequential
part 2/segments as long.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.layout import link

CHAIN_WIDTH = 128  # the most keys: a map [k, k] in float32 must fit into shared memory


@triton.jit(do_not_specialize=["segments", "apart", "cuts"])
def chain(
    maps, inner, first_cuts, cut_texts, segments, apart, cuts,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NEAR: tl.constexpr,
    PACKED: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Fill inner `cut hv k v`, the state at each cut, from maps `cut hv k (v + k)`: B and A of the segment before it.

    B of a sequence's first segment is the state at its first cut. A program has BV value columns of one sequence and
    head. Backwards, cuts are numbered from the end of a sequence, and its last segment is the first.

    The distance of the first cuts of two packed sequences is at least `apart` (NEAR is the next power of two). So a
    program searches for one among this number of cuts: most sequences are not cut, and there are too many to check
    each.
    """
    link(LINK)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0) // BLOCKS % HV
    part = tl.program_id(0) // BLOCKS // HV
    if PACKED:
        near = part * apart + tl.arange(0, NEAR)
        there = (tl.arange(0, NEAR) < apart) & (near < cuts)
        text = tl.load(cut_texts + near, mask=there, other=-1)
        begins = tl.load(first_cuts + text, mask=text >= 0, other=-1) == near
        text = tl.max(tl.where(begins, text, -1), 0)
        if text < 0:
            return
        cut = tl.load(first_cuts + text)
        cuts = tl.load(first_cuts + text + 1) - cut
    else:
        cuts = segments - 1
        cut = part * cuts
    x = tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    there = (x < K)[:, None] & (column < V)[None, :]
    square = (x < K)[:, None] & (x < K)[None, :]
    within = x[:, None] * V + column[None, :]
    across = x[:, None] * (V + K)
    entry = cut.to(tl.int64) * HV + head
    S = tl.load(maps + entry * K * (V + K) + across + column[None, :], mask=there, other=0.0)
    tl.store(inner + entry * K * V + within, S, mask=there)
    for _ in range(1, cuts):
        entry += HV
        map_ = maps + entry * K * (V + K) + across
        A = tl.load(map_ + V + x[None, :], mask=square, other=0.0)
        B = tl.load(map_ + column[None, :], mask=there, other=0.0)
        S = tl.dot(A, S, B, input_precision="tf32x3")
        tl.store(inner + entry * K * V + within, S, mask=there)
