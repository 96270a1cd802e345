"""The buffers and launches of gates.py, scores.py and channel.py, which run before a walk."""

import torch
from torch import Tensor

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.launching import ceil_div, linked, multiprocessors, next_power, start
from lineate.kernels.portable.channel import MOST, channel_scores, make_spans
from lineate.kernels.portable.configurations import GROUP, launch, power, precision
from lineate.kernels.portable.gates import FACTORS, head_gates
from lineate.kernels.portable.scores import head_scores, invert_wild
from lineate.kernels.stages import InWalk, Prepared

_SPANS: dict[tuple[torch.device, bool], Tensor] = {}


def spans_like(q: Tensor) -> Tensor:
    """Return the result of make_spans, which is cached except while a CUDA graph is captured.

    Memory allocated then belongs to the graph.
    """
    key = q.device, q.dtype == torch.float32
    if key in _SPANS:
        return _SPANS[key]
    spans = make_spans(CHUNK, q)
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _SPANS[key] = spans
    return spans


def make_channel_room(call: Call, wild: bool, for_backward: bool, norms: bool) -> Prepared:
    """Return empty buffers for decay per channel; wild and norms are included only on request."""
    _, _, hv, K, _ = call.sizes
    q, slots = call.q, call.sequences.slots
    P = q.new_empty(slots, hv, CHUNK, CHUNK)
    T = q.new_empty(slots, hv, CHUNK, CHUNK) if call.corrects else None
    wild_rows = q.new_empty(slots, hv, dtype=torch.int32) if wild else None
    keeps = call.corrects and for_backward and call.gates.probe is None  # only dbeta is computed from M
    M = q.new_empty(slots, hv, CHUNK, CHUNK) if keeps else None
    factors = q.new_empty(slots, hv, power(K) + CHUNK, dtype=torch.float32)
    Qr = q.new_empty(*q.shape[:2], hv, K)
    Kw = torch.empty_like(Qr)
    Kr = torch.empty_like(Qr) if call.corrects else Kw
    kept_norms = q.new_empty(slots, hv, 2, CHUNK, dtype=torch.float32) if norms else None
    return Prepared(Qr, Kr, Kw, P, T, M, factors, wild_rows, norms=kept_norms)


def fill_channel_scores(
    call: Call, ready: Prepared, products: str, again: bool = False, second: bool = False
) -> None:  # fmt: skip
    """Fill the buffers; with again, only the rows from each chunk's first wild row on, after a first launch.

    With a direction, its scores are filled; with `second`, Kw, P and M of the key that is written.
    """
    _, h, hv, K, _ = call.sizes
    q, gates, slots, BK = call.q, call.gates, call.sequences.slots, power(K)
    k = call.k if second or gates.direction is None else gates.direction
    group = chunks_to_check(call) if again else 1
    start(channel_scores, (ceil_div(slots, group), hv))(
        q, k, gates.probe, gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, ready.q, ready.k, ready.w, ready.P,
        ready.M, ready.T, ready.factors, ready.wild, spans_like(q), *call.where, slots, group,
        q.stride(1), k.stride(1), q.stride(2), k.stride(2), call.scale, gates.beta_scale,
        gates.lower_bound,
        HV=hv, R=hv // h, K=K, BK=BK, C=CHUNK, CORRECTS=call.corrects, NORMALIZE=call.normalize_qk,
        RAW=gates.raw_decay, RAW_BETA=gates.raw_beta, BIAS=gates.dt_bias is not None, KEEP=ready.M is not None,
        PACKED=call.sequences.packed, SPLIT=q.dtype != torch.float32,
        PRECISION=precision(call), PRODUCTS=products, COMPARED="second" if second else gates.compared, AGAIN=again,
        **launch("channel_scores", BX=BK), **linked(q.device),
    )  # fmt: skip


def chunks_to_check(call: Call, blocks: int = 1) -> int:
    """Return the chunks among which one program looks for wild ones: as many as let all programs run at once."""
    programs = call.sequences.slots * call.sizes[2] * blocks
    return max(1, min(MOST.value, programs // (3 * multiprocessors(call.q.device))))


def make_head_room(call: Call, wild: bool, in_walk: InWalk) -> Prepared:
    """Return empty buffers for decay per head or none, except those that the walk computes; wild only on request."""
    q, slots, hv = call.q, call.sequences.slots, call.sizes[2]
    P = q.new_empty(slots, hv, CHUNK, CHUNK) if in_walk is InWalk.NOTHING else None
    T = q.new_empty(slots, hv, CHUNK, CHUNK) if call.corrects and in_walk is not InWalk.ALL else None
    wild_rows = q.new_empty(slots, hv, dtype=torch.int32) if wild and T is not None else None
    factors = q.new_empty(slots, hv, FACTORS.value, CHUNK, dtype=torch.float32)
    return Prepared(q, call.k, call.k, P, T, None, factors, wild_rows)


def fill_factors(call: Call, ready: Prepared) -> None:
    """Fill the factors of decay per head."""
    hv, gates = call.sizes[2], call.gates
    heads = min(16, next_power(hv))
    start(head_gates, (call.sequences.slots, ceil_div(hv, heads)))(
        gates.log_decay, gates.beta, gates.A_log, gates.dt_bias, ready.factors, ready.made, *call.where, call.scale,
        gates.beta_scale, gates.lower_bound,
        HV=hv, HEADS=heads, C=CHUNK, GATED=gates.log_decay is not None, CORRECTS=call.corrects,
        RAW=gates.raw_decay, RAW_BETA=gates.raw_beta, BIAS=gates.dt_bias is not None, PACKED=call.sequences.packed,
        **launch("head_gates"), **linked(call.q.device),
    )  # fmt: skip


def fill_head_scores(call: Call, ready: Prepared, products: str) -> None:
    """Fill P and T; with products in float16, fill only the rows of T before the first wild one."""
    _, h, hv, K, _ = call.sizes
    q, k = call.q, call.k
    R = hv // h
    start(head_scores, (call.sequences.slots, h))(
        q, k, ready.P, ready.T, ready.factors, ready.wild, *call.where,
        q.stride(1), k.stride(1), q.stride(2), k.stride(2), h, call.scale,
        R=R, K=K, BK=power(K), C=CHUNK, GATED=call.gates.log_decay is not None, CORRECTS=call.corrects,
        NORMALIZE=call.normalize_qk, PACKED=call.sequences.packed, PRECISION=precision(call), PRODUCTS=products,
        maxnreg=128 if R == 1 else 168, **launch("head_scores"),
    )  # fmt: skip


def fill_wild_rows(call: Call, ready: Prepared) -> None:
    """Fill the rows of T from the first wild one on."""
    _, h, hv, K, _ = call.sizes
    k, slots = call.k, call.sequences.slots
    start(invert_wild, (ceil_div(slots, GROUP), hv))(
        k, ready.T, ready.factors, ready.wild, *call.where, slots, k.stride(1), k.stride(2),
        HV=hv, R=hv // h, K=K, BK=power(K), C=CHUNK, GROUP=GROUP, GATED=call.gates.log_decay is not None,
        NORMALIZE=call.normalize_qk, PACKED=call.sequences.packed, PRECISION=precision(call), **launch("head_scores"),
    )  # fmt: skip
