"""`lineate explore` inside of `lineate serve`: the served model is shown while it generates."""

import threading

import pytest
import torch

pytest.importorskip("llguidance")

from starlette.testclient import TestClient

from lineate.models import HybridLM, preset
from lineate.serving.app import Settings, describe, make_app
from lineate.serving.command import add_explorer
from lineate.serving.engine.engine import Engine
from lineate.text import Bytes

BODY = {"text": "for value in values", "changes": [{"layer": 0, "off": ["decay"]}]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return HybridLM(preset("tiny", "KGAG", Bytes.vocab_size)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def serving(model):
    engine, tokenizer = Engine(model, slots=2, context=256), Bytes()
    app = make_app(engine, tokenizer, describe(model, tokenizer, "mine", 256, 2), Settings())
    add_explorer(app, (), model, tokenizer, "mine")
    engine.start()
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client
    engine.stop(drain=False)


def generate(client):
    body = {"model": "mine", "prompt": "for value", "max_tokens": 16, "temperature": 0}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def test_the_page_shows_the_served_model(serving):
    page = serving.get("/explore/")
    assert page.status_code == 200 and "lineate explore" in page.text and "content-security-policy" in page.headers
    assert serving.get("/explore").url.path == "/explore/"
    assert serving.get("/explore/main.js").status_code == serving.get("/explore/dom.js").status_code == 200
    about = serving.get("/explore/api/about").json()
    assert about["models"][0] == {"name": "served", "label": "mine"} and not about["folders"]
    assert about["models"][1]["name"] == "small"
    found = serving.post("/explore/api/model", json=BODY).json()
    assert found["model"]["name"] == "served" and found["changed"] is not None
    reply = serving.post("/explore/api/model", json={**BODY, "layer": 4})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "layer"
    found = serving.post("/explore/api/lessons/run", json={"lesson": 9}).json()
    assert found["holds"] and found["picture"]
    assert serving.get("/").status_code == 200 and "lineate explore" not in serving.get("/").text


def test_looking_disturbs_nothing(serving, model):
    alone, before = generate(serving), serving.post("/explore/api/model", json=BODY).json()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    seen = []

    def look():
        for n in range(6):
            changes = [{"layer": n % 2, "rule": "delta_rule"}]
            serving.post("/explore/api/model", json={"text": f"number {n}", "changes": changes})
            seen.append(serving.post("/explore/api/model", json=BODY).json())

    looking = threading.Thread(target=look)
    looking.start()
    beside = [generate(serving)]
    while looking.is_alive():
        beside.append(generate(serving))
    assert set(beside) == {alone} and seen == [before] * 6
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())


def test_a_server_with_keys_has_no_page_without_them(model):
    tokenizer = Bytes()
    engine = Engine(model, slots=1, context=64)
    app = make_app(engine, tokenizer, describe(model, tokenizer, "mine", 64, 1), Settings(api_keys=("secret",)))
    add_explorer(app, ("secret",), model, tokenizer, "mine")
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/explore/").status_code == 404
        assert client.post("/explore/api/model", json=BODY).status_code == 404
