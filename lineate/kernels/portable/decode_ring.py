"""Decoding that reads the state at every token and writes it at every n-th: one launch a token.

S is the state as it was stored, and a ring has the m < n tokens since: keys, writes and log_decay (forms/ring.py).

    S'_t^T x = (e^{G_t} S)^T x + sum_i ((e^{G_t - G_i} k_i) . x) r_i        for x = k_t and x = q_t, in one pass over S
    r_t = beta_t (v_t - S'_t^T k_t)   or   v_t
    o_t = scale (S'_t^T q_t + (k_t . q_t) r_t)
    m + 1 < n     the ring gets k_t, r_t and log_decay_t
    m + 1 = n     S <- e^{G_t} S + sum_{i <= t} (e^{G_t - G_i} k_i) r_i^T, and the ring is empty

Entries are read from the newest to the oldest, so that G_t - G_i is a running sum of log_decay: every exponent is at
most 0, and a token that forgets everything is exact. A key is kept as it came; its l2-normalisation is in r_i. A
log_decay per head is kept in float32, the input of one per channel as it came, and its gate is computed again.

Bytes of a head with k = v = 128, a bfloat16 state, bfloat16 inputs and n = 8, averages over n tokens:

    state       32,768 read, 32,768 / 8 = 4,096 written
    entries     3.5 (256 + 256 + 4) = 1,806 read, 7/8 of 516 = 452 written; per channel 3.5 * 768 = 2,688 and 672
    q k v o     1,024; and 256 for a gate per channel
    together    40.1 KB per head, 41.5 KB per channel, next to 65.5 KB for reading and writing the state: .61 and .63

At 4.28 TB/s, the rate of a copy on an H200, 256 rows of 32 heads would take 77 us per head and 79 us per channel. They
took 163 and 138 us, 182 and 222 us without a ring, and a copy of their states 127 us.

A float32 state has float32 writes: .60 and .61 of 131 KB. The keys of a ring are shared by the value heads
of a key head, and the programs of a head find them, and the state that they fold, in the L2 cache.

A program has BV value columns of one head, as in decode.py, but keeps the state in its own dtype: only a fold needs it
in float32. The number of entries comes from two counters of each slot, which no launch of a step changes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.portable.decode import load_vector, parameters_of_head, store_vector, store_without_state
from lineate.kernels.portable.gates import decay_of_gate
from lineate.kernels.portable.rounding import round_nearest, round_stochastic, seed_of_head

NO_DECAY, PER_HEAD, PER_CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_tile(pointers, mask, EVEN: tl.constexpr):
    """Load in the dtype of the tensor, with 0 outside; nothing is masked where the tile divides the tensor."""
    if EVEN:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=mask, other=0.0)
    return found


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sum_two(a, b, axis: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return both sums along an axis by one reduction, since each one waits for all warps."""
    if INTERPRETED:
        found = tl.sum(a, axis), tl.sum(b, axis)
    else:
        found = tl.reduce((a, b), axis, _add_two)
    return found


@triton.jit
def products(q, k, INTERPRETED: tl.constexpr):
    """Return q . q, k . k and q . k."""
    if INTERPRETED:
        found = tl.sum(q * q, 0), tl.sum(k * k, 0), tl.sum(q * k, 0)
    else:
        found = tl.reduce((q * q, k * k, q * k), 0, _add_three)
    return found


@triton.jit
def entries_of_slot(tokens, folded, slot, EVERY: tl.constexpr):
    """Return m, int32: the entries of a slot's ring, 0 .. EVERY - 1 whatever its counters are."""
    m = ((tl.load(tokens + slot).to(tl.int64) - tl.load(folded + slot).to(tl.int64)) % EVERY).to(tl.int32)
    return tl.where(m < 0, m + EVERY, m)


@triton.jit
def activated(gate, bias, speed, lower_bound, RAW: tl.constexpr):
    """Return log_decay in float32 of a number that a ring or a call has for it."""
    log_decay = gate.to(tl.float32)
    if RAW:
        log_decay = decay_of_gate(log_decay + bias, speed, lower_bound)
    return log_decay


