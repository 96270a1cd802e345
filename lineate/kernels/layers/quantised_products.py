"""Products of a few rows with a weight of 8 or 4 bits, with the adjacent operations of a block; decoded weights.

Rows of 16 bits on Hopper go to the tensor cores (hopper/quantised_rows.py), up to MOST_ROWS of them. Others are
multiplied one by one on the ordinary cores (quantised.py), up to MOST_PORTABLE_ROWS. More rows are multiplied by a
decoded weight, or, if the caller requests it, rounded to float8 and multiplied by the float8 numbers of a weight.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.kernels.coded import CodedKernel
from lineate.kernels.launching import (
    ceil_div,
    is_hopper,
    launches_dependents,
    multiprocessors,
    next_power,
    overlap_options,
    start,
)
from lineate.kernels.layers import quantised as kernels
from lineate.kernels.layers.grouping import Groups
from lineate.kernels.layers.ops import KERNEL_DTYPES, SIZES
from lineate.kernels.layers.products import WIDEST, Convolution, Norm
from lineate.torch_ops.invariance import is_batch_invariant

MOST_ROWS = 64
LONGEST_ROW = 2**16  # of one row that fits into shared memory
MOST_PORTABLE_ROWS = 16
INVARIANT_ROWS = 32
"""The rows of a launch on the tensor cores in a batch-invariant step; fewer are filled up with zeros."""
BLOCK = 2**25
"""Elements of a weight that are decoded at a time for many rows."""
LEFT, LEFT_WARPS = 320, 8
"""The most bytes of codes that a thread of leave_quantised_row has in registers, and its warps."""
SHARED = 113 * 1024
"""Shared memory of a program, of which two fit on a multiprocessor."""


class Codes(NamedTuple):
    """A weight in tiles (lineate/quantised/format.py).

    Args:
        codes: `tiles groups bits 16 4`, or `experts tiles ...`.
        scales: `tiles groups 16`, or `experts tiles ...`; float16, or float32 for fp8.
        rows: Of the weight.
        kernel: Of the format: what the codes are.
    """

    codes: Tensor
    scales: Tensor
    rows: int
    kernel: CodedKernel

    @property
    def bits(self) -> int:
        return self.kernel.bits

    @property
    def columns(self) -> int:
        return 32 * self.codes.shape[-4]

    @property
    def floating(self) -> bool:
        return self.kernel.float8


def uses_tensor_cores(x: Tensor) -> bool:
    """Whether rows such as x go to the tensor cores."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and is_hopper(x.device)


def serves(x: Tensor, weight: Codes) -> bool:
    """Whether multiply supports x `rows k`."""
    most = MOST_ROWS if uses_tensor_cores(x) else MOST_PORTABLE_ROWS
    return (
        0 < x.shape[0] <= most and x.dtype in KERNEL_DTYPES and x.is_contiguous() and x.data_ptr() % 16 == 0
        and (x.shape[0] > 1 or x.shape[1] <= LONGEST_ROW)
        and weight.codes.is_contiguous() and weight.scales.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0 and weight.scales.data_ptr() % 16 == 0
    )  # fmt: skip


def takes_norm(x: Tensor) -> bool:
    """Whether multiply normalises these rows itself: a program has to have read all of them."""
    return x.shape[1] <= WIDEST and (x.shape[0] == 1 or not uses_tensor_cores(x))


def takes_gate(weight: Codes) -> bool:
    """Whether multiply can gate: both halves are whole tiles."""
    return weight.rows % 32 == 0


def parts_of(x: Tensor, weight: Codes) -> int:
    """Return the number of parts of k for multiply with which every multiprocessor has a program."""
    if not uses_tensor_cores(x):
        return 1
    return _parts(x, weight, _shape(x.shape[0], weight, ceil_div(weight.rows, 32) <= multiprocessors(x.device)))


