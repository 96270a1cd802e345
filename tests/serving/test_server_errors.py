"""Every malformed body gets a 4xx in OpenAI's shape that names the field; nothing of it reaches the engine."""

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineate.serving.api.service import Description
from lineate.serving.app import Settings
from lineate.web.limits import Limits
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine, live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LIMITS = Limits(
    body_bytes=100_000, new_tokens=500, choices=4, stops=3, messages=20, tools=3, grammar_bytes=9000, ids=2000
)
NAME = "model"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer):
    return ScriptedEngine(tokenizer.encode, lambda request, index: "Hello.")


@pytest.fixture(scope="module")
def http(engine, tokenizer):
    description = Description(NAME, context=1000, slots=3, created=0, fingerprint="x")
    with (
        live(engine, tokenizer, description, Settings(limits=LIMITS)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield http


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", **fields}


def schema(value: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": value}})


# The route, the body, and the field that the error names.
MALFORMED: dict[str, tuple[str, Any, str | None]] = {
    "no messages": (CHAT, {}, "messages"),
    "null messages": (CHAT, {"messages": None}, "messages"),
    "messages is a string": (CHAT, {"messages": "hi"}, "messages"),
    "messages is an object": (CHAT, {"messages": {}}, "messages"),
    "no message": (CHAT, {"messages": []}, "messages"),
    "too many messages": (CHAT, {"messages": USER * 21}, "messages"),
    "a message is a string": (CHAT, {"messages": ["hi"]}, "messages[0]"),
    "a message is null": (CHAT, {"messages": [*USER, None]}, "messages[1]"),
    "no role": (CHAT, message(content="hi"), "messages[0].role"),
    "an unknown role": (CHAT, message(role="robot", content="hi"), "messages[0].role"),
    "the role is a list": (CHAT, message(role=["user"], content="hi"), "messages[0].role"),
    "no content": (CHAT, message(role="user"), "messages[0].content"),
    "the content is a number": (CHAT, message(role="user", content=5), "messages[0].content"),
    "the content is an object": (CHAT, message(role="user", content={"a": 1}), "messages[0].content"),
    "a part is a string": (CHAT, message(role="user", content=["hi"]), "messages[0].content[0]"),
    "a part without a type": (CHAT, message(role="user", content=[{"text": "hi"}]), "messages[0].content[0].type"),
    "an image": (
        CHAT,
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
    ),
    "a part without text": (CHAT, message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    "the text is a list": (
        CHAT,
        message(role="user", content=[{"type": "text", "text": ["a"]}]),
        "messages[0].content[0].text",
    ),
    "an unknown field of a message": (CHAT, message(role="user", content="hi", mood="good"), "messages[0].mood"),
    "an assistant without content": (CHAT, message(role="assistant"), "messages[0].content"),
    "a result without its call's id": (CHAT, message(role="tool", content="x"), "messages[0].tool_call_id"),
    "a result of no call": (CHAT, message(role="tool", content="x", tool_call_id="c1"), "messages[0].tool_call_id"),
    "a call without an id": (
        CHAT,
        message(role="assistant", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls[0].id",
    ),
    "arguments that are an object": (
        CHAT,
        message(role="assistant", tool_calls=[{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a call without a name": (
        CHAT,
        message(role="assistant", tool_calls=[{**CALL, "function": {"arguments": "{}"}}]),
        "messages[0].tool_calls[0].function.name",
    ),
    "a name of a call that is none": (
        CHAT,
        message(role="assistant", tool_calls=[{**CALL, "function": {"name": "a b", "arguments": "{}"}}]),
        "messages[0].tool_calls[0].function.name",
    ),
    "an unknown field": (CHAT, chat(temprature=1), "temprature"),
    "a model that is a number": (CHAT, chat(model=7), "model"),
    "another model": (CHAT, chat(model="gpt-4o"), "model"),
    "a temperature that is a word": (CHAT, chat(temperature="hot"), "temperature"),
    "a temperature that is a list": (CHAT, chat(temperature=[1]), "temperature"),
    "a temperature that is true": (CHAT, chat(temperature=True), "temperature"),
    "a temperature below 0": (CHAT, chat(temperature=-0.1), "temperature"),
    "a temperature above 2": (CHAT, chat(temperature=2.01), "temperature"),
    "a temperature of 400 digits": (CHAT, chat(temperature=10**400), "temperature"),
    "a bias of 4000 digits": (CHAT, chat(logit_bias={"5": -(10**4000)}), "logit_bias.5"),
    "top_p above 1": (CHAT, chat(top_p=1.5), "top_p"),
    "top_p below 0": (CHAT, chat(top_p=-1), "top_p"),
    "top_k with a fraction": (CHAT, chat(top_k=1.5), "top_k"),
    "top_k below -1": (CHAT, chat(top_k=-2), "top_k"),
    "min_p above 1": (CHAT, chat(min_p=1.1), "min_p"),
    "a repetition penalty of 0": (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    "a presence penalty above 2": (CHAT, chat(presence_penalty=2.5), "presence_penalty"),
    "a frequency penalty that is text": (CHAT, chat(frequency_penalty="1"), "frequency_penalty"),
    "n of 0": (CHAT, chat(n=0), "n"),
    "n of a word": (CHAT, chat(n="two"), "n"),
    "n above the limit": (CHAT, chat(n=5), "n"),
    "max_tokens of 0": (CHAT, chat(max_tokens=0), "max_tokens"),
    "max_tokens below 0": (CHAT, chat(max_tokens=-5), "max_tokens"),
    "max_tokens with a fraction": (CHAT, chat(max_tokens=5.5), "max_tokens"),
    "max_tokens above the limit": (CHAT, chat(max_tokens=501), "max_tokens"),
    "max_completion_tokens above the limit": (CHAT, chat(max_completion_tokens=10**30), "max_completion_tokens"),
    "a seed that is text": (CHAT, chat(seed="1"), "seed"),
    "a seed of 65 bits": (CHAT, chat(seed=2**64), "seed"),
    "stop is a number": (CHAT, chat(stop=5), "stop"),
    "stop has a number": (CHAT, chat(stop=["a", 5]), "stop"),
    "stop is empty text": (CHAT, chat(stop=""), "stop"),
    "too many stops": (CHAT, chat(stop=["a", "b", "c", "d"]), "stop"),
    "a stop that is too long": (CHAT, chat(stop="x" * 300), "stop"),
    "stop_token_ids beyond the vocabulary": (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids"),
    "stream is a word": (CHAT, chat(stream="yes"), "stream"),
    "stream_options without stream": (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    "stream_options is a list": (CHAT, chat(stream=True, stream_options=[]), "stream_options"),
    "include_usage is 1": (
        CHAT,
        chat(stream=True, stream_options={"include_usage": 1}),
        "stream_options.include_usage",
    ),
    "an unknown stream option": (CHAT, chat(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "logprobs is a number": (CHAT, chat(logprobs=2), "logprobs"),
    "top_logprobs without logprobs": (CHAT, chat(top_logprobs=2), "top_logprobs"),
    "top_logprobs above 20": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "logit_bias is a list": (CHAT, chat(logit_bias=[1]), "logit_bias"),
    "logit_bias of a word": (CHAT, chat(logit_bias={"hello": 1}), "logit_bias"),
    "logit_bias beyond the vocabulary": (CHAT, chat(logit_bias={"99999": 1}), "logit_bias"),
    "logit_bias of a negative id": (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    "logit_bias above 100": (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5"),
    "logit_bias by text": (CHAT, chat(logit_bias={"5": "much"}), "logit_bias.5"),
    "tools is an object": (CHAT, chat(tools={}), "tools"),
    "too many tools": (CHAT, chat(tools=[TOOL] * 4), "tools"),
    "two tools of one name": (CHAT, chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    "a tool without a type": (CHAT, chat(tools=[{"function": {"name": "f"}}]), "tools[0].type"),
    "a tool of another type": (CHAT, chat(tools=[{**TOOL, "type": "retrieval"}]), "tools[0].type"),
    "a tool without a function": (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    "a tool without a name": (CHAT, chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    "a tool whose name is none": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "rm -rf"}}]),
        "tools[0].function.name",
    ),
    "parameters that are a list": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
        "tools[0].function.parameters",
    ),
    "parameters that are no schema": (
        CHAT,
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
            tool_choice="required",
        ),
        "tools",
    ),
    "a tool choice that is none": (CHAT, chat(tools=[TOOL], tool_choice="maybe"), "tool_choice"),
    "a tool choice without tools": (CHAT, chat(tool_choice="required"), "tool_choice"),
    "a tool choice of an unknown name": (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
    ),
    "a tool choice that is empty": (CHAT, chat(tools=[TOOL], tool_choice={}), "tool_choice"),
    "a format that is text": (CHAT, chat(response_format="json"), "response_format"),
    "a format without a type": (CHAT, chat(response_format={}), "response_format.type"),
    "a format of an unknown type": (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    "a format without its schema": (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    "a schema without a name": (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "response_format.json_schema.name",
    ),
    "a schema that is a list": (CHAT, schema([]), "response_format.json_schema.schema"),
    "a schema of an unknown type": (CHAT, schema({"type": "nonsense"}), "response_format.json_schema.schema"),
    "a schema that points nowhere": (CHAT, schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema"),
    "a schema that is itself": (CHAT, schema({"$ref": "#"}), "response_format.json_schema.schema"),
    "a schema with a wrong pattern": (
        CHAT,
        schema({"type": "string", "pattern": "((("}),
        "response_format.json_schema.schema",
    ),
    "a schema that is too large": (
        CHAT,
        schema({"description": "x" * 10_000}),
        "response_format.json_schema.schema",
    ),
    "a format beside a required call": (
        CHAT,
        chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
        "tool_choice",
    ),
    "functions": (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    "audio": (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    "variables that replace the messages": (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    "a variable named self": (CHAT, chat(chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
    "too many variables": (CHAT, chat(chat_template_kwargs={"x": [[0] * 30] * 40}), "chat_template_kwargs"),
    "a variable that is too long": (CHAT, chat(chat_template_kwargs={"x": "x" * 70_000}), "chat_template_kwargs"),
    "an unknown effort": (CHAT, chat(reasoning_effort="extreme"), "reasoning_effort"),
    "no room for max_tokens": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 400},
        "max_tokens",
    ),
    "a chat that is too long": (CHAT, message(role="user", content="x" * 1001), "messages"),
    "no prompt": (TEXT, {}, "prompt"),
    "an empty prompt": (TEXT, text(prompt=[]), "prompt"),
    "a prompt of nothing": (TEXT, text(prompt=""), "prompt"),
    "a prompt that is a number": (TEXT, text(prompt=5), "prompt"),
    "a prompt of words and ids": (TEXT, text(prompt=["a", 5]), "prompt"),
    "a prompt of ids beyond the vocabulary": (TEXT, text(prompt=[10**6]), "prompt"),
    "a prompt of negative ids": (TEXT, text(prompt=[-1]), "prompt"),
    "a prompt of fractions": (TEXT, text(prompt=[1.5]), "prompt"),
    "a prompt of booleans": (TEXT, text(prompt=[True]), "prompt"),
    "an empty list among prompts": (TEXT, text(prompt=[[1], []]), "prompt"),
    "too many prompts": (TEXT, text(prompt=["a"] * 5), "prompt"),
    "prompts times n": (TEXT, text(prompt=["a"] * 2, n=3), "prompt"),
    "a prompt that is too long": (TEXT, text(prompt="x" * 1001), "prompt"),
    "ids of a prompt that is too long": (TEXT, text(prompt=[1] * 1000), "prompt"),
    "too many prompts of ids": (TEXT, text(prompt=[[1]] * 5), "prompt"),
    "a suffix": (TEXT, text(suffix="end"), "suffix"),
    "best_of above n": (TEXT, text(best_of=3), "best_of"),
    "max_tokens below 0 for completions": (TEXT, text(max_tokens=-1), "max_tokens"),
    "a schema of vLLM": (TEXT, text(guided_json={"type": "object"}), "guided_json"),
    "a grammar of llama.cpp": (CHAT, chat(grammar='root ::= "a"'), "grammar"),
    "a format of Ollama": (CHAT, chat(format="json"), "format"),
    "the end of a message to continue": (CHAT, chat(continue_final_message=True), "continue_final_message"),
    "a typo": (CHAT, chat(temprature=0.5), "temprature"),
    "a field of a message that is unknown": (
        CHAT,
        message(role="user", content="x", colour="red"),
        "messages[0].colour",
    ),
    "logprobs above 5": (TEXT, text(logprobs=6), "logprobs"),
    "logprobs of true": (TEXT, text(logprobs=True), "logprobs"),
    "messages for completions": (TEXT, text(messages=USER), "messages"),
    "nothing to tokenize": ("/tokenize", {}, "prompt"),
    "a number to tokenize": ("/tokenize", {"prompt": 5}, "prompt"),
    "nothing to detokenize": ("/detokenize", {}, "tokens"),
    "a text to detokenize": ("/detokenize", {"tokens": "5"}, "tokens"),
    "too many ids to detokenize": ("/detokenize", {"tokens": [1] * 2001}, "tokens"),
    "an id beyond the vocabulary": ("/detokenize", {"tokens": [1, 10**9]}, "tokens[1]"),
    "a fraction to detokenize": ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
}


def check(answer: httpx.Response) -> dict[str, Any]:
    """Check the shape of an error and return it."""
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    assert "Traceback" not in answer.text and "/lineate/" not in answer.text and ".py" not in answer.text
    return body["error"]


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_body_names_its_field(http, engine, case):
    route, body, param = MALFORMED[case]
    before = len(engine.handles)
    error = check(http.post(route, json=body))
    assert error["param"] == param, error
    assert len(engine.handles) == before


def test_a_long_value_is_cut(http):
    """A message repeats the beginning of a wrong value, and all of a short one."""
    short = check(http.post(CHAT, json=chat(stop={"a": [1, "x"]})))
    assert short["message"].endswith('got {"a": [1, "x"]}')
    for long in ({"a": [[1, 2]] * 5000}, {"k" * 20_000: 1}, {str(i): {} for i in range(5000)}, [[["x" * 50_000]]]):
        found = check(http.post(CHAT, json=chat(stop=long)))["message"].partition("got ")[2]
        assert found == json.dumps(long)[:57] + "..."


RAW = {
    "nothing": b"",
    "no JSON": b"hello",
    "half of a body": b'{"messages": [{"role": "user"',
    "two bodies": b'{"a": 1} {"b": 2}',
    "a list": b"[]",
    "a string": b'"hi"',
    "null": b"null",
    "a number": b"5",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "infinity": b'{"temperature": Infinity}',
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "half of a surrogate pair": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "NUL": b"\x00" * 10,
    "nested lists": b"[" * 50_000 + b"]" * 49_000,
    "nested objects": b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    "nested within the parser's bounds": b'{"messages":' + b"[" * 100 + b"]" * 100 + b"}",
    "a number of many digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "a number beyond float": b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
    "a comment": b'{"messages": [] /* none */}',
}


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("route", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_body(http, case, route):
    answer = http.post(route, content=RAW[case], headers={"content-type": "application/json"})
    assert check(answer) and answer.status_code == 400


def test_a_body_of_another_type(http):
    """A page of another site can send a form or plain text without asking the server first, but not JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = http.post(CHAT, content=json.dumps(chat()), headers={"content-type": kind})
        assert check(answer)["code"] == "unsupported_media_type" and answer.status_code == 415


def test_a_body_that_is_too_large(http):
    assert http.post(CHAT, json=chat(user="x" * 110_000)).status_code == 413

    def parts():
        for _ in range(20):
            yield b" " * 10_000

    answer = http.post(CHAT, content=parts(), headers={"content-type": "application/json"})  # without a length
    assert check(answer)["code"] == "request_too_large" and answer.status_code == 413


def test_routes_that_do_not_exist(http):
    assert check(http.get("/v1/nothing"))["code"] == "not_found"
    assert check(http.post("/v1/embeddings", json={}))["code"] == "not_found"
    assert http.get(CHAT).status_code == 405 and check(http.get(CHAT))
    assert check(http.get("/../../etc/passwd")) and check(http.get("/%2e%2e/%2e%2e/etc/passwd"))


def test_what_openai_accepts_is_accepted(http):
    body = chat(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", n=1, stop=None, seed=None, logit_bias=None,
        max_tokens=None, response_format={"type": "text"}, tools=None, parallel_tool_calls=True, modalities=["text"],
        top_p=0, model=NAME, stream_options=None,
    )  # fmt: skip
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "Hello."
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert http.post(CHAT, json={"messages": [{"role": "developer", "content": parts}]}).status_code == 200
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": "done"}]
    assert http.post(CHAT, json={"messages": history, "tools": [TOOL]}).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for _, body, _ in MALFORMED.values() for name in body})


@pytest.mark.cover
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(route=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_no_value_breaks_the_server(http, route, fields):
    body = {**(chat() if route == CHAT else text()), **fields}
    answer = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 200 or check(answer)
