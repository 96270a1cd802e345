"""Launches of decoding with a ring (decode_ring.py): a token, a fold of the rings, and the counters of tokens."""

import torch
from torch import Tensor

from lineate.call import Inputs, Options, RingTensors, Slots
from lineate.kernels import RING_READS
from lineate.kernels.launching import ceil_div, next_power, overlap_options, start
from lineate.kernels.portable.decode import laid_out, state_units
from lineate.kernels.portable.decode_ring import (
    NO_DECAY,
    PER_CHANNEL,
    PER_HEAD,
    count_tokens,
    decode_in_ring,
    fold_ring,
)
from lineate.kernels.tape import launch

PART = 32
"""The value columns that a program folds at a time."""


def tiling(key_dim: int, state: torch.dtype, value_dim: int) -> tuple[int, int]:
    """Return the value columns and warps of a program; they do not depend on the batch, so a row's bits do not either.

    64 columns, since every program of a head reads the keys of the ring and computes their scores; as many warps as let
    a thread hold 256 bytes of the state.
    """
    columns = min(64, next_power(value_dim))
    return columns, max(1, min(8, next_power(key_dim) * columns * state.itemsize // 8192))


def _registers(state: Tensor) -> dict[str, int]:
    """Return the options that limit the registers of a thread, so that 12 warps of a multiprocessor read at a time.

    168 registers are what a thread needs with 256 bytes of a bfloat16 state; without the limit ptxas takes more.
    """
    if state.dtype is not torch.bfloat16 or not state.is_cuda or torch.version.hip is not None:
        return {}
    return {"maxnreg": 168}


def decode_ring(
    inputs: Inputs,
    where: Slots,
    ring: RingTensors,
    options: Options,
    columns: int | None = None,
    warps: int | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """Return the output `b 1 hv v` of one token a row; one launch also updates the ring, or inputs.state in place.

    The counters of the ring are unchanged. columns and warps replace those of `tiling`, for measurements.

    Args:
        inputs: The token and the state, checked by lineate.decode.
        where: Slots and seeds.
        ring: The ring of the state's slots.
        options: The options of the call.
        columns: The value columns of a program.
        warps: The warps of a program.
        settled: Whether no recent launch writes the state, the ring or its counters (launching.overlapping).
    """
    inputs.refuse_unread(RING_READS, "the kernel of decoding with a ring")
    q, k, v, log_decay, beta = laid_out(inputs)
    state = inputs.state
    assert state is not None
    b, _, h, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    strides = (*_strides(q), *_strides(k), *_strides(v))
    unit = 8 if all(s % 8 == 0 for s in (key_dim, value_dim, *strides)) else 1
    state_strides, state_unit = state_units(state)
    own_columns, own_warps = tiling(key_dim, state.dtype, value_dim)
    columns = own_columns if columns is None else columns
    blocks = ceil_div(value_dim, columns)
    output = torch.empty(b, 1, hv, value_dim, dtype=v.dtype, device=v.device)
    parameters = (inputs.A_log, inputs.dt_bias) if options.raw_decay else (None, None)
    A_log, dt_bias = (None if x is None else x.contiguous() for x in parameters)
    slots, seeds = (None if x is None else x.contiguous() for x in (where.slots, where.seeds))
    n_slots = min(state.shape[0], ring.keys.shape[0])

    def run() -> None:
        start(decode_in_ring, (b * hv * blocks,))(
            q, k, v, log_decay, beta, A_log, dt_bias, state, slots, seeds, ring.tokens, ring.folded, ring.keys,
            ring.writes, ring.log_decay, output,
            hv, n_slots, options.scale, options.beta_scale, options.lower_bound,
            *(s // unit for s in strides), *_strides(log_decay), *_strides(beta),
            *(s // state_unit for s in state_strides),
            K=key_dim, V=value_dim, BK=next_power(key_dim), BV=columns, PART=min(columns, PART), BLOCKS=blocks,
            GROUP=hv // h, UNIT=unit, STATE_UNIT=state_unit, EVERY=ring.every, DECAY=_decay(ring),
            BIAS_PER_CHANNEL=dt_bias is not None and dt_bias.dim() == 2,
            BETA_PER_CHANNEL=beta is not None and beta.dim() == 4,
            NORMALIZE=options.normalize_qk, RAW=options.raw_decay, RAW_BETA=options.raw_beta,
            NARROW=state.dtype is torch.bfloat16, INTERPRETED=q.device.type == "cpu",
            num_warps=own_warps if warps is None else warps, num_stages=1, **_registers(state),
            **(overlap_options(q.device) if settled else {"OVERLAP": False}),
        )  # fmt: skip

    given = q, k, v, log_decay, beta, A_log, dt_bias, state, slots, seeds, *ring.tensors
    launch("decode ring", given, (output,), (options, ring.every, columns, warps, settled), run)
    return output


def fold(state: Tensor, where: Slots, ring: RingTensors, rows: int, raw: Options) -> None:
    """Write the states of the rows with all entries of their rings; the counters of the ring are unchanged.

    Args:
        state: The pool of states.
        where: The slots of the rows, None if row i has slot i; and seeds.
        ring: The ring of the state's slots.
        rows: The number of rows.
        raw: Options whose raw_decay and lower_bound say how the log_decay of entries is made.
    """
    _, hv, key_dim, value_dim = state.shape
    columns = min(32, next_power(value_dim))
    blocks = ceil_div(value_dim, columns)
    state_strides, state_unit = state_units(state)
    slots, seeds = (None if x is None else x.contiguous() for x in (where.slots, where.seeds))
    A_log, dt_bias = (None if x is None or not raw.raw_decay else x.contiguous() for x in (ring.A_log, ring.dt_bias))

    def run() -> None:
        start(fold_ring, (rows * hv * blocks,))(
            state, slots, seeds, ring.tokens, ring.folded, ring.keys, ring.writes, ring.log_decay, A_log, dt_bias,
            hv, min(state.shape[0], ring.keys.shape[0]), raw.lower_bound, *(s // state_unit for s in state_strides),
            K=key_dim, V=value_dim, BK=next_power(key_dim), BV=columns, BLOCKS=blocks, GROUP=hv // ring.keys.shape[1],
            STATE_UNIT=state_unit, EVERY=ring.every, DECAY=_decay(ring),
            BIAS_PER_CHANNEL=dt_bias is not None and dt_bias.dim() == 2, RAW=raw.raw_decay,
            NARROW=state.dtype is torch.bfloat16, INTERPRETED=state.device.type == "cpu",
            num_warps=max(1, next_power(key_dim) // 64), num_stages=1,
        )  # fmt: skip

    given = state, slots, seeds, A_log, dt_bias, *ring.tensors
    launch("fold ring", given, (), (raw, ring.every, rows), run)


def count(ring: RingTensors, slots: Tensor, n_slots: int) -> None:
    """Add 1 to the counters of these slots, those in the pool."""
    rows, block = len(slots), 256

    def run() -> None:
        start(count_tokens, (ceil_div(rows, block),))(ring.tokens, slots, rows, n_slots, BLOCK=block)

    launch("count ring", (ring.tokens, slots), (), (n_slots,), run)


def _decay(ring: RingTensors) -> int:
    """Return DECAY of a ring's entries."""
    if ring.log_decay is None:
        return NO_DECAY.value
    return PER_CHANNEL.value if ring.log_decay.dim() == 4 else PER_HEAD.value


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of rows and heads of `b 1 heads ...`, with 0 for a dimension of size one."""
    if x is None:
        return 0, 0
    row, head = ((0 if x.shape[dim] == 1 else x.stride(dim)) for dim in (0, 2))
    return row, head
