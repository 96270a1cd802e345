"""Properties that hold for all numbers: continuing, causality, isolation of sequences and rows, and equal bits."""

import pytest
import torch
from torch import Tensor

from tests.support.cases import (
    FORMS,
    LARGE,
    PACKED,
    PATHS,
    ROWS,
    SMALL,
    TEXTS,
    Inputs,
    Result,
    Row,
    Shape,
    assert_float64_agrees,
    assert_same_bits,
    bounds,
    convert,
    draw,
    oracle,
    run,
    same_bits,
    weights,
)


def tokens(inputs: Inputs, part: slice) -> Inputs:
    """Return some tokens of a call, without its state."""
    return {name: x[:, part] for name, x in inputs.items() if name != "state"}


def rows(inputs: Inputs, which: list[int]) -> Inputs:
    """Return some rows of the batch."""
    return {name: x[which] for name, x in inputs.items()}


# Split anywhere equals whole.


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("forms", [*((form, form) for form in FORMS), ("chunkwise", "recurrent")], ids="-".join)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_split_anywhere_equals_whole(row, forms):
    """Outputs, the final state and all gradients agree when the state is carried over, also from chunks to decoding."""
    inputs = draw(row, SMALL)
    expected = oracle(row, inputs)
    for split in (1, 7, 16, 33, SMALL.t - 1):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        state, outputs = leaves["state"], []
        for form, part in zip(forms, (slice(None, split), slice(split, None)), strict=True):
            output, state = row.op(**tokens(leaves, part), state=state, form=form, chunk_size=16)
            outputs.append(output)
        output = torch.cat(outputs, dim=1)
        loss = (output * weights(output, 1)).sum() + (state * weights(state, 2)).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        assert_float64_agrees(Result(output.detach(), state.detach(), grads), expected, split)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_split_packed_texts_equal_whole_ones(row):
    """Each sequence is cut at its own place; some have no tokens left for the second call, some none for the first."""
    cuts = (0, 1, 5, 0, 16, 0, 20, 0)
    inputs = draw(row, PACKED, texts=len(TEXTS))
    whole = row.op(**inputs, cu_seqlens=bounds(), chunk_size=16)
    starts = bounds().tolist()
    first = torch.cat([torch.arange(s, s + cut) for s, cut in zip(starts, cuts, strict=False)])
    second = torch.cat([torch.arange(s + cut, s + n) for s, cut, n in zip(starts, cuts, TEXTS, strict=False)])
    state, output = inputs.pop("state"), torch.empty_like(whole.output)
    for part, lengths in ((first, cuts), (second, [n - cut for n, cut in zip(TEXTS, cuts, strict=True)])):
        text = {name: x[:, part] for name, x in inputs.items()}
        got = row.op(**text, state=state, cu_seqlens=bounds(lengths), chunk_size=16)
        output[:, part], state = got.output, got.state
    assert torch.allclose(output, whole.output, rtol=0, atol=1e-12)
    assert torch.allclose(state, whole.state, rtol=0, atol=1e-12)


# The future never changes the past.


def futures(row: Row, inputs: Inputs, position: int):
    """Yield the same call with other tokens from `position` on: other numbers, and gates that suddenly forget."""
    other = convert(draw(row, SMALL, seed=99), inputs["q"].dtype)
    for value in (None, 0.0, -50.0, -torch.inf):
        if value is not None and row.decay == "none":
            continue
        changed = {name: x.clone() for name, x in inputs.items()}
        for name in changed:
            if name != "state":
                changed[name][:, position:] = other[name][:, position:] * (1 if "decay" in name else 1.5)
        if value is not None:
            changed["log_decay"][:, position] = value
        yield value, changed


