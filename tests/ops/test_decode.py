"""decode: the token equation in place, in plain torch, in Triton's interpreter on a CPU, and natively on a GPU.

The oracle is the recurrent form in float64, run row by row where slots or packed sequences are involved.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, zeros

from lineate.ops.decoding import decode
from tests.support.cases import (
    DELTA,
    GATED_DELTA,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    SPECIAL_ROWS,
    Inputs,
    Result,
    Shape,
    assert_same_bits,
    assert_within,
    bounds,
    convert,
    draw,
    errors,
    interpreted,
    oracle,
    same_bits,
)
from tests.support.decode_cases import KERNEL, PATHS, SHAPE, SMALL, Path, check, check_op, inputs_of, run
from tests.support.torch_calls import compilations


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("t", [1, 2, 5])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_rule(row, t, path):
    check(row, inputs_of(row, SHAPE._replace(t=t)), path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_special_inputs(row, special, path):
    """The cases are resets of -50 and -inf, zero decay, beta 0, 1 and 1.99, and an empty memory."""
    check(row, inputs_of(row, SMALL, special), path, special)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [LINEAR, GATED_DELTA, KIMI_DELTA], ids=str)
def test_sizes(row, path):
    """k and v are 1, more than one block of columns, no powers of two, or whole tiles.

    7 value heads share a key head.
    """
    for k, v in ((1, 1), (33, 66), (64, 32), (8, 100), (3, 256), (256, 3)):
        check(row, inputs_of(row, Shape(1, 2, 1, 1, k, v)), path, (k, v), worst_case=k * v == 1)
    check(row, inputs_of(row, Shape(1, 2, 1, 7, 4, 3)), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [DELTA, KIMI_DELTA], ids=str)
def test_scale_and_normalization(row, path):
    inputs = inputs_of(row, SHAPE._replace(t=2))
    inputs["q"], inputs["k"] = 3 * inputs["q"], 0.2 * inputs["k"]
    check(row, inputs, path, normalize_qk=True)
    check(row, inputs, path, normalize_qk=True, scale=0.7)
    check(row, inputs, path, scale=-2.0)


@pytest.mark.parametrize("path", PATHS)
def test_beta_per_value_channel(path):
    inputs = inputs_of(KIMI_DELTA, SHAPE._replace(t=2))
    wide = {**inputs, "beta": torch.rand(2, 2, 4, 5, generator=torch.Generator().manual_seed(0))}
    expected = oracle(KIMI_DELTA, wide, only=())
    assert_within(errors(run(wide, path), expected), 2e-6)
    equal = {**inputs, "beta": inputs["beta"].unsqueeze(-1).expand(2, 2, 4, 5)}
    assert_same_bits(run(equal, path), run(inputs, path))


@pytest.mark.parametrize("path", KERNEL)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_same_bits_however_split(row, path):
    """Tokens one by one, and rows one by one, give the same bits as all at once."""
    shape = SHAPE._replace(t=3)
    inputs = inputs_of(row, shape)
    whole = run(inputs, path)
    state, outputs = inputs["state"], []
    for i in range(shape.t):
        token = {name: x[:, i : i + 1] for name, x in inputs.items() if name != "state"}
        output, state, _ = run({**token, "state": state}, path)
        outputs.append(output)
    assert_same_bits(Result(torch.cat(outputs, 1), state, {}), whole)
    rows = [run({name: x[i : i + 1] for name, x in inputs.items()}, path) for i in range(shape.b)]
    assert_same_bits(Result(torch.cat([x.output for x in rows]), torch.cat([x.state for x in rows]), {}), whole)


def alone(inputs: Inputs, path: Path, row: int, tokens: slice, state: Tensor) -> Result:
    """Run one row's tokens from one state `hv k v`."""
    own = {name: x[row : row + 1, tokens] for name, x in inputs.items() if name != "state"}
    return run({**own, "state": state[None]}, path)


