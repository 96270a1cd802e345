"""Memories that learn while they read: a memory is model x loss x optimiser x forgetting x chunk.

Reading is f(q); writing is one optimiser step on a loss of (k, v). MEMORY_RULES has the rows:

    name                    model f          loss                     optimiser
    linear attention        S^T x            -<f(k), v>               SGD, rate 1
    gated linear attention  S^T x            the same                 SGD + weight decay per head or channel
    DeltaNet                S^T x            1/2 ||f(k) - v||^2       SGD, rate beta
    Gated DeltaNet          S^T x            the same                 SGD + weight decay per head
    KDA                     S^T x            the same                 SGD + weight decay per channel
    least squares           S^T x            sum of all past errors   exact (Newton's step)
    TTT-Linear, TTT-MLP     x + LN(f(x))     1/2 ||f(k) - v||^2       SGD, chunk 16
    Titans, Titans MLP      linear or MLP    1/2 ||f(k) - v||^2       SGD + momentum + weight decay
    LaCT                    SwiGLU           -<f(k), v>               Muon + momentum, chunk 2048, rows renormalised

The chunked forms, each equal to its row, are in least_squares/, ttt/, titans/ and lact/; chunks.py has the layout of
tokens that they share. run_reference runs any rule token by token; dataclasses.replace makes variants of a rule:

    y, state = run_reference(MEMORY_RULES["DeltaNet"], q, k, v, {"rate": beta}, {"S": zeros})
    rule = replace(MEMORY_RULES["TTT-Linear"], chunk=4)

Any function can be a rule's model, loss or optimiser. This rule learns with the sign of the gradient:

    def signs(gradients, carried, gates):
        return {name: -gates["rate"] * x.sign() for name, x in gradients.items()}, carried

    rule = MemoryRule("sign descent", MATRIX, squared_error, signs)
"""

from typing import TYPE_CHECKING, Any

from lineate.memory.least_squares import least_squares
from lineate.memory.parts import (
    AFFINE,
    MATRIX,
    MLP,
    SWIGLU,
    TTT_MLP,
    MemoryModel,
    NamedWeights,
    Optimiser,
    correlation,
    deep,
    normed,
    reconstruction,
    squared_error,
)
from lineate.memory.reference import run_head, run_reference
from lineate.memory.rules import MemoryRule, MemoryState

MEMORY_RULES = {
    rule.name: rule
    for rule in (
        MemoryRule("linear attention", MATRIX, correlation),
        MemoryRule(
            "gated linear attention", MATRIX, correlation, forgetting=("head", "channel"), gradient_at="decayed"
        ),
        MemoryRule("DeltaNet", MATRIX, squared_error),
        MemoryRule("Gated DeltaNet", MATRIX, squared_error, forgetting=("head",), gradient_at="decayed"),
        MemoryRule("KDA", MATRIX, squared_error, forgetting=("channel",), gradient_at="decayed"),
        MemoryRule("least squares", MATRIX, squared_error, "least squares", forgetting=("none", "head")),
        MemoryRule("TTT-Linear", normed(AFFINE), reconstruction, "positioned sgd", chunk=16),
        MemoryRule("TTT-MLP", normed(TTT_MLP), reconstruction, "positioned sgd", chunk=16),
        MemoryRule("Titans", MATRIX, squared_error, "momentum", forgetting=("head",), chunk=16),
        MemoryRule("Titans MLP", MLP, squared_error, "momentum", forgetting=("head",), chunk=16),
        MemoryRule("LaCT", SWIGLU, correlation, "muon", chunk=2048, renormalises=True),
    )
}
"""The table: one row a rule."""

_RENAMED = {"RULES": "MEMORY_RULES", "Model": "MemoryModel", "Weights": "NamedWeights", "LINEAR": "MATRIX"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return the object that a deprecated name refers to, with a warning."""
        if name not in _RENAMED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import warnings

        text = f"lineate.memory.{name} is now {_RENAMED[name]}; the old name will be removed in 0.3.0"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]


__all__ = [
    "MEMORY_RULES",
    "MemoryRule",
    "MemoryState",
    "run_reference",
    "run_head",
    "least_squares",
    "MemoryModel",
    "NamedWeights",
    "Optimiser",
    "MATRIX",
    "AFFINE",
    "TTT_MLP",
    "MLP",
    "SWIGLU",
    "normed",
    "deep",
    "correlation",
    "squared_error",
    "reconstruction",
]
