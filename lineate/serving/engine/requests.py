"""Requests of the engine, their events, and handles."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from torch import Tensor

from lineate.generation.choice import Sampling
from lineate.serving.engine.progress import ReadingProgress


class Guide(Protocol):
    """Restricts the next token, for example to a grammar."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete; the request then ends."""
        ...

    def allowed(self, vocab: int) -> Tensor:
        """Return a mask of the allowed next tokens, `vocab` bool."""
        ...

    def advance(self, token: int) -> None:
        """Advance by a token."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        ...

    def copy(self) -> Self:
        """Return an independent copy of the guide in the same state."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and the options of its continuation.

    Args:
        ids: The tokens of the prompt, at least one.
        sampling: How tokens are chosen. Continuation i has the seed `sampling.seed + i`, so it equals the only
            continuation of a request with that seed.
        max_new_tokens: The most tokens of each continuation, 0 to read the prompt alone; None: as many as fit into the
            context.
        stop_tokens: Tokens that end a continuation; the token that was met is its last one.
        n: How many continuations of the prompt are made; the prompt is read once.
        logprobs: If an int, events have the log-probability of each token and of this number of the likeliest ones.
        guide: Restricts the tokens that can be chosen; each continuation gets a copy of it.
        timeout: Seconds after which the request ends, counted from its submission; None: never.
        prompt_logprobs: If an int, the first event of each continuation has the log-probability of each token of the
            prompt after the first, and of this number of the likeliest ones. The prompt is read whole, without the
            cache.
    """

    ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    n: int = 1
    logprobs: int | None = None
    guide: Guide | None = None
    timeout: float | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "stop_tokens", frozenset(self.stop_tokens))
        if not self.ids:
            raise ValueError("ids must have at least one token, got none")
        for name, lowest in (("max_new_tokens", 0), ("n", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            value = getattr(self, name)
            if value is None and name != "n":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} must be an int of at least {lowest}, got {value!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a chosen token under the model, before any sampling option.

    Args:
        token: The token.
        logprob: Its log-probability.
        top: The likeliest tokens and their log-probabilities, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Event:
    """News of one continuation of a request; it is not frozen because one is created for every token.

    Args:
        index: Which continuation, 0 .. n - 1.
        tokens: New tokens.
        logprobs: One entry for each new token, if the request asks for them.
        finished: None while the continuation runs; else why it ended: "stop" (a stop token, the guide, or
            Handle.stop), "length" (max_new_tokens), "cancelled" (Handle.cancel), "shutdown" (Engine.stop ended it),
            "timeout" or "error".
        error: The message, if finished is "error".
        cached_tokens: How many tokens of the prompt were not read, because their state was kept.
        prompt: The log-probabilities of the prompt's tokens after the first, in a first event, if they were requested.
    """

    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt: tuple[TokenLogprob, ...] | None = None


@dataclass
class Completion:
    """The result of a continuation.

    Args:
        tokens: Its tokens.
        logprobs: One entry for each token, if the request asks for them.
        finished: Why it ended; None if it has not.
        error: The message, if finished is "error".
        cached_tokens: How many tokens of the prompt were not read.
        prompt: The log-probabilities of the prompt's tokens after the first, if they were requested.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt: tuple[TokenLogprob, ...] | None = None

    def add(self, event: Event) -> None:
        """Add an event."""
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.finished, self.error, self.cached_tokens = event.finished, event.error, event.cached_tokens
        self.prompt = self.prompt if event.prompt is None else event.prompt


class QueueFull(Exception):
    """The engine's queue is full.

    Args:
        waiting: How many requests wait.
        retry_after: Seconds after which there will probably be room.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait already; try again in about {retry_after:.0f} s")
        self.waiting, self.retry_after = waiting, retry_after


class TooLong(ValueError):
    """A request needs more tokens than the context, or more memory than there is.

    Args:
        message: The requested size and the available one.
        fits: The number of tokens, prompt and continuation together, that would fit.
    """

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


class EngineStopped(RuntimeError):
    """The engine accepts no more requests, because it is stopping or has stopped."""


Listener = Callable[[Event], None]
Failed = Callable[..., None]
"""Receives a handled exception, the message to log it with, and the arguments of the message."""


class Handle:
    """A submitted request: its events, and the way to end it.

    Any thread may end it; one thread reads its events.

    Args:
        request: The request.
        number: Its number in the engine, in the order of submission.
        listener: Receives every event in the engine's thread; None: `events` yields them.
        wake: Called when the engine should check this handle.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        listener: Listener | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.request, self.number = request, number
        self._listener, self._wake = listener, wake
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put: Listener = self._events.put if listener is None else listener
        """Delivers an event; only the engine does so."""
        self._unfinished = request.n  # as far as events were read
        self.completions = [Completion() for _ in range(request.n)]
        """The results of the continuations, as far as events were read."""
        self.ending: dict[int, str] = {}
        """The continuations to end and the reasons; the engine checks them before each step."""
        self.progress = ReadingProgress(number, len(request.ids))
        """How far the prompt is read."""
        self.ended: set[int] = set()
        """The continuations whose last event was delivered."""

    def cancel(self, index: int | None = None) -> None:
        """End one continuation, or all, before the engine's next step. Its state is not kept.

        Args:
            index: Which continuation; None: all.
        """
        self._end(index, "cancelled")

    def shut_down(self) -> None:
        """End all continuations because the engine stops; their states are not kept."""
        self._end(None, "shutdown")

    def stop(self, index: int | None = None) -> None:
        """End one continuation, or all, as a stop token would: its state is kept for the next turn.

        Args:
            index: Which continuation; None: all.
        """
        self._end(index, "stop")

    def _end(self, index: int | None, finished: str) -> None:
        if index is not None and not 0 <= index < self.request.n:
            raise ValueError(f"index must be that of a continuation, 0 .. {self.request.n - 1}, got {index}")
        for n in range(self.request.n) if index is None else [index]:
            self.ending.setdefault(n, finished)
        self._wake()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Yield events until all continuations have ended; wait for each.

        Args:
            timeout: Seconds to wait for the next event; then TimeoutError is raised. None: for ever.
        """
        while self._unfinished:
            yield self._next(timeout)

    def pending(self) -> list[Event]:
        """Return the events that have arrived, without waiting."""
        found = []
        while not self._events.empty():
            found.append(self._next(0))
        return found

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Wait until all continuations have ended, and return them, with the events that were read before.

        Args:
            timeout: Seconds to wait in all; then TimeoutError is raised. None: for ever.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._unfinished:
            self._next(None if until is None else max(until - time.monotonic(), 0))
        return self.completions

    def _next(self, timeout: float | None) -> Event:
        if self._listener is not None:
            raise RuntimeError(f"the events of request {self.number} go to its listener; submit it without one")
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"no event of request {self.number} within {timeout} s") from None
        self._unfinished -= event.finished is not None
        self.completions[event.index].add(event)
        return event
