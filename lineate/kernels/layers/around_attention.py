"""The launches before and after the attention of a prompt, without gradients: keys of latent attention, the gate.

    k_h = (W_kh c, p)          one tensor of keys, whose last channels all heads share
    y = o sigmoid(z)

Both are bound by memory. Arithmetic is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.layers.ops import strides_of, unit_of
from lineate.kernels.layers.rows import sigmoid


@triton.jit(do_not_specialize=["n", "own_row", "own_token", "shared_row", "shared_token"])
def join_keys(
    own, shared, keys, n, own_row, own_token, own_head, shared_row, shared_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    BS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The keys of a token `HEADS SIZE+SHARED`, from its own channels `HEADS SIZE` and the shared ones.

    Strides are in units of UNIT elements.
    """
    row = (tl.program_id(0) // n).to(tl.int64)
    token = (tl.program_id(0) % n).to(tl.int64)
    h = tl.arange(0, BH)
    k = tl.arange(0, BK)
    s = tl.arange(0, BS)
    own += (row * own_row + token * own_token) * UNIT
    shared += (row * shared_row + token * shared_token) * UNIT
    keys += (row * n + token) * (HEADS * (SIZE + SHARED))
    mask = (h < HEADS)[:, None] & (k < SIZE)[None, :]
    found = tl.load(own + h[:, None] * (own_head * UNIT) + k[None, :], mask=mask, other=0.0)
    tl.store(keys + h[:, None] * (SIZE + SHARED) + k[None, :], found, mask=mask)
    same = tl.load(shared + s, mask=s < SHARED, other=0.0)
    same = tl.broadcast_to(same[None, :], (BH, BS))
    at = keys + SIZE + h[:, None] * (SIZE + SHARED) + s[None, :]
    tl.store(at, same, mask=(h < HEADS)[:, None] & (s < SHARED)[None, :])


@triton.jit(do_not_specialize=["t", "gate_row", "gate_token"])
def gate_rows(x, gate, y, t, gate_row, gate_token, SIZE: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr):
    """BN channels of a token of y = x sigmoid(gate), all `b t SIZE`; strides are in units of UNIT elements."""
    TILES: tl.constexpr = (SIZE + BN - 1) // BN
    row = (tl.program_id(0) // TILES).to(tl.int64)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    found = tl.load(x + row * SIZE + n, mask=n < SIZE, other=0.0).to(tl.float32)
    gate += (row // t * gate_row + row % t * gate_token) * UNIT
    opened = tl.load(gate + n, mask=n < SIZE, other=0.0).to(tl.float32)
    tl.store(y + row * SIZE + n, found * sigmoid(opened), mask=n < SIZE)


def keys_of(own: Tensor, shared: Tensor) -> Tensor:
    """Return the keys `b n heads k+s` of all heads.

    Args:
        own: Each head's channels, `b n heads k`.
        shared: Those that all heads have, `b n 1 s`.
    """
    b, n, heads, size = own.shape
    width = shared.shape[3]
    own, shared = (x if x.stride(3) == 1 else x.contiguous() for x in (own, shared))
    strides = *strides_of(own, 3), *strides_of(shared, 2)
    unit = unit_of((size, width, *strides))
    keys = torch.empty(b, n, heads, size + width, dtype=own.dtype, device=own.device)
    if keys.numel():
        with torch.cuda.device_of(own):
            start(join_keys, (b * n,))(
                own, shared, keys, n, *(s // unit for s in strides), HEADS=heads, SIZE=size, SHARED=width,
                BH=next_power(heads), BK=next_power(size), BS=next_power(width), UNIT=unit, num_warps=4,
            )  # fmt: skip
    return keys


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x sigmoid(gate), dense, of x and gate `b t n`."""
    b, t, n = x.shape
    x, gate = x.contiguous(), gate if gate.stride(2) == 1 else gate.contiguous()
    strides = strides_of(gate, 2)
    y, block = torch.empty_like(x), min(next_power(n), 2048)
    unit = unit_of((n, *strides))
    if y.numel():
        with torch.cuda.device_of(x):
            start(gate_rows, (b * t * ceil_div(n, block),))(
                x, gate, y, t, *(s // unit for s in strides), SIZE=n, BN=block, UNIT=unit,
                num_warps=max(1, block // 512),
            )  # fmt: skip
    return y
