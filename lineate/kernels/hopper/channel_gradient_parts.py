"""The arithmetic of channel_gradients.py, in Gluon: decays of blocks, products with the state and of pairs, sums.

Tensors of a unit are [block, row, channel] (CUBE, a thread has all rows of a block), one number a block and channel
(LINE), or accumulators [64, 64] (ACC). The five tiles of the state's products are those of S, dO, R, dS and dE; without
corrections there is no dE, and results that depend on it are not used. The second writer has those of R and dS alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lineate.kernels.hopper.channel_parts import (
    add,
    as_cube,
    as_flat,
    board_rows,
    by_rows,
    column_block,
    diagonal_entries,
    log2,
    log2_decay_of_gate,
    opaque,
    opened,
    reciprocal,
    rounded,
    row_block,
    scale_blocks,
    stack2,
    stack8,
    turned_block,
)
from lineate.kernels.hopper.parts import exp2
from lineate.kernels.portable.gates import FLOOR, LOG2E

K = gl.constexpr(128)
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
FLAT = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
CUBE = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
LINE = gl.constexpr(gl.SliceLayout(1, CUBE.value))  # [block, channel]
TWO = gl.constexpr(gl.BlockedLayout([2, 1, 2], [1, 1, 32], [1, 4, 1], [2, 1, 0]))
EIGHT = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 4, 1], [2, 1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PASSING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def start_state_products(tiles_1, tiles_0, ready_0, phase, none, CORRECTS: gl.constexpr):
    """Start dO S, dE S, R dS and S^T dS, of which the last columns have arrived (tiles_1) and the first may not yet."""
    S1, dO1, R1, dS1, dE1 = tiles_1
    S0, dO0, R0, dS0, dE0 = tiles_0
    OS = warpgroup_mma(dO1, S1, none, use_acc=False, is_async=True)
    ES = OS
    if CORRECTS:
        ES = warpgroup_mma(dE1, S1, none, use_acc=False, is_async=True)
    RS = warpgroup_mma(R1, dS1, none, use_acc=False, is_async=True)
    SS = warpgroup_mma(S1.permute([1, 0]), dS1, none, use_acc=False, is_async=True)
    for x in gl.static_range(5 if CORRECTS else 4):
        mbarrier.wait(ready_0[x], phase)
    OS = warpgroup_mma(dO0, S0, OS, is_async=True)
    if CORRECTS:
        ES = warpgroup_mma(dE0, S0, ES, is_async=True)
    RS = warpgroup_mma(R0, dS0, RS, is_async=True)
    SS = warpgroup_mma(S0.permute([1, 0]), dS0, SS, is_async=True)
    return OS, ES, RS, SS


@gluon.jit
def start_write_product(tiles_1, tiles_0, ready_0, phase, none):
    """Start R dS of a second writer, whose tiles are those of R and dS."""
    R1, dS1 = tiles_1
    R0, dS0 = tiles_0
    RS = warpgroup_mma(R1, dS1, none, use_acc=False, is_async=True)
    for x in gl.static_range(2):
        mbarrier.wait(ready_0[x], phase)
    return warpgroup_mma(R0, dS0, RS, is_async=True)


@gluon.jit
def block_decays(
    d, there, r, xs, A_log, dt_bias, head, channel, lower_bound, RAW: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """Return the decay (log2) of a block's first row, W of its last row, and F, from the gates or log_decay d."""
    d = d.to(gl.float32)
    if RAW:
        if BIAS:
            d += gl.load(dt_bias + head * K + channel + xs).to(gl.float32)[:, None, :]
        speed = 1.0
        if A_log is not None:
            speed = gl.exp(gl.load(A_log + head).to(gl.float32))
        d = gl.where(there, log2_decay_of_gate(d, speed, lower_bound), 0.0)
    else:
        d = d * LOG2E
    d = gl.where(d <= 0.0, gl.maximum(d, FLOOR * LOG2E), float("nan"))  # as `allowed` of gates.py does
    first = gl.sum(gl.where(r == 0, d, -0.0), 1)  # (adding -0.0 costs no instruction)
    W = gl.associative_scan(gl.where(r == 0, 0.0, d), 1, add)
    inside = gl.sum(gl.where(r == 15, W, -0.0), 1)
    return first, inside, exp2(W)


