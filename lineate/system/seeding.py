"""torch's global random numbers, for one thread at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_LOCK = RLock()


@contextmanager
def own_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Give a block exclusive use of torch's CPU generator, and restore the generator's state afterwards.

    All threads share that generator: two blocks that seed it, such as a lesson and the training of a built-in model
    on one server, wait for each other.

    Args:
        seed: The seed at the start of the block; None: the current state.
    """
    with _LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
