"""Recursive least squares: the memory that has the exact minimum, which DeltaNet approaches step by step.

    S_t = argmin_S  sum_{s <= t} w_s ||S^T k_s - v_s||^2 + r_t ||S||^2,     w_s = beta_s prod_{s < i <= t} lambda_i
    y_t = S_t^T q_t                                                      lambda = exp(log_decay), in (0, 1]

The state is S and P = (sum_s w_s k_s k_s^T + r I)^-1. One token is a rank-1 update:

    g   = beta P k / (lambda + beta k^T P k)         gain
    S_t = S + g (v - S^T k)^T
    P_t = (P - g k^T P) / lambda

The ridge r starts at `ridge` and would be forgotten with the data: P then grows without bound in every direction the
keys leave out. So after each `chunk` tokens of a text r is raised to `ridge` again, by a = ridge - r:

    P <- (I + a P)^-1 P        S <- (I + a P)^-1 S

restore=False leaves that out, and r_t = ridge prod_{i <= t} lambda_i.

Chunked, with L_t the product of lambda from the chunk's start, u_t = sqrt(beta_t / L_t), K and V with rows u_t k_t and
u_t v_t. From chunk to chunk H = P^-1 and B = H S only add up, so those before all chunks are found at once, in float64:

    H <- L_c (H + K^T K) + a I          B <- L_c (B + K^T V)          P = H^-1,  S = P B

Inside of all chunks, with C C^T = I + K P K^T (Cholesky; eigenvalues at least 1), whose leading blocks are the factors
of every prefix:

    [X | E] = C^-1 [K P | V - K S]        y = Q S + tril(Q X^T) E
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.memory.products import product
from lineate.precision import full_precision_backward
from lineate.rule import compute_dtype, full_precision
from lineate.sequences import locate, sequence_lengths

SMALLEST_WEIGHT = 1e-12
"""The chunked form takes a beta below this for this: its square root has no gradient at 0."""

TOGETHER = 64
"""Chunks whose states are found together: their products grow with its square."""

State = dict[str, Tensor]


@full_precision_backward
def least_squares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    ridge: float = 0.01,
    state: State | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
    restore: bool = True,
    form: str = "auto",
) -> tuple[Tensor, State]:
    """S_t = argmin_S sum_s w_s ||S^T k_s - v_s||^2 + r_t ||S||^2, y_t = S_t^T q_t.

    q, k `b t h k`; v `b t h v`; log_decay `b t h`, <= 0 (None: nothing is forgotten); beta `b t h`, > 0 (None: 1).
    Returns y `b t h v` and the state: P `rows h k k`, S `rows h k v`, ridge `rows h`, and position `rows`, which counts
    the tokens since the ridge was restored. form: "recurrent", "chunkwise", or "auto", recurrent for one token.
    P holds numbers up to 1 / (ridge prod lambda), the product over one chunk. Token by token in float32 keep that below
    about 1e5; whole texts are computed in float64 and take a product down to 1e-11, else refuse (on a GPU, or compiled,
    give NaN): forget faster with smaller chunks.
    """
    checks.check_qkv(q, k, v)
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    checks.check_chunk_size(chunk)
    checks.check_flag("restore", restore)
    checks.check_choice("form", form, ("auto", "recurrent", "chunkwise"))
    b, t, h, key_dim = q.shape
    if v.shape[2] != h:
        raise ValueError(f"v must have h = {h} heads like q and k, got {v.shape[2]}; repeat the heads of q and k")
    if not 0 < ridge < float("inf"):
        raise ValueError(f"ridge must be finite and above 0, got {ridge}; 0.01 is usual")
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate is not None and gate.shape != (b, t, h):
            raise ValueError(f"{name} must have shape (b, t, h) = {(b, t, h)}, got {tuple(gate.shape)}")
        checks.check_device(name, gate, q)
    checks.check_decay(log_decay)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = compute_dtype(q.dtype)
    if state is None:
        state = empty_state(rows, h, key_dim, v.shape[3], ridge, dtype, q.device)
        fresh = True
    else:
        _check(state, rows, h, key_dim, v.shape[3], dtype, chunk)
        fresh = False
    with full_precision(q):
        given = v.dtype
        inputs = tuple(None if x is None else x.to(dtype) for x in (q, k, v, log_decay, beta))
        # Without forgetting the ridge is never low, and chunks may start anywhere.
        restored = ridge if restore and log_decay is not None else None
        if form == "recurrent" or (form == "auto" and t == 1 and cu_seqlens is None):
            output, state = _recurrent(inputs, state, cu_seqlens, chunk, restored)
        else:
            output, state = _by_length(inputs, state, cu_seqlens, chunk, restored, fresh or restored is None)
    return output.to(given), state


def empty_state(
    rows: int, h: int, key_dim: int, value_dim: int, ridge: float, dtype: torch.dtype, device: torch.device
) -> State:
    """Before the first token: P = I / ridge, S = 0."""
    eye = torch.eye(key_dim, dtype=dtype, device=device)
    return {
        "P": (eye / ridge).expand(rows, h, key_dim, key_dim),
        "S": eye.new_zeros(rows, h, key_dim, value_dim),
        "ridge": eye.new_full((rows, h), ridge),
        "position": torch.zeros(rows, dtype=torch.int64, device=device),
    }


def step(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    *,
    chunk: int,
    restored: float | None,
) -> tuple[Tensor, State]:
    """One token: q, k `b h k`, v `b h v`, gates `b h`; restored: the ridge, if it is restored after `chunk` tokens."""
    P, S, ridge, position = state["P"], state["S"], state["ridge"], state["position"] + 1
    Pk = P @ k[..., None]  # b h k 1
    energy = k[..., None, :] @ Pk  # b h 1 1
    weight = torch.ones_like(energy) if beta is None else beta[..., None, None]
    kept = torch.ones_like(energy) if log_decay is None else log_decay.exp()[..., None, None]
    gain = weight * Pk / (kept + weight * energy)
    S = S + gain * (v[..., None, :] - k[..., None, :] @ S)
    P = (P - gain * Pk.mT) / kept
    P = (P + P.mT) / 2
    output = q[..., None, :] @ S
    ridge = ridge * kept[..., 0, 0]
    if restored is not None:
        full = position == chunk
        if P.device.type != "cpu" or bool(full.any()):  # on a GPU looking would wait for it
            W, ridge = _restore(torch.cat((P, S), -1), ridge, full, restored)
            P, S = (x.contiguous() for x in W.split((P.shape[-1], S.shape[-1]), -1))
    return output.squeeze(-2), {"P": P, "S": S, "ridge": ridge, "position": position % chunk}


def _recurrent(
    inputs: Sequence[Tensor | None], state: State, cu_seqlens: Tensor | None, chunk: int, restored: float | None
) -> tuple[Tensor, State]:
    """q, k, v, log_decay, beta `b t h ...`, token by token, packed texts one after the other."""
    if cu_seqlens is not None:
        outputs, states = [], []
        for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own = [None if x is None else x[:, start:end] for x in inputs]
            y, after = _recurrent(own, {name: x[row : row + 1] for name, x in state.items()}, None, chunk, restored)
            outputs.append(y)
            states.append(after)
        return torch.cat(outputs, 1), {name: torch.cat([after[name] for after in states]) for name in state}
    q, k, v, log_decay, beta = inputs
    assert q is not None and k is not None and v is not None
    outputs = []
    for i in range(q.shape[1]):
        gates = [None if x is None else x[:, i] for x in (log_decay, beta)]
        y, state = step(state, q[:, i], k[:, i], v[:, i], *gates, chunk=chunk, restored=restored)
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else v, state


class _Layout(NamedTuple):
    """Tokens in chunks, `n rows h c ...`, with empty slots before and behind those of a row."""

    rows: int
    n: int
    c: int
    slot: Tensor | None
    """Of every token, `b * t`, in `rows n c`; None: rows are as long and begin in the first slot."""
    length: Tensor
    """Of rows: how many tokens."""

    def put(self, x: Tensor) -> Tensor:
        """x `b t h d` -> `n rows h c d`, 0 in empty slots. A key of 0 writes nothing."""
        if self.slot is None:
            grid = F.pad(x, (0, 0, 0, 0, 0, self.n * self.c - x.shape[1]))
        else:
            grid = x.new_zeros(self.rows * self.n * self.c, *x.shape[2:]).index_copy(0, self.slot, x.flatten(0, 1))
        return grid.view(self.rows, self.n, self.c, *x.shape[2:]).permute(1, 0, 3, 2, 4)

    def take(self, x: Tensor, b: int, t: int) -> Tensor:
        """x `n rows h c d` -> `b t h d`."""
        grid = x.permute(1, 0, 3, 2, 4)
        if self.slot is None:
            return grid.flatten(1, 2)[:, :t]
        return grid.flatten(0, 2).index_select(0, self.slot).unflatten(0, (b, t))


def _by_length(
    inputs: Sequence[Tensor | None],
    state: State,
    cu_seqlens: Tensor | None,
    chunk: int,
    restored: float | None,
    aligned: bool,
) -> tuple[Tensor, State]:
    """_chunkwise; packed texts with about as many chunks go together, since all get room for as many.

    aligned: all rows begin a chunk.
    """
    assert inputs[0] is not None
    lengths = () if cu_seqlens is None else sequence_lengths(cu_seqlens)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(max(-(-length // chunk), 1).bit_length(), []).append(row)
    if len(groups) < 2:
        begin = None if aligned else state["position"]
        return _chunkwise(inputs, state, _lay_out(inputs[0], begin, cu_seqlens, chunk), restored)
    starts = [0, *accumulate(lengths)]
    outputs, states, tokens, order = [], [], [], []
    for rows in groups.values():
        at = torch.cat([torch.arange(starts[row], starts[row + 1], device="cpu") for row in rows]).to(inputs[0].device)
        own = [None if x is None else x[:, at] for x in inputs]
        bounds = torch.tensor([0, *accumulate(lengths[row] for row in rows)], device=at.device)
        which = torch.tensor(rows, device=at.device)
        before = {name: x[which] for name, x in state.items()}
        y, after = _by_length(own, before, bounds, chunk, restored, aligned)
        outputs.append(y)
        states.append(after)
        tokens.append(at)
        order.append(which)
    back, rank = torch.cat(tokens).argsort(), torch.cat(order).argsort()
    state = {name: torch.cat([after[name] for after in states])[rank] for name in state}
    return torch.cat(outputs, 1)[:, back], state


def _lay_out(q: Tensor, begin: Tensor | None, cu_seqlens: Tensor | None, c: int) -> _Layout:
    """begin: the slot of each row's first token, below c; None: 0."""
    b, t = q.shape[:2]
    lengths = [t] * b if cu_seqlens is None else sequence_lengths(cu_seqlens)
    rows = len(lengths)
    spare = 0 if begin is None else c - 1  # room for any place: looking would wait for a GPU
    n = -(-(max(lengths) + spare) // c)
    length = torch.tensor(lengths, device=q.device)
    if begin is None and cu_seqlens is None:
        return _Layout(rows, n, c, None, length)
    begin = torch.zeros_like(length) if begin is None else begin.clamp(0, c - 1)  # no row may run into another
    row, at = locate(F.pad(length.cumsum(0), (1, 0)), b * t)
    return _Layout(rows, n, c, row * (n * c) + begin[row] + at, length)


def _chunkwise(
    inputs: Sequence[Tensor | None], state: State, layout: _Layout, restored: float | None
) -> tuple[Tensor, State]:
    """q, k, v, log_decay, beta `b t h ...`: first the state before every chunk, then all chunks at once, in float64."""
    assert inputs[0] is not None
    (b, t), dtype, n = inputs[0].shape[:2], inputs[0].dtype, layout.n
    q, k, v, log_decay, beta = (
        None if x is None else layout.put((x if x.dim() == 4 else x[..., None]).double()) for x in inputs
    )  # n rows h c d
    assert q is not None and k is not None and v is not None
    sums = torch.zeros_like(k[..., :1]) if log_decay is None else log_decay.cumsum(-2)  # log L_t
    if beta is not None:
        scale = beta.clamp(min=SMALLEST_WEIGHT).sqrt()
        k, v = scale * k, scale * v
    total = sums[..., -1, 0]  # log L_c, n rows h
    checks.check_forgetting(total, layout.c)
    sums = sums.where(total[..., None, None] >= checks.LEAST_LEFT, torch.nan)  # on a GPU and compiled nobody looked
    end = state["position"] + layout.length
    ridge, raised = _ridges(state["ridge"].double(), total, end, layout.c, restored)
    after = _added(state)
    outputs = []
    for first in range(0, n, TOGETHER):
        own = slice(first, min(first + TOGETHER, n))
        before = _before(after, k[own], v[own], sums[own], raised[own])
        after, (P, S) = before[-1], _solve(before)
        outputs.append(_read(q[own], k[own], v[own], sums[own], P[:-1], S[:-1]))
    output = layout.take(torch.cat(outputs), b, t)
    after_last = {"P": P[-1], "S": S[-1], "ridge": ridge}
    return output.to(dtype), {name: x.to(dtype) for name, x in after_last.items()} | {"position": end % layout.c}


def _added(state: State) -> Tensor:
    """H | B = P^-1 | P^-1 S, `rows h k k+v`. A P that was rounded is made definite by as much as its rounding."""
    P, S = (state[name].double() for name in ("P", "S"))
    rounding = torch.finfo(state["P"].dtype).eps * P.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-30)
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    H = torch.linalg.inv_ex((P + P.mT) / 2 + rounding.detach()[..., None, None] * eye).inverse
    return torch.cat((H, H @ S), -1)


