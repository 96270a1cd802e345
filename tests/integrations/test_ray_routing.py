"""Which replica a request goes to: the policy alone, without Ray."""

import json
from array import array
from dataclasses import replace

import pytest

pytest.importorskip("pydantic_core")

from hypothesis import given, settings
from hypothesis import strategies as st

from lineate.serving.replicas.options import ReplicaOptions
from lineate.serving.replicas.prefixes import Prefixes
from lineate.serving.replicas.prompts import BLOCK, CHAT, COMPLETIONS, blocks_of
from lineate.serving.replicas.routing import Routing


def prompt(*numbers: int) -> "array[int]":
    return array("q", numbers)


def three(**options) -> Routing:
    routing = Routing(**options)
    routing.update("abc")
    return routing


def send(routing: Routing, request: str, blocks) -> str:
    """Send a request where the routing says, and return the replica."""
    routing.open(request)
    return routing.choose(request, blocks)[0]


def test_a_prompt_goes_to_the_replica_that_has_most_of_it():
    routing = three(imbalance=0)
    one = send(routing, "1", prompt(1, 2, 3))
    other = send(routing, "2", prompt(1, 2, 3, 4, 5))
    assert one != other and routing.stats.by_load == 2  # the first replica is too busy
    for request in "12":
        routing.end(request)
    for n, blocks in enumerate((prompt(1, 2, 3, 4), prompt(1, 2, 3, 4, 5, 6))):
        assert send(routing, f"next {n}", blocks) == other
        routing.end(f"next {n}")
    assert routing.stats.by_prefix == 2 and routing.stats.by_load == 2 and routing.stats.blocks == 6


def test_a_replica_that_is_too_busy_is_passed_over():
    routing = three(imbalance=2)
    blocks = prompt(1, 2, 3)
    first = send(routing, "0", blocks)
    assert [send(routing, str(n), blocks) for n in (1, 2)] == [first, first]  # two more than the others: the limit
    second = send(routing, "3", blocks)
    assert second != first and routing.stats.by_load == 2
    assert send(routing, "4", blocks) == second  # which has the prompt from then on, and is less busy
    for n in range(5):
        routing.end(str(n))
    assert set(routing.stats.active.values()) == {0}


def test_prompts_that_nobody_knows_are_spread():
    routing = three()
    for n in range(9):
        send(routing, str(n), prompt(100 + n))
    assert routing.stats.active == {"a": 3, "b": 3, "c": 3} and routing.stats.by_load == 9
    for n in range(9):
        routing.end(str(n))
    went = []
    for n in range(6):  # also if one has ended before the next begins
        went.append(send(routing, f"one by one {n}", prompt()))
        routing.end(f"one by one {n}")
    assert sorted(went) == ["a", "a", "b", "b", "c", "c"]


def test_what_all_prompts_begin_with_does_not_count():
    routing = three()
    went = []
    for n in range(6):
        went.append(send(routing, str(n), prompt(7, *range(100 * n, 100 * n + 20))))
        routing.end(str(n))
    assert sorted(went) == ["a", "a", "b", "b", "c", "c"] and routing.stats.by_load == 6
    again = send(routing, "again", prompt(7, *range(100, 120), 3, 4))
    assert again == went[1] and routing.stats.by_prefix == 1


def test_a_request_counts_once_and_where_it_is():
    routing = three()
    assert send(routing, "1", prompt(1)) == "a"
    routing.choose("1", prompt(1))
    assert routing.stats.active == {"a": 1, "b": 0, "c": 0}
    routing.move("1", "b", prompt(1))  # "a" did not take it
    assert routing.stats.active == {"a": 0, "b": 1, "c": 0}
    routing.end("1")
    routing.end("1")
    assert routing.stats.active == {"a": 0, "b": 0, "c": 0}
    routing.choose("1", prompt(1))  # chosen after its client had left
    assert routing.stats.active == {"a": 0, "b": 0, "c": 0}


def test_a_replica_that_is_gone_is_forgotten():
    routing = three()
    assert send(routing, "1", prompt(1, 2)) == "a" and send(routing, "2", prompt(3)) == "b"
    routing.update("bcd")
    assert routing.stats.blocks == 1 and routing.stats.active == {"b": 1, "c": 0, "d": 0}
    routing.end("1")  # it ended with its replica
    routing.move("2", "a", prompt(3))  # which has gone: it counts where it was
    assert routing.stats.active == {"b": 1, "c": 0, "d": 0} and send(routing, "3", prompt(3)) == "b"
    routing.update("")
    routing.open("4")
    assert routing.choose("4", prompt(1)) == [] and routing.stats.blocks == 0


def test_old_prompts_are_forgotten():
    prefixes = Prefixes(most=10)
    prefixes.add(prompt(1, 2, 3, 4), "a")
    prefixes.add(prompt(1, 2, 5, 6), "b")
    assert prefixes.blocks == 6
    prefixes.add(prompt(1, 2, 3, 4), "a")  # used again
    prefixes.add(prompt(7, 8, 9, 10, 11), "c")
    assert prefixes.blocks == 9  # of the oldest prompt, what another one shares stays
    assert prefixes.shared(prompt(1, 2, 5, 6)) == {"a": 2, "b": 2}
    assert prefixes.shared(prompt(1, 2, 3, 4, 9)) == {"a": 4, "b": 2}
    assert prefixes.shared(prompt(7, 8)) == {"c": 2} and prefixes.shared(prompt(2)) == {}
    prefixes.add(prompt(*range(100, 120)), "c")  # longer than all that may be held: its beginning is
    assert prefixes.blocks <= 10 and prefixes.shared(prompt(*range(100, 120))) == {"c": 10}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from("abc"), st.booleans()), max_size=30))
