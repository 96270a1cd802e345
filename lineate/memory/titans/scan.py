"""Titans over many chunks at once: only M and S go from chunk to chunk, in two kernels
(lineate/kernels/memories/titans.py).

Everything else is parallel over cells, a chunk of a row each. Forward: a walk makes M and S at the start of every cell;
then all cells are read. Backward, with A and B the gradients by M and S at every cell's end:

    direct: the gradients of M, S and all inputs through the outputs y, by autograd
    A, B:   a walk from the last chunk to the first
    the rest, through the writes, M' = b M + f S - (last x)^T G and S' = carried S - (moving x)^T G:

    db = <A, M>     df = <A, S>     dlast_t = -((x A) . G)_t       dG = -(last (x A) + moving (x B))
    dcarried = <B, S>               dmoving_t = -((x B) . G)_t     dx = -(last (G A^T) + moving (G B^T))

and from dG and dx to k and v again by autograd. Kept between forward and backward: the inputs, M and S.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lineate.kernels.memories.tiles import Walk
from lineate.kernels.memories.titans import Made, MatrixList, TitansCells, fill_adjoints, fill_states
from lineate.memory.chunks import walk_places
from lineate.memory.gpu import kept
from lineate.memory.products import product
from lineate.memory.titans.model import LAYER_NORM_EPS, Factors, TitansOptions, clipped, gradients, read, select
from lineate.rule import full_precision
from lineate.torch_ops.tracing import in_memory, uncompiled


@uncompiled
def scan(
    qkv: Sequence[Tensor],
    factors: Factors,
    weights: MatrixList,
    momentum: MatrixList,
    counts: list[int],
    complete: list[list[bool]],
    options: TitansOptions,
) -> tuple[Tensor, MatrixList, MatrixList, MatrixList]:
    """Return y of all cells of some chunks; then M, S and the chunk's start after them.

    Args:
        qkv: q, k, v `cells h c d`.
        factors: The factors of the gates in every cell.
        weights: M at the rows' starts, `rows h in out`.
        momentum: S at the rows' starts, `rows h in out`.
        counts: For each chunk, how many rows have it. All rows have a first one, and begin it.
        complete: For each chunk and row, whether the row reaches the chunk's end.
        options: The options of the memory.
    """
    depth, (base, of_rows, chunks) = len(weights), walk_places(tuple(counts), qkv[0].device)
    walk = Walk(base, of_rows, sum(counts))
    ended = tuple(complete[n - 1][row] for row, n in enumerate(chunks))
    tensors = in_memory((*qkv, *factors, *weights, *momentum))
    y, *after = _Scan.apply(walk, options, all(ended), *tensors)
    weights, momentum, start = after[:depth], after[depth : 2 * depth], after[2 * depth :]
    if not start:
        start = weights
    elif any(ended):
        start = select(_flags(ended, qkv[0].device), weights, start)
    return y, weights, momentum, start


@kept
def _flags(values: tuple[bool, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _cells(k: Tensor, v: Tensor, factors: Factors, residual: bool) -> TitansCells:
    ends = torch.cat((factors.kept[..., -1, :], factors.pushed[..., -1, :], factors.carried[..., 0, :]), -1)
    found = k, v - k if residual else v, factors.written[..., -1, :], factors.moving.squeeze(-1), ends
    return TitansCells(*(x.detach().contiguous() for x in found))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, options: TitansOptions, ended: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return y, M and S after each row's last cell, and M at its start if it has not ended.

        Tensors: q, k, v, the factors, M and S of each row.
        """
        (q, k, v), factors, initial = tensors[:3], Factors(*tensors[3:8]), tensors[8:]
        clip, residual, norm = options
        cells, depth = walk.cells, len(initial) // 2
        rooms = [_room(x, walk) for x in initial]
        for room, x in zip(rooms, initial, strict=True):
            room[: x.shape[0]] = x
        cells_of = _cells(k, v, factors, residual)
        fill_states(cells_of, walk, rooms[:depth], rooms[depth:], clip, LAYER_NORM_EPS if norm else None)
        states = [x[:cells] for x in rooms]
        M, S = states[:depth], states[depth:]
        inputs, _, grads = gradients(k, v, M, options)
        y = read(q, factors, M, S, inputs, clipped(inputs, grads, options), options)
        ctx.save_for_backward(*tensors[:8], *states)
        ctx.walk, ctx.options = walk, options
        begun = [] if ended else [x[_last(walk)] for x in M]
        return y, *(x[cells:].clone() for x in rooms), *begun

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *after: Tensor) -> tuple[Tensor | None, ...]:
        dy, *by_end = in_memory((dy, *after))
        with full_precision(dy):
            return None, None, None, *_backward(ctx.saved_tensors, ctx.walk, ctx.options, dy, by_end)


def _room(like: Tensor, walk: Walk) -> Tensor:
    """A slot for each cell, then one for each row."""
    return like.new_empty(walk.cells + walk.chunks.shape[0], *like.shape[1:])


