"""Decoding with the rules of the general row: n writes a token in one launch, the state read once and updated in place.

    S' = Diag(exp(log_decay_t)) S_{t-1}                     forget
    h_j = S'^T e_j + sum_{i<j} (k_i . e_j) r_i              compare: what S' and the writes before this one answer
    r_j = beta_j (v_j - h_j),   write v - h,   or v
    o_t = scale (S'^T q_t + sum_j (k_j . q_t) r_j - (d . q_t) h)
    S_t = S' + sum_j k_j r_j^T - d h^T                      write

    gated_delta_rule_2      one write; e = erase * k, and no d
    gated_delta_product     n writes; e = k, and no d
    diagonal_plus_low_rank  one write; e = probe, d = direction

These lines are the equation of rule.py with each S_j written as S' plus the products of the writes before: so all reads
are reads of S', which do not wait for each other, and the state changes once a token. Rows, slots, packed sequences,
raw gates and rounding are those of decode.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.call import Inputs, Options, Slots
from lineate.kernels import DECODE_GENERAL_READS
from lineate.kernels.launching import ceil_div, next_power, overlap_options, start
from lineate.kernels.portable.decode import (
    last_contiguous,
    load_scalar,
    load_vector,
    parameters_of_head,
    slots_of_row,
    store_vector,
    store_without_state,
    tiling,
    tokens_of_row,
    unit_vector,
)  # fmt: skip
from lineate.kernels.portable.gates import decay_of_gate
from lineate.kernels.portable.rounding import round_nearest, round_stochastic, seed_of_head
from lineate.kernels.tape import launch
from lineate.torch_ops.invariance import is_batch_invariant

_TENSORS = ("q", "k", "v", "decay", "beta", "compared", "write", "direction")
_PLAIN = [
    *("t", "hv", "n_slots", "slots_width"),
    *(f"{x}_{dim}" for x in _TENSORS for dim in ("row", "token", "head")),
    *("k_write", "v_write", "beta_write", "z_row", "state_slot", "state_head"),
]


@triton.jit(do_not_specialize=_PLAIN)
def decode_writes(
    q, k, v, log_decay, beta, compared, write, direction,
    A_log, dt_bias, state, slots, start_slots, seeds, cu_seqlens, weight, z, output,
    t, hv, n_slots, slots_width, scale, beta_scale, lower_bound, eps,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    decay_row, decay_token, decay_head, beta_row, beta_token, beta_head,
    compared_row, compared_token, compared_head, write_row, write_token, write_head,
    direction_row, direction_token, direction_head, k_write, v_write, beta_write, z_row, state_slot, state_head,
    N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, DECAY_UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr, TIMES_KEY: tl.constexpr,
    NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr, LOGITS: tl.constexpr, EACH_TOKEN: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run all writes of the tokens of one row, head and block of value columns.

    `compared` is e, or, with TIMES_KEY, its factor of k; with LOGITS, that factor and `write` are raw. With the weight
    of a norm, the output of the one token is norm(o) act(z). Strides are in units of UNIT elements, those of log_decay
    of DECAY_UNIT, those of beta and z of 1, and those of the state of STATE_UNIT.
    """
    EVEN_K: tl.constexpr = K == BK
    EVEN_V: tl.constexpr = V == BLOCKS * BV
    program = tl.program_id(0)
    block = program % BLOCKS
    head = (program // BLOCKS) % hv
    row = (program // BLOCKS // hv).to(tl.int64)
    x = tl.arange(0, BK)
    y = block * BV + tl.arange(0, BV)
    has_x = x < K
    has_y = y < V
    has_xy = has_x[:, None] & has_y[None, :]

    batch, first, n = tokens_of_row(cu_seqlens, row, t)
    output += ((batch * t + first) * hv + head) * V
    output_token = hv * V
    begin, end = slots_of_row(slots, start_slots, row, EACH_TOKEN)
    if slots is not None:  # noqa: SIM102 (known when compiling; the next is not)
        if (begin < 0) | (begin >= n_slots):
            store_without_state(output, y, has_y, begin, n, output_token, BV, EVEN_V, OVERLAP)
            return
    tile = head.to(tl.int64) * (tl.cast(state_head, tl.int64) * STATE_UNIT) + x[:, None] * V + y[None, :]
    slot_stride = tl.cast(state_slot, tl.int64) * STATE_UNIT
    S = load_vector(state + begin * slot_stride + tile, has_xy, EVEN_K and EVEN_V)
    if weight is not None:
        w_norm = load_vector(weight + y, has_y, EVEN_V)
    if OVERLAP:  # no recent launch writes the state, slots or parameters
        gdc_launch_dependents()
        gdc_wait()

    key_head = (head // GROUP).to(tl.int64)
    value_head = head.to(tl.int64)
    q += (batch * q_row + first * q_token + key_head * q_head) * UNIT
    k += (batch * k_row + first * k_token + key_head * k_head) * UNIT
    v += (batch * v_row + first * v_token + value_head * v_head) * UNIT
    q_token = tl.cast(q_token, tl.int64) * UNIT
    k_token = tl.cast(k_token, tl.int64) * UNIT
    v_token = tl.cast(v_token, tl.int64) * UNIT
    k_write = tl.cast(k_write, tl.int64) * UNIT
    v_write = tl.cast(v_write, tl.int64) * UNIT
    if compared is not None:
        compared += (batch * compared_row + first * compared_token + value_head * compared_head) * UNIT
        compared_token = tl.cast(compared_token, tl.int64) * UNIT
    if write is not None:
        write += (batch * write_row + first * write_token + value_head * write_head) * UNIT
        write_token = tl.cast(write_token, tl.int64) * UNIT
    if direction is not None:
        direction += (batch * direction_row + first * direction_token + value_head * direction_head) * UNIT
        direction_token = tl.cast(direction_token, tl.int64) * UNIT
    if log_decay is not None:
        log_decay += (batch * decay_row + first * decay_token + value_head * decay_head) * DECAY_UNIT
        decay_token = tl.cast(decay_token, tl.int64) * DECAY_UNIT
        if not DECAY_PER_CHANNEL:
            next_log_decay = load_scalar(log_decay, n > 0)
        if RAW:
            speed, bias = parameters_of_head(A_log, dt_bias, head, x, has_x, K, EVEN_K, BIAS_PER_CHANNEL)
    if beta is not None:
        w = tl.arange(0, BN)
        beta += batch * beta_row + first * beta_token + value_head * beta_head + w * beta_write
        next_beta = load_scalar(beta, (w < N) & (n > 0))  # those of all writes
    if weight is not None:
        z_t = load_vector(z + row * z_row + value_head * V + y, has_y, EVEN_V)
    if EACH_TOKEN:
        slots += row * slots_width
    if seeds is not None:
        seed = tl.load(seeds + row).to(tl.int64)

    # Two stages, and numbers per head loaded ahead by hand, for the reason given in decode.py.
    for i in tl.range(n, num_stages=2):
        q_t = load_vector(q + x, has_x, EVEN_K)
        if NORMALIZE:
            q_t = unit_vector(q_t)
        q_t *= scale
        # forget
        if log_decay is not None:
            if DECAY_PER_CHANNEL:
                log_decay_t = load_vector(log_decay + x, has_x, EVEN_K)
                log_decay += decay_token
            else:
                log_decay_t = next_log_decay
                log_decay += decay_token
                next_log_decay = load_scalar(log_decay, i + 1 < n)
            if RAW:
                log_decay_t = decay_of_gate(log_decay_t + bias, speed, lower_bound)
            decay = tl.exp(log_decay_t)
            if DECAY_PER_CHANNEL:
                S *= decay[:, None]
            else:
                S *= decay
        if beta is not None:
            beta_t = next_beta
            beta += beta_token
            next_beta = load_scalar(beta, (w < N) & (i + 1 < n))
            if RAW_BETA:
                beta_t = beta_scale / (1.0 + tl.exp(-beta_t))
        # compare, read
        o_t = tl.sum(S * q_t[:, None], 0)
        keys = ()
        errors = ()
        for j in tl.static_range(N):
            k_j = load_vector(k + j * k_write + x, has_x, EVEN_K)
            r_j = load_vector(v + j * v_write + y, has_y, EVEN_V)
            if NORMALIZE:
                k_j = unit_vector(k_j)
            e_j = k_j
            if compared is not None:
                e_j = load_vector(compared + x, has_x, EVEN_K)
                if LOGITS:
                    e_j = beta_scale * tl.sigmoid(e_j)
                if TIMES_KEY:
                    e_j *= k_j
            if write is not None:
                write_t = load_vector(write + y, has_y, EVEN_V)
                if LOGITS:
                    write_t = tl.sigmoid(write_t)
                r_j *= write_t
            held = tl.sum(S * e_j[:, None], 0)
            for before in tl.static_range(j):
                held += tl.sum(keys[before] * e_j, 0) * errors[before]
            if direction is None:
                r_j -= held
            if beta is not None:
                r_j *= tl.sum(tl.where(w == j, beta_t, 0.0), 0)
            o_t += tl.sum(k_j * q_t, 0) * r_j
            keys += (k_j,)
            errors += (r_j,)
        if direction is not None:
            d_t = load_vector(direction + x, has_x, EVEN_K)
            direction += direction_token
            o_t -= tl.sum(d_t * q_t, 0) * held
            S -= d_t[:, None] * held[None, :]
        # write
        for j in tl.static_range(N):
            S += keys[j][:, None] * errors[j][None, :]
        if weight is not None:
            o_t = o_t.to(output.dtype.element_ty).to(tl.float32)  # rounded as between two launches
            o_t *= tl.rsqrt(tl.sum(o_t * o_t, 0) * (1.0 / V) + eps) * w_norm * tl.sigmoid(z_t)
            if SILU:
                o_t *= z_t
        store_vector(output + y, o_t, has_y, EVEN_V)
        if NARROW:  # after every token, as in decode.py
            if seeds is None:
                S = round_nearest(S, INTERPRETED)
            else:
                S = round_stochastic(S, seed_of_head(seed + i, head), x, y, V)
        if EACH_TOKEN:  # noqa: SIM102 (known when compiling; the next is not)
            if i < slots_width:
                end = tl.load(slots + i).to(tl.int64)
                if (end >= 0) & (end < n_slots):
                    store_vector(state + end * slot_stride + tile, S, has_xy, EVEN_K and EVEN_V)
        q += q_token
        k += k_token
        v += v_token
        if compared is not None:
            compared += compared_token
        if write is not None:
            write += write_token
        output += output_token
    if not EACH_TOKEN:  # noqa: SIM102
        if (end >= 0) & (end < n_slots):
            store_vector(state + end * slot_stride + tile, S, has_xy, EVEN_K and EVEN_V)


class GatedNorm(NamedTuple):
    """The norm and the output gate of a mixer: norm(o) act(z).

    Args:
        z: The gate before its activation, `rows 1 hv*v`.
        weight: Of the norm over the values of a head, `v`.
        eps: Added to the mean square.
        silu: Whether the activation is silu; otherwise it is the sigmoid.
    """

    z: Tensor
    weight: Tensor
    eps: float
    silu: bool


def decode_general(
    inputs: Inputs,
    where: Slots,
    options: Options,
    *,
    settled: bool = False,
    logits: bool = False,
    norm: GatedNorm | None = None,
) -> Tensor:
    """Return the output `b t hv v`; one launch also updates inputs.state in place. lineate.decode checks the arguments.

    Args:
        inputs: The call.
        where: Its slots.
        options: Its options.
        settled: Whether no recent launch writes the state, so that it may be read while they run
            (launching.overlapping).
        logits: Whether erase and write are the raw logits of beta_scale sigmoid(erase) and sigmoid(write).
        norm: What follows the rule in a mixer, for one token a row; a program then has all values of a head.
    """
    inputs.refuse_unread(DECODE_GENERAL_READS, "the decoding kernel of the general row")
    several = options.rule.writes
    inputs = inputs.map(last_contiguous, ("q", "k", "v", "erase", "write", "probe", "direction"))
    log_decay, beta, state, write = inputs.log_decay, inputs.beta, inputs.state, inputs.write
    per_channel = log_decay is not None and log_decay.dim() == 4
    if log_decay is not None and per_channel:
        log_decay = last_contiguous(log_decay)
    compared = inputs.probe if inputs.erase is None else inputs.erase
    assert state is not None
    q, k, v, direction = inputs.q, inputs.k, inputs.v, inputs.direction
    b, t, h, key_dim = q.shape
    hv, value_dim = v.shape[-2:]
    writes = k.shape[2] if several else 1
    slots, start_slots, seeds = (None if x is None else x.contiguous() for x in where)
    cu_seqlens = None if inputs.cu_seqlens is None else inputs.cu_seqlens.contiguous()
    each_token = slots is not None and slots.dim() == 2

    vectors = [_strides(q), *(_strides(x, several) for x in (k, v)), *map(_strides, (compared, write, direction))]
    decays, betas, state_strides = _strides(log_decay), _strides(beta, several), _strides(state)
    wide = [*sum(vectors, ()), *(decays if per_channel else ())]
    invariant = is_batch_invariant()  # a single row has no stride, so strides must not choose the kernel
    unit = 8 if not invariant and all(s % 8 == 0 for s in (key_dim, value_dim, *wide)) else 1
    decay_unit = unit if per_channel else 1
    aligned = 16 // state.element_size()
    state_unit = aligned if all(s % aligned == 0 for s in (key_dim * value_dim, *state_strides)) else 1
    (_, k_write, v_write), beta_write = (s[3] for s in vectors[:3]), betas[3]
    columns, warps = tiling(key_dim, value_dim)
    z, weight, eps, silu = (None, None, 0.0, False) if norm is None else norm
    if norm is not None:
        assert t == 1 and cu_seqlens is None
        columns = next_power(value_dim)
        warps = max(1, min(8, next_power(key_dim) * columns // 2048))
    blocks = ceil_div(value_dim, columns)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    output = torch.empty(b, t, hv, value_dim, dtype=v.dtype, device=v.device)
    parameters = inputs.A_log, inputs.dt_bias
    A_log, dt_bias = (None if x is None or not options.raw_decay else x.contiguous() for x in parameters)

    def run() -> None:
        start(decode_writes, (rows * hv * blocks,))(
            q, k, v, log_decay, beta, compared, write, direction,
            A_log, dt_bias, state, slots, start_slots, seeds, cu_seqlens, weight, z, output,
            t, hv, state.shape[0], slots.shape[1] if slots is not None and each_token else 0,
            options.scale, options.beta_scale, options.lower_bound, eps,
            *(s // unit for strides in vectors[:3] for s in strides[:3]),
            *(s // decay_unit for s in decays[:3]), *betas[:3],
            *(s // unit for strides in vectors[3:] for s in strides[:3]),
            k_write // unit, v_write // unit, beta_write, 0 if z is None else z.stride(0),
            *(s // state_unit for s in state_strides[:2]),
            N=writes, K=key_dim, V=value_dim, BN=next_power(writes), BK=next_power(key_dim), BV=columns, BLOCKS=blocks,
            GROUP=hv // h, UNIT=unit, DECAY_UNIT=decay_unit, STATE_UNIT=state_unit, DECAY_PER_CHANNEL=per_channel,
            BIAS_PER_CHANNEL=dt_bias is not None and dt_bias.dim() == 2, TIMES_KEY=inputs.erase is not None,
            NORMALIZE=options.normalize_qk, RAW=options.raw_decay, RAW_BETA=options.raw_beta, LOGITS=logits,
            EACH_TOKEN=each_token, SILU=silu, NARROW=state.dtype is torch.bfloat16, INTERPRETED=q.device.type == "cpu",
            num_warps=warps, num_stages=1, **(overlap_options(q.device) if settled else {"OVERLAP": False}),
        )  # fmt: skip

    given = (
        q, k, v, log_decay, beta, compared, write, direction,
        A_log, dt_bias, state, slots, start_slots, seeds, cu_seqlens, weight, z,
    )  # fmt: skip
    chosen = options, inputs.erase is not None, settled, logits, eps, silu, invariant
    launch("decode_general", given, (output,), chosen, run)
    return output


def _strides(x: Tensor | None, several: bool = False) -> tuple[int, int, int, int]:
    """Return the strides of rows, tokens, heads and writes, with 0 where there is one; several: x is `b t n ...`."""
    if x is None:
        return 0, 0, 0, 0
    row, token, *rest = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return (row, token, rest[1], rest[0]) if several else (row, token, rest[0], 0)
