"""The op of TTT-Linear and TTT-MLP: its checks, its state, and one token at a time."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.memory.chunks import check_chunk, lay_out
from lineate.memory.ttt.dual import Tokens, run_chunks
from lineate.memory.ttt.model import Layers, gradients
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.precision import full_precision_backward


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
    """Return o_t = q_t + LN(z(q_t; W_t)), and the state after the last token of each row.

    Args:
        q: Queries `b t h d`.
        k: Keys `b t h d`.
        v: Values `b t h d`.
        rate: The step size of each token's write, `b t h`.
        norm_weight: The weight gamma of LN, `h d`.
        norm_bias: The bias beta of LN, `h d`.
        state: The model: weight1 `rows h d n`, bias1 `rows h n`, weight2, ..., the last with n = d, at the start of the
            chunk; without the dimension `rows` they are the same for all rows. In the middle of a chunk
            also weight1_sum, bias1_sum, ... of the same shapes, and position `rows`: how many tokens of the chunk are
            written. The state that is returned has all of them.
        factor: The factor of the sum of gradients for the reader at each position of a chunk, `chunk`; None is 1, 1/2,
            ..., 1/chunk.
        chunk: Tokens that share the weights at which the gradient is taken.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.
        eps: Added to the variance in LN.
        recompute_chunks: How many chunks form a group that keeps only its first weights, and is recomputed in the
            backward; 0 keeps everything.

    Returns:
        o `b t h d` in the dtype of q, and the state.
    """
    _check(
        q, k, v, {"rate": rate, "norm_weight": norm_weight, "norm_bias": norm_bias, "factor": factor}, chunk, cu_seqlens
    )
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = compute_dtype(q.dtype)
    given = q.dtype
    with full_precision(q):
        weights, sums, position = _open(state, rows, q.shape[2:], chunk, dtype)
        q, k, v, rate, gamma, beta = (x.to(dtype) for x in (q, k, v, rate, norm_weight, norm_bias))
        if factor is None:
            factor = 1 / torch.arange(1, chunk + 1, device=q.device, dtype=dtype)
        factor = factor.to(dtype)
        tokens = Tokens(q, k, gamma * (v - k - beta), rate)
        if q.shape[1] == 1 and cu_seqlens is None and sums is not None and position is not None:
            z, weights, sums, position = _step(tokens, gamma, weights, sums, position, factor, eps)
        else:
            layout = lay_out(q, position, chunk, cu_seqlens)
            z, weights, sums = run_chunks(tokens, gamma, weights, sums, layout, factor, eps, recompute_chunks)
            position = layout.position.clone()  # layouts are kept
        output = q + F.layer_norm(z, z.shape[-1:], eps=eps) * gamma + beta
    return output.to(given), _close(weights, sums, position, q.shape[2])


def _step(
    tokens: Tokens, gamma: Tensor, weights: Layers, sums: Layers, position: Tensor, factor: Tensor, eps: float
) -> tuple[Tensor, Layers, Layers, Tensor]:
    """Return z(q; W_t) `b 1 h d` of one token of each row, and the state after it."""
    b, _, h, _ = tokens.q.shape
    q, k, target = (x.reshape(b * h, 1, -1) for x in tokens[:3])
    rate = tokens.rate.reshape(b * h, 1, 1)
    here = factor[position].repeat_interleave(h)[:, None, None]
    full = (position + 1 == factor.shape[0]).repeat_interleave(h)[:, None, None]
    inputs, _, _, grads = gradients(weights, k, target, gamma.square().repeat(b, 1)[:, None], eps)
    y = q
    stepped, since = [], []
    for i, ((w, a), (w0, a0), x, grad) in enumerate(zip(weights, sums, inputs, grads, strict=True)):
        w0, a0 = torch.baddbmm(w0, rate * x.transpose(1, 2), grad), a0 + rate * grad
        now = w - here * w0, a - here * a0
        y = torch.baddbmm(now[1], elementwise(partial(F.gelu, approximate="tanh"), y) if i else y, now[0])
        stepped.append((torch.where(full, now[0], w), torch.where(full, now[1], a)))
        since.append((torch.where(full, 0, w0), torch.where(full, 0, a0)))
    return y.view(b, 1, h, -1), stepped, since, (position + 1) % factor.shape[0]


def _open(
    state: dict[str, Tensor], rows: int, head: torch.Size, chunk: int, dtype: torch.dtype
) -> tuple[Layers, Layers | None, Tensor | None]:
    """Return the state's weights, and its sums and position if it has them."""
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

    def layers(suffix: str) -> Layers:
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


def _close(weights: Layers, sums: Layers, position: Tensor, h: int) -> dict[str, Tensor]:
    """Return the state as a dictionary; the inverse of _open."""
    state = {}
    for suffix, pairs in (("", weights), ("_sum", sums)):
        for i, (w, a) in enumerate(pairs):
            state[f"weight{i + 1}{suffix}"] = w.unflatten(0, (-1, h))
            state[f"bias{i + 1}{suffix}"] = a.unflatten(0, (-1, h)).squeeze(2)
    return state | {"position": position}


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: dict[str, Tensor | None],
    chunk: int,
    cu_seqlens: Tensor | None,
) -> None:
    checks.check_qkv(q, k, v)
    check_chunk(chunk)
    checks.check_cu_seqlens(cu_seqlens, *q.shape[:2])
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "v": ("(b, t, h, d) like q", tuple(q.shape)),
        "rate": ("(b, t, h)", tuple(q.shape[:3])),
        "norm_weight": ("(h, d)", tuple(q.shape[2:])),
        "norm_bias": ("(h, d)", tuple(q.shape[2:])),
        "factor": ("(chunk,)", (chunk,)),
    }
    for name, x in {"v": v, **others}.items():
        if x is None:
            continue
        symbols, sizes = shapes[name]
        if tuple(x.shape) != sizes:
            raise ValueError(f"{name} must have shape {symbols} = {sizes}, got {tuple(x.shape)}")
        checks.check_device(name, x, q)
