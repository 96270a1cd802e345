"""Titans: a memory that learns by gradient descent with momentum, and forgets.

    S_t = eta_t S_{t-1} - theta_t grad_t       grad of 1/2 |f(M; k_t) - v_t|^2 at M0, the weights as the chunk began
    M_t = (1 - alpha_t) M_{t-1} + S_t
    y_t = f(M_t; q_t)

f is a matrix, or an MLP of several: x_{l+1} = silu(x_l M^l), the last one without silu, then optionally a layer norm
and + x. The gradient of one token in each matrix is x^T G of rank 1, so nothing but scores is needed inside a chunk:

    E_ij = prod_{j<r<=i} eta_r      A_ti = prod_{i<r<=t} (1 - alpha_r)      W = A (E theta)
    m_t = prod_{r<=t} eta_r         b_t = prod_{r<=t} (1 - alpha_r)         f = A m
    x M_t = b_t x M + f_t x S - sum_{j<=t} W_tj (x . x_j) G_j               M, S those before the chunk

and M, S at its end are the same sums. The products are taken over just the tokens they span, never as quotients:
gates of exactly 0 or 1 are exact, gradients too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.memory.gpu import MOST, on_gpu
from lineate.memory.grid import lay_out
from lineate.memory.products import product
from lineate.precision import full_precision_backward
from lineate.rule import compute_dtype, full_precision
from lineate.sequences import sequence_lengths

EPS = 1e-6
"""Of the optional layer norm."""

Options = tuple[float | None, bool, bool]
"""clip, residual, norm."""
Scan = Callable[..., tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]]


def titans_state(weights: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """The state of `rows` rows that begin with these weights, `h in out` each: no momentum, at a chunk's start."""
    state: dict[str, Tensor] = {}
    for i, x in enumerate(weights):
        x = x.to(compute_dtype(x.dtype)).expand(rows, *x.shape)
        state |= {f"weights_{i}": x, f"momentum_{i}": torch.zeros_like(x), f"start_{i}": x}
    state["position"] = torch.zeros(rows, dtype=torch.int64, device=weights[0].device)
    return state


@full_precision_backward
def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    state: Mapping[str, Tensor] | None = None,
    *,
    chunk: int = 16,
    clip: float | None = None,
    residual: bool = False,
    norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """q, k `b t h k`, v `b t h v`; rate theta, momentum eta, forgetting alpha `b t h` -> `b t h v` and the state.

    state: of `titans_state`, or of an earlier call, also in the middle of a chunk; without position all rows are at a
    chunk's start, and no GPU need be asked; None: a matrix of zeros. clip: the largest norm of one token's gradient
    over all matrices (of one token, so that the future cannot change the past).
    """
    rows = _check(q, k, v, {"theta": theta, "eta": eta, "alpha": alpha}, state, chunk, clip, residual, cu_seqlens)
    dtype, (b, t) = compute_dtype(q.dtype), q.shape[:2]
    with full_precision(q):
        known = state is not None and "position" in state
        if state is None:
            state = titans_state([q.new_zeros(q.shape[2], q.shape[3], v.shape[3], dtype=dtype)], rows)
        depth = len(state) // 3
        weights, momentum, start = (
            [state[f"{name}_{i}"] for i in range(depth)] for name in ("weights", "momentum", "start")
        )
        if not known:
            start = weights
        options = clip, residual, norm
        tokens = [x.to(dtype) for x in (q, k, v, theta, eta, alpha)]
        if t == 1 and cu_seqlens is None:  # nothing here waits for a device
            tokens = [x.transpose(1, 2) for x in tokens]  # b h 1 ...
            factors = _factors(tokens[3:], None)
            y, weights, momentum = _advance(tokens[:3], factors, weights, momentum, start, options)
            position = state["position"] if known else torch.zeros(rows, dtype=torch.int64, device=q.device)
            position = (position + 1) % chunk
            start = where(position == 0, weights, start)
            return y.transpose(1, 2).to(v.dtype), _state(weights, momentum, start, position)

        lengths = (t,) * b if cu_seqlens is None else sequence_lengths(cu_seqlens)
        grid = lay_out(tuple(state["position"].tolist()) if known else (0,) * rows, lengths, chunk, q.device)
        tokens = [grid.cells(x) for x in tokens]  # cells h chunk ...
        factors = _factors(tokens[3:], grid.filled[:, None])
        scan = _scan_for(weights, chunk)
        pieces = _pieces(grid.counts, known, weights if scan else None)
        sizes = [sum(grid.counts[piece]) for piece in pieces]
        split = zip(*(x.split(sizes) for x in (*tokens[:3], *factors)), strict=True)
        memory = [[x.index_select(0, grid.order) for x in part] for part in (weights, momentum, start)]
        outputs, done = [], []
        for i, (piece, own) in enumerate(zip(pieces, split, strict=True)):
            counts, complete = grid.counts[piece], grid.complete[piece]
            n = counts[0]
            if n < memory[0][0].shape[0]:  # the others are through
                done.append([[x[n:] for x in part] for part in memory])
                memory = [[x[:n] for x in part] for part in memory]
            weights, momentum, start = memory
            if scan is not None and (i or not known):
                y, *memory = scan(own[:3], Factors(*own[3:]), weights, momentum, counts, complete, options)
                outputs.append(y)
                continue
            y, weights, momentum = _advance(own[:3], Factors(*own[3:]), weights, momentum, start, options)
            outputs.append(y)
            if all(complete[0]):
                start = weights
            elif any(complete[0]):
                start = where(torch.tensor(complete[0], device=q.device), weights, start)
            memory = [weights, momentum, start]
        done.append(memory)
        back = grid.order.argsort()
        weights, momentum, start = (
            [torch.cat([piece[part][i] for piece in reversed(done)]).index_select(0, back) for i in range(depth)]
            for part in range(3)
        )
        y = grid.back(torch.cat(outputs), b).to(v.dtype)
        return y, _state(weights, momentum, start, grid.positions.clone())  # grids are kept


