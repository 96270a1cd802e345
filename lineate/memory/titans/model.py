"""The reads and writes of a chunk of Titans, for any number of chunks at once: factors of gates, gradients, outputs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory.products import product

LAYER_NORM_EPS = 1e-6
"""Added to the variance in the optional layer norm."""


class TitansOptions(NamedTuple):
    """The options of a memory, besides its matrices."""

    clip: float | None
    """The largest norm of one token's gradient over all matrices; None: no clipping."""
    residual: bool
    """Whether + x follows."""
    norm: bool
    """Whether a layer norm comes before it."""


class Factors(NamedTuple):
    """The factors that the gates of a chunk of c tokens give."""

    written: Tensor
    """W, `n h c c`: how much of each gradient is in M_t."""
    moving: Tensor
    """E_cj theta_j, `n h c 1`: how much of each gradient is in S at the end."""
    kept: Tensor
    """b, `n h c 1`: how much of M is in M_t."""
    pushed: Tensor
    """f, `n h c 1`: how much of S is in M_t."""
    carried: Tensor
    """m_c, `n h 1 1`: how much of S is in S at the end."""


def make_factors(gates: list[Tensor], filled: Tensor | None) -> Factors:
    """Return the factors of the gates theta, eta, alpha `n h c`.

    filled `n 1 c` says which slots hold a token. An empty one changes nothing: its gates are 0, 1 and 0, and S is not
    added to M.
    """
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
    """Return `... c c` of x `... c`: at (i, j) the product over j < r <= i, 0 above the diagonal."""
    c = x.shape[-1]
    below = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)
    return x.unsqueeze(-1).where(below, 1).cumprod(-2).tril()


def select(rows: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Return new in the rows where `rows` is true, else old; all `rows h in out`."""
    return [torch.where(rows[:, None, None, None], x, y) for x, y in zip(new, old, strict=True)]


def gradients(
    k: Tensor, v: Tensor, weights: list[Tensor], options: TitansOptions
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return x, z = x M and the gradient G by z for each matrix, not clipped; a token's gradient in it is x^T G."""
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
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS)
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


def clipped(inputs: list[Tensor], grads: list[Tensor], options: TitansOptions) -> list[Tensor]:
    """Return G of every matrix, scaled so that the norm of a token's gradient over all of them is at most clip."""
    clip = options[0]
    if clip is None:
        return grads
    squares = [x.square().sum(-1) * G.square().sum(-1) for x, G in zip(inputs, grads, strict=True)]
    size = torch.stack(squares).sum(0).clamp_min(1e-30).sqrt()  # where it is 0, so is its gradient
    scale = (clip / (size + 1e-6)).clamp(max=1).unsqueeze(-1)
    return [scale * G for G in grads]


def read(
    q: Tensor,
    factors: Factors,
    weights: list[Tensor],
    momentum: list[Tensor],
    inputs: list[Tensor],
    grads: list[Tensor],
    options: TitansOptions,
) -> Tensor:
    """Return y `n h c v`: f(M_t; q_t) for every token of a chunk that begins with M and S."""
    x, (_, residual, norm) = q, options
    for i, (own, G) in enumerate(zip(inputs, grads, strict=True)):
        x = F.silu(x) if i else x
        old = factors.kept * product(x, weights[i]) + factors.pushed * product(x, momentum[i])
        x = old - product(product(x, own.mT) * factors.written, G)
    y = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS) if norm else x
    return y + q if residual else y
