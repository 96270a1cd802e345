"""Accuracy in float32 and below, dtypes, memory layout, autocast, uninitialised memory, and what requires gradients."""

import itertools

import pytest
import torch

import lineate
from tests.support.cases import (
    BACKENDS,
    CHUNKWISE,
    DELTA,
    FORWARD_PATHS,
    KIMI_DELTA,
    LARGE,
    PACKED,
    PATHS,
    ROWS,
    SMALL,
    SPECIAL_ROWS,
    TEXTS,
    Result,
    Shape,
    assert_same_bits,
    assert_within,
    bounds,
    budget,
    convert,
    draw,
    errors,
    needs_native,
    oracle,
    relative_error,
    run,
    same_bits,
    weights,
)

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.slow(but="values")
@pytest.mark.parametrize(
    "shape",
    [SMALL, LARGE, Shape(1, 500, 1, 2, 64, 32), Shape(1, 130, 1, 1, 130, 33), Shape(1, 70, 2, 2, 3, 130)],
    ids=str,
)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_float32_on_ordinary_inputs(row, shape):
    """The chunkwise form in float32 is within 2e-6 of the float64 recurrent form on outputs, 1e-5 on gradients."""
    inputs = convert(draw(row, shape), torch.float32)
    expected = oracle(row, inputs)
    for chunk_size, backend in itertools.product((16, 64, 100), BACKENDS):
        found = errors(run(row, inputs, backend=backend, chunk_size=chunk_size), expected)
        allowed = {name: 2e-6 if name in ("output", "state") else 1e-5 for name in found}
        assert_within(found, allowed, (backend, chunk_size))


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_float32_on_special_inputs(row, special, shape):
    """With resets, no decay, extreme beta and nearly parallel keys, results are finite and within budget."""
    inputs = convert(draw(row, shape, special), torch.float32)
    expected = oracle(row, inputs)
    for chunk_size in (16, 64):
        allowed = budget(row, inputs, expected, chunk_size)
        for backend in BACKENDS:
            found = errors(run(row, inputs, backend=backend, chunk_size=chunk_size), expected)
            assert_within(found, allowed, (backend, chunk_size))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_normalize_qk_in_float32(row):
    """q and k are five times too long, and one key is zero: it has no direction, but it has a gradient."""
    inputs = convert(draw(row, SMALL), torch.float32)
    inputs["q"], inputs["k"] = inputs["q"] * 5, inputs["k"] * 5
    inputs["k"][:, 7] = 0
    expected = oracle(row, inputs, normalize_qk=True)
    allowed = budget(row, inputs, expected, 16, normalize_qk=True)
    for backend in BACKENDS:
        got = run(row, inputs, backend=backend, chunk_size=16, normalize_qk=True)
        assert_within(errors(got, expected), allowed, backend)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_parallel_form_in_float32(row, special):
    """The budget is the same, with one chunk of length t."""
    inputs = convert(draw(row, SMALL, special), torch.float32)
    expected = oracle(row, inputs)
    assert_within(errors(run(row, inputs, "parallel"), expected), budget(row, inputs, expected, SMALL.t))


