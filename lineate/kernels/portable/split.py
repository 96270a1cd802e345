"""The chain that cuts the walk over a long sequence with few heads into segments that run in parallel, exactly.

A segment maps the state that enters it to the one that leaves it, S -> A S + B. One walk computes all A and B at once
(B is the segment's result for an empty state, A its result for the identity without values); a short chain over the
segments then computes the state entering each segment, and all segments walk at once. The work is three times as much,
the waiting 1/segments.
"""

import triton
import triton.language as tl

CHAIN_WIDTH = 128  # the most keys: a map [k, k] in float32 must fit into shared memory


@triton.jit(do_not_specialize=["segments"])
def chain(
    maps, outer, entries, segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Fill entries `pair segment k v`, the state entering each segment (leaving it if REVERSE), from outer `pair k v`.

    maps `pair segment k (v + k)`: B, then A. A program has BV value columns of one sequence and head.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    x = tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    there = (x < K)[:, None] & (column < V)[None, :]
    within = x[:, None] * V + column[None, :]
    S = tl.load(outer + pair * K * V + within, mask=there, other=0.0)
    for step in range(segments):
        j = segments - 1 - step if REVERSE else step
        entry = pair * segments + j
        tl.store(entries + entry * K * V + within, S, mask=there)
        map_ = maps + entry * K * (V + K) + x[:, None] * (V + K)
        A = tl.load(map_ + V + x[None, :], mask=(x < K)[:, None] & (x < K)[None, :], other=0.0)
        B = tl.load(map_ + column[None, :], mask=there, other=0.0)
        S = tl.dot(A, S, B, input_precision="tf32x3")