def _ridges(ridge: Tensor, total: Tensor, end: Tensor, c: int, restored: float | None) -> tuple[Tensor, Tensor]:
    """r after the last token, `rows h`, and by how much it is raised after each chunk, `n rows h`."""
    if restored is None:
        return ridge * total.sum(0).exp(), torch.zeros_like(total)
    whole = end // c  # chunks of each row, after which it is restored
    number = torch.arange(total.shape[0], device=end.device)[:, None]
    begun = torch.where(number[..., None] == 0, ridge, restored)  # r before each chunk
    raised = torch.where((number < whole)[..., None], restored - begun * total.exp(), 0)
    behind = torch.where((number >= whole)[..., None], total, 0).sum(0)
    return torch.where(whole[:, None] == 0, ridge, restored) * behind.exp(), raised


def _before(first: Tensor, k: Tensor, v: Tensor, sums: Tensor, raised: Tensor) -> Tensor:
    """H | B before each of n chunks and after the last, `n+1 rows h k k+v`, from those before the first.

    A chunk makes L_c (H + K^T K) + a I of H and L_c (B + K^T V) of B: sums, with weights that are products of L_c.
    """
    n, size = k.shape[0], k.shape[-1]
    last = sums[..., -1:, :]
    total = last[..., 0, 0]  # n rows h
    lasting = F.pad(total.cumsum(0), (0, 0, 0, 0, 1, 0))  # log of what is left of the first, n+1 rows h
    later = torch.ones(n + 1, n, dtype=torch.bool, device=k.device).tril(-1)
    weight = (lasting[:, None] - lasting[1:]).masked_fill(~later[..., None, None], -torch.inf).exp()  # n+1 n rows h
    k, v = (((last - sums) / 2).exp() * x for x in (k, v))  # L_c / L_t of each token is left at the end
    written = product(k.mT, torch.cat((k, v), -1))  # n rows h k k+v
    eye = torch.eye(size, written.shape[-1], dtype=k.dtype, device=k.device)
    written = written + raised[..., None, None] * eye
    # A chunk that is not finite may not touch those before it, whose weight of it is 0.
    bad = ~written.isfinite().flatten(3).all(-1)  # n rows h
    written = written.masked_fill(bad[..., None, None], 0)
    found = weight.permute(2, 3, 0, 1) @ written.flatten(3).permute(1, 2, 0, 3)  # rows h n+1 k*(k+v)
    found = found.permute(2, 0, 1, 3).unflatten(-1, (size, -1)) + lasting.exp()[..., None, None] * first
    behind = F.pad(bad.int().cumsum(0), (0, 0, 0, 0, 1, 0)) > 0
    return found.masked_fill(behind[..., None, None], torch.nan)


