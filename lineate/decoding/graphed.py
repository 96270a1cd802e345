"""Decoding in place: memories, caches and lengths are updated where they are, on a GPU by replaying a CUDA graph.

A decoding step of a small model makes a few hundred launches, each of which takes the host longer than the device. A
graph replays them without the host, at the same addresses. So the lengths stay on the device, too.
"""

import torch
from torch import Tensor

from lineate.decoding import in_place
from lineate.decoding.in_place import Graph, capture, copied, read_in_place, round_up, state_in_place, write_back
from lineate.decoding.prepared import PreparedStep
from lineate.layers import Memory
from lineate.layers.formats import StateFormat
from lineate.models.hybrid import HybridLM
from lineate.models.state import ModelState


class DecodingInPlace:
    """The states of a decoder that are updated in place.

    Args:
        model: The model.
        state: The state to continue from; it is copied.
        room: How many more tokens to allocate memory for; it doubles when they are used up.
        format: How the memories are kept.
        autocast: Whether autocast is enabled, and its dtype.
        graph: Whether a GPU replays a graph.
        prepared: The step of a model of which C computes a part.
        reads: How many tokens were read before.
    """

    def __init__(
        self,
        model: HybridLM,
        state: ModelState,
        room: int,
        format: StateFormat,
        autocast: tuple[bool, torch.dtype],
        graph: bool,
        prepared: PreparedStep | None,
        reads: int,
    ) -> None:
        self.model, self.rows, self.reads, self._format, self._autocast = model, state.rows, reads, format, autocast
        device = model.device
        self._even = isinstance(state.lengths, int)
        self._longest = int(state.lengths if isinstance(state.lengths, int) else state.lengths.max())
        self._room = room
        self._wants_graph = graph and model.ranks is None  # sums over ranks are not recorded
        self._ids = torch.zeros(self.rows, 1, dtype=torch.int64, device=device)
        self._lengths = torch.empty(self.rows, dtype=torch.int64, device=device)
        if isinstance(state.lengths, int):
            self._lengths.fill_(state.lengths)
        else:
            self._lengths.copy_(state.lengths)
        self._memories: dict[int, dict[str, Tensor]] = {}
        self._caches: dict[int, dict[str, Tensor]] = {}
        for n, layer in enumerate(state.layers):
            if isinstance(layer, Memory):
                kept = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in layer.tensors.items()}
                self._memories[n] = {name: x.copy_(layer[name]) for name, x in kept.items()}
            else:
                self._caches[n] = {name: layer[name][:, : self._longest].to(device) for name in layer.names}
        self._capacity = self._window = 0
        self._graph: Graph | None = None
        self._prepared = prepared
        self._widen()

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits `rows 1 vocab` of ids `rows 1`, which are good."""
        if self._caches and self._longest == self._window:
            self._widen()
        bound = self._prepared if self._prepared is not None and self._prepared.is_bound else None
        if bound is not None and bound.accepts(ids):
            logits = self._read_prepared(bound, ids)
        else:
            self._ids.copy_(ids)
            (logits,) = self._step() if self._graph is None else self._graph.replay()
            if bound is not None:
                self._bind()  # the step has moved what C was bound to
        self._longest, self.reads = self._longest + 1, self.reads + 1
        return logits

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read_prepared(self, prepared: PreparedStep, ids: Tensor) -> Tensor:
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return prepared.read(ids)[0]

    @property
    def captured(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return self._graph is not None

    def state(self) -> ModelState:
        """Return a copy of the state after the last read."""
        lengths = self._longest if self._even else self._lengths.clone()
        return copied(self._memories, self._caches, self._longest, lengths)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self) -> tuple[Tensor, ...]:
        """Read self._ids and update memories and caches in place, without waiting for the device."""
        state = state_in_place(self._memories, self._caches, self._window, self._lengths, format=self._format)
        read = read_in_place(self.model, self._ids, state, self._autocast)
        write_back(self._memories, read.state)
        self._lengths += 1
        return (read.logits,)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _widen(self) -> None:
        """Widen the window that attention reads by at least one token, allocate memory if needed, and prepare again."""
        self._graph = None  # frees the memory of the old graph
        needed = self._longest + 1
        if needed > self._capacity:
            if self._capacity:
                self._room *= 2
            self._capacity = round_up(self._longest + self._room, 64)
            for tensors in self._caches.values():
                for name, old in tensors.items():  # zeros, since masked entries must be finite
                    tensors[name] = old.new_zeros(self.rows, self._capacity, *old.shape[2:])
                    tensors[name][:, : self._longest] = old[:, : self._longest]
        # The window grows by at least an eighth, so that long sequences are not captured too often.
        self._window = min(self._capacity, round_up(needed + needed // 8, in_place.WINDOW_STEP))
        if self._ids.is_cuda and self._wants_graph:
            # Caches need not be put back after a trial run: steps only write after the last token.
            changing = [self._lengths, *(x for memory in self._memories.values() for x in memory.values())]
            self._graph = capture(self._step, changing, self._ids.device)
        self._bind()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _bind(self) -> None:
        """Bind the prepared step to the tensors, if there is one."""
        if self._prepared is not None:
            self._prepared.bind(self._memories, self._caches, self._window, self._lengths, self._format)
