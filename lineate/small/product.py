"""x weight^T for a weight of 8 or 4 bits, with the gradient of x; the weight itself is frozen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native import small as native
from lineate.native.build import why_not
from lineate.registrar import register_op
from lineate.small.format import TILE, decode
from lineate.tracing import constant_in_graphs

BLOCK = 2**20
"""Elements that are decoded at a time."""


def small_linear(x: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return x weight^T in x's dtype; x `... columns`, codes and scales of a weight `rows columns` in tiles."""
    result: Tensor = _run(x, codes, scales, rows)
    return result


@constant_in_graphs
def _ready() -> bool:
    return why_not() is None


def _forward(x: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if x.is_cpu and x.dtype is not torch.float64 and flat.shape[0] and _ready():
        y = native.product(flat.float(), codes.contiguous(), scales.contiguous(), rows, codes.shape[-3])
    else:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        y = torch.empty(flat.shape[0], rows, dtype=wide, device=x.device)
        for first, block in _blocks(codes, scales, rows):
            y[:, first : first + len(block)] = F.linear(flat.to(wide), block.to(wide))
    return y.to(x.dtype).view(*x.shape[:-1], rows)


def _backward(dy: Tensor, x: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return dx = dy weight."""
    flat = dy.reshape(-1, rows)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dx = torch.zeros(flat.shape[0], x.shape[-1], dtype=wide, device=x.device)
    for first, block in _blocks(codes, scales, rows):
        dx.addmm_(flat[:, first : first + len(block)].to(wide), block.to(wide))
    return dx.to(x.dtype).view_as(x)


def _blocks(codes: Tensor, scales: Tensor, rows: int):  # type: ignore[no-untyped-def]
    """Yield a first row and the rows from there on in float32, a few tiles at a time."""
    columns = scales.shape[1] * 32
    tiles = max(1, BLOCK // (TILE * columns))
    for at in range(0, codes.shape[0], tiles):
        first = at * TILE
        yield first, decode(codes[at : at + tiles], scales[at : at + tiles], min(rows - first, tiles * TILE))


def _fake(x: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


_run = register_op(
    "small_linear",
    _forward,
    _backward,
    fake=_fake,
    fake_backward=lambda dy, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    tensors=3,
)
