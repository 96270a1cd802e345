"""The products of a mixture of experts for many rows on Hopper: weights come by TMA, rows of x are gathered.

    h_p = silu(G_e x_t) U_e x_t, or relu(U_e x_t)^2; then o_p = D_e h_p      for each pair p of a token and an expert

As experts.multiply_blocks, for weights whose sizes are whole tiles. Gate and factor are two products.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from lineate.kernels.launching import is_hopper, overlap_options, start
from lineate.kernels.layers.grouping import Groups
from lineate.kernels.layers.rows import _sigmoid

TALL = 8
"""Blocks of pairs whose programs are next to each other, so that they share tiles of weights in the L2 cache."""


@triton.jit(do_not_specialize=["count"])
def multiply_tiles(
    x, weight, blocks, members, y, count,
    N: tl.constexpr, K: tl.constexpr, EVERY: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TALL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows p of y `pairs N` for one block of pairs and BN channels, from rows p / EVERY of x `tokens K`.

    weight describes `experts N K` (KIND 1: `experts 2N K`) as rows of K. KIND 1: silu(first half) second half; 2:
    relu^2.
    """
    TILES: tl.constexpr = N // BN
    ROWS: tl.constexpr = 2 * N if KIND == 1 else N
    first = tl.program_id(0) // (TALL * TILES) * TALL
    high = tl.minimum(TALL, count - first)
    inside = tl.program_id(0) % (TALL * TILES)
    block = first + inside % high
    tile = inside // high
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(blocks + block)
    if expert >= 0:
        pair = tl.load(members + block * BM + tl.arange(0, BM))
        there = tl.maximum(pair, 0)  # rows that the block does not have are computed, and not stored
        at = x + (there // EVERY)[:, None].to(tl.int64) * K + tl.arange(0, BK)[None, :]
        row = expert * ROWS + tile * BN
        total = tl.zeros((BM, BN), tl.float32)
        if KIND == 1:
            up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = tl.load(at + k)
            total = tl.dot(a, weight.load([row, k]).T, total)
            if KIND == 1:
                up = tl.dot(a, weight.load([row + N, k]).T, up)
        if KIND == 1:
            total *= _sigmoid(total) * up
        elif KIND == 2:
            total = tl.maximum(total, 0.0)
            total *= total
        c = tile * BN + tl.arange(0, BN)
        to = y + there[:, None].to(tl.int64) * N + c[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=(pair >= 0)[:, None])


def serves(x: Tensor, weight: Tensor, tile: dict[str, int], gated: bool) -> bool:
    """Whether `multiply` supports x `tokens k` and weight `experts n k` in this configuration."""
    n, k = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    return (
        is_hopper(x.device) and x.dtype.itemsize == 2 and n % tile["BN"] == 0 and k % tile["BK"] == 0
        and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    )  # fmt: skip


def multiply(
    x: Tensor, weight: Tensor, groups: Groups, y: Tensor, *, every: int, kind: int, tile: dict[str, int]
) -> None:
    """Write the products of pairs into y `pairs n`; pair p has row p / every of x `tokens k`.

    Args:
        x: Dense, where `serves`.
        weight: `experts n k`, or with kind 1 `experts 2n k`; dense.
        groups: The pairs by expert, with members.
        y: Dense.
        every: Pairs of a row of x.
        kind: 1: the result is silu(first half) second half; 2: relu^2; 0: the product.
        tile: The configuration of the kernel; BM is groups.size.
    """
    experts, rows, k = weight.shape
    n = rows // 2 if kind == 1 else rows
    described = TensorDescriptor(weight, [experts * rows, k], [k, 1], [tile["BN"], tile["BK"]])
    count = groups.blocks.shape[0]
    start(multiply_tiles, (n // tile["BN"] * count,))(
        x, described, groups.blocks, groups.members, y, count,
        N=n, K=k, EVERY=every, KIND=kind, **({"TALL": TALL} | tile), **overlap_options(x.device),
    )  # fmt: skip
