"""Rates of writing that depend on the length of a key that is not normalised, for the delta rules.

    "exact"      (1 - e^(-beta |k|^2)) / |k|^2      the exact solution of dS/ds = k (v - S^T k)^T after a time beta
    "kaczmarz"   beta / (|k|^2 + 1e-6)              beta = 1 makes S^T k = v with the least change of S

A delta rule with rate r multiplies what the memory answers to k by 1 - r |k|^2. That is e^(-beta |k|^2) with the first,
which lies in (0, 1) for keys of any length, and 1 - beta with the second, whatever the length is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lineate import checks
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise

NEAR, TERMS = 0.25, 13
"""Below NEAR the series with TERMS terms has an error below float64's rounding; above, expm1 loses two bits at most."""
EPSILON = 1e-6
"""Is added to |k|^2 by "kaczmarz", so that a key of zeros has a finite rate."""


def rate_of_key(k: Tensor, beta: Tensor, kind: str) -> Tensor:
    """Return the rate of writing r that a beta and the length of its key give, in place of beta in a delta rule.

        exact       r = (1 - e^(-beta |k|^2)) / |k|^2      (EFLA)
        kaczmarz    r = beta / (|k|^2 + 1e-6)              (Kaczmarz linear attention)

    The keys are not normalised, here or in the rule. Everything differentiates, also where a key or beta is 0.

    >>> rate = lineate.rate_of_key(k, beta, "exact")
    >>> out, state = lineate.gated_delta_rule(q, k, v, log_decay, rate)

    Args:
        k: keys, `b t h k`, or `b t n h k` for n writes a token.
        beta: `b t hv`, or `b t n hv`, at least 0, with hv a multiple of h.
        kind: "exact" or "kaczmarz".

    Returns:
        The rates in the shape of beta, float32 (float64 for float64 keys).
    """
    checks.check_choice("kind", kind, tuple(RATES))
    heads, wanted = k.shape[-2], (*k.shape[:-2], beta.shape[-1])
    if tuple(beta.shape) != wanted or beta.shape[-1] % heads:
        raise ValueError(
            f"beta must have the shape of k without its channels and a multiple of its {heads} heads, "
            f"{(*k.shape[:-2], heads)}, got {tuple(beta.shape)}"
        )
    wide = k.to(compute_dtype(k.dtype))
    square = (wide * wide).sum(-1)
    square = square.repeat_interleave(beta.shape[-1] // heads, -1)  # b t [n] hv
    return RATES[kind](beta.to(wide.dtype), square)


def _exact(beta: Tensor, square: Tensor) -> Tensor:
    """Return (1 - e^-x) / |k|^2 with x = beta |k|^2; where x is small, beta times a series in x."""
    x = beta * square
    near = x < NEAR
    # A branch that is not taken gets harmless numbers, because an infinite gradient times 0 would be NaN.
    small, large, divisor = torch.where(near, x, 0.0), torch.where(near, 1.0, x), torch.where(near, 1.0, square)
    return torch.where(near, beta * _series(small), -elementwise(torch.expm1, -large) / divisor)


def _series(x: Tensor) -> Tensor:
    """Return 1 - x/2! + x^2/3! - ..., which is (1 - e^-x) / x."""
    y = torch.ones_like(x)
    for i in range(TERMS, 1, -1):
        y = 1 - x / i * y
    return y


def _kaczmarz(beta: Tensor, square: Tensor) -> Tensor:
    return beta / (square + EPSILON)


RATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"exact": _exact, "kaczmarz": _kaczmarz}
"""The functions from beta and |k|^2 to the rate, by their names."""
