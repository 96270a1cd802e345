"""The native backend's forms: chunkwise with its backward, and recurrent for decoding."""

import torch
from torch import Tensor

from lineate.chunk_op import Grads, Outputs, register
from lineate.forms.packing import check_bounds
from lineate.native.call import States, Tensors, dense, run
from lineate.tracing import PLAIN, recorded

_NO_STATES = torch.empty(0, device="cpu")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    outputs: Outputs,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
    entry: str = "forward",
) -> None:
    """q, k `b t h k`; v `b t hv v`; log_decay `b t hv` or `b t hv k`; beta `b t hv`; state `b hv k v`."""
    output, final, states = outputs
    written = _dense(output)
    run(
        entry,
        Tensors(_dense(q), _dense(k), _dense(v), dense(log_decay), dense(beta), written),
        States(state=state.contiguous(), final=final, states=states if states.shape[0] else None),
        cu_seqlens,
        corrects=corrects,
        scale=scale,
        normalize_qk=normalize_qk,
        chunk_size=chunk_size,
    )
    if written is not output:
        output.copy_(written)


def _backward(
    doutput: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    grads: Grads,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> None:
    """The same chunks from the last to the first, each from the state that entered it."""
    *wanted, dstate = grads
    written = [dense(x) for x in wanted]
    run(
        "backward",
        Tensors(
            _dense(q),
            _dense(k),
            _dense(v),
            dense(log_decay),
            dense(beta),
            None,
            _dense(doutput),
            *(x if x is not None and x.dim() > 1 else None for x in written),
        ),
        States(dfinal=dfinal.contiguous(), states=states, dstate=dstate),
        cu_seqlens,
        corrects=corrects,
        scale=scale,
        normalize_qk=normalize_qk,
        chunk_size=chunk_size,
    )
    for x, y in zip(wanted, written, strict=True):
        if y is not None and y is not x:
            x.copy_(y)


def _dense(x: Tensor) -> Tensor:
    found = dense(x)
    assert found is not None
    return found


chunkwise = register("chunkwise_native", _forward, _backward)


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, q.shape[1])
    output, final = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (v, state))
    _forward(
        q,
        k,
        v,
        log_decay,
        beta,
        state,
        cu_seqlens,
        (output, final, _NO_STATES),
        corrects=corrects,
        scale=scale,
        normalize_qk=normalize_qk,
        chunk_size=1,
        entry="recurrent",
    )
    return output, final


_recurrent_op = torch.library.custom_op("lineate::recurrent_native", _recurrent, mutates_args=())


@_recurrent_op.register_fake
def _(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """Token by token, without gradients: decoding.

    Only what records calls, tensors of other kinds and virtual ones need an op, which costs microseconds.
    """
    run_tokens = _recurrent
    if recorded():
        run_tokens = _recurrent_op
    else:
        for x in (q, k, v, log_decay, beta, state):  # one loop, since every token of decoding goes through it
            if x is not None and (type(x) not in PLAIN or x.is_neg() or x._is_zerotensor()):
                run_tokens = _recurrent_op
    return run_tokens(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk)
