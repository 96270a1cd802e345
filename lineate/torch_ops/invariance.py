"""Whether the step that is being computed must give a row the same bits whatever rows run with it.

A decoder that was made with batch_invariant=True opens `batch_invariant` while a step runs or is recorded. Functions
that choose a kernel or its configuration by the number of rows ask `is_batch_invariant`, and then choose by the sizes
of a row alone. What has no such kernel on a GPU raises NotInvariant, upon which the decoder runs its rows one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_invariant: ContextVar[bool] = ContextVar("lineate_batch_invariant", default=False)


class NotInvariant(Exception):
    """A part of a step has no kernels on this GPU whose bits do not depend on the number of rows."""


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Compute what follows, in this thread, with bits that do not depend on the number of rows; see is_batch_invariant.

    Args:
        wanted: False ends the effect of an outer block instead.
    """
    token = _invariant.set(wanted)
    try:
        yield
    finally:
        _invariant.reset(token)


def is_batch_invariant() -> bool:
    """Whether a row's bits must not depend on the other rows; a compiled graph is for all numbers of rows anyway."""
    return not torch.compiler.is_compiling() and _invariant.get()
