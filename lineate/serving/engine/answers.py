"""Texts that end with an answer, which are read again in pieces so that the next turn finds their states."""

from collections.abc import Callable

from lineate.serving.engine.reading import Reading

MOST_ANSWERS = 64
"""The most answers that wait to be read again; the oldest are given up, whose states are the likeliest to be gone."""


class Answer:
    """A text that ends with an answer, cut at a multiple of the spacing, which is read again in pieces.

    Its tokens were decoded one by one, which rounds otherwise than reading: the state that the row had is not shared.
    Reading begins at the kept state of the prompt; if that is gone, the text is not worth reading.

    Args:
        ids: The tokens.
        begins: How many of them belong to whole pieces of the prompt.
    """

    def __init__(self, ids: tuple[int, ...], begins: int) -> None:
        self.ids, self.begins = ids, begins
        self.read = 0
        """How many tokens were read."""
        self._reading: Reading | None = None

    def advance(self, make: Callable[[tuple[int, ...]], Reading]) -> bool:
        """Read one piece, and keep the state after it; return whether there is no more to do.

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
        self.begins = reading.position  # what was read so far must be there if it pauses
        return reading.done or not reading.kept  # a cache without room would have it read for nothing

    def pause(self) -> None:
        """Free the state; reading goes on from the one that was kept."""
        self._reading = None
