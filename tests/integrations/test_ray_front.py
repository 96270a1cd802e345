"""The front and its replicas without Ray: three replicas with scripted engines in one process, which can be lost."""

import contextlib
import json
import pickle
import socket
import threading
from array import array
from contextlib import aclosing
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import httpx
import openai
import uvicorn

from lineate.models import preset
from lineate.serving.api.service import Description
from lineate.serving.app import Settings, describe, make_app
from lineate.serving.draining import DrainingServer
from lineate.serving.engine.engine import Engine
from lineate.serving.replicas.call import Call
from lineate.serving.replicas.front import TRIES, make_front
from lineate.serving.replicas.gathered import ReplicaLost, gather
from lineate.serving.replicas.replica import Replica
from lineate.serving.replicas.routing import Routing
from lineate.web.limits import Limits
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import WAIT, ScriptedEngine, until
from tests.support.small_models import random_model

CHAT = "/v1/chat/completions"
TEXT = "Hello, world. This is a replica."
BODY = {"messages": [{"role": "user", "content": "hi"}]}
DESCRIPTION = Description("scripted", context=100_000, slots=4, created=0, fingerprint="x")


class Scripted(ScriptedEngine):
    """A scripted engine that can be started."""

    alive = True

    def start(self) -> None:
        """Do nothing: each request has a thread of its own."""


class LocalReplicas:
    """Replicas in this process.

    `lost` says after how many messages a replica is lost, at the next request that it gets; `gone` are those that are.
    """

    def __init__(self, engines, limits: Limits) -> None:
        self.engines, self.lost, self.went, self.gone = engines, {}, [], set()
        self.routing = Routing()
        tokenizer = chat_tokenizer()

        def build(engine):
            return make_app(engine, tokenizer, DESCRIPTION, Settings(limits=limits)), engine

        self.replicas = {name: Replica(lambda x=engine: build(x), name) for name, engine in engines.items()}
        self.routing.update(engines)

    @property
    def stats(self):
        return self.routing.stats

    async def answer(self, call):
        ticket = str(len(self.went))
        self.routing.open(ticket)
        (name, *_) = self.routing.choose(ticket, call.blocks)
        self.went.append(name)
        left = self.lost.get(name, 10**6)
        try:
            async with aclosing(self.replicas[name].answer(pickle.loads(pickle.dumps(call)))) as answers:
                async for replica, messages in answers:
                    for message in messages:
                        if not left:
                            self.lose(name)
                            raise ReplicaLost(name)
                        left -= 1
                        yield replica, [message]
        finally:
            self.routing.end(ticket)

    def lose(self, name):
        self.gone.add(name)
        self.routing.update(set(self.replicas) - self.gone)

    async def ask_all(self, call):
        answers = [await replica.whole(call) for name, replica in self.replicas.items() if name not in self.gone]
        return {name: body for name, status, body in answers if status == 200}


class Served:
    def __init__(self, app, server, port, thread, replicas):
        self.app, self.server, self.thread, self.replicas = app, server, thread, replicas
        self.url, self.port = f"http://127.0.0.1:{port}", port
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)


@pytest.fixture
def gate():
    """No token comes before it is set."""
    gate = threading.Event()
    yield gate
    gate.set()


