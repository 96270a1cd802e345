"""The public ops of the rules with one key, and softmax attention; those of the general row are in ops/general.py.

Shapes: q, k `b t h k`; v `b t hv v` (hv a multiple of h); log_decay `b t hv` or `b t hv k`, natural logarithm, at most
0, per token, or `hv` if it is constant; beta `b t hv`; state `b hv k v` in float32 (float64 for float64 inputs). All
ops have the same keywords. The result is always Attended(output `b t hv v` in the dtype of v, state). `lineate.explain`
says what would run.

Dtypes. q, k and v of different dtypes are converted to the one that torch promotes them to; the output has v's own.
Gates may have any dtype. A first state of another floating dtype is converted to float32 (float64 for float64 inputs).

Gradients. Every op differentiates backwards. Inside torch.func (vmap, grad, jvp, ...) and forward mode all forms run
torch's own functions, which differentiate any number of times; elsewhere only "recurrent" and "parallel" do, twice.

Checks. On a GPU neither the values of cu_seqlens nor log_decay <= 0 are checked, as reading them would wait for it.
log_decay is not checked inside torch.func and in the torch backend's compiled "recurrent" and "parallel" forms either.

Autocast changes no result and no first derivative of these ops, wherever the backward runs. The one exception is
the torch backend's compiled "recurrent" and "parallel" forms, whose backward runs in autocast's dtype.

torch.jit.trace can record the ops. The trace fixes the form that was chosen and whether gradients were required.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Request, in_one_dtype, spread_decay
from lineate.console.hints import OF_OPS, hinted
from lineate.dispatch import check_and_resolve, empty_state
from lineate.forms.chunkwise import READS as CHUNKWISE_READS
from lineate.forms.chunkwise import chunkwise
from lineate.forms.general_chunkwise import general_chunkwise
from lineate.forms.packing import Form, run_chunked, run_packed
from lineate.forms.parallel import parallel
from lineate.forms.recurrent import recurrent
from lineate.forms.stability import watch_erasing, watch_writes
from lineate.native import general as native_general
from lineate.native import ops as native_ops
from lineate.ops.key_sums import divide_by_last, with_ones
from lineate.ops.softmax import KeyValueCache, check_cache, softmax
from lineate.plans import repeat, repeat_signature
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule, compute_dtype, full_precision
from lineate.rule import normalize as unit
from lineate.torch_ops.precision import full_precision_backward
from lineate.torch_ops.tracing import transformed

State = TypeVar("State")


class Attended(NamedTuple, Generic[State]):
    """The result of every op: the output, and the memory after the last token."""

    output: Tensor
    """`b t hv v`, in the dtype of v."""
    state: State
    """`b hv k v`, or `n_seqs hv k v` for packed sequences; a KeyValueCache for softmax attention."""


@hinted(OF_OPS)
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

    With normalize=True the output is divided by phi(q_t) . (sum of the keys so far). The state then has v + 1 columns,
    of which the last is that sum; float16, whose range such sums exceed, is computed as float32.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.
        feature_map: phi: "identity", "elu+1", or any callable on `b t h k`, which may change k.
        normalize: whether to divide the output by phi(q_t) . (sum of the keys so far).

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = in_one_dtype(Inputs(q=q, k=k, v=v, state=state, cu_seqlens=cu_seqlens))
    checks.check_qkv(inputs.q, inputs.k, inputs.v)
    checks.check_flag("normalize", normalize)
    if normalize_qk:
        checks.check_flag("normalize_qk", normalize_qk)
    phi = _feature_map(feature_map)
    if phi is not None:
        if normalize_qk:  # the features of unit vectors, not unit features
            inputs = inputs.map(unit, ("q", "k"))
            normalize_qk = False
        inputs = inputs.map(phi, ("q", "k"))
    if normalize:
        q, k, v_and_ones = with_ones(inputs.q, inputs.k, inputs.v)
        inputs = inputs.replace(q=q, k=k, v=v_and_ones)
    output, final = attend(LINEAR, inputs, Request(scale, form, backend, chunk_size, normalize_qk))
    return Attended(divide_by_last(output, v.dtype) if normalize else output.to(v.dtype), final)


@hinted(OF_OPS)
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

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv` (per head) or `b t hv k` (per key channel): natural logarithm, at most 0, per token; or
            `hv`, one constant for each head (RetNet, lightning attention).
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(q=q, k=k, v=v, log_decay=log_decay, state=state, cu_seqlens=cu_seqlens)
    return attend(GATED_LINEAR, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


@hinted(OF_OPS)
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
    and overflows (keys of N(0, 1) reach 1e12 within 20 tokens); on a CPU, UnstableMemoryWarning says so once.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        beta: the rate of writing, `b t hv`; also `b t hv v`, one rate per value channel.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(q=q, k=k, v=v, beta=beta, state=state, cu_seqlens=cu_seqlens)
    return attend(DELTA, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


@hinted(OF_OPS)
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

    Keys should have unit length (normalize_qk=True), or the memory may overflow: see delta_rule.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv`: natural logarithm of the decay, at most 0, per token; or `hv`, one constant for each head.
        beta: the rate of writing, `b t hv`; also `b t hv v`, one rate per value channel.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=state, cu_seqlens=cu_seqlens)
    return attend(GATED_DELTA, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


@hinted(OF_OPS)
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

    The decay comes before the comparison. Keys should have unit length (normalize_qk=True), or the memory may overflow:
    see delta_rule.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv k`: natural logarithm of the decay, at most 0, per token.
        beta: the rate of writing, `b t hv`; also `b t hv v`, one rate per value channel.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=state, cu_seqlens=cu_seqlens)
    return attend(KIMI_DELTA, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


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

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        scale: multiplies the scores; None is 1/sqrt(k).
        state: the cache to continue from; None is an empty one.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the cache after the last token.
    """
    checks.check_qkv(q, k, v)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    check_cache(state, k, v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Attended(*softmax(q, k, v, state, cu_seqlens, scale=scale, normalize_qk=normalize_qk))


def attend(rule: Rule, inputs: Inputs, request: Request) -> Attended[Tensor]:
    """Check a call of a rule, choose its form and backend, and run it; or repeat an earlier one."""
    given = inputs
    signature = repeat_signature(rule, inputs, request)
    repeated = repeat(signature, inputs)
    if repeated is not None:
        return Attended(*repeated)
    if inputs.A_log is not None or inputs.dt_bias is not None:
        raise ValueError(
            f"A_log and dt_bias must be None for {rule.name}, whose gates are given, got a tensor; use "
            "lineate.fused_delta_rule for raw gates, or A_log together with them in a mixer's rule_inputs"
        )
    inputs = in_one_dtype(inputs)
    if "head" in rule.decays:
        inputs = spread_decay(inputs)
    if inputs.v is not given.v:  # of another dtype
        output, state = attend(rule, inputs, request)
        return Attended(output.to(given.v.dtype), state)
    plan, options = check_and_resolve(rule, inputs, request)
    if inputs.state is None:
        q, v, shared = inputs.q, inputs.v, plan.backend == "triton"
        inputs = inputs.replace(state=empty_state(q, v, inputs.cu_seqlens, compute_dtype(v.dtype), shared=shared))
    if plan.backend == "native":
        native = native_general if rule.general else native_ops
        return Attended(*(native.chunkwise if plan.form == "chunkwise" else native.recurrent)(inputs, options))
    by_hand = rule.general or all(name in CHUNKWISE_READS for name in rule.gates)
    if plan.form == "chunkwise" and plan.backend == "torch" and by_hand and not transformed():
        return Attended(*(general_chunkwise if rule.general else chunkwise)(inputs, options))
    checks.check_decay(inputs.log_decay)
    if rule.general:
        watch_erasing(inputs, options)
    elif rule.corrects:
        watch_writes(inputs.k, inputs.beta, options.normalize_qk)
    if plan.backend == "triton":
        from lineate.kernels import ops as kernels  # triton, at its first use

        if plan.form == "recurrent":
            return Attended(*kernels.recurrent(inputs, options))
        attended = Attended(*kernels.chunkwise(inputs, options))
        kernels.remember_forward(signature, given, inputs, options)
        return attended
    run: Form = recurrent if plan.form == "recurrent" else parallel
    if plan.form == "chunkwise":  # inside a transform, or for a rule whose chunks are not written by hand
        run = partial(run_chunked, run)
    return Attended(*_attend_torch(run, inputs, options))


@full_precision_backward
def _attend_torch(run: Form, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    with full_precision(inputs.q):
        output, final = run(inputs, options) if inputs.cu_seqlens is None else run_packed(run, inputs, options)
        return output.to(inputs.v.dtype), final


def _feature_map(feature_map: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor] | None:
    if callable(feature_map):
        return feature_map
    checks.check_choice("feature_map", feature_map, ("identity", "elu+1"))
    return None if feature_map == "identity" else lambda x: torch.nn.functional.elu(x) + 1
