"""The kernels of the rules as torch ops, for torch.compile and autograd."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate.call import Inputs, Options, Slots
from lineate.kernels import CHUNKWISE_READS, GENERAL_READS, RECURRENT_READS, general
from lineate.kernels import pipeline as kernels
from lineate.kernels.call import CHUNK, aligned, count_slots, dense, in_rows, lies_dense, make_call
from lineate.kernels.replaying import Tape
from lineate.kernels.stages import Gradients
from lineate.kernels.tape import find, launch, may_replay, replayed
from lineate.plans import Signature, remember, undecided
from lineate.torch_ops import chunk_op
from lineate.torch_ops.chunk_op import Outputs
from lineate.torch_ops.schema import Flat, declare_call_op
from lineate.torch_ops.zeros import read_zeros

OPTIONS = Options._fields
"""The options of the chunkwise op; its chunks have always the same length."""


def _forward(inputs: Inputs, options: Options, outputs: Outputs) -> None:
    """Fill the output, the final state, and the states that enter each chunk, if they are wanted."""
    inputs = general.in_rows_of_writes(inputs, options)
    output, final, states = outputs
    kept = states if states.shape[0] else None
    made, key = (output, final, kept), (options, kept is not None)
    if replayed("forward", inputs.tensors(), made, key):
        return
    laid_out = _laid_out(inputs)
    state = laid_out.state
    assert state is not None

    def run() -> None:
        given = laid_out.replace(state=None)
        if options.rule.general:
            general.forward(given, options, state, output, final, kept)
            return
        cutting = kernels.cutting_of(given.q, given.v, "forward", kernels.makes_beside(given, options))
        kernels.forward(make_call(given, options, cutting, output), state, output, final, kept)

    launch("forward", laid_out.tensors(), made, key, run)


def _backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients."""
    inputs, grads = (general.in_rows_of_writes(x, options) for x in (inputs, grads))
    made = [x if x is not None and x.numel() else None for x in grads.tensors()]
    if replayed("backward", (doutput, dfinal, states, *inputs.tensors()), made, options):
        return
    laid_out = _laid_out(inputs)
    doutput, dfinal = aligned(doutput.contiguous()), dfinal.contiguous()

    def run() -> None:
        if options.rule.general:
            general.backward(laid_out, options, states, doutput, dfinal, grads)
            return
        call = make_call(laid_out, options, kernels.cutting_of(laid_out.q, laid_out.v, "backward"))
        kernels.backward(call, doutput, dfinal, states, _gradients(grads))

    launch("backward", (doutput, dfinal, states, *laid_out.tensors()), made, options, run)


def _gradients(grads: Inputs) -> Gradients:
    """Return the buffers of the gradients as the stages name them."""
    assert grads.state is not None
    return Gradients(
        q=grads.q, k=grads.k, v=grads.v, log_decay=grads.log_decay, beta=grads.beta, state=grads.state,
        A_log=grads.A_log, dt_bias=grads.dt_bias,
    )  # fmt: skip


def _laid_out(inputs: Inputs) -> Inputs:
    """Return the tensors as the kernels read them, so that what is copied is copied before the launches."""
    laid = inputs.map(in_rows, inputs.OPERANDS).map(lambda x: x if lies_dense(x) else dense(x), _GATES)
    device = inputs.q.device
    laid = laid.map(Tensor.contiguous, ("state",))
    return laid.map(lambda x: x.to(device).contiguous(), ("cu_seqlens",))  # a copy if they are elsewhere, or have gaps


_GATES = tuple(x.name for x in Inputs.FIELDS if x.role in ("gate", "parameter"))


def _empty_outputs(inputs: Inputs, options: Options, keep: bool) -> Outputs:
    """Return memory for the outputs of a call, with states `slots hv v k` in the dtype of v."""
    v, state, cu_seqlens = inputs.v, inputs.state, inputs.cu_seqlens
    assert state is not None
    key_dim = inputs.q.shape[3]
    (b, t), (hv, value_dim) = v.shape[:2], v.shape[-2:]
    if options.rule.writes:
        v, t = v[:, :, 0], t * v.shape[2]
    slots = b * count_slots(t, 1) if cu_seqlens is None else count_slots(t, cu_seqlens.shape[0] - 1)
    states = v.new_empty(slots if keep else 0, hv, value_dim, key_dim)
    return v.new_empty(v.shape), state.new_empty(state.shape), states


