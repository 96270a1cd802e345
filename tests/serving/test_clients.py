"""Requests that clients of OpenAI, vLLM, llama.cpp, Ollama and lm-evaluation-harness send, and their answers."""

import json
import logging
import threading
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import httpx
import torch

from lineate.generation.choice import Sampling
from lineate.models import preset
from lineate.serving.api import foreign
from lineate.serving.api.lanes import SHORT_ENTRIES
from lineate.serving.app import Settings, describe
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from lineate.web.fields import Fields
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import live, until
from tests.support.small_models import random_model

MODEL, CONTEXT, SLOTS, SPACING = "tiny-chat", 1024, 3, 64
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
TEXT = {str(token): -100 for token in range(256, 264)}
ORIGIN = "https://app.example"
WORDS = "Once upon a time there was a lion. " * 8


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=2, pattern="GA"))


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(model, slots=SLOTS, context=CONTEXT, spacing=SPACING, cache=StateCache(2**26, SPACING))
    engine.start()
    yield engine
    engine.stop(drain=False)


@pytest.fixture(scope="module")
def server(engine, tokenizer):
    description = describe(engine.model, tokenizer, MODEL, CONTEXT, SLOTS)
    with live(engine, tokenizer, description, Settings(cors=(ORIGIN,))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def post(http, route="/v1/chat/completions", **body):
    body = {"messages": HELLO, **body} if "chat" in route else body
    return http.post(route, json={"max_tokens": 3, "seed": 1, "logit_bias": TEXT, **body})


def expected(model, ids, top):
    """Return the log-probabilities of the tokens after the first, and of the likeliest ones, from one pass."""
    with torch.no_grad():
        values = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[:-1]
    return values[torch.arange(len(ids) - 1), torch.tensor(ids[1:])], values.topk(top).values


# Messages and fields.


@pytest.mark.cover
def test_a_message_is_given_back_as_it_was_dumped(client):
    """`messages.append(message.model_dump())` has null for everything that the message lacks."""
    tool = {"type": "function", "function": {"name": "now"}}
    options = {"model": MODEL, "seed": 3, "tools": [tool]}
    first = client.chat.completions.create(
        messages=HELLO, max_tokens=300, tool_choice="required", parallel_tool_calls=False, **options
    )
    message = first.choices[0].message.model_dump()
    assert message["annotations"] is None and json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}
    messages = [*HELLO, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Noon."}]
    second = client.chat.completions.create(messages=messages, max_tokens=5, logit_bias=TEXT, **options)
    messages += [second.choices[0].message.model_dump(), HELLO[0]]
    third = client.chat.completions.create(messages=messages, max_tokens=5, **options)
    assert third.usage.prompt_tokens > second.usage.prompt_tokens


def test_parts_of_messages_that_say_nothing(http):
    plain = post(http, messages=[{"role": "user", "content": "Hi"}]).json()
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [{"type": "text", "text": "Hi", **mark}], "annotations": [], **mark}]
    found = post(http, messages=marked).json()
    assert found["choices"] == plain["choices"] and found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    tool = {"type": "function", "function": {"name": "f", **mark}, **mark}
    assert post(http, tools=[tool]).status_code == 200


