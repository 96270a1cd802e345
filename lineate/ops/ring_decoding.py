"""`decode` with a ring: one token a row, whose state is written at every n-th token alone (rings.py)."""

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Slots
from lineate.dispatch import TRANSFORMED
from lineate.forms import ring as form
from lineate.forms.stability import watch_writes
from lineate.ops.decode_calls import DecodeRequest, at_least_4d, check_and_choose, computed_gates, one_dtype
from lineate.ops.rings import Ring, check_rule
from lineate.ops.rounding import round_memory
from lineate.ops.slot_checks import check_slot_values
from lineate.plans import PLANS, call_signature
from lineate.rule import EPSILON, Rule, compute_dtype, full_precision, normalize
from lineate.torch_ops.tracing import transformed


def decode_with_ring(
    rule: Rule | None, inputs: Inputs, where: Slots, request: DecodeRequest, ring: Ring, *, settled: bool = False
) -> Tensor:
    """Run one token a row; see lineate.decode.

    Args:
        rule: Its row; None: the one that takes the gates.
        inputs: The token and the state.
        where: The slots and seeds of the rows.
        request: The options of the call.
        ring: The ring of the state.
        settled: Whether no recent launch writes what the kernel loads early, as in a step of a model.
    """
    if not isinstance(ring, Ring):
        raise TypeError(f"ring must be a lineate.Ring or None, got {type(ring).__name__}; make it with lineate.Ring")
    tensors = (*inputs.tensors(), *where, ring.state, *ring.tensors.tensors)
    signature = call_signature("decode ring", rule, tensors, request)
    known: tuple[str, Options] | None = None
    if signature is not None and inputs.state is not None:
        own = (ring.rule.name, ring.raw_decay, ring.lower_bound, ring.every, inputs.state.stride())
        signature = (*signature, *own)
        known = PLANS.get(signature)
    if known is None:
        checks.check_which_raw(request.raw_gates)
        one = one_dtype(inputs, request.raw_gates in (True, "log_decay"))
        if one is not inputs:
            return decode_with_ring(rule, one, where, request, ring, settled=settled).to(inputs.v.dtype)
        if torch.compiler.is_compiling() or transformed():
            raise ValueError(f"ring must be None in compiled code and under torch.func: {TRANSFORMED}; leave it None")
        known = check_and_choose(rule, inputs, where, request)
        _check_ring(ring, inputs, where, known[1])
        if signature is not None:
            PLANS.put(signature, known)
    backend, options = known
    state = inputs.state
    assert state is not None
    if state.data_ptr() != ring.state.data_ptr():
        raise ValueError("state must be the pool that the ring was made for, got other memory; pass ring.state")
    if ring.raw_decay:
        _check_parameters(ring, inputs)
    check_slot_values(where.slots, where.start_slots, None, state.shape[0])
    if not options.raw_decay:
        checks.check_decay(inputs.log_decay)
    if backend == "triton":
        from lineate.kernels import pipeline  # triton, at its first use

        output = pipeline.decode_ring(inputs, where, ring.tensors, options, settled=settled)
    else:
        with full_precision(inputs.q), torch.no_grad():
            output = _run(inputs, where, ring, options)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)  # as any torch function that writes in place does
    if ring.counts:
        _count(ring, where.slots, len(inputs.q), state.shape[0], backend)
    return output


def _count(ring: Ring, slots: Tensor | None, rows: int, n_slots: int, backend: str) -> None:
    """Count one token of every row that is not idle."""
    tokens = ring.tensors.tokens
    if slots is None:
        tokens[:rows] += 1
    elif backend == "triton":
        from lineate.kernels.portable import launch_ring  # triton, at its first use

        launch_ring.count(ring.tensors, slots, n_slots)
    else:
        tokens.index_add_(0, slots.clamp(min=0).long(), (slots >= 0).to(tokens.dtype))


