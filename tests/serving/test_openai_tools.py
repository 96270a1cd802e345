"""Calls and reasoning in a model's text, through OpenAI's client; a script says what the model writes."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

from lineate.serving.api.calls import Called
from lineate.serving.api.guides import Grammars
from lineate.serving.api.service import Description
from lineate.serving.api.tools import AnswerParser, Said, calls_grammar
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine, live

NAME = "scripted"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "boolean"}},
            },
        },
    }
]
TAGS = (
    "<tool_call>\n<function=look>\n<parameter=place>\n42\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=all>\ntrue\n</parameter>\n</function>\n</tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"place": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)


NOT_JSON = {
    "a call": '<tool_call>{"name": "look", "arguments": {"days": HERE}}</tool_call>',
    "a name": '<tool_call>{"name": HERE, "arguments": {}}</tool_call>',
    "kimi": '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"days": HERE}<|tool_call_end|>',
}
"""Calls that cannot be JSON when HERE is NaN, a number beyond float, or half of a surrogate pair."""


def qwen(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"


# What the model writes; the content, the reasoning and the arguments of the calls that clients see.
WRITTEN = {
    "text alone": ("Hello there.", "Hello there.", None, []),
    "a call": (qwen(place="Oslo"), None, None, [{"place": "Oslo"}]),
    "text before a call": ("I look it up.\n\n" + qwen(place="Oslo"), "I look it up.", None, [{"place": "Oslo"}]),
    "two calls": (qwen(days=1) + "\n" + qwen(days=2), None, None, [{"days": 1}, {"days": 2}]),
    "text after a call": (qwen(days=1) + "\nDone.", "Done.", None, [{"days": 1}]),
    "other letters": (qwen(place="Tromsø 🏔"), None, None, [{"place": "Tromsø 🏔"}]),
    "tags": (TAGS, None, None, [{"place": "42", "days": 3, "all": True}]),
    "kimi": (KIMI, None, None, [{"place": "Oslo"}]),
    "a call without its end": (qwen(days=1).removesuffix("</tool_call>"), None, None, [{"days": 1}]),
    "broken JSON": ('<tool_call>{"name": look}</tool_call>', '<tool_call>{"name": look}</tool_call>', None, []),
    "no name": ("<tool_call>{}</tool_call> x", "<tool_call>{}</tool_call> x", None, []),
    **{
        f"{form} with {value}": (text.replace("HERE", value), text.replace("HERE", value), None, [])
        for value in ("NaN", "1e999", r'"\ud800"')
        for form, text in NOT_JSON.items()
    },
    "half of a call": ('So <tool_call>{"name"', 'So <tool_call>{"name"', None, []),
    "almost a marker": ("a <tool_cal b <", "a <tool_cal b <", None, []),
    "reasoning": ("<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm.", []),
    "reasoning and a call": ("<think>Hm.</think>" + qwen(days=1), None, "Hm.", [{"days": 1}]),
    "reasoning about a call": ("<think>" + qwen(days=1) + "</think>No.", "No.", qwen(days=1), []),
    "reasoning without an end": ("<think>Hm, so", "", "Hm, so", []),
    "a late <think>": ("Yes. <think>x</think>", "Yes. <think>x</think>", None, []),
}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(think="{% if open %}<think>\n{% else %}{# </think> #}{% endif %}")


@pytest.fixture(scope="module")
def script():
    return {"text": ""}


@pytest.fixture(scope="module")
def engine(tokenizer, script):
    return ScriptedEngine(tokenizer.encode_rendered, lambda request, index: script["text"])


@pytest.fixture(scope="module")
def client(engine, tokenizer):
    with live(engine, tokenizer, Description(NAME, context=4000, slots=4, created=0, fingerprint="x")) as server:
        yield server.client()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRITTEN)
def test_what_clients_see(client, script, case, stream):
    script["text"], content, reasoning, calls = WRITTEN[case]
    if stream:
        with client.chat.completions.stream(model=NAME, messages=USER, tools=TOOLS) as events:
            thoughts = [
                event.chunk.choices[0].delta.model_extra.get("reasoning_content")
                for event in events
                if event.type == "chunk" and event.chunk.choices
            ]
            choice = events.get_final_completion().choices[0]
        assert "".join(x for x in thoughts if x) == (reasoning or "")
    else:
        choice = client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS).choices[0]
        assert (choice.message.model_extra or {}).get("reasoning_content") == reasoning
    assert (choice.message.content or None) == (content or None)
    made = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in made] == [("look", x) for x in calls]
    assert len({call.id for call in made}) == len(made)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_without_tools_a_call_is_text(client, script):
    script["text"] = qwen(days=1)
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model=NAME, messages=USER, **options).choices[0]
        assert choice.message.content == script["text"] and choice.message.tool_calls is None


def test_only_one_call_if_the_client_wants_one(client, script, engine):
    script["text"] = qwen(days=1) + "\n" + qwen(days=2) + " and more text" * 50
    options = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = client.chat.completions.create(model=NAME, messages=USER, **options).choices[0]
    assert [json.loads(x.function.arguments) for x in choice.message.tool_calls] == [{"days": 1}]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None


def test_a_template_that_opens_reasoning(client, script):
    script["text"] = "Hm.\n</think>\n\nYes."
    made = client.chat.completions.create(
        model=NAME, messages=USER, extra_body={"chat_template_kwargs": {"open": True}}
    )  # fmt: skip
    message = made.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.parametrize("case", ["a call", "tags", "kimi"])
def test_a_call_cut_by_the_length(client, script, case):
    """It is a call whose arguments end where the text does, whole or in a stream; no markup becomes content."""
    script["text"] = WRITTEN[case][0]
    for most in (1, 2, 12, 25, 34):
        options = {"model": NAME, "messages": USER, "tools": TOOLS, "max_tokens": most}
        made = client.chat.completions.create(**options).choices[0]
        assert made.finish_reason == "length" and not made.message.content
        calls = [(x.function.name, x.function.arguments) for x in made.message.tool_calls or []]
        assert len(calls) == 1 or (most <= 2 and not calls)  # nothing was written but markers
        assert all(name in ("", "look") and arguments in script["text"] for name, arguments in calls)
        streamed = [["", ""] for _ in calls]
        for chunk in client.chat.completions.create(stream=True, **options):
            choice = chunk.choices[0]
            assert not choice.delta.content
            for x in choice.delta.tool_calls or []:
                streamed[x.index][0] += x.function.name or ""
                streamed[x.index][1] += x.function.arguments
        assert choice.finish_reason == "length" and [tuple(x) for x in streamed] == calls


CUT = {
    "a call": ('{"name": "look", "arguments": {"place": "Oslo"}}', '{"name": "look", "arguments": '),
    "tags": (TAGS.removeprefix("<tool_call>").strip(), "<function=look>"),
    "kimi": ('{"place": "Oslo"}', '{"name": "look", "arguments": '),
}
"""What follows the markers of these calls, and what a text of theirs in a message begins with."""


@pytest.mark.parametrize("case", CUT)
def test_a_cut_call_is_given_back(client, script, engine, tokenizer, case):
    """The model reads what it wrote of it, and an answer to it."""
    script["text"] = "I look.\n\n" + WRITTEN[case][0]
    options = {"model": NAME, "tools": TOOLS}
    seen = set()
    for most in (12, 18, 38, 52, len(tokenizer.encode_rendered(script["text"]))):
        made = client.chat.completions.create(messages=USER, max_tokens=most, **options).choices[0].message
        calls = made.tool_calls or []
        messages = [*USER, made.model_dump(), *({"role": "tool", "tool_call_id": x.id, "content": "?"} for x in calls)]
        client.chat.completions.create(messages=messages, max_tokens=1, **options)
        shown = tokenizer.decode(engine.handles[-1].request.ids, keep_special=True)
        assert shown.count("<|im_start|>tool") == len(calls)
        turn = shown.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
        content, _, last = turn.partition("\n\n")
        assert content.startswith("I look.")
        for call in calls:
            function = call.function
            try:
                whole = bool(function.name) and isinstance(json.loads(function.arguments or "{}"), dict)
            except ValueError:
                whole = False
            seen.add((function.name, whole))
            assert whole == ("<tool_call>" in turn)
            if not whole:
                assert last.endswith(function.arguments)
                assert function.name == "" or last.startswith(CUT[case][1]) or case == "tags"
                assert case == "kimi" or CUT[case][0].startswith(last)
    assert {("", False), ("look", False)} <= seen


@pytest.mark.parametrize("arguments", ["{x", "[1]", "null", '"', "1e999", '{"x": NaN}', "\n", "<parameter=x>\nHm"])
def test_arguments_that_are_no_object_are_text(client, script, engine, tokenizer, arguments):
    script["text"] = "Yes."
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    good = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"days": 1}'}}
    for calls in ([call], [good, call]):
        messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *USER]
        client.chat.completions.create(model=NAME, messages=messages)
        shown = tokenizer.decode(engine.handles[-1].request.ids, keep_special=True)
        turn = shown.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
        assert "look" in turn and arguments in turn.partition("<tool_call>")[0]
        assert turn.count("<tool_call>") == len(calls) - 1


def test_a_function_without_parameters_takes_no_arguments(tokenizer):
    """A grammar of its calls allows no argument, whichever way the parameters are left out."""
    grammars = Grammars(tokenizer, 10**6)
    for own in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}):
        tools = [{"type": "function", "function": {"name": "now", **own}}]
        for form, call in (
            ("json", '<tool_call>\n{"name": "now", "arguments": {'),
            ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"),
        ):
            guide = grammars.guide(calls_grammar(form, tools, False, tokenizer.encode_rendered), "tools")
            for token in tokenizer.encode_rendered(call):
                guide.advance(token)
            allowed = guide.allowed(tokenizer.vocab_size)
            assert allowed[tokenizer.encode("}")[0]] and not allowed[tokenizer.encode('"')[0]]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size_give_the_same(size):
    for text, content, reasoning, calls in WRITTEN.values():
        parser = AnswerParser(TOOLS, "maybe")
        parts = [part for n in range(0, len(text), size) for part in parser.push(text[n : n + size])] + parser.finish()
        said = {
            thought: "".join(x.text for x in parts if isinstance(x, Said) and x.reasoning == thought)
            for thought in (0, 1)
        }
        assert said == {0: content or "", 1: reasoning or ""}
        assert [json.loads(x.arguments) for x in parts if isinstance(x, Called)] == calls
