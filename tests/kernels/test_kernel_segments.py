"""Long sequences are cut into segments that run in parallel, and their backward into slices that run in turn."""

import half
import pytest
import torch
import torch.nn.functional as F
from cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Inputs,
    Result,
    _condition,
    assert_same_bits,
    assert_within,
    convert,
    draw,
    errors,
    relative_error,
)
from few import few
from paths import GPU_ONLY, ONE_EACH, PATHS
from raw_gates import check_fused, raw_inputs
from rule_kernels import CHUNK, LEAN, MODEL, check, differentiate, loss_of, native_term, on_gpu, row_results, run, sized
from torch import Tensor

import lineate


@pytest.fixture
def cuts(monkeypatch):
    """Return a function that sets how many segments a walk has, and how many bytes of states a slice may have."""
    chunkwise = pytest.importorskip("lineate.kernels.pipeline")

    def set_cuts(segments: object = None, slice_bytes: int | None = None) -> None:
        if segments is not None:
            monkeypatch.setattr(chunkwise, "count_segments", lambda chunks, *_: segments(chunks))
        if slice_bytes is not None:
            monkeypatch.setattr(chunkwise, "SLICE_BYTES", slice_bytes)

    return set_cuts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", few(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_segments(row, path, cuts):
    """Two segments of two chunks, and one of none, give the same results within the same budget."""
    cuts(segments=lambda chunks: min(3, chunks))
    shape = sized(path, LEAN, MODEL)._replace(t=3 * CHUNK + 5)
    check(row, convert(draw(row, shape, "reset -50" if row.decay != "none" else "ordinary"), path.dtype), path)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(
    "row", few([LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (LINEAR, GATED_DELTA)), ids=str
)
def test_slices_of_the_backward_change_no_bit(row, path, cuts):
    for b in (1, 2):
        inputs = convert(draw(row, sized(path, LEAN)._replace(b=b, t=130 if b == 1 else 20)), path.dtype)
        expected = run(row, inputs, path)
        cuts(slice_bytes=1)
        assert_same_bits(run(row, inputs, path), expected, b)
        cuts(slice_bytes=2**28)


@pytest.mark.parametrize("path", ONE_EACH)
def test_slices_of_the_fused_backward(path, cuts):
    """dA_log and ddt_bias are sums over the slices, in another order; everything else keeps its bits."""
    inputs = raw_inputs(KIMI_DELTA, path, "bias", sized(path, LEAN)._replace(t=130))
    expected = differentiate(lineate.fused_delta_rule, inputs, path)
    cuts(slice_bytes=1)
    got = check_fused(KIMI_DELTA, inputs, path)
    for result in (got, expected):
        del result.grads["A_log"], result.grads["dt_bias"]
    assert_same_bits(got, expected)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", few([GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_batch_company_never_changes_where_a_row_is_cut(row, path, cuts):
    """A row alone is sliced by tokens, rows together are sliced by rows, and the bits are the same."""
    shape = sized(path, LEAN)._replace(b=2, t=4 * CHUNK - 3)
    inputs = convert(draw(row, shape), path.dtype)
    size = 4 if path.dtype == torch.float32 else 2
    cuts(segments=lambda chunks: max(1, chunks // 2), slice_bytes=2 * shape.hv * shape.k * shape.v * size)
    together = row_results(row, inputs, path, [0, 1])
    assert_same_bits(row_results(row, inputs, path, [1])[0], together[1])


@pytest.mark.parametrize("path", GPU_ONLY[:2])
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_long_texts(row, path):
    """100003 tokens agree with the chunkwise form in float64 on the GPU, within 2 x the error of torch in the same
    dtype."""
    inputs = on_gpu(convert(draw(row, MODEL._replace(t=100_003)), path.dtype))

    def in_torch(dtype: torch.dtype) -> Result:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="torch")
        grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
        return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))

    expected = in_torch(torch.float64)
    if path.dtype == torch.float32:
        kappa = _condition({n: x[:, -1000:].cpu() for n, x in inputs.items() if n != "state"}, CHUNK)
        extra = native_term(path, 100_003 if row.decay == "none" else 10 * CHUNK, kappa)  # decayed tokens are forgotten
        allowed = {n: 2 * x + extra for n, x in errors(in_torch(torch.float32), expected).items()}
    else:
        allowed = half.budget(inputs, expected)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, state = row.op(**leaves, form="chunkwise", backend="triton")
    grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
    got = Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))
    assert_within(errors(got, expected), allowed)
    # The end is as exact as the whole, so errors do not accumulate.
    late = slice(-1000, None)

    def tail(result: Result) -> Result:
        grads = {n: x if n == "state" else x[:, late] for n, x in result.grads.items()}
        return Result(result.output[:, late], result.state, grads)

    assert_within(errors(tail(got), tail(expected)), {n: 2 * x for n, x in allowed.items()}, "the last 1000 tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_more_than_two_to_the_31_elements(row):
    """Heads are independent, so the last ones, with the largest addresses, must equal a run on them alone."""
    t, h, hv, k, v = 300_000, 16, 64, 128, 128
    assert t * hv * v > 2**31
    torch.cuda.empty_cache()  # frees what another test left
    if torch.cuda.mem_get_info()[0] < 110 * 2**30:
        pytest.skip("needs 110 GiB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

    gate = normal(1, t, hv, k) if row is KIMI_DELTA else normal(1, t, hv)
    inputs = {
        "q": F.normalize(normal(1, t, h, k), dim=-1), "k": F.normalize(normal(1, t, h, k), dim=-1),
        "v": normal(1, t, hv, v), "log_decay": gate.sub_(2).exp_().neg_(), "beta": normal(1, t, hv).sigmoid_(),
    }  # fmt: skip
    doutput = normal(1, t, hv, v)

    def results(inputs: Inputs, doutput: Tensor) -> dict[str, Tensor]:
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="triton")
        grads = torch.autograd.grad(output, list(leaves.values()), doutput)
        return {"output": output.detach(), "state": state.detach(), **dict(zip(leaves, grads, strict=True))}

    def last(name: str, x: Tensor) -> Tensor:
        """Return the part of the last key head and its value heads."""
        return x[:, -hv // h :] if name == "state" else x[:, :, -1:] if name in ("q", "k") else x[:, :, -hv // h :]

    own = {name: last(name, x.detach()).contiguous() for name, x in inputs.items()}
    whole = {name: last(name, x).contiguous() for name, x in results(inputs, doutput).items()}
    alone = results(own, doutput[:, :, -hv // h :].contiguous())
    for name, x in whole.items():
        for part in (slice(None, 1000), slice(-1000, None)) if name != "state" else (slice(None),):
            assert relative_error(x[:, part], alone[name][:, part]) <= 2**-9, name
    assert all(x.isfinite().all() for x in whole.values())
