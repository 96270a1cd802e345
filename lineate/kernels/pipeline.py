"""The chunkwise form on a GPU: the order of its stages, the buffers between them, and the slices of a call.

    forward     prepare -> forward walk
    backward    slice by slice: prepare again -> backward walk -> gradients

stages.py describes each stage; architectures.py chooses the kernels.
"""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from lineate.call import Inputs, Options, RingTensors, Slots
from lineate.kernels.architectures import architecture_of, stages_for
from lineate.kernels.call import CHUNK, Call, aligned, clear
from lineate.kernels.launching import ceil_div, compile_only, multiprocessors
from lineate.kernels.segments import WHOLE, Cutting, cut_backward, cut_forward
from lineate.kernels.stages import Around, BackwardWalk, ForwardWalk, Gradients, RawGradients, Stages
from lineate.plans import PLANS

# The bytes of states that the backward of one slice of the tokens may keep; its other buffers are about as large.
# Smaller slices save memory, but each is a dozen launches of some 100 us of the host's time.
SLICE_BYTES = 2**28

CUTS = {"forward": cut_forward, "backward": cut_backward}
"""The rules by which sequences are cut, from the programs of an uncut walk and the device's multiprocessors."""


def forward(call: Call, state: Tensor, output: Tensor, final: Tensor, states: Tensor | None) -> None:
    """Fill output, final, and states `slots hv v k`, the state entering each chunk, if given."""
    stages = stages_for(call)
    compile_ahead(stages, state, states is not None)
    _forward(stages, state, output, final, states)


def backward(call: Call, doutput: Tensor, dfinal: Tensor, states: Tensor, grads: Gradients) -> None:
    """Fill grads, from the states that forward kept. Those of raw gates per head come after those of the gates."""
    gates, outside, inner = call.gates, call.gates_outside, grads
    if outside:
        log_decay, beta = (
            torch.empty_like(x, dtype=torch.float32) if raw and x is not None else x
            for x, raw in ((grads.log_decay, gates.raw_decay), (grads.beta, gates.raw_beta))
        )
        inner = grads._replace(log_decay=log_decay, beta=beta, A_log=None, dt_bias=None)
    _backward_in_slices(call, doutput, dfinal, states, inner)
    clear(call.sequences, call.q.shape[1], *inner[:4], inner.beta if inner.probe is None else inner.probe)
    if inner.direction is not None:
        clear(call.sequences, call.q.shape[1], inner.direction)
    if outside:
        log_decay, beta, dgate, dwrite, dA_log, ddt_bias = (
            call.q.new_empty(0) if x is None else x
            for x in (inner.log_decay, inner.beta, grads.log_decay, grads.beta, grads.A_log, grads.dt_bias)
        )
        raw = RawGradients(dgate, dwrite, dA_log, ddt_bias)
        architecture_of(call.q.device).raw_gate_gradients(gates, log_decay, beta, raw)


