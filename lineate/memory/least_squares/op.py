"""The op of least squares: its checks, its state, and the tokens one by one."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lineate import checks
from lineate.memory.chunks import check_chunk
from lineate.memory.least_squares.chunked import Fit, run_chunks
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.precision import full_precision_backward


@full_precision_backward
def least_squares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    ridge: float = 0.01,
    state: Fit | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
    restore: bool = True,
    form: str = "auto",
) -> tuple[Tensor, Fit]:
    """Return y_t = S_t^T q_t, S_t = argmin_S sum_s w_s ||S^T k_s - v_s||^2 + r_t ||S||^2, and the state.

    P holds numbers up to 1 / (ridge prod lambda), the product over one chunk. Token by token in float32, keep that
    below about 1e5. Whole sequences are computed in float64, where the product may be as small as 1e-11; a smaller one
    is refused (on a GPU, or compiled, it gives NaN): forget faster with smaller chunks.

    Args:
        q: Queries `b t h k`.
        k: Keys `b t h k`.
        v: Values `b t h v`.
        log_decay: log lambda, `b t h`, at most 0; None: nothing is forgotten.
        beta: The weight of each pair, `b t h`, above 0; None: 1.
        ridge: r_0, to which r is restored after each chunk.
        state: The result of an earlier call; None: no token was read.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.
        chunk: Tokens between two restorations of the ridge.
        restore: Whether the ridge is restored; False: it is forgotten with the data.
        form: "recurrent" (token by token), "chunkwise", or "auto", which is recurrent for one token.

    Returns:
        y `b t h v` in the dtype of v, and the state: P `rows h k k`, S `rows h k v`, ridge `rows h`, and position
        `rows`, the tokens since the ridge was restored.
    """
    checks.check_qkv(q, k, v)
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    check_chunk(chunk)
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
            output, state = run_chunks(inputs, state, cu_seqlens, chunk, restored, fresh or restored is None)
    return output.to(given), state


def empty_state(
    rows: int, h: int, key_dim: int, value_dim: int, ridge: float, dtype: torch.dtype, device: torch.device
) -> Fit:
    """Return the state before the first token: P = I / ridge, S = 0.

    Args:
        rows: Sequences of the batch.
        h: Heads.
        key_dim: Channels of a key.
        value_dim: Channels of a value.
        ridge: The weight of the squared length of S.
        dtype: float32 or float64.
        device: The device of the tensors.
    """
    eye = torch.eye(key_dim, dtype=dtype, device=device)
    return {
        "P": (eye / ridge).expand(rows, h, key_dim, key_dim),
        "S": eye.new_zeros(rows, h, key_dim, value_dim),
        "ridge": eye.new_full((rows, h), ridge),
        "position": torch.zeros(rows, dtype=torch.int64, device=device),
    }


def step(
    state: Fit,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    *,
    chunk: int,
    restored: float | None,
) -> tuple[Tensor, Fit]:
    """Return y and the state after one token of each row: q, k `b h k`, v `b h v`, gates `b h`.

    restored: the ridge, if it is restored after each `chunk` tokens; else None.
    """
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
        if P.device.type != "cpu" or bool(full.any()):  # on a GPU, reading values would wait for the device
            W, ridge = _restore(torch.cat((P, S), -1), ridge, full, restored)
            P, S = (x.contiguous() for x in W.split((P.shape[-1], S.shape[-1]), -1))
    return output.squeeze(-2), {"P": P, "S": S, "ridge": ridge, "position": position % chunk}


def _recurrent(
    inputs: Sequence[Tensor | None], state: Fit, cu_seqlens: Tensor | None, chunk: int, restored: float | None
) -> tuple[Tensor, Fit]:
    """Run q, k, v, log_decay, beta `b t h ...` token by token, packed sequences one after the other."""
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


def _restore(W: Tensor, ridge: Tensor, full: Tensor, restored: float) -> tuple[Tensor, Tensor]:
    """Return (I + a P)^-1 W, W = [P | ...] `rows h k *`, with a = restored - ridge, in the rows that are `full`."""
    size = W.shape[-2]
    a = torch.where(full[:, None], restored - ridge, 0)
    eye = torch.eye(size, dtype=W.dtype, device=W.device)
    factor = torch.linalg.cholesky_ex(eye + a[..., None, None] * W[..., :size]).L
    # I + a P is well conditioned, its eigenvalues at most 1 / prod lambda: its inverse is safe.
    return _symmetric(torch.cholesky_inverse(factor) @ W), ridge + a


def _symmetric(W: Tensor) -> Tensor:
    """Return W = [P | ...] with P made symmetric."""
    P = W[..., : W.shape[-2]]
    return torch.cat(((P + P.mT) / 2, W[..., W.shape[-2] :]), -1)


def _check(state: Fit, rows: int, h: int, key_dim: int, value_dim: int, dtype: torch.dtype, chunk: int) -> None:
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
