"""Decoding: runs a few tokens a row and updates the memory in place, as one torch op.

    decode(q, k, v, log_decay, beta, state=pool, slots=slots)      # on a GPU one kernel launch, fit for a CUDA graph

The equation is rule.step's; the gates select the rule as in `explain`. Training uses the ops of lineate.ops.
"""

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Slots, in_one_dtype, spread_decay
from lineate.dispatch import (
    TRANSFORMED,
    TRITON_WIDTH,
    interpreted,
    resolve_scale,
    select_rule,
)
from lineate.forms.general import GATES, GeneralRow, general_row
from lineate.forms.stability import watch_erasing, watch_writes
from lineate.kernels import DECODE_GENERAL_READS, DECODE_READS, DECODE_WRITES, GENERAL_RULES
from lineate.ops.rounding import NEAREST, ROUNDINGS, STOCHASTIC, round_memory
from lineate.ops.slot_checks import check_decode_state, check_seeds, check_slot_values, check_slots
from lineate.plans import PLANS, call_signature
from lineate.rule import Rule, activate, check_row, compute_dtype, full_precision, general_step, normalize, read, step
from lineate.torch_ops.schema import Flat, declare_call_op
from lineate.torch_ops.tracing import constant_in_graphs, in_memory, is_virtual, needs_grad, transformed

