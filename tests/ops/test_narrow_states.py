"""decode with states in bfloat16: float32 arithmetic, rounded after every token, to the nearest or stochastically."""

import math

import pytest
import torch
from torch import Tensor, zeros

from lineate.ops.decoding import decode
from lineate.rule import step
from tests.support.cases import (
    DELTA,
    GATED_DELTA,
    GATED_LINEAR,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Inputs,
    Row,
    Shape,
    bounds,
    same_bits,
)
from tests.support.decode_cases import KERNEL, PATHS, SHAPE, Path, check_op, inputs_of, run
from tests.support.fresh import run as run_fresh

BOTH = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
NEAREST, STOCHASTIC = 2**-8, 2**-7
"""How far rounding moves a number at most, relative to it."""


def narrow_inputs(row: Row, shape: Shape, texts: int | None = None) -> Inputs:
    inputs = inputs_of(row, shape, texts=texts)
    return {**inputs, "state": inputs["state"].bfloat16()}


def options_of(rounding: str, rows: int, first: int = 0) -> dict[str, object]:
    """Return the options of a rounding, with a seed of its own for each row; the second is above 32 bits."""
    if rounding == "nearest":
        return {}
    seeds = torch.tensor([5, 2**40 + 9, -3, 11, 12, 13, 14, 15])[:rows]
    return {"rounding": "stochastic", "seeds": seeds + first}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nearest_is_what_torch_rounds_to(row, path):
    """After one token, the state has the bits of Tensor.to(bfloat16) of the float32 state, and the output is its."""
    inputs = narrow_inputs(row, SHAPE._replace(t=1))
    got = run(inputs, path)
    wide = run({**inputs, "state": inputs["state"].float()}, path)
    assert got.state.dtype == torch.bfloat16 and wide.state.dtype == torch.float32
    if path[0] == "cuda":  # another layout of the state sums over keys in another order
        torch.testing.assert_close(got.output, wide.output, rtol=1e-5, atol=1e-6)
        assert ((got.state.float() - wide.state).abs() <= NEAREST * 1.001 * wide.state.abs() + 1e-6).all()
        assert (got.state != wide.state.bfloat16()).float().mean() < 0.02
    else:
        assert same_bits(got.output, wide.output) and same_bits(got.state, wide.state.bfloat16())


def test_ties_and_odd_numbers():
    """Ties go to even; infinities, NaN, zeros and the largest number are rounded as by torch; subnormal ones, too."""
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38,
                            -3.4e38, 1e-40, 1.0, math.pi, 2.0**-126, 1 + 2**-8 + 2**-20])  # fmt: skip
    state = zeros(1, 1, 1, 15).bfloat16()
    one = torch.ones(1, 1, 1, 1)
    for backend in ("torch", "auto"):
        decode(one, one, numbers.view(1, 1, 1, 15), state=state.zero_(), backend=backend)
        assert torch.equal(state.flatten().isnan(), numbers.isnan())
        assert torch.equal(state.flatten().nan_to_num(1), numbers.bfloat16().nan_to_num(1))


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
def test_stochastic_rounding_of_odd_numbers(path):
    """Numbers of bfloat16 and infinities stay, NaN stays NaN, and others go to one of their two neighbours."""
    numbers = torch.tensor([1.0, -1.5, torch.inf, -torch.inf, torch.nan, 0.0, 1 + 2**-9, -math.pi, 1e30, 2.0**-120])
    one, seeds = torch.ones(64, 1, 1, 1), torch.arange(64)
    inputs = {"q": one, "k": one, "v": numbers.expand(64, 1, 1, 10), "state": zeros(64, 1, 1, 10).bfloat16()}
    got = run(inputs, path, rounding="stochastic", seeds=seeds).state[:, 0, 0]
    assert torch.equal(got[:, :4], numbers[:4].bfloat16().expand(64, 4)) and not got[:, 5].any()
    assert got[:, 4].isnan().all() and not got[:, 5:].isnan().any()
    moved = (got[:, 5:].float() - numbers[5:]).abs()
    assert (moved <= STOCHASTIC * numbers[5:].abs()).all()
    assert [len(got[:, i].unique()) for i in (6, 7, 8)] == [2, 2, 2]


