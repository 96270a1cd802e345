"""JSON of answers and events, on one line."""

import json
from collections.abc import Sequence
from typing import Any

_LINE_ENDS = {ord(x): f"\\u{ord(x):04x}" for x in "\x85\u2028\u2029"}
"""Line ends of Python's splitlines, by which httpx cuts a stream into events; JSON may escape any character."""


def dump(value: Any) -> str:
    """Return JSON without spaces, for events and answers."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_LINE_ENDS)


PART = 256
"""Values of a list that are encoded in one call, which holds the interpreter's lock until it returns."""


def dump_items(values: Sequence[Any]) -> str:
    """Return the JSON of a long list without its brackets; other threads run meanwhile."""
    return ",".join(dump(values[n : n + PART])[1:-1] for n in range(0, len(values), PART))


def dump_characters(text: str) -> str:
    """Return the JSON of a long text without its quotes; other threads run meanwhile."""
    size = 16 * PART
    return "".join(dump(text[n : n + size])[1:-1] for n in range(0, len(text), size))
