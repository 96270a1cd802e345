"""The forward walk of portable/state.py for Hopper (sm_90), in Gluon: TMA, mbarriers, wgmma in flight.

    E = V - Kr S      R = T (beta E)      (rule only accumulates: R = V)
    O = Qr S + P R    S <- e^{G_c} S + Kw^T R

The state is held transposed as in state.py, S [BV, K], in halves of 64 key channels, S0 and S1, each a wgmma
accumulator. Every product is [BV, 64] x [64, 64], with its left operand in registers. The order of the products always
leaves the tensor cores one more product to do while the registers of the previous one are converted (brackets name the
result that is waited for):

    Qr0 S0  [E]  T E  Qr1 S1  [R]  Kw0 R  P R  Kw1 R  [S0]  next Kr0 S0  [S1]  Kr1 S1  [all]

With a second writer (SECOND) the values U are its own, and E = -(Kr S + M_k U): Kw0 U, Kw1 U and P_k U come after Qr1
S1, and the next M_k U after Kw1 R.

P is read or, for rules that only accumulate (SCORES), computed here one chunk ahead: the next q k^T is issued after
Qr S, its P is made while P R and Kw1 R run, and it is stored into one of two tiles.

Tiles come in through a ring of STAGES buffers. A warp of its own fetches them and stores the results (copy_tiles),
because a warp that starts a copy waits for 150 cycles, and a chunk has four to nine of them: a third of its time, if
the warps that multiply had to start them. ptxas allows no product in flight across the loop's end, so the loop ends
where the next product needs no register of the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.parts import (
    COPY_REGISTERS,
    barrier,
    entering_state,
    factor,
    find_segment,
    fresh,
    half,
    link,
    make_ring,
    map_start,
    next_buffer,
    signals,
    text_bounds,
    trim,
)
from lineate.kernels.hopper.walk_parts import (
    compare,
    copy_tiles,
    keep,
    score,
    second_values,
    start_scores,
    values_of,
)
from lineate.kernels.portable.gates import FACTORS, LAST, READ_Q, WRITE


@gluon.jit
def _walk(
    kept_q, ready_q, kept_k, ready_k, kept_w, ready_w, kept_v, ready_v, kept_P, ready_P, kept_T, ready_T, kept_factors,
    ready_factors, kept_w2, ready_w2, kept_M2, ready_M2, kept_P2, ready_P2, apart, done, free, written, entering, start,
    out, final, token, count, rows, known, ends, first, column_o, scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
    CHANNEL: gl.constexpr, CORRECTS: gl.constexpr, KEEP: gl.constexpr, MAP: gl.constexpr, SCORES: gl.constexpr,
    GATED: gl.constexpr, SECOND: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Walk over the chunks. start, final: the positions of the state of these columns before and after.

    kept_w2, kept_M2, kept_P2: Kw, M and P of a second writer.
    """
    H: gl.constexpr = K // 64
    dtype: gl.constexpr = kept_k.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 256 // num_warps, 16])  # q k^T
    valued = None
    if MAP:  # after the V columns of an empty state come those of the identity, to which no values are written
        valued = first < V
    i = gl.arange(0, BV, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, acc))[None, :]
    none = gl.zeros([BV, 64], gl.float32, acc)
    if MAP:
        S0, S1 = map_start(start, known, first, i, j, V, BV, H)
    else:
        S0 = fresh(start + i + j * V, True)  # (with `made`, there was no wait for the previous launch)
        S1 = S0
        if H == 2:
            S1 = fresh(start + i + (j + 64) * V, True)
    O = none.to(dtype)
    held0 = gl.convert_layout(S0.to(dtype), left)
    held1 = gl.convert_layout(S1.to(dtype), left)
    KS = none
    if (count == 1) & (rows < 64):
        trim(kept_k, ready_k, 0, 0, rows)
        trim(kept_v, ready_v, 0, 0, rows)
        if CHANNEL and CORRECTS:
            trim(kept_w, ready_w, 0, 0, rows)
        if SECOND:
            trim(kept_w2, ready_w2, 0, 0, rows)
        fence_async_shared()
        barrier()
    if CORRECTS:
        mbarrier.wait(ready_k.index(0), 0, pred=count > 0)
        KS = warpgroup_mma(held0, half(kept_k, 0, 0).permute([1, 0]), none, use_acc=False, is_async=True)
        if H == 2:
            KS = warpgroup_mma(held1, half(kept_k, 0, 64).permute([1, 0]), KS, is_async=True)
        if MAP:  # (otherwise ptxas, which knows S here, waits after every product)
            KS = warpgroup_mma_wait(0, deps=(KS,))
        if SECOND:
            U = second_values(kept_v, ready_v, 0, 0, count > 0, left)
            mbarrier.wait(ready_M2.index(0), 0, pred=count > 0)
            KS = warpgroup_mma(U, kept_M2.index(0).permute([1, 0]), KS, is_async=True)
        else:
            goal, rate = compare(
                kept_v, ready_v, kept_factors, ready_factors, 0, 0, count > 0, valued, acc, H, CHANNEL
            )  # fmt: skip
        mbarrier.wait(ready_T.index(0), 0, pred=count > 0)
        KS = warpgroup_mma_wait(0, deps=(KS,))
    if not MAP:
        mbarrier.wait(ready_q.index(0), 0, pred=count > 0)
    if SCORES:
        mbarrier.wait(ready_k.index(0), 0, pred=count > 0)
        QK = start_scores(kept_q, kept_k, 0, square)
        mbarrier.wait(ready_factors.index(0), 0, pred=count > 0)
        QK = warpgroup_mma_wait(0, deps=(QK,))
        kept_P.index(0).store(score(QK, kept_factors, 0, scale, 0, square, GATED))
        fence_async_shared()
    stage = 0
    phase = 0
    barrier()
    for n in range(count):
        out_stage = n % OUTS
        upcoming, turn = next_buffer(stage, phase, STAGES)
        if (n + 2 == count) & (rows < 64):
            trim(kept_k, ready_k, upcoming, turn, rows)
            trim(kept_v, ready_v, upcoming, turn, rows)
            if CHANNEL and CORRECTS:
                trim(kept_w, ready_w, upcoming, turn, rows)
            if SECOND:
                trim(kept_w2, ready_w2, upcoming, turn, rows)
            fence_async_shared()
            barrier()
        # No product is in flight (ptxas would wait for it anyway); registers hold S, its halves in 16 bits and Kr S.
        if not MAP:
            QS = warpgroup_mma(held0, half(kept_q, stage, 0).permute([1, 0]), none, use_acc=False, is_async=True)
        if CORRECTS:
            if SECOND:
                E = gl.convert_layout((KS * -1.0).to(dtype), left)
            else:
                E = gl.convert_layout((goal - KS * rate).to(dtype), left)
            Rt = warpgroup_mma(E, kept_T.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        else:
            mbarrier.wait(ready_factors.index(stage), phase)
            mbarrier.wait(ready_v.index(stage), phase)
            Rt = values_of(kept_v, stage, valued, acc)
        if H == 2 and not MAP:
            QS = warpgroup_mma(held1, half(kept_q, stage, 64).permute([1, 0]), QS, is_async=True)
        more = n + 1 < count
        if SCORES:
            mbarrier.wait(ready_k.index(upcoming), turn, pred=more)
            mbarrier.wait(ready_q.index(upcoming), turn, pred=more)
            QK = start_scores(kept_q, kept_k, upcoming, square)
        if OUTS == 2 and not MAP:
            mbarrier.wait(free.index(out_stage), (n // OUTS - 1) & 1, pred=n >= OUTS)
        if KEEP and SECOND:
            barrier()  # all warps' products with k have ended
            keep(entering, stage, held0, held1, acc, H)
        elif KEEP and OUTS == 2:  # with one buffer, the previous store must finish first
            keep(entering, out_stage, held0, held1, acc, H)
        if SECOND:
            mbarrier.wait(ready_factors.index(stage), phase)
        if CHANNEL:
            S0 = S0 * factor(kept_factors, stage, 0, acc)
            if H == 2:
                S1 = S1 * factor(kept_factors, stage, 1, acc)
        else:
            last = factor(kept_factors, stage, LAST, acc)
            S0 = S0 * last
            S1 = S1 * last
        if not CHANNEL:
            write = factor(kept_factors, stage, WRITE, acc)
        if SECOND:
            mbarrier.wait(ready_w2.index(stage), phase)
            S0 = warpgroup_mma(U, half(kept_w2, stage, 0), S0, is_async=True)
            if H == 2:
                S1 = warpgroup_mma(U, half(kept_w2, stage, 64), S1, is_async=True)
            if not MAP:
                mbarrier.wait(ready_P2.index(stage), phase)
                QS = warpgroup_mma(U, kept_P2.index(stage).permute([1, 0]), QS, is_async=True)
        if CORRECTS:
            if SECOND:
                if MAP:
                    Rt, S0, S1 = warpgroup_mma_wait(H, deps=(Rt, S0, S1))
                else:
                    Rt, QS, S0, S1 = warpgroup_mma_wait(2 * H, deps=(Rt, QS, S0, S1))
            elif MAP:
                Rt = warpgroup_mma_wait(0, deps=(Rt,))
            else:
                Rt, QS = warpgroup_mma_wait(H - 1, deps=(Rt, QS))
        added = gl.convert_layout(Rt.to(dtype), left)
        wrote = added
        if not CHANNEL:
            wrote = gl.convert_layout((Rt * write).to(dtype), left)
        if CHANNEL or not CORRECTS:
            mbarrier.wait(ready_w.index(stage), phase)
        S0 = warpgroup_mma(wrote, half(kept_w, stage, 0), S0, is_async=True)
        if not MAP:
            if not CHANNEL:
                read = factor(kept_factors, stage, READ_Q, acc)
            if SCORES:
                QS, QK, S0 = warpgroup_mma_wait(1, deps=(QS, QK, S0))
            elif SECOND:
                mbarrier.wait(ready_P.index(stage), phase)
                QS, S0, S1 = warpgroup_mma_wait(1, deps=(QS, S0, S1))
            else:
                mbarrier.wait(ready_P.index(stage), phase)
                QS, S0 = warpgroup_mma_wait(1, deps=(QS, S0))
            if not CHANNEL:
                QS = QS * read
            QS = warpgroup_mma(added, kept_P.index(n % 2 if SCORES else stage).permute([1, 0]), QS, is_async=True)
        if H == 2:
            S1 = warpgroup_mma(wrote, half(kept_w, stage, 64), S1, is_async=True)
        if SCORES:  # of the next chunk, while these products run
            mbarrier.wait(ready_factors.index(upcoming), turn, pred=more)
            made = score(QK, kept_factors, upcoming, scale, n >> 28, square, GATED)
        if SECOND:
            U = second_values(kept_v, ready_v, upcoming, turn, more, left)
            mbarrier.wait(ready_M2.index(upcoming), turn, pred=more)
            KS = warpgroup_mma(U, kept_M2.index(upcoming).permute([1, 0]), none, use_acc=False, is_async=True)
        elif CORRECTS:
            goal, rate = compare(
                kept_v, ready_v, kept_factors, ready_factors, upcoming, turn, more, valued, acc, H, CHANNEL
            )  # fmt: skip
        if OUTS == 1 and not MAP:
            mbarrier.wait(free.index(0), (n - 1) & 1, pred=n > 0)
        if SCORES:
            kept_P.index((n + 1) % 2).store(made)
        if SECOND and MAP:
            S0, S1, KS = warpgroup_mma_wait(H, deps=(S0, S1, KS))
        elif SECOND:
            S0, QS, S1, KS = warpgroup_mma_wait(H, deps=(S0, QS, S1, KS))
        elif MAP:
            S0, S1 = warpgroup_mma_wait(H - 1, deps=(S0, S1))
        elif H == 2:
            S0, QS, S1 = warpgroup_mma_wait(1, deps=(S0, QS, S1))
        else:
            S0, QS = warpgroup_mma_wait(0, deps=(S0, QS))
        if KEEP and OUTS == 1 and not SECOND:
            keep(entering, out_stage, held0, held1, acc, H)
        held0 = gl.convert_layout(S0.to(dtype), left)
        if SCORES:
            mbarrier.wait(apart, 1)
        elif CORRECTS:
            mbarrier.wait(ready_k.index(upcoming), turn, pred=more)
        if SECOND:
            KS = warpgroup_mma(held0, half(kept_k, upcoming, 0).permute([1, 0]), KS, is_async=True)
        elif CORRECTS:
            KS = warpgroup_mma(held0, half(kept_k, upcoming, 0).permute([1, 0]), none, use_acc=False, is_async=True)
        if not MAP:
            O = QS.to(dtype)
        if CORRECTS:
            if H == 2:
                S1, KS = warpgroup_mma_wait(1, deps=(S1, KS))
        elif H == 2:
            S1 = warpgroup_mma_wait(0, deps=(S1,))
        if H == 2:
            held1 = gl.convert_layout(S1.to(dtype), left)
            if CORRECTS:
                KS = warpgroup_mma(held1, half(kept_k, upcoming, 64).permute([1, 0]), KS, is_async=True)

        # All of this chunk has been read: its output can be stored and its buffers filled again.
        if not MAP:
            written.index(out_stage).permute([1, 0]).store(O)
            fence_async_shared()
        barrier()
        mbarrier.arrive(done.index(stage), count=1)
        if not MAP and not SCORES:
            mbarrier.wait(ready_q.index(upcoming), turn, pred=more)
        if CORRECTS:
            mbarrier.wait(ready_T.index(upcoming), turn, pred=more)
            KS = warpgroup_mma_wait(0, deps=(KS,))
        token += 64
        stage = upcoming
        phase = turn

    if MAP:
        gl.store(final + i + j * (V + K), S0)
        if H == 2:
            gl.store(final + i + (j + 64) * (V + K), S1)
    else:
        if count > 0:  # store the last chunk's output, which may be partial
            at_o = out + (token - 64).to(gl.int64) * (HV * V) + column_o
            gl.store(at_o + i + j * (HV * V), O, mask=j < rows)
        if ends:
            gl.store(final + i + j * V, S0)
            if H == 2:
                gl.store(final + i + (j + 64) * V, S1)


@gluon.jit(do_not_specialize=["t", "lasts", "segments"])
def forward_state(
    q, k, w, v, P, T, factors, made, output, states, second_w, second_M, second_P, outer, inner, final, out,
    bounds, first_slots, first_cuts, cut_texts, t, lasts, segments, head_q, head_k, head_v, scale,
    HV: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    OUTS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr, KEEP: gl.constexpr, MAP: gl.constexpr,
    PACKED: gl.constexpr, SCORES: gl.constexpr, GATED: gl.constexpr, LINK: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Compute forward_state of state.py. q, k, w, v, P, T, factors, output, states: descriptors; out: the output.

    factors are rows of 64: those of gates.py or, with CHANNEL, e^{G_c} in halves and beta. With CHANNEL, k, q, w are
    Kr, Qr, Kw; without CORRECTS nothing reads with k, and k is Kw. MAP, as in state.py, reads neither q nor P.
    SCORES: P is not read (its descriptor gives the layout) but computed from q, k and, if GATED, the factors.
    made `slot hv`: head_scores runs in parallel, and sets a 1 for each chunk whose P and T are written.
    second_w, second_M, second_P: descriptors of Kw, M and P of a second writer, or None; its values are v.
    """
    SECOND: gl.constexpr = second_w is not None
    gl.static_assert(not SECOND or (CHANNEL and CORRECTS and BV == 64))
    gl.static_assert(not (SCORES and (CHANNEL or MAP or CORRECTS)))
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
    begin = segment * chunks // segments
    if SCORES and not CUT:
        begin = gl.program_id(2) * chunks  # (this is 0, but where ptxas knows that, it spills more)
    count = gl.minimum((segment + 1) * chunks // segments, chunks) - begin
    key_head = head if CHANNEL else head // R
    column_q = key_head * head_q
    column_k = key_head * head_k
    column_v = head * head_v + first
    if MAP:  # (outside of v, a copy writes zeros)
        column_v = gl.where(first < V, column_v, v.shape[1] if SECOND else 0)
    column_o = head * V + first
    token = start + begin * 64  # first token of the current chunk
    at = (slot + begin) * HV + head
    rows = length - (begin + count - 1) * 64  # in the last chunk; below them are another sequence's rows
    starts = entering_state(outer, inner, text, segment, cut, head, first, HV, K, V)
    final_at = final + pair.to(gl.int64) * K * (V + K if MAP else V) + first
    ends = pair >= 0
    if CUT:
        ends = pair < lasts * HV

    kept_k, ready_k = make_ring(k, STAGES)
    kept_v, ready_v = make_ring(v, STAGES)
    kept_factors, ready_factors = make_ring(factors, STAGES)
    sources = (k, v, factors)
    kept = (kept_k, kept_v, kept_factors)
    ready = (ready_k, ready_v, ready_factors)
    kept_T, ready_T, kept_w, ready_w = kept_k, ready_k, kept_k, ready_k
    kept_q, ready_q, kept_P, ready_P, apart = kept_k, ready_k, kept_k, ready_k, ready_k
    written, entering = kept_k, kept_k
    if not MAP:
        kept_q, ready_q = make_ring(q, STAGES)
        sources += (q,)
        kept += (kept_q,)
        ready += (ready_q,)
        if SCORES:
            kept_P = gl.allocate_shared_memory(dtype, [2, 64, 64], P.layout)
            # A wait for phase 1 of this barrier returns at once, but without some wait before O, ptxas runs one product
            # after another.
            apart = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(apart, count=1)
        else:
            kept_P, ready_P = make_ring(P, STAGES)
            sources += (P,)
            kept += (kept_P,)
            ready += (ready_P,)
    if CORRECTS:
        kept_T, ready_T = make_ring(T, STAGES)
        sources += (T,)
        kept += (kept_T,)
        ready += (ready_T,)
    if CHANNEL and CORRECTS:
        kept_w, ready_w = make_ring(w, STAGES)
        sources += (w,)
        kept += (kept_w,)
        ready += (ready_w,)
    kept_w2, ready_w2, kept_M2, ready_M2, kept_P2, ready_P2 = kept_k, ready_k, kept_k, ready_k, kept_k, ready_k
    if SECOND:
        kept_w2, ready_w2 = make_ring(second_w, STAGES)
        kept_M2, ready_M2 = make_ring(second_M, STAGES)
        sources += (second_w, second_M)
        kept += (kept_w2, kept_M2)
        ready += (ready_w2, ready_M2)
        if not MAP:
            kept_P2, ready_P2 = make_ring(second_P, STAGES)
            sources += (second_P,)
            kept += (kept_P2,)
            ready += (ready_P2,)
    if not MAP:
        written = gl.allocate_shared_memory(dtype, [OUTS, 64, BV], output.layout)
    if KEEP and not SECOND:  # (there is no room: with a second writer, it takes the place of the chunk's k)
        entering = gl.allocate_shared_memory(dtype, [OUTS, BV, K], states.layout)
    done, free = signals(STAGES, OUTS)
    fence_async_shared()
    barrier()
    if made is None:
        link(LINK)  # (find_slots, which makes the bounds, is at least two launches before this one)
    gl.warp_specialize(
        [
            (_walk, (
                kept_q, ready_q, kept_k, ready_k, kept_w, ready_w, kept_v, ready_v, kept_P, ready_P, kept_T, ready_T,
                kept_factors, ready_factors, kept_w2, ready_w2, kept_M2, ready_M2, kept_P2, ready_P2, apart, done, free,
                written, entering, starts, out, final_at, token, count, rows, segment == 0, ends, first, column_o,
                scale, HV, K, V, BV, STAGES, OUTS, CHANNEL, CORRECTS, KEEP, MAP, SCORES, GATED, SECOND, num_warps,
            )),
            (copy_tiles, (
                sources, kept, ready, done, free, made, output, states, written, entering, token, at, count, column_q,
                column_k, column_v, column_o, first, HV, V, STAGES, OUTS, ROWS, CHANNEL, CORRECTS, KEEP, MAP,
                SCORES, SECOND,
            )),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip
