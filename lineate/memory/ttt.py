"""TTT-Linear and TTT-MLP (arXiv 2407.04620): the memory is a small model that is trained on every token.

    z(x) = W x + b                      one layer (TTT-Linear), or gelu between several (TTT-MLP has two)
    loss_s = 1/2 |LN(z(k_s)) - (v_s - k_s)|^2
    W_t = W_0 - f_i sum_{s <= t} rate_s grad loss_s(W_0)       all s of the chunk that holds t, its i-th token
    o_t = q_t + LN(z(q_t; W_t))                                after the write

All gradients of a chunk of c tokens are taken at the weights W_0 of its start; after c tokens W_0 = W_c. The factor f
of the reader's place is max(0, 1/i + learned_i). With G_l = dloss/dz_l and x_l the input of layer l for the keys, the
dual form reads a whole chunk by products, layer after layer, and never makes W_t:

    y_l = y W_l + b_l - tril(f_t rate_s (y_t . x_ls + 1)) G_l       y = q, then gelu(y_l)

A state holds the weights of the chunk's start, the sums of rate_s grad loss_s since, and the place in the chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lineate import checks
from lineate.memory.gpu import MOST, on_gpu
from lineate.memory.ttt_layout import Layout, lay_out, to_chunks, to_tokens
from lineate.precision import full_precision_backward
from lineate.rule import compute_dtype, full_precision
from lineate.tracing import needs_grad

Weights = list[tuple[Tensor, Tensor]]
"""W `n d_in d_out` and b `n 1 d_out` of every layer; n = rows * heads."""


@full_precision_backward
def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state: dict[str, Tensor],
    *,
    factor: Tensor | None = None,
    chunk: int = 16,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    recompute_chunks: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """o_t = q_t + LN(z(q_t; W_t)), and the state after the last token of each row.

    q, k, v `b t h d`; rate `b t h`, of the writer; factor `chunk`, of the reader's place (None: 1, 1/2, ..., 1/chunk);
    norm_weight, norm_bias `h d`, of LN. With cu_seqlens b = 1 and rows are the packed texts.

    state: weight1 `rows h d n`, bias1 `rows h n`, ..., the last with n = d, at the chunk's start; without rows the
    same for all. In the middle of a chunk also weight1_sum, bias1_sum, ... of the same shapes, and position `rows`, the
    tokens of the chunk that are written; the state that is returned has all of them.
    recompute_chunks: so many chunks at a time keep only their first weights for the backward, which runs them again.
    """
    _check(q, k, v, rate, norm_weight, norm_bias, factor, chunk, cu_seqlens)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = compute_dtype(q.dtype)
    given = q.dtype
    with full_precision(q):
        weights, sums, position = _open(state, rows, q.shape[2:], chunk, dtype)
        q, k, v, rate, gamma, beta = (x.to(dtype) for x in (q, k, v, rate, norm_weight, norm_bias))
        if factor is None:
            factor = 1 / torch.arange(1, chunk + 1, device=q.device, dtype=dtype)
        factor = factor.to(dtype)
        target = gamma * (v - k - beta)  # the loss's gradient at LN, times gamma, is gamma^2 normal - target
        if q.shape[1] == 1 and cu_seqlens is None and sums is not None and position is not None:
            z, weights, sums, position = _step(q, k, target, rate, gamma, weights, sums, position, factor, eps)
        else:
            layout = lay_out(q, position, chunk, cu_seqlens)
            z, weights, sums = _dual(
                q, k, target, rate, gamma, weights, sums, layout, factor, eps, recompute_chunks
            )  # fmt: skip
            position = layout.position.clone()  # layouts are kept
        output = q + F.layer_norm(z, z.shape[-1:], eps=eps) * gamma + beta
    return output.to(given), _close(weights, sums, position, q.shape[2])


def _dual(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    gamma: Tensor,
    weights: Weights,
    sums: Weights | None,
    layout: Layout,
    factor: Tensor,
    eps: float,
    recompute_chunks: int,
) -> tuple[Tensor, Weights, Weights]:
    """z(q_t; W_t) `b t h d`, the weights at the start of each row's last chunk and the sums since."""
    b, t, h, _ = q.shape
    if layout.order is not None:
        weights = _rows(weights, layout.order, h)
        sums = None if sums is None else _rows(sums, layout.order, h)
    q, k, target = (to_chunks(x, layout) for x in (q, k, target))
    rate = to_chunks(rate[..., None], layout).transpose(1, 2)  # n 1 c
    square = gamma.square().repeat(layout.rows, 1)[:, None]  # rows*h 1 d
    # What does not depend on the weights, for all chunks at once.
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
        fitting = max(MOST // max(sum(w.numel() for w, _ in weights), 1), 1)
        most = min(most or fitting, fitting)
    outputs: list[Tensor] = []
    finished: list[Weights] = []
    runs = _runs(layout.sizes, most, with_kernels, with_kernels and sums is not None)
    parts = zip(*(x.split([sum(run) * h for run in runs]) for x in per_chunk), strict=True)
    done = 0
    for run, part in zip(runs, parts, strict=True):
        size = run[0] * h
        finished.append([(w[size:], a[size:]) for w, a in weights])
        weights = [(w[:size], a[:size]) for w, a in weights]
        prior = None if sums is None or outputs else [(w[:size], a[:size]) for w, a in sums]
        scan: Callable[..., tuple[Tensor, Weights]] = _scan
        arguments: tuple[Any, ...] = weights, prior, reader, part, square[:size], eps
        if with_kernels and prior is None:
            from lineate.memory.ttt_scan import scan  # triton, at its first use

            base, counts = layout.places(done, len(run))
            arguments = weights, part, square[:h], base, counts, eps
        if recompute_chunks and torch.is_grad_enabled():
            some, weights = recompute(scan, *arguments, use_reentrant=False)
        else:
            some, weights = scan(*arguments)
        outputs.append(some)
        done += len(run)
    finished.append(weights)
    weights = [
        (torch.cat([part[i][0] for part in reversed(finished)]), torch.cat([part[i][1] for part in reversed(finished)]))
        for i in range(len(weights))
    ]
    since = _tail(weights, k, target, rate, square, layout, h, eps)
    if sums is not None:
        keep = layout.first.repeat_interleave(h)[:, None, None]
        since = [(w + keep * w0, a + keep * a0) for (w, a), (w0, a0) in zip(since, sums, strict=True)]
    if layout.rank is not None:
        weights, since = _rows(weights, layout.rank, h), _rows(since, layout.rank, h)
    return to_tokens(torch.cat(outputs), layout, b, t), weights, since


def _kernels_serve(weights: Weights, k: Tensor) -> bool:
    """Whether the weights can go from chunk to chunk in a kernel; k `n c d`."""
    if not on_gpu(k):
        return False
    from lineate.kernels.memories import ttt as kernels

    return kernels.serves(k.shape[1], [w.shape[1] for w, _ in weights])


def _runs(sizes: list[int], most: int, any_rows: bool, first_alone: bool) -> list[list[int]]:
    """Consecutive chunks, by their rows, `most` at a time (0: any number); with as many rows, unless any_rows."""
    runs: list[list[int]] = []
    for i, rows in enumerate(sizes):
        if i > first_alone and (any_rows or runs[-1][0] == rows) and (not most or len(runs[-1]) < most):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    return runs


def _scan(
    weights: Weights,
    prior: Weights | None,
    reader: tuple[Tensor, Tensor] | None,
    parts: tuple[Tensor, ...],
    square: Tensor,
    eps: float,
) -> tuple[Tensor, Weights]:
    """The dual form chunk by chunk; prior: the sums before the first one, which its reader's factors turn to steps."""
    outputs = []
    for q, k, target, mask, scores, write in zip(*(x.split(square.shape[0]) for x in parts), strict=True):
        found = gradients(weights, k, target, square, eps)
        outputs.append(read(weights, found, q, mask, scores, prior, None if reader is None else reader[0]))
        stepped: Weights = []
        for i, ((w, a), x, grad) in enumerate(zip(weights, found.inputs, found.grads, strict=True)):
            step = write * grad
            w, a = torch.baddbmm(w, x.transpose(1, 2), step, alpha=-1), a - step.sum(1, keepdim=True)
            if prior is not None and reader is not None:
                w, a = w - reader[1] * prior[i][0], a - reader[1] * prior[i][1]
            stepped.append((w, a))
        weights, prior = stepped, None
    return torch.cat(outputs), weights


def read(
    weights: Weights,
    found: "Gradients",
    q: Tensor,
    mask: Tensor,
    scores: Tensor,
    prior: Weights | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """y of the last layer; mask = tril(f_t rate_s), scores = mask (q_t . k_s + 1), of any number of chunks."""
    y = q
    for i, ((w, a), x, grad) in enumerate(zip(weights, found.inputs, found.grads, strict=True)):
        if i:
            y = F.gelu(y, approximate="tanh")
            scores = mask * (torch.bmm(y, x.transpose(1, 2)) + 1)
        z = torch.baddbmm(torch.baddbmm(a, y, w), scores, grad, alpha=-1)
        if prior is not None and factor is not None:
            z = z - factor * torch.baddbmm(prior[i][1], y, prior[i][0])
        y = z
    return y


class Gradients(NamedTuple):
    """Of every layer, for the keys, so that dloss/dW_l = x_l^T G_l."""

    inputs: list[Tensor]
    """x_l."""
    before: list[Tensor]
    """z_l = x_l W_l + b_l."""
    back: list[Tensor]
    """dloss/dx_l, from the second layer on."""
    grads: list[Tensor]
    """G_l = dloss/dz_l."""


def gradients(weights: Weights, k: Tensor, target: Tensor, square: Tensor, eps: float) -> Gradients:
    """k `n c d`, for any number of chunks."""
    inputs, before = [k], []
    backs: list[Tensor] = []
    for w, a in weights:
        z = torch.baddbmm(a, inputs[-1], w)
        before.append(z)
        if len(before) < len(weights):
            inputs.append(F.gelu(z, approximate="tanh"))
    grads = [_norm_gradient(before[-1], target, square, eps)]
    for (w, _), z in zip(reversed(weights[1:]), reversed(before[:-1]), strict=True):
        back = torch.bmm(grads[0], w.transpose(1, 2))
        backs.insert(0, back)
        grads.insert(0, torch.ops.aten.gelu_backward(back, z, approximate="tanh"))
    return Gradients(inputs, before, backs, grads)


def _norm_gradient(z: Tensor, target: Tensor, square: Tensor, eps: float) -> Tensor:
    """G = (g - mean g - x mean(g x)) / sigma with x = (z - mean z) / sigma, g = gamma^2 x - target."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal = centred * inverse
    g = square * normal - target
    along = (g * normal).mean(-1, keepdim=True)
    return (g - g.mean(-1, keepdim=True) - normal * along) * inverse


def _tail(
    weights: Weights, k: Tensor, target: Tensor, rate: Tensor, square: Tensor, layout: Layout, h: int, eps: float
) -> Weights:
    """The sums of rate_s grad loss_s over each row's last chunk, if it is not complete."""
    if layout.aligned:
        return _zeros(weights)
    k, target, rate = (x.unflatten(0, (-1, h))[layout.tail].flatten(0, 1) for x in (k, target, rate))
    rate = rate * layout.begun.repeat_interleave(h)[:, None, None]
    found = gradients(weights, k, target, square, eps)
    return [
        (torch.bmm(rate * x.transpose(1, 2), grad), torch.bmm(rate, grad))
        for x, grad in zip(found.inputs, found.grads, strict=True)
    ]


def _step(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    gamma: Tensor,
    weights: Weights,
    sums: Weights,
    position: Tensor,
    factor: Tensor,
    eps: float,
) -> tuple[Tensor, Weights, Weights, Tensor]:
    """One token of each row: z(q; W_t) `b 1 h d`, and the state after it."""
    b, _, h, _ = q.shape
    q, k, target = (x.reshape(b * h, 1, -1) for x in (q, k, target))
    rate = rate.reshape(b * h, 1, 1)
    here = factor[position].repeat_interleave(h)[:, None, None]
    full = (position + 1 == factor.shape[0]).repeat_interleave(h)[:, None, None]
    inputs, _, _, grads = gradients(weights, k, target, gamma.square().repeat(b, 1)[:, None], eps)
    y = q
    stepped, since = [], []
    for i, ((w, a), (w0, a0), x, grad) in enumerate(zip(weights, sums, inputs, grads, strict=True)):
        w0, a0 = torch.baddbmm(w0, rate * x.transpose(1, 2), grad), a0 + rate * grad
        now = w - here * w0, a - here * a0
        y = torch.baddbmm(now[1], F.gelu(y, approximate="tanh") if i else y, now[0])
        stepped.append((torch.where(full, now[0], w), torch.where(full, now[1], a)))
        since.append((torch.where(full, 0, w0), torch.where(full, 0, a0)))
    return y.view(b, 1, h, -1), stepped, since, (position + 1) % factor.shape[0]


def _open(
    state: dict[str, Tensor], rows: int, head: torch.Size, chunk: int, dtype: torch.dtype
) -> tuple[Weights, Weights | None, Tensor | None]:
    """The state's weights, its sums and the place in the chunk, if it has one."""
    h, d = head
    depth = sum(name.startswith("weight") and not name.endswith("_sum") for name in state)
    names = [f"{kind}{i + 1}" for i in range(depth) for kind in ("weight", "bias")]
    running = {f"{name}_sum" for name in names} | {"position"}
    if not depth or state.keys() not in (set(names), set(names) | running):
        raise ValueError(
            f"state must have weight1, bias1, ... and, in the middle of a chunk, weight1_sum, bias1_sum, ... and "
            f"position, got {', '.join(state) or 'nothing'}"
        )
    width = d
    for i in range(depth):
        w, end = state[f"weight{i + 1}"], d if i == depth - 1 else state[f"weight{i + 1}"].shape[-1]
        for suffix in ("", "_sum") if "position" in state else ("",):
            for kind, sizes in (("weight", (h, width, end)), ("bias", (h, end))):
                name = f"{kind}{i + 1}{suffix}"
                if state[name].shape not in ((rows, *sizes), sizes):
                    raise ValueError(
                        f"state[{name!r}] must have shape (rows, h, ...) = {(rows, *sizes)} or {sizes}, "
                        f"got {tuple(state[name].shape)}"
                    )
        width = w.shape[-1]

    def layers(suffix: str) -> Weights:
        pairs = []
        for i in range(depth):
            w, a = (state[f"{kind}{i + 1}{suffix}"].to(dtype) for kind in ("weight", "bias"))
            w, a = w.expand(rows, *w.shape[-3:]), a.expand(rows, *a.shape[-2:])
            pairs.append((w.flatten(0, 1), a.flatten(0, 1)[:, None]))
        return pairs

    if "position" not in state:
        return layers(""), None, None
    position = state["position"]
    checks.check_position(position, rows, chunk)
    return layers(""), layers("_sum"), position


def _close(weights: Weights, sums: Weights, position: Tensor, h: int) -> dict[str, Tensor]:
    state = {}
    for suffix, pairs in (("", weights), ("_sum", sums)):
        for i, (w, a) in enumerate(pairs):
            state[f"weight{i + 1}{suffix}"] = w.unflatten(0, (-1, h))
            state[f"bias{i + 1}{suffix}"] = a.unflatten(0, (-1, h)).squeeze(2)
    return state | {"position": position}


def _zeros(weights: Weights) -> Weights:
    return [(torch.zeros_like(w), torch.zeros_like(a)) for w, a in weights]


def _rows(weights: Weights, order: Tensor, h: int) -> Weights:
    return [
        (w.unflatten(0, (-1, h))[order].flatten(0, 1), a.unflatten(0, (-1, h))[order].flatten(0, 1)) for w, a in weights
    ]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    factor: Tensor | None,
    chunk: int,
    cu_seqlens: Tensor | None,
) -> None:
    checks.check_qkv(q, k, v)
    checks.check_chunk_size(chunk)
    checks.check_cu_seqlens(cu_seqlens, *q.shape[:2])
    named: dict[str, tuple[Tensor, str, tuple[int, ...]]] = {
        "v": (v, "(b, t, h, d) like q", tuple(q.shape)),
        "rate": (rate, "(b, t, h)", tuple(q.shape[:3])),
        "norm_weight": (norm_weight, "(h, d)", tuple(q.shape[2:])),
        "norm_bias": (norm_bias, "(h, d)", tuple(q.shape[2:])),
    }
    if factor is not None:
        named["factor"] = factor, "(chunk,)", (chunk,)
    for name, (x, symbols, sizes) in named.items():
        if tuple(x.shape) != sizes:
            raise ValueError(f"{name} must have shape {symbols} = {sizes}, got {tuple(x.shape)}")
        checks.check_device(name, x, q)
