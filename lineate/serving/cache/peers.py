"""Agreement between the caches of several ranks, so that all of them find and keep the same states.

Ranks that share a model keep their own parts of a state: in memory, and in folders of their own. A part may be missing
on one rank, whose disk is full or whose file is damaged. Then no rank may find the state, or else the ranks would read
different tokens. Everything else that a cache decides follows from its calls, which are the same on all ranks.
"""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it needs torch.distributed, which some builds of torch lack
    from lineate.parallel.job.link import Link


class Peers(Protocol):
    """The caches of all ranks, each of which calls these methods in the same order."""

    session: str
    """A word that all ranks share and that differs between starts of the job; "" if there is one rank."""

    def all(self, done: bool) -> bool:
        """Return whether all ranks have done something.

        Args:
            done: Whether this rank has done it.
        """
        ...

    def common(self, names: Sequence[str]) -> list[str]:
        """Return the names that all ranks have, in rank 0's order.

        Args:
            names: Those of this rank.
        """
        ...

    def any_of(self, names: Sequence[str]) -> list[str]:
        """Return the names that some rank has, in an order that is the same on all ranks.

        Args:
            names: Those of this rank.
        """
        ...


class Alone:
    """The only rank."""

    session = ""

    def all(self, done: bool) -> bool:
        """Return whether this rank has done it."""
        return done

    def common(self, names: Sequence[str]) -> list[str]:
        """Return the names of this rank."""
        return list(names)

    def any_of(self, names: Sequence[str]) -> list[str]:
        """Return the names of this rank."""
        return list(names)


class LinkedPeers:
    """The ranks of a job.

    Args:
        link: Their connections.
    """

    def __init__(self, link: "Link") -> None:
        self._link = link
        self.session = link.share(uuid.uuid4().hex)

    def all(self, done: bool) -> bool:
        """Return whether all ranks have done something."""
        return all(self._link.gather(done))

    def common(self, names: Sequence[str]) -> list[str]:
        """Return the names that all ranks have, in rank 0's order."""
        first, *others = self._link.gather(list(names))
        shared = set(first).intersection(*others)
        return [name for name in first if name in shared]

    def any_of(self, names: Sequence[str]) -> list[str]:
        """Return the names that some rank has, sorted."""
        return sorted(set().union(*self._link.gather(list(names))))
