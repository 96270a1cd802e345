"""The chunkwise form as one torch op per backend: this file has the schema, shapes and autograd of each op."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.rule import full_precision
from lineate.torch_ops.registrar import register_op
from lineate.torch_ops.tracing import PLAIN_TENSORS
from lineate.torch_ops.zeros import read_zeros

Outputs = tuple[Tensor, Tensor, Tensor]
"""The output `b t hv v`, the final state, and the states that enter each chunk, `n b hv k v` (n = 0: not wanted)."""
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""dq, dk, dv, dlog_decay, dbeta, dstate; those of absent inputs have no elements."""
Chunkwise = Callable[[Inputs, Options], tuple[Tensor, Tensor]]
"""The form's function for callers: it returns the output and the final state."""
_TENSORS = 7  # of Inputs, from q to cu_seqlens: the ops here take no raw gates


class Forward(Protocol):
    """A backend's forward, which fills the outputs."""

    def __call__(self, inputs: Inputs, options: Options, outputs: Outputs) -> None: ...


class Backward(Protocol):
    """A backend's backward, which fills the gradients from those of the output and of the final state.

    It starts from `states`, those that entered each chunk; inputs.state is None.
    """

    def __call__(
        self, inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Grads
    ) -> None: ...


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
        outputs = empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, q.shape[1])
        inputs = Inputs(q, k, v, log_decay, beta, state, cu_seqlens)
        with full_precision(q):
            run_forward(inputs, Options(corrects, scale, normalize_qk, chunk_size), outputs)
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
        inputs = Inputs(q, k, v, log_decay, beta, None, cu_seqlens)
        with full_precision(q):
            run_backward(inputs, Options(corrects, scale, normalize_qk, chunk_size), states, doutput, dfinal, grads)
        return grads

    def fake(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk, chunk_size, keep):  # type: ignore[no-untyped-def]
        return empty_outputs(q, v, state, cu_seqlens, chunk_size, keep)

    def fake_backward(doutput, dfinal, q, k, v, log_decay, beta, states, *_):  # type: ignore[no-untyped-def]
        return _empty_grads(q, k, v, log_decay, beta, dfinal)

    run = register_op(
        name,
        forward,
        backward,
        fake=fake,
        fake_backward=fake_backward,
        tensors=_TENSORS,
        save=partial(save_states, _TENSORS),
        differentiate=differentiate,
        hidden=2,
        keeps=True,
    )

    def chunkwise(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        output, final, _ = run(
            *inputs[:_TENSORS], options.corrects, options.scale, options.normalize_qk, options.chunk_size
        )
        return output, final

    return chunkwise


def save_states(count, ctx, inputs, output):  # type: ignore[no-untyped-def]
    """Save the tensors that `differentiate` needs, with the states that enter each chunk in place of the first state.

    The op's arguments are `count` tensors, the last two of them the state and cu_seqlens; then options, and `keep`.
    """
    *tensors, _, cu_seqlens = inputs[:count]
    ctx.save_for_backward(*tensors, output[2], cu_seqlens)
    ctx.options = inputs[count:-1]
    ctx.results = [(x.shape, x.dtype) for x in output[:2]]


def differentiate(backward, ctx, *gradients):  # type: ignore[no-untyped-def]
    """Return the gradients of a chunkwise op's arguments: backward(doutput, dfinal, *saved tensors, *options)."""
    saved = ctx.saved_tensors  # read only once, because activation checkpointing refuses a second read
    *tensors, states, _ = saved
    _check_kept(states)
    arrived = [
        _zeros(states, shape, dtype) if x is None else x
        for x, (shape, dtype) in zip(gradients[:2], ctx.results, strict=True)
    ]
    *grads, dstate = backward(*arrived, *saved, *ctx.options)
    grads = [None if x is None else dx for x, dx in zip(tensors, grads, strict=True)]
    return *grads, dstate, *[None] * (len(ctx.options) + 2)


def _zeros(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return read-only zeros with the properties of a tensor."""
    return read_zeros(shape, dtype, like.device) if type(like) in PLAIN_TENSORS else like.new_zeros(shape, dtype=dtype)


def _check_kept(states: Tensor) -> None:
    """Raise if there are no states between chunks: a call recorded without gradients does not keep them."""
    if states.shape[0] == 0:
        raise RuntimeError(
            "the states for the backward were not kept, because this call was recorded (torch.jit.trace, make_fx) "
            "where nothing required grad; record it with an input that requires grad"
        )


def empty_outputs(
    q: Tensor, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk_size: int, keep: bool
) -> Outputs:
    """Allocate the outputs of a call."""
    b, t, _, key_dim = q.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # An upper bound: each packed sequence may end in part of a chunk.
    chunks = (t + sequences * (chunk_size - 1)) // chunk_size if keep else 0
    states = state.new_empty(chunks, b, v.shape[2], key_dim, v.shape[3])
    return v.new_empty(v.shape), state.new_empty(state.shape), states


def _empty_grads(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, dfinal: Tensor
) -> Grads:
    dlog_decay, dbeta = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, beta))
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, dfinal))
    return dq, dk, dv, dlog_decay, dbeta, dstate
