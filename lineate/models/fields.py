"""Checks of a configuration's fields: each is of its declared type, and no size is beyond what any model has.

A configuration may come from an untrusted file. Sizes are bounded before anything is allocated, so that a typo or an
attack raises an error instead of taking an hour or all memory; a checkpoint's tensors bound them further.
"""

from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

MOST_LAYERS = 4096
MOST_CHANNELS = 2**24
"""The upper bound of any one size: hidden, vocabulary, heads times channels, tokens of a chunk or window."""
MOST_EXPERTS = 2**16
MOST_PIECES = 2**18
"""The upper bound of heads, or experts, of all layers together; a checkpoint may have a piece for each."""
MOST_NUMBER = 2**63 - 1
MOST = {"n_layers": MOST_LAYERS, "count": MOST_EXPERTS}
UNBOUNDED = ("max_position", "bos_token_id", "pad_token_id")
"""Fields whose numbers are not the size of anything."""


def check_fields(part: Any, prefix: str = "") -> None:
    """Raise a TypeError or ValueError that names the first field which is not as its annotation says.

    A field's metadata may have `choices`, the values it takes, and `least`, its smallest whole number; without `least`
    that is 1, or the default if the default is less. With `negative` a float must be below 0. The contents of mappings
    are not checked.
    """
    hints = get_type_hints(type(part))
    for field in fields(part):
        if not field.init:
            continue
        name, value, kinds = prefix + field.name, getattr(part, field.name), alternatives(hints[field.name])
        if value is None and NoneType in kinds:
            continue
        if "choices" not in field.metadata:
            _check_hint(name, hints[field.name])
        if any(get_origin(kind) is dict for kind in kinds):
            if not isinstance(value, dict):
                raise TypeError(f"{name} must be a dict, got {show(value)}")
        elif "choices" in field.metadata:
            choices = field.metadata["choices"]
            if not isinstance(value, str | None) or value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {show(value)}")
        elif bool in kinds:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be true or false, got {show(value)}")
        elif any(get_origin(kind) is tuple for kind in kinds):
            check_whole_numbers(name, value)
        elif int in kinds and float not in kinds:
            if field.name in UNBOUNDED:
                check_whole(name, value, -MOST_NUMBER, MOST_NUMBER)
            else:
                check_whole(name, value, _least(field), MOST.get(field.name, MOST_CHANNELS))
        elif float in kinds:
            _check_number(name, value, field)
        elif not isinstance(value, kinds):
            raise TypeError(f"{name} must be {_kind(kinds)}, got {show(value)}")


def _check_hint(name: str, hint: Any) -> None:
    """Raise if the annotation, which may be a user's, is one whose values cannot be checked."""
    for kind in alternatives(hint):
        if kind is Any or not (isinstance(kind, type) or get_origin(kind) is dict or kind == tuple[int, ...]):
            raise TypeError(
                f"{name} must be declared as bool, int, float, str, tuple[int, ...], dict, a frozen dataclass, or one "
                f"of them | None, got {hint}; change the annotation"
            )


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type of another annotation."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _least(field: Field[Any]) -> int:
    given = field.metadata.get("least", field.default if isinstance(field.default, int) else 1)
    return min(int(given), 1)


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {show(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {show(value)}")


def check_whole_numbers(name: str, values: Any, least: int = -MOST_NUMBER, most: int = MOST_NUMBER) -> None:
    """Raise unless this is a list or tuple of whole numbers."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of whole numbers, got {show(values)}")
    for value in values:
        check_whole(f"every number of {name}", value, least, most)


def check_product(name: str, product: int, most: int = MOST_CHANNELS) -> None:
    """Raise if two sizes that are both possible are impossible together."""
    if product > most:
        raise ValueError(f"{name} must be at most {most:,}, got {show(product)}")


def show(value: Any) -> str:
    """Return a value from an untrusted file as text, cut to fit on a line."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 100:
            return f"a number of about {value.bit_length() * 3 // 10} digits"
        return f"{value:,}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_number(name: str, value: Any, field: Field[Any]) -> None:
    """Raise unless the number is finite and above 0; 0 and less are allowed if the default is 0 or less.

    With `negative` in the field's metadata it must be below 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if field.metadata.get("negative"):
        if not -1e300 <= value < 0:
            raise ValueError(f"{name} must be finite and below 0, got {show(value)}")
        return
    usual = field.default if isinstance(field.default, int | float) else 1
    least = -1e300 if usual < 0 else 0
    zero = name == "initializer_range" or usual <= 0
    if not least <= value <= 1e300 or (value == 0 and not zero):
        text = show(value) if isinstance(value, int) else value
        bound = "" if usual < 0 else f" and {'at least' if zero else 'above'} 0"
        raise ValueError(f"{name} must be finite{bound}, got {text}")


def _kind(kinds: tuple[Any, ...]) -> str:
    named = [kind.__name__ for kind in kinds if kind is not NoneType]
    return " or ".join(["text" if name == "str" else f"a {name}" for name in named])
