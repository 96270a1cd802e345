"""A cache with a bound that forgets by least recent use."""

from threading import RLock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """A cache that has at least the n keys that were used last, and at most 2 n.

    It is two dicts. A key that is used is in the younger one, or moves there. When that has n keys, it becomes the
    older one, and the older one is forgotten. So a key in use costs one lookup in a dict, without a lock.

    Args:
        n: The least number of keys that it remembers.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._younger: dict[Key, Value] = {}
        self._older: dict[Key, Value] = {}
        self._changing = RLock()  # reentrant, since collecting garbage while it is held may call an op

    def __len__(self) -> int:
        return len(self._younger) + sum(key not in self._younger for key in self._older)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which then was used last; None if there is none."""
        value = self._younger.get(key)
        return self._moved(key) if value is None else value

    def put(self, key: Key, value: Value) -> None:
        """Keep the value of a key, which then was used last; it must not be None."""
        with self._changing:
            if len(self._younger) >= self.n:
                self._older, self._younger = self._younger, {}  # in this order: a reader finds each key in one of them
            self._younger[key] = value

    def _moved(self, key: Key) -> Value | None:
        value = self._older.get(key)
        if value is not None:
            self.put(key, value)
        return value
