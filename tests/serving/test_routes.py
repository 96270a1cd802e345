"""The table of routes: the server, a replica and the front offer its rows, and the documentation lists them."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import httpx

from lineate.serving.api.service import Description
from lineate.serving.app import Settings, make_app
from lineate.serving.replicas.call import Call
from lineate.serving.replicas.front import make_front
from lineate.serving.replicas.replica import Replica
from lineate.serving.replicas.routing import Routing
from lineate.serving.routes import ENDPOINTS, OTHER_PATHS, Endpoint
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import ScriptedEngine

ROOT = Path(__file__).parents[2]
DESCRIPTION = Description("scripted", context=100_000, slots=4, created=0, fingerprint="x")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "Once"},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5]},
}
PLACES = {"{name:path}": "scripted", "{name}": "main.js"}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH")
KEY = {"Authorization": "Bearer first"}


class Scripted(ScriptedEngine):
    """A scripted engine that can be started."""

    alive = True

    def start(self) -> None:
        """Do nothing: each request has a thread of its own."""


@dataclass
class LocalReplicas:
    """Replicas in this process; `went` has the paths that they were asked for."""

    replicas: dict[str, Replica]

    def __post_init__(self) -> None:
        self.routing, self.went = Routing(), []
        self.routing.update(self.replicas)

    @property
    def stats(self):
        return self.routing.stats

    async def answer(self, call):
        self.routing.open(call.path)
        name, *_ = self.routing.choose(call.path, call.blocks)
        self.went.append(call.path)
        try:
            async for found in self.replicas[name].answer(call):
                yield found
        finally:
            self.routing.end(call.path)

    async def ask_all(self, call):
        answers = [await replica.whole(call) for replica in self.replicas.values()]
        return {name: body for name, status, body in answers if status == 200}


@dataclass
class Both:
    """The server of one process, the front of two replicas, and one of these."""

    server: Any
    front: Any
    replicas: LocalReplicas
    runner: asyncio.Runner

    def send(self, method: str, path: str, key: bool = True, **options: Any) -> list[httpx.Response]:
        """Return the answers of the server and of the front."""

        async def sent() -> list[httpx.Response]:
            found = []
            for app in (self.server, self.front):
                transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                    found.append(await http.request(method, path, headers=KEY if key else None, **options))
            return found

        return self.runner.run(sent())


@contextmanager
def serving(endpoints: Sequence[Endpoint] = ENDPOINTS, **settings: Any) -> Iterator[Both]:
    tokenizer = chat_tokenizer()

    def build(**options: Any):
        engine = Scripted(tokenizer.encode, lambda *_: "Hello.")
        return make_app(engine, tokenizer, DESCRIPTION, Settings(**options), endpoints), engine

    replicas = LocalReplicas({name: Replica(build, name) for name in "ab"})
    with asyncio.Runner() as runner:
        yield Both(build(**settings)[0], make_front(replicas, Settings(**settings), endpoints), replicas, runner)


def concrete(path: str) -> str:
    """Return a path of a row with names of things that are there."""
    for place, value in PLACES.items():
        path = path.replace(place, value)
    return path


def test_the_server_and_the_front_offer_exactly_the_rows():
    with serving() as both:
        rows = [(row.path, set(row.methods)) for row in ENDPOINTS]
        assert [(route.path, route.methods) for route in both.server.routes] == rows
        # The front passes on requests with any method, so that a replica says which are allowed.
        own = [(row.path, set(row.methods) if row.front else None) for row in ENDPOINTS]
        assert [(x.path, x.methods) for x in both.front.routes] == own + [(row.path, None) for row in OTHER_PATHS]
    assert len({row.path for row in ENDPOINTS}) == len(ENDPOINTS)


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: row.path)
def test_a_row_is_answered_alike(row):
    """The server, a replica, and the front with replicas behind it take the methods of a row, and no others."""
    path = concrete(row.path)
    with serving() as both:
        for method in METHODS:
            server, front = both.send(method, path, **({"json": BODIES[path]} if row.has_body(method) else {}))
            assert (server.status_code == 200) is (method in row.methods), (method, server.text)
            assert front.status_code == server.status_code
            assert front.headers["content-type"] == server.headers["content-type"] or method not in row.methods
        passed = [method for method in METHODS if row.front is None or method not in row.methods]
        assert both.replicas.went == [path] * len(passed)  # a replica says which methods it takes
        if "GET" in row.methods:
            name, status, text = both.runner.run(both.replicas.replicas["a"].whole(Call("GET", path)))
            assert (name, status) == ("a", 200) and text


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: row.path)
def test_a_row_needs_a_key_unless_it_says_otherwise(row):
    with serving(api_keys=("first",)) as both:
        method, path = row.methods[0], concrete(row.path)
        for answer in both.send(method, path, key=False, content=b"no JSON"):
            assert answer.status_code == (401 if row.key else 200)
        assert row.key is False or both.replicas.went == []
        body = {"json": BODIES[path]} if row.body else {}
        assert [answer.status_code for answer in both.send(method, path, **body)] == [200, 200]


def test_other_paths_are_answered_by_a_replica():
    with serving() as both:
        for method, path in (("GET", "/no/such/path"), ("GET", "/explore/x"), ("POST", "/explore/api/model")):
            server, front = both.send(method, path, **({"json": {}} if method == "POST" else {}))
            assert server.status_code == front.status_code == 404 and server.json() == front.json()
        assert both.replicas.went == ["/no/such/path", "/explore/x", "/explore/api/model"]
    with serving(api_keys=("first",)) as both:
        for path in ("/no/such/path", "/explore/api/about"):
            _, front = both.send("GET", path, key=False)
            assert front.status_code == 401


def test_the_documentation_lists_the_rows():
    text = (ROOT / "docs/serving.md").read_text().split("## What is served")[1]
    listed = re.findall(r"^\| `([A-Z]+) (/\S*)` \| (.*) \|$", text, re.MULTILINE)
    assert listed == [(row.methods[0], row.path.replace(":path", ""), row.about) for row in ENDPOINTS]


def test_the_recipe_of_an_endpoint():
    """The row of CONTRIBUTING.md is served by the server, the replicas and the front, with keys, bodies and CORS."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## An endpoint")[1]
    program = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program[1], "CONTRIBUTING.md", "exec"), names)
    row = names["endpoint"]
    expected = len(chat_tokenizer().encode("Once upon a time"))
    with serving((row, *ENDPOINTS), api_keys=("first",), cors=("https://app.example",)) as both:
        for answer in both.send("POST", row.path, json={"text": "Once upon a time"}):
            assert answer.json() == {"count": expected}
        assert both.replicas.went == [row.path]
        for options, status in (
            ({"json": {}}, 400),
            ({"json": {"text": "a", "more": 1}}, 400),
            ({"content": b"text"}, 415),
        ):
            assert [answer.status_code for answer in both.send("POST", row.path, **options)] == [status] * 2
        assert [answer.status_code for answer in both.send("POST", row.path, key=False)] == [401] * 2


def test_methods_of_new_rows_are_allowed_to_other_origins():
    async def remove(service, request, body):
        raise AssertionError

    row = Endpoint(path="/lineate/state", methods=("DELETE",), answer=remove, about="nothing")
    origin = {"Origin": "https://app.example", "Access-Control-Request-Method": "DELETE"}
    for endpoints, status in ((ENDPOINTS, 400), ((row, *ENDPOINTS), 200)):
        with serving(endpoints, cors=("https://app.example",)) as both:
            for app in (both.server, both.front):

                async def asked(app: Any = app) -> int:
                    async with httpx.AsyncClient(
                        transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1"
                    ) as http:
                        return (await http.options("/lineate/state", headers=origin)).status_code

                assert both.runner.run(asked()) == status
