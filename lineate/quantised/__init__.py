"""Weights of 16, 8 and 4 bits and float8, which stay small in memory and are multiplied with activations of float32."""

from lineate.quantised.format import BY_BITS, FORMATS, TILE, Format, register_format
from lineate.quantised.product import float8_activations, rounded_activations
from lineate.quantised.rounding import GROUP, TooLargeError
from lineate.quantised.weight import SmallWeight, quantize
from lineate.quantised.which import shrink, small_formats

__all__ = [
    "BY_BITS",
    "FORMATS",
    "GROUP",
    "TILE",
    "Format",
    "SmallWeight",
    "TooLargeError",
    "float8_activations",
    "quantize",
    "register_format",
    "rounded_activations",
    "shrink",
    "small_formats",
]
