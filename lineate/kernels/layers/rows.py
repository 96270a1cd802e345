"""The norms and the gated unit of a layer, each in one launch and bound by memory alone: tiles of whole rows.

    y = x / sqrt(mean x^2 + eps) w act(z)            RMSNorm, with an output gate or without
    y = silu(gate) up                                the gated linear unit

All arithmetic is float32. Sums over tokens (the gradients of weights) are computed in two steps, always in the same
order.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Two instructions of PTX that flush the smallest numbers to 0, without which a sigmoid takes three times as many.
_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    if _PTX:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit(do_not_specialize=["count"])
def add_partials(
    partials, total, count, CHANNELS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Sum partials `count SIZE CHANNELS` over count into total `CHANNELS SIZE`, transposed; its last place is age 0."""
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) * BC + tl.arange(0, BC)
    sums = tl.zeros((ROWS, BC), tl.float32)
    for first in range(0, count, ROWS):
        at = partials + (first + i).to(tl.int64)[:, None] * (SIZE * CHANNELS) + j[None, :]
        sums += tl.load(at, mask=(first + i < count)[:, None] & (j < SIZE * CHANNELS)[None, :], other=0.0)
    at = total + (j % CHANNELS) * SIZE + (SIZE - 1 - j // CHANNELS)
    tl.store(at, tl.sum(sums, 0), mask=j < SIZE * CHANNELS)


@triton.jit
def _load_rows(x, outer, inner, outer_stride, inner_stride, j, mask, UNIT: tl.constexpr):
    at = outer * (tl.cast(outer_stride, tl.int64) * UNIT) + inner * (tl.cast(inner_stride, tl.int64) * UNIT)
    return tl.load(x + at[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_gate(gate, outer, inner, outer_stride, inner_stride, j, mask, UNIT: tl.constexpr, SILU: tl.constexpr):
    """Return the gate's activation and its derivative."""
    z = _load_rows(gate, outer, inner, outer_stride, inner_stride, j, mask, UNIT)
    s = sigmoid(z)
    if SILU:
        act = s * z
        slope = s * (1.0 + z * (1.0 - s))
    else:
        act = s
        slope = s * (1.0 - s)
    return act, slope


@triton.jit(do_not_specialize=["rows", "x_outer", "x_inner", "gate_outer", "gate_inner"])
def norm(
    x, gate, weight, y, rows, eps, x_outer, x_inner, gate_outer, gate_inner,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    SILU: tl.constexpr, SHIFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows `outer HEADS` a program; strides are in units of UNIT elements. y is dense; gate may be None.

    The factor is SHIFT + weight.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BN)
    mask = (r < rows)[:, None] & (j < SIZE)[None, :]
    outer, inner = r // HEADS, r % HEADS
    w = tl.load(weight + j, mask=j < SIZE, other=0.0).to(tl.float32) + SHIFT
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile = _load_rows(x, outer, inner, x_outer, x_inner, j, mask, UNIT)
    scale = tl.rsqrt(tl.sum(tile * tile, 1) * (1.0 / SIZE) + eps)
    result = tile * scale[:, None] * w[None, :]
    if gate is not None:
        act, _ = _load_gate(gate, outer, inner, gate_outer, gate_inner, j, mask, UNIT, SILU)
        result *= act
    tl.store(y + r.to(tl.int64)[:, None] * SIZE + j[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_and_norm(
    x, parts, weight, total, y, rows, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, SHIFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add x `rows SIZE` and the parts `PARTS rows SIZE` of one row into total; y, if not None, is its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BN)
    has = j < SIZE
    if weight is not None:
        w = tl.load(weight + j, mask=has, other=0.0).to(tl.float32) + SHIFT
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.load(x + row * SIZE + j, mask=has, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + (part * rows + row) * SIZE + j, mask=has, other=0.0)
    sums = sums.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + j, sums, mask=has)
    if weight is not None:
        sums = sums.to(tl.float32)
        scale = tl.rsqrt(tl.sum(sums * sums, 0) * (1.0 / SIZE) + eps)
        tl.store(y + row * SIZE + j, sums * scale * w, mask=has)


@triton.jit(
    do_not_specialize=["rows", "tiles", "x_outer", "x_inner", "gate_outer", "gate_inner", "dy_outer", "dy_inner"]
)
def norm_backward(
    x, gate, weight, dy, dx, dgate, partials, rows, tiles, eps,
    x_outer, x_inner, gate_outer, gate_inner, dy_outer, dy_inner,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    SILU: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """n = x r, r = 1 / sqrt(mean x^2 + eps),  dn = dy act w,  dx = r (dn - n mean(dn n)),  dz = dy n w act'.

    One program `tiles` tiles of ROWS rows; its part of dw = sum dy act n goes to partials `programs SIZE`.
    """
    j = tl.arange(0, BN)
    w = tl.load(weight + j, mask=j < SIZE, other=0.0).to(tl.float32) + SHIFT
    dw = tl.zeros((ROWS, BN), tl.float32)
    for i in range(tiles):
        r = (tl.program_id(0) * tiles + i) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (j < SIZE)[None, :]
        outer, inner = r // HEADS, r % HEADS
        at = r.to(tl.int64)[:, None] * SIZE + j[None, :]
        tile = _load_rows(x, outer, inner, x_outer, x_inner, j, mask, UNIT)
        d = _load_rows(dy, outer, inner, dy_outer, dy_inner, j, mask, UNIT)
        scale = tl.rsqrt(tl.sum(tile * tile, 1) * (1.0 / SIZE) + eps)
        scale = tl.where(r < rows, scale, 0.0)  # eps may be 0
        normed = tile * scale[:, None]
        if gate is not None:
            act, slope = _load_gate(gate, outer, inner, gate_outer, gate_inner, j, mask, UNIT, SILU)
            tl.store(dgate + at, d * normed * w[None, :] * slope, mask=mask)
            d *= act
        dw += d * normed
        dn = d * w[None, :]
        mean = tl.sum(dn * normed, 1) * (1.0 / SIZE)
        tl.store(dx + at, scale[:, None] * (dn - normed * mean[:, None]), mask=mask)
    tl.store(partials + tl.program_id(0).to(tl.int64) * SIZE + j, tl.sum(dw, 0), mask=j < SIZE)


@triton.jit(do_not_specialize=["rows", "x_row"])
def gated_unit(
    x, y, rows, x_row, N: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """x `rows gate | up`, each N wide; a tile [ROWS, BN] a program."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    r = (tl.program_id(0) // BLOCKS) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % BLOCKS) * BN + tl.arange(0, BN)
    mask = (r < rows)[:, None] & (j < N)[None, :]
    at = x + r[:, None] * (tl.cast(x_row, tl.int64) * UNIT) + j[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + r.to(tl.int64)[:, None] * N + j[None, :], gate * sigmoid(gate) * up, mask=mask)


@triton.jit(do_not_specialize=["rows", "x_row", "dy_row"])
def gated_unit_backward(
    x, dy, dx, rows, x_row, dy_row, N: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """dgate = dy up silu'(gate),  dup = dy silu(gate)."""
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    r = (tl.program_id(0) // BLOCKS) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % BLOCKS) * BN + tl.arange(0, BN)
    mask = (r < rows)[:, None] & (j < N)[None, :]
    at = x + r[:, None] * (tl.cast(x_row, tl.int64) * UNIT) + j[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
    dy += r[:, None] * (tl.cast(dy_row, tl.int64) * UNIT) + j[None, :]
    d = tl.load(dy, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    dx += r.to(tl.int64)[:, None] * (2 * N) + j[None, :]
    tl.store(dx, d * up * s * (1.0 + gate * (1.0 - s)), mask=mask)
    tl.store(dx + N, d * gate * s, mask=mask)
