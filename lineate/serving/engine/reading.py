"""Reading a prompt, one piece at a time, always in the same pieces.

A prompt is cut at the multiples of a spacing, counted from its first token. Each piece is read separately with b = 1,
so the state at a cut has the same bits in every run, and may be kept and continued later as if the prompt had been read
whole. Decoding tokens one by one rounds differently: decoded tokens are read again, in these pieces, before the state
after them is kept for others.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.models.reading import reserve
from lineate.serving.cache.cache import Found, StateCache
from lineate.serving.engine.requests import Failed

CPU_SPACING, GPU_SPACING, MOST_SPACING = 128, 1024, 4096
"""The spacing of a server whose options name none: on a CPU, on a GPU, and at most."""
ROWS_OF_AN_EXPERT = 128
"""The tokens of a piece that each expert should get on average: then a product with its weights takes longer than
reading them."""
NOT_KEPT = "the cache failed to keep the state of %d tokens"

logger = logging.getLogger(__name__)


def default_spacing(config: HybridConfig, on_gpu: bool) -> int:
    """Return the spacing of a server whose options name none.

    The spacing is both the number of tokens that are read at once and the distance of kept states: reading returns the
    state after its last token alone. Where few of many experts get a token, a GPU needs larger pieces.

    Args:
        config: The shape of the model.
        on_gpu: Whether it computes on a GPU.
    """
    if not on_gpu:
        return CPU_SPACING
    spacing, experts = GPU_SPACING, config.experts
    while (
        experts is not None and spacing < MOST_SPACING and spacing * experts.active < ROWS_OF_AN_EXPERT * experts.count
    ):
        spacing *= 2
    return spacing


def log_failure(error: Exception, message: str, *args: object) -> None:
    """Log a handled exception.

    Args:
        error: The exception.
        message: Its meaning.
        args: The arguments of the message.
    """
    logger.error(message, *args, exc_info=error)


class Reading:
    """A prompt that is being read.

        reading = Reading(model, ids, spacing=256, cache=cache)
        while not reading.done:
            reading.advance()
        reading.state, reading.logits

    Args:
        model: The model.
        ids: The prompt.
        spacing: The tokens of a piece.
        cache: Where states are looked up and kept; None: nowhere.
        clock: Returns seconds, to measure the cost of a state.
        failed: Called with an exception of the cache, without which the prompt is read, and the message to log it with.
    """

    def __init__(
        self,
        model: HybridLM,
        ids: tuple[int, ...],
        spacing: int,
        cache: StateCache | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        failed: Failed = log_failure,
    ) -> None:
        self.model, self.ids, self.spacing = model, ids, spacing
        self.cache, self.clock, self.failed = cache, clock, failed
        self.position = 0
        """How many tokens the state has read."""
        self.cached_tokens = 0
        """How many of them came from the cache."""
        self.read = 0
        """The number of tokens that were read, not found in the cache."""
        self.state: ModelState | None = None
        self.logits: Tensor | None = None
        """The logits of the last token, `vocab`, once all are read."""
        self.on_read: Callable[[int, Tensor], None] | None = None
        """Receives the inputs of the model's head of each piece, `n hidden`, and the index of its first token."""
        self.begun = False
        """Whether the cache was queried."""
        self.released = False
        """Whether the state was freed."""
        self.kept = False
        """Whether the cache has the state after the last piece."""

    @property
    def done(self) -> bool:
        """Whether the whole prompt is read."""
        return self.position == len(self.ids) and self.logits is not None

    @property
    def next_stop(self) -> int:
        """Where the next piece ends."""
        return min((self.position // self.spacing + 1) * self.spacing, len(self.ids))

    @property
    def nbytes(self) -> int:
        """The bytes of the state, with the room for the rest of the prompt."""
        layers = () if self.state is None else self.state.layers
        return sum(x.nbytes for layer in layers for x in layer.tensors.values())

    def shared_stop(self, other: "Reading") -> int:
        """Return the last position at which this prompt can continue from a state that reading the other one keeps."""
        low, high = 0, min(len(self.ids), len(other.ids))
        while low < high:  # how many first tokens are the same
            middle = (low + high + 1) // 2
            if self.ids[low:middle] == other.ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low if low == len(self.ids) == len(other.ids) else low - low % self.spacing

    def look_up(self) -> None:
        """Continue from the longest kept prefix, if it is longer than what has been read."""
        self.begun = True
        if self.cache is None:
            return
        try:
            found = self.cache.find(self.ids)
        except Exception as error:  # a prompt can always be read
            self.failed(error, "the cache failed to look up a prompt, which is read instead")
            return
        if found is not None and found.length > self.position:
            self._take(found)

    def _take(self, found: Found) -> None:
        whole = found.length == len(self.ids)
        self.state = found.state if whole else reserve(found.state, len(self.ids))
        self.position = self.cached_tokens = found.length
        self.logits = found.logits if whole else None

    def release(self) -> None:
        """Free the state, which is no longer needed."""
        self.state = self.logits = None
        self.released = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def advance(self) -> None:
        """Read the next piece, and keep the state after it. Nothing changes if the model fails."""
        if self.done:
            return
        stop = self.next_stop
        hidden, state, seconds = _read(self.model, self.ids[self.position : stop], self.state, self.clock)
        self.read += stop - self.position
        done = stop == len(self.ids)
        # A prompt may end where this one is cut; the head reads one token, the piece has a spacing of them.
        logits = self.model.logits(hidden[:, -1:])[0, -1] if done or self.cache is not None else None
        if self.on_read is not None:
            self.on_read(self.position, hidden[0])
        if self.state is None and not done:
            state = reserve(state, len(self.ids))
        self.state, self.position, self.logits = state, stop, logits if done else None
        if logits is None or bool(logits.isfinite().all()):  # results of a transient fault must not be kept
            self._keep(stop, state, logits, seconds)

    def _keep(self, stop: int, state: ModelState, logits: Tensor | None, seconds: float) -> None:
        """Keep a state in the cache, if there is one; the request continues without it if that fails."""
        self.kept = False
        try:
            if self.cache is not None:
                self.kept = self.cache.keep(self.ids[:stop], state, logits, seconds)
        except Exception as error:
            self.failed(error, NOT_KEPT, stop)


def _read(
    model: HybridLM, ids: tuple[int, ...], state: ModelState | None, clock: Callable[[], float]
) -> tuple[Tensor, ModelState, float]:
    """Read tokens after a state; return the inputs of the head, `1 n hidden`, the new state and the seconds."""
    begun = clock()
    tokens = torch.tensor([ids], device=model.device)
    hidden, new = model.hidden(model.embed(tokens), state)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return hidden, new, clock() - begun
