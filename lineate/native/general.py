"""The general row on the native backend: its structure of 64-bit words, and its chunkwise and recurrent forms.

C takes k, v and beta of n writes a token as n t tokens; everything else has t.
"""

import struct
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.forms.general import GATES
from lineate.forms.general_chunkwise import make_outputs
from lineate.forms.stability import warn_erasing
from lineate.native.build import c_function
from lineate.native.call import UNSTABLE, States, check_status, cut, dense, strided
from lineate.native.recurrent import register_recurrent
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT, full_precision
from lineate.torch_ops.chunk_op import Outputs, register

RULES = (GATED_DELTA_2, GATED_DELTA_PRODUCT, DIAGONAL_PLUS_LOW_RANK)
"""The rows that the C code computes."""
READS = ("q", "k", "v", *GATES, "state", "cu_seqlens")
"""The tensors of a call that the C code reads."""
_LAYOUT = struct.Struct("12q" + "5q" * 20 + "7q" + "d")  # Call in general.c
_OF_WRITES = ("k", "v", "beta")
_NO_TENSORS = (None,) * 10


class _Tensors(NamedTuple):
    """The strided tensors of a call as C reads them, with k, v and beta of all writes one after another."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: tuple[Tensor | None, ...]


def _run(
    entry: str,
    inputs: Inputs,
    options: Options,
    states: States,
    output: Tensor | None,
    gradients: tuple[Tensor | None, ...] = _NO_TENSORS,
) -> None:
    """Fill the structure and call `lineate_general_<entry>`."""
    b, t, h, key_dim = inputs.q.shape
    hv, value_dim = inputs.v.shape[-2:]
    writes = inputs.k.shape[2] if options.rule.writes else 1
    tensors = _tensors(inputs, options)
    log_decay, chunk_size = inputs.log_decay, options.chunk_size
    decay = 0 if log_decay is None else log_decay.dim() - 2
    sequences, threads = cut(b, inputs.cu_seqlens, chunk_size), torch.get_num_threads()
    sizes = (b, t, h, hv // h, key_dim, value_dim, chunk_size, sequences.number)
    words: list[int] = [*sizes, decay, writes, options.normalize_qk, threads]
    words += strided((*tensors[:3], *tensors.gates, output, *gradients))
    words += [0 if x is None else x.data_ptr() for x in states]
    words += sequences.words()
    status = c_function(f"general_{entry}")(_LAYOUT.pack(*words, options.scale))
    check_status(status, threads, chunk_size, log_decay)
    if status & UNSTABLE and entry != "backward":
        warn_erasing(inputs, options)


def _tensors(inputs: Inputs, options: Options) -> _Tensors:
    """Return the tensors of a call as C reads them; copies only those that it cannot."""
    k, v, beta = inputs.k, inputs.v, inputs.beta
    if options.rule.writes:
        k, v, beta = k.flatten(1, 2), v.flatten(1, 2), None if beta is None else beta.flatten(1, 2)
    gates = inputs.log_decay, beta, inputs.erase, inputs.write, inputs.probe, inputs.direction
    return _Tensors(dense(inputs.q), dense(k), dense(v), tuple(dense(x) for x in gates))


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
    kept = States(state=inputs.state.contiguous(), final=final, states=states if states.shape[0] else None)
    _run(entry, inputs, options, kept, written)
    if written is not output:
        output.copy_(written)


def _backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    places = {name: getattr(grads, name) for name in ("q", "k", "v", *GATES)}
    if options.rule.writes:
        places |= {name: places[name].flatten(1, 2) for name in _OF_WRITES}  # views: the gradients are dense
    written = {name: dense(x) for name, x in places.items()}
    with full_precision(inputs.q):
        kept = States(dfinal=dfinal.contiguous(), states=states, dstate=grads.state)
        _run("backward", inputs, options, kept, None, (dense(doutput), *written.values()))
    for name, x in places.items():
        found = written[name]
        if found is not None and found is not x:
            x.copy_(found)


chunkwise = register("chunkwise_general_native", _forward, _backward, READS, make_outputs=make_outputs)
recurrent = register_recurrent(
    "recurrent_general_native", partial(_fill_outputs, entry="recurrent"), READS, make_outputs
)
"""Runs token by token, without gradients: decoding. options.chunk_size must be 1."""
