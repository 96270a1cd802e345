"""Checks of a configuration's fields: each is of its declared type, and no size is beyond what any model has.

A configuration may come from anyone's file. Sizes are bounded before anything is made of them, so that a slip of the
pen, or malice, costs an error and not an hour or all memory; a checkpoint's tensors bound them further.
"""

from dataclasses import fields
from types import NoneType
from typing import Any, get_args

MOST_LAYERS = 4096
MOST_CHANNELS = 2**24
"""Of any one size: hidden, vocabulary, heads times channels, tokens of a chunk or window."""
MOST_EXPERTS = 2**16
MOST_PIECES = 2**18
"""Heads, or experts, of all layers together; a checkpoint may have a piece for each."""
MOST_NUMBER = 2**63 - 1
MOST = {"n_layers": MOST_LAYERS, "count": MOST_EXPERTS}
UNBOUNDED = ("max_position", "bos_token_id", "pad_token_id")
"""Numbers that nothing is made of."""
MAY_BE_ZERO = ("conv_size", "window", "rotary_dim", "shared_size", "rope_dim", "nope_dim")
CHOICES = {
    "gate_activation": ("silu", "sigmoid"),
    "feature_map": ("identity", "elu+1"),
    "qk_norm": ("head", "full", None),
    "titans": ("linear", "mlp"),
    "scores": ("softmax", "sigmoid"),
}


def check_fields(part: Any, prefix: str = "") -> None:
    """Raise a TypeError or ValueError that names the first field which is not as its annotation says."""
    for field in fields(part):
        if not field.init:
            continue
        name, value = prefix + field.name, getattr(part, field.name)
        kinds = get_args(field.type) or (field.type,)
        if value is None and NoneType in kinds:
            continue
        if field.name in CHOICES:
            if not isinstance(value, str | None) or value not in CHOICES[field.name]:
                words = ", ".join(map(repr, CHOICES[field.name]))
                raise ValueError(f"{name} must be one of {words}, got {show(value)}")
        elif bool in kinds:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be true or false, got {show(value)}")
        elif Ellipsis in kinds:  # tuple[int, ...]
            check_whole_numbers(name, value)
        elif int in kinds:
            if field.name in UNBOUNDED:
                check_whole(name, value, -MOST_NUMBER, MOST_NUMBER)
            else:
                check_whole(name, value, int(field.name not in MAY_BE_ZERO), MOST.get(field.name, MOST_CHANNELS))
        elif float in kinds:
            _check_number(name, value)
        elif not isinstance(value, kinds):
            raise TypeError(f"{name} must be {_kind(kinds)}, got {show(value)}")


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {show(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {show(value)}")


def check_whole_numbers(name: str, values: Any, least: int = -MOST_NUMBER, most: int = MOST_NUMBER) -> None:
    """A list or tuple of whole numbers."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of whole numbers, got {show(values)}")
    for value in values:
        check_whole(f"every number of {name}", value, least, most)


def check_product(name: str, product: int, most: int = MOST_CHANNELS) -> None:
    """Two sizes that are both possible may be impossible together."""
    if product > most:
        raise ValueError(f"{name} must be at most {most:,}, got {show(product)}")


def show(value: Any) -> str:
    """A value of anyone's file, cut to what fits on a line."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 100:
            return f"a number of about {value.bit_length() * 3 // 10} digits"
        return f"{value:,}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_number(name: str, value: Any) -> None:
    """Finite and above 0; the deviation of the first weights may be 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    zero = name == "initializer_range"
    if not 0 <= value <= 1e300 or (value == 0 and not zero):
        text = show(value) if isinstance(value, int) else value
        raise ValueError(f"{name} must be finite and {'at least' if zero else 'above'} 0, got {text}")


def _kind(kinds: tuple[Any, ...]) -> str:
    named = [kind.__name__ for kind in kinds if kind is not NoneType]
    return " or ".join(["text" if name == "str" else f"a {name}" for name in named])
