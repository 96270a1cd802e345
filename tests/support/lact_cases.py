"""Inputs and states of LaCT, and the gradients of a loss on everything that it returns."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory.lact import lact_state
from tests.support.memories import floats


def make(b: int = 2, t: int = 13, h: int = 2, d: int = 5, dh: int = 6, dtype=torch.float64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = (F.normalize(random(b, t, h, d), dim=-1) for _ in range(2))
    inputs = [q, k, random(b, t, h, d), random(b, t, h, 3).exp() * 0.1, random(b, t, h).sigmoid()]
    shapes = (dh, d), (d, dh), (dh, d)
    state = lact_state([random(h, *shape) / shape[1] ** 0.5 for shape in shapes], b)
    return [x.to(dtype) for x in inputs], {n: x if n == "position" else x.to(dtype) for n, x in state.items()}


def middle(state: dict[str, Tensor], position: int) -> dict[str, Tensor]:
    """Return a state from the middle of a sequence, with random sums and momentum."""
    g = torch.Generator().manual_seed(3)
    moved = {
        name: torch.randn(x.shape, generator=g, dtype=x.dtype) * 0.3
        for name, x in state.items()
        if name.startswith(("sums", "previous"))
    }
    total = torch.rand(state["momentum"].shape, generator=g, dtype=torch.float64) * position
    return state | moved | {"momentum": total, "position": torch.full_like(state["position"], position)}


def gradients(y: Tensor, end: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(9)
    terms = [(x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in (y, *floats(end))]
    return torch.autograd.grad(sum(terms), leaves, allow_unused=True)
