"""The launches of head_scores.py and channel.py: P, T and the other state-independent parts of a chunk."""

import torch
from torch import Tensor

from lineate.kernels.call import Call
from lineate.kernels.hopper.channel import channel_scores
from lineate.kernels.hopper.descriptors import describe, describe_rows, describe_squares
from lineate.kernels.hopper.head_scores import head_scores
from lineate.kernels.hopper.scores import WORKERS
from lineate.kernels.launching import ceil_div, compiling, linked, multiprocessors, start
from lineate.kernels.portable.gates import FACTORS
from lineate.kernels.stages import Prepared

# When head_scores runs in parallel with the walk: Gated DeltaNet, us in a graph on an H200, sequential and parallel.
#
#     tokens, value heads of 128      2048, 32    3072, 32    4096, 32    8192, 20    8192, 32    8192, 40    8192, 48
#     forward                          61  67      89  86     112 106     213 190     212 196     258 202     233 237
#     forward and backward                                                            730 689
#
# The walk's first chunk comes about 5 us later, and the scores use part of its L2 bandwidth while they are computed.
LEAST_IDLE = 3 / 8  # of the multiprocessors
LEAST_CHUNKS = 48

# With decay per channel, scores take longer than the walk, so they are computed in two or three pieces, and those of
# a piece while the walk over the piece before runs. Each piece costs some 10 us. Kimi Delta Attention, us in a graph on
# an H200:
#
#     tokens, value heads of 128      4096, 24    4096, 32    8192, 24    8192, 32    32768, 32
#     1 piece                            181         205         329         371        1403
#     2 pieces                           178         204         308         363        1329
#     3                                  185         214         310         367        1313
#     4                                  200         235         322         382        1315
LEAST_IN_PIECES, LONG = 96, 256  # chunks; from the latter on three pieces
SCORES_MICROSECONDS = 6.6  # of a chunk and head, on one multiprocessor
WALK_MICROSECONDS = 1.4  # of a chunk


def takes_beside(q: Tensor, v: Tensor, corrects: bool, channel: bool) -> bool:
    """Whether head_scores can run in parallel with a walk: for rules that correct, with decay per head or none."""
    return corrects and not channel and q.dtype == torch.bfloat16 and q.shape[3] == 128 and v.shape[3] % 64 == 0


def leaves_room(call: Call) -> bool:
    """Whether the walk over one sequence, unless it is cut, leaves room for head_scores, and is long enough.

    (Those of several sequences would all begin at once, but the scores of the last sequence are computed last.)
    """
    return call.lone_chunks >= LEAST_CHUNKS and _idle(call) >= LEAST_IDLE * multiprocessors(call.q.device)


def _all(call: Call) -> int:
    return multiprocessors(call.q.device)


