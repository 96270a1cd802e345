"""The eviction order: the state that is cheapest to recompute for its bytes goes first, weighted by age.

    priority = age + cost / bytes        when a state is kept or used; cost: seconds to recompute it from its ancestor
    evict the lowest; then age = its priority

As `age` only grows, a state that is never used falls behind those that are kept or used later, an expensive or small
one more slowly (Greedy-Dual-Size, Cao and Irani 1997). Every operation takes O(log n).
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Aging(Generic[Item]):
    """Items in their order of eviction; of equal ones, the least recently used first."""

    def __init__(self) -> None:
        self.age = 0.0
        self._uses = 0
        self._current: dict[Item, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Item]] = []

    def __len__(self) -> int:
        return len(self._current)

    def use(self, item: Item, worth: float) -> None:
        """Add an item, or record its use.

        Args:
            item: the item.
            worth: cost per byte.
        """
        self._uses += 1
        self._set(item, self.age + worth, self._uses)

    def change(self, item: Item, more: float) -> None:
        """Change an item's cost per byte, without using it.

        Args:
            item: the item.
            more: added to its worth.
        """
        priority, use = self._current[item]
        self._set(item, priority + more, use)

    def remove(self, item: Item) -> None:
        """Remove an item."""
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
        """Yield all items in their order of eviction."""
        yield from sorted(self._current, key=self._current.__getitem__)

    def _set(self, item: Item, priority: float, use: int) -> None:
        self._current[item] = priority, use
        heapq.heappush(self._heap, (priority, use, item))
        if len(self._heap) > 64 + 4 * len(self._current):  # drop replaced and removed entries
            self._heap = [(*key, kept) for kept, key in self._current.items()]
            heapq.heapify(self._heap)
