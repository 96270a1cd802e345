"""Read a JSON body field by field; each error names the field, the expected value and the given one."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lineate.console.names import nearest
from lineate.web.errors import LONGEST_GOT, invalid

DEEPEST = 64
"""Levels of objects and lists within a body; schemas of tools have a dozen."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names of functions and schemas."""


def parse(body: bytes) -> "Fields":
    """Return the fields of a body, which must be a JSON object of finite numbers and whole characters."""
    from pydantic_core import from_json

    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"the body must be JSON, got text that is not ({_reason(error)})", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, got {shown(value)}")
    _check_depth(value)
    return Fields(value)


def _reason(error: ValueError) -> str:
    return str(error)[:200]


def _check_depth(value: Any) -> None:
    """Refuse deep nesting, which would exhaust the stack of recursive code; this check uses no recursion."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for x in level
            if isinstance(x, dict | list)
            for child in (x.values() if isinstance(x, dict) else x)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise invalid(None, f"the body must have at most {DEEPEST} levels of nesting")


def shown(value: Any) -> str:
    """Return a value as JSON, cut to what a message can repeat."""
    text = json.dumps(_beginning(value, iter(range(LONGEST_GOT))), ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_GOT else text[: LONGEST_GOT - 3] + "..."


def _beginning(value: Any, parts: Iterator[int]) -> Any:
    """Return the first parts of a value, truncated only where the rest is longer than a message shows."""
    if isinstance(value, str):
        return value[:LONGEST_GOT]
    if isinstance(value, list):
        return [_beginning(x, parts) for x, _ in zip(value, parts, strict=False)]
    if isinstance(value, dict):
        return {key[:LONGEST_GOT]: _beginning(x, parts) for (key, x), _ in zip(value.items(), parts, strict=False)}
    return value


class Fields:
    """The fields of one JSON object; a missing field and null are equivalent.

    Args:
        value: The object.
        where: Its place in the body, such as "messages[0]"; "" for the body itself.
    """

    def __init__(self, value: dict[str, Any], where: str = "") -> None:
        self.value = value
        self.where = where
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """Return the place of a field in the body."""
        return f"{self.where}.{name}" if self.where else name

    def wrong(self, name: str, expected: str) -> Exception:
        """Return the error of a field that is not as expected."""
        path = self.path(name)
        return invalid(path, f"{path} must be {expected}, got {shown(self.value.get(name))}", "invalid_value")

    def take(self, name: str) -> Any:
        """Return the field's value; None if it is missing."""
        self._read.add(name)
        return self.value.get(name)

    def needed(self, name: str, expected: str) -> Any:
        """Return the field; raise if it is missing."""
        if (found := self.take(name)) is None:
            path = self.path(name)
            raise invalid(path, f"{path} is missing; it must be {expected}", "missing_required_parameter")
        return found

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a finite number in a range."""
        found = self.take(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        if not least <= found <= most or not math.isfinite(found):  # a whole number may be too large for isfinite
            raise self.wrong(name, f"from {least:g} to {most:g}")
        return float(found)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number in a range, or None."""
        found = self.take(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.wrong(name, "a whole number")
        if not least <= found <= most:
            raise self.wrong(name, f"from {least} to {most}")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        found = self.take(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return found

    def text(self, name: str, most: int = 2**31) -> str | None:
        """Return a string of at most `most` characters, or None."""
        found = self.take(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise self.wrong(name, "a string")
        if len(found) > most:
            path = self.path(name)
            raise invalid(
                path, f"{path} must have at most {most} characters, got {len(found)}", "string_above_max_length"
            )
        return found

    def name(self) -> str:
        """Return the field `name` of a function or a schema, which must be a name."""
        expected = "1 to 64 letters, digits, dots, hyphens and underscores"
        self.needed("name", expected)
        found = self.text("name")
        if found is None or not NAME.fullmatch(found):
            raise self.wrong("name", expected)
        return found

    def word(self, name: str, words: Sequence[str]) -> str | None:
        """Return one of these words, or None."""
        found = self.take(name)
        if found is not None and (not isinstance(found, str) or found not in words):
            raise self.wrong(name, f"one of {', '.join(words)}")
        return found

    def items(self, name: str, most: int) -> list[Any] | None:
        """Return a list of at most `most` items, or None."""
        found = self.take(name)
        if found is None:
            return None
        if not isinstance(found, list):
            raise self.wrong(name, "a list")
        if len(found) > most:
            path = self.path(name)
            raise invalid(path, f"{path} must have at most {most} items, got {len(found)}", "array_above_max_length")
        return found

    def objects(self, name: str, most: int) -> list["Fields"] | None:
        """Return a list of objects, or None."""
        found = self.items(name, most)
        if found is None:
            return None
        for i, item in enumerate(found):
            if not isinstance(item, dict):
                path = f"{self.path(name)}[{i}]"
                raise invalid(path, f"{path} must be an object, got {shown(item)}", "invalid_type")
        return [Fields(item, f"{self.path(name)}[{i}]") for i, item in enumerate(found)]

    def child(self, name: str) -> "Fields | None":
        """Return an object, or None."""
        found = self.take(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self.wrong(name, "an object")
        return Fields(found, self.path(name))

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect here."""
        self._read.update(names)

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Refuse fields of OpenAI's API that this server does not support."""
        for name in names:
            if self.take(name) is not None:
                raise invalid(self.path(name), f"{self.path(name)} is not supported: {why}", "unsupported_parameter")

    @property
    def unread(self) -> list[tuple[str, Any]]:
        """The fields that were not read, and their values, without those that are null."""
        return [(name, value) for name, value in self.value.items() if name not in self._read and value is not None]

    def finish(self) -> None:
        """Refuse the first field that was not read."""
        for name, _ in self.unread:
            path = self.path(name[:LONGEST_GOT])
            message = f"unknown field {path!r}{nearest(name[:LONGEST_GOT], self._read)}"
            raise invalid(path, message, "unknown_parameter")
