"""The op of LaCT: its checks, its state, one token at a time, and rows grouped by their positions."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.forms.sequences import sequence_lengths
from lineate.memory.chunks import check_chunk
from lineate.memory.lact.scan import ScanState, scan
from lineate.memory.lact.steps import halves
from lineate.memory.parts import orthogonalise, renormalise, row_norms
from lineate.memory.products import product
from lineate.rule import compute_dtype, full_precision
from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.precision import full_precision_backward
from lineate.torch_ops.tracing import transformed

_MATRICES = range(3)


def lact_state(weights: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """Return the state of rows at a chunk's start: the weights, no sums, no momentum.

    Args:
        weights: W0, W1, W2 that every row begins with, `h out in` each.
        rows: How many rows there are.
    """
    return _filled({name: x.contiguous() for name, x in fresh_state(weights, rows).items()})


def fresh_state(weights: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """Return the minimal initial state, without a copy: the weights only; `lact` derives the rest.

    Args:
        weights: W0, W1, W2 that every row begins with, `h out in` each.
        rows: How many rows there are.
    """
    return {f"weights_{i}": x.to(compute_dtype(x.dtype)).expand(rows, -1, -1, -1) for i, x in enumerate(weights)}


def _filled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with its missing entries filled in, in the order of lact_state."""
    filled: dict[str, Tensor] = {}
    for i in _MATRICES:
        filled[f"weights_{i}"] = weights = state[f"weights_{i}"]
        for name in ("sums", "previous"):
            x = state.get(f"{name}_{i}")
            filled[f"{name}_{i}"] = torch.zeros_like(weights) if x is None else x
        filled[f"norms_{i}"] = state[f"norms_{i}"] if f"norms_{i}" in state else row_norms(weights)
    rows, heads = weights.shape[:2]
    for name, shape, dtype in (("momentum", (rows, heads), weights.dtype), ("position", (rows,), torch.int64)):
        x = state.get(name)
        filled[name] = torch.zeros(shape, dtype=dtype, device=weights.device) if x is None else x
    return filled