@needs_native
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_decoding_in_float32(row, special, dtype):
    """The native recurrent form, which has no gradients, meets the same budget with chunks of 1, whole and packed."""
    for shape, texts in ((SMALL, None), (PACKED, TEXTS)):
        inputs = convert(draw(row, shape, special, texts=texts and len(texts)), dtype)
        options = {"cu_seqlens": bounds(texts)} if texts else {}
        expected = oracle(row, inputs, only=(), **options)
        got = run(row, inputs, "recurrent", backend="native", only=(), **options)
        assert_within(errors(got, expected), budget(row, inputs, expected, 1, **options))


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("gates", ["same", "float32"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_half_precision_only_rounds_inputs_and_results(row, path, dtype, gates):
    """State, sums and solve are float32: the only difference from the float64 oracle is the last rounding."""
    inputs = convert(
        draw(row, SMALL, "reset -50" if row.decay != "none" else "ordinary"),
        HALF[dtype],
        gates=torch.float32 if gates == "float32" else None,
    )
    expected = oracle(row, inputs)
    got = run(row, inputs, **path, chunk_size=16)
    chunk_size = SMALL.t if path["form"] == "parallel" else 16
    assert_within(errors(got, expected), budget(row, inputs, expected, chunk_size))
    assert got.output.dtype == inputs["v"].dtype
    assert {name: x.dtype for name, x in got.grads.items()} == {name: x.dtype for name, x in inputs.items()}


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_dtype_and_shape_of_the_result(row, path):
    """The output is like v; the state is float32, or float64 for float64 inputs, whether one was passed or not."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if path["backend"] == "torch":
        dtypes.append(torch.float64)
    for dtype, texts, passed in itertools.product(dtypes, (None, (20, 0, 33)), (True, False)):
        shape = SMALL._replace(b=1) if texts else SMALL
        inputs = convert(draw(row, shape, texts=texts and len(texts)), dtype)
        if not passed:
            del inputs["state"]
        attended = row.op(**inputs, **path, cu_seqlens=bounds(texts) if texts else None)
        assert isinstance(attended, lineate.Attended)
        assert (attended.output.dtype, attended.output.shape) == (dtype, inputs["v"].shape)
        state = torch.float64 if dtype == torch.float64 else torch.float32
        rows = len(texts) if texts else shape.b
        assert (attended.state.dtype, attended.state.shape) == (state, (rows, shape.hv, shape.k, shape.v))
        assert attended.output.isfinite().all()
        assert attended.state.isfinite().all()


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_autocast_changes_no_bit(row, path, dtype):
    """Autocast would round the operands of every product to bfloat16.

    As torch asks, the backward is called outside of it.
    """
    inputs = convert(draw(row, SMALL), dtype)
    gradients = path != {"form": "recurrent", "backend": "native"}
    results = []
    for autocast in (False, True):
        leaves = {name: x.clone().requires_grad_(gradients) for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output, state = row.op(**leaves, **path)
        grads = {}
        if gradients:
            loss = (output.double() * weights(output, 1)).sum() + (state.double() * weights(state, 2)).sum()
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        results.append(Result(output.detach(), state.detach(), grads))
    assert_same_bits(*results)


@pytest.mark.parametrize("path", CHUNKWISE)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_backward_inside_autocast_changes_no_bit(row, path):
    inputs = convert(draw(row, SMALL), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(row, inputs, **path)
    assert_same_bits(got, run(row, inputs, **path))


def strange_layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same numbers in memory that is not contiguous."""
    padded = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    padded[..., ::2] = x
    behind = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    behind[:, 2:-1] = x
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "tokens last": x.movedim(1, -1).contiguous().movedim(-1, 1),
        "every other element": padded[..., ::2],
        "a slice of tokens": behind[:, 2:-1],
    }


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_memory_layout_does_not_matter(row, path):
    """Non-contiguous inputs, and gradients that arrive transposed, give the same numbers up to rounding."""
    inputs = convert(draw(row, SMALL), torch.float32)
    expected = oracle(row, inputs)
    allowed = budget(row, inputs, expected, 64)
    layouts = {name: strange_layouts(x) for name, x in inputs.items()}
    for layout in layouts["q"]:
        leaves = {name: x[layout].requires_grad_() for name, x in layouts.items()}
        output, state = row.op(**leaves, **path, chunk_size=16)
        loss = (output.transpose(1, 3) * weights(output, 1).transpose(1, 3)).sum()
        loss = loss + (state.mT * weights(state, 2).mT).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        assert_within(errors(Result(output.detach(), state.detach(), grads), expected), allowed, layout)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_expanded_inputs_and_gradients(row, path):
    """One token is expanded to all and one state to all rows, with stride 0; so is the gradient of a sum."""
    inputs = convert(draw(row, SMALL), torch.float32)
    expanded = {name: x[:1] if name == "state" else x[:1, :1] for name, x in inputs.items()}
    expanded = {name: x.expand_as(inputs[name]) for name, x in expanded.items()}
    expected = oracle(row, expanded, weighted=False)
    leaves = {name: x.detach().requires_grad_() for name, x in expanded.items()}
    output, state = row.op(**leaves, **path)
    grads = torch.autograd.grad(output.sum() + state.sum(), list(leaves.values()))
    got = Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))
    assert_within(errors(got, expected), budget(row, expanded, expected, 64, weighted=False, worst_case=True))