@pytest.mark.cover
@pytest.mark.slow(but="pairs")
@BOTH
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_LINEAR, DELTA, KIMI_DELTA], ids=str)
def test_same_bits_however_split(row, path, rounding):
    """Up to 8 tokens in one call have the bits of as many calls: the state is rounded after each of them."""
    t = 8
    inputs = narrow_inputs(row, SHAPE._replace(t=t))
    whole = run(inputs, path, **options_of(rounding, 2))
    state, outputs = inputs["state"], []
    for i in range(t):
        token = {name: x[:, i : i + 1] for name, x in inputs.items() if name != "state"}
        output, state, _ = run({**token, "state": state}, path, **options_of(rounding, 2, i))
        outputs.append(output)
    assert same_bits(torch.cat(outputs, 1), whole.output) and same_bits(state, whole.state)
    for i in range(2):  # nor does a row depend on the others
        alone = {name: x[i : i + 1] for name, x in inputs.items()}
        options = {name: x[i : i + 1] if isinstance(x, Tensor) else x for name, x in options_of(rounding, 2).items()}
        own = run(alone, path, **options)
        assert same_bits(own.output[0], whole.output[i]) and same_bits(own.state[0], whole.state[i])


@BOTH
@pytest.mark.parametrize("path", PATHS)
def test_slots(path, rounding):
    """A pool, rows that start from a shared slot, idle rows, and one slot for each token; the rest stays, even NaN."""
    inputs = narrow_inputs(KIMI_DELTA, SHAPE._replace(b=3, t=3), texts=9)
    inputs["state"][[0, 8]] = torch.nan
    before, starts, options = inputs["state"], torch.tensor([5, 5, -1]), options_of(rounding, 3)
    one = run(inputs, path, slots=torch.tensor([1, 2, 3]), start_slots=starts, **options)
    each = torch.tensor([[4, -1, 6], [7, 1, 2], [3, 3, 3]])
    many = run(inputs, path, slots=each, start_slots=starts, **options)
    for got, written in ((one, [1, 2]), (many, [4, 6, 7, 1, 2])):
        kept = [i for i in range(9) if i not in written]
        assert torch.equal(got.state[kept].view(torch.int16), before[kept].view(torch.int16))
        assert not got.output[2].any()
    assert same_bits(one.output, many.output)
    assert same_bits(one.state[1], many.state[6]) and same_bits(one.state[2], many.state[2])
    again = {name: x[:2, 1:] for name, x in inputs.items() if name != "state"} | {"state": many.state}
    options = options_of(rounding, 2, 1)
    after = run(again, path, slots=torch.tensor([0, 8]), start_slots=torch.tensor([4, 7]), **options)
    assert same_bits(after.state[[0, 8]], one.state[[1, 2]])  # from the state after the first token


@BOTH
@pytest.mark.parametrize("path", PATHS)
def test_packed_sequences(path, rounding):
    """Seeds are counted from each sequence's own first token; a sequence without tokens keeps its state."""
    lengths = (2, 0, 3)
    inputs = narrow_inputs(GATED_DELTA, Shape(1, 5, 2, 4, 6, 5), texts=3)
    packed = run(inputs, path, cu_seqlens=bounds(lengths), **options_of(rounding, 3))
    assert same_bits(packed.state[1], inputs["state"][1])
    for i, (first, end) in enumerate(((0, 2), (2, 2), (2, 5))):
        if end > first:
            own = {name: x[:, first:end] for name, x in inputs.items() if name != "state"}
            options = options_of(rounding, 3)
            options |= {"seeds": options["seeds"][i : i + 1]} if options else {}
            alone = run({**own, "state": inputs["state"][i : i + 1]}, path, **options)
            assert same_bits(alone.output, packed.output[:, first:end]) and same_bits(alone.state[0], packed.state[i])


@pytest.mark.parametrize("path", KERNEL)
@pytest.mark.parametrize("v", [5, 64, 100])
def test_the_kernel_draws_the_numbers_of_the_specification(path, v):
    """Without a sum over keys, torch and the kernel have the same float32 state; so they round it to the same bits."""
    inputs = narrow_inputs(LINEAR, Shape(3, 2, 1, 2, 33, v))
    options = options_of("stochastic", 3)
    ours, theirs = run(inputs, path, **options), run(inputs, ("cpu", "torch"), **options)
    assert (
        same_bits(ours.state, theirs.state) if path[0] == "cpu" else (ours.state != theirs.state).float().mean() < 0.01
    )


