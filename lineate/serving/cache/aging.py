"""Which state is given up first: the one that is cheapest to make again for the bytes it takes, decayed by age.

    priority = age + cost / bytes        when a state is kept or used; cost: seconds to make it from its ancestor
    evict the lowest; then age = its priority

As `age` only grows, a state that is never used falls behind those that are kept or used later, an expensive or small
one more slowly (Greedy-Dual-Size, Cao and Irani 1997). Every operation takes O(log n).
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Aging(Generic[Item]):
    """Items in the order in which they are given up; of equal ones, the one that was used longest ago."""

    def __init__(self) -> None:
        self.age = 0.0
        self._uses = 0
        self._current: dict[Item, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Item]] = []

    def __len__(self) -> int:
        return len(self._current)

    def use(self, item: Item, worth: float) -> None:
        """Add an item, or note that it is used.

        Args:
            item: what is kept.
            worth: cost per byte.
        """
        self._uses += 1
        self._set(item, self.age + worth, self._uses)

    def change(self, item: Item, more: float) -> None:
        """Change an item's cost per byte, without using it.

        Args:
            item: what is kept.
            more: what is added to its worth.
        """
        priority, use = self._current[item]
        self._set(item, priority + more, use)

    def remove(self, item: Item) -> None:
        """Forget an item."""
        del self._current[item]

    def pop(self) -> Item:
        """Remove and return the lowest item; there must be one."""
        while True:
            priority, use, item = heapq.heappop(self._heap)
            if self._current.get(item) == (priority, use):
                del self._current[item]
                self.age = max(self.age, priority)
                return item

    def ordered(self) -> Iterator[Item]:
        """Yield all items, the first to be given up first."""
        yield from sorted(self._current, key=self._current.__getitem__)

    def _set(self, item: Item, priority: float, use: int) -> None:
        self._current[item] = priority, use
        heapq.heappush(self._heap, (priority, use, item))
        if len(self._heap) > 64 + 4 * len(self._current):  # drop what was replaced or removed
            self._heap = [(*key, kept) for kept, key in self._current.items()]
            heapq.heapify(self._heap)
