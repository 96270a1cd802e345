"""An eager function as one torch op, for graphs that cannot look into it: its sizes depend on numbers in tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor


def opaque(
    name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], *, gradients: int
) -> Callable[..., Tensor]:
    """Return run, which goes into compiled graphs as `lineate::<name>`; the graph's backward runs it once more.

    run takes and returns annotated tensors and numbers; its first `gradients` arguments, tensors, are differentiated.
    fake returns an empty tensor of the result's shape. Outside of graphs run is called as it is.
    """

    def backward(dout: Tensor, *inputs: object) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:gradients] if isinstance(x, Tensor)]
        with _autograd_inside_an_op(), torch.enable_grad():
            found = torch.autograd.grad(run(*leaves, *inputs[gradients:]), leaves, dout)
        return tuple(x.contiguous() for x in found)

    schema = torch.library.infer_schema(run, mutates_args=())
    given = schema[1 : schema.index(")")]
    results = ", ".join(["Tensor"] * gradients)
    forward_op = torch.library.custom_op(f"lineate::{name}", run, mutates_args=())
    backward_op = torch.library.custom_op(
        f"lineate::{name}_backward", backward, mutates_args=(), schema=f"(Tensor dout, {given}) -> ({results})"
    )
    forward_op.register_fake(fake)
    backward_op.register_fake(lambda dout, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:gradients]))
    forward_op.register_autograd(partial(_differentiate, backward_op, gradients), setup_context=_save)

    def call(*inputs: object) -> Tensor:
        return forward_op(*inputs) if torch.compiler.is_compiling() else run(*inputs)

    return call


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.options = [None if isinstance(x, Tensor) else (x,) for x in inputs]  # a tuple: None may be an option


def _differentiate(backward, gradients, ctx, dout):  # type: ignore[no-untyped-def]
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if option is None else option[0] for option in ctx.options]
    return *backward(dout, *inputs), *[None] * (len(inputs) - gradients)


def _autograd_inside_an_op() -> AbstractContextManager[None]:
    """Let autograd record: torch leaves it out of what ops call."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
