"""Weights of 16, 8 and 4 bits and float8, which are multiplied with activations of float32 as they lie in memory."""

import warnings
from typing import Any

from lineate.quantised.format import BY_BITS, FORMATS, TILE, Format, register_format
from lineate.quantised.product import float8_activations, rounded_activations
from lineate.quantised.rounding import GROUP, TooLargeError
from lineate.quantised.weight import QuantisedWeight, quantize
from lineate.quantised.which import quantised_formats, shrink

__all__ = [
    "BY_BITS",
    "FORMATS",
    "GROUP",
    "TILE",
    "Format",
    "QuantisedWeight",
    "TooLargeError",
    "float8_activations",
    "quantize",
    "register_format",
    "rounded_activations",
    "shrink",
    "quantised_formats",
]

_OLD = {"SmallWeight": "QuantisedWeight", "small_formats": "quantised_formats"}
"""The names of before 0.2.0; removed in 0.3.0."""


def __getattr__(name: str) -> Any:
    new = _OLD.get(name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"{__name__}.{name} is now {__name__}.{new}; the old name will be removed in 0.3.0"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return globals()[new]
