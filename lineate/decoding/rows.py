"""Steps of rows whose states stay where they are; on a GPU each is a CUDA graph, which replays without the host.

There is one graph for each number of rows, of tokens, and window of the caches. A graph replays its launches at the
same addresses. So the tensors keep their addresses, idle rows are part of the step too (their length stays 0), and the
numbers of rows and guesses are rounded up to powers of two, so that few graphs are needed.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lineate.decoding import in_place
from lineate.decoding.in_place import (
    Graph,
    Tensors,
    capture,
    capture_all,
    read_in_place,
    round_up,
    state_in_place,
    try_out,
    write_back,
)  # fmt: skip
from lineate.decoding.invariant import read_in_groups, rows_together
from lineate.decoding.rings import MemoryRings
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.layers.projection import run_own_forwards
from lineate.layers.registry import kind_of
from lineate.layers.softmax import reads_own_length
from lineate.layers.step.supported_modules import are_unchanged
from lineate.models import HybridLM, ModelState
from lineate.models.trail import ModelTrail
from lineate.torch_ops.invariance import NotInvariant

MOST_GRAPHS = 48
"""The most steps of a pool of rows whose graphs are kept at a time."""

logger = logging.getLogger(__name__)
Step = TypeVar("Step")


def can_be_recorded(model: HybridLM) -> bool:
    """Whether replaying a graph of the model does all that calling it does, as far as that is known beforehand.

    Hooks, modules of other libraries and methods set on a module may do something in Python for every token, and
    memories that learn read their position on the host.
    """
    return (
        model.is_plain
        and not torch.is_autocast_enabled("cuda")
        and torch.cuda.current_stream(model.device) == torch.cuda.default_stream(model.device)
        and not _has_any_global_hook()
        and are_unchanged()
        and all(kind.built_in and not kind.learns for kind in map(kind_of, set(model.config.letters)))
        and run_own_forwards(model)
        and all(x.is_cuda for x in model.parameters())
    )


class RowTensors(NamedTuple):
    """The tensors that the steps read and write.

    Args:
        memories: `rows ...` by layer and name.
        caches: `rows capacity ...` by layer and name.
        lengths: The tokens of each row, `rows`.
        capacity: The most tokens that a row can have.
        format: The format of the memories.
        rings: The tokens that the memories do not have yet; None: they are written at every token.
    """

    memories: Tensors
    caches: Tensors
    lengths: Tensor
    capacity: int
    format: StateFormat = AS_COMPUTED
    rings: MemoryRings | None = None

    def first(self, rows: int) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]]]:
        """Return the first rows of memories and caches."""
        memories, caches = (
            {n: {name: x[:rows] for name, x in own.items()} for n, own in each.items()} for each in self[:2]
        )
        return memories, caches


class Trail(NamedTuple):
    """A trail that was recorded; nothing else may be replayed between reading and accepting.

    Args:
        ids: The tokens that it reads, `rows t`.
        read: Reads them.
        accept: Keeps the first ones of each row.
    """

    ids: Tensor
    read: Graph
    accept: Graph


class RowSteps:
    """Reads tokens of rows in place.

    Args:
        model: The model.
        tensors: The states of the rows.
        graphed: Whether to record graphs on a GPU; False where the model is known to be one that cannot be recorded.
        autocast: Whether autocast is enabled, and its dtype.
        most_graphs: The most steps whose graphs are kept at a time.
        invariant: Whether a row's bits may not depend on the other rows (decoding/invariant.py).
    """

    def __init__(
        self,
        model: HybridLM,
        tensors: RowTensors,
        graphed: bool = True,
        autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16),
        most_graphs: int = MOST_GRAPHS,
        invariant: bool = False,
    ) -> None:
        on_gpu = tensors.lengths.is_cuda
        self.invariant = invariant
        self.together: int | None = rows_together(model) if invariant else None
        """The rows that run together in an invariant step; None: all."""
        self.tried = not (invariant and on_gpu)
        """Whether it is known if all parts of an invariant step have invariant kernels."""
        self.model, self.graphed = model, graphed and on_gpu and model.ranks is None  # sums over ranks are not recorded
        self._autocast, self._most = autocast, most_graphs
        self._given, self._lengths = tensors, tensors.lengths
        self._rows = len(tensors.lengths)
        self.ids = torch.zeros_like(tensors.lengths)[:, None]
        """The next token of each row, `rows 1`."""
        self.runs = torch.zeros_like(tensors.lengths)
        """1 for rows that run, `rows`."""
        self.counts = torch.zeros_like(tensors.lengths)
        """How many tokens of a trail each row keeps, `rows`; 0 except while a trail is accepted."""
        self._own_lengths: dict[int, bool] = {}  # whether attention reads only up to each row's length, by t
        self._kept: dict[Hashable, object] = {}
        # All graphs share the memory of their intermediate results: nothing of a replay is read after the next one.
        # A step that is the only one has memory of its own, which is freed with it.
        self._memory = torch.cuda.graph_pool_handle() if self.graphed and most_graphs > 1 else None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are allocated besides the pool's."""
        return [self.ids, self.runs, self.counts]

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, ids: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Read ids `rows 1`; return logits and the inputs of the head.

        Args:
            ids: One token of each running row.
            longest: The tokens of the longest row.
        """
        running = len(ids)
        self.ids[:running] = ids
        graph = self.prepare(running, longest)
        if graph is None and not self.tried:
            self._try(partial(try_out, partial(self._read, running, self._window(longest + 1, 1)), self._changing()))
        return self._read(running, self._window(longest + 1, 1)) if graph is None else graph.replay()

    def repeat(self, longest: int) -> tuple[Tensor, ...] | None:
        """Return copies of the results of the last step of all rows, if it was a graph.

        Args:
            longest: The tokens of the longest row before it.
        """
        graph = self._kept.get((self._rounded(self._rows), self._window(longest + 1, 1)))
        return tuple(x.clone() for x in graph.results) if isinstance(graph, Graph) else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self, running: int, longest: int) -> Graph | None:
        """Return the graph of the next step, recorded if need be; None: its launches are made one by one.

        Args:
            running: The number of running rows.
            longest: The tokens of the longest row.
        """
        rows, window = self._rounded(running), self._window(longest + 1, 1)
        return self._recorded((rows, window), partial(self._record_step, rows, window))

    @torch.inference_mode(False)
    @torch.no_grad()
    def trail(self, ids: Tensor, longest: int) -> tuple[tuple[Tensor, ...], int] | None:
        """Read ids `rows t`, padded to one more than a power of two; return logits and hidden, and the new t.

        Then call accept. None if the trail cannot be recorded, or is too long for the capacity.

        Args:
            ids: Tokens of each running row.
            longest: The tokens of the longest row.
        """
        assert not self.invariant, "a speculative pass is not invariant"
        running, t = len(ids), 1 + (1 << max(ids.shape[1] - 2, 0).bit_length())
        if longest + t > self._given.capacity:
            return None
        trail = self._prepare_trail(running, longest, t)
        if trail is None:
            return None
        trail.ids[:running, : ids.shape[1]] = ids
        self._accept = trail.accept
        return trail.read.replay(), t

    @torch.inference_mode(False)
    @torch.no_grad()
    def accept(self, counts: Tensor) -> None:
        """Keep the first tokens of each row of the last trail.

        Args:
            counts: One number for each running row.
        """
        self.counts[: len(counts)] = counts
        self._accept.graph.replay()
        self.counts.zero_()  # idle rows, and speculative passes that are recorded, accept nothing

    @torch.inference_mode(False)
    @torch.no_grad()
    def record(self, guesses: int = 0) -> None:
        """Record the steps of every number of rows.

        Args:
            guesses: The most guesses that trails will read; 0: there will be none.
        """
        numbers = sorted({min(1 << n, self._rows) for n in range(self._rows.bit_length() + 1)})
        counts = [1 << n for n in range(max(guesses - 1, 0).bit_length() + 1)] if guesses else []
        for rows in numbers:
            self.prepare(rows, 0)
            for t in (n + 1 for n in counts if n + 1 <= self._given.capacity):
                self._prepare_trail(rows, 0, t)

    def _prepare_trail(self, running: int, longest: int, t: int) -> Trail | None:
        """Return the trail of t tokens, recorded if need be, as prepare does."""
        rows, window = self._rounded(running), self._window(longest + t, t)
        return self._recorded((rows, window, t), partial(self._record_trail, rows, window, t))

    def _rounded(self, running: int) -> int:
        """Return the number of rows of a graph into which the running ones fit."""
        return min(self._rows, 1 << (running - 1).bit_length())

    def _window(self, needed: int, t: int) -> int:
        """Return the window of attention, in entries, for t new tokens.

        This is the capacity where kernels read only up to each row's length. Other windows grow by at least an eighth,
        so that few are needed.
        """
        capacity = self._given.capacity
        if t not in self._own_lengths:
            mixers = [self.model.layers[n].mixer for n in self._given.caches]
            self._own_lengths[t] = all(reads_own_length(mixer, t) for mixer in mixers)  # type: ignore[arg-type]
        if self._own_lengths[t]:
            return capacity
        window = step = in_place.WINDOW_STEP
        while window < needed:
            window = round_up(window + window // 8, step)
        return min(window, capacity)

    def _recorded(self, key: Hashable, record: Callable[[], Step]) -> Step | None:
        """Return a recorded step from a least-recently-used cache; None if the model cannot be recorded."""
        if not self.graphed:
            return None
        step = self._kept.pop(key, None)
        if step is None:
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            try:
                step = record()
            except RuntimeError as error:  # memories that learn read their position on the host, which a graph cannot
                logger.warning("this model decodes without CUDA graphs: %s", error)
                self.graphed = False
                return None
        self._kept[key] = step
        return step  # type: ignore[return-value]

    def _changing(self) -> list[Tensor]:
        """Return the tensors that a step changes; in the caches it writes only after the last token."""
        return [self._lengths, *(x for own in self._given.memories.values() for x in own.values())]

    def _try(self, run: Callable[[], Step]) -> Step:
        """Run an invariant step that is undone if it fails; if a part has no invariant kernels, rows run one by one."""
        try:
            made = run()
        except NotInvariant as reason:
            logger.warning("rows of this model decode one by one, as batch_invariant needs: it has %s", reason)
            self.together = 1
            made = run()
        self.tried = True
        return made

    def _read(self, rows: int, window: int) -> tuple[Tensor, ...]:
        """Read self.ids with the first rows, some of which may not run; those keep their length of 0."""
        memories, caches = self._given.first(rows)
        lengths = self._lengths[:rows]
        if self.invariant:
            states = memories, caches, lengths
            found = read_in_groups(self.model, self.ids[:rows], states, window, self._given.format, self.together)
            lengths += self.runs[:rows]
            return found
        state = state_in_place(memories, caches, window, lengths, format=self._given.format)
        if self._given.rings is not None:
            state = self._given.rings.added_to(state, rows)
        read = read_in_place(self.model, self.ids[:rows], state, self._autocast)
        write_back(memories, read.state)
        lengths += self.runs[:rows]
        return read.logits, read.hidden

    def _record_step(self, rows: int, window: int) -> Graph:
        """Record a step of the first rows."""

        def record() -> Graph:
            return capture(lambda: self._read(rows, window), self._changing(), self._lengths.device, self._memory)

        return record() if self.tried else self._try(record)

    def _record_trail(self, rows: int, window: int, t: int) -> Trail:
        """Record how a trail of the first rows is read, and how its first self.counts tokens are accepted."""
        ids = torch.zeros(rows, t, dtype=torch.int64, device=self._lengths.device)
        memories, caches = self._given.first(rows)
        trails: list[tuple[ModelTrail, ModelState]] = []

        def read() -> tuple[Tensor, ...]:
            state = state_in_place(memories, caches, window, self._lengths[:rows], t, self._given.format)
            out = self.model.trail(ids, state)
            trails[:] = [(out.trail, state)]
            return out.logits, out.hidden

        def accept() -> tuple[Tensor, ...]:
            trail, state = trails[0]
            trail.after(self.counts[:rows], state)
            self._lengths[:rows] += self.counts[:rows]
            return ()

        return Trail(ids, *capture_all([read, accept], self._changing(), ids.device, self._memory))
