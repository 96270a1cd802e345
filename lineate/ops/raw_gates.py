"""The gate of the decay, and the delta rules from raw gates; the kernels compute norms, gates and rates."""

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, RawGates, Request, in_one_dtype, spread_bias, spread_decay
from lineate.dispatch import check_and_resolve, empty_state, select_rule
from lineate.ops.rules import Attended, attend
from lineate.plans import repeat, repeat_signature
from lineate.rule import Rule, activate, compute_dtype, decay_of_gate


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
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=gate if raw_decay else log_decay, beta=write if raw_beta else beta, state=state,
        cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    raw = RawGates(raw_decay, raw_beta, beta_scale, lower_bound)
    return attend_raw(None, inputs, raw, normalize_qk=normalize_qk, scale=scale, backend=backend)


def attend_raw(
    rule: Rule | None,
    given: Inputs,
    raw: RawGates,
    *,
    normalize_qk: bool = True,
    scale: float | None = None,
    backend: str = "auto",
) -> Attended[Tensor]:
    """Run a rule whose gates are raw, or some of them; see fused_delta_rule.

    rule: its row; None: the one that takes the gates, once they have been checked.
    """
    name = "" if rule is None else rule.name
    signature = repeat_signature("fused_delta_rule", given, (name, *raw, normalize_qk, scale, backend))
    repeated = repeat(signature, given)
    if repeated is not None:
        return Attended(*repeated)
    inputs = in_one_dtype(given)
    checks.check_qkv(inputs.q, inputs.k, inputs.v)
    if not raw.raw_decay:
        inputs = spread_decay(inputs)
    checks.check_raw_gates(inputs, raw.beta_scale, raw.lower_bound, raw.which)
    rule = select_rule(inputs) if rule is None else rule
    if inputs.dt_bias is not None and inputs.log_decay is not None:
        inputs = inputs.replace(dt_bias=spread_bias(inputs.dt_bias, inputs.log_decay))
    request = Request(scale, "chunkwise", backend, None, normalize_qk)
    plan, options = check_and_resolve(rule, inputs, request)
    if plan.backend == "triton":
        from lineate.kernels import ops as kernels  # triton, at its first use

        if inputs.state is None:
            state = empty_state(inputs.q, inputs.v, inputs.cu_seqlens, torch.float32, shared=True)
            inputs = inputs.replace(state=state)
        bound = None if raw.lower_bound is None else float(raw.lower_bound)
        options = Options(
            rule, options.scale, normalize_qk, 64, float(raw.beta_scale), raw.raw_decay, raw.raw_beta, bound
        )  # fmt: skip
        if not raw.raw_decay:
            checks.check_decay(given.log_decay)
        output, final = kernels.chunkwise(inputs, options)
        kernels.remember_forward(signature, given, inputs, options)
    else:
        output, final = attend(rule, activated(inputs, raw), request)
    return Attended(output.to(given.v.dtype), final)


def activated(inputs: Inputs, raw: RawGates) -> Inputs:
    """Return the call with log_decay and beta in place of the raw gates and their parameters."""
    log_decay, beta = activate(
        inputs.log_decay, inputs.beta, inputs.A_log, inputs.dt_bias, raw.beta_scale,
        lower_bound=raw.lower_bound, raw_gates=raw.which,
    )  # fmt: skip
    return inputs.replace(log_decay=log_decay, beta=beta, A_log=None, dt_bias=None)
