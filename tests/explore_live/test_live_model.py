"""The endpoints of the view "Model" against the model itself, changed models, and what they refuse."""

import copy
import json
import math

import pytest
import torch

from lineate.call import Inputs
from lineate.explore.live.app import make_app
from lineate.explore.live.changes import Change, beside, softmax_of
from lineate.explore.live.models import Models, open_folder
from lineate.explore.memories import FIXED_SIZE
from lineate.explore.subject import trace
from lineate.layers import kind_of
from lineate.models import HybridLM, preset
from lineate.models.hybrid import next_token_loss
from lineate.rule import activate, rule_named
from lineate.text import Bytes
from lineate.web.errors import ApiError
from tests.support.explore_page import HOSTS, some_models, untrained

TEXT = "for value in values"
IDS = torch.tensor([list(TEXT.encode())])
OPEN = 40.0  # sigmoid of it is 1
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def ask(client, path="/api/model", **body):
    reply = client.post(path, json={"text": TEXT, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def step(client, at, **body):
    return ask(client, "/api/model/step", at=at, **body)


def client_of(*models):
    testing = pytest.importorskip("starlette.testclient")
    return testing.TestClient(make_app(HOSTS, Models(*models)), base_url="http://127.0.0.1")


@pytest.mark.cover
@pytest.mark.parametrize("pattern", ["KGAT", "LRDM", "SSA", "JUQ", "VVA"])
def test_numbers_are_those_of_the_model(pattern):
    given = untrained(pattern)
    own, client = given.subject.model, client_of(given)
    with torch.no_grad():
        out = own(IDS)
    loss = float(next_token_loss(out.logits, IDS, None))
    for layer, letter in enumerate(pattern):
        found = ask(client, layer=layer, head=1)
        assert found["kind"] == {"T": "none", "A": "softmax", "M": "softmax"}.get(letter, "memory")
        assert found["tokens"][:4] == ["f", "o", "r", "\u2423"] and len(found["tokens"]) == len(TEXT)
        assert sum(found["loss"]["own"]) / (len(TEXT) - 1) == pytest.approx(loss, abs=1e-3)
        assert found["changed"] is None and found["loss"]["changed"] is None
        after = step(client, 5, layer=layer, head=1)
        probabilities = out.logits[0, 4].softmax(-1)
        best = [x["own"] for x in after["next"]]
        assert best == sorted(best, reverse=True)
        assert best == pytest.approx(probabilities.topk(8).values.tolist(), abs=1e-3)
        assert sum(x["follows"] for x in after["next"]) <= 1
        last = step(client, len(TEXT), layer=layer, head=1)["own"]
        if found["kind"] == "memory":
            memory = out.state.layers[layer]["memory"][0, 1, :, :64]  # linear attention has one more column
            most = float(memory.abs().max())
            torch.testing.assert_close(torch.tensor(last["cells"]), memory, rtol=0, atol=0.006 * most)  # three digits
            assert found["own"]["norms"]["state"][-1] == pytest.approx(float(memory.norm()), rel=1e-3)
            n = found["own"]["writes"]
            assert n == (2 if letter == "U" else 1)
            assert [len(row) for row in found["own"]["matrix"]] == [n * (i + 1) for i in range(len(TEXT))]
            assert len(found["own"]["norms"]["written"]) == n * len(TEXT)
            assert (found["own"]["erased"] is not None) == (letter in "JUQV")
        elif found["kind"] == "softmax":
            assert last["kind"] == "cache" and last["rows"] == len(TEXT)
            assert all(sum(row) == pytest.approx(1, abs=1e-3) for row in found["own"]["matrix"])
        else:
            assert last is None and found["own"] is None


@pytest.mark.parametrize("letter", "AM")
def test_softmax_weights_are_those_of_the_layer(letter):
    """The weights times the values, gated and projected, are what the layer computes."""
    torch.manual_seed(0)
    mixer = HybridLM(preset("tiny", letter)).layers[0].mixer
    x = torch.randn(1, 11, 128)
    found = softmax_of(mixer, x)
    group = len(found.weights) // len(found.values)
    values = found.values.repeat_interleave(group, 0)[..., : mixer.out_proj.in_features // len(found.weights)]
    with torch.no_grad():
        output = (found.weights @ values).transpose(0, 1).flatten(1)
        if letter == "A":
            output = output * mixer.in_proj(x)[0].split(mixer.splits, -1)[1].sigmoid()
        torch.testing.assert_close(mixer.out_proj(output), mixer(x)[0][0], **CLOSE)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("letter", "LRDGK")
def test_the_own_rule_changes_nothing(letter):
    model = untrained(letter).subject.model
    kind = kind_of(letter)
    changes = {n: Change(kind.name) for n in range(4)}
    torch.testing.assert_close(logits(beside(model, changes)), logits(model), **CLOSE)
    others = {rule: logits(beside(model, {1: Change(rule)})) for rule in (*FIXED_SIZE, "softmax_attention")}
    for rule, changed in others.items():
        assert (changed - logits(model)).abs().max() > 1e-3 or rule == kind.name or (rule, letter) in SAME


SAME = {
    ("gated_linear_attention", "L"), ("gated_delta_rule", "D"), ("kimi_delta_attention", "D"),
    ("kimi_delta_attention", "G"),
}  # fmt: skip
"""Rules that equal the layer's own because a gate that it lacks stays open, or is the same in all channels."""


def patched(model, letter, gate):
    """Return the model with the gate of layer 1 opened where the layer makes it."""
    model = copy.deepcopy(model)
    mixer = model.layers[1].mixer
    inputs = mixer.rule_inputs

    def opened(q, k, v, gates):
        found = inputs(q, k, v, gates)
        beta = torch.full_like(found.beta, OPEN) if gate == "write" else found.beta
        if gate == "decay":
            return found.replace(log_decay=torch.full_like(found.log_decay, -1e4))
        return found.replace(beta=beta)

    if gate == "output":
        mixer.output_gate = lambda gates: torch.full_like(type(mixer).output_gate(mixer, gates), OPEN)
        mixer.norm.activation = "sigmoid"
    else:
        mixer.rule_inputs = opened
    return model


@pytest.mark.parametrize("gate", ["decay", "write", "output"])
@pytest.mark.parametrize("letter", "GK")
def test_an_open_gate_is_the_model_with_that_gate_open(letter, gate):
    model = untrained(letter).subject.model
    wanted = logits(patched(model, letter, gate))
    torch.testing.assert_close(logits(beside(model, {1: Change(off=frozenset({gate}))})), wanted, **CLOSE)
    assert (wanted - logits(model)).abs().max() > 1e-3


def test_another_rule_reads_the_same_tokens():
    """Kimi Delta Attention replaced by Gated DeltaNet has the mean of the channels' log decays."""
    model = untrained("K").subject.model
    wanted = copy.deepcopy(model)
    mixer = wanted.layers[1].mixer
    inputs = mixer.rule_inputs

    def averaged(q, k, v, gates):
        found = inputs(q, k, v, gates)
        log_decay, beta = activate(found.log_decay, found.beta, found.A_log, found.dt_bias, mixer.beta_scale)
        return Inputs(q, k, v, log_decay=log_decay.mean(-1), beta=beta)

    mixer.rule_inputs, mixer.rule = averaged, rule_named("gated_delta_rule")
    torch.testing.assert_close(logits(beside(model, {1: Change("gated_delta_rule")})), logits(wanted), **CLOSE)


def test_changes_are_answered_beside_the_model(client):
    change = [{"layer": 0, "rule": "linear_attention", "off": ["output"]}]
    plain, found = ask(client, layer=0), ask(client, layer=0, changes=change)
    assert found["own"] == plain["own"] and found["loss"]["own"] == plain["loss"]["own"]
    assert found["changed"]["rule"] == "linear attention" and found["changed"]["decay"] is None
    assert found["changed"]["matrix"] != found["own"]["matrix"] and found["loss"]["changed"] != found["loss"]["own"]
    assert rule_named("linear_attention").decays == ("none",) and found["changed"]["beta"] is None
    later = ask(client, layer=1, changes=change)
    assert later["changed"]["rule"] == "Gated DeltaNet" and later["changed"]["matrix"] != later["own"]["matrix"]
    after = step(client, 4, layer=0, changes=change)
    assert {x["changed"] for x in after["next"]} != {None} and after["changed"]["cells"] != after["own"]["cells"]
    cache = step(client, 4, layer=0, changes=[{"layer": 0, "rule": "softmax_attention"}])
    assert cache["own"]["kind"] == "state" and cache["changed"]["kind"] == "cache" and cache["changed"]["rows"] == 4
    forgets = ask(client, layer=0, changes=[{"layer": 0, "off": ["decay", "write"]}])["changed"]
    assert {x for row in forgets["decay"]["rows"] for x in row} == set(forgets["beta"]) == {1.0}
    assert forgets["decay"]["half_life"] == [1e9] * 3 and set(forgets["norms"]["forgotten"]) == {0.0}
    nothing = ask(client, layer=0, changes=[{"layer": 0, "rule": "kimi_delta_attention"}])
    assert nothing["changed"] is None


@pytest.mark.parametrize("pattern", ["KGAT", "LRDM", "SSA"])
def test_half_lives_of_all_heads(pattern):
    """A half-life is ln 2 / -log_decay, in the median over the tokens, then over the channels of a head."""
    given = untrained(pattern)
    layers = ask(client_of(given))["model"]["layers"]
    decays = {found.layer: found.log_decay for found in trace(given.subject.model, IDS) if found.log_decay is not None}
    assert decays.keys() == {"KGAT": {0, 1}, "LRDM": {1}, "SSA": {0, 1, 3}}[pattern]
    assert decays.keys() == {n for n, layer in enumerate(layers) if layer["half_lives"]}
    for n, decay in decays.items():  # t hv, or t hv k
        assert len(layers[n]["half_lives"]) == layers[n]["heads"] == decay.shape[1]
        for head, found in enumerate(layers[n]["half_lives"]):
            channels = decay[:, head].double().view(len(decay), -1).T
            lives = sorted(math.log(2) / -float(each.median()) for each in channels)
            assert found == pytest.approx(lives[(len(lives) - 1) // 2], rel=5e-3)


def test_gates_of_the_general_row():
    """J erases and writes with rate 1 where the write gate is open; Q's gates depend on each other; V cannot change."""
    given = untrained("JUQV")
    client, model = client_of(given), given.subject.model
    layers = ask(client)["model"]["layers"]
    assert [layer["gates"] for layer in layers] == [["decay", "write", "output"]] * 2 + [["output"], []]
    assert [layer["rule"] for layer in layers] == ["gated_delta_rule_2", "gated_delta_product", "comba", "rwkv7"]
    assert [layer["changeable"] for layer in layers] == [True, True, True, False]
    found = ask(client, layer=0, changes=[{"layer": 0, "off": ["write"]}])["changed"]
    assert found["rule"] == "Gated DeltaNet-2" and set(found["write"]) == {1.0}
    torch.testing.assert_close(torch.tensor(found["erased"]), torch.ones(len(TEXT)), **CLOSE)
    cache = step(client, 4, layer=1, changes=[{"layer": 1, "rule": "softmax_attention"}])["changed"]
    assert cache["rows"] == 8  # two pairs a token
    for n in range(3):  # the same rule through the changed layer is the layer
        torch.testing.assert_close(logits(beside(model, {n: Change(off=frozenset())})), logits(model), **CLOSE)
    same = {1: Change("gated_delta_rule")}
    torch.testing.assert_close(logits(beside(model, same)), logits(model), **CLOSE)


def test_mamba_is_shown_and_cannot_be_changed():
    """The term D x, which it adds behind the rule, is not the rule's, so another rule cannot replace it."""
    layers = ask(client_of(untrained("SG")))["model"]["layers"]
    assert [(layer["changeable"], bool(layer["gates"])) for layer in layers[:2]] == [(False, False), (True, True)]


def test_a_model_is_left_as_it_was():
    given = untrained("KGAT")
    model = given.subject.model
    before = {name: x.clone() for name, x in model.state_dict().items()}
    parts = [{name: dict(x) if isinstance(x, dict) else x for name, x in vars(m).items()} for m in model.modules()]
    client = client_of(given)
    ask(client, changes=[{"layer": 0, "off": ["decay"]}])
    ask(client, layer=2)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    after = [{name: dict(x) if isinstance(x, dict) else x for name, x in vars(m).items()} for m in model.modules()]
    assert [set(x) for x in after] == [set(x) for x in parts]
    assert all(len(x[name]) == len(y[name]) for x, y in zip(after, parts, strict=True) for name in x if "hooks" in name)
    beside_it = beside(model)
    assert beside_it.layers[0].mixer is not model.layers[0].mixer
    assert beside_it.layers[0].mixer.in_proj.weight is model.layers[0].mixer.in_proj.weight


REFUSED = {
    "no text": ({}, "text"),
    "an empty text": ({"text": ""}, "text"),
    "a long text": ({"text": "x" * 129}, "text"),
    "a text of numbers": ({"text": 5}, "text"),
    "an unknown layer": ({"text": "a", "layer": 4}, "layer"),
    "a layer before the first": ({"text": "a", "layer": -1}, "layer"),
    "an unknown head": ({"text": "a", "head": 2}, "head"),
    "half a head": ({"text": "a", "head": 0.5}, "head"),
    "a step behind the text": ({"text": "ab", "at": 3}, "at"),
    "step 0": ({"text": "ab", "at": 0}, "at"),
    "an unknown model": ({"text": "a", "model": "/no/such/folder"}, "model"),
    "a change without its layer": ({"text": "a", "changes": [{}]}, "changes[0].layer"),
    "a change of softmax attention": ({"text": "a", "changes": [{"layer": 2}]}, "changes[0].layer"),
    "a change of a memory that learns": ({"text": "a", "changes": [{"layer": 3}]}, "changes[0].layer"),
    "an unknown rule": ({"text": "a", "changes": [{"layer": 0, "rule": "magic"}]}, "changes[0].rule"),
    "an unknown gate": ({"text": "a", "changes": [{"layer": 0, "off": ["door"]}]}, "changes[0].off[0]"),
    "a gate that is no word": ({"text": "a", "changes": [{"layer": 0, "off": [[1]]}]}, "changes[0].off[0]"),
    "an unknown field": ({"text": "a", "colour": "red"}, "colour"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_named(client, case):
    body, field = REFUSED[case]
    path = "/api/model/step" if "at" in body else "/api/model"
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and field in error["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer, whose weights are random."""
    made = tmp_path_factory.mktemp("models") / "mine"
    untrained("GA").subject.model.save_pretrained(made)
    return made


def broken(folder, tmp_path, how):
    made = tmp_path / "broken"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    if how == "not JSON":
        (made / "config.json").write_text("{")
    elif how == "no weights":
        (made / "model.safetensors").unlink()
    elif how == "half of the weights":
        whole = (made / "model.safetensors").read_bytes()
        (made / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif how == "other sizes":
        config = json.loads((made / "config.json").read_text())
        config["hidden_size"] = 192
        (made / "config.json").write_text(json.dumps(config))
    else:
        for file in made.iterdir():
            file.unlink()
    return made


@pytest.mark.parametrize("how", ["empty", "not JSON", "no weights", "half of the weights", "other sizes"])
def test_a_broken_folder_is_said(client, folder, tmp_path, how):
    reply = client.post("/api/model", json={"text": "a", "model": str(broken(folder, tmp_path, how))})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "model" and "which cannot be loaded: " in error["message"]


def test_a_folder_is_opened(client, folder):
    """One without a tokenizer reads numbers."""
    found = ask(client, text="5 17 255", model=str(folder))
    assert found["tokens"] == ["5", "17", "255"] and found["model"]["label"] == "mine" and found["model"]["trained"]
    assert dict(found["model"]["facts"])["layers"] == "4: GAGA"
    for wrong in ("a b", "5 256", "-1", "5.0"):
        reply = client.post("/api/model", json={"text": wrong, "model": str(folder)})
        assert reply.status_code == 400 and "numbers from 0 to 255" in reply.json()["error"]["message"]
    Bytes().save(folder)
    client = client_of(None, True)
    assert ask(client, model=str(folder))["tokens"][:3] == ["f", "o", "r"]


def test_folders_are_named_by_programs_of_this_machine_alone(folder):
    reply = client_of(untrained("GA")).post("/api/model", json={"text": "a", "model": str(folder)})
    assert reply.status_code == 400 and "model must be one of given, small, got" in reply.json()["error"]["message"]


def test_a_large_folder_is_left_to_the_command_line(folder):
    with pytest.raises(ApiError, match="start lineate explore FOLDER"):
        open_folder(str(folder), 1000)


def test_built_in_models_are_offered_before_they_are_made(client):
    about = client.get("/api/about").json()
    assert [model["name"] for model in about["models"]] == ["given", "small"] and about["folders"]
    models = some_models()
    assert models.find("chat") is models.find("small")  # its name in links of earlier versions
    assert some_models(folders=False).folders is False
