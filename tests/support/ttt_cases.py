"""Inputs of TTT-Linear and TTT-MLP, and their op with all inputs by name."""

from itertools import pairwise

import torch
from torch import Tensor

from lineate.memory.ttt import ttt

HEADS, DIM, CHUNK = 2, 6, 4


def draw(
    model: str, b: int, t: int, *, rows: int | None = None, chunk: int = CHUNK, dim: int = DIM
) -> dict[str, Tensor]:
    """Draw inputs, norm, factors and weights, all float64; the weights differ between rows if their number is given."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    named = {name: normal(b, t, HEADS, dim) for name in ("q", "k", "v")}
    named["rate"] = normal(b, t, HEADS).sigmoid() * 0.3
    named["norm_weight"], named["norm_bias"] = 1 + 0.3 * normal(HEADS, dim), 0.3 * normal(HEADS, dim)
    named["factor"] = (1 / torch.arange(1, chunk + 1) + 0.2 * normal(chunk)).clamp(min=0.05)
    widths = [dim] * 2 if model == "linear" else [dim, 4 * dim, dim]
    first = () if rows is None else (rows,)
    for i, (a, c) in enumerate(pairwise(widths)):
        named[f"weight{i + 1}"] = 0.5 * normal(*first, HEADS, a, c)
        named[f"bias{i + 1}"] = 0.5 * normal(*first, HEADS, c)
    return named


def dual(named: dict[str, Tensor], **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = ("q", "k", "v", "rate", "norm_weight", "norm_bias", "factor")
    state = {name: x for name, x in named.items() if name not in inputs}
    return ttt(*(named[name] for name in inputs[:-1]), state, **{"chunk": CHUNK, "factor": named["factor"], **options})
