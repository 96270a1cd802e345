"""Answers that a shutdown cuts short, as OpenAI's own client and the engine's callers see them."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import openai

from lineate.models import preset
from lineate.serving.app import Settings, describe
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from lineate.web.limits import Limits
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import live, until
from tests.support.serving_models import model as small_model
from tests.support.serving_models import prompt
from tests.support.small_models import random_model

CONTEXT, SLOTS = 100_000, 2
ENDLESS = {"model": "tiny", "max_tokens": 90_000, "extra_body": {"ignore_eos": True}}
CUT = "the server is shutting down; the answer is not complete"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@contextlib.contextmanager
def serving(tokenizer, start=True, **limits):
    """Serve a real engine with a limit for draining that passes at once."""
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=1, pattern="G"))
    engine = Engine(model, slots=SLOTS, context=CONTEXT, spacing=64)
    if start:
        engine.start()
    try:
        settings = Settings(limits=Limits(drain_seconds=0.05, **limits))
        with live(engine, tokenizer, describe(model, tokenizer, "tiny", CONTEXT, SLOTS), settings) as server:
            server.engine = engine
            yield server
    finally:
        engine.stop(drain=False)


def ask(server, kind, **options):
    """Ask for an answer that has no end."""
    client = server.client()
    if kind == "chat":
        return client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **ENDLESS, **options)
    return client.completions.create(prompt="hi", **ENDLESS, **options)


def text_of(kind, choice):
    return (choice.delta.content or "") if kind == "chat" else choice.text


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_ends_with_an_error(tokenizer, kind, n):
    with serving(tokenizer) as server:
        stream = ask(server, kind, stream=True, n=n, stream_options={"include_usage": True})
        seen, drained = [], False
        with pytest.raises(openai.APIError, match=CUT) as caught:
            for chunk in stream:
                seen.append(chunk)
                if not drained and len(seen) > 10:
                    server.server.drain()
                    drained = True
        assert (caught.value.code, caught.value.type) == ("shutting_down", "server_error")
        choices = [choice for chunk in seen for choice in chunk.choices]
        assert sorted(x.index for x in choices if x.finish_reason == "shutdown") == list(range(n))
        assert {x.finish_reason for x in choices} == {None, "shutdown"}
        assert "".join(text_of(kind, x) for x in choices)
        usage = seen[-1].usage
        assert usage is not None and 0 < usage.completion_tokens < 90_000 * n
        assert seen[-1].lineate["stopped_by"] == "shutdown"
        assert server.engine.stats.finished == {"shutdown": n}
        counted = server.app.state.service.metrics.text().decode()
        assert f'lineate_engine_finished_total{{kind="shutdown"}} {n}.0' in counted


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_whole_answer_has_a_reason_of_its_own(tokenizer, kind):
    with serving(tokenizer) as server, ThreadPoolExecutor(1) as elsewhere:
        made = elsewhere.submit(ask, server, kind)
        until(lambda: server.engine.stats.new_tokens > 10, "the first tokens")
        server.server.drain()
        made = made.result(60)
        (choice,) = made.choices
        assert choice.finish_reason == "shutdown" and made.lineate["stopped_by"] == "shutdown"
        assert choice.message.content if kind == "chat" else choice.text
        assert 10 < made.usage.completion_tokens < 90_000


@pytest.mark.parametrize("why", ["time", "shutdown"])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_choices_that_still_wait_end_without_a_text(tokenizer, kind, why):
    """The others keep what they have, although one choice was never begun."""
    with serving(tokenizer, seconds=1.0 if why == "time" else 600.0) as server, ThreadPoolExecutor(1) as elsewhere:
        made = elsewhere.submit(ask, server, kind, n=SLOTS + 1)
        until(lambda: server.engine.stats.new_tokens > 10, "the first tokens")
        if why == "shutdown":
            server.server.drain()
        made = made.result(60)
        texts = [choice.message.content if kind == "chat" else choice.text for choice in made.choices]
        assert [bool(text) for text in texts] == [True] * SLOTS + [False]
        assert {x.finish_reason for x in made.choices} == {"length" if why == "time" else "shutdown"}
        assert made.lineate["stopped_by"] == why and made.usage.completion_tokens > 10


def test_choices_of_a_stream_that_still_wait(tokenizer):
    with serving(tokenizer, seconds=1.0) as server:
        chunks = [*ask(server, "completions", stream=True, n=SLOTS + 2)]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    ends = [(x.index, x.finish_reason, bool(x.text)) for x in choices if x.finish_reason is not None]
    assert sorted(index for index, _, _ in ends) == list(range(SLOTS + 2))
    assert ends[-2:] == [(SLOTS, "length", False), (SLOTS + 1, "length", False)]
    assert {x.index for x in choices if x.text} == set(range(SLOTS))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_an_answer_that_has_not_begun_is_an_error(tokenizer, kind, stream):
    with serving(tokenizer, start=False) as server, ThreadPoolExecutor(1) as elsewhere:
        made = elsewhere.submit(lambda: [*ask(server, kind, stream=True)] if stream else ask(server, kind))
        until(lambda: server.engine.stats.waiting == 1, "the request")
        server.server.drain()
        with pytest.raises(openai.APIError) as caught:
            made.result(60)
        assert caught.value.code == "shutting_down"
        assert stream or isinstance(caught.value, openai.InternalServerError)


def test_an_answer_that_ends_while_the_server_drains_is_whole(tokenizer):
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=1, pattern="G"))
    engine = Engine(model, slots=SLOTS, context=CONTEXT, spacing=64)
    with live(engine, tokenizer, describe(model, tokenizer, "tiny", CONTEXT, SLOTS)) as server:
        with ThreadPoolExecutor(1) as elsewhere:
            asked = {"model": "tiny", "prompt": "hi", "max_tokens": 20, "extra_body": {"ignore_eos": True}}
            made = elsewhere.submit(lambda: [*server.client().completions.create(stream=True, **asked)])
            until(lambda: engine.stats.waiting == 1, "the request")
            server.server.drain()
            engine.start()
            chunks = made.result(60)
        assert chunks[-1].choices[0].finish_reason == "length"
    engine.stop()


@pytest.mark.parametrize("when", ["waiting", "reading", "running"])
def test_the_engine_says_that_it_was_stopped(when):
    """A client's own cancel keeps its reason, even where the engine stops before it has taken notice."""
    engine = Engine(small_model("GA"), slots=4, context=1024, spacing=64)
    handles = [engine.submit(Request(prompt(150, seed=n), n=2)) for n in range(2)]
    for _ in range({"waiting": 0, "reading": 1, "running": 9}[when]):
        engine.step()
    handles[0].cancel(1)
    engine.stop(drain=False)
    assert [made.finished for made in handles[0].result(0)] == ["shutdown", "cancelled"]
    assert [made.finished for made in handles[1].result(0)] == ["shutdown"] * 2
    assert engine.stats.finished == {"shutdown": 3, "cancelled": 1}
    assert [bool(made.tokens) for made in handles[1].result(0)] == [when == "running"] * 2


def test_a_drain_whose_time_passes():
    engine = Engine(small_model("GA"), slots=1, context=1024, spacing=64)
    handles = [engine.submit(Request(prompt(20, seed=n))) for n in range(2)]
    for _ in range(5):
        engine.step()
    engine.stop(timeout=1e-9)
    assert [handle.result(0)[0].finished for handle in handles] == ["shutdown"] * 2
    assert handles[0].completions[0].tokens
