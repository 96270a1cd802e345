"""Errors about unknown arguments, with the correct name or usage."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from lineate.console.names import nearest

P = ParamSpec("P")
R = TypeVar("R")


def hinted(hints: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a call with an unknown keyword raises a TypeError with the correct usage.

    The keywords are only looked up after a call has failed. The signature of the function is unchanged.

    Args:
        hints: The correct usage, by argument names of other libraries.
    """

    def decorate(run: Callable[P, R]) -> Callable[P, R]:
        known = tuple(inspect.signature(run).parameters)

        @wraps(run)
        def call(*args: P.args, **named: P.kwargs) -> R:
            try:
                return run(*args, **named)
            except TypeError:
                unknown = [name for name in named if name not in known]
                if not unknown:
                    raise
                name = unknown[0]
                hint = f"; {hints[name]}" if name in hints else nearest(name, known)
                raise TypeError(f"{run.__name__}() has no argument {name!r}{hint}") from None

        return call

    return decorate


OF_OPS = {
    "g": "write log_decay, the logarithm of the decay, which is at most 0",
    "gk": "write log_decay, the logarithm of the decay, which is at most 0",
    "decay": "write log_decay, the logarithm of the decay, which is at most 0",
    "alpha": "write log_decay, the logarithm of the decay, which is at most 0",
    "initial_state": "write state",
    "recurrent_state": "write state",
    "output_final_state": "leave it out: every op returns (output, state)",
    "use_qk_l2norm_in_kernel": "write normalize_qk=True",
    "head_first": "leave it out: tensors are `b t h d`",
    "mode": "write form",
}
"""Names that other libraries have for the arguments of the ops; docs/from-fla.md is about all of them."""
