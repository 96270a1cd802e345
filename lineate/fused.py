"""The delta rules from what a layer's projections give: norms, gates and rates inside the kernels."""

import torch
from torch import Tensor

from lineate import checks
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
    checks.check_raw_gates(gate, write, A_log, dt_bias, beta_scale, q, v)
    if dt_bias is not None:
        dt_bias = dt_bias.view(gate.shape[2:])
    rule = select_rule(gate, write)
    plan = check_and_resolve(
        rule, q, k, v, gate, write,
        scale=scale, state=state, cu_seqlens=cu_seqlens, form="chunkwise", backend=backend, chunk_size=None,
        normalize_qk=normalize_qk,
    )  # fmt: skip
    if plan.backend == "triton":
        from lineate.kernels import ops as kernels  # triton, at its first use

        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if state is None:
            state = empty_state(q, v, cu_seqlens, torch.float32)
        output, final = kernels.chunkwise(
            q, k, v, gate, write, state, cu_seqlens, corrects=True, scale=scale, normalize_qk=normalize_qk,
            A_log=A_log, dt_bias=dt_bias, beta_scale=float(beta_scale),
        )  # fmt: skip
        return Attended(output, final)
    log_decay, beta = activate(gate, write, A_log, dt_bias, beta_scale)
    assert log_decay is not None and beta is not None
    op = kimi_delta_attention if gate.dim() == 4 else gated_delta_rule
    return op(
        q, k, v, log_decay, beta,
        scale=scale, state=state, cu_seqlens=cu_seqlens, form="chunkwise", backend=backend, normalize_qk=normalize_qk,
    )  # fmt: skip
