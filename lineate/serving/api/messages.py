"""Checks the messages and tools of a chat and converts them to the form that templates read."""

from typing import Any

from lineate.serving.api.foreign import OF_MESSAGES
from lineate.web.errors import invalid
from lineate.web.fields import Fields
from lineate.web.limits import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields, limits: Limits) -> tuple[dict[str, Any], ...]:
    """Read the messages; each tool message must answer a call that an assistant's message made before."""
    fields.needed("messages", "a list of messages")
    given = fields.objects("messages", limits.messages)
    if not given:
        raise fields.wrong("messages", "a list of at least one message")
    called: set[str] = set()
    messages = []
    for message in given:
        messages.append(_message(message, called, limits))
        message.ignore(*OF_MESSAGES)
        message.finish()
    return tuple(messages)


def _message(message: Fields, called: set[str], limits: Limits) -> dict[str, Any]:
    message.needed("role", "one of " + ", ".join(ROLES))
    role = message.word("role", ROLES)
    message.refuse(("audio",), "the model reads and writes text")
    message.refuse(("function_call",), "it is deprecated; use tool_calls")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message)}
    name = message.text("name", 256)
    if name is not None:
        result["name"] = name
    if role == "assistant":
        message.text("refusal")
        for key in ("reasoning_content", "reasoning", "thinking"):  # field names of reasoning that clients send back
            if (text := message.text(key)) is not None:
                result["reasoning_content"] = text
        given = message.objects("tool_calls", limits.tools)
        if not given and result["content"] is None:
            raise message.wrong("content", "a string, unless there are tool_calls")
        calls = [_call(call, called) for call in given or ()]
        if whole := [call for call in calls if isinstance(call, dict)]:
            result["tool_calls"] = whole
        texts = (result["content"], *(call for call in calls if isinstance(call, str)))
        result["content"] = "\n\n".join(filter(None, texts))
    elif result["content"] is None:
        raise message.wrong("content", "a string or a list of text parts")
    if role == "tool":
        message.needed("tool_call_id", "the id of a call")
        identity = message.text("tool_call_id", 256)
        if identity not in called:
            raise message.wrong("tool_call_id", "the id of a call that an earlier assistant message made")
        result["tool_call_id"] = identity
    return result


def _content(message: Fields) -> str | None:
    """Return the text of a message; parts are joined."""
    given = message.take("content")
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise message.wrong("content", "a string or a list of text parts")
    texts = []
    for part in message.objects("content", 4096) or ():
        part.needed("type", "text")
        kind = part.take("type")
        if kind not in ("text", "refusal"):
            raise part.wrong("type", "text, as the model reads text alone")
        part.needed(kind, "a string")
        texts.append(part.text(kind) or "")
        part.ignore(*OF_MESSAGES)
        part.finish()
    return "".join(texts)


def _call(call: Fields, called: set[str]) -> dict[str, Any] | str:
    """Return a call of an earlier answer; templates read the arguments as an object.

    A call that was cut has no name, or arguments that are no object, which not every template can show. Its text as the
    model wrote it, without the marker before it, is returned.
    """
    from pydantic_core import from_json

    call.needed("id", "a string")
    identity = call.text("id", 256) or ""
    call.word("type", ("function",))
    call.needed("function", "an object with a name and arguments")
    function = call.child("function")
    assert function is not None
    name = "" if function.take("name") == "" else function.name()
    text = function.text("arguments") or ""
    function.ignore("parsed_arguments")
    function.finish()
    call.ignore("index", *OF_MESSAGES)
    call.finish()
    called.add(identity)
    if not name:
        return text
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    tags = not text.strip() or text.lstrip().startswith("<")
    return f"<function={name}>{text}" if tags else f'{{"name": "{name}", "arguments": {text}'


def read_tools(fields: Fields, limits: Limits) -> tuple[dict[str, Any], ...]:
    """Read the functions that the model may call, with the given schemas."""
    tools = fields.objects("tools", limits.tools)
    names: set[str] = set()
    for tool in tools or ():
        tool.needed("type", "function")
        tool.word("type", ("function",))
        tool.needed("function", "an object with a name")
        function = tool.child("function")
        tool.ignore(*OF_MESSAGES)
        tool.finish()
        assert function is not None
        name = function.name()
        if name in names:
            raise invalid(
                function.path("name"), f"tools must have different names, got {name!r} twice", "invalid_value"
            )
        names.add(name)
        function.text("description")
        function.child("parameters")
        function.flag("strict")
        function.ignore(*OF_MESSAGES)
        function.finish()
    return tuple(tool.value for tool in tools or ())