_run = chunk_op.register("chunkwise_triton", _forward, _backward, CHUNKWISE_READS, OPTIONS, _empty_outputs)
_run_general = chunk_op.register(
    "chunkwise_general_triton", _forward, _backward, GENERAL_READS, chunk_op.OPTIONS, _empty_outputs
)


def chunkwise(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final state."""
    run = _run_general if options.rule.general else _run
    return run(inputs, options if options.chunk_size == CHUNK else options._replace(chunk_size=CHUNK))


def remember_forward(signature: Signature | None, given: Inputs, inputs: Inputs, options: Options) -> None:
    """Let later calls with this signature be repeated without gradients, once one is recorded.

    Args:
        signature: That of the call (plans.py); None if it cannot be repeated.
        given: The call's own tensors; its state may be None.
        inputs: What it ran with.
        options: Likewise.
    """
    if signature is None or options.rule.writes or not undecided(signature):
        return
    state = inputs.state
    assert state is not None
    own = given.given()
    moved = any(own[name].data_ptr() != x.data_ptr() for name, x in inputs.given().items() if name in own)
    if moved or not _read_unchanged(inputs):
        remember(signature, None)  # something is converted or copied first
        return
    known, tape = find("forward", inputs.tensors(), (options._replace(chunk_size=CHUNK), False))
    if known:
        remember(signature, None if tape is None else partial(_repeat_forward, tape, state.shape))


def _read_unchanged(inputs: Inputs) -> bool:
    """Whether a forward's launches read these very tensors: `_laid_out` returns them."""
    laid_out = _laid_out(inputs)
    return all(getattr(laid_out, name) is x for name, x in inputs.given().items())


def _repeat_forward(tape: Tape, shape: torch.Size, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Return the output and the final state, of that shape, of a recorded forward; None if it must be run."""
    device = inputs.v.device
    if not may_replay(device):
        return None
    output = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=device)
    final = torch.empty(shape, dtype=torch.float32, device=device)
    tensors = inputs.named()
    if inputs.state is None:
        tensors = {**tensors, "state": read_zeros(shape, torch.float32, device)}
    done = tape.replay((*tensors.values(), output, final, None), device)
    return (output, final) if done else None


def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final state, token by token in one launch, without gradients: decoding."""
    flat, op = (_FLAT_GENERAL, _recurrent_general_op) if options.rule.general else (_FLAT, _recurrent_op)
    output, final = op(*flat.flatten(inputs, options))
    return output, final


def _recurrent(flat: Flat, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Decode into a copy of the state."""
    inputs, options = flat.restore(arguments)
    assert inputs.state is not None
    final = inputs.state.clone(memory_format=torch.contiguous_format)
    device = inputs.q.device
    inputs = inputs.map(lambda x: x.to(device), ("cu_seqlens",))
    return kernels.decode(inputs.replace(state=final), Slots(), options), final


def _fake_recurrent(flat: Flat, *arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, _ = flat.restore(arguments)
    assert inputs.state is not None
    v = inputs.v
    return v.new_empty(*v.shape[:2], *v.shape[-2:]), inputs.state.new_empty(inputs.state.shape)


def _declare_recurrent(name: str, flat: Flat) -> Any:
    run, fake = partial(_recurrent, flat), partial(_fake_recurrent, flat)
    return declare_call_op(name, flat, run, fake, results="(Tensor, Tensor)")


_FLAT, _FLAT_GENERAL = (
    Flat(reads, ("rule", "scale", "normalize_qk")) for reads in (RECURRENT_READS, GENERAL_READS)
)  # fmt: skip
_recurrent_op = _declare_recurrent("recurrent_triton", _FLAT)
_recurrent_general_op = _declare_recurrent("recurrent_general_triton", _FLAT_GENERAL)
