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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.memory.grid import lay_out
from lineate.memory.products import product
from lineate.rule import compute_dtype, full_precision

EPS = 1e-6
"""Of the optional layer norm."""


def titans_state(weights: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """The state of `rows` rows that begin with these weights, `h in out` each: no momentum, at a chunk's start."""
    state: dict[str, Tensor] = {}
    for i, x in enumerate(weights):
        x = x.to(compute_dtype(x.dtype)).expand(rows, *x.shape)
        state |= {f"weights_{i}": x, f"momentum_{i}": torch.zeros_like(x), f"start_{i}": x}
    state["position"] = torch.zeros(rows, dtype=torch.int64, device=weights[0].device)
    return state


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

    state: of `titans_state`, or of an earlier call, also in the middle of a chunk; None: a matrix of zeros. clip: the
    largest norm of one token's gradient over all matrices (of one token, so that the future cannot change the past).
    """
    rows = _check(q, k, v, {"theta": theta, "eta": eta, "alpha": alpha}, state, chunk, clip, residual, cu_seqlens)
    dtype, (b, t) = compute_dtype(q.dtype), q.shape[:2]
    with full_precision(q):
        known = state is not None
        if state is None:
            state = titans_state([q.new_zeros(q.shape[2], q.shape[3], v.shape[3], dtype=dtype)], rows)
        depth = len(state) // 3
        weights, momentum, start = (
            [state[f"{name}_{i}"] for i in range(depth)] for name in ("weights", "momentum", "start")
        )
        options = clip, residual, norm
        tokens = [x.to(dtype) for x in (q, k, v, theta, eta, alpha)]
        if t == 1 and cu_seqlens is None:  # nothing here waits for a device
            tokens = [x.transpose(1, 2) for x in tokens]  # b h 1 ...
            factors = _factors(tokens[3:], None)
            y, weights, momentum = _advance(tokens[:3], factors, weights, momentum, start, options)
            position = (state["position"] + 1) % chunk
            start = _where(position == 0, weights, start)
            return y.transpose(1, 2).to(v.dtype), _state(weights, momentum, start, position)

        lengths = [t] * b if cu_seqlens is None else cu_seqlens.diff().tolist()
        grid = lay_out(state["position"].tolist() if known else [0] * rows, lengths, chunk, q.device)
        tokens = [grid.cells(x) for x in tokens]  # cells h chunk ...
        factors = _factors(tokens[3:], grid.filled[:, None])
        split = zip(*(x.split(grid.counts) for x in (*tokens[:3], *factors)), strict=True)
        memory = [[x.index_select(0, grid.order) for x in part] for part in (weights, momentum, start)]
        outputs, done = [], []
        for j, own in enumerate(split):
            n = grid.counts[j]
            if n < memory[0][0].shape[0]:  # the others are through
                done.append([[x[n:] for x in part] for part in memory])
                memory = [[x[:n] for x in part] for part in memory]
            weights, momentum, start = memory
            y, weights, momentum = _advance(own[:3], Factors(*own[3:]), weights, momentum, start, options)
            outputs.append(y)
            if all(grid.complete[j]):
                start = weights
            elif any(grid.complete[j]):
                start = _where(torch.tensor(grid.complete[j], device=q.device), weights, start)
            memory = [weights, momentum, start]
        done.append(memory)
        back = grid.order.argsort()
        weights, momentum, start = (
            [torch.cat([piece[part][i] for piece in reversed(done)]).index_select(0, back) for i in range(depth)]
            for part in range(3)
        )
        y = grid.back(torch.cat(outputs), b).to(v.dtype)
        return y, _state(weights, momentum, start, grid.positions)


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
    options: tuple[float | None, bool, bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One chunk, or less: q, k, v `n h c d` -> the outputs, M and S after it."""
    q, k, v = qkv
    clip, residual, norm = options
    inputs, grads = _gradients(k, v, start, clip, residual, norm)
    written, moving, kept, pushed, carried = factors
    x = q
    for i, (own, G) in enumerate(zip(inputs, grads, strict=True)):
        x = F.silu(x) if i else x
        old = kept * product(x, weights[i]) + pushed * product(x, momentum[i])
        x = old - product(product(x, own.mT) * written, G)
    y = F.layer_norm(x, x.shape[-1:], eps=EPS) if norm else x
    y = y + q if residual else y
    last = written[..., -1, :].unsqueeze(-1)
    b, f = kept[..., -1:, :], pushed[..., -1:, :]
    pairs = list(zip(weights, momentum, inputs, grads, strict=True))
    weights = [b * M + f * S - product((last * x).mT, G) for M, S, x, G in pairs]
    momentum = [carried * S - product((moving * x).mT, G) for _, S, x, G in pairs]
    return y, weights, momentum


def _gradients(
    k: Tensor, v: Tensor, weights: list[Tensor], clip: float | None, residual: bool, norm: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """For each matrix its inputs x and the gradients G after it, so that a token's gradient in it is x^T G."""
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
    if clip is not None:
        squares = [x.square().sum(-1) * G.square().sum(-1) for x, G in zip(inputs, grads, strict=True)]
        size = torch.stack(squares).sum(0).clamp_min(1e-30).sqrt()  # where it is 0, so is its gradient
        scale = (clip / (size + 1e-6)).clamp(max=1).unsqueeze(-1)
        grads = [scale * G for G in grads]
    return inputs, grads


def _where(rows: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
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
