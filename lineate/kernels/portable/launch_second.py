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
    make_work,
)
from lineate.kernels.portable.launch_scores import spans_like
from lineate.kernels.portable.second_writer import both_residuals, second_state_gradients
from lineate.kernels.stages import Around, Gradients, Prepared, Second


def make_second_room(ready: Prepared) -> Prepared:
    """Return empty buffers for the scores of the key that is written."""
    assert ready.P is not None
    P, M = torch.empty_like(ready.P), torch.empty_like(ready.P)
    norms = None if ready.norms is None else torch.empty_like(ready.norms)
    return ready._replace(w=torch.empty_like(ready.w), P=P, M=M, T=None, norms=norms)


def with_second(ready: Prepared, writer: Prepared) -> Prepared:
    """Return the buffers with those of the key that is written."""
    assert writer.P is not None and writer.M is not None
    return ready._replace(second=Second(writer.w, writer.P, writer.M, writer.norms))


def fill_both_gradients(
    call: Call, ready: Prepared, around: Around, grads: Gradients,
    fill: Callable[[ChannelWork, Gradients, bool], None] | None = None,
) -> None:  # fmt: skip
    """Fill the gradients of a call with a direction; grads.v gets dU in place of X.

    fill: launches an architecture's own kernels of the first writer, which mark blocks in work.wild, then (True) those
    of the second; the launches here then fill only the marked blocks.
    """
    first, second, erased = _fill_both_residuals(call, ready, around, grads, wild=fill is not None)
    if fill is not None:
        fill(first, erased, False)
        fill(second, grads, True)
    fill_state_gradients(call, around, first, erased)
    _fill_second_state_gradients(call, around, second)
    fill_pair_gradients(call, first, grads)
    fill_pair_gradients(call, second, grads, second=True)
    gather_heads(call, second.dq, second.dk, grads)


def _fill_both_residuals(
    call: Call, ready: Prepared, around: Around, grads: Gradients, wild: bool
) -> tuple[ChannelWork, ChannelWork, Gradients]:  # fmt: skip
    """Fill R, dP and dM of both writers, and dU.

    Return the buffers of both, and the gradients of the first, which have X as v.
    """
    _, _, hv, K, V = call.sizes
    v, second, config = call.v, ready.second, launch("second_writer", BV=narrow(call))
    assert second is not None and ready.P is not None and ready.T is not None and grads.direction is not None
    X, residuals = torch.empty_like(grads.v), call.v.new_empty(call.v.shape)
    work = make_work(call, ready, grads, residuals, wild)
    first = work._replace(dk=grads.direction)
    other = work._replace(dP=torch.empty_like(work.dP), dM=torch.empty_like(work.dP))
    start(both_residuals, (call.sequences.slots, hv))(
        ready.k, v, second.w, ready.T, second.P, second.M, around.states, around.dstates, around.doutput, grads.v, X,
        residuals, first.dP, first.dM, other.dP, other.dM, *call.where, v.stride(1), v.stride(2),
        HV=hv, K=K, V=V, BK=power(K), C=CHUNK, PACKED=call.sequences.packed, EVEN=V % config["BV"] == 0,
        PRECISION=precision(call), **config,
    )  # fmt: skip
    return first, other, grads._replace(v=X)


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
