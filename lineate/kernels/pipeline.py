"""The chunkwise form on a GPU: buffers and launches. The arithmetic is in the kernels.

forward    gates, scores: P, T and the factors of every chunk, all chunks at once
           state: from chunk to chunk, the state and the output
backward   gates, scores again
           state: the same walk backwards, for dS
           gradients: those of every chunk at once
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineate.kernels.call import CHUNK, Call, Gates, aligned, find_texts, power
from lineate.kernels.hopper import added as hopper_added
from lineate.kernels.hopper import channel as hopper_channel
from lineate.kernels.hopper import channel_gradients as hopper_channel_gradients
from lineate.kernels.hopper import gradients as hopper_gradients
from lineate.kernels.hopper import scores as hopper_scores
from lineate.kernels.hopper import walk as hopper
from lineate.kernels.hopper import walk_backward as hopper_backward
from lineate.kernels.launching import ceil_div, compile_only, next_power, start
from lineate.kernels.portable.backward import gather, head_decay_gradients, head_gradients, head_residuals
from lineate.kernels.portable.channel import (
    channel_gradients,
    channel_residuals,
    channel_scores,
    channel_state_gradients,
    make_spans,
)
from lineate.kernels.portable.configurations import GROUP, launch, launch_walk, narrow
from lineate.kernels.portable.gates import FACTORS, head_gates, head_gates_backward
from lineate.kernels.portable.scores import head_scores, invert_wild
from lineate.kernels.portable.split import CHAIN_WIDTH, LEAST_CHUNKS, PROGRAMS, chain, count_segments
from lineate.kernels.portable.state import backward_state, forward_state

_SPANS: dict[tuple[torch.device, bool], Tensor] = {}


def spans_like(q: Tensor) -> Tensor:
    """make_spans, made once; not kept if this call is being captured, when memory belongs to the graph."""
    key = q.device, q.dtype == torch.float32
    if key in _SPANS:
        return _SPANS[key]
    spans = make_spans(CHUNK, q)
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _SPANS[key] = spans
    return spans


@dataclass(frozen=True)
class Prepared:
    """What of a call does not depend on the state. q, k, w are Qr, Kr, Kw if decay is per channel, else q, k, k.

    P is None if the walk makes it, T if the rule only accumulates.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    P: Tensor | None
    T: Tensor | None
    M: Tensor | None
    factors: Tensor
    norms: Tensor | None = None
    """`slot hv 2 c`: scale / |q_i|, 1 / |k_i|; where a Gluon kernel found them for another."""


