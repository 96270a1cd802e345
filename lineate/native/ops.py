"""The forms of the native backend: chunkwise with its backward, and recurrent for decoding."""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.native.call import States, Tensors, dense, run
from lineate.torch_ops.chunk_op import Grads, Outputs, register
from lineate.torch_ops.tracing import PLAIN_TENSORS, recorded

_NO_STATES = torch.empty(0, device="cpu")


def _forward(inputs: Inputs, options: Options, outputs: Outputs, entry: str = "forward") -> None:
    """Fill the outputs; the shapes are those of lineate.call.Inputs."""
    q, k, v, log_decay, beta, state, cu_seqlens = inputs[:7]
    assert state is not None
    output, final, states = outputs
    written = _dense(output)
    run(
        entry,
        Tensors(_dense(q), _dense(k), _dense(v), dense(log_decay), dense(beta), written),
        States(state=state.contiguous(), final=final, states=states if states.shape[0] else None),
        cu_seqlens,
        options,
    )
    if written is not output:
        output.copy_(written)


def _backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Grads
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    *wanted, dstate = grads
    written = [dense(x) for x in wanted]
    run(
        "backward",
        Tensors(
            _dense(inputs.q),
            _dense(inputs.k),
            _dense(inputs.v),
            dense(inputs.log_decay),
            dense(inputs.beta),
            None,
            _dense(doutput),
            *(x if x is not None and x.dim() > 1 else None for x in written),
        ),
        States(dfinal=dfinal.contiguous(), states=states, dstate=dstate),
        inputs.cu_seqlens,
        options,
    )
    for x, y in zip(wanted, written, strict=True):
        if y is not None and y is not x:
            x.copy_(y)


def _dense(x: Tensor) -> Tensor:
    found = dense(x)
    assert found is not None
    return found


chunkwise = register("chunkwise_native", _forward, _backward)


def _recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    assert inputs.state is not None
    output, final = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.v, inputs.state))
    _forward(inputs, options, (output, final, _NO_STATES), "recurrent")
    return output, final


@torch.library.custom_op("lineate::recurrent_native", mutates_args=())
def _recurrent_op(
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
    inputs = Inputs(q, k, v, log_decay, beta, state, cu_seqlens)
    return _recurrent(inputs, Options(corrects, scale, normalize_qk, chunk_size=1))


@_recurrent_op.register_fake
def _(q, k, v, log_decay, beta, state, cu_seqlens, corrects, scale, normalize_qk):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)


def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run token by token, without gradients: decoding. options.chunk_size must be 1.

    An op costs microseconds, so it is used only while calls are recorded, and for subclasses and virtual tensors.
    """
    as_op = recorded()
    if not as_op:
        for x in inputs[:6]:  # one loop, since every token of decoding goes through it
            if x is not None and (type(x) not in PLAIN_TENSORS or x.is_neg() or x._is_zerotensor()):
                as_op = True
    if as_op:
        return _recurrent_op(*inputs[:7], options.corrects, options.scale, options.normalize_qk)
    return _recurrent(inputs, options)
