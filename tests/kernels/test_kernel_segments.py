"""Long sequences are cut into segments that run in parallel, and their backward into slices that run in turn."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from tests.support import half
from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Inputs,
    Result,
    Row,
    _condition,
    assert_same_bits,
    assert_within,
    bounds,
    convert,
    draw,
    errors,
    relative_error,
    same_bits,
)
from tests.support.marks import slow_but
from tests.support.paths import BF16, GPU_ONLY, ONE_EACH, PATHS, Path
from tests.support.raw_gates import check_fused, raw_inputs
from tests.support.rule_kernels import (
    CHUNK,
    LEAN,
    MODEL,
    check,
    differentiate,
    loss_of,
    native_term,
    on_gpu,
    packed_inputs,
    row_results,
    run,
    sized,
)


@pytest.fixture
def cuts(monkeypatch):
    """Return a function that sets how walks are cut, and how many bytes of states a slice may have."""
    chunkwise = pytest.importorskip("lineate.kernels.pipeline")
    tape = importlib.import_module("lineate.kernels.tape")
    Cutting = importlib.import_module("lineate.kernels.segments").Cutting

    def set_cuts(cutting: tuple[int, int, int] | None = None, slice_bytes: int | None = None) -> None:
        tape.forget_tapes()
        if cutting is not None:
            for way in ("forward", "backward"):
                monkeypatch.setitem(chunkwise.CUTS, way, lambda *_: Cutting(*cutting))
        if slice_bytes is not None:
            monkeypatch.setattr(chunkwise, "SLICE_BYTES", slice_bytes)

    yield set_cuts
    tape.forget_tapes()


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_segments(row, path, cuts):
    """Two segments of one chunk, and one of two, give the same results within the same budget."""
    cuts((3, 3, 1))
    shape = sized(path, LEAN, MODEL)._replace(t=3 * CHUNK + 5)
    check(row, convert(draw(row, shape, "reset -50" if row.decay != "none" else "ordinary"), path.dtype), path)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (KIMI_DELTA, GATED_DELTA)), ids=str)
def test_segments_of_packed_sequences(row, path, cuts):
    """Sequences without tokens, too short to be cut, of two segments and of three, in one row."""
    cuts((2, 3, 1) if path.device == "cpu" else (2, 4, 1))
    texts = (0, 70, 30, 129, 0) if path.device == "cpu" else (0, 70, 30, 129, 0, 1, 3 * CHUNK, 9 * CHUNK + 5, 0)
    inputs = packed_inputs(row, path, texts, LEAN)
    got = check(row, inputs, path, cu_seqlens=bounds(texts))
    assert same_bits(got.state[:1], inputs["state"][:1])


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize(
    "row", slow_but([LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (LINEAR, GATED_DELTA)), ids=str
)
def test_slices_of_the_backward_change_no_bit(row, path, cuts):
    for b in (1, 2):
        inputs = convert(draw(row, sized(path, LEAN)._replace(b=b, t=130 if b == 1 else 20)), path.dtype)
        expected = run(row, inputs, path)
        cuts(slice_bytes=1)
        assert_same_bits(run(row, inputs, path), expected, b)
        cuts(slice_bytes=2**28)


@pytest.mark.cover
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


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_batch_company_never_changes_where_a_row_is_cut(row, path, cuts):
    """A row alone is sliced by tokens, rows together are sliced by rows, and the bits are the same."""
    shape = sized(path, LEAN)._replace(b=2, t=4 * CHUNK - 3)
    inputs = convert(draw(row, shape), path.dtype)
    size = 4 if path.dtype == torch.float32 else 2
    cuts((4, 2, 2), slice_bytes=2 * shape.hv * shape.k * shape.v * size)
    together = row_results(row, inputs, path, [0, 1])
    assert_same_bits(row_results(row, inputs, path, [1])[0], together[1])


def each_sequence(row: Row, parts: list[Inputs], path: Path, packed: bool) -> list[Result]:
    """Run these sequences in one call, packed or as rows, and separate the results; the loss is the sum of all."""
    lengths = [x["q"].shape[1] for x in parts]
    joined = {n: torch.cat([x[n] for x in parts], 1 if packed and n != "state" else 0) for n in parts[0]}
    leaves = {n: x.to(path.device).requires_grad_() for n, x in joined.items()}
    options = {"cu_seqlens": bounds(tuple(lengths)).to(path.device)} if packed else {}
    output, state = row.op(**leaves, **options, form="chunkwise", backend="triton")
    grads = torch.autograd.grad(output.double().sum() + state.double().sum(), list(leaves.values()))

    def take(x: Tensor, which: int, name: str = "") -> Tensor:
        if name == "state" or not packed:
            return x[which : which + 1].detach().cpu()
        return x[:, sum(lengths[:which]) : sum(lengths[: which + 1])].detach().cpu()

    return [
        Result(take(output, i), take(state, i, "state"), {n: take(x, i, n) for n, x in zip(leaves, grads, strict=True)})
        for i in range(len(parts))
    ]


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_a_cut_sequence_has_the_same_bits_alone_in_a_batch_and_packed(row, path, cuts):
    cuts((3, 4, 1))
    shape = sized(path, LEAN)
    lengths = (70, 3 * CHUNK + 5, 1, 2 * CHUNK + 1) if path.device == "cpu" else (70, 3 * CHUNK + 5, 1, 9 * CHUNK, 300)
    parts = [convert(draw(row, shape._replace(b=1, t=t, h=shape.h)), path.dtype) for t in lengths]
    packed = each_sequence(row, parts, path, packed=True)
    rows = each_sequence(row, [parts[1], parts[1]], path, packed=False)
    for which in (1, 3):
        alone = each_sequence(row, [parts[which]], path, packed=False)[0]
        assert_same_bits(packed[which], alone, which)
    assert_same_bits(rows[1], packed[1])
    assert_same_bits(each_sequence(row, [parts[1], parts[0]], path, packed=True)[0], packed[1])


RULES = [(2, 3, 1), (4, 2, 2), (3, 3, 1), (64, 16, 8), (1000, 9, 2)]


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", [(64 * 64, 0, 63, 64 * 256 - 1), (1,) * 300 + (700, 3), (5000,)], ids=len)
def test_the_device_cuts_by_the_same_rule_as_the_host(lengths, rule, path):
    kernels, segments = (importlib.import_module(f"lineate.kernels.{name}") for name in ("call", "segments"))
    cutting = segments.Cutting(*rule)
    drawn = torch.zeros(1, sum(lengths), 1, 1, device=path.device)
    found = kernels.find_sequences(drawn, bounds(lengths).to(path.device), cutting)
    cuts = [cutting.count_segments(-(-t // CHUNK)) - 1 for t in lengths]
    assert sum(cuts) <= found.cuts
    if found.cuts:
        ends = torch.tensor([0, *cuts]).cumsum(0)
        assert found.first_cuts.tolist() == ends.tolist()
        owners = [which for which, count in enumerate(cuts) for _ in range(count)]
        assert found.cut_sequences.tolist() == owners + [-1] * (found.cuts - len(owners))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("wrong", [(0, 400, 100, 250), (100, 500), (0, 0, 0), (-5, 300)], ids=str)
def test_wrong_bounds_make_no_cut_outside_of_the_tokens(wrong, path):
    kernels, segments = (importlib.import_module(f"lineate.kernels.{name}") for name in ("call", "segments"))
    cutting = segments.Cutting(2, 3, 1)
    drawn = torch.zeros(1, 300, 1, 1, device=path.device)
    found = kernels.find_sequences(drawn, torch.tensor(wrong, device=path.device), cutting)
    lengths = found.bounds.diff().tolist()
    cuts = [cutting.count_segments(-(-t // CHUNK)) - 1 for t in lengths]
    assert found.first_cuts.diff().tolist() == cuts and sum(cuts) <= found.cuts


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("rule", [(4, 6, 1), (2, 3, 1), (2, 9, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 32, torch.float32), (64, 128, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("chunks", [(10, 2, 4, 0, 5, 1), (2,) * 5, (1, 12), (1, 1)], ids=str)
def test_the_chain_finds_the_cuts_of_every_packed_sequence(chunks, sizes, rule, path):
    """Sequences with the most and the least cuts, and uncut ones between them; bfloat16 is for the chain in Gluon."""
    architectures, call, segments = (
        importlib.import_module(f"lineate.kernels.{name}") for name in ("architectures", "call", "segments")
    )
    cutting, hv, (K, V, dtype) = segments.Cutting(*rule), 2, sizes
    lengths = [max(0, CHUNK * n - 3) for n in chunks]
    q, v = (torch.zeros(1, sum(lengths), hv, n, dtype=dtype, device=path.device) for n in (K, V))
    beta = torch.zeros(1, sum(lengths), hv, device=path.device)
    inputs = lineate.call.Inputs(q, q, v, beta=beta, cu_seqlens=bounds(lengths).to(path.device))
    made = call.make_call(inputs, lineate.call.Options(lineate.rule.DELTA, 1.0, False), cutting)
    cuts = [cutting.count_segments(n) - 1 for n in chunks]
    if not made.sequences.cuts:
        assert not any(cuts)
        return
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(made.sequences.cuts, hv, K, V + K, generator=generator).to(path.device) / K**0.5
    found = architectures.stages_for(made).chain_segments(maps)
    cut = 0
    for count in cuts:
        S = torch.zeros(hv, K, V, dtype=torch.float64, device=path.device)
        for n in range(count):
            B, A = maps[cut].double().split([V, K], -1)
            S = B if n == 0 else A @ S + B
            assert (found[cut] - S).abs().max() < 1e-5 * S.abs().max()
            cut += 1


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_company_never_changes_the_bits_of_a_long_sequence(row):
    """8 value heads are cut from 4096 tokens on; the second and third call of a form record and replay its launches."""
    shape = MODEL._replace(b=1, h=4, hv=8)
    parts = [convert(draw(row, shape._replace(t=t)), torch.bfloat16) for t in (8000, 100, 4100, 1)]
    packed = [each_sequence(row, parts, BF16, packed=True) for _ in range(3)]
    for which in (0, 2):
        alone = [each_sequence(row, [parts[which]], BF16, packed=False)[0] for _ in range(3)]
        for each in (*packed[1:], packed[0]):
            assert_same_bits(each[which], alone[0], which)
        assert_same_bits(alone[2], alone[0], which)
    together = each_sequence(row, [parts[2]] * 3, BF16, packed=False)
    assert_same_bits(together[1], packed[0][2])


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