def prepare(call: Call, scores: bool = True, for_backward: bool = False) -> Prepared:
    """Scores (unless the walk makes them), inverse and factors of every chunk."""
    _, h, hv, K, _ = call.sizes
    q, k, gates, texts = call.q, call.k, call.gates, call.texts
    slots, R, BK = texts.slots, hv // h, power(K)
    raw, bias = gates.A_log is not None, gates.dt_bias is not None
    P = q.new_empty(slots, hv, CHUNK, CHUNK) if scores else None
    T = q.new_empty(slots, hv, CHUNK, CHUNK) if call.corrects else None
    wild = q.new_empty(slots, hv, dtype=torch.int32) if call.products[0] == "fp16" else None
    if call.channel:
        M = q.new_empty(slots, hv, CHUNK, CHUNK) if call.corrects and for_backward else None
        factors = q.new_empty(slots, hv, BK + CHUNK, dtype=torch.float32)
        Qr = q.new_empty(*q.shape[:2], hv, K)
        Kw = torch.empty_like(Qr)
        Kr = torch.empty_like(Qr) if call.corrects else Kw
        norms, first = None, 0
        if call.channel_on_hopper:
            first = 1
            if for_backward and call.normalize_qk:
                norms = q.new_empty(slots, hv, 2, CHUNK, dtype=torch.float32)
            hopper_channel.channel_scores_hopper(
                q, k, gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, Qr, Kr, Kw, P, M, T,
                factors, wild, norms, texts.bounds, texts.first_slots, texts.slot_texts, call.scale, gates.beta_scale,
                normalize=call.normalize_qk,
            )  # fmt: skip
        for n in range(first, len(call.products)):
            start(channel_scores, (slots, hv))(
                q, k, gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, Qr, Kr, Kw, P, M, T, factors, wild,
                spans_like(q), *call.where,
                q.stride(1), k.stride(1), q.stride(2), k.stride(2), call.scale, gates.beta_scale,
                HV=hv, R=R, K=K, BK=BK, C=CHUNK, CORRECTS=call.corrects, NORMALIZE=call.normalize_qk,
                RAW=raw, BIAS=bias, KEEP=M is not None, PACKED=texts.packed, SPLIT=q.dtype != torch.float32,
                PRECISION=call.precision, PRODUCTS=call.products[n], AGAIN=n > 0, **launch("channel_scores", BX=BK),
            )  # fmt: skip
        return Prepared(Qr, Kr, Kw, P, T, M, factors, norms)
    factors = q.new_empty(slots, hv, FACTORS.value, CHUNK, dtype=torch.float32)
    heads = min(16, next_power(hv))
    decay = gates.log_decay is not None
    start(head_gates, (slots, ceil_div(hv, heads)))(
        gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, factors, *call.where, call.scale, gates.beta_scale,
        HV=hv, HEADS=heads, C=CHUNK, GATED=decay, CORRECTS=call.corrects, RAW=raw, BIAS=bias, PACKED=texts.packed,
        **launch("head_gates"),
    )  # fmt: skip
    if not scores and not call.corrects:
        return Prepared(q, k, k, P, T, None, factors)
    if call.on_hopper and q.dtype == torch.bfloat16:
        hopper_scores.head_scores_hopper(
            q, k, P, T, factors, wild, texts.bounds, texts.first_slots, texts.slot_texts, call.scale,
            gated=decay, corrects=call.corrects, normalize=call.normalize_qk,
        )  # fmt: skip
    else:
        start(head_scores, (slots, h))(
            q, k, P, T, factors, wild, *call.where, q.stride(1), k.stride(1), q.stride(2), k.stride(2), h, call.scale,
            R=R, K=K, BK=BK, C=CHUNK, GATED=decay, CORRECTS=call.corrects, NORMALIZE=call.normalize_qk,
            PACKED=texts.packed, PRECISION=call.precision, PRODUCTS=call.products[0],
            maxnreg=128 if R == 1 else 168, **launch("head_scores"),
        )  # fmt: skip
    if len(call.products) > 1:
        start(invert_wild, (ceil_div(slots, GROUP), hv))(
            k, T, factors, wild, *call.where, slots, k.stride(1), k.stride(2),
            HV=hv, R=R, K=K, BK=BK, C=CHUNK, GROUP=GROUP, GATED=decay, NORMALIZE=call.normalize_qk,
            PACKED=texts.packed, PRECISION=call.precision, **launch("head_scores"),
        )  # fmt: skip
    return Prepared(q, k, k, P, T, None, factors)


_COMPILED: set[tuple[object, ...]] = set()


def compile_ahead(call: Call, state: Tensor, keep: bool) -> None:
    """Before the first call of its kind: its kernels, and its backward's if states are kept, compiled side by side.

    What is missed here, or if nothing can be done here, is compiled when it is first launched.
    """
    if not call.q.is_cuda or torch.cuda.is_current_stream_capturing():
        return
    segments = segments_of(call)
    pairs = call.texts.count * call.v.shape[2]
    blocks = forward_block(call, segments), hopper_backward.block_of(call.v.shape[3], pairs * segments)
    kind = (
        *((None if x is None else (x.device, x.dtype, *x.shape[2:])) for x in (call.q, call.v, *call.gates.tensors)),
        call.corrects, call.normalize_qk, call.texts.packed, call.products, segments > 1, *blocks, keep,
    )  # fmt: skip
    if kind in _COMPILED:
        return
    _COMPILED.add(kind)
    # Few tokens stand for all; as many as are cut into segments, if those are.
    part = _part(call, slice(0, call.q.shape[0]), slice(0, CHUNK if segments == 1 else CHUNK * LEAST_CHUNKS))

    def both() -> None:
        output, final = torch.empty_like(part.v, memory_format=torch.contiguous_format), torch.empty_like(state)
        states = output.new_empty(part.texts.slots, *part.v.shape[2:], part.q.shape[3]) if keep else None
        forward(part, state, output, final, states)
        if states is not None:
            backward(part, output, final, states, _empty_gradients(part, final))

    with suppress(torch.OutOfMemoryError):
        compile_only(both)


