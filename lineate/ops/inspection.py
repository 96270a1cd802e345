"""The memories between the tokens of a rule, and the attention matrix that it amounts to."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, Request, in_one_dtype, spread_decay
from lineate.dispatch import check_and_resolve, empty_state, select_rule
from lineate.forms.packing import Form, run_chunked, run_packed
from lineate.forms.parallel import attention_matrix as _attention_matrix
from lineate.forms.stability import watch_erasing, watch_writes
from lineate.ops.rules import attend
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.precision import full_precision_backward


class AttendedStates(NamedTuple):
    """The result of attend_keeping_states: an op's result, and the memories between its tokens."""

    output: Tensor
    """`b t hv v`, in the dtype of v."""
    state: Tensor
    """`b hv k v`, or `n_seqs hv k v` for packed sequences: the memory after the last token."""
    states: Tensor
    """`b n hv k v`: the memory after every keep_states_every tokens; `n hv k v` for packed sequences, in order."""


def attend_keeping_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    keep_states_every: int,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    direction: Tensor | None = None,
    backend: str = "auto",
    normalize_qk: bool = False,
) -> AttendedStates:
    """Run the rule that the gates select, as in `explain`, and return the memory after every keep_states_every tokens.

    >>> output, state, states = lineate.attend_keeping_states(q, k, v, log_decay, beta, keep_states_every=64)
    >>> lineate.gated_delta_rule(q2, k2, v2, log_decay2, beta2, state=states[:, 0])      # continue after 64 tokens

    The tokens between two kept states are one call, from the first of these states; so multiples of 64, a chunk, take
    about the time of the op alone. Everything differentiates. Packed sequences run one after the other, and their
    bounds are read, which waits for a GPU.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`; `b t n h k` selects gated_delta_product, and v and beta then have n writes too.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv` (per head), `b t hv k` (per key channel), `hv` (a constant of each head), or None for a rule
            that does not forget.
        beta: `b t hv`, `b t hv v`, or None for a rule that only accumulates.
        keep_states_every: after how many tokens a memory is kept. Of t tokens, n = t // keep_states_every are: the
            memory after an incomplete rest is not among them, but in `state`.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        erase: `b t hv k`, of gated_delta_rule_2.
        write: `b t hv v`, of gated_delta_rule_2.
        probe: `b t hv k`, of diagonal_plus_low_rank.
        direction: `b t hv k`, of diagonal_plus_low_rank.
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        AttendedStates(output, state, states).
    """
    checks.check_every(keep_states_every)
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, erase=erase, write=write, probe=probe, direction=direction,
        state=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    rule, request = select_rule(inputs), Request(scale, "auto", backend, None, normalize_qk)
    inputs = spread_decay(in_one_dtype(inputs))
    check_and_resolve(rule, inputs, request)
    if inputs.state is None:
        inputs = inputs.replace(state=empty_state(inputs.q, inputs.v, cu_seqlens, compute_dtype(inputs.v.dtype)))
    kept: list[Tensor] = []

    def attend_part(part: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        output, state = attend(rule, part, request)
        if part.q.shape[1] == options.chunk_size:
            kept.append(state)
        return output, state

    run: Form = partial(run_chunked, attend_part)
    options = Options(rule, 1.0, chunk_size=keep_states_every)
    output, final = run(inputs, options) if cu_seqlens is None else run_packed(run, inputs, options)
    if cu_seqlens is None:
        states = torch.stack(kept, 1) if kept else final.new_empty(final.shape[0], 0, *final.shape[1:])
    else:
        states = torch.cat(kept) if kept else final.new_empty(0, *final.shape[1:])
    return AttendedStates(output.to(v.dtype), final, states)


@full_precision_backward
def attention_matrix(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    direction: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
) -> Tensor:
    """Return A `b hv t t`, lower triangular: the weights with which each token reads each value, so that output = A V.

    This holds for an empty initial memory.

    The gates select the rule as in `explain`; without gates it is linear attention. With n writes a token the matrix is
    `b hv t t n`, one weight for each write. In gated_delta_rule_2 the values are what is written, write * v.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`, or `b t n h k`.
        log_decay: `b t hv` (per head), `b t hv k` (per key channel) or `hv` (constant), at most 0; None: nothing is
            forgotten.
        beta: the rate of writing, `b t hv`, or `b t n hv`; None for a rule that only accumulates.
        erase: `b t hv k`, of gated_delta_rule_2.
        probe: `b t hv k`, of diagonal_plus_low_rank.
        direction: `b t hv k`, of diagonal_plus_low_rank.
        scale: multiplies the matrix; None is 1/sqrt(k).
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        The matrix, float32 (float64 for float64 inputs).
    """
    inputs = in_one_dtype(
        Inputs(q=q, k=k, v=q, log_decay=log_decay, beta=beta, erase=erase, probe=probe, direction=direction)
    )
    q, k = inputs.q, inputs.k
    several = isinstance(k, Tensor) and k.dim() == 5
    checks.check_qkv(q, k[:, :, 0] if several else k, q)
    if not several:
        checks.check_one_rate(beta)
    hv = q.shape[2]
    for gate, heads in ((log_decay, 2), (beta, 3 if several else 2), (erase, 2), (probe, 2)):
        if isinstance(gate, Tensor) and gate.dim() in (1, 3, 4, 5):
            found = gate.shape[0 if gate.dim() == 1 else heads]
            hv = found // hv * hv or hv  # rounded down, so that the message about a wrong number names the gate
            break
    v = q.new_ones(*k.shape[:-2], hv, 1)
    inputs = spread_decay(inputs.replace(v=v, write=None if erase is None else v))
    rule = select_rule(inputs)
    checks.check_inputs(rule, inputs)
    checks.check_decay(inputs.log_decay)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    options = Options(rule, q.shape[-1] ** -0.5 if scale is None else scale, normalize_qk)
    if rule.general:
        watch_erasing(inputs, options)
    elif rule.corrects:
        watch_writes(k, beta, normalize_qk)
    with full_precision(q):
        return _attention_matrix(inputs, options)
