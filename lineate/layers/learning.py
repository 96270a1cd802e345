"""The base class of the mixers whose memory learns while it reads: TTT, Titans, LaCT and least squares.

q | k | v | ... = in_proj(x)         one projection for everything
q | k | v = silu(conv(q | k | v))    the short convolution; with conv_size 0 both it and its silu are left out
o, memory = learn(q | k | v, ...)    the memory, from the state of an earlier call or from its learned beginning
y = out_proj(o)
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.configs import MemoryConfig
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.projection import project
from lineate.layers.registry import ModelSizes
from lineate.layers.state import Memory, TensorSpec
from lineate.memory.chunks import check_chunk
from lineate.parallel.tensor.shards import Cut, Part, linear_cuts, share_out
from lineate.rule import compute_dtype


class LearningMixer(nn.Module):
    """A mixer whose memory learns: projections, the short convolution, and the state.

    A subclass makes its own parameters and norm, calls `finish`, and has `reset_parameters`, `memory_spec` and `learn`.
    Context parallelism is not supported, because the memory cannot be passed between ranks: there is no `context`, and
    a segment is refused.
    """

    beside: ClassVar[tuple[str, ...]] = ("conv",)
    """Tensors of the state that do not belong to the memory."""
    expansion: float = 0
    """Hidden channels of the memory's model, as a multiple of a head's channels; 0 if it has no hidden layer."""

    def __init__(
        self, hidden_size: int, heads: int, *, splits: tuple[int, ...], chunk: int, conv_size: int, norm_eps: float
    ) -> None:
        """Make in_proj and the convolution.

        Args:
            hidden_size: Channels of x.
            heads: Heads of the memory.
            splits: The widths of q | k | v and of the other outputs of in_proj.
            chunk: Tokens that share one gradient point; for least squares, those between two restored ridges.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            norm_eps: Added to the divisors of the norms.
        """
        check_chunk(chunk)
        super().__init__()
        self.heads, self.splits, self.chunk, self.norm_eps = heads, splits, chunk, norm_eps
        self.in_proj = nn.Linear(hidden_size, sum(splits), bias=False)
        self.conv = ShortConvolution(splits[0], conv_size) if conv_size else None

    def finish(self, width: int) -> None:
        """Make out_proj with `width` input channels, and initialise all parameters."""
        self.out_proj = nn.Linear(width, self.in_proj.in_features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the memory's own parameters."""
        raise self._missing("reset_parameters")

    def memory_spec(self, dtype: torch.dtype, wide: torch.dtype) -> list[TensorSpec]:
        """Return the specs of the state without the convolution's; dtype: of projections, wide: of the memory."""
        raise self._missing("memory_spec")

    def learn(
        self, x: Tensor, mixed: Tensor, gates: list[Tensor], state: Memory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the input of out_proj, `b t width`, and the new tensors of the state.

        Args:
            x: The input of the layer, `b t hidden`.
            mixed: q | k | v, after the convolution.
            gates: The other parts of in_proj's result.
            state: The state before x, or None.
            cu_seqlens: The bounds of packed sequences, or None.
        """
        raise self._missing("learn")

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must have {name}, as every LearningMixer")

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        """The tensors of the state."""
        dtype = self.in_proj.weight.dtype
        return (*convolution_spec(self.conv, dtype), *self.memory_spec(dtype, compute_dtype(dtype)))

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Return y `b t hidden`, and the state: the memory, and the convolution's last inputs.

        Args:
            x: `b t hidden`.
            state: The result of an earlier call, to continue; None: x begins its sequences.
            cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`.
        """
        check_call(self, x, state, cu_seqlens)
        mixed, *gates = project(self.in_proj, x).split(self.splits, -1)
        tensors: dict[str, Tensor] = {}
        if self.conv is not None:
            mixed, tensors["conv"] = self.conv(mixed, None if state is None else state["conv"], cu_seqlens)
        y, memory = self.learn(x, mixed, gates, state, cu_seqlens)
        return project(self.out_proj, y), Memory(tensors | memory)

    def shared_cuts(self, mixed: tuple[Part, ...], gates: tuple[Part, ...]) -> dict[str, Cut]:
        """Return the division of the projections and the convolution among ranks.

        Args:
            mixed: The parts of q | k | v.
            gates: The parts of the other outputs of in_proj.
        """
        cuts = linear_cuts("in_proj", self.in_proj, 0, (*mixed, *gates))
        cuts |= linear_cuts("out_proj", self.out_proj, 1, (Part(self.out_proj.in_features, self.heads),))
        if self.conv is not None:
            cuts["conv.weight"] = Cut(0, mixed)
        return cuts

    def memory_of(self, state: Memory) -> dict[str, Tensor]:
        """Return the memory's part of a state."""
        return {name: y for name, y in state.tensors.items() if name not in self.beside}


def rows_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of rows of a call's state: the batch, or the packed sequences."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def shared_sizes(model: ModelSizes, memory: MemoryConfig) -> dict[str, Any]:
    """Return the arguments of these mixers' constructors from a configuration."""
    sizes = {"hidden_size": model.hidden_size, "heads": memory.heads, "conv_size": memory.conv_size}
    return sizes if memory.chunk is None else {**sizes, "chunk": memory.chunk}


def divide_memory(memory: MemoryConfig, ranks: int) -> MemoryConfig:
    """Return the sizes of one rank's share of the heads."""
    return replace(memory, heads=share_out("the heads", memory.heads, ranks))


def check_chunked(name: str, choice: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless the choice is a name that has a chunked form; functions run only in the reference."""
    if callable(choice):
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, which have a chunked form, got a function; "
            "lineate.memory.run_reference takes any model, loss and optimiser in a MemoryRule"
        )
    checks.check_choice(name, choice, allowed)
