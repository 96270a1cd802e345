"""Tool calls and reasoning in a model's text: parsed while the text arrives, and enforced by a grammar.

calls.py has the forms of a call. Text that is not a call stays text; a truncated call has arguments that end where the
text does. So every character of a text is part of exactly one text or call, except for markers and the white space
around them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lineate.serving.api import calls
from lineate.serving.api.calls import CLOSED, ENDS, SECTION, TAGS, Called, ends_call, may_become, overlap, read_call
from lineate.serving.api.guides import JSON_OPTIONS

THINK, THOUGHT = "<think>", "</think>"
MARKERS = (*ENDS, *ENDS.values(), calls.ARGUMENTS, *SECTION, THINK, THOUGHT)
"""Texts that may be special tokens; the parser needs them even if a tokenizer hides them."""

FIRST_LOOK = 32
"""Characters after an opener after which a text that cannot become a call is released."""
MOST_REPEATS = 4096
"""The longest maxLength of a string that a grammar counts in Qwen3.5's form."""


@dataclass(frozen=True)
class Said:
    """A piece of an answer's text."""

    text: str
    reasoning: bool = False


class AnswerParser:
    """Divides a model's text, piece by piece, into reasoning, content and calls.

    A call in reasoning counts if the reasoning is never closed, so text from there on is held back until this is known.

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
        self._fresh = trim  # whether the next white space is dropped, as after a marker
        self._thinking = reasoning == "open"
        self._may_think = reasoning == "maybe"
        self._opener = ""  # of the call that is being read
        self._seen = 0  # from where its end is searched
        self._look = FIRST_LOOK  # its length at the next check
        self._ready: tuple[Called, int] | None = None  # a call and its end, while reasoning may still continue
        self._left_open = False  # whether the last call had no opener, so that its </tool_call> is left
        self.calls = 0
        """How many calls were complete."""

    def push(self, text: str) -> list[Said | Called]:
        """Add text; return the pieces that are certain."""
        if self._plain:
            return [Said(text)] if text else []
        self._held += text
        parts: list[Said | Called] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, cut: bool = False) -> list[Said | Called]:
        """Return the rest when the text has ended; a call without its end counts if it can be parsed.

        Args:
            cut: Whether the text was truncated by a limit.
        """
        parts: list[Said | Called] = []
        while self._step(parts) or (self._opener and self._end_call(cut, parts)):
            pass
        if self._held:
            self._say(self._held, parts)
        self._held = ""
        if self._space and not self._fresh:
            parts.append(Said(self._space, self._thinking))
        self._space = ""
        return parts

    def _step(self, parts: list[Said | Called]) -> bool:
        """Consume one marker and the text before it; return whether there was one."""
        if self._thinking and self._opener:
            at = self._held.find(THOUGHT)
            if at >= 0:  # it was a thought
                self._refuse(parts)
                return True
        if self._opener:
            return self._read_on(parts)
        markers = self._expected()
        at, marker = min(((self._held.find(x), x) for x in markers if x in self._held), default=(-1, ""))
        if at < 0:
            cut = len(self._held) - overlap(self._held, markers)
            self._say(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        self._say(self._held[:at], parts)
        self._held = self._held[at + len(marker) :]
        if marker in ENDS or marker == TAGS or (self._thinking and marker != THOUGHT):
            self._opener, self._seen, self._look, self._ready = marker, 0, FIRST_LOOK, None
        else:
            self._space, self._fresh = "", True
            self._left_open = False
            if marker in (THINK, THOUGHT):
                self._thinking = marker == THINK
                self._may_think = False
        return True

    def _expected(self) -> tuple[str, ...]:
        if self._thinking:
            return (THOUGHT, *ENDS, TAGS, SECTION[0]) if self._schemas else (THOUGHT,)
        begun = self._held.lstrip()
        self._may_think = self._may_think and (begun.startswith(THINK) or THINK.startswith(begun))
        begins = (THINK,) if self._may_think else ()
        if not self._schemas:
            return begins
        return (*begins, *ENDS, TAGS, *SECTION, *([ENDS["<tool_call>"]] if self._left_open else []))

    def _read_on(self, parts: list[Said | Called], ended: bool = False) -> bool:
        """Consume the call whose opener was found, or treat it as text; return whether either was possible."""
        end = CLOSED[self._opener]
        while self._ready is None and (at := self._held.find(end, self._seen)) >= 0:
            stop = at + len(end)
            if self._opener == TAGS and not (found := ends_call(self._held, stop, ended)):
                if found is None:
                    return False
                self._seen = stop
                continue
            self._seen = stop
            call = read_call(self._held[: stop if self._opener == TAGS else at], self._opener, self._schemas)
            if call is not None and self._thinking:
                self._ready = call, stop
            elif call is not None:
                return self._take(call, stop, parts)
            elif not may_become(self._held[:stop], self._opener, self._schemas):
                return self._refuse(parts)
        self._seen = max(self._seen, len(self._held) - len(end) + 1)
        if self._ready is None and len(self._held) >= self._look:
            self._look = 2 * len(self._held)
            begun = self._held[: len(self._held) - overlap(self._held, (end, THOUGHT))]
            if not may_become(begun, self._opener, self._schemas):
                return self._refuse(parts)
        return False

    def _end_call(self, cut: bool, parts: list[Said | Called]) -> bool:
        """Consume the unfinished call at the end of the text, or treat it as text."""
        if self._read_on(parts, True):
            return True
        if self._ready is not None:
            return self._take(*self._ready, parts)
        begun = self._held[: len(self._held) - overlap(self._held, (CLOSED[self._opener],))]
        call = None if self._opener == TAGS else read_call(begun, self._opener, self._schemas)
        if call is None and (self._thinking or not cut or not may_become(begun, self._opener, self._schemas)):
            return self._refuse(parts)
        return self._take(call or calls.cut_call(self._held, self._opener), len(self._held), parts)

    def _take(self, call: Called | None, stop: int, parts: list[Said | Called]) -> bool:
        """Return the call that ends here; None if only its opener was written."""
        if call is not None:
            parts.append(call)
            self.calls += not call.cut
        self._held, self._left_open = self._held[stop:], self._opener == TAGS
        self._opener, self._space, self._fresh = "", "", True
        self._thinking = self._may_think = False
        return True

    def _refuse(self, parts: list[Said | Called]) -> bool:
        """Output the opener as text, because no call follows; the rest is parsed again."""
        opener, self._opener = self._opener, ""
        self._say(opener, parts)
        return True

    def _say(self, text: str, parts: list[Said | Called]) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if self._fresh:
            body = body.lstrip()
        if body:
            parts.append(Said(body, self._thinking))
            self._fresh = self._may_think = self._left_open = False


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
    made = []
    for n, tool in enumerate(tools):
        name, schema = tool["function"]["name"], _parameters(tool["function"])
        if form == "tags":
            inner = [_quoted(f"\n<function={name}>\n"), *_tag_rules(n, schema, rules), _quoted("</function>\n")]
        else:
            rules.append(f"arguments_{n}: {_json_rule(schema)}")
            if form == "kimi":
                begins = [_quoted(f"functions.{name}:"), "/[0-9]{1,3}/", _marker(calls.ARGUMENTS, encode)]
                inner = [*begins, f"arguments_{n}"]
            else:
                begin = _quoted(f'\n{{"name": "{name}", "arguments": ')
                inner = [begin, f"arguments_{n}", _quoted("}\n")]
        rules.append(f"call_{n}: {' '.join(inner)}")
        made.append(f"call_{n}")
    opener = "<|tool_call_begin|>" if form == "kimi" else "<tool_call>"
    rules.append(f"call: {_marker(opener, encode)} ({' | '.join(made)}) {_marker(ENDS[opener], encode)}")
    if form == "kimi":
        body = "call+" if parallel else "call"
        start = f"{_marker(SECTION[0], encode)} {body} {_marker(SECTION[1], encode)}"
    else:
        start = 'call ("\\n" call)*' if parallel else "call"
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; without described properties, the arguments are empty."""
    schema = function.get("parameters") or {}
    empty = set(schema) <= {"type", "properties", "required", "description", "title", "$schema"}
    if empty and schema.get("type", "object") == "object" and not schema.get("properties"):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return schema


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