@full_precision_backward
def lact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor,
    momentum: Tensor | None,
    state: Mapping[str, Tensor],
    *,
    chunk: int = 2048,
    muon: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return y_t = f(q_t), and the state after the last token of each row.

    A call of more than one token has first derivatives only.

    Args:
        q: Queries `b t h d`.
        k: Keys `b t h d`.
        v: Values `b t h d`.
        rates: The step sizes of each token's write in W0, W1 and W2, `b t h 3`.
        momentum: How much of the last chunk's change is added, `b t h`, averaged over the chunk; None adds nothing.
        state: The result of `lact_state` or of an earlier call, also in the middle of a chunk. If it has the weights
            only, the norms are the lengths of their rows, and all else is 0. Without position, all rows begin a chunk;
            this avoids waiting for a GPU to read the positions.
        chunk: Tokens that are written together, in one step.
        muon: Whether the step is orthogonalised; if False, it is the sum of gradients itself.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.

    Returns:
        y `b t h d` in the dtype of v, and the state: weights_0, sums_0, previous_0, norms_0, weights_1, ..., momentum
        `rows h` and position `rows`.
    """
    _check(q, k, v, rates, momentum, state, chunk, cu_seqlens)
    dtype, t = compute_dtype(q.dtype), q.shape[1]
    rows = state["weights_0"].shape[0]
    with full_precision(q):
        if momentum is None:
            momentum = rates.new_zeros(rates.shape[:3])
        fresh = "position" not in state
        if not fresh:
            checks.check_position(state["position"], rows, chunk)
        tokens = (q, k, v, rates, momentum)
        if t == 1 and cu_seqlens is None:
            if fresh:  # the returned state must not be a view of a layer's initial weights
                state = {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.items()}
            y, after = _apply([x.to(dtype).transpose(1, 2) for x in tokens], _filled(state))
            # A captured step cannot read positions: it always computes a chunk's end, and selects the result in rows
            # that end.
            capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
            ends = after["position"] == chunk
            if capturing or bool(ends.any()):
                after = _choose(ends, _update(after, chunk, muon), after)
            return y.transpose(1, 2).to(v.dtype), after

        positions = [0] * rows if fresh else state["position"].tolist()
        groups = [[row for row, at in enumerate(positions) if at == p] for p in sorted(set(positions))]
        if cu_seqlens is not None:
            groups = [[row] for row in range(rows)]
            lengths = sequence_lengths(cu_seqlens)
            parts = list(zip(*(x.split(lengths, 1) for x in tokens), strict=True))
        elif len(groups) == 1:
            return _run(tokens, state, positions[0], chunk, muon)
        else:  # rows at one position go together
            places = [torch.tensor(own, device=q.device) for own in groups]
            parts = [tuple(x.index_select(0, own) for x in tokens) for own in places]
        outputs, states = [], []
        for own, part in zip(groups, parts, strict=True):
            before = _select(state, torch.tensor(own, device=q.device))
            y, after = _run(part, before, positions[own[0]], chunk, muon)
            outputs.append(y)
            states.append(after)
        back = torch.tensor([row for own in groups for row in own], device=q.device).argsort()
        after = _select({name: torch.cat([x[name] for x in states]) for name in states[0]}, back)
        return torch.cat(outputs).index_select(0, back) if cu_seqlens is None else torch.cat(outputs, 1), after


def _run(
    tokens: tuple[Tensor, ...], state: Mapping[str, Tensor], position: int, chunk: int, muon: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run rows that all stand at this position; tokens `n t h ...`, t may be 0."""
    if transformed() or torch.compiler.is_exporting():  # an exported graph has gradients of its own
        return _walk(tokens, _filled(state), position, chunk, muon)
    n, t, h = tokens[0].shape[:3]

    def stacked(name: str) -> Tensor:
        W0, W1, W2 = (state[f"{name}_{i}"] for i in _MATRICES)
        return torch.cat((W0, W2, W1.mT), 2).flatten(0, 1)

    matrices, total = stacked("weights"), state["momentum"].flatten() if "momentum" in state else None
    sums, previous = (stacked(name) if f"{name}_0" in state else None for name in ("sums", "previous"))
    if "norms_0" in state:
        norms = torch.cat((state["norms_0"], state["norms_2"]), 2).flatten(0, 1), state["norms_1"].mT.flatten(0, 1)
    else:
        upper, lower = halves(matrices)
        norms = row_norms(upper), row_norms(lower.mT).mT
    y, end = scan(tokens, ScanState(matrices, sums, previous, total), norms, position, chunk, muon)
    after = {"momentum": end[3].view(n, h), "position": torch.full((n,), (position + t) % chunk, device=y.device)}
    for name, x in zip(("weights", "sums", "previous"), end, strict=False):
        W0, W2, W1 = x.unflatten(0, (n, h)).chunk(3, 2)
        for i, part in enumerate((W0, W1.mT, W2)):
            after[f"{name}_{i}"] = part.clone(memory_format=torch.contiguous_format)
    first, third = norms[0].unflatten(0, (n, h)).chunk(2, 2)
    for i, part in enumerate((first, norms[1].unflatten(0, (n, h)).mT, third)):
        after[f"norms_{i}"] = state[f"norms_{i}"] if "norms_0" in state else part.clone()
    return y, _filled(after)


