"""bench/serving/flagships.py: its clients, its numbers, and a run of a small preset on a CPU."""

import asyncio
import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("typer")

from bench.serving import flagships
from bench.serving.streams import Answer, Server, stream
from lineate.models import preset
from lineate.serving.app import Settings, describe
from lineate.serving.engine.engine import Engine
from lineate.text import Numbered
from lineate.web.limits import Limits
from tests.support.live_server import live
from tests.support.small_models import random_model


def counts(time, steps, running, reading=0, waiting=0):
    return {"time": time, "steps": steps, "running": running, "reading": reading, "waiting": waiting}


def test_a_step_is_timed_only_while_all_rows_decode():
    seen = [
        counts(0, 0, 0, waiting=2), counts(1, 3, 1, reading=1), counts(2, 10, 2), counts(4, 30, 2), counts(5, 35, 2),
        counts(6, 36, 1), counts(7, 50, 2), counts(9, 60, 2, waiting=1),
    ]  # fmt: skip
    assert flagships.step_seconds(seen, 2) == 3 / 25
    assert flagships.step_seconds(seen, 3) is None


def test_numbers_of_clients_that_run_together():
    answers = [Answer(0.0, [1.0, 2.0, 3.0, 4.0], tokens=4), Answer(1.0, [3.0, 3.5, 4.5, 5.0], tokens=5)]
    found = flagships.summarise(answers, [], 2)
    assert (found["tokens"], found["seconds"], found["tokens_per_second"]) == (9, 5.0, 1.8)
    assert found["decode_tokens_per_second"] == 2.0  # after 3 and up to 4: one token of each
    assert (found["first_median"], found["first_p99"], found["between_p99"]) == (1.5, 2.0, 1.0)
    assert flagships.percentile([3.0, 1.0, 2.0], 50) == 2.0 and flagships.percentile([], 99) is None


@pytest.fixture
def server():
    model = random_model(preset("tiny", vocab_size=300))
    engine = Engine(model, slots=2, context=600, spacing=64)
    engine.start()
    tokenizer = Numbered(300)
    settings = Settings(limits=Limits(body_bytes=8192, progress_seconds=0.001))
    with live(engine, tokenizer, describe(model, tokenizer, "tiny", 600, 2), settings) as server:
        yield server
    engine.stop(drain=False)


def test_a_client_counts_tokens_and_collects_comments(server):
    asked = flagships.parse([])
    before = time.perf_counter()
    answer = asyncio.run(stream(server.port, flagships.body_of(asked, [n % 300 for n in range(500)], 5)))
    assert answer.tokens == 5 and answer.own["read_tokens"] == 500
    assert before <= answer.began < answer.times[0] <= answer.times[-1] and len(answer.gaps) == len(answer.times) - 1
    assert all(x.startswith("reading ") and x.endswith(" of 500 tokens") for x in answer.comments)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [300]}, "400 Bad Request: .*whole numbers below 300"),
        ({"prompt": [1] * 9000}, "413 .*at most 8192 bytes"),
    ],
)
def test_a_client_that_is_refused_says_why(server, body, message):
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(stream(server.port, body))


WRONG = {
    "--hardware": ("abacus", "invalid choice: 'abacus'"), "--preset": ("huge", "invalid choice: 'huge'"),
    "--bits": ("3", "invalid choice: '3'"), "--clients": ("1,,3", "a whole number of at least 1, got ''"),
    "--new": ("0", "a whole number of at least 1, got '0'"), "--prompt": ("-3", "got '-3'"),
    "--long": ("1M", "got '1M'"), "--requests": ("0", "got '0'"), "--spacing": ("x", "got 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused_before_anything_is_measured(name, capsys):
    value, message = WRONG[name]
    with pytest.raises(SystemExit):
        flagships.main([f"{name}={value}"])
    assert name in (said := capsys.readouterr().err) and message in said


def test_options_of_the_server():
    asked = flagships.parse(["--bits", "fp8", "--new", "10", "--spacing", "8192"])
    words = flagships.options_of(asked, 1, 2**20)
    assert words[:2] == ["kimi-linear-48b", "--random-weights"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--context"] == str(2**20 + 10 + flagships.ROOM) and options["--spacing"] == "8192"
    assert (options["--max-body"], options["--bits"], options["--slots"]) == ("24MB", "fp8", "1")
    assert "--spacing" not in flagships.options_of(flagships.parse([]), 4, 64)


def test_a_server_that_does_not_start_is_an_error(capsys):
    why = "the server ended with code 2: .*--random-weights must be given with"
    with Server(["no-such-preset", "--random-weights"]) as server, pytest.raises(RuntimeError, match=rf"{why}"):
        server.wait(60)
    assert "no-such-preset" in capsys.readouterr().out


CPU = ["--preset", "tiny", "--dtype", "float32", "--device", "cpu"]


@pytest.mark.cover
def test_clients_of_a_small_preset(tmp_path, capsys):
    file = tmp_path / "out" / "found.json"
    flagships.main([*CPU, "--clients", "1,3", "--prompt", "150", "--new", "24", "--json", str(file)])
    said, found = capsys.readouterr().out, json.loads(file.read_text())["results"]
    assert [x["clients"] for x in found] == [1, 3] and [x["tokens"] for x in found] == [24, 72]
    assert [x["requests"] for x in found] == [1, 3]
    for x in found:
        assert 0 < x["bound_step"] < x["engine_step"] and x["first_median"] <= x["first_p99"]
    assert "ready after" in said and "step ms, served" in said


@pytest.mark.cover
def test_one_long_prompt_of_a_small_preset(tmp_path, capsys):
    file = tmp_path / "found.json"
    flagships.main([*CPU, "--long", "700", "--new", "6", "--json", str(file)])
    found = json.loads(file.read_text())["results"][0]
    assert (found["prompt"], found["new"], found["body_bytes"] > 700) == (700, 6, True)
    assert found["first_seconds"] >= found["read_seconds"] > found["bound_read"] > 0
    assert found["progress_comments"] == len(found["comments"]) and "its JSON s" in capsys.readouterr().out


@pytest.mark.cover
def test_a_load_with_published_figures(tmp_path, capsys, monkeypatch):
    load = flagships.Published(requests=5, clients=2, prompt=70, new=6, seconds=2.0, best=1.0)
    monkeypatch.setitem(flagships.PUBLISHED, "throughput", load)
    monkeypatch.setattr(flagships, "PUBLISHED_PRESET", "tiny")
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "found.json"
    flagships.main([*CPU, "--published", "throughput", "--json", str(file)])
    found, said = json.loads(file.read_text())["results"][0], capsys.readouterr().out
    assert (found["what"], found["clients"], found["requests"], found["tokens"]) == ("throughput", 2, 5, 30)
    assert found["published_seconds"] == [2.0, 1.0]
    assert "theirs, defaults, bfloat16" in said and "190" in said and "vLLM" in said  # 5 * 76 tokens in 2 s
