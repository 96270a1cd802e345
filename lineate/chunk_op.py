"""The chunkwise form as one torch op a backend: schema, shapes, autograd; the arithmetic is the backend's.

torch.compile and autograd both see `lineate::<name>` and `lineate::<name>_backward`, nothing inside them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lineate.forms.packing import check_bounds
from lineate.rule import full_precision
from lineate.tracing import in_memory, is_eager, needs_grad, recorded

Outputs = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Forward(Protocol):
    """Fills output `b t hv v`, final state, and, if it has room, the states entering each chunk `n b hv k v`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        cu_seqlens: Tensor | None,
        outputs: Outputs,
        *,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
    ) -> None: ...


class Backward(Protocol):
    """Fills dq, dk, dv, dlog_decay, dbeta, dstate; those of absent inputs have no elements."""

    def __call__(
        self,
        doutput: Tensor,
        dfinal: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        states: Tensor,
        cu_seqlens: Tensor | None,
        grads: Grads,
        *,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
    ) -> None: ...


class Chunkwise(Protocol):
    """The form as callers use it: (output, final state)."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        cu_seqlens: Tensor | None,
        *,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]: ...


def register(name: str, run_forward: Forward, run_backward: Backward) -> Chunkwise:
    """Make the two ops of one backend and return the differentiable function over them."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        cu_seqlens: Tensor | None,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs = _empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, q.shape[1])
        with full_precision(q):
            run_forward(
                q,
                k,
                v,
                log_decay,
                beta,
                state,
                cu_seqlens,
                outputs,
                corrects=corrects,
                scale=scale,
                normalize_qk=normalize_qk,
                chunk_size=chunk_size,
            )
        return outputs

    def backward(
        doutput: Tensor,
        dfinal: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        states: Tensor,
        cu_seqlens: Tensor | None,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        grads = _empty_grads(q, k, v, log_decay, beta, dfinal)
        with full_precision(q):
            run_backward(
                doutput,
                dfinal,
                q,
                k,
                v,
                log_decay,
                beta,
                states,
                cu_seqlens,
                grads,
                corrects=corrects,
                scale=scale,
                normalize_qk=normalize_qk,
                chunk_size=chunk_size,
            )
        return grads

    forward_op = torch.library.custom_op(f"lineate::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"lineate::{name}_backward", backward, mutates_args=())

    @forward_op.register_fake
    def _(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk, chunk_size, keep):  # type: ignore[no-untyped-def]
        return _empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)

    @backward_op.register_fake
    def _(doutput, dfinal, q, k, v, log_decay, beta, states, cu_seqlens, corrects, scale, normalize_qk, chunk_size):  # type: ignore[no-untyped-def]
        return _empty_grads(q, k, v, log_decay, beta, dfinal)

    forward_op.register_autograd(partial(_differentiate, backward_op), setup_context=_save)

    direct = make_direct(forward, backward, backward_op, _save, _differentiate, hidden=2)

    def chunkwise(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        cu_seqlens: Tensor | None,
        *,
        corrects: bool,
        scale: float,
        normalize_qk: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        tensors = [q, k, v, log_decay, beta, state]
        keep = needs_grad(*tensors)
        run: Callable[..., Any] = forward_op
        if is_eager(*tensors, cu_seqlens):  # an op's first call would import torch._dynamo, which takes seconds
            run = direct if keep else forward
            *tensors, cu_seqlens = in_memory((*tensors, cu_seqlens))
        output, final, _ = run(*tensors, cu_seqlens, corrects, scale, normalize_qk, chunk_size, keep)
        return output, final

    return chunkwise


def make_direct(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    backward_op: Any,
    save: Callable[..., None],
    differentiate: Callable[..., Any],
    hidden: int | None = None,
) -> Callable[..., Any]:
    """An op with its autograd, without torch.library between, which costs more than a small call's arithmetic.

    save(ctx, inputs, output) keeps what differentiate(backward, ctx, *gradients) needs; hidden: the output that has no
    gradient, if there is one. The inputs must be in_memory; gradients need not. backward_op learns to refuse second
    derivatives.
    """
    backward_op.register_autograd(partial(_refuse_second_derivative, backward_op._qualname.removesuffix("_backward")))

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
            # With gradients enabled a second derivative may be wanted, which the op refuses; and vmap can map an op.
            as_op = torch.is_grad_enabled() or recorded() or any(_is_batched(x) for x in gradients if x is not None)
            if as_op:
                return differentiate(backward_op, ctx, *gradients)
            return differentiate(backward, ctx, *in_memory(gradients))

    return Direct.apply


def _is_batched(x: Tensor) -> bool:
    """By vmap, or by is_grads_batched."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def _refuse_second_derivative(name, ctx, *gradients):  # type: ignore[no-untyped-def]
    raise RuntimeError(
        f"{name} has no second derivative, its first is written by hand; take both with torch.func (grad, jvp, "
        "hessian), for which plain torch runs, or call the rule with form='recurrent' or form='parallel'"
    )


def expect_gradients(ctx, output):  # type: ignore[no-untyped-def]
    """In setup_context: no gradient is made up for what has none (of the kept states it would be as large as they)."""
    ctx.set_materialize_grads(False)
    ctx.results = [(x.shape, x.dtype) for x in output[:2]]


def arrived(ctx, like, *gradients):  # type: ignore[no-untyped-def]
    """Those of output and final state; zeros for one that did not come."""
    return [
        like.new_zeros(shape, dtype=dtype) if x is None else x
        for x, (shape, dtype) in zip(gradients, ctx.results, strict=True)
    ]


def check_kept(states: Tensor) -> None:
    """The states between chunks are there: a call recorded without gradients does not keep them."""
    if states.shape[0] == 0:
        raise RuntimeError(
            "the states for the backward were not kept, because this call was recorded (torch.jit.trace, make_fx) "
            "where nothing required grad; record it with an input that requires grad"
        )


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    expect_gradients(ctx, output)
    q, k, v, log_decay, beta, _, cu_seqlens, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, output[2], cu_seqlens)


def _differentiate(backward, ctx, doutput, dfinal, _):  # type: ignore[no-untyped-def]
    q, k, v, log_decay, beta, states, cu_seqlens = ctx.saved_tensors
    check_kept(states)
    doutput, dfinal = arrived(ctx, v, doutput, dfinal)
    dq, dk, dv, dlog_decay, dbeta, dstate = backward(
        doutput, dfinal, q, k, v, log_decay, beta, states, cu_seqlens, *ctx.options
    )
    dlog_decay = None if log_decay is None else dlog_decay
    dbeta = None if beta is None else dbeta
    return dq, dk, dv, dlog_decay, dbeta, dstate, *[None] * 6


def _empty_outputs(
    q: Tensor, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk_size: int, keep: bool
) -> Outputs:
    b, t, _, key_dim = q.shape
    texts = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = (
        (t + texts * (chunk_size - 1)) // chunk_size if keep else 0
    )  # at most: each text may end in part of a chunk
    states = state.new_empty(chunks, b, v.shape[2], key_dim, v.shape[3])
    return v.new_empty(v.shape), state.new_empty(state.shape), states


def _empty_grads(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, dfinal: Tensor
) -> Grads:
    dlog_decay, dbeta = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, beta))
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, dfinal))
    return dq, dk, dv, dlog_decay, dbeta, dstate
