"""torch.compile(fullgraph=True) of hybrid models with softmax and latent attention: one graph, the results of eager."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor

from lineate.layers import GatedAttention
from lineate.layers.softmax import attend_new
from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.models.config import AttentionConfig, FeedConfig, LatentConfig, LinearConfig, MemoryConfig
from lineate.native.product import MOST_ROWS
from tests.support.cases import relative_error
from tests.support.marks import slow_but

TEXTS = torch.tensor([0, 9, 10, 10, 23])
"""Packed sequences of 9, 1, 0 and 13 tokens."""
CONFIG = HybridConfig(
    vocab_size=40, hidden_size=16, n_layers=2, pattern="GA", tie_embeddings=True,
    linear=LinearConfig(2, 2, 8, 8), attention=AttentionConfig(4, 2, 8, rotary_dim=4),
    latent=LatentConfig(2, rank=8, nope_dim=8, rope_dim=4, value_dim=8), memory=MemoryConfig(2, 8),
    feed=FeedConfig(32),
)  # fmt: skip
hybrids = pytest.mark.parametrize("pattern", ["GA", "KM"])


@pytest.fixture(autouse=True)
def functions_of_torch(monkeypatch):
    """Let element-wise functions run as torch does, as in a graph; a few rows have other last bits without one."""
    monkeypatch.setattr("lineate.torch_ops.elementwise.MOST", 0)


def make(pattern: str) -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(replace(CONFIG, pattern=pattern))


def draw(b: int, t: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (b, t), generator=torch.Generator().manual_seed(t))


class Compiled:
    """A model in one graph, and how many graphs it has taken so far."""

    def __init__(self, model: HybridLM, dynamic: bool | None = None, backend: str = "aot_eager") -> None:
        torch._dynamo.reset()
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        self.run = torch.compile(model, fullgraph=True, backend=self.counter, dynamic=dynamic)

    @property
    def graphs(self) -> int:
        return self.counter.frame_count


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(["GA", "KM"], ["KM"]))
@pytest.mark.parametrize("packed", slow_but([False, True], [True]), ids=["batch", "packed"])
def test_training_is_one_graph(pattern, packed):
    """Nothing breaks it, or fullgraph would raise; loss and all gradients agree to the bit, as the same calls run."""
    model = make(pattern)
    ids, bounds = (draw(1, 23), TEXTS) if packed else (draw(2, 21), None)
    compiled = Compiled(model)
    results = []
    for run in (model, compiled.run):
        loss = run(ids, cu_seqlens=bounds, labels=ids).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert compiled.graphs == 1
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


def check(got: Tensor, wanted: Tensor, rows: int) -> None:
    """Compare results: to the bit, unless the rows are so few that our C code multiplies them without a compiler."""
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert rows <= MOST_ROWS or torch.equal(got, wanted)


AOT = pytest.param("aot_eager", marks=pytest.mark.slow)
"""Traces the operators of a graph too; with symbolic lengths that takes three times as long as finding the graph."""


@pytest.mark.cover
@pytest.mark.parametrize("backend", ["eager", AOT])
@pytest.mark.parametrize("pattern", slow_but(["GA", "KM"], ["GA"]))
@torch.no_grad()
def test_one_graph_serves_every_length(pattern, backend):
    """After the first length nothing is compiled again."""
    model = make(pattern)
    compiled = Compiled(model, dynamic=True, backend=backend)
    graphs = []
    for t in (20, 33, 40, 64, 65, 5):
        check(compiled.run(draw(2, t)).logits, model(draw(2, t)).logits, 2 * t)
        graphs.append(compiled.graphs)
    assert len(set(graphs)) == 1


@pytest.mark.slow
@hybrids
@torch.no_grad()
def test_one_graph_serves_every_packing(pattern):
    """Other numbers and lengths of sequences compile nothing again."""
    model = make(pattern)
    compiled = Compiled(model, dynamic=True)
    graphs = []
    for ends in ([0, 9, 23], [0, 23, 40], [0, 1, 2, 33], [0, 5, 6, 7, 20, 41], [0, 23, 90]):
        bounds, ids = torch.tensor(ends), draw(1, ends[-1])
        check(compiled.run(ids, cu_seqlens=bounds).logits, model(ids, cu_seqlens=bounds).logits, ends[-1])
        graphs.append(compiled.graphs)
    assert len(set(graphs)) == 1


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(["GA", "KM"], ["KM"]))
@torch.no_grad()
def test_decoding_is_one_graph_for_every_length(pattern):
    """The second step finds that the length of the cache differs, and no later step does."""
    model = make(pattern)
    compiled = Compiled(model)
    state, expected = (model(draw(2, 21)).state for _ in range(2))
    for token in draw(8, 2):
        got, wanted = compiled.run(token[:, None], state=state), model(token[:, None], state=expected)
        check(got.logits, wanted.logits, 2)
        state, expected = got.state, wanted.state
    assert compiled.graphs == 2


def read(run, ids: Tensor, ends: Tensor | None, state: ModelState | None) -> tuple[Tensor, ModelState]:
    out = run(ids, cu_seqlens=ends, state=state)
    return out.logits, out.state


@pytest.mark.slow
@hybrids
@torch.no_grad()
def test_states_of_packed_texts_continue(pattern):
    """States of eager and of compiled calls continue token by token and packed.

    The caches have different padding, so results do not agree to the bit.
    """
    model = make(pattern)
    compiled = Compiled(model)
    more = torch.tensor([0, 2, 9, 10, 10])
    steps = [(draw(4, 1), None), (draw(1, 10), more), (draw(4, 2), None)]
    for first in (model, compiled.run):
        _, state = read(first, draw(1, 23), TEXTS, None)
        _, expected = read(model, draw(1, 23), TEXTS, None)
        for ids, ends in steps:
            got, state = read(compiled.run, ids, ends, state)
            wanted, expected = read(model, ids, ends, expected)
            assert relative_error(got, wanted) <= 1e-6
            assert torch.equal(torch.as_tensor(state.lengths), torch.as_tensor(expected.lengths))
        _, state = read(model, draw(1, 10), more, state)  # this takes back the room after the bounds
        _, expected = read(model, draw(1, 10), more, expected)
        assert state.nbytes == expected.nbytes


@pytest.mark.cover
@torch.no_grad()
def test_compiled_calls_leave_the_state_they_continue():
    """Nothing is written into the room after a cache, because another continuation may use it meanwhile."""
    layer = GatedAttention(16, 2)
    _, state = layer(torch.randn(1, 5, 16))
    _, state = layer(torch.randn(1, 1, 16), state)  # leaves room for more tokens
    kept = {name: x.clone() for name, x in state.tensors.items()}
    torch._dynamo.reset()
    _, after = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(1, 1, 16), state)
    assert after.lengths == 7
    assert all(torch.equal(x, kept[name]) for name, x in state.tensors.items())
    _, eager = layer(torch.randn(1, 1, 16), state)
    assert eager.tensors["keys"] is state.tensors["keys"]  # the room is not claimed yet


@pytest.mark.cover
@pytest.mark.parametrize("backend", ["eager", AOT])
@pytest.mark.parametrize(
    ("letter", "dynamic", "lengths"),
    [
        ("E", True, (20, 21, 33)),
        pytest.param("E", True, (40, 41, 64), marks=pytest.mark.slow),
        *(pytest.param(letter, None, (40,), marks=pytest.mark.slow) for letter in "ETPN"),
    ],
)
@torch.no_grad()
def test_learning_mixers_are_one_graph(letter, dynamic, lengths, backend):
    """They are laid out in chunks by their lengths; the lengths of least squares may be symbolic."""
    mixer = make(letter).layers[0].mixer
    torch._dynamo.reset()
    run = torch.compile(mixer, fullgraph=True, backend=backend, dynamic=dynamic)
    for t in lengths:
        x = torch.randn(2, t, mixer.in_proj.weight.shape[1])
        check(run(x)[0], mixer(x)[0], 2 * t)


@pytest.mark.cover
def test_packed_attention_keeps_the_promises_of_an_op():
    """opcheck passes (schema, fake tensors, autograd registration)."""
    q, k, v = (torch.randn(1, 23, 4, 8) for _ in range(3))
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    for name in ("attend_texts", "attend_texts_backward"):
        given = (torch.randn(1, 23, 4, 8),) if name.endswith("backward") else ()
        op = getattr(torch.ops.lineate, name).default
        torch.library.opcheck(op, (*given, q, k, v, TEXTS, TEXTS, 0.3), test_utils=checks)
    torch._dynamo.reset()
    run = torch.compile(attend_new, fullgraph=True, backend="aot_eager")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *qkv: run(*qkv, 0.3, TEXTS), leaves, fast_mode=True)


@pytest.mark.gpu
@hybrids
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_training_on_a_gpu_is_one_graph(pattern, packed):
    """It runs in bfloat16, where packed attention is one launch; the compiler's own fusions round differently."""
    model = make(pattern).cuda()
    ids, bounds = (
        (draw(1, 200).cuda(), torch.tensor([0, 90, 91, 91, 200]).cuda()) if packed else (draw(2, 100).cuda(), None)
    )
    torch._dynamo.reset()
    results = []
    for run in (model, torch.compile(model, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(ids, cu_seqlens=bounds, labels=ids).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, got in zip(*results, strict=True):
        assert relative_error(got, expected) <= 0.05