def past(row: Row, inputs: Inputs, path: dict[str, str], position: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs before `position`, and the gradients of a loss on them."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output = row.op(**leaves, **path, chunk_size=32).output[:, :position]
    grads = torch.autograd.grad((output * weights(output, 1)).sum(), list(leaves.values()))
    return output.detach(), dict(zip(leaves, grads, strict=True))


@pytest.mark.filterwarnings("ignore::lineate.UnstableMemoryWarning")  # the futures' numbers have any size
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("position", [1, 5, 16, 17, 31, 32, 47])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_future_never_changes_the_past(row, path, position):
    """No bit of an earlier output or gradient changes, and gradients of future tokens are exactly 0."""
    inputs = convert(draw(row, SMALL), torch.float32)
    output, grads = past(row, inputs, path, position)
    for name, x in grads.items():
        if name != "state":
            assert not x[:, position:].any(), name
    for value, changed in futures(row, inputs, position):
        changed_output, changed_grads = past(row, changed, path, position)
        assert same_bits(changed_output, output), value
        for name, x in changed_grads.items():
            before = slice(None) if name == "state" else (slice(None), slice(position))
            assert same_bits(x[before], grads[name][before]), (name, value)
            if name != "state":
                assert not x[:, position:].any(), (name, value)


# A reset forgets everything.


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("position", [5, 16, 40])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [row for row in ROWS if row.decay != "none"], ids=str)
def test_nothing_crosses_a_decay_of_zero(row, path, position):
    """The bits after log_decay = -inf do not depend on earlier tokens, and no gradient reaches back across it.

    Only dlog_decay before the reset has rounding errors, because it is a sum of differences over all later tokens.
    """
    inputs = convert(draw(row, SMALL), torch.float32)
    inputs["log_decay"][:, position] = -torch.inf
    other = convert(draw(row, SMALL, seed=7), torch.float32)
    changed = {"state": other["state"]}
    for name, x in inputs.items():
        if name != "state":
            changed[name] = torch.cat((other[name][:, :position], x[:, position:]), dim=1)
    expected = None
    for call in (inputs, changed):
        leaves = {name: x.clone().requires_grad_() for name, x in call.items()}
        output, state = row.op(**leaves, **path, chunk_size=32)
        after = output[:, position:]
        loss = (after * weights(after, 1)).sum() + (state * weights(state, 2)).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        assert not grads.pop("state").any()
        for name, x in grads.items():
            largest = x[:, :position].abs().max().item()
            assert largest <= (1e-6 if name == "log_decay" else 0), name
        assert not grads["log_decay"][:, position].any()
        got = Result(after.detach(), state.detach(), {name: x[:, position:] for name, x in grads.items()})
        expected = expected or got
        assert_same_bits(got, expected)


# Packed sequences never see each other.


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_packed_texts_equal_separate_runs(row, path):
    """They agree to the last bit, gradients too; an empty sequence returns its state and the gradient of its state."""
    inputs = convert(draw(row, PACKED, texts=len(TEXTS)), torch.float32)
    packed = run(row, inputs, **path, cu_seqlens=bounds(), chunk_size=16)
    output_weights, state_weights = weights(packed.output, 1), weights(packed.state, 2)
    start = 0
    for i, length in enumerate(TEXTS):
        part, own = slice(start, start + length), slice(i, i + 1)
        start += length
        if not length:
            assert same_bits(packed.state[own], inputs["state"][own])
            assert same_bits(packed.grads["state"][own], state_weights[own].float())
            continue
        leaves = {name: x.clone().requires_grad_() for name, x in tokens(inputs, part).items()}
        leaves["state"] = inputs["state"][own].clone().requires_grad_()
        output, state = row.op(**leaves, **path, chunk_size=16)
        loss = (output * output_weights[:, part]).sum() + (state * state_weights[own]).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        mine = {name: x[own] if name == "state" else x[:, part] for name, x in packed.grads.items()}
        assert_same_bits(
            Result(packed.output[:, part], packed.state[own], mine),
            Result(output.detach(), state.detach(), grads),
            f"text {i} of {length} tokens",
        )


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("broken", [1, 4, 6])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_broken_text_stays_alone(row, path, broken):
    """If one sequence is full of NaN, with its state, no other sequence changes a bit."""
    inputs = convert(draw(row, PACKED, texts=len(TEXTS)), torch.float32)
    options = {**path, "cu_seqlens": bounds(), "chunk_size": 16}
    expected = run(row, inputs, **options)
    start, end = bounds()[broken : broken + 2].tolist()
    for name, x in inputs.items():
        (x[broken] if name == "state" else x[:, start:end]).fill_(torch.nan)
    got = run(row, inputs, **options)
    others = [i for i in range(len(TEXTS)) if i != broken]
    kept = [i for i in range(PACKED.t) if not start <= i < end]
    assert not got.output[:, start:end].isfinite().any()

    def pick(result: Result) -> Result:
        grads = {name: x[others] if name == "state" else x[:, kept] for name, x in result.grads.items()}
        return Result(result.output[:, kept], result.state[others], grads)

    assert_same_bits(pick(got), pick(expected))


# Batch order and batch company never change a row's bits.


