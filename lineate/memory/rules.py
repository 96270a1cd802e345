"""The types of a memory rule, one row of the table, and of the state of the reference."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lineate import checks
from lineate.console.names import nearest
from lineate.memory.chunks import check_chunk
from lineate.memory.parts import Loss, MemoryModel, NamedWeights, Optimiser, check_name

OPTIMISERS = ("sgd", "momentum", "positioned sgd", "muon", "least squares")
"""The optimisers that have a name (steps.py)."""


@dataclass(frozen=True)
class MemoryRule:
    """One row of the table: model x loss x optimiser x forgetting x chunk."""

    name: str
    """The name in tables and messages."""
    model: MemoryModel
    """The model f."""
    loss: Loss
    """Any function of (model, weights, k, v); its gradient is taken by autograd."""
    optimiser: Literal["sgd", "positioned sgd", "momentum", "muon", "least squares"] | Optimiser = "sgd"
    """positioned: W_t = W0 - max(0, 1/t + learned_t) sum_s rate_s G_s; muon: once, at the end of the chunk.

    Or any function (gradients, carried, gates) -> (steps, carried): W = W' + steps, once a token.
    """
    forgetting: tuple[Literal["none", "head", "channel"], ...] = ("none",)
    """The shapes of log_decay it takes: per head `t`, per key channel `t k`."""
    chunk: int = 1
    """How many tokens share the weights at which the gradient is taken."""
    gradient_at: Literal["decayed", "start"] = "start"
    """Where the gradient is taken: at the decayed weights (chunk 1 only), or at those of the chunk's start."""
    clip: float | None = None
    """The largest length of one token's gradient over all weights."""
    renormalises: bool = False
    """Whether rows are rescaled to their initial lengths after each write."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.model, MemoryModel):
            raise TypeError(
                "model must be a lineate.memory.MemoryModel (MATRIX, AFFINE, TTT_MLP, MLP, SWIGLU, normed(model), "
                f"deep(n) or your own), got {type(self.model).__name__}"
            )
        if not callable(self.loss):
            raise TypeError(
                "loss must be a function of (model, weights, k, v): correlation, squared_error, reconstruction or your "
                f"own, got {self.loss!r}"
            )
        if not callable(self.optimiser) and self.optimiser not in OPTIMISERS:
            raise ValueError(
                f"optimiser must be one of {', '.join(map(repr, OPTIMISERS))}, or a function of (gradients, carried, "
                f"gates), got {self.optimiser!r}{nearest(str(self.optimiser), OPTIMISERS)}"
            )
        kinds = ("none", "head", "channel")
        if not isinstance(self.forgetting, tuple) or not self.forgetting:
            raise TypeError(
                f"forgetting must be a tuple of some of {', '.join(map(repr, kinds))}, got {self.forgetting!r}"
            )
        for kind in self.forgetting:
            checks.check_choice("forgetting", kind, kinds)
        check_chunk(self.chunk)
        checks.check_choice("gradient_at", self.gradient_at, ("decayed", "start"))
        if self.gradient_at == "decayed" and self.chunk != 1:
            raise ValueError(f"gradient_at='decayed' needs chunk=1, got {self.chunk}; use gradient_at='start'")
        if isinstance(self.clip, bool) or not isinstance(self.clip, int | float | None):
            raise TypeError(f"clip must be a number or None, got {type(self.clip).__name__}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}; None clips nothing")
        checks.check_flag("renormalises", self.renormalises)


@dataclass
class MemoryState:
    """The state of one head; that of run_reference holds all heads: tensors `rows heads ...`, position `rows`."""

    weights: NamedWeights
    """The weights after the last token."""
    start: NamedWeights
    """The weights at the start of the chunk."""
    sums: NamedWeights = field(default_factory=dict)
    """The sums of rate_s G_s over the chunk so far (positioned sgd, muon); muon also: "momentum", that of the gates."""
    momentum: NamedWeights = field(default_factory=dict)
    """S_t of Titans; the last chunk's dW of LaCT; the state of an optimiser that is a function."""
    hessian: Tensor | None = None
    """Least squares: sum of k k^T and the ridge, `k k`, the inverse of P."""
    position: int | Tensor = 0
    """How many tokens of the current chunk have been read."""
