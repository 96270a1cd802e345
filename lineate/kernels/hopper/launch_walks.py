"""The launches of walk.py, whole.py and walk_backward.py, and the numbers of columns and buffers of their programs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from lineate.kernels.call import Call
from lineate.kernels.hopper.chain import chain
from lineate.kernels.hopper.descriptors import SHARED, describe, describe_rows, describe_squares
from lineate.kernels.hopper.walk import forward_state
from lineate.kernels.hopper.walk_backward import backward_state
from lineate.kernels.hopper.whole import whole_walk
from lineate.kernels.launching import linked, multiprocessors, next_power, start
from lineate.kernels.stages import BackwardWalk, ForwardWalk, Prepared

CHAIN_COLUMNS = 16  # of a program of the chain
MAPS = gl.NVMMASharedLayout(128, 32, 2)  # of a tile of maps


def _box_rows(K: int, channel: bool) -> int:
    """Return the rows of 64 factors in a box: the smallest sufficient power of two."""
    return 8 if not channel else 4 if K == 128 else 2


def forward_block(call: Call, map_only: bool = False) -> int:
    """Return the value columns of a program of the forward walk: 64, or 128 if the device cannot run those at once.

    Of programs with 64 columns, a multiprocessor has room for one; for two if they find maps. With a second writer,
    there is no room for 128.
    """
    _, _, hv, K, V = call.sizes
    if call.gates.direction is not None:
        return 64
    programs = call.sequences.walks(map_only, likely=True) * hv * ((V + K if map_only else V) // 64)
    at_once = multiprocessors(call.q.device) * (2 if map_only else 1)
    return 128 if V % 128 == 0 and K % 128 == 0 and programs > at_once else 64


def forward_bytes(call: Call, block: int, stages: int, outs: int, keep: bool, scores: bool) -> int:
    """Return the bytes of shared memory of a program of the forward walk with these stages and buffers of output.

    One that finds maps needs less.
    """
    K, channel, corrects = call.sizes[3], call.channel, call.corrects
    tiles = K * (3 if channel and corrects else 2) + block + 64 * (corrects + (not scores))
    rows = _box_rows(K, channel)
    if call.gates.direction is not None:  # a second writer, without room for the states that are kept
        tiles, keep = tiles + K + 128, False
    made = 2 * 64 * 128 if scores else 0
    return stages * (128 * tiles + 256 * rows) + made + outs * 2 * block * (64 + (K if keep else 0)) + 1536


def forward_buffers(call: Call, block: int, keep: bool, scores: bool) -> tuple[int, int]:
    """Return STAGES and OUTS of the forward walk, the most that fit into shared memory."""
    for stages, outs in ((3, 2), (3, 1), (2, 2), (2, 1)):
        if forward_bytes(call, block, stages, outs, keep, scores) <= SHARED:
            return stages, outs
    raise ValueError(f"lineate: a state of {call.q.shape[3]} x {block} does not fit into shared memory")


def walks_whole(call: Call) -> bool:
    """Whether one launch (whole.py) computes scores, inverse, state and output: where supported and faster."""
    _, _, hv, K, V = call.sizes
    pairs = call.sequences.number * hv
    fills = 2 * pairs * V // 128 > multiprocessors(call.q.device)
    return K == 128 and V % 128 == 0 and fills and pairs < 2**16 and not call.normalize_qk


def walk_whole(call: Call, ready: Prepared, walk: ForwardWalk) -> None:
    """Launch the walk that makes scores and inverse itself."""
    t, _, hv, K, V = call.sizes
    q, k, v, output, sequences = ready.q, ready.k, call.v, walk.output, call.sequences
    assert output is not None
    start(whole_walk, (V // 128, sequences.number * hv))(
        describe_rows(q, K), describe_rows(k, K), describe_rows(v, 128),
        describe(ready.factors, ready.factors.numel() // 64, 64, 64, [_box_rows(K, False), 64]), ready.factors,
        describe(output, q.shape[0] * t, hv * V, hv * V, [64, 128]),
        walk.outer, walk.final, output, sequences.bounds, sequences.first_slots, t,
        q.stride(2), k.stride(2), v.stride(2), call.scale,
        HV=hv, R=hv // q.shape[2], V=V, GATED=call.gates.log_decay is not None,
        PACKED=sequences.packed, num_warps=8, **linked(q.device, last=True),
    )  # fmt: skip


def walk_forward(call: Call, ready: Prepared, walk: ForwardWalk) -> None:
    """Launch the forward walk.

    If P is None, the walk computes it: for bfloat16 and rules that only accumulate, without decay per channel.
    """
    t, _, hv, K, V = call.sizes
    q, k, w, v, P, T = ready.q, ready.k, ready.w, call.v, ready.P, ready.T
    sequences, channel, corrects, output, states = call.sequences, call.channel, call.corrects, walk.output, walk.states
    second, more = ready.second, (None, None, None)
    if second is not None:
        more = describe_rows(second.w, K), describe_squares(second.M), describe_squares(second.P)
    scores = P is None and not walk.map_only
    block = forward_block(call, walk.map_only)
    stages, outs = forward_buffers(call, block, states is not None, scores)

    P_tiles = describe_rows(q, 64) if P is None else describe_squares(P)  # (of q, only the layout is used)
    k_tiles = describe_rows(k if corrects or not channel else w, K)
    tokens = q.shape[0] * t
    output_tiles = P_tiles if output is None else describe(output, tokens, hv * V, hv * V, [64, block])
    columns = V + K if walk.map_only else V
    start(forward_state, (columns // block * hv * sequences.walks(walk.map_only),))(
        describe_rows(q, K),
        k_tiles,
        describe_rows(w, K) if channel and corrects else k_tiles,
        describe_rows(v, block),
        P_tiles,
        P_tiles if T is None else describe_squares(T),
        describe(ready.factors, ready.factors.numel() // 64, 64, 64, [_box_rows(K, channel), 64]),
        ready.made,
        output_tiles,
        output_tiles if states is None else describe(states, sequences.slots * hv * V, K, K, [block, K]),
        *more, walk.outer, walk.inner, walk.final, output, *sequences.places(t, walk.map_only),
        q.stride(2), k.stride(2), v.stride(2), call.scale,
        HV=hv, R=hv // q.shape[2], K=K, V=V, BV=block, STAGES=stages, OUTS=outs,
        CHANNEL=channel, CORRECTS=corrects, KEEP=states is not None, MAP=walk.map_only, PACKED=sequences.packed,
        SCORES=scores, GATED=call.gates.log_decay is not None, num_warps=block // 16,
        maxnreg=128 if walk.map_only and block == 64 else None,
        **linked(q.device, last=not (walk.map_only or walk.more)),
    )  # fmt: skip


def chain_segments(call: Call, maps: Tensor) -> Tensor:
    """Return the states at the cuts, `cut hv k v`."""
    _, _, hv, K, V = call.sizes
    sequences, cuts = call.sequences, call.sequences.cuts
    inner = maps.new_empty(cuts, hv, K, V)
    squares = describe(maps, cuts * hv * K, V + K, V + K, [K, K])
    squares.layout = MAPS
    apart = sequences.cutting.least_cuts
    start(chain, (V // CHAIN_COLUMNS * hv * sequences.chains,))(
        squares, maps, inner, sequences.first_cuts, sequences.cut_sequences, sequences.segments, apart, cuts,
        HV=hv, K=K, V=V, BV=CHAIN_COLUMNS, NEAR=next_power(apart), STAGES=3, PACKED=sequences.packed,
        num_warps=K // 16, **linked(maps.device),
    )  # fmt: skip
    return inner


def backward_block(call: Call, map_only: bool = False) -> int:
    """Return the value columns of a program of the backward walk: 64, or 128 if the device cannot run those at once.

    A multiprocessor has room for one program. One that finds maps has 128 where all its columns are multiples of that.
    """
    _, _, hv, K, V = call.sizes
    if map_only:
        return 128 if V % 128 == 0 and K % 128 == 0 else 64
    walks = call.sequences.walks(map_only=False, likely=True) * hv
    return 128 if V % 128 == 0 and V // 64 * walks > multiprocessors(call.q.device) else 64


def backward_bytes(call: Call, block: int, stages: int, others: int, early: int, outs: int) -> int:
    """Return the bytes of shared memory of a program of the backward walk with these numbers of buffers."""
    K, channel, corrects = call.sizes[3], call.channel, call.corrects
    ring = stages * 128 * (2 * K + (64 if corrects else 0)) + early * 128 * (64 + block)
    ring += (others + channel) * 256 * _box_rows(K, channel) + (others * 128 * K if channel and corrects else 0)
    return ring + outs * 2 * block * (64 + K) + 1024


def backward_buffers(call: Call, block: int, map_only: bool = False) -> tuple[int, int, int, int]:
    """Return STAGES, OTHERS, EARLY and OUTS of the backward walk, the most that fit into shared memory."""
    for each in ((3, 3, 2, 2), (3, 3, 2, 1), (2, 3, 2, 2), (2, 3, 2, 1), (2, 2, 2, 1)):
        outs = 0 if map_only else each[3]
        if backward_bytes(call, block, *each[:3], outs) <= SHARED:
            return each
    raise ValueError(f"lineate: a state of {call.q.shape[3]} x {block} does not fit into shared memory")


def walk_backward(call: Call, ready: Prepared, walk: BackwardWalk) -> None:
    """Launch the backward walk. doutput, dvalues and dstates are contiguous."""
    t, _, hv, K, V = call.sizes
    q, w, P, T = ready.q, ready.w, ready.P, ready.T
    sequences, channel, corrects = call.sequences, call.channel, call.corrects
    assert P is not None
    block = backward_block(call, walk.map_only)
    stages, others, early, outs = backward_buffers(call, block, walk.map_only)
    tokens = q.shape[0] * t
    columns = V + K if walk.map_only else V
    doutput_tiles = describe(walk.doutput, tokens, hv * V, hv * V, [64, block])
    dstates_tiles = doutput_tiles
    if walk.dstates is not None:
        dstates_tiles = describe(walk.dstates, sequences.slots * hv * V, K, K, [block, 64])

    P_tiles = describe_squares(P)
    k = ready.k if corrects or not channel else w
    k_tiles = describe_rows(k, K)
    start(backward_state, (columns // block * hv * sequences.walks(walk.map_only),))(
        describe_rows(q, K),
        k_tiles,
        describe_rows(w, K) if channel and corrects else k_tiles,
        P_tiles,
        P_tiles if T is None else describe_squares(T),
        describe(ready.factors, ready.factors.numel() // 64, 64, 64, [_box_rows(K, channel), 64]),
        ready.made,
        doutput_tiles,
        doutput_tiles if walk.dvalues is None else describe(walk.dvalues, tokens, hv * V, hv * V, [64, block]),
        dstates_tiles,
        ready.factors, walk.outer, walk.inner, walk.dstart, walk.dvalues,
        *sequences.places(t, walk.map_only),
        q.stride(2), k.stride(2),
        HV=hv, R=hv // q.shape[2], K=K, V=V, BV=block, STAGES=stages, OTHERS=others, EARLY=early, OUTS=outs,
        CHANNEL=channel, CORRECTS=corrects, MAP=walk.map_only, PACKED=sequences.packed, num_warps=block // 16,
        **linked(q.device, last=not walk.map_only),
    )  # fmt: skip
