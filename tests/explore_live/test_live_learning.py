"""The endpoint of the view "Learning" against closed forms, ops and torch's own Adam, and what it refuses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate.explore.live.learning_view import LEARNERS, RIDGE, TASKS, LearningRequest, adam, pairs
from lineate.memory import MEMORY_RULES, run_head
from lineate.memory.lact import lact, lact_state

SIZES = {"tokens": 16, "channels": 4, "chunk": 4, "seed": 3}


def ask(client, **body):
    reply = client.post("/api/learning", json={**SIZES, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens_of(task="pairs"):
    asked = LearningRequest("", "", 0, 0, 1, 4, task, SIZES["tokens"], SIZES["channels"], SIZES["seed"])
    return pairs(asked)


def losses(answers, values):
    """Return relative squared errors, and 1 - cosine."""
    errors = (answers - values).square().sum(-1) / values.square().sum(-1)
    return errors.tolist(), (1 - F.cosine_similarity(answers, values, dim=-1)).tolist()


def check(found, answers, values):
    errors, angles = losses(answers, values)
    assert found["ran_away_at"] is None
    assert found["angles"] == pytest.approx(angles, abs=2e-3)
    assert found["errors"] is None or found["errors"] == pytest.approx(errors, abs=2e-3)


@pytest.mark.parametrize("task", TASKS)
def test_tasks(task):
    k, v = tokens_of(task)
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(16))
    torch.testing.assert_close(v.norm(dim=-1), torch.ones(16))
    count = len(torch.unique(k, dim=0))
    assert count == (2 if task == "pairs" else 16)
    if task != "pairs":
        first, second = (torch.linalg.lstsq(k[half], v[half]).solution for half in (slice(8), slice(8, 16)))
        torch.testing.assert_close(k[:8] @ first, v[:8], rtol=0, atol=1e-4)
        assert torch.allclose(first, second, atol=1e-3) == (task == "map")


def test_delta_rule_is_the_op(client):
    k, v = tokens_of()
    found = ask(client, memory="delta_rule", rate=0.5)
    states = [torch.zeros(4, 4)]
    for n in range(1, 16):
        beta = torch.full((1, n, 1), 0.5)
        states.append(lineate.delta_rule(k[None, :n, None], k[None, :n, None], v[None, :n, None], beta).state[0, 0])
    check(found, torch.stack([S.T @ key for S, key in zip(states, k, strict=True)]), v)


def test_least_squares_is_the_minimum(client):
    k, v = tokens_of("map")
    found = ask(client, memory="least_squares", task="map")
    ridge = RIDGE * torch.eye(4)
    states = [torch.linalg.solve(k[:n].T @ k[:n] + ridge, k[:n].T @ v[:n]) for n in range(16)]
    check(found, torch.stack([S.T @ key for S, key in zip(states, k, strict=True)]), v)


@pytest.mark.parametrize("name", [name for name, x in LEARNERS.items() if x.own in ("positioned sgd", "momentum")])
def test_gradient_steps_are_those_of_the_reference(client, name):
    """An answer before a token is what the memory reads with the key of that token right after the one before."""
    learner, (k, v) = LEARNERS[name], tokens_of("map")
    v = v * (2 if learner.stretched else 1)
    gates = {"rate": torch.full((15,), learner.rates[learner.own])}
    if learner.own == "momentum":
        gates["momentum"] = torch.full((15,), 0.6)
    weights = learner.weights(4)
    with torch.no_grad():
        later, _ = run_head(replace(learner.rule, chunk=4), k[1:], k[:-1], v[:-1], gates, weights)
        check(ask(client, memory=name, task="map"), torch.cat((learner.rule.model(weights, k[0])[None], later)), v)


def test_lact_is_the_op(client):
    """Muon writes at the end of a chunk, so four tokens are answered with the same weights."""
    k, v = tokens_of()
    weights = LEARNERS["lact"].weights(4)
    state = lact_state([weights[name][None] for name in ("W0", "W1", "W2")], 1)
    q, answers = k[None, :, None], []
    for start in range(0, 16, 4):
        chunk = slice(start, start + 4)
        rates, momentum = torch.ones(1, 4, 1, 3), torch.full((1, 4, 1), 0.6)
        y, state = lact(q[:, chunk], q[:, chunk], 2 * v[None, chunk, None], rates, momentum, state, chunk=4)
        answers.append(y[0, :, 0])
    check(ask(client, memory="lact"), torch.cat(answers), v)


@pytest.mark.cover
def test_adam_is_that_of_torch():
    weight = torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    own, carried = {"S": weight.detach().clone()}, {"S": torch.zeros(3, 3)}
    optimizer = torch.optim.Adam([weight], lr=0.05, betas=(0.9, 0.99))
    for n in range(5):
        weight.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(n))
        steps, carried = adam({"S": weight.grad}, carried, {"rate": torch.tensor(0.05)})
        own["S"] = own["S"] + steps["S"]
        optimizer.step()
        torch.testing.assert_close(own["S"], weight.detach())


@pytest.mark.parametrize("name", LEARNERS)
def test_the_optimiser_is_exchangeable(client, name):
    """Every memory runs with each optimiser that the page offers for it, and all of them but least squares differ."""
    found = {}
    for optimiser in LEARNERS[name].rates:
        answer = ask(client, memory=name, optimiser=optimiser, task="map")
        assert answer["optimiser"] == optimiser and len(answer["angles"]) == 16
        found[optimiser] = tuple(answer["angles"])
    same = {"sgd", "positioned sgd"} & set(found) if not LEARNERS[name].chunked else set()  # chunks of one token
    assert len(set(found.values())) == len(found) - bool(same)


def test_a_rate_that_is_too_large_runs_away(client):
    found = ask(client, memory="titans", optimiser="sgd", rate=4, tokens=64)
    at = found["ran_away_at"]
    assert 5 < at < 64 and found["errors"][at - 2] is not None and set(found["errors"][at - 1 :]) == {None}


def test_forgetting_helps_where_the_map_changes(client):
    kept = {decay: ask(client, memory="least_squares", task="turn", decay=decay, tokens=64) for decay in (1, 0.8)}
    last = {decay: sum(found["errors"][-8:]) for decay, found in kept.items()}
    assert last[0.8] < 0.2 * last[1]


def test_every_row_is_one_of_the_memories():
    for learner in LEARNERS.values():
        assert learner.rule is MEMORY_RULES[learner.rule.name] and next(iter(learner.rates)) == learner.own


REFUSED = {
    "no memory": ({}, "memory"),
    "an unknown memory": ({"memory": "elephant"}, "memory"),
    "an unknown optimiser": ({"memory": "titans", "optimiser": "luck"}, "optimiser"),
    "least squares without a matrix": ({"memory": "lact", "optimiser": "least squares"}, "optimiser"),
    "muon with biases": ({"memory": "ttt_linear", "optimiser": "muon"}, "optimiser"),
    "a rate below 0": ({"memory": "titans", "rate": -0.1}, "rate"),
    "a large rate": ({"memory": "titans", "rate": 5}, "rate"),
    "momentum of 1": ({"memory": "titans", "momentum": 1}, "momentum"),
    "a small decay": ({"memory": "titans", "decay": 0.4}, "decay"),
    "a chunk between": ({"memory": "titans", "chunk": 5}, "chunk"),
    "channels between": ({"memory": "titans", "channels": 5}, "channels"),
    "few tokens": ({"memory": "titans", "tokens": 8}, "tokens"),
    "many tokens": ({"memory": "titans", "tokens": 1000}, "tokens"),
    "an unknown task": ({"memory": "titans", "task": "chess"}, "task"),
    "an unknown field": ({"memory": "titans", "colour": "red"}, "colour"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_named(client, case):
    body, field = REFUSED[case]
    reply = client.post("/api/learning", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and field in error["message"]