def _idle(call: Call) -> int:
    """Return how many multiprocessors a walk leaves idle; a program of it has one, and 64 value columns."""
    _, _, hv, _, V = call.sizes
    return multiprocessors(call.q.device) - call.sequences.number * hv * (V // 64)


def fill_head_scores(call: Call, ready: Prepared, for_backward: bool) -> None:
    """Fill P and, if the rule corrects, T, for bfloat16. Only the backward reads those of slots without a chunk.

    If the rule corrects and k is not 128, the launch that fills the wild rows of T must follow.
    """
    _, h, hv, _, _ = call.sizes
    # An item is a chunk with all value heads of a key head; where these are few, with one value head.
    few = ready.made is not None or call.sequences.slots * h < 3 * multiprocessors(call.q.device)
    both = compiling() and ready.made is None
    for groups in {h, hv} if both else {hv if few else h}:
        _launch_head_scores(call, ready, groups, for_backward)


def _launch_head_scores(call: Call, ready: Prepared, groups: int, for_backward: bool) -> None:
    """Launch the kernel with a number of groups of value heads."""
    _, h, hv, K, _ = call.sizes
    q, k, slots, firsts = call.q, call.k, call.sequences.slots, call.sequences.first_slots
    used = None if firsts is None or for_backward or K != 128 else firsts[call.sequences.number :]
    items = slots * groups
    # Programs on a multiprocessor, as measured.
    side_by_side = 4 if h < hv else 3 if call.normalize_qk else 2
    programs = min(side_by_side * multiprocessors(q.device), items)
    if ready.made is not None:
        programs = min(_idle(call), ceil_div(items, WORKERS.value))
    squares = [describe_squares(x) for x in (ready.P, ready.T) if x is not None]
    start(head_scores, (programs,))(
        describe_rows(q, K), describe_rows(k, K), squares[0], squares[-1],
        describe(ready.factors, slots * hv * FACTORS.value, 64, 64, [4, 64]), k, ready.T, ready.factors,
        ready.wild, ready.made,
        *call.where, items, used, k.stride(1), q.stride(2), k.stride(2), call.scale,
        H=groups, R=hv // groups, SHARED=groups // h, K=K, GATED=call.gates.log_decay is not None,
        CORRECTS=call.corrects, NORMALIZE=call.normalize_qk, PACKED=call.sequences.packed,
        UP=ready.made is not None and not for_backward,
        num_warps=4, maxnreg=128 if ready.made is None else 168, **linked(q.device),
    )  # fmt: skip


def piece_lengths(call: Call) -> list[int]:
    """Return the chunks of consecutive pieces of a call with decay per channel.

    The scores of a piece are computed on the multiprocessors that the walk over the piece before it leaves idle, and
    both take about as long.
    """
    chunks, idle = call.lone_chunks, _idle(call)
    whole = call.q.shape[0] == 1 and not call.sequences.packed and not call.sequences.cuts
    if not whole or call.gates.direction is not None or chunks < LEAST_IN_PIECES or idle < LEAST_IDLE * _all(call):
        return [chunks]
    growth = WALK_MICROSECONDS * idle / (SCORES_MICROSECONDS * call.sizes[2])
    shares = [growth**n for n in range(2 if chunks < LONG else 3)]
    later = [round(chunks * x / sum(shares)) for x in shares[1:]]
    return [chunks - sum(later), *later]


def fill_channel_scores(call: Call, ready: Prepared, second: bool = False, late: bool = False) -> None:
    """Fill the buffers of a call with decay per channel; the portable launch for the wild rows must follow.

    For the backward, M and (with normalize_qk) norms are kept. If the rule only accumulates, Kr is not written. With a
    direction, its scores are filled; with `second`, Kw, P and M of the key that is written. late: while the walk over
    the piece before runs.
    """
    _, h, hv, _, _ = call.sizes
    q, gates, P = call.q, call.gates, ready.P
    k = call.k if second or gates.direction is None else gates.direction
    assert gates.log_decay is not None and P is not None
    units = call.sequences.slots * hv
    start(channel_scores, (min(2 * (_idle(call) if late else _all(call)), units),))(
        describe_rows(q, 64), describe_rows(k, 64), describe_rows(gates.log_decay, 64),
        describe_squares(P), describe_squares(P if ready.M is None else ready.M),
        describe_squares(P if ready.T is None else ready.T),
        gates.probe, gates.beta, gates.A_log, gates.log_decay if gates.dt_bias is None else gates.dt_bias,
        ready.q, ready.k, ready.w, ready.factors, ready.wild, ready.norms,
        *call.where, units, int(late), q.stride(2), k.stride(2), call.scale, gates.beta_scale, gates.lower_bound,
        HV=hv, R=hv // h, CORRECTS=call.corrects, NORMALIZE=call.normalize_qk, RAW=gates.raw_decay,
        RAW_BETA=gates.raw_beta,
        BIAS=gates.dt_bias is not None, KEEP=(ready.M is not None and not second) or ready.norms is not None,
        PACKED=call.sequences.packed, COMPARED="second" if second else gates.compared, num_warps=4,
        **linked(call.q.device),
    )  # fmt: skip
