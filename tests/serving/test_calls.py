"""Calls in a model's text: nothing is lost or half read, wherever the text is split and wherever it ends."""

import json
import re

import pytest

pytest.importorskip("pydantic_core")

from hypothesis import given, settings
from hypothesis import strategies as st

from lineate.serving.api.calls import Called
from lineate.serving.api.tools import AnswerParser, Said

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "days": {"type": "integer"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    }
]
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", BEGIN, END, *SECTION]
GAP_PART = re.compile("|".join([r"\s", *map(re.escape, MARKS)]))
GAP = re.compile(f"(?:{GAP_PART.pattern})*")


def as_json(arguments):
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def as_tags(arguments, opener="<tool_call>\n"):
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{opener}<function=look>\n{inner}</function>\n</tool_call>"


def as_kimi(arguments):
    return f"{SECTION[0]}{BEGIN}functions.look:0{ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}{END}{SECTION[1]}"


FORMS = {
    "json": as_json,
    "tags": as_tags,
    "tags without an opener": lambda arguments: as_tags(arguments, ""),
    "kimi": as_kimi,
}


def parsed(text, pieces=(), reasoning="", cut=False):
    """Return the parts of a text that arrives in pieces of these sizes, and then whole."""
    parser, parts, at = AnswerParser(TOOLS, reasoning), [], 0
    for size in (*pieces, len(text)):
        parts += parser.push(text[at : at + size])
        at += size
    return parts + parser.finish(cut)


def shown(parts):
    """Return what clients see: content, reasoning and calls."""
    texts = ["".join(x.text for x in parts if isinstance(x, Said) and x.reasoning is kind) for kind in (False, True)]
    return *texts, [(x.name, x.arguments, x.cut) for x in parts if isinstance(x, Called)]


def after(text, at, part):
    """Return the places where a part of an answer can end in the text that begins at a place."""
    gap = GAP.match(text, at).end()
    if isinstance(part, Said):
        starts = [at]
        while starts[-1] < gap:  # markers before it one by one
            starts.append(GAP_PART.match(text, starts[-1]).end())
        return {start + len(part.text) for start in starts if text.startswith(part.text, start)}
    name, arguments = re.escape(part.name), re.escape(part.arguments)
    if part.cut:
        begins = [rf"<function={name}>", "<function=", "", rf"(?:functions\.)?{name}(?::\d+)?{re.escape(ARGUMENTS)}"]
        begins += [rf'{{\s*"name"\s*:\s*"{name}"\s*,?\s*"?\w*"?\s*:?\s*']
        found = re.compile(rf"(?:{'|'.join(begins)}){arguments}[,}}\s]*\Z").match(text, gap)
        return {len(text)} if found else set()
    forms = [rf'{{\s*"name"\s*:\s*"{name}"\s*,\s*"(?:arguments|parameters)"\s*:\s*{arguments}\s*}}']
    if part.arguments == "{}":
        nothing = r'(?:,\s*"(?:arguments|parameters)"\s*:\s*(?:null|"")\s*)?'
        forms += [rf'{{\s*"name"\s*:\s*"{name}"\s*{nothing}}}']
    forms += [rf"(?:functions\.)?{name}(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*{arguments}"]
    inner = json.loads(part.arguments).items()
    values = [
        (key, *{re.escape(x) for x in (value if isinstance(value, str) else "", json.dumps(value))})
        for key, value in inner
    ]
    tags = [rf"<parameter={re.escape(key)}>\n?(?:{'|'.join(ways)})\n?</parameter>\s*" for key, *ways in values]
    forms += [rf"<function={name}>\s*{''.join(tags)}</function>"]
    found = re.compile("|".join(forms)).match(text, gap)
    return {found.end()} if found else set()


