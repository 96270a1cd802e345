"""Makes untrusted text safe to print on a terminal: names in files, texts of models, and messages.

A tensor's name or a generated text may contain an escape sequence, which moves the cursor, hides text or types a
command, and square brackets that rich would parse as markup. All such text passes through this module.
"""

import io
import os
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

DOT = "\u00b7"
KEPT = "\n\t\u200c\u200d"
"""Newline and tab, and the two joiners that scripts and emoji are written with."""


def printable(text: str) -> str:
    """Return the text with a dot for every character that is invisible or controls the terminal.

    These are the control characters (ESC, carriage return, bell, and their 8-bit forms), those that turn the direction
    of a line, lone surrogates, and code points without a meaning. Newlines, tabs and spaces of every width are kept.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in KEPT or unicodedata.category(c) == "Zs" else DOT for c in text)


def console(stderr: bool = False, width: int | None = None) -> "Console":
    """Return a console of rich that shows strings literally: no markup, no emoji codes, no control characters."""
    from rich.console import Console

    class Literal(Console):
        def render_str(self, text: str, *args: Any, **options: Any) -> Any:  # every string and cell passes through it
            return super().render_str(printable(text), *args, **options)

    return Literal(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def fail(error: Exception | str, code: int) -> NoReturn:
    """End the program with a message: exit code 2 for a wrong request, 1 for a failure."""
    rank = os.environ.get("RANK", "0")
    name = "lineate" if rank == "0" else f"lineate, rank {rank}"
    print(f"{name}: {printable(str(error))}", file=sys.stderr)
    sys.exit(code)


def print_anything() -> None:
    """Let stdout print a question mark for characters that its encoding lacks; a model may generate any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
