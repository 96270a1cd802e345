"""Plans which requests may run at the same time, from the bytes of their states, before anything is allocated.

    the pool               rows * (memories + capacity * bytes a token); while it is resized, both the old and the new
    a step                 the new memories of all rows, before the old ones are freed
    guesses                the states of a drafter that is a model
    a prompt being read    its state with room for the whole prompt, and a copy of what is kept on the way
    an answer read again   the same for its tokens, while there is no other work

A request is admitted when all of this fits into the memory, with its rows and its longest length; so no admitted
request ever runs out of memory. An answer that is read again frees its state when a request arrives, and is dropped if
it does not fit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lineate.decoding.in_place import round_up
from lineate.models import HybridLM
from lineate.serving.engine.pool import ROW_NUMBERS, Pool

CAPACITY_STEP = 64
"""Capacities are multiples of this many tokens."""


@dataclass(frozen=True)
class Need:
    """The needs of one request.

    Args:
        rows: The number of its rows.
        prompt: The tokens of its prompt.
        total: The most tokens that a row of it can have.
        reads: Whether its prompt is still to be read.
    """

    rows: int
    prompt: int
    total: int
    reads: bool


@dataclass(frozen=True)
class Shape:
    """A size of the pool.

    Args:
        rows: The most rows that can run.
        capacity: The most tokens that a row can have.
    """

    rows: int
    capacity: int


class Plan:
    """The bytes of requests, and the shape of the pool that they need.

    Args:
        model: The model.
        slots: The most rows that may run.
        context: The most tokens that a row may have.
        memory_bytes: The most bytes for the pool and for the prompts being read; None: no limit.
        margin: Tokens that a row may have beyond its request, for guesses that are refused.
        drafted: Returns the most bytes that a drafter keeps for a row of a number of tokens; None: it keeps none.
        state_dtype: The dtype of the pool's memories, as Engine has it; prompts are read as the layers compute.
    """

    def __init__(
        self,
        model: HybridLM,
        slots: int,
        context: int,
        memory_bytes: int | None,
        margin: int = 0,
        drafted: Callable[[int], int] | None = None,
        state_dtype: str | torch.dtype | None = None,
    ) -> None:
        self.model, self.slots, self.context = model, slots, context
        self.memory_bytes, self.margin, self.drafted = memory_bytes, margin, drafted
        self._memories = model.state_nbytes(1, 0, state_dtype)  # of a row of the pool
        self._computed = model.state_nbytes(1, 0)
        self._token = model.state_nbytes(1, 1) - self._computed

    def capacity(self, total: int) -> int:
        """Return the capacity of a pool whose longest row can have `total` tokens."""
        return round_up(total + self.margin, CAPACITY_STEP)

    def pool_nbytes(self, shape: Shape) -> int:
        """Return the bytes of a pool, and of the new memories of a step before the old ones are freed."""
        numbers = ROW_NUMBERS[self.model.device.type == "cuda"]
        versions = 1 if not self.margin else 2 + self.margin  # guesses: after each token, and the accepted memory
        made = versions * self._memories
        row = self._memories + shape.capacity * self._token
        return shape.rows * (row + numbers * 8 + made) + self._drafted_nbytes(shape)

    def _drafted_nbytes(self, shape: Shape) -> int:
        """Return the most bytes that the drafter keeps for all rows."""
        return 0 if self.drafted is None else shape.rows * self.drafted(shape.capacity)

    def _read_nbytes(self, tokens: int) -> int:
        """Return the bytes of a prompt of `tokens` tokens that is being read, with the kept copies."""
        return 2 * (self._computed + tokens * self._token)

    def reading_nbytes(self, need: Need) -> int:
        """Return the bytes of a prompt that is being read."""
        return self._read_nbytes(need.prompt) if need.reads else 0

    def first_shape(self) -> Shape:
        """Return the shape to begin with: all slots at the full context if they fit, else the smallest."""
        whole = Shape(self.slots, self.capacity(self.context))
        everything = self.pool_nbytes(whole) + self._read_nbytes(self.context)
        return whole if self._fits(everything) else Shape(1, CAPACITY_STEP)

    def shape_for(self, pool: Pool, needs: Iterable[Need]) -> Shape | None:
        """Return the shape that the pool must have for these requests, its own if that suffices; None if none fits.

        Args:
            pool: The current pool.
            needs: The needs of all requests that run, are read, or are to be admitted.
        """
        needs = list(needs)
        rows, capacity = sum(x.rows for x in needs), self.capacity(max(x.total for x in needs))
        if rows > self.slots:
            return None
        if rows <= pool.rows and capacity <= pool.capacity and self.has_room(pool, needs):
            return Shape(pool.rows, pool.capacity)
        reading = sum(map(self.reading_nbytes, needs))
        drafted = self._drafted_nbytes(Shape(pool.rows, pool.capacity))
        most = self.capacity(self.context)
        wishes = [(self.slots, most), (self.slots, min(2 * capacity, most)), (self.slots, capacity), (rows, capacity)]
        for wish in wishes:
            shape = Shape(*wish)
            if self._fits(max(pool.resize_nbytes(*wish) + drafted, self.pool_nbytes(shape)) + reading):
                return shape
        return None

    def has_room(self, pool: Pool, needs: Iterable[Need]) -> bool:
        """Whether the prompts of these requests may be read with the current pool.

        Args:
            pool: The current pool.
            needs: The needs of all requests that run or are read.
        """
        shape = Shape(pool.rows, pool.capacity)
        return self._fits(self.pool_nbytes(shape) + sum(map(self.reading_nbytes, needs)))

    def most_tokens(self, rows: int, prompt: int) -> int:
        """Return how many tokens a request can have if no other runs; fewer than its prompt: it does not fit."""
        low, high = 0, self.context
        while low < high:  # the greatest total that fits
            middle = (low + high + 1) // 2
            need = Need(rows, min(prompt, middle), middle, True)
            shape = Shape(rows, self.capacity(middle))
            if self._fits(self.pool_nbytes(shape) + self.reading_nbytes(need)):
                low = middle
            else:
                high = middle - 1
        return low

    def _fits(self, nbytes: int) -> bool:
        return self.memory_bytes is None or nbytes <= self.memory_bytes
