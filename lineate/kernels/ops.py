"""The kernels of the rules as torch ops, for torch.compile and autograd."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate.again import Form, remember, undecided
from lineate.call import Inputs, Options, Slots, which_are_raw
from lineate.kernels import pipeline as kernels
from lineate.kernels.call import CHUNK, aligned, count_slots, dense, in_rows, lies_dense, lies_in_rows, make_call
from lineate.kernels.replaying import Tape
from lineate.kernels.stages import Gradients
from lineate.kernels.tape import find, launch, may_replay, replayed
from lineate.torch_ops.chunk_op import differentiate, save_states
from lineate.torch_ops.registrar import register_op
from lineate.torch_ops.zeros import read_zeros

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
    raw_decay: bool,
    raw_beta: bool,
    lower_bound: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the final state, and the states that enter each chunk, which a backward needs."""
    output, final, states = _empty_outputs(q, v, state, cu_seqlens, keep)
    options = Options(
        corrects, scale, normalize_qk, CHUNK, beta_scale, which_are_raw(raw_decay, raw_beta), lower_bound
    )  # fmt: skip
    given = q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens
    made = output, final, states if keep else None
    if replayed("forward", given, made, (options, keep)):
        return output, final, states
    q, k, v, log_decay, beta, A_log, dt_bias = _laid_out(q, k, v, log_decay, beta, A_log, dt_bias)
    state, cu_seqlens = state.contiguous(), _beside(q, cu_seqlens)

    def run() -> None:
        inputs = Inputs(q, k, v, log_decay, beta, None, cu_seqlens, A_log, dt_bias)
        cutting = kernels.cutting_of(q, v, "forward", kernels.makes_beside(inputs, options))
        call = make_call(inputs, options, cutting, output)
        kernels.forward(call, state, output, final, states if keep else None)

    given = q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens
    launch("forward", given, made, (options, keep), run)
    return output, final, states


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens, corrects, scale, normalize_qk, beta_scale, raw_decay,
    raw_beta, lower_bound, keep
):  # fmt: skip
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
    raw_decay: bool,
    raw_beta: bool,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate; those of absent inputs have no elements."""
    grads = _empty_grads(Inputs(q, k, v, log_decay, beta, None, cu_seqlens, A_log, dt_bias), dfinal)
    options = Options(
        corrects, scale, normalize_qk, CHUNK, beta_scale, which_are_raw(raw_decay, raw_beta), lower_bound
    )  # fmt: skip
    given = doutput, dfinal, q, k, v, log_decay, beta, A_log, dt_bias, states, cu_seqlens
    made = [x if x.numel() else None for x in grads]
    if replayed("backward", given, made, options):
        return grads
    q, k, v, log_decay, beta, A_log, dt_bias = _laid_out(q, k, v, log_decay, beta, A_log, dt_bias)
    cu_seqlens = _beside(q, cu_seqlens)
    inputs = Inputs(q, k, v, log_decay, beta, None, cu_seqlens, A_log, dt_bias)
    doutput, dfinal = aligned(doutput.contiguous()), dfinal.contiguous()

    def run() -> None:
        dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate = grads
        gates = zip((log_decay, beta, A_log, dt_bias), (dlog_decay, dbeta, dA_log, ddt_bias), strict=True)
        decay, strength, rate, bias = (None if x is None else dx for x, dx in gates)
        call = make_call(inputs, options, kernels.cutting_of(q, v, "backward"))
        wanted = Gradients(dq, dk, dv, decay, strength, dstate, rate, bias)
        kernels.backward(call, doutput, dfinal, states, wanted)

    given = doutput, dfinal, q, k, v, log_decay, beta, A_log, dt_bias, states, cu_seqlens
    launch("backward", given, made, options, run)
    return grads


def _laid_out(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors in the layout of the kernels, so that copies are made before the launches."""
    return (
        *(in_rows(x) for x in (q, k, v)),
        *(x if x is None or lies_dense(x) else dense(x) for x in gates),
    )