def _scan_for(weights: list[Tensor], chunk: int) -> Scan | None:
    """What takes many chunks at once, if the kernels serve them."""
    if not on_gpu(weights[0]):
        return None
    from lineate.kernels.memories.titans import fits  # triton, at its first use
    from lineate.memory.titans_scan import scan

    return scan if fits(chunk, [weights[0].shape[2], *(x.shape[3] for x in weights)]) else None


def _pieces(counts: list[int], known: bool, scanned: list[Tensor] | None) -> list[slice]:
    """Chunks that are taken together: one by one, or, by the kernels, up to MOST elements of states.

    A first chunk that may begin in its middle is always alone.
    """
    if scanned is None:
        return [slice(j, j + 1) for j in range(len(counts))]
    size = 2 * sum(x[0].numel() for x in scanned)  # of M and S of a cell
    pieces = [slice(0, 1)] if known else []
    first, cells = len(pieces), 0
    for j in range(first, len(counts)):
        if j > first and (cells + counts[j]) * size > MOST:
            pieces.append(slice(first, j))
            first, cells = j, 0
        cells += counts[j]
    return [*pieces, slice(first, len(counts))] if first < len(counts) else pieces


class Factors(NamedTuple):
    """What the gates of a chunk come to; c tokens."""

    written: Tensor
    """W, `n h c c`: how much of each gradient is in M_t."""
    moving: Tensor
    """E_cj theta_j, `n h c 1`: how much of it is in S at the end."""
    kept: Tensor
    """b, `n h c 1`: how much of M is in M_t."""
    pushed: Tensor
    """f, `n h c 1`: how much of S is in M_t."""
    carried: Tensor
    """m_c, `n h 1 1`: how much of S is in S at the end."""


def _factors(gates: list[Tensor], filled: Tensor | None) -> Factors:
    """theta, eta, alpha `n h c`; filled `n 1 c`: an empty slot changes nothing (0, 1, 0, and S is not added to M)."""
    theta, eta, alpha = gates
    keep = 1 - alpha
    if filled is not None:
        theta, eta, keep = theta * filled, eta.where(filled, 1), keep.where(filled, 1)
    if theta.shape[-1] == 1:
        return Factors(*(x.unsqueeze(-1) for x in (theta, theta, keep, eta, eta)))
    A, E = _between(keep), _between(eta)
    if filled is not None:
        A = A * filled.unsqueeze(-2)
    E = E * theta.unsqueeze(-2)
    m = eta.cumprod(-1).unsqueeze(-1)
    b, f = keep.cumprod(-1).unsqueeze(-1), product(A, m)
    return Factors(product(A, E), E[..., -1, :].unsqueeze(-1), b, f, m[..., -1:, :])


def _between(x: Tensor) -> Tensor:
    """x `... c` -> `... c c`: at (i, j) the product over j < r <= i, 0 above the diagonal."""
    c = x.shape[-1]
    below = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)
    return x.unsqueeze(-1).where(below, 1).cumprod(-2).tril()


