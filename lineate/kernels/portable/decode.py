"""Decoding: the token equation in one launch, the state updated in place.

    S' = Diag(exp(log_decay_t)) S_{t-1}                     forget
    r  = beta_t (v_t - S'^T k_t)   or   v_t                 compare
    o_t = scale (S'^T q_t + (k_t . q_t) r)                  read: S_t^T q_t without reading S_t a second time
    S_t = S' + k_t r^T                                      write

A program holds BV value columns of one head's state, a tile [BK, BV] in registers, which it loads once, carries through
all tokens of its row and stores once. A step reads and writes little more than the state, which is the least possible
traffic. Rows are batch rows or packed sequences; a row's state may be anywhere in a pool of slots. A bfloat16 state is
computed in float32 and rounded after every token (rounding.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.call import Inputs, Options, Slots
from lineate.kernels import DECODE_READS
from lineate.kernels.launching import ceil_div, next_power, overlap_options, start
from lineate.kernels.portable.gates import decay_of_gate
from lineate.kernels.portable.rounding import round_nearest, round_stochastic, seed_of_head
from lineate.kernels.tape import launch


@triton.jit
def load_vector(pointers, mask, EVEN: tl.constexpr):
    """Load as float32, with 0 outside; nothing is masked where the tile divides the tensor."""
    if EVEN:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=mask, other=0.0)
    return found.to(tl.float32)


@triton.jit
def load_scalar(pointer, there):
    return tl.load(pointer, mask=there, other=0.0).to(tl.float32)


@triton.jit
def store_vector(pointers, x, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def unit_vector(x):
    """Return x * rsqrt(sum x^2 + 1e-6), as rule.normalize does."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def parameters_of_head(
    A_log, dt_bias, head, x, has_x, K: tl.constexpr, EVEN_K: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr
):  # fmt: skip
    """Return exp(A_log) and dt_bias of a head, 1 and 0 if they are None; the bias [BK] if it is per channel."""
    speed = 1.0
    if A_log is not None:
        speed = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = 0.0
    if dt_bias is not None:
        if BIAS_PER_CHANNEL:
            bias = load_vector(dt_bias + head * K + x, has_x, EVEN_K)
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)
    return speed, bias


@triton.jit
def tokens_of_row(cu_seqlens, row, t):
    """Return batch, first and n: the tokens of a row are [first, first + n) of the batch row."""
    if cu_seqlens is None:
        batch = row
        first = row * 0
        n = t
    else:
        batch = row * 0
        first = tl.maximum(tl.load(cu_seqlens + row).to(tl.int64), 0)
        n = (tl.minimum(tl.load(cu_seqlens + row + 1).to(tl.int64), t) - first).to(tl.int32)
    return batch, first, n


@triton.jit
def slots_of_row(slots, start_slots, row, EACH_TOKEN: tl.constexpr):
    """Return the slots from which S_0 is read and, unless every token has its own, to which S_t is written."""
    start = row
    end = row
    if slots is not None:
        if start_slots is None:
            start = tl.load(slots + row).to(tl.int64)
            end = start
        else:
            start = tl.load(start_slots + row).to(tl.int64)
            if not EACH_TOKEN:
                end = tl.load(slots + row).to(tl.int64)
    return start, end


