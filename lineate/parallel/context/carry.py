"""Pass the state of linear mixers between the segments of context parallelism (context.py), as if in one process.

    linear rules   S_out = A S_in + B over a segment; all ranks gather the pairs (A, B) and compose those before them
    convolution    the last few inputs of the ranks before

Gradients flow back through the same maps: dS_in = A^T dS_out + U^T dO, where token t reads S_in^T U_t of S_in.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.call import Inputs
from lineate.ops import Attended
from lineate.parallel.context.segments import Bounds, Context, Pending, Segment
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.tracing import uncompiled

READ_AT_ONCE = 4096
"""Tokens whose gradients are added to the state's at a time, which bounds the size of the float32 copy."""


class _HandOn(torch.autograd.Function):
    """Sends pieces `rows n c` of leaving sequences to later ranks, and their gradients back.

    x passes through because it is always used, so that the backward runs on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, piece: Tensor, segment: Segment, parts: list[int]) -> tuple[Tensor, Tensor]:
        ctx.segment, ctx.parts = segment, parts
        padded = F.pad(piece, (0, 0, 0, max(parts) - piece.shape[1]))
        pieces = segment.context.gather(padded)  # size rows n c
        before = [pieces[rank][:, : parts[rank]] for rank in segment.before]
        return x.view_as(x), torch.cat(before, 1) if before else piece.new_empty(piece.shape[0], 0, piece.shape[2])

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dbefore: Tensor) -> tuple[Tensor, Tensor, None, None]:
        segment, parts = ctx.segment, ctx.parts
        rows, _, channels = dbefore.shape
        dpieces = dbefore.new_zeros(segment.context.size, rows, max(parts), channels)
        ranks = segment.before
        for rank, part in zip(ranks, dbefore.split([parts[rank] for rank in ranks], 1), strict=True):
            dpieces[rank, :, : parts[rank]] = part
        return dx, segment.context.scatter_sum(dpieces)[:, : parts[segment.context.rank]], None, None


def _hand_on(segment: Segment, x: Tensor, piece: Tensor, parts: list[int]) -> tuple[Tensor, Tensor]:
    """Return x, and the tokens `rows n c` of this rank's first sequence that earlier ranks hold.

    piece: what this rank sends to later ranks.
    """
    if not any(parts):
        return x, piece.new_empty(piece.shape[0], 0, piece.shape[2])
    return _HandOn.apply(x, piece, segment, parts)


@uncompiled
def enter_convolution(segment: Segment, x: Tensor, state: Tensor | None, past: int) -> tuple[Tensor, Tensor | None]:
    """Return x `b t c` and the convolution's state `rows c past`, with earlier ranks' inputs for the first sequence."""
    parts = segment.parts(past)
    mine = parts[segment.context.rank]
    piece = x[:, segment.bounds[-2] :]
    if piece.shape[1] < mine:  # the sequence begins here, or is shorter
        front = x.new_zeros(piece.shape[0], past, x.shape[2])
        if state is not None:
            front = state[segment.last_rows].transpose(1, 2).to(x.dtype)
        piece = torch.cat((front, piece), 1)
    x, before = _hand_on(segment, x, piece[:, piece.shape[1] - mine :], parts)
    if not segment.continues:
        return x, state
    entering = before[:, before.shape[1] - past :].transpose(1, 2)
    if segment.cu_seqlens is not None:
        rows = len(segment.bounds) - 1
        others = x.new_zeros(rows - 1, x.shape[2], past) if state is None else state[1:].to(x.dtype)
        entering = torch.cat((entering, others))
    return x, entering.contiguous()


Run = Callable[[Inputs], Attended[Tensor]]
"""A rule on its inputs; its output and its final state are linear in the state and the values."""


def run_rule(run: Run, inputs: Inputs, bounds: Bounds, *, corrects: bool) -> Attended[Tensor]:
    """Run a rule within these bounds, from the state that enters the segment.

    corrects: A is a k x k matrix, not only a diagonal.
    """
    if not isinstance(bounds, Segment):
        return run(inputs if bounds is None else inputs.replace(cu_seqlens=bounds))
    return _run_segment(run, inputs, bounds, corrects)


@uncompiled
def _run_segment(run: Run, inputs: Inputs, bounds: Segment, corrects: bool) -> Attended[Tensor]:
    if not bounds.anything_continues:
        return run(inputs.replace(cu_seqlens=bounds.cu_seqlens))
    k, v, memory = inputs.k, inputs.v, inputs.state
    rank, b, sequences = bounds.context.rank, v.shape[0], len(bounds.bounds) - 1
    sizes = (b, v.shape[-2], k.shape[-1])
    empty = v.new_zeros(*sizes, v.shape[-1], dtype=compute_dtype(v.dtype))
    with torch.no_grad():
        left = empty
        if bounds.hands_on(rank):
            own = None if memory is None or bounds.own.through else memory[bounds.last_rows]
            _, left = _run(run, inputs, empty if own is None else own, slice(*bounds.bounds[-2:]))
        added = bounds.context.gather_later(left)  # while U and A are made
        reads = across = None
        if bounds.continues:  # U and A: output and final state of the rule on the identity with values of 0
            identity = torch.eye(sizes[2], dtype=empty.dtype, device=v.device).expand(*sizes, sizes[2]).contiguous()
            nothing = v.new_zeros(*v.shape[:-1], sizes[2])
            unwritten = inputs.replace(v=nothing, write=None if inputs.write is None else nothing)
            reads, across = _run(run, unwritten, identity, slice(0, bounds.first))
            across = across if corrects else across.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).contiguous()
        maps = _gather_maps(bounds.context, across, left, corrects)
    if bounds.continues:
        with torch.no_grad():
            entering = _compose(maps.wait(), added.wait(), bounds.before)
        del maps, added  # they hold the maps of all ranks
        memory = entering if bounds.cu_seqlens is None else torch.cat(
            (entering, empty.expand(sequences - 1, -1, -1, -1) if memory is None else memory[1:])
        )  # fmt: skip
    output, final = run(inputs.replace(state=memory, cu_seqlens=bounds.cu_seqlens))
    if not bounds.continues:  # nothing enters, so the rule ran while the maps were gathered
        maps.wait()
        added.wait()
    return Attended(*_Leave.apply(output, final, reads, across, bounds, corrects))


class _Leave(torch.autograd.Function):
    """The identity on output and final state; backward adds later ranks' gradients to that of the final state."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        final: Tensor,
        reads: Tensor | None,
        across: Tensor | None,
        segment: Segment,
        corrects: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.segment, ctx.corrects = segment, corrects
        ctx.save_for_backward(reads, across)
        return output.view_as(output), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        reads, across = ctx.saved_tensors
        dentering = torch.zeros_like(dfinal[segment.first_rows])
        with full_precision(dfinal):
            if across is not None:
                across = across.mT if ctx.corrects else across  # of a diagonal: itself
            maps = _gather_maps(segment.context, across, dentering, ctx.corrects)  # while dentering is summed
            if across is not None:
                dentering = _times(across, dfinal[segment.first_rows])
                pieces = (y[:, : segment.first].split(READ_AT_ONCE, 1) for y in (reads, doutput))
                for read, dread in zip(*pieces, strict=True):
                    dentering += torch.einsum("bthk,bthv->bhkv", read.to(dfinal.dtype), dread.to(dfinal.dtype))
            added = segment.context.gather(dentering)
            dleft = _compose(maps.wait(), added, reversed(segment.after))
        dfinal = dfinal.clone()
        dfinal[segment.last_rows] += dleft
        return doutput, dfinal, None, None, None, None


