"""The products of a mixture whose weights are codes of 8 or 4 bits, for blocks of many pairs of an expert.

    h_p = silu(G_e x_t) U_e x_t, or relu(U_e x_t)^2      o_p = D_e h_p       (experts.py)

A program reads the codes of its tile of a weight once for all pairs of its block, decodes them in registers, rounded to
the dtype of the tokens as decode_quantised rounds them, and multiplies them on the tensor cores. So no decoded weight
is written to memory. Tiles of a weight have 16 rows, and groups 32 columns (lineate/quantised/format.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import start
from lineate.kernels.layers.experts import GATED
from lineate.kernels.layers.grouping import Groups
from lineate.kernels.layers.quantised import decode_tiles
from lineate.kernels.layers.quantised_products import Codes
from lineate.kernels.layers.rows import sigmoid

SHAPE = {"BM": 32, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
"""Pairs of a block, rows of a weight and columns of a program.

us on an H200 of the two products in fp8, Kimi-Linear-48B (k 2304, n 1024, 256 experts, 8 of them for each row), next to
those of decoded weights and of multiply_quantised_rows with its best size of blocks:

                 BM 32    BM 64    decoded    rows
     640 rows      903     1835       2669    1059
    1024          1271     1841       2697    1389
    1536          1739     1831       2720    1898
    2048          2132     2614       2910    2474
    4096                   4410       3235
"""


@triton.jit
def multiply_coded_blocks(
    x, codes, scales, blocks, members, y,
    N: tl.constexpr, K: tl.constexpr, EVERY: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows p of y `pairs N` for one block of pairs and BN rows of a weight, from rows p / EVERY of x `tokens K`.

    codes are the words of `experts N K` (KIND 1: `experts 2N K`). KIND 1: silu(first half) second half, of BN / 2
    channels; 2: relu^2.
    """
    HALVES: tl.constexpr = 2 if KIND == 1 else 1
    OWN: tl.constexpr = BN // HALVES  # channels of this program
    TILES: tl.constexpr = N // OWN
    T: tl.constexpr = OWN // 16
    SCALES: tl.constexpr = (K + 127) // 128 * 16 if FP8 else K // 2
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(blocks + block)
    if expert >= 0:
        pair = tl.load(members + block * BM + tl.arange(0, BM))
        k = tl.arange(0, BK)
        at_x = x + (tl.maximum(pair, 0) // EVERY)[:, None].to(tl.int64) * K + k[None, :]
        own = expert.to(tl.int64) * (HALVES * N // 16) + tile * T
        codes += own * (K // 2 * BITS)
        scales += own * SCALES
        total = tl.zeros((BM, OWN), tl.float32)
        ups = tl.zeros((BM, OWN), tl.float32)
        for first in range(0, K, BK):
            a = tl.load(at_x + first, mask=(pair >= 0)[:, None], other=0.0)
            b = decode_tiles(codes, scales, first, T, K, BK, BITS, FP8, x.dtype.element_ty)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee" if EXACT else "tf32")
            if KIND == 1:
                AFTER: tl.constexpr = N // 16
                c = decode_tiles(
                    codes + AFTER * (K // 2 * BITS), scales + AFTER * SCALES, first, T, K, BK, BITS, FP8,
                    x.dtype.element_ty,
                )  # fmt: skip
                ups = tl.dot(a, tl.trans(c), ups, input_precision="ieee" if EXACT else "tf32")
        if KIND == 1:
            total = total * sigmoid(total) * ups
        elif KIND == 2:
            total = tl.maximum(total, 0.0)
            total *= total
        n = tile * OWN + tl.arange(0, OWN)
        at = tl.maximum(pair, 0)[:, None].to(tl.int64) * N + n[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=(pair >= 0)[:, None])


def serves(weight: Codes) -> bool:
    """Whether multiply takes a weight `experts n k`: whole tiles of SHAPE."""
    return weight.rows % SHAPE["BN"] == weight.columns % SHAPE["BK"] == 0


def multiply(
    x: Tensor, weight: Codes, kind: str | None, groups: Groups, y: Tensor, *, every: int,
    shape: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Write the products of pairs into y `pairs n`; pair p has row p / every of x `tokens k`, where `serves`.

    Args:
        x: Dense.
        weight: Of the experts, `experts n k`; with "swiglu" `experts 2n k`.
        kind: "swiglu" or "relu2" for the first product of experts; None for the second one.
        groups: The pairs by expert.
        y: Dense.
        every: Pairs of a row of x.
        shape: The configuration of the kernel; BM is groups.size. None: SHAPE.
    """
    shape = SHAPE if shape is None else shape
    n = y.shape[1]
    own = shape["BN"] // (2 if kind == "swiglu" else 1)
    assert groups.members is not None and groups.size == shape["BM"] and n % own == 0
    start(multiply_coded_blocks, (n // own * groups.blocks.numel(),))(
        x, weight.codes.view(torch.int32), weight.scales, groups.blocks, groups.members, y,
        N=n, K=weight.columns, EVERY=every, KIND=0 if kind is None else GATED[kind], BITS=weight.bits,
        FP8=weight.floating, EXACT=x.itemsize == 4, **shape,
    )  # fmt: skip
