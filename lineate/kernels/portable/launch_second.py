"""The buffers and launches of second_writer.py, around those of the first writer, what is erased."""

import torch

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.launching import ceil_div, start
from lineate.kernels.portable.configurations import launch, narrow, power, precision
from lineate.kernels.portable.launch_gradients import (
    ChannelWork,
    fill_pair_gradients,
    fill_state_gradients,
    gather_heads,
    make_parts,
)
from lineate.kernels.portable.launch_scores import fill_channel_scores, spans_like
from lineate.kernels.portable.second_writer import second_residuals, second_state_gradients, second_values
from lineate.kernels.stages import Around, Gradients, Prepared, Second


def prepare_second(call: Call, ready: Prepared, products: str) -> Prepared:
    """Return the buffers with those of the key that is written, and the values of the first writer, all filled."""
    _, _, hv, _, V = call.sizes
    assert ready.P is not None
    P, M = torch.empty_like(ready.P), torch.empty_like(ready.P)
    writer = ready._replace(w=torch.empty_like(ready.w), P=P, M=M, T=None)
    fill_channel_scores(call, writer, products, second=True)
    values = call.v.new_empty(call.v.shape)
    config = launch("second_writer", BV=narrow(call))
    v = call.v
    start(second_values, (call.sequences.slots, hv))(
        v, M, values, *call.where, v.stride(1), v.stride(2),
        HV=hv, V=V, C=CHUNK, PACKED=call.sequences.packed, EVEN=V % config["BV"] == 0, PRECISION=precision(call),
        **config,
    )  # fmt: skip
    return ready._replace(second=Second(writer.w, P, M, values))


def fill_both_gradients(call: Call, ready: Prepared, around: Around, work: ChannelWork, grads: Gradients) -> None:
    """Fill the gradients of a call with a direction, whose residuals are in work; grads.v gets dU in place of X."""
    assert grads.direction is not None and ready.second is not None and work.dM is not None
    dq, dk = make_parts(call, grads)
    first = work._replace(dq=dq, dk=grads.direction)
    fill_state_gradients(call, around, first, grads)
    second = first._replace(dk=dk, dP=torch.empty_like(work.dP), dM=torch.empty_like(work.dM))
    _fill_second_residuals(call, ready.second, around, second, grads)
    _fill_second_state_gradients(call, around, second)
    fill_pair_gradients(call, first, grads)
    fill_pair_gradients(call, second, grads, second=True)
    gather_heads(call, dq, dk, grads)


def _fill_second_residuals(
    call: Call, second: Second, around: Around, work: ChannelWork, grads: Gradients
) -> None:  # fmt: skip
    """Fill dP and dM of the second writer, and dU."""
    _, _, hv, K, V = call.sizes
    v, config = call.v, launch("second_writer", BV=narrow(call))
    start(second_residuals, (call.sequences.slots, hv))(
        v, second.w, second.P, second.M, around.dstates, around.doutput, grads.v, work.dP, work.dM, *call.where,
        v.stride(1), v.stride(2),
        HV=hv, K=K, V=V, BK=power(K), C=CHUNK, PACKED=call.sequences.packed, EVEN=V % config["BV"] == 0,
        PRECISION=precision(call), **config,
    )  # fmt: skip


def _fill_second_state_gradients(call: Call, around: Around, work: ChannelWork) -> None:
    """Fill dk through the states, and add its part to dG."""
    _, h, hv, K, V = call.sizes
    q, k, v, config = call.q, call.k, call.v, launch("channel_state_gradients", BV=power(call.sizes[4]))
    start(second_state_gradients, (call.sequences.slots, hv, ceil_div(K, config["BX"])))(
        q, k, v, call.gates.log_decay, around.dstates, work.dk, work.dG, spans_like(q), *call.where,
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, NORMALIZE=call.normalize_qk, PACKED=call.sequences.packed,
        EVEN=V % config["BV"] == 0, SPLIT=q.dtype != torch.float32, PRECISION=precision(call), **config,
    )  # fmt: skip
