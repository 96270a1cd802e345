"""A request in the form sent to a replica."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from lineate.serving.replicas.prompts import PromptReader, blocks_of


@dataclass(frozen=True)
class Call:
    """A complete HTTP request.

    Args:
        method: GET, POST, ...
        path: The path, decoded.
        query: The part after the question mark.
        headers: Names in lower case, and values.
        body: The body.
        blocks: The blocks of the prompt, for the router.
        ticket: The name under which the router counts it. The blocks and the ticket stay in the process of the front.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    blocks: "array[int]" = field(default_factory=lambda: array("q"), repr=False, compare=False)
    ticket: str = field(default="", compare=False)

    @classmethod
    def of(cls, scope: Any, body: bytes = b"", most: int = 0, prompt: PromptReader | None = None) -> "Call":
        """Return the call of an ASGI scope.

        Args:
            scope: The scope of a request.
            body: Its body.
            most: The most values of a body that is read, besides ids (blocks_of).
            prompt: How the prompt of the body is read, for the router; None: it has none.
        """
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        blocks = blocks_of(prompt, body, most)
        return cls(scope["method"], scope["path"], scope.get("query_string", b""), headers, body, blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.method, self.path, self.query, self.headers, self.body)

    def scope(self) -> dict[str, Any]:
        """Return its ASGI scope for a replica."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode("utf-8", "surrogateescape"),
            "query_string": self.query,
            "root_path": "",
            "headers": [list(pair) for pair in self.headers],
            "client": None,
            "server": None,
        }