@triton.jit
def store_without_state(
    output, y, has_y, start, n, output_token, BV: tl.constexpr, EVEN_V: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Store the output of a row without a state: 0 of an idle one, NaN of one whose slot is outside the pool."""
    if OVERLAP:  # the previous launch may still read the memory of the output
        gdc_wait()
    nothing = tl.where(start < 0, 0.0, float("nan"))
    for _ in range(n):
        store_vector(output + y, tl.full([BV], 0.0, tl.float32) + nothing, has_y, EVEN_V)
        output += output_token


# One compilation serves every batch size, length and stride: triton does not specialise these on 1 or multiples of 16.
_PLAIN = [
    *("t", "hv", "n_slots", "slots_width"),
    *(f"{x}_{dim}" for x in ("q", "k", "v", "decay", "beta") for dim in ("row", "token", "head")),
    *("state_slot", "state_head"),
]


@triton.jit(do_not_specialize=_PLAIN)
def decode_tokens(
    q, k, v, log_decay, beta, A_log, dt_bias, state, slots, start_slots, seeds, cu_seqlens, output,
    t, hv, n_slots, slots_width, scale, beta_scale, lower_bound,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    decay_row, decay_token, decay_head, beta_row, beta_token, beta_head, state_slot, state_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, BIAS_PER_CHANNEL: tl.constexpr, BETA_PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr, EACH_TOKEN: tl.constexpr,
    NARROW: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run the token equation for one row, head and block of value columns.

    Strides of q, k, v are in units of UNIT elements, those of the state in units of STATE_UNIT, which tells the
    compiler their alignment.
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

    batch, first, n = tokens_of_row(cu_seqlens, row, t)
    output += ((batch * t + first) * hv + head) * V
    output_token = hv * V
    start, end = slots_of_row(slots, start_slots, row, EACH_TOKEN)
    if slots is not None:  # noqa: SIM102 (known when compiling; the next is not)
        if (start < 0) | (start >= n_slots):
            store_without_state(output, y, has_y, start, n, output_token, BV, EVEN_V, OVERLAP)
            return
    tile = head.to(tl.int64) * (tl.cast(state_head, tl.int64) * STATE_UNIT) + x[:, None] * V + y[None, :]
    slot_stride = tl.cast(state_slot, tl.int64) * STATE_UNIT
    S = load_vector(state + start * slot_stride + tile, has_xy, EVEN_K and EVEN_V)
    if OVERLAP:  # no recent launch writes the state or slots
        gdc_launch_dependents()
        gdc_wait()

    key_head = (head // GROUP).to(tl.int64)
    q += (batch * q_row + first * q_token + key_head * q_head) * UNIT
    k += (batch * k_row + first * k_token + key_head * k_head) * UNIT
    v += (batch * v_row + first * v_token + head.to(tl.int64) * v_head) * UNIT
    q_token = tl.cast(q_token, tl.int64) * UNIT
    k_token = tl.cast(k_token, tl.int64) * UNIT
    v_token = tl.cast(v_token, tl.int64) * UNIT
    if log_decay is not None:
        log_decay += batch * decay_row + first * decay_token + head.to(tl.int64) * decay_head
        if not DECAY_PER_CHANNEL:
            next_log_decay = load_scalar(log_decay, n > 0)
        if RAW:
            speed, bias = parameters_of_head(A_log, dt_bias, head, x, has_x, K, EVEN_K, BIAS_PER_CHANNEL)
    if beta is not None:
        beta += batch * beta_row + first * beta_token + head.to(tl.int64) * beta_head
        if not BETA_PER_CHANNEL:
            next_beta = load_scalar(beta, n > 0)
    if EACH_TOKEN:
        slots += row * slots_width
    if seeds is not None:
        seed = tl.load(seeds + row).to(tl.int64)

    # Two stages: the vectors of token i + 1 are fetched while token i is computed. With a single token, they also make
    # all its vectors be requested before any is waited for (one latency instead of five). A scalar may be too small for
    # the compiler's asynchronous copies, so the next one is loaded ahead by hand.
    for i in tl.range(n, num_stages=2):
        q_t = load_vector(q + x, has_x, EVEN_K)
        k_t = load_vector(k + x, has_x, EVEN_K)
        v_t = load_vector(v + y, has_y, EVEN_V)
        if NORMALIZE:
            q_t = unit_vector(q_t)
            k_t = unit_vector(k_t)
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
        # compare
        r = v_t
        if beta is not None:
            if BETA_PER_CHANNEL:
                beta_t = load_vector(beta + y, has_y, EVEN_V)
                beta += beta_token
            else:
                beta_t = next_beta
                beta += beta_token
                next_beta = load_scalar(beta, i + 1 < n)
            if RAW_BETA:
                beta_t = beta_scale / (1.0 + tl.exp(-beta_t))
            r = beta_t * (v_t - tl.sum(S * k_t[:, None], 0))
        # read, write
        o_t = tl.sum(S * q_t[:, None], 0) + tl.sum(k_t * q_t, 0) * r
        S += k_t[:, None] * r[None, :]
        store_vector(output + y, o_t, has_y, EVEN_V)
        if NARROW:  # after every token, whether it is stored or not, so that splitting a call changes no bit
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
        output += output_token
    if not EACH_TOKEN:  # noqa: SIM102
        if (end >= 0) & (end < n_slots):
            store_vector(state + end * slot_stride + tile, S, has_xy, EVEN_K and EVEN_V)


def tiling(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the value columns and warps of a program; they do not depend on the batch, so a row's bits do not either.

    32 columns are 128 bytes of a row in memory. There are as many warps as let a thread hold 64 numbers of the state,
    and two of q and of k, since an asynchronous copy takes at least 4 bytes.
    """
    columns = min(32, next_power(value_dim))
    return columns, max(1, next_power(key_dim) // 64)


def decode(
    inputs: Inputs,
    where: Slots,
    options: Options,
    columns: int | None = None,
    warps: int | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """Return the output `b t hv v`; one launch also updates inputs.state in place. lineate.decode checks the arguments.

    columns and warps replace those of `tiling`, for measurements. settled: whether no recent launch writes the state,
    so that it may be read while they run (launching.overlapping).
    """
    inputs.refuse_unread(DECODE_READS, "the decoding kernel")
    q, k, v, log_decay, beta = laid_out(inputs)
    state, cu_seqlens = inputs.state, inputs.cu_seqlens
    slots, start_slots, seeds = where
    assert state is not None
    b, t, h, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    each_token = slots is not None and slots.dim() == 2
    strides = (*_strides(q), *_strides(k), *_strides(v))
    unit = 8 if all(s % 8 == 0 for s in (key_dim, value_dim, *strides)) else 1
    state_strides, state_unit = state_units(state)
    own_columns, own_warps = tiling(key_dim, value_dim)
    columns = own_columns if columns is None else columns
    blocks = ceil_div(value_dim, columns)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    output = torch.empty(b, t, hv, value_dim, dtype=v.dtype, device=v.device)
    parameters = inputs.A_log, inputs.dt_bias
    A_log, dt_bias = (None if x is None or not options.raw_decay else x.contiguous() for x in parameters)
    slots, start_slots = (None if x is None else x.contiguous() for x in (slots, start_slots))
    seeds, cu_seqlens = (None if x is None else x.contiguous() for x in (seeds, cu_seqlens))

    def run() -> None:
        start(decode_tokens, (rows * hv * blocks,))(
            q,
            k,
            v,
            log_decay,
            beta,
            A_log,
            dt_bias,
            state,
            slots,
            start_slots,
            seeds,
            cu_seqlens,
            output,
            t,
            hv,
            state.shape[0],
            slots.shape[1] if slots is not None and each_token else 0,
            options.scale,
            options.beta_scale,
            options.lower_bound,
            *(s // unit for s in strides),
            *((0, 0, 0) if log_decay is None else _strides(log_decay)),
            *((0, 0, 0) if beta is None else _strides(beta)),
            *(s // state_unit for s in state_strides),
            K=key_dim,
            V=value_dim,
            BK=next_power(key_dim),
            BV=columns,
            BLOCKS=blocks,
            GROUP=hv // h,
            UNIT=unit,
            STATE_UNIT=state_unit,
            DECAY_PER_CHANNEL=log_decay is not None and log_decay.dim() == 4,
            BIAS_PER_CHANNEL=dt_bias is not None and dt_bias.dim() == 2,
            BETA_PER_CHANNEL=beta is not None and beta.dim() == 4,
            NORMALIZE=options.normalize_qk,
            RAW=options.raw_decay,
            RAW_BETA=options.raw_beta,
            EACH_TOKEN=each_token,
            NARROW=state.dtype is torch.bfloat16,
            INTERPRETED=q.device.type == "cpu",
            num_warps=own_warps if warps is None else warps,
            num_stages=1,
            **(overlap_options(q.device) if settled else {"OVERLAP": False}),
        )

    given = q, k, v, log_decay, beta, A_log, dt_bias, state, slots, start_slots, seeds, cu_seqlens
    launch("decode", given, (output,), (options, columns, warps, settled), run)
    return output


def last_contiguous(x: Tensor) -> Tensor:
    """Return x itself if its last dimension is contiguous (a view of one fused projection is), else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def laid_out(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q, k, v, log_decay and beta with a contiguous last dimension; gates per head are read with any strides."""
    log_decay, beta = (
        x if x is None or x.dim() < 4 else last_contiguous(x) for x in (inputs.log_decay, inputs.beta)
    )  # fmt: skip
    return last_contiguous(inputs.q), last_contiguous(inputs.k), last_contiguous(inputs.v), log_decay, beta


def state_units(state: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the strides of slots and heads, and the number of elements that divides them for aligned accesses."""
    strides, (key_dim, value_dim) = _strides(state)[:2], state.shape[2:]
    aligned = 16 // state.element_size()
    return strides, aligned if all(s % aligned == 0 for s in (key_dim * value_dim, *strides)) else 1


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the first three strides, with 0 for a dimension of size one, whose stride must not select a variant."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
