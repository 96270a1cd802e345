"""Queries over cached entries of rows of several lengths, and their attention in float64."""

import torch
from torch import Tensor

from tests.support.paths import Path


def draw(path: Path, lengths: list[int], t: int, heads: int, kv: int, size: int, room: int = 5) -> list[Tensor]:
    """Return q, k, v; what lies after a row's last token is NaN."""
    generator = torch.Generator().manual_seed(len(lengths) + t)
    rows, n = len(lengths), max(lengths) + room
    shapes = (rows, t, heads, size), (rows, n, kv, size), (rows, n, kv, size)
    q, k, v = (torch.randn(shape, generator=generator).to(path.dtype) for shape in shapes)
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = torch.nan
    return [x.to(path.device) for x in (q, k, v)]


def draw_latent(
    path: Path, lengths: list[int], t: int, heads: int, width: int, room: int = 5
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and the cache of latent attention."""
    q, cache, _ = draw(path, lengths, t, heads, 1, width, room)
    return q, cache


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Run softmax attention row by row and head by head; q's tokens are the last ones of each row."""
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for row, length in enumerate(lengths):
        seen = torch.arange(length) <= length - t + torch.arange(t)[:, None]  # t n
        for head in range(q.shape[2]):
            own, keys, values = (
                x.double().cpu()
                for x in (q[row, :, head], k[row, :length, head // group], v[row, :length, head // group])
            )
            weights = (scale * own @ keys.T).masked_fill(~seen, -torch.inf).softmax(1)
            out[row, :, head] = weights @ values
    return out
