"""The launches that compute every chunk's gradients, with the kernels of backward.py and channel_gradients.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.kernels.call import CHUNK, Call, Gates
from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.portable.backward import add_parts, gather, head_decay_gradients, head_gradients, head_residuals
from lineate.kernels.portable.channel_gradients import (
    channel_gradients,
    channel_residuals,
    channel_state_gradients,
)
from lineate.kernels.portable.configurations import launch, narrow, power, precision
from lineate.kernels.portable.gates import head_gates_backward
from lineate.kernels.portable.launch_scores import chunks_to_check, spans_like
from lineate.kernels.stages import Around, Gradients, Prepared, RawGradients


def fill_head_gradients(call: Call, ready: Prepared, around: Around, grads: Gradients) -> None:
    """Fill the gradients with decay per head or none."""
    _, h, hv, K, V = call.sizes
    q, k, v, sequences = call.q, call.k, call.v, call.sequences
    doutput, states, dstates = around
    decay = call.gates.log_decay is not None
    residuals = torch.empty_like(grads.v) if call.corrects else v
    dq, dk = make_parts(call, grads)
    first = launch("head_residuals", BV=narrow(call))
    second = launch("head_gradients", BX=power(K), BV=power(V))
    blocks = ceil_div(K, second["BX"])
    sums = q.new_empty(sequences.slots, hv, 1 + blocks, CHUNK, dtype=torch.float32) if decay else None
    options = {
        "HV": hv, "R": hv // h, "K": K, "V": V, "PARTS": 1 + blocks, "C": CHUNK, "GATED": decay,
        "CORRECTS": call.corrects, "PACKED": sequences.packed, "PRECISION": precision(call),
    }  # fmt: skip
    start(head_residuals, (sequences.slots, hv))(
        q, k, v, ready.P, ready.T, ready.factors, states, doutput, grads.v, grads.beta, residuals, sums, *call.where,
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2), call.scale,
        BK=power(K), NORMALIZE=call.normalize_qk, EVEN=V % first["BV"] == 0, **options, **first,
    )  # fmt: skip
    start(head_gradients, (sequences.slots, hv, blocks))(
        q, k, ready.P, ready.T, ready.factors, states, dstates, doutput, grads.v, residuals, sums, dq, dk, *call.where,
        q.stride(1), k.stride(1), residuals.stride(1), q.stride(2), k.stride(2), residuals.stride(2),
        EVEN=V % second["BV"] == 0, **options, **second,
    )  # fmt: skip
    fill_decay_gradients(call, ready, sums, grads)
    gather_heads(call, dq, dk, grads)


def fill_decay_gradients(call: Call, ready: Prepared, sums: Tensor | None, grads: Gradients) -> None:
    """Fill the gradient of log_decay per head from dG, which is given in parts; do nothing without decay."""
    if sums is None:
        return
    hv = sums.shape[1]
    heads = min(16, next_power(hv))
    start(head_decay_gradients, (call.sequences.slots, ceil_div(hv, heads)))(
        ready.factors, sums, grads.log_decay, *call.where,
        HV=hv, PARTS=sums.shape[2], HEADS=heads, C=CHUNK, PACKED=call.sequences.packed, **launch("head_gates"),
    )  # fmt: skip


def make_parts(call: Call, grads: Gradients) -> tuple[Tensor, Tensor]:
    """Return the buffers of the value heads' dq and dk: the final tensors if no gather is needed."""
    _, h, hv, _, _ = call.sizes
    if hv == h and not call.normalize_qk:
        return grads.q, grads.k
    shape = *grads.q.shape[:2], hv, grads.q.shape[3]
    return grads.q.new_empty(shape), grads.k.new_empty(shape)


def gather_heads(call: Call, dq: Tensor, dk: Tensor, grads: Gradients) -> None:
    """Go from each value head's gradients (of unit q and k, if normalised) to those of q and k."""
    t, h, _, K, _ = call.sizes
    if dq is grads.q:
        return
    for x, parts, dx in ((call.q, dq, grads.q), (call.k, dk, grads.k)):
        tokens = x.shape[0] * t
        start(gather, (ceil_div(tokens * h, 16),))(
            x, parts, dx, tokens, x.stride(1), x.stride(2),
            H=h, R=parts.shape[2] // h, K=K, BK=power(K), ROWS=16, NORMALIZE=call.normalize_qk, num_warps=4,
        )  # fmt: skip


