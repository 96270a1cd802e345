"""TTT-Linear and TTT-MLP on a GPU: only the weights go from chunk to chunk, by kernels; the rest is done at once.

A cell is one chunk of one row. Forward: a kernel makes the weights at the start of every cell, and all cells read
theirs together. Backward, with L the gradient by the weights at the end of a cell:

    1. all cells at once: the readers' gradients, by their cells' weights, by the x and G of the writers, and by q
    2. a kernel goes back from cell to cell and makes every L
    3. all cells at once: to those by x and G are added those of <L, W'>, W' = W - x^T (write G), and those
       with respect to the inputs of x and G
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lineate.kernels.memories import ttt as kernels
from lineate.kernels.memories.tiles import Walk
from lineate.memory.chunks import walk_places
from lineate.memory.ttt.model import Layers, gradients, read
from lineate.rule import full_precision
from lineate.torch_ops.tracing import in_memory, uncompiled


@uncompiled
def scan(
    weights: Layers, parts: tuple[Tensor, ...], square: Tensor, sizes: tuple[int, ...], eps: float
) -> tuple[Tensor, Layers]:
    """Return the output of the last layer in all cells, and the weights at the end of each row.

    Args:
        weights: The layers at the rows' starts.
        parts: q, k, target `cells*h c d`, mask, scores `cells*h c c`, write `cells*h c 1`.
        square: gamma^2, `h 1 d`.
        sizes: For each chunk, how many rows have it; all rows have the first.
        eps: Added to the variance in LN.
    """
    base, counts, _ = walk_places(sizes, parts[0].device)
    flat = [x for pair in weights for x in pair]
    y, *flat = _Scan.apply(Walk(base, counts, sum(sizes)), eps, *in_memory((*parts, square, *flat)))
    return y, _pairs(flat)


def _pairs(flat: list[Tensor]) -> Layers:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _every(square: Tensor, cells: Tensor) -> Tensor:
    return square.repeat(cells.shape[0] // square.shape[0], 1, 1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, eps: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, target, mask, scores, write, square, *weights = tensors
        slots = kernels.states(kernels.TTTCells(k, target, write, square), weights, walk, eps)
        n = k.shape[0]
        cells = _pairs([x[:n] for x in slots])
        y = read(cells, gradients(cells, k, target, _every(square, k), eps), q, mask, scores)
        ctx.save_for_backward(*tensors[:7], *slots)
        ctx.walk, ctx.eps = walk, eps
        return y, *(x[n:].clone() for x in slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfinal: Tensor) -> tuple[Tensor | None, ...]:
        dy, *finals = in_memory((dy, *dfinal))
        saved = ctx.saved_tensors
        q, k, target, mask, scores, write, square = (x.detach().requires_grad_() for x in saved[:7])
        cells = [x[: k.shape[0]].requires_grad_() for x in saved[7:]]
        with torch.enable_grad(), full_precision(k):
            made = gradients(_pairs([x.detach() for x in cells]), k, target, _every(square, k), ctx.eps)
            # x_2 and all G, which readers and writers share, detached from their inputs
            shared = [*made.inputs[1:], *made.grads]
            cut = [x.detach().requires_grad_() for x in shared]
            inputs, grads = [k, *cut[: len(made.back)]], cut[len(made.back) :]
            y = read(_pairs(cells), made._replace(inputs=inputs, grads=grads), q, mask, scores)
            found = torch.autograd.grad(y, [q, mask, scores, *cut, *cells], dy, allow_unused=True)
        dq, dmask, dscores, *asked = found
        asked, by_cells = asked[: len(cut)], asked[len(cut) :]
        del y, found
        with full_precision(k):
            values = [*made.before, *made.back, *cells[2:3]]
            cut_cells = kernels.TTTCells(k, target, write, square)
            initial, ends = kernels.adjoints(cut_cells, values, asked, by_cells, finals, ctx.walk, ctx.eps)
            del by_cells
            # <L, W'> = <L, W> - sum_s write_s <x_s L_W + L_b, G_s>
            dwrite = torch.zeros_like(write)
            by_inputs = []
            for i, (x, grad, (w, a)) in enumerate(zip(inputs, grads, _pairs(ends), strict=True), len(made.back)):
                moved = torch.baddbmm(a, x, w)
                dwrite -= (moved * grad).sum(-1, keepdim=True)
                asked[i] = torch.addcmul(asked[i], write, moved, value=-1)
                by_inputs.append(torch.bmm(write * grad, w.transpose(1, 2)))
            for i, x in enumerate(by_inputs[1:]):
                asked[i] = asked[i] - x
            dk, dtarget, dsquare = torch.autograd.grad(shared, (k, target, square), asked)
        dk = dk - by_inputs[0]
        return None, None, dq, dk, dtarget, dmask, dscores, dwrite, dsquare, *(x.clone() for x in initial)