def _last(walk: Walk) -> Tensor:
    """Return each row's last cell."""
    rows = torch.arange(walk.chunks.shape[0], device=walk.chunks.device)
    return walk.base[(walk.chunks - 1).long()] + rows


def _backward(
    saved: Sequence[Tensor], walk: Walk, options: TitansOptions, dy: Tensor, after: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of q, k, v, factors, M and S, from those of y, M and S after the last cell and M at its start."""
    depth, cells = (len(saved) - 8) // 2, walk.cells
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in saved]
        (q, k, v), factors, M, S = leaves[:3], Factors(*leaves[3:8]), leaves[8 : 8 + depth], leaves[8 + depth :]
        inputs, before, grads = gradients(k, v, M, options)
        writes = clipped(inputs, grads, options)
        y = read(q, factors, M, S, inputs, writes, options)
        direct = list(torch.autograd.grad(y, leaves, dy, retain_graph=True, materialize_grads=True))
    direct, dstates = direct[:8], direct[8:]
    ends = _adjoints(saved, walk, options, (inputs, before, grads), dstates, after)
    del dstates
    dq, dk, dv, *dfactors = direct
    dinputs, dwrites = _written(leaves[3:], inputs, writes, [x[:cells] for x in ends], dfactors)
    through = torch.autograd.grad((*inputs, *writes), (k, v), (*dinputs, *dwrites))
    return [dq, dk + through[0], dv + through[1], *dfactors, *(x[cells:].clone() for x in ends)]


def _adjoints(
    saved: Sequence[Tensor],
    walk: Walk,
    options: TitansOptions,
    made: tuple[MatrixList, MatrixList, MatrixList],
    dstates: MatrixList,
    after: Sequence[Tensor],
) -> MatrixList:
    """Return A of each matrix, then B: a slot for each cell, then the gradients at the start of each row.

    made: the result of `gradients` for all cells.
    """
    (clip, residual, norm), (inputs, before, grads) = options, made
    (k, v), factors, depth = saved[1:3], Factors(*saved[3:8]), len(inputs)
    last = _last(walk)
    for dM, begun in zip(dstates, after[2 * depth :], strict=False):  # none if all ended
        dM.index_add_(0, last, begun)
    dstates = [x.contiguous() for x in dstates]
    ends = [_room(x, walk) for x in dstates]
    for end, x in zip(ends, after, strict=False):
        end.index_copy_(0, last, x)
    M = list(saved[8 : 8 + depth])
    z = [x.detach().contiguous() for x in before]
    back = product(grads[-1].detach(), M[-1].mT).contiguous() if depth == 2 else None
    terms = None if clip is None else _clipping([x.detach() for x in inputs], [x.detach() for x in grads], clip)
    fill_adjoints(
        _cells(k, v, factors, residual), Made(z[-1], z[0] if depth == 2 else None, back, terms), walk, M,
        (dstates[:depth], dstates[depth:]), (ends[:depth], ends[depth:]), LAYER_NORM_EPS if norm else None,
    )  # fmt: skip
    return ends


def _clipping(inputs: MatrixList, grads: MatrixList, clip: float) -> Tensor:
    """Return `4 cells h c`: the scale s, e |x|^2 and e |G|^2 of the last matrix, e |x|^2 of the first.

    e = (ds/dsize) / size.
    """
    xx, gg = ([x.square().sum(-1) for x in part] for part in (inputs, grads))
    square = torch.stack([x * g for x, g in zip(xx, gg, strict=True)]).sum(0)
    size = square.clamp_min(1e-30).sqrt()
    s = clip / (size + 1e-6)
    e = torch.where((s <= 1) & (square >= 1e-30), -s / (size + 1e-6) / size, 0)
    return torch.stack((s.clamp(max=1), e * xx[-1], e * gg[-1], e * xx[0]))


def _written(
    given: Sequence[Tensor], inputs: MatrixList, writes: MatrixList, ends: MatrixList, dfactors: MatrixList
) -> tuple[MatrixList, MatrixList]:
    """dx and dG of the writes, from A and B; the gradients of the factors are added to dfactors."""
    depth = len(inputs)
    factors, states = Factors(*(x.detach() for x in given[:5])), [x.detach() for x in given[5:]]
    last, moving = factors.written[..., -1, :].unsqueeze(-1), factors.moving
    dwritten, dmoving, dkept, dpushed, dcarried = dfactors
    dinputs, dwrites = [], []
    for i in range(depth):
        x, G, M, S, A, B = (y.detach() for y in (inputs[i], writes[i], *states[i::depth], *ends[i::depth]))
        to_M, to_S = product(x, A), product(x, B)
        dwrites.append(-(last * to_M + moving * to_S))
        dinputs.append(-(last * product(G, A.mT) + moving * product(G, B.mT)))
        dwritten[..., -1, :] -= (to_M * G).sum(-1)
        dmoving -= (to_S * G).sum(-1, keepdim=True)
        dkept[..., -1, 0] += (A * M).sum((-2, -1))
        dpushed[..., -1, 0] += (A * S).sum((-2, -1))
        dcarried[..., 0, 0] += (B * S).sum((-2, -1))
    return dinputs, dwrites
