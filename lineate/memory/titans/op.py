"""The op of Titans: its checks, its state, and the loop over chunks."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lineate import checks
from lineate.memory.chunks import check_chunk, lay_out
from lineate.memory.gpu import STATE_NUMBERS, on_gpu
from lineate.memory.products import product
from lineate.memory.titans.model import Factors, TitansOptions, clipped, gradients, make_factors, read, select
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.precision import full_precision_backward

TitansScan = Callable[..., tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]]


def titans_state(weights: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """Return the state of rows at a chunk's start, without momentum.

    Args:
        weights: The matrices that every row begins with, `h in out` each.
        rows: How many rows there are.
    """
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
    """Return y_t = f(M_t; q_t), and the state after the last token of each row.

    Args:
        q: Queries `b t h k`.
        k: Keys `b t h k`.
        v: Values `b t h v`.
        theta: The step size of each token's write, `b t h`.
        eta: The fraction of the momentum that is kept, `b t h`.
        alpha: The fraction of the memory that is forgotten, `b t h`.
        state: The result of `titans_state` or of an earlier call, also in the middle of a chunk. Without position,
            all rows begin a chunk; this avoids waiting for a GPU to read the positions. None is one matrix of zeros.
        chunk: Tokens that share the weights at which the gradient is taken.
        clip: The largest norm of one token's gradient over all matrices; None does not clip. Clipping is per token, so
            that the future cannot change the past.
        residual: Whether the memory returns f(x) + x.
        norm: Whether a layer norm without weights follows the last matrix.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.

    Returns:
        y `b t h v` in the dtype of v, and the state: weights_0, momentum_0, start_0, weights_1, ... `rows h in out` and
        position `rows`.
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
        options = TitansOptions(clip, residual, norm)
        tokens = [x.to(dtype) for x in (q, k, v, theta, eta, alpha)]
        if t == 1 and cu_seqlens is None:  # nothing here waits for a device
            tokens = [x.transpose(1, 2) for x in tokens]  # b h 1 ...
            factors = make_factors(tokens[3:], None)
            y, weights, momentum = _advance(tokens[:3], factors, weights, momentum, start, options)
            position = state["position"] if known else torch.zeros(rows, dtype=torch.int64, device=q.device)
            position = (position + 1) % chunk
            start = select(position == 0, weights, start)
            return y.transpose(1, 2).to(v.dtype), _state(weights, momentum, start, position)

        positions = tuple(state["position"].tolist()) if known else None
        layout = lay_out(q, positions, chunk, cu_seqlens, even=False)
        assert layout.filled is not None and layout.ends is not None  # the host knows the positions
        tokens = [layout.near_cells(x) for x in tokens]  # cells h chunk ...
        factors = make_factors(tokens[3:], layout.filled[:, None])
        scan = _scan_for(weights, chunk)
        pieces = _pieces(layout.sizes, known, weights if scan else None)
        sizes = [sum(layout.sizes[piece]) for piece in pieces]
        split = zip(*(x.split(sizes) for x in (*tokens[:3], *factors)), strict=True)
        memory = [[x.index_select(0, layout.order) for x in part] for part in (weights, momentum, start)]
        outputs, done = [], []
        for i, (piece, own) in enumerate(zip(pieces, split, strict=True)):
            counts, complete = layout.sizes[piece], layout.ends[piece]
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
                start = select(torch.tensor(complete[0], device=q.device), weights, start)
            memory = [weights, momentum, start]
        done.append(memory)
        weights, momentum, start = (
            [torch.cat([piece[part][i] for piece in reversed(done)]).index_select(0, layout.rank) for i in range(depth)]
            for part in range(3)
        )
        y = layout.tokens(torch.cat(outputs), b, t).to(v.dtype)
        return y, _state(weights, momentum, start, layout.position.clone())  # layouts are kept


def _scan_for(weights: list[Tensor], chunk: int) -> TitansScan | None:
    """Return the function that runs many chunks at once, or None if the kernels do not support the call."""
    if not on_gpu(weights[0]):
        return None
    from lineate.kernels.memories.titans import fits  # triton, at its first use
    from lineate.memory.titans.scan import scan

    return scan if fits(chunk, [weights[0].shape[2], *(x.shape[3] for x in weights)]) else None


def _pieces(counts: list[int], known: bool, scanned: list[Tensor] | None) -> list[slice]:
    """Return which chunks run together: single ones, or with the kernels as many as STATE_NUMBERS allows.

    A first chunk that some row may enter in the middle always runs alone.
    """
    if scanned is None:
        return [slice(j, j + 1) for j in range(len(counts))]
    size = 2 * sum(x[0].numel() for x in scanned)  # of M and S of a cell
    pieces = [slice(0, 1)] if known else []
    first, cells = len(pieces), 0
    for j in range(first, len(counts)):
        if j > first and (cells + counts[j]) * size > STATE_NUMBERS:
            pieces.append(slice(first, j))
            first, cells = j, 0
        cells += counts[j]
    return [*pieces, slice(first, len(counts))] if first < len(counts) else pieces


def _advance(
    qkv: Sequence[Tensor],
    factors: Factors,
    weights: list[Tensor],
    momentum: list[Tensor],
    start: list[Tensor],
    options: TitansOptions,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the outputs of one chunk or less, q, k, v `n h c d`, and M and S after it."""
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
    """Check the arguments of `titans` and return the rows of the state."""
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
    check_chunk(chunk)
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
