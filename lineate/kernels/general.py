"""The rules of the general row on the stages of the five rules: their calls become such calls, the gradients come back.

    gated_delta_rule_2      compared: erase * k; decay per channel; the stages' values are U = write * V

    R = (I + M)^{-1} (U - Er S)      O = Qr S + P R      S_next = e^{G_c} S + Kw^T R

This is Kimi Delta Attention with another reader and without beta, so the walks are the same; only M and the gradients
through it and through Er have a probe in place of the key (portable/channel.py, channel_gradients.py).
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.kernels import pipeline
from lineate.kernels.call import Call, clear, make_call
from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.portable.elements import multiply, multiply_backward, spread, sum_channels
from lineate.kernels.stages import Gradients

_BLOCK = 1024  # numbers of a program


def forward(
    inputs: Inputs, options: Options, state: Tensor, output: Tensor, final: Tensor, states: Tensor | None
) -> None:  # fmt: skip
    """Fill output, final, and states `slots hv v k`, the state entering each chunk, if given."""
    staged = _stage(inputs)
    beside = pipeline.makes_beside(staged, options)
    cutting = pipeline.cutting_of(staged.q, staged.v, "forward", beside)
    pipeline.forward(make_call(staged, options, cutting, output), state, output, final, states)


def backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the states that forward kept."""
    staged = _stage(inputs)
    call = make_call(staged, options, pipeline.cutting_of(staged.q, staged.v, "backward"))
    assert grads.state is not None and staged.log_decay is not None
    spread_out = inputs.log_decay is not None and inputs.log_decay.dim() == 3
    dlog_decay = torch.empty_like(staged.log_decay) if spread_out else grads.log_decay
    room = Gradients(grads.q, grads.k, grads.v, dlog_decay, None, grads.state, probe=grads.erase)
    pipeline.backward(call, doutput, dfinal, states, room)
    if inputs.write is not None and grads.write is not None:
        _values_backward(call, inputs.v, inputs.write, grads.v, grads.write)
    if spread_out and dlog_decay is not None and grads.log_decay is not None:
        _sum_channels(dlog_decay, grads.log_decay)


def _stage(inputs: Inputs) -> Inputs:
    """Return the tensors as the stages read them."""
    values, log_decay = inputs.v, inputs.log_decay
    if inputs.write is not None:
        values = _write_values(inputs.v, inputs.write)
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = _spread(log_decay, inputs.q.shape[3])
    return inputs.replace(v=values, write=None, log_decay=log_decay, state=None)


def _write_values(v: Tensor, write: Tensor) -> Tensor:
    """Return U = write * v, contiguous and in the dtype of v."""
    u = v.new_empty(v.shape)
    start(multiply, (ceil_div(u.numel(), _BLOCK),))(
        v, write, u, u.numel(), v.stride(1), v.stride(2), H=v.shape[2], D=v.shape[3], BLOCK=_BLOCK, num_warps=4
    )
    return u


def _values_backward(call: Call, v: Tensor, write: Tensor, dv: Tensor, dwrite: Tensor) -> None:
    """Go from dU, which dv holds, to the gradients of v and write; both are 0 outside of packed sequences."""
    start(multiply_backward, (ceil_div(dv.numel(), _BLOCK),))(
        v, write, dv, dwrite, dv.numel(), v.stride(1), v.stride(2), H=v.shape[2], D=v.shape[3], BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    clear(call.sequences, v.shape[1], dv, dwrite)


def _spread(log_decay: Tensor, key_dim: int) -> Tensor:
    """Return a decay per head as one per channel, in float32, in which its gradients are added up."""
    channels = log_decay.new_empty(*log_decay.shape, key_dim, dtype=torch.float32)
    start(spread, (ceil_div(channels.numel(), _BLOCK),))(
        log_decay, channels, channels.numel(), D=key_dim, BLOCK=_BLOCK, num_warps=4
    )
    return channels


def _sum_channels(channels: Tensor, total: Tensor) -> None:
    """Add the gradients of the channels to those of the heads."""
    start(sum_channels, (ceil_div(total.numel(), 16),))(
        channels, total, total.numel(), D=channels.shape[-1], BD=next_power(channels.shape[-1]), BLOCK=16, num_warps=4
    )
