"""The states of a decoder that are updated where they are, by the steps of rows.py, and whose caches grow."""

import torch
from torch import Tensor

from lineate.decoding import in_place
from lineate.decoding.in_place import copied, round_up
from lineate.decoding.prepared import PreparedStep
from lineate.decoding.rows import RowSteps, RowTensors
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
        self.model, self.rows, self._format, self._autocast = model, state.rows, format, autocast
        self.done: tuple[int, Tensor | None] = reads, None
        """How many tokens were read, and the logits of the last one."""
        device = model.device
        self._even = isinstance(state.lengths, int)
        self._longest = int(state.lengths if isinstance(state.lengths, int) else state.lengths.max())
        self._room = room
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
        self._graphed, self._prepared = graph, prepared
        self._grow()

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits `rows 1 vocab` of ids `rows 1`, which are good."""
        if self._caches and self._longest + 1 > self._capacity:
            self._room *= 2
            self._grow()
        bound = self._prepared
        if bound is not None and self._longest + 1 > self._window:
            self._bind(bound)
        if bound is not None and bound.is_bound and bound.accepts(ids):
            logits = self._read_prepared(bound, ids)
        else:
            logits = self._steps.step(ids, self._longest)[0]
            if bound is not None:
                self._bind(bound)  # the step has moved what C was bound to
        self._longest += 1
        self.done = self.reads + 1, logits
        return logits

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read_prepared(self, prepared: PreparedStep, ids: Tensor) -> Tensor:
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return prepared.read(ids)[0]

    @property
    def reads(self) -> int:
        """How many tokens of every row were read."""
        return self.done[0]

    @property
    def captured(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return self._steps.graphed

    def state(self) -> ModelState:
        """Return a copy of the state after the last read."""
        lengths = self._longest if self._even else self._lengths.clone()
        return copied(self._memories, self._caches, self._longest, lengths)

    def row(self, row: int) -> ModelState:
        """Return a copy of the state of one row after the last read."""
        n = self._longest if self._even else int(self._lengths[row])
        return copied(self._memories, self._caches, n, n, slice(row, row + 1))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grow(self) -> None:
        """Allocate memory for self._room more tokens, and prepare the step."""
        self._capacity = round_up(self._longest + self._room, 64)
        for own in self._caches.values():
            for name, old in own.items():  # zeros, since masked entries must be finite
                own[name] = old.new_zeros(self.rows, self._capacity, *old.shape[2:])
                own[name][:, : self._longest] = old[:, : self._longest]
        tensors = RowTensors(self._memories, self._caches, self._lengths, self._capacity, self._format)
        vars(self).pop("_steps", None)  # frees the memory of the old graph before another one is recorded
        self._steps = RowSteps(self.model, tensors, self._graphed, self._autocast, most_graphs=1)
        self._steps.runs.fill_(1)
        self._steps.prepare(self.rows, self._longest)
        if self._prepared is not None:
            self._bind(self._prepared)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _bind(self, prepared: PreparedStep) -> None:
        """Bind the prepared step to the tensors; the window of attention grows by at least an eighth."""
        needed = self._longest + 1
        self._window = min(self._capacity, round_up(needed + needed // 8, in_place.WINDOW_STEP))
        prepared.bind(self._memories, self._caches, self._window, self._lengths, self._format)
