"""The kernels of the rules, run and checked in Triton's interpreter on a CPU and natively on a GPU.

One body serves both: `path` is ("cpu", float32), which is the interpreter, or ("cuda", a dtype). The oracle is the
recurrent form in float64 on a CPU; budgets are cases.budget in float32 and half.budget in 16 bits.
"""

import torch
from torch import Tensor

from tests.support import half
from tests.support.cases import (
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    Inputs,
    Result,
    Row,
    Shape,
    _condition,
    assert_within,
    budget,
    convert,
    draw,
    errors,
    oracle,
    weights,
)
from tests.support.paths import Path

CHUNK = 64

# k != v, hv > h, and no size is a power of two; a GPU adds the sizes of models, which may have other kernels.
LENGTHS = (1, 63, 64, 65, 3 * 64 + 5)
SMALL = Shape(1, 70, 1, 2, 12, 20)
LEAN = SMALL._replace(hv=1)
SHORT = SMALL._replace(t=20)
ONE_HEAD = SHORT._replace(hv=1)  # where heads are not the point
MODEL = Shape(1, 130, 2, 4, 128, 128)
TEXTS = (0, 1, 64, 0, 128, 70, 0)
FEWER_TEXTS = (0, 1, 64, 0, 67)  # for a CPU, where every program is slow


def sized(path: Path, small: Shape = SMALL, model: Shape = MODEL) -> Shape:
    return small if path.device == "cpu" else model


def to(device: str, x: object) -> object:
    return x.to(device) if isinstance(x, Tensor) else x


def loss_of(output: Tensor, state: Tensor) -> Tensor:
    """Return sum(w output) + sum(w' state), the loss of cases.run."""
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
    """Return the error that a GPU adds in float32.

    Products by three tf32 ones and exp keep 22 bits; once per chunk, T multiplies the errors.
    """
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
    """Compare output, final state and all gradients with the oracle, on exactly the same numbers."""
    expected = oracle(row, inputs, **options)
    got = run(row, inputs, path, **options)
    assert_like_the_inputs(got, inputs)
    assert_within(errors(got, expected), allowance(row, inputs, expected, path, **options), what or row)
    return got


CHANNEL_ROWS = [GATED_LINEAR_CHANNEL, KIMI_DELTA]


def packed_inputs(row: Row, path: Path, lengths: tuple[int, ...], small: Shape = SMALL) -> Inputs:
    shape = sized(path, small)._replace(b=1, t=sum(lengths))
    return convert(draw(row, shape, texts=len(lengths)), path.dtype)


def row_results(row: Row, inputs: Inputs, path: Path, order: list[int]) -> list[Result]:
    """Run rows of the batch together and separate the results; the loss of a row does not depend on its place."""
    leaves = {name: x[order].to(path.device).requires_grad_() for name, x in inputs.items()}
    output, state = row.op(**leaves, form="chunkwise", backend="triton")
    loss = sum((x.double() * weights(x[:1], i).to(path.device)).sum() for i, x in ((1, output), (2, state)))
    grads = [x.cpu() for x in torch.autograd.grad(loss, list(leaves.values()))]
    output, state = output.detach().cpu(), state.detach().cpu()
    return [
        Result(output[i], state[i], {name: x[i] for name, x in zip(leaves, grads, strict=True)})
        for i in range(len(order))
    ]


def on_gpu(inputs: Inputs) -> Inputs:
    return {name: x.cuda() for name, x in inputs.items()}