def row_results(row: Row, inputs: Inputs, path: dict[str, str], order: list[int]) -> list[Result]:
    """Run rows of the batch together and separate the results; the loss of a row does not depend on its place."""
    leaves = {name: x.clone().requires_grad_() for name, x in rows(inputs, order).items()}
    output, state = row.op(**leaves, **path, chunk_size=16)
    loss = (output * weights(output[:1], 1)).sum() + (state * weights(state[:1], 2)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return [
        Result(output[i].detach(), state[i].detach(), {name: x[i] for name, x in zip(leaves, grads, strict=True)})
        for i in range(len(order))
    ]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("heads", "threads"), [((1, 1), 1), ((2, 6), 1), ((5, 5), 2), ((11, 11), 2)])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_batch_company_never_changes_a_row(row, path, heads, threads):
    """A row alone, in batches of 2 to 20 and in another order has the same bits, forward and backward."""
    h, hv = heads
    inputs = convert(draw(row, Shape(20, 19, h, hv, 6, 5)), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = row_results(row, inputs, path, list(range(20)))
        for order in ([0], [7], [19], [3, 4], [19, 0, 7], list(range(9, 2, -1)), list(range(19, -1, -1))):
            for i, got in zip(order, row_results(row, inputs, path, order), strict=True):
                assert_same_bits(got, together[i], f"row {i} in {order}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_broken_row_stays_alone(row, path):
    inputs = convert(draw(row, SMALL._replace(b=3)), torch.float32)
    expected = row_results(row, inputs, path, [0, 1, 2])
    for x in inputs.values():
        x[1] = torch.nan
    got = row_results(row, inputs, path, [0, 1, 2])
    assert got[1].output.isnan().all()
    for i in (0, 2):
        assert_same_bits(got[i], expected[i])


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_heads_do_not_see_each_other(row, path):
    """If one key head and its value heads are full of NaN, the other heads keep their bits."""
    inputs = convert(draw(row, Shape(2, 21, 3, 6, 6, 5)), torch.float32)
    expected = run(row, inputs, **path, chunk_size=16)
    key_heads, value_heads = [0, 2], [0, 1, 4, 5]
    for name, x in inputs.items():
        if name in ("q", "k"):
            x[:, :, 1] = torch.nan
        elif name == "state":
            x[:, 2:4] = torch.nan
        else:
            x[:, :, 2:4] = torch.nan
    got = run(row, inputs, **path, chunk_size=16)

    def pick(result: Result) -> Result:
        grads = {
            name: x[:, value_heads] if name == "state" else x[:, :, key_heads if name in ("q", "k") else value_heads]
            for name, x in result.grads.items()
        }
        return Result(result.output[:, :, value_heads], result.state[:, value_heads], grads)

    assert_same_bits(pick(got), pick(expected))


# The same inputs give the same bits, and are left alone.


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_two_runs_give_the_same_bits(row, path, shape):
    inputs = convert(draw(row, shape, "reset -50" if row.decay != "none" else "ordinary"), torch.float32)
    first = run(row, inputs, **path)
    # Makes the next calls use other memory, at other addresses.
    junk = [torch.full((n,), torch.nan) for n in (100, 10_000, 1_000_000)]
    second = run(row, inputs, **path)
    del junk
    assert_same_bits(second, first)
    assert_same_bits(run(row, inputs, **path), first)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("shape", [SMALL, Shape(1, 20, 1, 1, 6, 5), Shape(1, 1, 1, 1, 6, 5)], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_inputs_are_never_modified(row, path, shape):
    """The call, its backward and writes to the result leave them unchanged: output and state own their memory."""
    for normalize_qk in (False, True):
        inputs = convert(draw(row, shape, seed=5), torch.float32)
        kept = {name: x.clone() for name, x in inputs.items()}
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        output, state = row.op(**leaves, **path, chunk_size=16, normalize_qk=normalize_qk)
        versions = {name: x._version for name, x in inputs.items()}
        gradient_of_output, gradient_of_state = torch.ones_like(output), torch.ones_like(state)
        grads = torch.autograd.grad((output, state), list(leaves.values()), (gradient_of_output, gradient_of_state))
        assert gradient_of_output.eq(1).all()
        assert gradient_of_state.eq(1).all()
        for x in (output, state, *grads):
            x.detach().fill_(7e7)
        for name, x in inputs.items():
            assert torch.equal(x, kept[name]), name
            assert x._version == versions[name] == 0, name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_states_of_empty_texts_are_copies(row, path):
    inputs = convert(draw(row, PACKED, texts=len(TEXTS)), torch.float32)
    kept = inputs["state"].clone()
    state = row.op(**inputs, **path, cu_seqlens=bounds()).state
    state.fill_(7e7)
    assert torch.equal(inputs["state"], kept)
