"""Names that people type: underscores and hyphens are alike, and a wrong name is answered with what may be meant."""

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
    """Return the end of an error: what may have been meant, if a name is close or starts with this one."""
    plain = {hyphenated(x).lower(): x for x in known}
    word = hyphenated(name).lower()
    close = [x for x in plain if word and x.startswith(word)] or get_close_matches(word, plain, 1)
    return f"; did you mean {' or '.join(repr(plain[x]) for x in close)}?" if close else ""


def user_path(name: str | Path) -> Path:
    """Return the path with its home folder in place of ~ or ~user; a user who does not exist stays, as in a shell."""
    return Path(os.path.expanduser(name))