BACKENDS = ("auto", "torch", "triton")
READS = {
    "torch": ("q", "k", "v", *GATES, "state", "cu_seqlens", "A_log", "dt_bias"),
    "triton": DECODE_READS,
    "triton, general row": DECODE_GENERAL_READS,
}
"""The tensors of a decoding call that each backend reads."""


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    start_slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    direction: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    raw_gates: bool | str = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
    rounding: str = NEAREST,
    seeds: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run t >= 1 tokens a row through the memory, write the new memory into `state`, return the output `b t hv v`.

    A row is one of b batch rows, or, with cu_seqlens and b = 1, one of the packed sequences. There are no gradients.
    The gates select the rule as in `explain`. The bits of a row's result depend neither on the rest of the batch
    nor on how its tokens are split into calls.

    No slot may be written by two rows, or written by one and read by another. On a CPU this is checked. On a GPU it is
    not, because reading the slots would wait for the device; there the kernel touches no slot outside the pool, and the
    output of a row that starts outside of it is NaN.

    q, k and v of different dtypes are converted to the one that torch promotes them to. The state must be float32
    (float64 for float64 inputs) or bfloat16, because it is written. All arithmetic is float32's. A bfloat16 state is
    rounded after every token, also after those whose state is not stored; the output is read before that.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`; `b t n h k` selects gated_delta_product, and v and beta then have n writes too.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv` (per head), `b t hv k` (per key channel), `hv` (a constant of each head), or None for a rule
            that does not forget.
        beta: `b t hv`, `b t hv v` (one rate per value channel), or None for a rule that only accumulates.
        state: `rows hv k v`, float32 (float64 for float64 inputs) or bfloat16, modified; with slots a pool
            `n_slots hv k v`, of which only the named slots are modified.
        slots: `rows`, int: the slot of each row. Or one slot for each token, `b t` (packed: `n_seqs` by the longest
            sequence): the memory after token i of a row goes to slots[row, i], so that a rejected guess can be taken
            back; this needs start_slots. A negative slot is not written.
        start_slots: `rows`, int: the slot each row starts from; None is slots. Rows may share one. A row that
            starts from a negative slot is idle: its output is 0 and it writes nothing.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        erase: `b t hv k`, of gated_delta_rule_2.
        write: `b t hv v`, of gated_delta_rule_2.
        probe: `b t hv k`, of diagonal_plus_low_rank.
        direction: `b t hv k`, of diagonal_plus_low_rank.
        scale: multiplies the output; None is 1/sqrt(k).
        normalize_qk: whether q and k are l2-normalised inside.
        raw_gates: whether log_decay is the raw gate x of log_decay = -exp(A_log) * softplus(x + dt_bias), and beta the
            raw logit x of beta = beta_scale * sigmoid(x). "log_decay" or "beta" if only that one is raw.
        A_log: `hv`, for raw gates. With a lower bound, None is exp(A_log) = 1.
        dt_bias: `hv`, `hv k` (also flat) or None, for raw gates.
        beta_scale: the largest beta of raw gates.
        lower_bound: below 0: if given, log_decay = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)) for raw gates.
        rounding: how a bfloat16 state is rounded: "nearest", ties to even; or "stochastic", up or down by chance, so
            that its mean is exact and changes below half a unit in the last place are not lost.
        seeds: `rows`, int, for stochastic rounding: token i of row r takes the random numbers of seeds[r] + i. The same
            seeds give the same bits. A position in the sequence is a good seed; on the device it serves a CUDA graph.
        backend: "auto", "torch" or "triton": one launch that reads and writes the state once.

    Returns:
        The output `b t hv v`, in the dtype of v.
    """
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, erase=erase, write=write, probe=probe, direction=direction,
        state=state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    request = DecodeRequest(scale, normalize_qk, raw_gates, beta_scale, lower_bound, rounding, backend)
    return decode_inputs(None, inputs, Slots(slots, start_slots, seeds), request)


class DecodeRequest(NamedTuple):
    """The options that the caller of `decode` passes, before they are checked."""

    scale: float | None = None
    normalize_qk: bool = False
    raw_gates: bool | str = False
    beta_scale: float = 1.0
    lower_bound: float | None = None
    rounding: str = NEAREST
    backend: str = "auto"


def decode_inputs(rule: Rule | None, inputs: Inputs, where: Slots, request: DecodeRequest) -> Tensor:
    """Run a few tokens a row and write the new memory into inputs.state; see decode.

    rule: its row; None: the one that takes the gates.
    """
    state = inputs.state
    signature = call_signature("decode", rule, (*inputs.tensors(), *where), request)
    if signature is not None:
        signature = None if state is None else (*signature, state.stride())
    known: tuple[str, Options] | None = None if signature is None else PLANS.get(signature)
    if known is None:
        checks.check_which_raw(request.raw_gates)
        one = _in_one_dtype(inputs, request.raw_gates in (True, "log_decay"))
        if one is not inputs:
            return decode_inputs(rule, one, where, request).to(inputs.v.dtype)
        known = _check_and_choose(rule, inputs, where, request)
        if signature is not None:
            PLANS.put(signature, known)
    chosen, options = known
    if signature is not None:
        return _decode(inputs, options, where, chosen)
    if transformed():
        raise ValueError(
            "decode must not be compiled inside of torch.func transforms or forward mode, which do not see into it; "
            "call it outside of torch.compile, or use the ops, such as lineate.gated_delta_rule"
        )
    # An op costs microseconds; only compilers, dispatch modes and tensor subclasses need one.
    output: Tensor = _decode_op(*_FLAT.flatten(inputs, options, where), chosen)
    return output


def _in_one_dtype(inputs: Inputs, raw_decay: bool) -> Inputs:
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


def _decode(inputs: Inputs, options: Options, where: Slots, backend: str) -> Tensor:
    """Check the values of the arguments, then run; compiled calls also reach this with concrete values."""
    q, state = inputs.q, inputs.state
    assert state is not None
    checks.check_cu_seqlens(inputs.cu_seqlens, q.shape[0], q.shape[1])
    check_slot_values(where.slots, where.start_slots, inputs.cu_seqlens, state.shape[0])
    if state._is_zerotensor():
        raise ValueError("state must have memory to write into, got a zero tensor; start from torch.zeros")
    if not options.raw_decay:
        checks.check_decay(inputs.log_decay)
    if backend == "torch":
        with full_precision(q):
            return _decode_torch(inputs, where, options)
    from lineate.kernels import pipeline  # triton, at its first use

    if q.device.type == "cpu":  # the interpreter
        log_decay, rate = _activated(inputs, options, torch.float32)
        if options.rule.general:
            watch_erasing(inputs.replace(log_decay=log_decay, beta=rate), options)
        elif options.corrects:
            watch_writes(inputs.k, rate, options.normalize_qk)
    if any(is_virtual(x) for x in inputs.given().values()):
        inputs = inputs.map(lambda x: in_memory((x,))[0])
    output = pipeline.decode(inputs, Slots(*in_memory(where)), options)
    if inputs.state is not None and inputs.state is not state:  # a view of negated numbers
        state.copy_(inputs.state)
    elif not state.is_inference():
        torch.autograd.graph.increment_version(state)  # as any torch function that writes in place does
    return output


_FLAT = Flat(READS["torch"], Options._fields, places=True)


def _run_op(*arguments: Any) -> Tensor:
    return _decode(*_FLAT.restore(arguments[:-1]), _FLAT.slots(arguments), arguments[-1])


def _fake(*arguments: Any) -> Tensor:
    v = _FLAT.restore(arguments)[0].v
    return v.new_empty(*v.shape[:2], *v.shape[-2:])


_decode_op = declare_call_op(
    "decode", _FLAT, _run_op, _fake, results="Tensor", written=("state",), more=("str backend",)
)


def _decode_torch(inputs: Inputs, where: Slots, options: Options) -> Tensor:
    """Run rule.step token by token, for all rows at once or for one packed sequence after the other."""
    q, v, state, cu_seqlens = inputs.q, inputs.v, inputs.state, inputs.cu_seqlens
    assert state is not None
    slots, start_slots, seeds = where
    t, dtype = q.shape[1], compute_dtype(v.dtype)
    advance = (_advance_general if options.rule.general else _advance)(inputs, options, dtype)
    output = v.new_empty(*v.shape[:2], *v.shape[-2:])
    start_slots = slots if start_slots is None else start_slots
    batches = [(slice(0, q.shape[0]), slice(0, q.shape[0]), 0, t)]  # rows, batch rows, first token, end
    if cu_seqlens is not None:
        sequences = enumerate(pairwise(cu_seqlens.tolist()))
        batches = [(slice(i, i + 1), slice(0, 1), first, end) for i, (first, end) in sequences]
    for rows, batch, first, end in batches:
        if start_slots is None:
            idle, own = None, state[rows]
        else:
            start = start_slots[rows].long()
            idle, own = start < 0, state[start.clamp(min=0)]
        own = own.to(dtype)
        for i in range(first, end):
            answer, own = advance(own, batch, i)
            if state.dtype != dtype:
                own = round_memory(own, None if seeds is None else seeds[rows] + (i - first))
            output[batch, i] = (answer if idle is None else answer.masked_fill(idle[:, None, None], 0)).to(v.dtype)
            if slots is not None and slots.dim() == 2 and i - first < slots.shape[1]:
                _write(state, slots[rows, i - first], own, idle)
        if slots is None:
            state[rows] = own
        elif slots.dim() == 1:
            _write(state, slots[rows], own, idle)
    return output


Advance = Callable[[Tensor, slice, int], tuple[Tensor, Tensor]]
"""Takes the memory, rows of the batch, and the number of a token; returns what the token reads, and the new memory."""


def _advance(inputs: Inputs, options: Options, dtype: torch.dtype) -> Advance:
    """Return a step of a rule with one key."""
    q, k, v = inputs.q, inputs.k, inputs.v
    group = v.shape[2] // q.shape[2]
    log_decay, beta = _activated(inputs, options, dtype)
    if options.corrects:
        watch_writes(k, beta, options.normalize_qk)  # before the state is written
    q, k = q.to(dtype), k.to(dtype)
    if options.normalize_qk:
        q, k = normalize(q), normalize(k)
    q, k = ((options.scale * q).repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2))  # b t hv k
    decay = None if log_decay is None else _at_least_4d(log_decay.exp())  # b t hv 1|k
    beta = None if beta is None else _at_least_4d(beta)  # b t hv 1|v

    def advance(own: Tensor, batch: slice, i: int) -> tuple[Tensor, Tensor]:
        return step(
            own,
            q[batch, i],
            k[batch, i],
            v[batch, i].to(dtype),
            None if decay is None else decay[batch, i],
            None if beta is None else beta[batch, i],
            options.corrects,
        )

    return advance


def _advance_general(inputs: Inputs, options: Options, dtype: torch.dtype) -> Advance:
    """Return a step of the general row: all writes of one token."""
    log_decay, beta = _activated(inputs, options, dtype)
    inputs = inputs.replace(log_decay=log_decay, beta=beta)
    watch_erasing(inputs, options)
    row: GeneralRow = general_row(inputs, options)
    decay = None if row.log_decay is None else row.log_decay.exp()

    def advance(own: Tensor, batch: slice, i: int) -> tuple[Tensor, Tensor]:
        for j in range(i * row.writes, (i + 1) * row.writes):
            forget = None if decay is None or j % row.writes else decay[batch, j]
            own = general_step(own, row.k[batch, j], row.u[batch, j], forget, row.e[batch, j], row.d[batch, j])
        return read(own, row.q[batch, i]), own

    return advance


def _activated(inputs: Inputs, options: Options, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return log_decay and beta, from raw gates where they are."""
    log_decay, beta = activate(
        inputs.log_decay, inputs.beta, inputs.A_log, inputs.dt_bias, options.beta_scale, dtype, options.lower_bound,
        options.raw_gates,
    )  # fmt: skip
    return tuple(None if x is None else x.to(dtype) for x in (log_decay, beta))  # type: ignore[return-value]


def _write(state: Tensor, slots: Tensor, own: Tensor, idle: Tensor | None) -> None:
    """Set state[slots] = own where the row is not idle and the slot is not negative."""
    kept = slots >= 0 if idle is None else (slots >= 0) & ~idle
    state[slots[kept].long()] = own[kept].to(state.dtype)


def _at_least_4d(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _check_and_choose(rule: Rule | None, inputs: Inputs, where: Slots, request: DecodeRequest) -> tuple[str, Options]:
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
