"""Random calls of every rule: shapes, dtypes, head groups, chunk sizes, states, packed sequences, special gates."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cases import (
    NATIVE_OBSTACLE,
    ROWS,
    Row,
    Shape,
    assert_float64_agrees,
    assert_within,
    bounds,
    budget,
    convert,
    draw,
    errors,
    oracle,
    run,
    specials,
)

EXAMPLES = [8, pytest.param(100, marks=pytest.mark.slow)]  # a row; six rows
PATHS = (("chunkwise", "torch"), ("chunkwise", "native"), ("parallel", "torch"), ("recurrent", "native"))


@dataclass(frozen=True)
class Call:
    """The parts of a random call; small enough to read when it fails."""

    shape: Shape
    special: str
    seed: int
    dtype: torch.dtype
    gates: torch.dtype | None
    lengths: list[int] | None
    chunk_size: int
    normalize_qk: bool
    scale: float | None


@st.composite
def calls(pick, row: Row) -> Call:
    h, group = pick(st.integers(1, 3)), pick(st.integers(1, 3))
    lengths = pick(st.none() | st.lists(st.integers(0, 24), min_size=1, max_size=4).filter(any))
    b, t = (1, sum(lengths)) if lengths else (pick(st.integers(1, 3)), pick(st.integers(1, 70)))
    dtype = pick(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return Call(
        shape=Shape(b, t, h, h * group, pick(st.integers(1, 12)), pick(st.integers(1, 12))),
        special=pick(st.sampled_from(list(specials(row)))),
        seed=pick(st.integers(0, 2**31)),
        dtype=dtype,
        gates=pick(st.sampled_from([None, torch.float32])) if dtype == torch.bfloat16 else None,
        lengths=lengths,
        chunk_size=pick(st.sampled_from([1, 2, 5, 8, 16, 17, 32, 64])),
        normalize_qk=pick(st.booleans()),
        scale=pick(st.sampled_from([None, 1.0, 0.25])),
    )


@pytest.mark.cover
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_forms_agree_on_random_calls(row, examples):
    """Every form and backend agrees with the float64 oracle on the same numbers: output, state and all gradients."""
    compared = 0

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(calls(row))
    def compare(call: Call) -> None:
        inputs = draw(row, call.shape, call.special, texts=call.lengths and len(call.lengths), seed=call.seed)
        inputs = convert(inputs, call.dtype, call.gates)
        options = {"normalize_qk": call.normalize_qk, "scale": call.scale}
        if call.lengths:
            options["cu_seqlens"] = bounds(call.lengths).int()
        expected = oracle(row, inputs, **options)
        for form, backend in PATHS:
            if backend == "native" and (NATIVE_OBSTACLE or call.dtype == torch.float64):
                continue
            only = () if (form, backend) == ("recurrent", "native") else None  # it is for decoding and has no gradients
            got = run(row, inputs, form, backend=backend, only=only, chunk_size=call.chunk_size, **options)
            if call.dtype == torch.float64:
                assert_float64_agrees(got, expected, (form, backend))
                continue
            size = {"parallel": call.shape.t, "recurrent": 1}.get(form, call.chunk_size)
            found, allowed = errors(got, expected), budget(row, inputs, expected, size, **options)
            if any(found[name] > allowed[name] for name in found):
                allowed = budget(row, inputs, expected, size, worst_case=True, **options)
            assert_within(found, allowed, (form, backend))
        nonlocal compared
        compared += 1

    compare()
    assert compared >= examples
