"""The launches of the walks of state.py and of the chain over segments of split.py."""

from torch import Tensor

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.launching import ceil_div, linked, next_power, start
from lineate.kernels.portable.configurations import launch, launch_walk, power, precision
from lineate.kernels.portable.split import chain
from lineate.kernels.portable.state import backward_state, forward_state
from lineate.kernels.stages import BackwardWalk, ForwardWalk, Prepared


def walk_forward(call: Call, ready: Prepared, walk: ForwardWalk) -> None:
    """Launch the forward walk."""
    t, h, hv, K, V = call.sizes
    sequences, q, k, v, second = call.sequences, ready.q, ready.k, call.v, ready.second
    more = (None, None, None) if second is None else (second.w, second.P, second.M)
    config = launch_walk("forward_state", call)
    BV = config["BV"]
    columns = V + K if walk.map_only else V
    start(forward_state, (ceil_div(columns, BV) * hv * sequences.walks(walk.map_only),))(
        q, k, ready.w, v, ready.P, ready.T, ready.factors, *more, walk.outer, walk.inner, walk.output, walk.final,
        walk.states, *sequences.places(t, walk.map_only),
        q.stride(1), k.stride(1), v.stride(1), q.stride(2), k.stride(2), v.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, CHANNEL=call.channel, CORRECTS=call.corrects,
        KEEP=walk.states is not None, MAP=walk.map_only, PACKED=sequences.packed,
        EVEN=V % BV == 0 and not walk.map_only, PRECISION=precision(call), **config,
    )  # fmt: skip


def walk_backward(call: Call, ready: Prepared, walk: BackwardWalk) -> None:
    """Launch the backward walk."""
    t, h, hv, K, V = call.sizes
    sequences, q, k = call.sequences, ready.q, ready.k
    config = launch_walk("backward_state", call)
    BV = config["BV"]
    columns = V + K if walk.map_only else V
    start(backward_state, (ceil_div(columns, BV) * hv * sequences.walks(walk.map_only),))(
        q, k, ready.w, ready.P, ready.T, ready.factors, walk.outer, walk.inner, walk.doutput, walk.dvalues, walk.dstart,
        walk.dstates, *sequences.places(t, walk.map_only),
        q.stride(1), k.stride(1), q.stride(2), k.stride(2),
        HV=hv, R=hv // h, K=K, V=V, BK=power(K), C=CHUNK, CHANNEL=call.channel, CORRECTS=call.corrects,
        MAP=walk.map_only, PACKED=sequences.packed, EVEN=V % BV == 0 and not walk.map_only,
        PRECISION=precision(call), **config,
    )  # fmt: skip


def chain_segments(call: Call, maps: Tensor) -> Tensor:
    """Return the states at the cuts, `cut hv k v`."""
    _, _, hv, K, V = call.sizes
    sequences = call.sequences
    inner = maps.new_empty(sequences.cuts, hv, K, V)
    config = launch("chain", BV=power(V))
    apart = sequences.cutting.least_cuts
    start(chain, (ceil_div(V, config["BV"]) * hv * sequences.chains,))(
        maps, inner, sequences.first_cuts, sequences.cut_sequences, sequences.segments, apart, sequences.cuts,
        HV=hv, K=K, V=V, BK=power(K), NEAR=next_power(apart), PACKED=sequences.packed, **config,
        **linked(maps.device),
    )  # fmt: skip
    return inner
