"""Calls of tools and reasoning in a model's text: found while the text arrives, and forced by a grammar.

    Qwen       <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    Qwen3.5    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    Kimi       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>

A call that cannot be read stays text: nothing that the model wrote is lost.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lineate.serving.api.guides import JSON_OPTIONS

ENDS = {"<tool_call>": "</tool_call>", "<|tool_call_begin|>": "<|tool_call_end|>"}
"""What a call begins and ends with."""
ARGUMENTS = "<|tool_call_argument_begin|>"
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
"""What Kimi writes around all calls."""
THINK, THOUGHT = "<think>", "</think>"
MARKERS = (*ENDS, *ENDS.values(), ARGUMENTS, *SECTION, THINK, THOUGHT)
"""Texts that may be tokens of their own; a parser must see them even if a tokenizer does not show them."""

MOST_REPEATS = 4096
"""The longest maxLength of a string that a grammar counts in Qwen3.5's form."""


@dataclass(frozen=True)
class Said:
    """A piece of an answer's text."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Called:
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object."""
    id: str


class AnswerParser:
    """Divides a model's text, piece by piece, into reasoning, content and calls.

    Args:
        tools: The functions that may be called; without any, calls are text.
        reasoning: "open" if the prompt ended inside of <think>, "maybe" if the text may begin with it, "" if neither.
        trim: Whether white space at the beginning is left out.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], reasoning: str = "", trim: bool = False) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._plain = not tools and not reasoning and not trim
        self._held = ""
        self._space = ""  # white space that is dropped if a call follows
        self._fresh = trim  # whether white space that comes now is left out, as after a marker
        self._thinking = reasoning == "open"
        self._may_think = reasoning == "maybe"
        self._opener = ""  # of the call that is being read
        self.calls = 0

    def push(self, text: str) -> list[Said | Called]:
        """Return what is certain after more text."""
        if self._plain:
            return [Said(text)] if text else []
        self._held += text
        parts: list[Said | Called] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Said | Called]:
        """Return what is left when the text has ended; a call without its end counts if it can be read."""
        parts: list[Said | Called] = []
        if self._opener:
            self._call(self._held, "", parts)
        elif self._held:
            self._say(self._held, parts)
        self._held = ""
        if self._space and not self._fresh:
            parts.append(Said(self._space, self._thinking))
        self._space = ""
        return parts

    def _step(self, parts: list[Said | Called]) -> bool:
        """Take one marker and what stands before it from the held text; return whether there was one."""
        if self._opener:
            body, end, rest = self._held.partition(ENDS[self._opener])
            if not end:
                return False
            self._call(body, end, parts)
            self._held = rest
            return True
        markers = self._expected()
        at, marker = min(((self._held.find(x), x) for x in markers if x in self._held), default=(-1, ""))
        if at < 0:
            kept = max((n for x in markers for n in range(1, len(x)) if self._held.endswith(x[:n])), default=0)
            cut = len(self._held) - kept
            self._say(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        self._say(self._held[:at], parts)
        self._held = self._held[at + len(marker) :]
        if marker in ENDS:
            self._opener = marker
        else:
            self._space, self._fresh = "", True
            self._thinking = marker == THINK
            self._may_think = False
        return True

    def _expected(self) -> tuple[str, ...]:
        if self._thinking:
            return (THOUGHT,)
        begun = self._held.lstrip()
        self._may_think = self._may_think and (begun.startswith(THINK) or THINK.startswith(begun))
        begins = (THINK,) if self._may_think else ()
        return (*begins, *ENDS, *SECTION) if self._schemas else begins

    def _say(self, text: str, parts: list[Said | Called]) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if self._fresh:
            body = body.lstrip()
        if body:
            parts.append(Said(body, self._thinking))
            self._fresh = self._may_think = False

    def _call(self, body: str, end: str, parts: list[Said | Called]) -> None:
        call = read_call(body, self._opener, self._schemas)
        opener, self._opener = self._opener, ""
        if call is None:
            self._say(opener + body + end, parts)
        else:
            parts.append(call)
            self._space, self._fresh = "", True
            self.calls += 1


def read_call(body: str, opener: str, schemas: dict[str, dict[str, Any]]) -> Called | None:
    """Return the call between two markers, or None if it is none."""
    made = f"call_{secrets.token_hex(12)}"
    if opener != "<tool_call>":
        name, marker, text = body.partition(ARGUMENTS)
        found = re.fullmatch(r"(?:functions\.)?([\w.-]+?)(?::\d+)?", name.strip())
        arguments = _object(text)
        if not marker or found is None or arguments is None:
            return None
        return Called(found[1], arguments, name.strip() if ":" in name else made)
    if "<function=" in body:
        return _read_tags(body, schemas, made)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or _dump(value) is None:
        return None
    given = value.get("arguments", value.get("parameters", {}))
    arguments = _object(given) if isinstance(given, str) else _dump(given)
    return None if arguments is None else Called(value["name"], arguments, made)


def _read_tags(body: str, schemas: dict[str, dict[str, Any]], made: str) -> Called | None:
    """Read Qwen3.5's form, whose values are text; the function's schema says which of them are JSON."""
    found = re.search(r"<function=([^>\n]+)>(.*)", body, re.DOTALL)
    if found is None:
        return None
    name, inner = found[1].strip(), found[2]
    properties = schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    arguments = {}
    for key, given in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", inner, re.DOTALL):
        arguments[key.strip()] = _value(given, properties.get(key.strip()))
    text = _dump(arguments)
    return None if text is None else Called(name, text, made)


def _value(text: str, schema: Any) -> Any:
    """Return a value as its schema says: a string stays text, anything else is JSON if it can be read as such."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _object(text: str) -> str | None:
    """Return the text of a JSON object, or None if it is none."""
    try:
        return _dump(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _dump(value: Any) -> str | None:
    """Return an object as JSON; None for what no JSON can have, such as NaN and halves of characters."""
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text


def form_of(template: str) -> str:
    """Return which form of calls a template asks for: "tags", "kimi", or "json"."""
    if "<function=" in template:
        return "tags"
    return "kimi" if "<|tool_call_begin|>" in template else "json"


def calls_grammar(
    form: str, tools: Sequence[dict[str, Any]], parallel: bool, encode: Callable[[str], list[int]]
) -> str:
    """Return a grammar of one or more calls of these tools.

    Args:
        form: "json", "tags" or "kimi".
        tools: The functions that may be called.
        parallel: Whether there may be several calls.
        encode: Encodes a marker; one that is a single token is only allowed as that token.
    """
    rules: list[str] = []
    calls = []
    for n, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}
        if form == "tags":
            inner = [_quoted(f"\n<function={name}>\n"), *_tag_rules(n, schema, rules), _quoted("</function>\n")]
        else:
            rules.append(f"arguments_{n}: {_json_rule(schema)}")
            if form == "kimi":
                begins = [_quoted(f"functions.{name}:"), "/[0-9]{1,3}/", _marker(ARGUMENTS, encode)]
                inner = [*begins, f"arguments_{n}"]
            else:
                begin = _quoted(f'\n{{"name": "{name}", "arguments": ')
                inner = [begin, f"arguments_{n}", _quoted("}\n")]
        rules.append(f"call_{n}: {' '.join(inner)}")
        calls.append(f"call_{n}")
    opener = "<|tool_call_begin|>" if form == "kimi" else "<tool_call>"
    rules.append(f"call: {_marker(opener, encode)} ({' | '.join(calls)}) {_marker(ENDS[opener], encode)}")
    if form == "kimi":
        body = "call+" if parallel else "call"
        start = f"{_marker(SECTION[0], encode)} {body} {_marker(SECTION[1], encode)}"
    else:
        start = 'call ("\\n" call)*' if parallel else "call"
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _tag_rules(n: int, schema: dict[str, Any], rules: list[str]) -> list[str]:
    """Add the rules of a function's parameters in Qwen3.5's form; return how they follow each other."""
    found: list[str] = []
    properties, required = schema.get("properties"), schema.get("required")
    for i, (key, own) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        name = f"value_{n}_{i}"
        if isinstance(own, dict) and own.get("type") == "string" and "enum" not in own:
            most = own.get("maxLength")
            repeat = f"{{0,{most}}}" if isinstance(most, int) and 0 <= most <= MOST_REPEATS else "*"
            rules.append(f'{name}[suffix="\\n</parameter>\\n"]: /(?s:.{repeat})/')
            end = ""
        elif isinstance(own, dict) and (words := _words(own.get("enum"))):
            rules.append(f"{name}: {' | '.join(map(_quoted, words))}")
            end = _quoted("\n</parameter>\n")
        else:
            whole = own if not isinstance(own, dict) else own | {x: schema[x] for x in ("$defs",) if x in schema}
            rules.append(f"{name}: {_json_rule(whole)}")
            end = _quoted("\n</parameter>\n")
        parameter = f"({_quoted(f'<parameter={key}>')} {_quoted(chr(10))} {name} {end})"
        found.append(parameter if isinstance(required, list) and key in required else parameter + "?")
    return found


def _words(enum: Any) -> list[str]:
    """Return the values of an enum if all of them are strings, else nothing."""
    return enum if isinstance(enum, list) and all(isinstance(x, str) for x in enum) else []


def _json_rule(schema: Any) -> str:
    """Return a rule for JSON of a schema, with bounded white space."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, encode: Callable[[str], list[int]]) -> str:
    ids = encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else _quoted(text)
