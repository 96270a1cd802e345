"""Decode one token of every row with each call, by a step that is prepared once.

On a CPU where C computes the model, its parts are read from the model once and bound to the states (native.py).
Elsewhere memories, caches and lengths are updated in place (placed.py), on a GPU by a CUDA graph (rows.py), as the rows
of the serving engine are.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from lineate.checks import check_flag
from lineate.decoding.invariant import check_invariant
from lineate.decoding.native import NativeDecoding
from lineate.decoding.placed import DecodingInPlace
from lineate.decoding.prepared import PreparedStep, Verified, reads_rows
from lineate.decoding.rings import check_state_every
from lineate.layers.formats import StateFormat
from lineate.models.checks import check_ids, check_state
from lineate.models.hybrid import HybridLM
from lineate.models.state import ModelState
from lineate.ops.rounding import NEAREST


class Decoder:
    """Decode one token of every row with each call: in C on a CPU, in a CUDA graph on a GPU.

        out = model(prompt, last_only=True)
        decoder = Decoder(model, out.state, room=512)
        logits = decoder(ids)                       # b 1 -> b 1 vocab; nothing waits for a GPU
        state = decoder.state                       # a ModelState, to continue in any other way

    The logits equal those of model(ids, state=...), on a CPU to the bit where C computes the model. Ids on a GPU are
    not checked.

    A decoder assumes that the model stays unchanged: its modules, their settings and hooks, and the addresses of its
    weights. New values that are written into the weights take effect. After any other change, call `refresh()`; with
    debug=True every call checks the assumption and raises. Decoders that run at the same time on a GPU must use one
    CUDA stream, since torch's matrix products share their workspace.

    Args:
        model: The model.
        state: The state to continue from, such as LMOutput.state of a prefill; it is not changed.
        room: How many more tokens to allocate memory for. When they are used up, room doubles, the caches are copied
            and the step is prepared again.
        graph: Whether a GPU replays a graph; False launches the kernels of every step one by one, as for debugging.
        state_dtype: "bfloat16" keeps memories in half the bytes, where a layer's can be; None: as the state has them.
        state_rounding: How bfloat16 memories are rounded: "nearest", or "stochastic" with positions as seeds.
        state_every: Write memories at every n-th token alone, 2 .. 16, where a layer's can be (lineate.Ring); 8 moves
            .6 of the bytes of the memories. For steps of many rows on a GPU, where it should be measured
            (docs/speed.md). On a CPU steps then run in torch. None: at every token.
        debug: Whether every call checks that the model is as it was prepared, and raises if it is not.
        batch_invariant: Whether a row has the same logits, to the bit, whatever other rows the decoder has, and at
            whatever index. Parts of a model that have no kernels for this make all rows run one by one
            (`rows_together`). See docs/generate.md for what is covered.
    """

    def __init__(
        self,
        model: HybridLM,
        state: ModelState,
        room: int,
        *,
        graph: bool = True,
        state_dtype: str | torch.dtype | None = None,
        state_rounding: str = NEAREST,
        state_every: int | None = None,
        debug: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        if not isinstance(state, ModelState):
            raise TypeError(f"state must be a ModelState, got {type(state).__name__}; pass LMOutput.state of a prefill")
        check_state(state, model.layers, state.rows)
        if not state.rows:
            raise ValueError("state must have at least one row, got none")
        if isinstance(room, bool) or not isinstance(room, int) or room < 1:
            raise ValueError(f"room must be an int of at least 1, the tokens to make room for, got {room!r}")
        check_flag("graph", graph)
        check_flag("debug", debug)
        check_flag("batch_invariant", batch_invariant)
        if model.context is not None:
            raise ValueError("model must not be under context parallelism to decode; use a copy on one device")
        if batch_invariant:
            check_invariant(model)
        self.batch_invariant = batch_invariant
        self._format = StateFormat.of(state_dtype, state_rounding)
        if state_dtype is not None:
            state = model.convert_state(state, state_dtype)
        self.model, self.rows = model, state.rows
        self._room, self._graph, self._debug = room, graph, debug
        device = model.device.type
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self._every = check_state_every(state_every)
        if self._every is not None and self._autocast[0]:
            raise ValueError(
                f"state_every must be None under autocast, got {state_every}; convert the model, as by model.bfloat16()"
            )
        if self._every is not None and batch_invariant:
            raise ValueError(
                f"state_every must be None with batch_invariant=True, got {state_every}; leave one of them out"
            )
        self.kept: list[int] = list(range(self.rows))
        """The rows that are left, by their numbers in the state that the decoder began with."""
        self._prepare(state, 0)

    def __deepcopy__(self, copied: dict[int, Any]) -> "Decoder":
        other = copy(self)
        copied[id(self)] = other
        other.model = deepcopy(self.model, copied)
        other.kept = list(self.kept)
        other._prepare(self.state, *self._steps.done)
        return other

    def refresh(self) -> None:
        """Prepare the step again, after the model was changed: read its modules, bind the states, record the graph."""
        self._prepare(self.state, *self._steps.done)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepare(self, state: ModelState, reads: int, logits: Tensor | None = None) -> None:
        # Keep the weights alive even if the model is deleted: the step reads them at their addresses.
        weights = [x.detach() for x in (*self.model.parameters(), *self.model.buffers())]
        verified = Verified(self.model) if self._debug else None
        steps = self._made(state, reads)
        steps.done = reads, logits
        self._weights, self._verified, self._steps, self.rows = weights, verified, steps, state.rows

    def _made(self, state: ModelState, reads: int) -> NativeDecoding | DecodingInPlace:
        step = None if self._every is not None else PreparedStep.of(self.model)
        if step is not None and step.computes_all and reads_rows(state.rows, self._format):
            native = NativeDecoding(step.plan, state, self._room, self._format, reads)
            if native.fits:
                return native
        return DecodingInPlace(
            self.model,
            state,
            self._room,
            self._format,
            self._autocast,
            self._graph,
            step,
            reads,
            self._every,
            self.batch_invariant,
        )

    def __call__(self, ids: Tensor) -> Tensor:
        """Read one token of every row. Where C computes the model, a call that raises changes nothing.

        Args:
            ids: Tokens `b 1`.

        Returns:
            Logits `b 1 vocab` in a new tensor, which later calls do not overwrite.
        """
        if self._verified is not None:
            self._verified.check()
        if isinstance(self._steps, NativeDecoding):
            return self._read(self._steps, ids)
        self._check(ids)
        return self._steps.read(ids)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read(self, steps: NativeDecoding, ids: Tensor) -> Tensor:
        if steps.is_full:
            steps = steps.grown(2 * self._room)
            self._steps, self._room = steps, 2 * self._room
        logits = steps.read(ids) if steps.accepts(ids) else None
        if logits is None:  # ids of another dtype, or wrong ones
            self._check(ids)
            logits = steps.read(ids.to("cpu", torch.int64))
        assert logits is not None
        return logits

    def _check(self, ids: Tensor) -> None:
        check_ids(ids, self.model.config.vocab_size)
        if ids.shape != (self.rows, 1):
            raise ValueError(f"ids must have shape (b, 1) = {(self.rows, 1)}, got {tuple(ids.shape)}")

    @property
    def captured(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return isinstance(self._steps, DecodingInPlace) and self._steps.captured

    @property
    def computes_all(self) -> bool:
        """Whether C computes the logits from the ids, so that no module is called."""
        return isinstance(self._steps, NativeDecoding)

    @property
    def rows_together(self) -> int:
        """How many rows a step computes together: all of them, unless batch_invariant needs smaller groups."""
        return self._steps.together if isinstance(self._steps, DecodingInPlace) else self.rows

    @property
    def reads(self) -> int:
        """How many tokens of every row were read."""
        return self._steps.reads

    @property
    def state(self) -> ModelState:
        """The state after the last call, as a copy that later calls do not change."""
        return self._steps.state()

    def repeat(self, reads: int) -> Tensor | None:
        """Return the logits of the last call if it was one more than `reads`; else None, and the next call is that one.

        So a caller that was interrupted between a call and what it does with the logits goes on without reading twice.
        """
        return self._steps.done[1] if self.reads > reads else None

    def rewinds(self, reads: int) -> bool:
        """Whether state_before(reads) and row(row, reads) have a state: always after all calls, and after all but the
        last where C computes the model and has just read."""
        return self._steps.has(reads)

    def state_before(self, reads: int) -> ModelState:
        """Return the state after `reads` calls, see `rewinds`."""
        self._check_rewinds(reads)
        return self._steps.state(reads)

    def row(self, row: int, reads: int | None = None) -> ModelState:
        """Return a copy of the state of one row after `reads` calls, see `rewinds`; None: after all of them."""
        reads = self.reads if reads is None else reads
        self._check_rewinds(reads)
        if not self._is_row(row):
            raise ValueError(f"row must be one of 0 .. {self.rows - 1}, got {row!r}")
        return self._steps.row(row, reads)

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(self, rows: Sequence[int], reads: int | None = None) -> None:
        """Go on with these rows alone, in this order, from their state after `reads` calls (None: all of them).

        Where C computes the model, this costs a copy of their states; on a GPU the graph is recorded again. If it
        fails, nothing has changed.
        """
        reads = self.reads if reads is None else reads
        self._check_rewinds(reads)
        if not rows or not all(map(self._is_row, rows)):
            raise ValueError(f"rows must be at least one of 0 .. {self.rows - 1}, got {list(rows)}")
        at, kept = torch.tensor(list(rows), dtype=torch.int64, device="cpu"), [self.kept[row] for row in rows]
        if isinstance(self._steps, NativeDecoding):
            steps: NativeDecoding | DecodingInPlace = self._steps.kept(at, reads, self._room)
        else:
            steps = self._made(self._steps.state().select(at.to(self.model.device)), reads)
        self._steps, self.kept, self.rows = steps, kept, len(kept)

    def _is_row(self, row: object) -> bool:
        return isinstance(row, int) and not isinstance(row, bool) and 0 <= row < self.rows

    def _check_rewinds(self, reads: int) -> None:
        if not self.rewinds(reads):
            raise ValueError(
                f"reads must be {self.reads}, the number of calls, or one less where C computes the model and has "
                f"just read, got {reads}"
            )