@gluon.jit
def clear_diagonal(tile_P, ready_P, phase, dP, norms, item, scale, NORMALIZE: gl.constexpr):
    """Take the diagonal out of the tile of dP, and with NORMALIZE multiply the rest by the inverse norms.

    Return the diagonal times the inverse norms or scale, and (with NORMALIZE) the inverse norms of k [64], of q
    [64, 1], of k [64, 1] and of k [1, 64]. Without NORMALIZE it is q F that has the scale.
    """
    i = opaque(gl.arange(0, 64, gl.SliceLayout(1, ACC)))
    j = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    mbarrier.wait(ready_P, phase)
    scores = tile_P.load(ACC)
    at_norm = norms + item.to(gl.int64) * 128
    own = gl.load(dP + item.to(gl.int64) * 4096 + i * 65).to(gl.float32)
    norm_q = own
    norm_k = own
    rate_k = own
    across = own
    if NORMALIZE:
        rate_q = gl.load(at_norm + i)
        rate_k = gl.load(at_norm + 64 + i)
        own = own * rate_q * rate_k
        norm_q = rate_q[:, None]
        norm_k = rate_k[:, None]
        across = gl.load(at_norm + 64 + j)[None, :]
        scores = scores.to(gl.float32) * norm_q * across
    else:
        own = own * scale
    tile_P.store(gl.where(i[:, None] == j[None, :], 0.0, scores).to(tile_P.dtype))
    return own, rate_k, norm_q, norm_k, across


@gluon.jit
def fill_board(tile, first, inside, SS, b, SECOND: gl.constexpr):
    """Return a board in this tile with the decays from each block's reference row to the next block's.

    Return also the decay from a block's row a to the chunk's end, and S.dS e^{G_c} (0 for a second writer).
    """
    if not SECOND:
        SdS = gl.convert_layout(diagonal_entries(SS, ACC), gl.SliceLayout(0, LINE))[None, :]
    board = tile._reinterpret(gl.float32, [32, 64], PLAIN)
    board.slice(0, 8, 0).store(stack2(first, inside, TWO))
    first0 = board.slice(0, 1, 0).load(LINE)
    first1 = board.slice(1, 1, 0).load(LINE)
    first2 = board.slice(2, 1, 0).load(LINE)
    first3 = board.slice(3, 1, 0).load(LINE)
    inside0 = board.slice(4, 1, 0).load(LINE)
    inside1 = board.slice(5, 1, 0).load(LINE)
    inside2 = board.slice(6, 1, 0).load(LINE)
    inside3 = board.slice(7, 1, 0).load(LINE)
    s1 = inside0 + first1
    s2 = inside1 + first2
    s3 = inside2 + first3
    # The decay from the block's row a to the chunk's end, and over the whole chunk.
    down = inside3 + gl.where(b < 3, s3, 0.0) + gl.where(b < 2, s2, 0.0) + gl.where(b < 1, s1, 0.0)
    if SECOND:
        last = gl.zeros([4, 64], gl.float32, LINE)
    else:
        last = SdS * exp2(first0 + s1 + s2 + s3 + inside3)
    down = exp2(down)
    s1 = exp2(s1)
    s2 = exp2(s2)
    s3 = exp2(s3)
    nothing = gl.zeros([4, 64], gl.float32, LINE)
    board.store(
        stack8(
            gl.where(b >= 1, s1, 1.0), gl.where(b >= 2, s2, 1.0), gl.where(b >= 3, s3, 1.0),
            gl.where(b < 1, s1, 1.0), gl.where(b < 2, s2, 1.0), gl.where(b < 3, s3, 1.0),
            nothing + exp2(first0), EIGHT,
        )
    )  # fmt: skip
    return board, down, last


