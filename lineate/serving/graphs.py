"""The CUDA graphs of a pool: one for each kind and shape of a step that was met, the last ones kept."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lineate.generation.in_place import Graph

MOST_GRAPHS = 48
"""The most steps whose graphs are kept at a time."""

Step = TypeVar("Step")


class TrailGraphs(NamedTuple):
    """A trail that was recorded; nothing else may be replayed between reading and accepting.

    Args:
        ids: The tokens that it reads, `rows t`.
        read: Reads them.
        accept: Keeps the first ones of each row.
    """

    ids: Tensor
    read: Graph
    accept: Graph


class Graphs:
    """Recorded steps by a key that says everything that their launches depend on."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, object] = {}
        self.memory = torch.cuda.graph_pool_handle()
        """The memory of intermediate results, shared by all graphs: nothing in it is read after another replay."""

    def get(self, key: Hashable, record: Callable[[], Step]) -> Step:
        """Return a recorded step.

        Args:
            key: The kind and the shape of the step.
            record: Records it, when the key is new.
        """
        step = self._kept.pop(key, None)
        if step is None:
            if len(self._kept) >= MOST_GRAPHS:
                del self._kept[next(iter(self._kept))]  # the one that was not used for the longest time
            step = record()
        self._kept[key] = step
        return step  # type: ignore[return-value]
