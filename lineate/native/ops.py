"""The native backend's forms: chunkwise with its backward, and recurrent for decoding."""

from torch import Tensor

from lineate.chunk_op import Grads, Outputs, register
from lineate.native.call import dense, run


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
) -> None:
    """q, k `b t h k`; v `b t hv v`; log_decay `b t hv` or `b t hv k`; beta `b t hv`; state `b hv k v`."""
    _run_forward(
        "forward", q, k, v, log_decay, beta, state, cu_seqlens, outputs, corrects, scale, normalize_qk, chunk_size
    )


def _run_forward(
    entry: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    outputs: Outputs,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> None:
    output, final, states = outputs
    state = state.contiguous()
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    inputs = {name: None if x is None else dense(x) for name, x in inputs.items()}
    written = dense(output)
    run(
        entry,
        {**inputs, "output": written},
        {"state": state, "final": final, "states": states if states.shape[0] else None},
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
    names = ("dq", "dk", "dv", "dlog_decay", "dbeta")
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "doutput": doutput}
    inputs = {name: None if x is None else dense(x) for name, x in inputs.items()}
    written = {name: dense(x) for name, x in zip(names, grads[:-1], strict=True) if x.numel()}
    run(
        "backward",
        {**inputs, **written},
        {"dfinal": dfinal.contiguous(), "states": states, "dstate": grads[-1]},
        cu_seqlens,
        corrects=corrects,
        scale=scale,
        normalize_qk=normalize_qk,
        chunk_size=chunk_size,
    )
    for name, x in zip(names, grads[:-1], strict=True):
        if name in written and written[name] is not x:
            x.copy_(written[name])


chunkwise = register("chunkwise_native", _forward, _backward)


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
    """Token by token, without gradients: decoding."""
    outputs = v.new_empty(v.shape), state.new_empty(state.shape), state[:0]
    _run_forward("recurrent", q, k, v, log_decay, beta, state, cu_seqlens, outputs, corrects, scale, normalize_qk, 1)
    return outputs[0], outputs[1]
