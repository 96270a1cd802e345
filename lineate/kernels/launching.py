"""Launching kernels; and, before the first launch of a kind, compiling all that a call needs side by side.

Triton compiles a kernel when it is first launched, one after another: a call with its backward would wait for the sum
of them. `compiling` makes launches compile only, each in a thread of its own, and waits for all.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

_only_compile: ContextVar[bool] = ContextVar("lineate_only_compile", default=False)


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid], which inside `compiling` launches nothing."""
    return partial(kernel.run, grid=grid, warmup=_only_compile.get())


def ceil_div(a: int, b: int) -> int:
    """(triton.cdiv takes 5 us on the host.)"""
    return -(-a // b)


def next_power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << (n - 1).bit_length()


@contextmanager
def compiling() -> Iterator[None]:
    """Launches of this thread only compile."""
    token = _only_compile.set(True)
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _only_compile.reset(token)
