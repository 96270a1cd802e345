"""Latent attention of a few new tokens over the cache itself, each row over its own number of entries.

    s_j = scale (q . c_j + r . p_j)        o = sum_j e^{s_j} c_j / sum_j e^{s_j},    j up to the query's own token

All heads share the entry (c_j, p_j) of a token: c_j is its latent vector, p_j its shared channels. q is a head's query
multiplied by the half of the up-projection that makes keys, r its part for the shared channels. A tile of entries is
loaded once and serves all queries of a program, both for the scores and for the sums.

A row's entries are cut into parts of whole tiles (parts.py), and one program reads one part for one tile of queries.
In a decoding step one launch writes the entry of the new token, (RMSNorm(c), p), p and r after their rotation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, next_power, overlap_options, shared_memory, start
from lineate.kernels.layers.ops import KERNEL_DTYPES, strides_of, unit_of
from lineate.kernels.layers.parts import join, part_size, parts_of_rows
from lineate.kernels.layers.products import Norm
from lineate.kernels.layers.token import entered

MOST_TOKENS = 48
"""The most new tokens of a row; more are faster with keys and values of each head (pieces.py)."""
WIDEST_RANK, WIDEST_SHARED = 512, 128
_LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """The tiles of a launch.

    Args:
        queries: Queries of a tile, a power of two of at least 16.
        entries: Entries of a tile, a power of two of at least 16.
        warps: Warps of a program.
        stages: Stages of the pipeline that loads entries.
    """

    queries: int
    entries: int
    warps: int
    stages: int


@triton.jit
def load_tile(x, at, d, there, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows `at` of x, those that are there; with zeros after their SIZE channels."""
    if SIZE == WIDTH:
        return tl.load(x + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    return tl.load(x + at[:, None] + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=[
        *("t", "capacity", "parts", "q_row", "q_token", "q_head", "r_row", "r_token", "r_head", "c_row", "c_token")
    ]
)
def read_latent_parts(
    q, r, cache, lengths, sums, peaks, totals, scale, t, capacity, parts,
    q_row, q_token, q_head, r_row, r_token, r_head, c_row, c_token,
    HEADS: tl.constexpr, RANK: tl.constexpr, SHARED: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Read one part of one row for one tile of queries: sums `row part t*HEADS RANK`, peaks and totals without RANK.

    Strides are in units of UNIT elements. A row's length counts its t new tokens; entries after it are not read.
    """
    tiles = tl.cdiv(t * HEADS, BQ)
    tile = tl.program_id(0) % tiles  # the tiles of one part run together, so that the cache serves them from L2
    part = tl.program_id(0) // tiles % parts
    row = (tl.program_id(0) // tiles // parts).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.minimum(tl.load(lengths + row), capacity).to(tl.int32)
    size = part_size(length, parts, BN)
    begin = part * size
    end = tl.minimum(begin + size, length)
    if begin >= end:
        return
    m = tile * BQ + tl.arange(0, BQ)
    d = tl.arange(0, BR)
    there = m < t * HEADS
    token = m // HEADS
    last = length - t + token  # the last entry that a query sees
    at = (row * q_row + token * tl.cast(q_token, tl.int64) + m % HEADS * tl.cast(q_head, tl.int64)) * UNIT
    queries = load_tile(q, at, d, there, RANK, BR)
    if SHARED:
        e = tl.arange(0, BS)
        at = (row * r_row + token * tl.cast(r_token, tl.int64) + m % HEADS * tl.cast(r_head, tl.int64)) * UNIT
        shared = load_tile(r, at, e, there, SHARED, BS)
    cache += row * c_row * UNIT
    peak = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, BR], tl.float32)
    for first in tl.range(begin, end, BN):
        j = first + tl.arange(0, BN)
        entry = j.to(tl.int64) * (tl.cast(c_token, tl.int64) * UNIT)
        latent = load_tile(cache, entry, d, j < end, RANK, BR)
        scores = tl.dot(queries, tl.trans(latent), input_precision=PRECISION)
        if SHARED:
            own = load_tile(cache + RANK, entry, e, j < end, SHARED, BS)
            scores = tl.dot(shared, tl.trans(own), scores, input_precision=PRECISION)
        scores *= scale * _LOG2_E
        scores = tl.where((j[None, :] <= last[:, None]) & (j < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees none of these entries
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
        peak = higher
    at = (row * parts + part) * (t * HEADS) + m
    tl.store(peaks + at, peak, mask=there)
    tl.store(totals + at, total, mask=there)
    tl.store(sums + at[:, None] * RANK + d[None, :], acc, mask=there[:, None] & (d < RANK)[None, :])


@triton.jit(do_not_specialize=["r_row", "r_head", "latent_row", "shared_row", "cache_row", "cache_token", "capacity"])
def place_entry(
    r, latent, shared, norm, frequencies, lengths, cache, y, eps,
    r_row, r_head, latent_row, shared_row, cache_row, cache_token, capacity,
    HEADS: tl.constexpr, RANK: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, SHIFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row's entry into the cache or, with HALF, one of its HEADS r `SHARED` after its rotation into y."""
    UNITS: tl.constexpr = HEADS + 1 if HALF else 1
    unit = tl.program_id(0) % UNITS
    row = (tl.program_id(0) // UNITS).to(tl.int64)
    d = tl.arange(0, BR)
    e = tl.arange(0, BS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.load(lengths + row)  # this token's position
    there = (at >= 0) & (at < capacity)
    if unit == 0:
        entry = cache + row * cache_row + at * cache_token
        own = entered(latent + row * latent_row, norm, frequencies, at, eps, RANK, 0, BR, SHIFT, cache.dtype.element_ty)
        tl.store(entry + d, own, mask=(d < RANK) & there)
        if SHARED:
            source = shared + row * shared_row
            same = entered(source, None, frequencies, at, eps, SHARED, HALF, BS, 0.0, cache.dtype.element_ty)
            tl.store(entry + RANK + e, same, mask=(e < SHARED) & there)
    elif HALF:
        source = r + row * r_row + (unit - 1) * r_head
        turned = entered(source, None, frequencies, at, eps, SHARED, HALF, BS, 0.0, y.dtype.element_ty)
        tl.store(y + (row * HEADS + unit - 1) * SHARED + e, turned, mask=e < SHARED)


def place(
    r: Tensor,
    latent: Tensor,
    shared: Tensor,
    norm: Norm,
    frequencies: Tensor | None,
    lengths: Tensor,
    cache: Tensor,
) -> Tensor:
    """Write the entry of one token per row into the cache, and return r after its rotation, `rows 1 heads shared`.

    Args:
        r: Queries for the shared channels, `rows 1 heads shared`.
        latent: Latent vectors before their norm, `rows rank`.
        shared: Shared channels before their rotation, `rows shared`.
        norm: Of the latent vectors.
        frequencies: The angles by which pairs of channels rotate per token, float32 `shared/2`; None: no rotation.
        lengths: The number of tokens of each row, without this one, int64 `rows`.
        cache: The cache `rows n 1 rank+shared`, which is written.
    """
    rows, _, heads, size = r.shape
    rank = latent.shape[1]
    frequencies = frequencies if size else None  # nothing to rotate: a program has no queries
    y = r if frequencies is None else torch.empty(rows, 1, heads, size, dtype=r.dtype, device=r.device)
    weight, eps, zero_centred = norm
    with torch.cuda.device_of(r):
        start(place_entry, (rows if frequencies is None else rows * (heads + 1),))(
            r, latent, shared, weight, frequencies, lengths, cache, y, eps,
            r.stride(0), r.stride(2), latent.stride(0), shared.stride(0), cache.stride(0), cache.stride(1),
            cache.shape[1], HEADS=heads, RANK=rank, SHARED=size, HALF=0 if frequencies is None else len(frequencies),
            BR=next_power(rank), BS=next_power(size) if size else 1, SHIFT=float(zero_centred),
            num_warps=max(1, min(4, next_power(rank) // 256)), **overlap_options(r.device),
        )  # fmt: skip
    return y


def tiles_of(device: torch.device, dtype: torch.dtype, queries: int, width: int) -> Tiles:
    """Return the tiles for this device, which has room for them.

    Args:
        device: The device.
        dtype: Of queries and entries.
        queries: Queries of a row: new tokens times heads.
        width: Channels of an entry, padded ones included.
    """
    if dtype == torch.float32:
        return Tiles(16, 32 if width <= 256 else 16, 4, 2)
    least = max(16, next_power(queries))
    for tiles in (Tiles(32, 32, 4, 3), Tiles(32, 32, 4, 2)):  # an H200 runs two such programs at once
        queries = min(tiles.queries, least)
        loaded = tiles.stages if queries >= 64 else tiles.stages - 1  # Hopper's products of 64 rows run asynchronously
        needed = dtype.itemsize * (queries * width + tiles.entries * (loaded * width + queries))
        if needed <= shared_memory(device):
            return tiles._replace(queries=queries)
    return Tiles(16, 16, 4, 1)


def serves_latent(q: Tensor, r: Tensor, cache: Tensor) -> bool:
    """Whether latent_attention supports these tensors."""
    return (
        q.dtype in KERNEL_DTYPES and q.dtype == r.dtype == cache.dtype and q.shape[3] <= WIDEST_RANK
        and r.shape[3] <= WIDEST_SHARED and 0 < q.shape[1] <= MOST_TOKENS and cache.shape[0] > 0
    )  # fmt: skip


def latent_attention(
    q: Tensor, r: Tensor, cache: Tensor, lengths: Tensor, scale: float, tiles: Tiles | None = None,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention `rows t heads rank` of q and r, the last t tokens of each row, without gradients.

    Args:
        q: Queries for the latent vectors, `rows t heads rank`.
        r: Queries for the shared channels, `rows t heads shared`.
        cache: Cached entries `rows n 1 rank+shared`.
        lengths: The number of entries of each row, including those of q, int64 `rows`.
        scale: Multiplies the scores.
        tiles: The tiles; None: those for this device.
        parts: The most parts of a row, a power of two; None: as many as suit this device.
    """
    rows, t, heads, rank = q.shape
    shared, queries = r.shape[3], t * heads
    q, r, cache = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, r, cache))
    strides = *strides_of(q, 3), *strides_of(r, 3), *strides_of(cache, 2)
    unit = unit_of((rank, shared, *strides))
    wide, narrow = max(16, next_power(rank)), max(16, next_power(shared)) if shared else 16
    tiles = tiles_of(q.device, q.dtype, queries, wide + narrow) if tiles is None else tiles
    programs = ceil_div(queries, tiles.queries)
    together = 2 if tiles.warps == 4 else 1  # programs of a multiprocessor
    parts = parts_of_rows(q.device, rows, programs, together, tiles.queries * rank) if parts is None else parts
    sums = torch.empty(rows, 1, parts, queries, rank, dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, rows, 1, parts, queries, dtype=torch.float32, device=q.device)
    output = torch.empty(rows, t, heads, rank, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        start(read_latent_parts, (rows * parts * programs,))(
            q, r, cache, lengths, sums, peaks, totals, scale, t, cache.shape[1], parts,
            *(s // unit for s in strides),
            HEADS=heads, RANK=rank, SHARED=shared, BQ=tiles.queries, BN=tiles.entries, BR=wide, BS=narrow,
            PRECISION="ieee" if q.dtype == torch.float32 else None, UNIT=unit,
            num_warps=tiles.warps, num_stages=tiles.stages, **overlap_options(q.device),
        )  # fmt: skip
        join(sums, peaks, totals, lengths, output, cache.shape[1], tiles.entries)
    return output