class ChannelWork(NamedTuple):
    """The tensors that the launches for decay per channel share."""

    residuals: Tensor
    """R, `token hv v`; v itself if the rule only accumulates."""
    dP: Tensor
    dM: Tensor | None
    dq: Tensor
    """`token hv k`, or the final dq if no gather is needed."""
    dk: Tensor
    dG: Tensor
    """`token hv k`."""
    dA_log: Tensor | None
    """`slot hv block`: one number for each block of key channels."""
    ddt_bias: Tensor | None
    """`slot hv k`."""
    wild: Tensor | None = None
    """`slot hv block`: which blocks an earlier kernel left to these launches, or None if they compute all blocks."""


def fill_residuals(call: Call, ready: Prepared, around: Around, grads: Gradients, wild: bool = False) -> ChannelWork:
    """Fill R, dP, dM, dV and dbeta with decay per channel.

    Return them with the buffers that are still to be filled, including wild if requested.
    """
    _, _, hv, K, V = call.sizes
    v, gates, sequences = call.v, call.gates, call.sequences
    config = launch("channel_residuals", BV=narrow(call))
    residuals = torch.empty_like(v, memory_format=torch.contiguous_format) if call.corrects else v
    work = make_work(call, ready, grads, residuals, wild)
    start(channel_residuals, (sequences.slots, hv))(
        ready.k, v, ready.M, ready.T, ready.factors, around.states, around.doutput, grads.v, grads.beta, residuals,
        work.dP, work.dM, *call.where, v.stride(1), v.stride(2), gates.beta_scale,
        HV=hv, K=K, V=V, BK=power(K), C=CHUNK, CORRECTS=call.corrects, COMPARED=gates.compared,
        RAW_BETA=gates.raw_beta, PACKED=sequences.packed, EVEN=V % config["BV"] == 0, PRECISION=precision(call),
        **config,
    )  # fmt: skip
    return work


def make_work(call: Call, ready: Prepared, grads: Gradients, residuals: Tensor, wild: bool) -> ChannelWork:
    """Return empty buffers for the gradients with decay per channel, and wild if requested."""
    _, _, hv, K, _ = call.sizes
    q, gates, sequences = call.q, call.gates, call.sequences
    assert ready.P is not None
    dP, dM = torch.empty_like(ready.P), torch.empty_like(ready.T) if ready.T is not None else None
    dq, dk = make_parts(call, grads)
    dG = q.new_empty(*q.shape[:2], hv, K, dtype=torch.float32)
    slots, blocks = sequences.slots, ceil_div(K, launch("channel_gradients")["BX"])
    dA_log = dP.new_empty(slots, hv, blocks, dtype=torch.float32) if gates.A_log is not None else None
    ddt_bias = dP.new_empty(slots, hv, K, dtype=torch.float32) if gates.dt_bias is not None else None
    left = q.new_empty(slots, hv, blocks, dtype=torch.int8) if wild else None
    return ChannelWork(residuals, dP, dM, dq, dk, dG, dA_log, ddt_bias, left)


def fill_channel_gradients(call: Call, around: Around, work: ChannelWork, grads: Gradients) -> None:
    """Fill the gradients of q, k and the gates with decay per channel: all blocks, or those left in work.wild."""
    fill_state_gradients(call, around, work, grads)
    fill_pair_gradients(call, work, grads)
    gather_heads(call, work.dq, work.dk, grads)
    if work.dA_log is not None and grads.A_log is not None:
        _add_parts(work.dA_log, grads.A_log)
    if work.ddt_bias is not None and grads.dt_bias is not None:
        _add_parts(work.ddt_bias.flatten(1)[..., None], grads.dt_bias)