def _check_ring(ring: Ring, inputs: Inputs, where: Slots, options: Options) -> None:
    """Raise unless a ring is for calls like this one."""
    own, state = ring.tensors, inputs.state
    assert state is not None
    check_rule(options.rule)
    if options.rule is not ring.rule:
        raise ValueError(
            f"ring must be one of {options.rule.name}, got one of {ring.rule.name}; make it with lineate.Ring"
        )
    if inputs.q.shape[1] != 1 or inputs.cu_seqlens is not None:
        what = "packed sequences" if inputs.cu_seqlens is not None else f"t = {inputs.q.shape[1]}"
        raise ValueError(f"ring takes one token a row, got {what}; call ring.fold(), and decode without the ring")
    if where.start_slots is not None:
        raise ValueError(
            "start_slots must be None with a ring, whose entries are those of one slot, got a tensor; call ring.fold() "
            "and copy the state, or decode without the ring"
        )
    if state.shape != ring.state.shape or state.stride() != ring.state.stride() or state.dtype != ring.state.dtype:
        raise ValueError(
            f"state must be the pool that the ring was made for, {ring.state.dtype} {tuple(ring.state.shape)}, got "
            f"{state.dtype} {tuple(state.shape)} with strides {state.stride()}; pass ring.state"
        )
    channel = inputs.log_decay is not None and inputs.log_decay.dim() == 4
    kept = own.log_decay
    expected = {
        "k": (own.keys.shape[1], own.keys.dtype, inputs.k.shape[2], inputs.k.dtype),
        "log_decay": (
            None if kept is None else kept.dim() == 4,
            kept.dtype if kept is not None and kept.dim() == 4 else None,
            None if inputs.log_decay is None else channel,
            inputs.log_decay.dtype if inputs.log_decay is not None and channel else None,
        ),
        "raw_gates": (ring.raw_decay, ring.lower_bound, options.raw_decay and channel,
                      options.lower_bound if options.raw_decay and channel else None),
    }  # fmt: skip
    for name, (*wanted, one, other) in expected.items():
        if wanted != [one, other]:
            raise ValueError(f"{name} must be as in the call that the ring was made for, {wanted}, got {[one, other]}; "
                             "make another one with lineate.Ring")  # fmt: skip
    if not options.rule.corrects and options.normalize_qk and own.writes.dtype != state.dtype:
        raise ValueError(
            "normalize_qk must be as in the call that the ring was made for, False, got True; make another one with "
            "lineate.Ring"
        )


def _check_parameters(ring: Ring, inputs: Inputs) -> None:
    """Raise unless the parameters of a raw gate are those of the entries; on a GPU, values are not compared."""
    for name in ("A_log", "dt_bias"):
        kept, given = getattr(ring.tensors, name), getattr(inputs, name)
        if kept is given:
            continue
        shapes = [None if x is None else tuple(x.shape) for x in (kept, given)]
        if shapes[0] != shapes[1]:
            problem = f"of shape {shapes[0]}, got {shapes[1]}"
        elif given.is_cpu and not torch.equal(kept, given):
            problem = "got other values"
        else:
            continue
        raise ValueError(f"{name} must be that of the call that the ring was made for, {problem}; make another ring")


def _run(inputs: Inputs, where: Slots, ring: Ring, options: Options) -> Tensor:
    """Run one token of every row by forms/ring.py, append it to the rings, and fold those that are full."""
    q, k, v, state = inputs.q, inputs.k, inputs.v, inputs.state
    assert state is not None
    own, dtype, every = ring.tensors, compute_dtype(v.dtype), ring.every
    log_decay, beta = computed_gates(inputs, options, dtype)
    if options.corrects:
        watch_writes(k, beta, options.normalize_qk)  # before anything is written
    slots = torch.arange(len(q), device=q.device) if where.slots is None else where.slots.long()
    group = v.shape[2] // q.shape[2]
    q_t, k_t = q[:, 0].to(dtype), k[:, 0].to(dtype)
    length = None
    if options.normalize_qk:
        length = torch.rsqrt((k_t * k_t).sum(-1) + EPSILON).repeat_interleave(group, dim=1)[..., None]  # b hv 1
        q_t, k_t = normalize(q_t), normalize(k_t)
    q_t, k_t = ((options.scale * q_t).repeat_interleave(group, dim=1), k_t.repeat_interleave(group, dim=1))  # b hv k
    decay = None if log_decay is None else at_least_4d(log_decay)[:, 0]  # b hv 1|k
    rate = None if beta is None else at_least_4d(beta)[:, 0]  # b hv 1|v
    at = slots.clamp(min=0)
    entries, stored = ring.entries(at, dtype), state[at].to(dtype)
    answer, write = form.step(stored, entries, q_t, k_t, v[:, 0].to(dtype), decay, rate, options.corrects)
    running = slots >= 0
    output = answer.masked_fill(~running[:, None, None], 0).to(v.dtype)[:, None]

    pending = ring.pending[at]
    full, more = running & (pending == every - 1), running & (pending < every - 1)
    if full.any():
        new = form.fold(
            stored[full], form.Entries(*(None if x is None else x[full] for x in entries)), k_t[full], write[full],  # type: ignore[arg-type]
            None if decay is None else decay[full],
        )  # fmt: skip
        if state.dtype != dtype:
            new = round_memory(new, None if where.seeds is None else where.seeds[full])
        state[at[full]] = new.to(state.dtype)
    place = at[more], slice(None), pending[more]
    own.keys[place] = k[more, 0]
    own.writes[place] = (write if length is None else write * length)[more].to(own.writes.dtype)
    if own.log_decay is not None and log_decay is not None:
        kept = inputs.log_decay if own.log_decay.dim() == 4 else log_decay
        assert kept is not None
        own.log_decay[place] = kept[more, 0].to(own.log_decay.dtype)
    return output
