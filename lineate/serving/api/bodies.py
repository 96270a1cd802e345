"""Counts the values in the JSON of a body before it is parsed."""

from lineate.web.errors import invalid

BEGINS = b",[{"
"""A value follows a comma or a bracket, or is the first one."""
_REST = bytes(set(range(256)) - set(BEGINS + b'"'))


def check_values(body: bytes, most: int) -> None:
    """Raise ApiError if a body has more than `most` values; the count is never too low, also for invalid JSON.

    A list of millions of lists takes seconds to parse, which blocks the interpreter.

    Args:
        body: The body.
        most: The most values.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) < most:  # those within texts included
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _REST)  # quotes and starts of values
    # Each text has two quotes and is a value or a key.
    if bare.count(b'"') > 4 * most or sum(map(len, bare.split(b'"')[::2])) >= most:
        raise invalid(None, f"the body must have at most {most} values, got more", "array_above_max_length")
