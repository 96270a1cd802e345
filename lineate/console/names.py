"""Names that people type: underscores and hyphens are equivalent, and an unknown name gets a suggestion."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def hyphenated(name: str) -> str:
    """Return the spelling that options have, emb-dim for emb_dim."""
    return name.replace("_", "-")


def spelled(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from this one in underscores and hyphens at most, else the name itself."""
    return next((x for x in known if hyphenated(x) == hyphenated(name)), name)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: a suggestion, if a known name is close or starts with this one."""
    plain = {hyphenated(x).lower(): x for x in known}
    word = hyphenated(name).lower()
    close = [x for x in plain if word and x.startswith(word)]
    if not close and (found := closest(word, plain)) is not None:
        close = [found]
    return f"; did you mean {' or '.join(repr(plain[x]) for x in close)}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelled most like this one, if one is close."""
    return next(iter(get_close_matches(name, list(known), 1)), None)


def user_path(name: str | Path) -> Path:
    """Return the path with ~ or ~user replaced by the home folder; an unknown user is left unchanged, as in a shell."""
    return Path(os.path.expanduser(name))


def named_path(name: str | Path) -> Path:
    """Return a path of the command line; an empty one, which pathlib takes for the current folder, is refused."""
    if str(name):
        return Path(name)
    from typer import BadParameter

    raise BadParameter("expected a name, got ''; write . for the current folder")