def _solve(before: Tensor) -> tuple[Tensor, Tensor]:
    """P = H^-1 and S = P B from H | B, `... k k+v`."""
    size = before.shape[-2]
    H, B = before.split((size, before.shape[-1] - size), -1)
    eye = torch.eye(size, dtype=H.dtype, device=H.device)
    inverse = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(H).L, eye, upper=False)
    return product(inverse.mT, inverse), product(inverse.mT, product(inverse, B))


def _read(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, P: Tensor, S: Tensor) -> Tensor:
    """y `n rows h c v`: the outputs inside chunks from P and S before them."""
    k, v = ((sums / -2).exp() * x for x in (k, v))
    KP, size = product(k, P), k.shape[-1]
    eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    factor = torch.linalg.cholesky_ex(eye + product(KP, k.mT)).L
    XE = torch.linalg.solve_triangular(factor, torch.cat((KP, v - product(k, S)), -1), upper=False)
    return product(q, S) + product(product(q, XE[..., :size].mT).tril(), XE[..., size:])


def _restore(W: Tensor, ridge: Tensor, full: Tensor, restored: float) -> tuple[Tensor, Tensor]:
    """W <- (I + a P)^-1 W, W = [P | ...] `rows h k *`, with a = restored - ridge, in the rows that are `full`."""
    size = W.shape[-2]
    a = torch.where(full[:, None], restored - ridge, 0)
    eye = torch.eye(size, dtype=W.dtype, device=W.device)
    factor = torch.linalg.cholesky_ex(eye + a[..., None, None] * W[..., :size]).L
    # I + a P is well conditioned, its eigenvalues at most 1 / prod lambda: its inverse is safe.
    return _symmetric(torch.cholesky_inverse(factor) @ W), ridge + a


def _symmetric(W: Tensor) -> Tensor:
    """P made symmetric in W = [P | ...]."""
    P = W[..., : W.shape[-2]]
    return torch.cat(((P + P.mT) / 2, W[..., W.shape[-2] :]), -1)


def _check(state: State, rows: int, h: int, key_dim: int, value_dim: int, dtype: torch.dtype, chunk: int) -> None:
    shapes = {"P": (rows, h, key_dim, key_dim), "S": (rows, h, key_dim, value_dim), "ridge": (rows, h)}
    for name, shape in (*shapes.items(), ("position", (rows,))):
        if name not in state:
            raise ValueError(
                f"state must have P, S, ridge and position, got {', '.join(state)}; pass one returned before"
            )
        x = state[name]
        if tuple(x.shape) != shape:
            raise ValueError(f"state[{name!r}] must have shape {shape}, got {tuple(x.shape)}")
        if name != "position" and x.dtype != dtype:
            raise ValueError(f"state[{name!r}] must be {dtype}, got {x.dtype}; convert it with .to({dtype})")
    checks.check_position(state["position"], rows, chunk)
