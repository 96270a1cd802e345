"""The states of a decoder that are updated where they are, by the steps of rows.py, and whose caches grow."""

import torch
from torch import Tensor

from lineate.decoding import in_place
from lineate.decoding.in_place import copied, round_up
from lineate.decoding.prepared import PreparedStep
from lineate.decoding.rings import MemoryRings
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
        every: The tokens after which memories are written; None: at every token.
        invariant: Whether a row's bits may not depend on the other rows; then every must be None.
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
        every: int | None = None,
        invariant: bool = False,
    ) -> None:
        self.model, self.rows, self._format, self._autocast = model, state.rows, format, autocast
        self._done: tuple[int, Tensor | None] = reads, None
        self._started = False
        """Whether a step was begun and, as far as this object knows, has not ended: see _settle."""
        device = model.device
        self._even = isinstance(state.lengths, int)
        self._longest = int(state.lengths if isinstance(state.lengths, int) else state.lengths.max())
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
        self._graphed, self._invariant = graph, invariant
        self._prepared = prepared if every is None else None  # C writes memories at every token
        self._rings = None
        if every is not None:
            with torch.inference_mode(False):
                self._rings = MemoryRings(model, self._memories, self._lengths, every, format)
        self._grow(room)

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits `rows 1 vocab` of ids `rows 1`, which are good."""
        self._settle()
        if self._caches and self._longest + 1 > self._capacity:
            self._grow(2 * self._room)
        bound = self._prepared
        if bound is not None and self._caches and self._longest + 1 > self._window:
            self._bind(bound)
        self._started = True
        if bound is not None and bound.is_bound and bound.accepts(ids):
            logits = self._read_prepared(bound, ids)
        else:
            logits = self._steps.step(ids, self._longest)[0]
            if bound is not None:
                self._bind(bound)  # the step has moved what C was bound to
        # No call comes between these lines, so that an interrupt finds all of them done, or none.
        self._longest = self._longest + 1
        self._done = self._done[0] + 1, logits
        self._started = False
        return logits

    def _settle(self) -> None:
        """Complete a step that was interrupted, as by Ctrl-C, before this object knew of its end."""
        if not self._started:
            return
        ahead = int(self._lengths.max()) - self._longest
        found = self._steps.repeat(self._longest) if ahead else None
        if ahead == 0 and self._steps.graphed:  # a graph is launched whole, and has not been
            self._started = False
        elif found is not None:
            self._longest, self._done, self._started = self._longest + 1, (self._done[0] + 1, found[0]), False
        else:
            raise RuntimeError(
                "a step of this decoder was interrupted, and its memories may be those of half a step; make a Decoder "
                "from a state that was read before"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read_prepared(self, prepared: PreparedStep, ids: Tensor) -> Tensor:
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return prepared.read(ids)[0]

    @property
    def done(self) -> tuple[int, Tensor | None]:
        """How many tokens were read, and the logits of the last one."""
        self._settle()
        return self._done

    @done.setter
    def done(self, done: tuple[int, Tensor | None]) -> None:
        self._done = done

    @property
    def reads(self) -> int:
        """How many tokens of every row were read."""
        return self.done[0]

    def has(self, reads: int) -> bool:
        """Whether the state after this number of reads is known: that after all of them."""
        return reads == self.reads

    @property
    def captured(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return self._steps.graphed

    @property
    def together(self) -> int:
        """How many rows run together."""
        bound = self._prepared is not None and self._prepared.is_bound
        together = None if bound else self._steps.together
        return self.rows if together is None else min(together, self.rows)

    def state(self, reads: int | None = None) -> ModelState:
        """Return a copy of the state after the given number of reads: all of them, which None means too."""
        assert reads is None or self.has(reads)
        self._settle()
        lengths = self._longest if self._even else self._lengths.clone()
        return self._complete(copied(self._memories, self._caches, self._longest, lengths), slice(None))

    def row(self, row: int, reads: int) -> ModelState:
        """Return a copy of the state of one row, as `state` does."""
        assert self.has(reads)
        n = self._longest if self._even else int(self._lengths[row])
        rows = slice(row, row + 1)
        return self._complete(copied(self._memories, self._caches, n, n, rows), rows)

    def _complete(self, state: ModelState, rows: slice) -> ModelState:
        """Return a copy of some rows with the tokens that the memories do not have yet."""
        if self._rings is not None:
            self._rings.complete(state, rows)
        return state

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grow(self, room: int) -> None:
        """Allocate memory for this many more tokens, and prepare the step; if that fails, nothing has changed."""
        capacity = round_up(self._longest + room, 64)
        caches: dict[int, dict[str, Tensor]] = {}
        for n, own in self._caches.items():
            caches[n] = {}
            for name, old in own.items():  # zeros, since masked entries must be finite
                caches[n][name] = new = old.new_zeros(self.rows, capacity, *old.shape[2:])
                new[:, : self._longest] = old[:, : self._longest]
        tensors = RowTensors(self._memories, caches, self._lengths, capacity, self._format, self._rings)
        steps = RowSteps(self.model, tensors, self._graphed, self._autocast, most_graphs=1, invariant=self._invariant)
        steps.runs.fill_(1)
        steps.prepare(self.rows, self._longest)
        if self._prepared is not None:
            self._prepared.unbind()
        self._caches, self._capacity, self._room, self._steps, self._window = caches, capacity, room, steps, 0
        if self._prepared is not None:
            self._bind(self._prepared)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _bind(self, prepared: PreparedStep) -> None:
        """Bind the prepared step to the tensors; the window of attention grows by at least an eighth."""
        needed = self._longest + 1
        self._window = min(self._capacity, round_up(needed + needed // 8, in_place.WINDOW_STEP))
        prepared.bind(self._memories, self._caches, self._window, self._lengths, self._format, self._invariant)
