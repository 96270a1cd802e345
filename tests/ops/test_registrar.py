"""One registrar makes the ops: eager calls and calls as an op agree, forward, backward and under a compiler."""

import importlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lineate.torch_ops.registrar import register_op
from tests.support.cases import interpreted

KEPT: list[bool] = []


def _forward(x: Tensor, y: Tensor | None, factor: float, keep: bool) -> tuple[Tensor, Tensor]:
    KEPT.append(keep)
    result = factor * x * x if y is None else factor * x * y
    return result, x.new_ones(1 if keep else 0)


def _backward(dresult: Tensor, x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    if y is None:
        return 2 * factor * x * dresult, x.new_empty(0)
    return factor * y * dresult, factor * x * dresult


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


def _differentiate(run, ctx, dresult, _):
    x, y = ctx.saved_tensors
    dx, dy = run(dresult, x, y, ctx.factor)
    return dx, None if y is None else dy, None, None


product = register_op(
    "test_product",
    _forward,
    _backward,
    fake=lambda x, y, factor, keep: (x.new_empty(x.shape), x.new_empty(1 if keep else 0)),
    fake_backward=lambda dresult, x, y, factor: (x.new_empty(x.shape), x.new_empty(0 if y is None else y.shape)),
    tensors=2,
    save=_save,
    differentiate=_differentiate,
    hidden=1,
    keeps=True,
)


def _double(x: Tensor, factor: float) -> Tensor:
    return factor * x


def _double_backward(dy: Tensor, x: Tensor, factor: float) -> Tensor:
    return factor * dy


double = register_op(
    "test_double",
    _double,
    _double_backward,
    fake=lambda x, factor: x.new_empty(x.shape),
    fake_backward=lambda dy, x, factor: x.new_empty(x.shape),
    tensors=1,
)


class Seen(TorchDispatchMode):
    """Records the ops of lineate that are called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineate":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("given", [False, True], ids=["without y", "with y"])
def test_an_eager_call_and_the_op_agree(given, x):
    y = (x.detach() + 1).requires_grad_() if given else None
    leaves = [x] if y is None else [x, y]
    eager = torch.autograd.grad(product(x, y, 2.0)[0].sum(), leaves)
    with Seen() as seen:
        as_op = torch.autograd.grad(product(x, y, 2.0)[0].sum(), leaves)
    assert seen.names == ["lineate::test_product", "lineate::test_product_backward"]
    assert all(a.equal(b) for a, b in zip(eager, as_op, strict=True))


def test_forward_is_told_whether_a_backward_may_follow(x):
    KEPT.clear()
    product(x, None, 2.0)
    product(x.detach(), None, 2.0)
    with torch.no_grad():
        product(x, None, 2.0)
    assert KEPT == [True, False, False]


def test_the_hidden_result_has_no_gradient(x):
    result, hidden = product(x, None, 2.0)
    assert result.requires_grad and not hidden.requires_grad


@pytest.mark.cover
def test_compiled_calls_are_one_graph(x):
    def run(x):
        return product(x, None, 2.0)[0].sum() + double(x, 3.0).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (wanted,), (got,) = torch.autograd.grad(run(x), x), torch.autograd.grad(compiled(x), x)
    assert got.equal(wanted)


def test_without_save_the_inputs_are_kept(x):
    (gradient,) = torch.autograd.grad(double(x, 3.0).sum(), x)
    assert gradient.equal(torch.full_like(x, 3.0))


def test_virtual_tensors_are_copied_first():
    x = torch.randn(3, 4)
    negative = torch._neg_view(x)
    assert double(negative, 2.0).equal(-2 * x) and not double(negative, 2.0).is_neg()


def test_a_second_derivative_is_refused(x):
    (gradient,) = torch.autograd.grad(double(x * x, 3.0).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="lineate::test_double has no second derivative"):
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize("part", ["registrar", pytest.param("norm of the kernels", marks=interpreted)])
def test_activation_checkpointing_may_unpack_saved_tensors_once(part, x):
    """It refuses to unpack them a second time, so gradients read them once."""
    run = lambda x: product(x, None, 2.0)[0] + double(x, 3.0)  # noqa: E731
    if part != "registrar":
        ops = importlib.import_module("lineate.kernels.layers.ops")
        weight = torch.ones(4)
        run = lambda x: ops.gated_rms_norm(x, x.sigmoid(), weight)  # noqa: E731
    wanted = torch.autograd.grad(run(x).sum(), x)
    got = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), x)
    assert got[0].equal(wanted[0])