def _walk(
    tokens: Sequence[Tensor], state: dict[str, Tensor], position: int, chunk: int, muon: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute _run in plain torch functions, which torch.func can transform."""
    dtype = state["weights_0"].dtype
    cuts = [0, *range(chunk - position, tokens[0].shape[1], chunk), tokens[0].shape[1]]
    sizes = [end - start for start, end in pairwise(cuts)]
    outputs = []
    for own in zip(*(x.to(dtype).transpose(1, 2).split(sizes, 2) for x in tokens), strict=True):
        y, state = _apply(own, state)
        outputs.append(y)
        position += y.shape[2]
        if position == chunk:
            position, state = 0, _update(state, chunk, muon)
    return torch.cat(outputs, 2).transpose(1, 2).to(tokens[2].dtype), state


def _apply(tokens: Sequence[Tensor], state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of tokens of one chunk, `n h c ...`, and the state with their gradients in its sums."""
    q, k, v, rates, momentum = tokens
    W0, W1, W2 = (state[f"weights_{i}"] for i in _MATRICES)
    y = product(elementwise(F.silu, product(q, W0.mT)) * product(q, W2.mT), W1.mT)
    a, u, back = product(k, W0.mT), product(k, W2.mT), product(v, W1)  # n h c dh
    gate = elementwise(torch.sigmoid, a)
    open_ = a * gate  # silu
    rate0, rate1, rate2 = rates.split(1, -1)
    steps = (
        product((rate0 * back * u * (gate + open_ * (1 - gate))).mT, k),
        product((rate1 * v).mT, open_ * u),
        product((rate2 * back * open_).mT, k),
    )
    after = dict(state)
    after |= {f"sums_{i}": state[f"sums_{i}"] + steps[i] for i in _MATRICES}
    after["momentum"] = state["momentum"] + momentum.sum(-1)
    after["position"] = state["position"] + q.shape[2]
    return y, after


def _update(state: dict[str, Tensor], chunk: int, muon: bool) -> dict[str, Tensor]:
    """Return the state after the end of a chunk."""
    after = dict(state)
    mean = (state["momentum"] / chunk)[..., None, None]
    changes = [state[f"sums_{i}"] + mean * state[f"previous_{i}"] for i in _MATRICES]
    steps = changes
    if muon:  # all three together, as `dh d`
        first, second, third = orthogonalise(torch.stack((changes[0], changes[1].mT, changes[2])))
        steps = [first, second.mT, third]
    for i in _MATRICES:
        after[f"weights_{i}"] = renormalise(state[f"weights_{i}"] + steps[i], state[f"norms_{i}"])
        after[f"sums_{i}"], after[f"previous_{i}"] = torch.zeros_like(changes[i]), changes[i]
    after["momentum"], after["position"] = (torch.zeros_like(state[name]) for name in ("momentum", "position"))
    return after


def _select(state: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: x.index_select(0, rows) for name, x in state.items()}


def _choose(rows: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.where(rows.view(-1, *(1,) * (x.dim() - 1)), new[name], x) for name, x in old.items()}


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor,
    momentum: Tensor | None,
    state: Mapping[str, Tensor],
    chunk: int,
    cu_seqlens: Tensor | None,
) -> None:
    checks.check_qkv(q, k, v)
    b, t, h, width = q.shape
    checks.check_cu_seqlens(cu_seqlens, b, t)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.shape != q.shape:
        raise ValueError(f"v must have the shape of q, (b, t, h, d) = {tuple(q.shape)}, got {tuple(v.shape)}")
    if rates.shape != (b, t, h, 3):
        raise ValueError(f"rates must have shape (b, t, h, 3) = {(b, t, h, 3)}, got {tuple(rates.shape)}")
    if momentum is not None and momentum.shape != (b, t, h):
        raise ValueError(f"momentum must have shape (b, t, h) = {(b, t, h)} or be None, got {tuple(momentum.shape)}")
    check_chunk(chunk)
    W0 = state.get("weights_0")
    wanted = compute_dtype(q.dtype)
    if W0 is None or W0.shape[:2] != (rows, h) or W0.shape[3] != width or W0.dtype != wanted:
        found = sorted(state) if W0 is None else f"{tuple(W0.shape)} in {W0.dtype}"
        raise ValueError(
            f"state must have weights_0 of shape (rows, h, dh, d) = ({rows}, {h}, dh, {width}) in {wanted}, "
            f"got {found}; make it with lact_state"
        )