def assert_untouched(pool: Tensor, before: Tensor, written: list[int]) -> None:
    kept = [i for i in range(len(before)) if i not in written]
    assert torch.equal(pool[kept].view(torch.int32), before[kept].view(torch.int32))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_slots(path, integer):
    """Rows are in any order in a pool, two of them idle; nothing else in it changes, not even NaN."""
    shape = SHAPE._replace(b=4, t=2)
    inputs = inputs_of(GATED_DELTA, shape, texts=7)
    inputs["state"][[0, 4]] = torch.nan
    slots = torch.tensor([5, -1, 2, -7], dtype=integer)
    got = run(inputs, path, slots=slots)
    assert_untouched(got.state, inputs["state"], [5, 2])
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(got.output[row], zeros(2, 4, 5))
            continue
        own = alone(inputs, path, row, slice(None), inputs["state"][slot])
        assert_same_bits(Result(got.output[row : row + 1], got.state[slot : slot + 1], {}), own)


@pytest.mark.parametrize("path", PATHS)
def test_rows_may_start_from_a_shared_slot(path):
    inputs = inputs_of(KIMI_DELTA, SHAPE._replace(b=4, t=2), texts=6)
    got = run(inputs, path, start_slots=torch.tensor([3, 3, -1, 1]), slots=torch.tensor([0, 4, 0, -1]))
    assert_untouched(got.state, inputs["state"], [0, 4])
    for row, (start, end) in enumerate([(3, 0), (3, 4), (-1, -1), (1, -1)]):
        if start < 0:
            assert torch.equal(got.output[row], zeros(2, 4, 5))
            continue
        own = alone(inputs, path, row, slice(None), inputs["state"][start])
        assert same_bits(got.output[row : row + 1], own.output)
        if end >= 0:
            assert same_bits(got.state[end], own.state[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_a_slot_for_each_token(row, path):
    """The memory after each token is stored where asked, so that a rejected draft token can be undone."""
    inputs = inputs_of(row, SHAPE._replace(b=3, t=3), texts=9)
    slots = torch.tensor([[8, 0, 5], [3, -1, 1], [2, 4, 6]])
    starts = [5, 7, -1]  # the first row starts where it ends; the last one is idle
    got = run(inputs, path, slots=slots, start_slots=torch.tensor(starts))
    assert_untouched(got.state, inputs["state"], [8, 0, 5, 3, 1])
    assert torch.equal(got.output[2], zeros(3, 4, 5))
    for i in range(2):
        for t in range(3):
            own = alone(inputs, path, i, slice(0, t + 1), inputs["state"][starts[i]])
            assert same_bits(got.output[i, : t + 1], own.output[0])
            if slots[i, t] >= 0:
                assert same_bits(got.state[slots[i, t]], own.state[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [LINEAR, KIMI_DELTA], ids=str)
def test_packed_texts(row, path):
    lengths = (0, 1, 3, 0, 2)
    inputs = inputs_of(row, Shape(1, 6, 2, 4, 6, 5), texts=5)
    got = check(row, inputs, path, cu_seqlens=bounds(lengths))
    assert same_bits(got.state[[0, 3]], inputs["state"][[0, 3]])
    assert_same_bits(run(inputs, path, cu_seqlens=bounds(lengths).int()), got)


@pytest.mark.parametrize("path", PATHS)
def test_packed_texts_with_slots(path):
    lengths = (2, 0, 1, 3)
    inputs = inputs_of(GATED_DELTA, Shape(1, 6, 2, 4, 6, 5), texts=12)
    ends = bounds(lengths)
    starts = [4, 6, -1, 9]

    one = run(inputs, path, cu_seqlens=ends, slots=torch.tensor([4, 0, 2, 3]), start_slots=torch.tensor(starts))
    assert_untouched(one.state, inputs["state"], [4, 0, 3])
    assert same_bits(one.state[0], inputs["state"][6])  # a sequence without tokens moves its memory
    each = torch.tensor([[1, 2, -1], [3, 5, 7], [0, 11, -1], [9, -1, 10]])
    many = run(inputs, path, cu_seqlens=ends, slots=each, start_slots=torch.tensor(starts))
    assert_untouched(many.state, inputs["state"], [1, 2, 9, 10])
    assert same_bits(one.output, many.output)
    assert same_bits(one.state[4], many.state[2]) and same_bits(one.state[3], many.state[10])
    assert torch.equal(one.output[0, 2], zeros(4, 5))
    for text, (first, end) in enumerate(pairwise(ends.tolist())):
        if end > first and starts[text] >= 0:
            own = alone(inputs, path, 0, slice(first, end), inputs["state"][starts[text]])
            assert same_bits(one.output[:, first:end], own.output)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_views_are_read_and_written_where_they_lie(row, path):
    """q, k, v are views of one projection, gates of another, the state is one layer's among others, v is transposed."""
    device, backend = path
    b, t, h, hv, k, v = shape = SHAPE._replace(t=2)
    inputs = inputs_of(row, shape)
    plain = run(inputs, path)
    q, key, value = (inputs[name].flatten(2) for name in "qkv")
    projection = torch.cat((q, key, value), dim=2).to(device)
    q, key, value = projection.split((h * k, h * k, hv * v), dim=2)
    gates = [name for name in ("log_decay", "beta") if name in inputs]
    call = {name: inputs[name].to(device).transpose(0, 1).contiguous().transpose(0, 1) for name in gates}
    layers = torch.full((b, 3, hv, k, v), torch.nan, device=device)
    layers[:, 1] = inputs["state"].to(device)
    for values in (value.unflatten(2, (hv, v)), inputs["v"].to(device).mT.contiguous().mT):
        before = layers.clone()
        output = decode(
            q.unflatten(2, (h, k)), key.unflatten(2, (h, k)), values, **call, state=layers[:, 1], backend=backend
        )
        assert_same_bits(Result(output.cpu(), layers[:, 1].cpu(), {}), plain)
        assert torch.equal(layers[:, ::2].isnan(), before[:, ::2].isnan())
        layers[:, 1] = inputs["state"].to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_half_precision_inputs_in_torch(row, dtype):
    check(row, convert(draw(row, SHAPE), dtype), ("cpu", "torch"))


def test_float64_runs_in_torch():
    inputs = draw(KIMI_DELTA, SHAPE)
    got = run(inputs, ("cpu", "auto"))
    assert got.state.dtype == torch.float64
    assert_within(errors(got, oracle(KIMI_DELTA, inputs, only=())), 1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_the_state_counts_as_modified(path):
    """Autograd must notice that a tensor it saved was written to; tensors of inference mode do not count."""
    inputs = {name: x.to(path[0]) for name, x in inputs_of(GATED_DELTA, SMALL._replace(t=1)).items()}
    version = inputs["state"]._version
    output = decode(**inputs, backend=path[1])
    assert inputs["state"]._version > version
    with torch.inference_mode():
        again = {name: x.to(path[0]) for name, x in inputs_of(GATED_DELTA, SMALL._replace(t=1)).items()}
        assert same_bits(decode(**again, backend=path[1]), output)


def test_parameters_are_fine_without_grad():
    inputs = inputs_of(GATED_DELTA, SHAPE._replace(t=1))
    A_log = torch.nn.Parameter(zeros(4))
    with torch.no_grad():
        decode(**inputs, raw_gates=True, A_log=A_log, dt_bias=A_log)
    with pytest.raises(ValueError, match=r"^A_log must not require grad: decode writes into state"):
        decode(**inputs, raw_gates=True, A_log=A_log)


@pytest.mark.parametrize("path", KERNEL)
def test_the_kernel_touches_nothing_outside_the_pool(path):
    """Values are not checked on a GPU: a slot that does not exist gives NaN, and is not written."""
    from lineate import call, rule
    from lineate.kernels import pipeline

    inputs = {name: x.to(path[0]) for name, x in inputs_of(GATED_DELTA, SHAPE._replace(b=3, t=1), texts=4).items()}
    before = inputs["state"].clone()
    slots = torch.tensor([4, 1, 2], device=path[0])
    given = call.Inputs(**inputs)
    output = pipeline.decode(given, call.Slots(slots), call.Options(rule.GATED_DELTA, scale=1.0))
    assert output[0].isnan().all() and not output[1:].isnan().any()
    assert_untouched(inputs["state"].cpu(), before.cpu(), [1, 2])


# compiling


def call_compiled(inputs: Inputs, path: Path, backend: str, **options: object) -> None:
    """Check state and output to the last bit, twice, because the second call runs what the first one compiled."""
    device, which = path

    def layer(state, **rest):
        output = decode(**rest, **options, state=state, backend=which)
        return output * 2, state.sum()  # code that reads the state afterwards must see the new one

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    ours, theirs = inputs["state"].clone(), inputs["state"].clone()
    rest = {name: x for name, x in inputs.items() if name != "state"}
    for _ in range(2):
        expected, got = layer(ours, **rest), compiled(theirs, **rest)
        assert same_bits(got[0], expected[0]) and same_bits(theirs, ours)
        assert torch.allclose(got[1], expected[1])


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [LINEAR, KIMI_DELTA], ids=str)
def test_compiled_equals_eager(row, path):
    call_compiled(inputs_of(row, SMALL._replace(t=2)), path, "aot_eager")


@pytest.mark.cover
def test_compiled_with_everything():
    inputs = inputs_of(KIMI_DELTA, Shape(1, 3, 1, 2, 3, 2), texts=5)
    call_compiled(
        inputs, ("cpu", "auto"), "aot_eager", cu_seqlens=bounds((1, 2)), slots=torch.tensor([[3, -1], [0, 2]]),
        start_slots=torch.tensor([1, 0]), raw_gates=True, A_log=zeros(2), dt_bias=zeros(2, 3), beta_scale=2.0,
    )  # fmt: skip
    for raw in ({"raw_gates": "log_decay", "lower_bound": -5.0}, {"raw_gates": "beta", "beta_scale": 2.0}):
        call_compiled(inputs_of(KIMI_DELTA, SMALL._replace(t=2)), ("cpu", "auto"), "aot_eager", **raw)


@pytest.mark.cover
def test_what_torch_demands_of_custom_ops():
    inputs = inputs_of(GATED_DELTA, SHAPE._replace(t=2), texts=4)
    check_op(inputs, slots=torch.tensor([2, 0]))


# wrong calls

RIGHT = inputs_of(GATED_DELTA, Shape(2, 3, 2, 4, 3, 5))
POOL = zeros(6, 4, 3, 5)
PAIR = torch.tensor([1, 0])
META = torch.device("meta")
WRONG: list[tuple[str, dict[str, object], type[Exception], str]] = [
    ("no state", {"state": None}, TypeError,
     "state must be a torch.Tensor, got NoneType; start from torch.zeros"),
    ("state of another batch", {"state": zeros(3, 4, 3, 5)}, ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (3, 4, 3, 5)"),
    ("state transposed", {"state": zeros(2, 4, 5, 3)}, ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (2, 4, 5, 3)"),
    ("pool transposed", {"state": zeros(6, 4, 5, 3), "slots": PAIR}, ValueError,
     "state must have shape (n_slots, hv, k, v) = (n_slots, 4, 3, 5) with slots, got (6, 4, 5, 3)"),
    ("pool of three dimensions", {"state": zeros(4, 3, 5), "slots": PAIR}, ValueError,
     "state must have shape (n_slots, hv, k, v) = (n_slots, 4, 3, 5) with slots, got (4, 3, 5)"),
    ("state in float16", {"state": zeros(2, 4, 3, 5).half()}, ValueError,
     "state must be float32 or bfloat16 for float32 inputs, got float16; convert it with .to(torch.float32)"),
    ("state expanded", {"state": zeros(1, 4, 3, 5).expand(2, 4, 3, 5)}, ValueError,
     "state must have memory of its own for each row, got an expanded view; call .contiguous()"),
    ("state with rows that overlap", {"state": zeros(99).as_strided((2, 4, 3, 5), (30, 15, 5, 1))}, ValueError,
     "state must have memory of its own for each number, got strides (30, 15, 5, 1) for shape (2, 4, 3, 5), in which "
     "numbers share memory; call .contiguous()"),
    ("pool with slots that overlap", {"state": zeros(200).as_strided((6, 4, 3, 5), (20, 15, 5, 1)), "slots": PAIR},
     ValueError, "state must have memory of its own for each number, got strides (20, 15, 5, 1) for shape "
     "(6, 4, 3, 5), in which numbers share memory; call .contiguous()"),
    ("slots list", {"slots": [0, 1]}, TypeError, "slots must be a torch.Tensor or None, got list"),
    ("slots float", {"slots": zeros(2)}, ValueError, "slots must be int32 or int64, got float32"),
    ("slots elsewhere", {"slots": PAIR.to(META)}, ValueError,
     "slots must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("slots of another batch", {"state": POOL, "slots": torch.tensor([0, 1, 2])}, ValueError,
     "slots must have shape (b,) = (2,) or (b, t) = (2, 3), got (3,)"),
    ("slots of other tokens", {"state": POOL, "slots": torch.tensor([[0, 1], [2, 3]]), "start_slots": PAIR},
     ValueError, "slots must have shape (b,) = (2,) or (b, t) = (2, 3), got (2, 2)"),
    ("slots without a start", {"state": POOL, "slots": torch.arange(6).view(2, 3)}, ValueError,
     "slots for each token need start_slots, where each row starts, got start_slots=None"),
    ("start without slots", {"start_slots": PAIR}, ValueError,
     "start_slots needs slots, where the memory goes, got slots=None; pass both"),
    ("start of another batch", {"state": POOL, "slots": PAIR, "start_slots": torch.tensor([0])}, ValueError,
     "start_slots must have shape (b,) = (2,), got (1,)"),
    ("slot past the pool", {"state": POOL, "slots": torch.tensor([0, 6])}, ValueError,
     "slots must be below n_slots = 6, got 6; a negative one is idle"),
    ("start past the pool", {"state": POOL, "slots": PAIR, "start_slots": torch.tensor([0, 9])}, ValueError,
     "start_slots must be below n_slots = 6, got 9; a negative one is idle"),
    ("one slot twice", {"state": POOL, "slots": torch.tensor([3, 3])}, ValueError,
     "slots must differ between rows, got 3 in rows 0 and 1"),
    ("a slot read and written", {"state": POOL, "slots": torch.tensor([3, 4]), "start_slots": torch.tensor([4, 2])},
     ValueError, "start_slots[0] = 4 is written by row 1; let it write elsewhere"),
    ("packed and batched", {"cu_seqlens": torch.tensor([0, 3])}, ValueError,
     "cu_seqlens needs the sequences packed into one row, b = 1, got b = 2; reshape to (1, b * t, ...)"),
    ("beta float", {"beta": 0.5}, TypeError, "beta must be a torch.Tensor, got float"),
    ("log_decay float", {"log_decay": -0.5}, TypeError, "log_decay must be a torch.Tensor, got float"),
    ("log_decay per key head", {"log_decay": zeros(2, 3, 2)}, ValueError,
     "log_decay must have shape (b, t, hv) = (2, 3, 4), got (2, 3, 2)"),
    ("log_decay positive", {"log_decay": zeros(2, 3, 4) + 0.5}, ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 0.5; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    ("scale", {"scale": "1"}, TypeError, "scale must be a number or None (1/sqrt(k)), got str"),
    ("normalize_qk", {"normalize_qk": 1}, TypeError, "normalize_qk must be a bool, got int"),
    ("raw_gates", {"raw_gates": zeros(4)}, TypeError,
     "raw_gates must be a bool, 'log_decay' or 'beta', got Tensor"),
    ("raw_gates word", {"raw_gates": "gate"}, ValueError,
     "raw_gates must be a bool, 'log_decay' or 'beta', got 'gate'"),
    ("A_log without a raw gate", {"raw_gates": "beta", "A_log": zeros(4)}, ValueError,
     "A_log is for raw gates, got raw_gates='beta'; pass raw_gates=True"),
    ("beta_scale without a raw logit", {"raw_gates": "log_decay", "A_log": zeros(4), "beta_scale": 2.0}, ValueError,
     "beta_scale is for raw gates, got 2.0 and raw_gates='log_decay'; multiply beta by it"),
    ("raw_gates of no beta", {"raw_gates": "beta", "beta": None}, ValueError,
     "raw_gates='beta' needs beta, got None; leave it False"),
    ("raw_gates of no decay", {"raw_gates": "log_decay", "log_decay": None}, ValueError,
     "raw_gates='log_decay' needs log_decay, got None; leave it False"),
    ("backend", {"backend": "native"}, ValueError,
     "backend must be one of 'auto', 'torch', 'triton', got 'native'"),
    ("A_log without raw gates", {"A_log": zeros(4)}, ValueError,
     "A_log is for raw gates, got raw_gates=False; pass raw_gates=True"),
    ("dt_bias without raw gates", {"dt_bias": zeros(4)}, ValueError,
     "dt_bias is for raw gates, got raw_gates=False; pass raw_gates=True"),
    ("beta_scale without raw gates", {"beta_scale": 2.0}, ValueError,
     "beta_scale is for raw gates, got 2.0 and raw_gates=False; multiply beta by it"),
    ("beta_scale without beta", {"raw_gates": True, "A_log": zeros(4), "beta": None, "beta_scale": 2.0}, ValueError,
     "beta_scale=2.0 needs beta, the raw logit, got beta=None; leave it 1"),
    ("beta_scale", {"raw_gates": True, "A_log": zeros(4), "beta_scale": "2"}, TypeError,
     "beta_scale must be a number, got str"),
    ("raw gates without A_log", {"raw_gates": True}, ValueError,
     "raw_gates=True with log_decay needs A_log of shape (hv,) = (4,), got None"),
    ("lower_bound without raw gates", {"lower_bound": -5.0}, ValueError,
     "lower_bound is for raw gates, got raw_gates=False; pass raw_gates=True"),
    ("lower_bound without a gate", {"raw_gates": True, "log_decay": None, "lower_bound": -5.0}, ValueError,
     "lower_bound needs log_decay, the raw gate, got log_decay=None; leave it None"),
    ("lower_bound str", {"raw_gates": True, "lower_bound": "-5"}, TypeError, "lower_bound must be a number, got str"),
    ("lower_bound 0", {"raw_gates": True, "lower_bound": 0}, ValueError,
     "lower_bound must be finite and below 0, got 0; -5 is usual"),
    ("raw gates without gates", {"raw_gates": True, "log_decay": None, "beta": None}, ValueError,
     "raw_gates=True needs log_decay or beta, got neither; leave it False"),
    ("A_log without a gate", {"raw_gates": True, "log_decay": None, "A_log": zeros(4)}, ValueError,
     "A_log and dt_bias need log_decay, the raw gate, got log_decay=None"),
    ("A_log float", {"raw_gates": True, "A_log": 1.0}, TypeError, "A_log must be a torch.Tensor, got float"),
    ("A_log int", {"raw_gates": True, "A_log": PAIR}, ValueError,
     "A_log must be floating point, got int64; convert it with .float()"),
    ("A_log per key head", {"raw_gates": True, "A_log": zeros(2)}, ValueError,
     "A_log must have shape (hv,) = (4,), got (2,)"),
    ("dt_bias per channel of a head's gate", {"raw_gates": True, "A_log": zeros(4), "dt_bias": zeros(4, 3)},
     ValueError, "dt_bias must have shape (hv,) = (4,), got (4, 3)"),
    ("dt_bias", {"raw_gates": True, "A_log": zeros(4), "dt_bias": zeros(3), "log_decay": zeros(2, 3, 4, 3)},
     ValueError, "dt_bias must have shape (hv,) = (4,) or (hv, k) = (4, 3) or (hv * k,) = (12,), got (3,)"),
    ("beta_scale 0", {"raw_gates": True, "A_log": zeros(4), "beta_scale": 0}, ValueError,
     "beta_scale must be finite and above 0, got 0; 1 and 2 are usual"),
    ("grad", {"v": zeros(2, 3, 4, 5, requires_grad=True)}, ValueError,
     "v must not require grad: decode writes into state and has no gradients; call it under torch.no_grad(), "
     "or train with the ops, such as lineate.gated_delta_rule"),
    ("triton elsewhere", {**{name: x.to(META) for name, x in RIGHT.items()}, "backend": "triton"}, ValueError,
     "backend='triton' cannot serve this call: it needs CUDA tensors, got meta; use backend='torch'"),
    ("misspelt keyword", {"slot": PAIR}, TypeError, "decode() got an unexpected keyword argument 'slot'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), [x[1:] for x in WRONG], ids=[x[0] for x in WRONG])
def test_wrong_calls(changes, error, message):
    """The message is exact, and no tensor changes."""
    call = {**RIGHT, **changes}
    kept = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    with pytest.raises(Exception) as caught:
        decode(**call)
    assert (type(caught.value), str(caught.value)) == (error, message)
    for name, x in kept.items():
        assert x.is_meta or torch.equal(call[name], x), name


def test_wrong_packed_slots():
    call = inputs_of(GATED_DELTA, Shape(1, 3, 2, 4, 3, 5), texts=6)
    options = {"cu_seqlens": bounds((2, 1)), "start_slots": PAIR}
    message = r"^slots must have shape \(n_seqs,\) = \(2,\) or \(n_seqs, longest sequence\) = \(2, ...\), got \(3,\)$"
    with pytest.raises(ValueError, match=message):
        decode(**call, **options, slots=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"^slots must have one for each token, at least 2 a row, got 1$"):
        decode(**call, **options, slots=torch.tensor([[1], [0]]))


@interpreted
def test_what_the_kernel_does_not_do():
    """An explicit request raises; 'auto' on a CPU uses torch."""
    message = r"^backend='triton' cannot serve this call: {}; use backend='torch'$"
    wide = inputs_of(GATED_DELTA, Shape(1, 1, 1, 1, 257, 2))
    with pytest.raises(ValueError, match=message.format("it takes k and v up to 256, got k = 257 and v = 2")):
        decode(**wide, backend="triton")
    with pytest.raises(ValueError, match=message.format("it computes in float32, got float64 inputs")):
        decode(**draw(GATED_DELTA, SHAPE), backend="triton")
    call = inputs_of(GATED_DELTA, SHAPE)
    call["state"] = call["state"].mT.contiguous().mT
    reason = r"it needs the \[k, v\] of each head of the state contiguous, got strides \(120, 30, 1, 6\)"
    with pytest.raises(ValueError, match=message.format(reason)):
        decode(**call, backend="triton")
    decode(**call)


# natively


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_native_dtypes_and_model_sizes(row, dtype):
    for shape in (Shape(3, 1, 2, 4, 128, 128), Shape(2, 4, 2, 2, 64, 128), Shape(2, 2, 1, 2, 256, 256), SHAPE):
        for gates in (dtype, torch.float32):
            check(row, convert(draw(row, shape), dtype, gates), ("cuda", "triton"), (shape, gates))
        check(row, convert(draw(row, shape), dtype), ("cuda", "triton"), shape, normalize_qk=True)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_in_a_cuda_graph(row):
    """A graph captured once and replayed with other tokens and other slots has the bits of eager calls."""
    inputs = {n: x.cuda() for n, x in convert(draw(row, Shape(4, 1, 2, 4, 128, 128), texts=9), torch.bfloat16).items()}
    first = inputs["state"].clone()
    slots = torch.tensor([5, -1, 2, 0], device="cuda")
    decode(**inputs, slots=slots)  # compiles
    inputs["state"].copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode(**inputs, slots=slots)
    eager = {**{name: x.clone() for name, x in inputs.items()}, "state": first.clone()}
    inputs["state"].copy_(first)
    for turn in range(3):
        graph.replay()
        assert same_bits(output, decode(**eager, slots=slots)), turn
        assert same_bits(inputs["state"], eager["state"])
        for name in ("q", "k", "v", "log_decay", "beta"):
            inputs[name].copy_(inputs[name].roll(1, 0))
            eager[name].copy_(inputs[name])
        slots.copy_(slots.roll(1))


@pytest.mark.gpu
def test_one_compilation_for_every_batch_and_length():
    before = None
    for b, t in ((1, 1), (1, 2), (2, 1), (16, 1), (3, 5)):
        decode(**{n: x.cuda() for n, x in convert(draw(KIMI_DELTA, Shape(b, t, 2, 4, 64, 64)), torch.bfloat16).items()})
        now = compilations()
        before = now if before is None else before
        assert now == before and any(now.values()), (b, t)


@pytest.mark.gpu
def test_compiled_by_inductor():
    call_compiled(inputs_of(GATED_DELTA, SHAPE), ("cuda", "auto"), "inductor")


def test_strides_that_interleave_without_overlapping():
    """Numbers of a state may lie between those of another one; each has memory of its own."""
    for shape, strides in (
        ((2, 4, 3, 5), (1, 2, 8, 24)),
        ((2, 4, 3, 5), (61, 15, 5, 1)),
        ((1, 4, 3, 5), (0, 15, 5, 1)),
    ):
        state = torch.zeros(200).as_strided(shape, strides)
        inputs = {name: x[: shape[0]] for name, x in RIGHT.items()}
        expected = torch.zeros(shape)
        output = decode(**{**inputs, "state": expected})
        assert torch.equal(decode(**{**inputs, "state": state}), output) and torch.equal(state, expected)
    state = torch.zeros(9).as_strided((2, 3), (3, 2))  # offsets 0 2 4 3 5 7
    inputs = {name: x[:1, :, :1, :1] for name, x in RIGHT.items() if name in "qk"}
    v, state = torch.ones(1, 3, 2, 3), state[None, :, None]
    decode(**inputs, v=v, state=state)
    assert torch.equal(state, state.contiguous())
