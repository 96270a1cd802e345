"""Memories that learn while they read: a memory is model x loss x optimiser x forgetting x chunk.

Reading is f(q); writing is one optimiser step on a loss of (k, v). RULES has the rows:

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

The chunked forms, each equal to its row: least_squares.py, ttt.py, titans.py, lact.py.

    y, state = run_reference(RULES["DeltaNet"], q, k, v, {"rate": beta}, {"S": zeros})    the oracle, token by token
    rule = replace(RULES["TTT-Linear"], chunk=4)                                          dataclasses.replace: variants
"""

from lineate.memory.least_squares import least_squares
from lineate.memory.parts import (
    AFFINE,
    LINEAR,
    MLP,
    SWIGLU,
    TTT_MLP,
    Model,
    Weights,
    correlation,
    deep,
    normed,
    reconstruction,
    squared_error,
)
from lineate.memory.reference import MemoryRule, MemoryState, run_head, run_reference

RULES = {
    rule.name: rule
    for rule in (
        MemoryRule("linear attention", LINEAR, correlation),
        MemoryRule(
            "gated linear attention", LINEAR, correlation, forgetting=("head", "channel"), gradient_at="decayed"
        ),
        MemoryRule("DeltaNet", LINEAR, squared_error),
        MemoryRule("Gated DeltaNet", LINEAR, squared_error, forgetting=("head",), gradient_at="decayed"),
        MemoryRule("KDA", LINEAR, squared_error, forgetting=("channel",), gradient_at="decayed"),
        MemoryRule("least squares", LINEAR, squared_error, "least squares", forgetting=("none", "head")),
        MemoryRule("TTT-Linear", normed(AFFINE), reconstruction, "positioned sgd", chunk=16),
        MemoryRule("TTT-MLP", normed(TTT_MLP), reconstruction, "positioned sgd", chunk=16),
        MemoryRule("Titans", LINEAR, squared_error, "momentum", forgetting=("head",), chunk=16),
        MemoryRule("Titans MLP", MLP, squared_error, "momentum", forgetting=("head",), chunk=16),
        MemoryRule("LaCT", SWIGLU, correlation, "muon", chunk=2048, renormalises=True),
    )
}
"""The table: one row a rule."""

__all__ = [
    "RULES",
    "MemoryRule",
    "MemoryState",
    "run_reference",
    "run_head",
    "least_squares",
    "Model",
    "Weights",
    "LINEAR",
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
