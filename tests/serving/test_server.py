"""The server as a whole: clients that leave, keys, queues, limits, metrics, draining."""

import contextlib
import json
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import httpx
import openai

from lineate.models import preset
from lineate.serving.api.service import Description
from lineate.serving.api.tools import AnswerParser
from lineate.serving.app import Settings, describe
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.text.tokenizer import Bytes
from lineate.web.limits import Limits
from lineate.web.pages import PageFiles
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine, live, until
from tests.support.small_models import random_model

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER}
DESCRIPTION = Description("scripted", context=100_000, slots=4, created=0, fingerprint="x")


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def gate():
    """No token comes before it is set."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def engine(tokenizer, gate):
    return ScriptedEngine(tokenizer.encode, lambda request, index: "Hello, world.", queue=3, gate=gate)


@contextlib.contextmanager
def serving(engine, tokenizer, **options):
    limits = {name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__}
    with (
        live(engine, tokenizer, DESCRIPTION, Settings(**options, limits=Limits(**limits))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        server.http = http
        yield server


def send(server, body, route=CHAT) -> socket.socket:
    """Send a request without reading the answer."""
    sent = socket.create_connection(("127.0.0.1", server.port))
    text = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    )
    sent.sendall(head.encode() + b"\r\n" + text)
    return sent


def rest(sent: socket.socket) -> str:
    """Read all that is still sent."""
    sent.settimeout(30)
    parts = []
    while part := sent.recv(65536):
        parts.append(part)
        text = b"".join(parts)
        length = re.search(rb"content-length: (\d+)", text)
        if b"0\r\n\r\n" in part or (length and len(text.partition(b"\r\n\r\n")[2]) >= int(length[1])):
            break
    return b"".join(parts).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(engine, tokenizer, stream):
    with serving(engine, tokenizer) as server:
        sent = send(server, {**BODY, "stream": stream})
        until(lambda: engine.running == 1)
        sent.close()
        until(lambda: engine.running == 0, "the end of the request")
        assert engine.handles[0].ending == {0: "cancelled"}
        until(lambda: server.app.state.traffic.active == 0)


@pytest.mark.cover
def test_a_client_that_leaves_a_real_engine(tokenizer):
    """Rows, readings and waiting requests are freed, and what others get does not change."""
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=2, pattern="GA"))
    engine = Engine(model, slots=2, context=4096, spacing=64, cache=StateCache(2**24, 64), poison=True)
    engine.start()
    try:
        with live(engine, tokenizer, describe(model, tokenizer, "tiny", 4096, 2)) as server:
            client = server.client()
            options = {"model": "tiny", "messages": USER, "max_tokens": 10, "seed": 1}
            before = client.chat.completions.create(**options).choices[0].message.content
            endless = {"messages": USER, "max_tokens": 4000, "ignore_eos": True}
            leaving = [send(server, {**endless, "stream": n % 2 == 0, "seed": n}) for n in range(6)]
            until(lambda: engine.stats.running == 2 and engine.stats.waiting == 4)
            for sent in leaving:
                sent.close()
            until(lambda: engine.stats.running + engine.stats.waiting + engine.stats.reading == 0)
            assert engine.stats.finished["cancelled"] == 6
            assert client.chat.completions.create(**options).choices[0].message.content == before
            until(lambda: len(engine.pool) == 0)
    finally:
        engine.stop(drain=False)


@pytest.mark.cover
def test_a_full_queue(engine, tokenizer, gate):
    with serving(engine, tokenizer) as server:
        waiting = [send(server, BODY) for _ in range(3)]
        until(lambda: engine.running == 3)
        answer = server.http.post(CHAT, json=BODY)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(openai.RateLimitError):
            server.client().chat.completions.create(model="scripted", messages=USER)
        several = server.http.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert several.status_code == 429
        gate.set()
        assert all("Hello, world." in rest(sent) for sent in waiting)
        assert server.http.post(CHAT, json=BODY).status_code == 200


def test_prompts_that_do_not_all_fit_leave_nothing(engine, tokenizer):
    with serving(engine, tokenizer) as server:
        waiting = [send(server, BODY) for _ in range(2)]
        until(lambda: engine.running == 2)
        assert server.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 429
        until(lambda: engine.running == 2, "the end of the prompt that was submitted")
        for sent in waiting:
            sent.close()


def test_more_prompts_than_can_ever_wait(engine, tokenizer):
    with serving(engine, tokenizer) as server:
        answer = server.http.post("/v1/completions", json={"prompt": ["a"] * 4})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
        assert not engine.handles


def test_too_many_requests_at_once(engine, tokenizer):
    with serving(engine, tokenizer, requests=1) as server, send(server, BODY):
        until(lambda: server.app.state.traffic.active == 1)
        assert server.http.post(CHAT, json=BODY).status_code == 429
        assert server.http.get("/health").status_code == 200


@pytest.mark.cover
def test_keys(engine, tokenizer, gate):
    gate.set()
    with serving(engine, tokenizer, api_keys=("first-key", "second-key")) as server:
        for route in ("/v1/models", "/metrics", "/lineate/info", "/lineate/stats"):
            assert server.http.get(route).status_code == 401
        for key in ("wrong", "first-ke", "first-key2", "Bearer", "first-key second-key"):
            answer = server.http.post(CHAT, json=BODY, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.post(CHAT, json=BODY, headers={"Authorization": "Basic first-key"}).status_code == 401
        assert server.http.post(CHAT, content=b"no JSON").status_code == 401  # before the body is read
        assert engine.handles == []
        for key in ("first-key", "second-key"):
            made = server.client(api_key=key).chat.completions.create(model="scripted", messages=USER)
            assert made.choices[0].message.content == "Hello, world."
        assert server.http.get("/health").json() == {"status": "ok"}


def test_metrics(engine, tokenizer, gate):
    gate.set()
    with serving(engine, tokenizer) as server:
        made = server.http.post(CHAT, json=BODY).json()
        server.http.post(CHAT, json={})
        server.http.get("/nothing/here")
        text = server.http.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['lineate_requests_total{route="/v1/chat/completions",status="200"}'] == "1.0"
        assert lines['lineate_requests_total{route="/v1/chat/completions",status="400"}'] == "1.0"
        assert lines['lineate_requests_total{route="other",status="404"}'] == "1.0"
        usage = made["usage"]
        assert float(lines['lineate_tokens_total{kind="prompt"}']) == usage["prompt_tokens"]
        assert float(lines['lineate_tokens_total{kind="generated"}']) == usage["completion_tokens"]
        assert lines["lineate_first_token_seconds_count"] == "1.0"
        assert lines["lineate_engine_slots"] == "4.0" and lines["lineate_engine_running"] == "0.0"
        assert "lineate_engine_new_tokens_total" in lines


@pytest.mark.cover
def test_two_servers_have_metrics_of_their_own(engine, tokenizer, gate):
    gate.set()
    with serving(engine, tokenizer) as one, serving(engine, tokenizer) as other:
        one.http.post(CHAT, json=BODY)
        assert 'route="/v1/chat/completions"' in one.http.get("/metrics").text
        assert 'route="/v1/chat/completions"' not in other.http.get("/metrics").text


def test_draining_finishes_what_runs_and_refuses_what_comes(engine, tokenizer, gate):
    with serving(engine, tokenizer) as server:
        sent = send(server, {**BODY, "stream": True})
        until(lambda: engine.running == 1)
        server.server.drain()
        until(lambda: server.app.state.traffic.draining)
        answer = server.http.post(CHAT, json=BODY)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "shutting_down"
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "draining"}
        gate.set()
        text = rest(sent)
        assert '"finish_reason":"stop"' in text and "data: [DONE]" in text
        server.thread.join(30)
        assert not server.thread.is_alive()


@pytest.mark.cover
@pytest.mark.parametrize("stream", [False, True])
def test_draining_refuses_what_has_not_begun(engine, tokenizer, stream):
    with serving(engine, tokenizer, drain_seconds=0.2) as server:
        sent = send(server, {**BODY, "stream": stream})
        until(lambda: engine.running == 1)
        server.server.drain()
        text = rest(sent)
        assert '"code":"shutting_down"' in text and ("data: [DONE]" in text) == stream
        assert stream or " 503 " in text.splitlines()[0]


@pytest.mark.cover
def test_draining_cancels_what_runs_too_long(engine, tokenizer):
    engine.free = 3
    with serving(engine, tokenizer, drain_seconds=0.2) as server:
        sent = send(server, {**BODY, "stream": True, "stream_options": {"include_usage": True}})
        until(lambda: engine.made == 3)
        server.server.drain()
        text = rest(sent)
        assert '"finish_reason":"shutdown"' in text and '"stopped_by":"shutdown"' in text
        assert '"finish_reason":"length"' not in text
        error, done = [line for line in text.splitlines() if line.startswith("data: ")][-2:]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down" and done == "data: [DONE]"
        server.thread.join(30)
        assert not server.thread.is_alive() and engine.running == 0


@pytest.mark.cover
def test_other_names_of_the_host(engine, tokenizer, gate):
    """A page of another site, whose name was made to lead here, is refused."""
    gate.set()
    with serving(engine, tokenizer, hosts=frozenset({"127.0.0.1", "localhost", "::1"})) as server:
        for host in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "",
            "[::",
            "localhost@evil.example:1x",
        ):
            answer = server.http.post(CHAT, json=BODY, headers={"Host": host})
            assert answer.status_code in (400, 403), host
        for host in ("localhost", "localhost:8000", f"127.0.0.1:{server.port}", "[::1]:99"):
            assert server.http.post(CHAT, json=BODY, headers={"Host": host}).status_code == 200, host


@pytest.mark.cover
def test_pages_of_other_sites(engine, tokenizer, gate):
    gate.set()
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with serving(engine, tokenizer) as server:
        assert "access-control-allow-origin" not in server.http.post(CHAT, json=BODY, headers=asked).headers
        assert server.http.options(CHAT, headers=asked).status_code == 405
    with serving(engine, tokenizer, cors=("https://app.example",)) as server:
        answer = server.http.post(CHAT, json=BODY, headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert server.http.options(CHAT, headers=asked).status_code == 200
        other = server.http.post(CHAT, json=BODY, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        wrong = server.http.post(CHAT, json={}, headers=asked)  # errors can be read too
        assert wrong.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.cover
def test_a_body_that_comes_too_slowly(engine, tokenizer):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with serving(engine, tokenizer, body_seconds=0.2) as server, socket.socket() as sent:
        sent.connect(("127.0.0.1", server.port))
        sent.sendall(head.encode() + b"\r\n{")
        sent.settimeout(30)
        assert b"408" in sent.recv(1000).split(b"\r\n")[0]


@pytest.mark.cover
def test_a_client_that_reads_nothing(tokenizer):
    """It loses its connection, while others are served."""
    engine = ScriptedEngine(tokenizer.encode, lambda request, index: "x" * (60_000 if len(request.ids) > 30 else 5))
    with serving(engine, tokenizer, send_seconds=0.3) as server, socket.socket() as sent:
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent.connect(("127.0.0.1", server.port))
        body = {"messages": USER * 3, "stream": True, "max_tokens": 60_000}
        text = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        sent.sendall(head.encode() + b"\r\n" + text)
        until(lambda: len(engine.handles) == 1)
        assert server.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == "xxxxx"
        until(lambda: server.app.state.traffic.active == 0, "the end of the stream")


@pytest.mark.cover
def test_the_time_of_a_request_is_limited(tokenizer):
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=1, pattern="G"))
    engine = Engine(model, slots=2, context=100_000, spacing=64)
    engine.start()
    try:
        description = describe(model, tokenizer, "tiny", 100_000, 2)
        with live(engine, tokenizer, description, Settings(limits=Limits(seconds=0.5))) as server:
            body = {"messages": USER, "max_tokens": 90_000, "ignore_eos": True}
            made = httpx.post(server.url + CHAT, json=body, timeout=30).json()
        assert made["choices"][0]["finish_reason"] == "length" and made["lineate"]["stopped_by"] == "time"
        assert 0 < made["usage"]["completion_tokens"] < 90_000
    finally:
        engine.stop(drain=False)


def test_waiting_for_longer_than_the_limit(tokenizer):
    """A request that never began gets an error, not an empty answer."""
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=1, pattern="G"))
    engine = Engine(model, slots=1, context=100_000, spacing=64)  # not started: everything waits
    thread = threading.Thread(target=lambda: until(lambda: engine.step() or not engine.stats.waiting))
    description = describe(model, tokenizer, "tiny", 100_000, 1)
    with live(engine, tokenizer, description, Settings(limits=Limits(seconds=0.01))) as server:
        sent = send(server, BODY)
        until(lambda: engine.stats.waiting == 1)
        time.sleep(0.02)
        thread.start()
        text = rest(sent)
    thread.join()
    assert " 503 " in text.splitlines()[0] and '"code":"timeout"' in text and "retry-after" in text.lower()


def test_a_model_without_a_template():
    """The plain template ends with "Assistant:"; the space after it is not part of the answer, nor is the next turn."""
    engine = ScriptedEngine(Bytes().encode, lambda request, index: " Yes, sir. \n\nUser: And you?")
    with serving(engine, Bytes()) as server:
        made = server.http.post(CHAT, json=BODY).json()["choices"][0]
        assert (made["message"]["content"], made["finish_reason"]) == ("Yes, sir. ", "stop")
        streamed = server.client().chat.completions.create(model="scripted", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Yes, sir. "
        text = Bytes().decode(engine.handles[0].request.ids)
        assert text == "User: hi\n\nAssistant:"


def test_silence_is_filled_with_comments(engine, tokenizer, gate):
    with serving(engine, tokenizer, heartbeat_seconds=0.05) as server:
        sent = send(server, {**BODY, "stream": True})
        sent.settimeout(30)
        text = ""
        while text.count(": still working") < 2:
            text += sent.recv(4096).decode()
        gate.set()
        assert "data: [DONE]" in rest(sent)


@pytest.mark.cover
def test_the_page(engine, tokenizer, tmp_path, monkeypatch):
    """Its files are served without a key, to no frame of another site, and they hide no route."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<html>a page</html>")
    (tmp_path / "page" / "main.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setattr("lineate.serving.api.operating.FILES", PageFiles(tmp_path / "page"))
    with serving(engine, tokenizer, api_keys=("key",)) as server:
        page = server.http.get("/")
        assert (
            page.text == "<html>a page</html>" and "frame-ancestors 'none'" in page.headers["content-security-policy"]
        )
        assert "javascript" in server.http.get("/main.js").headers["content-type"]
        assert server.http.get("/v1/models").status_code == 401
        for path in ("/nothing.js", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "/page/secret.txt"):
            answer = server.http.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found", path
        assert server.http.get(CHAT).status_code == 405
        assert server.http.post("/v1/embeddings", json={}).status_code == 404


def failing(request, index):
    raise RuntimeError("secret: /home/someone/model.safetensors is broken")


def test_faults_of_the_engine_are_not_explained(tokenizer):
    engine = ScriptedEngine(tokenizer.encode, failing)
    with serving(engine, tokenizer) as server:
        answer = server.http.post(CHAT, json=BODY)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        text = server.http.post(CHAT, json={**BODY, "stream": True}).text
        assert '"error":' in text and text.endswith("data: [DONE]\n\n")
        assert "secret" not in answer.text + text and "home" not in answer.text + text


def test_a_schema_that_fails_while_tokens_are_generated(tokenizer):
    def fails(request, index):
        raise ValueError("the grammar cannot be followed: it is too large")

    with serving(ScriptedEngine(tokenizer.encode, fails), tokenizer) as server:
        answer = server.http.post(CHAT, json={**BODY, "response_format": {"type": "json_object"}})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_schema"


def test_faults_of_ours_are_not_explained(engine, tokenizer, gate, monkeypatch):
    gate.set()
    with serving(engine, tokenizer) as server:
        monkeypatch.setattr(engine, "submit", lambda *_: failing(None, 0))
        answer = server.http.post(CHAT, json=BODY)
        assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.json()["error"]["message"]
        assert "secret" not in answer.text
        monkeypatch.undo()
        assert server.http.post(CHAT, json=BODY).status_code == 200


def test_a_stream_that_fails_names_its_request(engine, tokenizer, gate, monkeypatch):
    gate.set()
    with serving(engine, tokenizer) as server:
        monkeypatch.setattr(AnswerParser, "push", failing)
        answer = server.http.post(CHAT, json={**BODY, "stream": True})
        (error,) = [line for line in answer.text.splitlines() if '"error":' in line]
        assert answer.headers["x-request-id"] in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert "secret" not in answer.text and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("route", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_long_texts_do_not_delay_others(engine, tokenizer, gate, monkeypatch, route, body):
    """Long work runs outside of the event loop: another request is answered meanwhile."""
    own, begun = tokenizer.shown_bytes, threading.Event()

    def slow(token, keep_special):
        begun.set()
        assert gate.wait(30)
        return own(token, keep_special)

    with serving(engine, tokenizer) as server:
        monkeypatch.setattr(tokenizer, "shown_bytes", slow)
        with send(server, body, route) as sent:
            until(begun.is_set)
            assert server.http.get("/health", timeout=20).status_code == 200
            gate.set()
            assert "200 OK" in rest(sent)


def test_what_lineate_says_of_the_model(tokenizer):
    model = random_model(preset("tiny", vocab_size=tokenizer.vocab_size))
    described = describe(model, tokenizer, "tiny", 512, 2)
    assert sum(described.state_bytes(100)) == model.state_nbytes(1, 100)
    assert [layer["kind"] for layer in described.layers[-2:]] == ["gated_delta_rule", "softmax_attention"]
    assert described.fingerprint != describe(model, tokenizer, "tiny", 513, 2).fingerprint


def test_text_that_ends_lines_does_not_end_events(tokenizer):
    """httpx cuts a stream where Python's splitlines would, which is also at three characters beyond ASCII."""
    said = "a\x85b\u2028c\u2029d\x0be\r\nf"
    engine = ScriptedEngine(tokenizer.encode, lambda request, index: said)
    with serving(engine, tokenizer) as server:
        body = {"prompt": "x", "stream": True, "max_tokens": 60}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == said
