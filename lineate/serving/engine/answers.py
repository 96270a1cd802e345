"""Prompts with their answers, which are read again in pieces so that the next turn finds their states."""

from collections.abc import Callable

from lineate.serving.engine.reading import Reading

MOST_ANSWERS = 64
"""The most answers that wait to be read again; the oldest, whose states are likely evicted, are dropped."""


class Answer:
    """A text that ends with an answer, cut at a multiple of the spacing, which is read again in pieces.

    Its tokens were decoded one by one, which rounds differently from reading, so the row's state is not shared. Reading
    begins at the kept state of the prompt; if that was evicted, the text is not read.

    Args:
        ids: The tokens.
        begins: The number of tokens in whole pieces of the prompt.
    """

    def __init__(self, ids: tuple[int, ...], begins: int) -> None:
        self.ids, self.begins = ids, begins
        self.read = 0
        """How many tokens were read."""
        self._reading: Reading | None = None

    def advance(self, make: Callable[[tuple[int, ...]], Reading]) -> bool:
        """Read one piece, and keep the state after it; return whether this was the last piece.

        Args:
            make: Returns the reading of a text.
        """
        reading = self._reading
        if reading is None:
            reading = self._reading = make(self.ids)
            reading.look_up()
        if reading.done or reading.position < self.begins:
            return True
        before = reading.read
        reading.advance()
        self.read += reading.read - before
        self.begins = reading.position  # the pieces so far must be kept if it pauses
        return reading.done or not reading.kept  # without room in the cache, reading would be useless

    def pause(self) -> None:
        """Free the state; reading continues from the kept one."""
        self._reading = None
