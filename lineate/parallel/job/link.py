"""Connections between rank 0 and every other rank of a job, for values on which the ranks must agree.

    link = connect(store, place, about)      # on every rank; refused unless `about` is the same on all
    link.send("step", events)                # rank 0: to all others, which call link.receive("step")
    now = link.share(time.monotonic())       # rank 0's value on every rank
    all(link.gather(is_written))             # the values of all ranks on every rank

Messages are JSON, one a line, so nothing is ever unpickled. Collectives of torch.distributed are left to the model:
they would end a job that is idle for longer than their timeout, over NCCL they wait for minutes for a rank that was
killed, and they do not name that rank. Here a rank waits without a timeout and without using its processor, and the end
of a rank's process is detected at once, whatever the others are doing.

A rank that fails, or is lost, ends the job: `ended` says why, in one sentence that rank 0 has sent to all others, and
every call raises JobEnded.
"""

import hmac
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from lineate.parallel.job.processes import COLLECTIVE_TIMEOUT, Place

ADDRESS = "lineate/link"
"""The key of the store under which rank 0 publishes its address."""
GRACE_SECONDS = 5.0
"""Time that a failing rank waits for the message that another rank was lost, which may be the cause."""
HELLO_SECONDS = 10.0
LONGEST_HELLO = 2**20
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Keep-alive: a machine that disappears silently is detected after half a minute."""
LOCAL = ("localhost", "127.0.0.1", "::1")

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


class JobEnded(BaseException):
    """The job has ended, because a rank has failed or was lost. It is no Exception, so that no server survives it."""


class Link:
    """The connections of one rank: rank 0 has one to every other rank, the others have one to rank 0.

    One thread sends and receives; any thread may call fail and close.

    Args:
        rank: The number of this rank.
        size: The number of ranks.
        connections: A connected socket for each rank that this one talks to, by its number.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self.ended: str | None = None
        """The reason why the job has ended; None while it runs."""
        self.speaker = 0
        """The rank that reports it: rank 0, or the next one if rank 0 was lost."""
        self._over = threading.Event()  # set when the job has ended, for any reason
        self._closed = False
        self._changing = threading.Lock()
        self._callback: Callable[[str], None] | None = None
        self._peers = {number: _Peer(number, x) for number, x in sorted(connections.items())}
        for peer in self._peers.values():
            threading.Thread(target=self._listen, args=(peer,), name="lineate-link", daemon=True).start()

    def watch(self, callback: Callable[[str], None]) -> None:
        """Have a function called with the reason, in another thread, when the job ends other than by close.

        Args:
            callback: The function.
        """
        with self._changing:
            self._callback = callback
            why = self.ended
        if why is not None:
            callback(why)

    def send(self, kind: str, value: Any) -> None:
        """Send a message from rank 0 to all others.

        Args:
            kind: The kind that the others expect.
            value: A value that JSON can represent.
        """
        self._check()
        self._send_all({kind: value})

    def receive(self, kind: str) -> Any:
        """Wait for the next message of rank 0, which must be of this kind.

        Args:
            kind: The kind that rank 0 sends.
        """
        return self._take(self._peers[0], kind)

    def share(self, value: Value) -> Value:
        """Return rank 0's value on every rank; rank 0 does not wait for the others.

        Args:
            value: The value; that of the other ranks is ignored.
        """
        if self.rank:
            shared: Value = self.receive("share")
            return shared
        self.send("share", value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on every rank.

        Args:
            value: That of this rank.
        """
        if self.rank:
            self._check()
            self._send_all({"gather": value})
            gathered: list[Any] = self.receive("gathered")
            return gathered
        values = [value, *(self._take(peer, "gather") for peer in self._peers.values())]
        self.send("gathered", values)
        return values

    def fail(self, error: Exception) -> NoReturn:
        """End the job because this rank has failed; if another rank was lost, that is the reason instead.

        Args:
            error: The failure. A collective that fails is a RuntimeError.
        """
        if self.rank or isinstance(error, RuntimeError):
            self._over.wait(GRACE_SECONDS)
        what = f"{type(error).__name__}: {error}"
        if not self._over.is_set():
            logger.error("rank %d failed", self.rank, exc_info=error)
            if self.rank:
                self._send_all({"end": what})
        self._end(f"rank {self.rank} failed: {what}")
        raise JobEnded(self.ended)

    def refuse(self, why: str) -> None:
        """End the job on all other ranks, because this one stops; this rank prints the reason itself.

        Args:
            why: One sentence.
        """
        if self.rank and not self._over.is_set():
            self._send_all({"end": why})
        self._end(why, tell=False)

    def close(self) -> None:
        """Disconnect without being reported as lost."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
        self._send_all({"end": None})
        self._over.set()
        for peer in self._peers.values():
            peer.close()

    def _send_all(self, message: dict[str, Any]) -> None:
        """Send a message to all peers; a closed connection is detected by its listener."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        for peer in self._peers.values():
            peer.send(line)

    def _take(self, peer: "_Peer", kind: str) -> Any:
        """Return the next message of a peer, which must be of this kind."""
        message = peer.messages.get()
        if message is None:
            peer.messages.put(None)
            raise JobEnded(self.ended or f"rank {peer.rank} has left the job")
        if kind not in message:
            self.fail(AssertionError(f"expected {kind} of rank {peer.rank}, got {', '.join(message)}"))
        return message[kind]

    def _check(self) -> None:
        if self._over.is_set():
            raise JobEnded(self.ended or "the job has ended")

    def _listen(self, peer: "_Peer") -> None:
        """Put the messages of a peer into its queue, until it leaves or is lost."""
        last: dict[str, Any] | None = None
        for message in peer:
            if "end" in message:
                last = message
                break
            peer.messages.put(message)
        if self._closed or (last is not None and last["end"] is None):
            peer.messages.put(None)
        elif last is None:
            self.speaker = int(peer.rank == 0)
            self._end(f"rank {peer.rank} has ended without a word: it was killed, or its machine is gone")
        else:
            self._end(last["end"] if peer.rank == 0 else f"rank {peer.rank} failed: {last['end']}")

    def _end(self, why: str, tell: bool = True) -> None:
        """End the job once: notify the others if this is rank 0, wake waiting calls, run the callback if `tell`."""
        with self._changing:
            if self._over.is_set() or self._closed:
                return
            self.ended = why
            callback = self._callback
            self._over.set()
        if self.rank == 0:
            self._send_all({"end": why})
        for peer in self._peers.values():
            peer.messages.put(None)
        if callback is not None and tell:
            callback(why)


class _Peer:
    """One connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self._connection = rank, connection
        self.messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __iter__(self) -> Any:
        """Yield the messages until the connection ends."""
        try:
            with self._connection.makefile("rb") as file:
                for line in file:
                    yield json.loads(line)
        except (OSError, ValueError):  # it was closed on this side, or ended within a line
            return

    def send(self, line: bytes) -> None:
        with suppress(OSError), self._sending:  # the listener reports why it is closed
            self._connection.sendall(line)

    def close(self) -> None:
        with suppress(OSError):  # the other side may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(
    store: Any, here: Place, about: Mapping[str, Sequence[str]], timeout: timedelta = COLLECTIVE_TIMEOUT
) -> Link:
    """Connect rank 0 with all others; raise ValueError on rank 0, and JobEnded on the others, if they differ.

    Args:
        store: The store of torch.distributed through which the ranks meet.
        here: The place of this rank.
        about: Values that must be the same on every rank: by name, the compared value and its text.
        timeout: How long rank 0 waits for the others.
    """
    own = {name: list(said) for name, said in about.items()}
    if here.rank:
        host, port, token = json.loads(store.get(ADDRESS))
        connection = socket.create_connection((host, port), HELLO_SECONDS)
        connection.sendall(json.dumps([token, here.rank, own]).encode() + b"\n")
        link = Link(here.rank, here.size, {0: connection})
        link.receive("welcome")
        return link
    connections, others = _accept_all(store, here, timeout)
    link = Link(0, here.size, connections)
    for rank, said in sorted(others.items()):
        if (why := difference(rank, said, own)) is not None:
            link.refuse(why)
            raise ValueError(why)
    link.send("welcome", None)
    return link


