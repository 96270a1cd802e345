"""The buffers and launches of second_writer.py, around those of the first writer, what is erased."""

from collections.abc import Callable

import torch

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.launching import ceil_div, start
from lineate.kernels.portable.configurations import launch, narrow, power, precision
from lineate.kernels.portable.launch_gradients import (
    ChannelWork,
    fill_pair_gradients,
    fill_state_gradients,
    gather_heads,
)
from lineate.kernels.portable.launch_scores import spans_like
from lineate.kernels.portable.second_writer import second_residuals, second_state_gradients, second_values
from lineate.kernels.stages import Around, Gradients, Prepared, Second


def make_second_room(ready: Prepared) -> Prepared:
    """Return empty buffers for the scores of the key that is written."""
    assert ready.P is not None
    P, M = torch.empty_like(ready.P), torch.empty_like(ready.P)
    norms = None if ready.norms is None else torch.empty_like(ready.norms)
    return ready._replace(w=torch.empty_like(ready.w), P=P, M=M, T=None, norms=norms)


def with_second(call: Call, ready: Prepared, writer: Prepared) -> Prepared:
    """Return the buffers with those of the key that is written, which are filled; fill the first writer's values."""
    _, _, hv, _, V = call.sizes
    P, M = writer.P, writer.M
    assert P is not None and M is not None
    values = call.v.new_empty(call.v.shape)
    config = launch("second_writer", BV=narrow(call))
    v = call.v
    start(second_values, (call.sequences.slots, hv))(
        v, M, values, *call.where, v.stride(1), v.stride(2),
        HV=hv, V=V, C=CHUNK, PACKED=call.sequences.packed, EVEN=V % config["BV"] == 0, PRECISION=precision(call),
        **config,
    )  # fmt: skip
    return ready._replace(second=Second(writer.w, P, M, values, writer.norms))


def fill_both_gradients(
    call: Call, ready: Prepared, around: Around, work: ChannelWork, grads: Gradients,
    fill: Callable[[ChannelWork, bool], None] | None = None,
) -> None:  # fmt: skip
    """Fill the gradients of a call with a direction, whose residuals are in work; grads.v gets dU in place of X.

    fill: launches an architecture's own kernels of the first writer, which mark blocks in work.wild, then (True) those
    of the second; the launches here then fill only the marked blocks.
    """
    assert grads.direction is not None and ready.second is not None and work.dM is not None
    dq, dk = work.dq, work.dk
    first = work._replace(dk=grads.direction)
    if fill is not None:
        fill(first, False)
    fill_state_gradients(call, around, first, grads)
    second = work._replace(dP=torch.empty_like(work.dP), dM=torch.empty_like(work.dM))
    _fill_second_residuals(call, ready.second, around, second, grads)
    if fill is not None:
        fill(second, True)
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
        q, k, v, call.gates.log_decay, around.dstates, work.dk, work.dG, work.wild, spans_like(q), *call.where,
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, NORMALIZE=call.normalize_qk, PACKED=call.sequences.packed,
        EVEN=V % config["BV"] == 0, SPLIT=q.dtype != torch.float32, PRECISION=precision(call),
        AGAIN=work.wild is not None, **config,
    )  # fmt: skip