@triton.jit
def with_entries(
    S, forgotten, m, keys, writes, decays, bias, speed, lower_bound, x, y, has_x, has_y,
    K: tl.constexpr, V: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
    DECAY: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Return S + sum_i (e^{G_t - G_i} k_i) r_i^T; forgotten is G_t - G_m, what is lost after the newest entry."""
    for j in range(m):
        i = m - 1 - j
        k_i = load_vector(keys + i * K + x, has_x, EVEN_K)
        r_i = load_vector(writes + i * V + y, has_y, EVEN_V)
        if DECAY != NO_DECAY:
            k_i *= tl.exp(forgotten)
            if DECAY == PER_CHANNEL:
                forgotten += activated(load_vector(decays + i * K + x, has_x, EVEN_K), bias, speed, lower_bound, RAW)
            else:
                forgotten += tl.load(decays + i)
        S += k_i[:, None] * r_i[None, :]
    return S


@triton.jit
def rounded(S, seeds, row, head, x, y, V: tl.constexpr, NARROW: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return a state in float32 rounded to the dtype in which it is kept."""
    if NARROW:
        if seeds is None:
            S = round_nearest(S, INTERPRETED)
        else:
            S = round_stochastic(S, seed_of_head(tl.load(seeds + row).to(tl.int64), head), x, y, V)
    return S


# One compilation serves every batch size and stride: triton does not specialise these on 1 or multiples of 16.
_PLAIN = ["hv", "n_slots", "state_slot", "state_head"]
_PLAIN_STRIDES = [f"{x}_{dim}" for x in ("q", "k", "v", "decay", "beta") for dim in ("row", "head")]


@triton.jit(do_not_specialize=[*_PLAIN, *_PLAIN_STRIDES])
def decode_in_ring(
    q, k, v, log_decay, beta, A_log, dt_bias, state, slots, seeds, tokens, folded, keys, writes, decays, output,
    hv, n_slots, scale, beta_scale, lower_bound,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head, state_slot, state_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, EVERY: tl.constexpr,
    DECAY: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr, BETA_PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr,
    NARROW: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Read one token of one row, for one head and block of value columns, and append it to the ring or fold the ring.

    Strides of q, k, v are in units of UNIT elements, those of the state in units of STATE_UNIT. The tensors of the ring
    have no gaps: keys `slots h EVERY K`, writes `slots hv EVERY V`, decays `slots hv EVERY` or `slots hv EVERY K`.
    """
    EVEN_K: tl.constexpr = K == BK
    EVEN_V: tl.constexpr = V == BLOCKS * BV
    program = tl.program_id(0)
    block = program % BLOCKS  # so that programs that run at the same time access neighbouring memory
    head = (program // BLOCKS) % hv
    row = (program // BLOCKS // hv).to(tl.int64)
    x = tl.arange(0, BK)
    y = block * BV + tl.arange(0, BV)
    has_x = x < K
    has_y = y < V
    has_xy = has_x[:, None] & has_y[None, :]

    output += (row * hv + head) * V
    slot = row
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        if (slot < 0) | (slot >= n_slots):
            store_without_state(output, y, has_y, slot, 1, hv * V, BV, EVEN_V, OVERLAP)
            return
    state += slot * (tl.cast(state_slot, tl.int64) * STATE_UNIT)
    state += head.to(tl.int64) * (tl.cast(state_head, tl.int64) * STATE_UNIT)
    tile = state + x[:, None] * V + y[None, :]
    S = load_tile(tile, has_xy, EVEN_K and EVEN_V)
    m = entries_of_slot(tokens, folded, slot, EVERY)
    key_head = head // GROUP
    own = slot * hv + head
    keys += (slot * (hv // GROUP) + key_head) * (EVERY * K)
    writes += own * (EVERY * V)
    if DECAY == PER_CHANNEL:
        decays += own * (EVERY * K)
    if DECAY == PER_HEAD:
        decays += own * EVERY
    speed = 1.0
    bias = 0.0
    if RAW:
        speed, bias = parameters_of_head(A_log, dt_bias, head, x, has_x, K, EVEN_K, BIAS_PER_CHANNEL)
    # The entries, from the newest to the oldest; the addresses of those that are not there are the first one's.
    key_of = ()
    write_of = ()
    decay_of = ()
    for j in tl.static_range(EVERY - 1):
        i = tl.maximum(m - 1 - j, 0)
        key_of += (load_tile(keys + i * K + x, has_x & (j < m), False),)
        write_of += (load_tile(writes + i * V + y, has_y & (j < m), False),)
        if DECAY == PER_CHANNEL:
            decay_of += (load_tile(decays + i * K + x, has_x & (j < m), False),)
        if DECAY == PER_HEAD:
            decay_of += (load_tile(decays + i, j < m, False),)
    if OVERLAP:  # no recent launch writes the state, the ring, its counters, slots or parameters
        gdc_launch_dependents()
        gdc_wait()

    far_head = head.to(tl.int64)
    far_key_head = key_head.to(tl.int64)
    # All vectors are requested before any is used.
    q_t = load_vector(q + (row * q_row + far_key_head * q_head) * UNIT + x, has_x, EVEN_K)
    k_raw = load_tile(k + (row * k_row + far_key_head * k_head) * UNIT + x, has_x, EVEN_K)
    v_t = load_vector(v + (row * v_row + far_head * v_head) * UNIT + y, has_y, EVEN_V)
    if DECAY == PER_CHANNEL:
        gate = load_tile(log_decay + row * decay_row + far_head * decay_head + x, has_x, EVEN_K)
    if DECAY == PER_HEAD:
        gate = tl.load(log_decay + row * decay_row + far_head * decay_head)
    if beta is not None:
        beta += row * beta_row + far_head * beta_head
        if BETA_PER_CHANNEL:
            beta_t = load_vector(beta + y, has_y, EVEN_V)
        else:
            beta_t = tl.load(beta).to(tl.float32)
    k_t = k_raw.to(tl.float32)
    q_q, k_k, q_k = products(q_t, k_t, INTERPRETED)
    length = 1.0  # of k, inverse; the factors of both norms come last
    if NORMALIZE:
        length = tl.rsqrt(k_k + 1e-6)
        scale *= tl.rsqrt(q_q + 1e-6)
    forgotten = 0.0  # since the entry that is read
    if DECAY != NO_DECAY:
        log_decay_t = activated(gate, bias, speed, lower_bound, RAW)
        forgotten = log_decay_t
    # compare, read: the entries
    o_t = tl.zeros([BV], tl.float32)
    found = tl.zeros([BV], tl.float32)
    for j in tl.static_range(EVERY - 1):
        if j < m:
            k_j = key_of[j].to(tl.float32)
            r_j = write_of[j].to(tl.float32)
            if DECAY == PER_CHANNEL:
                k_j *= tl.exp(forgotten)
            if DECAY == PER_HEAD:
                r_j *= tl.exp(forgotten)
            if beta is None:
                o_t += tl.sum(k_j * q_t, 0) * r_j
            else:
                asked, compared = sum_two(k_j * q_t, k_j * k_t, 0, INTERPRETED)
                o_t += asked * r_j
                found += compared * r_j
            if DECAY == PER_CHANNEL:
                forgotten += activated(decay_of[j], bias, speed, lower_bound, RAW)
            if DECAY == PER_HEAD:
                forgotten += decay_of[j]
    # compare, read: the state
    q_S = q_t
    k_S = k_t
    if DECAY != NO_DECAY:
        decay = tl.exp(forgotten)
        q_S *= decay
        k_S *= decay
    S_t = S.to(tl.float32)
    if beta is None:
        o_t += tl.sum(S_t * q_S[:, None], 0)
        r_t = v_t
    else:
        o_S, found_S = sum_two(S_t * q_S[:, None], S_t * k_S[:, None], 0, INTERPRETED)
        o_t += o_S
        if RAW_BETA:
            beta_t = beta_scale / (1.0 + tl.exp(-beta_t))
        r_t = beta_t * (v_t - length * (found + found_S))
    r_t *= length  # as the factor of the key as it came
    store_vector(output + y, scale * (o_t + q_k * r_t), has_y, EVEN_V)

    # write: append; the last entry is read again below, by this program
    store_vector(writes + m * V + y, r_t.to(writes.dtype.element_ty), has_y, EVEN_V)
    if m + 1 < EVERY:
        if block == 0:
            if head % GROUP == 0:
                store_vector(keys + m * K + x, k_raw, has_x, EVEN_K)
            if DECAY == PER_CHANNEL:
                store_vector(decays + m * K + x, gate.to(decays.dtype.element_ty), has_x, EVEN_K)
            if DECAY == PER_HEAD:
                tl.store(decays + m, log_decay_t)
    else:  # write: fold, PART columns at a time, since few registers let more programs read at the same time
        tl.debug_barrier()
        for part in range(BV // PART):
            z = block * BV + part * PART + tl.arange(0, PART)
            has_z = z < V
            has_xz = has_x[:, None] & has_z[None, :]
            part_tile = state + x[:, None] * V + z[None, :]
            S_z = load_vector(part_tile, has_xz, EVEN_K and EVEN_V)
            forgotten = 0.0
            if DECAY == PER_CHANNEL:
                S_z *= decay[:, None]
                forgotten = log_decay_t
            if DECAY == PER_HEAD:
                S_z *= decay
                forgotten = log_decay_t
            S_z = with_entries(
                S_z, forgotten, m, keys, writes, decays, bias, speed, lower_bound, x, z, has_x, has_z,
                K, V, EVEN_K, EVEN_V, DECAY, RAW and DECAY == PER_CHANNEL,
            )  # fmt: skip
            S_z += k_t[:, None] * load_vector(writes + m * V + z, has_z, EVEN_V)[None, :]
            S_z = rounded(S_z, seeds, row, head, x, z, V, NARROW, INTERPRETED)
            store_vector(part_tile, S_z, has_xz, EVEN_K and EVEN_V)


@triton.jit(do_not_specialize=_PLAIN)
def fold_ring(
    state, slots, seeds, tokens, folded, keys, writes, decays, A_log, dt_bias, hv, n_slots, lower_bound,
    state_slot, state_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, STATE_UNIT: tl.constexpr, EVERY: tl.constexpr, DECAY: tl.constexpr,
    BIAS_PER_CHANNEL: tl.constexpr, RAW: tl.constexpr, NARROW: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the state with all entries of the ring, for one row, head and block of value columns."""
    EVEN_K: tl.constexpr = K == BK
    EVEN_V: tl.constexpr = V == BLOCKS * BV
    program = tl.program_id(0)
    block = program % BLOCKS
    head = (program // BLOCKS) % hv
    row = (program // BLOCKS // hv).to(tl.int64)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        if (slot < 0) | (slot >= n_slots):
            return
    m = entries_of_slot(tokens, folded, slot, EVERY)
    if m == 0:
        return
    x = tl.arange(0, BK)
    y = block * BV + tl.arange(0, BV)
    has_x = x < K
    has_y = y < V
    has_xy = has_x[:, None] & has_y[None, :]
    state += slot * (tl.cast(state_slot, tl.int64) * STATE_UNIT)
    state += head.to(tl.int64) * (tl.cast(state_head, tl.int64) * STATE_UNIT)
    tile = state + x[:, None] * V + y[None, :]
    own = slot * hv + head
    keys += (slot * (hv // GROUP) + head // GROUP) * (EVERY * K)
    writes += own * (EVERY * V)
    S = load_vector(tile, has_xy, EVEN_K and EVEN_V)
    speed = 1.0
    bias = 0.0
    forgotten = 0.0
    if DECAY == PER_CHANNEL:
        decays += own * (EVERY * K)
        if RAW:
            speed, bias = parameters_of_head(A_log, dt_bias, head, x, has_x, K, EVEN_K, BIAS_PER_CHANNEL)
        forgotten = tl.zeros([BK], tl.float32)
        for i in range(m):
            forgotten += activated(load_vector(decays + i * K + x, has_x, EVEN_K), bias, speed, lower_bound, RAW)
        S *= tl.exp(forgotten)[:, None]
        forgotten = tl.zeros([BK], tl.float32)
    if DECAY == PER_HEAD:
        decays += own * EVERY
        for i in range(m):
            forgotten += tl.load(decays + i)
        S *= tl.exp(forgotten)
        forgotten = 0.0
    S = with_entries(
        S, forgotten, m, keys, writes, decays, bias, speed, lower_bound, x, y, has_x, has_y,
        K, V, EVEN_K, EVEN_V, DECAY, RAW,
    )  # fmt: skip
    store_vector(tile, rounded(S, seeds, row, head, x, y, V, NARROW, INTERPRETED), has_xy, EVEN_K and EVEN_V)


@triton.jit
def count_tokens(tokens, slots, rows, n_slots, BLOCK: tl.constexpr):
    """Add 1 to the counter of every slot of the rows that is in the pool."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < n_slots)
    at = tokens + tl.where(inside, slot, 0)
    tl.store(at, tl.load(at, mask=inside, other=0) + 1, mask=inside)
