"""Sets how long torch's threads spin where they wait for each other, in processes that run a command of lineate.

torch's OpenMP runtime (GNU's) lets a thread that waits spin for milliseconds. Where another process is busy on a core,
the thread that is waited for then waits for the core, and two threads are much slower than one.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path

SPINS = "1000"
"""How often a waiting thread looks before it sleeps: tens of microseconds."""
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set GOMP_SPINCOUNT if these words start a command of lineate; the user's own settings win.

    The runtime reads it when torch is loaded, so this must run before.

    Args:
        words: of the command line, as in sys.orig_argv.
        environment: as os.environ.
    """
    module = ("-m", "lineate.cli") in pairwise(words)
    script = any(Path(word).name == "lineate" for word in words[:3])
    if (module or script) and not any(name in environment for name in _CHOSEN):
        environment["GOMP_SPINCOUNT"] = SPINS


if "torch" not in sys.modules:
    spin_briefly(sys.orig_argv, os.environ)
