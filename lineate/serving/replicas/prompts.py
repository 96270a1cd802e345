"""Prompts in the form that the router compares: the text of a body in blocks of 16 characters or tokens.

Two prompts with the same beginning have the same first blocks, whatever the chat template does with their messages. The
body is not validated here; the replica reports its errors.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lineate.serving.api.bodies import check_values
from lineate.web.errors import ApiError

BLOCK = 16
"""Characters, or ids of tokens, of a block."""
IDS = 2**20
"""Ids of tokens in the prompts of a completion; one with more goes to the least busy replica."""


@dataclass(frozen=True)
class PromptReader:
    """How the prompt of a body is read."""

    read: Callable[[Mapping[str, Any]], Sequence[Any]]
    """Returns the text of the prompt, or its ids, from the fields of a body."""
    ids: int = 0
    """The most ids of tokens that are read, besides other values."""


def blocks_of(reader: PromptReader | None, body: bytes, most: int) -> "array[int]":
    """Return the blocks of a request's prompt; none if it has no prompt that can be read, or too many values.

    Args:
        reader: How the prompt is read; None: there is none.
        body: The body of the request.
        most: The most values, besides ids.
    """
    if reader is None:
        return array("q")
    from pydantic_core import from_json

    try:
        check_values(body, most + reader.ids)
        fields = from_json(body)
    except (ApiError, ValueError):
        return array("q")
    if not isinstance(fields, Mapping):
        return array("q")
    return _numbers(reader.read(fields))


def _prompt(fields: Mapping[str, Any]) -> Sequence[Any]:
    """Return the first of the prompts of a completion: a text, or ids of tokens."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str | list) else ""


def _chat(fields: Mapping[str, Any]) -> str:
    """Return the text of a conversation, after its tools, which templates put first."""
    messages = fields.get("messages")
    parts = [str(fields["tools"])] if fields.get("tools") else []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            more = {name: x for name, x in message.items() if name not in ("role", "content") and x is not None}
            parts.append(f"\x1e{message.get('role')}\x1f{_content(message.get('content'))}{more or ''}")
    return "".join(parts)


def _content(content: Any) -> str:
    """Return the text of a message, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else "" for part in content)
    return content if isinstance(content, str) else ""


def _numbers(items: Sequence[Any]) -> "array[int]":
    """Return a number for each whole block; Python's hash is the same for the same block within a process."""
    starts = range(0, len(items) - BLOCK + 1, BLOCK)
    if isinstance(items, str):
        return array("q", [hash(items[n : n + BLOCK]) for n in starts])
    return array("q", [hash(str(items[n : n + BLOCK])) for n in starts])


CHAT, COMPLETIONS = PromptReader(_chat), PromptReader(_prompt, IDS)