def fill_state_gradients(call: Call, around: Around, work: ChannelWork, grads: Gradients) -> None:
    """Fill dq, dk, dG and that of the probe, through the states, of what is erased."""
    _, _, _, K, V = call.sizes
    q, gates, sequences, residuals = call.q, call.gates, call.sequences, work.residuals
    k = call.k if gates.direction is None else gates.direction
    doutput, states, dstates = around
    config = launch("channel_state_gradients", BV=power(V))
    group, grid = _grid(call, work, ceil_div(K, config["BX"]))
    start(channel_state_gradients, grid)(
        q, k, gates.probe, gates.log_decay, gates.A_log, gates.dt_bias, states, dstates, doutput, grads.v, residuals,
        work.dq, work.dk, grads.probe, work.dG, work.wild, spans_like(q), *call.where, sequences.slots, group,
        q.stride(1), k.stride(1), residuals.stride(1), q.stride(2), k.stride(2), residuals.stride(2),
        call.scale, gates.lower_bound,
        V=V, EVEN=V % config["BV"] == 0, COMPARED=gates.compared, **_channel_options(call, work), **config,
    )  # fmt: skip


def fill_pair_gradients(call: Call, work: ChannelWork, grads: Gradients, second: bool = False) -> None:
    """Add the gradients through the scores: of what is erased; with `second`, of the key, if that is another one."""
    K = call.sizes[3]
    q, gates = call.q, call.gates
    k = call.k if second or gates.direction is None else gates.direction
    config = launch("channel_gradients")
    group, grid = _grid(call, work, ceil_div(K, config["BX"]))
    start(channel_gradients, grid)(
        q, k, gates.probe, gates.log_decay, gates.A_log, gates.dt_bias, work.dP, work.dM, work.dq, work.dk,
        grads.probe, work.dG, grads.log_decay, work.dA_log, work.ddt_bias, work.wild, spans_like(q), *call.where,
        call.sequences.slots, group, q.stride(1), k.stride(1), q.stride(2), k.stride(2), call.scale, gates.lower_bound,
        COMPARED="second" if second else gates.compared, **_channel_options(call, work), **config,
    )  # fmt: skip


def _grid(call: Call, work: ChannelWork, blocks: int) -> tuple[int, tuple[int, int, int]]:
    """Return the chunks of a program of both kernels, several if it looks for wild blocks among them, and the grid."""
    slots, hv = call.sequences.slots, call.sizes[2]
    group = 1 if work.wild is None else chunks_to_check(call, blocks)
    return group, (ceil_div(slots, group), hv, blocks)


def _channel_options(call: Call, work: ChannelWork) -> dict[str, int | bool | str]:
    """Return the constants of both kernels."""
    _, h, hv, K, _ = call.sizes
    gates = call.gates
    return {
        "HV": hv, "R": hv // h, "K": K, "BK": power(K), "C": CHUNK, "CORRECTS": call.corrects,
        "NORMALIZE": call.normalize_qk, "RAW": gates.raw_decay, "BIAS": gates.dt_bias is not None,
        "PACKED": call.sequences.packed, "SPLIT": call.q.dtype != torch.float32, "PRECISION": precision(call),
        "AGAIN": work.wild is not None,
    }  # fmt: skip


def fill_raw_gate_gradients(gates: Gates, dlog_decay: Tensor, dbeta: Tensor, raw: RawGradients) -> None:
    """Fill the gradients of those gates that are raw from those of log_decay and beta per head, all contiguous."""
    hv = dlog_decay.shape[-1]
    tokens, heads, block = dlog_decay.numel() // hv, min(16, next_power(hv)), 128
    programs = ceil_div(tokens, block)
    sums = dlog_decay.new_empty(programs, 2, hv)
    start(head_gates_backward, (programs, ceil_div(hv, heads)))(
        gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, dlog_decay, dbeta, raw.gate, raw.write, sums, tokens,
        gates.beta_scale, gates.lower_bound, HV=hv, HEADS=heads, BT=block, RAW=gates.raw_decay, RAW_BETA=gates.raw_beta,
        BIAS=gates.dt_bias is not None, **launch("head_gates"),
    )  # fmt: skip
    if gates.A_log is not None:
        _add_parts(sums[:, 0, :, None], raw.A_log)
    if gates.dt_bias is not None:
        _add_parts(sums[:, 1, :, None], raw.dt_bias)


def _add_parts(parts: Tensor, total: Tensor) -> None:
    """Add up parts `count n blocks`, of which only the first dimension may have gaps, into total, of n elements."""
    count, n, blocks = parts.shape
    columns = min(32, next_power(n))
    start(add_parts, (ceil_div(n, columns),))(
        parts, total, count, n, parts.stride(0), BLOCKS=blocks, ROWS=4096 // columns, BN=columns, num_warps=4
    )
