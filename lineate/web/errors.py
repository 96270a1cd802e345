"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

A message names the field, the expected value and the given one. It never has a path of the server or a stack trace.
"""

from typing import Any

INVALID = "invalid_request_error"
SERVER = "server_error"
LONGEST_GOT = 60
"""Characters of a wrong value that a message repeats."""


class ApiError(Exception):
    """An answer other than 2xx.

    Args:
        status: The HTTP status.
        message: What is wrong, for the client.
        kind: OpenAI's "type".
        param: The field of the body that is wrong, such as "messages[0].role".
        code: A word that programs can compare.
        retry_after: Seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return the error of a body whose field is wrong."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str | None) -> ApiError:
    """Return the error of a prompt that does not fit together with the requested tokens."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def queue_full(seconds: int) -> ApiError:
    """Return the error of a request that arrives while the queue is full."""
    message = f"the queue is full; try again after {seconds} s"
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=seconds)


def unavailable(message: str, code: str, seconds: int = 5) -> ApiError:
    """Return the error of a server that takes no requests now."""
    return ApiError(503, message, SERVER, code=code, retry_after=seconds)


def shutting_down(message: str) -> ApiError:
    """Return the error of a server that takes no new requests, or has ended one because it shuts down."""
    return unavailable(message, "shutting_down")


def internal(request_id: str) -> ApiError:
    """Return the error of an internal failure: only the log has the reason, under this id."""
    return ApiError(500, f"the server failed to answer request {request_id}", SERVER, code="internal_error")