def _parts(x: Tensor, weight: Codes, shape: dict[str, int]) -> int:
    programs, chunks = ceil_div(weight.rows, 32 * shape["WM"]), weight.columns // 32 // (shape["C"] * shape["WK"])
    most = max(1, min(8, chunks, multiprocessors(x.device) // programs))
    return 1 << (most.bit_length() - 1)


def multiply(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    convolution: Convolution | None = None,
    residual: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """Return x weight^T `rows n` with the given adjacent operations, without gradients.

    Args:
        x: `rows k`, which `serves` takes.
        weight: `n k`; gated: `2n k`.
        bias: `n`.
        norm: Of x, where takes_norm(x).
        gated: Whether the result is silu(first half) * second half, where takes_gate(weight).
        convolution: Of the first channels. Launches shortly before this must not write its inputs.
        residual: `rows n`, added at the end.
        parts: How many sums to cut k into (parts_of): the result is then `parts rows n` in float32.
    """
    assert not (gated and (bias is not None or convolution is not None))
    assert parts == 1 or not (gated or norm or bias is not None or convolution or residual is not None)
    return _launch(x, weight, (bias, norm, convolution, residual), gated=gated, parts=parts)


def multiply_invariant(x: Tensor, weight: Codes, bias: Tensor | None = None, parts: int = 1) -> Tensor:
    """Return x weight^T `rows n` of any number of rows; a row's bits depend neither on their number nor on the others.

    Args:
        x: `rows k`, dense and aligned.
        weight: `n k`, which serves_invariant takes.
        bias: `n`.
        parts: As for multiply: 1, or invariant_parts(x, weight), for at most INVARIANT_ROWS rows.
    """
    around = bias, None, None, None
    if not uses_tensor_cores(x):  # a program has one row
        return _launch(x, weight, around, gated=False, parts=parts)
    shape = _shape(INVARIANT_ROWS, weight, alone=False)
    found = [_launch(y, weight, around, gated=False, parts=parts, shape=shape) for y in x.split(INVARIANT_ROWS)]
    return found[0] if len(found) == 1 else torch.cat(found)


def serves_invariant(x: Tensor, weight: Codes) -> bool:
    """Whether multiply_invariant takes rows such as x `rows k` and this weight."""
    return (
        x.dtype in KERNEL_DTYPES and weight.codes.is_contiguous() and weight.scales.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0 and weight.scales.data_ptr() % 16 == 0
    )  # fmt: skip


def invariant_parts(x: Tensor, weight: Codes) -> int:
    """Return the number of parts of k for multiply_invariant, whatever the number of rows."""
    return _parts(x, weight, _shape(INVARIANT_ROWS, weight, alone=False)) if uses_tensor_cores(x) else 1


class Pairs(NamedTuple):
    """Rows that are multiplied by the weights of experts.

    Args:
        experts: The expert of each pair, `pairs`.
        every: Pairs of a row of x.
        groups: The pairs in blocks of 8, 16, 32 or 64 of an expert, whose weights are then read once for a block, where
            uses_tensor_cores(x); None: each pair reads them. The results have the same bits.
        shared: The weight `n k` of one more expert, where uses_tensor_cores(x); or None.
    """

    experts: Tensor
    every: int
    groups: Groups | None = None
    shared: Codes | None = None


def multiply_experts(
    x: Tensor,
    weight: Codes,
    pairs: Pairs,
    *,
    gated: bool = False,
    shape: dict[str, int] | None = None,
    late: bool = False,
) -> Tensor:
    """Return row i / every of x times weight experts[i], `pairs n`.

    Args:
        x: `tokens k`, dense.
        weight: Of all experts, `experts n k`; gated: `experts 2n k`.
        pairs: The experts of the rows.
        gated: Whether the result is silu(first half) * second half, where takes_gate(weight).
        shape: C, WK, WM and STAGES of multiply_quantised_rows; None: those that were measured.
        late: Whether the next launch reads what the launch before this one wrote, before this one ends; where
            uses_tensor_cores(x), or launches do not overlap.
    """
    return _launch(x, weight, (None, None, None, None), gated=gated, pairs=pairs, shape=shape, late=late)


def takes_row(x: Tensor, down: Codes, pairs: int) -> bool:
    """Whether leave_one multiplies these codes of experts: their tiles fit into the registers.

    A step of Qwen3.5-35B-A3B in int4 took 2.24 ms on an H200, not 2.55; one of Kimi-Linear-48B in fp8, whose tiles
    do not fit, 2.75 instead of 1.96. The scales of fp8 take as many registers again.

    It reads the chosen experts before the first product ends. Where launches can overlap, that product must therefore
    be one that takes `late`, which multiply_quantised does not.
    """
    if launches_dependents(x.device) and not uses_tensor_cores(x):
        return False
    tile = next_power(down.columns // 32) * down.bits * 64 * (2 if down.floating else 1)
    return pairs * tile <= LEFT * 32 * LEFT_WARPS


def leave_one(
    hidden: Tensor,
    down: Codes,
    shared: Codes | None,
    chosen: Tensor,
    amounts: Tensor,
    y: Tensor,
    residual: Tensor | None = None,
) -> None:
    """Write the weighted sum of one row's pairs times their experts' weights into y `1 n`, where takes_row.

    Args:
        hidden: `pairs k`, dense.
        down: `experts n k`.
        shared: The weight `n k` of one more expert, or None.
        chosen: The experts of the pairs, `1 pairs`.
        amounts: The weights of the pairs, `1 pairs`, float32.
        y: Dense.
        residual: `1 n`, dense, which is added to the sum.
    """
    group = 128 if down.floating else 32
    with torch.cuda.device_of(y):
        start(kernels.leave_quantised_row, (ceil_div(down.rows, 16),))(
            hidden, down.codes.view(torch.int32), down.scales,
            None if shared is None else shared.codes.view(torch.int32), None if shared is None else shared.scales,
            chosen, amounts, residual, y,
            N=down.rows, K=down.columns, BITS=down.bits, FP8=down.floating, EXPERTS=down.codes.shape[0],
            PAIRS=chosen.numel(), BG=next_power(ceil_div(down.columns, group)), num_warps=LEFT_WARPS,
            **overlap_options(y.device),
        )  # fmt: skip


def _launch(
    x: Tensor,
    weight: Codes,
    around: tuple[Tensor | None, Norm | None, Convolution | None, Tensor | None],
    *,
    gated: bool,
    parts: int = 1,
    pairs: Pairs | None = None,
    shape: dict[str, int] | None = None,
    late: bool = False,
) -> Tensor:
    bias, norm, convolution, residual = around
    n, k, bits = weight.rows // 2 if gated else weight.rows, weight.columns, weight.bits
    experts, every, groups, shared = (None, 1, None, None) if pairs is None else pairs
    rows = x.shape[0] if experts is None else experts.shape[0]
    taps, past = (None, None) if convolution is None else convolution
    assert taps is None or (taps.shape[1] in SIZES and taps.is_contiguous())
    scale, eps, zero_centred = (None, 0.0, False) if norm is None else norm
    sizes = (rows, n) if parts == 1 else (parts, rows, n)
    y = torch.empty(sizes, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    words = weight.codes.view(torch.int32)
    constants = {
        "N": n, "K": k, "BITS": bits, "FP8": weight.floating, "SHIFT": float(zero_centred), "GATED": gated,
        "EVERY": every, "CHANNELS": 0 if taps is None else taps.shape[0], "SIZE": 1 if taps is None else taps.shape[1],
        **overlap_options(x.device),
    }  # fmt: skip
    blocks = experts if groups is None else groups.blocks
    tensors = words, weight.scales, x, scale, blocks, bias, residual, taps, past, y
    with torch.cuda.device_of(x):
        if uses_tensor_cores(x):
            from lineate.kernels.hopper.quantised_rows import multiply_quantised_rows

            assert norm is None or rows == 1
            if experts is None and shape is None:
                shape = _shape(rows, weight, ceil_div(n, 16 if gated else 32) <= multiprocessors(x.device))
            elif experts is not None:
                shape = _shape_of_experts(weight, 1 if groups is None else groups.size, shape)
            assert shape is not None
            warps = shape["WK"] * shape["WM"]
            tiles = ceil_div(n, (16 if gated else 32) * shape["WM"])
            own = None if shared is None else shared.codes.view(torch.int32), None if shared is None else shared.scales
            start(multiply_quantised_rows, (tiles * parts, 1 if blocks is None else blocks.shape[0]))(
                *tensors, None if groups is None else groups.members, *own, 1 if experts is not None else rows, eps,
                **shape, SPLIT=parts, EXPERTS=0 if experts is None else weight.codes.shape[0], LATE=late, **constants,
                num_warps=warps,
            )  # fmt: skip
        else:
            assert not (late and constants["OVERLAP"])
            block = min(512, next_power(k // 32 * bits))
            start(kernels.multiply_quantised, (ceil_div(n, 16), rows))(
                *tensors, eps, **constants, BP=block, BK=next_power(k), num_warps=max(1, min(8, block // 64))
            )
    return y


def _shape(rows: int, weight: Codes, alone: bool) -> dict[str, int]:
    """Return the configuration of multiply_quantised_rows for a number of rows: chunk, warps, stages.

    alone: whether each program has a multiprocessor to itself.

    One row on an H200, us with 8, and with 4 bits (n x k; chunk, warps, stages):

                        2, 4, 6       4, 4, 4     4, 8, 3
        12352 x 4096    16.3, 13.9    19.1        19.9, 13.3
         4096 x 4096    10.4,  7.6     8.7        10.6, 10.3
        22016 x 4096    31.1, 20.7    32.1        35.0, 25.1
         4096 x 11008   21.8, 19.0    19.9        15.9, 17.0
    """
    bits, k, scale = weight.bits, weight.columns, weight.scales.itemsize
    width = max(8, next_power(rows))
    pairs = {8: 1, 16: 1, 32: 2, 64: 4}[width]  # of tiles; more rows of x pay for larger parts
    chunk, warps, most = 8 // bits, 8 // pairs, 5
    if rows == 1:
        chunk, warps, most = 2, 4, 6
        if alone:
            chunk, warps, most = (4, 8, 3) if k >= 8192 else (4, 4, 4) if bits == 8 else (2, 4, 6)
    while warps > 1 and warps > k // 32:
        warps //= 2
    while chunk > 1 and chunk * warps > k // 32:
        chunk //= 2
    groups = chunk * warps
    stage = groups * (2 * pairs * (64 * bits + 16 * scale) + (0 if rows == 1 else 64 * width))
    kept = 2 * 32 * groups * next_power(ceil_div(k // 32, groups)) if rows == 1 else 0
    stages = max(2, min(most, ((2 * SHARED if alone else SHARED) - kept) // stage, 1 + ceil_div(k // 32, groups)))
    return {"R": width, "ONE": rows == 1, "C": chunk, "WK": warps, "WM": pairs, "STAGES": stages}


def _shape_of_experts(weight: Codes, rows: int, own: dict[str, int] | None) -> dict[str, int]:
    """Return the configuration of multiply_quantised_rows for blocks of `rows` pairs of an expert; 1: for a pair.

    Neither the number of pairs nor that of rows may choose C or WK: a row's sums would be added in another order.

    int8 on an H200, us with 8 and 512 pairs of 256 experts (n x k; C, WK, WM, STAGES):

                                 2, 2, 1, 3    2, 4, 1, 3    4, 4, 1, 5    1, 8, 1, 3
        1024 x 2048, gated         8.8, 119     11.0, 125      9.1, 169     12.1, 183
        2048 x 512                 6.3,  72      6.9, 101      6.9, 100     11.4, 207
    """
    shape = {"C": 2, "WK": 2, "WM": 1, "STAGES": 3} if own is None else dict(own)
    while shape["WK"] > 1 and shape["WK"] > weight.columns // 32:
        shape["WK"] //= 2
    while shape["C"] > 1 and shape["C"] * shape["WK"] > weight.columns // 32:
        shape["C"] //= 2
    groups = shape["C"] * shape["WK"]
    steps = ceil_div(weight.columns // 32, groups)
    codes = 2 * shape["WM"] * (64 * weight.bits + 16 * weight.scales.itemsize)
    kept, each = (64 * groups * next_power(steps), 0) if rows == 1 else (0, 64 * rows)
    stages = max(2, min(shape["STAGES"], (SHARED - kept) // (groups * (codes + each)), 1 + steps))
    return shape | {"R": max(8, rows), "ONE": rows == 1, "STAGES": stages}


# ---- decoded weights


def decoded(weight: Codes, dtype: torch.dtype, first: int = 0, tiles: int | None = None) -> Tensor:
    """Return the rows of `tiles` tiles from tile `first` on, `rows k`; None: all, of all experts if there are any."""
    flat = Codes(weight.codes.flatten(0, -5), weight.scales.flatten(0, -3), weight.rows, weight.kernel)
    k = weight.columns
    if weight.codes.dim() == 6:
        each = weight.codes.shape[1]
        y = torch.empty(weight.codes.shape[0], 16 * each, k, dtype=dtype, device=weight.codes.device)
        _decode(flat, y.flatten(0, 1), 0)
        return y[:, : weight.rows]
    tiles = flat.codes.shape[0] - first if tiles is None else tiles
    y = torch.empty(min(16 * tiles, weight.rows - 16 * first), k, dtype=dtype, device=weight.codes.device)
    _decode(flat, y, first)
    return y


def _decode(weight: Codes, y: Tensor, first: int) -> None:
    rows, k = y.shape
    block = min(512, next_power(k))
    with torch.cuda.device_of(y):
        start(kernels.decode_quantised, (ceil_div(rows, 16), ceil_div(k, block)))(
            weight.codes.view(torch.int32), weight.scales, y, first, rows, K=k, BITS=weight.bits, FP8=weight.floating,
            BK=block, num_warps=max(1, min(8, block // 64)),
        )  # fmt: skip


def decoded_rows(weight: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return these rows of a weight, `... k`, as an embedding looks them up; an id outside the weight gives NaN."""
    k = weight.columns
    y = torch.empty(*ids.shape, k, dtype=dtype, device=ids.device)
    block = min(1024, next_power(k))
    if y.numel():
        with torch.cuda.device_of(y):
            start(kernels.decode_quantised_rows, (ids.numel(), ceil_div(k, block)))(
                weight.codes, weight.scales, ids.contiguous(), y, N=weight.rows, K=k,
                BITS=weight.bits, FP8=weight.floating, BK=block, num_warps=4, **overlap_options(ids.device),
            )  # fmt: skip
    return y


def linear(x: Tensor, weight: Codes, float8: bool = False) -> Tensor:
    """Return x weight^T `rows n` of any number of rows; float8: many of them may be rounded, where takes_float8."""
    if is_batch_invariant() and serves_invariant(x, weight):
        return multiply_invariant(x, weight)
    if serves(x, weight):
        return multiply(x, weight)
    return multiply_float8(x, weight) if float8 and takes_float8(x, weight) else multiply_many(x, weight)


def multiply_many(x: Tensor, weight: Codes) -> Tensor:
    """Return x weight^T `rows n` of any number of rows, by decoding the weight in blocks."""
    tiles = weight.codes.shape[0]
    each = max(1, BLOCK // (16 * weight.columns))
    if tiles <= each:
        return F.linear(x, decoded(weight, x.dtype))
    y = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    for first in range(0, tiles, each):
        block = decoded(weight, x.dtype, first, min(each, tiles - first))
        y[:, 16 * first : 16 * first + len(block)] = F.linear(x, block)
    return y


# ---- rows of float8


def why_not_float8(device: torch.device) -> str | None:
    """Return why torch cannot multiply float8 with scales of 128 columns on this device; None if it can."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version < (12, 9):
        return f"torch must be built with CUDA 12.9 or later, got {torch.version.cuda}"
    if not is_hopper(device):
        return f"the GPU must have compute capability 9, got {torch.cuda.get_device_capability(device)}"
    return None


def takes_float8(x: Tensor, weight: Codes) -> bool:
    """Whether multiply_float8 takes these rows and this weight."""
    whole = weight.floating and weight.columns % 128 == 0 and x.dtype is torch.bfloat16 and x.is_contiguous()
    return whole and x.shape[0] > MOST_ROWS and why_not_float8(x.device) is None


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x `rows k` to float8, `m k`, with scales `m k/128` whose first dimension is dense, as torch takes them.

    m is rows, filled up with zeros to a multiple of 16.
    """
    (rows, k), m = x.shape, 16 * ceil_div(x.shape[0], 16)
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(k // 128, m, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        start(kernels.round_rows, (m // 16, k // 128))(x, codes, scales, rows, m, K=k, BM=16, num_warps=4)
    return codes, scales.t()


def rows_of(weight: Codes, first: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Return the float8 numbers of some tiles from tile `first` on, `16 tiles k`, and scales `k/128 16 tiles`."""
    words = weight.codes[first : first + tiles].view(torch.int32)[..., 0]  # tiles groups 8 16
    codes = words.permute(0, 3, 1, 2).contiguous().view(torch.float8_e4m3fn)
    scales = weight.scales[first : first + tiles].transpose(0, 1)  # groups tiles 16
    return codes.view(16 * tiles, weight.columns), scales.flatten(1)


def multiply_float8(x: Tensor, weight: Codes) -> Tensor:
    """Return x weight^T `rows n`, where takes_float8; x is rounded to float8, with a scale for 128 columns of a row."""
    own, factors = round_rows(x)
    tiles = weight.codes.shape[0]
    each = max(1, BLOCK // (16 * weight.columns))
    made = []
    for first in range(0, tiles, each):
        codes, scales = rows_of(weight, first, min(each, tiles - first))
        made.append(torch._scaled_mm(own, codes.t(), scale_a=factors, scale_b=scales, out_dtype=x.dtype))
    y = made[0] if len(made) == 1 else torch.cat(made, 1)
    return y[: x.shape[0], : weight.rows].contiguous()
