"""The routing policy: a request goes to the replica with the longest prefix of its prompt, unless it is too busy.

    routing = Routing(imbalance=4)
    routing.update(["a", "b", "c"])
    routing.open("request 1")
    first, *others = routing.choose("request 1", blocks)    # it counts as running on the first from now on
    routing.move("request 1", others[0], blocks)            # if the first did not take it
    routing.end("request 1")

A replica knows a prompt if it was sent at least an eighth of it before, so that a common beginning of all prompts does
not send all of them to one replica. A replica is too busy if it has more than `imbalance` requests more than the least
busy one. Then the request goes to the least busy replica, which knows the prompt from then on, so that a prompt that
many requests share spreads.
"""

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from lineate.serving.replicas.prefixes import LONGEST, MOST_BLOCKS, Prefixes

LEAST_SHARE = 1 / 8
"""The part of a prompt that a replica must have been sent before to be preferred for it."""


@dataclass(frozen=True)
class RoutingStats:
    """Counts of a routing.

    Args:
        active: Requests that run or wait, by replica.
        by_prefix: Requests with a prompt that went to the replica that knows most of it.
        by_load: Requests with a prompt that went to the least busy replica, because no replica knows it or those are
            too busy.
        blocks: Blocks of prompts that are remembered.
    """

    active: dict[str, int]
    by_prefix: int
    by_load: int
    blocks: int


class Routing:
    """The policy alone, without Ray; any thread may call it.

    Args:
        imbalance: The most requests that the replica with a prompt's beginning may have more than the least busy one.
        most_blocks: The most blocks of prompts that are remembered.
    """

    def __init__(self, imbalance: int = 4, most_blocks: int = MOST_BLOCKS) -> None:
        if isinstance(imbalance, bool) or not isinstance(imbalance, int) or imbalance < 0:
            raise ValueError(f"imbalance must be an int of at least 0, got {imbalance!r}")
        self._imbalance = imbalance
        self._lock = threading.Lock()
        self._prefixes = Prefixes(most_blocks)
        self._active: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        """When each replica was chosen last, as a counter."""
        self._turn = 0
        self._running: dict[str, str | None] = {}
        """The replica of each request that has not ended; None before one was chosen."""
        self._counts = {True: 0, False: 0}

    @property
    def stats(self) -> RoutingStats:
        """Its counts."""
        with self._lock:
            return RoutingStats(dict(self._active), self._counts[True], self._counts[False], self._prefixes.blocks)

    def update(self, replicas: Iterable[str]) -> None:
        """Update the set of replicas; the prompts of others are removed.

        Args:
            replicas: All replicas.
        """
        with self._lock:
            known = set(replicas)
            for gone in self._active.keys() - known:
                self._prefixes.forget(gone)
            running = list(self._running.values())
            self._active = {replica: running.count(replica) for replica in sorted(known)}
            self._turns = {replica: self._turns.get(replica, 0) for replica in known}

    def open(self, request: str) -> None:
        """Register a request that is about to be routed; it is counted from now until its end.

        Args:
            request: Its name.
        """
        with self._lock:
            self._running[request] = None

    def choose(self, request: str, blocks: "array[int]") -> list[str]:
        """Return all replicas, the chosen one first; the request counts there from now on.

        Args:
            request: Its name.
            blocks: Its prompt (prompts.py); empty if it has none.
        """
        with self._lock:
            order, known = self._order(blocks)
            if order and self._count(request, order[0], blocks) and blocks:
                self._counts[known] += 1
            return order

    def move(self, request: str, replica: str, blocks: "array[int]") -> None:
        """Count a request at the replica that it was sent to, if it was not sent to the first of the order.

        Args:
            request: Its name.
            replica: The replica that it was sent to.
            blocks: Its prompt.
        """
        with self._lock:
            self._count(request, replica, blocks)

    def end(self, request: str) -> None:
        """Stop counting a request; nothing happens if it has ended.

        Args:
            request: Its name.
        """
        with self._lock:
            self._leave(request)
            self._running.pop(request, None)

    def _order(self, blocks: "array[int]") -> tuple[list[str], bool]:
        """Return the order of replicas for a prompt, and whether the first one is the first for its sake."""
        loads, least = self._active, max(1, LEAST_SHARE * min(len(blocks), LONGEST))
        shared = {replica: n for replica, n in self._prefixes.shared(blocks).items() if n >= least and replica in loads}
        order = sorted(loads, key=lambda x: (loads[x], -shared.get(x, 0), self._turns[x]))
        if not shared:
            return order, False
        most = max(order, key=lambda x: (shared.get(x, 0), -loads[x]))
        if loads[most] - loads[order[0]] > self._imbalance:
            return order, False
        return [most, *(x for x in order if x != most)], True

    def _count(self, request: str, replica: str, blocks: "array[int]") -> bool:
        """Count a request on a replica and nowhere else; return whether it was not counted there."""
        if request not in self._running or self._running[request] == replica or replica not in self._active:
            return False  # its client has left, it is counted already, or the replica has just gone
        self._leave(request)
        self._running[request] = replica
        self._active[replica] += 1
        self._turn += 1
        self._turns[replica] = self._turn
        self._prefixes.add(blocks, replica)
        return True

    def _leave(self, request: str) -> None:
        """Stop counting a request at its replica."""
        replica = self._running.get(request)
        if replica in self._active:
            self._active[replica] -= 1


_ROUTINGS: dict[str, Routing] = {}


def routing_of(application: str, imbalance: int) -> Routing:
    """Return the routing of an application in this process, which its front and its router share; make it if need be.

    Args:
        application: The name of the application in Ray Serve.
        imbalance: See Routing.
    """
    return _ROUTINGS.setdefault(application, Routing(imbalance))


def forget_routing(application: str) -> None:
    """Remove the routing of an application that is no longer served.

    Args:
        application: The name of the application in Ray Serve.
    """
    _ROUTINGS.pop(application, None)
