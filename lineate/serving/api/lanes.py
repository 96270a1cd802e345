"""Threads that prepare requests: short bodies, long ones, grammars and long answers do not wait for each other."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lineate.web.errors import queue_full

LONG_BYTES = 16 * 2**10
"""Bytes of a body above which it is prepared in the lane of long ones."""
WAITING = 128
"""The queue length of a slow lane; further requests get 429."""
SHORT_ENTRIES = 512
"""Log-probabilities of an answer above which it is written in the lane of long answers."""
REST, LONGEST_REST = 2.0, 0.25
"""The pause of the lane of long bodies before the next one, as a multiple of the time of the last one, and its limit in
seconds. Reading JSON and rendering a template hold the interpreter's lock, which the engine and all other requests
need: the pause gives it to them for most of the time, whatever the number of long bodies."""

Made = TypeVar("Made")


class Lanes:
    """Two threads for short bodies, one for long ones, one for grammars, and one for long answers.

    Args:
        waiting: Requests that may wait for the lane of long bodies, and for that of grammars.
        clock: Returns seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        waiting: int = WAITING,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._waiting, self._clock, self._sleep = waiting, clock, sleep
        self._short = ThreadPoolExecutor(2, "lineate-prompts")
        self._long = ThreadPoolExecutor(1, "lineate-long-prompts")
        self._grammars = ThreadPoolExecutor(1, "lineate-grammars")
        self._answers = ThreadPoolExecutor(1, "lineate-long-answers")
        self._counts: dict[ThreadPoolExecutor, int] = {self._long: 0, self._grammars: 0}
        self._rests_until = float("-inf")

    async def prepare(self, made: Callable[[], Made], size: int) -> Made:
        """Run a function that reads a body or the text in it; raise ApiError if too many long ones wait.

        Args:
            made: The function.
            size: The bytes of the body.
        """
        if size <= LONG_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._short, made)
        return await self._queued(self._long, lambda: self._rested(made))

    async def compile(self, made: Callable[[], Made]) -> Made:
        """Run a function that compiles a grammar; raise ApiError if too many wait.

        Args:
            made: The function.
        """
        return await self._queued(self._grammars, made)

    async def write(self, made: Callable[[], Made], entries: int) -> Made:
        """Run a function that writes an answer; any number may wait, because their tokens have been generated.

        Args:
            made: The function.
            entries: The log-probabilities that it lists.
        """
        lane = self._short if entries <= SHORT_ENTRIES else self._answers
        return await asyncio.get_running_loop().run_in_executor(lane, made)

    def close(self) -> None:
        """Let the threads end."""
        for lane in (self._short, self._long, self._grammars, self._answers):
            lane.shutdown(wait=False, cancel_futures=True)

    async def _queued(self, lane: ThreadPoolExecutor, made: Callable[[], Made]) -> Made:
        if self._counts[lane] > self._waiting:
            raise queue_full(1)
        self._counts[lane] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, made)
        finally:
            self._counts[lane] -= 1

    def _rested(self, made: Callable[[], Made]) -> Made:
        """Run one after a pause; its answer does not wait for the next pause."""
        rest = self._rests_until - self._clock()
        if rest > 0:
            self._sleep(rest)
        began = self._clock()
        try:
            return made()
        finally:
            ended = self._clock()
            self._rests_until = ended + min(REST * (ended - began), LONGEST_REST)
