"""The backward walk of portable/state.py for Hopper (sm_90), in Gluon; walk.py is the forward one.

    dR = P^T dO + Kw dS      X = T^T dR      dE = beta X      (rule only accumulates: dV = dR)
    dS <- e^{G_c} dS + Qr^T dO - Kr^T dE

The gradient is held transposed as in state.py, dS [BV, K], in halves of 64 key channels, dS0 and dS1, each a wgmma
accumulator. Every product is [BV, 64] x [64, 64], with its left operand in registers. The order of the products always
leaves the tensor cores one more product to do while the registers of the previous one are converted (brackets name the
result that is waited for):

    dO Qr0  [dR]  dR T  dO Qr1  [X]  dE Kr0  dE Kr1  next dO P  [dS0]  next dS0 Kw0  [dS1]  dS1 Kw1  [all]

Tiles come in through rings of buffers: STAGES for k, q and T; OTHERS for the factors and w; EARLY for dO and P, which
are used one chunk ahead and so are filled again one chunk sooner. As in walk.py, a warp of its own starts all copies,
and no product is in flight across the loop's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.parts import (
    COPY_REGISTERS,
    await_mark,
    barrier,
    end_beside,
    entering_state,
    expect,
    factor,
    fetch,
    find_segment,
    fresh,
    half,
    link,
    make_ring,
    map_start,
    next_buffer,
    signals,
    store_rows,
    text_bounds,
    trim,
)
from lineate.kernels.portable.gates import BETA, FACTORS, LAST, READ_K, READ_Q, WRITE


@gluon.jit
def _places(token, at, column_k, column_q, CORRECTS: gl.constexpr):
    """Return the coordinates of a chunk's tiles of k, q and T."""
    places = ((token, column_k), (token, column_q))
    if CORRECTS:
        places += ((at * 64, 0),)
    return places


@gluon.jit
def _other_places(token, at, column_k, ROWS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr):
    """Return the coordinates of a chunk's tiles of factors and w."""
    places = ((at * ROWS, 0),)
    if CHANNEL and CORRECTS:
        places += ((token, column_k),)
    return places


@gluon.jit
def _load_last(at_last, there, CHANNEL: gl.constexpr):
    """Load e^{G_c} of decay per head, one number; 1 if there is no such chunk."""
    last = 1.0
    if not CHANNEL:
        last = gl.load(at_last, mask=there, other=1.0)
    return last


@gluon.jit
def _decay(
    dS0, dS1, last, kept_factors, stage, layout: gl.constexpr, H: gl.constexpr, CHANNEL: gl.constexpr
):  # fmt: skip
    """Return e^{G_c} dS."""
    if CHANNEL:
        dS0 = dS0 * factor(kept_factors, stage, 0, layout)
        if H == 2:
            dS1 = dS1 * factor(kept_factors, stage, 1, layout)
    else:
        dS0 = dS0 * last
        if H == 2:
            dS1 = dS1 * last
    return dS0, dS1


@gluon.jit
def _read(dO, kept_factors, stage, layout: gl.constexpr, left: gl.constexpr, CHANNEL: gl.constexpr):
    """Return dO^T times the factors of q, for its product with q; with CHANNEL, q already has its factors."""
    if not CHANNEL:
        read = factor(kept_factors, stage, READ_Q, layout)
        dO = gl.convert_layout((gl.convert_layout(dO, layout).to(gl.float32) * read).to(dO.dtype), left)
    return dO


@gluon.jit
def _leave(leaving0, leaving1, stage, held0, held1, layout: gl.constexpr, H: gl.constexpr):
    """Write the dS that left a chunk to shared memory, to be stored."""
    leaving0.index(stage).store(gl.convert_layout(held0, layout))
    if H == 2:
        leaving1.index(stage).store(gl.convert_layout(held1, layout))


