"""Named states of the views: lists of steps for the view "Memory", and the links that open them.

Copies of the page keep their answers, and lessons open them.
"""

from typing import Any

Body = dict[str, Any]
"""The body of a request of the page."""


def _write(key: str, value: str, decay: float = 0.9) -> Body:
    return {"op": "write", "key": key, "value": value, "decay": decay, "beta": 1}


AGAIN, OVERWRITE, ALIKE, FORGET = (
    "A, B, then A again", "overwrite without decay", "four keys that are alike", "write A and B, forget A",
)  # fmt: skip
_FORGET_A: Body = {"op": "forget", "key": "A", "decay": 0}
MEMORIES: dict[str, tuple[float, list[Body]]] = {
    AGAIN: (0, [_write("A", "w"), _write("B", "x"), _write("A", "y")]),
    OVERWRITE: (0, [_write("A", "w", 1), _write("A", "y", 1)]),
    ALIKE: (0.5, [_write(key, value, 1) for key, value in zip("ABCD", "wxyz", strict=True)]),
    FORGET: (0, [_write("A", "w", 1), _write("B", "x", 1), _FORGET_A]),
}
"""Lists of steps, with the cosine of their keys; the first is the page's initial one."""


def memory_link(name: str) -> str:
    """Return the address of the view "Memory" with a list of steps.

    Args:
        name: A name of MEMORIES.
    """
    cosine, steps = MEMORIES[name]
    texts = [f"{x['key']}:{x.get('value', '!')}:{x['decay']}" + (":1" if "value" in x else "") for x in steps]
    return f"#memory?cosine={cosine}&ask={'B' if _FORGET_A in steps else 'A'}&steps={';'.join(texts)}"
