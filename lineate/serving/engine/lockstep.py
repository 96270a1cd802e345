"""One engine on several ranks that share a model: all make the same steps, in the same order.

    front = Lockstep(engine, link)           # on every rank, around an identical engine
    front.start()                            # rank 0: serves as an Engine does
    front.follow()                           # the others: until rank 0 has stopped

Before each step, rank 0 sends the events since the last one: requests as plain data, continuations to end, and the
time. Every rank then passes them to its own engine and runs a step. An engine's decisions follow from these events,
from the tokens, and from times that rank 0 measures for all (`Engine.timer`); where ranks may differ, in memory or on
disk, the caches agree with each other (peers.py). So all ranks make the same calls of the model, and only rank 0
delivers the results.

With every step rank 0 sends a checksum of all events so far. A rank with a different checksum has diverged and ends the
job; so does a rank with any failure, even one that an engine of one process would survive.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from lineate.generation.choice import Sampling
from lineate.parallel.job.link import JobEnded, Link
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine, EngineStats
from lineate.serving.engine.requests import EngineStopped, Event, Guide, Handle, Listener, Request

logger = logging.getLogger(__name__)

Happening = list[Any]
"""["submit", number, time, request], ["end", number, index, reason], or ["close"]; JSON values."""


class Lockstep:
    """An engine on one of several ranks; rank 0's is used like an Engine.

    Args:
        engine: The engine of this rank, which nothing else may drive.
        link: The connections to the other ranks.
        guides: Returns the guide of a grammar, for requests that have one.
    """

    def __init__(self, engine: Engine, link: Link, guides: Callable[[str], Guide] | None = None) -> None:
        self._engine, self._link, self._guides = engine, link, guides
        self._now = 0.0
        engine.clock, engine.timer = lambda: self._now, lambda: link.share(time.perf_counter())
        engine.on_failure = link.fail
        self._own: dict[int, Handle] = {}
        """The handles of this rank's engine, by number."""
        self._handles: dict[int, Handle] = {}
        """The handles of rank 0 that have not ended, by number."""
        self._checksum = 0
        self._busy = False
        self._changed = threading.Condition()  # guards the fields below, and the handles of rank 0
        self._number = 0
        self._new: list[Happening] = []
        self._ending: set[int] = set()  # handles with continuations to end
        self._told: set[tuple[int, int]] = set()  # continuations whose end was sent
        self._closed = self._stopping = self._stopped = False
        self._given_up: str | None = None
        self._thread: threading.Thread | None = None
        self._callback: Callable[[str], None] | None = None
        if link.rank == 0:
            link.watch(self._give_up)

    # Called on rank 0 by any thread.

    def watch(self, callback: Callable[[str], None]) -> None:
        """Have a function called with the reason, in another thread, if the job ends early; all requests have failed.

        Args:
            callback: The function.
        """
        with self._changed:
            self._callback, given_up = callback, self._given_up
        if given_up is not None:
            callback(given_up)

    @property
    def slots(self) -> int:
        """The most rows that decode together."""
        return self._engine.slots

    @property
    def queue(self) -> int:
        """The most requests that wait."""
        return self._engine.queue

    @property
    def cache(self) -> StateCache | None:
        """The cache of this rank's part of the states."""
        return self._engine.cache

    @property
    def engine(self) -> Engine:
        """The engine of this rank."""
        return self._engine

    @property
    def stats(self) -> EngineStats:
        """State and counts of the engine, including requests that the next step will submit."""
        with self._changed:
            found = self._engine.stats
            return replace(found, waiting=found.waiting + self._unsent)

    @property
    def _unsent(self) -> int:
        return sum(happening[0] == "submit" for happening in self._new)

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Put a request into the queue of every rank; see Engine.submit.

        Args:
            request: The request; its guide must have a `grammar`, which the other ranks are sent.
            listener: Receives the events in the engine's thread; None: Handle.events yields them.
        """
        self._engine.check(request)
        plain = plain_request(request)
        with self._changed:
            if self._closed or self._link.ended is not None:
                raise EngineStopped("the engine is stopping and accepts no more requests")
            self._engine.check_open(self._unsent)
            self._number += 1
            number = self._number
            handle = self._handles[number] = Handle(request, number, listener, partial(self._wake, number))
            self._new.append(["submit", number, time.monotonic(), plain])
            self._changed.notify_all()
        return handle

    def _wake(self, number: int) -> None:
        with self._changed:
            self._ending.add(number)
            self._changed.notify_all()

    def start(self) -> None:
        """Begin to serve in a thread of its own, on rank 0."""
        if self._thread is not None or self._closed:
            raise RuntimeError("the engine must be started once, before it is stopped")
        self._thread = threading.Thread(target=self._run, name="lineate-engine", daemon=True)
        self._thread.start()

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests, and return when the engines of all ranks have ended; see Engine.stop.

        Args:
            drain: Whether submitted requests are finished first; otherwise they end at once, as "shutdown".
            timeout: Seconds after which the remaining requests end as "shutdown"; None: never.
        """
        with self._changed:
            if not self._closed:
                self._closed = True
                self._new.append(["close"])
                self._changed.notify_all()
        until = None if timeout is None else time.monotonic() + timeout
        while drain and self._goes_on() and (until is None or time.monotonic() < until):
            if self._thread is None:
                self.step()
            else:
                with self._changed:
                    self._changed.wait(0.05)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            while self._thread.is_alive() and self._link.ended is None:  # a collective may never return
                self._thread.join(0.05)
        elif not self._stopped and self._link.ended is None:
            self._step(last=True)

    def _goes_on(self) -> bool:
        """Whether there are unfinished requests."""
        with self._changed:
            return self._link.ended is None and not self._stopped and (self._busy or bool(self._new))

    # Called in the thread of rank 0's engine.

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._changed:
                    while not (self._new or self._ending or self._busy or self._stopping):
                        self._changed.wait()
                    last = self._stopping
                self._step(last)
        except JobEnded:  # whoever waits has been told
            return
        except Exception as error:
            with suppress(JobEnded):
                self._link.fail(error)

    def step(self) -> bool:
        """Run one step on all ranks; return whether work is left. Only rank 0 calls this."""
        if not self._stopped:
            self._step()
        return self._goes_on()

    def _step(self, last: bool = False) -> None:
        with self._changed:
            happened, self._new = [*self._new, *self._ends()], []
        now = time.monotonic()
        self._link.send("step", [now, self._checksum, last, happened])
        self._make(now, last, happened)

    def _ends(self) -> list[Happening]:
        """Return the continuations to end since the last step."""
        found: list[Happening] = []
        for number in sorted(self._ending):
            handle = self._handles.get(number)
            for index, finished in [] if handle is None else list(handle.ending.items()):
                if (number, index) not in self._told:
                    self._told.add((number, index))
                    found.append(["end", number, index, finished])
        self._ending.clear()
        return found

    # Called on every rank.

    def follow(self) -> None:
        """Follow rank 0's steps until it stops; called on every other rank."""
        while self.follow_step():
            pass

    def follow_step(self) -> bool:
        """Follow one step of rank 0; return False if it was the last."""
        now, checksum, last, happened = self._link.receive("step")
        if checksum != self._checksum:
            self._link.fail(RuntimeError("it has chosen other tokens than rank 0"))
        self._make(now, last, happened)
        return not last

    def _make(self, now: float, last: bool, happened: list[Happening]) -> None:
        """Pass the events to the engine, and run a step, or end all requests if this is the last."""
        for what, *about in happened:
            if what == "submit":
                self._submit(*about)
            elif what == "end":
                self._end(*about)
            else:
                self._engine.close()
        self._now = now
        if last:
            self._engine.stop(drain=False)
        busy = not last and self._engine.step()
        with self._changed:
            self._busy, self._stopped = busy, last
            self._changed.notify_all()

    def _submit(self, number: int, now: float, plain: dict[str, Any]) -> None:
        self._now = now
        request = read_request(plain, self._guides) if self._link.rank else self._handles[number].request
        self._own[number] = self._engine.submit(request, partial(self._deliver, number))
        assert self._own[number].number == number
        if not self._link.rank:
            self._handles[number].progress = self._own[number].progress

    def _end(self, number: int, index: int, finished: str) -> None:
        if (handle := self._own.get(number)) is not None:
            (handle.stop if finished == "stop" else handle.cancel)(index)

    def _deliver(self, number: int, event: Event) -> None:
        """Receive an event of this rank's engine, and on rank 0 pass it to the listener."""
        said = f"{number} {event.index} {event.tokens} {event.finished}"
        self._checksum = zlib.crc32(said.encode(), self._checksum)
        ended = False
        if event.finished is not None:
            own = self._own[number]
            if ended := len(own.ended) == own.request.n:  # the engine notes an end before it delivers it
                del self._own[number]
        if self._link.rank:
            return
        with self._changed:
            handle = self._handles.pop(number, None) if ended else self._handles.get(number)
            if handle is not None and event.finished is not None:
                handle.ended.add(event.index)
            if ended:
                self._told = {told for told in self._told if told[0] != number}
        if handle is not None:
            self._put(handle, event)

    def _put(self, handle: Handle, event: Event) -> None:
        try:
            handle.put(event)
        except BaseException:  # the listener is gone; the other ranks are told before the next step
            logger.exception("the listener of request %d failed; the request is cancelled", handle.number)
            handle.cancel()

    def _give_up(self, why: str) -> None:
        """End all requests on rank 0 with an error."""
        with self._changed:
            handles, self._handles = [*self._handles.values()], {}
            self._changed.notify_all()
        for handle in handles:
            for index in range(handle.request.n):
                if index not in handle.ended:
                    self._put(handle, Event(index, finished="error", error=why))
        with self._changed:
            self._given_up, callback = why, self._callback
        if callback is not None:
            callback(why)


