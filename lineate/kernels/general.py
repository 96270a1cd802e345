"""The rules of the general row on the stages of the five rules: their calls become such calls, the gradients come back.

gated_delta_rule_2      compared: erase * k; decay per channel; the stages' values are U = write * V

    R = (I + M)^{-1} (U - Er S)      O = Qr S + P R      S_next = e^{G_c} S + Kw^T R

    This is Kimi Delta Attention with another reader and without beta, so the walks are the same; only M and the
    gradients through it and through Er have a probe in place of the key (portable/channel.py,
    channel_gradients.py).

diagonal_plus_low_rank  compared: the probe; the direction is the writer of the walk, and the key a second one, with the
                        values V (portable/second_writer.py)

gated_delta_product     Gated DeltaNet on n rows a token, one for each write: the first row of a token forgets, the
                        last is read; in the others log_decay and q are 0
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.kernels import pipeline
from lineate.kernels.call import Call, clear, make_call
from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.portable.elements import (
    interleave,
    multiply,
    multiply_backward,
    spread,
    sum_channels,
    take_rows,
)  # fmt: skip
from lineate.kernels.stages import Gradients

_OF_WRITES = ("k", "v", "beta")
_NUMBERS = 4096  # of a program


def forward(
    inputs: Inputs, options: Options, state: Tensor, output: Tensor, final: Tensor, states: Tensor | None
) -> None:  # fmt: skip
    """Fill output, final, and states `slots hv v k`, the state entering each chunk, if given."""
    n, staged = _writes(inputs), _stage(inputs)
    beside = pipeline.makes_beside(staged, options)
    cutting = pipeline.cutting_of(staged.q, staged.v, "forward", beside)
    rows = output if n == 1 else inputs.v.new_empty(inputs.v.shape)
    pipeline.forward(make_call(staged, options, cutting, rows, n), state, rows, final, states)
    if n > 1:
        _take_rows(rows, output, n, n - 1)


def backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the states that forward kept."""
    n, staged = _writes(inputs), _stage(inputs)
    call = make_call(staged, options, pipeline.cutting_of(staged.q, staged.v, "backward"), writes=n)
    dq, dlog_decay = (
        None if own is None else torch.empty_like(own) if given is None or own.shape != given.shape else given
        for given, own in ((grads.q, staged.q), (grads.log_decay, staged.log_decay))
    )
    assert grads.state is not None and dq is not None
    probe = grads.probe if grads.erase is None else grads.erase
    doutput = doutput if n == 1 else _interleave(doutput, n, n - 1)
    room = Gradients(
        dq, grads.k, grads.v, dlog_decay, grads.beta, grads.state, probe=probe, direction=grads.direction
    )  # fmt: skip
    pipeline.backward(call, doutput, dfinal, states, room)
    if inputs.write is not None and grads.write is not None:
        _values_backward(call, inputs.v, inputs.write, grads.v, grads.write)
    if n > 1:
        _take_rows(dq, grads.q, n, n - 1)
    if dlog_decay is None or grads.log_decay is None or dlog_decay is grads.log_decay:
        return
    if n > 1:
        _take_rows(dlog_decay, grads.log_decay, n, 0)
    else:
        _sum_channels(dlog_decay, grads.log_decay)


def in_rows_of_writes(inputs: Inputs, options: Options) -> Inputs:
    """Return a call, or its gradients, with the n writes of each token as n rows: k, v and beta are `b nt ...`."""
    if not options.rule.writes:
        return inputs
    return inputs.map(lambda x: x.flatten(1, 2), _OF_WRITES)


def _writes(inputs: Inputs) -> int:
    """Return the rows of each token."""
    return inputs.k.shape[1] // inputs.q.shape[1]


def _stage(inputs: Inputs) -> Inputs:
    """Return the tensors as the stages read them."""
    n, q, v, log_decay = _writes(inputs), inputs.q, inputs.v, inputs.log_decay
    if inputs.write is not None:
        v = _write_values(v, inputs.write)
    if inputs.erase is not None or inputs.probe is not None:
        if log_decay is None:
            log_decay = q.new_zeros(*v.shape[:3], q.shape[3], dtype=torch.float32)
        elif log_decay.dim() == 3:
            log_decay = _spread(log_decay, q.shape[3])
    if n > 1:
        q, log_decay = _interleave(q, n, n - 1), None if log_decay is None else _interleave(log_decay, n, 0)
    return inputs.replace(q=q, v=v, write=None, log_decay=log_decay, state=None)


def _blocks(rows: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the configuration of a kernel of elements.py for rows of `size` numbers."""
    wide = next_power(size)
    each = max(1, min(next_power(rows), _NUMBERS // wide))
    return (ceil_div(rows, each),), {"D": size, "BR": each, "BD": wide, "num_warps": 4}


def _write_values(v: Tensor, write: Tensor) -> Tensor:
    """Return U = write * v, contiguous and in the dtype of v."""
    u = v.new_empty(v.shape)
    rows = u.shape[:3].numel()
    grid, sizes = _blocks(rows, u.shape[3])
    start(multiply, grid)(v, write, u, rows, v.stride(1), v.stride(2), H=v.shape[2], **sizes)
    return u


def _values_backward(call: Call, v: Tensor, write: Tensor, dv: Tensor, dwrite: Tensor) -> None:
    """Go from dU, which dv holds, to the gradients of v and write; both are 0 outside of packed sequences."""
    rows = dv.shape[:3].numel()
    grid, sizes = _blocks(rows, dv.shape[3])
    start(multiply_backward, grid)(v, write, dv, dwrite, rows, v.stride(1), v.stride(2), H=v.shape[2], **sizes)
    clear(call.sequences, v.shape[1], dv, dwrite)


def _spread(log_decay: Tensor, key_dim: int) -> Tensor:
    """Return a decay per head as one per channel, in float32, in which its gradients are added up."""
    channels = log_decay.new_empty(*log_decay.shape, key_dim, dtype=torch.float32)
    grid, sizes = _blocks(log_decay.numel(), key_dim)
    start(spread, grid)(log_decay, channels, log_decay.numel(), **sizes)
    return channels


def _sum_channels(channels: Tensor, total: Tensor) -> None:
    """Add the gradients of the channels to those of the heads."""
    grid, sizes = _blocks(total.numel(), channels.shape[-1])
    start(sum_channels, grid)(channels, total, total.numel(), **sizes)


def _interleave(x: Tensor, n: int, at: int) -> Tensor:
    """Return x `b t ...` as row `at` of the n rows of each token, contiguous, with 0 in the others."""
    rows = x.new_empty(x.shape[0], n * x.shape[1], *x.shape[2:])
    many = x.shape[:3].numel()
    grid, sizes = _blocks(many, _channels(x))
    start(interleave, grid)(x, rows, many, x.stride(1), x.stride(2), H=x.shape[2], N=n, AT=at, **sizes)
    return rows


def _take_rows(rows: Tensor, x: Tensor, n: int, at: int) -> None:
    """Fill x `b t ...` with row `at` of the n rows of each token."""
    many = x.shape[:3].numel()
    grid, sizes = _blocks(many, _channels(x))
    start(take_rows, grid)(rows, x, many, H=x.shape[2], N=n, AT=at, **sizes)


def _channels(x: Tensor) -> int:
    """Return the numbers of a head of x, `b t h k` or `b t h`."""
    return x.shape[3] if x.dim() == 4 else 1