FOREIGN = {
    "vllm": {"skip_special_tokens": True, "truncate_prompt_tokens": None, "length_penalty": 1.0, "priority": 0},
    "llama.cpp": {"cache_prompt": True, "mirostat": 0, "dry_multiplier": 0.0, "samplers": ["top_k"], "top_n_sigma": -1},
    "ollama": {"keep_alive": "5m", "think": False},
    "nothing": {
        "bad_words": [], "min_tokens": 0, "grammar": "", "add_generation_prompt": True, "images": None, "options": {},
        "include_stop_str_in_output": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server_of", FOREIGN)
def test_fields_of_other_servers(http, caplog, server_of, stream):
    fields = FOREIGN[server_of]
    named = [name for name, value in fields.items() if value is not None] if server_of != "nothing" else []
    with caplog.at_level(logging.DEBUG, "lineate.serving"):
        for route, own in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Once"})):
            plain, answer = (post(http, route, stream=stream, **own, **more) for more in ({}, fields))
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-lineate-ignored", "") == ", ".join(named)
            assert "x-lineate-ignored" not in plain.headers
            if not stream:
                assert answer.json()["choices"] == plain.json()["choices"]
    lines = [x.getMessage() for x in caplog.records if "are ignored: " in x.getMessage()]
    assert sorted(", ".join(x.split(": ")[1] for x in lines).split(", ")) == (sorted(2 * named) or [""])


def test_a_warning_names_an_ignored_field_once(monkeypatch, caplog):
    monkeypatch.setattr(foreign, "told", set())
    names = sorted(foreign.IGNORED)
    with caplog.at_level(logging.DEBUG, "lineate.serving"):
        for n in range(len(names)):
            assert foreign.accept_foreign(Fields({names[i]: 1 for i in range(n + 1)})) == tuple(names[: n + 1])
        warned = [x.args[0] for x in caplog.records if x.levelno == logging.WARNING]
        assert warned == names
        told = [x.args[0] for x in caplog.records if x.levelno == logging.DEBUG]
        assert told == [", ".join(names[: n + 1]) for n in range(len(names) - 1)]
    assert foreign.told == foreign.IGNORED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate_prompt_tokens", 5),
        ("truncate_prompt_tokens", -1),
        ("include_stop_str_in_output", True),
        ("options", {"num_ctx": 4096}),
        ("options", []),
        ("add_special_tokens", True),
        ("add_special_tokens", 0),
    ],
)
def test_fields_that_would_change_the_answer(http, name, value):
    for route, own in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Once"})):
        answer = post(http, route, **own, **{name: value})
        if name == "add_special_tokens" and value is True and own:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_a_prompt_without_the_tokens_before_it(http, tokenizer, monkeypatch):
    first = tokenizer.encode_rendered("<|endoftext|>")
    monkeypatch.setattr(type(tokenizer), "start", property(lambda own: tuple(first)))
    ids = tokenizer.encode("Once upon")
    for starts, same in ((None, first + ids), (True, first + ids), (False, ids)):
        found = post(http, "/v1/completions", prompt=["Once upon", "a"], add_special_tokens=starts)
        assert found.status_code == 200 and "x-lineate-ignored" not in found.headers
        by_ids = post(http, "/v1/completions", prompt=same, add_special_tokens=starts).json()
        assert found.json()["choices"][0]["text"] == by_ids["choices"][0]["text"]
        count = http.post("/tokenize", json={"prompt": "Once upon", "add_special_tokens": starts}).json()["count"]
        assert by_ids["usage"]["prompt_tokens"] == count == len(same)
        assert found.json()["usage"]["prompt_tokens"] == count + len(tokenizer.encode("a")) + (starts is not False)
    assert post(http, "/v1/completions", prompt="", add_special_tokens=False).status_code == 400
    room = CONTEXT - 1
    long = tokenizer.decode(ids[:1] * room)
    assert post(http, "/v1/completions", prompt=long, max_tokens=1, add_special_tokens=False).status_code == 200
    assert post(http, "/v1/completions", prompt=long, max_tokens=1).status_code == 400
    assert "x-lineate-ignored" not in post(http, add_special_tokens=False).headers


def test_the_length_as_llama_cpp_names_it(http):
    assert post(http, max_tokens=None, n_predict=2).json()["usage"]["completion_tokens"] == 2
    assert post(http, n_predict=-1).json()["usage"]["completion_tokens"] == 3
    assert post(http, n_predict=-2).status_code == 400


