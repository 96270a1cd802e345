"""Parses the text of one tool call, complete or truncated.

    Qwen       <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    Qwen3.5    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    Kimi       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>

A call is parsed completely or not at all. Arguments that were written as JSON are passed on unchanged. `may_become`
never refuses the beginning of a text that `read_call` reads, so it does not matter in which pieces a text arrives.
"""

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TAGS = "<function="
"""Begins a call in Qwen3.5's form; Qwen3-Coder sometimes writes it without <tool_call>."""
KIMI = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
"""The markers of Kimi around all calls."""
ENDS = {"<tool_call>": "</tool_call>", KIMI: "<|tool_call_end|>"}
"""The markers at the beginning and at the end of a call."""
CLOSED = {**ENDS, TAGS: "</function>", SECTION[0]: ENDS[KIMI]}
"""All markers that begin a call, with the corresponding ends."""

_DECODER = json.JSONDecoder()
_KEY, _COLON = re.compile(r"[{,]?\s*\""), re.compile(r"\s*:\s*")
_KEYS = {"name", "arguments", "parameters", "type"}
_KIMI_NAME = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = "</parameter>"
_AFTER_VALUE = re.compile(r"\s*(?:</function>\s*\Z|(<parameter=[^>\n]+>))")
_FUNCTION_END = re.compile(r"</function>\s*\Z")
_UNCLOSED = re.compile(r"</function>\s*</tool_call>")
"""Within a value it means that the model did not close the value."""
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Called:
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object; if the call was truncated, its text so far."""
    id: str
    cut: bool = False
    """Whether the text ended within the call. An incomplete name is then "" and part of the arguments."""


def read_call(text: str, opener: str, schemas: dict[str, dict[str, Any]]) -> Called | None:
    """Return the call between two markers, or None if the text is not a call.

    Args:
        text: The text after the opener, without its end; for TAGS with its end.
        opener: One of CLOSED.
        schemas: The parameters of each function.
    """
    form, body = _form(text, opener)
    if form == "kimi":
        name, marker, arguments = body.partition(ARGUMENTS)
        found, given = _KIMI_NAME.fullmatch(name.strip()), _object(arguments)
        if not marker or found is None or given is None:
            return None
        return Called(found[1], given, name.strip() if ":" in name else _new_id())
    if form == "tags":
        return _read_tags(body, schemas, opener == TAGS)
    return _read_json(body) if form == "json" else None


def may_become(text: str, opener: str, schemas: dict[str, dict[str, Any]]) -> bool:
    """Whether a text can be the beginning of a call.

    Args:
        text: The text after the opener; a part of the end marker at its end is not recognised.
        opener: One of CLOSED.
        schemas: The parameters of each function.
    """
    form, body = _form(text, opener)
    if form == "kimi":
        name, marker, arguments = body.partition(ARGUMENTS)
        if marker:
            return _KIMI_NAME.fullmatch(name.strip()) is not None and _may_be_json(arguments)
        name = name[: len(name) - overlap(name, (ARGUMENTS,))].strip()
        return not name or _KIMI_NAME.fullmatch(name) is not None or re.fullmatch(r"[\w.-]+:", name) is not None
    if form == "tags":
        tags = _scan(body)
        return tags.state != "wrong" and (opener != TAGS or not tags.name or tags.name in schemas)
    return form == "" or (form == "json" and _may_be_json(body) and {key for key, *_ in _members(body)} <= _KEYS)


def cut_call(text: str, opener: str) -> Called | None:
    """Return a truncated call that may_become allows; None if its text is empty.

    Args:
        text: The text after the opener.
        opener: One of CLOSED.
    """
    form, body = _form(text, opener)
    if form == "kimi":
        name, marker, arguments = body.partition(ARGUMENTS)
        found = _KIMI_NAME.fullmatch(name.strip())
        if marker and found is not None:
            return Called(found[1], arguments, name.strip() if ":" in name else _new_id(), True)
    elif form == "tags":
        if (begun := _FUNCTION.match(body)) is not None:
            return Called(begun[1].strip(), body[begun.end(1) + 1 :], _new_id(), True)
    elif form == "json":
        members = {key: (start, end) for key, start, end in _members(body)}
        name_start, name_end = members.get("name", (0, None))
        if name_end is not None:
            start, end = members.get("arguments", members.get("parameters", (len(body), None)))
            if end is None or not body[end:].strip(" \n\r\t,}"):
                return Called(str(json.loads(body[name_start:name_end])), body[start:end], _new_id(), True)
    return Called("", body.lstrip(), _new_id(), True) if body.strip() else None


def ends_call(text: str, at: int, ended: bool) -> bool | None:
    """Whether a call without an opener can end here, because only another marker follows; None if more text is needed.

    Args:
        text: The text.
        at: The position after </function>.
        ended: Whether the text is complete.
    """
    rest = text[at : at + 64].lstrip() or text[at:].lstrip()
    following = ("</tool_call>", "<tool_call>", TAGS)
    if rest.startswith(following):
        return True
    return (True if ended else None) if any(x.startswith(rest) for x in following) else False


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    return max((n for x in markers for n in range(1, len(x)) if text.endswith(x[:n])), default=0)


def _form(text: str, opener: str) -> tuple[str, str]:
    """Return the form of a call ("" if there is only white space so far) and its text in that form."""
    if opener == KIMI:
        return "kimi", text
    if opener == TAGS:
        return "tags", TAGS + text
    begun = text.lstrip()
    if opener == SECTION[0]:
        return (
            ("kimi", begun[len(KIMI) :])
            if begun.startswith(KIMI)
            else ("" if KIMI.startswith(begun) else "none", begun)
        )
    return ("tags" if begun.startswith("<") else "json" if begun else ""), text


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


# JSON.


def _read_json(body: str) -> Called | None:
    value = _parsed(body)
    if not isinstance(value, dict):
        return None
    members = list(_members(body))
    keys, name = {key for key, *_ in members}, value.get("name")
    known = keys <= _KEYS and len(keys) == len(members) and not {"arguments", "parameters"} <= keys
    if not known or not isinstance(name, str) or not name or value.get("type", "function") != "function":
        return None  # a key more would be lost
    given = "parameters" if "parameters" in keys else "arguments"
    if given in keys and value[given] in (None, ""):  # so models call functions without parameters
        arguments: str | None = "{}"
    elif isinstance(value.get(given), str):  # JSON within JSON
        arguments = _object(value[given])
    else:
        arguments = _object(next((body[start:end] for key, start, end in members if key == given), "{}"))
    return None if arguments is None else Called(name, arguments, _new_id())


def _members(body: str) -> Iterator[tuple[str, int, int | None]]:
    """Yield the keys of a JSON object, and where their values begin and end; None for a truncated value."""
    at = len(body) - len(body.lstrip())
    while (quote := _KEY.match(body, at)) is not None:
        try:
            key, at = _DECODER.raw_decode(body, quote.end() - 1)
        except ValueError:
            return
        colon = _COLON.match(body, at)
        if colon is None:
            return
        try:
            _, at = _DECODER.raw_decode(body, colon.end())
        except (ValueError, RecursionError):
            yield key, colon.end(), None
            return
        yield key, colon.end(), at
        at = len(body) - len(body[at:].lstrip())


def _parsed(text: str) -> Any:
    """Return the value of JSON; None for anything else, such as NaN and lone surrogates."""
    from pydantic_core import from_json

    try:
        value = from_json(text, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # a number beyond float was read as infinity
    except (ValueError, RecursionError):
        return None
    return value


def _object(text: str) -> str | None:
    """Return the text of a JSON object, or None if it is something else."""
    return text.strip() if isinstance(_parsed(text), dict) else None


def _may_be_json(text: str) -> bool:
    """Whether a text is a JSON object or the beginning of one."""
    from pydantic_core import from_json

    begun = text.lstrip()
    if not begun.startswith("{"):
        return not begun
    try:
        from_json(begun, allow_inf_nan=False)
    except ValueError as error:
        return "EOF" in str(error)
    return True


# Tags.


@dataclass(frozen=True)
class _Tags:
    """The contents of a call with tags."""

    state: str
    """ "whole", "open" if more must come, or "wrong"."""
    name: str = ""
    values: tuple[tuple[str, str], ...] = ()


def _scan(body: str) -> _Tags:
    """Divide a call into its parameters.

    A value ends at </parameter> only if another parameter or the end of the call follows, because values may contain
    this tag themselves. A repeated parameter, and text between parameters, make the call wrong.
    """
    begun = _FUNCTION.match(body)
    if begun is None:
        rest = body.lstrip()
        open_ = TAGS.startswith(rest) or (rest.startswith(TAGS) and not {"\n", ">"} & set(rest[len(TAGS) :]))
        return _Tags("open" if open_ else "wrong")
    name, at = begun[1].strip(), begun.end()
    values: dict[str, str] = {}
    while True:
        if _FUNCTION_END.match(body, at):
            return _Tags("whole", name, tuple(values.items()))
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            rest = body[at:]
            begins = "</function>".startswith(rest) or "<parameter=".startswith(rest)
            begins = begins or (rest.startswith("<parameter=") and not {"\n", ">"} & set(rest))
            return _Tags("open" if begins else "wrong", name)
        key, start = parameter[1].strip(), parameter.end()
        if key in values:
            return _Tags("wrong", name)
        end, after = _value_end(body, start)
        if _UNCLOSED.search(body, start, len(body) if end is None else end):
            return _Tags("wrong", name)
        if end is None:
            return _Tags("open", name)
        values[key] = body[start:end].removeprefix("\n").removesuffix("\n")
        at = after


def _value_end(body: str, start: int) -> tuple[int | None, int]:
    """Return the end of a value (None if it has none) and the beginning of the next tag."""
    at = start
    while (end := body.find(_PARAMETER_END, at)) >= 0:
        at = end + len(_PARAMETER_END)
        if _AFTER_VALUE.match(body, at):
            return end, body.index("<", at)
    return None, 0


def _read_tags(body: str, schemas: dict[str, dict[str, Any]], only_known: bool) -> Called | None:
    """Read Qwen3.5's form, whose values are text; the function's schema says which of them are JSON."""
    tags = _scan(body)
    if tags.state != "whole" or not tags.name or (only_known and tags.name not in schemas):
        return None
    properties = schemas.get(tags.name, {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    pairs = [f"{_quoted(key)}: {_value(text, properties.get(key))}" for key, text in tags.values]
    arguments = _object("{" + ", ".join(pairs) + "}")
    return None if arguments is None else Called(tags.name, arguments, _new_id())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(text: str, schema: Any) -> str:
    """Return a value as JSON: a string according to the schema, or text that is not JSON, stays text."""
    types = _types(schema)
    if types == {"string"}:
        return _quoted(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _quoted(text)
    if _object(f'{{"value": {text}}}') is None:  # Python accepts more than JSON: NaN, 1e999, lone surrogates
        return _quoted(text)
    kind = "null" if value is None else _TYPES[type(value)]
    is_string = "string" in types and kind not in types and not (kind == "integer" and "number" in types)
    return _quoted(text) if is_string or (isinstance(value, str) and "string" in types) else text


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names; empty if it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {x for x in (named if isinstance(named, list) else [named]) if isinstance(x, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = found.union(*map(_types, schema[key]))
    return found