def _run(run: Run, inputs: Inputs, state: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Run the rule on some of the tokens, as one sequence a row."""
    cut = inputs.at(tokens, state)
    return run(cut) if cut.q.shape[1] else (cut.v, state)


def _gather_maps(context: Context, across: Tensor | None, added: Tensor, corrects: bool) -> Pending:
    """Begin to gather A `b hv k k|1` of every rank; a rank without one sends 0. added: `b hv k v`."""
    if across is None:
        across = added.new_zeros(*added.shape[:3], added.shape[2] if corrects else 1)
    return context.gather_later(across)


def _compose(across: Tensor, added: Tensor, ranks: Iterable[int]) -> Tensor:
    """Return S after S = A S + added of each of these ranks in turn, from 0.

    across: every rank's A, `size b hv k k|1`; added: `size b hv k v`. The first rank's A may belong to another sequence
    and is never used, so values that are not finite do not spread.
    """
    S: Tensor | None = None
    with full_precision(added):
        for rank in ranks:  # a view would keep the tensors of all ranks
            S = added[rank].clone() if S is None else added[rank] + _times(across[rank], S)
    return torch.zeros_like(added[0]) if S is None else S


def _times(across: Tensor, S: Tensor) -> Tensor:
    """Return A S, for a matrix A `... k k` or a diagonal `... k 1`."""
    return across @ S if across.shape[-1] > 1 else across * S
