"""SIGINT and SIGTERM end a run within a moment and between two steps, however long the step in progress would take."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE, MOST_GRACE = 5.0, 30.0
"""Seconds after SIGTERM in which Python must get its turn: one call into C has none, such as a product of matrices, or
waiting for a GPU, which takes most of a step. Where steps take long it is more, but not more than schedulers allow."""

TOGETHER = 1.0
"""Seconds within which the same signal again is no second request: timeout(1) sends it to a process and its group."""


class Interrupted(BaseException):
    """A signal came in stoppable(); as KeyboardInterrupt, it is no Exception that a library might handle."""


class Signals:
    """What SIGINT and SIGTERM do while a run listens.

    The first one raises Interrupted inside stoppable(), and is noted elsewhere, for the next stoppable() to raise. The
    second one, if it is not TOGETHER with the first, does what it did before listen(). If SIGTERM finds the main thread
    inside a call that does not return within `grace`, or comes twice meanwhile, a thread says why and ends the process.
    SIGINT waits for such a call, as everywhere in Python: it may be a notebook's, whose process must live.
    """

    def __init__(self) -> None:
        self.busy = False
        """Whether a checkpoint is being written, which may take longer than `grace`."""
        self.grace = GRACE
        self._came = self._may_raise = False

    @contextmanager
    def listen(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Handle both signals inside; give_up() speaks before the process is ended, in another thread."""
        old: dict[int, Any] = {}
        first: dict[int, float] = {}

        def note(number: int, frame: Any) -> None:
            self._came = True
            if time.monotonic() - first.setdefault(number, time.monotonic()) >= TOGETHER:
                signal.signal(number, old[number])
                signal.raise_signal(number)
            if self._may_raise:
                self._may_raise = False
                raise Interrupted

        if threading.current_thread() is not threading.main_thread():  # signals are someone else's
            yield
            return
        self._came, self.busy, self.grace = False, False, GRACE
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        watch = threading.Thread(target=self._watch, args=(reader, give_up), daemon=True)
        watch.start()
        # Python's own handler in C writes the number of each signal there, even while the main thread is in a call.
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                old[number] = signal.getsignal(number)
                signal.signal(number, note)
            yield
        finally:
            for known, handler in old.items():
                signal.signal(known, handler)
            signal.set_wakeup_fd(wakeup)
            writer.close()  # which the thread takes for the end
            watch.join()
            reader.close()

    def took(self, seconds: float) -> None:
        """A step took so long, and the next one may."""
        self.grace = min(max(GRACE, 2 * seconds), MOST_GRACE)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """For work that may be left anywhere: it changes neither the weights nor what a checkpoint has."""
        self._may_raise = True
        try:
            if self._came:
                raise Interrupted
            yield
        finally:
            self._may_raise = False

    def _watch(self, reader: socket.socket, give_up: Callable[[], None]) -> None:
        first, deadline = 0.0, None
        while True:
            wait = None if deadline is None else max(0.1, deadline - time.monotonic())
            if select.select([reader], [], [], wait)[0]:
                if not (number := reader.recv(1)):
                    return
                if number[0] != signal.SIGTERM:
                    continue
                now = time.monotonic()
                if deadline is None:
                    first, deadline = now, now + self.grace
                elif not self._came and now - first >= TOGETHER:  # twice, and Python had no turn to see the first
                    break
            elif not self.busy:
                break
        give_up()
        os._exit(1)
