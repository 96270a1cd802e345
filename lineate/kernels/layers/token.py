"""One token per row of a linear mixer, or of attention: the operations between the projections, without gradients.

A linear mixer takes one launch, a program a row and value head with its whole memory in registers:

    S' = Diag(exp(decay_of_gate(a + dt_bias))) S             r = beta_scale sigmoid(b) (v - S'^T k), or v
    S  = S' + k r^T                                          y = norm(scale S^T q + D v) act(z)

layers/step/spec.py says which parts a mixer has. A norm over groups of all heads' channels is a second launch.

Attention takes one launch that normalizes and rotates queries and keys, and writes keys and values into the caches;
then cached.py reads them.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.call import Inputs
from lineate.kernels import STEP_READS
from lineate.kernels.launching import next_power, overlap_options, start
from lineate.kernels.layers.rows import sigmoid
from lineate.kernels.portable.decode import unit_vector
from lineate.kernels.portable.gates import decay_of_gate, softplus
from lineate.kernels.portable.rounding import round_nearest, round_stochastic, seed_of_head

SPEED = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
DECAY_GATES = {"none": 0, "speed": 1, "sigmoid": 2, "step": 3}
"""The functions from the raw decay to the decay (layers/step/spec.py), and their numbers in the kernel."""
MOST_STATE = 128 * 128
"""The most elements of a head's memory that a program has in registers."""
FEW_ROWS = 4
"""Up to this many rows `mix` runs, which takes less time than `decode` and a norm at one row, and more at 32 (H200)."""


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "z_row", "gate_row", "write_row"])
def mix_token(
    q, k, v, z, gate, write, A_log, dt_bias, weight, skip, state, seeds, y, scale, beta_scale, lower_bound, temperature,
    step_least, step_most, eps, q_row, k_row, v_row, z_row, gate_row, write_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr, DECAY: tl.constexpr, PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and value head: q, k `rows HEADS/GROUP K`, v, z, y `rows HEADS V`, gate and write `rows HEADS [K]`.

    Without `write` the memory is added to, without `gate` it keeps all, and without a norm's `weight` z is not read.
    """
    head = tl.program_id(0) % HEADS
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    i = tl.arange(0, BK)
    j = tl.arange(0, BV)
    has_i = i < K
    has_j = j < V
    both = has_i[:, None] & has_j[None, :]
    state += (row * HEADS + head) * (K * V) + i[:, None] * V + j[None, :]
    S = tl.load(state, mask=both, other=0.0).to(tl.float32)  # of the step before: no launch under way writes it
    if weight is not None:
        w = tl.load(weight + j, mask=has_j, other=0.0).to(tl.float32)
    if A_log is not None:
        speed = tl.exp(tl.load(A_log + head).to(tl.float32))
    if skip is not None:
        passed = tl.load(skip + head).to(tl.float32)
    bias = 0.0
    if dt_bias is not None:
        if BIAS_PER_CHANNEL:
            bias = tl.load(dt_bias + head * K + i, mask=has_i, other=0.0).to(tl.float32)
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    q_t = tl.load(q + row * q_row + head // GROUP * K + i, mask=has_i, other=0.0).to(tl.float32)
    k_t = tl.load(k + row * k_row + head // GROUP * K + i, mask=has_i, other=0.0).to(tl.float32)
    v_t = tl.load(v + row * v_row + head * V + j, mask=has_j, other=0.0).to(tl.float32)
    if weight is not None:
        z_t = tl.load(z + row * z_row + head * V + j, mask=has_j, other=0.0).to(tl.float32)
    if write is not None:
        b_t = tl.load(write + row * write_row + head).to(tl.float32)
    if gate is not None:
        if PER_CHANNEL:
            a_t = tl.load(gate + row * gate_row + head * K + i, mask=has_i, other=0.0).to(tl.float32)
        else:
            a_t = tl.load(gate + row * gate_row + head).to(tl.float32)
    if UNIT:
        q_t = unit_vector(q_t) * scale
        k_t = unit_vector(k_t)
    else:
        q_t *= scale
    r = v_t
    if gate is not None:
        if DECAY == SPEED:
            decay = tl.exp(decay_of_gate(a_t + bias, speed, lower_bound))
        elif DECAY == SIGMOID:
            decay = tl.exp(-softplus(-a_t) / temperature)
        else:
            dt = softplus(a_t + bias)
            dt = tl.where(dt < step_least, step_least, dt)  # NaN stays NaN
            dt = tl.where(dt > step_most, step_most, dt)
            decay = tl.exp(-speed * dt)
            r *= dt
        if PER_CHANNEL:
            S *= decay[:, None]
        else:
            S *= decay
    if write is not None:
        r = beta_scale / (1.0 + tl.exp(-b_t)) * (v_t - tl.sum(S * k_t[:, None], 0))
    o = tl.sum(S * q_t[:, None], 0) + tl.sum(k_t * q_t, 0) * r
    S += k_t[:, None] * r[None, :]
    if NARROW:
        if seeds is None:
            S = round_nearest(S, INTERPRETED)
        else:
            seed = tl.load(seeds + row).to(tl.int64)
            S = round_stochastic(S, seed_of_head(seed, head), i, j, V)
    tl.store(state, S, mask=both)
    if skip is not None:
        o += passed * v_t
    if weight is not None:
        o = o.to(y.dtype.element_ty).to(tl.float32)  # rounded as between two launches
        o *= tl.rsqrt(tl.sum(o * o, 0) * (1.0 / V) + eps) * w
        o *= sigmoid(z_t)
        if SILU:
            o *= z_t
    tl.store(y + (row * HEADS + head) * V + j, o, mask=has_j)


@dataclass(frozen=True)
class Token:
    """The options of `mix`; see layers/step/spec.py.

    Args:
        unit: Whether q and k are normalised.
        decay_gate: The function from the raw decay to the decay.
        scale: Multiplies the output.
        beta_scale: beta lies in (0, beta_scale).
        lower_bound: Of log_decay, or None.
        temperature: Of the decay gate "sigmoid".
        step_least: The smallest step of the decay gate "step".
        step_most: The largest one.
    """

    unit: bool
    decay_gate: str
    scale: float
    beta_scale: float = 1.0
    lower_bound: float | None = None
    temperature: float = 1.0
    step_least: float = 0.0
    step_most: float = math.inf


def mix(
    inputs: Inputs,
    token: Token,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    skip: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Tensor:
    """Run one token a row of a rule with raw gates, and its norm and output gate; return `rows 1 hv*v`.

    The memory, inputs.state, is overwritten. Launches shortly before this must not write it, nor the parameters.

    Args:
        inputs: q, k `rows 1 h k`, v `rows 1 hv v`, raw gates or None, the memory, A_log and dt_bias.
        token: The computation, see Token.
        norm: The output gate before its activation, `rows 1 hv*v`; the norm's weight, `v`, and eps; whether the
            activation is silu, otherwise it is the sigmoid. None: neither is applied, and the result is float32.
        skip: D `hv`: D v is added.
        seeds: `rows`, int: rounds a bfloat16 memory stochastically; None: to the nearest.
    """
    q, k, v, gate, write, state = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, inputs.state
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    inputs.refuse_unread(STEP_READS, "the step of a mixer")
    assert state is not None
    rows, _, h, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    z, weight, eps, silu = (None, None, 0.0, False) if norm is None else norm
    y = torch.empty(rows, 1, hv * value_dim, dtype=torch.float32 if norm is None else v.dtype, device=v.device)
    wide, tall = next_power(value_dim), next_power(key_dim)
    with torch.cuda.device_of(q):
        start(mix_token, (rows * hv,))(
            q, k, v, z, gate, write, A_log, dt_bias, weight, skip, state, seeds, y, token.scale, token.beta_scale,
            token.lower_bound, token.temperature, token.step_least, token.step_most, eps,
            *(0 if x is None else x.stride(0) for x in (q, k, v, z, gate, write)),
            HEADS=hv, GROUP=hv // h, K=key_dim, V=value_dim, BK=tall, BV=wide, UNIT=token.unit,
            DECAY=DECAY_GATES[token.decay_gate], PER_CHANNEL=gate is not None and gate.dim() == 4,
            BIAS_PER_CHANNEL=dt_bias is not None and dt_bias.dim() == 2, SILU=silu,
            NARROW=state.dtype is torch.bfloat16, INTERPRETED=q.device.type == "cpu",
            num_warps=max(1, min(8, wide * tall // 2048)), **overlap_options(q.device),
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["z_row"])
def norm_group(
    x, z, weight, y, eps, z_row, GROUPS: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
    GATE_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and group of x, y `rows GROUPS*SIZE`: norm(x silu(z)), or norm(x) silu(z)."""
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    n = tl.arange(0, BN)
    has = n < SIZE
    at = tl.program_id(0) % GROUPS * SIZE + n
    w = tl.load(weight + at, mask=has, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    opened = tl.load(z + row * z_row + at, mask=has, other=0.0).to(tl.float32)
    opened *= sigmoid(opened)
    found = tl.load(x + row * (GROUPS * SIZE) + at, mask=has, other=0.0).to(tl.float32)
    if GATE_FIRST:
        found *= opened
    found *= tl.rsqrt(tl.sum(found * found, 0) * (1.0 / SIZE) + eps) * w
    if not GATE_FIRST:
        found *= opened
    tl.store(y + row * (GROUPS * SIZE) + at, found, mask=has)


WIDEST_GROUP = 16384
"""The most channels that `norm_groups` normalises together."""


def norm_groups(x: Tensor, z: Tensor, weight: Tensor, *, groups: int, eps: float, gate_first: bool) -> Tensor:
    """Return RMSNorm(x silu(z)), or RMSNorm(x) silu(z), over groups of channels; `rows 1 n` in the dtype of z.

    Args:
        x: `rows 1 n`, dense.
        z: `rows 1 n`.
        weight: `n`.
        groups: How many groups the n channels are cut into.
        eps: Added to the mean square.
        gate_first: Whether the norm follows the gate.
    """
    rows, n = len(x), x.shape[-1]
    y = torch.empty(x.shape, dtype=z.dtype, device=x.device)
    width = next_power(n // groups)
    with torch.cuda.device_of(x):
        start(norm_group, (rows * groups,))(
            x, z, weight, y, eps, z.stride(0), GROUPS=groups, SIZE=n // groups, BN=width, GATE_FIRST=gate_first,
            num_warps=max(1, min(16, width // 512)), **overlap_options(x.device),
        )  # fmt: skip
    return y


def serves_memory(state: Tensor) -> bool:
    """Whether `mix` supports this memory, `rows hv k v`."""
    key_dim, value_dim = state.shape[-2:]
    return (
        next_power(key_dim) * next_power(value_dim) <= MOST_STATE
        and state.is_contiguous()
        and state.dtype in (torch.float32, torch.bfloat16)
    )


@triton.jit
def _factor(weight, d, has, inverse, SHIFT: tl.constexpr):
    """Return the factors of an RMSNorm with 1 / sqrt(mean x^2 + eps) = inverse."""
    return inverse * (tl.load(weight + d, mask=has, other=0.0).to(tl.float32) + SHIFT)


@triton.jit
def entered(
    source, norm, frequencies, position, eps, SIZE: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    SHIFT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return a head's query or key after its norm and its rotation; rounded in between, as between two launches."""
    d = tl.arange(0, BD)
    has = d < SIZE
    x = tl.load(source + d, mask=has, other=0.0).to(tl.float32)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / SIZE) + eps)
        x *= _factor(norm, d, has, inverse, SHIFT)
    x = x.to(dtype).to(tl.float32)
    if HALF:
        turns = d < 2 * HALF
        other = tl.where(d < HALF, d + HALF, d - HALF)  # the other channel of the rotated pair
        partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        if norm is not None:
            partner *= _factor(norm, other, turns, inverse, SHIFT)
        partner = partner.to(dtype).to(tl.float32)
        angle = position.to(tl.float32) * tl.load(frequencies + d % HALF, mask=turns, other=0.0)
        x = x * tl.cos(angle) + tl.where(d < HALF, -partner, partner) * tl.sin(angle)
    return x


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "cache_row", "cache_token", "capacity"])
def place_token(
    q, k, v, q_norm, k_norm, frequencies, lengths, keys, values, y, eps,
    q_row, k_row, v_row, cache_row, cache_token, capacity,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    SHIFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row: of the HEADS queries into y `rows HEADS SIZE`, of the KV keys and values into the caches."""
    UNITS: tl.constexpr = HEADS + 2 * KV
    unit = tl.program_id(0) % UNITS
    row = (tl.program_id(0) // UNITS).to(tl.int64)
    d = tl.arange(0, BD)
    has = d < SIZE
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.load(lengths + row)  # this token's position
    there = (at >= 0) & (at < capacity)
    place = row * cache_row + at * cache_token
    if unit >= HEADS + KV:
        head = unit - HEADS - KV
        value = tl.load(v + row * v_row + head * SIZE + d, mask=has)
        tl.store(values + place + head * SIZE + d, value, mask=has & there)
    elif unit >= HEADS:
        source = k + row * k_row + (unit - HEADS) * SIZE
        x = entered(source, k_norm, frequencies, at, eps, SIZE, HALF, BD, SHIFT, keys.dtype.element_ty)
        tl.store(keys + place + (unit - HEADS) * SIZE + d, x, mask=has & there)
    else:
        source = q + row * q_row + unit * SIZE
        x = entered(source, q_norm, frequencies, at, eps, SIZE, HALF, BD, SHIFT, y.dtype.element_ty)
        tl.store(y + (row * HEADS + unit) * SIZE + d, x, mask=has)


def place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor, Tensor, float, bool] | None,
    frequencies: Tensor | None,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Normalize and rotate one token per row, write its key and value, and return the query `rows 1 heads d`.

    Args:
        q: `rows 1 heads d`.
        k: `rows 1 kv d`.
        v: `rows 1 kv d`.
        norms: The weights `d` of the RMSNorms of q and of k, their eps, and whether they are zero-centred.
        frequencies: The angles by which pairs of channels rotate per token, float32 `n`; None: no rotation.
        lengths: The number of tokens of each row, without this one, int64 `rows`.
        keys: The key cache `rows n kv d`, which is written.
        values: The value cache `rows n kv d`, which is written.
    """
    rows, _, heads, size = q.shape
    kv = k.shape[2]
    y = torch.empty(rows, 1, heads, size, dtype=q.dtype, device=q.device)
    q_norm, k_norm, eps, zero_centred = (None, None, 0.0, False) if norms is None else norms
    with torch.cuda.device_of(q):
        start(place_token, (rows * (heads + 2 * kv),))(
            q, k, v, q_norm, k_norm, frequencies, lengths, keys, values, y, eps,
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), keys.shape[1],
            HEADS=heads, KV=kv, SIZE=size, HALF=0 if frequencies is None else frequencies.shape[0], BD=next_power(size),
            SHIFT=float(zero_centred), num_warps=1 if size <= 128 else 2, **overlap_options(q.device),
        )  # fmt: skip
    return y


def serves_caches(keys: Tensor, values: Tensor) -> bool:
    """Whether `place` writes into these caches, `rows n kv d`."""
    return (
        keys.shape == values.shape and keys.stride() == values.stride() and keys.dtype == values.dtype
        and keys.stride(-1) == 1 and keys.stride(2) in (keys.shape[3], 0)
    )  # fmt: skip
