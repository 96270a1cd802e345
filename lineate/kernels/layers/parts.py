"""The parts that the cached entries of a row are cut into, and the launch that joins them.

    o = sum_p e^{m_p} a_p / sum_p e^{m_p} l_p

A program reads one part of a row (cached.py, latent.py) and leaves its sum a_p, its highest score m_p (to base 2) and
its total l_p. The number of parts depends on the number of programs that there would be without them, but no launch
depends on the lengths, so that one CUDA graph serves all of them; a program whose part begins after the row's end
returns at once. How a row is cut depends on its length and on the number of parts alone, and in a batch-invariant step
the number of parts does not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, multiprocessors, next_power, overlap_options, start
from lineate.kernels.layers.ops import strides_of
from lineate.kernels.layers.rows import sigmoid
from lineate.torch_ops.invariance import is_batch_invariant

MOST_PARTS = 128
FEWEST_PARTS = 2
MOST_INVARIANT = 2**18
"""In a batch-invariant step, the most sums of a row (1 MiB): all parts have memory, also those of short rows."""
JOINED = 4096
"""How many sums a program joins: channels of a query times parts; at least 128 channels."""


@triton.jit
def part_size(length, parts, BN: tl.constexpr):
    """Return how many entries a part has: whole tiles."""
    return tl.cdiv(tl.cdiv(length, BN), parts) * BN


@triton.jit(do_not_specialize=["t", "capacity", "gate_row", "gate_token"])
def join_parts(
    sums, peaks, totals, lengths, gate, output, t, capacity, gate_row, gate_token,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the parts of BD channels of one query into output `row t KV*GROUP SIZE`, times the gate's sigmoid if any.

    sums are `row KV PARTS t*GROUP SIZE`, peaks and totals without SIZE.
    """
    BLOCKS: tl.constexpr = (SIZE + BD - 1) // BD
    block = tl.program_id(0) % BLOCKS
    query = tl.program_id(0) // BLOCKS % (t * GROUP)
    head = (tl.program_id(0) // BLOCKS // (t * GROUP) % KV).to(tl.int64)
    row = (tl.program_id(0) // BLOCKS // (t * GROUP) // KV).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.minimum(tl.load(lengths + row), capacity).to(tl.int32)
    part = tl.arange(0, PARTS)
    read = part * part_size(length, PARTS, BN) < length
    d = block * BD + tl.arange(0, BD)
    at = ((row * KV + head) * PARTS + part) * (t * GROUP) + query
    peak = tl.load(peaks + at, mask=read, other=float("-inf"))
    total = tl.load(totals + at, mask=read, other=0.0)
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    own = tl.load(sums + at[:, None] * SIZE + d[None, :], mask=read[:, None] & (d < SIZE)[None, :], other=0.0)
    y = tl.sum(own * weight[:, None], 0) / tl.sum(total * weight, 0)
    token = query // GROUP
    own_head = head * GROUP + query % GROUP
    if gate is not None:
        gate += row * gate_row + token * gate_token + own_head * SIZE
        y *= sigmoid(tl.load(gate + d, mask=d < SIZE, other=0.0).to(tl.float32))
    to = ((row * t + token) * (KV * GROUP) + own_head) * SIZE + d
    tl.store(output + to, y, mask=d < SIZE)


def parts_of(device: torch.device, programs: int, together: int = 1) -> int:
    """Return how many parts rows are cut into: enough programs for the device.

    Args:
        device: The device.
        programs: How many programs there would be with one part.
        together: Programs that a multiprocessor runs at once.
    """
    wanted = next_power(ceil_div(multiprocessors(device) * together, programs) + 1) // 2
    return min(MOST_PARTS, max(FEWEST_PARTS, wanted))


def parts_of_rows(device: torch.device, rows: int, programs: int, together: int, each: int) -> int:
    """Return how many parts this number of rows is cut into; in a batch-invariant step, the parts of a single row.

    Args:
        device: The device.
        rows: The number of rows.
        programs: How many programs a row would have with one part.
        together: Programs that a multiprocessor runs at once.
        each: The sums of a part: the queries of a program times their channels.
    """
    if not is_batch_invariant():
        return parts_of(device, rows * programs, together)
    room = max(FEWEST_PARTS, MOST_INVARIANT // (programs * each))
    return min(parts_of(device, programs, together), next_power(room + 1) // 2)


def join(
    sums: Tensor, peaks: Tensor, totals: Tensor, lengths: Tensor, output: Tensor, capacity: int, entries: int,
    gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Join the parts of all rows into the output.

    Args:
        sums: `rows kv parts t*group size`, float32.
        peaks: `rows kv parts t*group`, float32.
        totals: The same.
        lengths: The number of entries of each row, int64 `rows`.
        output: `rows t kv*group size`.
        capacity: The most entries of a row.
        entries: Of a tile.
        gate: `rows t kv*group*size`, whose sigmoid multiplies the result; None: there is none.
    """
    rows, kv, parts, queries, size = sums.shape
    t, heads = output.shape[1:3]
    joined = min(max(JOINED // parts, 128), max(16, next_power(size)))
    gate_strides = (0, 0) if gate is None else strides_of(gate, 2)
    start(join_parts, (rows * kv * queries * ceil_div(size, joined),))(
        sums, peaks, totals, lengths, gate, output, t, capacity, *gate_strides,
        KV=kv, GROUP=heads // kv, SIZE=size, BN=entries, BD=joined, PARTS=parts, num_warps=4,
        **overlap_options(output.device),
    )  # fmt: skip
