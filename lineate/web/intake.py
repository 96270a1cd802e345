"""The rate at which the bodies of requests are received, shared by all of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable

FREE_BYTES = 256 * 2**10
"""Bytes of each body that are received without a limit."""
BYTES_PER_SECOND = 16 * 2**20
"""Bytes per second of all bodies together, beyond the first bytes of each. Receiving and decoding them
takes the event loop and the interpreter's lock, which answers need: without a limit, 20 clients that send 8 MB each in
a loop made a chat ten times as slow."""


class Intake:
    """Limits the rate of long bodies; the connections of those that wait are not read, so that their clients wait too.

    Args:
        rate: Bytes a second.
        clock: Returns seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        rate: float = BYTES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = float("-inf")

    async def take(self, received: int, more: int) -> float:
        """Wait until `more` bytes of a body fit into the rate; return the seconds waited.

        Args:
            received: Bytes of the body that have been received before.
            more: Bytes that have just been received.
        """
        limited = min(more, received + more - FREE_BYTES)
        if limited <= 0:
            return 0.0
        now = self._clock()
        self._free_at = max(self._free_at, now) + limited / self._rate
        seconds = self._free_at - now
        await self._sleep(seconds)
        return seconds
