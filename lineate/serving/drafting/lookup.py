"""The drafter that needs no model: it repeats the continuation of an earlier occurrence of the last tokens."""

from array import array
from collections.abc import Sequence

from lineate.serving.drafting.drafter import BaseDrafter, DraftRow, Known


class _Index(Known):
    """The positions of all n-grams of a sequence: every position points to the previous one with the same n-gram."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.ids = array("q")
        self._last: dict[tuple[int, ...], int] = {}  # the n-gram -> the index after its last place
        self._before = array("q")  # that index -> the index after the place before, or 0

    def extend(self, ids: Sequence[int]) -> None:
        """Add the tokens that are new, each in constant time."""
        for token in ids[len(self.ids) :]:
            end = len(self.ids)  # the n-gram that ends before this token now has a continuation
            self._before.append(0)
            if end >= self.n:
                gram = tuple(self.ids[end - self.n :])
                self._before[end] = self._last.get(gram, 0)
                self._last[gram] = end
            self.ids.append(token)

    def guess(self, most: int, tries: int, longest: int) -> list[int]:
        """Return the tokens after the longest match of the last tokens; among equally long ones, the latest."""
        ids, end = self.ids, len(self.ids)
        place = self._last.get(tuple(ids[end - self.n :]), 0) if end >= self.n else 0
        best, length = 0, 0
        for _ in range(tries):
            if not place:
                break
            own = self.n
            while own < longest and own < place and ids[place - own - 1] == ids[end - own - 1]:
                own += 1
            if own > length:
                best, length = place, own
            place = self._before[place]
        if not best:
            return []
        found = list(ids[best : best + most])
        while len(found) < most:  # the text repeats: the continuation is the guess's own beginning
            found.append(found[best + len(found) - end])
        return found


class PromptLookup(BaseDrafter[_Index]):
    """Guess the continuation of an earlier occurrence of the last tokens, in the prompt or after it.

    It needs no model, and suits texts with repetition: code that is edited, documents that are quoted.

    Args:
        n: tokens that a match must have; each new token is indexed in constant time.
        longest: tokens of a match that are compared; the longest match is taken.
        tries: places that are compared, beginning with the latest.
    """

    def __init__(self, n: int = 2, longest: int = 32, tries: int = 32) -> None:
        for name, value in (("n", n), ("longest", longest), ("tries", tries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        super().__init__()
        self.n, self.longest, self.tries = n, longest, tries

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most `most` guesses for each row; see Drafter.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        found = []
        for row in rows:
            index = self._known.setdefault(row.key, _Index(self.n))
            index.extend(row.ids)
            length = index.pace.next_length(row.ids, most)
            guesses = index.guess(length, self.tries, self.longest) if length else []
            index.pace.note(len(row.ids), guesses)
            found.append(guesses)
        return found
