"""The endpoint of the view "Plan" against lineate.planning, and what it refuses."""

import pytest

from lineate.models.presets import PRESETS
from lineate.planning import (
    HARDWARE,
    estimate_times,
    from_numbers,
    largest_batch,
    longest_context,
    plan_memory,
    read_model,
    several,
    time_bounds,
    variants,
)
from lineate.planning.units import show_seconds

SIZES = {"hidden_size": 512, "layers": 8, "head_dim": 64, "kv_heads": 2}


def ask(client, **body):
    reply = client.post("/api/plan", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check(found, model, machine, batch, tokens):
    """Compare all numbers of an answer with those of the library."""
    models = {"own": model, "pure": variants(model)["softmax only"]}
    assert found["hardware"]["memory"]["bytes"] == machine.memory_bytes
    assert found["models"].keys() == models.keys()
    for name, each in models.items():
        plan, own = plan_memory(each), found["models"][name]
        parts = {part: value["bytes"] for part, value in own["parts"].items()}
        assert parts == {
            "weights": plan.weights,
            "state": batch * (plan.memory + plan.conv),
            "cache": batch * tokens * plan.cache_per_token,
        }
        assert own["total"]["bytes"] == plan.total(batch, tokens) == sum(parts.values())
        assert own["fits"] == (plan.total(batch, tokens) <= machine.memory_bytes)
        assert own["longest_context"] == longest_context(plan, machine.memory_bytes, batch)
        assert own["largest_batch"] == largest_batch(plan, machine.memory_bytes, tokens)
        check_rates(own, plan, machine, tokens)
        times = {x.what: x.seconds for x in time_bounds(plan, machine, batch, tokens) if x.what != "training step"}
        assert {x["what"]: x["seconds"] for x in own["times"]} == times
        fitted = [(x.what, x.seconds) for x in estimate_times(plan, machine, batch, tokens)]
        assert [(x["what"], x["seconds"]) for x in own["fitted"]] == fitted
        assert own["curve_bytes"] == [plan.total(batch, n) for n in found["curve_tokens"]]
        assert own["letters"] == each.config.letters


def check_rates(own, plan, machine, tokens):
    """Compare tokens a second with the largest batch over the least times of its step."""
    most = own["largest_batch"]
    steps = [x.seconds for x in time_bounds(plan, machine, most, tokens) if x.what.startswith("decode")] if most else []
    assert [x["per_second"] for x in own["rates"]] == [most / seconds for seconds in steps]


def test_nothing_is_fast_that_does_not_fit(client):
    own = ask(client, preset="qwen3-next-80b", hardware="rtx4090")["models"]["own"]
    assert (own["largest_batch"], own["rates"]) == (0, [])


@pytest.mark.parametrize("pattern", ["GGGA", "A", "K", "KKKM", "LRDGKTPNCEAM"])
def test_numbers_are_those_of_planning(client, pattern):
    found = ask(client, **SIZES, pattern=pattern, dtype="fp8", context=5000, batch=3, hardware="a100", devices=2)
    model = from_numbers(512, 8, 8, "fp8", kv_heads=2, head_dim=64, pattern=pattern)
    check(found, model, several(HARDWARE["a100"], 2), 3, 5000)


@pytest.mark.cover
@pytest.mark.parametrize("name", ["qwen3-next-80b", "small"])
def test_presets(client, name):
    found = ask(client, preset=name, context=262144, hardware="h200")
    check(found, read_model(name), HARDWARE["h200"], 1, 262144)
    changed = ask(client, preset=name, pattern="KA", dtype="float32")
    check(changed, read_model(name, "float32", "KA"), HARDWARE["h100"], 1, 32768)


@pytest.mark.cover
def test_the_page_offers_what_the_endpoint_takes(client):
    about = client.get("/api/about").json()
    assert about["presets"] == list(PRESETS)
    for machine in about["hardware"]:
        for dtype in about["dtypes"]:
            ask(client, **SIZES, hardware=machine["name"], dtype=dtype)
    for mixer in about["mixers"]:
        assert ask(client, **SIZES, pattern=mixer["letter"])["models"]["own"]["letters"] == 8 * mixer["letter"]


def test_fitted_times_have_their_error_or_a_reason(client):
    def texts(**body):
        return {x["what"]: x["text"] for x in ask(client, preset="kimi-linear-48b", **body)["models"]["own"]["fitted"]}

    shown = texts(hardware="h200", context=8192, batch=1)
    for x in estimate_times(read_model("kimi-linear-48b"), HARDWARE["h200"], 1, 8192):
        assert shown[x.what] == f"{show_seconds(x.seconds)} (± {x.largest_error:.0%})"
    assert all(x.endswith("(extrapolated)") for x in texts(hardware="h200", context=2**24).values())
    assert all(x.startswith("no measurement on this machine") for x in texts(hardware="b200").values())


REFUSED = {
    "an unknown preset": ({"preset": "qwen"}, "preset"),
    "sizes beside a preset": ({"preset": "tiny", "layers": 4}, "layers"),
    "an unknown letter": ({"pattern": "GGGX"}, "pattern"),
    "an empty pattern": ({"pattern": ""}, "pattern"),
    "a long pattern": ({"pattern": "G" * 129}, "pattern"),
    "a pattern of numbers": ({"pattern": 3}, "pattern"),
    "an unknown dtype": ({"dtype": "float12"}, "dtype"),
    "unknown hardware": ({"hardware": "abacus"}, "hardware"),
    "no device": ({"devices": 0}, "devices"),
    "no context": ({"context": 0}, "context"),
    "a context without end": ({"context": 2**25}, "context"),
    "half a sequence": ({"batch": 0.5}, "batch"),
    "a batch as a word": ({"batch": "many"}, "batch"),
    "true sequences": ({"batch": True}, "batch"),
    "no layers": ({"layers": 0}, "layers"),
    "too many layers": ({"layers": 129}, "layers"),
    "a small hidden size": ({"hidden_size": 32}, "hidden_size"),
    "a large hidden size": ({"hidden_size": 32768}, "hidden_size"),
    "a head that does not divide": ({"hidden_size": 512, "head_dim": 48}, "hidden_size"),
    "an odd head": ({"hidden_size": 512, "head_dim": 17}, "head_dim"),
    "key heads that do not divide": ({**SIZES, "kv_heads": 3}, "kv_heads"),
    "more key heads than heads": ({**SIZES, "kv_heads": 9}, "kv_heads"),
    "an unknown field": ({"colour": "red"}, "colour"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_named(client, case):
    body, field = REFUSED[case]
    reply = client.post("/api/plan", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and field in error["message"]
