"""The costs of the memories that learn while they read: TTT, Titans, LaCT and least squares.

c is the chunk, d the channels of a head, n and m the sizes of a matrix of the memory. "executed" counts the products of
lineate.memory, for whole chunks; "least" counts the recurrence: a token's output for k, gradients, and output for q.
Each mixer chooses one of these classes next to its own class.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from lineate.layers.configs import MemoryConfig
from lineate.layers.costs.measuring import saved_bytes
from lineate.layers.registry import ModelSizes, Operations, Sizes
from lineate.memory.least_squares import TOGETHER
from lineate.torch_ops.tracing import cpu_by_default

MakeMemory = Callable[[ModelSizes, MemoryConfig], nn.Module]

_QUERIES = 512  # queries that share one mask in LaCT's attention


@dataclass(frozen=True)
class LearningCosts:
    """The costs of one memory; this class counts those of TTT, and subclasses those of the others."""

    chunk: int
    """Tokens a chunk if the configuration does not set them."""
    gates: int
    """Gates a head, which in_proj makes."""
    gated: bool = True
    """Whether in_proj makes an output gate of all channels."""
    hidden: Callable[[MemoryConfig], int] = lambda memory: 0
    """Hidden channels of the memory, as a multiple of a head's channels; 0 if the memory is one matrix."""

    def operations(self) -> Operations:
        """Return the counts of the memory."""
        return Operations(self.projections, self.mixing, self.mixing_one)

    def projections(self, model: ModelSizes, memory: MemoryConfig) -> int:
        """Return the products with weights, per token: q, k, v, gates, and the output."""
        width = memory.heads * memory.head_dim
        return 2 * model.hidden_size * ((5 if self.gated else 4) * width + self.gates * memory.heads)

    def mixing(self, memory: MemoryConfig, tokens: int, convention: str) -> int:
        """Return the operations of a whole sequence, without projections."""
        if convention == "least":
            return memory.heads * tokens * self.least(memory) + self.beside(memory, tokens, executed=False)
        return self.executed(memory, tokens)

    def mixing_one(self, memory: MemoryConfig, context: int, convention: str) -> int:
        """Return the operations of one token inside a chunk."""
        if convention == "least":
            return memory.heads * (self.least(memory) + 4 * memory.head_dim * self.near(memory, context))
        return self.executed_one(memory, context)

    def chunk_of(self, memory: MemoryConfig) -> int:
        """Return the tokens of a chunk."""
        return self.chunk if memory.chunk is None else memory.chunk

    def matrices(self, memory: MemoryConfig) -> list[tuple[int, int]]:
        """Return the sizes of one head's matrices."""
        d, times = memory.head_dim, self.hidden(memory)
        return list(pairwise([d, *([times * d] if times else []), d]))

    def least(self, memory: MemoryConfig) -> int:
        """Return the operations of the recurrence, of one head and token."""
        sizes = [n * m for n, m in self.matrices(memory)]
        return 6 * sum(sizes) + 2 * sum(sizes[1:])

    def near(self, memory: MemoryConfig, context: int) -> int:
        """Return the tokens that the attention in parallel with the memory sees."""
        return 0

    def beside(self, memory: MemoryConfig, tokens: int, executed: bool) -> int:
        """Return the operations of the attention in parallel with the memory."""
        return 0

    def executed(self, memory: MemoryConfig, tokens: int) -> int:
        """Return the products of all chunks; an incomplete chunk computes the tokens that it has a second time."""
        c = self.chunk_of(memory)
        made, back, inside = self._products(memory, c)
        begun = 2 * made + back + sum(2 * c * m for _, m in self.matrices(memory)) if tokens % c else 0
        return memory.heads * (-(-tokens // c) * (3 * made + back + inside) + begun)

    def executed_one(self, memory: MemoryConfig, context: int) -> int:
        """Return the products of one token."""
        return memory.heads * self.least(memory)

    def _products(self, memory: MemoryConfig, c: int) -> tuple[int, int, int]:
        """Return the products with the memory, of the backward through all but its first matrix, and of scores."""
        sizes = self.matrices(memory)
        made = sum(2 * c * n * m for n, m in sizes)
        back = made - 2 * c * sizes[0][0] * sizes[0][1]
        return made, back, sum(2 * c * c * (n + m) for n, m in sizes)  # scores, and products with them


class TitansCosts(LearningCosts):
    """Titans: momentum and forgetting mix the gradients of a chunk."""

    def executed(self, memory: MemoryConfig, tokens: int) -> int:
        if tokens == 1:
            return self.executed_one(memory, 0)
        c = self.chunk_of(memory)
        made, back, inside = self._products(memory, c)
        gates = 2 * c**3 + 2 * c * c if c > 1 else 0
        return memory.heads * -(-tokens // c) * (5 * made + back + inside + gates)

    def executed_one(self, memory: MemoryConfig, context: int) -> int:
        made, back, _ = self._products(memory, 1)
        return memory.heads * (5 * made + back + sum(2 * (n + m) for n, m in self.matrices(memory)))


class LactCosts(LearningCosts):
    """LaCT: a gated network that learns by whole chunks, in parallel with attention over a window."""

    def least(self, memory: MemoryConfig) -> int:
        return 18 * memory.head_dim**2

    def window(self, memory: MemoryConfig) -> int:
        """Return the tokens that its attention sees."""
        return self.chunk_of(memory) if memory.window is None else memory.window

    def near(self, memory: MemoryConfig, context: int) -> int:
        return min(context + 1, self.window(memory))

    def beside(self, memory: MemoryConfig, tokens: int, executed: bool) -> int:
        """Count attention over the window; if executed, a block of queries computes all keys that any of them sees."""
        window = self.window(memory)
        if not window:
            return 0
        near = min(tokens, window)
        pairs = near * (near + 1) // 2 + (tokens - near) * near
        if executed:
            starts = range(0, tokens, _QUERIES)
            ends = [(start, min(start + _QUERIES, tokens)) for start in starts]
            pairs = sum((stop - start) * (stop - max(start - window + 1, 0)) for start, stop in ends)
        return 4 * memory.heads * memory.head_dim * pairs

    def executed(self, memory: MemoryConfig, tokens: int) -> int:
        d = memory.head_dim
        orthogonal = 3 * 5 * 3 * 2 * d**3  # three matrices, five steps of three products
        chunks = tokens // self.chunk_of(memory)
        return memory.heads * (tokens * 18 * d * d + chunks * orthogonal) + self.beside(memory, tokens, executed=True)

    def executed_one(self, memory: MemoryConfig, context: int) -> int:
        d = memory.head_dim
        return memory.heads * (18 * d * d + 4 * d * self.window(memory))


class LeastSquaresCosts(LearningCosts):
    """Least squares: the inverse of the keys' covariance is kept, and restored once a chunk."""

    def least(self, memory: MemoryConfig) -> int:
        return 10 * memory.head_dim**2

    def executed(self, memory: MemoryConfig, tokens: int) -> int:
        if tokens == 1:
            return self.executed_one(memory, 0)
        c, d = self.chunk_of(memory), memory.head_dim
        chunks = -(-tokens // c)
        parts = [min(TOGETHER, chunks - first) for first in range(0, chunks, TOGETHER)]
        states = sum(4 * n * (n + 1) * d * d + 6 * (n + 1) * d**3 for n in parts) + 2 * d**3
        return memory.heads * (chunks * (10 * c * d * d + 6 * c * c * d) + states)

    def executed_one(self, memory: MemoryConfig, context: int) -> int:
        d = memory.head_dim
        return memory.heads * (6 * d * d + 2 * d)  # the writes are not matrix products


def learning_kept(make: MakeMemory) -> Callable[[MemoryConfig, bool], float]:
    """Return a function that measures the bytes a token that the backward of a memory keeps.

    Args:
        make: (model, config) -> the mixer.
    """

    def kept(memory: MemoryConfig, half: bool) -> float:  # most of it is computed in float32 in any case
        return memory.heads * learning_bytes(make, replace(memory, heads=1))

    return kept


@lru_cache
@cpu_by_default
def learning_bytes(make: MakeMemory, memory: MemoryConfig) -> float:
    """Measure the bytes a token that a memory with one head keeps, as the growth from one chunk to the next."""
    hidden = 8
    mixer = make(Sizes(hidden), memory)
    chunk = getattr(mixer, "chunk", 16)
    assert isinstance(chunk, int)
    one, two = (saved_bytes(mixer, torch.randn(1, n * chunk, hidden)) for n in (2, 4))
    return (two - one) / (2 * chunk) - 4 * hidden  # the input is the block's