def test_as_many_tokens_as_there_is_room_for(http, tokenizer):
    """That is n_predict = -1; without it, and with null, a completion has OpenAI's 16 tokens."""
    ids = tokenizer.encode(WORDS * 9)[: CONTEXT - 40]
    options = {"prompt": ids, "max_tokens": None, "ignore_eos": True}
    for more, tokens in (({"n_predict": -1}, 40), ({"n_predict": None}, 16), ({"n_predict": -1, "max_tokens": 5}, 5)):
        made = post(http, "/v1/completions", **options | more).json()
        assert made["usage"]["completion_tokens"] == tokens
        assert made["choices"][0]["finish_reason"] == "length"


def test_head(http):
    for route in ("/", "/health"):
        answer = http.head(route)
        assert answer.status_code == 200 and answer.content == b""
        assert answer.headers["content-length"] == http.get(route).headers["content-length"]


def test_a_preflight_of_openais_client(http):
    asked = ["authorization", "content-type", "x-stainless-arch", "x-stainless-retry-count", "x-stainless-new-header"]
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    answer = http.options(
        "/v1/chat/completions", headers={**headers, "Access-Control-Request-Headers": ", ".join(asked)}
    )
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert set(asked) <= {x.strip() for x in answer.headers["access-control-allow-headers"].split(",")}
    other = http.options("/v1/chat/completions", headers={**headers, "Origin": "https://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    read = http.get("/health", headers={"Origin": ORIGIN}).headers
    assert "X-Lineate-Ignored" in read["access-control-expose-headers"]


# Choices.


@pytest.mark.cover
def test_more_choices_than_slots(client):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "logit_bias": TEXT, "logprobs": True}
    made = client.chat.completions.create(n=2 * SLOTS + 1, seed=5, **options)
    assert [x.index for x in made.choices] == list(range(2 * SLOTS + 1))
    for n, choice in enumerate(made.choices):
        alone = client.chat.completions.create(seed=5 + n, **options).choices[0]
        assert (choice.message.content, choice.logprobs) == (alone.message.content, alone.logprobs)
    assert made.usage.completion_tokens == 8 * (2 * SLOTS + 1)
    texts = [""] * (2 * SLOTS + 1)
    for chunk in client.chat.completions.create(n=2 * SLOTS + 1, seed=5, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [x.message.content for x in made.choices]


def test_a_seed_at_the_end_of_its_range(client):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "logit_bias": TEXT}
    made = client.chat.completions.create(n=SLOTS + 1, seed=2**64 - 1, **options)
    alone = client.chat.completions.create(seed=SLOTS - 1, **options)
    assert made.choices[SLOTS].message.content == alone.choices[0].message.content


def test_more_prompts_than_slots(client):
    prompts = [f"Number {n}: " for n in range(24)]
    options = {"model": MODEL, "max_tokens": 4, "seed": 7, "logit_bias": TEXT}
    made = client.completions.create(prompt=prompts, n=2, **options)
    assert [x.index for x in made.choices] == list(range(48)) and made.usage.completion_tokens == 192
    for n in (0, 23):
        alone = client.completions.create(prompt=prompts[n], n=2, **options | {"seed": 7 + 2 * n})
        assert [x.text for x in made.choices[2 * n : 2 * n + 2]] == [x.text for x in alone.choices]


def test_choices_that_the_queue_has_no_room_for(engine, http):
    answer = post(http, "/v1/completions", prompt=["a"] * 65, n=2)
    assert answer.status_code == 400 and "at most 128, got 65 x 2" in answer.json()["error"]["message"]
    until(lambda: engine.stats.waiting + engine.stats.running == 0)


# Log-probabilities.


def test_the_end_token_has_a_log_probability(client, tokenizer):
    end = min(tokenizer.ends)
    forced = {"model": MODEL, "max_tokens": 5, "logit_bias": {str(end): 100}}
    choice = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **forced).choices[0]
    (entry,) = choice.logprobs.content
    assert choice.finish_reason == "stop" and choice.message.content == ""
    assert entry.token == tokenizer.decode([end], keep_special=True) and len(entry.top_logprobs) == 2
    streamed = client.chat.completions.create(messages=HELLO, logprobs=True, stream=True, **forced)
    found = [x for chunk in streamed for x in (chunk.choices[0].logprobs or chunk).model_dump().get("content") or []]
    assert [x["logprob"] for x in found] == [entry.logprob]
    listed = client.completions.create(prompt="Once", logprobs=1, **forced).choices[0].logprobs
    assert listed.tokens == [entry.token] and len(listed.token_logprobs) == 1


