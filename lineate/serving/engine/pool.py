"""The rows that decode together, in tensors that are written in place.

Rows 0 .. len(pool) - 1 run. A row joins after the last one; when a row leaves, the last one moves into its place. So
the running rows are always the first ones, and a step reads a prefix of every tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lineate.decoding.in_place import read_in_place, round_up, state_in_place
from lineate.decoding.invariant import check_invariant, read_in_groups, rows_together
from lineate.decoding.prepared import PreparedStep
from lineate.decoding.rows import RowSteps, RowTensors
from lineate.generation.drawing import on_device
from lineate.layers import LayerState, Memory, TensorSpec, TokenCache
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.layers.softmax import WINDOW
from lineate.models import HybridLM, ModelState
from lineate.models.trail import ModelTrail

ROW_NUMBERS = (1, 4)
"""The number of int64 that a row has besides its state, on a CPU and on a GPU: its length; its next token, whether it
runs, and how many tokens of a trail it keeps."""


class Pool:
    """The states of the running rows; a step reads one token of each.

        pool = Pool(model, rows=8, capacity=4096)
        row = pool.join(state)                       # a ModelState of one row
        logits = pool.step([token])                  # one token of each running row -> rows vocab
        state = pool.row(row)                        # a copy
        moved = pool.leave(row)                      # the row that is `row` now, or None

    On a CPU, memories have only the running rows, and what C computes of the model is read from it when the first row
    joins: while rows run, only values may be written into its weights. On a GPU all tensors stay at their addresses,
    and a step is a CUDA graph, one for each number of rows (rounded up to a power of two) and window of the caches.

    Args:
        model: The model, in eval mode; the states have the dtypes of its state_spec.
        rows: The most rows that can run.
        capacity: The most tokens that a row can have.
        poison: Whether a row that leaves is overwritten with NaN, so that tests detect later reads.
        format: The format of the memories; a joining state is converted, and row returns it in this format.
        batch_invariant: Whether the bits of a row's logits may not depend on the other rows (decoding/invariant.py).
    """

    def __init__(
        self,
        model: HybridLM,
        rows: int,
        capacity: int,
        *,
        poison: bool = False,
        format: StateFormat = AS_COMPUTED,
        batch_invariant: bool = False,
    ) -> None:
        for name, value in (("rows", rows), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if model.context is not None:
            raise ValueError("model must not be under context parallelism to decode; use a copy on one device")
        if batch_invariant:
            check_invariant(model)
        self.model, self.poison, self.format, self.batch_invariant = model, poison, format, batch_invariant
        self._specs = format.specs(model.state_spec)
        self.device = model.device
        self.lengths: list[int] = []
        """The tokens that each running row has read."""
        self.hidden: Tensor | None = None
        """The inputs of the model's head in the last step or speculative pass, `rows t hidden`.

        None after a step that C computes entirely.
        """
        self._grows = model.device.type != "cuda"  # memories have only the running rows
        self._steps: RowSteps | None = None
        self._graphed = True  # unless a step cannot be recorded
        self._allocate(rows, capacity)

    @torch.inference_mode(False)
    def _allocate(self, rows: int, capacity: int) -> None:
        """Make the tensors of an empty pool; cached entries must be finite even where they are masked."""
        assert not self.lengths
        self.rows, self.capacity = rows, capacity
        self._memories: dict[int, dict[str, Tensor]] = {}
        self._caches: dict[int, dict[str, Tensor]] = {}
        for n, specs in enumerate(self._specs):
            if is_cache(specs):
                self._caches[n] = {spec.name: self._cache(spec, rows, capacity) for spec in specs}
            else:
                kept = 0 if self._grows else rows
                self._memories[n] = {
                    spec.name: torch.zeros((kept, *map(int, spec.shape)), dtype=spec.dtype, device=self.device)
                    for spec in specs
                }
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._used = [0] * rows  # how many cached entries of each row may differ from 0, beyond its length
        self._trail: tuple[ModelTrail, ModelState] | RowSteps | None = None  # what accepts it
        self._prepared: PreparedStep | None = None
        self._window = 0  # of the caches that the prepared step is bound to
        if not self._grows:
            self._steps = self._new_steps()

    def _new_steps(self) -> RowSteps:
        return RowSteps(self.model, self._tensors, self._graphed, invariant=self.batch_invariant)

    @property
    def _tensors(self) -> RowTensors:
        return RowTensors(self._memories, self._caches, self._lengths, self.capacity, self.format)

    def _free_steps(self) -> None:
        """Free the graphs and the tensors that they keep alive, after the device has replayed them."""
        if self._steps is not None:
            torch.cuda.synchronize(self.device)
            self._graphed = self._steps.graphed
            self._steps = None

    def _cache(self, spec: TensorSpec, rows: int, capacity: int) -> Tensor:
        sizes = [capacity if size == "t" else int(size) for size in spec.shape]
        return torch.zeros((rows, *sizes), dtype=spec.dtype, device=self.device)

    def __len__(self) -> int:
        """Return how many rows run."""
        return len(self.lengths)

    @property
    def on_trail(self) -> bool:
        """Whether tokens of a trail are still to be accepted."""
        return self._trail is not None

    @property
    def positions(self) -> Tensor:
        """The index of the next token of each running row in its sequence, `rows`, on the pool's device."""
        return self._lengths[: len(self)]

    @property
    def waits(self) -> bool:
        """Whether step is synchronous; on a GPU it returns before the tokens have been read."""
        return self._grows

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the pool has allocated."""
        states = (x for each in (self._memories, self._caches) for own in each.values() for x in own.values())
        inputs = [] if self._steps is None else self._steps.tensors
        return [*states, self._lengths, *inputs]

    @property
    def allocated(self) -> int:
        """The bytes of all tensors; on a CPU, `nbytes(rows, capacity)` less the memories of rows that do not run."""
        return sum(x.nbytes for x in self.tensors)

    def nbytes(self, rows: int, capacity: int) -> int:
        """Return the bytes of a pool with the given rows, all running, and capacity."""
        numbers = ROW_NUMBERS[not self._grows]
        return rows * (sum(spec.nbytes(capacity) for layer in self._specs for spec in layer) + 8 * numbers)

    def resize_nbytes(self, rows: int, capacity: int) -> int:
        """Return the most bytes that are allocated at any moment of resize(rows, capacity)."""
        if not self.lengths:
            return self.nbytes(rows, capacity)
        old = [x.nbytes for own in self._caches.values() for x in own.values()]
        specs = [spec for n in self._caches for spec in self._specs[n]]
        new = [rows * spec.nbytes(capacity) for spec in specs]
        rest = max(self.nbytes(rows, 0), self.nbytes(self.rows, 0))
        rest += 8 * rows if self._grows else self.nbytes(rows, 0)
        if not old:
            return rest
        return rest + max(sum(new[: i + 1]) + sum(old[i:]) for i in range(len(old)))

    @torch.inference_mode(False)
    @torch.no_grad()
    def resize(self, rows: int, capacity: int) -> None:
        """Allocate other tensors, one after another, and move the running rows into them.

        Args:
            rows: The most rows that can run, at least those that do.
            capacity: The most tokens that a row can have, at least those that running rows have.
        """
        running = len(self)
        if rows < running or capacity < max(self.lengths, default=0):
            raise ValueError(
                f"rows and capacity must be at least those that run, {running} and {max(self.lengths, default=0)}, "
                f"got {rows} and {capacity}"
            )
        self._free_steps()
        self._unbind()
        if not running:
            self._memories = self._caches = {}  # freed before the new ones are allocated
            self._allocate(rows, capacity)
            return
        used = max(self.lengths)
        self._note_used()
        for n, own in self._caches.items():
            for spec in self._specs[n]:
                new = self._cache(spec, rows, capacity)
                new[:running, :used] = own[spec.name][:running, :used]
                own[spec.name] = new
        self._used = [min(n, used) for n in self._used[:running]] + [0] * (rows - running)
        if not self._grows:
            for own in self._memories.values():
                for name, x in own.items():
                    own[name] = x.new_zeros(rows, *x.shape[1:])
                    own[name][:running] = x[:running]
        lengths = self._lengths.new_zeros(rows)
        lengths[:running] = self._lengths[:running]
        self._lengths, self.rows, self.capacity = lengths, rows, capacity
        if not self._grows:
            self._steps = self._new_steps()
            self._steps.runs[:running].fill_(1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def join(self, state: ModelState, count: int = 1) -> int:
        """Add a row, or `count` rows that continue from the same state; return the number of the first.

        Args:
            state: The state of one row; it is copied.
            count: How many rows begin from it.
        """
        self._check_settled()
        self._unbind()
        n, row = int(state.lengths), len(self)
        if self._grows and not row and (self._prepared is None or not self._prepared.is_current):
            self._prepared = PreparedStep.of(self.model, self.model.prediction is not None)
        if state.rows != 1:
            raise ValueError(f"state must have one row, got {state.rows}; join them one after another")
        if count < 1 or row + count > self.rows:
            raise ValueError(f"count must be between 1 and the {self.rows - row} free rows, got {count}")
        if n > self.capacity:
            raise ValueError(f"state must have at most capacity = {self.capacity} tokens, got {n}")
        if self._grows:  # all are computed before any is exchanged, so that a failure changes nothing
            self._memories = {
                layer: {name: torch.cat([x, *[state.layers[layer][name].to(x)] * count]) for name, x in memory.items()}
                for layer, memory in self._memories.items()
            }
        else:
            for layer, memory in self._memories.items():
                for name, x in memory.items():
                    x[row : row + count] = state.layers[layer][name].to(x)
        rows = slice(row, row + count)
        for layer, cache in self._caches.items():
            for name, x in cache.items():
                x[rows, :n] = state.layers[layer][name][:, :n].to(x)
                x[rows, n : max(self._used[rows])].zero_()
        self._lengths[rows].fill_(n)  # assigning a Python number would wait for the device
        if self._steps is not None:
            self._steps.runs[rows].fill_(1)
        self._used[rows] = [n] * count
        self.lengths += [n] * count
        return row

    @torch.inference_mode(False)
    @torch.no_grad()
    def leave(self, row: int) -> int | None:
        """Remove a row; return the row that has moved into its place, or None if it was the last.

        Args:
            row: A running row.
        """
        self._check_settled()
        self._unbind()
        self._check_row(row)
        self._note_used()
        last = len(self) - 1
        n, used = self.lengths[last], self._used[row]
        memories = [x for own in self._memories.values() for x in own.values()]
        caches = [x for own in self._caches.values() for x in own.values()]
        if self._grows:
            rest = [*range(row), *([last] if row < last else []), *range(row + 1, last)]
            kept = torch.tensor(rest, dtype=torch.int64, device=self.device)
            for memory in self._memories.values():
                memory.update({name: x.index_select(0, kept) for name, x in memory.items()})
        elif row < last:
            copy_all([x[row] for x in memories], [x[last] for x in memories])
        if row < last:
            copy_all([x[row, :n] for x in caches], [x[last, :n] for x in caches])
            for x in caches if n < used else []:
                x[row, n:used].zero_()
        for x in caches if self._grows else [*memories, *caches]:
            self._overwrite(x[last])
        if row < last:
            self._lengths[row] = self._lengths[last]
            self.lengths[row], self._used[row] = n, n
        self._lengths[last].zero_()
        if self._steps is not None:
            self._steps.runs[last].zero_()
        if self.poison:
            self._used[last] = self.capacity
        self.lengths.pop()
        return last if row < last else None

    def _note_used(self) -> None:
        """Count the entries that running rows have written step by step."""
        self._used[: len(self)] = map(max, self._used, self.lengths)

    def _overwrite(self, x: Tensor) -> None:
        if self.poison:
            x.fill_(float("nan") if x.is_floating_point() else 0)

    def clear(self) -> None:
        """Remove all rows, in any state after a failed step."""
        self._trail = None
        rows, capacity = self.rows, self.capacity
        self.lengths.clear()
        self._free_steps()
        self._memories = self._caches = {}
        self._allocate(rows, capacity)

    @torch.inference_mode(False)
    @torch.no_grad()
    def row(self, row: int) -> ModelState:
        """Return the state of a row, as a copy.

        Args:
            row: A running row.
        """
        self._check_settled()
        self._check_row(row)
        n, layers = self.lengths[row], []
        for layer in range(len(self.model.layers)):
            new: LayerState
            if layer in self._memories:
                new = Memory({name: x[row : row + 1].clone() for name, x in self._memories[layer].items()})
            else:
                new = TokenCache({name: x[row : row + 1, :n].clone() for name, x in self._caches[layer].items()}, n)
            layers.append(new)
        return ModelState(tuple(layers), n)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Read one token of every row; return logits `rows vocab`, which later calls do not overwrite.

        On a GPU, nothing waits for the device; rows may join and leave while it computes.

        Args:
            ids: One token of each running row; a tensor has int64 `rows` on the pool's device.
        """
        self._check_settled()
        self._check_room(len(ids), 1)
        tokens = (ids if isinstance(ids, Tensor) else on_device(ids, torch.int64, self.device))[:, None]
        logits, hidden = self._read(tokens) if self._steps is None else self._steps.step(tokens, max(self.lengths))
        self.hidden = None if hidden is None else hidden[: len(self)]
        self.lengths = [n + 1 for n in self.lengths]
        return logits[: len(self), 0]

    @torch.inference_mode(False)
    @torch.no_grad()
    def trail(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Read several tokens of every row in one pass; return logits `rows t vocab`. Then call accept.

        Args:
            ids: t tokens of each running row: those that are certain first, then guesses.
        """
        self._check_settled()
        if self.batch_invariant:
            raise RuntimeError("a pool with batch_invariant=True reads one token of each row at a time; call step")
        tokens = self._new_ids([list(own) for own in ids])
        rows = len(self)
        found = None if self._steps is None else self._steps.trail(tokens, max(self.lengths))
        if found is None:
            logits, hidden, t = *self._read_trail(tokens), tokens.shape[1]
        else:
            (logits, hidden), t = found
            self._trail = self._steps
        self._used[:rows] = (max(used, n + t) for used, n in zip(self._used, self.lengths, strict=False))
        self.hidden = hidden[:rows, : tokens.shape[1]]
        return logits[:rows, : tokens.shape[1]]

    @torch.inference_mode(False)
    @torch.no_grad()
    def accept(self, counts: Sequence[int]) -> None:
        """Keep the first counts[r] tokens that the last trail read of row r, and take back the others.

        Args:
            counts: One number of tokens for each running row, 0 .. t.
        """
        if self._trail is None:
            raise RuntimeError("there are no tokens to accept; call trail first")
        self._unbind()
        taken = torch.tensor(counts, dtype=torch.int64).to(self.device)
        trail, self._trail = self._trail, None
        if isinstance(trail, RowSteps):
            trail.accept(taken)
        else:
            new = trail[0].after(taken, None if self._grows else trail[1])
            if self._grows:
                self._memories = {n: dict(new.layers[n].tensors) for n in self._memories}
            self._lengths[: len(counts)] += taken
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    def record(self, guesses: int = 0) -> None:
        """Record the steps of every number of rows on a GPU, so that no request waits for it; on a CPU do nothing.

        Args:
            guesses: The most guesses that trails will read; 0: there will be none.
        """
        self._check_settled()
        if self._steps is not None:
            self._steps.record(guesses)

    def _new_ids(self, ids: list[list[int]]) -> Tensor:
        """Return ids `rows t`; raise unless there are some for each row, and room for them."""
        if any(len(own) != len(ids[0]) for own in ids):
            raise ValueError(f"ids must have as many tokens for each row, got {[len(own) for own in ids]}")
        self._check_room(len(ids), len(ids[0]) if ids else 0)
        return torch.tensor(ids, dtype=torch.int64).to(self.device)

    def _check_room(self, rows: int, t: int) -> None:
        """Raise unless there are tokens of each row, and room for t of them."""
        if rows != len(self) or not rows:
            raise ValueError(f"ids must have one entry for each of the {len(self)} running rows, got {rows}")
        if max(self.lengths) + t > self.capacity:
            raise ValueError(
                f"a row has {max(self.lengths)} tokens, and {t} more than the capacity of {self.capacity} "
                "allows; resize the pool"
            )

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read ids `rows 1` on a CPU."""
        if self._prepared is not None and self._bind(self._prepared) and self._prepared.accepts(ids):
            return self._prepared.read(ids)
        self._unbind()  # the call moves memories
        if self.batch_invariant:
            return self._read_invariant(ids)
        state = self._state_in_place(1)
        read = read_in_place(self.model, ids, state, (False, torch.bfloat16))
        for n in self._memories:
            self._memories[n] = dict(read.state.layers[n].tensors)
        self._lengths[: len(ids)] += 1
        return read.logits, read.hidden

    def _read_invariant(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(ids)
        states = *self._tensors.first(rows), self._lengths[:rows]
        found = read_in_groups(self.model, ids, states, self._windowed(1), self.format, rows_together(self.model))
        self._lengths[:rows] += 1
        return found

    def _bind(self, prepared: PreparedStep) -> bool:
        """Bind the prepared step to the tensors of the running rows, unless it is; return whether C can use them."""
        window = self._windowed(1)
        if not prepared.is_bound or window != self._window:
            rows, self._window = len(self), window
            _, caches = self._tensors.first(rows)
            prepared.bind(self._memories, caches, window, self._lengths[:rows], self.format, self.batch_invariant)
        return prepared.is_bound

    def _unbind(self) -> None:
        """Note that tensors move."""
        if self._prepared is not None:
            self._prepared.unbind()

    def _read_trail(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read ids `rows t`, without a graph; return logits and hidden."""
        state = self._state_in_place(ids.shape[1])
        out = self.model.trail(ids, state)
        self._trail = (out.trail, state)
        return out.logits, out.hidden

    def _state_in_place(self, t: int) -> ModelState:
        """Return the state of the running rows, whose next call reads t tokens."""
        rows = len(self)
        memories, caches = self._tensors.first(rows)
        return state_in_place(memories, caches, self._windowed(t), self._lengths[:rows], t, self.format)

    def _windowed(self, t: int) -> int:
        """Return how many entries of the caches attention reads on a CPU, with t new tokens."""
        return min(self.capacity, round_up(max(self.lengths) + t, WINDOW))

    def _check_settled(self) -> None:
        if self._trail is not None:
            raise RuntimeError("the tokens of a trail must be accepted or refused before anything else; call accept")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise ValueError(f"row must be a running one, 0 .. {len(self) - 1}, got {row}")


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others, with one launch for each dtype on a GPU."""
    for dtype in {x.dtype for x in targets}:
        which = [n for n, x in enumerate(targets) if x.dtype == dtype]
        torch._foreach_copy_([targets[n] for n in which], [sources[n] for n in which])


def is_cache(specs: Sequence[TensorSpec]) -> bool:
    """Whether the state of a layer has one entry a token."""
    return any("t" in spec.shape for spec in specs)
