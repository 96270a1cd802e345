"""The states of a decoder on a CPU where C computes the whole model.

Each memory is written next to the one that was read, so that a call that is interrupted, as by Ctrl-C, changes nothing.
"""

import torch
from torch import Tensor

from lineate.decoding.in_place import caches_in_place, copied, round_up
from lineate.decoding.prepared import are_plain
from lineate.layers import LayerState, Memory, TokenCache
from lineate.layers.formats import StateFormat
from lineate.layers.step.native import turn_on
from lineate.models.state import ModelState
from lineate.models.stepping import BoundStep, Plan, bind_states, run_tokens


class NativeDecoding:
    """The states of a decoder that C computes whole.

    Every memory is kept twice: a read goes from one copy to the other. What has been read is one number, which changes
    last, so that an interrupted read can be repeated.

    Args:
        plan: How the model reads a token; it is whole, and `prepared.reads_rows` holds for these rows and memories.
        state: The state to continue from.
        room: How many more tokens there will be memory for.
        format: How the memories are kept.
        reads: How many tokens were read before.
    """

    def __init__(self, plan: Plan, state: ModelState, room: int, format: StateFormat, reads: int = 0) -> None:
        self.plan, self.rows, self._format = plan, state.rows, format
        self._from, self._even = reads, isinstance(state.lengths, int)
        self._start = torch.empty(self.rows, dtype=torch.int64, device="cpu")
        self._start.copy_(torch.as_tensor(state.lengths))
        self._longest = int(self._start.max())
        self.capacity = round_up(self._longest + room, 64)
        self._caches = {n: self._roomy(x) for n, x in enumerate(state.layers) if isinstance(x, TokenCache)}
        memories = {n: x for n, x in enumerate(state.layers) if isinstance(x, Memory)}
        self._sides = tuple(
            {n: {name: own[name].clone() for name in own.names} for n, own in memories.items()} for _ in range(2)
        )
        self._lengths = [self._start.clone() for _ in range(2)]
        bound = [self._bind(side) for side in range(2)]
        self._bound = [x for x in bound if x is not None]
        self.fits = len(self._bound) == 2
        """Whether C can use these states; else there is nothing to read."""
        self.done: tuple[int, Tensor | None] = reads, None
        """How many tokens were read, and the logits of the last one."""
        self._before = False
        """Whether the other copy has the state before the last read."""

    def _roomy(self, cache: TokenCache) -> dict[str, Tensor]:
        made = {}
        for name in cache.names:  # zeros, since masked entries must be finite
            old = cache[name][:, : self._longest]
            made[name] = old.new_zeros(self.rows, self.capacity, *old.shape[2:])
            made[name][:, : self._longest] = old
        return made

    def _bind(self, side: int) -> BoundStep | None:
        """Return the step that reads the memories of a side and writes those of the other."""
        given, into, lengths = self._sides[side], self._sides[1 - side], self._lengths[side]
        layers: dict[int, LayerState] = {n: Memory(own, into=into[n]) for n, own in given.items()}
        layers |= caches_in_place(self._caches, self.capacity, 1, (lengths, lengths + 1), {})
        return bind_states(self.plan, [layers[n] for n in range(len(layers))], self.rows, True)

    @property
    def is_full(self) -> bool:
        """Whether the caches have no room for another token."""
        return bool(self._caches) and self._longest + self.done[0] - self._from >= self.capacity

    def grown(self, room: int) -> "NativeDecoding":
        """Return a copy with room for more tokens."""
        reads = self.done[0]
        made = NativeDecoding(self.plan, self.state(reads), room, self._format, reads)
        made.done = self.done
        return made

    def accepts(self, ids: Tensor) -> bool:
        """Whether ids are a plain int64 tensor `rows 1` on the CPU, outside of torch.func and torch.compile."""
        return are_plain(ids, self.rows)

    def read(self, ids: Tensor) -> Tensor | None:
        """Return the logits `rows 1 vocab` of ids `rows 1`; None, and nothing has changed, if one has no embedding."""
        reads = self.done[0]
        side = (reads - self._from) % 2
        bound = self._bound[side]
        torch.add(self._start, reads - self._from, out=self._lengths[side])
        turn_on(bound.shared)
        self._before, before = False, self._before
        logits = run_tokens(self.plan, bound, ids)
        if logits is None:
            self._before = before
        else:
            self.done, self._before = (reads + 1, logits), True
        return logits

    @property
    def reads(self) -> int:
        """How many tokens of every row were read."""
        return self.done[0]

    def has(self, reads: int) -> bool:
        """Whether the state after this number of reads is known: after all of them, or all but the last."""
        return reads == self.reads or (self._before and reads == self.reads - 1)

    def state(self, reads: int | None = None) -> ModelState:
        """Return a copy of the state after the given number of reads: all of them (None), or all but the last."""
        reads = self.reads if reads is None else reads
        more = reads - self._from
        assert self.has(reads)
        longest = self._longest + more
        lengths = longest if self._even else self._start + more
        return copied(self._sides[more % 2], self._caches, longest, lengths)

    def row(self, row: int, reads: int) -> ModelState:
        """Return a copy of the state of one row, as `state` does."""
        assert self.has(reads)
        more = reads - self._from
        n = int(self._start[row]) + more
        return copied(self._sides[more % 2], self._caches, n, n, slice(row, row + 1))

    def kept(self, rows: Tensor, reads: int, room: int) -> "NativeDecoding":
        """Return a copy with these rows alone, after the given number of reads; the model is not read again."""
        return NativeDecoding(self.plan, self.state(reads).select(rows), room, self._format, reads)