def check(text, parts):
    """Fail unless every character of a text is in its parts once, except for markers and white space next to them."""
    places = {0}
    for part in parts:
        before, places = places, {end for at in places for end in after(text, at, part)}
        assert places, f"{part} does not follow in {[text[at:] for at in before]}"
    rests = [text[GAP.match(text, at).end() :] for at in places]
    assert any(x.startswith(rest) for x in MARKS for rest in rests), f"one of {rests} was lost"


HOSTILE = {
    "an end": "a </parameter> b",
    "an end on a line": "<a>\n</parameter>\n</a>",
    "the end of a function": "see </function>, and\n</parameter>\n</function>\nmore",
    "the end of a call": "a </tool_call> b",
    "a call": 'say <tool_call>{"name": "look"}</tool_call>',
    "an opener": "<tool_call>",
    "quotes": 'a "b" \\ c\n{d}',
    "a number": "42",
    "lines": "\n\nfirst\n\nlast\n\n",
    "nothing": "",
}


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("form", FORMS)
def test_values_that_look_like_markup(form, value):
    given = {"place": HOSTILE[value], "days": 3}
    for text in (FORMS[form](given), "I look.\n\n" + FORMS[form](given) + FORMS[form]({"days": 1}) + "\nDone."):
        content, _, calls = shown(parsed(text))
        assert [json.loads(x) for _, x, _ in calls] == ([given] if "Done" not in text else [given, {"days": 1}])
        assert content == ("I look.Done." if "Done" in text else "")


@pytest.mark.parametrize(
    ("written", "read"), [("null", None), ("42", "42"), ('"x"', '"x"'), ("Oslo", "Oslo")]
)  # fmt: skip
def test_a_value_that_may_be_a_string_or_null(written, read):
    ((_, arguments, _),) = shown(parsed(as_tags({"note": written})))[2]
    assert json.loads(arguments) == {"note": read}


@pytest.mark.parametrize("written", ["NaN", "-Infinity", "1e999", "[1, NaN]", r'"\ud800"', '{"a": Infinity}'])
@pytest.mark.parametrize("name", ["days", "untyped"])
@pytest.mark.parametrize("opener", ["<tool_call>\n", ""])
def test_a_value_that_only_python_reads_as_json_is_a_string(written, name, opener):
    text = as_tags({name: written, "place": "Oslo"}, opener)
    for pieces in ((), [1] * len(text)):
        ((_, arguments, _),) = shown(parts := parsed(text, pieces))[2]
        assert json.loads(arguments) == {name: written, "place": "Oslo"}
        check(text, parts)


def test_a_value_at_the_deepest_level_that_is_read():
    """Within the arguments it stands one level deeper."""
    read = set()
    for depth in range(1, 300):
        written = "[" * depth + "]" * depth
        ((_, arguments, _),) = shown(parsed(as_tags({"untyped": written})))[2]
        value = json.loads(arguments)["untyped"]
        assert value == written or json.dumps(value) == written
        read.add(type(value))
    assert read == {str, list}


def test_json_is_passed_on_as_it_was_written():
    written = '{"x": 0.10000000000000000001, "y": 1E2,\n "z": [1, 1.0], "x": 5}'
    for text in (
        f'<tool_call>{{"name": "look", "arguments": {written}}}</tool_call>',
        f'<tool_call>{{"arguments": {written} , "name": "look"}}</tool_call>',
        f"{BEGIN}look{ARGUMENTS} {written} {END}",
    ):
        assert shown(parsed(text))[2] == [("look", written, False)]


@pytest.mark.parametrize("written", ["null", '""'])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_no_arguments_as_models_write_them(key, written):
    call = f'<tool_call>\n{{"name": "look", "{key}": {written}}}\n</tool_call>'
    for text in (
        call,
        f"Hm.\n{call}\n{as_json({'days': 1})}",
        call.replace('"name": "look", ', "").replace("}", ', "name": "look"}'),
    ):
        for pieces in ((), [1] * len(text)):
            content, _, calls = shown(parsed(text, pieces))
            assert calls[0] == ("look", "{}", False) and len(calls) == (2 if "Hm" in text else 1)
            assert content == ("Hm." if "Hm" in text else "")
    for end in range(len("<tool_call>\n{"), len(call)):
        for pieces in ((), [1] * end):
            check(call[:end], parsed(call[:end], pieces, cut=True))


