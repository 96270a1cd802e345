"""Everything about a call of `decode` that is decided before it runs: its options, its checks, its backend."""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Slots, in_one_dtype, spread_decay
from lineate.dispatch import TRANSFORMED, TRITON_WIDTH, interpreted, resolve_scale, select_rule
from lineate.forms.general import GATES
from lineate.kernels import DECODE_GENERAL_READS, DECODE_READS, DECODE_WRITES, GENERAL_RULES
from lineate.ops.rounding import NEAREST, ROUNDINGS, STOCHASTIC
from lineate.ops.slot_checks import check_decode_state, check_seeds, check_slots
from lineate.rule import Rule, activate, check_row
from lineate.torch_ops.tracing import constant_in_graphs, needs_grad, transformed

BACKENDS = ("auto", "torch", "triton")
READS = {
    "torch": ("q", "k", "v", *GATES, "state", "cu_seqlens", "A_log", "dt_bias"),
    "triton": DECODE_READS,
    "triton, general row": DECODE_GENERAL_READS,
}
"""The tensors of a decoding call that each backend reads."""


class DecodeRequest(NamedTuple):
    """The options that the caller of `decode` passes, before they are checked."""

    scale: float | None = None
    normalize_qk: bool = False
    raw_gates: bool | str = False
    beta_scale: float = 1.0
    lower_bound: float | None = None
    rounding: str = NEAREST
    backend: str = "auto"


def one_dtype(inputs: Inputs, raw_decay: bool) -> Inputs:
    """Return the inputs with q, k and v in one dtype, one log_decay a token, and dt_bias `hv k`; not converted ones."""
    plain = inputs.replace(state=None)  # it is written, so it is not converted
    one = in_one_dtype(plain if raw_decay else spread_decay(plain))
    bias = _unflat(inputs.dt_bias, inputs.log_decay)
    if one is plain and bias is inputs.dt_bias:
        return inputs
    return one.replace(state=inputs.state, dt_bias=bias)


def _unflat(dt_bias: Tensor | None, gate: Tensor | None) -> Tensor | None:
    """Return a bias `hv * k` of a gate per channel as `hv k`; others unchanged, for the checks."""
    if not isinstance(dt_bias, Tensor) or not isinstance(gate, Tensor) or gate.dim() != 4 or gate.shape[3] == 1:
        return dt_bias
    return dt_bias.view(gate.shape[2:]) if dt_bias.shape == (gate.shape[2:].numel(),) else dt_bias


def computed_gates(inputs: Inputs, options: Options, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return log_decay and beta, from raw gates where they are."""
    log_decay, beta = activate(
        inputs.log_decay, inputs.beta, inputs.A_log, inputs.dt_bias, options.beta_scale, dtype, options.lower_bound,
        options.raw_gates,
    )  # fmt: skip
    return tuple(None if x is None else x.to(dtype) for x in (log_decay, beta))  # type: ignore[return-value]


def at_least_4d(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(-1)


def check_and_choose(rule: Rule | None, inputs: Inputs, where: Slots, request: DecodeRequest) -> tuple[str, Options]:
    """Check everything about one call except values; return 'torch' or 'triton', and the options."""
    if rule is not None:
        check_row(rule)
    q, v, state, cu_seqlens = inputs.q, inputs.v, inputs.state, inputs.cu_seqlens
    scale, normalize_qk, raw_gates, beta_scale, lower_bound, rounding, backend = request
    checks.check_choice("backend", backend, BACKENDS)
    checks.check_choice("rounding", rounding, ROUNDINGS)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    for name in inputs.gates():
        if not isinstance(gate := getattr(inputs, name), Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(gate).__name__}")
    rule = select_rule(inputs) if rule is None else rule
    checks.check_inputs(rule, inputs)
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    checks.check_device("cu_seqlens", cu_seqlens, q)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_slots(where.slots, where.start_slots, rows, q, packed=cu_seqlens is not None)
    check_decode_state(state, q, v, rows, pooled=where.slots is not None)
    assert state is not None
    check_seeds(where.seeds, rows, q, state, stochastic=rounding == STOCHASTIC)
    checks.check_decode_gates(inputs, beta_scale, lower_bound, raw_gates)
    for name in inputs.DIFFERENTIABLE:
        if needs_grad(getattr(inputs, name)):
            raise ValueError(
                f"{name} must not require grad: decode writes into state and has no gradients; "
                "call it under torch.no_grad(), or train with the ops, such as lineate.gated_delta_rule"
            )
    scale = resolve_scale(scale, q.shape[-1])
    bound = None if lower_bound is None else float(lower_bound)
    raw_decay, raw_beta = raw_gates in (True, "log_decay"), raw_gates in (True, "beta")
    options = Options(rule, scale, normalize_qk, 64, float(beta_scale), raw_decay, raw_beta, bound)
    inputs.refuse_unread(READS["torch"], "decode")
    if backend == "torch" or (backend == "auto" and q.device.type != "cuda"):
        return "torch", options
    obstacle = _obstacle(rule, inputs, state)
    if obstacle is None:
        return "triton", options
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot serve this call: {obstacle}; use backend='torch'")
    return "torch", options


def _obstacle(rule: Rule, inputs: Inputs, state: Tensor) -> str | None:
    """Return the feature of this call that the kernel does not support, or None."""
    q = inputs.q
    if rule.general and rule not in GENERAL_RULES:
        return f"the kernel has no {rule.name}"
    reads = READS["triton, general row" if rule.general else "triton"]
    if unread := [name for name in inputs.given() if name not in reads]:
        return f"it does not read {', '.join(unread)}"
    if q.device.type != "cuda" and not (q.device.type == "cpu" and interpreted()):
        return f"it needs CUDA tensors, got {q.device.type}"
    if q.dtype == torch.float64:
        return "it computes in float32, got float64 inputs"
    key_dim, value_dim = state.shape[-2:]
    if max(key_dim, value_dim) > TRITON_WIDTH:
        return f"it takes k and v up to {TRITON_WIDTH}, got k = {key_dim} and v = {value_dim}"
    if rule.writes and inputs.k.shape[2] > DECODE_WRITES:
        return f"it takes up to {DECODE_WRITES} writes a token, got {inputs.k.shape[2]}"
    if transformed():
        return TRANSFORMED
    if (key_dim > 1 and state.stride(-2) != value_dim) or (value_dim > 1 and state.stride(-1) != 1):
        return f"it needs the [k, v] of each head of the state contiguous, got strides {tuple(state.stride())}"
    return _no_triton()


@constant_in_graphs
def _no_triton() -> str | None:
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None