@gluon.jit
def _copy_tiles(
    sources, kept, ready, others, kept_others, ready_others, early_sources, early_kept, early_ready, begun, done, free,
    made, dvalues, dstates, written, leaving0, leaving1, token, at, count, partial, column_q, column_k, column_o, first,
    HV: gl.constexpr, V: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, OTHERS: gl.constexpr,
    EARLY: gl.constexpr, OUTS: gl.constexpr, ROWS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr,
    MAP: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of all chunks and store their results.

    begun: the others have read dO and P of the first chunk. done[stage]: they have read a chunk's tiles, and dO and P
    of the next; its results are in shared memory. free[m]: results have been stored. made: as for the forward walk.
    """
    AHEAD: gl.constexpr = STAGES if STAGES > EARLY else EARLY + 1  # chunks whose T, or P, is fetched
    gl.static_assert(OTHERS <= AHEAD)
    for s in gl.static_range(AHEAD):
        await_mark(made, at - s * HV, s < count)
    for s in gl.static_range(EARLY):
        expect(early_sources, early_ready, s, s < count)
        places = ((token - s * 64, column_o), ((at - s * HV) * 64, 0))
        fetch(early_sources, early_kept, early_ready, places, s, s < count)
    for s in gl.static_range(OTHERS):
        expect(others, ready_others, s, s < count)
        places = _other_places(token - s * 64, at - s * HV, column_k, ROWS, CHANNEL, CORRECTS)
        fetch(others, kept_others, ready_others, places, s, s < count)
    for s in gl.static_range(STAGES):
        expect(sources, ready, s, s < count)
        places = _places(token - s * 64, at - s * HV, column_k, column_q, CORRECTS)
        fetch(sources, kept, ready, places, s, s < count)
    mbarrier.wait(begun, 0)
    expect(early_sources, early_ready, 0, count > EARLY)
    places = ((token - EARLY * 64, column_o), ((at - EARLY * HV) * 64, 0))
    fetch(early_sources, early_kept, early_ready, places, 0, count > EARLY)
    if OUTS == 1 and not MAP:  # the dS that left the first chunk
        row = gl.where(count > 0, at * V + first, dstates.shape[0])
        tma.async_copy_shared_to_global(dstates, [row, 0], leaving0.index(0))
        if H == 2:
            tma.async_copy_shared_to_global(dstates, [row, 64], leaving1.index(0))
        tma.store_wait(0)
        mbarrier.arrive(free.index(0), count=1)
    stage = 0
    phase = 0
    other = 0
    for n in range(count):
        await_mark(made, at - AHEAD * HV, n + AHEAD < count)
        mbarrier.wait(done.index(stage), phase)
        expect(others, ready_others, other, n + OTHERS < count)
        places = _other_places(token - OTHERS * 64, at - OTHERS * HV, column_k, ROWS, CHANNEL, CORRECTS)
        fetch(others, kept_others, ready_others, places, other, n + OTHERS < count)
        expect(sources, ready, stage, n + STAGES < count)
        places = _places(token - STAGES * 64, at - STAGES * HV, column_k, column_q, CORRECTS)
        fetch(sources, kept, ready, places, stage, n + STAGES < count)
        early = (n + 1) % EARLY
        expect(early_sources, early_ready, early, n + 1 + EARLY < count)
        places = ((token - (1 + EARLY) * 64, column_o), ((at - (1 + EARLY) * HV) * 64, 0))
        fetch(early_sources, early_kept, early_ready, places, early, n + 1 + EARLY < count)
        if not MAP:
            # (The last chunk may be partial and is stored by the others, so here its store goes outside of dvalues.)
            row = gl.where((n == 0) & partial, dvalues.shape[0], token)
            tma.async_copy_shared_to_global(dvalues, [row, column_o], written.index(n % OUTS))
            row = at * V + first
            if OUTS == 1:  # this is the dS that left the next chunk; after the first chunk there is none
                row = gl.where(n + 1 < count, row - HV * V, dstates.shape[0])
            tma.async_copy_shared_to_global(dstates, [row, 0], leaving0.index(n % OUTS))
            if H == 2:
                tma.async_copy_shared_to_global(dstates, [row, 64], leaving1.index(n % OUTS))
            tma.store_wait((OUTS - 1) * (1 + H))
            mbarrier.arrive(free.index((n + 1) % OUTS), count=1, pred=n + 1 >= OUTS)
        token -= 64
        at -= HV
        other = gl.where(other == OTHERS - 1, 0, other + 1)
        stage, phase = next_buffer(stage, phase, STAGES)
    tma.store_wait(0)
    end_beside(made)


@gluon.jit
def _walk(
    kept_q, ready_q, kept_k, ready_k, kept_w, ready_w, kept_P, ready_P, kept_T, ready_T, kept_dO, ready_dO,
    kept_factors, ready_factors, begun, done, free, written, leaving0, leaving1, numbers, start, dstart, dv, token, at,
    count, rows, known, ends, first, column_o,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, OTHERS: gl.constexpr,
    EARLY: gl.constexpr, OUTS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr, MAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Walk over the chunks. start, dstart: the positions of dS of these columns after and before them."""
    H: gl.constexpr = K // 64
    dtype: gl.constexpr = kept_k.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    i = gl.arange(0, BV, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, acc))[None, :]
    if MAP:
        dS0, dS1 = map_start(start, known, first, i, j, V, BV, H)
    else:
        dS0 = fresh(start + i + j * V, True)  # (with `made`, there was no wait for the previous launch)
        dS1 = dS0
        if H == 2:
            dS1 = fresh(start + i + (j + 64) * V, True)
    none = gl.zeros([BV, 64], gl.float32, acc)
    held0 = gl.convert_layout(dS0.to(dtype), left)
    held1 = gl.convert_layout(dS1.to(dtype), left)
    partial = (count > 0) & (rows < 64)
    if partial:
        trim(kept_dO, ready_dO, 0, 0, rows)
        trim(kept_k, ready_k, 0, 0, rows)
        trim(kept_q, ready_q, 0, 0, rows)
        if CHANNEL and CORRECTS:
            trim(kept_w, ready_w, 0, 0, rows)
        fence_async_shared()
        barrier()
    some = count > 0
    mbarrier.wait(ready_dO.index(0), 0, pred=some)
    mbarrier.wait(ready_P.index(0), 0, pred=some)
    mbarrier.wait(ready_w.index(0), 0, pred=some)
    mbarrier.wait(ready_factors.index(0), 0, pred=some)
    dO = kept_dO.index(0).permute([1, 0]).load(left)
    PO = warpgroup_mma(dO, kept_P.index(0), none, use_acc=False, is_async=True)
    if CHANNEL:
        KS = warpgroup_mma(held0, half(kept_w, 0, 0).permute([1, 0]), PO, is_async=True)
    else:
        KS = warpgroup_mma(held0, half(kept_w, 0, 0).permute([1, 0]), none, use_acc=False, is_async=True)
    if H == 2:
        KS = warpgroup_mma(held1, half(kept_w, 0, 64).permute([1, 0]), KS, is_async=True)
    if CHANNEL:
        KS = warpgroup_mma_wait(0, deps=(KS,))
        PO = none
    else:
        PO, KS = warpgroup_mma_wait(0, deps=(PO, KS))
    read = _read(dO, kept_factors, 0, acc, left, CHANNEL)
    if OUTS == 1 and not MAP:
        _leave(leaving0, leaving1, 0, held0, held1, acc, H)
        fence_async_shared()
    barrier()
    mbarrier.arrive(begun, count=1)
    at_last = numbers + (at.to(gl.int64) * FACTORS + LAST) * 64
    last = _load_last(at_last, some, CHANNEL)
    dS0, dS1 = _decay(dS0, dS1, last, kept_factors, gl.where(some, 0, OTHERS), acc, H, CHANNEL)
    mbarrier.wait(ready_q.index(0), 0, pred=some)
    if CORRECTS:
        mbarrier.wait(ready_T.index(0), 0, pred=some)
    stage = 0
    phase = 0
    other = 0
    other_phase = 0
    for n in range(count):
        out_stage = n % OUTS
        upcoming, turn = next_buffer(stage, phase, STAGES)
        other_upcoming, other_turn = next_buffer(other, other_phase, OTHERS)
        early = (n + 1) % EARLY
        early_turn = ((n + 1) // EARLY) & 1
        more = n + 1 < count
        if not MAP:  # noqa: SIM102  (Triton 3.6 fails on a condition of both)
            if (n == 1) & partial:
                at_dv = dv + (token + 64).to(gl.int64) * (HV * V) + column_o
                store_rows(written.index((n - 1) % OUTS), at_dv, HV * V, rows)
                barrier()
        at_last -= HV * FACTORS * 64
        last = _load_last(at_last, more, CHANNEL)
        # No product is in flight. Registers hold e^{G_c} dS, dS in 16 bits, Kw dS, P^T dO (CHANNEL: their sum); `read`.
        dS0 = warpgroup_mma(read, half(kept_q, stage, 0), dS0, is_async=True)
        if CHANNEL:
            dR = KS
        else:
            dR = KS * factor(kept_factors, other, WRITE, acc) + PO
        X = dR
        if CORRECTS:
            X = warpgroup_mma(
                gl.convert_layout(dR.to(dtype), left), kept_T.index(stage), none, use_acc=False, is_async=True
            )
        if H == 2:
            dS1 = warpgroup_mma(read, half(kept_q, stage, 64), dS1, is_async=True)
        if OUTS == 2 and not MAP:  # with one buffer, dS has already been stored
            mbarrier.wait(free.index(out_stage), (n // OUTS - 1) & 1, pred=n >= OUTS)
            _leave(leaving0, leaving1, out_stage, held0, held1, acc, H)
        mbarrier.wait(ready_dO.index(early), early_turn, pred=more)
        dO = kept_dO.index(early).permute([1, 0]).load(left)
        if CORRECTS:
            rate = factor(kept_factors, other, H if CHANNEL else BETA, acc) * -1.0
            if not CHANNEL:
                rate = rate * factor(kept_factors, other, READ_K, acc)
            if H == 2:
                X, dS0, dS1 = warpgroup_mma_wait(1, deps=(X, dS0, dS1))
            else:
                X, dS0 = warpgroup_mma_wait(0, deps=(X, dS0))
            if CHANNEL:
                mbarrier.wait(ready_k.index(stage), phase)
            dE = gl.convert_layout((X * rate).to(dtype), left)
            dS0 = warpgroup_mma(dE, half(kept_k, stage, 0), dS0, is_async=True)
            if H == 2:
                dS1 = warpgroup_mma(dE, half(kept_k, stage, 64), dS1, is_async=True)
        elif H == 2:  # (this waits for nothing, but fixes dR before P^T dO takes its registers)
            X, dS0, dS1 = warpgroup_mma_wait(2, deps=(X, dS0, dS1))
        else:
            X, dS0 = warpgroup_mma_wait(1, deps=(X, dS0))
        mbarrier.wait(ready_P.index(early), early_turn, pred=more)
        PO = warpgroup_mma(dO, kept_P.index(early), none, use_acc=False, is_async=True)
        dV = X.to(dtype)
        mbarrier.wait(ready_factors.index(other_upcoming), other_turn, pred=more)
        read = _read(dO, kept_factors, other_upcoming, acc, left, CHANNEL)
        if CHANNEL and CORRECTS:
            mbarrier.wait(ready_w.index(other_upcoming), other_turn, pred=more)
        else:
            mbarrier.wait(ready_k.index(upcoming), turn, pred=more)
        if OUTS == 1:
            mbarrier.wait(ready_q.index(upcoming), turn, pred=more)
            if CORRECTS:
                mbarrier.wait(ready_T.index(upcoming), turn, pred=more)
            mbarrier.wait(free.index(0), n & 1)
        if not MAP:
            written.index(out_stage).permute([1, 0]).store(dV)
        if H == 2:
            dS0, dS1, PO = warpgroup_mma_wait(2, deps=(dS0, dS1, PO))
        else:
            dS0, PO = warpgroup_mma_wait(1, deps=(dS0, PO))
        held0 = gl.convert_layout(dS0.to(dtype), left)
        next_w = other_upcoming if CHANNEL and CORRECTS else upcoming
        if CHANNEL:
            KS = warpgroup_mma(held0, half(kept_w, next_w, 0).permute([1, 0]), PO, is_async=True)
        else:
            KS = warpgroup_mma(held0, half(kept_w, next_w, 0).permute([1, 0]), none, use_acc=False, is_async=True)
        if H == 2:
            if CHANNEL:
                dS1, KS = warpgroup_mma_wait(2, deps=(dS1, KS))
            else:
                dS1, PO, KS = warpgroup_mma_wait(2, deps=(dS1, PO, KS))
            held1 = gl.convert_layout(dS1.to(dtype), left)
            KS = warpgroup_mma(held1, half(kept_w, next_w, 64).permute([1, 0]), KS, is_async=True)
        # Passing dS through the wait keeps the multiplication by e^{G_c} in this place, neither sooner nor later.
        if CHANNEL:
            KS, dS0, dS1 = warpgroup_mma_wait(H, deps=(KS, dS0, dS1))
        else:
            PO, KS, dS0, dS1 = warpgroup_mma_wait(H, deps=(PO, KS, dS0, dS1))
        dS0, dS1 = _decay(dS0, dS1, last, kept_factors, gl.where(more, other_upcoming, OTHERS), acc, H, CHANNEL)
        if OUTS == 1:
            _leave(leaving0, leaving1, 0, held0, held1, acc, H)

        # All of this chunk, and dO and P of the next, have been read: buffers can be stored and filled again.
        fence_async_shared()
        barrier()
        mbarrier.arrive(done.index(stage), count=1)
        if OUTS == 2:
            mbarrier.wait(ready_q.index(upcoming), turn, pred=more)
            if CORRECTS:
                mbarrier.wait(ready_T.index(upcoming), turn, pred=more)
        if CHANNEL:
            KS, dS0, dS1 = warpgroup_mma_wait(0, deps=(KS, dS0, dS1))
            PO = none
        else:
            PO, KS, dS0, dS1, read = warpgroup_mma_wait(0, deps=(PO, KS, dS0, dS1, read))
        token -= 64
        stage = upcoming
        phase = turn
        other = other_upcoming
        other_phase = other_turn

    if MAP:
        gl.store(dstart + i + j * (V + K), dS0)
        if H == 2:
            gl.store(dstart + i + (j + 64) * (V + K), dS1)
    else:
        if (count == 1) & partial:
            store_rows(written.index(0), dv + (token + 64).to(gl.int64) * (HV * V) + column_o, HV * V, rows)
        if ends:
            gl.store(dstart + i + j * V, dS0)
            if H == 2:
                gl.store(dstart + i + (j + 64) * V, dS1)


@gluon.jit(do_not_specialize=["t", "lasts", "segments"])
def backward_state(
    q, k, w, P, T, factors, made, doutput, dvalues, dstates, numbers, outer, inner, dstart, dv,
    bounds, first_slots, first_cuts, cut_texts, t, lasts, segments, head_q, head_k,
    HV: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    OTHERS: gl.constexpr, EARLY: gl.constexpr, OUTS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr,
    MAP: gl.constexpr, PACKED: gl.constexpr, LINK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute backward_state of state.py. q ... dstates: descriptors; numbers: the factors; dv: the dvalues.

    factors are rows of 64: those of gates.py or, with CHANNEL, e^{G_c} in halves and beta. With CHANNEL, k, q, w are
    Kr, Qr, Kw; without CORRECTS nothing reads with k, and k is Kw. MAP is as in state.py: into dstart, and neither
    dvalues nor dstates is written. made: as for forward_state.
    """
    gl.static_assert(K == 128 or K == 64)
    H: gl.constexpr = K // 64
    ROWS: gl.constexpr = H + 1 if CHANNEL else FACTORS
    dtype: gl.constexpr = k.dtype

    CUT: gl.constexpr = MAP or inner is not None
    BLOCKS: gl.constexpr = (V + K if MAP else V) // BV
    first = gl.program_id(0) % BLOCKS * BV
    pair = gl.program_id(0) // BLOCKS  # an item of find_segment, and a head
    head = pair % HV
    text, segment, segments, cut = find_segment(pair // HV, first_cuts, cut_texts, lasts, segments, CUT, PACKED)
    if CUT:
        needed = text >= 0
        if MAP:
            needed = needed & ((segment > 0) | (first < V))
        if not needed:
            link(LINK)
            return
    start, length, slot = text_bounds(text, bounds, first_slots, t, PACKED)
    chunks = (length + 63) // 64
    end = (segments - segment) * chunks // segments
    count = end - (segments - 1 - segment) * chunks // segments
    key_head = head if CHANNEL else head // R
    column_q = key_head * head_q
    column_k = key_head * head_k
    column_o = head * V + first
    if MAP:  # (outside of dO, a copy writes zeros)
        column_o = gl.where(first < V, column_o, HV * V)
    token = start + (end - 1) * 64  # first token of the current chunk
    at = (slot + end - 1) * HV + head
    rows = length - (end - 1) * 64  # in the last chunk; below them are another sequence's rows
    starts = entering_state(outer, inner, text, segment, cut, head, first, HV, K, V)
    ends = pair >= 0
    if CUT:
        ends = pair < lasts * HV

    kept_k, ready_k = make_ring(k, STAGES)
    kept_T, ready_T = kept_k, ready_k
    kept_q, ready_q = make_ring(q, STAGES)
    sources = (k, q)
    kept = (kept_k, kept_q)
    ready = (ready_k, ready_q)
    if CORRECTS:
        kept_T, ready_T = make_ring(T, STAGES)
        sources += (T,)
        kept += (kept_T,)
        ready += (ready_T,)
    kept_factors, ready_factors = make_ring(factors, OTHERS + CHANNEL)
    others = (factors,)
    kept_others = (kept_factors,)
    ready_others = (ready_factors,)
    kept_w, ready_w = kept_k, ready_k
    if CHANNEL and CORRECTS:
        kept_w, ready_w = make_ring(w, OTHERS)
        others += (w,)
        kept_others += (kept_w,)
        ready_others += (ready_w,)
    kept_dO, ready_dO = make_ring(doutput, EARLY)
    kept_P, ready_P = make_ring(P, EARLY)
    early_sources = (doutput, P)
    early_kept = (kept_dO, kept_P)
    early_ready = (ready_dO, ready_P)
    written, leaving0 = kept_k, kept_k
    if not MAP:
        written = gl.allocate_shared_memory(dtype, [OUTS, 64, BV], dvalues.layout)
        leaving0 = gl.allocate_shared_memory(dtype, [OUTS, BV, 64], dstates.layout)
    leaving1 = leaving0
    if H == 2 and not MAP:
        leaving1 = gl.allocate_shared_memory(dtype, [OUTS, BV, 64], dstates.layout)
    if CHANNEL:  # use e^{G_c} = 1 for a chunk that does not exist
        shape: gl.constexpr = factors.block_type.shape
        flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
        kept_factors.index(OTHERS).store(gl.full(shape, 1.0, gl.float32, flat))
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(begun, count=1)
    done, free = signals(STAGES, OUTS)
    fence_async_shared()
    barrier()
    if made is None:
        link(LINK)
    gl.warp_specialize(
        [
            (_walk, (
                kept_q, ready_q, kept_k, ready_k, kept_w, ready_w, kept_P, ready_P, kept_T, ready_T, kept_dO, ready_dO,
                kept_factors, ready_factors, begun, done, free, written, leaving0, leaving1, numbers, starts,
                dstart + pair.to(gl.int64) * K * (V + K if MAP else V) + first, dv, token, at, count, rows,
                segment == 0, ends, first, column_o, HV, K, V, BV, STAGES, OTHERS, EARLY, OUTS, CHANNEL, CORRECTS, MAP,
                num_warps,
            )),
            (_copy_tiles, (
                sources, kept, ready, others, kept_others, ready_others, early_sources, early_kept, early_ready, begun,
                done, free, made, dvalues, dstates, written, leaving0, leaving1, token, at, count,
                (count > 0) & (rows < 64), column_q, column_k, column_o, first, HV, V, H, STAGES, OTHERS, EARLY, OUTS,
                ROWS, CHANNEL, CORRECTS, MAP,
            )),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
