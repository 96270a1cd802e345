"""The products of a mixture of experts, whose weights are read in place.

    h_p = silu(G_e x_t) U_e x_t, or relu(U_e x_t)^2      for each pair p of a token t and an expert e
    o_p = D_e h_p
    y_t = sum_p w_p o_p                                   over the pairs of token t, in their order

Each product is one launch. A program multiplies a block of pairs of one expert (grouping.py) by a tile of the expert's
rows, so that each weight is read once for all pairs of a block; pairs that the block does not have are zeros. The last
pair of a token may be a shared expert, whose weights are separate tensors. All sums are float32, in an order that
depends neither on other pairs nor on their number, as long as the configuration is the same. With many pairs of an
expert, what lies between the two products is in the order of the blocks, so that the second one reads whole tiles of
both by Hopper's descriptors.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from lineate.kernels.launching import ceil_div, is_hopper, multiprocessors, next_power, overlap_options, start
from lineate.kernels.layers.grouping import Groups
from lineate.kernels.layers.rows import sigmoid
from lineate.torch_ops.invariance import is_batch_invariant

LEAVE = {"BN": 256, "BK": 64, "STAGES": 4}
"""Tiles of leave. On an H200, 32,768 rows of Kimi-Linear-48B take 2.1 ms instead of 2.5 by addresses."""
WARPS, LOADED = 4, 640
"""The warps of leave_row, and the most bytes of weights that a thread of it has in registers."""
LEAST_ROWS = 8
"""With fewer channels a program, leave_row is slower than two launches: with 4, a step of Kimi-Linear-48B takes 2.62 ms
on an H200 instead of 2.37."""
GATED = {"swiglu": 1, "relu2": 2}
"""The function that multiply_blocks applies to a product; 0: none."""


@triton.jit
def _weights(at, mask, WHOLE: tl.constexpr):
    """Load a tile of weights; WHOLE: the mask is not needed."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _product(
    at_x, at_w, pair, has, total, K: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, SWAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return total plus the product of the rows of pairs and the rows that a tile of weights has."""
    k = tl.arange(0, BK)
    for first in range(0, K, BK):
        if SWAP:
            mask_w = has[:, None] & (first + k < K)[None, :]
            mask_x = (pair >= 0)[None, :] & (first + k < K)[:, None]
        else:
            mask_w = has[None, :] & (first + k < K)[:, None]
            mask_x = (pair >= 0)[:, None] & (first + k < K)[None, :]
        b = _weights(at_w + first, mask_w, WHOLE)
        a = tl.load(at_x + first, mask=mask_x, other=0.0)
        if SWAP:
            total = tl.dot(b, a, total, input_precision="ieee" if EXACT else "tf32")
        else:
            total = tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")
    return total


@triton.jit(do_not_specialize=["begin"])
def multiply_blocks(
    x, weight, shared, blocks, members, y, begin,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, EVERY: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, REST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EXACT: tl.constexpr,
    PLACED: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows p of y `pairs N` for one block of pairs and BN channels, from rows p / EVERY of x `tokens K`.

    A block has BM pairs and REST others, which are multiplied by the same tiles of weights, if it has any of them.
    PLACED: y is `blocks BM+REST N`, a row for each place of a block.

    weight is `EXPERTS N K` (KIND 1: `EXPERTS 2N K`) of the experts from `begin` on; other blocks are left out. Expert
    begin + EXPERTS is `shared`, if there is one. KIND 1: silu(first half) second half; 2: relu^2. Without members,
    block b has pair b. SWAP: the product is computed as weight x^T. LATE: the next launch begins when the one before
    this has ended, so that it may read what that one has written.
    """
    TILES: tl.constexpr = (N + BN - 1) // BN
    HALVES: tl.constexpr = 2 if KIND == 1 else 1
    BW: tl.constexpr = HALVES * BN
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
        if LATE:
            gdc_launch_dependents()
    expert = tl.load(blocks + block) - begin
    if (expert >= 0) & (expert < EXPERTS + (0 if shared is None else 1)):
        m = tl.arange(0, BM)
        if members is None:
            pair = tl.where(m == 0, block, -1)
        else:
            pair = tl.load(members + block * (BM + REST) + m)
        token = tl.maximum(pair, 0) // EVERY
        n = tl.arange(0, BW)  # KIND 1: gate and factor of a channel are neighbours
        row = tile * BN + n // HALVES
        w = weight + expert.to(tl.int64) * (HALVES * N * K)
        if shared is not None:
            w = tl.where(expert == EXPERTS, shared, w)
        k = tl.arange(0, BK)
        has = row < N
        if SWAP:
            at_w = w + (row + n % HALVES * N)[:, None].to(tl.int64) * K + k[None, :]
            at_x = x + token[None, :].to(tl.int64) * K + k[:, None]
            total = tl.zeros((BW, BM), tl.float32)
        else:
            at_w = w + (row + n % HALVES * N)[None, :].to(tl.int64) * K + k[:, None]
            at_x = x + token[:, None].to(tl.int64) * K + k[None, :]
            total = tl.zeros((BM, BW), tl.float32)
        WHOLE: tl.constexpr = K % BK == 0 and N % BN == 0
        if REST:
            more = tl.load(members + block * (BM + REST) + BM + tl.arange(0, REST))
            if tl.max(more, 0) >= 0:
                at_more = x + (tl.maximum(more, 0) // EVERY)[None, :].to(tl.int64) * K + k[:, None]
                others = tl.zeros((BW, REST), tl.float32)
                for first in range(0, K, BK):
                    there = first + k < K
                    b = _weights(at_w + first, has[None, :] & there[:, None], WHOLE)
                    a = tl.load(at_x + first, mask=(pair >= 0)[:, None] & there[None, :], other=0.0)
                    c = tl.load(at_more + first, mask=(more >= 0)[None, :] & there[:, None], other=0.0)
                    total = tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")
                    others = tl.dot(tl.trans(b), c, others, input_precision="ieee" if EXACT else "tf32")
                _store(tl.trans(others), y, more, block * (BM + REST) + BM, tile, N, KIND, REST, BN, PLACED)
            else:
                total = _product(at_x, at_w, pair, has, total, K, BK, WHOLE, SWAP, EXACT)
        else:
            total = _product(at_x, at_w, pair, has, total, K, BK, WHOLE, SWAP, EXACT)
        if SWAP:
            total = tl.trans(total)
        _store(total, y, pair, block * (BM + REST), tile, N, KIND, BM, BN, PLACED)


@triton.jit
def _store(
    total, y, pair, place, tile, N: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Store the BM products of pairs, whose places begin with `place`, after their activation."""
    if KIND == 1:
        gate, up = tl.split(tl.reshape(total, (BM, BN, 2)))
        total = gate * sigmoid(gate) * up
    elif KIND == 2:
        total = tl.maximum(total, 0.0)
        total *= total
    c = tile * BN + tl.arange(0, BN)
    at = tl.maximum(pair, 0)
    if PLACED:
        at = place + tl.arange(0, BM)
    mask = (pair >= 0)[:, None] & (c < N)[None, :]
    tl.store(y + at[:, None].to(tl.int64) * N + c[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _described_product(hidden, weight, place, row, total, K: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """Return total plus the product of rows of hidden from `place` on and of weight from `row` on."""
    for first in tl.range(0, K, BK, num_stages=STAGES):
        a = hidden.load([place, first])
        b = weight.load([row, first])
        total = tl.dot(a, b.T, total)
    return total


@triton.jit(do_not_specialize=["begin"])
def leave_blocks(
    hidden, hidden_rest, weight, blocks, members, y, y_rest, begin, N: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, REST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BN channels of a block of y `blocks BM+REST N`, from hidden `.. K` and weight `EXPERTS N K`, by descriptors.

    The REST places are read and written by descriptors of their own, where a block has pairs there (members). Rows of
    places without a pair are undefined.
    """
    TILES: tl.constexpr = N // BN
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(blocks + block) - begin
    if (expert >= 0) & (expert < EXPERTS):
        place = block * (BM + REST)
        row = expert * N + tile * BN
        total = tl.zeros((BM, BN), tl.float32)
        if REST:
            if tl.load(members + place + BM) >= 0:
                others = tl.zeros((BN, REST), tl.float32)
                for first in tl.range(0, K, BK, num_stages=STAGES):
                    a = hidden.load([place, first])
                    c = hidden_rest.load([place + BM, first])
                    b = weight.load([row, first])
                    total = tl.dot(a, b.T, total)
                    others = tl.dot(b, c.T, others)
                y_rest.store([place + BM, tile * BN], tl.trans(others).to(y.dtype))
            else:
                total = _described_product(hidden, weight, place, row, total, K, BK, STAGES)
        else:
            total = _described_product(hidden, weight, place, row, total, K, BK, STAGES)
        y.store([place, tile * BN], total.to(y.dtype))


@triton.jit
def leave_row(
    hidden, weight, shared, chosen, weights, residual, y,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN channels of one row y `N`: the sum over pairs of weights `PAIRS` times hidden `PAIRS K` weight_e^T.

    chosen `PAIRS` names each pair's expert e; EXPERTS is `shared`, if there is one. weight is `EXPERTS N K`. With
    residual `N`, that is added to the sum, which is rounded before. All but hidden was written before the previous
    launch went on (LATE), so the weights of the experts are loaded while that one runs.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    has = n < N
    mask = has[:, None] & (k < K)[None, :]
    at = n[:, None] * K + k[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    names = ()
    amounts = ()
    for p in tl.static_range(PAIRS):
        names += (tl.load(chosen + p, cache_modifier=".cg"),)  # type: ignore[assignment]
        amounts += (tl.load(weights + p, cache_modifier=".cg"),)  # type: ignore[assignment]
    if residual is not None:
        own = tl.load(residual + n, mask=has, other=0.0, cache_modifier=".cg").to(tl.float32)
    tiles = ()
    for p in tl.static_range(PAIRS):
        w = weight + names[p].to(tl.int64) * (N * K)  # type: ignore[misc]
        if shared is not None:
            w = tl.where(names[p] == EXPERTS, shared, w)  # type: ignore[misc]
        tiles += (tl.load(w + at, mask=mask, other=0.0),)  # type: ignore[assignment]
    if OVERLAP:
        gdc_wait()
    total = tl.zeros((BN, BK), tl.float32)
    for p in tl.static_range(PAIRS):
        h = tl.load(hidden + p * K + k, mask=k < K, other=0.0).to(tl.float32) * amounts[p]  # type: ignore[misc]
        total += tiles[p].to(tl.float32) * h[None, :]  # type: ignore[misc]
    found = tl.sum(total, 1)
    if residual is not None:
        found = found.to(y.dtype.element_ty).to(tl.float32) + own
    tl.store(y + n, found.to(y.dtype.element_ty), mask=has)


@triton.jit(do_not_specialize=["rows"])
def add_pairs(
    parts, weights, places, shared, residual, y, rows, WIDTH: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr,
    BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN channels of a row of y `rows N`: the sum of weights `rows WIDTH` times parts `rows PAIRS N`.

    With places `rows PAIRS`, parts lie there. With shared `rows N`, it is the last summand, with the last weight. With
    residual `rows N`, that is added to the sum, which is rounded before.
    """
    TILES: tl.constexpr = (N + BN - 1) // BN
    row = (tl.program_id(0) // TILES).to(tl.int64)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    has = n < N
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BN,), tl.float32)
    for i in tl.static_range(PAIRS):
        place = row * PAIRS + i
        if places is not None:
            place = tl.load(places + place).to(tl.int64)
        found = tl.load(parts + place * N + n, mask=has, other=0.0).to(tl.float32)
        total += tl.load(weights + row * WIDTH + i) * found
    if shared is not None:
        found = tl.load(shared + row * N + n, mask=has, other=0.0).to(tl.float32)
        total += tl.load(weights + row * WIDTH + (WIDTH - 1)) * found
    if residual is not None:
        own = tl.load(residual + row * N + n, mask=has, other=0.0).to(tl.float32)
        total = total.to(y.dtype.element_ty).to(tl.float32) + own
    tl.store(y + row * N + n, total.to(y.dtype.element_ty), mask=has)


@triton.jit
def activate_pairs(x, y, N: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr):
    """BN channels of a row of y `pairs N`, from x `pairs 2N` (KIND 1) or `pairs N` (2)."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    row = (tl.program_id(0) // TILES).to(tl.int64)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if KIND == 1:
        gate = tl.load(x + row * (2 * N) + n, mask=n < N, other=0.0).to(tl.float32)
        up = tl.load(x + row * (2 * N) + N + n, mask=n < N, other=0.0).to(tl.float32)
        found = gate * sigmoid(gate) * up
    else:
        found = tl.maximum(tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32), 0.0)
        found *= found
    tl.store(y + row * N + n, found.to(y.dtype.element_ty), mask=n < N)


class Weights(NamedTuple):
    """The weights of experts, dense, in the dtype of the tokens.

    Args:
        experts: `experts n k`.
        shared: `n k` of the shared expert, or None.
        kind: "swiglu" or "relu2" for the first product of experts; None for the second one.
        begin: The number of the first of these experts; the pairs of others are left out.
    """

    experts: Tensor
    shared: Tensor | None
    kind: str | None
    begin: int = 0


def multiply(
    x: Tensor, weights: Weights, groups: Groups, y: Tensor, *, every: int, tile: dict[str, int], placed: bool = False,
    late: bool = False,
) -> None:  # fmt: skip
    """Write the products of pairs into y `pairs n`; pair p has row p / every of x `tokens k`.

    Args:
        x: Dense.
        weights: Of the experts.
        groups: The pairs by expert.
        y: Dense.
        every: Pairs of a row of x.
        tile: The configuration of the kernel; BM + REST is groups.size, or BM at least 16.
        placed: Whether y is `blocks size n`, with a row for each place of a block.
        late: Whether the next launch reads what the launch before this one wrote, before this one ends.
    """
    assert groups.members is None or tile["BM"] + tile["REST"] == groups.size
    count, n, k = weights.experts.shape
    n = n // 2 if weights.kind == "swiglu" else n
    start(multiply_blocks, (ceil_div(n, tile["BN"]) * groups.blocks.numel(),))(
        x, weights.experts, weights.shared, groups.blocks, groups.members, y, weights.begin,
        N=n, K=k, EXPERTS=count, EVERY=every, KIND=0 if weights.kind is None else GATED[weights.kind],
        EXACT=x.dtype is torch.float32, PLACED=placed, LATE=late, **tile, **overlap_options(x.device),
    )  # fmt: skip


def rows_of_leave(weight: Tensor, pairs: int) -> int:
    """Return how many channels a program of leave_row has, a power of two; 0: registers have room for too few.

    weight: `experts n k`.
    """
    _, n, k = weight.shape
    most = LOADED * 32 * WARPS // (pairs * next_power(k) * weight.itemsize)
    if most < LEAST_ROWS:
        return 0
    return min(1 << most.bit_length() - 1, next_power(ceil_div(n, 2 * multiprocessors(weight.device))))


def leave_one(
    hidden: Tensor, weights: Weights, chosen: Tensor, amounts: Tensor, y: Tensor, residual: Tensor | None = None
) -> None:
    """Write the weighted sum of one row's pairs times their experts' weights into y `1 n`, where rows_of_leave > 0.

    Args:
        hidden: `pairs k`, dense.
        weights: Of the experts; kind is None.
        chosen: The experts of the pairs, `1 pairs`.
        amounts: The weights of the pairs, `1 pairs`, float32.
        y: Dense.
        residual: `1 n`, dense, which is added to the sum.
    """
    pairs, k = hidden.shape
    count, n, _ = weights.experts.shape
    rows = rows_of_leave(weights.experts, pairs)
    assert rows and weights.begin == 0 and chosen.numel() == amounts.numel() == pairs
    start(leave_row, (ceil_div(n, rows),))(
        hidden, weights.experts, weights.shared, chosen, amounts, residual, y,
        N=n, K=k, EXPERTS=count, PAIRS=pairs, BN=rows, BK=next_power(k), num_warps=WARPS,
        **overlap_options(hidden.device),
    )  # fmt: skip


def leaves_by_descriptors(tokens: Tensor, sizes: tuple[int, int], tile: dict[str, int]) -> bool:
    """Whether leave takes weights of these sizes `n k` and blocks of this tile: on Hopper, in 16 bits, whole tiles.

    tokens: of the weights' device and dtype.
    """
    n, k = sizes
    return (
        is_hopper(tokens.device) and tokens.itemsize == 2 and tile["BM"] == 128
        and n % LEAVE["BN"] == k % LEAVE["BK"] == 0
    )  # fmt: skip


def leave(hidden: Tensor, weight: Tensor, groups: Groups, y: Tensor, begin: int = 0, *, rest: int = 0) -> None:
    """Write the products of the places of all blocks into y `blocks size n`; those without a pair are undefined.

    Args:
        hidden: `blocks size k`, dense.
        weight: `experts n k`, dense.
        groups: The pairs by expert.
        y: Dense.
        begin: The number of the first of these experts; the blocks of others are left out.
        rest: How many places of a block, its last ones, are multiplied separately; 0 or a power of two from 16 on.
    """
    count, n, k = weight.shape
    blocks, size = groups.blocks.numel(), groups.size - rest
    hidden, y = hidden.view(-1, k), y.view(-1, n)
    start(leave_blocks, (blocks * (n // LEAVE["BN"]),))(
        _described(hidden, size, LEAVE["BK"]), _described(hidden, rest, LEAVE["BK"]) if rest else None,
        _described(weight.view(count * n, k), LEAVE["BN"], LEAVE["BK"]), groups.blocks, groups.members,
        _described(y, size, LEAVE["BN"]), _described(y, rest, LEAVE["BN"]) if rest else None,
        begin, N=n, K=k, EXPERTS=count, BM=size, REST=rest, **LEAVE, num_warps=8,
    )  # fmt: skip


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns])


def add(
    parts: Tensor, weights: Tensor, y: Tensor, *, places: Tensor | None = None, shared: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the weighted sum of parts into y `rows n`.

    Args:
        parts: `rows pairs n`, dense; or with places any number of rows `n`.
        weights: `rows pairs`, float32; with shared one more column.
        y: Dense.
        places: The rows of parts, `rows pairs` int32; None: in order.
        shared: `rows n`, dense: the last summand.
        residual: `rows n`, dense, which is added to the sum.
    """
    rows, width = weights.shape
    n = parts.shape[-1]
    block = min(next_power(n), 256 if rows <= 64 or is_batch_invariant() else 1024)
    start(add_pairs, (rows * ceil_div(n, block),))(
        parts, weights, places, shared, residual, y, rows, WIDTH=width, PAIRS=width - (shared is not None), N=n,
        BN=block, num_warps=max(1, min(4, block // 256)), **overlap_options(parts.device),
    )  # fmt: skip


def activate(x: Tensor, kind: str) -> Tensor:
    """Return silu(first half) second half, or with kind "relu2" relu(x)^2, of each row of x, dense."""
    rows, n = x.shape[0], x.shape[1] // (2 if kind == "swiglu" else 1)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block = min(1024, next_power(n))
    start(activate_pairs, (rows * ceil_div(n, block),))(
        x, y, N=n, KIND=GATED[kind], BN=block, num_warps=max(1, min(4, block // 256)), **overlap_options(x.device)
    )
    return y
