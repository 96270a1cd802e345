"""Replicas under a local Ray, as `lineate serve --replicas 3` starts them: prefixes, kills, restarts, draining."""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from functools import partial

import pytest

if importlib.util.find_spec("ray") is None:  # importing it takes long, and these tests are slow ones
    pytest.skip("lineate[ray] is not installed", allow_module_level=True)
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

import openai

from lineate.models import preset
from lineate.serving.command import ServeArguments, make_replica
from lineate.serving.replicas.call import Call
from lineate.serving.replicas.cluster import RayReplicas
from lineate.serving.replicas.options import ReplicaOptions
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.replicated import CHAT, Clients, Replicated, ask, until
from tests.support.small_models import random_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "sea-lion"
    tokenizer = chat_tokenizer()
    random_model(preset("tiny", vocab_size=tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    words = ("--replicas", 3, "--spacing", 64, "--context", 4096, "--replica-cpus", 0.5, "--slots", 4, "--drain", 60)
    with Replicated(folder, *words) as server:
        yield server


def conversation(n: int, turns: int = 1, **options):
    """Return the body of a conversation of its own, whose later turns begin like the earlier ones."""
    messages = [{"role": "user", "content": f"{n} " * 8 + f"Tell me about sea number {n}, at length. " * 12}]
    for turn in range(1, turns):
        messages += [{"role": "assistant", "content": f"Later {turn}."}, {"role": "user", "content": f"And {turn}?"}]
    return {"messages": messages, "max_tokens": 8, "seed": n, "ignore_eos": True, **options}


def test_hits_go_to_the_replica_that_has_the_prefix(server):
    first = [server.chat(conversation(n)) for n in range(9)]
    where = [answer.headers["x-lineate-replica"] for answer in first]
    assert sorted(set(where)) == server.replicas and len(server.replicas) == 3  # new prompts are spread
    read = [answer.json()["usage"]["prompt_tokens"] for answer in first]
    before = server.total("lineate_front_routed_total", by="prefix")
    for turns in (2, 3):
        for n in range(9):
            answer = server.chat(conversation(n, turns))
            assert answer.headers["x-lineate-replica"] == where[n]
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= read[n] // 64 * 64
    assert server.total("lineate_front_routed_total", by="prefix") - before == 18
    cached = {x["replica"]: x["value"] for x in server.samples("lineate_engine_cached_tokens_total")}
    assert sorted(cached) == server.replicas and all(cached.values())


def test_the_api_is_that_of_one_server(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.create(model="sea-lion", messages=conversation(50)["messages"], max_tokens=5, seed=1)
    stream = client.chat.completions.create(
        model="sea-lion", messages=conversation(50)["messages"], max_tokens=5, seed=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(x.choices[0].delta.content or "" for x in chunks if x.choices) == made.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="temperature must be from 0 to 2, got 3"):
        client.chat.completions.create(model="sea-lion", messages=[{"role": "user", "content": "a"}], temperature=3)
    assert [model.id for model in client.models.list()] == ["sea-lion"]
    assert "<html" in server.http.get("/").text and server.http.get("/lineate/info").json()["context"] == 4096
    assert server.http.get("/no/such/route").json()["error"]["code"] == "not_found"
    assert server.http.get("/health", headers={"Host": "evil.example"}).status_code == 403
    assert sorted(server.http.get("/lineate/stats").json()["replicas"]) == server.replicas


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    text = json.dumps(conversation(60, max_tokens=3000, stream=stream)).encode()
    cancelled = server.total("lineate_engine_finished_total", kind="cancelled")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sent:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        sent.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        until(lambda: server.total("lineate_engine_running") == 1, "the request")
    until(lambda: server.total("lineate_engine_running") == 0, "its end", 30)
    assert server.total("lineate_engine_finished_total", kind="cancelled") == cancelled + 1
    until(lambda: server.total("lineate_front_active") == 0)


def expected(server, bodies):
    """Return what each body is answered with; every replica gives the same."""
    return [ask(server.http, body)["text"] for body in bodies]


def pressing(count: int = 12):
    return [conversation(100 + n, max_tokens=24, stream=n % 2 == 0) for n in range(count)]


def test_a_replica_that_is_killed_under_load(server):
    bodies = pressing()
    texts = expected(server, bodies)
    names, lost = set(server.replicas), server.total("lineate_front_lost_total")
    retries = server.total("lineate_front_retries_total")
    clients = Clients(server, bodies)
    clients.wait(2)
    (victim, *_) = server.processes()
    os.kill(victim, signal.SIGKILL)
    clients.wait(4)
    until(lambda: len(server.replicas) == 3 and set(server.replicas) != names, "a new replica")
    clients.wait(1)
    answers = clients.stop()
    (killed,) = names - set(server.replicas)
    for got in answers:
        whole = texts[got["client"]]
        if got["error"] is None:
            assert got["status"] == 200 and got["done"] and got["text"] == whole
        else:  # a stream of which its client had seen a part: it could not be given to another replica
            assert bodies[got["client"]]["stream"] and got["replica"] == killed and got["done"]
            assert got["error"]["code"] == "replica_lost" and got["error"]["type"] == "server_error"
            assert got["text"] and whole.startswith(got["text"])
    assert server.total("lineate_front_retries_total") > retries
    assert server.total("lineate_front_lost_total") - lost == sum(got["error"] is not None for got in answers)


def test_a_rolling_restart_under_load(server):
    bodies = pressing()
    texts = expected(server, bodies)
    names, lost = set(server.replicas), server.total("lineate_front_lost_total")
    clients = Clients(server, bodies)
    clients.wait(1)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: len(server.replicas) == 3 and not names & set(server.replicas), "three new replicas")
    clients.wait(1)
    for got in clients.stop():
        assert got["status"] == 200 and got["error"] is None and got["done"] and got["text"] == texts[got["client"]]
    assert server.total("lineate_front_lost_total") == lost


def test_draining(folder, tmp_path):
    """SIGTERM lets answers end; then the replicas write their states, which other replicas find after a restart."""
    words = (
        folder,
        "--replicas",
        2,
        "--spacing",
        64,
        "--context",
        4096,
        "--cache-folder",
        tmp_path,
        "--api-key",
        "sesame",
    )
    keys = {"Authorization": "Bearer sesame"}
    with Replicated(*words) as server:
        server.http.headers.update(keys)
        assert server.http.get("/v1/models", headers={"Authorization": "none"}).status_code == 401
        assert server.http.get("/metrics", headers={"Authorization": "none"}).status_code == 401
        told = [server.chat(conversation(n)) for n in range(4)]
        assert len({x.headers["x-lineate-replica"] for x in told}) == 2
        with server.http.stream("POST", CHAT, json=conversation(9, max_tokens=300, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.http.get("/health").status_code == 503)
            assert server.chat(conversation(1)).json()["error"]["code"] == "shutting_down"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]  # it was finished
        assert server.process.wait(90) == 0 and "Traceback" not in server.said
    shares = sorted(x.name for x in tmp_path.iterdir())
    assert shares == ["share-0", "share-1"] and all(list((tmp_path / x).rglob("state-*")) for x in shares)
    with Replicated(*words) as server:
        server.http.headers.update(keys)
        for n in range(4):  # wherever a prompt goes now
            again = server.chat(conversation(n))
            assert again.json()["choices"] == told[n].json()["choices"]
            cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= told[n].json()["usage"]["prompt_tokens"] // 64 * 64


def test_more_replicas_while_requests_wait(folder):
    words = (
        "--replicas",
        1,
        "--max-replicas",
        2,
        "--target-queue",
        2,
        "--slots",
        2,
        "--context",
        4096,
        "--spacing",
        64,
    )
    with Replicated(folder, *words) as server:
        assert len(server.replicas) == 1
        clients = Clients(server, [conversation(n, max_tokens=200) for n in range(8)])
        until(lambda: len(server.replicas) == 2, "a second replica")
        clients.wait(2)
        assert all(got["error"] is None and got["status"] == 200 for got in clients.stop())
        assert len({got["replica"] for got in clients.answers}) == 2


def test_fewer_replicas_when_nothing_waits(folder):
    """A replica that is not needed any more is stopped, wherever an answer runs, and the answer is whole."""
    asked = ServeArguments(str(folder), replicas=1, slots=4, context=4096, spacing=64, name="sea-lion")
    options = ReplicaOptions(1, most=2, target=1.0, grow_seconds=1.0, shrink_seconds=2.0, drain_seconds=60.0)
    replicas = RayReplicas(partial(make_replica, asked), options, "grows and shrinks")
    body = {"prompt": "The sea", "max_tokens": 1500, "ignore_eos": True, "seed": 1}

    async def answered(n: int) -> tuple[str, dict]:
        sent = json.dumps({**body, "prompt": f"{n} The sea"}).encode()
        headers = ((b"content-type", b"application/json"),)
        call = Call("POST", "/v1/completions", b"", headers, sent)
        found = [(replica, message) async for replica, messages in replicas.answer(call) for message in messages]
        return found[0][0], json.loads(b"".join(message.get("body", b"") for _, message in found))

    async def keep_asking(n: int, enough: Callable[[], bool], found: list) -> None:
        while not enough():
            found.append(await answered(n))

    async def run() -> list:
        found: list = []
        async with asyncio.timeout(240):
            await asyncio.gather(*(keep_asking(n, lambda: len(replicas.stats.active) == 2, found) for n in range(6)))
            await keep_asking(9, lambda: len(replicas.stats.active) == 1, found)
        return found

    try:
        found = asyncio.run(run())
    finally:
        replicas.close()
    assert all(value["usage"]["completion_tokens"] == 1500 for _, value in found)
    assert len({replica for replica, _ in found}) == 2


def test_a_restart_that_fails_leaves_the_old_replicas(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "sea-lion")
    with Replicated(place, "--replicas", 2, "--context", 4096, "--spacing", 64) as server:
        names, whole = server.replicas, ask(server.http, conversation(1))["text"]
        (place / "model.safetensors").unlink()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the replicas could not be restarted" in server.said, "the end of the restart")
        assert server.replicas == names
        assert all(ask(server.http, conversation(1, stream=n % 2 == 0))["text"] == whole for n in range(4))


def test_a_cluster_that_is_joined(folder):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        with Replicated(folder, "--replicas", 2, "--cluster", cluster.address) as server:
            where = {server.chat(conversation(n)).headers["x-lineate-replica"] for n in range(4)}
            assert sorted(where) == server.replicas and len(where) == 2
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(90) == 0 and "Traceback" not in server.said
        assert cluster.head_node.remaining_processes_alive()  # the cluster is not ours to end
    finally:
        cluster.shutdown()


def test_what_is_wrong_with_the_replicas_is_said_once(folder):
    with pytest.raises(RuntimeError) as said:
        Replicated(folder, "--replicas", 2, "--draft", "head")
    lines = [line for line in str(said.value).splitlines() if line.startswith("lineate: ")]
    assert "model must have a head of multi-token prediction" in lines[-1]
