"""Kept states, and the results of lookups."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lineate.layers import LayerState, Memory
from lineate.models.state import ModelState
from lineate.serving.cache.blocks import Block, Named, assemble


@dataclass(frozen=True)
class Found:
    """A kept state.

    Args:
        length: how many tokens of the prompt it has read.
        state: one row; its tensors belong to the caller.
        logits: `vocab`, for the token that follows; None if they were not kept.
    """

    length: int
    state: ModelState
    logits: Tensor | None


@dataclass(frozen=True)
class CacheStats:
    """Contents and counts of a cache.

    Args:
        states: states in memory.
        nodes: nodes of the tree, of which some only branch, hold blocks or name a file.
        bytes: bytes of all tensors in memory, shared ones counted once.
        budget_bytes: the most they may be.
        files: states on disk, of which some are in memory too.
        file_bytes: bytes of all files.
        ignored_files: files that cannot be used.
        hits: calls of find that found a state.
        misses: calls of find that found none.
        hit_tokens: tokens that the found states had read.
        kept: calls of keep after which the prefix had a state.
        refused: calls of keep whose state does not fit.
        evictions: states that were evicted for others.
        spilled: states that were written to disk.
        restored: states that were found on disk.
    """

    states: int
    nodes: int
    bytes: int
    budget_bytes: int
    files: int
    file_bytes: int
    ignored_files: int
    hits: int
    misses: int
    hit_tokens: int
    kept: int
    refused: int
    evictions: int
    spilled: int
    restored: int


@dataclass(eq=False)
class Kept:
    """A state in memory: its own tensors, and the last block of its chain.

    Args:
        layers: the tensors of each layer's Memory; None for a layer with one entry a token.
        logits: `vocab`, or None.
        block: the last block of its chain; None if no layer has one entry a token.
        nbytes: the bytes that were added for it.
        cost: seconds to recompute it from its nearest kept ancestor.
    """

    layers: tuple[Named | None, ...]
    logits: Tensor | None
    block: Block | None
    nbytes: int
    cost: float = 0.0

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Its tensors without those of blocks."""
        yield from (x for layer in self.layers if layer is not None for x in layer.values())
        if self.logits is not None:
            yield self.logits

    @property
    def worth(self) -> float:
        """Seconds per byte."""
        return self.cost / max(self.nbytes, 1)

    def copy(self, length: int) -> Found:
        """Return the state, which has read `length` tokens, in tensors of its own."""
        caches = iter([] if self.block is None else assemble(self.block))
        layers: tuple[LayerState, ...] = tuple(
            next(caches) if layer is None else Memory({name: x.clone() for name, x in layer.items()})
            for layer in self.layers
        )
        logits = None if self.logits is None else self.logits.clone()
        return Found(length, ModelState(layers, length), logits)


def own_nbytes(state: ModelState, logits: Tensor | None) -> int:
    """Return the bytes of all memories and logits."""
    memories = sum(layer.nbytes for layer in state.layers if isinstance(layer, Memory))
    return memories + (0 if logits is None else logits.nbytes)
