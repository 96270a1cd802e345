"""Wraps an eager function as one torch op, for graphs that cannot trace it because sizes depend on values."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lineate.torch_ops.registrar import declare_op


def opaque(
    name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], *, gradients: int
) -> Callable[..., Tensor]:
    """Return run, which appears in compiled graphs as `lineate::<name>`; the graph's backward runs it a second time.

    run takes and returns annotated tensors and numbers; its first `gradients` arguments, tensors, are differentiated.
    fake returns an empty tensor of the result's shape. Outside of graphs run is called directly.
    """

    def backward(dout: Tensor, *inputs: object) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:gradients] if isinstance(x, Tensor)]
        with _autograd_inside_an_op(), torch.enable_grad():
            found = torch.autograd.grad(run(*leaves, *inputs[gradients:]), leaves, dout)
        return tuple(x.contiguous() for x in found)

    schema = torch.library.infer_schema(run, mutates_args=())
    given = schema[1 : schema.index(")")]
    results = ", ".join(["Tensor"] * gradients)
    forward_op, _ = declare_op(
        name,
        run,
        backward,
        fake=fake,
        fake_backward=lambda dout, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:gradients]),
        backward_schema=f"(Tensor dout, {given}) -> ({results})",
    )

    def call(*inputs: object) -> Tensor:
        return forward_op(*inputs) if torch.compiler.is_compiling() else run(*inputs)

    return call


def _autograd_inside_an_op() -> AbstractContextManager[None]:
    """Enable autograd, which torch disables inside ops."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