def test_shared_prefixes_are_those_of_all_prompts(steps):
    """The tree agrees with a plain list of prompts, as long as nothing must be forgotten; replicas may go."""
    prefixes, plain = Prefixes(), []
    for numbers, replica, goes in steps:
        if goes:
            prefixes.forget(replica)
            plain = [(other, name) for other, name in plain if name != replica]
        else:
            prefixes.add(prompt(*numbers), replica)
            plain.append((numbers, replica))
        for asked in (*(x for x, _ in plain), [0, 1, 2, 0], [2]):
            expected: dict[str, int] = {}
            for other, name in plain:
                same = next((n for n, (x, y) in enumerate(zip(asked, other, strict=False)) if x != y), None)
                same = min(len(asked), len(other)) if same is None else same
                if same:
                    expected[name] = max(same, expected.get(name, 0))
            assert prefixes.shared(prompt(*asked)) == expected
    for replica in "abc":
        prefixes.forget(replica)
    assert prefixes.blocks == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=8), st.sampled_from("abc")), max_size=40))
def test_the_tree_never_grows_beyond_its_bound(steps):
    prefixes = Prefixes(most=7)
    for numbers, replica in steps:
        prefixes.add(prompt(*numbers), replica)
        assert prefixes.blocks <= 7
        assert prefixes.shared(prompt(*numbers)).get(replica, 0) == min(len(numbers), 7)


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


def shared_blocks(one, other) -> int:
    return next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


VALUES = 1000


def test_blocks_of_prompts():
    text = "The sea is wide and the sea is deep, and it is full of fish. "
    one = blocks_of(COMPLETIONS, body(prompt=text * 3), VALUES)
    assert len(one) == len(text * 3) // BLOCK
    other = blocks_of(COMPLETIONS, body(prompt=[text * 2 + "Here it ends.", "a second one"]), VALUES)
    assert shared_blocks(one, other) == len(text * 2) // BLOCK
    ids = blocks_of(COMPLETIONS, body(prompt=list(range(100))), VALUES)
    assert shared_blocks(ids, blocks_of(COMPLETIONS, body(prompt=[list(range(70))]), VALUES)) == 70 // BLOCK
    assert blocks_of(COMPLETIONS, body(prompt="short"), VALUES) == array("q")


def test_a_conversation_begins_like_its_earlier_turns():
    turns = [
        {"role": "system", "content": "You know all fish. " * 4},
        {"role": "user", "content": "Which ones swim? " * 3},
    ]
    said = [*turns, {"role": "assistant", "content": "All."}, {"role": "user", "content": "And which ones fly?"}]
    earlier, later = blocks_of(CHAT, body(messages=turns), VALUES), blocks_of(CHAT, body(messages=said, seed=3), VALUES)
    assert shared_blocks(earlier, later) == len(earlier) > 5 and len(later) > len(earlier)
    parts = [{"role": "system", "content": [{"type": "text", "text": turns[0]["content"]}]}, turns[1]]
    assert blocks_of(CHAT, body(messages=parts), VALUES) == earlier
    tools = [{"type": "function", "function": {"name": "find_fish", "parameters": {}}}]
    assert shared_blocks(earlier, blocks_of(CHAT, body(messages=turns, tools=tools), VALUES)) == 0


REFUSED = (
    b"", b"{", b"[]", b"3", b'{"messages": 3}', b'{"messages": [1, null]}', b'{"prompt": null}',
    b'{"prompt": [[null]]}', b'{"messages": [{"content": [3]}]}', b'{"prompt": {"a": 1}}',
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_bodies_that_the_replica_will_refuse(text):
    assert len(blocks_of(CHAT, text, VALUES)) == 0 and len(blocks_of(COMPLETIONS, text, VALUES)) == 0
    assert len(blocks_of(None, body(prompt="a" * 100), VALUES)) == 0


def test_a_body_with_too_many_values_is_not_read(monkeypatch):
    read = []
    monkeypatch.setattr("pydantic_core.from_json", lambda text: read.append(len(text)) or {})
    completions = replace(COMPLETIONS, ids=500)
    many = body(messages=[[]] * 2000)
    for path in (CHAT, completions):
        assert len(blocks_of(path, many, 1000)) == 0 and not read
    ids = body(prompt=list(range(1200)))
    blocks_of(CHAT, ids, 1000)
    assert not read
    blocks_of(completions, ids, 1000)
    assert read == [len(ids)]


WRONG = {
    "--replicas must be an int of at least 1, got 0": {"replicas": 0},
    "--max-replicas must be at least --replicas, 3, got 2": {"replicas": 3, "most": 2},
    "--imbalance must be an int of at least 0, got -1": {"replicas": 1, "imbalance": -1},
    "--target-queue must be a number above 0, got 0": {"replicas": 1, "target": 0},
    "--replica-cpus must be a number above 0, got nan": {"replicas": 1, "cpus": float("nan")},
    "--replica-gpus must be a part of one GPU or a whole number": {"replicas": 1, "gpus": 1.5},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(message):
    with pytest.raises(ValueError, match=message):
        ReplicaOptions(**WRONG[message])
    with pytest.raises(ValueError, match="imbalance must be an int of at least 0, got True"):
        Routing(imbalance=True)
