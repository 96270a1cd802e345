"""Requests that are long to prepare: they are refused early, and short ones do not wait for them."""

import json
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import httpx

from lineate.serving.api.bodies import check_values
from lineate.serving.api.guides import Grammars
from lineate.serving.api.lanes import LONG_BYTES, LONGEST_REST, REST, Lanes
from lineate.serving.api.schemas import JsonFormat
from lineate.serving.api.service import Description
from lineate.web.errors import ApiError
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine, live, until

DESCRIPTION = Description("scripted", context=2048, slots=4, created=0, fingerprint="x")
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def server(tokenizer):
    engine = ScriptedEngine(tokenizer.encode, lambda request, index: "Hello.")
    with live(engine, tokenizer, DESCRIPTION) as server:
        yield server


@pytest.mark.parametrize("kind", ["chat", "text", "texts", "tools"])
def test_a_prompt_that_cannot_fit(server, tokenizer, monkeypatch, kind):
    text, encoded = "The memory is a matrix. " * 100_000, []
    for name in ("encode", "encode_rendered"):
        encode = getattr(tokenizer, name)
        monkeypatch.setattr(tokenizer, name, lambda text, encode=encode: encoded.append(text) or encode(text))
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    body = {
        "chat": {"messages": [{"role": "user", "content": text}]},
        "text": {"prompt": text},
        "texts": {"prompt": ["hi", text]},
        "tools": {**HELLO, "tools": [tool]},
    }[kind]
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = httpx.post(server.url + route, json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "must have at most 2047 tokens, got at least" in answer.json()["error"]["message"]
    assert sum(map(len, encoded)) < 100_000


def test_short_requests_do_not_wait_for_long_ones_or_grammars(server, tokenizer, monkeypatch):
    go, begun, service = threading.Event(), [], server.app.state.service
    prompt, guide = service.text_prompt, service.grammars.guide

    def slow(made):
        def held(*args):
            begun.append(made)
            assert go.wait(60)
            return made(*args)

        return held

    monkeypatch.setattr(service, "text_prompt", slow(prompt))
    monkeypatch.setattr(service.grammars, "guide", slow(guide))
    long = {"prompt": "hi", "user": "x" * LONG_BYTES, "max_tokens": 1}
    schema = {**HELLO, "response_format": {"type": "json_object"}}
    answers = []

    def ask(route, body):
        answers.append(httpx.post(server.url + route, json=body, timeout=60).status_code)

    asked = [("/v1/completions", long)] * 4 + [("/v1/chat/completions", schema)] * 4
    threads = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in threads:
        thread.start()
    until(lambda: len(begun) == 2, "one long prompt and one grammar")
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
    assert len(begun) == 2 and not answers  # the others wait in their lanes
    go.set()
    for thread in threads:
        thread.join(60)
    assert answers == [200] * 8


async def _rests():
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def work(seconds):
        now[0] += seconds

    lanes = Lanes(clock=lambda: now[0], sleep=sleep)
    try:
        for seconds in (0.05, 9.0, 0.0, 0.0):
            await lanes.prepare(lambda seconds=seconds: work(seconds), LONG_BYTES + 1)
        await lanes.prepare(lambda: work(5), LONG_BYTES)
    finally:
        lanes.close()
    return slept


def test_the_lane_of_long_bodies_rests():
    import asyncio

    assert asyncio.run(_rests()) == pytest.approx([REST * 0.05, LONGEST_REST])


def test_too_many_that_wait():
    import asyncio

    async def run():
        go, lanes = threading.Event(), Lanes(waiting=2)
        try:
            tasks = [asyncio.ensure_future(lanes.compile(go.wait)) for _ in range(5)]
            found = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            codes = [task.exception().status for task in found[0]]
            go.set()
            return codes, await asyncio.gather(*found[1])
        finally:
            go.set()
            lanes.close()

    assert asyncio.run(run()) == ([429, 429], [True] * 3)


@pytest.mark.parametrize(
    ("value", "values"),
    [([1] * 100, 101), ([[]] * 100, 101), ([{}] * 50, 51), ([",[{" * 99] * 9, 10), (['"\\,[' * 40] * 9, 10)],
)
def test_values_are_counted_before_they_are_made(value, values):
    body = json.dumps({"prompt": value}).encode()
    check_values(body, 2 * values + 2)
    with pytest.raises(ApiError, match="must have at most"):
        check_values(body, values // 2)


def test_a_body_of_very_many_values(server, monkeypatch):
    monkeypatch.setattr("lineate.serving.api.service.parse", lambda body: pytest.fail("it was parsed"))
    body = b'{"prompt":[' + b"[]," * 500_000 + b"[]]}"
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400 and "at most" in answer.json()["error"]["message"]


def test_schemas_that_no_grammar_can_follow(tokenizer, monkeypatch):
    grammars = Grammars(tokenizer, 256 * 1024)
    properties = {f"p{n}": {"type": "string"} for n in range(501)}
    grammars.json(JsonFormat({"type": "object", "properties": properties, "required": ["p0"]}))
    with pytest.raises(ApiError, match="at most 500 properties that are not required in one object, got 501"):
        grammars.json(JsonFormat({"anyOf": [{"type": "object", "properties": properties}]}))
    monkeypatch.setattr("llguidance.LLMatcher.grammar_from_json_schema", lambda *_: pytest.fail("too late"))
    with pytest.raises(ApiError, match="must have at most 262144 bytes"):
        grammars.json(JsonFormat({"enum": ["x" * 300_000]}))


@pytest.mark.parametrize(("prompts", "n", "param"), [(1, 66, "n"), (66, 1, "prompt"), (2, 33, "n")])
def test_too_many_log_probabilities_of_prompts(server, prompts, n, param):
    body = {"prompt": [[65] * 2000] * prompts, "n": n, "echo": True, "logprobs": 0, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert f"must be at most 131072, got {2000 * prompts} x {n}; send fewer prompts" in error["message"]


@pytest.mark.parametrize("more", [{"echo": True}, {"logprobs": 0}])
def test_only_echo_with_log_probabilities_is_limited(tokenizer, more):
    engine = ScriptedEngine(tokenizer.encode, lambda request, index: "Hello.", slots=128)
    with live(engine, tokenizer, DESCRIPTION) as server:
        body = {"prompt": [65] * 2000, "n": 66, "max_tokens": 0, **more}
        made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert made.status_code == 200 and len(made.json()["choices"]) == 66