def _beside(q: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the bounds on the device of q, in the kernels' layout; a copy if they are elsewhere, or have gaps."""
    return None if cu_seqlens is None else cu_seqlens.to(q.device).contiguous()


def _fake_backward(  # type: ignore[no-untyped-def]
    doutput, dfinal, q, k, v, log_decay, beta, A_log, dt_bias, states, cu_seqlens, *_
):  # fmt: skip
    return _empty_grads(Inputs(q, k, v, log_decay, beta, None, cu_seqlens, A_log, dt_bias), dfinal)


_run = register_op(
    "chunkwise_triton",
    _forward,
    _backward,
    fake=_fake,
    fake_backward=_fake_backward,
    tensors=9,
    save=partial(save_states, 9),
    differentiate=differentiate,
    hidden=2,
    keeps=True,
)


def chunkwise(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final state."""
    q, k, v, log_decay, beta, state, cu_seqlens, A_log, dt_bias = inputs
    output, final, _ = _run(
        q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens,
        options.corrects, options.scale, options.normalize_qk, options.beta_scale, options.raw_decay,
        options.raw_beta, options.lower_bound,
    )  # fmt: skip
    return output, final


def remember_forward(form: Form | None, tensors: Sequence[Tensor | None], inputs: Inputs, options: Options) -> None:
    """Let later calls with this signature be replayed without gradients, once one is recorded.

    Args:
        form: The signature of the call (again.py); None if it cannot be replayed.
        tensors: The call's own, in the order of Inputs; its state may be None.
        inputs: The inputs that it ran with.
        options: The options that it ran with.
    """
    if form is None or not undecided(form):
        return
    state = inputs.state
    assert state is not None
    used = _in_order(inputs, state)
    own = _in_order(tensors, state if tensors[5] is None else tensors[5])
    pairs = [(x, y) for x, y in zip(own, used, strict=True) if x is not None and y is not None]
    if any(x.data_ptr() != y.data_ptr() for x, y in pairs) or not _read_as_they_are(inputs):
        remember(form, None)  # a tensor is converted or copied first
        return
    known, tape = find("forward", used, (options._replace(chunk_size=CHUNK), False))
    if known:
        remember(form, None if tape is None else partial(_forward_again, tape, state.shape))


def _read_as_they_are(inputs: Inputs) -> bool:
    """Whether a forward's launches read these very tensors: _laid_out, contiguous and _beside return them."""
    q, k, v, log_decay, beta, state, cu_seqlens, A_log, dt_bias = inputs
    gates = (x for x in (log_decay, beta, A_log, dt_bias) if x is not None)
    beside = cu_seqlens is None or (cu_seqlens.device == q.device and cu_seqlens.is_contiguous())
    dense_state = state is not None and state.is_contiguous()
    return beside and dense_state and all(map(lies_in_rows, (q, k, v))) and all(map(lies_dense, gates))


def _forward_again(tape: Tape, shape: torch.Size, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor] | None:
    """Return the output and the final state, of that shape, of a recorded forward; None if it must be run."""
    v, state = tensors[2], tensors[5]
    assert v is not None
    device = v.device
    if not may_replay(device):
        return None
    output = torch.empty(v.shape, dtype=v.dtype, device=device)
    final = torch.empty(shape, dtype=torch.float32, device=device)
    if state is None:
        state = read_zeros(shape, torch.float32, device)
    done = tape.replay((*_in_order(tensors, state), output, final, None), device)
    return (output, final) if done else None


def _in_order(tensors: Sequence[Tensor | None], state: Tensor) -> tuple[Tensor | None, ...]:
    """Return tensors, which are in the order of Inputs, with this state in the order of the forward's launches."""
    q, k, v, log_decay, beta, _, cu_seqlens, A_log, dt_bias = tensors
    return q, k, v, log_decay, beta, A_log, dt_bias, state, cu_seqlens


def _empty_outputs(
    q: Tensor, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, _, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    slots = b * count_slots(t, 1) if cu_seqlens is None else count_slots(t, cu_seqlens.shape[0] - 1)
    states = v.new_empty(slots if keep else 0, hv, value_dim, key_dim)
    return v.new_empty(v.shape), state.new_empty(state.shape), states


def _empty_grads(inputs: Inputs, dfinal: Tensor) -> Grads:
    q, k, v, log_decay, beta, _, _, A_log, dt_bias = inputs
    gates = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, beta, A_log, dt_bias))
    dlog_decay, dbeta, dA_log, ddt_bias = gates
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, dfinal))
    return dq, dk, dv, dlog_decay, dbeta, dA_log, ddt_bias, dstate


def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final state, token by token in one launch, without gradients: decoding."""
    return _recurrent(*inputs[:7], options.scale, options.normalize_qk)


@torch.library.custom_op("lineate::recurrent_triton", mutates_args=())
def _recurrent(
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
    """Decode into a copy of the state."""
    final = state.clone(memory_format=torch.contiguous_format)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    inputs = Inputs(q, k, v, log_decay, beta, final, cu_seqlens)
    output = kernels.decode(inputs, Slots(), Options(beta is not None, scale, normalize_qk))
    return output, final


@_recurrent.register_fake
def _(q, k, v, log_decay, beta, state, cu_seqlens, scale, normalize_qk):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)