def difference(rank: int, theirs: Mapping[str, Sequence[str]], ours: Mapping[str, Sequence[str]]) -> str | None:
    """Return a sentence about the first difference between a rank and rank 0; None if there is none.

    Args:
        rank: The number of the rank.
        theirs: The values of the rank.
        ours: The values of rank 0.
    """
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        (own, shown), (other, other_shown) = (said.get(name, ("", "nothing")) for said in (ours, theirs))
        if own != other:
            return f"every rank must have the same {name}, got {other_shown} on rank {rank} and {shown} on rank 0"
    return None


def _accept_all(
    store: Any, here: Place, timeout: timedelta
) -> tuple[dict[int, socket.socket], dict[int, dict[str, list[str]]]]:
    """Listen until all other ranks have introduced themselves; return their sockets and their values."""
    master = os.environ.get("MASTER_ADDR", LOCAL[0])
    alone = master in LOCAL or os.environ.get("LOCAL_WORLD_SIZE") == str(here.size)  # on one machine
    token = secrets.token_hex(16)
    connections: dict[int, socket.socket] = {}
    others: dict[int, dict[str, list[str]]] = {}
    with _listen(alone, here.size) as listening:
        listening.settimeout(timeout.total_seconds())
        store.set(ADDRESS, json.dumps(["127.0.0.1" if alone else master, listening.getsockname()[1], token]))
        while len(connections) < here.size - 1:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                got = ", ".join(map(str, [0, *sorted(connections)]))
                raise TimeoutError(f"expected {here.size} ranks within {timeout}, got {got}") from None
            try:
                given, rank, said = _hello(connection)
            except (OSError, ValueError, TypeError):  # not a process of this job
                connection.close()
                continue
            if not hmac.compare_digest(str(given).encode(), token.encode()):
                connection.close()
                continue
            connections[int(rank)], others[int(rank)] = connection, said
    return connections, others


def _listen(alone: bool, backlog: int) -> socket.socket:
    """Return a socket that listens at a free port: for this machine only, or for others as well."""
    if alone:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _hello(connection: socket.socket) -> tuple[str, int, dict[str, list[str]]]:
    """Return the first line of a new connection."""
    connection.settimeout(HELLO_SECONDS)
    line = b""
    while not line.endswith(b"\n"):  # one byte after it belongs to the next message; there is none before the welcome
        more = connection.recv(65536)
        if not more or len(line) > LONGEST_HELLO:
            raise ValueError("expected one line")
        line += more
    token, rank, said = json.loads(line)
    return token, rank, said
