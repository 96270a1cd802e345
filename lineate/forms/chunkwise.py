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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds, check_decay
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
    for heads in _head_blocks(inputs.q, inputs.v):
        for sequence, chunks in _sequences(inputs, options.chunk_size):
            S = heads.take_state(inputs.state, sequence)
            for index, tokens in chunks:
                if states.shape[0]:
                    heads.put_state(states[index], None, S)
                chunk = heads.load(inputs, options, tokens)
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
    for heads in _head_blocks(inputs.q, inputs.v):
        for sequence, chunks in _sequences(inputs, options.chunk_size):
            dS = heads.take_state(dfinal, sequence)
            for index, tokens in reversed(chunks):
                S = heads.take_state(states[index], None)
                chunk = heads.load(inputs, options, tokens)
                grad = chunk.backward(S, heads.take(doutput, tokens, S.dtype), dS)
                heads.put_keys(grads.q, tokens, grad.q)
                heads.put_keys(grads.k, tokens, grad.k)
                heads.put(grads.v, tokens, grad.v)
                for place, values in ((grads.log_decay, grad.log_decay), (grads.beta, grad.beta)):
                    if place is not None and values is not None:
                        heads.put(place, tokens, values)
            heads.put_state(grads.state, sequence, dS)


chunkwise = register("chunkwise", run_forward, run_backward, READS)

ChunkSlices = list[tuple[int, slice]]
"""Each chunk's index among all chunks, and its tokens."""


def _sequences(inputs: Inputs, chunk_size: int) -> list[tuple[int | None, ChunkSlices]]:
    """Return the row in the states of each packed sequence, and its chunks; unpacked, None (all rows alike)."""
    packed = inputs.cu_seqlens is not None
    bounds = inputs.cu_seqlens.tolist() if inputs.cu_seqlens is not None else [0, inputs.q.shape[1]]
    sequences: list[tuple[int | None, ChunkSlices]] = []
    index = 0
    for i, (start, end) in enumerate(pairwise(bounds)):
        starts = range(start, end, chunk_size)
        chunks = [(index + j, slice(x, min(x + chunk_size, end))) for j, x in enumerate(starts)]
        index += len(chunks)
        sequences.append((i if packed else None, chunks))
    return sequences


@dataclass(frozen=True)
class _Heads:
    """Some rows and heads of the batch, worked on together: it hands out chunks as `heads c ...` and stores results."""

    rows: slice
    """Rows of the batch."""
    keys: slice
    """Key heads."""
    values: slice
    """The value heads they serve."""
    group: int
    """Value heads a key head."""

    def load(self, inputs: Inputs, options: Options, tokens: slice) -> Chunk:
        """Return the chunk of these tokens."""
        log_decay, beta = inputs.log_decay, inputs.beta
        dtype = compute_dtype(inputs.v.dtype)
        keys = (x[self.rows, tokens, self.keys].transpose(1, 2).to(dtype) for x in (inputs.q, inputs.k))
        return Chunk(
            torch.stack(list(keys), dim=2).flatten(0, 1),
            self.take(inputs.v, tokens, dtype),
            None if log_decay is None else self.take(log_decay, tokens, dtype),
            None if beta is None else self.take(beta, tokens, dtype),
            corrects=options.corrects,
            scale=options.scale,
            normalize_qk=options.normalize_qk,
        )

    def take(self, x: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """Return these tokens of x: `b t hv d` -> `nv c d`; `b t hv` -> `nv c 1`."""
        x = x[self.rows, tokens, self.values].transpose(1, 2)
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)

    def put(self, x: Tensor, tokens: slice, values: Tensor) -> None:
        """Store `nv c d` into its place in `b t hv d`, or `nv c 1` into `b t hv`."""
        place = x[self.rows, tokens, self.values].transpose(1, 2)
        place.copy_(values.view(place.shape))

    def put_keys(self, x: Tensor, tokens: slice, values: Tensor) -> None:
        """Store `n c k` into its place in `b t h k`."""
        place = x[self.rows, tokens, self.keys].transpose(1, 2)
        place.copy_(values.view(place.shape))

    def take_state(self, states: Tensor, sequence: int | None) -> Tensor:
        """Return a copy `nv k v` of these heads' states."""
        rows = self.rows if sequence is None else slice(sequence, sequence + 1)
        return states[rows, self.values].clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def put_state(self, states: Tensor, sequence: int | None, S: Tensor) -> None:
        """Store `nv k v` among the states."""
        rows = self.rows if sequence is None else slice(sequence, sequence + 1)
        place = states[rows, self.values]
        place.copy_(S.view(place.shape))


def _head_blocks(q: Tensor, v: Tensor) -> Iterator[_Heads]:
    """Yield blocks of heads: on a CPU few enough that a chunk's work stays in its cache, elsewhere all at once."""
    b, _, h, _ = q.shape
    group = v.shape[2] // h
    at_once = 8 * torch.get_num_threads() if q.device.type == "cpu" else b * v.shape[2]
    keys = max(1, min(h, at_once // group))
    rows = max(1, at_once // (h * group)) if keys == h else 1
    for row in range(0, b, rows):
        for key in range(0, h, keys):
            end = min(key + keys, h)
            yield _Heads(slice(row, min(row + rows, b)), slice(key, end), slice(key * group, end * group), group)