def forward(call: Call, state: Tensor, output: Tensor, final: Tensor, states: Tensor | None) -> None:
    """Fills output, final, and states `slots hv v k`, the state entering each chunk, if given."""
    segments = segments_of(call)
    ready = prepare(call, scores=not scores_in_walk(call, segments, states is not None))
    if segments > 1:
        maps = walk_forward(call, ready, segments, map_only=True)
        state = chain_segments(call, maps, state, segments, reverse=False)
    walk_forward(call, ready, segments, state, output, final, states)


def segments_of(call: Call) -> int:
    """Packed texts are never cut: where would depend on their company. Wide keys are not: their maps are too large."""
    if call.texts.packed or call.q.shape[3] > CHAIN_WIDTH:
        return 1
    chunks = call.texts.slots // call.texts.count
    return count_segments(chunks, call.v.shape[2] * ceil_div(call.v.shape[3], 64))


def chain_segments(call: Call, maps: Tensor, outer: Tensor, segments: int, reverse: bool) -> Tensor:
    """The states between the segments, `pair segment k v`."""
    _, _, hv, K, V = call.sizes
    pairs = call.texts.count * hv
    entries = outer.new_empty(pairs, segments, K, V)
    config = launch("chain", BV=power(V))
    start(chain, (ceil_div(V, config["BV"]) * pairs,))(
        maps, outer, entries, segments, K=K, V=V, BK=power(K), REVERSE=reverse, **config
    )
    return entries


def forward_block(call: Call, segments: int) -> int:
    """Value columns that a program of hopper.forward_state has: 128 if there are programs enough all the same."""
    _, _, hv, K, V = call.sizes
    return 128 if V % 128 == 0 and K % 128 == 0 and call.texts.count * hv * segments >= PROGRAMS else 64


def scores_in_walk(call: Call, segments: int, keep: bool) -> bool:
    """Whether the forward's walk makes P itself, to the same bits: where that was found faster."""
    return (
        call.on_hopper
        and call.q.dtype == torch.bfloat16
        and not call.channel
        and not call.normalize_qk
        and forward_block(call, segments) == 128
        and not (call.corrects and (keep or call.q.shape[2] < call.v.shape[2]))
    )


def walk_forward(
    call: Call,
    ready: Prepared,
    segments: int,
    starts: Tensor | None = None,
    output: Tensor | None = None,
    final: Tensor | None = None,
    states: Tensor | None = None,
    map_only: bool = False,
) -> Tensor | None:
    """From chunk to chunk; map_only: the affine maps of the segments instead, `pair segment k (v + k)`."""
    t, h, hv, K, V = call.sizes
    texts, q, k, v = call.texts, ready.q, ready.k, call.v
    pairs = texts.count * hv
    if map_only:
        final = v.new_empty(pairs, segments, K, V + K, dtype=torch.float32)
    if call.on_hopper:
        hopper.forward_state_hopper(
            q, k, ready.w, v, ready.P, ready.T, ready.factors, starts, output, final, states,
            texts.bounds, texts.first_slots, texts.count, texts.packed, scale=call.scale,
            gated=call.gates.log_decay is not None, channel=call.channel, corrects=call.corrects,
            segments=segments, block=forward_block(call, segments), map_only=map_only,
        )  # fmt: skip
        return final
    config = launch_walk("forward_state", call)
    BV = config["BV"]
    columns = V + K if map_only else V
    start(forward_state, (ceil_div(columns, BV) * pairs, 1, segments))(
        q, k, ready.w, v, ready.P, ready.T, ready.factors, starts, output, final, states,
        texts.bounds, texts.first_slots, t, segments,
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, CHANNEL=call.channel, CORRECTS=call.corrects,
        KEEP=states is not None, MAP=map_only, PACKED=texts.packed, EVEN=V % BV == 0 and not map_only,
        PRECISION=call.precision, **config,
    )  # fmt: skip
    return final


