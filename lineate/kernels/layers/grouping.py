"""Groups pairs of a token and an expert by expert, on the device and without waiting for it.

A block has up to BM pairs of one expert, so that a program reads the weights of the expert once for all of them:

    blocks     `count`       the expert of each block, in ascending order; -1: there is no such block
    members    `count BM`    the pairs of each block, in ascending order; -1: there is none
    places     `pairs`       the position of each pair in members

The shapes depend on the number of pairs alone. Up to FEW_PAIRS pairs, a program has an expert and reads all pairs. More
pairs are cut into up to SEGMENTS segments, which one launch counts; then a program has a segment, whose pairs it reads
once, or an expert, whose blocks it fills.
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
CHUNK = 512
"""A segment has a multiple of these pairs."""
SEGMENTS = 128
"""The most segments of the pairs."""
TILE = tl.constexpr(128)
"""Pairs that are compared with each other at a time, to count those of the same expert before each."""
SLAB = tl.constexpr(16)
"""Segments whose counts are added at a time."""


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


@triton.jit
def fill_blocks(
    blocks, members, expert, begin, own, count, EXPERTS: tl.constexpr, BM: tl.constexpr, FILL: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Fill the blocks of one expert from block `begin` on, and the places of its last block that have no pair.

    own: pairs of the expert. The last expert also fills the blocks that there are not.
    """
    e = tl.arange(0, BE)
    after = begin + (own + BM - 1) // BM
    for first in range(begin, after, BE):
        tl.store(blocks + first + e, expert, mask=first + e < after)
    if expert == EXPERTS - 1:
        for first in range(after, count, BE):
            tl.store(blocks + first + e, -1, mask=first + e < count)
    m = begin * BM + own + tl.arange(0, FILL)
    tl.store(members + m, -1, mask=m < after * BM)


@triton.jit(do_not_specialize=["pairs", "count"])
def place_few_pairs(
    chosen, blocks, members, places, ends, pairs, count,
    EXPERTS: tl.constexpr, BM: tl.constexpr, FILL: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert, of at most BP pairs: its blocks and members, after those of the experts before it.

    BM = 1: members are the sorted pairs, and ends `EXPERTS` say where an expert's end. places `pairs` may be None.
    """
    expert = tl.program_id(0)
    i = tl.arange(0, BP)
    e = tl.arange(0, BE)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.load(chosen + i, mask=i < pairs, other=BE - 1)  # there is no expert BE - 1
    many = tl.histogram(found, BE)
    begin = tl.sum(tl.where(e < expert, (many + BM - 1) // BM, 0), 0)
    own = tl.sum(tl.where(e == expert, many, 0), 0)
    if BM == 1:
        tl.store(ends + expert, begin + own)
    else:
        fill_blocks(blocks, members, expert, begin, own, count, EXPERTS, BM, FILL, BE)
    mine = (found == expert).to(tl.int32)
    place = begin * BM + tl.cumsum(mine, 0) - mine
    tl.store(members + place, i, mask=mine > 0)
    if places is not None:
        tl.store(places + i, place, mask=mine > 0)


@triton.jit(do_not_specialize=["pairs", "count", "size", "segments"])
def place_pairs(
    chosen, counts, blocks, members, places, ends, pairs, count, size, segments,
    EXPERTS: tl.constexpr, BM: tl.constexpr, FILL: tl.constexpr, BE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one segment, as place_few_pairs does; later programs fill the blocks of one expert each."""
    program = tl.program_id(0)
    e = tl.arange(0, BE)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    many = tl.load(counts + e, mask=e < EXPERTS, other=0)
    used = (many + BM - 1) // BM
    begin = tl.cumsum(used, 0) - used
    if program < segments:
        following = begin * BM  # the place of the next pair of each expert
        for first in range(0, program, SLAB):
            s = first + tl.arange(0, SLAB)
            at = counts + (1 + s)[:, None] * EXPERTS + e[None, :]
            following += tl.sum(tl.load(at, mask=(s < program)[:, None] & (e < EXPERTS)[None, :], other=0), 0)
        i = tl.arange(0, TILE)
        end = tl.minimum(program * size + size, pairs)
        for first in range(program * size, end, TILE):
            inside = first + i < end
            found = tl.load(chosen + first + i, mask=inside, other=BE - 1)
            earlier = (found[:, None] == found[None, :]) & (i[:, None] > i[None, :])
            place = tl.gather(following, found, 0) + tl.sum(earlier.to(tl.int32), 1)
            tl.store(members + place, first + i, mask=inside)
            if places is not None:
                tl.store(places + first + i, place, mask=inside)
            following += tl.histogram(found, BE)
    else:
        expert = program - segments
        own = tl.sum(tl.where(e == expert, many, 0), 0)
        first = tl.sum(tl.where(e == expert, begin, 0), 0)
        if BM == 1:
            tl.store(ends + expert, first + own)
        else:
            fill_blocks(blocks, members, expert, first, own, count, EXPERTS, BM, FILL, BE)


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
    count = 0 if made[0] is None else made[0].shape[0]
    sizes = {"EXPERTS": experts, "BM": most, "FILL": next_power(most), "BE": next_power(experts + 1)}
    if pairs <= FEW_PAIRS:
        block = max(16, next_power(pairs))
        start(place_few_pairs, (experts,))(chosen, *made, pairs, count, **sizes, BP=block, num_warps=4, **overlap)
        return
    size = ceil_div(ceil_div(pairs, CHUNK), SEGMENTS) * CHUNK
    segments = ceil_div(pairs, size)
    counts = torch.zeros(1 + segments, experts, dtype=torch.int32, device=chosen.device)
    start(count_pairs, (segments,))(
        chosen, counts, pairs, size, EXPERTS=experts, BE=sizes["BE"], BP=CHUNK, num_warps=4, **overlap
    )
    start(place_pairs, (segments + experts,))(
        chosen, counts, *made, pairs, count, size, segments, **sizes, num_warps=8, **overlap
    )