def _advance(
    qkv: Sequence[Tensor],
    factors: Factors,
    weights: list[Tensor],
    momentum: list[Tensor],
    start: list[Tensor],
    options: Options,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One chunk, or less: q, k, v `n h c d` -> the outputs, M and S after it."""
    q, k, v = qkv
    inputs, _, grads = gradients(k, v, start, options)
    grads = clipped(inputs, grads, options)
    y = read(q, factors, weights, momentum, inputs, grads, options)
    last = factors.written[..., -1, :].unsqueeze(-1)
    b, f = factors.kept[..., -1:, :], factors.pushed[..., -1:, :]
    pairs = list(zip(weights, momentum, inputs, grads, strict=True))
    weights = [b * M + f * S - product((last * x).mT, G) for M, S, x, G in pairs]
    momentum = [factors.carried * S - product((factors.moving * x).mT, G) for _, S, x, G in pairs]
    return y, weights, momentum


def read(
    q: Tensor,
    factors: Factors,
    weights: list[Tensor],
    momentum: list[Tensor],
    inputs: list[Tensor],
    grads: list[Tensor],
    options: Options,
) -> Tensor:
    """y `n h c v`: f(M_t; q_t) for every token of a chunk that begins with M and S."""
    x, (_, residual, norm) = q, options
    for i, (own, G) in enumerate(zip(inputs, grads, strict=True)):
        x = F.silu(x) if i else x
        old = factors.kept * product(x, weights[i]) + factors.pushed * product(x, momentum[i])
        x = old - product(product(x, own.mT) * factors.written, G)
    y = F.layer_norm(x, x.shape[-1:], eps=EPS) if norm else x
    return y + q if residual else y


def gradients(
    k: Tensor, v: Tensor, weights: list[Tensor], options: Options
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """For each matrix x, z = x M and the gradients G by z, so that a token's gradient in it is x^T G; not clipped."""
    _, residual, norm = options
    inputs: list[Tensor] = [k]
    before: list[Tensor] = []
    for i, M in enumerate(weights):
        if i:
            inputs.append(F.silu(before[-1]))
        before.append(product(inputs[-1], M))
    z = before[-1]
    if norm:
        centred = z - z.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
        unit = centred * inverse
        error = unit - v + k if residual else unit - v
        G = (error - error.mean(-1, keepdim=True) - unit * (error * unit).mean(-1, keepdim=True)) * inverse
    else:
        G = z - v + k if residual else z - v
    grads = [G]
    for M, z in zip(weights[:0:-1], before[-2::-1], strict=True):
        gate = z.sigmoid()
        grads.insert(0, product(grads[0], M.mT) * (gate * (1 + z * (1 - gate))))
    return inputs, before, grads


def clipped(inputs: list[Tensor], grads: list[Tensor], options: Options) -> list[Tensor]:
    """G of every matrix, such that the norm of a token's gradient over all of them is at most clip."""
    clip = options[0]
    if clip is None:
        return grads
    squares = [x.square().sum(-1) * G.square().sum(-1) for x, G in zip(inputs, grads, strict=True)]
    size = torch.stack(squares).sum(0).clamp_min(1e-30).sqrt()  # where it is 0, so is its gradient
    scale = (clip / (size + 1e-6)).clamp(max=1).unsqueeze(-1)
    return [scale * G for G in grads]


def where(rows: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    return [torch.where(rows[:, None, None, None], x, y) for x, y in zip(new, old, strict=True)]


def _state(weights: list[Tensor], momentum: list[Tensor], start: list[Tensor], position: Tensor) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for i, (M, S, M0) in enumerate(zip(weights, momentum, start, strict=True)):
        state |= {f"weights_{i}": M, f"momentum_{i}": S, f"start_{i}": M0}
    return state | {"position": position}


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    state: Mapping[str, Tensor] | None,
    chunk: int,
    clip: float | None,
    residual: bool,
    cu_seqlens: Tensor | None,
) -> int:
    """Returns the rows of the state."""
    checks.check_qkv(q, k, v)
    b, t, h, width = q.shape
    checks.check_cu_seqlens(cu_seqlens, b, t)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.shape[2] != h:
        raise ValueError(f"v must have as many heads as q, {h}, got {v.shape[2]}; repeat q and k for its heads")
    if residual and v.shape[3] != width:
        raise ValueError(f"residual=True needs values as wide as keys, {width}, got {v.shape[3]}")
    for name, x in gates.items():
        if x.shape != (b, t, h):
            raise ValueError(f"{name} must have shape (b, t, h) = {(b, t, h)}, got {tuple(x.shape)}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be above 0, or None for no clipping, got {clip}")
    if state is None:
        return rows
    if "position" in state:
        checks.check_position(state["position"], rows, chunk)
    if "weights_0" not in state or state["weights_0"].shape[:3] != (rows, h, width):
        found = tuple(state["weights_0"].shape) if "weights_0" in state else sorted(state)
        raise ValueError(f"state must have weights_0 of shape (rows, h, k, ...) = {(rows, h, width)} ..., got {found}")
    last = state[f"weights_{len(state) // 3 - 1}"]
    if last.shape[3] != v.shape[3] or last.dtype != compute_dtype(q.dtype):
        raise ValueError(
            f"the state's last matrix must be (..., v) = {v.shape[3]} wide in {compute_dtype(q.dtype)}, "
            f"got {tuple(last.shape)} in {last.dtype}; make it with titans_state of weights of that shape and dtype"
        )
    return rows
