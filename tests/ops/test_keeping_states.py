"""attend_keeping_states: the op's result, and the memory after every given number of tokens."""

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import (
    BACKENDS,
    GATED_DELTA,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Shape,
    bounds,
    convert,
    draw,
    interpreted,
    same_bits,
)

SHAPE = Shape(2, 150, 2, 4, 3, 5)
BACKEND = [*BACKENDS, pytest.param("triton", marks=interpreted)]


def gates_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name != "state"}


def first(inputs: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Return the first n tokens, with the same first state."""
    return {name: x if name == "state" else x[:, :n] for name, x in inputs.items()}


@pytest.mark.parametrize("every", [1, 7, 64, 150, 151])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_states_are_those_of_shorter_calls(row, every):
    """In float64, state n is the final one of a call on the first n * every tokens; the rest is the op's result."""
    shape = SHAPE._replace(t=20) if every == 1 else SHAPE
    inputs = draw(row, shape)
    output, state, states = lineate.attend_keeping_states(**inputs, keep_states_every=every)
    expected = row.op(**inputs)
    torch.testing.assert_close(output, expected.output, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state, expected.state, rtol=1e-9, atol=1e-11)
    assert states.shape == (2, shape.t // every, 4, 3, 5) and states.dtype == state.dtype
    for n in range(shape.t // every):
        own = row.op(**first(inputs, (n + 1) * every)).state
        torch.testing.assert_close(states[:, n], own, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", BACKEND)
@pytest.mark.parametrize("row", [LINEAR, GATED_DELTA, KIMI_DELTA], ids=str)
def test_whole_chunks_have_the_bits_of_the_op(row, backend):
    """Chunks of 64 begin at the same tokens as in one call, in every backend."""
    inputs = convert(draw(row, SHAPE), torch.float32)
    output, state, states = lineate.attend_keeping_states(**inputs, keep_states_every=64, backend=backend)
    expected = row.op(**inputs, form="chunkwise", backend=backend)
    assert same_bits(output, expected.output) and same_bits(state, expected.state)
    assert same_bits(states[:, 1], row.op(**first(inputs, 128), form="chunkwise", backend=backend).state)


def test_packed_sequences():
    """Each sequence counts from its own beginning; those that are too short keep nothing."""
    lengths = (10, 0, 3, 17, 5)
    inputs = draw(GATED_DELTA, SHAPE._replace(b=1, t=sum(lengths)), texts=len(lengths))
    ends = bounds(lengths)
    output, state, states = lineate.attend_keeping_states(**inputs, keep_states_every=5, cu_seqlens=ends)
    expected = lineate.gated_delta_rule(**inputs, cu_seqlens=ends)
    torch.testing.assert_close(output, expected.output, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state, expected.state, rtol=1e-9, atol=1e-11)
    kept = []
    for i, length in enumerate(lengths):
        own = {name: x[:, ends[i] : ends[i + 1]] for name, x in gates_of(inputs).items()}
        own["state"] = inputs["state"][i : i + 1]
        if length:
            kept.append(lineate.attend_keeping_states(**own, keep_states_every=5).states[0])
    assert states.shape == (2 + 0 + 0 + 3 + 1, 4, 3, 5) and same_bits(states, torch.cat(kept))


def test_continuing_and_gradients():
    inputs = {name: x.requires_grad_() for name, x in draw(GATED_DELTA, SHAPE._replace(t=20)).items()}
    kept = lineate.attend_keeping_states(**inputs, keep_states_every=8, normalize_qk=True)
    rest = {name: x[:, 8:] for name, x in gates_of(inputs).items()}
    again = lineate.gated_delta_rule(**rest, state=kept.states[:, 0], normalize_qk=True)
    torch.testing.assert_close(again.output, kept.output[:, 8:], rtol=1e-9, atol=1e-11)
    whole = lineate.gated_delta_rule(**inputs, normalize_qk=True)
    names = list(inputs)
    got, expected = (
        torch.autograd.grad(x.square().sum(), list(inputs.values())) for x in (again.output, whole.output[:, 8:])
    )
    for name, x, y in zip(names, got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=name)


def test_other_inputs():
    """An empty memory, mixed dtypes, a constant decay, and one beta per value channel."""
    inputs = convert(draw(GATED_DELTA, SHAPE._replace(t=20)), torch.float32)
    del inputs["state"]
    inputs["v"], inputs["log_decay"] = inputs["v"].bfloat16(), -torch.arange(4.0)
    kept = lineate.attend_keeping_states(**inputs, keep_states_every=10)
    expected = lineate.gated_delta_rule(**inputs)
    assert kept.output.dtype == torch.bfloat16 and kept.states.dtype == torch.float32
    torch.testing.assert_close(kept.states[:, 1], expected.state)
    inputs["beta"] = torch.rand(2, 20, 4, 5)
    kept = lineate.attend_keeping_states(**inputs, keep_states_every=10)
    torch.testing.assert_close(kept.state, lineate.gated_delta_rule(**inputs).state)


def test_errors():
    inputs = draw(GATED_DELTA, SHAPE)
    for every, kind, message in (
        (0, ValueError, "keep_states_every must be at least 1, got 0; 64 keeps one a chunk"),
        (64.0, TypeError, "keep_states_every must be an int, got float"),
        (True, TypeError, "keep_states_every must be an int, got bool"),
    ):
        with pytest.raises(kind) as raised:
            lineate.attend_keeping_states(**inputs, keep_states_every=every)
        assert str(raised.value) == message
    with pytest.raises(ValueError, match="log_decay must have shape"):
        lineate.attend_keeping_states(**{**inputs, "log_decay": torch.zeros(3)}, keep_states_every=64)
