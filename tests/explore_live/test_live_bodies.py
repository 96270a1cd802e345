"""Whatever a body has, the endpoints answer, or say which field is wrong."""

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)
FEWER = settings(SETTINGS, max_examples=25)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | st.sampled_from(["A", "w", "write", "forget", "delta_rule", "tiny", "GGGA", "float32"]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def fields(*names, **known):
    """Return objects with some of these fields: known ones are often as they should be."""
    values = {name: ANYTHING for name in names} | {name: value | ANYTHING for name, value in known.items()}
    return st.fixed_dictionaries({}, optional=values)


STEPS = st.lists(
    fields(
        "decay", "beta", "channels", "erase", "write",
        op=st.sampled_from(["write", "forget"]), key=st.sampled_from("AB"), value=st.sampled_from("yz"),
    ),
    max_size=4,
)  # fmt: skip
MEMORY = fields("keys", "values", "cosine", "sharpness", "ask", "rules", "extra", steps=STEPS)
PLAN = fields(
    "preset", "dtype", "context", "batch", "hardware", "devices", "extra",
    pattern=st.text("LRDGKAMX", max_size=5), hidden_size=st.sampled_from([256, 300]), layers=st.integers(0, 3),
    head_dim=st.sampled_from([16, 64, 100]), kv_heads=st.integers(0, 5),
)  # fmt: skip


MODEL = fields(
    "layer", "head", "at", "extra", text=st.text(max_size=9), model=st.just("given"),
    changes=st.lists(
        fields("layer", rule=st.just("delta_rule"), off=st.lists(st.sampled_from(["decay", "write"]))), max_size=3
    ),
)  # fmt: skip
LEARNING = fields(
    "rate", "momentum", "decay", "chunk", "channels", "seed", "extra", memory=st.sampled_from(["titans", "lact"]),
    optimiser=st.sampled_from(["sgd", "muon"]), tokens=st.just(16), task=st.sampled_from(["pairs", "turn"]),
)  # fmt: skip


LESSONS = fields("code", "extra", lesson=st.integers(0, 13))


def check(client, path, body):
    reply = client.post(path, json=body)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] and error["message"], reply.text


@pytest.mark.cover
def test_memory(client):
    @SETTINGS
    @given(MEMORY)
    def run(body):
        check(client, "/api/memory", body)

    run()


@pytest.mark.cover
def test_plan(client):
    @SETTINGS
    @given(PLAN)
    def run(body):
        check(client, "/api/plan", body)

    run()


@pytest.mark.cover
@pytest.mark.parametrize("path", ["/api/model", "/api/model/step"])
def test_model(client, path):
    @FEWER
    @given(MODEL)
    def run(body):
        check(client, path, body)

    run()


def test_lessons(client):
    @FEWER
    @given(LESSONS)
    def run(body):
        check(client, "/api/lessons", body)

    run()


@pytest.mark.cover
def test_learning(client):
    @FEWER
    @given(LEARNING)
    def run(body):
        check(client, "/api/learning", body)

    run()
