"""The chunkwise form: quadratic inside a chunk of c tokens, recurrent between chunks; forward and backward by hand.

One head, q pre-scaled, G the cumulative log_decay inside the chunk, S the state entering it, rows are tokens:

    Qr = e^G q     Kr = e^G k     Kw = e^{G_c - G} k                       readers of S, writers to the next S
    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    E = V - Kr S          R = (I + beta M)^{-1} (beta E)      (rule only accumulates: R = V)
    O = Qr S + P R        S_next = e^{G_c} S + Kw^T R

Backward, from dO and dS_next, with X = (I + beta M)^{-T} dR, dE = beta X = dV, and Y = dO stacked on -dE:

    dR = P^T dO + Kw dS_next      d[P; M] = tril(Y R^T)      d[Qr; Kr] = Y S^T      dKw = R dS_next^T
    dbeta = rowsum(X (E - M R))      dS = e^{G_c} dS_next + [Qr; Kr]^T Y

q and k are stacked (s = 2) so that each line is one product. A chunk's work is done for a few heads at a time and stays
in cache. The backward keeps only the states between chunks and computes everything else again. Forward and backward are
one torch op each, for autograd and torch.compile alike. docs/derivation.md derives every line.
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds, check_decay
from lineate.forms.blocks import Heads, chunked_sequences, head_blocks
from lineate.forms.chunk import Chunk
from lineate.forms.stability import watch_writes
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.chunk_op import Outputs, register

READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens")
"""The tensors of a call that this form reads."""


def run_forward(inputs: Inputs, options: Options, outputs: Outputs) -> None:
    """Fill the outputs, one chunk after the other; the shapes are those of lineate.call.Inputs."""
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    with full_precision(inputs.q):
        _fill_outputs(inputs, options, outputs)


def _fill_outputs(inputs: Inputs, options: Options, outputs: Outputs) -> None:
    check_decay(inputs.log_decay)
    if options.corrects:
        watch_writes(inputs.k, inputs.beta, options.normalize_qk)
    assert inputs.state is not None
    output, final, states = outputs
    for heads in head_blocks(inputs.q, inputs.v):
        for sequence, chunks in chunked_sequences(inputs, options.chunk_size):
            S = heads.take_state(inputs.state, sequence)
            for index, tokens in chunks:
                if states.shape[0]:
                    heads.put_state(states[index], None, S)
                chunk = _load(heads, inputs, options, tokens)
                heads.put(output, tokens, chunk.forward(S))
            heads.put_state(final, sequence, S)


def run_backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    with full_precision(inputs.q):
        _fill_gradients(inputs, options, states, doutput, dfinal, grads)


def _fill_gradients(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    assert grads.state is not None
    for heads in head_blocks(inputs.q, inputs.v):
        for sequence, chunks in chunked_sequences(inputs, options.chunk_size):
            dS = heads.take_state(dfinal, sequence)
            for index, tokens in reversed(chunks):
                S = heads.take_state(states[index], None)
                chunk = _load(heads, inputs, options, tokens)
                grad = chunk.backward(S, heads.take(doutput, tokens, S.dtype), dS)
                heads.put_keys(grads.q, tokens, grad.q)
                heads.put_keys(grads.k, tokens, grad.k)
                heads.put(grads.v, tokens, grad.v)
                for place, values in ((grads.log_decay, grad.log_decay), (grads.beta, grad.beta)):
                    if place is not None and values is not None:
                        heads.put(place, tokens, values)
            heads.put_state(grads.state, sequence, dS)


def _load(heads: Heads, inputs: Inputs, options: Options, tokens: slice) -> Chunk:
    """Return the chunk of these tokens and heads."""
    log_decay, beta = inputs.log_decay, inputs.beta
    dtype = compute_dtype(inputs.v.dtype)
    keys = (x[heads.rows, tokens, heads.keys].transpose(1, 2).to(dtype) for x in (inputs.q, inputs.k))
    return Chunk(
        torch.stack(list(keys), dim=2).flatten(0, 1),
        heads.take(inputs.v, tokens, dtype),
        None if log_decay is None else heads.take(log_decay, tokens, dtype),
        None if beta is None else heads.take(beta, tokens, dtype),
        corrects=options.corrects,
        scale=options.scale,
        normalize_qk=options.normalize_qk,
    )


chunkwise = register("chunkwise", run_forward, run_backward, READS)
