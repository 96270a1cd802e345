"""The delta rules from what a layer's projections give: norms, gates and rates inside the kernels."""

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Request
from lineate.dispatch import check_and_resolve, empty_state, select_rule
from lineate.ops import Attended, gated_delta_rule, kimi_delta_attention
from lineate.rule import activate


def fused_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    *,
    beta_scale: float = 1.0,
    normalize_qk: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Attended[Tensor]:
    """Gated DeltaNet (gate `b t hv`) or Kimi Delta Attention (gate `b t hv k`) from raw gates.

        log_decay = -exp(A_log) softplus(gate + dt_bias)      beta = beta_scale sigmoid(write)

    write `b t hv`; A_log `hv`; dt_bias `hv`, or `hv k` (also flat) per channel. beta_scale = 2 allows negative
    eigenvalues. On a GPU the activations and the l2-normalisation of q and k happen inside the kernels, forward and
    backward; elsewhere they are plain torch in front of the same op. Everything differentiates.

    >>> out, state = lineate.fused_delta_rule(q, k, v, a, b, A_log, dt_bias)
    """
    checks.check_qkv(q, k, v)
    checks.check_raw_gates(Inputs(q, k, v, gate, write, A_log=A_log, dt_bias=dt_bias), beta_scale)
    if dt_bias is not None:
        dt_bias = dt_bias.view(gate.shape[2:])
    inputs = Inputs(q, k, v, gate, write, state, cu_seqlens, A_log, dt_bias)
    request = Request(scale, "chunkwise", backend, None, normalize_qk)
    plan, options = check_and_resolve(select_rule(gate, write), inputs, request)
    if plan.backend == "triton":
        from lineate.kernels import ops as kernels  # triton, at its first use

        if state is None:
            inputs = Inputs(
                q, k, v, gate, write, empty_state(q, v, cu_seqlens, torch.float32), cu_seqlens, A_log, dt_bias
            )
        options = Options(True, options.scale, normalize_qk, beta_scale=float(beta_scale), raw_gates=True)
        return Attended(*kernels.chunkwise(inputs, options))
    log_decay, beta = activate(gate, write, A_log, dt_bias, beta_scale)
    assert log_decay is not None and beta is not None
    op = kimi_delta_attention if gate.dim() == 4 else gated_delta_rule
    return op(
        q, k, v, log_decay, beta,
        scale=scale, state=state, cu_seqlens=cu_seqlens, form="chunkwise", backend=backend, normalize_qk=normalize_qk,
    )  # fmt: skip
