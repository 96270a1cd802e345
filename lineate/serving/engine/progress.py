"""How far the prompt of a request is read: for its client, who waits, and for the log."""

import logging

LOG = logging.getLogger("lineate.serving.progress")
"""Gets a line about each long prompt every PERIOD seconds; `lineate serve` prints them."""
PERIOD = 5.0
"""Seconds between two lines about a prompt; one that is read sooner has none."""


class ReadingProgress:
    """The progress of one prompt; the engine's thread writes it, and any thread may read it.

    Args:
        number: The number of the request, for the log.
        total: The tokens of the prompt.
    """

    def __init__(self, number: int, total: int) -> None:
        self.number, self.total = number, total
        self.tokens = 0
        """How many tokens are read, or came from the cache."""
        self._begun: tuple[float, int] | None = None  # the time and the tokens when reading began
        self._told: tuple[float, int] | None = None  # the same of the last line

    @property
    def reads(self) -> bool:
        """Whether reading has begun and has not ended."""
        return self._begun is not None and self.tokens < self.total

    def begin(self, tokens: int, now: float) -> None:
        """Note that reading begins.

        Args:
            tokens: How many tokens came from the cache.
            now: The time in seconds.
        """
        self.tokens, self._begun = tokens, (now, tokens)

    def note(self, tokens: int, now: float) -> None:
        """Note that a piece was read, and write a line to the log if one is due.

        Args:
            tokens: How many tokens are read in all.
            now: The time in seconds.
        """
        assert self._begun is not None
        self.tokens = tokens
        if tokens >= self.total:
            if self._told is not None:
                seconds, rate = _since(self._begun, tokens, now)
                LOG.info(
                    "request %d: read %d tokens in %.1f s, %.0f tokens/s",
                    self.number, tokens - self._begun[1], seconds, rate,
                )  # fmt: skip
            return
        seconds, rate = _since(self._told or self._begun, tokens, now)
        if seconds < PERIOD:
            return
        left = self._left(tokens, now)
        self._told = now, tokens
        LOG.info(
            "request %d: read %d of %d tokens, %.0f tokens/s, about %.0f s left",
            self.number, tokens, self.total, rate, left,
        )  # fmt: skip

    def _left(self, tokens: int, now: float) -> float:
        """Return about how many seconds the other tokens take: token n takes a + 2 b n, because attention reads more.

        a and b are those of the time since the last line and of the time before it.
        """
        assert self._begun is not None
        last = self._told or self._begun
        rate, growth = _since(last, tokens, now)[1], 0.0
        if last[1] > self._begun[1]:
            before = _since(self._begun, last[1], last[0])[1]
            growth = max(0.0, (1 / rate - 1 / before) / (tokens - self._begun[1]))
            growth = min(growth, 1 / rate / (tokens + last[1]))  # a is not negative
        return (self.total - tokens) * (1 / rate + growth * (self.total - last[1]))


def _since(before: tuple[float, int], tokens: int, now: float) -> tuple[float, float]:
    """Return the seconds since an earlier moment, and the tokens read in a second of them."""
    seconds = now - before[0]
    return seconds, (tokens - before[1]) / max(seconds, 1e-9)