@pytest.mark.parametrize("length", [1, 2, SPACING, SPACING + 1, 3 * SPACING + 5])
def test_log_probabilities_of_a_prompt(engine, model, length):
    """They are those of one pass over the prompt, whatever the cache has, and n and the length do not matter."""
    ids = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    plain = [engine.submit(Request(ids, Sampling(seed=1), max_new_tokens=4, n=2)).result(60) for _ in range(2)]
    for new in (0, 4):
        request = Request(ids, Sampling(seed=1), max_new_tokens=new, n=2, prompt_logprobs=3)
        for made, other in zip(engine.submit(request).result(60), plain[0], strict=True):
            assert made.tokens == other.tokens[:new] and made.finished == "length" and made.cached_tokens == 0
            assert [x.token for x in made.prompt] == ids[1:]
            if length > 1:
                own, best = expected(model, ids, 3)
                torch.testing.assert_close(
                    torch.tensor([x.logprob for x in made.prompt]).double(), own, atol=2e-4, rtol=0
                )
                found = torch.tensor([[value for _, value in x.top] for x in made.prompt]).double()
                torch.testing.assert_close(found, best, atol=2e-4, rtol=0)
    assert all(x.prompt is None for x in plain[1])


def test_a_prompt_with_log_probabilities_waits_for_no_other(model):
    """It is read at the same time as one with the same beginning, which it leaves nothing to."""
    engine = Engine(model, slots=2, context=CONTEXT, spacing=SPACING, cache=StateCache(2**24, SPACING))
    ids = list(range(4 * SPACING))
    handles = [engine.submit(Request(ids, max_new_tokens=1, prompt_logprobs=x)) for x in (None, 0, None, 0)]
    while engine.step():
        pass
    assert [len(x.result(0)[0].prompt or ()) for x in handles] == [0, len(ids) - 1, 0, len(ids) - 1]
    assert engine.stats.read_tokens == 3 * len(ids)  # the second plain one finds the state of the first
    engine.stop()


class Watching:
    """A drafter without guesses that is told what the head has read."""

    needs_hidden, row_nbytes = True, None

    def __init__(self):
        self.observed = []

    def propose(self, rows, most):
        return [None] * len(rows)

    def observe(self, key, ids, start, hidden):
        self.observed.append((start, len(hidden)))

    def forget(self, key):
        pass


def test_a_drafter_sees_a_prompt_with_log_probabilities(model):
    drafter, ids = Watching(), list(range(2 * SPACING + 3))
    engine = Engine(model, slots=2, context=CONTEXT, spacing=SPACING, drafter=drafter)
    handle = engine.submit(Request(ids, max_new_tokens=0, prompt_logprobs=0))
    while engine.step():
        pass
    assert drafter.observed == [(0, SPACING), (SPACING, SPACING), (2 * SPACING, 3)]
    assert len(handle.result(0)[0].prompt) == len(ids) - 1


