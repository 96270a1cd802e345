"""Links of several ranks in one process, whose connections a test can break as the end of a process does."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lineate.parallel.job.link import Link


class Linked:
    """The links of the given number of ranks."""

    def __init__(self, size: int) -> None:
        self._ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for rank in range(1, size):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                self._ends[rank][0] = socket.create_connection(listening.getsockname())
                self._ends[0][rank] = listening.accept()[0]
        self.links = [Link(rank, size, ends) for rank, ends in enumerate(self._ends)]

    def lose(self, rank: int) -> None:
        """Break the connections of a rank: the others find them closed, and the rank itself does nothing any more."""
        for end in self._ends[rank].values():
            end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for link in self.links:
            link.close()


def on_all(links: Sequence[Link], call: Callable[[Link], Any]) -> list[Any]:
    """Return what a call yields on every rank, all at the same time."""
    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(call, links))
