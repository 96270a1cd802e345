"""The rules of the general row as contestants of bench.rules.cpu: their inputs, and calls on one backend."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from bench.timing import Call

WRITES = 2
"""Writes a token of gated_delta_product."""
OPS = {
    "gdn2": lineate.gated_delta_rule_2,
    f"deltaproduct, {WRITES} writes": lineate.gated_delta_product,
    "low rank": lineate.diagonal_plus_low_rank,
}
"""The public op of each rule, by its name in the results."""


def make_inputs(rule: str, t: int, *, h: int = 16, dim: int = 128, with_state: bool = False) -> dict[str, Tensor]:
    """Return random inputs of a rule, the same every time, as those of bench.rules.contestants."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    several = () if rule in ("gdn2", "low rank") else (WRITES,)
    inputs = {"q": F.normalize(normal(1, t, h, dim), dim=-1), "k": F.normalize(normal(1, t, *several, h, dim), dim=-1)}
    inputs |= {"v": normal(1, t, *several, h, dim)}
    inputs |= {"log_decay": F.logsigmoid(normal(1, t, h, *(() if several else (dim,))) + 3)}
    if several:
        inputs |= {"beta": normal(1, t, *several, h).sigmoid()}
    elif rule == "gdn2":
        inputs |= {name: normal(1, t, h, dim).sigmoid() for name in ("erase", "write")}
    else:
        probe = F.normalize(normal(1, t, h, dim), dim=-1)
        inputs |= {"probe": probe, "direction": probe * normal(1, t, h, dim).sigmoid()}
    return inputs | ({"state": normal(1, h, dim, dim)} if with_state else {})


def forward(rule: str, inputs: dict[str, Tensor], backend: str) -> Call:
    """Return a call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return OPS[rule](**inputs, backend=backend)

    return call


def forward_backward(rule: str, inputs: dict[str, Tensor], backend: str) -> Call:
    """Return a call that differentiates the sum of the output by every input; it returns the gradients."""

    def call() -> Any:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        output = OPS[rule](**leaves, backend=backend).output
        return torch.autograd.grad(output.sum(), list(leaves.values()))

    return call
