"""Kernels that compute log_decay and beta from the caller's gates, and the factors of decay per head.

    log_decay = -exp(A_log) softplus(gate + dt_bias)      beta = beta_scale sigmoid(write)       if the gates are raw
              = lower_bound sigmoid(exp(A_log) (gate + dt_bias))          if lower_bound is not None

They are separate small kernels because the sums run along the tokens, which would need barriers in the scores' tiles.
"""

import triton
import triton.language as tl

from lineate.kernels.portable.layout import chunk_bounds, link

# e^-200 and any product with it is 0 in float32, so this floor on log_decay changes no result and keeps sums small.
FLOOR = tl.constexpr(-200.0)
LOG2E = tl.constexpr(1.4426950408889634)
SMALL_BETA = tl.constexpr(0.00390625)
# The vectors of one chunk and head with decay per head, in this order: `slot hv FACTORS c`.
READ_Q = tl.constexpr(0)  # scale |q|^-1 e^{G_i}
READ_K = tl.constexpr(1)  # |k|^-1 e^{G_i}
WRITE = tl.constexpr(2)  # |k|^-1 e^{G_c - G_i}; 0 past the end of the sequence
BETA = tl.constexpr(3)  # 0 past the end of the sequence
LAST = tl.constexpr(4)  # e^{G_c}, the same in all c places
COARSE = tl.constexpr(5)  # G_i is coarse + fine, whose differences are exact to float32 rounding
FINE = tl.constexpr(6)
DECAY = tl.constexpr(7)  # log_decay, at least FLOOR
FACTORS = tl.constexpr(8)


@triton.jit
def allowed(log_decay):
    """Return log_decay, at least FLOOR; NaN where it is NaN or positive, since values on a GPU are not checked."""
    return tl.where(log_decay <= 0.0, tl.maximum(log_decay, FLOOR), float("nan"))


@triton.jit
def is_small(beta, dtype: tl.constexpr):
    """Whether E - M R must not be computed as R / beta: beta is 0, or at most 1/256 with inputs in 16 bits.

    So small a beta makes R (float16 inputs), or beta M in the float16 products of the inverse (bfloat16), underflow.
    """
    return tl.abs(beta) <= (0.0 if dtype == tl.float32 else SMALL_BETA)


@triton.jit
def softplus(x):
    """Return max(x, 0) + log(1 + y), y = e^-|x|: log(1 + y) / y by a polynomial, to 2e-7 for all y in [0, 1]."""
    y = tl.exp(-tl.abs(x))
    p = 0.00512610212 * y - 0.0290740646
    p = p * y + 0.0775160866
    p = p * y - 0.136022476
    p = p * y + 0.190768807
    p = p * y - 0.24835399
    p = p * y + 0.333181217
    p = p * y - 0.49999445
    p = p * y + 0.999999966
    return tl.maximum(x, 0.0) + p * y


@triton.jit
def decay_of_gate(x, speed, lower_bound):
    """Return log_decay from x = gate + dt_bias and speed = exp(A_log)."""
    if lower_bound is None:
        log_decay = -speed * softplus(x)
    else:
        log_decay = lower_bound * tl.sigmoid(speed * x)
    return log_decay


@triton.jit
def gate_gradients(d, x, speed, lower_bound):
    """Return the gradients of x = gate + dt_bias and of A_log from d, that of log_decay."""
    if lower_bound is None:
        d = d * -speed
        dx = d * tl.sigmoid(x)
        dA_log = d * softplus(x)
    else:
        open_ = tl.sigmoid(speed * x)
        dx = d * (lower_bound * speed * open_ * (1.0 - open_))
        dA_log = dx * x
    return dx, dA_log


