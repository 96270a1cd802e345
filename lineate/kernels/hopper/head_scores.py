"""The head_scores of portable/scores.py for Hopper (sm_90), in Gluon, by persistent programs with TMA and wgmma.

scores.py and inverse.py have the parts. Four warps compute P and T of their chunks one after another; in the rare
chunks with wild rows, they then recompute those rows of T.

Where the walk leaves multiprocessors idle, it begins when these programs have begun, and they run in parallel with it:
one of them, with three groups of four warps, fills a multiprocessor that the walk does not need. They compute the
chunks in the walk's order and mark each one that is written (`made`); the walk waits for the marks. It cannot prevent
them from running, because they run before it begins.
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

from lineate.kernels.hopper.inverse import mend
from lineate.kernels.hopper.parts import barrier, between, fresh, link, mark, times
from lineate.kernels.hopper.scores import (
    ACC,
    SMALL,
    TILES,
    WORKERS,
    begin_end,
    diagonal,
    factor_row,
    halves,
    invert_blocks,
    mask,
    merge_blocks,
    pack_bf16,
    pack_fp16,
    place,
    slot_text,
)
from lineate.kernels.portable.gates import BETA, COARSE, FACTORS, FINE, LOG2E, READ_K, READ_Q, WRITE
from lineate.kernels.portable.solve import MOST_BETA, MOST_SQUARE, MOST_STEP


@gluon.jit
def _await_stores(PENDING: gl.constexpr):
    """Wait until all TMA stores except those of the last tiles have been written, not only read."""
    if PENDING == 1:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _make_all(
    q, k, P, T, vectors, keys, inverses, factors, wild, made, room, worker: gl.constexpr, bounds, first_slots,
    slot_texts, t, items, item, stride_k, head_q, head_k, scale,
    H: gl.constexpr, R: gl.constexpr, SHARED: gl.constexpr, K: gl.constexpr,
    GATED: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
    UP: gl.constexpr, LINK: gl.constexpr,
):  # fmt: skip
    """Compute P and T of the items of a group of warps, up or down from one. room: the buffers of all groups."""
    acc: gl.constexpr = ACC
    small: gl.constexpr = SMALL
    row: gl.constexpr = gl.SliceLayout(1, acc)
    column: gl.constexpr = gl.SliceLayout(0, acc)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp holds all 64
    thin: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = GATED or CORRECTS
    BESIDE: gl.constexpr = made is not None
    all_k, all_q, all_P, all_T, all_both, all_kept, all_swaps, all_lines, barriers = room
    ready_k = barriers[0].index(worker)
    ready_q = barriers[1].index(worker)
    ready_v = barriers[2].index(worker)
    swap = all_swaps.index(worker)
    squares = all_lines[0].index(worker)  # squared lengths of keys; with NORMALIZE, inverse norms
    norms_k = squares
    norms_q = all_lines[1].index(worker)
    logs_k = all_lines[2].index(worker)
    text = slot_text(item // H, slot_texts, PACKED)
    begin, end, first = begin_end(text, bounds, first_slots, PACKED)
    start, rows = place(item // H, begin, end, first, t, PACKED)
    mbarrier.expect(ready_k, 128 * K)
    tma.async_copy_global_to_shared(k, [start, item % H // SHARED * head_k], ready_k, all_k.index(worker))
    mbarrier.expect(ready_q, 128 * K)
    tma.async_copy_global_to_shared(q, [start, item % H // SHARED * head_q], ready_q, all_q.index(worker))
    link(LINK)  # the previous launch computes the factors
    if VECTORS:
        mbarrier.expect(ready_v, 1024)
        tma.async_copy_global_to_shared(vectors, [item * R * FACTORS + BETA, 0], ready_v, all_kept.index(worker))
    barrier()

    i1 = gl.arange(0, 64, row)
    i = i1[:, None]
    j = gl.arange(0, 64, column)[None, :]
    below = mask(i >= j)
    none = gl.zeros([64, 64], gl.float32, acc)
    phase = 0
    phase_v = 0
    step = gl.num_programs(0) * (WORKERS if BESIDE else 1)
    count = ((items - 1 - item if UP else item) // step + 1) * R
    wildest = 64
    till = 64
    past = 0
    for n in range(0, count):
        r = n % R
        last = r == R - 1
        u = item * R + r
        zero = u >> 28
        tile_k = all_k.index(worker + zero)
        tile_q = all_q.index(worker + zero)
        tile_P = all_P.index(worker + zero)
        # Find the next item, and fetch its tiles step by step.
        if UP:
            upcoming = item + gl.where(last, step, 0)
            more = upcoming < items
        else:
            upcoming = item - gl.where(last, step, 0)
            more = upcoming >= 0
        next_item = gl.where(more, upcoming, item)
        text = slot_text(next_item // H, slot_texts, PACKED)
        mbarrier.wait(ready_k, phase)
        mbarrier.wait(ready_q, phase)
        if NORMALIZE:
            vector = factors + u.to(gl.int64) * (FACTORS * 64) + gl.arange(0, 64, thin)
            read_q = gl.load(vector + READ_Q * 64)
            read_k = gl.load(vector + READ_K * 64)
            write = gl.load(vector + WRITE * 64)
            if r == zero:
                qq = warpgroup_mma(tile_q, tile_q.permute([1, 0]), none, use_acc=False, is_async=True)
                kk = warpgroup_mma(tile_k, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
                qq, kk = warpgroup_mma_wait(0, deps=(qq, kk))
                sq = diagonal(qq, small)
                sk = diagonal(kk, small)
                there = gl.arange(0, 64, sq.type.layout) < rows
                nk = gl.rsqrt(gl.where(there, sk, 0.0) + 1e-6)
                norms_q.store(gl.rsqrt(gl.where(there, sq, 0.0) + 1e-6))
                norms_k.store(nk)
                logs_k.store(gl.log2(nk))
                barrier()
        QK = warpgroup_mma(tile_q, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        begin, end, first = begin_end(text, bounds, first_slots, PACKED)
        if VECTORS:
            mbarrier.wait(ready_v, phase_v)
            given = all_kept.index(worker + zero)._reinterpret(gl.float32, [256], plain)
        to_q = gl.full([64], 1.0, gl.float32, row) * scale
        if NORMALIZE:
            to_q = to_q * norms_q.load(row)
        if GATED:
            fine_j = times(factor_row(given, FINE, column), -LOG2E)
            if NORMALIZE:
                fine_j = fine_j + logs_k.load(column)
            fine_i = times(factor_row(given, FINE, row), LOG2E)
            coarse_i, coarse_j = factor_row(given, COARSE, row), factor_row(given, COARSE, column)
            # (entries with j > i are arbitrary)
            D = between(coarse_i[:, None], coarse_j[None, :], fine_i[:, None], fine_j[None, :])
        elif NORMALIZE:
            D = norms_k.load(column)[None, :] + gl.zeros([64, 64], gl.float32, acc)
        QK = warpgroup_mma_wait(0, deps=(QK,))
        if CORRECTS:
            KK = warpgroup_mma(tile_k, tile_k.permute([1, 0]), none, use_acc=False, is_async=True)
        else:
            tma.store_wait(0)
            barrier()  # P has been stored; all warps' products have read q and k
        if GATED or NORMALIZE:
            QK = QK * D
        tile_P.store(pack_bf16(QK * to_q[:, None], below, mask(i < rows)))
        if CORRECTS:
            KK = warpgroup_mma_wait(0, deps=(KK,))
            if not NORMALIZE:
                squares.store(diagonal(KK, small))
        if NORMALIZE:
            nq = norms_q.load(thin)
            nk = norms_k.load(thin)
            gl.store(vector + READ_Q * 64, read_q * nq)
            gl.store(vector + READ_K * 64, read_k * nk)
            gl.store(vector + WRITE * 64, write * nk)
        next_start, next_rows = place(next_item // H, begin, end, first, t, PACKED)
        next_head = next_item % H // SHARED
        ask = last & more
        ahead = more | (last == 0)
        mbarrier.expect(ready_k, 128 * K, pred=ask)
        mbarrier.expect(ready_q, 128 * K, pred=ask)
        if VECTORS and not CORRECTS:
            mbarrier.expect(ready_v, 1024, pred=ahead)
        fence_async_shared()
        barrier()  # P and squares are complete; all warps' products have read q and k
        tma.async_copy_global_to_shared(k, [next_start, next_head * head_k], ready_k, tile_k, pred=ask)
        tma.async_copy_shared_to_global(P, [u * 64, 0], tile_P)
        tma.async_copy_global_to_shared(q, [next_start, next_head * head_q], ready_q, tile_q, pred=ask)
        next_u = next_item * R + gl.where(last, 0, r + 1)
        if CORRECTS:
            # As solve.first_wild_row does; a row whose decay is NaN is wild too.
            each = gl.arange(0, 64, line)
            rate = factor_row(given, BETA, line)
            if NORMALIZE:
                norm = norms_k.load(line)
                square = 1.0 - 1e-6 * norm * norm  # squared lengths of unit keys, and of keys that are 0
                tame = (norm > 0.0) & (rate * square <= MOST_STEP)
            else:
                square = squares.load(line)
                tame = (rate * square <= MOST_STEP) & (square <= MOST_SQUARE)
            tame = tame & (rate >= 0.0) & (rate <= MOST_BETA)
            if GATED:
                tame = tame & (factor_row(given, COARSE, line) <= 0.0)
            before = till
            till = gl.min(gl.where((tame == 0) & (each < rows), each, 64), 0)
            if K == 128:
                wildest = gl.minimum(wildest, till)
            else:
                gl.store(wild + u, till)

            to_k = factor_row(given, BETA, row) * -1.0
            if NORMALIZE:
                to_k = to_k * norms_k.load(row)
            if GATED or NORMALIZE:
                KK = KK * D
            N = pack_fp16(KK * to_k[:, None], below, mask(i < gl.minimum(till, rows)))
            N_low, N_high = halves(N, 32)
            X, XN = invert_blocks(N_low, N_high, swap, 0)
            mbarrier.expect(ready_v, 1024, pred=ahead)
            fence_async_shared()
            if BESIDE:
                _await_stores(1)
            else:
                tma.store_wait(1)
            barrier()  # X is complete; all warps have read the factors; T has been stored
            if BESIDE:
                mark(made + past, (n > R) & (before == 64))
            tma.async_copy_global_to_shared(
                vectors, [next_u * FACTORS + BETA, 0], ready_v, all_kept.index(worker + zero), pred=ahead
            )
            whole = merge_blocks(N_low, X, XN, swap, all_both.index(worker + zero))
            tile_T = all_T.index(worker + zero)
            tile_T.store(whole.to(gl.bfloat16))
        if CORRECTS:
            fence_async_shared()
            tma.store_wait(0)  # of P
            barrier()
            tma.async_copy_shared_to_global(T, [u * 64, 0], tile_T)
            if BESIDE and n < R:  # the walk may be waiting for it
                _await_stores(0)
                barrier()
                mark(made + u, till == 64)
        elif VECTORS:
            tma.async_copy_global_to_shared(
                vectors, [next_u * FACTORS + BETA, 0], ready_v, all_kept.index(worker + zero), pred=ahead
            )
        past = u
        phase_v ^= 1
        phase ^= gl.where(last, 1, 0)
        start = next_start
        rows = next_rows
        item = next_item
    tma.store_wait(0)
    if CORRECTS and K == 128:
        _await_stores(0)  # the store of T must have been written, not only read, before T is stored a second time
        barrier()
        if BESIDE:
            mark(made + past, till == 64)
        rooms = all_k.index(worker), all_P.index(worker), all_T.index(worker), all_both.index(worker), swap
        mend(
            keys, inverses, factors, made, rooms, bounds, first_slots, slot_texts, t, gl.where(wildest < 64, items, 0),
            items, worker, stride_k, head_k, H, R, SHARED, GATED, NORMALIZE, PACKED, UP,
        )  # fmt: skip


@gluon.jit
def _make_beside(
    q, k, P, T, vectors, keys, inverses, factors, made, room, worker: gl.constexpr, bounds, first_slots, slot_texts, t,
    items, stride_k, head_q, head_k, scale,
    H: gl.constexpr, R: gl.constexpr, SHARED: gl.constexpr, GATED: gl.constexpr, NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr, UP: gl.constexpr, LINK: gl.constexpr,
):  # fmt: skip
    """Compute P and T of the items of one group of warps of a program that runs in parallel with the walk."""
    n = gl.program_id(0) + worker * gl.num_programs(0)
    if n >= items:
        link(LINK)
    else:
        item = n if UP else items - 1 - n
        _make_all(
            q, k, P, T, vectors, keys, inverses, factors, None, made, room, worker, bounds, first_slots, slot_texts, t,
            items, item, stride_k, head_q, head_k, scale,
            H, R, SHARED, 128, GATED, True, NORMALIZE, PACKED, UP, LINK,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["t", "items", "used"])
def head_scores(
    q, k, P, T, vectors, keys, inverses, factors, wild, made, bounds, first_slots, slot_texts, t, items,
    used, stride_k, head_q, head_k, scale,
    H: gl.constexpr, R: gl.constexpr, SHARED: gl.constexpr, K: gl.constexpr,
    GATED: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr, PACKED: gl.constexpr,
    UP: gl.constexpr, LINK: gl.constexpr,
):  # fmt: skip
    """Fill P and T of every chunk with decay per head or none. An item is a slot and one of H groups of R value heads.

    SHARED groups have the same key head.

    q, k: descriptors of [64, K]; P, T: of [64, 64]; vectors: of factors, [4, 64]; keys, inverses: k and T themselves.
    items: slots H. used: the number of slots that have a chunk, to compute only these.
    wild `slot hv`, unless K is 128: the first wild row, or 64; another launch computes those rows.
    made `slot hv`: 0, gets a 1 for each chunk and head that is written, if the walk runs in parallel with this launch;
    then K is 128, and the rule corrects. UP: the first chunks are computed first, otherwise the last ones, so that a
    forward walk that follows finds the first ones in the cache.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    W: gl.constexpr = 1 if made is None else WORKERS
    all_k = gl.allocate_shared_memory(gl.bfloat16, [W, 64, K], k.layout)
    all_q = gl.allocate_shared_memory(gl.bfloat16, [W, 64, K], q.layout)
    all_P = gl.allocate_shared_memory(gl.bfloat16, [W, 64, 64], P.layout)
    ready_k = gl.allocate_shared_memory(gl.int64, [W, 1], mbarrier.MBarrierLayout())
    ready_q = gl.allocate_shared_memory(gl.int64, [W, 1], mbarrier.MBarrierLayout())
    # (Unused arguments of a variant are aliases of its other buffers.)
    all_kept, ready_v, all_T, all_both, all_swaps = all_P, ready_k, all_P, all_P, ready_k
    squares, norms_q, logs_k = ready_k, ready_k, ready_k
    if GATED or CORRECTS:
        all_kept = gl.allocate_shared_memory(gl.float32, [W, 4, 64], vectors.layout)
        ready_v = gl.allocate_shared_memory(gl.int64, [W, 1], mbarrier.MBarrierLayout())
    if CORRECTS:
        all_T = gl.allocate_shared_memory(gl.bfloat16, [W, 64, 64], T.layout)
        # X of rows ..32, and N of the other rows.
        all_both = gl.allocate_shared_memory(gl.float16, [W, 64, 32], gl.NVMMASharedLayout(64, 16, 2))
        all_swaps = gl.allocate_shared_memory(gl.float16, [W, 4, 16, 16], TILES)
    if CORRECTS or NORMALIZE:
        squares = gl.allocate_shared_memory(gl.float32, [W, 64], plain)
    if NORMALIZE:
        norms_q = gl.allocate_shared_memory(gl.float32, [W, 64], plain)
        logs_k = gl.allocate_shared_memory(gl.float32, [W, 64], plain)
    for w in gl.static_range(W):
        mbarrier.init(ready_k.index(w), count=1)
        mbarrier.init(ready_q.index(w), count=1)
        if GATED or CORRECTS:
            mbarrier.init(ready_v.index(w), count=1)
    fence_async_shared()
    barrier()
    room = (
        all_k, all_q, all_P, all_T, all_both, all_kept, all_swaps, (squares, norms_q, logs_k),
        (ready_k, ready_q, ready_v),
    )  # fmt: skip

    if used is not None:
        items = gl.minimum(fresh(used, True).to(gl.int32) * H, items)
    if made is None:
        item = items - 1 - gl.program_id(0)
        if item < 0:  # there are fewer chunks than programs
            link(LINK)
            return
        _make_all(
            q, k, P, T, vectors, keys, inverses, factors, wild, made, room, 0, bounds, first_slots, slot_texts, t,
            items, item, stride_k, head_q, head_k, scale,
            H, R, SHARED, K, GATED, CORRECTS, NORMALIZE, PACKED, UP, LINK,
        )  # fmt: skip
    else:
        gl.static_assert(CORRECTS and K == 128)
        gl.warp_specialize(
            [
                (_make_beside, (
                    q, k, P, T, vectors, keys, inverses, factors, made, room, 0, bounds, first_slots, slot_texts, t,
                    items, stride_k, head_q, head_k, scale, H, R, SHARED, GATED, NORMALIZE, PACKED, UP, LINK,
                )),
                (_make_beside, (
                    q, k, P, T, vectors, keys, inverses, factors, made, room, 1, bounds, first_slots, slot_texts, t,
                    items, stride_k, head_q, head_k, scale, H, R, SHARED, GATED, NORMALIZE, PACKED, UP, LINK,
                )),
                (_make_beside, (
                    q, k, P, T, vectors, keys, inverses, factors, made, room, 2, bounds, first_slots, slot_texts, t,
                    items, stride_k, head_q, head_k, scale, H, R, SHARED, GATED, NORMALIZE, PACKED, UP, LINK,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