@pytest.mark.parametrize("most", [0, 1, 5])
def test_echo_with_log_probabilities(client, model, tokenizer, most):
    """The lists of /v1/completions: one entry for each token of the prompt and of the answer, and where it begins."""
    options = {"model": MODEL, "max_tokens": most, "seed": 2, "logit_bias": TEXT, "echo": True}
    prompt = "Grüße, 世界! " + WORDS
    ids = [*tokenizer.start, *tokenizer.encode(prompt)]
    choice = client.completions.create(prompt=prompt, logprobs=2, **options).choices[0]
    found = choice.logprobs
    assert choice.text.startswith(prompt) and choice.finish_reason == "length"
    assert {len(x) for x in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)} == {
        len(ids) + most
    }
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    own, best = expected(model, ids, 2)
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(own.tolist(), abs=2e-4)
    assert [max(x.values()) for x in found.top_logprobs[1 : len(ids)]] == pytest.approx(best[:, 0].tolist(), abs=2e-4)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text.startswith(token, offset)
    by_ids = client.completions.create(prompt=ids, logprobs=2, **options).choices[0]
    assert (by_ids.text, by_ids.logprobs) == (choice.text, found)
    chunks = [x.choices[0] for x in client.completions.create(prompt=prompt, logprobs=2, stream=True, **options)]
    assert "".join(x.text for x in chunks) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [y for x in chunks if x.logprobs for y in getattr(x.logprobs, name)] == getattr(found, name)
    if not most:
        plain = client.completions.create(prompt=prompt, model=MODEL, max_tokens=0)
        assert (plain.choices[0].text, plain.usage.completion_tokens) == ("", 0)


def test_what_lm_evaluation_harness_reads(http, model, tokenizer):
    """Its local-completions: a batch of lists of ids, from which it sums the log-probabilities of each continuation."""
    pairs = [("The lion is", " big"), (WORDS, "and then"), ("2 + 2 =", " 4"), ("x", "<|im_end|>")]
    encoded = [(tokenizer.encode(a), tokenizer.encode_rendered(b)) for a, b in pairs]
    sent = {
        "model": MODEL, "prompt": [a + b for a, b in encoded], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }  # fmt: skip
    for _ in range(2):  # the second time, the cache has them
        answer = http.post("/v1/completions", json=sent)
        assert answer.status_code == 200
        for choice, (context, rest) in zip(answer.json()["choices"], encoded, strict=True):
            own, best = (x[-len(rest) :] for x in expected(model, context + rest, 1))
            listed = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            assert sum(listed) == pytest.approx(float(own.sum()), abs=1e-3) and len(listed) == len(rest)
            greedy = all(x == max(top.values()) for x, top in zip(listed, tops, strict=True))
            assert greedy == bool((own >= best[:, 0]).all())


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_listed_once_and_beside_the_event_loop(server, http, tokenizer, monkeypatch, stream):
    """Whatever n is; and no more than a part of its JSON is encoded by one call, or by the thread of the event loop."""
    ids, n, shown, dumped = tokenizer.encode(WORDS * 6)[:900], 2 * SLOTS, [], []
    assert len(ids) > SHORT_ENTRIES
    show, dumps = tokenizer.shown_bytes, json.dumps

    def counted_show(*args):
        shown.append(threading.current_thread().name)
        return show(*args)

    def counted_dumps(*args, **options):
        found = dumps(*args, **options)
        dumped.append((threading.current_thread().name, len(found)))
        return found

    monkeypatch.setattr(tokenizer, "shown_bytes", counted_show)
    monkeypatch.setattr(json, "dumps", counted_dumps)
    answer = post(http, "/v1/completions", prompt=ids, echo=True, logprobs=0, n=n, stream=stream)
    monkeypatch.undo()
    assert answer.status_code == 200
    lines = answer.text.split("data: ")[1:-1] if stream else [answer.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    for number in range(n):
        own = [x for x in choices if x["index"] == number]
        assert "".join(x["text"] for x in own).startswith(tokenizer.decode(ids))
        listed = [token for x in own for token in x["logprobs"]["tokens"]]
        assert len(listed) == len(ids) + 3
        assert [x for y in own for x in y["logprobs"]["text_offset"]][:2] == [0, len(listed[0])]
    # The engine's calls are few; the prompt is decoded for its text, and for its tokens' names and offsets.
    assert len(shown) < 3 * len(ids) + 50 * n
    loop = server.thread.name
    assert shown.count(loop) < 50 * n
    assert max((size for thread, size in dumped if thread == loop), default=0) < 2000
    assert any(thread.startswith("lineate-long-answers") for thread, _ in dumped)