@dataclass(frozen=True)
class Gradients:
    """Where the gradients go, in the shapes and dtypes of what they are of; None where there is nothing to have one."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


def _empty_gradients(call: Call, dstate: Tensor) -> Gradients:
    """Room for all of a call's, as ops.py makes it: float32 for gates that it looks after itself."""
    outside = call.gates_outside
    log_decay, beta, A_log, dt_bias = (
        None if x is None else torch.empty_like(x, dtype=torch.float32 if outside else x.dtype)
        for x in call.gates.tensors
    )
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    return Gradients(q, k, v, log_decay, beta, dstate, None if outside else A_log, None if outside else dt_bias)


# What the backward of one slice of the tokens may keep of states alone; its other buffers are about as large. Smaller
# slices save memory, but each is a dozen launches of some 100 us of the host's time.
SLICE_BYTES = 2**28


def backward(call: Call, doutput: Tensor, dfinal: Tensor, states: Tensor, grads: Gradients) -> None:
    """Fills grads, from the states that forward kept.

    Slice by slice from the last chunks to the first (a few rows of the batch at a time if it has several), so that the
    buffers stay small beside the states; the arithmetic is the same to the bit.
    """
    doutput, dfinal = aligned(doutput.contiguous()), dfinal.contiguous()
    parts = grads.A_log, grads.dt_bias
    totals = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in parts]
    for rows, tokens in _slices(call, states):
        chunks = states if call.texts.packed else states.view(call.q.shape[0], -1, *states.shape[1:])
        if not call.texts.packed:
            chunks = chunks[rows, tokens.start // CHUNK : ceil_div(tokens.stop, CHUNK)].flatten(0, 1)
        part = _part(call, rows, tokens)
        within = Gradients(
            *(None if x is None else x[rows, tokens] for x in (grads.q, grads.k, grads.v, grads.log_decay, grads.beta)),
            grads.state if call.texts.packed else grads.state[rows],
            grads.A_log, grads.dt_bias,
        )  # fmt: skip
        _backward_part(part, doutput[rows, tokens], dfinal if call.texts.packed else dfinal[rows], chunks, within)
        dfinal = grads.state if call.q.shape[0] == 1 else dfinal
        for total, x in zip(totals, parts, strict=True):
            if total is not None:
                total += x
    for total, x in zip(totals, parts, strict=True):
        if total is not None and x is not None:
            x.copy_(total)


def _slices(call: Call, states: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and tokens of each slice, the last tokens first."""
    b, t = call.q.shape[:2]
    everything = slice(0, b), slice(0, t)
    if call.texts.packed or (b == 1 and segments_of(call) > 1):  # slices would be cut into other segments
        yield everything
        return
    count = max(1, ceil_div(states.numel() * states.element_size(), SLICE_BYTES))
    if b > 1:
        rows = ceil_div(b, min(count, b))
        for first in range(0, b, rows):
            yield slice(first, min(first + rows, b)), slice(0, t)
        return
    tokens = ceil_div(ceil_div(t, CHUNK), count) * CHUNK
    for first in reversed(range(0, t, tokens)):
        yield slice(0, 1), slice(first, min(first + tokens, t))


def _part(call: Call, rows: slice, tokens: slice) -> Call:
    """The same call on a slice of its rows and tokens."""
    gates, texts = call.gates, call.texts
    if tokens == slice(0, call.q.shape[1]) and rows == slice(0, call.q.shape[0]):
        return call
    log_decay, beta = (None if x is None else x[rows, tokens] for x in (gates.log_decay, gates.beta))
    q, k, v = (x[rows, tokens] for x in (call.q, call.k, call.v))
    return replace(
        call, q=q, k=k, v=v, gates=replace(gates, log_decay=log_decay, beta=beta), texts=find_texts(q, texts.bounds)
    )


def _backward_part(call: Call, doutput: Tensor, dfinal: Tensor, states: Tensor, grads: Gradients) -> None:
    _, _, hv, K, V = call.sizes
    q, k, v, texts, gates = call.q, call.k, call.v, call.texts, call.gates
    ready = prepare(call, for_backward=True)
    dstates = torch.empty_like(states)
    segments = segments_of(call)
    if segments > 1:
        maps = walk_backward(call, ready, segments, doutput, map_only=True)
        dfinal = chain_segments(call, maps, dfinal, segments, reverse=True)
    walk_backward(call, ready, segments, doutput, dfinal, grads.v, grads.state, dstates)
    if call.channel:
        _channel_gradients(call, ready, doutput, states, dstates, grads)
    elif call.on_hopper and K == V == 128:
        parts = (hopper_gradients.PARTS if call.corrects else hopper_added.ADDED_PARTS).value
        sums = q.new_empty(texts.slots, hv, parts, CHUNK, dtype=torch.float32) if gates.log_decay is not None else None
        where = texts.bounds, texts.first_slots, texts.slot_texts, texts.count
        if call.corrects:
            hopper_gradients.head_gradients_hopper(
                q, k, v, ready.T, ready.factors, states, dstates, doutput, grads.v, grads.q, grads.k, grads.beta, sums,
                *where, call.scale, normalize_qk=call.normalize_qk,
            )  # fmt: skip
        else:
            hopper_added.added_gradients_hopper(
                q, k, v, ready.factors, states, dstates, doutput, grads.q, grads.k, sums,
                *where, call.scale, normalize_qk=call.normalize_qk,
            )  # fmt: skip
        _head_decay_gradients(call, ready, sums, grads)
    else:
        _head_gradients(call, ready, doutput, states, dstates, grads)


def _head_gradients(
    call: Call, ready: Prepared, doutput: Tensor, states: Tensor, dstates: Tensor, grads: Gradients
) -> None:
    _, h, hv, K, V = call.sizes
    q, k, v, texts = call.q, call.k, call.v, call.texts
    decay = call.gates.log_decay is not None
    residuals = torch.empty_like(grads.v) if call.corrects else v
    dq, dk = _parts(call, grads)
    first = launch("head_residuals", BV=narrow(call))
    second = launch("head_gradients", BX=power(K), BV=power(V))
    blocks = ceil_div(K, second["BX"])
    sums = q.new_empty(texts.slots, hv, 1 + blocks, CHUNK, dtype=torch.float32) if decay else None
    options = {
        "HV": hv, "R": hv // h, "K": K, "V": V, "PARTS": 1 + blocks, "C": CHUNK, "GATED": decay,
        "CORRECTS": call.corrects, "PACKED": texts.packed, "PRECISION": call.precision,
    }  # fmt: skip
    start(head_residuals, (texts.slots, hv))(
        q, k, v, ready.P, ready.T, ready.factors, states, doutput, grads.v, grads.beta, residuals, sums, *call.where,
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2), call.scale,
        BK=power(K), NORMALIZE=call.normalize_qk, EVEN=V % first["BV"] == 0, **options, **first,
    )  # fmt: skip
    start(head_gradients, (texts.slots, hv, blocks))(
        q, k, ready.P, ready.T, ready.factors, states, dstates, doutput, grads.v, residuals, sums, dq, dk, *call.where,
        q.stride(1), k.stride(1), residuals.stride(1), q.stride(2), k.stride(2), residuals.stride(2),
        EVEN=V % second["BV"] == 0, **options, **second,
    )  # fmt: skip
    _head_decay_gradients(call, ready, sums, grads)
    _gather(call, dq, dk, grads)


def _head_decay_gradients(call: Call, ready: Prepared, sums: Tensor | None, grads: Gradients) -> None:
    """From dG, in parts, to the gradient of log_decay."""
    if sums is None:
        return
    hv = sums.shape[1]
    heads = min(16, next_power(hv))
    start(head_decay_gradients, (call.texts.slots, ceil_div(hv, heads)))(
        ready.factors, sums, grads.log_decay, *call.where,
        HV=hv, PARTS=sums.shape[2], HEADS=heads, C=CHUNK, PACKED=call.texts.packed, **launch("head_gates"),
    )  # fmt: skip


def _parts(call: Call, grads: Gradients) -> tuple[Tensor, Tensor]:
    """Where the value heads' dq and dk go: straight to where they belong if gather has nothing to do."""
    _, h, hv, _, _ = call.sizes
    if hv == h and not call.normalize_qk:
        return grads.q, grads.k
    shape = *grads.q.shape[:2], hv, grads.q.shape[3]
    return grads.q.new_empty(shape), grads.k.new_empty(shape)


def _gather(call: Call, dq: Tensor, dk: Tensor, grads: Gradients) -> None:
    """From each value head's gradients (of unit q and k, if normalised) to those of q and k."""
    t, h, _, K, _ = call.sizes
    if dq is grads.q:
        return
    for x, parts, dx in ((call.q, dq, grads.q), (call.k, dk, grads.k)):
        tokens = x.shape[0] * t
        start(gather, (ceil_div(tokens * h, 16),))(
            x, parts, dx, tokens, x.stride(1), x.stride(2),
            H=h, R=parts.shape[2] // h, K=K, BK=power(K), ROWS=16, NORMALIZE=call.normalize_qk, num_warps=4,
        )  # fmt: skip


def walk_backward(
    call: Call,
    ready: Prepared,
    segments: int,
    doutput: Tensor,
    ends: Tensor | None = None,
    dvalues: Tensor | None = None,
    dstart: Tensor | None = None,
    dstates: Tensor | None = None,
    map_only: bool = False,
) -> Tensor | None:
    """From the last chunk to the first; map_only: the affine maps of the segments instead."""
    t, h, hv, K, V = call.sizes
    texts, q, k = call.texts, ready.q, ready.k
    pairs = texts.count * hv
    if not map_only and call.on_hopper:
        hopper_backward.backward_state_hopper(
            q, k, ready.w, ready.P, ready.T, ready.factors, ends, doutput, dvalues, dstart, dstates,
            texts.bounds, texts.first_slots, texts.count, texts.packed, hv=hv, channel=call.channel,
            corrects=call.corrects, segments=segments,
        )  # fmt: skip
        return None
    if map_only:
        dstart = doutput.new_empty(pairs, segments, K, V + K, dtype=torch.float32)
    config = launch_walk("backward_state", call)
    BV = config["BV"]
    columns = V + K if map_only else V
    start(backward_state, (ceil_div(columns, BV) * pairs, 1, segments))(
        q, k, ready.w, ready.P, ready.T, ready.factors, ends, doutput, dvalues, dstart, dstates,
        texts.bounds, texts.first_slots, t, segments, q.stride(1), k.stride(1), q.stride(2), k.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, CHANNEL=call.channel, CORRECTS=call.corrects,
        MAP=map_only, PACKED=texts.packed, EVEN=V % BV == 0 and not map_only, PRECISION=call.precision,
        **config,
    )  # fmt: skip
    return dstart


def _channel_gradients(
    call: Call, ready: Prepared, doutput: Tensor, states: Tensor, dstates: Tensor, grads: Gradients
) -> None:
    _, h, hv, K, V = call.sizes
    texts, gates, v = call.texts, call.gates, call.v
    raw, bias = gates.A_log is not None, gates.dt_bias is not None
    BK = power(K)
    config = launch("channel_residuals", BV=narrow(call))
    residuals = torch.empty_like(v, memory_format=torch.contiguous_format) if call.corrects else v
    dP, dM = torch.empty_like(ready.P), torch.empty_like(ready.T) if call.corrects else None
    start(channel_residuals, (texts.slots, hv))(
        ready.k, v, ready.M, ready.T, ready.factors, states, doutput, grads.v, grads.beta, residuals, dP, dM,
        *call.where,
        v.stride(1), v.stride(2), gates.beta_scale,
        HV=hv, K=K, V=V, BK=BK, C=CHUNK, CORRECTS=call.corrects, RAW=raw, PACKED=texts.packed,
        EVEN=V % config["BV"] == 0, PRECISION=call.precision, **config,
    )  # fmt: skip
    q, k = call.q, call.k
    dq, dk = _parts(call, grads)
    dG = q.new_empty(*q.shape[:2], hv, K, dtype=torch.float32)
    spans = spans_like(q)
    strides = q.stride(1), k.stride(1), q.stride(2), k.stride(2)
    options = {
        "HV": hv, "R": hv // h, "K": K, "BK": BK, "C": CHUNK, "CORRECTS": call.corrects,
        "NORMALIZE": call.normalize_qk, "RAW": raw, "BIAS": bias, "PACKED": texts.packed,
        "SPLIT": q.dtype != torch.float32, "PRECISION": call.precision,
    }  # fmt: skip
    config = launch("channel_gradients", BX=BK)
    blocks = ceil_div(K, config["BX"])
    dA_log = dP.new_empty(texts.slots, hv, blocks, dtype=torch.float32) if raw else None
    ddt_bias = dP.new_empty(texts.slots, hv, K, dtype=torch.float32) if bias else None
    wild = None
    if call.channel_on_hopper and V == 128:  # then the others do just what is wild
        wild = q.new_empty(texts.slots, hv, blocks, dtype=torch.int8)
        hopper_channel_gradients.channel_gradients_hopper(
            q, k, gates.log_decay, gates.A_log, gates.dt_bias, states, dstates, doutput, grads.v, residuals, dP, dM,
            ready.norms, dq, dk, grads.log_decay, dA_log, ddt_bias, wild,
            texts.bounds, texts.first_slots, texts.slot_texts, call.scale,
        )  # fmt: skip
    options["AGAIN"] = wild is not None
    config = launch("channel_state_gradients", BX=BK, BV=power(V))
    start(channel_state_gradients, (texts.slots, hv, ceil_div(K, config["BX"])))(
        q, k, gates.log_decay, gates.A_log, gates.dt_bias, states, dstates, doutput, grads.v, residuals,
        dq, dk, dG, wild, spans, *call.where, q.stride(1), k.stride(1), residuals.stride(1),
        q.stride(2), k.stride(2), residuals.stride(2), call.scale, V=V, EVEN=V % config["BV"] == 0, **options, **config,
    )  # fmt: skip
    config = launch("channel_gradients", BX=BK)
    start(channel_gradients, (texts.slots, hv, blocks))(
        q, k, gates.log_decay, gates.A_log, gates.dt_bias, dP, dM, dq, dk, dG, grads.log_decay,
        dA_log, ddt_bias, wild, spans, *call.where, *strides, call.scale, **options, **config,
    )  # fmt: skip
    _gather(call, dq, dk, grads)
    if dA_log is not None and grads.A_log is not None:
        grads.A_log.copy_(dA_log.sum((0, 2)))
    if ddt_bias is not None and grads.dt_bias is not None:
        grads.dt_bias.copy_(ddt_bias.sum(0).view_as(grads.dt_bias))


def raw_gate_gradients(
    gates: Gates, dlog_decay: Tensor, dbeta: Tensor, dgate: Tensor, dwrite: Tensor, dA_log: Tensor, ddt_bias: Tensor
) -> None:
    """Fills the last four from the gradients of log_decay and beta per head, all without gaps."""
    hv = dlog_decay.shape[-1]
    tokens, heads, block = dlog_decay.numel() // hv, min(16, next_power(hv)), 128
    programs = ceil_div(tokens, block)
    sums = dlog_decay.new_empty(programs, 2, hv)
    start(head_gates_backward, (programs, ceil_div(hv, heads)))(
        gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, dlog_decay, dbeta, dgate, dwrite, sums, tokens,
        gates.beta_scale, HV=hv, HEADS=heads, BT=block, BIAS=gates.dt_bias is not None, **launch("head_gates"),
    )  # fmt: skip
    dA_log.copy_(sums[:, 0].sum(0))
    if gates.dt_bias is not None:
        ddt_bias.copy_(sums[:, 1].sum(0))
