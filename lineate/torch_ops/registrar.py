"""Registers torch ops: schema, shapes of the results, backward, and a fast path for eager calls.

torch.compile, dispatch modes and autograd see `lineate::<name>` and `lineate::<name>_backward`, and nothing inside
them. An eager call bypasses torch.library, whose overhead exceeds the arithmetic of a small call.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lineate.torch_ops.tracing import PLAIN_TENSORS, in_memory, needs_grad, recorded

Run = Callable[..., Any]
_transforms_are_active = torch._C._are_functorch_transforms_active


class Way(Enum):
    """How a call of an op runs."""

    OP = "op"
    """As an op: for compilers, modes, transforms and unknown kinds of tensors."""
    DIFFERENTIATED = "differentiated"
    """Eagerly, and a backward may follow."""
    PLAIN = "plain"
    """Eagerly, without a backward."""
    VIRTUAL = "virtual"
    """The same, but the memory of some tensor does not hold its values (`in_memory`)."""


def way_of(tensors: Sequence[Tensor | None]) -> Way:
    """Return how a call with these tensors runs."""
    # Decoding calls this for every token of a layer: transformed() is written out, and one loop checks the tensors.
    if recorded() or _transforms_are_active() or forward_ad._current_level >= 0:
        return Way.OP
    wanted = virtual = False
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN_TENSORS:
                return Way.OP
            wanted = wanted or x.requires_grad
            virtual = virtual or x.is_neg() or x._is_zerotensor()
    if wanted and torch.is_grad_enabled():
        return Way.DIFFERENTIATED
    return Way.VIRTUAL if virtual else Way.PLAIN


class Declared(NamedTuple):
    """A function with its schema, for one whose annotations do not say it."""

    run: Run
    schema: str


def register_op(
    name: str,
    forward: Run | Declared,
    backward: Run | Declared,
    *,
    fake: Run,
    fake_backward: Run,
    tensors: int,
    save: Callable[..., None] | None = None,
    differentiate: Run | None = None,
    hidden: int | None = None,
    keeps: bool = False,
) -> Run:
    """Make the ops `lineate::<name>` and `lineate::<name>_backward`; return the function that callers use.

    Args:
        name: the op's name.
        forward: runs the op; its annotations are the schema, unless it is Declared. Tensors come first, then options.
        backward: forward's backward, with a schema of its own.
        fake: returns empty tensors in the shapes of forward's results, from forward's arguments.
        fake_backward: returns empty tensors in the shapes of backward's results.
        tensors: how many of forward's first arguments are tensors or None.
        save: called as save(ctx, inputs, output); saves the tensors that differentiate needs. None saves all inputs.
        differentiate: called as differentiate(run, ctx, *gradients) with run either backward or its op; returns one
            gradient for each of forward's arguments. A gradient that did not arrive is None. None calls
            run(*gradients, *inputs), which returns the gradients of the first inputs; those of absent inputs are
            ignored.
        hidden: the index of a result that has no gradient.
        keeps: whether forward's last argument is a bool, set by the returned function: keep what a backward needs.

    Returns:
        A function of forward's arguments (without the last one if `keeps`). It runs the op for compilers, modes,
        transforms and unknown kinds of tensors, and forward itself otherwise.
    """
    schema = backward_schema = None
    if isinstance(forward, Declared):
        forward, schema = forward
    if isinstance(backward, Declared):
        backward, backward_schema = backward
    save = partial(_save_without_zeros, save or _save_inputs)
    differentiate = differentiate or _differentiate_inputs
    forward_op, backward_op = declare_op(
        name, forward, backward, fake=fake, fake_backward=fake_backward, save=save, differentiate=differentiate,
        schema=schema, backward_schema=backward_schema,
    )  # fmt: skip
    backward_op.register_autograd(partial(_refuse_second_derivative, f"lineate::{name}"))
    direct = _make_function(forward, backward, backward_op, save, differentiate, hidden)

    def call(*inputs: Any) -> Any:
        way = way_of(inputs[:tensors])
        if way is Way.OP:
            return call_op(*inputs)
        wanted = way is Way.DIFFERENTIATED
        if way is not Way.PLAIN:
            inputs = (*in_memory(inputs[:tensors]), *inputs[tensors:])
        run = direct if wanted else forward
        return run(*inputs, wanted) if keeps else run(*inputs)

    def call_op(*inputs: Any) -> Any:
        return forward_op(*inputs, needs_grad(*inputs[:tensors])) if keeps else forward_op(*inputs)

    return call


def declare_op(
    name: str,
    forward: Run,
    backward: Run,
    *,
    fake: Run,
    fake_backward: Run,
    save: Callable[..., None] | None = None,
    differentiate: Run | None = None,
    schema: str | None = None,
    backward_schema: str | None = None,
) -> tuple[Any, Any]:
    """Register the two ops and return both; see register_op. Without a schema, the annotations count."""
    forward_op = torch.library.custom_op(f"lineate::{name}", forward, mutates_args=(), schema=schema)
    backward_op = torch.library.custom_op(
        f"lineate::{name}_backward", backward, mutates_args=(), schema=backward_schema
    )
    forward_op.register_fake(fake)
    backward_op.register_fake(fake_backward)
    forward_op.register_autograd(
        partial(differentiate or _differentiate_inputs, backward_op), setup_context=save or _save_inputs
    )
    return forward_op, backward_op


def _make_function(
    forward: Run, backward: Run, backward_op: Any, save: Callable[..., None], differentiate: Run, hidden: int | None
) -> Run:
    """Return the op as an autograd.Function; its inputs must not be virtual (`is_virtual`), its gradients may be."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            output = forward(*inputs)
            save(ctx, inputs, output)
            if hidden is not None:
                ctx.mark_non_differentiable(output[hidden])
            return output

        @staticmethod
        def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
            if runs_as_op(gradients):
                return differentiate(backward_op, ctx, *gradients)
            return differentiate(backward, ctx, *in_memory(gradients))

    return Direct.apply


def runs_as_op(gradients: Sequence[Tensor | None]) -> bool:
    """Whether the backward of an eager call must run as an op.

    With gradients enabled, a second derivative may follow, which the op refuses; and vmap can map an op.
    """
    return torch.is_grad_enabled() or recorded() or any(_is_batched(x) for x in gradients if x is not None)


def _save_without_zeros(save, ctx, inputs, output):  # type: ignore[no-untyped-def]
    """Keep missing gradients None, because zeros may take as much memory as all kept states."""
    ctx.set_materialize_grads(False)
    save(ctx, inputs, output)


def _save_inputs(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(not isinstance(output, tuple))
    ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs])
    ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]


def _differentiate_inputs(run, ctx, *gradients):  # type: ignore[no-untyped-def]
    pairs = zip(ctx.saved_tensors, ctx.options, strict=True)
    inputs = [option if x is None else x for x, option in pairs]
    made = run(*gradients, *inputs)
    made = (made,) if isinstance(made, Tensor) else made
    found = [None if x is None else gradient for x, gradient in zip(inputs, made, strict=False)]
    return *found, *[None] * (len(inputs) - len(found))


def _refuse_second_derivative(name, ctx, *gradients):  # type: ignore[no-untyped-def]
    raise RuntimeError(
        f"{name} has no second derivative, its first is written by hand; take both with torch.func (grad, jvp, "
        "hessian), for which plain torch runs, or call the rule with form='recurrent' or form='parallel'"
    )


def _is_batched(x: Tensor) -> bool:
    """Whether vmap, or is_grads_batched, maps over x."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
