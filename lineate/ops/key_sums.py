"""The division of linear attention by q . (sum of keys), which the memory has in a column of its own."""

import torch
from torch import Tensor


def with_ones(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a column of ones to v, in whose column the memory sums the keys (see divide_by_last); widen float16."""
    if v.dtype == torch.float16:  # sums over many tokens exceed its range before they are divided
        q, k, v = q.float(), k.float(), v.float()
    return q, k, torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)


def divide_by_last(output: Tensor, dtype: torch.dtype, smallest: float = 1e-6) -> Tensor:
    """Divide by the last column, q . (sum of keys), kept at least `smallest` away from 0, and convert to dtype."""
    total = output[..., -1:]
    total = torch.where(total.abs() < smallest, torch.copysign(total.new_full((), smallest), total), total)
    return (output[..., :-1] / total).to(dtype)
