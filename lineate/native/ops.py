"""The forms of the native backend: chunkwise with its backward, and recurrent for decoding."""

from functools import partial

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.native.call import States, Tensors, dense, run
from lineate.native.recurrent import register_recurrent
from lineate.rule import full_precision
from lineate.torch_ops.chunk_op import Outputs, register

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
    written = dense(output)
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
        dense(inputs.q),
        dense(inputs.k),
        dense(inputs.v),
        dense(inputs.log_decay),
        dense(inputs.beta),
        output,
    )


def _backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    written = grads.replace(state=None).map(dense)
    with full_precision(inputs.q):
        run(
            "backward",
            _tensors(inputs)._replace(
                doutput=dense(doutput),
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


def _make_recurrent_outputs(inputs: Inputs, options: Options, keep: bool) -> Outputs:
    """Return memory for the output and the final state; a recurrent form keeps no others."""
    assert inputs.state is not None
    return inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape), _NO_STATES


chunkwise = register("chunkwise_native", _forward, _backward, READS)
recurrent = register_recurrent(
    "recurrent_native", partial(_fill_outputs, entry="recurrent"), READS, _make_recurrent_outputs
)
"""Runs token by token, without gradients: decoding. options.chunk_size must be 1."""
