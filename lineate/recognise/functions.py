"""The functions that an expression may apply, over float64 tensors of at most two axes.

A vector may be flat [n], a column [n, 1] or a row [1, n]. Nothing here can make an axis longer than its inputs' axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Option = Any
"""A constant of a call: an axis, a pair of them, ("keep",), an exponent, or the text of an einsum."""
Run = Callable[[Sequence[Tensor], Sequence[Option]], Tensor]


class Misfit(Exception):
    """Shapes or values under which an expression has no meaning; another layout may have one."""


@dataclass(frozen=True)
class Function:
    """A function of the list."""

    run: Run
    """(arguments, options) -> the value."""
    usage: str = ""
    """The notation of a call; empty if the function is only an operator or a subscript."""
    arguments: tuple[int, int] = (1, 1)
    """The least and the largest number of values."""
    options: int = 0
    """How many constants may follow them."""
    keywords: tuple[str, ...] = ()
    """The keywords that give such constants."""


def is_vector(x: Tensor) -> bool:
    """Whether a value is a vector, flat or with one axis of length 1."""
    return x.dim() == 1 or (x.dim() == 2 and 1 in x.shape)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Return x y^T for two vectors."""
    if not (is_vector(x) and is_vector(y)):
        raise Misfit("outer needs two vectors")
    return torch.outer(x.flatten(), y.flatten())


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of two vectors, the product with a number, else the matrix product."""
    if x.dim() == 0 or y.dim() == 0:
        return x * y
    if is_vector(x) and is_vector(y) and x.numel() == y.numel():
        return (x.flatten() * y.flatten()).sum()
    return x @ y


def diag(x: Tensor) -> Tensor:
    """Return the diagonal matrix of a vector."""
    if not is_vector(x):
        raise Misfit("diag needs a vector")
    return torch.diag(x.flatten())


def added_axis(x: Tensor, axis: int) -> Tensor:
    """Return a flat vector as a column (axis 1 or -1) or a row (axis 0 or -2)."""
    if x.dim() != 1:
        raise Misfit("an axis can be added to a flat vector alone")
    return x.unsqueeze(axis)


def reshaped(arguments: Sequence[Tensor], options: Sequence[Option]) -> Tensor:
    """Return a vector as a column (-1, 1), a row (1, -1) or a flat one (-1)."""
    shape = options[0] if len(options) == 1 and isinstance(options[0], tuple) else tuple(options)
    if not is_vector(arguments[0]) or shape not in ((-1, 1), (1, -1), (-1,)):
        raise Misfit("reshape(-1, 1), reshape(1, -1) or reshape(-1) of a vector")
    return arguments[0].reshape(shape)


def summed(arguments: Sequence[Tensor], options: Sequence[Option]) -> Tensor:
    """Return the sum over an axis, or over all."""
    axes = [x for x in options if isinstance(x, int)]
    return arguments[0].sum(axes[0], keepdim=("keep",) in options) if axes else arguments[0].sum()


def norm(x: Tensor) -> Tensor:
    """Return the length of a vector, the Frobenius norm of a matrix."""
    return x.square().sum().sqrt()


def normalize(x: Tensor) -> Tensor:
    """Return a vector divided by its length."""
    if not is_vector(x):
        raise Misfit("normalize needs a vector")
    return x / norm(x)


def _one(run: Callable[[Tensor], Tensor], name: str, **more: Any) -> Function:
    return Function(lambda x, _: run(x[0]), f"{name}(x)", **more)


def _two(run: Callable[[Tensor, Tensor], Tensor], name: str) -> Function:
    return Function(lambda x, _: run(x[0], x[1]), f"{name}(x, y)", (2, 2))


AXES = ("axis", "dim", "keepdim", "keepdims")
FUNCTIONS: dict[str, Function] = {
    "add": _two(torch.add, "add"),
    "sub": _two(torch.sub, "sub"),
    "mul": _two(torch.mul, "mul"),
    "div": _two(torch.div, "div"),
    "multiply": _two(torch.mul, "multiply"),
    "matmul": _two(torch.matmul, "matmul"),
    "outer": _two(outer, "outer"),
    "dot": _two(dot, "dot"),
    "einsum": Function(lambda x, o: torch.einsum(o[0], *x), "einsum('i,j->ij', x, y)", (1, 3)),
    "power": Function(lambda x, o: x[0] ** o[0]),
    "neg": Function(lambda x, _: -x[0]),
    "column": Function(lambda x, _: added_axis(x[0], 1)),
    "row": Function(lambda x, _: added_axis(x[0], 0)),
    "unsqueeze": Function(lambda x, o: added_axis(x[0], o[0]), "x.unsqueeze(-1)", options=1, keywords=("dim",)),
    "reshape": Function(reshaped, "x.reshape(-1, 1)", options=2),
    "transpose": Function(lambda x, _: x[0].mT if x[0].dim() == 2 else x[0], "transpose(x)", options=2),
    "diag": _one(diag, "diag"),
    "eye": Function(lambda x, _: x[0], "eye(d)", (0, 0)),
    "exp": _one(torch.exp, "exp"),
    "log": _one(torch.log, "log"),
    "sqrt": _one(torch.sqrt, "sqrt"),
    "square": _one(torch.square, "square"),
    "abs": _one(torch.abs, "abs"),
    "maximum": _two(torch.maximum, "max"),
    "minimum": _two(torch.minimum, "min"),
    "sigmoid": _one(torch.sigmoid, "sigmoid"),
    "logsigmoid": _one(F.logsigmoid, "logsigmoid"),
    "softplus": _one(F.softplus, "softplus"),
    "tanh": _one(torch.tanh, "tanh"),
    "norm": _one(norm, "norm"),
    "normalize": _one(normalize, "normalize", keywords=("dim", "axis")),
    "sum": Function(summed, "sum(x, axis=0)", options=1, keywords=AXES),
    "softmax": _one(lambda x: x.softmax(-1), "softmax", options=1, keywords=("dim", "axis")),
}
METHODS = {
    name: name
    for name in ("dot", "matmul", "outer", "exp", "sigmoid", "sum", "norm", "unsqueeze", "reshape", "transpose")
} | {"view": "reshape", "t": "transpose", "mm": "matmul", "softmax": "softmax", "square": "square"}
"""Methods of a value, and the functions they are."""