@pytest.fixture
def poisoned_memory():
    """Fill every uninitialised tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.zeros(3).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_uninitialised_memory_is_never_read(row, path, packed, poisoned_memory):
    shape, texts = (PACKED, len(TEXTS)) if packed else (SMALL, None)
    inputs = convert(draw(row, shape, texts=texts), torch.float32)
    options = {"cu_seqlens": bounds()} if packed else {}
    expected = oracle(row, inputs, **options)
    got = run(row, inputs, **path, chunk_size=16, **options)
    assert_within(errors(got, expected), budget(row, inputs, expected, 64, **options))


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_of_some_inputs_only(row, path):
    """Which inputs require gradients does not change the gradients; the other inputs get none."""
    inputs = convert(draw(row, SMALL), torch.float32)
    everything = run(row, inputs, **path)
    for name in inputs:
        some = run(row, inputs, **path, only=(name,))
        assert list(some.grads) == [name]
        assert_same_bits(some, everything, name)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_without_gradients(row, path):
    inputs = convert(draw(row, SMALL), torch.float32)
    expected = run(row, inputs, **path)
    plain = row.op(**inputs, **path)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with torch.no_grad():
        no_grad = row.op(**leaves, **path)
    with torch.inference_mode():
        inference = row.op(**leaves, **path)
    for output, state in (plain, no_grad, inference):
        assert not output.requires_grad
        assert not state.requires_grad
        assert same_bits(output, expected.output)
        assert same_bits(state, expected.state)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_on_half_of_the_result(row, path):
    """Gradients of a loss on the output alone and on the state alone add up to those of both."""
    inputs = convert(draw(row, SMALL), torch.float32)
    totals = {name: torch.zeros_like(x) for name, x in inputs.items()}
    for which in (0, 1):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        half = row.op(**leaves, **path, chunk_size=16)[which]
        loss = (half * weights(half, which + 1)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for name, x in zip(leaves, grads, strict=True):
            if which == 1 and name == "q":
                assert x is None or not x.any()  # reading does not depend on the final memory
            totals[name] += 0 if x is None else x
    whole = run(row, inputs, **path, chunk_size=16)
    expected = oracle(row, inputs)
    assert_within(errors(whole._replace(grads=totals), expected), budget(row, inputs, expected, 64))


@pytest.mark.parametrize("path", PATHS)
def test_one_state_starts_two_continuations(path):
    """The gradient of a state that is used twice is the sum of both uses."""
    first, left, right = (convert(draw(KIMI_DELTA, SMALL, seed=i), torch.float32) for i in range(3))
    for inputs in (left, right):
        del inputs["state"]

    def state_gradient(*continuations):
        state = KIMI_DELTA.op(**first, **path).state.detach().requires_grad_()
        loss = sum(KIMI_DELTA.op(**x, state=state, **path).output.square().sum() for x in continuations)
        return torch.autograd.grad(loss, state)[0]

    both, sum_of_both = state_gradient(left, right), state_gradient(left) + state_gradient(right)
    assert relative_error(both, sum_of_both) < 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_backward_twice_through_one_graph(path):
    inputs = {name: x.requires_grad_() for name, x in convert(draw(DELTA, SMALL), torch.float32).items()}
    loss = DELTA.op(**inputs, **path, chunk_size=16).output.square().sum()
    first = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(inputs.values()))
    for name, x, y in zip(inputs, first, second, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nan_is_never_swallowed(row, path):
    """One NaN in any input shows in the output at most one token later: a NaN gate does not count as a reset."""
    for name in draw(row, SMALL):
        inputs = convert(draw(row, SMALL), torch.float32)
        (inputs[name][0] if name == "state" else inputs[name][0, 20]).flatten()[0] = torch.nan
        output = row.op(**inputs, **path, chunk_size=16).output
        seen = output[0, 0] if name == "state" else output[0, 20:22]
        assert seen.isnan().any(), name
        assert output[1].isfinite().all(), name
