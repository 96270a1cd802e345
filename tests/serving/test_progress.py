"""The progress of a long prompt: comments in the stream of its client, and lines in the log."""

import asyncio
import json
import logging
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import httpx

from lineate.generation.choice import Sampling
from lineate.serving.api import running
from lineate.serving.app import Settings, describe
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.progress import LOG, PERIOD, ReadingProgress
from lineate.serving.engine.requests import Request
from lineate.text import Numbered
from lineate.web.limits import Limits
from tests.support.live_server import live, until
from tests.support.serving_models import SPACING, model, prompt
from tests.support.small_models import random_model

GREEDY = Sampling(temperature=0)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, LOG.name)
    return caplog


def test_lines_come_at_the_period_with_the_rate_and_the_time_left(log):
    progress = ReadingProgress(7, 1_000_000)
    assert not progress.reads
    progress.begin(200_000, 100.0)  # from the cache
    progress.note(210_000, 100.0 + 0.9 * PERIOD)
    assert progress.reads and progress.tokens == 210_000 and not log.messages
    progress.note(300_000, 110.0)
    progress.note(310_000, 110.1)
    progress.note(320_000, 115.0)
    progress.note(1_000_000, 220.0)
    assert not progress.reads
    assert log.messages == [
        "request 7: read 300000 of 1000000 tokens, 10000 tokens/s, about 70 s left",
        "request 7: read 320000 of 1000000 tokens, 4000 tokens/s, about 362 s left",  # of the last 5 s
        "request 7: read 800000 tokens in 120.0 s, 6667 tokens/s",
    ]


@pytest.mark.parametrize("growth", [0.0, 1e-10])
def test_the_time_left_follows_the_growth_of_attention(log, growth):
    """Token n takes 20 us and 2 growth n: the second line tells exactly how long the others take."""
    progress = ReadingProgress(1, 1_000_000)
    progress.begin(0, 0.0)
    seconds = [2e-5 * n + growth * n * n for n in range(0, 1_000_001, 1000)]
    for n, now in enumerate(seconds[1:-1], 1):
        progress.note(1000 * n, now)
    for line in log.messages[1:]:
        tokens, left = int(line.split(" of ")[0].split()[-1]), float(line.split(" about ")[1].split()[0])
        assert abs(left - (seconds[-1] - seconds[tokens // 1000])) < 1
    assert len(log.messages) > 2


def test_a_clock_that_stands_still_gives_no_lines(log):
    progress = ReadingProgress(1, 100)
    progress.begin(0, 5.0)
    progress.note(64, 5.0)
    progress.note(100, 5.0)
    assert not log.messages


class Clock:
    """Advances by some seconds whenever a piece of a prompt is read."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.now


def run(engine: Engine, clock: Clock, request: Request) -> list[int]:
    """Run a request to its end; return the progress after each step."""
    handle, seen = engine.submit(request), []
    while engine.step():
        clock.now += clock.seconds
        seen.append(handle.progress.tokens)
    assert handle.result(0)[0].finished == "length"
    return seen


def test_the_engine_notes_each_piece(log):
    clock = Clock(PERIOD / 2)
    engine = Engine(model("GA"), slots=1, context=1024, spacing=SPACING, cache=StateCache(2**24, SPACING), clock=clock)
    seen = run(engine, clock, Request(prompt(320), GREEDY, max_new_tokens=2))
    assert seen == [64, 128, 192, 256]  # and the last piece in the last step
    assert log.messages == [
        "request 1: read 192 of 320 tokens, 38 tokens/s, about 3 s left",
        "request 1: read 320 tokens in 10.0 s, 32 tokens/s",
    ]
    log.clear()
    seen = run(engine, clock, Request((*prompt(320), *prompt(128, 1)), GREEDY, max_new_tokens=2))
    assert seen == [384] and not log.messages  # the prompt before it came from the cache


def test_short_prompts_have_no_lines(log):
    clock = Clock(PERIOD / 10)
    engine = Engine(model("GA"), slots=1, context=1024, spacing=SPACING, clock=clock)
    run(engine, clock, Request(prompt(500), GREEDY, max_new_tokens=2))
    assert not log.messages


@pytest.fixture
def engine():
    """An engine that only steps when a test says so."""
    return Engine(model("GA"), slots=2, context=1024, spacing=SPACING)


def served(engine: Engine, **limits: float):
    tokenizer = Numbered(257)  # its ids beyond the model's are refused by the engine
    description = describe(engine.model, tokenizer, "tiny", 1024, 2)
    return live(engine, tokenizer, description, Settings(limits=Limits(**limits)))


BODY = {"prompt": list(prompt(300)), "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}


def test_a_stream_gets_comments_while_its_prompt_is_read(engine):
    with served(engine, progress_seconds=0.01, heartbeat_seconds=0.03) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=BODY, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": still working"  # it waits in the queue
            for tokens in (64, 128, 192, 256):
                engine.step()
                wanted = f": reading {tokens} of 300 tokens"
                before = [line for line in iter(lambda: next(lines), wanted) if line]
                assert set(before) <= {": still working", f": reading {tokens - 64} of 300 tokens"}
            while engine.step():
                pass
            rest = [line for line in lines if line]
    data = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
    assert rest[-1] == "data: [DONE]" and data[-1]["choices"][0]["finish_reason"] == "length"
    first = rest.index(next(line for line in rest if line.startswith("data:")))
    assert not any("reading" in line for line in rest[first:])  # nothing once the prompt is read


@pytest.mark.parametrize(("progress", "periods"), [(0.08, [0.08, 0.02]), (9.0, [0.1])])
def test_a_heartbeat_comes_on_time_for_any_period_of_progress(engine, monkeypatch, progress, periods):
    waited: list[float] = []

    def timeout(seconds: float):
        waited.append(seconds)
        return asyncio.timeout(seconds)

    monkeypatch.setattr(running, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    with (
        served(engine, progress_seconds=progress, heartbeat_seconds=0.1) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=60) as answer,
    ):
        comments, lines = [], answer.iter_lines()
        while len(comments) < 3:
            comments += [line for line in [next(lines)] if line]
        while engine.step():
            pass
        list(lines)
    assert comments == [": still working"] * 3
    assert waited[: 3 * len(periods)] == pytest.approx(periods * 3)


def test_openai_clients_do_not_see_comments(engine):
    with served(engine, progress_seconds=0.01) as server:
        texts: list[str] = []

        def read() -> None:
            stream = server.client().completions.create(
                model="tiny", prompt=BODY["prompt"], max_tokens=3, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            texts.extend(chunk.choices[0].text for chunk in stream)

        client = threading.Thread(target=read)
        client.start()
        until(lambda: engine.stats.waiting, "the request")
        engine.step()
        client.join(0.1)  # comments are sent meanwhile
        while engine.step():
            pass
        client.join(60)
    assert not client.is_alive() and 1 <= len(texts) <= 4


def test_short_prompts_get_no_comments():
    lm = random_model(model("GA").config)
    engine = Engine(lm, slots=2, context=1024, spacing=SPACING)
    engine.start()
    try:
        with served(engine) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).text
        assert answer.endswith("data: [DONE]\n\n") and not any(x.startswith(":") for x in answer.splitlines())
    finally:
        engine.stop()
