"""The kernels as torch ops with shapes and autograd: what torch.compile and autograd see of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.chunk_op import arrived, check_kept, expect_gradients, make_direct
from lineate.kernels import pipeline as kernels
from lineate.kernels.call import count_slots, make_call
from lineate.kernels.stages import Gradients, Slots
from lineate.tracing import in_memory, is_eager, needs_grad

Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    beta_scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and, to keep for the backward, the states entering each chunk."""
    output, final, states = _empty_outputs(q, v, state, cu_seqlens, keep)
    inputs = Inputs(q, k, v, log_decay, beta, state, cu_seqlens, A_log, dt_bias)
    call = make_call(inputs, Options(corrects, scale, normalize_qk, beta_scale=beta_scale))
    state = state.contiguous()
    with torch.cuda.device_of(q):
        kernels.forward(call, state, output, final, states if keep else None)
    return output, final, states


_forward_op = torch.library.custom_op("lineate::chunkwise_triton", _forward, mutates_args=())


@_forward_op.register_fake
def _(q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens, corrects, scale, normalize_qk, beta_scale, keep):  # type: ignore[no-untyped-def]
    return _empty_outputs(q, v, state, cu_seqlens, keep)


def _backward(
    doutput: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    beta_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate; those of absent inputs have no elements."""
    grads = _empty_grads(dfinal, q, k, v, log_decay, beta, A_log, dt_bias, cu_seqlens)
    dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate = grads
    inputs = Inputs(q, k, v, log_decay, beta, None, cu_seqlens, A_log, dt_bias)
    call = make_call(inputs, Options(corrects, scale, normalize_qk, beta_scale=beta_scale))
    outside = call.gates_outside  # their gradients come after those of log_decay and beta
    if outside:
        dlog_decay, dbeta = (_room(x, cu_seqlens, torch.float32) for x in (dlog_decay, dbeta))
    wanted = Gradients(
        dq,
        dk,
        dv,
        None if log_decay is None else dlog_decay,
        None if beta is None else dbeta,
        dstate,
        None if A_log is None or outside else dA_log,
        None if dt_bias is None or outside else ddt_bias,
    )
    with torch.cuda.device_of(q):
        kernels.backward(call, doutput, dfinal, states, wanted)
        if outside:
            kernels.raw_gate_gradients(call.gates, dlog_decay, dbeta, *grads[3:5], dA_log, ddt_bias)
    return grads


_backward_op = torch.library.custom_op("lineate::chunkwise_triton_backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    doutput, dfinal, q, k, v, log_decay, beta, A_log, dt_bias, states, cu_seqlens, corrects, scale, normalize_qk,
    beta_scale
):  # fmt: skip
    return _empty_grads(dfinal, q, k, v, log_decay, beta, A_log, dt_bias, cu_seqlens)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    expect_gradients(ctx, output)
    q, k, v, log_decay, beta, A_log, dt_bias, _, cu_seqlens, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, A_log, dt_bias, output[2], cu_seqlens)


def _differentiate(backward, ctx, doutput, dfinal, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    check_kept(saved[7])
    doutput, dfinal = arrived(ctx, saved[2], doutput, dfinal)
    *grads, dstate = backward(doutput, dfinal, *saved, *ctx.options)
    grads = [None if x is None else dx for x, dx in zip(saved[:7], grads, strict=True)]
    return *grads, dstate, *[None] * 6


_forward_op.register_autograd(partial(_differentiate, _backward_op), setup_context=_save)


_direct = make_direct(_forward, _backward, _backward_op, _save, _differentiate, hidden=2)


def _empty_outputs(
    q: Tensor, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, _, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    slots = b * count_slots(t, 1) if cu_seqlens is None else count_slots(t, cu_seqlens.shape[0] - 1)
    states = v.new_empty(slots if keep else 0, hv, value_dim, key_dim)
    return _room(v, cu_seqlens), _room(state, cu_seqlens), states


def _empty_grads(
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Grads:
    gates = (q.new_empty(0) if x is None else _room(x, cu_seqlens) for x in (log_decay, beta, A_log, dt_bias))
    dlog_decay, dbeta, dA_log, ddt_bias = gates
    dq, dk, dv, dstate = (_room(x, cu_seqlens) for x in (q, k, v, dfinal))
    return dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate


def _room(like: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result; of zeros where tokens may lie outside every text (bounds on a GPU are not looked at)."""
    return like.new_empty(like.shape, dtype=dtype) if cu_seqlens is None else like.new_zeros(like.shape, dtype=dtype)


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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Output and final state. With A_log, log_decay is the raw gate and beta the raw logit."""
    tensors = [q, k, v, log_decay, beta, A_log, dt_bias, state]
    keep = needs_grad(*tensors)
    run: Callable[..., Any] = _forward_op
    if is_eager(*tensors, cu_seqlens):
        run = _direct if keep else _forward
        *tensors, cu_seqlens = in_memory((*tensors, cu_seqlens))
    output, final, _ = run(*tensors, cu_seqlens, corrects, scale, normalize_qk, beta_scale, keep)
    return output, final


@torch.library.custom_op("lineate::recurrent_triton", mutates_args=())
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """Token by token in one launch, without gradients: decoding, with the state copied first."""
    final = state.clone(memory_format=torch.contiguous_format)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    inputs = Inputs(q, k, v, log_decay, beta, final, cu_seqlens)
    output = kernels.decode(inputs, Slots(), Options(beta is not None, scale, normalize_qk), raw_gates=False)
    return output, final


@recurrent.register_fake
def _(q, k, v, log_decay, beta, state, cu_seqlens, scale, normalize_qk):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)
