"""The chunkwise form of the general row: the loop over chunks, forward and backward, as one torch op.

forms/general_chunk.py has the map of one chunk. Each value head has its own copy of q and k, because what it erases
and compares is its own.
"""

from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds, check_decay
from lineate.forms.blocks import Heads, chunked_sequences, head_blocks
from lineate.forms.general import GATES
from lineate.forms.general_chunk import GeneralChunk
from lineate.forms.stability import watch_erasing
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.chunk_op import Outputs, empty_outputs, register

READS = ("q", "k", "v", *GATES, "state", "cu_seqlens")
"""The tensors of a call that this form reads."""
_OF_KEYS = ("q", "k")
_OF_WRITES = ("k", "v", "beta")


def run_forward(inputs: Inputs, options: Options, outputs: Outputs) -> None:
    """Fill the outputs, one chunk after the other; the shapes are those of lineate.call.Inputs."""
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    check_decay(inputs.log_decay)
    watch_erasing(inputs, options)
    assert inputs.state is not None
    output, final, states = outputs
    with full_precision(inputs.q):
        for heads in head_blocks(inputs.q, inputs.v):
            for sequence, chunks in chunked_sequences(inputs, options.chunk_size):
                S = heads.take_state(inputs.state, sequence)
                for index, tokens in chunks:
                    if states.shape[0]:
                        heads.put_state(states[index], None, S)
                    heads.put(output, tokens, _load(heads, inputs, options, tokens).forward(S))
                heads.put_state(final, sequence, S)


def run_backward(
    inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
) -> None:  # fmt: skip
    """Fill the gradients, from the last chunk to the first; each chunk starts from the state that entered it."""
    assert grads.state is not None
    with full_precision(inputs.q):
        for heads in head_blocks(inputs.q, inputs.v):
            for sequence, chunks in chunked_sequences(inputs, options.chunk_size):
                dS = heads.take_state(dfinal, sequence)
                for index, tokens in reversed(chunks):
                    S = heads.take_state(states[index], None)
                    chunk = _load(heads, inputs, options, tokens)
                    found = chunk.backward(S, heads.take(doutput, tokens, S.dtype), dS)
                    for name, values in found.given().items():
                        _put(heads, options, name, getattr(grads, name), tokens, values)
                heads.put_state(grads.state, sequence, dS)


def _load(heads: Heads, inputs: Inputs, options: Options, tokens: slice) -> GeneralChunk:
    """Return the chunk of these tokens and heads."""
    dtype = compute_dtype(inputs.v.dtype)
    found: dict[str, Tensor | None] = dict.fromkeys(inputs.NAMES)
    for name in inputs.OF_TOKENS:
        if (x := getattr(inputs, name)) is not None:
            x, by_keys = x[heads.rows, tokens], name in _OF_KEYS
            if options.rule.writes and name in _OF_WRITES:
                x = x.flatten(1, 2)
            x = x[:, :, heads.keys if by_keys else heads.values].transpose(1, 2)
            x = (x if x.dim() == 4 else x.unsqueeze(-1)).to(dtype)
            x = x.repeat_interleave(heads.group, dim=1) if by_keys and heads.group > 1 else x
            found[name] = x.contiguous().flatten(0, 1)
    return GeneralChunk(inputs.of(found), scale=options.scale, normalize_qk=options.normalize_qk)


def _put(heads: Heads, options: Options, name: str, place: Tensor, tokens: slice, values: Tensor) -> None:
    """Store one gradient of a chunk; those of q and k are summed over the value heads of each key head."""
    by_keys, place = name in _OF_KEYS, place[heads.rows, tokens]
    if by_keys and heads.group > 1:
        values = values.unflatten(0, (-1, heads.group)).sum(1)
    if options.rule.writes and name in _OF_WRITES:
        place = place.flatten(1, 2)
    place = place[:, :, heads.keys if by_keys else heads.values].transpose(1, 2)
    place.copy_(values.view(place.shape))


def make_outputs(inputs: Inputs, options: Options, keep: bool) -> Outputs:
    """Return memory for the outputs of a call, whose v may have several writes a token."""
    one = inputs.replace(v=inputs.v[:, :, 0]) if options.rule.writes else inputs
    return empty_outputs(one, options, keep)


general_chunkwise = register("chunkwise_general", run_forward, run_backward, READS, make_outputs=make_outputs)
