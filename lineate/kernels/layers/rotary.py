"""Rotary positions in one launch: pairs of channels of a head are rotated, the others are copied.

    y_i = x_i cos - x_{i+n} sin,  y_{i+n} = x_{i+n} cos + x_i sin       i < n = HALF, cos and sin of the token's angle i

The backward rotates them by the opposite angles. All arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "t", "x_batch", "x_token", "x_head", "table_batch"])
def turn(
    x, y, cos, sin, rows, t, x_batch, x_token, x_head, table_batch,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """x `b t HEADS SIZE`, its strides in units; cos, sin `b t HALF`, table_batch 0 if all b share them; y is dense.

    A tile [ROWS, BH] of heads of tokens for each half, and [ROWS, BR] of the channels that are not rotated.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = r // HEADS
    batch = (token // t).to(tl.int64)
    place = (token % t).to(tl.int64)
    j = tl.arange(0, BH)
    mask = (r < rows)[:, None] & (j < HALF)[None, :]
    at = (batch * table_batch + place * HALF)[:, None] + j[None, :]
    c = tl.load(cos + at, mask=mask, other=0.0)
    s = tl.load(sin + at, mask=mask, other=0.0)
    if BACK:
        s = -s
    x += ((batch * x_batch + place * x_token + (r % HEADS) * x_head) * UNIT)[:, None]
    y += (r.to(tl.int64) * SIZE)[:, None]
    first = tl.load(x + j[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + (HALF + j)[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + j[None, :], first * c - second * s, mask=mask)
    tl.store(y + (HALF + j)[None, :], second * c + first * s, mask=mask)
    if SIZE > 2 * HALF:
        k = 2 * HALF + tl.arange(0, BR)
        mask = (r < rows)[:, None] & (k < SIZE)[None, :]
        tl.store(y + k[None, :], tl.load(x + k[None, :], mask=mask, other=0.0), mask=mask)
