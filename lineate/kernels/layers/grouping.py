"""Groups pairs of a token and an expert by expert, on the device and without waiting for it.

A block has up to BM pairs of one expert, so that a program reads the weights of the expert once for all of them:

    blocks     `count`       the expert of each block, in ascending order; -1: there is no such block
    members    `count BM`    the pairs of each block, in ascending order; -1: there is none
    places     `pairs`       the position of each pair in members

The shapes depend on the number of pairs alone. Up to FEW_PAIRS pairs take one launch, more pairs take three: counts of
each chunk of pairs, the positions at which an expert's pairs of each chunk begin, and the members.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, next_power, overlap_options, start

FEW_PAIRS = 1024
"""The most pairs that one program groups."""
CHUNK = 512
"""Pairs of a chunk."""


class Groups(NamedTuple):
    """Pairs grouped by expert, in int32.

    Args:
        blocks: `count`.
        members: `count size`; None: block b has pair b alone, and blocks are the chosen experts of the pairs.
        size: The most pairs of a block.
    """

    blocks: Tensor
    members: Tensor | None
    size: int


@triton.jit(do_not_specialize=["pairs"])
def group_few(
    chosen, ranks, blocks, members, pairs, BLOCKS: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Group all pairs in one program; ranks `pairs` is scratch memory.

    rank_i = #{j < i: e_j = e_i};  block_i = #{j: e_j < e_i, rank_j % BM = 0} + rank_i / BM
    """
    i = tl.arange(0, BP)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for first in range(0, BLOCKS * BM, BP):
        tl.store(members + first + i, -1, mask=first + i < BLOCKS * BM)
    for first in range(0, BLOCKS, BP):
        tl.store(blocks + first + i, -1, mask=first + i < BLOCKS)
    own = tl.load(chosen + i, mask=i < pairs, other=-1)
    rank = tl.zeros((BP,), tl.int32)
    for first in range(0, pairs, BJ):
        j = first + tl.arange(0, BJ)
        other = tl.load(chosen + j, mask=j < pairs, other=-2)
        rank += tl.sum(((other[None, :] == own[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(ranks + i, rank, mask=i < pairs)
    tl.debug_barrier()  # all threads see the ranks, and nothing is filled any more
    block = rank // BM
    for first in range(0, pairs, BJ):
        j = first + tl.arange(0, BJ)
        other = tl.load(chosen + j, mask=j < pairs, other=2**30)
        heads = tl.load(ranks + j, mask=j < pairs, other=1) % BM == 0
        earlier = heads[None, :] & (other[None, :] < own[:, None])
        block += tl.sum(earlier.to(tl.int32), 1)
    tl.store(members + block * BM + rank % BM, i, mask=i < pairs)
    tl.store(blocks + block, own, mask=(i < pairs) & (rank % BM == 0))


@triton.jit(do_not_specialize=["pairs", "blocks_count"])
def count_pairs(
    chosen, counts, blocks, members, pairs, blocks_count, BM: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr
):
    """Count the pairs of each expert in one chunk, counts `chunks BE`, and fill blocks and members with -1."""
    chunk = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    at = chunk * CHUNK + i
    own = tl.load(chosen + at, mask=at < pairs, other=BE - 1)  # an expert that there is not
    found = tl.histogram(own, BE)
    tl.store(counts + chunk.to(tl.int64) * BE + tl.arange(0, BE), found)
    step = tl.num_programs(0) * CHUNK
    for first in range(chunk * CHUNK, blocks_count * BM, step):
        tl.store(members + first + i, -1, mask=first + i < blocks_count * BM)
    for first in range(chunk * CHUNK, blocks_count, step):
        tl.store(blocks + first + i, -1, mask=first + i < blocks_count)


@triton.jit(do_not_specialize=["chunks"])
def begin_pairs(
    counts, starts, blocks, chunks, EXPERTS: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr
):
    """Turn counts into sums of the chunks before; starts `BE` are the places of the experts' first pairs.

    BM > 1: experts begin at multiples of BM, and blocks are written; BM = 1: starts are where experts end.
    """
    e = tl.arange(0, BE)
    c = tl.arange(0, BC)
    total = tl.zeros((BE,), tl.int32)
    for first in range(0, chunks, BC):
        at = counts + (first + c).to(tl.int64)[:, None] * BE + e[None, :]
        has = (first + c < chunks)[:, None] & (e < EXPERTS)[None, :]
        own = tl.load(at, mask=has, other=0)
        tl.store(at, total[None, :] + tl.cumsum(own, 0) - own, mask=has)
        total += tl.sum(own, 0)
    if BM == 1:
        tl.store(starts + e, tl.cumsum(total, 0), mask=e < EXPERTS)
    else:
        many = (total + BM - 1) // BM
        begin = tl.cumsum(many, 0) - many
        tl.store(starts + e, begin * BM, mask=e < EXPERTS)
        for n in range(0, tl.max(many, 0)):
            tl.store(blocks + begin + n, e, mask=n < many)


@triton.jit(do_not_specialize=["pairs"])
def place_pairs(
    chosen, counts, starts, members, places, pairs, BM: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """Write the members of one chunk, and places where they are not None."""
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(chosen + i, mask=i < pairs, other=-1)
    rank = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, CHUNK, BJ):
        j = chunk * CHUNK + first + tl.arange(0, BJ)
        other = tl.load(chosen + j, mask=j < pairs, other=-2)
        rank += tl.sum(((other[None, :] == own[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    before = tl.load(counts + chunk.to(tl.int64) * BE + own, mask=i < pairs, other=0)
    if BM == 1:
        begin = tl.load(starts + own - 1, mask=(i < pairs) & (own > 0), other=0)
    else:
        begin = tl.load(starts + own, mask=i < pairs, other=0)
    place = begin + before + rank
    tl.store(members + place, i, mask=i < pairs)
    if places is not None:
        tl.store(places + i, place, mask=i < pairs)


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """Return the most blocks that pairs can have: one for each expert, and one more for each further `size` pairs."""
    used = min(pairs, experts)
    return used + (pairs - used) // size


def group(chosen: Tensor, experts: int, size: int) -> Groups:
    """Return the pairs of chosen `rows width`, int32, in blocks of up to `size`; pair i is chosen.flatten()[i].

    Args:
        chosen: Experts below `experts`, dense.
        experts: How many there are.
        size: The most pairs of a block, at least 2.
    """
    pairs, device = chosen.numel(), chosen.device
    count = most_blocks(pairs, experts, size)
    blocks = torch.empty(count, dtype=torch.int32, device=device)
    members = torch.empty(count, size, dtype=torch.int32, device=device)
    if pairs <= FEW_PAIRS:
        ranks = torch.empty(pairs, dtype=torch.int32, device=device)
        width = max(16, next_power(pairs))
        start(group_few, (1,))(
            chosen, ranks, blocks, members, pairs, BLOCKS=count, BM=size, BP=width, BJ=min(64, width),
            num_warps=max(1, min(16, width // 32)), **overlap_options(device),
        )  # fmt: skip
    else:
        _group_many(chosen, experts, size, blocks, members, None)
    return Groups(blocks, members, size)


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of chosen `rows width`, int32, sorted by expert, each pair's place, and where experts end."""
    order, back = (torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device) for _ in range(2))
    ends = _group_many(chosen, experts, 1, order[:0], order, back)
    return order, back, ends


def _group_many(
    chosen: Tensor, experts: int, size: int, blocks: Tensor, members: Tensor, places: Tensor | None
) -> Tensor:  # fmt: skip
    """Fill blocks, members and places; return where each expert begins, or with blocks of 1 where it ends."""
    pairs, width = chosen.numel(), next_power(experts + 1)
    chunks = ceil_div(pairs, CHUNK)
    counts = torch.empty(chunks, width, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    count = blocks.shape[0]
    start(count_pairs, (chunks,))(
        chosen, counts, blocks, members, pairs, count, BM=size, BE=width, CHUNK=CHUNK, num_warps=4
    )
    start(begin_pairs, (1,))(counts, starts, blocks, chunks, EXPERTS=experts, BM=size, BE=width, BC=32, num_warps=16)
    start(place_pairs, (chunks,))(
        chosen, counts, starts, members, places, pairs, BM=size, BE=width, CHUNK=CHUNK, BJ=64, num_warps=8
    )
    return starts
