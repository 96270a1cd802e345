"""The parts of a memory: models, losses, optimisers. Pure functions of one head's tensors.

    model(weights, x) -> y                                 weights: a dict of tensors; x `d` or `t d`
    loss(model, weights, k, v) -> a number                 the reference takes its gradient by autograd
    optimiser(gradients, carried, gates) -> steps, carried

All three slots are open: a rule takes any function of these arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NamedWeights = dict[str, Tensor]
"""The weights of one head's model, or tensors like them, by their names."""
Loss = Callable[["MemoryModel", NamedWeights, Tensor, Tensor], Tensor]
"""loss(model, weights, k, v) -> a number."""
Optimiser = Callable[[NamedWeights, NamedWeights, NamedWeights], tuple[NamedWeights, NamedWeights]]
"""optimiser(gradients, carried, gates) -> the change of the weights, and its state for the next token.

All are tensors of one head by name: gradients and steps by the names of the learned weights, gates by theirs. carried
begins with zeros like the learned weights.
"""

MUON_STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""LaCT's five Newton-Schulz steps: X <- a X + b (X X^T) X + c (X X^T)^2 X."""
MUON_EPS, ROW_EPS = 1e-7, 1e-5
"""Added to the norm of an orthogonalised matrix, and to the length of a rescaled row."""


def check_name(name: str) -> None:
    """Check that a rule's or a model's name is a string."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")


@dataclass(frozen=True)
class MemoryModel:
    """A small network: `apply(weights, x)`; only the weights named in `learned` move while reading a sequence."""

    name: str
    """The name in tables and messages."""
    learned: tuple[str, ...]
    """The names of the weights that are learned."""
    apply: Callable[[NamedWeights, Tensor], Tensor]
    """(weights, x) -> the output of the network for x."""

    def __post_init__(self) -> None:
        check_name(self.name)
        names = self.learned
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"learned must be a tuple of names of weights, got {names!r}")
        if not callable(self.apply):
            raise TypeError(f"apply must be a function of (weights, x), got {self.apply!r}")

    def __call__(self, weights: NamedWeights, x: Tensor) -> Tensor:
        return self.apply(weights, x)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """Return gamma (x - mean x) / sqrt(var x + eps) + beta over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * gamma + beta


def _linear(weights: NamedWeights, x: Tensor) -> Tensor:
    return x @ weights["S"]


def _affine(weights: NamedWeights, x: Tensor) -> Tensor:
    return x @ weights["W"] + weights["b"]


def _ttt_mlp(weights: NamedWeights, x: Tensor) -> Tensor:
    hidden = F.gelu(x @ weights["W1"] + weights["b1"], approximate="tanh")
    return hidden @ weights["W2"] + weights["b2"]


def _mlp(weights: NamedWeights, x: Tensor) -> Tensor:
    return F.silu(x @ weights["W1"]) @ weights["W2"]


def _swiglu(weights: NamedWeights, x: Tensor) -> Tensor:
    return (F.silu(x @ weights["W0"].T) * (x @ weights["W2"].T)) @ weights["W1"].T


def normed(model: MemoryModel) -> MemoryModel:
    """Return the model x + LN(f(x)), with the fixed weights gamma and beta `d` (TTT).

    Args:
        model: f.
    """

    def apply(weights: NamedWeights, x: Tensor) -> Tensor:
        return x + layer_norm(model(weights, x), weights["gamma"], weights["beta"])

    return MemoryModel(f"x + LN({model.name})", model.learned, apply)


MATRIX = MemoryModel("S^T x", ("S",), _linear)
"""S `k v`."""
AFFINE = MemoryModel("W^T x + b", ("W", "b"), _affine)
"""W `d d`, b `d`."""
TTT_MLP = MemoryModel("W2^T gelu(W1^T x + b1) + b2", ("W1", "b1", "W2", "b2"), _ttt_mlp)
"""W1 `d e`, b1 `e`, W2 `e d`, b2 `d`; gelu with tanh."""
MLP = MemoryModel("W2^T silu(W1^T x)", ("W1", "W2"), _mlp)
"""W1 `d e`, W2 `e d`: a deep memory of two layers."""
SWIGLU = MemoryModel("W1 (silu(W0 x) * W2 x)", ("W0", "W1", "W2"), _swiglu)
"""W0, W2 `e d`, W1 `d e`."""


def deep(layers: int, residual: bool = False) -> MemoryModel:
    """Return the model W_n^T silu(... silu(W_1^T x)), with the weights W1 .. Wn (Titans).

    Args:
        layers: n.
        residual: Whether + x follows.
    """

    def apply(weights: NamedWeights, x: Tensor) -> Tensor:
        y = x @ weights["W1"]
        for i in range(2, layers + 1):
            y = F.silu(y) @ weights[f"W{i}"]
        return x + y if residual else y

    return MemoryModel(f"MLP of {layers}", tuple(f"W{i}" for i in range(1, layers + 1)), apply)


def correlation(model: MemoryModel, weights: NamedWeights, k: Tensor, v: Tensor) -> Tensor:
    """Return -<f(k), v>.

    Args:
        model: f.
        weights: Its weights.
        k: The key `k`.
        v: The value `v`.
    """
    return -(model(weights, k) * v).sum()


def squared_error(model: MemoryModel, weights: NamedWeights, k: Tensor, v: Tensor) -> Tensor:
    """Return 1/2 ||f(k) - v||^2.

    Args:
        model: f.
        weights: Its weights.
        k: The key `k`.
        v: The value `v`.
    """
    return (model(weights, k) - v).square().sum() / 2


def reconstruction(model: MemoryModel, weights: NamedWeights, k: Tensor, v: Tensor) -> Tensor:
    """Return 1/2 ||LN(f(k)) - (v - k)||^2, for a `normed` model, which is k + LN(f(k)).

    Args:
        model: f.
        weights: Its weights.
        k: The key `k`.
        v: The value `v`.
    """
    return ((model(weights, k) - k) - (v - k)).square().sum() / 2


def orthogonalise(x: Tensor, eps: float = MUON_EPS) -> Tensor:
    """Return nearly U V^T of x = U D V^T `... m n`, by five Newton-Schulz steps (Muon)."""
    wide = x.shape[-2] <= x.shape[-1]
    y = x if wide else x.mT
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + eps)
    for a, b, c in MUON_STEPS:
        square = y @ y.mT
        y = a * y + (b * square + c * (square @ square)) @ y
    return y if wide else y.mT


def row_norms(weight: Tensor) -> Tensor:
    """Return the length of each row, `... m 1`."""
    return weight.norm(dim=-1, keepdim=True)


def renormalise(weight: Tensor, norms: Tensor, eps: float = ROW_EPS) -> Tensor:
    """Return weight with its rows rescaled to the given lengths (LaCT)."""
    return weight / (row_norms(weight) + eps) * norms


def clip(gradients: NamedWeights, limit: float, eps: float = 1e-6) -> NamedWeights:
    """Return the gradients, scaled down together if their common length is over the limit."""
    scale = (limit / (total_norm(gradients.values()) + eps)).clamp(max=1)
    return {name: scale * x for name, x in gradients.items()}


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the length of all tensors as one vector; its gradient at 0 is 0."""
    square = torch.stack([x.square().sum() for x in tensors]).sum()
    return torch.where(square > 0, square, 1).sqrt() * (square > 0)
