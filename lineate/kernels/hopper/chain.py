"""The chain over the segments of a long walk (portable/split.py), in Gluon.

A step of the chain is S <- A S + B with the map A, B of a segment. A and S are divided into the part that tf32 can
represent and the rest, and three products of these are computed, which is nearly as exact as float32 (an infinite
number becomes NaN). Maps are fetched ahead.
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

from lineate.kernels.hopper.parts import barrier, fresh, link, next_buffer


@gluon.jit
def _divide(x):
    """Return the part of x that tf32 can represent, and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit(do_not_specialize=["segments", "apart", "cuts"])
def chain(
    squares, maps, inner, first_cuts, cut_texts, segments, apart, cuts,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, NEAR: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, LINK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute the chain of split.py. squares: a descriptor of maps, [k, k]."""
    BLOCKS: gl.constexpr = V // BV
    first = gl.program_id(0) % BLOCKS * BV
    head = gl.program_id(0) // BLOCKS % HV
    part = gl.program_id(0) // BLOCKS // HV
    if PACKED:
        beside = gl.arange(0, NEAR, gl.BlockedLayout([1], [32], [num_warps], [0]))
        near = part * apart + beside
        text = gl.load(cut_texts + near, mask=(beside < apart) & (near < cuts), other=-1, cache_modifier=".cg")
        begins = gl.load(first_cuts + text, mask=text >= 0, other=-1, cache_modifier=".cg") == near
        text = gl.max(gl.where(begins, text, -1), 0)
        if text < 0:
            link(LINK)
            return
        cut = fresh(first_cuts + text, True)
        cuts = fresh(first_cuts + text + 1, True) - cut
    else:
        cuts = segments - 1
        cut = part * cuts
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BV, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 1)
    kept = gl.allocate_shared_memory(gl.float32, [STAGES, K, K], squares.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    high = gl.allocate_shared_memory(gl.float32, [2, BV, K], squares.layout)  # of S, transposed for tf32
    low = gl.allocate_shared_memory(gl.float32, [2, BV, K], squares.layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    barrier()
    link(LINK)  # (find_slots, which finds the cuts, is at least two launches before this one)

    entry = cut * HV + head
    for s in gl.static_range(STAGES):
        there = s + 1 < cuts
        mbarrier.expect(ready.index(s), 4 * K * K, pred=there)
        tma.async_copy_global_to_shared(
            squares, [(entry + (s + 1) * HV) * K, V], ready.index(s), kept.index(s), pred=there
        )
    i = gl.arange(0, K, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, BV, gl.SliceLayout(0, acc))[None, :]
    given = maps + i * (V + K) + first + j
    left_at = inner + i * V + first + j
    S = gl.load(given + entry.to(gl.int64) * (K * (V + K)))
    gl.store(left_at + entry.to(gl.int64) * (K * V), S)
    # B of the next map; the mask is empty after the last one.
    B = gl.load(given + (entry + HV).to(gl.int64) * (K * (V + K)), mask=i < (cuts - 1) * K, other=0.0)
    stage = 0
    phase = 0
    for n in range(1, cuts):
        entry += HV
        m = n % 2
        next_B = gl.load(given + (entry + HV).to(gl.int64) * (K * (V + K)), mask=i < (cuts - 1 - n) * K, other=0.0)
        S_high, S_low = _divide(S)
        high.index(m).store(gl.permute(S_high, [1, 0]))
        low.index(m).store(gl.permute(S_low, [1, 0]))
        mbarrier.wait(ready.index(stage), phase)
        A_high, A_low = _divide(kept.index(stage).load(left))
        fence_async_shared()
        barrier()  # S is stored, and A is read, by all warps
        there = n + STAGES < cuts
        mbarrier.expect(ready.index(stage), 4 * K * K, pred=there)
        tma.async_copy_global_to_shared(
            squares, [(entry + STAGES * HV) * K, V], ready.index(stage), kept.index(stage), pred=there
        )
        S = warpgroup_mma(A_low, high.index(m).permute([1, 0]), B, is_async=True)
        S = warpgroup_mma(A_high, low.index(m).permute([1, 0]), S, is_async=True)
        S = warpgroup_mma(A_high, high.index(m).permute([1, 0]), S, is_async=True)
        S = warpgroup_mma_wait(0, deps=(S, A_high, A_low))[0]
        B = next_B
        gl.store(left_at + entry.to(gl.int64) * (K * V), S)
        stage, phase = next_buffer(stage, phase, STAGES)
