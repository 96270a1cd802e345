"""Attention of a long piece of a sequence over a longer cache, by cuDNN: whole blocks of keys, then one causal square.

    o = sum_b e^{z_b - z} o_b,    z = log sum_b e^{z_b}

o_b is the attention to the keys of block b alone, and z_b the logarithm of its sum. cuDNN makes a plan for every shape,
which takes 40 ms, so blocks have few: queries are padded to whole multiples of GRAIN, and the keys before them are
cut into powers of two. A piece that does not begin at a multiple of GRAIN is preceded by queries whose results are not
kept, so that the last block is a square.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, is_hopper, next_power, start
from lineate.kernels.layers.ops import unit_of

GRAIN = 1024
LARGEST = 16384
"""The most queries and keys of a block."""
WIDEST_HEAD = 256
OLDEST_CUDNN = 91900
"""The oldest version of cuDNN that was measured; older ones refuse some pairs of head sizes."""
Keys = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns keys `b m kv k` and values `b m kv v` of positions begin .. end."""


@triton.jit(
    do_not_specialize=[
        *(
            "count",
            "t",
            "front",
            "after_row",
            "before_row",
            "before_token",
            "before_head",
            "found_row",
            "found_token",
            "found_head",
        ),
    ]
)
def join_block(
    before, before_logs, found, logs, after, count, t, front, after_row,
    before_row, before_token, before_head, found_row, found_token, found_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Join the attention of `count` queries to one block with that to the blocks before it.

    before and found are `row head count SIZE`, with strides in units of UNIT elements; their logarithms
    `row head count`. The result is `row count HEADS SIZE` and replaces before_logs; or if ENDS, of queries
    front .. front + t alone, `row t HEADS SIZE`. Its rows have a stride of after_row units.
    """
    tiles = tl.cdiv(count * HEADS, BM)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    token, head = (m // HEADS).to(tl.int64), (m % HEADS).to(tl.int64)
    there = token < count
    if ENDS:
        there = there & (token >= front) & (token < front + t)
    mask = there[:, None] & (d < SIZE)[None, :]
    at = (row * HEADS + head) * count + token
    own = tl.load(logs + at, mask=there, other=0.0)
    kept = tl.load(before_logs + at, mask=there, other=0.0)
    highest = tl.maximum(own, kept)
    total = highest + tl.log(tl.exp(own - highest) + tl.exp(kept - highest))
    at_before = (row * before_row + token * before_token + head * before_head) * UNIT
    at_found = (row * found_row + token * found_token + head * found_head) * UNIT
    y = tl.load(before + at_before[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y *= tl.exp(kept - total)[:, None]
    x = tl.load(found + at_found[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y += x * tl.exp(own - total)[:, None]
    if ENDS:
        token -= front
    else:
        tl.store(before_logs + at, total, mask=there)
    after += row * after_row * UNIT + (token * HEADS + head)[:, None] * SIZE + d[None, :]
    tl.store(after, y.to(after.dtype.element_ty), mask=mask)


Sum = tuple[Tensor, Tensor]
"""The attention to some keys `b heads t v`, and the logarithms of its sums `b heads t`, dense, in float32."""


def join(before: Sum, found: Sum, output: Tensor, front: int | None = None) -> None:
    """Write the attention to two sets of keys into the output.

    Args:
        before: To the first set.
        found: To the second one.
        output: `b t heads v`, dense within a row: that of queries front .. front + t; None: that of all queries, and
            the logarithms replace those of `before`.
        front: The first query that is kept.
    """
    (kept, kept_logs), (own, logs) = before, found
    b, heads, count, size = own.shape
    strides = [output.stride(0), *(x.stride(i) for x in (kept, own) for i in (0, 2, 1))]
    unit = unit_of((size, *strides))
    rows = max(1, 2048 // next_power(size))
    with torch.cuda.device_of(own):
        start(join_block, (b * ceil_div(count * heads, rows),))(
            kept, kept_logs, own, logs, output, count, output.shape[1], front or 0, *(s // unit for s in strides),
            HEADS=heads, SIZE=size, BD=next_power(size), BM=rows, UNIT=unit, ENDS=front is not None, num_warps=4,
        )  # fmt: skip


def attend_block(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Sum:
    """Return the attention of q `b t heads k` to keys `b m kv k` and values `b m kv v`, all or (t = m) causally."""
    q, k, v = (_aligned(x).transpose(1, 2) for x in (q, k, v))
    output, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return output, logs.view(logs.shape[:3])


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor that cuDNN reads where it lies, or a copy."""
    fits = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:3])
    return x if fits else x.contiguous()