def token_by_token(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs `b t hv v` and the states after every token, in float64 by the equation."""
    x = {name: y.double() for name, y in inputs.items()}
    group = x["v"].shape[2] // x["q"].shape[2]
    q, k = (y.repeat_interleave(group, 2) for y in (x["q"], x["k"]))
    outputs, states = [], [x["state"]]
    for i in range(q.shape[1]):
        decay, beta = (None if name not in x else x[name][:, i] for name in ("log_decay", "beta"))
        decay = None if decay is None else decay.exp() if decay.dim() == 3 else decay.exp()[..., None]
        read, state = step(states[-1], q[:, i] / q.shape[-1] ** 0.5, k[:, i], x["v"][:, i], decay,
                           None if beta is None else beta[..., None], "beta" in x)  # fmt: skip
        outputs.append(read)
        states.append(state)
    return torch.stack(outputs, 1), states


@pytest.mark.slow(but="pairs")
@BOTH
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_recurrence_in_float64(row, path, rounding):
    """A token multiplies what was wrong by a matrix of norm at most 1, for unit keys, and adds u |S| to it.

    So after t tokens the error is at most u (|S_1| + ... + |S_t|), and the rounding of float32; the output of a token
    is read before its state is rounded, and a query of length 1 reads no more than is wrong.
    """
    t, u = 8, {"nearest": NEAREST, "stochastic": STOCHASTIC}[rounding]
    inputs = narrow_inputs(row, SHAPE._replace(t=t))
    for name in ("q", "k"):
        inputs[name] = torch.nn.functional.normalize(inputs[name], dim=-1)
    got = run(inputs, path, **options_of(rounding, 2))
    outputs, states = token_by_token(inputs)
    norms = [float(x.norm()) for x in states]
    single = 2**-20 * sum(norms)
    allowed = [u * (1 + 8 * u) * sum(norms[1 : i + 1]) + single for i in range(t + 1)]
    assert float((got.state.double() - states[-1]).norm()) <= allowed[t]
    for i in range(t):
        wrong = (got.output[:, i].double() - outputs[:, i]).norm()
        assert float(wrong) <= allowed[i] / inputs["q"].shape[-1] ** 0.5 + single


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
def test_stochastic_rounding_is_unbiased(path):
    """Over n seeds the mean is the number itself, within 5 of its standard deviations; other seeds, other numbers."""
    n = 4096 if path != ("cpu", "triton") else 128
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, 1, 2, 16, generator=generator)
    one = torch.ones(n, 1, 2, 1)
    inputs = {"q": one, "k": one, "v": numbers.expand(n, 1, 2, 16), "state": zeros(n, 2, 1, 16).bfloat16()}
    seeds = torch.arange(n) + 2**33
    got = run(inputs, path, rounding="stochastic", seeds=seeds).state[:, :, 0].double()
    below = (numbers.view(torch.int32) & ~0xFFFF).view(torch.float32)[0, 0].double()
    unit = 2.0 ** (below.abs().log2().floor() - 7)
    up = (got - below).abs() / unit  # 0 or 1
    assert ((up == 0) | (up == 1)).all()
    chance = (numbers[0, 0].double() - below).abs() / unit
    deviation = (chance * (1 - chance) / n).sqrt()
    assert ((up.mean(0) - chance).abs() <= 5 * deviation).all()
    correlation = torch.corrcoef(up.flatten(1).T)  # of columns and heads, over seeds
    assert (correlation - torch.eye(32)).abs().max() < 6 / n**0.5
    apart = (up[1:] - chance) * (up[:-1] - chance)  # of one seed and the next
    assert apart.mean().abs() < 5 / (apart.numel() ** 0.5)


@pytest.mark.parametrize("path", PATHS)
def test_a_seed_gives_the_same_bits(path):
    inputs = narrow_inputs(GATED_DELTA, SHAPE)
    options = options_of("stochastic", 2)
    first = run(inputs, path, **options)
    assert same_bits(first.state, run(inputs, path, **options).state)
    narrow = {**options, "seeds": torch.tensor([5, 9], dtype=torch.int32)}
    assert same_bits(first.state[0], run(inputs, path, **narrow).state[0])
    other = run(inputs, path, **(options | {"seeds": torch.tensor([6, 2**41 + 9])}))
    assert all((first.state[i] != other.state[i]).any() for i in range(2))


def drift(log_decay: Tensor, beta: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
    """Return the relative errors of each row's state against float32 after 1024 tokens and all, by rounding: `2 b`."""
    (b, n, h), size = log_decay.shape, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, n, h, size, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    start = zeros(b, h, size, size) if first is None else first
    states = {"float32": start.clone(), "nearest": start.bfloat16(), "stochastic": start.bfloat16()}
    found: dict[str, list[Tensor]] = {"nearest": [], "stochastic": []}
    for at in (slice(0, 1024), slice(1024, n)):
        for name, state in states.items():
            options = {"rounding": name, "seeds": torch.full((b,), at.start)} if name == "stochastic" else {}
            decode(*(x[:, at] for x in (q, k, v, log_decay, beta)), state=state, **options)
        exact = states["float32"].flatten(1)
        for name, errors in found.items():
            errors.append((states[name].float().flatten(1) - exact).norm(dim=1) / exact.norm(dim=1))
    return {name: torch.stack(errors) for name, errors in found.items()}


@pytest.mark.cover
def test_4096_tokens_do_not_drift():
    """The errors are those of docs/serving.md, and about as large after 4096 tokens as after 1024."""
    decays = torch.tensor([-1.0, -0.1, -0.01, -0.001, 0.0])
    beta = torch.rand(5, 4096, 1, generator=torch.Generator().manual_seed(1))
    found = drift(decays[:, None, None].expand(5, 4096, 1), beta)
    for name, most in (
        ("nearest", [0.003, 0.006, 0.015, 0.025, 0.025]),
        ("stochastic", [0.004, 0.009, 0.02, 0.035, 0.035]),
    ):
        assert (found[name] < torch.tensor(most)).all(), found
        assert (found[name][1] < 1.5 * found[name][0]).all(), found


@pytest.mark.cover
def test_a_memory_that_forgets_slowly_and_is_not_written():
    """A decay of less than half a unit in the last place is lost to the nearest; stochastic rounding keeps its mean."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(1, 2, 32, 32, generator=generator).bfloat16().float()
    found = drift(torch.full((1, 2048, 2), -0.001), zeros(1, 2048, 2), first)
    assert float(found["nearest"][0]) == pytest.approx(math.exp(1.024) - 1, rel=0.01)  # nothing was forgotten
    assert float(found["stochastic"][1]) < 0.2, found


@pytest.mark.cover
@BOTH
def test_compiled(rounding):
    """torch.compile sees one op, which has the bits of eager calls; opcheck accepts it."""
    inputs, options = narrow_inputs(KIMI_DELTA, SHAPE._replace(t=2)), options_of(rounding, 2)
    rest = {name: x for name, x in inputs.items() if name != "state"}

    def layer(state: Tensor) -> Tensor:
        return decode(**rest, **options, state=state) * 2

    torch._dynamo.reset()
    ours, theirs = inputs["state"].clone(), inputs["state"].clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert same_bits(compiled(theirs), layer(ours)) and same_bits(ours, theirs)
    check_op(inputs, seeds=options.get("seeds"))


RIGHT = narrow_inputs(GATED_DELTA, Shape(2, 3, 2, 4, 3, 5))
SEEDS = torch.tensor([1, 0])
WRONG: list[tuple[str, dict[str, object], type[Exception], str]] = [
    ("float16", {"state": zeros(2, 4, 3, 5).half()}, ValueError,
     "state must be float32 or bfloat16 for float32 inputs, got float16; convert it with .to(torch.float32)"),
    ("float64 inputs", {name: x.double() for name, x in RIGHT.items() if name != "state"}, ValueError,
     "state must be float64 for float64 inputs, got bfloat16; convert it with .to(torch.float64)"),
    ("rounding", {"rounding": "up"}, ValueError, "rounding must be one of 'nearest', 'stochastic', got 'up'"),
    ("stochastic float32", {"state": zeros(2, 4, 3, 5), "rounding": "stochastic", "seeds": SEEDS}, ValueError,
     "rounding='stochastic' is for a bfloat16 state, got float32; leave it 'nearest'"),
    ("no seeds", {"rounding": "stochastic"}, ValueError,
     "rounding='stochastic' needs seeds of shape (2,), got None; pass the position of each row's token"),
    ("seeds alone", {"seeds": SEEDS}, ValueError,
     "seeds are for stochastic rounding, got rounding='nearest'; pass rounding='stochastic'"),
    ("seeds list", {"rounding": "stochastic", "seeds": [0, 1]}, TypeError,
     "seeds must be a torch.Tensor or None, got list"),
    ("seeds float", {"rounding": "stochastic", "seeds": zeros(2)}, ValueError,
     "seeds must be int32 or int64, got float32"),
    ("seeds of another batch", {"rounding": "stochastic", "seeds": torch.arange(3)}, ValueError,
     "seeds must have shape (rows,) = (2,), got (3,)"),
    ("seeds elsewhere", {"rounding": "stochastic", "seeds": SEEDS.to("meta")}, ValueError,
     "seeds must be on the device of q, cpu, got meta; move it with .to(q.device)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), [x[1:] for x in WRONG], ids=[x[0] for x in WRONG])
def test_wrong_calls(changes, error, message):
    """The message is exact, and no tensor changes."""
    call = {**RIGHT, **changes}
    before = call["state"].clone()
    with pytest.raises(Exception) as caught:
        decode(**call)
    assert (type(caught.value), str(caught.value)) == (error, message)
    assert torch.equal(call["state"], before)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lineate.kernels.portable import decode

kernel = decode.decode_tokens
fixed = {name: None for name in ("A_log", "dt_bias", "cu_seqlens", "lower_bound", "slots", "start_slots", "seeds")}
fixed |= {"K": 128, "V": 128, "BK": 128, "BV": 32, "BLOCKS": 4, "GROUP": 1, "UNIT": 8, "STATE_UNIT": 8, "NARROW": True}
fixed |= {name: False for name in kernel.arg_names if name.isupper() and name not in fixed}
types = {**dict.fromkeys(("q", "k", "v", "output", "state"), "*bf16"), "log_decay": "*fp32", "beta": "*fp32",
         "scale": "fp32", "beta_scale": "fp32"}
signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in fixed.items()})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
lines = made.asm["ttir"].splitlines()
loop = next(n for n, line in enumerate(lines) if "scf.for" in line)
end = next(n for n, line in enumerate(lines) if n > loop and "scf.yield" in line)
tile = "tensor<128x32x!tt.ptr<bf16>>"
print([n < loop for n, line in enumerate(lines) if "tt.load" in line and tile in line],
      [n > end for n, line in enumerate(lines) if "tt.store" in line and tile in line])
"""


@pytest.mark.cover
def test_the_state_is_read_and_written_once_whatever_t_is():
    """Compiled for an H100, the kernel loads the tile of the state before the loop over tokens, and stores it after."""
    pytest.importorskip("triton")
    found = run_fresh(COMPILED, TRITON_INTERPRET="0")
    assert found.stdout == "[True] [True]\n", found.stderr


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_in_a_cuda_graph(row, rounding):
    """A graph that adds t to its seeds has the bits of eager calls, with other tokens, slots and seeds every time."""
    inputs = {name: x.cuda() for name, x in narrow_inputs(row, Shape(4, 2, 2, 4, 128, 128), texts=9).items()}
    inputs |= {name: inputs[name].bfloat16() for name in ("q", "k", "v")}
    first, slots = inputs["state"].clone(), torch.tensor([5, -1, 2, 0], device="cuda")
    seeds = torch.tensor([0, 7, 2**35, 3], device="cuda")
    options = {} if rounding == "nearest" else {"rounding": rounding, "seeds": seeds}

    def call() -> Tensor:
        output = decode(**inputs, slots=slots, **options)
        seeds.add_(2)
        return output

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    eager, drawn = {**{name: x.clone() for name, x in inputs.items()}, "state": first.clone()}, seeds.clone()
    inputs["state"].copy_(first)
    for turn in range(3):
        graph.replay()
        own = {} if rounding == "nearest" else {"rounding": rounding, "seeds": drawn}
        assert same_bits(output, decode(**eager, slots=slots, **own)), turn
        assert same_bits(inputs["state"], eager["state"])
        drawn += 2
        for name in ("q", "k", "v", "log_decay", "beta"):
            inputs[name].copy_(inputs[name].roll(1, 0))
            eager[name].copy_(inputs[name])
        slots.copy_(slots.roll(1))


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_model_sizes_on_a_gpu(row):
    """bfloat16 inputs, 1 to 8 tokens, whole tiles and odd ones: within the bound of the recurrence in float64."""
    path: Path = ("cuda", "triton")
    for shape in (Shape(3, 1, 2, 4, 128, 128), Shape(2, 8, 2, 2, 64, 128), Shape(2, 4, 1, 2, 256, 256), SHAPE):
        inputs = narrow_inputs(row, shape)
        for name in ("q", "k"):
            inputs[name] = torch.nn.functional.normalize(inputs[name], dim=-1)
        inputs |= {name: inputs[name].bfloat16() for name in ("q", "k", "v")}
        outputs, states = token_by_token(inputs)
        norm = sum(float(x.norm()) for x in states)
        for rounding, u in (("nearest", NEAREST), ("stochastic", STOCHASTIC)):
            got = run(inputs, path, **options_of(rounding, shape.b))
            # keys that were rounded to bfloat16 are up to 1 + 2^-8 long, which beta < 2 lets grow with every token
            assert float((got.state.double() - states[-1]).norm()) <= 1.2 * u * norm
            wrong = float((got.output.double() - outputs).norm() / outputs.norm())
            assert wrong < u * shape.t + 2**-7
