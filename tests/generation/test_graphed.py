"""generate on a GPU through a Decoder, which replays a CUDA graph: the tokens of the plain loop."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.decoding.in_place import Graph
from lineate.decoding.rows import can_be_recorded
from lineate.generation import generate, generated
from lineate.layers.configs import AttentionConfig, LinearConfig
from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.models.config import FeedConfig
from tests.support.small_models import random_model

pytestmark = pytest.mark.gpu
VOCAB = 61
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=64, n_layers=4, pattern="GGKA",
    linear=LinearConfig(heads=2, value_heads=4, key_dim=32, value_dim=32),
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=32, rotary_dim=16), feed=FeedConfig(size=96),
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"ids": [[1, 2, 3, 4]], "temperature": 0},
    "drawn": {"ids": [[1, 2, 3, 4]], "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2},
    "rows": {"ids": [[1, 2, 3], [7, 8, 9], [4, 5, 6]], "seed": [0, 1, 2]},
    "rows that stop": {"ids": [[1], [7, 8, 9, 2, 3], [4, 5], [6], [8]], "seed": range(5), "stop": range(0, VOCAB, 19)},
    "more than the room": {"ids": [[3, 1]], "max_new_tokens": 150},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> HybridLM:
    return random_model(CONFIG).cuda().eval()


def close(one: ModelState | None, other: ModelState | None) -> bool:
    assert one is not None and other is not None
    lengths = torch.as_tensor(other.lengths).cpu()
    assert torch.equal(torch.as_tensor(one.lengths).cpu().expand_as(lengths), lengths)
    for x, y in zip(one.layers, other.layers, strict=True):
        for name in x.names:
            for row, n in enumerate(lengths.expand(other.rows).tolist()):
                cut = slice(n) if hasattr(y, "lengths") else slice(None)
                torch.testing.assert_close(x[name][row, cut], y[name][row, cut], rtol=1e-3, atol=1e-4)
    return True


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_states_are_those_of_the_plain_loop(
    case: str, model: HybridLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "MOST_GRAPHED_ROOM", 16)
    monkeypatch.setattr(generated, "FEWEST_GRAPHED", 8)
    given = {"max_new_tokens": 60, "temperature": 1.0, "stop": (), **CASES[case]}
    own_call, graphs = generated.Decoder.__call__, []

    def read(decoder: Any, ids: Tensor) -> Tensor:
        graphs.append(decoder.captured)
        return own_call(decoder, ids)

    monkeypatch.setattr(generated.Decoder, "__call__", read)
    made = generate(model, **given)
    states = []
    for n, _ in enumerate(made):
        states += [made.state] if n in (0, 3, 20) else []
    assert sum(graphs) > 5 and all(graphs)
    monkeypatch.setattr(generated, "FEWEST_GRAPHED", 10**9)
    graphs.clear()
    plain = generate(model, **given)
    wanted = []
    for n, _ in enumerate(plain):
        wanted += [plain.state] if n in (0, 3, 20) else []
    assert not graphs and made.tokens == plain.tokens and close(made.state, plain.state)
    assert all(close(x, y) for x, y in zip(states, wanted, strict=True))


@pytest.mark.parametrize("where", ["before the graph", "after the graph", "while choosing"])
def test_an_interrupted_call_is_completed(where: str, model: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the state is read after an interruption or not, tokens and state fit, and no token is lost."""
    given = {"ids": [[1, 2, 3]], "max_new_tokens": 60, "temperature": 1.0, "stop": ()}
    wanted = generate(model, **given)
    states = [wanted.state for _ in wanted]
    made, calls = generate(model, **given), iter(range(10**6))
    own_choose = generated.choose_tokens

    own_replay = Graph.replay

    def choose(*args: Any) -> Tensor:
        if where == "while choosing" and next(calls) % 5 == 2:
            raise KeyboardInterrupt
        return own_choose(*args)

    def replay(graph: Graph) -> tuple[Tensor, ...]:
        n = next(calls) if where != "while choosing" else 0
        if where == "before the graph" and n % 5 == 2:
            raise KeyboardInterrupt
        results = own_replay(graph)
        if where == "after the graph" and n % 5 == 2:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(generated, "choose_tokens", choose)
    monkeypatch.setattr(Graph, "replay", replay)
    seen, interruptions = [], 0
    while True:
        try:
            token = next(made, None)
        except KeyboardInterrupt:
            interruptions += 1
            if interruptions % 2:
                assert close(made.state, states[len(made.tokens[0]) - 1])
            continue
        if token is None:
            break
        seen.append(int(token))
    assert interruptions > 5 and seen == made.tokens[0] == wanted.tokens[0]
    assert close(made.state, states[-1])


def test_a_copied_generation_goes_on_by_itself(model: HybridLM) -> None:
    made = generate(model, [[1, 2, 3]], 60, stop=(), temperature=0)
    for _ in range(10):
        next(made)
    twin = copy.deepcopy(made)
    assert made.run() == twin.run() and len(made.tokens[0]) == 60


@pytest.mark.parametrize("where", ["model", "mixer", "linear"])
def test_hooks_are_called_for_every_token(where: str, model: HybridLM) -> None:
    calls: list[int] = []
    module = {"model": model, "mixer": model.layers[1].mixer, "linear": model.layers[3].mixer.out_proj}[where]
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        assert not can_be_recorded(model)
        model.generate([[1, 2, 3]], 40, stop=()).run()
    finally:
        handle.remove()
    assert len(calls) == 40 and can_be_recorded(model)


def test_modules_of_others_are_called_for_every_token() -> None:
    class Counted(nn.Module):
        calls = 0

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            Counted.calls += 1
            return self.inner(x)

    model = random_model(CONFIG).cuda().eval()
    model.layers[0].mixer.out_proj = Counted(model.layers[0].mixer.out_proj)
    assert not can_be_recorded(model)
    model.generate([[1, 2, 3]], 40, stop=()).run()
    assert Counted.calls == 40


def test_under_autocast_and_on_other_streams_the_model_is_called(model: HybridLM) -> None:
    assert can_be_recorded(model)
    with torch.autocast("cuda", torch.bfloat16):
        assert not can_be_recorded(model)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not can_be_recorded(model)
