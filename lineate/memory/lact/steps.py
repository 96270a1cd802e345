"""The steps of LaCT's scan and their manual gradients: products, Newton-Schulz; reads and writes of tokens; C and M.

Here they are in torch; lineate.kernels.memories.lact has the last two as one kernel each, by the same names.

All tensors are batches of matrices, float32 or float64, and no graph is made. M = [W0; W2; W1^T] `r 3e d`, e hidden
channels; `a | u` and `s` are `r c 2e`; z and hidden `r c e`; rates `r c 3`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.memory.parts import MUON_EPS, MUON_STEPS

# Products. A CPU's libraries want the second matrix without gaps (products.py).


def times(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x y."""
    return torch.bmm(x, y if y.is_cuda else y.contiguous(), out=out)


def add_times(
    base: Tensor, x: Tensor, y: Tensor, beta: float = 1.0, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return beta base + alpha x y."""
    return torch.baddbmm(base, x, y if y.is_cuda else y.contiguous(), beta=beta, alpha=alpha, out=out)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    """Return [W0; W2] and W1^T of M `... 3e d`."""
    e = x.shape[-2] // 3
    return x.split((2 * e, e), -2)


# Newton-Schulz: X <- a X + P X, P = b X X^T + c (X X^T)^2. Matrices with more rows than columns are turned.

Course = list[tuple[Tensor, ...]]
"""X, X X^T and P of every step."""


def newton_schulz(x: Tensor, course: Course | None = None) -> Tensor:
    """Take all steps from matrices of norm 1, three launches each; their course is appended to a list."""
    y = _laid(x, x)
    for a, b, c in MUON_STEPS:
        square = times(y, y.mT)
        inner = add_times(square, square, square, b, c)
        if course is not None:
            course.append((y, square, inner))
        y = add_times(y, inner, y, a)
    return _laid(y, x)


def newton_schulz_backward(dx: Tensor, course: Course) -> Tensor:
    """Return dX: with G = dP + dP^T, dP = dX' X^T,  dX = a dX' + P dX' + (H + H^T) X,  H = b/2 G + c G (X X^T)."""
    d = _laid(dx, dx)
    for (a, b, c), (x, square, inner) in zip(reversed(MUON_STEPS), reversed(course), strict=True):
        both = times(d, x.mT)
        both = both + both.mT
        half = add_times(both, both, square, b / 2, c)
        d = add_times(d, inner, d, a)
        add_times(d, half + half.mT, x, out=d)
    return _laid(d, dx)


def _laid(x: Tensor, like: Tensor) -> Tensor:
    """Return x, turned if `like` has more rows than columns."""
    return x if like.shape[-2] <= like.shape[-1] else x.mT


# Reads and writes of tokens


def glu(au: Tensor) -> Tensor:
    """Return silu(a) u."""
    a, u = au.chunk(2, -1)
    return F.silu(a).mul_(u)


def glu_backward(au: Tensor, dhidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(a) u, and the gradient by a | u."""
    a, u = au.chunk(2, -1)
    _, opened, slope = _silu(a)
    dau = torch.empty_like(au)
    da, du = dau.chunk(2, -1)
    torch.mul(opened, dhidden, out=du)
    torch.mul(slope.mul_(u), dhidden, out=da)
    return opened.mul_(u), dau


def writes(au: Tensor, z: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return s = [rate0 z u silu'(a), rate2 z silu(a)] and hidden = rate1 silu(a) u."""
    a, u = au.chunk(2, -1)
    rate0, rate1, rate2 = rates.split(1, -1)
    gate, opened, slope = _silu(a)
    s = torch.empty_like(au)
    s0, s2 = s.chunk(2, -1)
    torch.mul(slope.mul_(u), torch.mul(z, rate0, out=gate), out=s0)
    torch.mul(opened, torch.mul(z, rate2, out=gate), out=s2)
    return s, opened.mul_(u).mul_(rate1)


def writes_backward(au: Tensor, z: Tensor, rates: Tensor, ds: Tensor, dhidden: Tensor, drates: Tensor) -> None:
    """Overwrite a | u and z with their gradients, and ds and dhidden with s and hidden; fill drates.

    silu'' = gate (1 - gate) (2 + a (1 - 2 gate)), with e_i = rate_i times the gradient of W_i's write:

        da = z (e0 u silu'' + e2 silu') + e1 u silu'    du = e0 z silu' + e1 silu    dz = e0 u silu' + e2 silu
    """
    a, u = au.chunk(2, -1)
    ds0, ds2 = ds.chunk(2, -1)
    gate, opened, slope = _silu(a)
    bend = torch.addcmul(a, a, gate, value=-2).add_(2).mul_(torch.addcmul(gate, gate, gate, value=-1)).mul_(u)
    steep, both = slope * u, opened * u
    rate0, rate1, rate2 = rates.split(1, -1)
    e0, e1, e2 = torch.mul(ds0, rate0, out=gate), dhidden * rate1, ds2 * rate2
    torch.mul(bend.mul_(e0).addcmul_(e2, slope), z, out=a).addcmul_(e1, steep)
    torch.mul(slope.mul_(z), e0, out=u).addcmul_(e1, opened)
    # The write of each token, before its rate
    written0, written2 = torch.mul(steep, z, out=slope), torch.mul(opened, z, out=bend)
    torch.mul(e0, steep, out=z).addcmul_(e2, opened)
    parts = (ds0, written0, rate0), (dhidden, both, rate1), (ds2, written2, rate2)
    for i, (d, written, rate) in enumerate(parts):
        torch.sum(torch.mul(d, written, out=e1), -1, out=drates[..., i])
        torch.mul(written, rate, out=d)


def _silu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gate, silu and its slope."""
    gate = a.sigmoid()
    opened = a * gate
    return gate, opened, torch.addcmul(opened, opened, gate, value=-1).add_(gate)


# The end of a chunk


class Unit(NamedTuple):
    """Each of the three matrices C over its norm."""

    x: Tensor
    """C / (|C| + eps), `3r e d`."""
    size: Tensor
    """1 / (|C| + eps)."""
    inverse: Tensor
    """1 / |C|, 0 if |C| is."""


def unit(changes: Tensor, eps: float = MUON_EPS) -> Unit:
    """Return the unit matrices of C `... 3e d`."""
    flat = changes.reshape(-1, changes.shape[-2] // 3, changes.shape[-1])
    norm = torch.linalg.matrix_norm(flat, keepdim=True)
    size = 1 / (norm + eps)
    return Unit(flat * size, size, torch.where(norm > 0, 1 / norm, 0))


def change(sums: Tensor, mean: Tensor, previous: Tensor, out: Tensor, eps: float) -> Tensor:
    """Store C = sums + mean * previous in out, mean `r`, and return the x of its unit."""
    return unit(torch.addcmul(sums, mean[:, None, None], previous, out=out), eps).x


def change_backward(dx: Tensor, at: Unit, base: Tensor | None, mean: Tensor, out: Tensor) -> Tensor:
    """Store dC = base + dx size - x <dx, x> / |C| in out, and return mean * dC, the gradient by previous."""
    dot = (dx * at.x).sum((-1, -2), keepdim=True) * at.inverse
    place = out.view(dx.shape)
    torch.mul(dx, at.size, out=place).addcmul_(at.x, dot, value=-1)
    if base is not None:
        out += base
    return out * mean[:, None, None]


def rescale(matrices: Tensor, step: Tensor, norms: Sequence[Tensor], out: Tensor, eps: float) -> None:
    """Store M + step in out, the rows of W0, W2 and W1 rescaled to these norms, `r 2e 1` and `r 1 d`."""
    moved = matrices + step
    for dim, part, norm, place in zip((-1, -2), halves(moved), norms, halves(out), strict=True):
        torch.mul(part, norm / (torch.linalg.vector_norm(part, dim=dim, keepdim=True) + eps), out=place)


def rescale_backward(
    given: Tensor, moved: Tensor, norms: Sequence[Tensor], dnorms: Sequence[Tensor], eps: float
) -> Tensor:
    """Return the gradient by moved = M + step, and store that by the norms in dnorms. l: the length of a row.

    dmoved = given norm / (l + eps) - moved <given, moved> norm / (l (l + eps)^2)
    """
    dmoved = torch.empty_like(given)
    parts = zip((-1, -2), halves(given), halves(moved), norms, dnorms, halves(dmoved), strict=True)
    for dim, d, x, norm, dnorm, place in parts:
        length = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        torch.div(torch.sum(d * x, dim, keepdim=True), length + eps, out=dnorm)
        scale = norm / (length + eps)
        torch.mul(d, scale, out=place).addcmul_(x, torch.where(length > 0, dnorm * scale / length, 0), value=-1)
    return dmoved
