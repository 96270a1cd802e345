"""The forms of the native backend: chunkwise with its backward, and recurrent for decoding."""

from typing import Any

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.native.call import States, Tensors, dense, run
from lineate.rule import full_precision
from lineate.torch_ops.chunk_op import OPTIONS, Outputs, register
from lineate.torch_ops.registrar import Way, way_of
from lineate.torch_ops.schema import Flat, declare_call_op

READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens")
"""The tensors of a call that the C code reads."""
_NO_STATES = torch.empty(0, device="cpu")


def _forward(inputs: Inputs, options: Options, outputs: Outputs) -> None:
    """Fill the outputs; the shapes are those of lineate.call.Inputs."""
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    with full_precision(inputs.q):
        _fill_outputs(inputs, options, outputs, "forward")


def _fill_outputs(inputs: Inputs, options: Options, outputs: Outputs, entry: str) -> None:
    assert inputs.state is not None
    output, final, states = outputs
    written = _dense(output)
    run(
        entry,
        _tensors(inputs, output=written),
        States(state=inputs.state.contiguous(), final=final, states=states if states.shape[0] else None),
        inputs.cu_seqlens,
        options,
    )
    if written is not output:
        output.copy_(written)


def _tensors(inputs: Inputs, output: Tensor | None = None) -> Tensors:
    """Return the tensors of a call as C reads them."""
    return Tensors(
        _dense(inputs.q),
        _dense(inputs.k),
        _dense(inputs.v),
        dense(inputs.log_decay),
        dense(inputs.beta),
        output,
    )


def _backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    written = grads.replace(state=None).map(_dense)
    with full_precision(inputs.q):
        run(
            "backward",
            _tensors(inputs)._replace(
                doutput=_dense(doutput),
                dq=written.q,
                dk=written.k,
                dv=written.v,
                dlog_decay=written.log_decay,
                dbeta=written.beta,
            ),
            States(dfinal=dfinal.contiguous(), states=states, dstate=grads.state),
            inputs.cu_seqlens,
            options,
        )
    for name, y in written.given().items():
        x: Tensor = getattr(grads, name)
        if y is not x:
            x.copy_(y)


def _dense(x: Tensor) -> Tensor:
    found = dense(x)
    assert found is not None
    return found


chunkwise = register("chunkwise_native", _forward, _backward, READS)


def _recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    assert inputs.state is not None
    output, final = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.v, inputs.state))
    _fill_outputs(inputs, options, (output, final, _NO_STATES), "recurrent")
    return output, final


_FLAT = Flat(READS, OPTIONS)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, _ = _FLAT.restore(arguments)
    assert inputs.state is not None
    return inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape)


_recurrent_op = declare_call_op(
    "recurrent_native", _FLAT, lambda *arguments: _recurrent(*_FLAT.restore(arguments)), _fake,
    results="(Tensor, Tensor)",
)  # fmt: skip


def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run token by token, without gradients: decoding. options.chunk_size must be 1.

    An op costs microseconds, so it is used only while calls are recorded, and for subclasses and virtual tensors.
    """
    if way_of(inputs.tensors()) in (Way.OP, Way.VIRTUAL):
        output, final = _recurrent_op(*_FLAT.flatten(inputs, options))
        return output, final
    return _recurrent(inputs, options)
