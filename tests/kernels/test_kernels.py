"""The Triton kernels: the case table of the torch forms, in Triton's interpreter on a CPU and natively on a GPU.

One body serves both: `path` is ("cpu", float32), which is the interpreter, or ("cuda", a dtype). The oracle is the
recurrent form in float64 on a CPU; budgets are cases.budget in float32 and half.budget in 16 bits. Uninitialised memory
is full of NaN in every test.
"""

import importlib
import pkgutil
from typing import NamedTuple

import half
import pytest
import torch
import torch.nn.functional as F
from cases import (
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    SPECIAL_ROWS,
    Inputs,
    Result,
    Row,
    Shape,
    _condition,
    assert_same_bits,
    assert_within,
    bounds,
    budget,
    convert,
    draw,
    errors,
    interpreted,
    oracle,
    relative_error,
    same_bits,
    weights,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lineate
from lineate.fused import activate

CHUNK = 64


class Path(NamedTuple):
    """Where the kernels run, and the dtype of q, k and v."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return "interpreter" if self.device == "cpu" else f"gpu-{str(self.dtype).removeprefix('torch.')}"


INTERPRETER = Path("cpu", torch.float32)
GPU = [Path("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
BF16 = GPU[1]


def param(path: Path, *values: object, slow: bool = False) -> object:
    marks = [interpreted if path.device == "cpu" else pytest.mark.gpu, *([pytest.mark.slow] if slow else [])]
    return pytest.param(path, *values, id="-".join(map(str, (path, *values))), marks=marks)


PATHS = [param(path) for path in (INTERPRETER, *GPU)]
ONE_EACH = [param(INTERPRETER), param(BF16)]
GPU_ONLY = [param(path) for path in GPU]

# k != v, hv > h and no power of two everywhere; the GPU adds the sizes of models, for which kernels may differ.
LENGTHS = (1, 63, 64, 65, 3 * 64 + 5)
SMALL = Shape(1, 70, 1, 2, 12, 20)
LEAN = SMALL._replace(hv=1)
SHORT = SMALL._replace(t=20)
MODEL = Shape(1, 130, 2, 4, 128, 128)
TEXTS = (0, 1, 64, 0, 128, 70, 0)
FEWER_TEXTS = (0, 1, 64, 0, 67)  # on a CPU, where every program costs


def sized(path: Path, small: Shape = SMALL, model: Shape = MODEL) -> Shape:
    return small if path.device == "cpu" else model


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every uninitialised tensor arrives full of NaN, on the GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(3).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def to(device: str, x: object) -> object:
    return x.to(device) if isinstance(x, Tensor) else x


def loss_of(output: Tensor, state: Tensor) -> Tensor:
    """sum(w output) + sum(w' state), the loss of cases.run."""
    return sum((x.double() * weights(x, i).to(x.device)).sum() for i, x in ((1, output), (2, state)))


def differentiate(
    op: object, inputs: Inputs, path: Path, only: tuple[str, ...] | None = None, **options: object
) -> Result:
    """Run on copies of the inputs, differentiate by all (or by `only` some), and bring the result to the CPU."""
    leaves = {
        name: x.detach().clone().to(path.device).requires_grad_(only is None or name in only)
        for name, x in inputs.items()
    }
    output, state = op(**leaves, **{name: to(path.device, x) for name, x in options.items()}, backend="triton")
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(loss_of(output, state), list(wanted.values())) if wanted else ()
    return Result(output.detach().cpu(), state.detach().cpu(), {n: x.cpu() for n, x in zip(wanted, grads, strict=True)})


def run(row: Row, inputs: Inputs, path: Path, only: tuple[str, ...] | None = None, **options: object) -> Result:
    return differentiate(row.op, inputs, path, only, form="chunkwise", **options)


def native_term(path: Path, t: int, kappa: float = 1.0) -> float:
    """What a GPU adds in float32: products of three tf32 ones keep 22 bits, and so does exp; once a chunk, by T."""
    return (-(-t // CHUNK) + 2) * 2**-22 * kappa if path.device == "cuda" else 0.0


def allowance(row: Row, inputs: Inputs, expected: Result, path: Path, **options: object) -> dict[str, float]:
    if path.dtype != torch.float32:
        return half.budget(inputs, expected, **options)
    kappa = _condition({n: x.float() for n, x in inputs.items()}, CHUNK, **options)
    extra = native_term(path, inputs["q"].shape[1], kappa)
    return {name: x + extra for name, x in budget(row, inputs, expected, CHUNK, **options).items()}


def assert_like_the_inputs(got: Result, inputs: Inputs) -> None:
    assert (got.output.dtype, got.output.shape) == (inputs["v"].dtype, inputs["v"].shape)
    assert got.state.dtype == torch.float32
    for name, x in got.grads.items():
        assert (x.dtype, x.shape) == (inputs[name].dtype, inputs[name].shape), name


def check(row: Row, inputs: Inputs, path: Path, what: object = "", **options: object) -> Result:
    """Output, final state and all gradients against the oracle, on exactly the same numbers."""
    expected = oracle(row, inputs, **options)
    got = run(row, inputs, path, **options)
    assert_like_the_inputs(got, inputs)
    assert_within(errors(got, expected), allowance(row, inputs, expected, path, **options), what or row)
    return got


# Shapes


def shapes() -> list[object]:
    cpu = [SMALL._replace(b=2 if t == 1 else 1, t=t, hv=1 if t > 65 else 2) for t in LENGTHS]
    cpu += [Shape(1, 20, 2, 2, 33, 66), Shape(2, 20, 1, 3, 5, 1)]
    gpu = [Shape(2, t, 1, 2, 48, 40) for t in LENGTHS] + [MODEL, Shape(1, 65, 2, 2, 33, 66)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), shapes())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_shapes(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


def wide_shapes() -> list[object]:
    sizes = [(160, 96), (96, 160), (256, 256), (16, 256), (256, 16)]
    cpu = [param(INTERPRETER, Shape(1, 65, 1, 1, *size), slow=True) for size in sizes]
    return cpu + [param(path, Shape(1, 65, 1, 1, *size)) for path in GPU[:2] for size in sizes[:3]]


@pytest.mark.parametrize(("path", "shape"), wide_shapes())
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_wide_heads(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


def tiled_shapes() -> list[object]:
    """As the Gluon kernels take them: one, two and four value heads a key head, k and v of 64, 128 and 192."""
    sizes = [(1, 4, 128, 128), (2, 2, 128, 128), (2, 2, 64, 64), (1, 2, 64, 128), (2, 2, 128, 64), (1, 2, 128, 192)]
    return [param(BF16, Shape(2, 130, *size)) for size in sizes] + [param(GPU[2], Shape(2, 130, *sizes[2]))]


@pytest.mark.parametrize(("path", "shape"), tiled_shapes())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_whole_tiles(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


@pytest.mark.parametrize("path", [param(BF16)])
@pytest.mark.parametrize("heads", [24, 48])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_more_chunks_than_programs(row, packed, heads, path):
    """Programs that take one chunk after another take several, and the walk has whole states, not halves of them."""
    shape = Shape(3, 200, heads, 48, 128, 128)
    if packed:
        texts = (200, 1, 0, 330, 69)
        inputs = convert(draw(row, shape._replace(b=1, t=sum(texts)), texts=len(texts)), path.dtype)
        check(row, inputs, path, cu_seqlens=bounds(texts))
    else:
        check(row, convert(draw(row, shape), path.dtype), path)


CHANNEL_ROWS = [GATED_LINEAR_CHANNEL, KIMI_DELTA]


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalize"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32], ids=["bf16 gates", "fp32 gates"])
@pytest.mark.parametrize("wild", [None, -50.0, -300.0, -torch.inf], ids=str)
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
def test_decay_per_channel_in_gluon(row, wild, gates, packed, normalize, monkeypatch):
    """The Gluon kernels take both rules; what is wild (a few tokens, all channels or three) the plain ones do again."""
    taken = []
    for file, name in (("launch_scores", "fill_channel_scores"), ("launch_gradients", "fill_channel_gradients")):
        module = importlib.import_module(f"lineate.kernels.hopper.{file}")

        def note(*given: object, name: str = name, launch: object = getattr(module, name), **options: object) -> None:
            taken.append(name)
            launch(*given, **options)

        monkeypatch.setattr(module, name, note)
    texts = (100, 1, 0, 64, 130)
    shape = Shape(1 if packed else 2, sum(texts), 1, 2, 128, 128)
    inputs = convert(draw(row, shape, texts=len(texts) if packed else None), BF16.dtype, gates)
    if wild is not None:
        inputs["log_decay"][:, 10:200:37] = wild
        inputs["log_decay"][:, 28:250:41, 1, 5:80:30] = wild
    if normalize:
        inputs["q"], inputs["k"] = inputs["q"] * 3, inputs["k"] * 3
    check(row, inputs, BF16, normalize_qk=normalize, **({"cu_seqlens": bounds(texts)} if packed else {}))
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(taken) == {"fill_channel_scores", "fill_channel_gradients"}


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.decay != "channel"], ids=str)
def test_scores_made_in_the_walk(row, packed, training, monkeypatch):
    """To the bits of those made before it: which of the two is done depends on how many texts there are."""
    from lineate.kernels.architectures import architecture_of

    asked = []
    architecture = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    choose = architecture.scores_in_walk
    texts = (200, 1, 0, 64, 129, 50)
    shape = Shape(1 if packed else len(texts), sum(texts), 24, 24, 128, 128)
    inputs = convert(draw(row, shape, texts=len(texts)), BF16.dtype)
    if "log_decay" in inputs:
        inputs["log_decay"][:, 10:90:7] = -torch.inf
        inputs["log_decay"][:, 91:150:9] = -60
    options = {}
    if packed:  # the last text must not be seen by the others
        options["cu_seqlens"] = bounds(texts)
        for name in ("q", "k", "v"):
            inputs[name][:, -50:] = torch.nan
    results = []
    for allowed in (True, False):

        def decide(*arguments: object, allowed: bool = allowed) -> bool:
            asked.append(choose(*arguments))
            return allowed and asked[-1]

        monkeypatch.setattr(architecture, "scores_in_walk", decide)
        results.append(run(row, inputs, BF16, None if training else (), **options))
        assert not results[-1].output[:, : sum(texts[:-1])].isnan().any()
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert set(asked) == {on_hopper and not (row.corrects and training)}
    assert_same_bits(*results)


# Special inputs


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_special_inputs(row, special, path):
    """Resets of -50 and -inf, no decay, decay -200, beta 0, 1 and 1.99, parallel keys, an empty memory."""
    check(row, convert(draw(row, sized(path, LEAN), special), path.dtype), path, special)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_normalize_qk(row, path):
    """q and k of any length, and one key of zeros: its direction does not exist, its gradient does."""
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    inputs["q"], inputs["k"] = inputs["q"] * 4, inputs["k"] * 4
    inputs["k"][:, 7] = 0
    check(row, inputs, path, normalize_qk=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_scale(row, path):
    inputs = convert(draw(row, sized(path, SHORT)), path.dtype)
    check(row, inputs, path, scale=-1.5)
    check(row, inputs, path, scale=0.25, normalize_qk=True)


GATED_ROWS = [row for row in ROWS if row is not LINEAR]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", GATED_ROWS, ids=str)
def test_gates_of_another_dtype(row, path):
    """Gates have a dtype of their own, and so have their gradients (the interpreter cuts bfloat16, a GPU rounds)."""
    for gates in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if gates != path.dtype and not (path.device == "cpu" and gates == torch.bfloat16):
            check(row, convert(draw(row, sized(path, SHORT)), path.dtype, gates), path, gates)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_state_is_a_state_of_zeros(row, path):
    inputs = convert(draw(row, sized(path, SHORT), "empty memory"), path.dtype)
    shape = sized(path, SHORT)
    zeros = {**inputs, "state": torch.zeros(shape.b, shape.hv, shape.k, shape.v)}
    assert_same_bits(run(row, inputs, path), run(row, zeros, path))


# Packed texts


def packed_inputs(row: Row, path: Path, lengths: tuple[int, ...]) -> Inputs:
    shape = sized(path)._replace(b=1, t=sum(lengths))
    return convert(draw(row, shape, texts=len(lengths)), path.dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_packed_texts(row, path):
    """None (first, inside, last), one token, one chunk, two chunks, a remainder; an empty text keeps its state."""
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    inputs = packed_inputs(row, path, texts)
    got = check(row, inputs, path, cu_seqlens=bounds(texts))
    empty = [i for i, length in enumerate(texts) if not length]
    assert same_bits(got.state[empty], inputs["state"][empty])
    assert same_bits(got.grads["state"][empty], weights(got.state, 2)[empty].float())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_packed_texts_do_not_see_each_other(row, path):
    """A text alone has the bits it has in company; a text full of NaN, its state too, changes nobody else."""
    lengths = (1, 66, 0, 5) if path.device == "cpu" else (1, 70, 0, 20)
    inputs = packed_inputs(row, path, lengths)

    def part(result: Result | Inputs, which: int):
        """What is one text's own."""
        start, end = bounds(lengths)[which : which + 2].tolist()
        own = slice(which, which + 1)

        def cut(name: str, x: Tensor) -> Tensor:
            return x[own] if name == "state" else x[:, start:end]

        if isinstance(result, dict):
            return {name: cut(name, x) for name, x in result.items()}
        grads = {name: cut(name, x) for name, x in result.grads.items()}
        return Result(cut("output", result.output), cut("state", result.state), grads)

    def separate_losses(inputs: Inputs, lengths: tuple[int, ...]) -> Result:
        """The loss of a text must not depend on its place: all weights are 1."""
        leaves = {name: x.clone().to(path.device).requires_grad_() for name, x in inputs.items()}
        ends = bounds(lengths).to(path.device)
        output, state = row.op(**leaves, cu_seqlens=ends, backend="triton", form="chunkwise")
        grads = torch.autograd.grad(output.double().sum() + state.double().sum(), list(leaves.values()))
        grads = {name: x.cpu() for name, x in zip(leaves, grads, strict=True)}
        return Result(output.detach().cpu(), state.detach().cpu(), grads)

    together = separate_losses(inputs, lengths)
    for which in (1, 3):
        alone = separate_losses(part(inputs, which), (lengths[which],))
        assert_same_bits(part(together, which), alone, which)
    broken = {name: x.clone() for name, x in inputs.items()}
    for x in part(broken, 1).values():
        x.fill_(torch.nan)
    got = separate_losses(broken, lengths)
    assert part(got, 1).output.isnan().all()
    for which in (0, 2, 3):
        assert_same_bits(part(got, which), part(together, which), which)


# Memory layout


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("by_head", [False, True], ids=["q, k, v", "head by head"])
@pytest.mark.parametrize("row", [LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_views_of_one_projection(row, by_head, path):
    """q, k and v where a fused projection left them; its gradient is their gradients beside each other."""
    shape = sized(path, SHORT._replace(b=2, hv=1, k=16, v=24), MODEL._replace(b=2))
    if by_head:
        shape = shape._replace(h=2, hv=2)
    inputs = convert(draw(row, shape), path.dtype)
    plain = run(row, inputs, path)

    def side_by_side(x: Tensor) -> Tensor:
        return x if by_head else x.flatten(2)

    def take_apart(x: Tensor) -> Inputs:
        parts = x.split([side_by_side(inputs[name]).shape[-1] for name in "qkv"], dim=-1)
        return {name: part.view(inputs[name].shape) for name, part in zip("qkv", parts, strict=True)}

    projection = torch.cat([side_by_side(inputs[name]) for name in "qkv"], dim=-1).to(path.device).requires_grad_()
    views = take_apart(projection)
    rest = {n: x.to(path.device).requires_grad_() for n, x in inputs.items() if n not in views}
    output, state = row.op(**views, **rest, form="chunkwise", backend="triton")
    dprojection, *grads = torch.autograd.grad(loss_of(output, state), [projection, *rest.values()])
    grads = {n: x.cpu() for n, x in zip(rest, grads, strict=True)} | take_apart(dprojection.cpu())
    assert_same_bits(Result(output.detach().cpu(), state.detach().cpu(), grads), plain)


def strange_layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in memory that is not contiguous, or not aligned."""
    padded = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    padded[..., ::2] = x
    behind = x.new_full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan)
    behind[:, 2:-1] = x
    shifted = x.new_full((x.numel() + 1,), torch.nan)
    shifted[1:] = x.flatten()
    return {
        "rows inside": x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).copy_(x),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "tokens last": x.movedim(1, -1).contiguous().movedim(-1, 1),
        "every other element": padded[..., ::2],
        "a slice of tokens": behind[:, 2:-1],
        "not aligned": shifted[1:].view(x.shape),
    }


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("one_token", [False, True], ids=["many tokens", "one token"])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_memory_layout_does_not_matter(row, one_token, path):
    """Not contiguous inputs, and gradients that arrive transposed: the same bits. With one token strides lie."""
    shape = sized(path, SHORT._replace(b=2, hv=1), MODEL._replace(b=2))
    shape = shape._replace(t=1, h=2, hv=2) if one_token else shape
    inputs = convert(draw(row, shape), path.dtype)
    plain = run(row, inputs, path)
    layouts = {name: strange_layouts(x.to(path.device)) for name, x in inputs.items()}
    for layout in layouts["q"]:
        leaves = {name: x[layout].requires_grad_() for name, x in layouts.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="triton")
        loss = (output.double().transpose(1, 3) * weights(output, 1).to(path.device).transpose(1, 3)).sum()
        loss = loss + (state.double().mT * weights(state, 2).to(path.device).mT).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        got = Result(output.detach().cpu(), state.detach().cpu(), {})
        got = got._replace(grads={n: x.cpu() for n, x in zip(leaves, grads, strict=True)})
        assert_same_bits(got, plain, layout)


@pytest.mark.parametrize("path", ONE_EACH)
def test_expanded_inputs_and_gradients(path):
    """One token for all and one state for all rows, as views of stride 0; the gradient of a sum is one too."""
    inputs = convert(draw(GATED_DELTA, sized(path, SHORT._replace(b=2), MODEL._replace(b=2))), path.dtype)
    expanded = {name: x[:1] if name == "state" else x[:1, :1] for name, x in inputs.items()}
    results = []
    for copy in (False, True):
        leaves = {name: x.to(path.device).expand_as(inputs[name]) for name, x in expanded.items()}
        leaves = {name: (x.contiguous() if copy else x).detach().requires_grad_() for name, x in leaves.items()}
        output, state = GATED_DELTA.op(**leaves, form="chunkwise", backend="triton")
        grads = torch.autograd.grad(output.sum() + state.sum(), list(leaves.values()))
        results.append(Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True))))
    assert_same_bits(*results)


# What requires gradients


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_gradients_of_some_inputs_only(row, path):
    inputs = convert(draw(row, sized(path, SHORT._replace(hv=1))), path.dtype)
    everything = run(row, inputs, path)
    for name in inputs:
        some = run(row, inputs, path, only=(name,))
        assert list(some.grads) == [name]
        assert_same_bits(some, everything, name)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_without_gradients(row, path):
    """Nothing is kept for a backward then; the numbers are the same, in no_grad and inference mode too."""
    inputs = convert(draw(row, sized(path, SHORT)), path.dtype)
    expected = run(row, inputs, path)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    with torch.no_grad():
        no_grad = row.op(**leaves, form="chunkwise", backend="triton")
    with torch.inference_mode():
        inference = row.op(**leaves, form="chunkwise", backend="triton")
    for output, state in (no_grad, inference):
        assert not output.requires_grad
        assert not state.requires_grad
        assert same_bits(output.cpu(), expected.output)
        assert same_bits(state.cpu(), expected.state)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_losses_on_half_of_the_result(row, path):
    """A loss on the output alone, or on the state alone: gradients that do not come are zeros, not memory."""
    inputs = convert(draw(row, sized(path, SHORT)), path.dtype)
    totals = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.items()}
    for which in (0, 1):
        leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
        result = row.op(**leaves, form="chunkwise", backend="triton")[which]
        loss = (result.double() * weights(result, which + 1).to(path.device)).sum()
        for name, x in zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True):
            if which == 1 and name == "q":
                assert x is None or not x.any()  # reading changes no memory
            totals[name] += 0 if x is None else x.double().cpu()
    expected = oracle(row, inputs)
    whole = run(row, inputs, path)
    assert_within(errors(whole._replace(grads=totals), expected), allowance(row, inputs, expected, path))


@pytest.mark.parametrize("path", ONE_EACH)
def test_backward_twice_through_one_graph(path):
    """And twice through two graphs that share their inputs: buffers of one call are never another's."""
    inputs = convert(draw(KIMI_DELTA, sized(path, SHORT)), path.dtype)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    outputs = [KIMI_DELTA.op(**leaves, form="chunkwise", backend="triton").output for _ in range(2)]
    first = torch.autograd.grad(outputs[0].square().sum(), list(leaves.values()), retain_graph=True)
    others = torch.autograd.grad(outputs[1].square().sum(), list(leaves.values()))
    second = torch.autograd.grad(outputs[0].square().sum(), list(leaves.values()))
    for name, x, y, z in zip(leaves, first, second, others, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z), name


@pytest.mark.parametrize("path", ONE_EACH)
def test_second_derivatives_are_refused(path):
    """Rather than given as if the first ones were constants."""
    inputs = convert(draw(GATED_DELTA, sized(path, SHORT)), path.dtype)
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    output, _ = GATED_DELTA.op(**leaves, form="chunkwise", backend="triton")
    (dq,) = torch.autograd.grad(output.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (dq.square().sum() + leaves["q"].sum()).backward()


@pytest.mark.parametrize("path", ONE_EACH)
def test_inputs_are_never_modified(path):
    """Neither by the call nor by its backward, nor through the result."""
    inputs = convert(draw(KIMI_DELTA, sized(path, SHORT)), path.dtype)
    for normalize_qk in (False, True):
        leaves = {name: x.to(path.device).clone().requires_grad_() for name, x in inputs.items()}
        output, state = KIMI_DELTA.op(**leaves, form="chunkwise", backend="triton", normalize_qk=normalize_qk)
        ones = torch.ones_like(output), torch.ones_like(state)
        grads = torch.autograd.grad((output, state), list(leaves.values()), ones)
        assert ones[0].eq(1).all() and ones[1].eq(1).all()
        for x in (output, state, *grads):
            x.detach().fill_(7e4)
        for name, x in leaves.items():
            assert torch.equal(x.detach().cpu(), inputs[name]), name
            assert x._version == 0, name


# Causality


def past(row: Row, inputs: Inputs, path: Path, position: int) -> Result:
    """The outputs before `position`, and the gradients of a loss on them."""
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    output = row.op(**leaves, form="chunkwise", backend="triton").output[:, :position]
    loss = (output.double() * weights(output, 1).to(path.device)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return Result(output.detach().cpu(), torch.zeros(()), {n: x.cpu() for n, x in zip(leaves, grads, strict=True)})


def causal_positions() -> list[object]:
    return [param(INTERPRETER, x) for x in (17, 64)] + [param(p, x) for p in GPU for x in (1, 17, 31, 63, 64, 100)]


@pytest.mark.parametrize(("path", "position"), causal_positions())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_future_never_changes_the_past(row, path, position):
    """Not one bit of an earlier output or gradient; and no gradient reaches the future, not even a rounding error.

    Only where a reset leaves a chunk's gradients to another kernel (channel.py instead of hopper/channel_gradients.py)
    are they merely close.
    """
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    other = convert(draw(row, sized(path, LEAN), seed=99), path.dtype)
    expected = past(row, inputs, path, position)
    values = (0.0, -50.0, -torch.inf)
    if path.device == "cpu":
        values = (-torch.inf,) if position % CHUNK else (0.0,)
    if row.decay == "none":
        values = (None,)
    for value in values:
        changed = {name: x.clone() for name, x in inputs.items()}
        for name in changed:
            if name != "state":
                changed[name][:, position:] = other[name][:, position:] * (1 if "decay" in name else 1.5)
        if value is not None:
            changed["log_decay"][:, position] = value
        got = past(row, changed, path, position)
        close = row.decay == "channel" and path == BF16 and value == -torch.inf
        assert same_bits(got.output, expected.output), value
        for name, x in got.grads.items():
            before = slice(None) if name == "state" else (slice(None), slice(position))
            if close:
                assert relative_error(x[before], expected.grads[name][before]) < 2**-7, (name, value)
            else:
                assert same_bits(x[before], expected.grads[name][before]), (name, value)
            if name != "state":
                assert not x[:, position:].any(), (name, value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [row for row in ROWS if row.decay != "none"], ids=str)
def test_nothing_crosses_a_decay_of_zero(row, path):
    """What follows log_decay = -inf has the same bits whatever came before, and no gradient reaches back across it.

    Only dlog_decay, a sum of differences over all later tokens, keeps their rounding errors before the reset.
    """
    position = 40
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    inputs["log_decay"][:, position] = -torch.inf
    other = convert(draw(row, sized(path, LEAN), seed=7), path.dtype)
    changed = {
        n: other[n] if n == "state" else torch.cat((other[n][:, :position], inputs[n][:, position:]), 1) for n in inputs
    }
    results = []
    for call in (inputs, changed):
        leaves = {name: x.to(path.device).requires_grad_() for name, x in call.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="triton")
        after = output[:, position:]
        grads = torch.autograd.grad(loss_of(after, state), list(leaves.values()))
        grads = {n: x.cpu() for n, x in zip(leaves, grads, strict=True)}
        assert not grads.pop("state").any()
        largest = max(x[:, position:].abs().max().item() for x in grads.values())
        rounding = (1e-6 if path.dtype == torch.float32 else torch.finfo(path.dtype).eps) * largest
        for name, x in grads.items():
            assert x[:, :position].abs().max().item() <= (rounding if name == "log_decay" else 0), name
        assert not grads["log_decay"][:, position].any()
        kept = {name: x[:, position:] for name, x in grads.items()}
        results.append(Result(after.detach().cpu(), state.detach().cpu(), kept))
    assert_same_bits(*results)


# The same bits


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_two_runs_give_the_same_bits(row, path):
    inputs = convert(draw(row, sized(path, LEAN, MODEL._replace(t=1000))), path.dtype)
    first = run(row, inputs, path)
    junk = [torch.full((n,), torch.nan, device=path.device) for n in (100, 10_000, 1_000_000)]
    assert_same_bits(run(row, inputs, path), first)
    del junk
    if path.device == "cuda":
        for _ in range(3):
            assert_same_bits(run(row, inputs, path), first)


def row_results(row: Row, inputs: Inputs, path: Path, order: list[int]) -> list[Result]:
    """Run rows of the batch together and take the results apart; the loss of a row does not depend on its place."""
    leaves = {name: x[order].to(path.device).requires_grad_() for name, x in inputs.items()}
    output, state = row.op(**leaves, form="chunkwise", backend="triton")
    loss = sum((x.double() * weights(x[:1], i).to(path.device)).sum() for i, x in ((1, output), (2, state)))
    grads = [x.cpu() for x in torch.autograd.grad(loss, list(leaves.values()))]
    output, state = output.detach().cpu(), state.detach().cpu()
    return [
        Result(output[i], state[i], {name: x[i] for name, x in zip(leaves, grads, strict=True)})
        for i in range(len(order))
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_batch_company_never_changes_a_row(row, path):
    """Alone, in company and in another order: the same bits, forward and backward; NaN stays in its row."""
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
    """Neither does a batch so large, or a row so long, that the work may be divided differently."""
    inputs = convert(draw(row, MODEL._replace(b=2, t=4100)), path.dtype)
    many = {name: x.repeat_interleave(20, 0) for name, x in inputs.items()}  # 160 walks: more than multiprocessors
    together = row_results(row, many, path, list(range(40)))
    for i in range(2):
        assert_same_bits(row_results(row, inputs, path, [i])[0], together[20 * i], i)
        assert_same_bits(together[20 * i + 19], together[20 * i], i)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_heads_do_not_see_each_other(row, path):
    """One key head full of NaN, with its value heads: the others keep their bits."""
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


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_nan_is_never_swallowed(row, path):
    """One NaN in any input must show in the output, at the latest one token later: a gate of NaN is no reset."""
    shape = sized(path, SHORT._replace(b=2, hv=1), MODEL._replace(b=2))
    for name in draw(row, shape):
        inputs = convert(draw(row, shape), path.dtype)
        (inputs[name][0] if name == "state" else inputs[name][0, 10]).flatten()[0] = torch.nan
        call = {n: x.to(path.device) for n, x in inputs.items()}
        output = row.op(**call, form="chunkwise", backend="triton").output.cpu()
        seen = output[0, 0] if name == "state" else output[0, 10:12]
        assert seen.isnan().any(), name
        assert output[1].isfinite().all(), name


@pytest.mark.parametrize("path", ONE_EACH)
def test_autocast_changes_no_bit(path):
    inputs = convert(draw(GATED_DELTA, sized(path, SHORT)), path.dtype)
    with torch.autocast(path.device, torch.bfloat16 if path.device == "cpu" else torch.float16):
        got = run(GATED_DELTA, inputs, path)
    assert_same_bits(got, run(GATED_DELTA, inputs, path))


# Split anywhere equals whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_split_anywhere_equals_whole(row, path):
    """Outputs, the final state and all gradients, with the state carried over."""
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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_recurrent_form(row, path):
    """What decoding is made of, as a form of the op: no gradients, the given state untouched, packed texts too."""
    for lengths in (None, (1, 0, 4)):
        shape = sized(path)._replace(b=2 if lengths is None else 1, t=5)
        inputs = convert(draw(row, shape, texts=lengths and len(lengths)), path.dtype)
        options = {"cu_seqlens": bounds(lengths)} if lengths else {}
        expected = oracle(row, inputs, only=(), **options)
        call = {name: x.to(path.device) for name, x in {**inputs, **options}.items()}
        output, state = row.op(**call, form="recurrent", backend="triton")
        assert torch.equal(call["state"].cpu(), inputs["state"])
        allowed = {n: x + 5 * native_term(path, 1) for n, x in budget(row, inputs, expected, 1, **options).items()}
        assert_within(errors(Result(output.cpu(), state.cpu(), {}), expected), allowed, lengths)


# Raw gates


FUSED_ROWS = [GATED_DELTA, KIMI_DELTA]


def raw_inputs(row: Row, path: Path, bias: str, shape: Shape, texts: int | None = None) -> Inputs:
    """Gates before their activation, in the dtype of q; A_log and dt_bias are parameters, in float32."""
    inputs = draw(row, shape, texts=texts)
    generator = torch.Generator().manual_seed(3)
    inputs["gate"] = 2 * torch.randn(inputs.pop("log_decay").shape, generator=generator, dtype=torch.float64)
    inputs["write"] = 2 * torch.randn(inputs.pop("beta").shape, generator=generator, dtype=torch.float64)
    inputs["q"], inputs["k"] = 3 * inputs["q"], 3 * inputs["k"]
    inputs = convert(inputs, path.dtype)
    inputs["A_log"] = torch.randn(shape.hv, generator=generator) - 1
    if bias != "no bias":
        size = inputs["gate"].shape[2:]
        inputs["dt_bias"] = torch.randn(size, generator=generator)
        if bias == "flat":
            inputs["dt_bias"] = inputs["dt_bias"].flatten()
    return inputs


def unfused(row: Row, inputs: Inputs, dtype: torch.dtype, beta_scale: float, **options: object) -> Result:
    """Activation, then the recurrent form in torch, differentiated by everything."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    bias = leaves.get("dt_bias")
    bias = None if bias is None else bias.view(leaves["gate"].shape[2:])
    log_decay, beta = activate(leaves["gate"], leaves["write"], leaves["A_log"], bias, beta_scale)
    plain = {name: leaves[name] for name in ("q", "k", "v", "state") if name in leaves}
    output, state = row.op(**plain, log_decay=log_decay, beta=beta, form="recurrent", backend="torch", **options)
    grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
    return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))


def rates(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """dlog_decay/dgate, and what a gate's gradient is multiplied by in dA_log = sum_t dgate_t softplus / sigmoid."""
    given = inputs["gate"].double()
    if "dt_bias" in inputs:
        given = given + inputs["dt_bias"].double().view(given.shape[2:])
    speed = inputs["A_log"].double().exp()
    slope = (speed.unsqueeze(-1) if given.dim() == 4 else speed) * given.sigmoid()
    return slope, F.softplus(given) / given.sigmoid()


def fused_errors(got: Result, expected: Result, inputs: Inputs) -> dict[str, float]:
    """As cases.errors: dgate is dlog_decay times the slope, and measured like it, against |k| |dk| times the slope."""
    found = errors(got, expected)
    floor = (
        expected.grads["k"].norm() * inputs["k"].double().norm(dim=-1).mean() * rates(inputs)[0].square().mean().sqrt()
    )
    return {**found, "dgate": relative_error(got.grads["gate"], expected.grads["gate"], floor.item())}


def fused_allowance(
    row: Row, inputs: Inputs, expected: Result, path: Path, beta_scale: float, **options: object
) -> dict[str, float]:
    """As cases.budget and half.budget, with the activations in front.

    dA_log and ddt_bias are a few sums of dgate over all tokens, and may cancel: their errors are bounded by that of
    dgate, |sum_t e_t r_t| <= |e| |r|.
    """
    if path.dtype != torch.float32:
        reference = half.run(inputs, raw={"beta_scale": beta_scale}, **options)
        allowed = half.budget(inputs, expected, raw={"beta_scale": beta_scale}, **options)
        rounding = torch.finfo(inputs["gate"].dtype).eps / 2 if inputs["gate"].dtype != torch.float32 else 0.0
        allowed["dgate"] = 2 * fused_errors(reference, expected, inputs)["dgate"] + rounding
    else:
        bias = inputs.get("dt_bias")
        bias = None if bias is None else bias.float().view(inputs["gate"].shape[2:])
        log_decay, beta = activate(inputs["gate"].float(), inputs["write"], inputs["A_log"], bias, beta_scale)
        gates = {"log_decay": log_decay, "beta": beta}
        kappa = _condition({"k": inputs["k"], "v": inputs["v"], **gates}, CHUNK, **options)
        t, n = inputs["q"].shape[1], min(CHUNK, inputs["q"].shape[1]) + inputs["k"].shape[-1] + inputs["v"].shape[-1]
        extra = 2**-24 * n**0.5 * kappa + native_term(path, t, kappa)
        found = fused_errors(unfused(row, inputs, torch.float32, beta_scale, **options), expected, inputs)
        allowed = {name: 2 * error + extra for name, error in found.items()}
        for name in ("gate", "write", "A_log", "dt_bias"):
            if name in inputs and inputs[name].dtype != torch.float32:
                allowed["d" + name] += torch.finfo(inputs[name].dtype).eps / 2
    slope, ratio = rates(inputs)
    grads = {name: x.double() for name, x in expected.grads.items()}
    floor = grads["k"].norm() * inputs["k"].double().norm(dim=-1).mean() * slope.square().mean().sqrt()
    error = allowed["dgate"] * max(grads["gate"].norm(), floor)
    per_head = ratio.square().sum([i for i in range(ratio.dim()) if i != 2]).sqrt().max()
    allowed["dA_log"] += (error * per_head / grads["A_log"].norm()).item()
    if "dt_bias" in inputs:
        tokens = inputs["gate"].shape[0] * inputs["gate"].shape[1]
        allowed["ddt_bias"] += (error * tokens**0.5 / grads["dt_bias"].norm()).item()
    return allowed


def check_fused(row: Row, inputs: Inputs, path: Path, what: object = "", **options: object) -> Result:
    beta_scale = options.get("beta_scale", 1.0)
    rest = {"normalize_qk": True, **{name: x for name, x in options.items() if name != "beta_scale"}}
    expected = unfused(row, inputs, torch.float64, beta_scale, **rest)
    got = differentiate(lineate.fused_delta_rule, inputs, path, **options)
    assert_like_the_inputs(got, inputs)
    allowed = fused_allowance(row, inputs, expected, path, beta_scale, **rest)
    assert_within(fused_errors(got, expected, inputs), allowed, what or row)
    return got


def biases(row: Row) -> tuple[str, ...]:
    return ("no bias", "bias", "flat") if row is KIMI_DELTA else ("no bias", "bias")


FUSED = [pytest.param(row, bias, id=f"{row}-{bias}") for row in FUSED_ROWS for bias in biases(row)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "bias"), FUSED)
def test_fused_equals_activation_and_op(row, bias, path):
    """Norms, gates and rates inside the kernels; the gradients of A_log and dt_bias too."""
    shape = sized(path, SMALL._replace(b=2 if bias == "bias" else 1))
    inputs = raw_inputs(row, path, bias, shape)
    got = check_fused(row, inputs, path)
    if bias == "bias":
        assert_same_bits(differentiate(lineate.fused_delta_rule, inputs, path), got)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_options(row, path):
    """Negative eigenvalues, a scale, no normalisation, an empty memory."""
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    check_fused(row, inputs, path, "beta_scale", beta_scale=2.0)
    check_fused(row, inputs, path, "scale", beta_scale=2, scale=0.3)
    del inputs["state"]
    check_fused(row, inputs, path, "empty memory")
    inputs["q"], inputs["k"] = inputs["q"] / 4, inputs["k"] / 4
    check_fused(row, inputs, path, "as they are", normalize_qk=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_packed_texts(row, path):
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    shape = sized(path)._replace(b=1, t=sum(texts))
    check_fused(row, raw_inputs(row, path, "bias", shape, len(texts)), path, cu_seqlens=bounds(texts))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_gates_of_another_dtype(row, path):
    """A layer's gates may come in float32 beside q in bfloat16, its parameters in bfloat16."""
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    narrow = torch.float16 if path.device == "cpu" else torch.bfloat16
    for gates, parameters in ((narrow, torch.float32), (torch.float32, narrow)):
        mixed = {n: x.to(gates if n in ("gate", "write") else x.dtype) for n, x in inputs.items()}
        mixed = {n: x.to(parameters if n in ("A_log", "dt_bias") else x.dtype) for n, x in mixed.items()}
        check_fused(row, mixed, path, (gates, parameters))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_extreme_gates(row, path):
    """Gates of -100 to 100 and infinite ones: exp never overflows, a closed gate forgets all, an open one nothing."""
    inputs = raw_inputs(row, path, "no bias", sized(path, SHORT))
    gate = inputs["gate"].flatten(2)
    gate[:, 3], gate[:, 5], gate[:, 8], gate[:, 11] = 100.0, -100.0, torch.inf, -torch.inf
    inputs["write"][:, 2], inputs["write"][:, 4] = 100.0, -100.0
    expected = unfused(row, inputs, torch.float64, 1.0, normalize_qk=True)
    got = differentiate(lineate.fused_delta_rule, inputs, path)
    found = errors(got._replace(grads={}), expected._replace(grads={}))
    reference = half.run(inputs, raw={}, normalize_qk=True) if path.dtype != torch.float32 else None
    reference = reference or unfused(row, inputs, torch.float32, 1.0, normalize_qk=True)
    extra = native_term(path, inputs["q"].shape[1]) + 2**-24 * (CHUNK + 256) ** 0.5
    rounding = torch.finfo(path.dtype).eps / 2 if path.dtype != torch.float32 else 0.0
    allowed = errors(reference._replace(grads={}), expected._replace(grads={}))
    assert_within(found, {name: 2 * x + extra + rounding for name, x in allowed.items()})
    for name, x in got.grads.items():
        if expected.grads[name].isfinite().all():
            assert x.isfinite().all(), name


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_small_raw_gates_are_not_lost(row, path):
    """softplus(-12) is 6e-6: 1 + e^-12 alone would lose a hundredth of it, and a long memory with it."""
    shape = sized(path)._replace(b=1, t=1)
    inputs = raw_inputs(row, path, "no bias", shape)
    inputs["gate"].fill_(-12.0)
    inputs["write"].fill_(-torch.inf)
    inputs["A_log"].fill_(8.0)
    call = {name: x.to(path.device) for name, x in inputs.items()}
    state = lineate.fused_delta_rule(**call, backend="triton").state.cpu()
    decay = torch.exp(-torch.exp(torch.tensor(8.0).double()) * F.softplus(torch.tensor(-12.0).double()))
    assert ((state / inputs["state"] - decay) / decay).abs().max().item() < 1e-6


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_fused_gradients_of_some_inputs_only(row, path):
    inputs = raw_inputs(row, path, "bias", sized(path, SHORT))
    everything = differentiate(lineate.fused_delta_rule, inputs, path)
    for name in ("gate", "A_log", "dt_bias") if path.device == "cpu" else inputs:
        some = differentiate(lineate.fused_delta_rule, inputs, path, only=(name,))
        assert list(some.grads) == [name]
        assert_same_bits(some, everything, name)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("row", "bias"), FUSED)
def test_fused_without_kernels(row, bias, backend):
    """On a CPU it is torch in front of the op: float32 within its budget, float64 to 1e-10."""
    inputs = raw_inputs(row, INTERPRETER, bias, SMALL)
    expected = unfused(row, inputs, torch.float64, 2.0, normalize_qk=True)
    for dtype in (torch.float32, torch.float64):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, state = lineate.fused_delta_rule(**leaves, beta_scale=2.0, backend=backend)
        grads = dict(zip(leaves, torch.autograd.grad(loss_of(output, state), list(leaves.values())), strict=True))
        allowed = fused_allowance(row, inputs, expected, INTERPRETER, 2.0, normalize_qk=True)
        found = fused_errors(Result(output.detach(), state.detach(), grads), expected, inputs)
        assert_within(found, allowed if dtype == torch.float32 else 1e-10, dtype)


# Long texts are cut into segments that run side by side, and their backward into slices that run one after the other


@pytest.fixture
def cuts(monkeypatch):
    """Sets how many segments a walk of so many chunks has, and how many bytes of states a slice may have."""
    chunkwise = pytest.importorskip("lineate.kernels.pipeline")

    def set_cuts(segments: object = None, slice_bytes: int | None = None) -> None:
        if segments is not None:
            monkeypatch.setattr(chunkwise, "count_segments", lambda chunks, *_: segments(chunks))
        if slice_bytes is not None:
            monkeypatch.setattr(chunkwise, "SLICE_BYTES", slice_bytes)

    return set_cuts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_segments(row, path, cuts):
    """Two segments of two chunks, and one of none: the same results within the same budget."""
    cuts(segments=lambda chunks: min(3, chunks))
    shape = sized(path, LEAN, MODEL)._replace(t=3 * CHUNK + 5)
    check(row, convert(draw(row, shape, "reset -50" if row.decay != "none" else "ordinary"), path.dtype), path)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_slices_of_the_backward_change_no_bit(row, path, cuts):
    for b in (1, 2):
        inputs = convert(draw(row, sized(path, LEAN)._replace(b=b, t=130 if b == 1 else 20)), path.dtype)
        expected = run(row, inputs, path)
        cuts(slice_bytes=1)
        assert_same_bits(run(row, inputs, path), expected, b)
        cuts(slice_bytes=2**28)


@pytest.mark.parametrize("path", ONE_EACH)
def test_slices_of_the_fused_backward(path, cuts):
    """dA_log and ddt_bias are sums over the slices, in another order; the rest keeps its bits."""
    inputs = raw_inputs(KIMI_DELTA, path, "bias", sized(path, LEAN)._replace(t=130))
    expected = differentiate(lineate.fused_delta_rule, inputs, path)
    cuts(slice_bytes=1)
    got = check_fused(KIMI_DELTA, inputs, path)
    for result in (got, expected):
        del result.grads["A_log"], result.grads["dt_bias"]
    assert_same_bits(got, expected)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_batch_company_never_changes_where_a_row_is_cut(row, path, cuts):
    """A row alone is sliced by tokens, rows together are sliced by rows: the same bits all the same."""
    shape = sized(path, LEAN)._replace(b=2, t=4 * CHUNK - 3)
    inputs = convert(draw(row, shape), path.dtype)
    size = 4 if path.dtype == torch.float32 else 2
    cuts(segments=lambda chunks: max(1, chunks // 2), slice_bytes=2 * shape.hv * shape.k * shape.v * size)
    together = row_results(row, inputs, path, [0, 1])
    assert_same_bits(row_results(row, inputs, path, [1])[0], together[1])


# Compiling


class Layer(nn.Module):
    """Something to differentiate before and after the op, the state in and out."""

    def __init__(self, op: object, path: Path, shape: Shape, **options: object):
        super().__init__()
        self.op, self.options = op, options
        self.before, self.after = (nn.Linear(shape.v, n, device=path.device) for n in (shape.v, 3))

    def forward(self, inputs: Inputs, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v = self.before(inputs["v"].float()).to(inputs["v"].dtype)
        output, state = self.op(**{**inputs, "v": v}, cu_seqlens=cu_seqlens, backend="triton", **self.options)
        return self.after(output.float()), state


def compare_compiled(layer: Layer, inputs: Inputs, path: Path, cu_seqlens: Tensor | None = None) -> None:
    """Compiled in one graph, forward and backward: the same bits as eager, twice."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    cu_seqlens = to(path.device, cu_seqlens)
    for turn in (0, 1):
        results = []
        for function in (layer, compiled):
            leaves = {n: x.to(path.device) + 0 for n, x in inputs.items()}
            leaves = {n: (x.roll(turn, 1) if x.dim() > 2 else x).requires_grad_() for n, x in leaves.items()}
            output, state = function(leaves, cu_seqlens)
            wanted = [*leaves.values(), *layer.parameters()]
            results.append([output, state, *torch.autograd.grad(output.square().sum() + state.square().sum(), wanted)])
        for i, (expected, got) in enumerate(zip(*results, strict=True)):
            assert same_bits(got.detach(), expected.detach()), i


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [LINEAR, GATED_DELTA, KIMI_DELTA], ids=str)
def test_compiled_equals_eager(row, path):
    torch.manual_seed(0)
    shape = sized(path, SHORT)
    layer = Layer(row.op, path, shape, form="chunkwise", normalize_qk=row.corrects)
    compare_compiled(layer, convert(draw(row, shape), path.dtype), path)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_compiled_fused_equals_eager(row, path):
    torch.manual_seed(0)
    shape = sized(path, SHORT)
    layer = Layer(lineate.fused_delta_rule, path, shape, beta_scale=2.0)
    compare_compiled(layer, raw_inputs(row, path, "bias", shape), path)


@pytest.mark.parametrize("path", ONE_EACH)
def test_compiled_packed_texts(path):
    torch.manual_seed(0)
    lengths = (1, 0, 70)
    inputs = packed_inputs(GATED_DELTA, path, lengths)
    compare_compiled(Layer(GATED_DELTA.op, path, sized(path), form="chunkwise"), inputs, path, bounds(lengths))


@pytest.mark.parametrize("path", ONE_EACH)
def test_compiled_recurrent_form(path):
    torch._dynamo.reset()
    inputs = convert(draw(KIMI_DELTA, sized(path)._replace(t=2)), path.dtype)
    call = {name: x.to(path.device) for name, x in inputs.items()}
    op = torch.compile(lambda x: KIMI_DELTA.op(**x, backend="triton"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, expected in zip(op(call), KIMI_DELTA.op(**call, backend="triton"), strict=True):
            assert same_bits(got, expected)


class Captured(TorchDispatchMode):
    """The calls of lineate's own torch ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineate":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("which", ["gated_delta", "fused gated_delta", "fused kimi_delta"])
def test_custom_ops_keep_their_promises(which, packed, path):
    """opcheck: schema, fake tensors, autograd registration, of every op that a call and its backward use."""
    lengths = (1, 0, 19)
    shape, texts = sized(path, SHORT._replace(hv=1))._replace(t=20), len(lengths) if packed else None
    row = {x.name: x for x in ROWS}[which.removeprefix("fused ")]
    fused = which.startswith("fused")
    inputs = (
        raw_inputs(row, path, "bias", shape, texts) if fused else convert(draw(row, shape, texts=texts), path.dtype)
    )
    leaves = {name: x.to(path.device).requires_grad_() for name, x in inputs.items()}
    op = lineate.fused_delta_rule if fused else row.op
    with Captured() as captured:
        output, state = op(**leaves, backend="triton", cu_seqlens=bounds(lengths).to(path.device) if packed else None)
        torch.autograd.grad(output.square().sum() + state.square().sum(), list(leaves.values()))
    assert len(captured.calls) == 2
    for op, args, kwargs in captured.calls:
        detached = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
        torch.library.opcheck(op, detached, kwargs, test_utils=utils)


# Natively only


def on_gpu(inputs: Inputs) -> Inputs:
    return {name: x.cuda() for name, x in inputs.items()}


@pytest.mark.parametrize("path", GPU_ONLY)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_auto_takes_the_kernels(row, path):
    inputs = on_gpu(convert(draw(row, MODEL), path.dtype))
    assert lineate.explain(**inputs).backend == "triton"
    for got, expected in zip(row.op(**inputs), row.op(**inputs, form="chunkwise", backend="triton"), strict=True):
        assert same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_a_positive_log_decay_answers_nan(row):
    """Nobody waits for a GPU to look at its gates: what would be an error on a CPU is NaN there, in its head alone."""
    inputs = on_gpu(convert(draw(row, MODEL), torch.bfloat16))
    inputs["log_decay"][:, 20, 1] = 0.5
    output = row.op(**inputs, form="chunkwise").output
    assert output[:, 20:, 1].isnan().any()
    assert output[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("row", [GATED_LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_nan_in_log_decay_is_not_swallowed(row, path):
    inputs = convert(draw(row, sized(path)), path.dtype)
    inputs["log_decay"][:, 10, -1] = torch.nan
    assert run(row, inputs, path, only=()).output[:, 11:, -1].isnan().any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
@pytest.mark.parametrize("how", ["negative beta", "long keys"])
def test_wild_systems(how, row, path):
    """A memory that grows by a fifth a token has entries in its inverse that leave float16: they must be right too."""
    inputs = draw(row, sized(path))
    inputs["log_decay"] = inputs["log_decay"] * 0.1
    if how == "negative beta":
        inputs["beta"] = -0.2 * torch.ones_like(inputs["beta"])
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
    else:
        inputs["beta"] = torch.full_like(inputs["beta"], 1.2)
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]) * 1.4
    check(row, convert(inputs, path.dtype), path, how)


def call_of(inputs: Inputs, corrects: bool, normalize: bool = False, beta_scale: float = 1.0) -> object:
    """The call that the stages get of these inputs."""
    calls, kernels = importlib.import_module("lineate.call"), importlib.import_module("lineate.kernels.call")
    options = calls.Options(corrects, 1.0, normalize, beta_scale=beta_scale)
    return kernels.make_call(calls.Inputs(**{name: x for name, x in inputs.items() if name != "state"}), options)


@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalize"])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
@pytest.mark.parametrize("path", [param(INTERPRETER)])
def test_wild_rows_are_made_anew(row, path, normalize, monkeypatch):
    """As with bfloat16 inputs: products of float16 up to the first wild row, of float32 from there on."""
    stages = importlib.import_module("lineate.kernels.portable.stages").PortableStages
    inputs = convert(draw(row, LEAN._replace(t=150)), path.dtype)
    inputs["k"][:, 100:] *= 1.7
    inputs["beta"][:, 100:] = 1.0
    inputs["beta"][:, 30] = -0.5
    call = call_of(inputs, True, normalize)
    expected = stages(call).prepare().T
    monkeypatch.setattr(stages, "choose_products", lambda _: ("fp16", "tf32x3"))
    got = stages(call).prepare().T
    for slot, first in ((0, 30), (1, CHUNK if normalize else 36), (2, CHUNK if normalize else 0)):
        assert (got - expected)[slot].abs().max() < 1e-3
        assert same_bits(got[slot, :, first:], expected[slot, :, first:])
        assert first == 0 or not same_bits(got[slot, :, :first], expected[slot, :, :first])


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Has calls take the Gluon launches of decay per channel, and puts others in their place."""
    hopper = pytest.importorskip("lineate.kernels.hopper.stages")

    class Stages(hopper.HopperStages):
        def __init__(self, call: object) -> None:
            super().__init__(call)
            self.takes_channel, self.products = True, ("fp16", "tf32x3")

    def replace_launches(scores: object, gradients: object = None) -> type:
        monkeypatch.setattr(hopper.launch_scores, "fill_channel_scores", scores)
        monkeypatch.setattr(hopper.launch_gradients, "fill_channel_gradients", gradients)
        monkeypatch.setattr(importlib.import_module("lineate.kernels.pipeline"), "stages_for", Stages)
        return Stages

    return replace_launches


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
def test_scores_that_gluon_leaves_are_made_anew(row, path, as_on_hopper):
    """Whatever lies from a chunk's first wild row on, and of what looks ahead, becomes the plain kernel's."""
    portable = importlib.import_module("lineate.kernels.portable.stages").PortableStages
    call = call_of(convert(draw(row, LEAN._replace(t=150), "reset -50"), path.dtype), row.corrects)
    expected = portable(call).prepare(for_backward=True)
    first_wild = (30, CHUNK, 0)

    def leave(_: object, ready: NamedTuple) -> None:
        ready.wild[:, 0] = torch.tensor(first_wild)
        for slot, first in enumerate(first_wild):
            tokens = slice(slot * CHUNK, slot * CHUNK + first)
            for x, y in ((ready.q, expected.q), (ready.k, expected.k)):
                x[:, tokens] = y[:, tokens]
            for x, y in ((ready.P, expected.P), (ready.M, expected.M), (ready.T, expected.T)):
                if x is not None:
                    x[slot, :, :first] = y[slot, :, :first]
            if first == CHUNK:
                ready.w[:, tokens], ready.factors[slot] = expected.w[:, tokens], expected.factors[slot]

    got = as_on_hopper(leave)(call).prepare(for_backward=True)
    assert (got.T is None) == (got.M is None) == (not row.corrects)
    for name in ("q", "k", "w", "P", "M", "T", "factors"):
        x, y = getattr(got, name), getattr(expected, name)
        assert (x is None and y is None) or same_bits(x, y), name


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
def test_gradients_that_gluon_leaves_are_made_anew(row, path, as_on_hopper):
    """64 channels of a chunk become the plain kernels' if they are wild, and are not touched if not."""
    inputs = convert(draw(row, Shape(1, 70, 1, 1, 128, 128), "reset -50"), path.dtype)
    expected = run(row, inputs, path)
    wild_units = torch.tensor([[[1, 0]], [[0, 1]]])

    def all_wild(_: object, ready: NamedTuple) -> None:
        ready.wild.zero_()

    def leave(call: object, ready: NamedTuple, around: NamedTuple, work: NamedTuple, grads: NamedTuple) -> None:
        work.wild.copy_(wild_units)
        for slot, _, x in (wild_units == 0).nonzero().tolist():
            part = slice(None), slice(slot * CHUNK, (slot + 1) * CHUNK), slice(None), slice(x * 64, x * 64 + 64)
            for x, name in ((work.dq, "q"), (work.dk, "k"), (grads.log_decay, "log_decay")):
                x[part] = expected.grads[name][part] + 1

    as_on_hopper(all_wild, leave)
    got = run(row, inputs, path)
    for name in ("q", "k", "log_decay"):
        tame = (wild_units == 0).repeat_interleave(64, 2).repeat_interleave(CHUNK, 0)[None, :70]
        expected.grads[name] += tame
    assert_same_bits(got, expected)


def test_wild_rows_are_looked_for_unless_there_can_be_none():
    """Unit keys and beta = 2 sigmoid(logit) at most: no second launch. Decay per channel can always be wild."""
    stages = pytest.importorskip("lineate.kernels.portable.stages").PortableStages
    x = torch.zeros(1, 5, 2, 16, dtype=torch.bfloat16)

    def launches(log_decay: Tensor, normalize: bool, A_log: Tensor | None = None, beta_scale: float = 1.0) -> int:
        inputs = {"q": x, "k": x, "v": x, "log_decay": log_decay, "beta": x[..., 0], "A_log": A_log}
        return len(stages(call_of(inputs, True, normalize, beta_scale)).products)

    assert launches(x[..., 0], True, A_log=x[0, 0, :, 0], beta_scale=2.0) == 1
    assert launches(x[..., 0], True, A_log=x[0, 0, :, 0], beta_scale=2.1) == 2
    assert launches(x[..., 0], False, A_log=x[0, 0, :, 0]) == 2
    assert launches(x[..., 0], True) == 2
    assert launches(x, True, A_log=x[0, 0, :, 0]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "wrong", [(0, 20, 140), (3, 20, 130), (0, 120, 60, 130), (0, -5, 130), (0, 1000, 0, 130), (0, 0, 0)], ids=str
)
def test_wrong_bounds_touch_nothing_outside(wrong):
    """Bounds are not looked at on a GPU either; memory around the tensors stays as it is."""
    shape = MODEL._replace(h=1, hv=2) if not any(wrong) else MODEL
    inputs = convert(draw(GATED_DELTA, shape, "empty memory"), torch.bfloat16)
    guarded = {}
    for name, x in inputs.items():
        guarded[name] = torch.full((3, *x.shape), 7.0, dtype=x.dtype, device="cuda")
        guarded[name][1] = x
    leaves = {name: x[1].detach().requires_grad_() for name, x in guarded.items()}
    output, state = GATED_DELTA.op(**leaves, cu_seqlens=torch.tensor(wrong, device="cuda"), form="chunkwise")
    torch.autograd.grad(output.nan_to_num().sum() + state.nan_to_num().sum(), list(leaves.values()))
    torch.cuda.synchronize()
    for x in guarded.values():
        assert x[0].eq(7).all() and x[2].eq(7).all()


@pytest.mark.parametrize("path", GPU_ONLY[:2])
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_long_texts(row, path):
    """100003 tokens against the chunkwise form in float64 on the GPU; 2 x the error of torch in the same dtype."""
    inputs = on_gpu(convert(draw(row, MODEL._replace(t=100_003)), path.dtype))

    def in_torch(dtype: torch.dtype) -> Result:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="torch")
        grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
        return Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))

    expected = in_torch(torch.float64)
    if path.dtype == torch.float32:
        kappa = _condition({n: x[:, -1000:].cpu() for n, x in inputs.items() if n != "state"}, CHUNK)
        extra = native_term(path, 100_003 if row.decay == "none" else 10 * CHUNK, kappa)  # what is decayed is forgotten
        allowed = {n: 2 * x + extra for n, x in errors(in_torch(torch.float32), expected).items()}
    else:
        allowed = half.budget(inputs, expected)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, state = row.op(**leaves, form="chunkwise", backend="triton")
    grads = torch.autograd.grad(loss_of(output, state), list(leaves.values()))
    got = Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True)))
    assert_within(errors(got, expected), allowed)
    # The end is as exact as the whole: nothing drifts.
    late = slice(-1000, None)

    def tail(result: Result) -> Result:
        grads = {n: x if n == "state" else x[:, late] for n, x in result.grads.items()}
        return Result(result.output[:, late], result.state, grads)

    assert_within(errors(tail(got), tail(expected)), {n: 2 * x for n, x in allowed.items()}, "the last 1000 tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_more_than_two_to_the_31_elements(row):
    """Heads are independent: the last ones, whose addresses are the largest, equal a run on them alone."""
    t, h, hv, k, v = 300_000, 16, 64, 128, 128
    assert t * hv * v > 2**31
    torch.cuda.empty_cache()  # what another test left
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
        """The last key head and its value heads."""
        return x[:, -hv // h :] if name == "state" else x[:, :, -1:] if name in ("q", "k") else x[:, :, -hv // h :]

    own = {name: last(name, x.detach()).contiguous() for name, x in inputs.items()}
    whole = {name: last(name, x).contiguous() for name, x in results(inputs, doutput).items()}
    alone = results(own, doutput[:, :, -hv // h :].contiguous())
    for name, x in whole.items():
        for part in (slice(None, 1000), slice(-1000, None)) if name != "state" else (slice(None),):
            assert relative_error(x[:, part], alone[name][:, part]) <= 2**-9, name
    assert all(x.isfinite().all() for x in whole.values())


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_in_a_cuda_graph(row, backward, packed):
    """Captured once, replayed with other numbers and other bounds: the same bits as eager calls."""
    shape = MODEL._replace(b=1, t=130)
    lengths = (64, 0, 66)
    inputs = on_gpu(raw_inputs(row, BF16, "bias", shape, len(lengths) if packed else None))
    leaves = {name: x.requires_grad_(backward) for name, x in inputs.items()}
    ends = bounds(lengths).cuda() if packed else None

    def compute() -> list[Tensor]:
        output, state = lineate.fused_delta_rule(**leaves, cu_seqlens=ends)
        if not backward:
            return [output, state]
        ones = torch.ones_like(output), torch.ones_like(state)
        return [output, state, *torch.autograd.grad((output, state), list(leaves.values()), ones)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for i, (got, expected) in enumerate(zip(captured, compute(), strict=True)):
            assert same_bits(got.detach(), expected.detach()), (turn, i)
        with torch.no_grad():
            for name in ("q", "k", "v", "gate", "write"):
                leaves[name].copy_(leaves[name].roll(1, 1))
            if ends is not None:
                ends.copy_(bounds(((1, 129, 0), (0, 65, 65))[turn % 2]))


@pytest.mark.parametrize("problem", [None, ValueError, KeyboardInterrupt])
def test_launches_that_only_compile(problem):
    """Nothing is launched; and whatever ends it, later launches, and Triton, know nothing of it."""
    launching = pytest.importorskip("lineate.kernels.launching")
    modes = importlib.import_module("triton.runtime._async_compile").active_mode
    seen = []

    class Kernel:
        def run(self, *args, grid, warmup, **options):
            seen.append((args, grid, warmup, modes.get() is not None, options))

    def function():
        launching.start(Kernel(), (1, 2))(3, four=5)
        if problem:
            raise problem

    if problem:
        with pytest.raises(problem):
            launching.compile_only(function)
    else:
        launching.compile_only(function)
    launching.start(Kernel(), (6,))()
    assert seen == [((3,), (1, 2), True, True, {"four": 5}), ((), (6,), False, False, {})]
    assert modes.get() is None


def kernels() -> dict[str, object]:
    package = importlib.import_module("lineate.kernels")
    found = {}
    for info in pkgutil.walk_packages(package.__path__, "lineate.kernels."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, x in vars(module).items():
            if hasattr(x, "device_caches"):
                found[f"{x.__module__}.{name}"] = x
    return found


def compilations() -> dict[str, int]:
    """How many variants of each kernel there are by now."""
    return {n: sum(len(cache[0]) for cache in x.device_caches.values()) for n, x in kernels().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_one_compilation_for_every_batch_and_length(row, packed, monkeypatch):
    """Neither t nor b nor the number of texts may compile anything again: a server sees all of them.

    And all that a call and its backward need was compiled ahead of them, side by side.
    """
    chunkwise = importlib.import_module("lineate.kernels.pipeline")
    before, ahead, compile_ahead = None, {}, chunkwise.compile_ahead
    for kernel in kernels().values():
        kernel.device_caches.clear()
    monkeypatch.setattr(chunkwise, "_COMPILED", set())
    monkeypatch.setattr(
        chunkwise, "compile_ahead", lambda *args: (compile_ahead(*args), ahead.update(compilations()))[0]
    )
    for b, t in ((2, 130), (1, 64), (3, 65), (1, 1), (5, 16), (2, 100)):
        texts = (t,) * b if packed else None
        shape = MODEL._replace(b=1, t=b * t) if packed else MODEL._replace(b=b, t=t)
        inputs = on_gpu(raw_inputs(row, BF16, "bias", shape, texts and len(texts)))
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        output, state = lineate.fused_delta_rule(**leaves, cu_seqlens=bounds(texts).cuda() if texts else None)
        torch.autograd.grad(output.float().sum() + state.sum(), list(leaves.values()))
        after = compilations()
        before = before or after
        assert after == ahead, (b, t)
        assert {n: x for n, x in after.items() if x != before.get(n)} == {}, (b, t)