@triton.jit(do_not_specialize=["t"])
def head_gates(
    log_decay, beta, A_log, dt_bias, factors, made, bounds, first_slots, slot_texts, t, scale, beta_scale, lower_bound,
    HV: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, CORRECTS: tl.constexpr,
    RAW: tl.constexpr, RAW_BETA: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Compute the factors of decay per head; a program takes a chunk and HEADS value heads, in tiles [C, HEADS].

    G is summed in two parts. Coarse is a multiple of 1/512 below 2^14 and adds without rounding; fine is the rest,
    below 1/1024 per token. So e^{G_i - G_j} is as exact after a reset as before, and causal to the last bit.
    made `slot hv`, if given, is set to 0.
    """
    link(LINK)
    slot = tl.program_id(0)
    start, rows = chunk_bounds(slot, bounds, first_slots, slot_texts, t, C, PACKED)
    i = tl.arange(0, C)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = (i < rows)[:, None] & (head < HV)[None, :]
    at = (start + i)[:, None] * HV + head[None, :]
    decay = tl.zeros((C, HEADS), tl.float32)
    rate = tl.where(there, 1.0, 0.0)
    if GATED:
        decay = tl.load(log_decay + at, mask=there, other=0.0).to(tl.float32)
        if RAW:
            if BIAS:
                decay += tl.load(dt_bias + head, mask=head < HV, other=0.0).to(tl.float32)[None, :]
            speed = tl.full((1, HEADS), 1.0, tl.float32)
            if A_log is not None:
                speed = tl.exp(tl.load(A_log + head, mask=head < HV, other=0.0).to(tl.float32))[None, :]
            decay = tl.where(there, decay_of_gate(decay, speed, lower_bound), 0.0)
        decay = allowed(decay)
    if CORRECTS:
        rate = tl.load(beta + at, mask=there, other=0.0).to(tl.float32)
        if RAW_BETA:
            rate = tl.where(there, beta_scale * tl.sigmoid(rate), 0.0)
    steps = tl.floor(decay * 512.0 + 0.5) * (1.0 / 512.0)
    coarse, fine = tl.cumsum(steps, 0), tl.cumsum(decay - steps, 0)
    end_coarse, end_fine = tl.sum(steps, 0)[None, :], tl.sum(decay - steps, 0)[None, :]
    read = tl.exp(coarse + fine)
    write = tl.where(there, tl.exp((end_coarse - coarse) + (end_fine - fine)), 0.0)
    last = tl.exp(end_coarse + end_fine) + tl.zeros((C, HEADS), tl.float32)
    vector = factors + (slot.to(tl.int64) * HV + head)[None, :] * (FACTORS * C) + i[:, None]
    within = (head < HV)[None, :] & (i < C)[:, None]
    tl.store(vector + READ_Q * C, scale * read, mask=within)
    tl.store(vector + READ_K * C, read, mask=within)
    tl.store(vector + WRITE * C, write, mask=within)
    tl.store(vector + BETA * C, rate, mask=within)
    tl.store(vector + LAST * C, last, mask=within)
    tl.store(vector + COARSE * C, coarse, mask=within)
    tl.store(vector + FINE * C, fine, mask=within)
    tl.store(vector + DECAY * C, decay, mask=within)
    if made is not None:
        tl.store(made + slot * HV + head, tl.zeros((HEADS,), tl.int32), mask=head < HV)


@triton.jit(do_not_specialize=["tokens"])
def head_gates_backward(
    gate, write, A_log, dt_bias, dlog_decay, dbeta, dgate, dwrite, sums, tokens, beta_scale, lower_bound,
    HV: tl.constexpr, HEADS: tl.constexpr, BT: tl.constexpr, RAW: tl.constexpr, RAW_BETA: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Go from the gradients of log_decay (RAW) and beta (RAW_BETA) to those of the raw gates, in tiles [BT, HEADS].

    sums `program 2 hv`: this program's part of dA_log and ddt_bias.
    """
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = (row < tokens)[:, None] & (head < HV)[None, :]
    at = row[:, None] * HV + head[None, :]
    if RAW:
        x = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias + head, mask=head < HV, other=0.0).to(tl.float32)[None, :]
        speed = tl.full((1, HEADS), 1.0, tl.float32)
        if A_log is not None:
            speed = tl.exp(tl.load(A_log + head, mask=head < HV, other=0.0).to(tl.float32))[None, :]
        d = tl.load(dlog_decay + at, mask=there, other=0.0)
        dx, dspeed = gate_gradients(d, x, speed, lower_bound)
        tl.store(dgate + at, dx.to(dgate.dtype.element_ty), mask=there)
        part = sums + tl.program_id(0) * 2 * HV + head
        tl.store(part, tl.sum(tl.where(there, dspeed, 0.0), 0), mask=head < HV)
        tl.store(part + HV, tl.sum(tl.where(there, dx, 0.0), 0), mask=head < HV)
    if RAW_BETA:
        rate = tl.sigmoid(tl.load(write + at, mask=there, other=0.0).to(tl.float32))
        dy = tl.load(dbeta + at, mask=there, other=0.0) * beta_scale * rate * (1.0 - rate)
        tl.store(dwrite + at, dy.to(dwrite.dtype.element_ty), mask=there)
