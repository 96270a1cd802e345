"""generate through a Decoder: the tokens and states of model(ids, state=...) to the bit, also when interrupted."""

import copy
import linecache
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.decoding import decoder as decoder_module
from lineate.decoding import native as native_module
from lineate.generation import generate, generated
from lineate.layers.configs import AttentionConfig, LinearConfig
from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.models.config import FeedConfig
from lineate.native.build import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no C compiler")
VOCAB = 61


@pytest.fixture(scope="module")
def model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(
        HybridConfig(
            vocab_size=VOCAB, hidden_size=64, n_layers=4, pattern="GGKA",
            linear=LinearConfig(heads=2, value_heads=4, key_dim=32, value_dim=32),
            attention=AttentionConfig(heads=4, kv_heads=2, head_dim=32, rotary_dim=16), feed=FeedConfig(size=96),
        )
    ).eval()  # fmt: skip


def same(one: ModelState | None, other: ModelState | None) -> bool:
    assert one is not None and other is not None
    pairs = [(x[name], y[name]) for x, y in zip(one.layers, other.layers, strict=True) for name in x.names]
    return torch.equal(torch.as_tensor(one.lengths), torch.as_tensor(other.lengths)) and all(
        torch.equal(x, y) for x, y in pairs
    )


def without_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "FEWEST_DECODED", 10**9)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"ids": [[1, 2, 3, 4]], "temperature": 0},
    "one token": {"ids": [[5]]},
    "drawn": {"ids": [[1, 2, 3, 4]], "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2},
    "rows": {"ids": [[1, 2, 3], [7, 8, 9], [4, 5, 6]], "seed": [0, 1, 2]},
    "uneven rows that stop": {"ids": [[1], [7, 8, 9, 2, 3], [4, 5]], "seed": [3, 4, 5], "stop": range(0, VOCAB, 9)},
    "more than the room": {"ids": [[3, 1]], "max_new_tokens": 150},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_states_are_those_of_the_model(case: str, model: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "MOST_ROOM", 16)
    own_call, decoded = generated.Decoder.__call__, []

    def read(*args: Any) -> Tensor:
        decoded.append(True)
        return own_call(*args)

    monkeypatch.setattr(generated.Decoder, "__call__", read)
    given = {"max_new_tokens": 40, "temperature": 1.0, "stop": (), **CASES[case]}
    made = generate(model, **given)
    states = []
    for n, _ in enumerate(made):
        states += [made.state] if n in (0, 3, 20) else []
    assert decoded
    decoded.clear()
    without_decoder(monkeypatch)
    plain = generate(model, **given)
    wanted = []
    for n, _ in enumerate(plain):
        wanted += [plain.state] if n in (0, 3, 20) else []
    assert not decoded
    assert made.tokens == plain.tokens and same(made.state, plain.state)
    assert all(same(x, y) for x, y in zip(states, wanted, strict=True))


def test_a_continued_state_is_not_changed(model: HybridLM) -> None:
    with torch.no_grad():
        state = model(torch.tensor([[1, 2, 3]]), last_only=True).state
    before = [{name: x[name].clone() for name in x.names} for x in state.layers]
    runs = [generate(model, [[4]], 20, state=state, stop=(), temperature=0).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(torch.equal(x[name], old[name]) for x, old in zip(state.layers, before, strict=True) for name in old)


@pytest.mark.parametrize("where", ["before C", "after C", "while choosing"])
def test_an_interrupted_call_is_repeated(where: str, model: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ids": [[1, 2, 3]], "max_new_tokens": 30, "temperature": 1.0, "stop": ()}
    wanted = generate(model, **given)
    states = [wanted.state for _ in wanted]
    made, calls = generate(model, **given), iter(range(10**6))
    own_call, own_choose = generated.Decoder.__call__, generated.choose_tokens

    def read(*args: Any) -> Tensor:
        n = next(calls)
        if where == "before C" and n % 5 == 2:
            raise KeyboardInterrupt
        logits = own_call(*args)
        if where == "after C" and n % 5 == 2:
            raise KeyboardInterrupt
        return logits

    def choose(*args: Any) -> Tensor:
        if where == "while choosing" and next(calls) % 5 == 2:
            raise KeyboardInterrupt
        return own_choose(*args)

    monkeypatch.setattr(generated.Decoder, "__call__", read)
    monkeypatch.setattr(generated, "choose_tokens", choose)
    interruptions = 0
    while True:
        try:
            token = next(made, None)
        except KeyboardInterrupt:
            interruptions += 1
            count = len(made.tokens[0])
            assert same(made.state, states[count - 1]) if count else True
            continue
        if token is None:
            break
        assert same(made.state, states[len(made.tokens[0]) - 1])
    assert interruptions > 3 and made.tokens == wanted.tokens


def calls_of(events: list[str], stop_at: int) -> Callable[..., Any]:
    """Return a function for sys.settrace that raises KeyboardInterrupt before the stop_at-th line with a call.

    Python handles a signal at the end of a call, so at no line between two calls.
    """
    files = {module.__file__ for module in (generated, decoder_module, native_module)}

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and "(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            events.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(events) == stop_at:
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("part", range(3), ids=["first third", "second third", "last third"])
def test_an_interrupt_at_any_call_loses_nothing(part: int, model: HybridLM) -> None:
    """Rows of which some stop go on, with the same tokens and state, after an interrupt before any line with a call."""
    given: dict[str, Any] = {
        "ids": [[1], [7, 8, 9, 2, 3], [4, 5]], "max_new_tokens": 14, "temperature": 1.0, "seed": [3, 4, 5],
        "stop": range(0, VOCAB, 9), "repetition_penalty": 1.3,
    }  # fmt: skip

    def run(stop_at: int) -> tuple[list[list[int]], ModelState | None, list[Tensor], list[str]]:
        made, seen, events = generate(model, **given), [], list[str]()
        while True:
            sys.settrace(calls_of(events, stop_at))
            try:
                token = next(made, None)
            except KeyboardInterrupt:
                sys.settrace(None)
                torch.set_grad_enabled(True)  # it may come before a `with` block has ended
                if stop_at % 2:
                    made.state  # noqa: B018, it completes the call
                continue
            finally:
                sys.settrace(None)
            if token is None:
                return made.tokens, made.state, seen, events
            seen.append(token)

    tokens, state, seen, events = run(0)
    assert len(events) > 300 and min(map(len, tokens)) < max(map(len, tokens))
    for stop_at in range(1 + part, len(events) + 1, 3 * 4):
        found = run(stop_at)
        assert found[0] == tokens and same(found[1], state), found[3][stop_at - 1]
        assert all(map(torch.equal, found[2], seen)) and len(found[2]) == len(seen), found[3][stop_at - 1]


def test_what_is_set_on_the_model_is_called_for_every_token(model: HybridLM) -> None:
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        model.generate([[1, 2, 3]], 20, stop=()).run()
    finally:
        handle.remove()
    assert len(calls) == 20


def test_a_copied_generation_goes_on_by_itself(model: HybridLM) -> None:
    made = generate(model, [[1, 2, 3]], 30, stop=(), temperature=0)
    for _ in range(10):
        next(made)
    twin = copy.deepcopy(made)
    assert made.run() == twin.run() and len(made.tokens[0]) == 30
