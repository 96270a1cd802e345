"""The gate of the decay, and the delta rules from raw gates; the kernels compute norms, gates and rates."""

import torch
from torch import Tensor

from lineate import checks
from lineate.again import form_of, repeat
from lineate.call import Inputs, Options, Request, in_one_dtype, spread_bias, spread_decay, which_are_raw
from lineate.dispatch import check_and_resolve, empty_state, select_rule
from lineate.ops.rules import Attended, gated_delta_rule, kimi_delta_attention
from lineate.rule import activate, compute_dtype, decay_of_gate


def decay_gate(
    gate: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *, lower_bound: float | None = None
) -> Tensor:
    """Return the log_decay that a raw gate gives, as the gated rules take it.

        log_decay = -exp(A_log) softplus(gate + dt_bias)                 (Gated DeltaNet, Kimi Linear)
                  = lower_bound sigmoid(exp(A_log) (gate + dt_bias))     with a lower bound (GLM-5-Next, Ring)

    >>> log_decay = lineate.decay_gate(gate, A_log, dt_bias, lower_bound=-5.0)

    fused_delta_rule computes the same inside its kernels.

    Args:
        gate: `b t hv` (per head) or `b t hv k` (per key channel), as a projection gives it.
        A_log: the logarithm of each head's speed of forgetting, `hv`. With a lower bound, None is exp(A_log) = 1.
        dt_bias: added to gate: `hv`, for a gate per channel also `hv k` (or flat); None adds nothing.
        lower_bound: if given, log_decay lies between it and 0; it must be below 0.

    Returns:
        log_decay in the shape of gate, float32 (float64 for a float64 gate).
    """
    checks.check_gate(gate, A_log, dt_bias, lower_bound)
    bias = None if dt_bias is None else spread_bias(dt_bias, gate)
    return decay_of_gate(gate.to(compute_dtype(gate.dtype)), A_log, bias, lower_bound)


def fused_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None = None,
    write: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
    normalize_qk: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Attended[Tensor]:
    """Run Gated DeltaNet (gate `b t hv`) or Kimi Delta Attention (gate `b t hv k`) from raw gates.

        log_decay = -exp(A_log) softplus(gate + dt_bias)      beta = beta_scale sigmoid(write)
                  = lower_bound sigmoid(exp(A_log) (gate + dt_bias))      with a lower bound

    On a GPU the activations and the l2-normalisation of q and k happen inside the kernels, forward and backward;
    elsewhere they are plain torch in front of the same op. Everything differentiates.

    >>> out, state = lineate.fused_delta_rule(q, k, v, a, b, A_log, dt_bias)
    >>> out, state = lineate.fused_delta_rule(q, k, v, a, beta=beta, A_log=A_log)      # only the gate is raw

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        gate: the raw gate of log_decay, `b t hv` (per head) or `b t hv k` (per key channel); None with log_decay.
        write: the raw logit of beta, `b t hv`; None with beta.
        A_log: the logarithm of each head's speed of forgetting, `hv`. With a lower bound, None is exp(A_log) = 1.
        dt_bias: added to gate: `hv`, for a gate per channel also `hv k` (or flat); None adds nothing.
        log_decay: log_decay itself, `b t hv`, `b t hv k` or `hv` (constant), instead of gate.
        beta: beta itself, `b t hv`, instead of write.
        beta_scale: the largest beta; 2 allows negative eigenvalues.
        lower_bound: if given, log_decay lies between it and 0, as in GLM-5-Next and Ring; it must be below 0.
        normalize_qk: whether q and k are l2-normalised inside.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    raw_decay = checks.check_either("gate", "log_decay", (gate, log_decay))
    raw_beta = checks.check_either("write", "beta", (write, beta))
    decay, rate = gate if raw_decay else log_decay, write if raw_beta else beta
    tensors = Inputs(q, k, v, decay, rate, state, cu_seqlens, A_log, dt_bias)
    arguments = raw_decay, raw_beta, beta_scale, lower_bound, normalize_qk, scale, backend
    form = form_of("fused_delta_rule", tensors, arguments)
    repeated = repeat(form, tensors)
    if repeated is not None:
        return Attended(*repeated)
    given = v
    q, k, v, _, _, state, _ = in_one_dtype(Inputs(q, k, v, state=state))[:7]
    checks.check_qkv(q, k, v)
    raw_gates = which_are_raw(raw_decay, raw_beta)
    inputs = Inputs(q, k, v, decay, rate, state, cu_seqlens, A_log, dt_bias)
    if not raw_decay:
        inputs = spread_decay(inputs)
        decay = inputs.log_decay
    checks.check_raw_gates(inputs, beta_scale, lower_bound, raw_gates)
    rule = select_rule(decay, rate)
    if dt_bias is not None and decay is not None:
        dt_bias = spread_bias(dt_bias, decay)
        inputs = inputs._replace(dt_bias=dt_bias)
    plan, options = check_and_resolve(rule, inputs, Request(scale, "chunkwise", backend, None, normalize_qk))
    if plan.backend == "triton":
        from lineate.kernels import ops as kernels  # triton, at its first use

        if state is None:
            inputs = inputs._replace(state=empty_state(q, v, cu_seqlens, torch.float32, shared=True))
        bound = None if lower_bound is None else float(lower_bound)
        options = Options(True, options.scale, normalize_qk, 64, float(beta_scale), raw_gates, bound)
        checks.check_decay(log_decay)
        output, final = kernels.chunkwise(inputs, options)
        kernels.remember_forward(form, tensors, inputs, options)
        return Attended(output.to(given.dtype), final)
    log_decay, beta = activate(
        decay, rate, A_log, dt_bias, beta_scale, lower_bound=lower_bound, raw_gates=raw_gates
    )  # fmt: skip
    assert log_decay is not None and beta is not None
    op = kimi_delta_attention if log_decay.dim() == 4 else gated_delta_rule
    output, final = op(
        q, k, v, log_decay, beta,
        scale=scale, state=state, cu_seqlens=cu_seqlens, form="chunkwise", backend=backend, normalize_qk=normalize_qk,
    )  # fmt: skip
    return Attended(output.to(given.dtype), final)
