"""torch's global random numbers, for one thread at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_LOCK = RLock()


@contextmanager
def own_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Let a block use torch's generator of the CPU alone, and leave it as it was.

    All threads share that generator: two blocks that seed it, such as a lesson and the training of a built-in model
    on one server, wait for each other.

    Args:
        seed: Where the random numbers of the block begin; None: where they are.
    """
    with _LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
