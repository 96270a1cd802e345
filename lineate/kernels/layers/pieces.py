"""Attention of a piece of a sequence over a longer cache: causal from the end, without a mask and without gradients.

    o_i = sum_j e^{s_ij} v_j / sum_j e^{s_ij},    s_ij = scale (q_i . k_j + r_i . p_j),    j <= length - t + i

k and v are of each head, or of a group of heads; p are shared channels that all heads have (latent attention), r the
last channels of q. A program reads all keys for a tile of queries of one head, with the running maximum and sum of its
rows in float32.

The keys may come in blocks, one launch each, so that latent attention need not expand its whole cache. Between the
launches the sums are kept in float32, divided by their totals, with the logarithm of the totals. Rows of a batch, and
packed sequences, have their own lengths, which are read on the device.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, is_hopper, next_power, shared_memory, start
from lineate.kernels.layers.latent import load_tile
from lineate.kernels.layers.ops import strides_of, unit_of

WIDEST_HEAD, WIDEST_SHARED = 256, 128
_LOG2_E = tl.constexpr(1.4426950408889634)


class Block(NamedTuple):
    """Some of the keys of all rows.

    Args:
        k: Keys `rows n kv k`.
        v: Values `rows n kv v`.
        p: Channels of the keys that all heads share, `rows n 1 p`; None: there are none.
        first: The position of the first key.
    """

    k: Tensor
    v: Tensor
    p: Tensor | None = None
    first: int = 0


class Tiles(NamedTuple):
    """The tiles of a launch: queries and keys of a tile, warps of a program, and tiles of keys in flight or in use."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _load_keys(x, at, d, there, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load rows `at` of x; if MASKED, those that are there."""
    if MASKED:
        return load_tile(x, at, d, there, SIZE, WIDTH)
    if SIZE == WIDTH:
        return tl.load(x + at[:, None] + d[None, :])
    return tl.load(x + at[:, None] + d[None, :], mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def _scan_keys(
    acc, peak, total, queries, shared, k, v, p, last, begin, end, scale, k_token, v_token, p_token,
    SIZE: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys begin .. end to acc `queries BV`, peak and total; last: the last key that each query sees if MASKED."""
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    for first in tl.range(begin, end, BN):
        j = first + tl.arange(0, BN)
        there = j < end
        keys = _load_keys(k, j.to(tl.int64) * k_token, d, there, SIZE, BK, MASKED)
        scores = tl.dot(queries, tl.trans(keys))
        if SHARED:
            own = _load_keys(p, j.to(tl.int64) * p_token, tl.arange(0, BS), there, SHARED, BS, MASKED)
            scores = tl.dot(shared, tl.trans(own), scores)
        scores *= scale
        if MASKED:
            scores = tl.where((j[None, :] <= last[:, None]) & there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees none of these keys
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        values = _load_keys(v, j.to(tl.int64) * v_token, e, there, VALUE, BV, MASKED)
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc)
        peak = higher
    return acc, peak, total


@triton.jit(
    do_not_specialize=[
        *("tiles", "t", "length", "count", "first", "q_row", "q_token", "q_head", "k_row", "k_token", "k_head"),
        *("v_row", "v_token", "v_head", "p_row", "p_token"),
    ]
)
def attend_keys(
    q, k, v, p, bounds, lengths, carried, carried_totals, output, scale, tiles, t, length, count, first,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, p_row, p_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr,
    BEGINS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of queries of one head to the `count` keys from position `first` on.

    Strides are in units of UNIT elements. bounds: of packed queries; None: each row has t. lengths: the keys of each
    row; None: `length`. BEGINS: nothing was carried; ENDS: the output is complete, `tokens HEADS VALUE`.
    """
    tile = tiles - 1 - tl.program_id(0) % tiles  # those with most keys first
    head = (tl.program_id(0) // tiles % HEADS).to(tl.int64)
    row = (tl.program_id(0) // tiles // HEADS).to(tl.int64)
    start = row * t
    base = row * q_row * UNIT
    if bounds is not None:
        start = tl.load(bounds + row).to(tl.int64)
        t = (tl.load(bounds + row + 1) - start).to(tl.int32)
        base = start * q_token * UNIT
    if tile * BM >= t:
        return
    if lengths is not None:
        length = tl.load(lengths + row).to(tl.int32)
    q += base + head * q_head * UNIT
    k += (row * k_row + head // GROUP * k_head) * UNIT
    v += (row * v_row + head // GROUP * v_head) * UNIT
    m = tile * BM + tl.arange(0, BM)
    there = m < t
    at = m.to(tl.int64) * (tl.cast(q_token, tl.int64) * UNIT)
    e = tl.arange(0, BV)
    to = (start + m) * HEADS + head
    last = length - t + m - first  # the last key of the block that a query sees
    lowest = length - t + tile * BM - first
    end = tl.minimum(tl.minimum(count, length - first), lowest + BM)
    if not ENDS:  # noqa: SIM102 (a compile-time condition around one of the device)
        if end <= 0:
            return
    full = tl.maximum(tl.minimum(end, lowest + 1), 0) // BN * BN  # keys that all queries of the tile see

    queries = load_tile(q, at, tl.arange(0, BK), there, SIZE, BK)
    shared = queries
    if SHARED:
        shared = load_tile(q + SIZE, at, tl.arange(0, BS), there, SHARED, BS)
        p += row * p_row * UNIT
    seen = there[:, None] & (e < VALUE)[None, :]
    if BEGINS:
        peak = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
    else:
        peak = tl.load(carried_totals + to, mask=there, other=0.0)
        total = tl.full([BM], 1.0, tl.float32)
        acc = tl.load(carried + to[:, None] * VALUE + e[None, :], mask=seen, other=0.0)
    scale *= _LOG2_E
    k_step, v_step = tl.cast(k_token, tl.int64) * UNIT, tl.cast(v_token, tl.int64) * UNIT
    p_step = tl.cast(p_token, tl.int64) * UNIT
    acc, peak, total = _scan_keys(
        acc, peak, total, queries, shared, k, v, p, last, 0, full, scale, k_step, v_step, p_step,
        SIZE, VALUE, SHARED, BN, BK, BV, BS, False,
    )  # fmt: skip
    acc, peak, total = _scan_keys(
        acc, peak, total, queries, shared, k, v, p, last, full, end, scale, k_step, v_step, p_step,
        SIZE, VALUE, SHARED, BN, BK, BV, BS, True,
    )  # fmt: skip
    acc = acc / total[:, None]
    if ENDS:
        tl.store(output + to[:, None] * VALUE + e[None, :], acc.to(output.dtype.element_ty), mask=seen)
    else:
        tl.store(carried + to[:, None] * VALUE + e[None, :], acc, mask=seen)
        tl.store(carried_totals + to, peak + tl.log2(total), mask=there)


def tiles_of(device: torch.device, itemsize: int, key: int, value: int) -> Tiles | None:
    """Return the tiles for keys and values of this many channels, padded ones included; None: they do not fit."""
    wanted = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2)] if is_hopper(device) else []
    for queries, keys, warps, stages in (*wanted, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)):
        if value > 128 and keys > 64:
            continue  # the scores and the sums have to stay in registers
        needed = itemsize * (queries * key + stages * keys * (key + value) + queries * keys)
        if needed + 4096 <= shared_memory(device):
            return Tiles(queries, keys, warps, stages)
    return None


def serves_piece(q: Tensor, cache: Tensor, key: int, value: int, shared: int = 0) -> bool:
    """Whether piece_attention supports these tensors: 16-bit ones.

    Args:
        q: Queries `b t heads key+shared`.
        cache: A tensor of the cache, with the dtype of the keys and their rows.
        key: Channels of a key of each head.
        value: Channels of a value.
        shared: Channels of a key that all heads share.
    """
    if q.dtype not in (torch.bfloat16, torch.float16) or q.dtype != cache.dtype or cache.shape[0] == 0:
        return False
    if q.shape[1] == 0 or not 0 < key <= WIDEST_HEAD or not 0 < value <= WIDEST_HEAD or shared > WIDEST_SHARED:
        return False
    return tiles_of(q.device, q.itemsize, *_padded(key, value, shared)) is not None


def _padded(size: int, value: int, shared: int) -> tuple[int, int]:
    narrow = max(16, next_power(shared)) if shared else 0
    return max(16, next_power(size)) + narrow, max(16, next_power(value))


def piece_attention(
    q: Tensor, blocks: Iterable[Block], n: int, lengths: int | Tensor, scale: float, bounds: Tensor | None = None,
    longest: int = 0, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention `b t heads v` of q, the last tokens of each row, without gradients.

    Args:
        q: Queries `b t heads k+p`; with bounds `1 t heads k+p`.
        blocks: The keys, in order and without gaps.
        n: How many keys there are in all blocks.
        lengths: The number of keys of each row, those of q's tokens included, int64 `rows`; an int if all have as many.
        scale: Multiplies the scores.
        bounds: Where the packed queries of the rows begin and end, `rows + 1`; None: q has as many rows.
        longest: The most queries of a row, with bounds.
        tiles: The tiles; None: those for this device.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    b, t, heads = q.shape[:3]
    carried = totals = output = None
    with torch.cuda.device_of(q):
        for k, v, p, first in blocks:
            k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
            size, value, shared = k.shape[3], v.shape[3], 0 if p is None else p.shape[3]
            strides = (
                *strides_of(q, 3),
                *strides_of(k, 3),
                *strides_of(v, 3),
                *((0, 0) if p is None else strides_of(p, 2)),
            )
            unit = unit_of((size, value, shared, *strides))
            key, wide = _padded(size, value, shared)
            chosen = tiles_of(q.device, q.itemsize, key, wide) if tiles is None else tiles
            assert chosen is not None
            if output is None:
                output = torch.empty(b, t, heads, value, dtype=q.dtype, device=q.device)
            ends, begins = first + k.shape[1] >= n, first == 0
            if carried is None and not ends:
                carried = torch.empty(b, t, heads, value, dtype=torch.float32, device=q.device)
                totals = torch.empty(b, t, heads, dtype=torch.float32, device=q.device)
            count = ceil_div(t if bounds is None else longest, chosen.queries)
            grid = count * heads * (b if bounds is None else bounds.shape[0] - 1)
            if grid:
                start(attend_keys, (grid,))(
                    q, k, v, p, bounds, lengths if isinstance(lengths, Tensor) else None, carried, totals, output,
                    scale, count, t, 0 if isinstance(lengths, Tensor) else lengths, k.shape[1], first,
                    *(s // unit for s in strides),
                    HEADS=heads, GROUP=heads // k.shape[2], SIZE=size, VALUE=value, SHARED=shared, BM=chosen.queries,
                    BN=chosen.keys, BK=max(16, next_power(size)), BV=wide, BS=max(16, next_power(max(shared, 1))),
                    UNIT=unit, BEGINS=begins, ENDS=ends, num_warps=chosen.warps, num_stages=chosen.stages,
                )  # fmt: skip
    assert output is not None
    return output
