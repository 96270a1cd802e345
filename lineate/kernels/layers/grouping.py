"""Groups pairs of a token and an expert by expert, on the device and without waiting for it.

A block has up to BM pairs of one expert, so that a program reads the weights of the expert once for all of them:

    blocks     `count`       the expert of each block, in ascending order; -1: there is no such block
    members    `count BM`    the pairs of each block, in ascending order; -1: there is none
    places     `pairs`       the position of each pair in members

The shapes depend on the number of pairs alone. Up to FEW_PAIRS pairs, a program has an expert and reads all pairs. More
pairs are cut into up to SEGMENTS segments, which one launch counts; then a program has an expert and a segment.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, next_power, overlap_options, start

FEW_PAIRS = 1024
"""The most pairs that every program counts."""
CHUNK = 2048
"""Pairs that a program reads at a time."""
SEGMENTS = 32
"""The most segments of the pairs, a power of two. 262,144 pairs of 256 experts took 0.31 ms on an H200 in one."""


class Groups(NamedTuple):
    """Pairs grouped by expert, in int32.

    Args:
        blocks: `count`.
        members: `count size`, undefined where there is no block; None: block b has pair b alone, and blocks are the
            chosen experts of the pairs.
        size: The most pairs of a block.
        places: The position of each pair in members; None: it was not asked for.
    """

    blocks: Tensor
    members: Tensor | None
    size: int
    places: Tensor | None = None


@triton.jit(do_not_specialize=["pairs", "size"])
def count_pairs(
    chosen, counts, pairs, size, EXPERTS: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Count the pairs of each expert in one segment: counts `1+segments experts`, whose first row is the sum."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    segment = tl.program_id(0)
    end = tl.minimum(segment * size + size, pairs)
    i = tl.arange(0, BP)
    e = tl.arange(0, BE)
    found = tl.zeros((BE,), tl.int32)
    for first in range(segment * size, end, BP):
        found += tl.histogram(tl.load(chosen + first + i, mask=first + i < end, other=BE - 1), BE)
    tl.store(counts + (1 + segment) * EXPERTS + e, found, mask=e < EXPERTS)
    tl.atomic_add(counts + e, found, mask=e < EXPERTS)


@triton.jit(do_not_specialize=["pairs", "count", "size"])
def place_pairs(
    chosen, counts, blocks, members, places, ends, pairs, count, size,
    EXPERTS: tl.constexpr, BM: tl.constexpr, FILL: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert in one segment: its blocks and members, after those of the experts before it.

    Without counts there are at most BP pairs, which every program counts, and one segment. BM = 1: members are the
    sorted pairs, and ends `EXPERTS` say where an expert's end. places `pairs` may be None.
    """
    expert = tl.program_id(0) % EXPERTS
    segment = tl.program_id(0) // EXPERTS
    i = tl.arange(0, BP)
    e = tl.arange(0, BE)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    done = 0
    if counts is None:  # there is no expert BE - 1
        many = tl.histogram(tl.load(chosen + i, mask=i < pairs, other=BE - 1), BE)
    else:
        many = tl.load(counts + e, mask=e < EXPERTS, other=0)
        earlier = tl.arange(0, BS)
        done = tl.sum(tl.load(counts + (1 + earlier) * EXPERTS + expert, mask=earlier < segment, other=0), 0)
    begin = tl.sum(tl.where(e < expert, (many + BM - 1) // BM, 0), 0)
    own = tl.sum(tl.where(e == expert, many, 0), 0)
    if segment == 0:
        if BM == 1:
            tl.store(ends + expert, begin + own)
        else:
            after = begin + (own + BM - 1) // BM
            for first in range(begin, after, BE):
                tl.store(blocks + first + e, expert, mask=first + e < after)
            if expert == EXPERTS - 1:
                for first in range(after, count, BE):
                    tl.store(blocks + first + e, -1, mask=first + e < count)
            m = begin * BM + own + tl.arange(0, FILL)
            tl.store(members + m, -1, mask=m < after * BM)
    done += begin * BM
    end = tl.minimum(segment * size + size, pairs)
    for first in range(segment * size, end, BP):
        mine = (tl.load(chosen + first + i, mask=first + i < end, other=-1) == expert).to(tl.int32)
        place = done + tl.cumsum(mine, 0) - mine
        tl.store(members + place, first + i, mask=mine > 0)
        if places is not None:
            tl.store(places + first + i, place, mask=mine > 0)
        done += tl.sum(mine, 0)


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """Return the most blocks that pairs can have: one for each expert, and one more for each further `size` pairs."""
    used = min(pairs, experts)
    return used + (pairs - used) // size


def group(chosen: Tensor, experts: int, size: int, placed: bool = False) -> Groups:
    """Return the pairs of chosen `rows width`, int32, in blocks of up to `size`; pair i is chosen.flatten()[i].

    Args:
        chosen: Experts below `experts`, dense.
        experts: How many there are.
        size: The most pairs of a block, 2 or more.
        placed: Whether the result has the places of the pairs.
    """
    count = most_blocks(chosen.numel(), experts, size)
    blocks = torch.empty(count, dtype=torch.int32, device=chosen.device)
    members = torch.empty(count, size, dtype=torch.int32, device=chosen.device)
    places = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device) if placed else None
    _place(chosen, experts, size, (blocks, members, places, None))
    return Groups(blocks, members, size, places)


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of chosen `rows width`, int32, sorted by expert, each pair's place, and where experts end."""
    order, places = (torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _place(chosen, experts, 1, (None, order, places, ends))
    return order, places, ends


def _place(chosen: Tensor, experts: int, most: int, made: tuple[Tensor | None, ...]) -> None:
    """Fill the tensors made: blocks, members, places and ends; most: pairs of a block."""
    pairs, overlap = chosen.numel(), overlap_options(chosen.device)
    blocks, bins = made[0], next_power(experts + 1)
    counts, block, warps, segments, size = None, max(16, next_power(pairs)), 4, 1, pairs
    if pairs > FEW_PAIRS:
        chunks, block, warps = ceil_div(pairs, CHUNK), CHUNK, 8
        size = ceil_div(chunks, SEGMENTS) * CHUNK
        segments = ceil_div(pairs, size)
        counts = torch.zeros(1 + segments, experts, dtype=torch.int32, device=chosen.device)
        start(count_pairs, (segments,))(
            chosen, counts, pairs, size, EXPERTS=experts, BE=bins, BP=block, num_warps=warps, **overlap
        )
    start(place_pairs, (experts * segments,))(
        chosen, counts, *made, pairs, 0 if blocks is None else blocks.shape[0], size,
        EXPERTS=experts, BM=most, FILL=next_power(most), BE=bins, BP=block, BS=SEGMENTS, num_warps=warps, **overlap,
    )  # fmt: skip
