"""The features that LaCT's network reads, computed from a fused projection in one launch forward and one backward.

    f = silu(scale x + offset),  y = f / sqrt(sum over a head of f^2 + eps)        for q and k
    y = silu(x)                                                                    for v

A program takes tiles [ROWS, BD] of tokens of one head of q, k or v. All arithmetic is float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.layers.ops import as_rows, check_dtypes, strides_of
from lineate.torch_ops.registrar import register_op

NORMALIZE_EPS = 1e-6
"""Added to the squared length of each vector that is normalised."""
_PROGRAMS = 4096  # enough for any device; a constant, so that no result depends on the device


@triton.jit
def _load(x, scale, offset, r, rows, stride, j, D: tl.constexpr, H: tl.constexpr):
    """Return the tile x of head program_id(1) of q | k | v, its scale (1 for v), silu, slope and mask."""
    head = tl.program_id(1)
    has = (r < rows)[:, None] & (j < D)[None, :]
    tile = tl.load(x + r[:, None] * tl.cast(stride, tl.int64) + head * D + j[None, :], mask=has, other=0.0)
    tile = tile.to(tl.float32)
    scaled = (j < D) & (head < 2 * H)
    a = tl.load(scale + head * D + j, mask=scaled, other=1.0).to(tl.float32)
    b = tl.load(offset + head * D + j, mask=scaled, other=0.0).to(tl.float32)
    z = tl.where(has, tile * a[None, :] + b[None, :], 0.0)
    gate = tl.sigmoid(z)
    return tile, a, z * gate, gate * (1.0 + z * (1.0 - gate)), has


@triton.jit
def _choose(q, k, v, H: tl.constexpr):
    """Return the one of q, k and v that program_id(1) computes."""
    part = tl.program_id(1) // H
    x = q
    if part == 1:
        x = k
    if part == 2:
        x = v
    return x


@triton.jit(do_not_specialize=["rows", "stride"])
def make_features(
    x, scale, offset, q, k, v, rows, stride, eps, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Store q, k, v `rows H D` from x `rows q | k | v`, H D channels each."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BD)
    _, _, f, _, has = _load(x, scale, offset, r, rows, stride, j, D, H)
    if tl.program_id(1) < 2 * H:
        f *= tl.rsqrt(tl.sum(f * f, 1) + eps)[:, None]
    at = (r.to(tl.int64) * H + tl.program_id(1) % H)[:, None] * D + j[None, :]
    tl.store(_choose(q, k, v, H) + at, f, mask=has)


@triton.jit(do_not_specialize=["rows", "tiles", "stride"])
def make_features_backward(
    x, scale, offset, dq, dk, dv, dx, partials, rows, tiles, stride, eps,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store dx = dz scale, dz = df silu', df = r (dy - y <dy, y>), r = 1 / sqrt(sum f^2 + eps); for v, df = dy.

    One program takes `tiles` tiles; its dscale = sum dz x and doffset = sum dz go to partials `programs 2 2HD`.
    """
    j = tl.arange(0, BD)
    head = tl.program_id(1)
    dscale = tl.zeros((ROWS, BD), tl.float32)
    doffset = tl.zeros((ROWS, BD), tl.float32)
    for i in range(tiles):
        r = (tl.program_id(0) * tiles + i) * ROWS + tl.arange(0, ROWS)
        tile, a, f, slope, has = _load(x, scale, offset, r, rows, stride, j, D, H)
        at = (r.to(tl.int64) * H + head % H)[:, None] * D + j[None, :]
        d = tl.load(_choose(dq, dk, dv, H) + at, mask=has, other=0.0).to(tl.float32)
        if head < 2 * H:
            inverse = tl.rsqrt(tl.sum(f * f, 1) + eps)[:, None]
            y = f * inverse
            d = inverse * (d - y * tl.sum(d * y, 1)[:, None])
        d *= slope
        dscale += d * tile
        doffset += d
        tl.store(dx + (r.to(tl.int64) * (3 * H) + head)[:, None] * D + j[None, :], d * a[None, :], mask=has)
    if head < 2 * H:
        place = partials + tl.program_id(0).to(tl.int64) * (4 * H * D) + head * D + j
        tl.store(place, tl.sum(dscale, 0), mask=j < D)
        tl.store(place + 2 * H * D, tl.sum(doffset, 0), mask=j < D)


def _tile(d: int, elements: int) -> dict[str, int]:
    wide = next_power(d)
    return {"ROWS": max(elements // wide, 1), "BD": wide, "num_warps": min(max(wide // 256, 4), 16)}


def _room(x: Tensor, scale: Tensor, offset: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(*x.shape[:-1], heads, scale.shape[1] // heads) for _ in range(3))
    return q, k, v


def _features(x: Tensor, scale: Tensor, offset: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    found = _room(x, scale, offset, heads)
    x = as_rows(x)
    rows, d = x.shape[0], scale.shape[1] // heads
    tile = _tile(d, 2048)
    with torch.cuda.device_of(x):
        start(make_features, (ceil_div(rows, tile["ROWS"]), 3 * heads))(
            x,
            scale.contiguous(),
            offset.contiguous(),
            *found,
            rows,
            *strides_of(x, 1),
            NORMALIZE_EPS,
            H=heads,
            D=d,
            **tile,
        )
    return found


def _backward_room(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, scale: Tensor, offset: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), scale.new_empty(scale.shape), offset.new_empty(offset.shape)


def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, scale: Tensor, offset: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape)
    x = as_rows(x)
    rows, d = x.shape[0], scale.shape[1] // heads
    tile = _tile(d, 1024)
    tiles = max(ceil_div(ceil_div(rows, tile["ROWS"]) * 3 * heads, _PROGRAMS), 1)
    programs = ceil_div(rows, tile["ROWS"] * tiles)
    with torch.cuda.device_of(x):
        partials = torch.empty(programs, 2, *scale.shape, dtype=torch.float32, device=x.device)
        start(make_features_backward, (programs, 3 * heads))(
            x, scale.contiguous(), offset.contiguous(), *(y.contiguous() for y in (dq, dk, dv)), dx, partials,
            rows, tiles, *strides_of(x, 1), NORMALIZE_EPS, H=heads, D=d, **tile,
        )  # fmt: skip
    dscale, doffset = partials.sum(0)
    return dx, dscale.to(scale.dtype, copy=True), doffset.to(offset.dtype, copy=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(backward: Callable[..., Any], ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    x, scale, offset = ctx.saved_tensors
    shape = (*x.shape[:-1], ctx.heads, scale.shape[1] // ctx.heads)
    dq, dk, dv = (x.new_zeros(shape) if d is None else d for d in gradients)
    return *backward(dq, dk, dv, x, scale, offset, ctx.heads), None


_run = register_op(
    "lact_features_triton", _features, _backward, fake=_room, fake_backward=_backward_room, tensors=3, save=_save,
    differentiate=_differentiate,
)  # fmt: skip


def features(x: Tensor, scale: Tensor, offset: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of q, k and v, each `b t heads d` in the dtype of x.

    Args:
        x: The fused projection, `b t q | k | v`.
        scale: The factors of q and k, `2 heads*d`.
        offset: The offsets then added to them, `2 heads*d`.
        heads: Heads of each of q, k and v.
    """
    check_dtypes(x=x, scale=scale, offset=offset)
    found: tuple[Tensor, Tensor, Tensor] = _run(x, scale, offset, heads)
    return found
