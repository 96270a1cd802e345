"""The launches of gradients.py, added.py and channel_gradients.py, which compute every chunk's gradients at once.

doutput, dstates and grads are contiguous. A slice of tokens of such a tensor has b = 1, so its rows follow one another,
independently of its strides.
"""

import torch
from torch import Tensor

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.hopper.added import ADDED_PARTS, added_gradients
from lineate.kernels.hopper.channel_gradients import channel_gradients
from lineate.kernels.hopper.descriptors import describe, describe_rows, describe_squares
from lineate.kernels.hopper.gradient_sides import PARTS
from lineate.kernels.hopper.gradients import head_gradients
from lineate.kernels.launching import multiprocessors, start
from lineate.kernels.portable.launch_gradients import ChannelWork
from lineate.kernels.stages import Around, Gradients, Prepared


def fill_head_gradients(call: Call, ready: Prepared, around: Around, grads: Gradients) -> Tensor | None:
    """Fill dq, dk, dV and, if the rule corrects, dbeta, for k = v = 128; return dG in parts, or None without decay.

    dq and dk are the final gradients. Only the gradient of log_decay remains to be computed, from dG.
    """
    parts = (PARTS if call.corrects else ADDED_PARTS).value
    shape = call.sequences.slots, call.sizes[2], parts, CHUNK
    sums = call.q.new_empty(shape, dtype=torch.float32) if call.gates.log_decay is not None else None
    if call.corrects:
        _launch_corrected(call, ready, around, grads, sums)
    else:
        _launch_added(call, ready, around, grads, sums)
    return sums


def _launch_corrected(call: Call, ready: Prepared, around: Around, grads: Gradients, sums: Tensor | None) -> None:
    """Launch the kernel for rules that correct. sums `slot hv PARTS c`."""
    t, h, hv, K, V = call.sizes
    q, k, v, sequences, factors = call.q, call.k, call.v, call.sequences, ready.factors
    tokens, slots = q.shape[0] * t, sequences.slots
    assert ready.T is not None
    values = (describe(x, tokens, hv * V, hv * V, [64, V]) for x in (around.doutput, grads.v))
    memories = (describe(x, slots * hv * V, K, K, [V, K]) for x in (around.states, around.dstates))
    start(head_gradients, (min(multiprocessors(q.device), slots * h),))(
        describe_rows(q, K), describe_rows(k, K), describe_rows(v, V), describe_squares(ready.T),
        describe(factors, factors.numel() // 64, 64, 64, [8, 64]), *memories, *values,
        factors, grads.beta, grads.beta if sums is None else sums, grads.v, grads.q, grads.k,
        *call.where, slots, sequences.number, q.stride(2), k.stride(2), v.stride(2), call.scale,
        HV=hv, R=hv // h, K=K, V=V, GATED=sums is not None, NORMALIZE=call.normalize_qk, PACKED=sequences.packed,
        num_warps=4,
    )  # fmt: skip


def _launch_added(call: Call, ready: Prepared, around: Around, grads: Gradients, sums: Tensor | None) -> None:
    """Launch the kernel for rules that only accumulate. sums `slot hv ADDED_PARTS c`."""
    t, h, hv, K, V = call.sizes
    q, k, v, sequences, factors = call.q, call.k, call.v, call.sequences, ready.factors
    tokens, slots = q.shape[0] * t, sequences.slots
    memories = (describe(x, slots * hv * V, K, K, [V, K]) for x in (around.states, around.dstates))
    rows = (
        describe(x, tokens, n * 128, n * 128, [64, 128]) for x, n in ((around.doutput, hv), (grads.q, h), (grads.k, h))
    )
    start(added_gradients, (min(multiprocessors(q.device), slots * h),))(
        describe_rows(q, K), describe_rows(k, K), describe_rows(v, V),
        describe(factors, factors.numel() // 64, 64, 64, [8, 64]), *memories, *rows,
        factors, factors if sums is None else sums, grads.q, grads.k,
        *call.where, slots, sequences.number, q.stride(2), k.stride(2), v.stride(2), call.scale,
        HV=hv, R=hv // h, K=K, V=V, GATED=sums is not None, NORMALIZE=call.normalize_qk, PACKED=sequences.packed,
        num_warps=8,
    )  # fmt: skip


def fill_channel_gradients(
    call: Call, ready: Prepared, around: Around, work: ChannelWork, grads: Gradients, second: bool = False
) -> None:  # fmt: skip
    """Fill dq, dk and the gradients of the gates with decay per channel, for v = 128, and mark the others in wild.

    The portable launches must follow, for the marked blocks of 64 channels. With normalize_qk, ready.norms are used.
    With a direction, the gradients of what is erased are filled, and work.dG gets its part of that of log_decay; then,
    with `second`, those of the key that is written, which are added to them.
    """
    t, h, hv, _, _ = call.sizes
    q, gates = call.q, call.gates
    k = call.k if second or gates.direction is None else gates.direction
    residuals, dP, dM, dq, dk, dG, dA_log, ddt_bias, wild = work
    log_decay, norms = gates.log_decay, ready.norms
    assert log_decay is not None and grads.log_decay is not None
    tokens, of_first = q.shape[0] * t, [None, None, None]
    if second:
        assert ready.second is not None and gates.probe is not None and grads.probe is not None
        residuals, norms = call.v, ready.second.norms
        of_first = [describe(x, tokens, hv * 128, hv * 128, [64, 64]) for x in (gates.probe, dq, grads.probe)]
    units = 2 * call.sequences.slots * hv
    values = (describe(x, tokens, hv * 128, hv * 128, [64, 64]) for x in (around.doutput, grads.v))
    memories = (describe(x, units * 64, 128, 128, [64, 64]) for x in (around.states, around.dstates))
    tma_gates = log_decay.dtype == q.dtype
    queries = describe_rows(q, 64)
    start(channel_gradients, (min(2 * multiprocessors(q.device), units),))(
        queries, describe_rows(k, 64), describe_rows(log_decay, 64) if tma_gates else queries,
        *memories, *values, describe_rows(residuals, 64),
        describe_squares(dP), describe_squares(dP if dM is None else dM),
        log_decay, gates.probe, dP, wild if norms is None else norms, gates.A_log,
        log_decay if gates.dt_bias is None else gates.dt_bias,
        dq, dk, grads.probe, dG if gates.compared == "probe" and not second else grads.log_decay,
        wild if dA_log is None else dA_log, wild if ddt_bias is None else ddt_bias, wild, *of_first,
        dG if second else None, *call.where, units, q.stride(2), k.stride(2),
        None if dM is not None and not second else residuals.stride(2), call.scale, gates.lower_bound,
        HV=hv, R=hv // h, CORRECTS=dM is not None, NORMALIZE=norms is not None, RAW=gates.raw_decay,
        BIAS=gates.dt_bias is not None, PACKED=call.sequences.packed, TMA_GATES=tma_gates,
        COMPARED="second" if second else gates.compared, num_warps=4,
    )  # fmt: skip