MALFORMED = {
    "an unclosed parameter": "<tool_call><function=look><parameter=place>Oslo</function></tool_call>",
    "text between parameters": as_tags({"days": 1}).replace("</parameter>", "</parameter> and"),
    "text before the function": as_tags({"days": 1}).replace("<function", "Now <function", 1).replace("look", "run"),
    "text behind the function": as_tags({"days": 1}).replace("</function>", "</function> so"),
    "a parameter twice": as_tags({"days": 1}).replace("</function>", "<parameter=days>\n2\n</parameter>\n</function>"),
    "a key more": '<tool_call>{"name": "look", "arguments": {}, "why": "rain"}</tool_call>',
    "a name twice": '<tool_call>{"name": "a", "name": "look", "arguments": {}}</tool_call>',
    "arguments twice": '<tool_call>{"name": "look", "arguments": {"days": 1}, "parameters": {"days": 2}}</tool_call>',
    "arguments that are a list": '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    "arguments that are a number": '<tool_call>{"name": "look", "arguments": 0}</tool_call>',
    "arguments that are false": '<tool_call>{"name": "look", "arguments": false}</tool_call>',
    "a brace more": '<tool_call>{"name": "look", "arguments": {}}}</tool_call>',
    "a brace less": '<tool_call>{"name": "look", "arguments": {"days": 1}</tool_call>',
    "no name in tags": "<tool_call><function=></function></tool_call>",
    "kimi without arguments": f"{BEGIN}functions.look:0{END}",
    "kimi with text": f"{BEGIN}functions.look:0{ARGUMENTS}now{END}",
    "text behind a function without an opener": as_tags({"days": 1}, "").replace("</function>", "</function> so"),
    "an unknown function without an opener": as_tags({"days": 1}, "").replace("look", "run"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_call_that_cannot_be_read_is_text(case):
    """All of it, and a call that comes after it is read."""
    text = MALFORMED[case]
    for pieces in ((), [1] * len(text)):
        assert shown(parsed(text, pieces)) == (text, "", [])
        content, _, calls = shown(parsed(text + "\n" + as_json({"days": 1}), pieces))
        assert (content, [json.loads(x) for _, x, _ in calls]) == (text, [{"days": 1}])


def test_text_that_mentions_a_call_is_not_held_back():
    """A stream goes on as soon as it is certain that no call begins."""
    parser = AnswerParser(TOOLS, "maybe")
    for text in ("<think>", "They want <tool_call> in the answer, ", "and <function=other> too. ", "Now</think>"):
        parser.push(text)
    said = parser.push("Write <tool_call> and then the name of the function, " + "and more " * 9)
    assert "".join(x.text for x in said).endswith("and more")


THOUGHT = {
    "a call": ("Hm.\n" + as_json({"days": 1}), ("", "Hm.", [{"days": 1}])),
    "tags": ("Hm.\n" + as_tags({"days": 1}), ("", "Hm.", [{"days": 1}])),
    "tags without an opener": ("Hm.\n" + as_tags({"days": 1}, ""), ("", "Hm.", [{"days": 1}])),
    "kimi": ("Hm." + as_kimi({"days": 1}), ("", "Hm.", [{"days": 1}])),
    "two calls": (as_json({"days": 1}) + "\n" + as_json({"days": 2}), ("", "", [{"days": 1}, {"days": 2}])),
    "text after a call": (as_json({"days": 1}) + "\nDone.", ("Done.", "", [{"days": 1}])),
    "a mention before it": (
        "A <tool_call> is due. " + as_json({"days": 1}),
        ("", "A <tool_call> is due.", [{"days": 1}]),
    ),
    "a call that was only a thought": (as_json({"days": 1}) + "\n</think>No.", ("No.", as_json({"days": 1}), [])),
    "half of a call": ('Hm. <tool_call>{"name": "lo', ("", 'Hm. <tool_call>{"name": "lo', [])),
}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("case", THOUGHT)
def test_a_call_in_reasoning_that_is_never_closed(case, size):
    text, (content, thought, calls) = THOUGHT[case]
    for begin, reasoning in (("<think>", "maybe"), ("", "open")):
        found = shown(parsed(begin + text, [size] * len(text), reasoning))
        assert found[:2] == (content, thought)
        assert [json.loads(x) for _, x, _ in found[2]] == calls


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_anywhere(form):
    """Its name and its arguments so far are a call; no markup is content."""
    whole = {"place": "Oslo, or <b>", "days": 3}
    text = "Hm.\n\n" + FORMS[form](whole)
    opener = {"kimi": BEGIN, "tags without an opener": "<function="}.get(form, "<tool_call>")
    begin = text.index(opener) + len(opener)
    seen = set()
    for end in range(begin, len(text) + 1):
        parts = parsed(text[:end], cut=True)
        check(text[:end], parts)
        content, reasoning, calls = shown(parts)
        assert any(x.startswith(content.removeprefix("Hm.")) for x in MARKS)  # a marker may be cut, too
        assert not reasoning and len(calls) <= 1
        for name, arguments, cut in calls:
            seen.add((name, cut))
            if not cut:
                assert json.loads(arguments) == whole
            elif name and form in ("json", "kimi"):
                assert json.dumps(whole).startswith(arguments)
    assert seen == {("", True), ("look", True), ("look", False)}


WORDS = [
    *MARKS, ARGUMENTS, "<function=", "<function=look>", "<function=run>", "</function>", "<parameter=",
    "<parameter=place>", "<parameter=days>", "</parameter>", "{", "}", '"', '"name"', '"look"', ":", ",",
    '"arguments"', "look", "functions.look:1", '{"name": "look", "arguments": ', '{"days": 1}', "}", "\n", " ",
    "Oslo", "ø", "<", "</", "3", "\\", "null", '""', '<tool_call>{"name": "look", "arguments": null}</tool_call>',
    '<tool_call>{"name": "look", "arguments": ""}</tool_call>',
]  # fmt: skip
VALUES = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
CALLS = st.builds(
    lambda form, place, days: FORMS[form]({"place": place, "days": days}),
    st.sampled_from(sorted(FORMS)), VALUES, st.integers(0, 99),
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), CALLS), max_size=8).map("".join)
PIECES = st.lists(st.integers(1, 30), max_size=20)
REASONING = st.sampled_from(["", "maybe", "open"])


@pytest.mark.cover
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, pieces=PIECES, reasoning=REASONING, cut=st.booleans())
def test_how_a_text_is_split_does_not_matter(text, pieces, reasoning, cut):
    whole = shown(parsed(text, (), reasoning, cut))
    assert shown(parsed(text, pieces, reasoning, cut)) == whole
    assert shown(parsed(text, [1] * len(text), reasoning, cut)) == whole


@pytest.mark.cover
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, reasoning=REASONING)
def test_nothing_is_lost_or_said_twice(text, reasoning):
    check(text, parsed(text, (), reasoning))


@pytest.mark.cover
@settings(max_examples=150, deadline=None)
@given(before=st.sampled_from(["", "Hm. ", "A < b.\n"]), call=CALLS, share=st.floats(0, 1))
def test_nothing_of_a_cut_text_is_lost(before, call, share):
    text = (before + call)[: round(share * len(before + call))]
    for pieces in ((), [1] * len(text)):
        check(text, parsed(text, pieces, cut=True))
