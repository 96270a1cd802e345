"""The endpoint of the view "Memory" against the equation in float64, and what it refuses."""

import random

import pytest
import torch
from torch import Tensor

import lineate
from lineate.explore.memories import DEMO_RULES
from lineate.rule import ONE_KEY_RULES

LETTERS = "stuvwxyz"
CLOSE = 2e-6  # the numbers are rounded to six decimals


def ask(client, **body):
    reply = client.post("/api/memory", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def write(key, value, **gates):
    return {"op": "write", "key": key, "value": value, **gates}


def random_steps(seed: int, count: int, keys: int, values: int) -> list[dict]:
    """Return steps with gates of every kind: shut, open and between; per channel too."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        key = "ABCDEFGH"[draw.randrange(keys)]
        step = {"op": "forget", "key": key} if draw.random() < 0.2 else None
        if step is None:
            letter = LETTERS[-values:][draw.randrange(values)]
            value = letter if draw.random() < 0.5 else [round(draw.uniform(-2, 2), 3) for _ in range(values)]
            step = write(key, value, beta=draw.choice([0, 0.5, 1, 1.9, 2]))
        if draw.random() < 0.7:
            step["decay"] = draw.choice([0, 0.3, 0.9, 1])
        if draw.random() < 0.4:
            step["channels"] = [draw.choice([0, 0.5, 0.95, 1]) for _ in range(keys)]
        found.append(step)
    return found


def reference(name: str, steps: list[dict], vectors: Tensor, values: int) -> list[Tensor]:
    """Return S after each number of steps, from the equation written out with matrices."""
    rule = next(rule for rule in ONE_KEY_RULES if rule.name == name)
    count = len(vectors)
    S = torch.zeros(count, values, dtype=torch.float64)
    found = [S]
    for step in steps:
        at, writes = "ABCDEFGH".index(step["key"]), step["op"] == "write"
        decay = step.get("decay", 1.0 if writes else 0.0)
        own = [decay if writes or i == at else 1.0 for i in range(count)]
        channels = step.get("channels", own)
        kept = {"none": [1.0] * count, "head": [decay] * count, "channel": channels}[rule.decays[0]]
        S = torch.diag(torch.tensor(kept, dtype=torch.float64)) @ S
        if writes:
            k, v = vectors[at], vector(step["value"], values)
            beta = step.get("beta", 1.0) if rule.corrects else 1.0
            S = S + beta * torch.outer(k, v - S.T @ k if rule.corrects else v)
        found.append(S)
    return found


def symmetric_root(cosines: Tensor) -> Tensor:
    """Return keys, one a row, with these cosines: the symmetric K of which K K^T is that matrix."""
    squares, basis = torch.linalg.eigh(cosines)
    return basis @ torch.diag(squares.sqrt()) @ basis.T


def vector(value, values: int) -> Tensor:
    if isinstance(value, str):
        return torch.eye(values, dtype=torch.float64)[LETTERS[-values:].index(value)]
    return torch.tensor(value, dtype=torch.float64)


def close(got, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted, rtol=0, atol=CLOSE)


CASES = [(0, 1, 2, 2, 0.0), (1, 12, 4, 4, 0.3), (2, 30, 3, 5, 0.95), (3, 64, 8, 8, 0.1)]


@pytest.mark.parametrize("seed, count, keys, values, cosine", CASES)
def test_states_answers_and_norms_follow_the_equation(client, seed, count, keys, values, cosine):
    steps = random_steps(seed, count, keys, values)
    found = ask(client, steps=steps, keys=keys, values=values, cosine=cosine)
    assert list(found["rules"]) == list(DEMO_RULES)
    exact = torch.full((keys, keys), cosine, dtype=torch.float64).fill_diagonal_(1.0)
    vectors = symmetric_root(exact)
    close(found["keys"]["vectors"], vectors)
    for rule in ONE_KEY_RULES:
        own, wanted = found["rules"][rule.name], torch.stack(reference(rule.name, steps, vectors, values))
        close(own["states"], wanted)
        close(own["norms"], wanted.flatten(1).norm(dim=1))
        close(own["answers"], vectors @ wanted)


@pytest.mark.parametrize("rule", [rule.name for rule in ONE_KEY_RULES])
def test_the_state_is_that_of_the_op(client, rule):
    """The public op in its recurrent form, on the same tokens, ends with the same state and reads the same."""
    steps = [step for step in random_steps(5, 40, 4, 4) if step["op"] == "write"]
    found = ask(client, steps=steps, cosine=0.4, rules=[rule], ask="C")
    assert list(found["rules"]) == [rule]
    vectors = symmetric_root(torch.full((4, 4), 0.4, dtype=torch.float64).fill_diagonal_(1.0))
    k = torch.stack([vectors["ABCD".index(step["key"])] for step in steps])[None, :, None]
    v = torch.stack([vector(step["value"], 4) for step in steps])[None, :, None]
    q = vectors[2].expand_as(k)
    head = torch.tensor([step.get("decay", 1.0) for step in steps], dtype=torch.float64).log()[None, :, None]
    channel = torch.tensor([step.get("channels", [step.get("decay", 1.0)] * 4) for step in steps], dtype=torch.float64)
    row = next(x for x in ONE_KEY_RULES if x.name == rule)
    gates = {"none": [], "head": [head], "channel": [channel.log()[None, :, None]]}[row.decays[0]]
    if row.corrects:
        gates.append(torch.tensor([step["beta"] for step in steps], dtype=torch.float64)[None, :, None])
    output, state = getattr(lineate, rule)(q, k, v, *gates, scale=1.0, form="recurrent")
    own = found["rules"][rule]
    close(own["states"][-1], state[0, 0])
    close([answer[2] for answer in own["answers"][1:]], output[0, :, 0])


GENERAL = ("gated_delta_rule_2", "gated_delta_product", "comba", "rwkv7")


def general_reference(name: str, steps: list[dict], vectors: Tensor, values: int) -> list[Tensor]:
    """Return S after each step under a rule that erases and writes separately, from its equation."""
    count, half = len(vectors), False
    S = torch.zeros(count, values, dtype=torch.float64)
    found = [S]
    for step in steps:
        at, writes = "ABCDEFGH".index(step["key"]), step["op"] == "write"
        decay = step.get("decay", 1.0 if writes else 0.0)
        channels = torch.tensor(step.get("channels", [decay if writes or i == at else 1.0 for i in range(count)]))
        half = writes and not half  # whether this is the first write of two
        beta = step.get("beta", 1.0) if writes else 0.0
        erase, write = (step.get(rate, beta) for rate in ("erase", "write"))
        k = vectors[at] if writes else torch.zeros(count, dtype=torch.float64)
        v = vector(step["value"], values) if writes else torch.zeros(values, dtype=torch.float64)
        if name == "gated_delta_rule_2":
            S = channels[:, None] * S
            S = S - erase * torch.outer(k, S.T @ k) + write * torch.outer(k, v)
        elif name == "gated_delta_product":
            S = (decay if half or not writes else 1.0) * S
            S = S + beta * torch.outer(k, v - S.T @ k)
        elif name == "comba":
            S = decay * S + min(beta, 1) * torch.outer(k, v - S.T @ k)
        else:
            least = torch.tensor(-0.5, dtype=torch.float64).exp().neg().exp()
            S = channels.clamp(min=least)[:, None] * S - min(erase, 1) * torch.outer(k, S.T @ k) + torch.outer(k, v)
        found.append(S)
    return found


@pytest.mark.parametrize("seed, count, keys, values, cosine", CASES)
def test_rules_of_the_general_row_follow_their_equations(client, seed, count, keys, values, cosine):
    draw, steps = random.Random(seed), random_steps(seed, count, keys, values)
    for step in steps:
        if step["op"] == "write" and draw.random() < 0.7:
            step |= {"erase": draw.choice([0, 0.5, 1, 1.9]), "write": draw.choice([0, 0.5, 1, 2])}
    found = ask(client, steps=steps, keys=keys, values=values, cosine=cosine, rules=list(GENERAL), ask="B")
    assert set(found["rules"]) == set(GENERAL)
    vectors = symmetric_root(torch.full((keys, keys), cosine, dtype=torch.float64).fill_diagonal_(1.0))
    written = torch.tensor(found["values"]["written"], dtype=torch.float64)
    for name in GENERAL:
        own, wanted = found["rules"][name], torch.stack(general_reference(name, steps, vectors, values))
        most = 1 + float(wanted.abs().max())
        assert (torch.tensor(own["states"]).double() - wanted).abs().max() < 1e-5 * most
        assert (torch.tensor(own["answers"]).double() - vectors @ wanted).abs().max() < 1e-5 * most
        for i, row in enumerate(own["rows"]):
            answer = torch.tensor(row, dtype=torch.float64) @ written[:i]
            assert (answer - vectors[1] @ wanted[i]).abs().max() < 1e-4 * most


def test_two_writes_of_gated_delta_product_are_those_of_the_op(client):
    given = zip("ABAC", "wxyz", (1, 0.2, 0.7, 0.1), strict=True)
    steps = [write(key, value, decay=decay, beta=1.5) for key, value, decay in given]
    (own,) = ask(client, steps=steps, cosine=0.4, rules=["gated_delta_product"])["rules"].values()
    vectors = symmetric_root(torch.full((4, 4), 0.4, dtype=torch.float64).fill_diagonal_(1.0))
    k = vectors[[0, 1, 0, 2]].view(1, 2, 2, 1, 4)
    v = torch.eye(4, dtype=torch.float64).view(1, 2, 2, 1, 4)
    log_decay = torch.tensor([1.0, 0.7], dtype=torch.float64).log().view(1, 2, 1)  # of the first write of each token
    beta = torch.full((1, 2, 2, 1), 1.5, dtype=torch.float64)
    _, state = lineate.gated_delta_product(k[:, :, 0], k, v, log_decay, beta)
    close(own["states"][-1], state[0, 0])


@pytest.mark.parametrize("rule", DEMO_RULES)
def test_attention_rows_times_values_are_the_answers(client, rule):
    steps = random_steps(7, 25, 4, 4)
    found = ask(client, steps=steps, cosine=0.2, ask="B", rules=[rule])
    own, written = found["rules"][rule], torch.tensor(found["values"]["written"], dtype=torch.float64)
    for i, row in enumerate(own["rows"]):
        assert len(row) == i
        read = torch.tensor(row, dtype=torch.float64) @ written[:i]
        torch.testing.assert_close(
            read, torch.tensor(own["answers"][i][1], dtype=torch.float64), rtol=0, atol=1e-5 * (i + 1)
        )


def test_softmax_attention_keeps_every_pair_and_ignores_gates(client):
    steps = [{"op": "forget", "key": "A"}, write("A", "w", decay=0), {"op": "forget", "key": "A"}, write("B", "x")]
    found = ask(client, steps=steps, sharpness=3, ask="A", cosine=0.5)["rules"]["softmax_attention"]
    assert found["states"] is None and found["norms"] is None
    weights = torch.tensor([3.0, 1.5], dtype=torch.float64).softmax(0)
    close(found["rows"][4], torch.tensor([0, weights[0], 0, weights[1]], dtype=torch.float64))
    close(found["answers"][4][0], torch.tensor([*weights, 0, 0], dtype=torch.float64))
    assert found["answers"][1] == [[0.0] * 4] * 4 and found["answers"][3][0] == [1.0, 0.0, 0.0, 0.0]


def test_errors_compare_with_what_was_written_last(client):
    steps = [write("A", "w"), write("A", "y"), {"op": "forget", "key": "A"}, write("B", [0.5, 0, 0, 0])]
    found = ask(client, steps=steps)
    assert [each[0] for each in found["targets"]] == [None, [1, 0, 0, 0], [0, 0, 1, 0], [0] * 4, [0] * 4]
    assert found["targets"][4][1] == [0.5, 0, 0, 0] and found["targets"][4][2] is None
    errors = {rule: [each[0] for each in own["errors"]] for rule, own in found["rules"].items()}
    assert errors["delta_rule"] == [None, 0, 0, 1, 1]  # it overwrites, and cannot forget
    assert errors["linear_attention"][:3] == [None, 0, 1]  # it still has the first value too
    assert errors["gated_delta_rule"] == errors["kimi_delta_attention"] == [None, 0, 0, 0, 0]
    assert found["rules"]["linear_attention"]["mean_errors"][0] is None
    assert found["rules"]["delta_rule"]["mean_errors"][4] == 0.5


def test_forgetting_one_key_costs_a_gate_for_all_the_others(client):
    steps = [write("A", "w"), write("B", "x"), {"op": "forget", "key": "A"}]
    found = ask(client, steps=steps, ask="B")["rules"]
    assert found["gated_delta_rule"]["errors"][3][:2] == [0, 1]
    assert found["kimi_delta_attention"]["errors"][3][:2] == [0, 0]


def test_an_empty_list(client):
    found = ask(client, keys=3, values=2, steps=[])
    for own in found["rules"].values():
        assert own["answers"] == [[[0.0] * 2] * 3] and own["rows"] == [[]] and own["mean_errors"] == [None]
    assert ask(client, rules=[])["rules"] == {}


REFUSED = {
    "not a list": ({"steps": 3}, "steps"),
    "not an object": ({"steps": [3]}, "steps[0]"),
    "too many steps": ({"steps": [write("A", "w")] * 65}, "steps"),
    "no op": ({"steps": [{"key": "A"}]}, "steps[0].op"),
    "another op": ({"steps": [{"op": "read", "key": "A"}]}, "steps[0].op"),
    "no key": ({"steps": [{"op": "forget"}]}, "steps[0].key"),
    "a key that is not there": ({"steps": [write("E", "w")]}, "steps[0].key"),
    "an empty key": ({"steps": [write("", "w")]}, "steps[0].key"),
    "two keys": ({"steps": [write("AB", "w")]}, "steps[0].key"),
    "no value": ({"steps": [{"op": "write", "key": "A"}]}, "steps[0].value"),
    "a value that is not there": ({"steps": [write("A", "w"), write("A", "a")]}, "steps[1].value"),
    "two values": ({"steps": [write("A", "wx")]}, "steps[0].value"),
    "a value of another type": ({"steps": [write("A", 1)]}, "steps[0].value"),
    "a short value": ({"steps": [write("A", [1, 0, 0])]}, "steps[0].value"),
    "a long value": ({"steps": [write("A", [1] * 9)]}, "steps[0].value"),
    "a value with a word": ({"steps": [write("A", [1, 0, "x", 0])]}, "steps[0].value[2]"),
    "a value with true": ({"steps": [write("A", [1, 0, True, 0])]}, "steps[0].value[2]"),
    "a large value": ({"steps": [write("A", [1, 0, 0, 11])]}, "steps[0].value[3]"),
    "a decay above 1": ({"steps": [write("A", "w", decay=1.1)]}, "steps[0].decay"),
    "a negative decay": ({"steps": [write("A", "w", decay=-0.1)]}, "steps[0].decay"),
    "an erase above 2": ({"steps": [write("A", "w", erase=2.1)]}, "steps[0].erase"),
    "a negative write": ({"steps": [write("A", "w", write=-0.1)]}, "steps[0].write"),
    "a forgotten key with erase": ({"steps": [{"op": "forget", "key": "A", "erase": 1}]}, "steps[0].erase"),
    "a beta above 2": ({"steps": [write("A", "w", beta=2.1)]}, "steps[0].beta"),
    "a forgotten key with beta": ({"steps": [{"op": "forget", "key": "A", "beta": 1}]}, "steps[0].beta"),
    "few channels": ({"steps": [write("A", "w", channels=[1, 1])]}, "steps[0].channels"),
    "a wrong channel": ({"steps": [write("A", "w", channels=[1, 1, 2, 1])]}, "steps[0].channels[2]"),
    "an unknown field of a step": ({"steps": [write("A", "w", gate=1)]}, "steps[0].gate"),
    "an unknown field": ({"step": []}, "step"),
    "one key": ({"keys": 1}, "keys"),
    "no key at all": ({"keys": 0}, "keys"),
    "nine keys": ({"keys": 9}, "keys"),
    "half a key": ({"keys": 2.5}, "keys"),
    "nine values": ({"values": 9}, "values"),
    "equal keys": ({"cosine": 1}, "cosine"),
    "a negative cosine": ({"cosine": -0.1}, "cosine"),
    "a sharpness without end": ({"sharpness": 1e9}, "sharpness"),
    "an unknown rule": ({"rules": ["delta_rule", "mamba"]}, "rules[1]"),
    "a rule of another type": ({"rules": [["delta_rule"]]}, "rules[0]"),
    "too many rules": ({"rules": ["delta_rule"] * 40}, "rules"),
    "a question for no key": ({"ask": "E"}, "ask"),
    "an empty question": ({"ask": ""}, "ask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_named(client, case):
    body, field = REFUSED[case]
    reply = client.post("/api/memory", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize(
    "content, kind, status",
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"", "application/json", 400),
        (b'{"cosine": NaN}', "application/json", 400),
        (b'{"steps": ' + b"[" * 500 + b"]" * 500 + b"}", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b'{"x": "' + b"x" * 2**16 + b'"}', "application/json", 413),
    ],
)
def test_a_malformed_body(client, content, kind, status):
    for path in ("/api/memory", "/api/plan", "/api/model", "/api/model/step", "/api/learning"):
        reply = client.post(path, content=content, headers={"Content-Type": kind})
        assert reply.status_code == status and reply.json()["error"]["message"]


def test_routes_and_headers(client):
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert client.get("/main.js").status_code == client.get("/dom.js").status_code == 200
    assert client.get("/nothing.js").status_code == 404 and client.get("/api/memory").status_code != 200
    assert client.post("/api/about", json={}).status_code == 405
    for name in ("..%2fapp.py", "%2e%2e/app.py", "..%5capp.py"):
        assert client.get(f"/{name}").status_code == 404
    about = client.get("/api/about").json()
    assert [rule["name"] for rule in about["rules"]] == list(DEMO_RULES)
    assert {rule["name"] for rule in about["memory_rules"]} == {*DEMO_RULES, *GENERAL}


def test_only_its_own_names_are_answered(client):
    reply = client.get("/", headers={"Host": "elsewhere.example"})
    assert reply.status_code == 403 and "lineate explore --allow-host" in reply.json()["error"]["message"]
