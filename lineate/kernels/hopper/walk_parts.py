"""The parts of walk.py: the warp that copies, and what a chunk compares, writes and reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from lineate.kernels.hopper.parts import (
    await_mark,
    between,
    end_beside,
    expect,
    factor,
    fetch,
    half,
    next_buffer,
    rates,
    round_bf16,
    times,
)
from lineate.kernels.portable.gates import BETA, COARSE, FINE, LOG2E, READ_K


@gluon.jit
def places_of(
    token, at, column_q, column_k, column_v,
    ROWS: gl.constexpr, CHANNEL: gl.constexpr, CORRECTS: gl.constexpr, MAP: gl.constexpr, SCORES: gl.constexpr,
    SECOND: gl.constexpr,
):  # fmt: skip
    """Return the coordinates of a chunk's tiles of k, v, factors, q, P, T, w, and of a second w, M and P."""
    places = ((token, column_k), (token, column_v), (at * ROWS, 0))
    if not MAP:
        places += ((token, column_q),)
        if not SCORES:
            places += ((at * 64, 0),)
    if CORRECTS:
        places += ((at * 64, 0),)
    if CHANNEL and CORRECTS:
        places += ((token, column_k),)
    if SECOND:
        places += ((token, column_k), (at * 64, 0))
        if not MAP:
            places += ((at * 64, 0),)
    return places


@gluon.jit
def keep(entering, stage, held0, held1, layout: gl.constexpr, H: gl.constexpr):
    """Write the state that entered a chunk to shared memory, to be stored."""
    half(entering, stage, 0).store(gl.convert_layout(held0, layout))
    if H == 2:
        half(entering, stage, 64).store(gl.convert_layout(held1, layout))


@gluon.jit
def compare(
    kept_v, ready_v, kept_factors, ready_factors, stage, phase, there, valued,
    layout: gl.constexpr, H: gl.constexpr, CHANNEL: gl.constexpr,
):  # fmt: skip
    """Wait for values and factors; return beta V [BV, 64], 0 unless valued, and the factor of Kr S in beta E."""
    mbarrier.wait(ready_factors.index(stage), phase, pred=there)
    beta = factor(kept_factors, stage, H if CHANNEL else BETA, layout)
    rate = beta
    if not CHANNEL:
        rate = beta * factor(kept_factors, stage, READ_K, layout)
    mbarrier.wait(ready_v.index(stage), phase, pred=there)
    return times(values_of(kept_v, stage, valued, layout), beta), rate


@gluon.jit
def values_of(kept_v, stage, valued, layout: gl.constexpr):
    """Return V [BV, 64], or 0 unless valued (None counts as True)."""
    values = kept_v.index(stage).permute([1, 0]).load(layout).to(gl.float32)
    if valued is not None:
        values = gl.where(valued, values, 0.0)
    return values


@gluon.jit
def second_values(kept_v, ready_v, stage, phase, there, left: gl.constexpr):
    """Wait for the values of a second writer; return them as a left operand [BV, 64]."""
    mbarrier.wait(ready_v.index(stage), phase, pred=there)
    return kept_v.index(stage).permute([1, 0]).load(left)


@gluon.jit
def start_scores(kept_q, kept_k, stage, layout: gl.constexpr):
    """Start q k^T of a chunk; the caller waits for it."""
    none = gl.zeros([64, 64], gl.float32, layout)
    return warpgroup_mma(
        kept_q.index(stage), kept_k.index(stage).permute([1, 0]), none, use_acc=False, is_async=True
    )  # fmt: skip


@gluon.jit
def score(QK, kept_factors, stage, scale, zero, layout: gl.constexpr, GATED: gl.constexpr):
    """Return P, with the same bits as scores.py.

    zero: 0, which the compiler must not know, or it keeps the mask in registers.
    """
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] + zero
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    if GATED:
        fine_j = times(factor(kept_factors, stage, FINE, layout), -LOG2E)
        fine_i = times(rates(kept_factors, stage, FINE, layout), LOG2E)
        coarse_i = rates(kept_factors, stage, COARSE, layout)
        # (entries with j > i are arbitrary)
        QK = QK * between(coarse_i, factor(kept_factors, stage, COARSE, layout), fine_i, fine_j)
    return round_bf16(gl.where(i >= j, QK * scale, 0.0))


@gluon.jit
def copy_tiles(
    sources, kept, ready, done, free, made, output, states, written, entering, token, at, count,
    column_q, column_k, column_v, column_o, first,
    HV: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr, ROWS: gl.constexpr,
    CHANNEL: gl.constexpr, CORRECTS: gl.constexpr, KEEP: gl.constexpr, MAP: gl.constexpr, SCORES: gl.constexpr,
    SECOND: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of all chunks and store their results.

    done[stage]: the others have read a chunk's tiles, and its results lie in shared memory. free[m]: results have been
    stored. made: the marks of the chunks whose P and T are written, if head_scores runs in parallel. SECOND: the state
    that entered a chunk lies in its buffer of k, which is filled again when that has been stored.
    """
    for s in gl.static_range(STAGES):
        places = places_of(
            token + s * 64, at + s * HV, column_q, column_k, column_v, ROWS, CHANNEL, CORRECTS, MAP, SCORES,
            SECOND,
        )  # fmt: skip
        await_mark(made, at + s * HV, s < count)
        expect(sources, ready, s, s < count)
        fetch(sources, kept, ready, places, s, s < count)
    stage = 0
    phase = 0
    for n in range(count):
        there = n + STAGES < count
        await_mark(made, at + STAGES * HV, there)  # (here, because the load takes a while)
        mbarrier.wait(done.index(stage), phase)
        places = places_of(
            token + STAGES * 64, at + STAGES * HV, column_q, column_k, column_v, ROWS, CHANNEL, CORRECTS, MAP,
            SCORES, SECOND,
        )  # fmt: skip
        if KEEP and SECOND:
            tma.async_copy_shared_to_global(states, [at * V + first, 0], entering.index(stage))
        expect(sources, ready, stage, there)
        if KEEP and SECOND:
            for x in gl.static_range(1, len(sources)):
                tma.async_copy_global_to_shared(
                    sources[x], places[x], ready[x].index(stage), kept[x].index(stage), pred=there
                )  # fmt: skip
        else:
            fetch(sources, kept, ready, places, stage, there)
        if not MAP:
            # (The last chunk may be partial and is stored by the others, so here its store goes outside of the output.)
            row = gl.where(n + 1 < count, token, output.shape[0])
            tma.async_copy_shared_to_global(output, [row, column_o], written.index(n % OUTS))
            if KEEP and SECOND:
                tma.store_wait(1)
                tma.async_copy_global_to_shared(
                    sources[0], places[0], ready[0].index(stage), kept[0].index(stage), pred=there
                )  # fmt: skip
            elif KEEP:
                tma.async_copy_shared_to_global(states, [at * V + first, 0], entering.index(n % OUTS))
            tma.store_wait((OUTS - 1) * (1 + (KEEP and not SECOND)))
            mbarrier.arrive(free.index((n + 1) % OUTS), count=1, pred=n + 1 >= OUTS)
        token += 64
        at += HV
        stage, phase = next_buffer(stage, phase, STAGES)
    tma.store_wait(0)
    end_beside(made)
