"""The dual form of TTT over many tokens: chunk by chunk in torch, or all chunks by kernels on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lineate.memory.chunks import Chunks
from lineate.memory.gpu import STATE_NUMBERS, on_gpu
from lineate.memory.ttt.model import Layers, gradients, read
from lineate.torch_ops.tracing import needs_grad


class Tokens(NamedTuple):
    """The tokens of a call, `b t h d`, and rate `b t h`."""

    q: Tensor
    k: Tensor
    target: Tensor
    """gamma (v - k - beta): the loss's gradient at LN, times gamma, is gamma^2 normal - target."""
    rate: Tensor


def run_chunks(
    tokens: Tokens,
    gamma: Tensor,
    weights: Layers,
    sums: Layers | None,
    layout: Chunks,
    factor: Tensor,
    eps: float,
    recompute_chunks: int,
) -> tuple[Tensor, Layers, Layers]:
    """Return z(q_t; W_t) `b t h d`, the weights at the start of each row's last chunk, and the sums since.

    Args:
        tokens: The tokens of all rows.
        gamma: The weight of LN, `h d`.
        weights: The layers at the start of each row's first chunk.
        sums: The sums since then, if rows may be in the middle of a chunk; None if all rows begin one.
        layout: Where the tokens lie in chunks.
        factor: The reader's factors, `chunk`.
        eps: Added to the variance in LN.
        recompute_chunks: How many chunks form a group that keeps only its first weights; 0 keeps everything.
    """
    b, t, h, _ = tokens.q.shape
    if not layout.even:  # else the rows keep their order
        weights = _select_rows(weights, layout.order, h)
        sums = None if sums is None else _select_rows(sums, layout.order, h)
    q, k, target = (layout.cells(x).flatten(0, 1) for x in tokens[:3])  # n c d, n = cells * h
    rate = layout.cells(tokens.rate[..., None]).flatten(0, 1).transpose(1, 2)  # n 1 c
    square = gamma.square().repeat(layout.rows, 1)[:, None]  # rows*h 1 d
    # The parts that do not depend on the weights, for all chunks at once.
    mask = (factor[:, None] * rate).tril()  # n c c
    scores = mask * torch.baddbmm(torch.ones_like(mask), q, k.transpose(1, 2))
    complete = layout.complete.repeat_interleave(h)[:, None, None]
    write = (factor[-1] * complete * rate).transpose(1, 2)  # n c 1
    per_chunk = (q, k, target, mask, scores, write)
    reader = None
    if sums is not None:
        reader = factor[:, None], (factor[-1] * complete)[: layout.sizes[0] * h]
    with_kernels, most = _kernels_serve(weights, k), recompute_chunks
    if with_kernels and not needs_grad(*per_chunk, *(x for pair in weights for x in pair)):
        fitting = max(STATE_NUMBERS // max(sum(w.numel() for w, _ in weights), 1), 1)
        most = min(most or fitting, fitting)
    outputs: list[Tensor] = []
    finished: list[Layers] = []
    runs = _runs(layout.sizes, most, with_kernels, with_kernels and sums is not None)
    parts = zip(*(x.split([sum(run) * h for run in runs]) for x in per_chunk), strict=True)
    for run, part in zip(runs, parts, strict=True):
        size = run[0] * h
        finished.append([(w[size:], a[size:]) for w, a in weights])
        weights = [(w[:size], a[:size]) for w, a in weights]
        prior = None if sums is None or outputs else [(w[:size], a[:size]) for w, a in sums]
        scan: Callable[..., tuple[Tensor, Layers]] = _loop
        arguments: tuple[Any, ...] = weights, prior, reader, part, square[:size], eps
        if with_kernels and prior is None:
            from lineate.memory.ttt.scan import scan  # triton, at its first use

            arguments = weights, part, square[:h], tuple(run), eps
        if recompute_chunks and torch.is_grad_enabled():
            some, weights = recompute(scan, *arguments, use_reentrant=False)
        else:
            some, weights = scan(*arguments)
        outputs.append(some)
    finished.append(weights)
    weights = [
        (torch.cat([part[i][0] for part in reversed(finished)]), torch.cat([part[i][1] for part in reversed(finished)]))
        for i in range(len(weights))
    ]
    since = _tail(weights, k, target, rate, square, layout, h, eps)
    if sums is not None:
        keep = layout.first.repeat_interleave(h)[:, None, None]
        since = [(w + keep * w0, a + keep * a0) for (w, a), (w0, a0) in zip(since, sums, strict=True)]
    if not layout.even:
        weights, since = _select_rows(weights, layout.rank, h), _select_rows(since, layout.rank, h)
    return layout.tokens(torch.cat(outputs).unflatten(0, (-1, h)), b, t), weights, since


def _kernels_serve(weights: Layers, k: Tensor) -> bool:
    """Whether the weights can go from chunk to chunk in a kernel; k `n c d`."""
    if not on_gpu(k):
        return False
    from lineate.kernels.memories import ttt as kernels  # triton, at its first use

    return kernels.serves(k.shape[1], [w.shape[1] for w, _ in weights])


def _runs(sizes: list[int], most: int, any_rows: bool, first_alone: bool) -> list[list[int]]:
    """Group consecutive chunks, given by how many rows have each.

    Args:
        sizes: For each chunk, how many rows have it.
        most: Chunks of a group, at most; 0: any number.
        any_rows: Whether the chunks of a group may differ in their rows.
        first_alone: Whether the first chunk is a group of its own.
    """
    runs: list[list[int]] = []
    for i, rows in enumerate(sizes):
        if i > first_alone and (any_rows or runs[-1][0] == rows) and (not most or len(runs[-1]) < most):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    return runs


def _loop(
    weights: Layers,
    prior: Layers | None,
    reader: tuple[Tensor, Tensor] | None,
    parts: tuple[Tensor, ...],
    square: Tensor,
    eps: float,
) -> tuple[Tensor, Layers]:
    """Run the dual form chunk by chunk; prior: the sums before the first one, to scale by the reader's factors."""
    outputs = []
    for q, k, target, mask, scores, write in zip(*(x.split(square.shape[0]) for x in parts), strict=True):
        found = gradients(weights, k, target, square, eps)
        outputs.append(read(weights, found, q, mask, scores, prior, None if reader is None else reader[0]))
        stepped: Layers = []
        for i, ((w, a), x, grad) in enumerate(zip(weights, found.inputs, found.grads, strict=True)):
            step = write * grad
            w, a = torch.baddbmm(w, x.transpose(1, 2), step, alpha=-1), a - step.sum(1, keepdim=True)
            if prior is not None and reader is not None:
                w, a = w - reader[1] * prior[i][0], a - reader[1] * prior[i][1]
            stepped.append((w, a))
        weights, prior = stepped, None
    return torch.cat(outputs), weights


def _tail(
    weights: Layers, k: Tensor, target: Tensor, rate: Tensor, square: Tensor, layout: Chunks, h: int, eps: float
) -> Layers:
    """Return the sums of rate_s grad loss_s over each row's last chunk, if it is not complete."""
    if layout.aligned:
        return [(torch.zeros_like(w), torch.zeros_like(a)) for w, a in weights]
    k, target, rate = (x.unflatten(0, (-1, h))[layout.tail].flatten(0, 1) for x in (k, target, rate))
    rate = rate * layout.begun.repeat_interleave(h)[:, None, None]
    found = gradients(weights, k, target, square, eps)
    return [
        (torch.bmm(rate * x.transpose(1, 2), grad), torch.bmm(rate, grad))
        for x, grad in zip(found.inputs, found.grads, strict=True)
    ]


def _select_rows(weights: Layers, order: Tensor, h: int) -> Layers:
    return [
        (w.unflatten(0, (-1, h))[order].flatten(0, 1), a.unflatten(0, (-1, h))[order].flatten(0, 1)) for w, a in weights
    ]
