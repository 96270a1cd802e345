"""Tokens as labels of an axis: every character is visible, none is parsed as a formula, and long labels are cut."""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}
"""An open box, a return arrow and a tab arrow stand for invisible characters."""
LONGEST_LABEL = 10
"""How many characters a label has at most."""
LARGEST, SMALLEST = 9.0, 4.5
"""The size of a label in points; where labels do not fit, only every second or third token has one."""
FONT_FAMILY = "monospace"


def visible(word: str, drawable: Container[int] | None = None) -> str:
    r"""Return a word with marks for blanks, and \x1b, \u4e2d, .. for characters that are not printable or drawable."""
    return "".join(_seen(letter, drawable) for letter in word)


def _seen(letter: str, drawable: Container[int] | None) -> str:
    mark = MARKS.get(letter, letter)
    if mark.isprintable() and (drawable is None or ord(mark) in drawable):
        return mark
    return letter.encode("unicode_escape").decode()


def cut(word: str, longest: int = LONGEST_LABEL) -> str:
    """Return the beginning of a long word with two dots behind it."""
    return word if len(word) <= longest else word[: longest - 2] + ".."


def label_tokens(axes: "Axes", words: Sequence[str], points: float, both: bool = False) -> None:
    """Put the tokens 1, 2, .. on the x axis, which is `points` long (and on the y axis)."""
    pitch = points / len(words)
    every = max(1, -(-SMALLEST // (0.92 * pitch)))
    size = min(LARGEST, 0.92 * pitch * every)
    places = range(1, len(words) + 1, int(every))
    glyphs = _glyphs()
    labels = [cut(visible(words[place - 1], glyphs)) for place in places]
    narrow = max(map(len, labels)) == 1  # these fit next to each other
    look: dict[str, Any] = {"fontsize": size, "family": FONT_FAMILY, "parse_math": False}
    axes.set_xticks(places, labels, rotation=0 if narrow else 90, **look)
    if both:
        axes.set_yticks(places, labels, **look)
    axes.tick_params("both" if both else "x", length=0, pad=2)


def _glyphs() -> Container[int]:
    """Return the characters that the labels' font has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return get_font(findfont(FontProperties(family=FONT_FAMILY))).get_charmap()
