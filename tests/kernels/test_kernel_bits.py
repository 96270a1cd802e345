"""Bits of the kernels: the same twice, in any batch and next to NaN; a call split anywhere equals the whole."""

import pytest
import torch

from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    ROWS,
    Result,
    assert_same_bits,
    assert_within,
    convert,
    draw,
    errors,
    oracle,
)
from tests.support.marks import slow_but
from tests.support.paths import GPU_ONLY, ONE_EACH, PATHS
from tests.support.rule_kernels import LEAN, MODEL, SHORT, allowance, loss_of, row_results, run, sized


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_two_runs_give_the_same_bits(row, path):
    inputs = convert(draw(row, sized(path, LEAN, MODEL._replace(t=1000))), path.dtype)
    first = run(row, inputs, path)
    junk = [torch.full((n,), torch.nan, device=path.device) for n in (100, 10_000, 1_000_000)]
    assert_same_bits(run(row, inputs, path), first)
    del junk
    if path.device == "cuda":
        for _ in range(3):
            assert_same_bits(run(row, inputs, path), first)


@pytest.mark.parametrize("path", GPU_ONLY)
@pytest.mark.parametrize("k, v", [(8, 6), (32, 32), (24, 40)])
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, KIMI_DELTA], ids=str)
def test_narrow_heads_never_read_memory_around_them(row, k, v, path):
    """Gradients of heads below 64 channels keep their bits whatever the rest of the device's memory holds."""
    inputs = convert(draw(row, MODEL._replace(b=2, t=100, k=k, v=v)), path.dtype)
    first = run(row, inputs, path)
    for value in 4 * (torch.nan, 3e4, 0.0):
        torch.cuda.empty_cache()
        junk = [torch.full((n,), value, device=path.device) for n in 20 * (2**9, 2**12, 2**15)]
        del junk
        assert_same_bits(run(row, inputs, path), first)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR, KIMI_DELTA)), ids=str)
def test_batch_company_never_changes_a_row(row, path):
    """A row has the same bits alone, among others and in another order, forward and backward; NaN stays in its row."""
    shape = sized(path, SHORT._replace(b=3, hv=1), MODEL._replace(b=9))
    inputs = convert(draw(row, shape), path.dtype)
    together = row_results(row, inputs, path, list(range(shape.b)))
    orders = ([1], [2, 0]) if path.device == "cpu" else ([0], [8], [3, 4], [7, 0, 5], list(range(8, -1, -1)))
    for order in orders:
        for i, got in zip(order, row_results(row, inputs, path, order), strict=True):
            assert_same_bits(got, together[i], f"row {i} in {order}")
    for x in inputs.values():
        x[1] = torch.nan
    got = row_results(row, inputs, path, list(range(shape.b)))
    assert got[1].output.isnan().all()
    for i in {0, shape.b - 1}:
        assert_same_bits(got[i], together[i], i)


@pytest.mark.parametrize("path", GPU_ONLY[:2])
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_batch_company_never_changes_a_long_row(row, path):
    """The same holds for a batch so large, or a row so long, that the work may be divided differently."""
    inputs = convert(draw(row, MODEL._replace(b=2, t=4100)), path.dtype)
    many = {name: x.repeat_interleave(20, 0) for name, x in inputs.items()}  # 160 walks: more than multiprocessors
    together = row_results(row, many, path, list(range(40)))
    for i in range(2):
        assert_same_bits(row_results(row, inputs, path, [i])[0], together[20 * i], i)
        assert_same_bits(together[20 * i + 19], together[20 * i], i)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_heads_do_not_see_each_other(row, path):
    """If one key head and its value heads are full of NaN, the other heads keep their bits."""
    inputs = convert(draw(row, sized(path, SHORT._replace(h=2, hv=4))), path.dtype)
    expected = run(row, inputs, path)
    for name, x in inputs.items():
        part = x[:, :, :1] if name in ("q", "k") else x[:, :2] if name == "state" else x[:, :, :2]
        part.fill_(torch.nan)
    got = run(row, inputs, path)

    def pick(result: Result) -> Result:
        grads = {
            name: x[:, 2:] if name == "state" else x[:, :, 1:] if name in ("q", "k") else x[:, :, 2:]
            for name, x in result.grads.items()
        }
        return Result(result.output[:, :, 2:], result.state[:, 2:], grads)

    assert_same_bits(pick(got), pick(expected))


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_nan_is_never_swallowed(row, path):
    """One NaN in any input shows in the output at most one token later: a NaN gate does not count as a reset."""
    shape = sized(path, SHORT._replace(b=2, hv=1), MODEL._replace(b=2))
    for name in draw(row, shape):
        inputs = convert(draw(row, shape), path.dtype)
        (inputs[name][0] if name == "state" else inputs[name][0, 10]).flatten()[0] = torch.nan
        call = {n: x.to(path.device) for n, x in inputs.items()}
        output = row.op(**call, form="chunkwise", backend="triton").output.cpu()
        seen = output[0, 0] if name == "state" else output[0, 10:12]
        assert seen.isnan().any(), name
        assert output[1].isfinite().all(), name


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_autocast_changes_no_bit(path):
    inputs = convert(draw(GATED_DELTA, sized(path, SHORT)), path.dtype)
    with torch.autocast(path.device, torch.bfloat16 if path.device == "cpu" else torch.float16):
        got = run(GATED_DELTA, inputs, path)
    assert_same_bits(got, run(GATED_DELTA, inputs, path))


# Split anywhere equals whole


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_split_anywhere_equals_whole(row, path):
    """Outputs, the final state and all gradients agree when the state is carried over."""
    shape = sized(path, LEAN)
    inputs = convert(draw(row, shape), path.dtype)
    expected = oracle(row, inputs)
    allowed = allowance(row, inputs, expected, path)
    for split in (7, 64) if path.device == "cpu" else (1, 7, 63, 64, 65, 100, 128, shape.t - 1):
        leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
        state, outputs = leaves["state"], []
        for part in (slice(None, split), slice(split, None)):
            tokens = {name: x[:, part] for name, x in leaves.items() if name != "state"}
            output, state = row.op(**tokens, state=state, form="chunkwise", backend="triton")
            outputs.append(output)
        output = torch.cat(outputs, dim=1)
        grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
        grads = {name: x.cpu() for name, x in zip(leaves, grads, strict=True)}
        found = errors(Result(output.detach().cpu(), state.detach().cpu(), grads), expected)
        assert_within(found, allowed, split)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_nan_in_log_decay_is_not_swallowed(row, path):
    inputs = convert(draw(row, sized(path)), path.dtype)
    inputs["log_decay"][:, 10, -1] = torch.nan
    assert run(row, inputs, path, only=()).output[:, 11:, -1].isnan().any()