@contextlib.contextmanager
def serving(gate, free: int = 0, names: str = "abc", **options):
    limits = Limits(**{name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__})
    tokenizer = chat_tokenizer()
    engines = {name: Scripted(tokenizer.encode, lambda *_: TEXT, gate=gate, free=free) for name in names}
    replicas = LocalReplicas(engines, limits)
    app = make_front(replicas, Settings(**options, limits=limits))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = DrainingServer(app, uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started, "the server")
        try:
            yield Served(app, server, port, thread, replicas)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def events(answer) -> list:
    """Return the events of a stream; the last must be [DONE]."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def said(chunks) -> str:
    return "".join(x["choices"][0]["delta"].get("content") or "" for x in chunks if "choices" in x)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2])  # nothing, the head, the head and the chunk that names the role
def test_a_replica_that_is_lost_before_its_answer(gate, stream, after):
    gate.set()
    with serving(gate) as server:
        server.replicas.lost = {"a": after}
        answer = server.http.post(CHAT, json={**BODY, "stream": stream})
        assert answer.status_code == 200
        lost = stream or after < 2  # an answer that is no stream has two messages
        assert server.replicas.went == (["a", "b"] if lost else ["a"])
        assert answer.headers["x-lineate-replica"] == server.replicas.went[-1]
        if stream:
            chunks = events(answer)
            assert said(chunks) == TEXT and len({chunk["id"] for chunk in chunks}) == 1
            assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks].count("assistant") == 1
        else:
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
        metrics = server.http.get("/metrics").text
        assert f"lineate_front_retries_total {float(lost)}" in metrics and "lineate_front_lost_total 0.0" in metrics


def test_long_bodies_are_read_beside_the_event_loop(gate, monkeypatch):
    gate.set()
    of, threads = Call.of, []

    def noted(*arguments):
        threads.append(threading.current_thread())
        return of(*arguments)

    monkeypatch.setattr(Call, "of", noted)
    with serving(gate) as server:
        for size in (10, 2**15):
            body = {"messages": [{"role": "user", "content": "a" * size}]}
            assert server.http.post(CHAT, json=body).status_code == 200
        assert threads[0] is server.thread and threads[1] is not server.thread


def test_a_body_with_too_many_values_is_refused_by_its_replica(gate):
    gate.set()
    with serving(gate, values=1000) as server:
        answer = server.http.post(CHAT, json={"messages": [[]] * 20_000})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "array_above_max_length"
        assert server.http.post(CHAT, json=BODY).status_code == 200


def test_a_replica_that_is_lost_in_the_middle_of_a_stream(gate):
    gate.set()
    with serving(gate) as server:
        server.replicas.lost = {"a": 6}
        answer = server.http.post(CHAT, json={**BODY, "stream": True})
        assert answer.status_code == 200 and server.replicas.went == ["a"]
        *chunks, last = events(answer)
        assert said(chunks) == TEXT[:4]
        assert last["error"]["code"] == "replica_lost" and last["error"]["type"] == "server_error"
        assert "lineate_front_lost_total 1.0" in server.http.get("/metrics").text
        server.replicas.lost = {"b": 6}
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="the replica that was answering was lost"):
            list(client.chat.completions.create(model="scripted", messages=BODY["messages"], stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_no_replica_survives(gate, stream):
    gate.set()
    with serving(gate, names="abcdef") as server:
        server.replicas.lost = dict.fromkeys("abcdef", 0)
        answer = server.http.post(CHAT, json={**BODY, "stream": stream})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
        assert int(answer.headers["retry-after"]) > 0
        assert len(server.replicas.went) == TRIES < 6  # the others are spared


def test_a_stream_that_waits_is_kept_open_and_can_still_be_given_to_another(gate):
    with serving(gate, heartbeat_seconds=0.05) as server:
        server.replicas.lost = {"a": 5}
        with server.http.stream("POST", CHAT, json={**BODY, "stream": True}) as stream:
            assert stream.status_code == 200
            lines = (line for line in stream.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [": still working"] * 3  # and no chunk
            until(lambda: server.replicas.went == ["a", "b"])
            gate.set()
            data = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
        assert said(data) == TEXT and len({chunk["id"] for chunk in data}) == 1


def test_a_stream_that_another_replica_refuses(gate):
    """The client has a head of status 200 already, so that the refusal is an event."""
    with serving(gate, heartbeat_seconds=0.05) as server:
        server.replicas.lost = {"a": 4}
        server.replicas.engines["b"].stop()
        server.replicas.lose("c")
        answer = server.http.post(CHAT, json={**BODY, "stream": True})
        (only,) = events(answer)
        assert only["error"]["code"] == "stopping" and server.replicas.went == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [0, 3])
def test_a_client_that_leaves(gate, stream, free):
    with serving(gate, free=free) as server:
        text = json.dumps({**BODY, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as sent:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            sent.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
            until(lambda: server.replicas.engines["a"].running == 1)
        until(lambda: server.replicas.engines["a"].running == 0, "the end of the request")
        assert server.replicas.engines["a"].handles[0].ending == {0: "cancelled"}
        until(lambda: server.replicas.stats.active["a"] == 0 and server.app.state.traffic.active == 0)


def test_draining(gate):
    with serving(gate) as server:
        done = []
        waiting = threading.Thread(target=lambda: done.append(server.http.post(CHAT, json=BODY)))
        waiting.start()
        until(lambda: server.replicas.stats.active["a"] == 1)
        server.server.drain()
        until(lambda: server.app.state.traffic.draining)
        with httpx.Client(base_url=server.url) as http:
            assert http.post(CHAT, json=BODY).json()["error"]["code"] == "shutting_down"
            assert http.get("/health").json() == {"status": "draining", "replicas": 3}
        gate.set()
        waiting.join(WAIT)
        assert done[0].json()["choices"][0]["message"]["content"] == TEXT
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("free", [0, 4])
def test_draining_ends_what_takes_too_long(gate, free):
    with serving(gate, free=free, drain_seconds=0.2) as server:
        done = []
        waiting = threading.Thread(target=lambda: done.append(server.http.post(CHAT, json={**BODY, "stream": True})))
        waiting.start()
        until(lambda: server.replicas.stats.active["a"] == 1)
        until(lambda: server.replicas.engines["a"].made == free)
        server.server.drain()
        waiting.join(WAIT)
        error = events(done[0])[-1]["error"] if free else done[0].json()["error"]
        assert error["code"] == "shutting_down" and (free or done[0].status_code == 503)


def test_keys(gate):
    gate.set()
    with serving(gate, api_keys=("first", "second")) as server:
        needed = ("/v1/models", "/metrics", "/lineate/info", "/lineate/stats", CHAT, "/tokenize", "/explore/api/about")
        for route in needed:
            answer = server.http.get(route)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", route
        assert server.http.post(CHAT, content=b"no JSON").status_code == 401  # before the body is read
        assert server.replicas.went == []
        for route in ("/", "/main.js", "/health"):
            assert server.http.get(route).status_code == 200
        server.http.headers["Authorization"] = "Bearer second"
        for route in needed[:4]:
            assert server.http.get(route).status_code == 200
        assert server.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == TEXT


def test_what_the_front_refuses_itself(gate):
    gate.set()
    with serving(gate, body_bytes=1000, hosts=frozenset({"127.0.0.1"}), cors=("https://app.example",)) as server:
        assert (
            server.http.get("/v1/models", headers={"Host": "evil.example"}).json()["error"]["code"]
            == "host_not_allowed"
        )
        assert server.http.post(CHAT, content=b"{}").json()["error"]["code"] == "unsupported_media_type"
        long = {"messages": [{"role": "user", "content": "a" * 2000}]}
        assert server.http.post(CHAT, json=long).json()["error"]["code"] == "request_too_large"
        assert server.replicas.went == []
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        allowed = server.http.options(CHAT, headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example"


def test_metrics_and_numbers_of_all_replicas(gate):
    gate.set()
    with serving(gate) as server:
        for _ in range(3):
            server.http.post(CHAT, json=BODY)
        text = server.http.get("/metrics").text
        for name in "abc":
            assert f'lineate_requests_total{{replica="{name}",route="/v1/chat/completions",status="200"}} 1.0' in text
            assert f'lineate_engine_slots{{replica="{name}"}} 4.0' in text
            assert f'lineate_first_token_seconds_bucket{{le="+Inf",replica="{name}"}} 1.0' in text
        assert 'lineate_front_requests_total{route="/v1/chat/completions",status="200"} 3.0' in text
        assert text.count("# TYPE lineate_requests_total counter") == 1
        assert sorted(server.http.get("/lineate/stats").json()["replicas"]) == ["a", "b", "c"]


def test_metrics_keep_their_values():
    text = (
        '# HELP a_total A count.\n# TYPE a_total counter\na_total{kind="x"} 3.0\n# HELP b B.\n# TYPE b gauge\nb 1e+09\n'
    )
    lines = gather(b"own 1.0\n", {"one": text.encode(), "other": text.encode()}).decode().splitlines()
    assert lines[0] == "own 1.0" and 'a_total{kind="x",replica="one"} 3.0' in lines
    assert 'b{replica="other"} 1e+09' in lines and lines.count("# TYPE a_total counter") == 1


def test_no_replicas(gate):
    gate.set()
    with serving(gate) as server:
        assert server.http.get("/health").json() == {"status": "ok", "replicas": 3}
        for name in "abc":
            server.replicas.lose(name)
        answer = server.http.get("/health")
        assert answer.status_code == 503 and answer.json() == {"status": "no replica", "replicas": 0}


def test_a_call_is_sent_without_what_the_router_needs():
    call = Call("POST", CHAT, b"a=1", ((b"host", b"x"),), b"{}", array("q", [1, 2]), "ticket")
    sent = pickle.loads(pickle.dumps(call))
    assert sent == call and sent.blocks == array("q") and sent.ticket == ""
    scope = sent.scope()
    assert scope["path"] == CHAT and scope["query_string"] == b"a=1" and scope["headers"] == [[b"host", b"x"]]


def test_the_health_of_a_replica():
    tokenizer = chat_tokenizer()
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=2, pattern="GA"))
    engine = Engine(model, slots=2, context=256, spacing=64)

    def build():
        return make_app(engine, tokenizer, describe(model, tokenizer, "tiny", 256, 2), Settings()), engine

    replica = Replica(build, "a")
    replica.check_health()
    engine.stop()
    with pytest.raises(RuntimeError, match="the engine's thread has ended"):
        replica.check_health()


def test_a_replica_whose_engine_is_stuck(monkeypatch):
    """Steps may take long, but not for ever while requests wait."""
    now = [0.0]
    monkeypatch.setattr("lineate.serving.replicas.replica.time.monotonic", lambda: now[0])
    tokenizer = chat_tokenizer()
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=2, pattern="GA"))

    class Stuck(Engine):
        alive = True

        def start(self):
            """Never make a step."""

    engine = Stuck(model, slots=2, context=256, spacing=64)
    described = describe(model, tokenizer, "tiny", 256, 2)
    replica = Replica(lambda: (make_app(engine, tokenizer, described, Settings()), engine), "a")
    now[0] = 1000.0
    replica.check_health()  # nothing waits for it
    from lineate.generation.choice import Sampling
    from lineate.serving.engine.requests import Request

    engine.submit(Request((1, 2, 3), Sampling(), max_new_tokens=2))
    for now[0] in (1200.0, 1299.0):
        replica.check_health()
    now[0] = 1301.0
    with pytest.raises(RuntimeError, match="has made no step for 301 s with 1 requests"):
        replica.check_health()
    engine.step()
    replica.check_health()
