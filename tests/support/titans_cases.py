"""Calls of Titans, drawn at random."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory.titans import op as rule

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """One call; sizes are those of keys, of hidden channels if there are any, and of values."""

    sizes: tuple[int, ...]
    chunk: int = 4
    t: int = 11
    lengths: tuple[int, ...] | None = None
    """The lengths of packed sequences."""
    positions: tuple[int, ...] | None = (0, 0)
    """The positions of rows in their chunks; None if no state is given."""
    h: int = 2
    clip: float | None = None
    residual: bool = False
    norm: bool = False

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.sizes)), f"c{self.chunk}", f"t{self.t}" if self.lengths is None else "packed"]
        parts += ["at" + ".".join(map(str, self.positions)) if self.positions else "new"]
        return " ".join([*parts, *(name for name in ("clip", "residual", "norm") if getattr(self, name))])


def draw(case: Case) -> tuple[Tensors, Tensors]:
    """Return float32 inputs with gates of exactly 0 and 1, a key of 0, and a state whose start is not its weights."""
    generator = torch.Generator().manual_seed(0)
    b, t = (2, case.t) if case.lengths is None else (1, sum(case.lengths))
    keys, values, h = case.sizes[0], case.sizes[-1], case.h

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (F.normalize(normal(b, t, h, keys), dim=-1) for _ in range(2))
    theta, eta, alpha = (normal(b, t, h).sigmoid() * scale for scale in (0.5, 1, 0.5))
    if t > 8:
        eta[:, 6], eta[0, 4], alpha[:, 7], alpha[0, 5, 0], theta[0, 8], k[:, 5, 0] = 0, 1, 1, 0, 0, 0
    inputs = {"q": q, "k": k, "v": normal(b, t, h, values), "theta": theta, "eta": eta, "alpha": alpha}
    if case.positions is None:
        return inputs, {}
    state = rule.titans_state([normal(h, *pair) / pair[0] ** 0.5 for pair in pairwise(case.sizes)], len(case.positions))
    state = {name: x if name == "position" else x + 0.3 * normal(*x.shape) for name, x in state.items()}
    return inputs, state | {"position": torch.tensor(case.positions)}
