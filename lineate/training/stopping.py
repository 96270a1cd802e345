"""SIGINT and SIGTERM stop a run almost at once, in the state between two steps, even if a step would take long."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE_SECONDS, MAX_GRACE_SECONDS = 5.0, 30.0
"""How long after SIGTERM the main thread may take to return to Python before the process is ended.

Python cannot handle a signal during one call into C, such as a matrix product or waiting for a GPU. Where steps take
long the limit is twice a step, up to MAX_GRACE_SECONDS, since a job scheduler kills the process soon after that."""

SAME_REQUEST_SECONDS = 1.0
"""A repeated signal within this time counts as the same request: timeout(1) signals both a process and its group."""


class Interrupted(BaseException):
    """A signal arrived inside stoppable(). Like KeyboardInterrupt it is no Exception, so libraries do not catch it."""


class Signals:
    """The handling of SIGINT and SIGTERM while a run listens.

    The first signal raises Interrupted inside stoppable(); anywhere else it is remembered, and the next stoppable()
    raises. A second signal, at least SAME_REQUEST_SECONDS after the first, has its effect from before listen(). If
    SIGTERM arrives while the main thread is in a call that does not return within `grace` seconds, or arrives again
    during that call, a watching thread prints why and ends the process. SIGINT always waits for such a call to return,
    as usual in Python, since the process may belong to a notebook and must survive.
    """

    def __init__(self) -> None:
        self.busy = False
        """Whether a checkpoint is being written, which may take longer than `grace` allows."""
        self.grace = GRACE_SECONDS
        self._came = self._may_raise = False

    @contextmanager
    def listen(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Handle both signals inside this context.

        Args:
            give_up: Called in another thread to print a last message before the process is ended.
        """
        old: dict[int, Any] = {}
        first: dict[int, float] = {}

        def note(number: int, frame: Any) -> None:
            self._came = True
            if time.monotonic() - first.setdefault(number, time.monotonic()) >= SAME_REQUEST_SECONDS:
                signal.signal(number, old[number])
                signal.raise_signal(number)
            if self._may_raise:
                self._may_raise = False
                raise Interrupted

        if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
            yield
            return
        self._came, self.busy, self.grace = False, False, GRACE_SECONDS
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        watch = threading.Thread(target=self._watch, args=(reader, give_up), daemon=True)
        watch.start()
        # Python's C handler writes each signal's number to this socket, even while the main thread is in a C call.
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
            writer.close()  # tells the watching thread to end
            watch.join()
            reader.close()

    def took(self, seconds: float) -> None:
        """Adapt `grace` to the seconds that the last step took.

        Args:
            seconds: How long the step took.
        """
        self.grace = min(max(GRACE_SECONDS, 2 * seconds), MAX_GRACE_SECONDS)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A context for work that may stop anywhere: it must not change weights or other contents of a checkpoint."""
        self._may_raise = True
        try:
            if self._came:
                raise Interrupted
            yield
        finally:
            self._may_raise = False

    def _watch(self, reader: socket.socket, give_up: Callable[[], None]) -> None:
        """End the process when SIGTERM is not handled in time; runs in its own thread until the socket closes."""
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
                elif not self._came and now - first >= SAME_REQUEST_SECONDS:
                    break  # a second signal, before Python could handle the first
            elif not self.busy:
                break
        give_up()
        os._exit(1)
