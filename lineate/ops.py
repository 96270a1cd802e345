"""The five public ops, softmax attention beside them, and the attention matrix of each.

Shapes: q, k `b t h k`; v `b t hv v` (hv a multiple of h); log_decay `b t hv` or `b t hv k`, natural log, <= 0, per
token; beta `b t hv`; state `b hv k v` in float32 (float64 for float64 inputs). Keywords, the same on all:

    scale         multiplies the output; None is 1/sqrt(k)
    state         the memory to continue from; None is an empty one
    cu_seqlens    (n_seqs + 1,) int: texts packed into one row (b = 1) that never see each other;
                  states are then `n_seqs hv k v`
    form          "auto", "recurrent", "chunkwise" or "parallel"
    backend       "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU)
    chunk_size    tokens a chunk of the chunkwise form; None takes the backend's own
    normalize_qk  l2-normalise q and k inside

The result is always Attended(output `b t hv v` in the dtype of v, state). `lineate.explain` says what would run.

Everything differentiates backwards. Inside of torch.func (vmap, grad, jvp, ...) and forward mode only torch's own
functions run, of any form, and differentiate any number of times; elsewhere form="recurrent" and "parallel" alone
differentiate twice. On a GPU, where looking would wait, the kernels check neither cu_seqlens nor log_decay <= 0; nor is
log_decay checked where torch.func maps or differentiates it, and in compiled "recurrent" and "parallel" torch forms.
Autocast changes no result and no first derivative of these ops, wherever the backward runs; compiled "recurrent" and
"parallel" torch forms alone take autocast's dtype in their backward. torch.jit.trace records the ops; as any trace, it
keeps the form that was chosen, and whether gradients were wanted.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.dispatch import check_and_resolve, empty_state, select_rule
from lineate.forms.chunkwise import chunkwise
from lineate.forms.packing import Form, run_chunked, run_packed
from lineate.forms.parallel import attention_matrix as _attention_matrix
from lineate.forms.parallel import parallel
from lineate.forms.recurrent import recurrent
from lineate.forms.softmax import KeyValueCache, softmax
from lineate.native import ops as native_ops
from lineate.precision import full_precision_backward
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule, compute_dtype, full_precision
from lineate.rule import normalize as unit
from lineate.stability import watch_writes
from lineate.tracing import transformed

State = TypeVar("State")


class Attended(NamedTuple, Generic[State]):
    """What every op returns: the output `b t hv v`, and the memory after the last token."""

    output: Tensor
    state: State


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
    feature_map: str | Callable[[Tensor], Tensor] = "identity",
    normalize: bool = False,
) -> Attended[Tensor]:
    """Accumulate every pair: S_t = S_{t-1} + phi(k_t) v_t^T, o_t = scale * S_t^T phi(q_t).

    feature_map is phi: "identity", "elu+1", or any callable on `b t h k` (it may change k). With normalize=True the
    output is divided by phi(q_t) . sum of the keys so far; the state then has v + 1 columns, the last one that sum
    (float16, whose range such sums exceed, is computed as float32).
    """
    checks.check_qkv(q, k, v)
    checks.check_flag("normalize", normalize)
    if normalize_qk:
        checks.check_flag("normalize_qk", normalize_qk)
    phi = _feature_map(feature_map)
    if phi is not None:
        if normalize_qk:  # the features of unit vectors, not unit features
            q, k = unit(q), unit(k)
            normalize_qk = False
        q, k = phi(q), phi(k)
    dtype = v.dtype
    if normalize:
        q, k, v = with_ones(q, k, v)
    attended = _attend(
        LINEAR, q, k, v, None, None, scale, state, cu_seqlens, form, backend, chunk_size, normalize_qk
    )  # fmt: skip
    return Attended(divide_by_last(attended.output, dtype), attended.state) if normalize else attended


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget, then accumulate: S_t = Diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T (RetNet, Mamba-2, GLA).

    log_decay is `b t hv` (per head) or `b t hv k` (per key channel).
    """
    return _attend(
        GATED_LINEAR, q, k, v, log_decay, None, scale, state, cu_seqlens, form, backend, chunk_size, normalize_qk
    )  # fmt: skip


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Correct instead of adding: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T (DeltaNet).

    Keys should have unit length (normalize_qk=True). Outside of 0 <= beta |k|^2 <= 2 the memory grows with every token
    and overflows (keys of N(0, 1): 1e12 within 20 tokens); on a CPU UnstableMemoryWarning says so, once.
    beta may be `b t hv v`, one rate per value channel, in the recurrent form.
    """
    return _attend(
        DELTA, q, k, v, None, beta, scale, state, cu_seqlens, form, backend, chunk_size, normalize_qk
    )  # fmt: skip


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget per head, then correct: S' = exp(log_decay_t) S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T.

    log_decay is `b t hv`. Keys should have unit length (normalize_qk=True), or the memory may overflow: see delta_rule.
    """
    return _attend(
        GATED_DELTA, q, k, v, log_decay, beta, scale, state, cu_seqlens, form, backend, chunk_size, normalize_qk
    )  # fmt: skip


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget per key channel, then correct: S' = Diag(exp(log_decay_t)) S_{t-1}, then as gated_delta_rule.

    log_decay is `b t hv k`. Decay comes before the comparison. Keys should have unit length (normalize_qk=True), or the
    memory may overflow: see delta_rule.
    """
    return _attend(
        KIMI_DELTA, q, k, v, log_decay, beta, scale, state, cu_seqlens, form, backend, chunk_size, normalize_qk
    )  # fmt: skip


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    state: KeyValueCache | None = None,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
) -> Attended[KeyValueCache]:
    """Causal softmax attention in the same shapes, for comparison: o_t = sum_j softmax_j(scale q_t . k_j) v_j, j <= t.

    Its state is the key/value cache, which grows by one key and one value a token.
    """
    checks.check_qkv(q, k, v)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    checks.check_cache(state, k, v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Attended(*softmax(q, k, v, state, cu_seqlens, scale=scale, normalize_qk=normalize_qk))


@full_precision_backward
def attention_matrix(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
) -> Tensor:
    """A `b hv t t`, lower triangular, with output A V from an empty memory: what each token reads of each value.

    The gates select the rule as in `explain`; without gates it is linear attention.
    """
    checks.check_qkv(q, k, q)
    checks.check_one_rate(beta)
    gate, hv = log_decay if log_decay is not None else beta, q.shape[2]
    if isinstance(gate, Tensor) and gate.dim() > 2:
        hv = gate.shape[2] // hv * hv or hv  # a wrong number is the gate's, not that of values that are not there
    checks.check_inputs(select_rule(log_decay, beta), q, k, q.new_empty(*q.shape[:2], hv, 1), log_decay, beta)
    checks.check_decay(log_decay)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    watch_writes(k, beta, normalize_qk)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    corrects = beta is not None
    with full_precision(q):
        return _attention_matrix(q, k, log_decay, beta, corrects=corrects, scale=scale, normalize_qk=normalize_qk)


def _attend(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    backend: str,
    chunk_size: int | None,
    normalize_qk: bool,
) -> Attended[Tensor]:
    """Check, choose, run."""
    plan = check_and_resolve(
        rule,
        q,
        k,
        v,
        log_decay,
        beta,
        scale=scale,
        state=state,
        cu_seqlens=cu_seqlens,
        form=form,
        backend=backend,
        chunk_size=chunk_size,
        normalize_qk=normalize_qk,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if state is None:
        state = empty_state(q, v, cu_seqlens, compute_dtype(v.dtype))
    if plan.backend == "triton":
        checks.check_decay(log_decay)
        watch_writes(k, beta, normalize_qk)
        return Attended(
            *_attend_triton(plan.form, rule, q, k, v, log_decay, beta, scale, state, cu_seqlens, normalize_qk)
        )
    native = plan.backend == "native"
    if plan.form == "chunkwise" and not transformed():
        run_chunks = native_ops.chunkwise if native else chunkwise
        output, final = run_chunks(
            q,
            k,
            v,
            log_decay,
            beta,
            state,
            cu_seqlens,
            corrects=rule.corrects,
            scale=scale,
            normalize_qk=normalize_qk,
            chunk_size=plan.chunk_size,
        )
        return Attended(output, final)
    if native:
        output, final = native_ops.recurrent(
            q, k, v, log_decay, beta, state, cu_seqlens, corrects=rule.corrects, scale=scale, normalize_qk=normalize_qk
        )
        return Attended(output, final)
    checks.check_decay(log_decay)
    watch_writes(k, beta, normalize_qk)
    run: Form = partial(
        recurrent if plan.form == "recurrent" else parallel,
        corrects=rule.corrects,
        scale=scale,
        normalize_qk=normalize_qk,
    )
    if plan.form == "chunkwise":  # transformed
        run = partial(run_chunked, run, plan.chunk_size)
    return Attended(*_attend_torch(run, q, k, v, log_decay, beta, state, cu_seqlens))


@full_precision_backward
def _attend_torch(
    run: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with full_precision(q):
        if cu_seqlens is None:
            output, final = run(q, k, v, log_decay, beta, state)
        else:
            output, final = run_packed(run, q, k, v, log_decay, beta, state, cu_seqlens)
        return output.to(v.dtype), final


def _attend_triton(
    form: str,
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    state: Tensor,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    from lineate.kernels import ops as kernels  # triton, at its first use

    if form == "recurrent":
        return kernels.recurrent(
            q, k, v, log_decay, beta, state, cu_seqlens, scale=scale, normalize_qk=normalize_qk
        )  # fmt: skip
    return kernels.chunkwise(
        q, k, v, log_decay, beta, state, cu_seqlens, corrects=rule.corrects, scale=scale, normalize_qk=normalize_qk
    )


def _feature_map(feature_map: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor] | None:
    if callable(feature_map):
        return feature_map
    checks.check_choice("feature_map", feature_map, ("identity", "elu+1"))
    return None if feature_map == "identity" else lambda x: F.elu(x) + 1


def with_ones(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a last column of v whose memory is the sum of keys, for divide_by_last; float16 as float32."""
    if v.dtype == torch.float16:  # sums over many tokens exceed its range before they are divided
        q, k, v = q.float(), k.float(), v.float()
    return q, k, torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)


def divide_by_last(output: Tensor, dtype: torch.dtype, smallest: float = 1e-6) -> Tensor:
    """Divided by the last column, q . sum of keys, kept at least `smallest` away from 0; in this dtype."""
    total = output[..., -1:]
    total = torch.where(total.abs() < smallest, torch.copysign(total.new_full((), smallest), total), total)
    return (output[..., :-1] / total).to(dtype)
