"""Least squares over many tokens: H and B before all chunks as sums, then all chunks at once, in float64."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.forms.sequences import sequence_lengths
from lineate.memory.chunks import Chunks, lay_out
from lineate.memory.products import product

SMALLEST_WEIGHT = 1e-12
"""The chunked form raises a smaller beta to this, because the square root has no gradient at 0."""

TOGETHER = 64
"""Chunks whose states are computed together: the size of their products grows with its square."""

Fit = dict[str, Tensor]
"""The state of least squares: P, S, ridge and position."""


def run_chunks(
    inputs: Sequence[Tensor | None],
    state: Fit,
    cu_seqlens: Tensor | None,
    chunk: int,
    restored: float | None,
    aligned: bool,
) -> tuple[Tensor, Fit]:
    """Run q, k, v, log_decay, beta `b t h ...` in chunks.

    Rows that go together all get room for the same number of chunks, so packed sequences are grouped by their length.

    Args:
        inputs: q, k, v, log_decay and beta; an absent gate is None.
        state: The state of all rows.
        cu_seqlens: The bounds of packed sequences, or None.
        chunk: Tokens of a chunk.
        restored: The ridge, if it is restored after each chunk; else None.
        aligned: Whether all rows begin a chunk.
    """
    assert inputs[0] is not None
    lengths = () if cu_seqlens is None else sequence_lengths(cu_seqlens)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(max(-(-length // chunk), 1).bit_length(), []).append(row)
    if len(groups) < 2:
        layout = lay_out(inputs[0], None if aligned else state["position"], chunk, cu_seqlens, even=True)
        return _chunkwise(inputs, state, layout, restored)
    starts = [0, *accumulate(lengths)]
    outputs, states, tokens, order = [], [], [], []
    for rows in groups.values():
        at = torch.cat([torch.arange(starts[row], starts[row + 1], device="cpu") for row in rows]).to(inputs[0].device)
        own = [None if x is None else x[:, at] for x in inputs]
        bounds = torch.tensor([0, *accumulate(lengths[row] for row in rows)], device=at.device)
        which = torch.tensor(rows, device=at.device)
        after = {name: x[which] for name, x in state.items()}
        if len(at):  # otherwise all of these sequences are empty
            y, after = run_chunks(own, after, bounds, chunk, restored, aligned)
            outputs.append(y)
        states.append(after)
        tokens.append(at)
        order.append(which)
    back, rank = torch.cat(tokens).argsort(), torch.cat(order).argsort()
    state = {name: torch.cat([after[name] for after in states])[rank] for name in state}
    return torch.cat(outputs, 1)[:, back], state


def _chunkwise(
    inputs: Sequence[Tensor | None], state: Fit, layout: Chunks, restored: float | None
) -> tuple[Tensor, Fit]:
    """Find the state before every chunk, then read all chunks at once, in float64."""
    assert inputs[0] is not None
    (b, t), dtype, n = inputs[0].shape[:2], inputs[0].dtype, len(layout.sizes)
    q, k, v, log_decay, beta = (
        None if x is None else layout.grid((x if x.dim() == 4 else x[..., None]).double()) for x in inputs
    )  # n rows h c d
    assert q is not None and k is not None and v is not None
    sums = torch.zeros_like(k[..., :1]) if log_decay is None else log_decay.cumsum(-2)  # log L_t
    if beta is not None:
        scale = beta.clamp(min=SMALLEST_WEIGHT).sqrt()
        k, v = scale * k, scale * v
    total = sums[..., -1, 0]  # log L_c, n rows h
    checks.check_forgetting(total, layout.chunk)
    sums = sums.where(total[..., None, None] >= checks.LEAST_LEFT, torch.nan)  # unchecked on a GPU or compiled
    end = state["position"] + layout.lengths
    ridge, raised = _ridges(state["ridge"].double(), total, end, layout.chunk, restored)
    after = _added(state)
    outputs = []
    for first in range(0, n, TOGETHER):
        own = slice(first, min(first + TOGETHER, n))
        before = _before(after, k[own], v[own], sums[own], raised[own])
        after, (P, S) = before[-1], _solve(before)
        outputs.append(_read(q[own], k[own], v[own], sums[own], P[:-1], S[:-1]))
    output = layout.tokens(torch.cat(outputs).flatten(0, 1), b, t)
    after_last = {"P": P[-1], "S": S[-1], "ridge": ridge}
    return output.to(dtype), {name: x.to(dtype) for name, x in after_last.items()} | {"position": end % layout.chunk}


def _added(state: Fit) -> Tensor:
    """Return H | B = P^-1 | P^-1 S, `rows h k k+v`, of P plus as much as its rounding, which keeps it definite."""
    P, S = (state[name].double() for name in ("P", "S"))
    rounding = torch.finfo(state["P"].dtype).eps * P.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-30)
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    H = torch.linalg.inv_ex((P + P.mT) / 2 + rounding.detach()[..., None, None] * eye).inverse
    return torch.cat((H, H @ S), -1)


def _ridges(ridge: Tensor, total: Tensor, end: Tensor, c: int, restored: float | None) -> tuple[Tensor, Tensor]:
    """Return r after the last token, `rows h`, and by how much it is raised after each chunk, `n rows h`."""
    if restored is None:
        return ridge * total.sum(0).exp(), torch.zeros_like(total)
    whole = end // c  # chunks of each row, after which it is restored
    number = torch.arange(total.shape[0], device=end.device)[:, None]
    begun = torch.where(number[..., None] == 0, ridge, restored)  # r before each chunk
    raised = torch.where((number < whole)[..., None], restored - begun * total.exp(), 0)
    behind = torch.where((number >= whole)[..., None], total, 0).sum(0)
    return torch.where(whole[:, None] == 0, ridge, restored) * behind.exp(), raised


def _before(first: Tensor, k: Tensor, v: Tensor, sums: Tensor, raised: Tensor) -> Tensor:
    """Return H | B before each of n chunks and after the last, `n+1 rows h k k+v`, from those before the first.

    A chunk makes L_c (H + K^T K) + a I of H and L_c (B + K^T V) of B: sums, with weights that are products of L_c.
    """
    n, size = k.shape[0], k.shape[-1]
    last = sums[..., -1:, :]
    total = last[..., 0, 0]  # n rows h
    lasting = F.pad(total.cumsum(0), (0, 0, 0, 0, 1, 0))  # log of the remaining share of the first, n+1 rows h
    later = torch.ones(n + 1, n, dtype=torch.bool, device=k.device).tril(-1)
    weight = (lasting[:, None] - lasting[1:]).masked_fill(~later[..., None, None], -torch.inf).exp()  # n+1 n rows h
    k, v = (((last - sums) / 2).exp() * x for x in (k, v))  # L_c / L_t: the remaining share of each token at the end
    written = product(k.mT, torch.cat((k, v), -1))  # n rows h k k+v
    eye = torch.eye(size, written.shape[-1], dtype=k.dtype, device=k.device)
    written = written + raised[..., None, None] * eye
    # A chunk that is not finite must not affect earlier ones, which give it weight 0 (0 * inf is NaN).
    bad = ~written.isfinite().flatten(3).all(-1)  # n rows h
    written = written.masked_fill(bad[..., None, None], 0)
    found = weight.permute(2, 3, 0, 1) @ written.flatten(3).permute(1, 2, 0, 3)  # rows h n+1 k*(k+v)
    found = found.permute(2, 0, 1, 3).unflatten(-1, (size, -1)) + lasting.exp()[..., None, None] * first
    behind = F.pad(bad.int().cumsum(0), (0, 0, 0, 0, 1, 0)) > 0
    return found.masked_fill(behind[..., None, None], torch.nan)


def _solve(before: Tensor) -> tuple[Tensor, Tensor]:
    """Return P = H^-1 and S = P B from H | B, `... k k+v`."""
    size = before.shape[-2]
    H, B = before.split((size, before.shape[-1] - size), -1)
    eye = torch.eye(size, dtype=H.dtype, device=H.device)
    inverse = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(H).L, eye, upper=False)
    return product(inverse.mT, inverse), product(inverse.mT, product(inverse, B))


def _read(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, P: Tensor, S: Tensor) -> Tensor:
    """Return y `n rows h c v`, the outputs inside chunks, from P and S before them."""
    k, v = ((sums / -2).exp() * x for x in (k, v))
    KP, size = product(k, P), k.shape[-1]
    eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    factor = torch.linalg.cholesky_ex(eye + product(KP, k.mT)).L
    XE = torch.linalg.solve_triangular(factor, torch.cat((KP, v - product(k, S)), -1), upper=False)
    return product(q, S) + product(product(q, XE[..., :size].mT).tril(), XE[..., size:])