@cache
def _has_cudnn() -> bool:
    return torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) >= OLDEST_CUDNN


def serves_square(q: Tensor, k: Tensor, value: int) -> bool:
    """Whether attend_block takes q `b t heads k`, and keys k of the same dtype with values of this many channels."""
    return (
        q.dtype in (torch.bfloat16, torch.float16) and k.dtype == q.dtype and q.is_cuda and is_hopper(q.device)
        and q.shape[0] > 0 and q.shape[1] >= GRAIN and 0 < max(q.shape[3], value) <= WIDEST_HEAD
        and q.shape[3] % 8 == value % 8 == 0 and _has_cudnn() and torch.backends.cuda.cudnn_sdp_enabled()
    )  # fmt: skip


def long_attention(q: Tensor, keys: Keys, n: int, scale: float) -> Tensor:
    """Return the attention `b t heads v` of q `b t heads k`, the last t of n tokens, without gradients.

    Args:
        q: `b t heads k`.
        keys: Returns the keys and values of some of the n tokens.
        n: How many tokens there are.
        scale: Multiplies the scores.
    """
    t = q.shape[1]
    if t == n:
        return attend_block(q, *keys(0, n), scale, True)[0].transpose(1, 2)
    first = (n - t) // GRAIN * GRAIN
    front = n - t - first  # queries before those of q, whose results are not kept
    pieces = []
    for begin in range(0, front + t, LARGEST):
        count = min(LARGEST, ceil_div(front + t - begin, GRAIN) * GRAIN)
        skipped = max(front - begin, 0)
        own = q[:, max(begin - front, 0) : begin - front + count]
        pieces.append(_attend_square(own, keys, (first + begin, skipped, count), n, scale))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _attend_square(q: Tensor, keys: Keys, square: tuple[int, int, int], n: int, scale: float) -> Tensor:
    """Return the attention `b t heads v` of q, whose tokens lie in one square, to it and to all keys before it.

    Args:
        q: `b t heads k`.
        keys: As for long_attention.
        square: The position where it begins, the number of queries in it before q, and its size.
        n: How many keys there are.
        scale: Multiplies the scores.
    """
    (begin, skipped, count), t = square, q.shape[1]
    q = _padded(q, skipped, count)
    kept: Tensor | None = None
    before: Sum | None = None
    for low, high in blocks_before(begin):
        found = attend_block(q, *keys(low, high), scale, False)
        if before is None:
            before = found
            continue
        if kept is None:
            kept = q.new_empty(q.shape[0], count, q.shape[2], found[0].shape[3], dtype=torch.float32)
        join(before, found, kept)
        before = kept.transpose(1, 2), before[1]
    k, v = (_padded(x, 0, count) for x in keys(begin, min(begin + count, n)))
    found = attend_block(q, k, v, scale, True)
    if before is None:
        return found[0].transpose(1, 2)[:, skipped : skipped + t]
    output = q.new_empty(q.shape[0], t, q.shape[2], v.shape[3])
    join(before, found, output, skipped)
    return output


def blocks_before(end: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of keys up to `end`, a multiple of GRAIN: powers of two, LARGEST at most."""
    begin = 0
    while begin < end:
        size = min(LARGEST, next_power(end - begin + 1) // 2)
        yield begin, begin + size
        begin += size


def _padded(x: Tensor, front: int, count: int) -> Tensor:
    """Return x `b t heads k` with zeros before and after it, so that it has `count` tokens."""
    after = count - front - x.shape[1]
    return F.pad(x, (0, 0, 0, 0, front, after)) if front or after else x