def plain_request(request: Request) -> dict[str, Any]:
    """Return a request as JSON values.

    Args:
        request: The request; a guide must have its grammar as text.
    """
    grammar = None
    if request.guide is not None:
        grammar = getattr(request.guide, "grammar", None)
        if not isinstance(grammar, str):
            raise ValueError(
                f"guide must have a grammar, which other ranks are sent, got {type(request.guide).__name__}"
            )
    plain = {field.name: getattr(request, field.name) for field in fields(request)}
    return plain | {
        "sampling": asdict(request.sampling),
        "stop_tokens": sorted(request.stop_tokens),
        "guide": grammar,
    }


def read_request(plain: dict[str, Any], guides: Callable[[str], Guide] | None = None) -> Request:
    """Return the request of plain_request's values, with the checks of a new one.

    Args:
        plain: The values.
        guides: Returns the guide of a grammar.
    """
    sampling = plain["sampling"]
    biases = tuple((token, bias) for token, bias in sampling["logit_bias"])
    guide = None
    if plain["guide"] is not None:
        if guides is None:
            raise ValueError("guides must be given to follow requests that have a grammar, got None")
        guide = guides(plain["guide"])
    return Request(**plain | {"sampling": Sampling(**sampling | {"logit_bias": biases}), "guide": guide})
