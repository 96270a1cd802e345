"""torch.jit.trace records the ops: a trace gives what the call gives, for other numbers and lengths, and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import lineate
from lineate.layers.convolution import short_convolution
from lineate.layers.feed import SwiGLU
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LatentConfig, LinearConfig
from tests.support.cases import FORWARD_PATHS, KIMI_DELTA, PATHS, ROWS, Row, Shape, bounds, convert, draw, needs_native

# Tracing warns at every Python decision that it records the outcome.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning"),
]


def trace(call: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    return torch.jit.trace(call, example, check_trace=False)


def example(row: Row, t: int, seed: int = 0, grad: bool = False) -> list[Tensor]:
    inputs = convert(draw(row, Shape(2, t, 2, 4, 6, 5), seed=seed), torch.float32)
    return [x.requires_grad_(grad) for x in inputs.values()]


def as_call(row: Row, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, state = tensors
        return tuple(row.op(*inputs, state=state, **options))

    return call


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_trace_gives_what_the_op_gives(row: Row, path: dict[str, str]) -> None:
    call = as_call(row, **path)
    traced = trace(call, *example(row, 9))
    # This loop is unrolled in the trace.
    lengths = (9,) if path == {"form": "recurrent", "backend": "torch"} else (9, 50)
    for t in lengths:
        given = example(row, t, seed=1)
        for got, expected in zip(traced(*given), call(*given), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_trace_differentiates(row: Row, path: dict[str, str]) -> None:
    call = as_call(row, **path)
    given = example(row, 9, seed=1, grad=True)
    traced = trace(call, *example(row, 9, grad=True))
    got, expected = (
        torch.autograd.grad(sum(x.sin().sum() for x in run(*given)), given) for run in (traced, call)
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("path", PATHS[1:3])
def test_a_trace_takes_other_texts(path: dict[str, str]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
        return lineate.kimi_delta_attention(q, k, v, log_decay, beta, cu_seqlens=cu_seqlens, **path).output

    inputs = convert(draw(KIMI_DELTA, Shape(1, 20, 2, 4, 6, 5)), torch.float32)
    given = [x for name, x in inputs.items() if name != "state"]
    traced = trace(call, *given, bounds([4, 5, 11]))
    for lengths in ([4, 5, 11], [7, 0, 13]):
        torch.testing.assert_close(traced(*given, bounds(lengths)), call(*given, bounds(lengths)))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_decode_in_a_trace_writes_the_state(backend: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return lineate.decode(q, k, v, log_decay, beta, state=state, backend=backend), state

    traced = trace(call, *example(KIMI_DELTA, 2))
    given, again = example(KIMI_DELTA, 2, seed=1), example(KIMI_DELTA, 2, seed=1)
    for got, expected in zip(traced(*given), call(*again), strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.equal(given[-1], example(KIMI_DELTA, 2, seed=1)[-1])


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


A_LOG = torch.tensor([0.1, -0.2, 0.3, 0.4])
WEIGHT = _numbers(12, 4, seed=7)
PARTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "fused": (
        lambda q, k, v, gate, write: tuple(lineate.fused_delta_rule(q, k, v, gate, write, A_LOG)),
        [(2, 9, 2, 6), (2, 9, 2, 6), (2, 9, 4, 5), (2, 9, 4), (2, 9, 4)],
    ),
    "softmax": (lambda q, k, v: lineate.softmax_attention(q, k, v).output, [(2, 9, 2, 6), (2, 9, 2, 6), (2, 9, 4, 5)]),
    "attention matrix": (lambda q, k: lineate.attention_matrix(q, k), [(2, 9, 2, 6), (2, 9, 2, 6)]),
    "convolution": (lambda x: short_convolution(x, WEIGHT), [(2, 9, 12)]),
    "convolution with a state": (lambda x, state: short_convolution(x, WEIGHT, state), [(2, 9, 12), (2, 12, 3)]),
    "norm": (RMSNorm(12), [(2, 9, 12)]),
    "gated norm": (GatedRMSNorm(12), [(2, 9, 12), (2, 9, 12)]),
    "swiglu": (SwiGLU(12, 20), [(2, 9, 12)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_traces_of_the_other_ops(name: str) -> None:
    call, shapes = PARTS[name]
    first, second = ([_numbers(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in (1, 2))
    with torch.no_grad():
        torch.testing.assert_close(trace(call, *first)(*second), call(*second))


@pytest.mark.parametrize("pattern", ["LRD", "GKA", "KM"])
def test_a_traced_model(pattern: str) -> None:
    config = HybridConfig(
        vocab_size=50, hidden_size=32, n_layers=len(pattern), pattern=pattern, linear=LinearConfig(2, 2, 8, 8),
        attention=AttentionConfig(2, 1, 8), latent=LatentConfig(2, rank=8, nope_dim=8, rope_dim=8, value_dim=8),
        feed=FeedConfig(48),
    )  # fmt: skip
    model = HybridLM(config)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids).logits

    traced = trace(Logits(), torch.arange(40)[None])
    ids = torch.arange(49, 0, -1)[None]
    got, expected = traced(ids), model(ids).logits
    torch.testing.assert_close(got, expected)
    weights = list(model.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), weights) for x in (got, expected)))


@pytest.mark.parametrize("path", PATHS[1:3])
@pytest.mark.parametrize("record", [trace, lambda call, *given: make_fx(call)(*given)], ids=["trace", "make_fx"])
def test_a_record_without_gradients_says_so_when_they_are_wanted(record: Any, path: dict[str, str]) -> None:
    call = as_call(KIMI_DELTA, **path)
    recorded = record(call, *example(KIMI_DELTA, 37))
    output, _ = recorded(*example(KIMI_DELTA, 37, grad=True))
    with pytest.raises(RuntimeError, match="record it with an input that requires grad"):
        output.sum().backward()


@needs_native
def test_recording_leaves_nothing_behind() -> None:
    """A trace's sizes are tensors, which must not be remembered as a call that needs no further checks."""
    from lineate import plans

    known = plans.PLANS.items()
    trace(as_call(KIMI_DELTA), *example(KIMI_DELTA, 23))
    trace(lambda q, k, v, d, b, s: lineate.decode(q, k, v, d, b, state=s), *example(KIMI_DELTA, 3))
    assert known == plans.PLANS.items()
