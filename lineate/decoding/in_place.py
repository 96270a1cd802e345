"""One decoding step in place: memories and caches are written where they are, and lengths stay on the device.

A step that allocates nothing that outlives it, and that never waits for the device, can be recorded in a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineate.decoding.capturing import CAPTURES, capture_stream, captured
from lineate.layers import LayerState, Memory, TokenCache
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.layers.gpu import overlapping
from lineate.layers.state import CacheInPlace
from lineate.models.hybrid import HybridLM
from lineate.models.state import ModelState

WINDOW_STEP = 1024
"""On a GPU, attention reads a window of the caches, a multiple of this many tokens; a wider one is captured anew."""

Tensors = Mapping[int, Mapping[str, Tensor]]
"""Tensors by layer and name."""


def state_in_place(
    memories: Tensors, caches: Tensors, window: int, lengths: Tensor, new: int = 1, format: StateFormat = AS_COMPUTED
) -> ModelState:
    """Return a state whose next call writes into these tensors.

    Args:
        memories: Tensors `rows ...` by layer and name; a call may overwrite them, or return new ones.
        caches: Tensors `rows capacity ...` by layer and name; a call writes the new tokens into them.
        window: How many entries of the caches attention reads.
        lengths: The tokens that each row has, `rows`.
        new: How many tokens the next call adds to every row.
        format: How the memories are kept; positions are the seeds of stochastic rounding.
    """
    seeds = format.seeds(lengths)
    layers: dict[int, LayerState] = {n: Memory(own, owned=True, seeds=seeds) for n, own in memories.items()}
    if caches:
        layers |= caches_in_place(caches, window, new, (lengths, lengths + new), {})
    return ModelState(tuple(layers[n] for n in range(len(layers))), 0)


def caches_in_place(
    caches: Tensors, window: int, new: int, lengths: tuple[Tensor, Tensor], shared: dict[Hashable, Any]
) -> dict[int, LayerState]:
    """Return the caches of state_in_place.

    Args:
        caches: Tensors `rows capacity ...` by layer and name.
        window: How many entries attention reads.
        new: How many tokens the next call adds to every row.
        lengths: The tokens that each row has, `rows`, before and after the call.
        shared: Where the layers keep what they compute alike, in one call.
    """
    return {n: CacheInPlace(own, window, new, lengths, shared) for n, own in caches.items()}


def copied(
    memories: Tensors, caches: Tensors, longest: int, lengths: int | Tensor, rows: slice = slice(None)
) -> ModelState:
    """Return a copy of the state in these tensors.

    Args:
        memories: Tensors `rows ...` by layer and name.
        caches: Tensors `rows capacity ...` by layer and name.
        longest: The entries of the caches that are copied.
        lengths: The tokens of each of these rows; an int if all have as many.
        rows: Which rows are copied.
    """
    layers: dict[int, LayerState] = {n: Memory({x: own[x][rows].clone() for x in own}) for n, own in memories.items()}
    for n, own in caches.items():
        layers[n] = TokenCache({name: x[rows, :longest].clone() for name, x in own.items()}, lengths)
    return ModelState(tuple(layers[n] for n in range(len(layers))), lengths)


class Read(NamedTuple):
    """The result of a step.

    Args:
        logits: `rows 1 vocab`.
        hidden: The input of the head, `rows 1 hidden`.
        state: A state that has the new memories.
    """

    logits: Tensor
    hidden: Tensor
    state: ModelState


def read_in_place(model: HybridLM, ids: Tensor, state: ModelState, autocast: tuple[bool, torch.dtype]) -> Read:
    """Read one token of every row.

    Args:
        model: The model.
        ids: Tokens, `rows 1`.
        state: What state_in_place returns.
        autocast: Whether autocast is enabled, and its dtype.
    """
    enabled, dtype = autocast
    # Without autocast's cache of converted weights, which would be freed before a graph is replayed.
    with torch.autocast(ids.device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
        x, new = model.hidden(model.embed(ids), state)
        return Read(model.logits(x), x, new)


def write_back(memories: Tensors, new: ModelState) -> None:
    """Copy the memories that a call made anew to where the old ones are, with one launch for each dtype."""
    stale, fresh = defaultdict(list), defaultdict(list)
    for n, memory in memories.items():
        for name, x in memory.items():
            found = new.layers[n][name]
            if found is not x:  # the layer made a new tensor
                stale[x.dtype].append(x)
                fresh[x.dtype].append(found)
    for each in stale:
        torch._foreach_copy_(stale[each], fresh[each])


@dataclass(frozen=True)
class Graph:
    """A recorded step, and where its results are after it was replayed."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, ...]

    def replay(self) -> tuple[Tensor, ...]:
        """Run the step; return copies of its results, which the next step does not overwrite."""
        self.graph.replay()
        return tuple(x.clone() for x in self.results)


def capture(
    step: Callable[[], tuple[Tensor, ...]], changing: list[Tensor], device: torch.device, pool: Any = None
) -> Graph:
    """Record a step in a CUDA graph; what the step changes is as before.

    Args:
        step: What to record.
        changing: The tensors that the step changes and whose values matter; they are put back after each trial run.
        device: The device.
        pool: The memory of the graph's intermediate results, shared with other graphs; None: its own.
    """
    return capture_all([step], changing, device, pool)[0]


def capture_all(
    steps: Sequence[Callable[[], tuple[Tensor, ...]]], changing: list[Tensor], device: torch.device, pool: Any
) -> list[Graph]:
    """Record steps that follow each other in a CUDA graph each; what they change is as before.

    A step may use what the one before it has made, as long as no other graph of the pool is replayed in between.

    Args:
        steps: What to record, in the order in which the graphs will be replayed.
        changing: The tensors that the steps change and whose values matter; they are put back after each trial run.
        device: The device.
        pool: The memory of the graphs' intermediate results, shared with other graphs.
    """
    with CAPTURES, torch.cuda.device(device):
        stream, current = capture_stream(torch.cuda.current_device()), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), overlapping():
            try_out(lambda: [step() for step in steps], changing)
        current.wait_stream(stream)
        graphs = []
        for step in steps:
            with captured(device, pool) as graph, overlapping():
                results = step()
            graphs.append(Graph(graph, results))
    return graphs


def try_out(step: Callable[[], object], changing: list[Tensor]) -> None:
    """Make a step twice and undo it: it compiles kernels and allocates workspaces, which a capture must not do.

    A step that fails is undone, too.
    """
    kept = [x.clone() for x in changing]
    for _ in range(2):
        try:
            step()
        finally:
            for x, before in zip(changing, kept, strict=True):
                x.copy_(before)


def round_up(n: int, unit: int) -> int:
    """Return the lowest multiple of unit that is at least n."""
    return -(-n // unit) * unit
