"""Sets how long torch's threads spin where they wait for each other, in processes that run a command of lineate.

torch's OpenMP runtime (GNU's) lets a thread that waits spin for milliseconds. Where another process is busy on a core,
the other thread then waits for that core, and two threads are much slower than one.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

SPINS = "1000"
"""Polls of a waiting thread before it sleeps: tens of microseconds."""
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_WITH_VALUE = ("--check-hash-based-pycs",)
"""Python's long options whose value is the next word."""


def spin_briefly(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set GOMP_SPINCOUNT if these words start a command of lineate; the user's own settings win.

    The runtime reads it when torch is loaded, so this must run before.

    Args:
        words: of the command line, as in sys.orig_argv.
        environment: as os.environ.
    """
    if _starts_a_command(words) and not any(name in environment for name in _CHOSEN):
        environment["GOMP_SPINCOUNT"] = SPINS


def _starts_a_command(words: Sequence[str]) -> bool:
    """Whether the program of a command line is lineate; later words are the program's own arguments."""
    if words and Path(words[0]).name == "lineate":
        return True
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            return Path(word).name == "lineate"
        if word.startswith("--"):
            if word in _WITH_VALUE:
                next(rest, None)
            continue
        for at, letter in enumerate(word[1:], 2):  # of options that are written as one word
            if letter in "cm":  # the program is what follows
                return letter == "m" and (word[at:] or next(rest, "")) == "lineate.cli"
            if letter in "WX":
                if not word[at:]:
                    next(rest, None)
                break
    return False


if "torch" not in sys.modules:
    spin_briefly(sys.orig_argv, os.environ)