@gluon.jit
def make_tiles(tile_q, tile_k, Yq, Yk, Z, F, in_q, probes, CORRECTS: gl.constexpr, COMPARED: gl.constexpr):
    """Make the tiles Yq, Yk (of what is compared) and Z; in_q is the factor of q besides F."""
    dtype: gl.constexpr = tile_q.dtype
    keys = as_cube(tile_k.load(FLAT).to(gl.float32), CUBE)
    Z.store(as_flat((keys * reciprocal(F)).to(dtype), FLAT))
    if CORRECTS:
        if COMPARED == "erase":
            keys = keys * probes.to(gl.float32)
        elif COMPARED != "key":
            keys = probes.to(gl.float32)
        Yk.store(as_flat((keys * F).to(dtype), FLAT))
    queries = as_cube(tile_q.load(FLAT).to(gl.float32), CUBE)
    Yq.store(as_flat((queries * in_q * F).to(dtype), FLAT))


@gluon.jit
def pair_products(
    tile_P, tile_M, Yq, Yk, Z, board, OS, ES, RS, norm_q, norm_k, none, CORRECTS: gl.constexpr,
    NORMALIZE: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Return aq, ak and aw, and R dS, whose product is still running. SECOND: without dO S and dE S."""
    f = board_rows(board, 24, OS)
    if SECOND:
        aq = none
        ak = none
    elif NORMALIZE:
        aq = scale_blocks(OS, f, ACC) * norm_q
        ak = aq
        if CORRECTS:
            ak = scale_blocks(ES, f, ACC) * (norm_k * -1.0)
    else:
        aq = scale_blocks(OS, f, ACC)
        ak = aq
        if CORRECTS:
            ak = scale_blocks(ES, f * -1.0, ACC)
    aq = warpgroup_mma(column_block(tile_P, 0, LEFT), row_block(Z, 0), aq, is_async=True)
    if CORRECTS:
        ak = warpgroup_mma(column_block(tile_M, 0, LEFT), row_block(Z, 0), ak, is_async=True)
    aw = warpgroup_mma(turned_block(tile_P, 48, LEFT), row_block(Yq, 48), none, use_acc=False, is_async=True)
    if CORRECTS:
        aw = warpgroup_mma(turned_block(tile_M, 48, LEFT), row_block(Yk, 48), aw, is_async=True)
    for s in gl.static_range(1, 4):
        f = board_rows(board, s * 4 - 4, OS)
        if CORRECTS:
            aq, ak, aw = warpgroup_mma_wait(3, deps=(aq, ak, aw))
        else:
            aq, aw = warpgroup_mma_wait(1, deps=(aq, aw))
        aq = warpgroup_mma(
            column_block(tile_P, s * 16, LEFT), row_block(Z, s * 16), scale_blocks(aq, f, ACC), is_async=True
        )
        if CORRECTS:
            aq, ak, aw = warpgroup_mma_wait(3, deps=(aq, ak, aw))
            ak = warpgroup_mma(
                column_block(tile_M, s * 16, LEFT), row_block(Z, s * 16), scale_blocks(ak, f, ACC), is_async=True
            )
        f = board_rows(board, 24 - s * 4, OS)
        if CORRECTS:
            aq, ak, aw = warpgroup_mma_wait(2, deps=(aq, ak, aw))
        else:
            aq, aw = warpgroup_mma_wait(1, deps=(aq, aw))
        aw = warpgroup_mma(
            turned_block(tile_P, 48 - s * 16, LEFT), row_block(Yq, 48 - s * 16), scale_blocks(aw, f, ACC), is_async=True
        )
        if CORRECTS:
            aw = warpgroup_mma(turned_block(tile_M, 48 - s * 16, LEFT), row_block(Yk, 48 - s * 16), aw, is_async=True)
    if CORRECTS:
        aq, ak, aw, RS = warpgroup_mma_wait(0, deps=(aq, ak, aw, RS))
    else:
        aq, aw, RS = warpgroup_mma_wait(0, deps=(aq, aw, RS))
    return aq, ak, aw, RS


@gluon.jit
def store_row_gradients(
    aq, ak, aw, RS, own, rate_k, tile_q, tile_k, tile_e, tile_dq, tile_de, all_A, all_B, all_C, F, in_q, down, probe,
    dq, dk, dprobe, to, at, r, there, ROW: gl.constexpr, CORRECTS: gl.constexpr, NORMALIZE: gl.constexpr,
    COMPARED: gl.constexpr,
):  # fmt: skip
    """Store dq, dk and (with a probe) dprobe, whose rows have ROW numbers.

    "second": the probe and the gradients of the first writer, to which those of q and the probe are added, are in
    tile_e, tile_dq and tile_de.

    Return a row's reads less its writes that the chunk reads, which are part of dlog_decay up to that row, and its
    write to the state, which is part of dlog_decay behind it, less the former.
    """
    dtype: gl.constexpr = tile_q.dtype
    # Pass the accumulators through shared memory, so that a thread gets all rows of a block.
    pass_A = all_A._reinterpret(gl.float32, [64, 64], PASSING)
    pass_B = all_B._reinterpret(gl.float32, [64, 64], PASSING)
    by_row = all_C._reinterpret(gl.float32, [2048], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pass_A.store(aq)
    if CORRECTS:
        pass_B.store(ak)
    by_row.slice(0, 64, 0).store(own)
    if NORMALIZE:
        by_row.slice(64, 64, 0).store(rate_k)
    # (q and k are loaded twice, to save registers)
    read = as_cube(pass_A.load(FLAT), CUBE)
    total = read * rounded(as_cube(tile_q.load(FLAT).to(gl.float32), CUBE) * in_q * F)
    read = F * in_q * read
    own = by_rows(by_row.slice(0, 64, 0).load(gl.SliceLayout(1, FLAT)), CUBE)
    read = read + own * as_cube(tile_k.load(FLAT).to(gl.float32), CUBE)
    if COMPARED == "second":
        read = read + as_cube(tile_dq.load(FLAT).to(gl.float32), CUBE)
    gl.store(dq + to + at + r * ROW, read.to(dtype), mask=there)
    if CORRECTS:
        reread = as_cube(pass_B.load(FLAT), CUBE)
    pass_A.store(aw)
    pass_B.store(RS)
    inverse = reciprocal(F)
    written = as_cube(pass_A.load(FLAT), CUBE)
    keys = as_cube(tile_k.load(FLAT).to(gl.float32), CUBE)
    total = total - written * rounded(keys * inverse)
    written = inverse * written
    if CORRECTS:
        if COMPARED == "erase":
            erased = gl.load(probe + to + at + r * ROW, mask=there, other=0.0).to(gl.float32)
            total = total + reread * rounded(keys * erased * F)
            reread = F * reread
            gl.store(dprobe + to + at + r * ROW, (keys * reread).to(dprobe.dtype.element_ty), mask=there)
            written = erased * reread + written
        elif COMPARED == "probe":
            probes = gl.load(probe + to + at + r * ROW, mask=there, other=0.0).to(gl.float32)
            total = total + reread * rounded(probes * F)
            gl.store(dprobe + to + at + r * ROW, (F * reread).to(dprobe.dtype.element_ty), mask=there)
        elif COMPARED == "second":
            total = total + reread * rounded(as_cube(tile_e.load(FLAT).to(gl.float32), CUBE) * F)
            reread = F * reread + as_cube(tile_de.load(FLAT).to(gl.float32), CUBE)
            gl.store(dprobe + to + at + r * ROW, reread.to(dprobe.dtype.element_ty), mask=there)
        else:
            total = total + reread * rounded(keys * F)
            written = F * reread + written
    kept = as_cube(pass_B.load(FLAT), CUBE) * inverse * down[:, None, :]
    if NORMALIZE:
        kept = kept * by_rows(by_row.slice(64, 64, 0).load(gl.SliceLayout(1, FLAT)), CUBE)
    step = keys * kept - total
    own = by_rows(by_row.slice(0, 64, 0).load(gl.SliceLayout(1, FLAT)), CUBE)
    written = written + kept + own * as_cube(tile_q.load(FLAT).to(gl.float32), CUBE)
    gl.store(dk + to + at + r * ROW, written.to(dtype), mask=there)
    return total, step


@gluon.jit
def sum_over_rows(tile, total, step, last, first, b, r):
    """Return dlog_decay: for each row the totals of the rows from it on and the writes to the state of those before it.

    total and step are those of store_row_gradients; last is S.dS e^{G_c}. Return also the board in this tile.
    """
    running = gl.associative_scan(step, 1, add)
    block_step = gl.sum(gl.where(r == 15, running, -0.0), 1)
    block_total = gl.sum(total, 1)
    board = tile._reinterpret(gl.float32, [32, 64], PLAIN)
    board.slice(0, 8, 0).store(stack2(block_total, block_total + block_step, TWO))
    base = last + block_total
    for x in gl.static_range(1, 4):
        base = base + gl.where(b < x, board.slice(x, 1, 0).load(LINE), 0.0)
        base = base + gl.where(b >= x, board.slice(x + 3, 1, 0).load(LINE), 0.0)
    dgiven = base[:, None, :] + (running - step)
    return board, gl.where((r == 0) & (first <= FLOOR * LOG2E)[:, None, :], 0.0, dgiven)


@gluon.jit
def gate_gradients(
    dgiven, x0, step, first, inside, F, rows, there, r, xs, board, A_log, dt_bias, dA_log, ddt_bias, u, head, channel,
    lower_bound, BIAS: gl.constexpr,
):  # fmt: skip
    """Return the gradient of raw gates x0 from that of log_decay, and store unit u's parts of dA_log and ddt_bias."""
    if BIAS:
        x0 += gl.load(dt_bias + head * K + channel + xs).to(gl.float32)[:, None, :]
    rate = 1.0
    if A_log is not None:
        rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    if lower_bound is None:
        # The sum of dgiven_r d_r, by parts: d is the difference of W = log2 F, and step is that of dgiven.
        # (Keeping W would take registers; log2 F is exact to 1e-7, which matters only for log_decay below
        # 1e-5.)
        of_speed = gl.sum(gl.where(r == 15, -0.0, log2(F) * step), 1)
        of_speed = inside * gl.sum(gl.where(r == 15, dgiven, -0.0), 1) - of_speed
        of_speed = (of_speed + first * gl.sum(gl.where(r == 0, dgiven, -0.0), 1)) * (1.0 / LOG2E)
        of_speed = gl.where(rows > 0, of_speed, 0.0)
        dgiven = gl.where(there, dgiven, 0.0)
        dgiven = dgiven * (rate * -1.0) * opened(x0, 1.0)
    else:
        open_ = opened(x0, rate)
        dgiven = gl.where(there, dgiven, 0.0) * (lower_bound * rate) * (open_ * (1.0 - open_))
        of_speed = gl.sum(gl.where(there, dgiven * x0, 0.0), 1)
    of_bias = gl.sum(dgiven, 1)
    board.slice(8, 8, 0).store(stack2(of_speed, of_bias, TWO))
    of_speed = board.slice(8, 1, 0).load(LINE)
    of_bias = board.slice(12, 1, 0).load(LINE)
    for x in gl.static_range(1, 4):
        of_speed = of_speed + board.slice(8 + x, 1, 0).load(LINE)
        of_bias = of_bias + board.slice(12 + x, 1, 0).load(LINE)
    if A_log is not None:
        gl.store(dA_log + u, gl.sum(gl.sum(of_speed, 1), 0))
    if BIAS:
        gl.store(ddt_bias + (u >> 1).to(gl.int64) * K + channel + xs, of_bias)
    return dgiven
