"""Decoding: runs a few tokens a row and updates the memory in place, as one torch op.

    decode(q, k, v, log_decay, beta, state=pool, slots=slots)      # on a GPU one kernel launch, fit for a CUDA graph

The equation is rule.step's; the gates select the rule as in `explain`. Training uses the ops of lineate.ops.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Slots
from lineate.forms.general import GeneralRow, general_row
from lineate.forms.stability import watch_erasing, watch_writes
from lineate.ops.decode_calls import READS, DecodeRequest, at_least_4d, check_and_choose, computed_gates, one_dtype
from lineate.ops.ring_decoding import decode_with_ring
from lineate.ops.rings import Ring
from lineate.ops.rounding import NEAREST, round_memory
from lineate.ops.slot_checks import check_slot_values
from lineate.plans import PLANS, call_signature
from lineate.rule import Rule, compute_dtype, full_precision, general_step, normalize, read, step
from lineate.torch_ops.schema import Flat, declare_call_op
from lineate.torch_ops.tracing import in_memory, is_virtual, transformed


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
    ring: Ring | None = None,
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
        ring: where tokens wait until the state is written, at every n-th token alone, so that a step moves .6 of the
            bytes; see lineate.Ring. It takes one token a row, slots without start_slots, and the five rules with one
            key a token. A bfloat16 state is then rounded when it is written, and seeds of other tokens are not used.
        backend: "auto", "torch" or "triton": one launch that reads and writes the state once.

    Returns:
        The output `b t hv v`, in the dtype of v.
    """
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, erase=erase, write=write, probe=probe, direction=direction,
        state=state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    request = DecodeRequest(scale, normalize_qk, raw_gates, beta_scale, lower_bound, rounding, backend)
    if ring is not None:
        return decode_with_ring(None, inputs, Slots(slots, start_slots, seeds), request, ring)
    return decode_inputs(None, inputs, Slots(slots, start_slots, seeds), request)


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
        one = one_dtype(inputs, request.raw_gates in (True, "log_decay"))
        if one is not inputs:
            return decode_inputs(rule, one, where, request).to(inputs.v.dtype)
        known = check_and_choose(rule, inputs, where, request)
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
        log_decay, rate = computed_gates(inputs, options, torch.float32)
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
    log_decay, beta = computed_gates(inputs, options, dtype)
    if options.corrects:
        watch_writes(k, beta, options.normalize_qk)  # before the state is written
    q, k = q.to(dtype), k.to(dtype)
    if options.normalize_qk:
        q, k = normalize(q), normalize(k)
    q, k = ((options.scale * q).repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2))  # b t hv k
    decay = None if log_decay is None else at_least_4d(log_decay.exp())  # b t hv 1|k
    beta = None if beta is None else at_least_4d(beta)  # b t hv 1|v

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
    log_decay, beta = computed_gates(inputs, options, dtype)
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


def _write(state: Tensor, slots: Tensor, own: Tensor, idle: Tensor | None) -> None:
    """Set state[slots] = own where the row is not idle and the slot is not negative."""
    kept = slots >= 0 if idle is None else (slots >= 0) & ~idle
    state[slots[kept].long()] = own[kept].to(state.dtype)
