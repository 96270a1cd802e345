"""Softmax attention of a few new tokens over cached keys and values, each row over its own number of them.

    o = sum_j e^{s_j} v_j / sum_j e^{s_j},    s_j = scale q . k_j,    j up to the query's own token

A row's keys are cut into parts of whole tiles (parts.py), and one program reads one part for all queries that share the
keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import next_power, overlap_options, shared_memory, start
from lineate.kernels.layers.ops import KERNEL_DTYPES, strides_of, unit_of
from lineate.kernels.layers.parts import join, part_size, parts_of_rows

WIDEST_HEAD = 256
MOST_QUERIES = 64
"""The most queries that share a head of keys: new tokens times heads."""
_LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """The tiles of a launch: keys of a tile, warps of a program, stages of the pipeline that loads keys and values."""

    keys: int
    warps: int
    stages: int


@triton.jit(
    do_not_specialize=[
        *("t", "capacity", "parts", "q_row", "q_token", "q_head", "k_row", "k_token", "k_head"),
        *("v_row", "v_token", "v_head"),
    ]
)
def read_parts(
    q, k, v, lengths, sums, peaks, totals, scale, t, capacity, parts,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Read one part of the keys of one row and head: sums `row kv parts t*GROUP SIZE`, peaks and totals without SIZE.

    Strides are in units of UNIT elements. A row's length counts its t new tokens; those after it are not read.
    """
    part = tl.program_id(0) % parts
    head = (tl.program_id(0) // parts % KV).to(tl.int64)
    row = (tl.program_id(0) // parts // KV).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.minimum(tl.load(lengths + row), capacity).to(tl.int32)
    size = part_size(length, parts, BN)
    begin = part * size
    end = tl.minimum(begin + size, length)
    if begin >= end:
        return
    m = tl.arange(0, BM)
    d = tl.arange(0, BD)
    last = length - t + m // GROUP  # the last key that a query sees
    there = (m < t * GROUP)[:, None] & (d < SIZE)[None, :]
    at = (row * q_row + (m // GROUP) * tl.cast(q_token, tl.int64) + (head * GROUP + m % GROUP) * q_head) * UNIT
    queries = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
    k += (row * k_row + head * k_head) * UNIT
    v += (row * v_row + head * v_head) * UNIT
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        j = first + tl.arange(0, BN)
        mask = (j < end)[:, None] & (d < SIZE)[None, :]
        keys = tl.load(
            k + j.to(tl.int64)[:, None] * (tl.cast(k_token, tl.int64) * UNIT) + d[None, :], mask=mask, other=0.0
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where((j[None, :] <= last[:, None]) & (j < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees none of these keys
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            v + j.to(tl.int64)[:, None] * (tl.cast(v_token, tl.int64) * UNIT) + d[None, :], mask=mask, other=0.0
        )
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        peak = higher
    at = ((row * KV + head) * parts + part) * (t * GROUP) + m
    tl.store(peaks + at, peak, mask=m < t * GROUP)
    tl.store(totals + at, total, mask=m < t * GROUP)
    tl.store(sums + at[:, None] * SIZE + d[None, :], acc, mask=there)


def tiles_of(device: torch.device, dtype: torch.dtype, queries: int, width: int) -> tuple[Tiles, int]:
    """Return the tiles for this device, and how many such programs a multiprocessor has room for, 1 or 2.

    us on an H200, one row of 16 heads of queries and 2 of keys of 256 channels, after 131,072 tokens:

        keys, stages, programs    64, 2, 2    64, 3, 1    32, 4, 1
                                      72.7        67.7        70.4

    Args:
        device: The device.
        dtype: Of queries, keys and values.
        queries: Queries of a head of keys.
        width: Channels of a key, padded ones included.
    """
    warps = 4 if queries <= 32 else 8
    wide = dtype == torch.float32 and width > 64
    for tiles in (Tiles(32 if wide else 64, warps, 3), Tiles(32 if wide else 64, warps, 2)):
        needed = dtype.itemsize * width * (2 * tiles.keys * tiles.stages + max(16, next_power(queries)))
        if needed <= shared_memory(device):
            return tiles, min(2, shared_memory(device) // needed)
    return Tiles(16, warps, 2), 1


def serves_cached(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cached_attention supports these tensors."""
    queries = q.shape[1] * (q.shape[2] // k.shape[2])
    return (
        q.dtype in KERNEL_DTYPES and q.dtype == k.dtype == v.dtype and k.shape == v.shape
        and q.shape[3] <= WIDEST_HEAD and 0 < queries <= MOST_QUERIES
    )  # fmt: skip


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, gate: Tensor | None = None,
    tiles: Tiles | None = None, parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention `rows t heads d` of q, the last t tokens of each row, without gradients.

    Args:
        q: Queries `rows t heads d`.
        k: Cached keys `rows n kv d`.
        v: Cached values `rows n kv d`.
        lengths: The number of entries of each row, including those of q, int64 `rows`.
        scale: Multiplies the scores.
        gate: `rows t heads*d`, whose sigmoid multiplies the result; None: there is none.
        tiles: The tiles; None: those for this device.
        parts: The most parts of a row, a power of two; None: as many as suit this device.
    """
    rows, t, heads, size = q.shape
    kv = k.shape[2]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    strides = [s for x in (q, k, v) for s in strides_of(x, 3)]
    unit = unit_of((size, *strides))
    queries, width = heads // kv * t, max(16, next_power(size))
    usual, together = tiles_of(q.device, q.dtype, queries, width)
    tiles = usual if tiles is None else tiles
    parts = parts_of_rows(q.device, rows, kv, together, queries * size) if parts is None else parts
    sums = torch.empty(rows, kv, parts, queries, size, dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, rows, kv, parts, queries, dtype=torch.float32, device=q.device)
    output = torch.empty(rows, t, heads, size, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        start(read_parts, (rows * kv * parts,))(
            q, k, v, lengths, sums, peaks, totals, scale, t, k.shape[1], parts, *(s // unit for s in strides),
            KV=kv, GROUP=heads // kv, SIZE=size, BM=max(16, next_power(queries)), BN=tiles.keys, BD=width,
            STAGES=tiles.stages, PRECISION="ieee" if q.dtype == torch.float32 else None, UNIT=unit,
            num_warps=tiles.warps, **overlap_options(q.device),
        )  # fmt: skip
        join(sums, peaks, totals, lengths, output, k.shape[1], tiles.keys, gate)
    return output
