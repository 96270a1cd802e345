"""How many values the JSON of a body has, counted before anything is made of them."""

from lineate.web.errors import invalid

BEGINS = b",[{"
"""A value is behind a comma or a bracket, or is the first one."""
_REST = bytes(set(range(256)) - set(BEGINS + b'"'))


def check_values(body: bytes, most: int) -> None:
    """Raise ApiError if a body has more than `most` values; nothing that is no JSON passes for less than it has.

    A list of millions of lists takes seconds to read, in which the interpreter does nothing else.

    Args:
        body: The body.
        most: The most values.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) < most:  # those within texts included
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _REST)  # quotes, and what values begin with
    # Each text has two quotes and is a value or a key.
    if bare.count(b'"') > 4 * most or sum(map(len, bare.split(b'"')[::2])) >= most:
        raise invalid(None, f"the body must have at most {most} values, got more", "array_above_max_length")