def _backward_in_slices(call: Call, doutput: Tensor, dfinal: Tensor, states: Tensor, grads: Gradients) -> None:
    """Go slice by slice from the last chunks to the first (a few rows of the batch at a time if it has several).

    So the buffers stay small compared with the states; the arithmetic is the same to the bit.
    """
    doutput, dfinal = aligned(doutput.contiguous()), dfinal.contiguous()
    parts = grads.A_log, grads.dt_bias
    stages = stages_for(call)
    slices = list(_slices(stages, states))
    several = len(slices) > 1
    totals = [torch.zeros_like(x, dtype=torch.float32) if several and x is not None else None for x in parts]
    for rows, tokens in slices:
        chunks, dend, dstart = states, dfinal, grads.state
        if not call.sequences.packed:
            chunks = states.view(call.q.shape[0], -1, *states.shape[1:])
            chunks = chunks[rows, tokens.start // CHUNK : ceil_div(tokens.stop, CHUNK)].flatten(0, 1)
            dend, dstart = dfinal[rows], grads.state[rows]
        part = call.part(rows, tokens)
        own = stages if part is call else stages_for(part)
        _backward(own, doutput[rows, tokens], dend, chunks, _within(grads, rows, tokens, dstart))
        dfinal = grads.state if call.q.shape[0] == 1 else dfinal
        for total, x in zip(totals, parts, strict=True):
            if total is not None and x is not None:
                total += x
    for total, x in zip(totals, parts, strict=True):
        if total is not None and x is not None:
            x.copy_(total)


def decode(inputs: Inputs, slots: Slots, options: Options) -> Tensor:
    """Return the output `b t hv v` of a few tokens; inputs.state, a pool of states, is updated in place."""
    return architecture_of(inputs.q.device).decode(inputs, slots, options)


def decode_ring(inputs: Inputs, slots: Slots, ring: RingTensors, options: Options, *, settled: bool = False) -> Tensor:
    """Return the output `b 1 hv v` of one token a row; it goes into the ring, or with it into inputs.state."""
    return architecture_of(inputs.q.device).decode_ring(inputs, slots, ring, options, settled=settled)


def compile_ahead(stages: Stages, state: Tensor, keep: bool) -> None:
    """Before the first call of a kind, compile its kernels in parallel, with its backward's if states are kept.

    Kernels that are not compiled here are compiled when they are first launched.
    """
    call = stages.call
    if not call.q.is_cuda or torch.cuda.is_current_stream_capturing():
        return
    back = cutting_of(call.q, call.v, "backward") if keep else WHOLE
    kind = (
        "compiled",
        *(
            None if x is None else (x.device, x.dtype, *x.shape[2:])
            for x in (call.q, call.v, *call.gates.tensors, call.gates.probe, call.gates.direction)
        ),
        call.gates.compared,
        call.gates.raw_decay, call.gates.raw_beta, call.gates.lower_bound is None, call.corrects, call.normalize_qk,
        call.sequences.packed, stages.variant(), stages.made_in_walk(keep), call.sequences.cuts > 0,
        _is_cut(call, back), keep,
    )  # fmt: skip
    if PLANS.get(kind) is not None:
        return
    PLANS.put(kind, True)

    def some(cutting: Cutting) -> Call:
        """Return the call on a few tokens that select the same kernels; they are enough to be cut as well."""
        b, t = call.q.shape[:2]
        tokens = CHUNK * (cutting.shortest if _is_cut(call, cutting) else 1)
        part = call.part(slice(0, b), slice(0, min(tokens, t)), cutting)
        likely = call.part(slice(0, b), slice(0, t), cutting).sequences.likely_cuts  # by which columns are chosen
        return part._replace(sequences=part.sequences._replace(likely_cuts=likely))

    def both() -> None:
        part = some(call.sequences.cutting)
        output, final = torch.empty_like(part.v, memory_format=torch.contiguous_format), torch.empty_like(state)
        _forward(stages_for(part), state, output, final, _room_for_states(part) if keep else None)
        if keep:
            part = some(back)
            backward(part, torch.empty_like(part.v), final, _room_for_states(part), empty_gradients(part, final))

    with suppress(torch.OutOfMemoryError):
        compile_only(both)


def _forward(stages: Stages, state: Tensor, output: Tensor, final: Tensor, states: Tensor | None) -> None:
    pieces, kept = stages.pieces(), []
    for n, (tokens, own) in enumerate(pieces):
        ready = own.prepare(own.made_in_walk(states is not None))
        kept.append(ready)  # the next piece's scores, which do not wait for this walk, need other memory
        inner = None
        if own.call.sequences.cuts:
            maps = _room_for_maps(own.call)
            own.walk_forward(ready, ForwardWalk(state, None, None, maps, None))
            inner = own.chain_segments(maps)
        chunks = states
        if states is not None and len(pieces) > 1:
            chunks = states[tokens.start // CHUNK : ceil_div(tokens.stop, CHUNK)]
        walk = ForwardWalk(state, inner, output[:, tokens], final, chunks, more=n + 1 < len(pieces))
        own.walk_forward(ready, walk)
        state = final


def _backward(stages: Stages, doutput: Tensor, dfinal: Tensor, states: Tensor, grads: Gradients) -> None:
    """Fill the gradients of one slice."""
    ready = stages.prepare(for_backward=True)
    dstates = torch.empty_like(states)
    inner = None
    if stages.call.sequences.cuts:
        maps = _room_for_maps(stages.call)
        stages.walk_backward(ready, BackwardWalk(doutput, dfinal, None, None, maps, None))
        inner = stages.chain_segments(maps)
    stages.walk_backward(ready, BackwardWalk(doutput, dfinal, inner, grads.v, grads.state, dstates))
    stages.gradients(ready, Around(doutput, states, dstates), grads)


def makes_beside(inputs: Inputs, options: Options) -> bool:
    """Whether scores of such inputs are computed in parallel with a walk that leaves multiprocessors idle."""
    return architecture_of(inputs.q.device).makes_beside(inputs, options)


def cutting_of(q: Tensor, v: Tensor, way: str, beside: bool = False) -> Cutting:
    """Return how the sequences of a call are cut for a walk forward or backward.

    Calls with wide keys are not cut, because their maps are too large. beside: the result of makes_beside for the call.
    """
    stages = architecture_of(q.device)
    if q.shape[3] > stages.widest_chain:
        return WHOLE
    return CUTS[way](v.shape[2] * ceil_div(v.shape[3], stages.walk_columns), multiprocessors(q.device), beside)


def _is_cut(call: Call, cutting: Cutting) -> bool:
    """Whether a sequence of the call may be cut by this rule."""
    t, sequences = call.q.shape[1], call.sequences
    return cutting.most_cuts(t, sequences.number if sequences.packed else 1) > 0


def _room_for_maps(call: Call) -> Tensor:
    """Return a buffer for the affine maps of the segments before each cut, `cut hv k (v + k)`."""
    _, _, hv, K, V = call.sizes
    return call.v.new_empty(call.sequences.cuts, hv, K, V + K, dtype=torch.float32)


def _room_for_states(call: Call) -> Tensor:
    """Return a buffer for the states that enter each chunk, `slot hv v k`."""
    _, _, hv, K, V = call.sizes
    return call.v.new_empty(call.sequences.slots, hv, V, K)


def empty_gradients(call: Call, dstate: Tensor) -> Gradients:
    """Return buffers for all of a call's gradients."""
    q, k, v, log_decay, beta, A_log, dt_bias, probe, direction = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (call.q, call.k, call.v, *call.gates.tensors, call.gates.probe, call.gates.direction)
    )
    assert q is not None and k is not None and v is not None
    return Gradients(q, k, v, log_decay, beta, dstate, A_log, dt_bias, probe, direction)


def _within(grads: Gradients, rows: slice, tokens: slice, dstate: Tensor) -> Gradients:
    """Return the gradients of a slice of rows and tokens, as views."""
    given = grads.log_decay, grads.beta, grads.probe, grads.direction
    log_decay, beta, probe, direction = (None if x is None else x[rows, tokens] for x in given)
    q, k, v = (x[rows, tokens] for x in (grads.q, grads.k, grads.v))
    return Gradients(q, k, v, log_decay, beta, dstate, grads.A_log, grads.dt_bias, probe, direction)


def _slices(stages: Stages, states: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield rows and tokens of each slice, the last tokens first."""
    call = stages.call
    b, t = call.q.shape[:2]
    everything = slice(0, b), slice(0, t)
    if call.sequences.packed or (b == 1 and call.sequences.cuts):
        yield everything  # slices would be cut into other segments
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
